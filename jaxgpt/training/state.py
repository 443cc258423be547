"""Everything a run carries from one step to the next, as one pytree; nothing else is needed.

Randomness is a function of the seed and the step, and the data of the step's sample counter, so
neither keys nor iterators are part of the state. The state of a big model never exists on one
device: `init_state` is compiled with the shardings of its result.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding

from jaxgpt.config import Config
from jaxgpt.model import params as parameters
from jaxgpt.parallel.mesh import platform
from jaxgpt.parallel.sharding import replicated, tree_shardings
from jaxgpt.training.optimizer import Optimizer, OptState

Array = jax.Array


@struct.dataclass
class TrainState:
    """Parameters, optimiser state, three int32 counters and the digest of all rows consumed."""

    step: Array  # updates attempted; the next is number step + 1
    params: parameters.Params
    opt_state: OptState
    skipped: Array  # of these, how many changed nothing: not finite, a spike, no loss token
    skipped_in_row: Array  # how many were not finite since the last that changed something
    rows_digest: Array  # uint32, see `audit`; rows of skipped updates count


def init_state(cfg: Config, optimizer: Optimizer, key: Array) -> TrainState:
    """Return the state before the first step; a pure function of (cfg, key) on every mesh."""
    params = parameters.init(parameters.specs(cfg.model), key, cfg.train.param_dtype)
    return from_params(optimizer, params)


def from_params(optimizer: Optimizer, params: parameters.Params) -> TrainState:
    """Return the state before the first step, of these parameters."""
    zero = jnp.int32(0)
    return TrainState(zero, params, optimizer.init(params), zero, zero, jnp.uint32(0))


def create(
    cfg: Config, optimizer: Optimizer, mesh: Mesh, placed: TrainState | None = None
) -> TrainState:
    """Return `init_state` for `run.seed`, each array made where it lies on the mesh.

    `placed`: what `state_shardings` returns, if it is known.
    """
    make = functools.partial(init_state, cfg, optimizer)
    placed = placed or state_shardings(mesh, cfg, optimizer)
    # XLA:CPU compiles it in 2 s of a core in place of 4.5 (a small GPT), and it runs once.
    options = {"xla_backend_optimization_level": 1} if platform(mesh) == "cpu" else None
    make = jax.jit(make, out_shardings=placed, compiler_options=options)
    return make(jax.random.key(cfg.run.seed))


def abstract_state(cfg: Config, optimizer: Optimizer, mesh: Mesh | None = None) -> TrainState:
    """Return the state as `jax.ShapeDtypeStruct` leaves without values, placed if given a mesh.

    Parameter trees lie by their specs, all else on each device. Whatever in the optimiser's state
    is a `Params` tree (moments, master weights, average) lies as the parameters do where it has
    their shape, also where it lacks some of them or holds more than one array for each.
    """
    specs = parameters.specs(cfg.model)
    params = parameters.abstract(specs, cfg.train.param_dtype)
    state = jax.eval_shape(functools.partial(from_params, optimizer), params)
    if mesh is None:
        return state
    of_params = tree_shardings(mesh, specs)

    def placed(leaf: jax.ShapeDtypeStruct, where: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    def place(node: Any) -> Any:
        if not isinstance(node, parameters.Params):
            return placed(node, replicated(mesh))

        def alike(spec: parameters.ParamSpec, where: NamedSharding, part: Any) -> Any:
            return jax.tree.map(
                lambda leaf: placed(leaf, where if leaf.shape == spec.shape else replicated(mesh)),
                part,
            )

        return jax.tree.map(alike, specs, of_params, node)

    return jax.tree.map(place, state, is_leaf=lambda node: isinstance(node, parameters.Params))


def shardings(state: TrainState) -> TrainState:
    """Return the sharding of each leaf of a state, or of a placed one without values."""
    return jax.tree.map(lambda leaf: leaf.sharding, state)


def state_shardings(mesh: Mesh, cfg: Config, optimizer: Optimizer) -> TrainState:
    """Return the sharding of each leaf of the run's state."""
    return shardings(abstract_state(cfg, optimizer, mesh))
