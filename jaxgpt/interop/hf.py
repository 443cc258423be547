"""Hugging Face folders in: configuration, weights and tokenizer of a model become a run.

Every tensor of the files is accounted for before any is read. Weights go to disk layer by layer, so
that memory holds a few times the largest layer, never the model.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from jaxgpt import config
from jaxgpt.checkpoint import arrays, parts
from jaxgpt.checkpoint.fingerprint import named_leaves
from jaxgpt.config import Config, ModelConfig, RunConfig
from jaxgpt.durable import write_atomic
from jaxgpt.errors import DataError
from jaxgpt.interop import families, new_folder, tensors, tokenizers, weights
from jaxgpt.interop.families import Source
from jaxgpt.interop.tensors import HEAD, Entry
from jaxgpt.interop.weights import FLOATS, Weights
from jaxgpt.model import params as parameters
from jaxgpt.model.params import Params

CONFIG = "config.json"
STORED = "stored"
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
SHOWN = 8
COMPARED = 1 << 22  # elements of a tied head at once


class Checked(NamedTuple):
    """A folder whose configuration and tensors agree: each leaf has a source, none is left over."""

    source: Source
    weights: Weights
    entries: tuple[Entry, ...]
    names: dict[str, str]  # of a tensor in the files, by its full name
    unused: tuple[str, ...]  # tensors that hold no weight of their own: buffers, a tied head


def check(directory: str | Path) -> Checked:
    """Return what a folder holds; raises DataError naming every tensor that is out of place."""
    directory = Path(directory)
    found = weights.open_weights(directory)
    path = directory / CONFIG
    source = families.read_config(weights.read_json(path, weights.MAX_CONFIG), str(path))
    family, cfg = source.family, source.model
    if cfg.num_layers * max(1, cfg.num_experts) > len(found.tensors):
        # The table of tensors is never built on the word of config.json alone.
        raise DataError(
            f"{path}: num_hidden_layers = {cfg.num_layers} (experts: {cfg.num_experts}): more than "
            f"the {len(found.tensors)} tensors of the files can fill"
        )
    entries = tensors.table(family, cfg)
    names: dict[str, str] = {}
    for name, full in tensors.resolve(family, found.tensors).items():
        if full in names:
            raise DataError(
                f"{directory}: holds {names[full]} and {name}, which are the same weight"
            )
        names[full] = name
    wanted = {name: shape for e in entries for name, shape in zip(e.names, e.shapes, strict=True)}
    unused = [full for full in names if tensors.is_buffer(family, full)]
    if cfg.tie_embeddings and HEAD in names:
        unused.append(HEAD)
    problems = {
        "missing": [name for name in wanted if name not in names],
        "not part of this model": [n for n in names if n not in wanted and n not in unused],
        "of the wrong shape": [
            f"{name} {list(shape)} instead of {list(wanted[name])}"
            for name in names.keys() & wanted.keys()
            if (shape := found.tensors[names[name]].shape) != wanted[name]
        ],
        "of a dtype that is not read": [
            f"{name} {dtype}"
            for name in names.keys() & wanted.keys()
            if (dtype := found.tensors[names[name]].dtype) not in FLOATS
        ],
    }
    lines = [f"{len(list_)} {what}: {_first(list_)}" for what, list_ in problems.items() if list_]
    if HEAD in problems["missing"]:
        lines.append("tie_word_embeddings is false, so the head must be there")
    if lines:
        raise DataError(f"{directory}: tensors {'; '.join(lines)}")
    checked = Checked(source, found, entries, names, tuple(unused))
    if HEAD in unused and not _same_values(checked, HEAD, entries[0].names[0]):
        raise DataError(
            f"{directory}: {HEAD} is not {entries[0].names[0]}, but tie_word_embeddings is true; "
            "set it to false to keep both"
        )
    return checked


def _first(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(sorted(names)[:SHOWN]) + more


def _same_values(checked: Checked, *names: str) -> bool:
    one, other = (checked.weights.read(checked.names[name]) for name in names)
    if one.shape != other.shape:
        return False
    step = max(1, COMPARED // max(1, one.shape[1]))
    return all(
        np.array_equal(one[i : i + step], other[i : i + step]) for i in range(0, len(one), step)
    )


def read_entry(checked: Checked, entry: Entry) -> dict[str, np.ndarray]:
    """Return the leaves of an entry by path, in the dtype of the files, as views where possible."""
    stored = [checked.weights.read(checked.names[name]) for name in entry.names]
    return dict(zip(entry.leaves, entry.to_ours(stored), strict=True))


def load(
    directory: str | Path, dtype: jax.typing.DTypeLike | None = None
) -> tuple[ModelConfig, Params]:
    """Return the configuration and the parameters of a Hugging Face folder, unrolled.

    Parameters are in the dtype of the files, or in `dtype`. Raises DataError.
    """
    checked = check(directory)
    leaves: dict[str, jax.Array] = {}
    for entry in checked.entries:
        for name, array in read_entry(checked, entry).items():
            leaves[name] = jax.numpy.array(np.ascontiguousarray(array), dtype)
    specs = parameters.specs(checked.source.model)
    ordered = [leaves[name] for name in named_leaves(specs)]
    return checked.source.model, jax.tree.unflatten(jax.tree.structure(specs), ordered)


# A run.


def import_run(
    directory: str | Path,
    out: str | Path,
    *,
    param_dtype: str = STORED,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Make the run folder `out` of a Hugging Face folder and return what was imported.

    `param_dtype`: "float32", "bfloat16", or "stored", as in the files. The folder appears when all
    of it is on disk. Raises ConfigError if something is at `out`; DataError; StorageError.
    """
    directory, out = Path(directory), Path(out).absolute()
    new_folder.check_free(out)
    checked = check(directory)
    with new_folder.appearing(out, "import") as unfinished:
        tokenizer_digest = _write_run(directory, unfinished, out, checked, param_dtype, say)
    return _summary(checked, out, param_dtype, tokenizer_digest)


