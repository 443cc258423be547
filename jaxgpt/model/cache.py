"""Keys and values of tokens already seen, so that generation computes each token once.

Slot s of a row holds the token at position s of that row, so rows of unequal length need no
padding on the left: a right-padded prompt fills later slots with values that no query may see
(a query at position p sees slots 0..p) and that the next tokens overwrite. Each layer has arrays
of its own, [B, K, S, H]: a step then reads them where they are, without slicing or transposing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from jaxgpt.config import ModelConfig

Array = jax.Array


@struct.dataclass
class KVCache:
    """The cache of a batch of rows. `length` is where the next token goes if no position is given.

    After a prompt that is padded on the right, set it: `cache.replace(length=prompt_lengths)`.
    """

    k: tuple[Array, ...]  # L of [B, K, S, H]
    v: tuple[Array, ...]  # L of [B, K, S, H]
    length: Array  # [B] int32


def init_cache(
    cfg: ModelConfig, batch: int, length: int, dtype: DTypeLike = jnp.bfloat16
) -> KVCache:
    """Return an empty cache of `length` slots per row; its dtype may differ from the compute dtype.

    Positions at or above `length` are dropped by `write`, so the caller checks them, as it checks
    `length` against learned positions (`cfg.seq_len`).
    """
    shape = (batch, cfg.kv_heads, length, cfg.head_width)
    k, v = (tuple(jnp.zeros(shape, dtype) for _ in range(cfg.num_layers)) for _ in "kv")
    return KVCache(k, v, jnp.zeros(batch, jnp.int32))


def write(cache: KVCache, layer: int, positions: Array, k: Array, v: Array) -> KVCache:
    """Store k, v [B, T, K, H] of one layer at `positions` [B, T], in the cache's dtype."""
    rows = jnp.arange(k.shape[0])[:, None]

    def put(old: Array, new: Array) -> Array:
        at = old.at[rows, :, positions]  # [B, T, K, H]: what is indexed comes first
        return at.set(new.astype(old.dtype), mode="drop")

    # Behind a barrier, or of one row XLA:CPU writes twice, into the result and into what attention
    # reads, and copies each array three times for it: 57 MB in a step of GPT-2 124M, float32.
    # JAX 0.10.2 copies them all the same.
    new = jax.lax.optimization_barrier((put(cache.k[layer], k), put(cache.v[layer], v)))
    old = (cache.k, cache.v)
    k, v = ((*x[:layer], y, *x[layer + 1 :]) for x, y in zip(old, new, strict=True))
    return cache.replace(k=k, v=v)


def read(cache: KVCache, layer: int, dtype: DTypeLike) -> tuple[Array, Array]:
    """Return all slots of one layer, k and v [B, K, S, H], in `dtype`."""
    return cache.k[layer].astype(dtype), cache.v[layer].astype(dtype)
