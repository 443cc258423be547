"""The standard library as a corpus: sources and documentation, the same each time."""

from __future__ import annotations

import platform
import subprocess
import sys
import sysconfig
from pathlib import Path

from jaxgpt.config import DataConfig
from jaxgpt.corpus import sources, stdlib

CFG = DataConfig(sources=("stdlib",))


def documents():
    for part in sources.partitions(CFG):
        yield from sources.documents(CFG, part, sources.bad_records(CFG, part))


def test_sources_are_the_library_without_tests_and_packages():
    paths = stdlib.python_files()
    names = {stdlib.short_name(path) for path in paths}
    assert {"stdlib:os.py", "stdlib:json/decoder.py", "stdlib:asyncio/events.py"} <= names
    assert not any(
        folder in Path(path).parts for path in paths
        for folder in ("site-packages", "__pycache__", "test", "tests")
    )  # fmt: skip
    assert len(paths) > 400


def test_a_source_file_is_kept_as_it_is():
    path = Path(sysconfig.get_path("stdlib"), "heapq.py")
    texts = {document.origin: document.text for document in documents()}
    assert texts["stdlib:heapq.py"] == path.read_bytes().decode()
    assert len(texts) > 450


def test_modules_in_c_are_documented():
    modules = stdlib.extension_modules()
    assert {"math", "sys", "itertools", "_io"} <= set(modules)
    assert not any(name.startswith(("_test", "_xx")) for name in modules)
    text = stdlib.documentation("math")
    assert "math.sqrt(x, /)\nReturn the square root of x." in text
    assert (
        "str.upper()\nReturn a copy of the string converted to uppercase."
        in stdlib.documentation("builtins")
    )


def test_documentation_is_the_same_in_another_process():
    code = "from jaxgpt.corpus import stdlib; print(stdlib.documentation('itertools'))"
    command = [sys.executable, "-c", code]
    other = subprocess.run(command, capture_output=True, text=True, check=True, encoding="utf-8")
    assert other.stdout == stdlib.documentation("itertools") + "\n"


def test_documentation_counts_as_changed_with_another_version_of_python():
    slices = [part for partition in sources.partitions(CFG) for part in partition.slices]
    modules = {part.path: part.stamp for part in slices if part.kind == "module"}
    assert len(modules) > 50 and set(modules.values()) == {platform.python_version()}
