"""The weights that a new run starts from where `run.init_from` names some.

They may come from another run, or from outside by `jaxgpt hf import`. Step, optimiser and data
start at 0. Everything is compared before anything is loaded: weights of another model would load
where shapes happen to agree, and compute something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxgpt import config
from jaxgpt.checkpoint import load
from jaxgpt.checkpoint.fingerprint import named_leaves
from jaxgpt.checkpoint.record import Record
from jaxgpt.config import Config, ModelConfig
from jaxgpt.errors import ConfigError, DataError, NothingRestorable
from jaxgpt.model import params as parameters
from jaxgpt.model.canonical import computed
from jaxgpt.model.params import Params
from jaxgpt.parallel.sharding import tree_shardings
from jaxgpt.training import state as states
from jaxgpt.training.optimizer import Optimizer
from jaxgpt.training.state import TrainState


class Source(NamedTuple):
    """The step whose weights a run starts from."""

    directory: Path  # of the step
    record: Record

    @property
    def run_dir(self) -> Path:
        return self.directory.parent.parent

    @property
    def digest(self) -> str:
        """What all processes must have found alike."""
        numbers = sum(leaf.fingerprint for leaf in self.record.leaves)
        return f"step {self.record.step} {numbers:x}"


def find_source(cfg: Config, tokenizer_digest: str) -> Source | None:
    """Return what `run.init_from` names, its newest finite step by default; None for nothing.

    Raises NothingRestorable where there is none; ConfigError, a line for each difference, for
    another model; DataError for another tokenizer than that of the data.
    """
    where = f"run.init_from = {cfg.run.init_from}"
    if not cfg.run.init_from:
        return None
    path, run_dir = Path(cfg.run.init_from).absolute(), Path(cfg.run.dir).absolute()
    if cfg.run.overwrite and path.is_relative_to(run_dir):
        raise ConfigError(
            f"{where}: lies in run.dir, which run.overwrite sets aside; use another run.dir"
        )
    try:
        directory, record = load.find_step(path)
    except NothingRestorable as error:
        raise NothingRestorable(f"run.init_from: {error}") from None
    differences = list(_differences(config.from_dict(record.config).model, cfg.model))
    if differences:
        raise ConfigError(*(f"{where}: {line}" for line in differences))
    digest = record.identity.get("tokenizer", tokenizer_digest)
    if digest != tokenizer_digest:
        raise DataError(
            f"{where}: was trained with tokenizer {digest[:12]}, data.store was made with "
            f"{tokenizer_digest[:12]}; prepare the data with the tokenizer of that run"
        )
    return Source(directory, record)


def start_state(
    cfg: Config,
    optimizer: Optimizer,
    mesh: Mesh,
    source: Source | None,
    say: Callable[[str], None],
    placed: TrainState,
) -> TrainState:
    """Return the state before the first step, of random weights or of those of `source`.

    The latter are read straight to where they lie on the mesh, each verified, then brought into the
    run's layout and `train.param_dtype`; a rounding is said. `placed`: the sharding of each leaf.
    """
    if source is None:
        return states.create(cfg, optimizer, mesh, placed)
    try:
        _, loaded, record = load.load_step(
            source.directory, shardings=lambda of: tree_shardings(mesh, parameters.specs(of.model))
        )
    except NothingRestorable as error:
        raise NothingRestorable(f"run.init_from: {error}") from None
    dtype = jnp.dtype(cfg.train.param_dtype)
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(loaded)}
    rounded = [str(d) for d in dtypes if jnp.promote_types(d, dtype) != dtype]
    which = "last weights, not their average," if load.averaged(record) else "weights"
    say(
        f"starting from the {which} of {source.directory}, step {record.step} (run.init_from)"
        + (f", rounded from {', '.join(sorted(rounded))} to {dtype}" if rounded else "")
    )

    def make(weights: Params) -> TrainState:
        weights = parameters.restack(weights, cfg.model.stacked)
        weights = jax.tree.map(lambda leaf: leaf.astype(dtype), weights)
        return states.from_params(optimizer, weights)

    return jax.jit(make, out_shardings=placed)(loaded)


def _differences(saved: ModelConfig, now: ModelConfig) -> Iterator[str]:
    """Yield what is not the same function of parameters of the same shapes, a line each."""
    there, here = _function(saved), _function(now)
    for key in here:
        if there.get(key) != here[key]:
            yield f"has model.{key} = {there.get(key)!r}, this run {here[key]!r}"
    shapes, wanted = (
        {name: list(spec.shape) for name, spec in named_leaves(parameters.specs(m)).items()}
        for m in (saved, now)
    )
    for name in wanted if there == here else ():
        if shapes.get(name, wanted[name]) != wanted[name]:
            yield (
                f"params.{name} is {shapes[name]}, in this run {wanted[name]}; set "
                f"model.vocab_size = {saved.vocab_size} if the tokenizer is the same"
            )


def _function(model: ModelConfig) -> dict[str, Any]:
    """Return what shapes parameters or changes what they compute, but for the vocabulary."""
    fields = dict(vars(computed(model)))
    fields["attn_scale"] = fields["attn_scale"] or model.head_width**-0.5
    del fields["vocab_size"]  # told apart by the parameters that have it
    if model.positions != "learned":
        del fields["seq_len"]
    return fields
