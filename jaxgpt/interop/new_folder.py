"""A folder that is written beside its place and appears there whole, or not at all."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from jaxgpt.checkpoint import lock
from jaxgpt.durable import storage_errors, sync_directory
from jaxgpt.errors import ConfigError


def check_free(out: Path) -> None:
    """Raise ConfigError if there is something at `out`, but for an empty folder."""
    with storage_errors(out):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"{out}: exists and is not empty; name a new folder")
        if out.is_symlink():  # which a folder cannot replace
            raise ConfigError(f"{out}: is a symbolic link; name a new folder")


@contextlib.contextmanager
def appearing(out: Path, verb: str) -> Iterator[Path]:
    """Yield an empty folder beside `out`, called after the `verb`; it becomes `out` at the end.

    It is removed if the block fails, and by the next attempt if this process is killed. Raises
    ConfigError if something is at `out`, or while another process writes it; StorageError.
    """
    unfinished = out.with_name(f"{out.name}.{verb}ing")
    with contextlib.ExitStack() as stack:
        with storage_errors(unfinished):
            unfinished.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock.claim(unfinished, "wait for it, or name another folder"))
        try:
            check_free(out)  # again: another process may just have finished
            with storage_errors(unfinished):
                for old in unfinished.iterdir():
                    if old.name != lock.NAME:
                        shutil.rmtree(old) if old.is_dir() else old.unlink()
            yield unfinished
            with storage_errors(out):
                unfinished.rename(out)
                (out / lock.NAME).unlink()
                sync_directory(out.parent)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
