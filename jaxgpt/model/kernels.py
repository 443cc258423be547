"""Attention by the kernels of others: splash (Pallas, TPU), cuDNN (NVIDIA), `jax.nn` (XLA).

Each sees the part of one device: q [B, T, N, H] against k, v [B, S, K, H]. What a kernel cannot do
is for `attention.choose` to know. Splash attention never holds the scores in memory; neither does
cuDNN, which takes documents as a bias [B, 1, T, T], one for all heads.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
LANES = 128  # of a TPU's vector unit: blocks are multiples
# The largest blocks that compile in the 16 MiB that XLA gives a kernel unless told otherwise, with
# the bytes of a head up to which they do (v5p; 2,048 tokens never do).
SPLASH_BLOCKS = ((1024, 512), (512, 1024), (256, 2048), (LANES, 1 << 30))
FUSED_BLOCKS = 4  # the fused backward kernel holds dQ once per block of keys: up to so many


def splash(
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array | None = None,
    key_segment_ids: Array | None = None,
    *,
    window: int = 0,
    scale: float = 0.0,
    softcap: float = 0.0,
    interpret: bool = False,
) -> Array:
    """Return attention [B, T, N, H] by splash attention; the last query lies beside the last key.

    Rows are padded to whole blocks, keys in front and behind: no query sees those. `interpret`
    runs the kernel's program without a TPU. Its output and log-sum-exp are named "attn".
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    (_, T, N, H), S = q.shape, k.shape[1]
    if key_segment_ids is None:
        key_segment_ids = segment_ids
    q = q * jnp.asarray(scale or H**-0.5, q.dtype)
    # Behind the last query as many tokens as behind the last key, so that they stay side by side.
    behind = -T % LANES
    front = -(S + behind) % LANES
    if front and segment_ids is None:
        segment_ids, key_segment_ids = jnp.zeros(q.shape[:2], int), jnp.zeros(k.shape[:2], int)

    def padded(x: Array, front: int, fill: int = 0) -> Array:
        sides = [(0, 0), (front, behind)] + [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x, sides, constant_values=fill) if front or behind else x

    nowhere = jnp.iinfo(jnp.int32).min  # the segment of padding
    ids = None
    if segment_ids is not None:
        ids = SegmentIds(
            padded(segment_ids.astype(jnp.int32), 0, nowhere),
            padded(key_segment_ids.astype(jnp.int32), front, nowhere),
        )
    q, k, v = padded(q, 0), padded(k, front), padded(v, front)
    most = next(block for block, size in SPLASH_BLOCKS if H * q.dtype.itemsize <= size)
    kernel = _splash_kernel(N, q.shape[1], k.shape[1], window, softcap, most, interpret)
    heads_first = [x.swapaxes(1, 2) for x in (q, k, v)]  # [B, heads, T, H]
    return jax.vmap(kernel)(*heads_first, ids).swapaxes(1, 2)[:, :T]


@functools.lru_cache(maxsize=16)
def _splash_kernel(
    num_heads: int, T: int, S: int, window: int, softcap: float, most: int, interpret: bool
) -> Any:
    """Return the kernel of one row; made once per shape, as its mask takes T S steps of NumPy."""
    from jax.experimental.pallas.ops.tpu import splash_attention as library

    rows, keys = splash_block(T, most), splash_block(S, most)
    fused = S // keys <= FUSED_BLOCKS
    sizes = library.BlockSizes(
        block_q=rows, block_kv=keys, block_kv_compute=keys,
        block_q_dkv=rows, block_kv_dkv=keys, block_kv_dkv_compute=keys,
        block_q_dq=None if fused else rows, block_kv_dq=None if fused else keys,
        use_fused_bwd_kernel=fused,
    )  # fmt: skip
    mask = library.LocalMask((T, S), (window - 1 if window else None, 0), offset=S - T)
    with jax.ensure_compile_time_eval():  # or the tables of the mask would belong to this trace
        return library.make_splash_mha(
            library.MultiHeadMask([mask] * num_heads), block_sizes=sizes, head_shards=1,
            q_seq_shards=1, attn_logits_soft_cap=softcap or None, interpret=interpret,
            residual_checkpoint_name="attn",
        )  # fmt: skip


def splash_block(length: int, most: int) -> int:
    """Return the largest multiple of 128, up to `most`, that divides a padded length."""
    return max(b for b in range(LANES, min(length, most) + 1, LANES) if length % b == 0)


def dot_product(
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array | None = None,
    *,
    window: int = 0,
    scale: float = 0.0,
    implementation: str = "xla",
) -> Array:
    """Return attention [B, T, N, H] by `jax.nn.dot_product_attention`, S = T."""
    mask = None
    if segment_ids is not None:
        mask = (segment_ids[:, :, None] == segment_ids[:, None])[:, None]  # [B, 1, T, S]
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask, is_causal=True, scale=scale or None,
        local_window_size=(window - 1, 0) if window else None,
        implementation=implementation,
    )  # fmt: skip
