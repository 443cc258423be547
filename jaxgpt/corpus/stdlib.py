"""A corpus that every machine has: the Python standard library, its sources and documentation.

Sources are the .py files without tests and installed packages; documentation is made of the strings
of the modules written in C, one document per module. The same Python gives the same documents.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import re
import sys
import sysconfig
import types
import warnings
from pathlib import Path

from jaxgpt.errors import show_path

SKIPPED_FOLDERS = {
    "__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test",
}  # fmt: skip


def python_files() -> list[str]:
    """Return the paths of the library's .py files, in byte order."""
    found = []
    for folder, folders, files in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        found += [os.path.join(folder, name) for name in files if name.endswith(".py")]
    return sorted(found, key=os.fsencode)


def short_name(path: str) -> str:
    """Return how documents name a file: stdlib:os.py in the library, else its path."""
    folder = sysconfig.get_path("stdlib") + os.sep
    return f"stdlib:{path.removeprefix(folder)}" if path.startswith(folder) else show_path(path)


def extension_modules() -> list[str]:
    """Return the names of the modules written in C, in order, without those made for tests."""
    folder = Path(sysconfig.get_path("stdlib"), "lib-dynload")
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    files = folder.iterdir() if folder.is_dir() else ()
    names = {path.name.partition(".")[0] for path in files if path.name.endswith(suffixes)}
    return sorted(
        name
        for name in names.union(sys.builtin_module_names)
        if name in sys.stdlib_module_names and not name.startswith(("_test", "_xx", "xx"))
    )


def documentation(module: str) -> str:
    """Return the documentation strings of a C module, its functions, classes and methods.

    Raises ImportError when the module cannot be imported on this machine.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated modules are documented like any other
        namespace = importlib.import_module(module)
    sections = [f"{module}\n\n{namespace.__doc__ or ''}"]
    for name, value in sorted(vars(namespace).items()):
        if isinstance(value, types.BuiltinFunctionType | type):
            sections.append(_entry(f"{module}.{name}", value))
        if isinstance(value, type):
            members = sorted(vars(value).items())
            sections += [
                _entry(f"{module}.{name}.{member}", method)
                for member, method in members
                if not member.startswith("__") and not isinstance(method, str | type)
            ]
    return "\n\n".join(filter(None, sections)) + "\n"


def _entry(name: str, value: object) -> str:
    text = getattr(value, "__doc__", None)
    own = isinstance(text, str) and text != type(value).__doc__  # not that of an instance's class
    signature = getattr(value, "__text_signature__", None) or ""
    # ($self, x, /) is (x, /) to a reader.
    signature = re.sub(r"\$\w+(, /(?=\)))?(, )?", "", signature)
    return f"{name}{signature}\n{text}" if own else ""
