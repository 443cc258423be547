"""A digest of the rows that a run has trained on, in whatever order and wherever they lay.

Each row [T] gives one number that moves with every token, target and place; the numbers of all rows
are summed modulo 2**32. Integer sums have no rounding, so hosts, mesh, micro-batches and batch size
do not matter: two runs that report the same digest at a position have consumed the same rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.data.packing import Batch

Array = jax.Array


def mix(word: Array) -> Array:
    """Return a bijection of uint32 words in which every bit depends on every bit.

    It is the finaliser of MurmurHash3 (Appleby 2011). Weights by an odd factor alone see every
    change of one word, but not every pair that trades places: x and -x differ by 2**31, short
    mantissas by large powers of two, and times an even difference of factors both are 0.
    """
    word = (word ^ (word >> 16)) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * np.uint32(0xC2B2AE35)
    return word ^ (word >> 16)


def rows_digest(batch: Batch) -> Array:
    """Return the sum over the rows of a batch [..., T], uint32 []; padding counts like a token."""
    place = 2 * jnp.arange(batch.tokens.shape[-1], dtype=jnp.uint32) + 1
    pair = mix(batch.tokens.astype(jnp.uint32)) + jnp.uint32(3) * batch.targets.astype(jnp.uint32)
    row = jnp.sum(mix(pair) * place, axis=-1, dtype=jnp.uint32)
    return jnp.sum(mix(row), dtype=jnp.uint32)
