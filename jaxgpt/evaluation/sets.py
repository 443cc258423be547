"""The sets that a run is evaluated on: stores by name, or what its own data holds out."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from jaxgpt.config import Config
from jaxgpt.data.history import History
from jaxgpt.data.store import Store, earlier_manifest, open_store, read_manifest
from jaxgpt.errors import DataError


def eval_stores(
    cfg: Config,
    history: History | None = None,
    *,
    search: Path | None = None,
    say: Callable[[str], None] | None = None,
) -> dict[str, Store]:
    """Open the sets to evaluate on: eval.store, by default the held-out part of each data store.

    With `history`, a data store that has been added to is as the run goes on with it, so that a
    later evaluation has the documents of the earlier ones. `search` is a run folder in which a
    store is looked for too, in case the run was moved. A data store without held-out documents is
    left out, with a line through `say`.
    """
    named = cfg.eval.store
    if isinstance(named, str) and named:
        named = {"valid": named}
    if named:
        return {name: open_store(_found(path, search), "valid") for name, path in named.items()}
    opened = {}
    for name, path in _data_stores(cfg).items():
        folder = Path(_found(path, search))
        source = None
        if (folder / "valid").is_dir() or not folder.is_dir():
            source = _held_out(folder, history)
        if source and source.num_docs:
            opened[name] = source
        elif say:
            say(f"{path}: no documents are held out (data.valid_share), so nothing to evaluate")
    return opened


def _data_stores(cfg: Config) -> dict[str, str]:
    """Return the stores of data.store and data.stages by name: one alone as "valid".

    Several go by the last part of their paths; where that is the same for two, by all of it.
    """
    first = [cfg.data.store] if isinstance(cfg.data.store, str) else list(cfg.data.store)
    later = [path for table in cfg.data.stages.values() for path in table]
    paths = list(dict.fromkeys([*first, *later]))
    if len(paths) == 1:
        return {"valid": paths[0]}
    last = Counter(Path(path).name for path in paths)
    return {path if last[Path(path).name] > 1 else Path(path).name: path for path in paths}


def _found(path: str, search: Path | None) -> str:
    here = search / Path(path).name if search else None
    return str(here) if here and here.is_dir() and not Path(path).is_dir() else path


def _held_out(path: Path, history: History | None) -> Store:
    """Open the held-out part of a store, of the generation that the run goes on with."""
    newest = open_store(path, "valid")
    if history is None or history.may_change:
        return newest
    used = []
    for digest in {digest for _, table in history.plan for digest in table}:
        with contextlib.suppress(DataError):  # of another store
            used.append(open_store(path, digest=digest).manifest["generation"])
    if not used or max(used) >= newest.manifest["generation"]:
        return newest
    earlier = read_manifest(newest.directory, earlier_manifest(max(used)))
    return open_store(path, "valid", digest=earlier["digest"])
