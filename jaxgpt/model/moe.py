"""Mixture of experts: a router sends each token to k of E MLPs and adds up what they return.

h is [B, T, D]. The router computes in float32. Statistics and auxiliary losses are sums over the
tokens of a batch, per block, so that they add up over micro-batches and devices; padding is neither
counted nor takes anybody's place.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from jaxgpt.config import ModelConfig
from jaxgpt.model.activations import ACTIVATIONS
from jaxgpt.model.params import LayerParams

Array = jax.Array
Constrain = Callable[[Array, tuple[str | None, ...]], Array]


@struct.dataclass
class RouterSums:
    """Sums of one block, float32; of all blocks with a leading axis L.

    A token is counted if it has a loss weight or belongs to a document. `balance` and `z` are what
    `train.balance_loss` and `train.router_z_loss` multiply; only they carry gradients.
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
    constrain: Constrain,
) -> tuple[Array, RouterSums | None]:
    """Return the experts' weighted sum for h [B, T, D], in h's dtype, and the sums of this block.

    `weights` [B, T] are those of the loss; without them (inference) nothing is counted and no
    capacity is applied.
    """
    logits = h.astype(jnp.float32) @ p.router.astype(jnp.float32)  # [B, T, E]
    scores, chosen, gates = route(cfg, logits, p.router_bias)
    spread = jax.nn.one_hot(chosen, cfg.num_experts, dtype=jnp.float32)  # [B, T, k, E]
    mixture = jnp.einsum("btk,btke->bte", gates, spread)
    hidden = jnp.einsum("btd,edf->btef", h, p.w_up.astype(h.dtype)).astype(jnp.float32)
    if p.w_gate is None:
        hidden = ACTIVATIONS[cfg.mlp](hidden)
    else:
        gate = jnp.einsum("btd,edf->btef", h, p.w_gate.astype(h.dtype)).astype(jnp.float32)
        hidden = ACTIVATIONS[cfg.mlp](gate) * hidden
    out = jnp.einsum("btef,efd->bted", hidden.astype(h.dtype), p.w_down.astype(h.dtype))
    out = jnp.einsum("bted,bte->btd", out.astype(jnp.float32), mixture).astype(h.dtype)
    if weights is None:
        return out, None
    return out, router_sums(cfg, logits, scores, chosen, weights, segment_ids)


def route(cfg: ModelConfig, logits: Array, bias: Array | None) -> tuple[Array, Array, Array]:
    """Return scores [..., E], the k chosen experts [..., k] and their weights [..., k], float32.

    The bias decides who is chosen and nothing else (loss-free balancing, Wang et al. 2024).
    """
    softmax = cfg.router == "softmax"
    scores = jax.nn.softmax(logits) if softmax else jax.nn.sigmoid(logits)
    order = scores if bias is None else scores + jax.lax.stop_gradient(bias)
    chosen = jax.lax.top_k(order, cfg.experts_per_token)[1]
    gates = jnp.take_along_axis(scores, chosen, axis=-1)
    if cfg.router_norm:
        gates = gates / gates.sum(-1, keepdims=True)
    return scores, chosen, gates


def router_sums(
    cfg: ModelConfig,
    logits: Array,
    scores: Array,
    chosen: Array,
    weights: Array,
    segment_ids: Array | None,
) -> RouterSums:
    """Return the sums of one block over its counted tokens.

    The balance loss of a row is E sum_e f_e P_e, f_e the share of its slots that expert e got and
    P_e its mean probability (Fedus et al. 2021, eq. 4), by row as in DeepSeek-V3, eq. 17, so that
    neither micro-batches nor devices change it; 1 when all experts get the same.
    """
    E = cfg.num_experts
    counted = weights != 0
    if segment_ids is not None:
        counted |= segment_ids != 0
    counted = counted.astype(jnp.float32)
    tokens = jnp.maximum(counted.sum(-1), 1.0)  # [B]
    asked = jax.nn.one_hot(chosen, E, dtype=jnp.float32).sum(-2)  # [B, T, E]
    load = jnp.einsum("bte,bt->be", asked, counted)
    probs = scores / scores.sum(-1, keepdims=True)
    f = load / (tokens * cfg.experts_per_token)[:, None]
    P = jnp.einsum("bte,bt->be", probs, counted) / tokens[:, None]
    z = jnp.square(jax.nn.logsumexp(logits, axis=-1))
    entropy = -(probs * jnp.log(jnp.maximum(probs, 1e-30))).sum(-1)
    entropy = jax.lax.stop_gradient(entropy)
    select = lambda x: jnp.where(weights != 0, weights * x, 0.0)  # noqa: E731
    return RouterSums(
        balance=(weights.sum(-1) * E * (f * P).sum(-1)).sum(),
        z=select(z).sum(),
        entropy=select(entropy).sum(),
        load=load.sum(0),
        dropped=jnp.float32(0),
    )
