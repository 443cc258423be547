"""Attention by the kernels of others: splash (Pallas, TPU), cuDNN (NVIDIA), `jax.nn` (XLA).

Each sees the part of one device: q [B, T, N, H] against k, v [B, S, K, H]. What a kernel cannot do
is for `attention.choose` to know. Splash attention never holds the scores in memory; neither does
cuDNN, which takes documents as a bias [B, 1, T, T], one for all heads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from jaxgpt.model.remat import named

Array = jax.Array
LANES = 128  # of a TPU's vector unit, and of a row in a tile of its memory: blocks are multiples
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
    """Return attention [B, T, N, H] by `jax.nn.dot_product_attention`, S = T.

    By cuDNN, `jax.vmap` makes one call of all its rows, and a backward pass needs the output and
    the statistics of its softmax, both named "attn", but neither the mask nor the forward kernel.
    """
    library = functools.partial(_library, window, scale, implementation)
    call = _kernel if implementation == "cudnn" else lambda f, *arrays: f(*arrays)
    return call(library, q, k, v, segment_ids)


def _library(
    window: int, scale: float, implementation: str, q: Array, k: Array, v: Array, ids: Array | None
) -> Array:
    mask = None if ids is None else (ids[:, :, None] == ids[:, None])[:, None]  # [B, 1, T, S]
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask, is_causal=True, scale=scale or None,
        local_window_size=(window - 1, 0) if window else None,
        implementation=implementation,
    )  # fmt: skip


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kernel(f: Callable[..., Array], q: Array, k: Array, v: Array, ids: Array | None) -> Array:
    """Return f(q, k, v, ids), the result of a kernel with a derivative of its own.

    JAX 0.12 cannot map cuDNN's attention with one mask for all heads: it is never asked to.
    """
    return by_rows(f)(q, k, v, ids)


def _kernel_forward(f: Callable[..., Array], *arrays: Array | None) -> tuple[Array, tuple]:
    def run(*arrays: Array | None) -> tuple[Array, list[Array]]:
        out, pull = _differentiated(f, *arrays)
        kinds = _kinds(f, *arrays)
        leaves = zip(jax.tree.leaves(pull), kinds, strict=True)
        return out, [leaf for leaf, kind in leaves if kind == "statistic"]

    out, statistics = jax.tree.map(lambda x: named(x, "attn"), by_rows(run)(*arrays))
    return out, (*arrays, out, statistics)


def _kernel_backward(f: Callable[..., Array], kept: tuple, grad: Array) -> tuple[Array | None, ...]:
    def run(arrays: tuple, out: Array, statistics: list[Array], grad: Array) -> tuple[Array, ...]:
        _, pull = _differentiated(f, *arrays)  # of its kernel nothing is used
        leaves, structure = jax.tree.flatten(pull)
        saved = iter(statistics)
        for i, kind in enumerate(_kinds(f, *arrays)):
            if kind != "again":
                leaves[i] = out if kind == "out" else next(saved)
        return jax.tree.unflatten(structure, leaves)(grad)

    *arrays, out, statistics = kept
    return *by_rows(run)(tuple(arrays), out, statistics, grad), None


_kernel.defvjp(_kernel_forward, _kernel_backward)


def _differentiated(f: Callable[..., Array], q: Array, k: Array, v: Array, ids: Any) -> tuple:
    return jax.vjp(lambda q, k, v: f(q, k, v, ids), q, k, v)


def _kinds(f: Callable[..., Array], *arrays: Array | None) -> list[str]:
    """Return what each array is that the derivative of f needs.

    "out", the result; "statistic", what else is made of q, k and v; "again", arguments, and what
    is made of documents alone, as a mask.
    """

    def needed(*arrays: Array | None) -> tuple[Array, list[Array]]:
        out, pull = _differentiated(f, *arrays)
        return out, jax.tree.leaves(pull)

    jaxpr = jax.make_jaxpr(needed)(*arrays).jaxpr
    made = set(jaxpr.invars[:3])
    for eqn in jaxpr.eqns:
        if any(isinstance(v, Var) and v in made for v in eqn.invars):
            made.update(eqn.outvars)
    made.difference_update(jaxpr.invars)
    out, *leaves = jaxpr.outvars

    def kind(v: Any) -> str:
        if v is out:
            return "out"
        return "statistic" if isinstance(v, Var) and v in made else "again"

    return [kind(v) for v in leaves]


def by_rows(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return f of arrays [B, ...], which `jax.vmap` is to call once, with all its rows.

    The first axis of each argument and result is rows, which f computes one by one: the mapped
    axis becomes part of it. Derivatives must be taken inside or around, not through it.
    """
    call = jax.custom_batching.custom_vmap(f)

    def mapped(size: int, is_mapped: Any, *arrays: Any) -> tuple[Any, Any]:
        def fold(x: Array, is_mapped: bool) -> Array:
            x = x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
            return x.reshape(size * x.shape[1], *x.shape[2:])

        out = call(*jax.tree.map(fold, arrays, tuple(is_mapped)))
        out = jax.tree.map(lambda x: x.reshape(size, len(x) // size, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    call.def_vmap(mapped)
    return call
