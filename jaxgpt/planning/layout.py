"""What a device holds of a model and of a batch: the sizes that memory and time are counted from.

`state_sizes` are of the configuration alone, `layout` adds a machine and a mesh over it. Weights
are listed in the stacked form, whatever `model.stacked` says: all layers of a name as one array.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jaxgpt.config import Config, with_values
from jaxgpt.model import attention
from jaxgpt.model import params as parameters
from jaxgpt.parallel.mesh import BATCH_AXES, axis_sizes, check_sizes, slow_sizes
from jaxgpt.parallel.sharding import partition
from jaxgpt.planning.hardware import Target
from jaxgpt.training import optimizer, state
from jaxgpt.validation import num_steps

TOKEN_AXES = (*BATCH_AXES, "context")  # split the tokens of a batch


class Weight(NamedTuple):
    """All weights of one name, and the bytes of each element in all parts of the state."""

    name: str
    shape: tuple[int, ...]  # with the layers first
    axes: tuple[str | None, ...]
    state: dict[str, int]  # cause: bytes per element

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def in_layers(self) -> bool:
        return self.name.startswith("layers/")

    @property
    def looked_up(self) -> bool:
        return self.name in ("embed", "pos_embed")


class StateSizes(NamedTuple):
    """What does not depend on a mesh: the weights, and the state that each device holds whole."""

    weights: tuple[Weight, ...]
    replicated: dict[str, int]  # cause: bytes


@dataclass(frozen=True, eq=False)
class Layout:
    """A configuration on a machine: devices per axis, and what each of them has."""

    cfg: Config
    target: Target
    sizes: dict[str, int]  # devices per mesh axis
    slow: dict[str, int]  # of these, in different slices
    specs: dict[str, tuple[tuple[str, ...], ...]]  # mesh axes of each dimension, by weight
    shares: dict[str, tuple[int, int]]  # elements that a device holds, and uses at once, by weight
    weights: tuple[Weight, ...]
    replicated: dict[str, int]
    attention: frozenset[str]  # the ways in which its blocks compute it, see `model.attention`

    @property
    def accum(self) -> int:
        return self.cfg.train.accum_steps

    @property
    def batch_shards(self) -> int:
        return math.prod(self.sizes[axis] for axis in BATCH_AXES)

    @property
    def rows(self) -> int:
        """Return the rows of a micro-batch on a device."""
        return self.cfg.train.micro_rows // self.batch_shards

    @property
    def length(self) -> int:
        """Return the tokens of a row on a device."""
        return self.cfg.model.seq_len // self.sizes["context"]

    @property
    def tokens(self) -> int:
        """Return the tokens of a micro-batch on a device."""
        return self.rows * self.length

    @property
    def layers(self) -> int:
        """Return the layers of a device."""
        return self.cfg.model.num_layers // self.sizes["stage"]

    @property
    def ticks(self) -> int:
        """Return the turns of the pipeline for a step; without one, the micro-batches."""
        rounds = self.cfg.mesh.rounds if self.piped else 1
        return self.accum * rounds + self.sizes["stage"] - 1

    @property
    def piped(self) -> bool:
        """Tell whether micro-batches pass through stages."""
        return self.sizes["stage"] > 1

    @property
    def at_once(self) -> int:
        """Return the layers that a device computes in one turn of the pipeline, or in all."""
        return self.layers // (self.cfg.mesh.rounds if self.piped else 1)

    @property
    def places(self) -> int:
        """Return the micro-batches whose embeddings and loss a device computes at once."""
        return -(-self.accum // self.sizes["stage"]) if self.piped else 1

    @property
    def compute(self) -> int:
        """Return the bytes of an element in the compute dtype."""
        return jnp.dtype(self.cfg.train.compute_dtype).itemsize

    @property
    def param(self) -> int:
        return jnp.dtype(self.cfg.train.param_dtype).itemsize

    def split(self, size: int, *axes: str) -> int:
        """Return a device's part of a dimension that `axes` split where they divide it."""
        parts = math.prod(self.sizes[axis] for axis in axes)
        return size // parts if size % parts == 0 else size

    def spec(self, weight: Weight) -> tuple[tuple[str, ...], ...]:
        """Return the mesh axes that split each dimension of a weight."""
        return self.specs[weight.name]

    def gathered_over(self, weight: Weight) -> tuple[str, ...]:
        """Return the mesh axes over which a weight is gathered before it is used."""
        return _gathered_over(weight, self.spec(weight))

    def held(self, weight: Weight) -> int:
        """Return the elements of a weight on a device."""
        return self.shares[weight.name][0]

    def used(self, weight: Weight) -> int:
        """Return the elements of a weight on a device that has gathered them."""
        return self.shares[weight.name][1]

    def reduced_over(self, weight: Weight) -> tuple[str, ...]:
        """Return the mesh axes whose devices hold the same part and add up its gradients."""
        taken = {axis for axes in self.spec(weight) for axis in axes}
        return tuple(a for a in TOKEN_AXES if self.sizes[a] > 1 and a not in taken)


