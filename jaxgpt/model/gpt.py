"""The decoder as pure functions: `init`, `hidden`, `apply`, and the head they share.

    params = init(cfg, jax.random.key(0))
    logits = apply(cfg, params, tokens)                      # [B, T, V]

Tokens go through an embedding (plus positions), L blocks, a last normalisation and the head.
`cfg` is static. Nothing here knows of losses, optimisers or meshes: activations are placed by
`model.shards` under logical names (batch, seq, heads, kv_heads, head_dim, mlp, vocab, embed).
JAX clamps ids and learned positions that are out of range, so callers check them before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxgpt.config import ModelConfig
from jaxgpt.model import embedding, narrow, remat
from jaxgpt.model import params as parameters
from jaxgpt.model.attention import Impl
from jaxgpt.model.blocks import SITES_PER_LAYER, Call, block, norm
from jaxgpt.model.cache import KVCache
from jaxgpt.model.moe import RouterSums
from jaxgpt.model.params import LayerParams, Params
from jaxgpt.model.positions import restart, rope_phases
from jaxgpt.model.shards import Shards, here

Array = jax.Array


class Forward(NamedTuple):
    """What training needs of a forward pass."""

    hidden: Array  # [B, T, D], what the head is applied to
    taps: dict[int, Array]  # {block: [B, T, D]} of `cfg.aux_layers` (from 1), ready for the head
    router: RouterSums | None  # leaves [L, ...]; None for dense MLPs


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
    shards: Shards | None = None,
) -> Array | tuple[Array, KVCache]:
    """Return what the head is applied to, [B, T, D] in `dtype`; with a cache (hidden, cache).

    tokens [B, T] int32. segment_ids [B, T]: tokens see only their own segment. positions [B, T]:
    by default 0, 1, ... from the start of the row or segment, or from `cache.length`.
    dropout_key: one typed key, or one per row [B]; None turns dropout off, as in evaluation.
    With a cache, tokens are written at their positions and `cache.length` is set one past the
    last; see `model.cache` for padded prompts. Neither segments nor dropout go with a cache:
    ValueError. `impl` chooses the attention (`model.attention`), None the fastest of the platform.
    `shards` are the devices (`model.shards`), None a single one.
    """
    stream, _, cache, _ = _forward(
        cfg,
        params,
        tokens,
        cache,
        segment_ids=segment_ids,
        positions=positions,
        dtype=dtype,
        dropout_key=dropout_key,
        impl=impl,
        shards=shards,
    )
    out = final_norm(cfg, params, stream, dtype)
    return out if cache is None else (out, cache)


def forward(
    cfg: ModelConfig,
    params: Params,
    tokens: Array,
    *,
    weights: Array | None = None,
    segment_ids: Array | None = None,
    positions: Array | None = None,
    dtype: DTypeLike = jnp.float32,
    dropout_key: Array | None = None,
    impl: Impl | None = None,
    shards: Shards | None = None,
) -> Forward:
    """Return `hidden`, the same of the blocks of `cfg.aux_layers`, and the sums of the routers.

    A tap passes the same last normalisation as the final hidden state, so that one head fits all.
    `weights` [B, T] are those of the loss: routers count with them; without them, None.
    """
    stream, taps, _, router = _forward(
        cfg,
        params,
        tokens,
        weights=weights,
        segment_ids=segment_ids,
        positions=positions,
        dtype=dtype,
        dropout_key=dropout_key,
        impl=impl,
        shards=shards,
    )
    finish = partial(final_norm, cfg, params, dtype=dtype)
    return Forward(finish(stream), {layer: finish(tap) for layer, tap in taps.items()}, router)


def apply(
    cfg: ModelConfig,
    params: Params,
    tokens: Array,
    *,
    cache: KVCache | None = None,
    dtype: DTypeLike = jnp.float32,
    shards: Shards | None = None,
    **options: Array | str | None,
) -> Array | tuple[Array, KVCache]:
    """Return float32 logits [B, T, V], soft-capped if configured; arguments as `hidden`.

    With a cache: (logits, cache). For training prefer `hidden` and a loss that never holds all
    logits at once.
    """
    options |= {"dtype": dtype, "shards": shards}
    out = hidden(cfg, params, tokens, cache=cache, **options)
    out, cache = (out, None) if cache is None else out
    out = logits(cfg, params, out)
    out = out if shards is None else shards.constrain(out, ("batch", "seq", "vocab"))
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
    with a sliding window w < T, S = w or w - w² / 2T (PaLM, appendix B). Of E experts the k that a
    token is sent to count. Recomputation, normalisation, softmax and the optimiser are not counted.
    """
    specs = parameters.specs(cfg)
    looked_up = [specs.pos_embed, None if cfg.tie_embeddings else specs.embed]
    products = parameters.count(specs) - parameters.count(looked_up)
    if cfg.num_experts:
        layers = specs.layers if isinstance(specs.layers, tuple) else (specs.layers,)
        experts = parameters.count([(p.w_gate, p.w_up, p.w_down) for p in layers])
        products -= experts * (1 - cfg.experts_per_token / cfg.num_experts)
    T, keys = cfg.seq_len, 0.0
    for layer in range(cfg.num_layers):
        seen = min(cfg.window(layer) or T, T)
        keys += seen - seen**2 / (2 * T) if causal else seen
    return 6 * products + 12 * cfg.num_heads * cfg.head_width * keys


