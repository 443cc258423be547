"""Which saved steps exist: publishing, listing, checking, setting aside and deleting them.

A checkpoint folder holds `<step>/` (arrays), `<step>.ok.json` (the record) and `quarantine/`. A
step exists when its record does. The record is published last, by rename, after everything it
vouches for is on disk. While a step is written or deleted, `<step>.pending` marks its files as ours
to remove after a crash. Nothing here knows arrays or how they are stored.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from jaxgpt.checkpoint.faults import fault
from jaxgpt.checkpoint.record import MAX_BYTES, Damaged, Record, StoredFile, decode, encode
from jaxgpt.durable import sync_directory

T = TypeVar("T")
QUARANTINE = "quarantine"
# Files and folders made durable and hashed at the same time: an fsync is mostly waiting, one hash
# takes a core at 1.5 GB/s.
SEALED_AT_ONCE = 8
SUFFIX, PENDING = ".ok.json", ".pending"
_RECORD_NAME = re.compile(r"(0|[1-9][0-9]{0,17})\.ok\.json")
_PENDING_NAME = re.compile(r"(0|[1-9][0-9]{0,17})\.pending")
_TEMPORARY_NAME = re.compile(r"[0-9]+\.(orbax-checkpoint-tmp.*|ok\.json\.tmp|pending\.tmp)")


def list_steps(root: Path) -> list[int]:
    """Return the steps that have a record, ascending; an absent folder has none."""
    if not root.is_dir():
        return []
    matches = (_RECORD_NAME.fullmatch(entry.name) for entry in os.scandir(root) if entry.is_file())
    return sorted(int(match[1]) for match in matches if match)


def read_record(root: Path, step: int) -> Record:
    """Return the record of `step`; raises Damaged (also if absent), ConfigError, OSError."""
    path = root / f"{step}{SUFFIX}"
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise Damaged(f"{path}: there is no such checkpoint") from None
    record = decode(raw, str(path))
    if record.step != step:
        raise Damaged(f"{path}: the commit record is that of step {record.step}")
    return record


def publish(root: Path, record: Record) -> None:
    """Make the step exist: after this returns, its record survives a crash of the machine."""
    _write_durably(root / f"{record.step}{SUFFIX}", encode(record))
    fault("publish.done")
    (root / f"{record.step}{PENDING}").unlink(missing_ok=True)


def mark_pending(root: Path, step: int) -> None:
    """Note that `<step>/` is unfinished and ours, so that `clean` removes it after a crash."""
    _write_durably(root / f"{step}{PENDING}", b"")


def _write_durably(path: Path, content: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    if content:
        fault("publish.temporary")
    temporary.rename(path)
    sync_directory(path.parent)


def seal(directory: Path) -> tuple[StoredFile, ...]:
    """Make every file and folder below `directory` durable and return the table of its files.

    Orbax syncs array data only; its metadata files and the folders that name them are not.
    """
    walked = list(os.walk(directory, topdown=False))
    paths = [Path(folder, name) for folder, _, names in walked for name in sorted(names)]

    def seal_file(path: Path) -> StoredFile:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = file.seek(0, os.SEEK_END)
        return StoredFile(path.relative_to(directory).as_posix(), size, digest)

    table = _at_once(seal_file, paths)
    _at_once(sync_directory, [*(Path(folder) for folder, _, _ in walked), directory.parent])
    return tuple(table)


def _at_once(action: Callable[[Path], T], paths: Sequence[Path]) -> list[T]:
    """Return `action` of each path, of SEALED_AT_ONCE at the same time; raises the first error.

    With plain threads: an executor takes no work once the main thread has ended, and a save that
    has begun goes on even then.
    """
    results: dict[int, T] = {}
    errors: list[Exception] = []
    todo = iter(list(enumerate(paths)))  # next() of a list's iterator is safe in several threads

    def work() -> None:
        for number, path in todo:
            try:
                results[number] = action(path)
            except Exception as error:
                errors.append(error)

    threads = [
        threading.Thread(target=work, name="checkpoint-seal")
        for _ in range(min(SEALED_AT_ONCE, len(paths)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(paths))]


def check_files(directory: Path, files: tuple[StoredFile, ...], *, hash_up_to: int) -> None:
    """Raise Damaged unless all `files` have their size, and small ones their hash.

    Small is up to `hash_up_to` bytes. Files that the record does not name are ignored.
    """
    for expected in files:
        path = directory / expected.name
        if path.is_symlink() or not path.is_file():
            raise Damaged(f"{path}: the file is missing")
        if (size := path.stat().st_size) != expected.size:
            raise Damaged(f"{path}: has {size} bytes, saved were {expected.size}")
    for expected in files:
        if expected.size <= hash_up_to:
            path = directory / expected.name
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != expected.sha256:
                raise Damaged(f"{path}: its content changed since it was saved")


def quarantine(root: Path, step: int, why: str) -> Path:
    """Move `step` out of the way, keeping it for inspection; return where its folder went."""
    (root / QUARANTINE).mkdir(exist_ok=True)
    taken = set(os.listdir(root / QUARANTINE))
    number = 1
    while {f"{step}-{why}-{number}", f"{step}-{why}-{number}{SUFFIX}"} & taken:
        number += 1
    target = root / QUARANTINE / f"{step}-{why}-{number}"
    for suffix in ("", SUFFIX):
        if (root / f"{step}{suffix}").exists():
            (root / f"{step}{suffix}").rename(target.with_name(target.name + suffix))
        fault("quarantine.moved")
    sync_directory(root / QUARANTINE)
    sync_directory(root)
    return target


def delete(root: Path, step: int) -> None:
    """Delete a step; its record goes first, so that a half-deleted step never counts as one."""
    (root / f"{step}{SUFFIX}").rename(root / f"{step}{PENDING}")
    fault("retention.demoted")
    remove_pending(root, step)


def remove_pending(root: Path, step: int) -> None:
    """Remove what an unfinished save or deletion of `step` left; the mark goes last."""
    for entry in [*root.glob(f"{step}.orbax-checkpoint-tmp*"), root / f"{step}"]:
        if entry.exists():
            shutil.rmtree(entry)
    (root / f"{step}{SUFFIX}.tmp").unlink(missing_ok=True)
    (root / f"{step}{PENDING}").unlink(missing_ok=True)


def superfluous(finite: dict[int, bool], keep: int, keep_every: int) -> list[int]:
    """Return the steps that need not be kept, given whether each published step is finite.

    Kept are the `keep` newest finite steps, all that are newer than those, and finite multiples of
    `keep_every` (0: none). Without a finite step everything is kept.
    """
    kept = sorted(step for step in finite if finite[step])[-max(1, keep) :]
    return [
        step
        for step in sorted(finite)
        if kept
        and step < kept[0]
        and not (finite[step] and keep_every > 0 and step % keep_every == 0)
    ]


def clean(root: Path) -> list[str]:
    """Remove what saves and deletions that were cut off left behind; return the names removed.

    Only what is marked as ours, or named as only Orbax or this module name things, is touched.
    """
    names = sorted(os.listdir(root))
    removed = []
    for name in names:
        path = root / name
        if match := _PENDING_NAME.fullmatch(name):
            if (
                f"{match[1]}{SUFFIX}" in names
            ):  # cut off just after publishing: the step is complete
                path.unlink()
            else:
                remove_pending(root, int(match[1]))
                removed.append(match[1])
        elif _TEMPORARY_NAME.fullmatch(name) and path.exists():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            removed.append(name)
    return removed


def strangers(root: Path) -> list[str]:
    """Return the entries named like a step that have no record: none of them is a checkpoint."""
    names = set(os.listdir(root)) if root.is_dir() else set()
    return sorted(name for name in names if name.isdigit() and f"{name}{SUFFIX}" not in names)
