"""Where the weights and activations of a pipeline lie, and how they get there.

Weights are [S, R, L / (S R), ...], activations of a turn [S, B, T, D], those that wait for their
turn or are finished on the belt, [S, q, B, T, D]: S is split over the stages. See `model.turns`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxgpt.config import ModelConfig
from jaxgpt.model import params as parameters
from jaxgpt.model.params import LayerParams
from jaxgpt.model.shards import MeshAxes, Names, Shards

Array = jax.Array

# Weights that a block casts to the compute dtype and uses in no other.
CAST = {"wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down"}
CAST |= {"shared_gate", "shared_up", "shared_down"}
STREAM = ("stages", "batch", "seq", None)
BELT = ("stages", None, "batch", "seq", None)


def place(cfg: ModelConfig, layers: Any, rounds: int, shards: Shards) -> Any:
    """Return stacked layers [L, ...] where the pipeline needs them, [S, R, L / (S R), ...].

    In round r stage s computes the r S + s-th part of the layers. With one round it holds them;
    with more the stages exchange parts, R - R / S of their R each: once per update, not per turn.
    """
    return _placed(cfg, layers, rounds, shards, back=False)


def unplace(cfg: ModelConfig, layers: Any, rounds: int, shards: Shards) -> Any:
    """Return what `place` has placed as stacked layers [L, ...]."""
    return _placed(cfg, layers, rounds, shards, back=True)


def _placed(cfg: ModelConfig, layers: Any, rounds: int, shards: Shards, *, back: bool) -> Any:
    S = shards.split("layers")

    def leaf(spec: parameters.ParamSpec, w: Array) -> Array:
        stacked, staged = spec.axes, ("layers", None, None, *spec.axes[1:])
        if rounds == 1:
            w = w.reshape(spec.shape if back else (S, 1, -1, *spec.shape[1:]))
            return shards.constrain(w, stacked if back else staged)

        def of_device(w: Array, axes: MeshAxes) -> Array:
            parts = w[0] if back else w.reshape(rounds, -1, *w.shape[1:])
            parts = _exchange(parts, S, axes["layers"], back=back)
            return parts.reshape(-1, *w.shape[3:]) if back else parts[None]

        names, out = (staged, stacked) if back else (stacked, staged)
        return shards.on_shards(of_device, (w,), (names,), out, exchange=("layers",))

    return jax.tree.map(leaf, parameters.specs(cfg).layers, layers)


def _exchange(parts: Array, stages: int, axes: tuple[str, ...], *, back: bool) -> Array:
    """Return the R parts of the layers that this stage computes, of the R it holds, or `back`.

    Part i of stage s is part s R + i of all, so part (s R + i) // S of stage (s R + i) % S. In each
    of R exchanges every stage sends one and gets one: R-regular bipartite graphs have R matchings,
    of which the c-th is i = c + s g // S modulo R, g the common divisor of R and S.
    """
    if not axes:
        return parts
    R, S = len(parts), stages
    stage, c = np.arange(S), np.arange(R)[:, None]
    held = (c + stage * math.gcd(R, S) // S) % R  # [R, S]
    to, put = (stage * R + held) % S, (stage * R + held) // S
    moves = [list(zip(stage.tolist(), row.tolist(), strict=True)) for row in to]
    placed = np.empty_like(put)  # [R, S], where the stage that gets a part puts it
    np.put_along_axis(placed, to, put, axis=1)
    if back:
        held, placed = placed, held
        moves = [[(b, a) for a, b in pairs] for pairs in moves]
    me = jax.lax.axis_index(axes)
    got = [
        jax.lax.ppermute(at(parts, jnp.asarray(one)[me], 0), axes, pairs)
        for one, pairs in zip(held, moves, strict=True)
    ]
    return jnp.stack(got)[jnp.asarray(np.argsort(placed, axis=0))[:, me]]


def cast(layers: LayerParams, dtype: DTypeLike) -> LayerParams:
    """Return the layers with the matrices in the compute dtype, as a block would cast them."""

    def leaf(path: Any, w: Array) -> Array:
        return w.astype(dtype) if path[-1].name in CAST else w

    return jax.tree.map_with_path(leaf, layers)


def collect(cfg: ModelConfig, shards: Shards, p: Any, sink: Any, busy: Array) -> Any:
    """Return one layer's weights, whose gradients flow to the sink, where each of them lies."""

    def leaf(spec: parameters.ParamSpec, w: Array, into: Array) -> Array:
        return _weight(shards, spec.axes[1:], w, into, busy)

    return jax.tree.map(leaf, parameters.specs(cfg).layers, p, sink)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _weight(shards: Shards, names: Names, w: Array, sink: Array, busy: Array) -> Array:
    return w


