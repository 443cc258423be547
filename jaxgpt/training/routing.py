"""What training does with the sums of routers: their losses, their statistics, their balance.

The sums of `model.moe` are per block; here they become scalars of the metrics, and the direction in
which router biases move.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxgpt.config import Config
from jaxgpt.model.moe import RouterSums
from jaxgpt.model.params import Params

Array = jax.Array
LOAD, DROPPED = "router_load", "router_dropped"  # of `losses`: [L, E] and [L], not yet scalars


def losses(cfg: Config, router: RouterSums) -> tuple[Array, dict[str, Array]]:
    """Return what the routers of all blocks add to the loss sum, and their sums by name.

    A mean over blocks of `balance_loss` times the load balancing loss and `router_z_loss` times the
    squared log-partition, weighted as the main loss: what they add to the loss per token is
    `balance_loss` when experts are balanced, whatever E, k, or the number of blocks.
    """
    balance = cfg.train.balance_loss * router.balance.mean()
    z = cfg.train.router_z_loss * router.z.mean()
    sums = {
        "balance_loss_sum": balance,
        "router_z_loss_sum": z,
        "router_entropy_sum": router.entropy.mean(),
        LOAD: router.load,
        DROPPED: router.dropped,
    }
    return balance + z, jax.tree.map(jax.lax.stop_gradient, sums)


def with_load(grads: Params, load: Array) -> Params:
    """Return the gradients with, as those of router biases, load [L, E] over the block's mean.

    Their sign is all that counts: an expert with more than its share is asked less often
    (loss-free balancing, Wang et al. 2024, algorithm 1).
    """
    excess = load - load.mean(-1, keepdims=True)
    if not isinstance(grads.layers, tuple):
        if grads.layers.router_bias is None:
            return grads
        return grads.replace(layers=grads.layers.replace(router_bias=excess))
    layers = tuple(
        p if p.router_bias is None else p.replace(router_bias=excess[index])
        for index, p in enumerate(grads.layers)
    )
    return grads.replace(layers=layers)


def statistics(sums: dict[str, Array]) -> dict[str, Array]:
    """Return the sums of a step with the statistics of its routers as scalars.

    What shows that routers collapse, for a step of any size: `expert_load_max` and
    `expert_load_min`, the most and least loaded expert of any block as a multiple of the fair load
    (1 when balanced, E / k when all tokens choose the same); `experts_unused`, the share of experts
    of all blocks that no token chose; `slots_dropped`, the share of slots beyond the capacity.
    `router_entropy` (ln E when a router knows nothing, 0 when it is sure) is among the sums.
    """
    sums = dict(sums)
    load, dropped = sums.pop(LOAD), sums.pop(DROPPED)
    total = jnp.maximum(load.sum(-1, keepdims=True), 1.0)  # [L, 1]
    relative = load * load.shape[-1] / total
    return sums | {
        "expert_load_max": relative.max(),
        "expert_load_min": relative.min(),
        "experts_unused": (load == 0).mean(),
        "slots_dropped": dropped.sum() / total.sum(),
    }
