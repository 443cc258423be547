"""Experts on several devices: tokens go to the devices of the experts they chose, and back.

Each device holds its own tokens and its share of the experts. `dropless` computes every slot,
however uneven the choice: an all-to-all moves so many slots from one device to another, and there
are as many turns as the longest queue needs, usually one. So memory is that of a nearly even
choice, whatever the router does; an uneven one costs time.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.config import ModelConfig
from jaxgpt.model import dispatch
from jaxgpt.model.dispatch import Impl, Matrices
from jaxgpt.model.shards import MeshAxes

Array = jax.Array

# With n tokens on each of X devices that share E experts. `ragged_all_to_all` would send no
# padding, but receives into a buffer of the worst case, X min(k, E/X) / k times the even one;
# XLA:CPU does not run it (jax-ml/jax#34755), so that what is tested would not be what trains; and
# on 8 B200 it reached 2 % of NVLink (openxla/xla#33386). Gathering all tokens and scattering the
# sums moves X / k times the bytes of an even choice, and needs memory for the same worst case.

# Slots of a turn over those of an even choice. Less would often need a second turn, more is padding
# that is sent and held; a guess, no trained router was measured.
SLACK = 1.5
MULTIPLE = 8  # rows


class _How(NamedTuple):
    """What is static in the compiled exchange."""

    cfg: ModelConfig
    axes: tuple[str, ...]  # mesh axes over which experts are split
    everyone: tuple[str, ...]  # mesh axes whose devices take the same number of turns
    rows: int  # slots from one device to another in a turn
    platform: str
    impl: Impl | None


class _Plan(NamedTuple):
    """Where the slots of a device go; S = n k slots."""

    expert: Array  # [S] int32, of all experts
    place: Array  # [S] int32, in the queue for the expert's device
    turns: Array  # int32 scalar, the same on all devices


def dropless(
    cfg: ModelConfig,
    h: Array,
    chosen: Array,
    gates: Array,
    matrices: Matrices,
    axes: MeshAxes,
    platform: str,
    impl: Impl | None = None,
) -> Array:
    """Return `dispatch.dropless` of a device's tokens h [..., D] among the experts of all devices.

    To be called by each device, with `axes` of `Shards.on_shards` for batch, seq, experts and mlp;
    `chosen` numbers all experts, `matrices` hold the device's own. With S = n k slots per device,
    a turn sends, receives and computes `SLACK` S rows. Backward passes compute the experts again,
    turn by turn, so that only the tokens are kept. Where tokens are not split over the devices that
    share experts, each computes its own experts for all of them, and the sums are added up.
    """
    if not axes["experts"]:
        return dispatch.dropless(cfg, h, chosen, gates, matrices, platform, impl)
    (*lead, D), k = h.shape, chosen.shape[-1]
    x, chosen, gates = h.reshape(-1, D), chosen.reshape(-1, k), gates.reshape(-1, k)
    own = len(matrices[1])  # experts of a device
    if not set(axes["experts"]) <= set(axes["batch"]):
        local = chosen - jax.lax.axis_index(axes["experts"]) * own
        local = jnp.where((local >= 0) & (local < own), local, own)
        out = dispatch.dropless(cfg, x, local, gates, matrices, platform, impl, nobody=True)
        return jax.lax.psum(out, axes["experts"]).reshape(h.shape)
    everyone = {axis: None for names in axes.values() for axis in names}
    rows = slots_per_turn(len(x), k, cfg.num_experts, cfg.num_experts // own)
    how = _How(cfg, axes["experts"], tuple(everyone), rows, platform, impl)
    return _exchanged(how, x, gates, matrices, _plan(how, chosen, own)).reshape(*lead, D)


def slots_per_turn(tokens: int, k: int, num_experts: int, devices: int) -> int:
    """Return how many slots of a device's tokens go to each of the devices in one turn.

    `SLACK` times the even share, in eights, but no more than could ever go there: a token chooses
    an expert once.
    """
    most = tokens * min(k, num_experts // devices)
    rows = math.ceil(SLACK * tokens * k / devices / MULTIPLE) * MULTIPLE
    return min(rows, most)


def _plan(how: _How, chosen: Array, own: int) -> _Plan:
    """Line up the slots for each device, by expert, then by token; chosen [n, k]."""
    expert = chosen.reshape(-1)
    place, sizes = dispatch.queue(expert, how.cfg.num_experts)
    sizes = sizes.reshape(-1, own)  # [X, E/X]
    before = (jnp.cumsum(sizes, axis=1) - sizes).reshape(-1)
    turns = -(-sizes.sum(1).max() // how.rows)
    return _Plan(expert, before[expert] + place, jax.lax.pmax(turns, how.everyone))


def _turn(how: _How, turn: Array, x: Array, gates: Array, matrices: Matrices, plan: _Plan) -> Array:
    """Return what the slots of a turn add to the result, float32 [n, D]; x [n, D], gates [n, k]."""
    (n, D), k, own = x.shape, gates.shape[1], len(matrices[1])
    rows, devices = how.rows, how.cfg.num_experts // own
    place = plan.place - turn * rows
    now = (place >= 0) & (place < rows)
    position = jnp.where(now, plan.expert // own * rows + place, devices * rows)  # [S]
    source = dispatch.inverse(position, devices * rows)  # [X rows], S for none
    swap = partial(jax.lax.all_to_all, axis_name=how.axes, split_axis=0, concat_axis=0, tiled=True)
    expert = jnp.take(plan.expert % own, source, mode="fill", fill_value=own)
    gate = dispatch.take(gates.reshape(-1, 1), source, position[:, None])  # [X rows, 1]
    sent = dispatch.take(x, source // k, position.reshape(n, k))  # [X rows, D]
    # Gates go along: the gradient of one is a product with what its expert returns, which would
    # have to come back once more.
    out = dispatch.dropless(
        how.cfg, swap(sent), swap(expert)[:, None], swap(gate), matrices, how.platform, how.impl,
        nobody=True,
    )  # fmt: skip
    out = dispatch.take(swap(out), position, source[:, None]).reshape(n, k, D)
    return out.astype(jnp.float32).sum(1)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchanged(how: _How, x: Array, gates: Array, matrices: Matrices, plan: _Plan) -> Array:
    """Return the sum of all turns, [n, D] in x's dtype.

    Differentiated by hand, as the number of turns is data.
    """

    def all_turns(x: Array, gates: Array, matrices: Matrices, plan: _Plan) -> Array:
        def body(turn: Array, total: Array) -> Array:
            return total + _turn(how, turn, x, gates, matrices, plan)

        start = jnp.zeros(x.shape, jnp.float32)
        return jax.lax.fori_loop(0, plan.turns, body, start).astype(x.dtype)

    return dispatch.one_by_one(all_turns)(x, gates, matrices, plan)


def _forward(
    how: _How, x: Array, gates: Array, matrices: Matrices, plan: _Plan
) -> tuple[Array, tuple]:
    return _exchanged(how, x, gates, matrices, plan), ((x, gates, matrices), plan)


def _backward(how: _How, saved: tuple, grad: Array) -> tuple[Any, ...]:
    def all_turns(primals: tuple, plan: _Plan, grad: Array) -> tuple:
        def body(turn: Array, total: Any) -> Any:
            _, pull = jax.vjp(lambda *primals: _turn(how, turn, *primals, plan), *primals)
            return jax.tree.map(lambda a, b: a + b.astype(jnp.float32), total, pull(grad))

        start = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), primals)
        total = jax.lax.fori_loop(0, plan.turns, body, start)
        return jax.tree.map(lambda g, x: g.astype(x.dtype), total, primals)

    return *dispatch.one_by_one(all_turns)(*saved, grad.astype(jnp.float32)), None


_exchanged.defvjp(_forward, _backward)
