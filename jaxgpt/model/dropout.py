"""Which attention weights dropout keeps: a pure function of row key, query, key and head.

Each weight has a hash of its own counters, Threefry-2x32 (Salmon et al. 2011). So a device draws
for the rows, heads, queries and keys that it has, wherever they begin, what one device would. It is
plain arithmetic that joins what uses it: for 4 rows of 6 heads, 128 queries and 512 keys 3 ms on 2
cores, where `jax.random` with a key per query took 100.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA  # of Threefry's key schedule
HEAD_SHIFT = 24  # positions are below 2^24 (validation.MAX_SEQ_LEN): 8 bits of each are left


class Draws(NamedTuple):
    """What a device draws for: its rows and heads."""

    seeds: Array  # [B, 2] uint32, from `seeds`
    first_head: Array | int  # the number of its first head among all


def seeds(keys: Array) -> Array:
    """Return the seeds [B, 2] of rows, from their typed keys [B]."""
    return jax.vmap(lambda key: jax.random.bits(key, (2,), jnp.uint32))(keys)


def keep(rate: float, draws: Draws, num_heads: int, queries: Array, keys: Array) -> Array:
    """Return which weights [..., B, N, t, s] stay, all but a share `rate`, of N heads.

    `queries` [..., t] and `keys` [..., s] are positions in the row.
    """
    head = (draws.first_head + jnp.arange(num_heads)).astype(jnp.uint32)[:, None, None]
    counters = (
        queries.astype(jnp.uint32)[..., None, None, :, None] + (head % 256 << HEAD_SHIFT),
        keys.astype(jnp.uint32)[..., None, None, None, :] + (head // 256 << HEAD_SHIFT),
    )
    low, high = (draws.seeds[:, i, None, None, None] for i in (0, 1))
    limit = np.uint32(min(round((1 - rate) * 2**32), 2**32 - 1))
    return threefry((low, high), counters)[0] < limit  # the other word would cost as much


def threefry(key: tuple[Array, Array], counters: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return Threefry-2x32 with 20 rounds of two words, uint32; shapes broadcast."""
    keys = (*key, key[0] ^ key[1] ^ np.uint32(PARITY))
    x, y = counters[0] + keys[0], counters[1] + keys[1]
    for turn in range(5):
        for bits in ROTATIONS[turn % 2]:
            x = x + y
            y = (y << np.uint32(bits) | y >> np.uint32(32 - bits)) ^ x
        x = x + keys[(turn + 1) % 3]
        y = y + keys[(turn + 2) % 3] + np.uint32(turn + 1)
    return x, y