def _forward(
    cfg: ModelConfig,
    params: Params,
    tokens: Array,
    cache: KVCache | None = None,
    **options: Any,
) -> tuple[Array, dict[int, Array], KVCache | None, RouterSums | None]:
    """Return the residual stream after the last block, those of `aux_layers`, cache and sums.

    `options` are those of `call_of`.
    """
    training = options["segment_ids"], options["dropout_key"]
    if cache is not None and training != (None, None):
        raise ValueError(
            "a KV cache holds one document per row and is for inference: no "
            "segment_ids, no dropout_key"
        )
    call, positions = call_of(cfg, tokens.shape, cache=cache, **options)
    x = embedding.embed(cfg, params, tokens, positions, call)
    # A cache has arrays of its own for each layer, which a loop over stacked ones cannot index.
    layers = (params if cache is None else parameters.restack(params, stacked=False)).layers
    x, taps, cache, router = _blocks(cfg, layers, x, cache, call)
    if cache is not None:
        cache = cache.replace(length=jnp.asarray(positions[:, -1] + 1, jnp.int32))
    return x, taps, cache, router


def call_of(
    cfg: ModelConfig,
    shape: tuple[int, ...],
    *,
    dtype: DTypeLike,
    impl: Impl | None,
    shards: Shards | None,
    segment_ids: Array | None = None,
    positions: Array | None = None,
    cache: KVCache | None = None,
    dropout_key: Array | None = None,
    weights: Array | None = None,
) -> tuple[Call, Array]:
    """Return what all blocks share for tokens of `shape` [B, T], and positions; see `hidden`."""
    B, T = shape
    if cache is not None and positions is None:
        positions = cache.length[:, None] + jnp.arange(T)  # [B, T]
    elif positions is None:
        positions = jnp.arange(T) if segment_ids is None else restart(segment_ids)  # [T] or [B, T]
    phases = rope_phases(cfg, positions) if cfg.positions == "rope" else None
    local = phases is not None and cfg.rope_local_base > 0
    shards = shards or here()
    whole = shards.split("heads") == shards.split("kv_heads") == 1
    call = Call(
        dtype=dtype,
        impl=impl,
        # With a cache, a step of one id would copy every weight to fuse them: 5 times slower.
        # Where heads are split over devices, it would join axes that are split.
        fused=cache is None and shards.platform == "cpu" and whole,
        shards=shards,
        phases=phases,
        local_phases=rope_phases(cfg, positions, local=True) if local else phases,
        segment_ids=segment_ids,
        positions=positions if cache is not None else None,
        dropout_keys=_dropout_keys(cfg, dropout_key, B) if cfg.dropout else None,
        weights=weights,
    )
    return call, positions


