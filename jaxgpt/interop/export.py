"""A checkpoint out as a Hugging Face folder: written part by part, compared, and only then named.

Leaves are read as they were saved, each verified by its fingerprint, and every tensor is compared
with them again after it was written; memory holds a group of leaves, never the model.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jaxgpt import config
from jaxgpt.checkpoint import load
from jaxgpt.checkpoint.fingerprint import named_leaves
from jaxgpt.config import ModelConfig
from jaxgpt.durable import storage_errors, write_atomic
from jaxgpt.errors import DataError, NumericsError
from jaxgpt.interop import families, hf, new_folder, tensors, tokenizers, twin, verify
from jaxgpt.interop.stored import Stored, host_device, open_stored
from jaxgpt.interop.tensors import Entry
from jaxgpt.interop.tokenizer_folder import dump
from jaxgpt.interop.tokenizers import CarriedOut
from jaxgpt.interop.weights import MAX_CONFIG, SHARD_BYTES, read_json, write_weights
from jaxgpt.model import params as parameters
from jaxgpt.model.canonical import computed
from jaxgpt.model.params import Params
from jaxgpt.run_folder import KEPT
from jaxgpt.tokenization import tokenizer
from jaxgpt.tokenization.tokenizer import Tokenizer


class Plan(NamedTuple):
    """What is exported: the leaves of a step, the model as a family has it, and its config.json."""

    run_dir: Path
    stored: Stored
    weights: Literal["last", "ema"]
    model: ModelConfig
    family: str
    entries: tuple[Entry, ...]
    dtype: np.dtype | None  # None: each leaf as it was saved
    content: dict[str, Any]
    tok: Tokenizer | None

    @property
    def dtypes(self) -> str:
        """Return the dtype of the tensors that are written, or the several of them."""
        return str(self.dtype or self.stored.dtypes)


def export_run(
    run: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    dtype: Literal["float32", "bfloat16", "stored"] = "stored",
    weights: Literal["last", "ema", "best"] = "best",
    check: Literal["full", "twin", "none"] = "full",
    shard_bytes: int = SHARD_BYTES,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Write a checkpoint as a folder that transformers loads, and return what was written.

    `run` is a run folder or the folder of one step; without a step the newest finite one is taken.
    `weights`: "best" is the moving average where the step holds one. Every tensor is compared with
    the checkpoint; `check` "twin" also compares a tiny model of the same configuration with
    transformers, and the tokenizer; "full" the weights themselves too, if memory holds them twice.
    The folder appears when all agrees. Raises ConfigError for a model that no family expresses, an
    `out` that is not empty, and libraries that are missing; NothingRestorable; DataError and
    NumericsError for what does not agree; StorageError.
    """
    out = Path(out).absolute()
    new_folder.check_free(out)
    if check != "none":
        verify.require()
    plan = make_plan(run, step, dtype, weights)
    with new_folder.appearing(out, "export") as unfinished:
        files = write(plan, unfinished, shard_bytes)
        summary = _check(plan, unfinished, files.carried, check, say)
    with storage_errors(out):
        sizes = {path.name: path.stat().st_size for path in sorted(out.iterdir())}
    return {
        "directory": str(out),
        "family": plan.family,
        "step": plan.stored.record.step,
        "weights": plan.weights,
        "dtype": plan.dtypes,
        "dtype_saved": plan.stored.dtypes,
        "parameters": parameters.count(parameters.specs(plan.model)),
        "tensors": sum(len(entry.names) for entry in plan.entries),
        "files": sizes,
        **summary,
        "notes": [*files.notes, *summary["notes"]],
    }


def make_plan(run: str | Path, step: int | None, dtype: str, weights: str) -> Plan:
    """Return what an export will write; errors as for `export_run`."""
    run_dir = load.run_folder(run)
    directory, record = load.find_step(run if step is None else run_dir / "ckpt" / str(step))
    chosen = load.choose(directory, record, weights)
    stored = open_stored(directory, record, chosen)
    model = config.from_dict(record.config).model
    base = _carried(run_dir)
    kept = families.read_config(base, str(run_dir / KEPT)).family if base else None
    family = kept or families.family_of(model)
    kind = hf.DTYPES.get(dtype)
    content = families.write_config(family, model, str(kind or stored.dtype("embed")), base)
    tok = None
    if "tokenizer" in record.identity or (run_dir / load.TOKENIZER).is_file():
        tok = tokenizer.load(load.find_tokenizer(directory))
        if tok.vocab_size > model.vocab_size:
            raise DataError(
                f"{tok.path}: the tokenizer has {tok.vocab_size} ids, the model only "
                f"{model.vocab_size}; these do not belong together"
            )
        ids = {"bos": tok.start_id, "eos": tokenizers.end_ids(tok), "pad": tok.pad_id}
        for name, number in ids.items():
            if content.get(f"{name}_token_id") is None:
                content[f"{name}_token_id"] = number
    entries = tensors.table(family, model)
    return Plan(run_dir, stored, chosen, model, family, entries, kind, content, tok)


def _carried(run_dir: Path) -> dict[str, Any] | None:
    """Return the config.json that an imported run came with."""
    path = run_dir / KEPT / "config.json"
    return read_json(path, MAX_CONFIG) if path.is_file() else None


