"""Parameters out of a checkpoint, for evaluation, generation and export: verified, read-only."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
from jax.typing import DTypeLike

from jaxgpt import config
from jaxgpt.checkpoint import commit, processes
from jaxgpt.checkpoint.fingerprint import named_leaves
from jaxgpt.checkpoint.record import Damaged, Leaf, Record
from jaxgpt.checkpoint.verify import print_line, read_record, read_verified
from jaxgpt.config import Config
from jaxgpt.errors import ConfigError, DataError, NothingRestorable
from jaxgpt.model import params
from jaxgpt.model.params import Params
from jaxgpt.tokenization import tokenizer

TOKENIZER = "tokenizer.model"
# Of the leaves in a training state: the weights after the last update, and their moving average.
PREFIX = {"last": "params.", "ema": "opt_state.ema."}
DTYPES = ("float32", "bfloat16", "float16")
Weights = Literal["last", "ema", "best"]


def load_params(
    path: str | Path,
    step: int | None = None,
    dtype: DTypeLike | None = None,
    *,
    weights: Weights = "last",
    shardings: Callable[[Config], Params] | None = None,
    log: Callable[[str], None] = print_line,
) -> tuple[Config, Params]:
    """Return the configuration and the parameters of a run, in the layout they were saved in.

    `path` is a run folder, its ckpt folder, or the folder of one step. Without a step the newest
    finite one that passes verification is taken, saying so if it is not the newest; a step that is
    named never falls back. `weights`: those after the last update; "ema": their moving average,
    ConfigError if the step holds none; "best": the average if it does. They are verified as saved,
    then cast to `dtype` if given.
    `shardings` maps the configuration to placements; by default all go to the first device.
    Nothing is moved or deleted. Raises NothingRestorable, StorageError, and ConfigError for a
    configuration that this version does not know.
    """
    options = {"weights": weights, "shardings": shardings, "log": log}
    cfg, loaded, _ = load_step(path, step, dtype, **options)
    return cfg, loaded


def load_step(
    path: str | Path,
    step: int | None = None,
    dtype: DTypeLike | None = None,
    *,
    weights: Weights = "last",
    shardings: Callable[[Config], Params] | None = None,
    log: Callable[[str], None] = print_line,
) -> tuple[Config, Params, Record]:
    """Return what `load_params` does, and the commit record of the step it is from."""
    root, named = _locate(Path(path))
    step = named if step is None else step
    tried: list[str] = []
    for candidate in reversed(commit.list_steps(root)) if step is None else [step]:
        directory = root / str(candidate)
        try:
            record = read_record(root, candidate)
            if step is None and not record.finite:
                raise Damaged(f"{directory}: holds NaN or infinity")
            cfg, loaded = _load(directory, record, weights, shardings)
        except Damaged as damage:
            if step is not None:
                raise
            log(f"WARNING: {damage}; trying the checkpoint before it")
            tried.append(str(damage))
            continue
        if dtype is not None:
            loaded = jax.tree.map(lambda leaf: leaf.astype(dtype), loaded)
        return cfg, loaded, record
    raise NothingRestorable(f"{root}: no checkpoint passes verification: {'; '.join(tried)}")


def find_step(path: str | Path) -> tuple[Path, Record]:
    """Return the folder and the record of the step that a path names, or of its newest finite one.

    `path` is one of those that `load_params` takes; arrays are not read. Raises NothingRestorable.
    """
    root, named = _locate(Path(path))
    tried: list[str] = []
    for step in reversed(commit.list_steps(root)) if named is None else [named]:
        try:
            record = read_record(root, step)
            if record.finite:
                return root / str(step), record
            tried.append(f"{root / str(step)}: holds NaN or infinity")
        except Damaged as damage:
            tried.append(str(damage))
    raise NothingRestorable(f"{path}: no checkpoint can be used: {'; '.join(tried)}")


def averaged(record: Record) -> bool:
    """Tell whether a step holds a moving average of the weights (optim.ema_decay)."""
    return any(leaf.path.startswith(PREFIX["ema"]) for leaf in record.leaves)


def newest_record(run_dir: Path) -> Record | None:
    """Return the commit record of the newest checkpoint of a run whose record is whole, or None.

    Hosts may see files late: of several processes all return what the one that sees the newest
    step does. Raises ConfigError where one does not come to see it, and StorageError.
    """
    root = run_dir / "ckpt"
    newest = _newest_whole(root)
    step = processes.agree_on_newest(root, newest.step if newest else -1)
    if newest is None or step > newest.step:
        return read_record(root, step) if step >= 0 else None
    return newest


def _newest_whole(root: Path) -> Record | None:
    for step in reversed(commit.list_steps(root)) if root.is_dir() else []:
        try:
            return read_record(root, step)
        except Damaged:
            continue  # restoring says so and sets it aside
    return None


def run_folder(path: str | Path) -> Path:
    """Return the run folder of a path that `load_params` takes; raises NothingRestorable."""
    return _locate(Path(path))[0].parent


def find_tokenizer(path: str | Path) -> Path:
    """Return the tokenizer file of a run; `path` is one of those that `load_params` takes.

    Only the very tokenizer that the run was trained with will do: another one of the same size
    would turn every id into other text. Raises DataError if it is not found, naming the places.
    """
    root, step = _locate(Path(path))
    step = commit.list_steps(root)[-1] if step is None else step
    record = read_record(root, step)
    saved, digest = record.config, record.identity.get("tokenizer")
    named, store = _text(saved, "tokenizer", "path"), _text(saved, "data", "store")
    places = [root.parent / TOKENIZER]  # the run's own copy, which moves with it
    places += [Path(named)] if named else []
    places += [Path(store) / TOKENIZER] if store else []
    for place in places:
        if place.is_file() and (digest is None or _has_digest(place, digest)):
            return place
    looked, which = ", ".join(map(str, places)), f" (SHA-256 {digest[:12]})" if digest else ""
    raise DataError(
        f"{path}: the tokenizer of this run{which} is in none of {looked}; put it there"
    )


def _has_digest(path: Path, digest: str) -> bool:
    """Tell whether a file is the tokenizer of a digest; early runs recorded that of the file."""
    with open(path, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() == digest:
            return True
    try:
        return tokenizer.load(path).digest == digest
    except DataError:
        return False


def _text(saved: dict[str, Any], section: str, key: str) -> str:
    table = saved.get(section)
    value = table.get(key) if isinstance(table, dict) else None
    return value if isinstance(value, str) else ""


def _locate(path: Path) -> tuple[Path, int | None]:
    """Return the checkpoint folder that `path` means, and the step if it names one."""
    path = path.absolute()
    if path.name.isdigit() and (path.parent / (path.name + commit.SUFFIX)).is_file():
        return path.parent, int(path.name)
    for root in (path / "ckpt", path):
        if commit.list_steps(root):
            return root, None
    raise NothingRestorable(
        f"{path}: no checkpoint here; name a run folder, its ckpt folder or the folder of a step"
    )


def choose(directory: Path, record: Record, weights: Weights) -> Literal["last", "ema"]:
    """Return which weights of a step are meant; ConfigError for an average that it lacks."""
    if weights == "ema" and not averaged(record):
        raise ConfigError(
            f"{directory}: holds no moving average of the weights (optim.ema_decay); take the last"
        )
    return "ema" if weights != "last" and averaged(record) else "last"


def saved_leaves(
    directory: Path, record: Record, weights: Literal["last", "ema"], shapes: Params
) -> dict[str, Leaf]:
    """Return the leaves that a step holds of these weights, by path in `shapes`.

    `shapes` is a tree of anything with a shape. Raises Damaged where the record holds others.
    """
    prefix, leaves = PREFIX[weights], {}
    saved = {leaf.path: leaf for leaf in record.leaves}
    for name, shape in named_leaves(shapes).items():
        leaf = saved.get(prefix + name)
        if leaf is None or leaf.shape != shape.shape or leaf.dtype not in DTYPES:
            found = f"{leaf.dtype}{list(leaf.shape)}" if leaf else "nothing"
            raise Damaged(
                f"{directory}: {prefix}{name} is {found}, by the configuration {list(shape.shape)}"
            )
        leaves[name] = leaf
    return leaves


def _load(
    directory: Path,
    record: Record,
    weights: Weights,
    shardings: Callable[[Config], Params] | None,
) -> tuple[Config, Params]:
    chosen = choose(directory, record, weights)
    cfg = config.from_dict(record.config)
    shapes = params.abstract(params.specs(cfg.model))
    placements = named_leaves(shardings(cfg)) if shardings else {}
    wanted = {
        leaf.path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placements.get(name))
        for name, leaf in saved_leaves(directory, record, chosen, shapes).items()
    }
    values = read_verified(directory, record, wanted)
    return cfg, jax.tree.unflatten(jax.tree.structure(shapes), values.values())
