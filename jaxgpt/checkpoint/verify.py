"""Checks between a record and what a run wants from it, and the reading of arrays that passed.

Another run's checkpoint is a decision for a person: refused with every difference named, and left
in place. A checkpoint whose files or values changed is `Damaged`. A file system that cannot be read
is neither, but a StorageError.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxgpt import config
from jaxgpt.checkpoint import arrays, commit, fingerprint, processes
from jaxgpt.checkpoint.record import MAX_INTEGER, Damaged, Record
from jaxgpt.durable import storage_errors, storage_reason
from jaxgpt.errors import ConfigError, StorageError

SMALL_FILE = 1 << 20  # bytes; up to these, metadata that no fingerprint covers, always hashed
SECTIONS = ("run", "tokenizer", "data", "model", "optim", "train")
SHOWN = 8


@dataclass(frozen=True)
class Wanted:
    """The run that wants to resume: its state, digests and configuration, and what may differ."""

    abstract_state: Any  # of jax.ShapeDtypeStruct with shardings
    identity: dict[str, str]
    config: dict[str, Any]
    allow: Collection[str] = ()
    verify_files: bool = False


def print_line(line: str) -> None:
    """The default `log` of this room: one line on stderr."""
    print(line, file=sys.stderr, flush=True)


def read_record(root: Path, step: int) -> Record:
    """Return the record of `step`; raises Damaged, ConfigError or StorageError."""
    with storage_errors(root):
        return commit.read_record(root, step)


def restore_state(
    directory: Path, record: Record, wanted: Wanted, log: Callable[[str], None]
) -> Any:
    """Return the state of one step, verified, placed as wanted and in the wanted layout.

    Raises ConfigError if it is another run's, Damaged if it is not what was saved, StorageError if
    it cannot be read.
    """
    layout = arrays.layout_of(wanted.abstract_state)
    convert = "none" not in (layout, record.layout) and layout != record.layout
    abstract = wanted.abstract_state
    if convert:
        abstract = arrays.convert_abstract(abstract, record.layout)
    leaves = fingerprint.named_leaves(abstract)
    for name in _check_belongs(directory, record, leaves, wanted):
        log(f"{directory}: {name} has changed since, as checkpoint.allow_change permits")
    if changed := _first(list(_config_differences(record.config, wanted.config))):
        log(f"configuration since step {record.step}: {'; '.join(changed)}")
    values = read_verified(directory, record, leaves, verify_files=wanted.verify_files)
    state = jax.tree.unflatten(jax.tree.structure(abstract), values.values())
    if convert:
        log(f"{directory}: parameters converted from the {record.layout} layout to {layout}")
        placements = jax.tree.map(lambda leaf: leaf.sharding, wanted.abstract_state)
        state = jax.jit(arrays.convert, static_argnums=1, out_shardings=placements)(state, layout)
    return state


def _check_belongs(
    directory: Path, record: Record, leaves: dict[str, jax.ShapeDtypeStruct], wanted: Wanted
) -> list[str]:
    """Return the digests that differ and may; raises ConfigError with everything that may not."""
    if not any(leaf.path.startswith("opt_state.") for leaf in record.leaves) and any(
        name.startswith("opt_state.") for name in leaves
    ):
        raise ConfigError(
            f"{directory}: holds weights alone, as `jaxgpt hf import` writes them: no run to go on "
            f"with; start one from them with run.init_from={directory.parent.parent} and another "
            "run.dir"
        )
    saved, now = record.identity, wanted.identity
    different = {
        name: words
        for name in sorted(saved | now)
        if (words := _difference(name, saved.get(name), now.get(name)))
    }
    of_leaves = _leaf_differences(record, leaves)
    other_state = "model" not in different and any("opt_state." in line for line in of_leaves)
    problems = [
        f"{directory}: {name} differs: {words}"
        + ("" if other_state else f"; {_remedy(name, wanted.allow)}")
        for name, words in different.items()
        if name not in wanted.allow
    ]
    problems += [f"{directory}: {line}" for line in of_leaves]
    if other_state:
        problems.append(
            f"{directory}: the state of the optimiser has another form; to start from the weights "
            f"alone set run.init_from={directory.parent.parent} and another run.dir"
        )
    if problems:
        keys = _first(list(_config_differences(record.config, wanted.config)))
        problems += [f"{directory}: configuration: {'; '.join(keys)}"] if keys else []
        raise ConfigError(*problems)
    return list(different)


def _difference(name: str, saved: str | None, now: str | None) -> str:
    """Return how a digest differs, empty if it does not; of two tables (JSON) only what differs.

    A key that one version of jaxgpt did not know counts as its default.
    """
    tables = _table(saved), _table(now)
    if saved == now or None in tables:
        return "" if saved == now else f"saved with {saved or 'none'}, now {now or 'none'}"
    defaults = config.to_dict(config.Config()).get(name, {})
    return "; ".join(_changes(defaults | tables[0], defaults | tables[1]))


def _table(text: str | None) -> dict[str, Any] | None:
    try:
        table = json.loads(text or "")
    except ValueError:
        return None
    return table if isinstance(table, dict) else None


def _changes(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key in sorted(old | new):
        if old.get(key) != new.get(key):
            yield f"{prefix}{key} was {old.get(key)!r}, is {new.get(key)!r}"


def _remedy(name: str, allow: Collection[str]) -> str:
    if name == "model":
        return "another model needs another run.dir"
    names = ", ".join(f'"{allowed}"' for allowed in (*allow, name))
    return f"to resume all the same set checkpoint.allow_change=[{names}]"


def _leaf_differences(record: Record, leaves: dict[str, jax.ShapeDtypeStruct]) -> list[str]:
    saved = {leaf.path: f"{leaf.dtype}{list(leaf.shape)}" for leaf in record.leaves}
    now = {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in leaves.items()}
    different = [
        f"{name} is saved as {saved[name]}, wanted as {now[name]}"
        for name in now
        if saved.get(name, now[name]) != now[name]
    ]
    missing = [f"{name} is wanted, but not saved" for name in now if name not in saved]
    surplus = [f"{name} is saved, but not wanted" for name in saved if name not in now]
    return ["; ".join(_first(lines)) for lines in (different, missing, surplus) if lines]


def _first(lines: list[str]) -> list[str]:
    return lines if len(lines) <= SHOWN else [*lines[:SHOWN], f"and {len(lines) - SHOWN} more"]


def _config_differences(saved: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    defaults = config.to_dict(config.Config())
    for section in SECTIONS:
        old, new = saved.get(section), now.get(section)
        if isinstance(old, dict) and isinstance(new, dict):
            lines = _changes(defaults[section] | old, defaults[section] | new, f"{section}.")
            yield from (line for line in lines if not line.startswith("run.dir was"))


def read_verified(
    directory: Path,
    record: Record,
    leaves: dict[str, jax.ShapeDtypeStruct],
    *,
    verify_files: bool = False,
) -> dict[str, jax.Array]:
    """Return the named leaves of a step, each proven by its fingerprint to be what was saved.

    The caller has checked `leaves` against the record. Raises Damaged, or StorageError if the files
    are what was saved and still cannot be read.
    """
    values = processes.together(lambda: _read(directory, record, leaves, verify_files))
    saved = {leaf.path: leaf.fingerprint for leaf in record.leaves}
    numbers = fingerprint.tree_fingerprints(values)
    wrong = [name for name, number in numbers.items() if number != saved[name]]
    if wrong:
        raise Damaged(
            f"{directory}: values changed since they were saved: {', '.join(_first(wrong))}"
        )
    return values


def _read(
    directory: Path,
    record: Record,
    leaves: dict[str, jax.ShapeDtypeStruct],
    verify_files: bool,
) -> dict[str, jax.Array]:
    needed = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves.values())
    stored = sum(file.size for file in record.files)
    if needed > stored:  # arrays are stored whole and plain: refuse before anything is allocated
        raise Damaged(f"{directory}: its leaves take {needed} bytes, its files hold {stored}")
    with storage_errors(directory):
        limit = MAX_INTEGER if verify_files else SMALL_FILE
        processes.check_visible([directory / file.name for file in record.files])
        commit.check_files(directory, record.files, hash_up_to=limit)
        try:
            return arrays.read(directory, leaves)
        except (
            Exception
        ) as error:  # damage comes in many types; the hashes say whether it is damage
            commit.check_files(directory, record.files, hash_up_to=MAX_INTEGER)
            raise StorageError(
                f"{directory}: the files are as saved, but reading failed: {storage_reason(error)}"
            ) from error
