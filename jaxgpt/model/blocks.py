"""One transformer block: normalisation, attention sub-layer, MLP or experts, residual sums.

x is the residual stream [B, T, D]. Matrix products take and give the compute dtype; normalisation,
activations, biases and rotations are float32 inside. A block knows nothing of the other layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxgpt.config import ModelConfig
from jaxgpt.model import moe, remat
from jaxgpt.model.activations import activated
from jaxgpt.model.attention import Impl, attend, attend_cached
from jaxgpt.model.cache import KVCache, read, write
from jaxgpt.model.params import LayerParams
from jaxgpt.model.positions import rotate
from jaxgpt.model.remat import named
from jaxgpt.model.shards import Shards

Array = jax.Array
Matrices = tuple[tuple[Array | None, Array | None], ...]  # (matrix, bias) of gate, up and down
HALVED = 1 << 28  # bytes of a tensor of an MLP's width from which on `halves` may be true
# Where dropout acts: on the embeddings, then at three sites of each layer.
EMBED_SITE, ATTENTION_SITE, ATTENTION_OUT_SITE, MLP_OUT_SITE, SITES_PER_LAYER = 0, 1, 2, 3, 3


@dataclass(frozen=True)
class Call:
    """What all blocks of one forward pass share."""

    dtype: DTypeLike
    impl: Impl | None  # of attention; None: the fastest here
    fused: bool  # one matrix product for queries, keys and values
    shards: Shards
    phases: tuple[Array, Array] | None  # RoPE cos and sin, float32 [..., T, 1, H/2]
    local_phases: tuple[Array, Array] | None  # those of blocks with a window
    segment_ids: Array | None  # [B, T]
    positions: Array | None  # [B, T]; set only with a cache
    dropout_keys: Array | None  # [sites, B]
    weights: Array | None  # [B, T] float32, of the loss; None: not in training


def block(
    cfg: ModelConfig,
    p: LayerParams,
    x: Array,
    layer: int | Array,
    window: int,
    cache: KVCache | None,
    call: Call,
) -> tuple[Array, KVCache | None, moe.RouterSums | None]:
    """Return the residual stream after the block numbered `layer` (from 0), and the cache.

    `window` is the block's own (0: none). The third result is that of `moe.mlp`.
    `pre`: x + f(norm x). `post`: norm(x + f(x)), the original transformer. `sandwich`:
    x + norm(f(norm x)). Dropout acts just before the sum.
    """

    def normalise(x: Array, scale: Array, bias: Array | None, dtype: DTypeLike) -> Array:
        once = partial(norm, cfg, dtype=dtype)
        return remat.cheap(cfg, call.shards.platform, once)(x, scale, bias)

    x, post = named(x, "block_in"), cfg.norm_placement == "post"
    attn_norm, mlp_norm = (p.attn_norm, p.attn_norm_bias), (p.mlp_norm, p.mlp_norm_bias)
    with jax.named_scope("attention"):
        h = x if post else normalise(x, *attn_norm, call.dtype)
        h, cache = _attention(cfg, p, h, layer, window, cache, call)
        h = named(h, "attn_out")
        if p.attn_post_norm is not None:
            h = normalise(h, p.attn_post_norm, p.attn_post_norm_bias, call.dtype)
        x = x + drop(cfg, h, keys_at(call, layer, ATTENTION_OUT_SITE)).astype(x.dtype)
        x = normalise(x, *attn_norm, x.dtype) if post else x
    with jax.named_scope("mlp"):
        h = x if post else normalise(x, *mlp_norm, call.dtype)
        h, router = _mlp(cfg, p, h, call)
        h = named(h, "mlp_out")
        if p.mlp_post_norm is not None:
            h = normalise(h, p.mlp_post_norm, p.mlp_post_norm_bias, call.dtype)
        x = x + drop(cfg, h, keys_at(call, layer, MLP_OUT_SITE)).astype(x.dtype)
        x = normalise(x, *mlp_norm, x.dtype) if post else x
    return call.shards.constrain(x, ("batch", "seq", None)), cache, router


def norm(cfg: ModelConfig, x: Array, scale: Array, bias: Array | None, dtype: DTypeLike) -> Array:
    """Return LayerNorm or RMSNorm of the last axis, computed in float32, in `dtype`."""
    x = x.astype(jnp.float32)
    if cfg.norm == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    return _scaled(cfg, x, scale, bias, dtype)


def _scaled(
    cfg: ModelConfig, x: Array, scale: Array, bias: Array | None, dtype: DTypeLike
) -> Array:
    """Return RMSNorm of the last axis: of x with its mean taken off, it is LayerNorm."""
    x = x.astype(jnp.float32)
    scale = 1.0 + scale.astype(jnp.float32) if cfg.norm_plus_one else scale
    x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + cfg.norm_eps) * scale
    return (x if bias is None else x + bias).astype(dtype)


def _attention(
    cfg: ModelConfig,
    p: LayerParams,
    h: Array,
    layer: int | Array,
    window: int,
    cache: KVCache | None,
    call: Call,
) -> tuple[Array, KVCache | None]:
    q, k, v = _project(p, h.astype(call.dtype), call)
    if p.q_norm is not None:
        once = partial(_scaled, cfg, bias=None, dtype=call.dtype)
        scaled = remat.cheap(cfg, call.shards.platform, once)
        q, k = scaled(q, p.q_norm), scaled(k, p.k_norm)
    phases = call.local_phases if window else call.phases
    if phases is not None:
        q, k = rotate(q, phases), rotate(k, phases)
    q, k, v = named(q, "q"), named(k, "k"), named(v, "v")
    limits = {"window": window, "scale": cfg.attn_scale, "softcap": cfg.attn_softcap}
    if cache is not None:
        cache = write(cache, layer, call.positions, k, v)
        k, v = read(cache, layer, call.dtype)
        out = attend_cached(q, k, v, call.positions, **limits)
    else:
        keys = keys_at(call, layer, ATTENTION_SITE)
        out = attend(
            q, k, v, segment_ids=call.segment_ids, impl=call.impl, dropout_keys=keys,
            dropout=0.0 if keys is None else cfg.dropout, shards=call.shards, **limits,
        )  # fmt: skip
    if call.shards.platform == "cpu":
        out = linear(out.reshape(*out.shape[:2], -1), p.wo.reshape(-1, p.wo.shape[-1]), p.bo, call)
    else:  # of another shape, a scan would keep what attention gives a second time
        out = add_bias(jnp.einsum("btnh,nhd->btd", out, p.wo.astype(call.dtype)), p.bo)
    return out, cache


def _project(p: LayerParams, h: Array, call: Call) -> list[Array]:
    """Return q [B, T, N, H], k and v [B, T, K, H]."""
    (D, N, H), K = p.wq.shape, p.wk.shape[1]
    flat = [w.reshape(D, -1) for w in (p.wq, p.wk, p.wv)]  # [D, N H], [D, K H], [D, K H]
    if call.fused:
        # One product for three, and one input gradient for three and their sum. Only on CPU: on
        # a mesh it would join axes that are split over devices.
        fused = jnp.concatenate([w.astype(call.dtype) for w in flat], axis=1)
        fused = linear(h, fused, None, call)
        parts = jnp.split(fused, (N * H, (N + K) * H), axis=-1)
    else:
        parts = [linear(h, w, None, call) for w in flat]
    biases, axes = (p.bq, p.bk, p.bv), ("heads", "kv_heads", "kv_heads")
    return [
        call.shards.constrain(
            add_bias(part.reshape(*h.shape[:2], -1, H), bias), ("batch", "seq", axis, "head_dim")
        )
        for part, bias, axis in zip(parts, biases, axes, strict=True)
    ]


def _mlp(
    cfg: ModelConfig, p: LayerParams, h: Array, call: Call
) -> tuple[Array, moe.RouterSums | None]:
    h = h.astype(call.dtype)
    if cfg.num_experts:
        out, router = moe.mlp(
            cfg, p, h, weights=call.weights, segment_ids=call.segment_ids, shards=call.shards
        )
        if p.shared_up is not None:
            shared = (p.shared_gate, None), (p.shared_up, None), (p.shared_down, None)
            out = out + _dense(cfg, h, *shared, call)
        return out, router
    return _dense(cfg, h, (p.w_gate, p.b_gate), (p.w_up, p.b_up), (p.w_down, p.b_down), call), None


def _dense(
    cfg: ModelConfig,
    h: Array,
    gate: tuple[Array | None, Array | None],
    up: tuple[Array, Array | None],
    down: tuple[Array, Array | None],
    call: Call,
) -> Array:
    """Return an MLP of h [B, T, D]; gate, up and down are (matrix, bias)."""
    F, split, width = up[0].shape[1], call.shards.split, jnp.dtype(call.dtype).itemsize
    held = h.shape[0] * h.shape[1] * F * width // (split("batch") * split("seq"))
    mlp = _halved if halves(cfg, F, held, split("mlp"), call.shards.platform) else _whole
    return add_bias(mlp(cfg, h, (gate, up, (down[0], None)), call), down[1])


def halves(cfg: ModelConfig, F: int, held: int, split: int, platform: str) -> bool:
    """Tell whether the backward pass of an MLP takes one half of its width F after the other.

    It does where memory decides: on TPUs that compute an MLP again, if a device would hold many
    bytes, `held`, of a tensor of width F, and F is not `split` over devices.
    """
    kept = cfg.remat != "full" or not {"gate", "up"}.isdisjoint(cfg.remat_save + cfg.remat_offload)
    return platform == "tpu" and not kept and held >= HALVED and split == 1 and F % 2 == 0


def _whole(cfg: ModelConfig, h: Array, matrices: Matrices, call: Call) -> Array:
    gate, up, down = matrices
    # Else float32 tensors of width F wait for the backward pass: of GPT-2 124M on an H200 a third
    # of all memory. On CPU as well, to compute tanh again costs no more than to keep it.
    activate = remat.again(cfg, partial(activated, cfg.mlp, dtype=call.dtype))

    def project(matrix: Array, bias: Array | None, name: str) -> Array:
        out = named(linear(h, matrix, bias, call), name)
        # Or oneDNN multiplies and activates at once, and the backward pass gets, in place of the
        # product, what is activated: gradients were off by a quarter (JAX 0.12.0.1, bfloat16).
        return jax.lax.optimization_barrier(out) if call.shards.platform == "cpu" else out

    into = project(*up, "up")
    gated = None if gate[0] is None else project(*gate, "gate")
    hidden = call.shards.constrain(activate(into, gated), ("batch", "seq", "mlp"))
    return linear(hidden, *down, call)


def _halved(cfg: ModelConfig, h: Array, matrices: Matrices, call: Call) -> Array:
    """Return `_whole`, of which the backward pass computes one half of F after the other.

    It computes the block again anyway, and so holds half of four tensors of width F at a time.
    """

    @jax.custom_vjp
    def mlp(h: Array, matrices: Matrices) -> Array:
        return _whole(cfg, h, matrices, call)

    def forward(h: Array, matrices: Matrices) -> tuple[Array, tuple[Array, Matrices]]:
        return mlp(h, matrices), (h, matrices)

    def backward(saved: tuple[Array, Matrices], grad: Array) -> tuple[Array, Matrices]:
        h, (gate, up, down) = saved
        F, total, found = up[0].shape[1], jnp.zeros_like(h), []
        for mine in (slice(F // 2), slice(F // 2, F)):
            into = jax.tree.map(lambda w, mine=mine: w[..., mine], (gate, up))
            half = *into, jax.tree.map(lambda w, mine=mine: w[mine], down)
            _, transposed = jax.vjp(lambda h, half: _whole(cfg, h, half, call), h, half)
            of_h, of_half = transposed(grad)
            # The other half waits for these.
            h, grad, total, of_half = jax.lax.optimization_barrier((h, grad, total + of_h, of_half))
            found.append(of_half)
        *into, downs = zip(*found, strict=True)
        joined = [jax.tree.map(lambda *w: jnp.concatenate(w, -1), *each) for each in into]
        return total, (*joined, jax.tree.map(lambda *w: jnp.concatenate(w), *downs))

    mlp.defvjp(forward, backward)
    return mlp(h, matrices)


def linear(x: Array, w: Array, bias: Array | None, call: Call) -> Array:
    """Return x [B, T, I] @ w [I, O] + bias in the compute dtype, to which w is cast here."""
    w = w.astype(call.dtype)
    if call.shards.split("seq") > 1:
        # One axis of rows and tokens could not be split over both: each product, forward and
        # backward, would gather its input over the devices that hold parts of a row.
        return add_bias(x @ w, bias)
    B, T, _ = x.shape
    # Two axes: with three, XLA:CPU transposes both operands of each weight gradient.
    out = x.reshape(B * T, -1) @ w
    return add_bias(out.reshape(B, T, -1), bias)


def add_bias(x: Array, bias: Array | None) -> Array:
    """Return x + bias in x's dtype; summed in float32, and so is the bias gradient."""
    return x if bias is None else (x.astype(jnp.float32) + bias).astype(x.dtype)


def keys_at(call: Call, layer: int | Array, site: int) -> Array | None:
    """Return the row keys [B] of a dropout site of a layer, or None if dropout is off."""
    keys = call.dropout_keys
    return None if keys is None else keys[layer * SITES_PER_LAYER + site]


def drop(cfg: ModelConfig, x: Array, keys: Array | None) -> Array:
    """Zero a share `cfg.dropout` of x [B, ...] and scale up the rest; keys None: return x.

    A row's mask depends on its key, of [B], alone: never on the rest of the batch.
    """
    if keys is None:
        return x
    share = 1 - cfg.dropout
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, share, x.shape[1:]))(keys)
    return jnp.where(keep, x.astype(jnp.float32) / share, 0.0).astype(x.dtype)
