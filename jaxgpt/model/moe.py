"""Mixture of experts: a router sends each token to k of E MLPs and adds up what they return.

h is [B, T, D]. The router computes in float32; `model.dispatch` computes the experts. Statistics
and auxiliary losses are sums over the tokens of a batch, per block, so that they add up over
micro-batches and devices; padding is neither counted nor takes anybody's place.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxgpt.config import ModelConfig
from jaxgpt.model import dispatch, exchange
from jaxgpt.model.params import LayerParams
from jaxgpt.model.shards import Shards, here

Array = jax.Array
TOKENS = ("batch", "seq", None)


@struct.dataclass
class RouterSums:
    """Sums of one block, float32; of all blocks with a leading axis L.

    `balance` and `z` are what `train.balance_loss` and `train.router_z_loss` multiply; only they
    carry gradients.
    """

    balance: Array  # over rows: the row's loss weight * E sum_e f_e P_e
    z: Array  # over tokens: weight * logsumexp(router logits)^2
    entropy: Array  # over tokens: weight * entropy of the router's distribution, nats
    load: Array  # [E], slots that counted tokens asked of each expert
    dropped: Array  # of these, how many were beyond the capacity


def mlp(
    cfg: ModelConfig,
    p: LayerParams,
    h: Array,
    *,
    weights: Array | None,
    segment_ids: Array | None,
    shards: Shards | None = None,
    impl: dispatch.Impl | None = None,
) -> tuple[Array, RouterSums | None]:
    """Return the experts' weighted sum for h [B, T, D], in h's dtype, and the sums of this block.

    `weights` [B, T] are those of the loss; without them (inference) nothing is counted and no
    capacity is applied. `impl` chooses how dropless experts are computed, None the fastest here.
    """
    # HIGHEST: on TPU a float32 product is bfloat16 inside, too coarse to choose by.
    highest = jax.lax.Precision.HIGHEST
    logits = jnp.matmul(
        h.astype(jnp.float32), p.router.astype(jnp.float32), precision=highest
    )  # [B, T, E]
    shards = shards or here()
    scores, chosen, gates = route(cfg, logits, p.router_bias, shards)
    matrices = tuple(w if w is None else w.astype(h.dtype) for w in (p.w_gate, p.w_up, p.w_down))
    counted = None if weights is None else is_counted(weights, segment_ids)
    if counted is not None and cfg.capacity_factor:
        out, kept = dispatch.limited(cfg, h, chosen, gates, matrices, counted, shards)
    else:
        out, kept = _by_device(cfg, h, chosen, gates, matrices, shards, impl), None
    if counted is None:
        return out, None
    return out, router_sums(cfg, logits, scores, chosen, weights, counted, kept)


def route(
    cfg: ModelConfig, logits: Array, bias: Array | None, shards: Shards
) -> tuple[Array, Array, Array]:
    """Return scores [B, T, E], the k chosen experts [B, T, k] and their weights [B, T, k], float32.

    softmax: Mixtral, and Qwen3-MoE with or without `router_norm`. sigmoid: DeepSeek-V3, eq. 12-16;
    the bias decides who is chosen and nothing else (loss-free balancing, Wang et al. 2024).
    """
    softmax = cfg.router == "softmax"
    scores = jax.nn.softmax(logits) if softmax else jax.nn.sigmoid(logits)
    order = jax.lax.stop_gradient(scores if bias is None else scores + bias)
    # The partitioner does not split top_k: it would gather the scores of the whole batch.
    best = lambda order: jax.lax.top_k(order, cfg.experts_per_token)[1]  # noqa: E731
    chosen = shards.on_shards(best, (order,), (TOKENS,), TOKENS)
    gates = jnp.take_along_axis(scores, chosen, axis=-1)
    if cfg.router_norm:
        gates = gates / (gates.sum(-1, keepdims=True) + 1e-20)  # k sigmoids may all be 0
    return scores, chosen, gates


def is_counted(weights: Array, segment_ids: Array | None) -> Array:
    """Return which tokens [B, T] are no padding.

    Those with a loss weight or in a document; without `segment_ids`, also those that come before
    one with a weight in their row, such as a prompt.
    """
    weighted = weights != 0
    if segment_ids is not None:
        return weighted | (segment_ids != 0)
    return jax.lax.cummax(weighted.astype(jnp.int32), axis=1, reverse=True) > 0


def router_sums(
    cfg: ModelConfig,
    logits: Array,
    scores: Array,
    chosen: Array,
    weights: Array,
    counted: Array,
    kept: Array | None,
) -> RouterSums:
    """Return the sums of one block over its counted tokens; `kept` [B, T, k]: None for all slots.

    The balance loss of a row is E sum_e f_e P_e, f_e the share of its slots that expert e got and
    P_e its mean probability (Fedus et al. 2021, eq. 4), by row as in DeepSeek-V3, eq. 17, so that
    neither micro-batches nor devices change it; 1 when all experts get the same. The z-loss is that
    of ST-MoE (Zoph et al. 2022), eq. 5.
    """
    E = cfg.num_experts
    tokens = jnp.maximum(counted.sum(-1), 1)[:, None]  # [B, 1]
    asked = (chosen[..., None] == jnp.arange(E)) & counted[..., None, None]  # [B, T, k, E]
    load = asked.sum((1, 2)).astype(jnp.float32)  # [B, E]
    probs = scores / (scores.sum(-1, keepdims=True) + 1e-20)
    f = load / (tokens * cfg.experts_per_token)
    P = jnp.where(counted[..., None], probs, 0.0).sum(1) / tokens
    z = jnp.square(jax.nn.logsumexp(logits, axis=-1))
    entropy = jax.lax.stop_gradient(-(probs * jnp.log(jnp.maximum(probs, 1e-30))).sum(-1))
    select = lambda x: jnp.where(weights != 0, weights * x, 0.0).sum()  # noqa: E731
    dropped = 0 if kept is None else (counted[..., None] & ~kept).sum()
    return RouterSums(
        balance=(weights.sum(-1) * E * (f * P).sum(-1)).sum(),
        z=select(z),
        entropy=select(entropy),
        load=load.sum(0),
        dropped=jnp.float32(dropped),
    )


def _by_device(
    cfg: ModelConfig,
    h: Array,
    chosen: Array,
    gates: Array,
    matrices: dispatch.Matrices,
    shards: Shards,
    impl: dispatch.Impl | None,
) -> Array:
    """Return `exchange.dropless`, each device with its own rows and its part of every expert.

    Sorting tokens over all rows would gather them on every device. A device holds its experts
    whole, along D.
    """

    def run(h: Array, chosen: Array, gates: Array, *rest: Any) -> Array:
        *matrices, axes = rest
        return exchange.dropless(cfg, h, chosen, gates, tuple(matrices), axes, platform, impl)[None]

    platform, into = shards.platform, ("experts", None, "mlp")
    names = (TOKENS, TOKENS, TOKENS, into, into, ("experts", "mlp", None))
    parts = shards.on_shards(
        run, (h, chosen, gates, *matrices), names, ("mlp", *TOKENS),
        exchange=("batch", "seq", "experts", "mlp"),
    )  # fmt: skip
    return parts.sum(0)  # devices that hold parts of F return parts of the sum