def with_vocabulary(cfg: Config) -> tuple[Config, str]:
    """Return `cfg` with a vocabulary, and a line if that is a guess: no store is opened here."""
    if cfg.model.vocab_size:
        return cfg, ""
    size = cfg.tokenizer.vocab_size
    return with_values(cfg, "plan", model={"vocab_size": size}), (
        f"model.vocab_size is that of a store; taken as tokenizer.vocab_size = {size:,} here"
    )


def state_sizes(cfg: Config) -> StateSizes:
    """Return the weights of `cfg` and what the state keeps of them; raises ConfigError."""
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, stacked=True))
    specs = parameters.specs(cfg.model)
    like = parameters.abstract(specs, cfg.train.param_dtype)
    built = optimizer.build(cfg, max(1, num_steps(cfg)), like)
    tree = state.abstract_state(cfg, built)
    per_element: dict[str, dict[str, int]] = {}
    replicated: dict[str, int] = {}

    def add(cause: str, node: Any) -> None:
        if not isinstance(node, parameters.Params):
            for leaf in jax.tree.leaves(node):
                replicated[cause] = replicated.get(cause, 0) + leaf.size * leaf.dtype.itemsize
            return

        def one(path: Any, spec: parameters.ParamSpec, part: Any) -> None:
            name = parameters.weight_name(path)[0]
            for leaf in jax.tree.leaves(part):
                if leaf.shape == spec.shape:
                    bytes_ = per_element.setdefault(name, {})
                    bytes_[cause] = bytes_.get(cause, 0) + leaf.dtype.itemsize
                else:
                    replicated[cause] = replicated.get(cause, 0) + leaf.size * leaf.dtype.itemsize

        jax.tree.map_with_path(one, specs, node)

    opt = tree.opt_state
    counters = (tree.replace(params=None, opt_state=None), opt.count, opt.spikes)
    parts = {
        "parameters": tree.params,
        "master weights": opt.master,
        "moments": opt.inner,
        "moving average": opt.ema,
        "counters": counters,
    }
    for cause, part in parts.items():
        for node in jax.tree.leaves(part, is_leaf=lambda n: isinstance(n, parameters.Params)):
            add(cause, node)
    weights = []
    for path, spec in jax.tree.leaves_with_path(specs):
        name = parameters.weight_name(path)[0]
        weights.append(Weight(name, spec.shape, spec.axes, per_element[name]))
    return StateSizes(tuple(weights), replicated)


def layout(cfg: Config, target: Target, known: StateSizes | None = None) -> Layout:
    """Return `cfg` on `target`; raises ConfigError, with all reasons, where it cannot run there."""
    sizes = axis_sizes(cfg.mesh, target.num_devices)
    slow = slow_sizes(cfg.mesh, sizes, target.num_slices)
    check_sizes(sizes, cfg)
    known = known or state_sizes(cfg)
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    specs = {
        weight.name: tuple(
            (entry,) if isinstance(entry, str) else tuple(entry or ())
            for entry in partition(mesh, weight.shape, weight.axes)
        )
        for weight in known.weights
    }
    shares = {weight.name: _shares(weight, specs[weight.name], sizes) for weight in known.weights}
    tasks = attention.tasks(cfg, target.chip.platform, sizes["context"])
    ways = frozenset(attention.choose(task, attention.asked(cfg)) for task in tasks)
    return Layout(cfg, target, sizes, slow, specs, shares, *known, ways)


def _gathered_over(weight: Weight, spec: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    names = zip(weight.axes, spec, strict=True)
    return tuple(axis for name, axes in names if name == "embed" for axis in axes)


def _shares(
    weight: Weight, spec: tuple[tuple[str, ...], ...], sizes: dict[str, int]
) -> tuple[int, int]:
    """Return the elements of a weight on a device, and on one that has gathered them."""
    held = weight.count // math.prod(sizes[axis] for axes in spec for axis in axes)
    return held, held * math.prod(sizes[axis] for axis in _gathered_over(weight, spec))
