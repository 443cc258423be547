"""Finished stores: what one was prepared from, whether it is whole, and what has been added since.

`prepared.json` is written last. It holds the key (everything that contents depend on), one entry
per generation and the report; `inputs-<generation>.jsonl` lists the partitions of a generation with
their files. A store whose sources have only grown gets a new generation: the shards and manifests
of the earlier ones stay, and new files become shards at its end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxgpt.config import DataConfig
from jaxgpt.corpus import sources
from jaxgpt.corpus.sources import Partition, Slice
from jaxgpt.corpus.workers import SPLITS
from jaxgpt.data.store import MANIFEST, earlier_manifest, open_store
from jaxgpt.errors import DataError, StorageError, show_path

FINISHED, JOURNAL = "prepared.json", ".prepare"
NAMED = 3  # at most so many changed files are named in a message
GROWS = (  # what of a key may differ where a store has only grown
    "data.sources", "input", "generation", "base", "first", "partitions",
)  # fmt: skip


@dataclass(frozen=True)
class Finished:
    """A store as `prepared.json` describes it; generation 0 is that of a store not yet made."""

    generation: int = 0
    partitions: int = 0
    key: dict[str, Any] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    tally: dict[str, Any] = field(default_factory=dict)
    shards: dict[str, list[dict]] = field(default_factory=lambda: {split: [] for split in SPLITS})

    @property
    def names(self) -> dict[str, set[str]]:
        """The files of the shards, by split."""
        return {split: {shard["name"] for shard in self.shards[split]} for split in SPLITS}

    @property
    def digests(self) -> list[str]:
        """The identities of the data, none for a store not yet made."""
        return [self.report[split]["digest"] for split in SPLITS if split in self.report]


def inputs_name(generation: int) -> str:
    """Return the name of the list of a generation's partitions and files."""
    return f"inputs-{generation:06}.jsonl"


def read_finished(store: Path, settings: dict) -> Finished:
    """Return what a folder holds, checked against `settings` and against the files that are there.

    Raises DataError for a store of other settings, a damaged one, or one that `prepare` did not
    make; the message says what to do.
    """
    found = _read(store)
    if found is None:
        taken = [name for name in (MANIFEST, *SPLITS) if (store / name).exists()]
        if taken and not (store / JOURNAL).exists():
            raise DataError(f"{store}: has {taken[0]}, not made by `prepare`; choose another")
        return Finished()
    old, report = found["key"], found["report"]
    fixed = {name: settings[name] for name in settings if name not in GROWS}
    if wrong := changes(old, {"version": fixed["version"]}) or changes(old, fixed):
        raise _of_something_else(store, wrong)
    shards = {}
    for split in SPLITS:
        try:
            shards[split] = open_store(store / split, digest=report[split]["digest"]).manifest
        except (DataError, StorageError) as error:
            raise _damaged(store, str(error)) from error
    return Finished(
        generation=found["generation"],
        partitions=found["partitions"],
        key=old,
        report=report,
        tally=found["tally"],
        shards={split: shards[split]["shards"] for split in SPLITS},
    )


def finished_key(store: Path) -> dict | None:
    """Return what a finished store was made of; None where there is none."""
    found = _read(store)
    return found and found["key"]


def _read(store: Path) -> dict | None:
    path = store / FINISHED
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_bytes())
        found["key"], found["report"]
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(store, f"{FINISHED} cannot be read") from error
    return found


def _damaged(store: Path, problem: str) -> DataError:
    return DataError(
        f"{store} is damaged: {problem}; restore the file, or delete the folder and prepare again"
    )


def _of_something_else(store: Path, wrong: str) -> DataError:
    return DataError(
        f"{store} was prepared from something else: {wrong}; "
        "delete the folder or choose another data.store"
    )


