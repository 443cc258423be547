"""The folder of a run's checkpoints, as the first process keeps it: lock, leftovers, retention.

The folder is opened by that process alone; what changes it does nothing on the others. `log` is
told, in one line each, of what is moved or deleted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import IO

from jaxgpt.checkpoint import arrays, commit, lock, processes
from jaxgpt.checkpoint.faults import fault
from jaxgpt.checkpoint.record import Damaged
from jaxgpt.checkpoint.verify import read_record
from jaxgpt.durable import storage_errors, storage_reason
from jaxgpt.errors import ConfigError, JaxgptError

Log = Callable[[str], None]


def open_folder(root: Path, log: Log) -> IO[str]:
    """Make the folder, lock it and remove unfinished saves; return what holds the lock.

    Raises ConfigError if the folder cannot be used or another job writes to it.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        held = lock.claim(root)
        _clean(root, log)
    except OSError as error:
        raise ConfigError(
            f"checkpoint folder {root}: {storage_reason(error)}; use another run.dir"
        ) from error
    if ignored := commit.strangers(root):
        names = ", ".join(ignored[:8])
        log(f"{root}: ignored, for they have no commit record: {names}")
    return held


def make_room(root: Path, step: int, superseded: list[int], log: Log) -> None:
    """Set aside what is in the way of saving `step`, and mark it as being saved; StorageError."""
    if not processes.is_first():
        return
    with storage_errors(f"{root}: not prepared for step {step}"):
        _clean(root, log)
        for old in superseded:
            target = commit.quarantine(root, old, "superseded")
            log(f"checkpoint step {old}: the run went back before it, moved to {target}")
        if (root / str(step)).exists():
            target = commit.quarantine(root, step, "stranger")
            log(f"checkpoint step {step}: a folder was in its place, moved to {target}")
        commit.mark_pending(root, step)


def retain(root: Path, keep: int, keep_every: int, finite: dict[int, bool], log: Log) -> None:
    """Delete superfluous steps; one that cannot be deleted is tried again at the next save.

    `finite` tells of steps whether they hold finite values only; those that it lacks are added.
    """
    if not processes.is_first():
        return
    steps = commit.list_steps(root)
    for step in steps:
        if step not in finite:
            with contextlib.suppress(JaxgptError):  # unreadable: not counted, not deleted
                finite[step] = read_record(root, step).finite
    known = {step: finite[step] for step in steps if step in finite}
    for step in commit.superfluous(known, keep, keep_every):
        try:
            commit.delete(root, step)
            fault("retention.done")
        except OSError as error:
            log(f"WARNING: checkpoint step {step}: not deleted: {storage_reason(error)}")


def discard(root: Path, step: int, log: Log) -> None:
    """Remove a save that failed; other steps are not touched."""
    try:
        if processes.is_first() and step not in commit.list_steps(root):
            commit.remove_pending(root, step)
    except OSError as error:
        log(f"WARNING: checkpoint step {step}: not removed: {storage_reason(error)}")


def set_aside(root: Path, step: int, damage: Damaged, log: Log) -> None:
    """Move a damaged step away, loudly."""
    if not processes.is_first():
        return
    try:
        outcome = f"moved to {commit.quarantine(root, step, 'damaged')}"
    except OSError as error:
        outcome = f"not moved away: {storage_reason(error)}"
    log(f"WARNING: checkpoint step {step} is DAMAGED and not used: {damage}; {outcome}")


def remains(root: Path) -> list[str]:
    """Return signs that a run had checkpoints: damaged ones, and arrays without a record."""
    damaged = sorted((root / commit.QUARANTINE).glob("*-damaged-*"))
    lost = [name for name in commit.strangers(root) if arrays.holds_arrays(root / name)]
    return [f"{commit.QUARANTINE}/{path.name} is damaged" for path in damaged] + [
        f"{name} has no commit record" for name in lost
    ]


def _clean(root: Path, log: Log) -> None:
    if removed := commit.clean(root):
        log(f"{root}: removed what was left unfinished: {', '.join(removed)}")
