"""The decoder as pure functions: `init`, `hidden`, `apply`, and the head they share.

    params = init(cfg, jax.random.key(0))
    logits = apply(cfg, params, tokens)                      # [B, T, V]

Tokens go through an embedding (plus positions), L blocks, a last normalisation and the head.
`cfg` is static. Nothing here knows of losses, optimisers or meshes: activations are offered to
`constrain` under logical names (batch, seq, heads, kv_heads, head_dim, mlp, vocab).
JAX clamps ids and learned positions that are out of range, so callers check them before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxgpt.config import ModelConfig
from jaxgpt.model import params as parameters
from jaxgpt.model.attention import Impl
from jaxgpt.model.blocks import EMBED_SITE, SITES_PER_LAYER, Call, block, drop, keys_at, norm
from jaxgpt.model.cache import KVCache
from jaxgpt.model.params import LayerParams, Params
from jaxgpt.model.positions import restart, rope_phases, sinusoids

Array = jax.Array
Constrain = Callable[[Array, tuple[str | None, ...]], Array]


def init(cfg: ModelConfig, key: Array, dtype: DTypeLike = jnp.float32) -> Params:
    """Return initial parameters in `dtype`; raises ConfigError if the vocabulary is unknown."""
    return parameters.init(parameters.specs(cfg), key, dtype)


def head(cfg: ModelConfig, params: Params) -> Array:
    """Return the LM head [V, D]: the token embedding if tied. Exactly V rows, never padded."""
    return params.embed if cfg.tie_embeddings else params.lm_head


def hidden(
    cfg: ModelConfig,
    params: Params,
    tokens: Array,
    *,
    segment_ids: Array | None = None,
    positions: Array | None = None,
    cache: KVCache | None = None,
    dtype: DTypeLike = jnp.float32,
    dropout_key: Array | None = None,
    impl: Impl | None = None,
    constrain: Constrain | None = None,
) -> Array | tuple[Array, KVCache]:
    """Return what the head is applied to, [B, T, D] in `dtype`; with a cache (hidden, cache).

    tokens [B, T] int32. segment_ids [B, T]: tokens see only their own segment. positions [B, T]:
    by default 0, 1, ... from the start of the row or segment, or from `cache.length`.
    dropout_key: one typed key, or one per row [B]; None turns dropout off, as in evaluation.
    With a cache, tokens are written at their positions and `cache.length` is set one past the
    last; see `model.cache` for padded prompts. Neither segments nor dropout go with a cache:
    ValueError. `impl` chooses the attention (`model.attention`), None the fastest here.
    """
    stream, _, cache = _forward(
        cfg, params, tokens, segment_ids, positions, cache, dtype, dropout_key, impl, constrain
    )
    out = _final_norm(cfg, params, stream, dtype)
    return out if cache is None else (out, cache)


def hidden_and_taps(
    cfg: ModelConfig,
    params: Params,
    tokens: Array,
    *,
    segment_ids: Array | None = None,
    positions: Array | None = None,
    dtype: DTypeLike = jnp.float32,
    dropout_key: Array | None = None,
    impl: Impl | None = None,
    constrain: Constrain | None = None,
) -> tuple[Array, dict[int, Array]]:
    """Return `hidden`, and for each block of `cfg.aux_layers` (from 1) its own, {block: [B, T, D]}.

    A tap passes the same last normalisation as the final hidden state, so that one head fits all.
    """
    stream, taps, _ = _forward(
        cfg, params, tokens, segment_ids, positions, None, dtype, dropout_key, impl, constrain
    )
    finish = partial(_final_norm, cfg, params, dtype=dtype)
    return finish(stream), {layer: finish(tap) for layer, tap in taps.items()}


def apply(
    cfg: ModelConfig,
    params: Params,
    tokens: Array,
    *,
    cache: KVCache | None = None,
    dtype: DTypeLike = jnp.float32,
    constrain: Constrain | None = None,
    **options: Array | str | None,
) -> Array | tuple[Array, KVCache]:
    """Return float32 logits [B, T, V], soft-capped if configured; arguments as `hidden`.

    With a cache: (logits, cache). For training prefer `hidden` and a loss that never holds all
    logits at once.
    """
    options |= {"dtype": dtype, "constrain": constrain}
    out = hidden(cfg, params, tokens, cache=cache, **options)
    out, cache = (out, None) if cache is None else out
    out = logits(cfg, params, out)
    out = out if constrain is None else constrain(out, ("batch", "seq", "vocab"))
    return out if cache is None else (out, cache)


def logits(cfg: ModelConfig, params: Params, hidden: Array) -> Array:
    """Return the float32 logits [..., V] of hidden states [..., D], soft-capped if configured."""
    weights = head(cfg, params).astype(hidden.dtype)
    out = jnp.einsum("...d,vd->...v", hidden, weights, preferred_element_type=jnp.float32)
    return cfg.logit_softcap * jnp.tanh(out / cfg.logit_softcap) if cfg.logit_softcap else out


def flops_per_token(cfg: ModelConfig, causal: bool) -> float:
    """Return the floating-point operations of training on one token: 6 P + 12 L N H S.

    P are the parameters without the table of positions and without the embedding if the head is
    not tied to it (a lookup, not a product); biases and norms, under 0.1 %, are counted. Two
    operations per parameter forward and four backward (Kaplan et al. 2020). The second term is
    the two products of attention over S keys: S = T or, if `causal`, the T / 2 seen on average;
    with a sliding window w < T, S = w or w - w² / 2T (PaLM, appendix B). Recomputation,
    normalisation, softmax and the optimiser are not counted.
    """
    specs = parameters.specs(cfg)
    looked_up = [specs.pos_embed, None if cfg.tie_embeddings else specs.embed]
    products = parameters.count(specs) - parameters.count(looked_up)
    T = cfg.seq_len
    seen = min(cfg.sliding_window or T, T)
    if causal:
        seen -= seen**2 / (2 * T)
    return 6 * products + 12 * cfg.num_layers * cfg.num_heads * cfg.head_width * seen


def _forward(
    cfg: ModelConfig,
    params: Params,
    tokens: Array,
    segment_ids: Array | None,
    positions: Array | None,
    cache: KVCache | None,
    dtype: DTypeLike,
    dropout_key: Array | None,
    impl: Impl | None,
    constrain: Constrain | None,
) -> tuple[Array, dict[int, Array], KVCache | None]:
    """Return the residual stream after the last block, those of `aux_layers`, and the cache."""
    if cache is not None and (segment_ids is not None or dropout_key is not None):
        raise ValueError(
            "a KV cache holds one document per row and is for inference: no "
            "segment_ids, no dropout_key"
        )
    B, T = tokens.shape
    if cache is not None and positions is None:
        positions = cache.length[:, None] + jnp.arange(T)  # [B, T]
    elif positions is None:
        positions = jnp.arange(T) if segment_ids is None else restart(segment_ids)  # [T] or [B, T]
    call = Call(
        dtype=dtype,
        impl=impl,
        # With a cache, a step of one id would copy every weight to fuse them: 5 times slower.
        fused=cache is None and (impl or jax.default_backend()) in ("blocks", "cpu"),
        constrain=constrain or (lambda x, axes: x),
        phases=rope_phases(cfg, positions) if cfg.positions == "rope" else None,
        segment_ids=segment_ids,
        positions=positions if cache is not None else None,
        dropout_keys=_dropout_keys(cfg, dropout_key, B) if cfg.dropout else None,
    )
    x = _embed(cfg, params, tokens, positions, call)
    x, taps, cache = _blocks(cfg, params.layers, x, cache, call)
    if cache is not None:
        cache = cache.replace(length=jnp.asarray(positions[:, -1] + 1, jnp.int32))
    return x, taps, cache


def _embed(cfg: ModelConfig, params: Params, tokens: Array, positions: Array, call: Call) -> Array:
    with jax.named_scope("embed"):
        x = params.embed[tokens].astype(jnp.float32)  # [B, T, D]
        if cfg.embed_scale:
            x = x * math.sqrt(cfg.embed_dim)
        if cfg.positions == "learned":
            x = x + params.pos_embed[positions]
        elif cfg.positions == "sinusoidal":
            x = x + sinusoids(positions, cfg.embed_dim)
        x = drop(cfg, x, keys_at(call, 0, EMBED_SITE))
        # The dtype of the residual stream, for the whole model, is decided here.
        return call.constrain(x.astype(call.dtype), ("batch", "seq", None))


def _blocks(
    cfg: ModelConfig,
    layers: LayerParams | tuple[LayerParams, ...],
    x: Array,
    cache: KVCache | None,
    call: Call,
) -> tuple[Array, dict[int, Array], KVCache | None]:
    """Run all blocks: a loop over a tuple of layers, or scans over stacked ones between taps."""

    def run(carry: tuple, layer: tuple[int | Array, LayerParams]) -> tuple[tuple, None]:
        (x, cache), (index, p) = carry, layer
        return block(cfg, p, x, index, cache, call), None

    if cfg.remat == "full":
        run = jax.checkpoint(run, prevent_cse=isinstance(layers, tuple))
    carry, taps, start = (x, cache), {}, 0
    for stop in sorted({*cfg.aux_layers, cfg.num_layers}):
        if isinstance(layers, tuple):
            for index in range(start, stop):
                carry, _ = run(carry, (index, layers[index]))
        else:
            part = layers
            if stop - start < cfg.num_layers:
                part = jax.tree.map(lambda w, a=start, b=stop: w[a:b], layers)
            carry, _ = jax.lax.scan(run, carry, (jnp.arange(start, stop), part))
        if stop in cfg.aux_layers:
            taps[stop] = carry[0]
        start = stop
    return carry[0], taps, carry[1]


def _final_norm(cfg: ModelConfig, params: Params, x: Array, dtype: DTypeLike) -> Array:
    """Normalise in pre and sandwich placement; a post-norm block has already done so."""
    if params.final_norm is None:
        return x.astype(dtype)
    with jax.named_scope("final_norm"):
        return norm(cfg, x, params.final_norm, params.final_norm_bias, dtype)


def _dropout_keys(cfg: ModelConfig, key: Array | None, batch: int) -> Array | None:
    """Return a key for each dropout site and row, [sites, B], of one key or one per row [B].

    Raises TypeError for an untyped key, whose two numbers would pass for the keys of two rows.
    """
    if key is None:
        return None
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise TypeError("dropout_key: expected a typed key, jax.random.key(seed)")
    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    rows = key if key.ndim else fold(key, jnp.arange(batch))
    sites = jnp.arange(1 + SITES_PER_LAYER * cfg.num_layers)
    return jax.vmap(fold, in_axes=(0, None), out_axes=1)(rows, sites)