def _weight_forward(
    shards: Shards, names: Names, w: Array, sink: Array, busy: Array
) -> tuple[Array, Array]:
    return w, (busy, jnp.zeros((), sink.dtype))


def _weight_backward(shards: Shards, names: Names, saved: Any, grad: Array) -> tuple:
    busy, like = saved
    grad = jnp.where(busy, grad.astype(like.dtype), 0)
    return None, shards.constrain(grad, names), None


_weight.defvjp(_weight_forward, _weight_backward)


def at_the_end(x: Array, after: np.ndarray, shards: Shards) -> tuple[Array, np.ndarray]:
    """Return x [A, B, ...] as results lie at last, [S, rows, ...], and which row is which.

    `after` [S, q] is `End.after`. The second is the number m B + i of each row, [S, rows]; -1 where
    no micro-batch has ended up.
    """
    B, n = x.shape[1], _parts(x.shape[1], shards)
    rows = np.where(after[..., None] < 0, -1, after[..., None] * B + np.arange(B))  # [S, q, B]
    rows = rows.reshape(*after.shape, n, -1).swapaxes(1, 2).reshape(len(after), -1)
    return merge(on_belt(x, after, shards), shards), rows


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def shift(x: Array, by: int, shards: Shards) -> Array:
    """Return x [S, B, T, D] with each stage's entry at the stage `by` further on, in a ring.

    Differentiated by hand: `on_shards` would add up gradients over axes that do not split x.
    """

    def of_device(x: Array, axes: MeshAxes) -> Array:
        if not (stages := axes["stages"]):
            return jnp.roll(x, by, axis=0)
        size = jax.lax.axis_size(stages)
        return jax.lax.ppermute(x, stages, [(i, (i + by) % size) for i in range(size)])

    return shards.on_shards(of_device, (x,), (STREAM,), STREAM, exchange=("stages",))


def _shift_forward(x: Array, by: int, shards: Shards) -> tuple[Array, None]:
    return shift(x, by, shards), None


def _shift_backward(by: int, shards: Shards, saved: None, grad: Array) -> tuple[Array]:
    return (shift(grad, -by, shards),)


shift.defvjp(_shift_forward, _shift_backward)


@jax.custom_vjp
def pick(stages: Array, yes: Array, no: Array) -> Array:
    """Return yes [S, ...] at the stages of a mask [S], no [S, ...] at the others.

    Differentiated by hand: `jnp.where` would keep the mask, broadcast to the size of x, for the
    backward pass of each turn: 5 GB for a model of 1B on 4 stages.
    """
    return jnp.where(stages.reshape(-1, *(1,) * (yes.ndim - 1)), yes, no)


def _pick_forward(stages: Array, yes: Array, no: Array) -> tuple[Array, Array]:
    return pick(stages, yes, no), stages


def _pick_backward(stages: Array, grad: Array) -> tuple[None, Array, Array]:
    nothing = jnp.zeros_like(grad)
    return None, pick(stages, grad, nothing), pick(stages, nothing, grad)


pick.defvjp(_pick_forward, _pick_backward)


def on_belt(x: Array, places: np.ndarray, shards: Shards) -> Array:
    """Return x [A, B, ...] as it lies on the belt, [S, q, B, ...]; that of no place is any."""
    x = x[places.clip(0)]
    return shards.constrain(x, (*BELT[:3], *(("seq",) if x.ndim > 3 else ())))


def _parts(rows: int, shards: Shards) -> int:
    n = shards.split("batch")
    return n if rows % n == 0 else 1


def merge(x: Array, shards: Shards) -> Array:
    """Return [S, q, B, ...] as [S, q B, ...], each device's rows together."""
    S, q, B, *rest = x.shape
    n = _parts(B, shards)
    x = x.reshape(S, q, n, B // n, *rest).swapaxes(1, 2).reshape(S, q * B, *rest)
    return shards.constrain(x, ("stages", "batch", *(("seq", None)[: len(rest)])))


def at(x: Array, index: Array, axis: int = 1) -> Array:
    return jax.lax.dynamic_index_in_dim(x, index, axis, keepdims=False)
