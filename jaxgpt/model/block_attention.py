"""Attention in plain JAX, over blocks of queries: what every platform and every model can compute.

Queries are q [B, T, N, H] against k, v [B, S, K, H], the last query beside the last key. The loop
over blocks is unrolled and all slices are static, so that nothing is computed above the diagonal or
left of the window. Masks select with a finite number and every token sees itself, so no row is
empty and no gradient is NaN. Softmax is float32; products are in q's dtype.
"""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp

from jaxgpt.model.dropout import Draws, keep
from jaxgpt.model.shards import here

Array = jax.Array

BLOCK = 128  # query rows; on CPU 1.5 times faster than the whole matrix at T = 512, more beyond
TALL_BLOCK = 512  # of accelerators, whose matrix units want taller products
MAX_BLOCKS = 32  # longer rows get taller blocks, so that compile time stays bounded
MAX_CPU_BLOCKS = 16  # there the sums of their gradients are written out, see `_cut`
MASKED = -1e30  # finite: exp(MASKED - max) is exactly 0, and gradients stay finite


def block_attention(
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array | None = None,
    key_segment_ids: Array | None = None,
    *,
    window: int = 0,
    scale: float = 0.0,
    softcap: float = 0.0,
    dropout: float = 0.0,
    draws: Draws | None = None,
    position: Array | int = 0,
    rows: int = BLOCK,
    recompute: bool = False,
) -> Array:
    """Return attention [B, T, N, H], from blocks of at least `rows` queries.

    `segment_ids` [B, T] are those of the queries, `key_segment_ids` [B, S] of the keys (None: the
    same). Dropout draws by `draws`, and by `position`, that of the first query in its row.
    `recompute`: the backward pass keeps no weights, and holds those of one block at a time.
    """
    T, first = q.shape[1], k.shape[1] - q.shape[1]
    if key_segment_ids is None:
        key_segment_ids = segment_ids
    weigh = partial(weighted, scale=scale, softcap=softcap, dropout=dropout, draws=draws)
    cpu = here().platform == "cpu"
    rows = max(rows, -(-T // (MAX_CPU_BLOCKS if cpu else MAX_BLOCKS)))
    starts = range(0, T, rows)
    spans = []  # of the keys that the queries of each block see, first and one past the last
    for start in starts:
        left = max(0, first + start - window + 1) if window else 0
        spans.append((left, first + min(start + rows, T)))
    q, k, v = by_head(q, k, v)
    parts = jnp.split(q, tuple(starts[1:]), axis=-2), _cut(k, tuple(spans)), _cut(v, tuple(spans))
    outputs = []
    for start, (left, right), query, key, value in zip(starts, spans, *parts, strict=True):

        def one(
            q: Array,
            k: Array,
            v: Array,
            ids: Array | None,
            key_ids: Array | None,
            start: int = start,
            left: int = left,
        ) -> Array:
            begin = first + start
            query = jnp.arange(begin, begin + q.shape[-2])[:, None]
            key = jnp.arange(left, left + k.shape[-2])[None]
            visible = key <= query  # [t, s]
            if window:
                visible &= key > query - window
            if ids is not None:
                visible &= ids[:, :, None] == key_ids[:, None]
                visible = visible[:, None, None]  # [B, 1, 1, t, s]
            places = position + start, position + left - first
            return weigh(q, k, v, visible, places=places)

        ids, key_ids = None, None
        if segment_ids is not None:
            ids, key_ids = segment_ids[:, start : right - first], key_segment_ids[:, left:right]
        attend = jax.checkpoint(one) if recompute else one
        outputs.append(attend(query, key, value, ids, key_ids))
    return by_token(_joined(outputs, axis=3))


def _joined(parts: list[Array], axis: int) -> Array:
    """Return the concatenation of parts; on CPU kept apart from what comes before and after.

    Joined with a transpose in one loop, XLA:CPU asks for each element which part it is of.
    """
    if len(parts) == 1 or here().platform != "cpu":
        return jnp.concatenate(parts, axis)
    return jax.lax.optimization_barrier(jnp.concatenate(jax.lax.optimization_barrier(parts), axis))


Spans = tuple[tuple[int, int], ...]


def _cut(x: Array, spans: Spans) -> list[Array]:
    """Return the overlapping parts x[:, :, first:stop] of keys or values [B, K, S, H]."""
    if here().platform == "cpu":
        return _parts(x, spans, x.shape[2])
    return [x[:, :, first:stop] for first, stop in spans]


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _parts(x: Array, spans: Spans, size: int) -> list[Array]:
    """Return those of `_cut` on CPU; `size` is S."""
    return [x[:, :, first:stop] for first, stop in spans]


def _parts_forward(x: Array, spans: Spans, size: int) -> tuple[list[Array], None]:
    return _parts(x, spans, size), None


def _parts_backward(spans: Spans, size: int, _: None, grads: list[Array]) -> tuple[Array]:
    """Sum the parts where they overlap, in float32.

    Differentiated by JAX, each part would be padded to the whole length, and their sums take XLA
    three times as long. Behind a barrier, or oneDNN is asked to add a part to the product that
    another one is, and leaves it out (JAX 0.12.0.1 in float32: off by 100 %).
    """
    grads = jax.lax.optimization_barrier(grads)
    like = grads[0]
    bounds = sorted({0, size}.union(*spans))
    pieces = []
    for left, right in itertools.pairwise(bounds):
        covering = [
            grad[:, :, left - first : right - first]
            for (first, stop), grad in zip(spans, grads, strict=True)
            if first <= left and right <= stop
        ]
        if not covering:  # keys of earlier devices that no query of this one sees
            covering = [jnp.zeros_like(like, shape=(*like.shape[:2], right - left, like.shape[3]))]
        total = covering[0]
        for part in covering[1:]:
            total = total.astype(jnp.float32) + part.astype(jnp.float32)
        pieces.append(total.astype(like.dtype))
    return (_joined(pieces, axis=2),)


_parts.defvjp(_parts_forward, _parts_backward)


def weighted(
    q: Array,
    k: Array,
    v: Array,
    visible: Array,
    *,
    scale: float = 0.0,
    softcap: float = 0.0,
    dropout: float = 0.0,
    draws: Draws | None = None,
    places: tuple[Array | int, Array | int] = (0, 0),
) -> Array:
    """Return the weighted values [B, K, G, t, H] of q [B, K, G, t, H], k and v [B, K, s, H].

    `places` are the positions of the first query and of the first key in their row.
    """
    scale = scale or q.shape[-1] ** -0.5
    if not softcap and not dropout:
        return _plain(scale, q, k, v, visible)
    weights, total = _weights(scale, softcap, q, k, visible)
    if dropout:
        t, s = weights.shape[-2:]
        positions = places[0] + jnp.arange(t), places[1] + jnp.arange(s)
        heads = weights.shape[1] * weights.shape[2]
        kept = keep(dropout, draws, heads, *positions).reshape(weights.shape)
        weights = jnp.where(kept, weights / (1 - dropout), 0.0)
    return _values(weights.astype(v.dtype), total, v)


def _weights(
    scale: float, softcap: float, q: Array, k: Array, visible: Array
) -> tuple[Array, Array]:
    """Return exp(scores - their maximum) [B, K, G, t, s] and its sums [B, K, G, t, 1], float32."""
    q = q * jnp.asarray(scale, q.dtype)
    scores = _by_rows("bkrh,bksh->bkrs", q, k).astype(jnp.float32)
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(visible, scores, MASKED)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    return weights, weights.sum(-1, keepdims=True)


def _values(weights: Array, total: Array, v: Array) -> Array:
    """Return the sum of v [B, K, s, H] by weights [B, K, G, t, s], which sum to `total`."""
    out = _by_rows("bkrs,bksh->bkrh", weights, v)
    # Dividing after the product touches [t, H] instead of [t, s] numbers.
    return (out.astype(jnp.float32) / total).astype(v.dtype)


def _by_rows(subscripts: str, x: Array, y: Array) -> Array:
    """Return `einsum` of x [B, K, G, t, ...], the queries of a group below each other, and y.

    Products of plain matrices: with G and t apart, XLA:CPU transposes for dK and dV, and 4 of 16
    products of two layers miss oneDNN.
    """
    B, K, G, t, last = x.shape
    return jnp.einsum(subscripts, x.reshape(B, K, G * t, last), y).reshape(B, K, G, t, -1)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _plain(scale: float, q: Array, k: Array, v: Array, visible: Array) -> Array:
    """Return `weighted` without cap and dropout.

    Differentiated by hand: the backward pass needs neither the mask nor float32 weights, which
    would be a sixth of all memory of a small GPT in bfloat16.
    """
    weights, total = _weights(scale, 0.0, q, k, visible)
    return _values(weights.astype(v.dtype), total, v)


def _plain_forward(
    scale: float, q: Array, k: Array, v: Array, visible: Array
) -> tuple[Array, tuple[Array, ...]]:
    weights, total = _weights(scale, 0.0, q, k, visible)
    # Behind a barrier, or XLA would keep them in float32 as well, and spare itself the rounding.
    weights = jax.lax.optimization_barrier(weights.astype(v.dtype))
    out = _values(weights, total, v)
    return out, (q, k, v, weights, total, out)


def _plain_backward(
    scale: float, saved: tuple[Array, ...], grad: Array
) -> tuple[Array | None, ...]:
    q, k, v, weights, total, out = saved
    wide = grad.astype(jnp.float32)
    share = (wide / total).astype(v.dtype)  # weights are not divided: the gradient is
    of_total = (wide * out.astype(jnp.float32)).sum(-1, keepdims=True) / total
    dv = _by_rows_transposed(weights, share)
    of_weights = _by_rows("bkrh,bksh->bkrs", share, v).astype(jnp.float32)
    of_scores = (weights.astype(jnp.float32) * (of_weights - of_total)).astype(q.dtype)
    scale = jnp.asarray(scale, q.dtype)
    dq = _by_rows("bkrs,bksh->bkrh", of_scores, k) * scale
    return dq, _by_rows_transposed(of_scores, q * scale), dv, None


def _by_rows_transposed(x: Array, y: Array) -> Array:
    """Return x^T y [B, K, s, H] of x [B, K, G, t, s] and y [B, K, G, t, H], summed over G and t."""
    B, K, G, t, _ = x.shape
    x, y = x.reshape(B, K, G * t, -1), y.reshape(B, K, G * t, -1)
    return jnp.einsum("bkrs,bkrh->bksh", x, y)


_plain.defvjp(_plain_forward, _plain_backward)


def by_head(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """Return q [B, K, G, T, H], k and v [B, K, S, H]: heads before tokens, queries grouped."""
    return grouped(q, k.shape[2]), k.swapaxes(1, 2), v.swapaxes(1, 2)


def grouped(q: Array, num_kv_heads: int) -> Array:
    """Return [B, K, G, T, H] of queries [B, T, N, H]: those of a key's head together."""
    B, T, N, H = q.shape
    K = num_kv_heads
    return q.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)


def by_token(out: Array) -> Array:
    """Return [B, T, N, H] of [B, K, G, T, H]."""
    B, K, G, T, H = out.shape
    return out.transpose(0, 3, 1, 2, 4).reshape(B, T, K * G, H)  # [B, T, N, H]