def _blocks(
    cfg: ModelConfig,
    layers: LayerParams | tuple[LayerParams, ...] | narrow.Stacked,
    x: Array,
    cache: KVCache | None,
    call: Call,
) -> tuple[Array, dict[int, Array], KVCache | None, RouterSums | None]:
    """Run all blocks: a loop over a tuple of layers, or scans over stacked ones between taps."""

    def run(carry: tuple, index: int | Array, p: Any, window: int) -> tuple[tuple, Any]:
        p = narrow.used(cfg, call.shards, p) if isinstance(p, narrow.Stacked) else p
        x, cache, router = block(cfg, p, carry[0], index, window, carry[1], call)
        return (x, cache), router

    if cfg.remat == "full" and cache is None:
        run = jax.checkpoint(
            run,
            prevent_cse=isinstance(layers, tuple),
            static_argnums=3,
            policy=remat.policy(cfg, call.shards.platform),
        )
    elif isinstance(layers, tuple) and cache is None:
        # Traced once, not for each layer: half the time for six, and the program is the same.
        run = jax.jit(run, static_argnums=3)
    carry, taps, sums, start = (x, cache), {}, [], 0
    for stop in sorted({*cfg.aux_layers, cfg.num_layers}):
        if isinstance(layers, tuple):
            for index in range(start, stop):
                carry, router = run(carry, index, layers[index], cfg.window(index))
                sums.append(jax.tree.map(lambda leaf: leaf[None], router))
        else:
            carry, parts = scan_layers(cfg, run, carry, layers, start, stop)
            sums += parts
        if stop in cfg.aux_layers:
            taps[stop] = carry[0]
        start = stop
    router = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *sums)
    return carry[0], taps, carry[1], router


def scan_layers(
    cfg: ModelConfig,
    run: Callable,
    carry: tuple,
    layers: Any,
    start: int,
    stop: int,
    first: int | Array = 0,
) -> tuple[tuple, list[RouterSums | None]]:
    """Scan over the stacked layers [start, stop), in groups within which windows repeat.

    `run(carry, number, layer, window)` computes one; `first` is the number of `layers[0]`, of which
    the windows of [0, stop) must be those of [first, first + stop).
    """
    period = cfg.global_every if cfg.sliding_window and cfg.global_every else 1
    groups = (stop - start) // period

    def group(carry: tuple, part: tuple[Array, Any]) -> tuple[tuple, Any]:
        indices, p = part
        found = []
        for j in range(period):
            one = jax.tree.map(lambda w, j=j: w[j], p) if period > 1 else p
            index = indices[j] if period > 1 else indices
            carry, router = run(carry, index, one, cfg.window(start + j))
            found.append(router)
        return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *found)

    def grouped(w: Array) -> Array:
        part = w if stop - start == len(w) else w[start:stop]
        part = part if groups * period == len(part) else part[: groups * period]
        return part.reshape(groups, period, *w.shape[1:]) if period > 1 else part

    sums = []
    if groups:
        numbers = grouped(first + jnp.arange(len(jax.tree.leaves(layers)[0])))
        carry, found = jax.lax.scan(group, carry, (numbers, jax.tree.map(grouped, layers)))
        sums.append(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), found))
    for index in range(start + groups * period, stop):
        one = jax.tree.map(lambda w, i=index: w[i], layers)
        carry, router = run(carry, first + index, one, cfg.window(index))
        sums.append(jax.tree.map(lambda leaf: leaf[None], router))
    return carry, sums


def final_norm(cfg: ModelConfig, params: Params, x: Array, dtype: DTypeLike) -> Array:
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