def changes(old: dict, new: dict) -> str:
    """Return in words how one key differs from another."""
    names = [name for name in new if old.get(name) != new[name]]
    return "; ".join(f"{name} was {old.get(name)!r}, now {new[name]!r}" for name in names)


def added(
    store: Path, finished: Finished, cfg: DataConfig, key: dict, parts: list[Partition]
) -> list[Partition]:
    """Return the partitions of what has come to the sources since a store was finished.

    `parts` are those of all sources as they are now. Raises DataError where the sources have not
    only grown: an entry that is gone or has another place, a file that is gone or has changed.
    """
    if not finished.generation:
        return parts
    if finished.key["input"] == key["input"]:
        return []
    old, new = finished.key["data.sources"], key["data.sources"]
    if new[: len(old)] != old:
        raise _of_something_else(store, f"data.sources was {old!r}, now {new!r}")
    slices = _recorded(store, finished)
    known = {(part.path, part.stamp) for part in slices if part.kind != "unreadable"}
    there = sources.file_keys(parts)
    if lost := sorted(known - there):
        paths = {path for path, _ in there}
        what = {True: "has changed (size or time)", False: "is gone"}
        how = [f"{show_path(path)} {what[path in paths]}" for path, _ in lost]
        more = f" and {len(lost) - NAMED} more" if len(lost) > NAMED else ""
        raise _of_something_else(store, ", ".join(how[:NAMED]) + more)
    reported = {part.path for part in slices if part.kind == "unreadable"}
    return [part for p in sources.partitions(cfg, without=known) if (part := _rest(p, reported))]


def _rest(partition: Partition, reported: set[str]) -> Partition | None:
    """Return a partition without files that an earlier generation has left out as unreadable."""
    slices = tuple(
        part for part in partition.slices if part.kind != "unreadable" or part.path not in reported
    )
    return replace(partition, slices=slices) if slices else None


def describe(parts: Iterable[Partition], first: int) -> bytes:
    """Return a line of JSON per partition: its index, its source, and its slices with stamps."""
    lines = (
        {"partition": number, "source": part.source, "slices": part.slices}
        for number, part in enumerate(parts, first)
    )
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def paths_read(inputs: bytes) -> set[str]:
    """Return the files that the partitions of `describe` read, as `show_path` gives them."""
    slices = (
        Slice(*values) for line in inputs.splitlines() for values in json.loads(line)["slices"]
    )
    return {show_path(part.path) for part in slices if part.kind != "unreadable"}


def _recorded(store: Path, finished: Finished) -> list[Slice]:
    """Return the slices of all generations of a finished store."""
    slices = []
    for generation in range(1, finished.generation + 1):
        name = inputs_name(generation)
        try:
            with open(store / name, "rb") as lines:
                for line in map(json.loads, lines):
                    slices += [Slice(*values) for values in line["slices"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _damaged(store, f"{name} cannot be read") from error
    return slices


def withdraw(store: Path, finished: Finished) -> None:
    """Undo what a killed run published of the generation after `finished`, and remove its shards.

    A copy of the newest manifest under an earlier one's name exists only when a newer one was about
    to take its place.
    """
    for split in SPLITS:
        folder, copy = store / split, earlier_manifest(finished.generation)
        if not finished.generation:
            (folder / MANIFEST).unlink(missing_ok=True)
        elif (folder / copy).exists():
            os.replace(folder / copy, folder / MANIFEST)
    (store / inputs_name(finished.generation + 1)).unlink(missing_ok=True)
    remove_unlisted(store, finished.names)


def remove_unlisted(store: Path, names: dict[str, set[str]]) -> None:
    """Remove shards without an entry in a manifest, and what killed writers left half-written."""
    for split in SPLITS:
        folder = store / split
        for path in (*folder.glob("*.shard*"), *folder.glob("manifest*.partial")):
            if path.name not in names[split]:
                path.unlink(missing_ok=True)
    for path in store.glob("*.partial"):
        path.unlink(missing_ok=True)
