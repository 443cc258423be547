"""Keys and values of tokens already seen, so that generation computes each token once.

Slot s of a row holds the token at position s of that row, so rows of unequal length need no
padding on the left: a right-padded prompt fills later slots with values that no query may see
(a query at position p sees slots 0..p) and that the next tokens overwrite. Shapes: [L, B, S, K, H].
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

    k: Array  # [L, B, S, K, H]
    v: Array  # [L, B, S, K, H]
    length: Array  # [B] int32


def init_cache(
    cfg: ModelConfig, batch: int, length: int, dtype: DTypeLike = jnp.bfloat16
) -> KVCache:
    """Return an empty cache of `length` slots per row; its dtype may differ from the compute dtype.

    Positions at or above `length` are dropped by `write`, so the caller checks them, as it checks
    `length` against learned positions (`cfg.seq_len`).
    """
    shape = (cfg.num_layers, batch, length, cfg.kv_heads, cfg.head_width)
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros(batch, jnp.int32))


def write(cache: KVCache, layer: int | Array, positions: Array, k: Array, v: Array) -> KVCache:
    """Store k, v [B, T, K, H] of one layer at `positions` [B, T], in the cache's dtype."""
    rows = jnp.arange(k.shape[0])[:, None]
    return cache.replace(
        k=cache.k.at[layer, rows, positions].set(k.astype(cache.k.dtype), mode="drop"),
        v=cache.v.at[layer, rows, positions].set(v.astype(cache.v.dtype), mode="drop"),
    )


def read(cache: KVCache, layer: int | Array, dtype: DTypeLike) -> tuple[Array, Array]:
    """Return all slots of one layer, k and v [B, S, K, H], in `dtype`."""
    return cache.k[layer].astype(dtype), cache.v[layer].astype(dtype)