def _write_run(
    directory: Path,
    unfinished: Path,
    out: Path,
    checked: Checked,
    param_dtype: str,
    say: Callable[[str], None],
) -> str | None:
    """Write the run in `unfinished`; return the digest of its tokenizer, if there is one."""
    tok = tokenizers.carry_in(directory, unfinished)
    if tok is None:
        say(f"{directory}: holds no tokenizer; put one into {out} as tokenizer.model")
    cfg = Config(run=RunConfig(dir=str(out)), model=checked.source.model)
    origins = {f"model.{name}": f"{directory / CONFIG}" for name in vars(checked.source.model)}
    toml = config.to_toml(dataclasses.replace(cfg, origins=origins))
    write_atomic(unfinished / "config.toml", toml.encode())
    digest = tok.digest if tok else None
    record = parts.save(
        unfinished / "ckpt",
        _shapes(checked, param_dtype),
        _parts(checked, param_dtype),
        identity={"tokenizer": digest} if digest else {},
        meta={"imported": {"family": checked.source.family, "from": str(directory)}},
        config=config.to_dict(cfg),
    )
    if not record.finite:  # no verb would use them
        raise DataError(f"{directory}: {_not_finite(checked, param_dtype)}: NaN or infinity")
    return digest


def _not_finite(checked: Checked, param_dtype: str) -> str:
    """Return the names of the first tensors that hold NaN or infinity as they are written."""
    for part in _parts(checked, param_dtype):
        for entry in checked.entries:
            names = [f"params.{leaf}" for leaf in entry.leaves]
            if any(name in part and not np.isfinite(part[name]).all() for name in names):
                return _first(list(entry.names))
    raise ValueError("all tensors are finite")


def _dtype(checked: Checked, entry: Entry, param_dtype: str) -> np.dtype:
    """Return the dtype in which an entry's leaves are written."""
    if param_dtype != STORED:
        return DTYPES[param_dtype]
    found = {FLOATS[checked.weights.tensors[checked.names[name]].dtype] for name in entry.names}
    return found.pop() if len(found) == 1 else DTYPES["float32"]


def _shapes(checked: Checked, param_dtype: str) -> Params:
    specs = parameters.specs(checked.source.model)
    dtypes = {leaf: _dtype(checked, e, param_dtype) for e in checked.entries for leaf in e.leaves}
    shapes = [
        jax.ShapeDtypeStruct(spec.shape, dtypes[name]) for name, spec in named_leaves(specs).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(specs), shapes)


def _parts(checked: Checked, param_dtype: str) -> Iterator[dict[str, np.ndarray]]:
    """Yield the leaves of each part of the checkpoint; the table lists layers one by one."""
    part: dict[str, np.ndarray] = {}
    for entry in checked.entries:
        if part and arrays.part_of(next(iter(part))) != arrays.part_of(f"params.{entry.leaves[0]}"):
            yield part
            part = {}
        dtype = _dtype(checked, entry, param_dtype)
        for name, array in read_entry(checked, entry).items():
            part[f"params.{name}"] = np.ascontiguousarray(array, dtype)
    yield part


def _summary(
    checked: Checked, out: Path, param_dtype: str, tokenizer_digest: str | None
) -> dict[str, Any]:
    source, found = checked.source, checked.weights.tensors
    read = [name for entry in checked.entries for name in entry.names]
    stored = Counter(str(FLOATS[found[checked.names[name]].dtype]) for name in read)
    written = {str(_dtype(checked, entry, param_dtype)) for entry in checked.entries}
    cfg = source.model
    return {
        "run_dir": str(out),
        "family": source.family,
        "parameters": parameters.count(parameters.specs(cfg)),
        "dtypes_stored": dict(stored.most_common()),
        "dtype_written": ", ".join(sorted(written)),
        "positions": cfg.positions,
        "rope_base": cfg.rope_base if cfg.positions == "rope" else None,
        "rope_local_base": cfg.rope_local_base,
        "rope_scaling": cfg.rope_scaling,
        "rope_factor": cfg.rope_factor,
        "rope_layout": "half-split" if cfg.positions == "rope" else None,
        "seq_len": cfg.seq_len,
        "tied": cfg.tie_embeddings,
        "tensors_read": len(read),
        "tensors_unused": [checked.names[name] for name in checked.unused],
        "ignored": list(source.ignored),
        "tokenizer": tokenizer_digest,
    }
