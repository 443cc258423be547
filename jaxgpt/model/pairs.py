"""Attention of some queries to some keys, as a part of a softmax over more keys than are here.

Arrays have a leading axis of P pairs that are computed at once: q [P, B, K, G, t, H], already
scaled, k and v [P, B, K, s, H], segment ids [P, B, t] and [P, B, s]. Queries are taken in blocks,
so that the scores of one block are held at a time; products are summed in float32. Gradients are
those of flash attention (Dao et al. 2022, algorithm 4): weights come from the log-sum-exp again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.model.block_attention import MASKED
from jaxgpt.model.dropout import Draws, keep

Array = jax.Array
SCORES = 1 << 20  # of one head that are held at once: 4 MiB in float32
STRIPS = 8  # of a triangle: 1/16 of the work is for pairs of tokens that are masked
MIN_STRIP = 128  # rows: lower strips are slower, whatever they leave out


class Limits(NamedTuple):
    """What holds for all pairs: `window` in tokens, `softcap` and `dropout`; 0: none."""

    window: int
    softcap: float
    dropout: float = 0.0


class Drawn(NamedTuple):
    """What dropout draws for: positions in the row of the first query and key of each pair, [P]."""

    draws: Draws
    query: Array
    key: Array


class State(NamedTuple):
    """A softmax in the making, float32: the weighted values are total / weight."""

    total: Array  # [..., t, H], sum of exp(score - top) v
    top: Array  # [..., t, 1], the largest score, or MASKED
    weight: Array  # [..., t, 1], sum of exp(score - top)


def merge(a: State, b: State) -> State:
    """Return the softmax over the keys of both."""
    top = jnp.maximum(a.top, b.top)
    left, right = jnp.exp(a.top - top), jnp.exp(b.top - top)
    return State(left * a.total + right * b.total, top, left * a.weight + right * b.weight)


def pair(
    limits: Limits,
    q: Array,
    k: Array,
    v: Array,
    ids: Array | None,
    key_ids: Array | None,
    offset: Array | int | None,
    drawn: Drawn | None = None,
) -> State:
    """Return the softmax of queries over keys, [P, B, K, G, t, .].

    `offset` (of each pair, or one for all) is the position of the first query less that of the
    first key; None: all keys lie before all queries, and there is no window. `drawn` is for
    dropout alone, which takes weights away from the values, not from the softmax's sum.
    """
    blocks = _blocks(q.shape[-2], k.shape[-2])

    def one(block: tuple) -> State:
        q, ids, start = block
        scores, visible = _scores(limits, q, k, ids, key_ids, offset, start)[:2]
        top = scores.max(-1, keepdims=True)
        weights = jnp.exp(scores - top)
        if visible is not None:
            weights = jnp.where(visible, weights, 0.0)  # a query may see none of these keys
        kept = _dropout(limits, weights.shape, drawn, start)(weights)
        total = _product("pbkgts,pbksh->pbkgth", kept.astype(v.dtype), v)
        return State(total, top, weights.sum(-1, keepdims=True))

    return jax.tree.map(_joined, jax.lax.map(one, _split(blocks, q, ids)))


def pair_gradients(
    limits: Limits,
    q: Array,
    k: Array,
    v: Array,
    ids: Array | None,
    key_ids: Array | None,
    offset: Array | int | None,
    grad: Array,
    log_sum: Array,
    delta: Array,
    drawn: Drawn | None = None,
) -> tuple[Array, Array, Array]:
    """Return what the keys of `pair` add to the gradients of q, k and v, in float32.

    `grad` [P, B, K, G, t, H] is that of the attention output, `log_sum` [P, B, K, G, t, 1] the
    logarithm of the whole softmax's sum, `delta` the sum over H of output times `grad`.
    """
    blocks = _blocks(q.shape[-2], k.shape[-2])

    def one(sums: tuple[Array, Array], block: tuple) -> tuple[tuple[Array, Array], Array]:
        q, ids, start, grad, log_sum, delta = block
        scores, visible, slope = _scores(limits, q, k, ids, key_ids, offset, start)
        weights = jnp.exp(scores - log_sum)
        if visible is not None:
            weights = jnp.where(visible, weights, 0.0)
        dropped = _dropout(limits, weights.shape, drawn, start)
        dv = _product("pbkgts,pbkgth->pbksh", dropped(weights).astype(v.dtype), grad)
        of_weights = dropped(_product("pbkgth,pbksh->pbkgts", grad, v))
        of_scores = weights * (of_weights - delta)
        if slope is not None:
            of_scores = of_scores * slope
        of_scores = of_scores.astype(q.dtype)
        dq = _product("pbkgts,pbksh->pbkgth", of_scores, k)
        dk = _product("pbkgts,pbkgth->pbksh", of_scores, q)
        return (sums[0] + dk, sums[1] + dv), dq

    zeros = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    more = [_cut(blocks, x, -2) for x in (grad.astype(q.dtype), log_sum, delta)]
    (dk, dv), dq = jax.lax.scan(one, zeros, (*_split(blocks, q, ids), *more))
    return _joined(dq), dk, dv


def triangle(
    limits: Limits, q: Array, k: Array, v: Array, ids: Array | None, drawn: Drawn | None = None
) -> State:
    """Return the softmax of queries over the keys at their own positions and before, t = s."""
    found = []
    for rows, keys in _strips(limits, q.shape[-2]):
        parts = _strip(rows, keys, q, k, v, ids)
        offset = rows.start - keys.start
        found.append(pair(limits, *parts, offset, _moved(drawn, rows.start, keys.start)))
    return jax.tree.map(lambda *strips: jnp.concatenate(strips, -2), *found)


def triangle_gradients(
    limits: Limits,
    q: Array,
    k: Array,
    v: Array,
    ids: Array | None,
    grad: Array,
    log_sum: Array,
    delta: Array,
    drawn: Drawn | None = None,
) -> tuple[Array, Array, Array]:
    """Return the gradients of `triangle`; arguments as those of `pair_gradients`."""
    dqs, dk, dv = [], jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for rows, keys in _strips(limits, q.shape[-2]):
        parts = _strip(rows, keys, q, k, v, ids)
        of_rows = [x[..., rows, :] for x in (grad, log_sum, delta)]
        dq, more_k, more_v = pair_gradients(
            limits, *parts, rows.start - keys.start, *of_rows,
            _moved(drawn, rows.start, keys.start),
        )  # fmt: skip
        dqs.append(dq)
        dk, dv = dk.at[..., keys, :].add(more_k), dv.at[..., keys, :].add(more_v)
    return jnp.concatenate(dqs, -2), dk, dv


def _scores(
    limits: Limits,
    q: Array,
    k: Array,
    ids: Array | None,
    key_ids: Array | None,
    offset: Array | int | None,
    start: Array,
) -> tuple[Array, Array | None, Array | None]:
    """Return scores [P, B, K, G, t, s], which are seen, and their slope under the softcap."""
    scores, slope, visible = _product("pbkgth,pbksh->pbkgts", q, k), None, None
    if limits.softcap:
        capped = jnp.tanh(scores / limits.softcap)
        scores, slope = limits.softcap * capped, 1 - jnp.square(capped)
    if offset is not None:
        query = start + jnp.arange(q.shape[-2]) + jnp.reshape(offset, (-1, 1))  # [P or 1, t]
        distance = query[..., None] - jnp.arange(k.shape[-2])
        visible = distance >= 0
        if limits.window:
            visible &= distance < limits.window
        visible = visible[:, None, None, None]
    if ids is not None:
        same = (ids[..., :, None] == key_ids[..., None, :])[:, :, None, None]
        visible = same if visible is None else visible & same
    if visible is not None:
        scores = jnp.where(visible, scores, MASKED)
    return scores, visible, slope


def _dropout(
    limits: Limits, shape: tuple[int, ...], drawn: Drawn | None, start: Array
) -> Callable[[Array], Array]:
    """Return dropout of weights [P, B, K, G, t, s] of the queries from `start` on."""
    if drawn is None:
        return lambda weights: weights
    queries = (drawn.query + start)[:, None] + jnp.arange(shape[-2])
    keys = drawn.key[:, None] + jnp.arange(shape[-1])
    kept = keep(limits.dropout, drawn.draws, shape[2] * shape[3], queries, keys).reshape(shape)
    return lambda weights: jnp.where(kept, weights / (1 - limits.dropout), 0.0)


def _moved(drawn: Drawn | None, rows: int, keys: int) -> Drawn | None:
    """Return the same of a part, which begins so many queries and keys later."""
    return drawn and drawn._replace(query=drawn.query + rows, key=drawn.key + keys)


def _product(how: str, a: Array, b: Array) -> Array:
    return jnp.einsum(how, a, b, preferred_element_type=jnp.float32)


def _strips(limits: Limits, length: int) -> list[tuple[slice, slice]]:
    """Return rows of queries and the keys they may see; what they may not see costs nothing."""
    rows = max(-(-length // STRIPS), MIN_STRIP)
    strips = []
    for start in range(0, length, rows):
        stop = min(start + rows, length)
        left = max(0, start - limits.window + 1) if limits.window else 0
        strips.append((slice(start, stop), slice(left, stop)))
    return strips


def _strip(
    rows: slice, keys: slice, q: Array, k: Array, v: Array, ids: Array | None
) -> tuple[Array, Array, Array, Array | None, Array | None]:
    of_ids = (None, None) if ids is None else (ids[..., rows], ids[..., keys])
    return q[..., rows, :], k[..., keys, :], v[..., keys, :], *of_ids


def _blocks(queries: int, keys: int) -> int:
    """Return into how many blocks queries are cut: the fewest that divide them and fit."""
    fewest = min(queries, -(-queries * keys // SCORES))
    return next(n for n in range(fewest, queries + 1) if queries % n == 0)


def _split(blocks: int, q: Array, ids: Array | None) -> tuple[Array, Array | None, Array]:
    """Return q, ids and the first query of each block, with the blocks in front."""
    starts = jnp.arange(blocks) * (q.shape[-2] // blocks)
    return _cut(blocks, q, -2), None if ids is None else _cut(blocks, ids, -1), starts


def _cut(blocks: int, x: Array, axis: int) -> Array:
    axis += x.ndim
    shape = (*x.shape[:axis], blocks, x.shape[axis] // blocks, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def _joined(x: Array) -> Array:
    """Return [..., blocks t, H] of [blocks, ..., t, H]."""
    x = jnp.moveaxis(x, 0, -3)
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])
