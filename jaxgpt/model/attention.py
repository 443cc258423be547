"""Causal attention over grouped heads: q [B, T, N, H] against k, v [B, S, K, H], G = N / K.

Three ways to the same values, chosen by platform when the program is traced: `blocks` (CPU),
`dot_product` and `cudnn` (accelerators, `jax.nn.dot_product_attention`), and `reference`, the whole
score matrix, for what those cannot do. Masks select with a finite number and every token sees
itself, so no row is empty and no gradient is NaN. Softmax is float32; products are in q's dtype.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from jaxgpt.model.shards import Shards, here

Array = jax.Array
Impl = Literal["blocks", "dot_product", "cudnn", "reference"]

BLOCK = 128  # query rows; on CPU 1.5 times faster than the whole matrix at T = 512, more beyond
MAX_BLOCKS = 32  # longer rows get taller blocks, so that compile time stays bounded
MASKED = -1e30  # finite: exp(MASKED - max) is exactly 0, and gradients stay finite


def attend(
    q: Array,
    k: Array,
    v: Array,
    *,
    segment_ids: Array | None = None,
    window: int = 0,
    scale: float = 0.0,
    softcap: float = 0.0,
    dropout: float = 0.0,
    dropout_keys: Array | None = None,
    impl: Impl | None = None,
    shards: Shards | None = None,
) -> Array:
    """Return softmax(scale q kᵀ + mask) v, [B, T, N, H]: causal self-attention, S = T.

    `scale` 0 is 1 / √H.

    A token sees itself and those before it in its row; with `segment_ids` [B, T] only those of its
    own segment, with `window` w > 0 only the last w, itself included. `softcap` c > 0 replaces a
    score s by c tanh(s / c). Dropout needs one key per row, [B]; the mask of a query depends on its
    row's key and its index alone, so it is the same for every `impl`. Raises ValueError for an
    `impl` that cannot do what is asked.
    """
    if dropout and dropout_keys is None:
        raise ValueError(f"attention dropout = {dropout} needs dropout_keys, one per row")
    plain = not (softcap or dropout)
    unmasked = segment_ids is None and not window
    platform = (shards or here()).platform
    impl = impl or default_impl(q, platform, plain=plain, unmasked=unmasked)
    if impl in ("dot_product", "cudnn"):
        if not plain:
            raise ValueError(f"attention impl {impl!r} has neither softcap nor dropout")
        return _dot_product(q, k, v, segment_ids, window, scale, impl)
    if impl not in ("blocks", "reference"):
        raise ValueError(f"attention impl {impl!r}: blocks, dot_product, cudnn or reference")
    weigh = partial(
        _weigh, scale=scale, softcap=softcap, dropout=dropout, dropout_keys=dropout_keys
    )
    T = q.shape[1]
    rows = max(BLOCK, -(-T // MAX_BLOCKS)) if impl == "blocks" else T
    q, k, v = _by_head(q, k, v)
    outputs = []
    # The loop is unrolled and all slices are static: no work is done above the diagonal or left of
    # the window, and a block's scores stay in cache.
    for start in range(0, T, rows):
        stop = min(start + rows, T)
        left = max(0, start - window + 1) if window else 0
        query, key = jnp.arange(start, stop)[:, None], jnp.arange(left, stop)[None]
        visible = key <= query  # [t, s]
        if window:
            visible &= key > query - window
        if segment_ids is not None:
            same = segment_ids[:, start:stop, None] == segment_ids[:, None, left:stop]
            visible = (visible & same)[:, None, None]  # [B, 1, 1, t, s]
        rows_q, rows_k, rows_v = q[..., start:stop, :], k[:, :, left:stop], v[:, :, left:stop]
        outputs.append(weigh(rows_q, rows_k, rows_v, visible, first_query=start, first_key=left))
    out = outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=3)
    return _by_token(out)


def attend_cached(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    *,
    window: int = 0,
    scale: float = 0.0,
    softcap: float = 0.0,
) -> Array:
    """Return attention over a cache whose slot s holds position s, for queries at `positions`.

    q [B, T, N, H], k and v [B, S, K, H], positions [B, T] int32. The caller has already written
    the queries' own keys; slots above a query's position are not seen, whatever they hold.
    """
    slots, query = jnp.arange(k.shape[1]), positions[:, :, None]
    visible = slots <= query
    if window:
        visible &= slots > query - window
    visible = visible[:, None, None]  # [B, 1, 1, T, S]
    return _by_token(_weigh(*_by_head(q, k, v), visible, scale=scale, softcap=softcap))


def default_impl(q: Array, platform: str, *, plain: bool, unmasked: bool) -> Impl:
    """Return the fastest `impl`; `plain`: no softcap or dropout, `unmasked`: causal only."""
    if platform == "cpu":
        return "blocks"  # 2-3 times faster than dot_product there
    if not plain:
        return "reference"
    half, width = q.dtype in (jnp.bfloat16, jnp.float16), q.shape[-1]
    fits = half and width % 8 == 0 and width <= 128  # cuDNN's limits, all generations
    return "cudnn" if platform == "gpu" and unmasked and fits else "dot_product"


def _dot_product(
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array | None,
    window: int,
    scale: float,
    impl: str,
) -> Array:
    mask = None
    if segment_ids is not None:
        mask = (segment_ids[:, :, None] == segment_ids[:, None])[:, None]  # [B, 1, T, S]
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask, is_causal=True, scale=scale or None,
        local_window_size=(window - 1, 0) if window else None,
        implementation="cudnn" if impl == "cudnn" else "xla",
    )  # fmt: skip


def _weigh(
    q: Array,
    k: Array,
    v: Array,
    visible: Array,
    *,
    scale: float = 0.0,
    softcap: float = 0.0,
    dropout: float = 0.0,
    dropout_keys: Array | None = None,
    first_query: int = 0,
    first_key: int = 0,
) -> Array:
    """Return the weighted values [B, K, G, t, H] of q [B, K, G, t, H], k and v [B, K, s, H]."""
    B, K, G, t, H = q.shape
    # Products of plain matrices, the queries of a group below each other: with G and t apart,
    # XLA:CPU transposes for dK and dV, and 4 of 16 products of two layers miss oneDNN.
    q = (q * jnp.asarray(scale or H**-0.5, q.dtype)).reshape(B, K, G * t, H)
    scores = jnp.einsum("bkrh,bksh->bkrs", q, k).astype(jnp.float32)
    scores = scores.reshape(B, K, G, t, -1)
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(visible, scores, MASKED)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    total = weights.sum(-1, keepdims=True)
    if dropout:
        keep = _keep(dropout_keys, 1 - dropout, weights.shape, first_query, first_key)
        weights = jnp.where(keep, weights / (1 - dropout), 0.0)
    # Dividing after the product touches [t, H] instead of [t, s] numbers.
    weights = weights.astype(v.dtype).reshape(B, K, G * t, -1)
    out = jnp.einsum("bkrs,bksh->bkrh", weights, v).reshape(B, K, G, t, H)
    return (out.astype(jnp.float32) / total).astype(v.dtype)


def _keep(
    keys: Array, share: float, shape: tuple[int, ...], first_query: int, first_key: int
) -> Array:
    """Draw which weights [B, K, G, t, s] stay, a pure function of row key, query, key and head.

    Each query draws [s, N] from key 0 on: counter-based bits of a shorter draw are the beginning
    of a longer one, so a block that sees fewer keys draws the same bits.
    """
    B, K, G, t, s = shape

    def of_query(key: Array, index: Array) -> Array:
        key = jax.random.fold_in(key, index)
        return jax.random.bernoulli(key, share, (first_key + s, K * G))[first_key:]

    queries = first_query + jnp.arange(t)
    keep = jax.vmap(lambda key: jax.vmap(partial(of_query, key))(queries))(keys)  # [B, t, s, N]
    return keep.transpose(0, 3, 1, 2).reshape(B, K, G, t, s)


def _by_head(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """Return q [B, K, G, T, H], k and v [B, K, S, H]: heads before tokens, queries grouped."""
    B, T, N, H = q.shape
    K = k.shape[2]
    q = q.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)  # [B, K, G, T, H]
    return q, k.swapaxes(1, 2), v.swapaxes(1, 2)


def _by_token(out: Array) -> Array:
    B, K, G, T, H = out.shape
    return out.transpose(0, 3, 1, 2, 4).reshape(B, T, K * G, H)  # [B, T, N, H]