def write(plan: Plan, directory: Path, shard_bytes: int) -> CarriedOut:
    """Write all files into a folder; return what became of the tokenizer."""
    write_weights(directory, _arrays(plan), shard_bytes)
    write_atomic(directory / "config.json", dump(plan.content))
    if plan.tok is None:
        note = f"{plan.run_dir}: has no tokenizer, so there is none in the folder"
        return CarriedOut((), (note,), False)
    return tokenizers.carry_out(plan.tok, plan.run_dir, directory, plan.model.seq_len)


def _arrays(plan: Plan) -> Iterator[tuple[str, np.ndarray]]:
    for group in plan.stored.groups(plan.entries):
        yield from _converted(group, _cast(plan, plan.stored.read(group)))


def _cast(plan: Plan, leaves: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    if plan.dtype is None:
        return leaves
    return {name: leaf.astype(plan.dtype, copy=False) for name, leaf in leaves.items()}


def _converted(
    entries: Iterable[Entry], leaves: dict[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    for entry in entries:
        arrays = entry.to_hf([leaves[name] for name in entry.leaves])
        yield from zip(entry.names, arrays, strict=True)


# Comparing.


def _check(
    plan: Plan, directory: Path, carried: bool, check: str, say: Callable[[str], None]
) -> dict[str, Any]:
    """Compare the files with the checkpoint and with transformers; return what was found."""
    say("comparing every tensor with the checkpoint")
    compare_files(plan, directory)
    found: dict[str, Any] = {"verified": check, "notes": []}
    if check == "none":
        found["notes"] = ["UNVERIFIED: not loaded with transformers (--verify none)"]
        return found
    if plan.tok is not None and tokenizers.loadable(directory):
        say("comparing the tokenizer with that of transformers")
        remarks = verify.compare_tokenizer(directory, plan.tok, carried)
        found["tokenizer_agrees"] = not remarks
        found["notes"] += remarks
    say("comparing a tiny model of this configuration with transformers")
    found["twin_difference"] = check_twin(plan)
    count = parameters.count(parameters.specs(plan.model))
    if check == "full" and not verify.fits(plan.model, count):
        found["verified"] = "twin"
        found["notes"].append(
            f"no memory for {count:,} parameters twice in float32: transformers was compared on a "
            "tiny model of the same configuration"
        )
    elif check == "full":
        say("comparing the model with transformers")
        tokens = verify.rows(plan.model, plan.tok)
        cfg, params = _unrolled(plan.model, _all_leaves(plan))
        found["difference"] = verify.compare_model(directory, cfg, params, tokens, "the model")
    return found


def compare_files(plan: Plan, directory: Path) -> None:
    """Read a written folder as an import does and compare every bit with the checkpoint.

    Raises DataError for files that an import refuses, and NumericsError naming the first tensor
    that differs, or the field of another model.
    """
    checked = hf.check(directory)
    there, here = computed(checked.source.model), computed(plan.model)
    for name, value in vars(here).items():
        if (found := getattr(there, name)) != value:
            raise NumericsError(f"config.json says model.{name} = {found!r}, not {value!r}")
    for group in plan.stored.groups(checked.entries):
        leaves = _cast(plan, plan.stored.read(group))
        for entry in group:
            for name, array in hf.read_entry(checked, entry).items():
                _compare_bits(", ".join(entry.names[:2]), name, array, leaves[name])


def _compare_bits(tensor: str, name: str, found: np.ndarray, right: np.ndarray) -> None:
    if (found.dtype, found.shape) != (right.dtype, right.shape):
        raise NumericsError(
            f"{tensor}: {found.dtype}{list(found.shape)} in the files, params.{name} of the "
            f"checkpoint is {right.dtype}{list(right.shape)}"
        )
    bits = np.dtype(f"u{right.dtype.itemsize}")
    same = np.ascontiguousarray(found).view(bits) == np.ascontiguousarray(right).view(bits)
    if not same.all():
        at = tuple(int(i) for i in np.unravel_index(np.argmin(same), same.shape))
        raise NumericsError(
            f"{tensor}: {found[at]} in the files, params.{name}{list(at)} of the checkpoint is "
            f"{right[at]}"
        )


def check_twin(plan: Plan) -> float:
    """Write a tiny model of the plan's configuration and compare it; errors as `compare_model`."""
    cfg = twin.shrink(plan.model)
    leaves = twin.random_leaves(cfg)
    content = families.write_config(plan.family, cfg, "float32", plan.content)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        write_weights(directory, _converted(tensors.table(plan.family, cfg), leaves))
        write_atomic(directory / "config.json", dump(content))
        cfg, params = _unrolled(cfg, leaves)
        tokens = verify.rows(cfg, None)
        return verify.compare_model(directory, cfg, params, tokens, "a tiny model like it")


def _all_leaves(plan: Plan) -> dict[str, np.ndarray]:
    groups = plan.stored.groups(plan.entries)
    return {k: v for group in groups for k, v in _cast(plan, plan.stored.read(group)).items()}


def _unrolled(cfg: ModelConfig, leaves: dict[str, np.ndarray]) -> tuple[ModelConfig, Params]:
    """Return a model in the unrolled layout and its parameters in float32, in main memory."""
    cfg = dataclasses.replace(cfg, stacked=False)
    specs = parameters.specs(cfg)
    with jax.default_device(host_device()):
        arrays = [jax.numpy.asarray(leaves[name], np.float32) for name in named_leaves(specs)]
    return cfg, jax.tree.unflatten(jax.tree.structure(specs), arrays)
