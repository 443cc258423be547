"""The loss of each row of a batch on one device, on a mesh, or on the stages of a pipeline.

Compiled once for a configuration and a number of rows, whatever the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jaxgpt.config import Config, ModelConfig
from jaxgpt.data.packing import Batch
from jaxgpt.model import gpt, pipeline, staging
from jaxgpt.model.params import Params
from jaxgpt.model.shards import Shards
from jaxgpt.parallel.mesh import batch_shards
from jaxgpt.parallel.sharding import Placement, replicated
from jaxgpt.training.loss import token_losses
from jaxgpt.training.step import logits_dtype


def compiled(
    cfg: Config, params: Params, mesh: Mesh | None, rows: int
) -> Callable[[Batch], tuple[Array, Array]]:
    """Return the loss sums [B], nats, and token counts [B] of a batch [1, B, T], B = `rows`."""
    dtypes = {"dtype": cfg.train.compute_dtype, "logits_dtype": str(logits_dtype(cfg))}
    if mesh is not None and mesh.shape["stage"] > 1:
        micro_rows = _micro_rows(rows, cfg.train.micro_rows, batch_shards(mesh))
        more = {"micro_rows": micro_rows, "rounds": cfg.mesh.rounds}
        return partial(_of_pipeline, cfg.model, params, mesh=mesh, **dtypes, **more)
    return partial(_of_mesh, cfg.model, params, mesh=mesh, **dtypes)


def _micro_rows(rows: int, wanted: int, parts: int) -> int:
    """Return the largest divisor of `rows` up to `wanted`, or the least, that `parts` divides."""
    sizes = [n for n in range(parts, rows + 1, parts) if rows % n == 0]
    return max([n for n in sizes if n <= wanted], default=sizes[0])


@partial(jax.jit, static_argnames=("cfg", "mesh", "dtype", "logits_dtype"))
def _of_mesh(
    cfg: ModelConfig,
    params: Params,
    batch: Batch,
    *,
    mesh: Mesh | None,
    dtype: str,
    logits_dtype: str,
) -> tuple[Array, Array]:
    batch = jax.tree.map(lambda x: x[0], batch)  # [B, T]
    shards = Placement(mesh)
    hidden = gpt.hidden(
        cfg,
        params,
        batch.tokens,
        segment_ids=batch.segment_ids,
        positions=batch.positions,
        dtype=dtype,
        shards=shards,
    )
    loss = _losses(cfg, params, dtype, logits_dtype)
    losses = loss(shards, hidden, batch.targets, batch.weights)
    sums = losses.sum(axis=1), batch.weights.sum(axis=1)
    if mesh is not None:  # every process reads all rows
        sums = jax.lax.with_sharding_constraint(sums, replicated(mesh))
    return sums


@partial(jax.jit, static_argnames=("cfg", "mesh", "dtype", "logits_dtype", "micro_rows", "rounds"))
def _of_pipeline(
    cfg: ModelConfig,
    params: Params,
    batch: Batch,
    *,
    mesh: Mesh,
    dtype: str,
    logits_dtype: str,
    micro_rows: int,
    rounds: int,
) -> tuple[Array, Array]:
    """Return the same on a mesh with stages, none of which ever has the layers of another."""
    shards, parts = Placement(mesh), batch_shards(mesh)
    # Rows of micro-batches [A, b], such that each device computes rows that it holds.
    order = np.arange(batch.tokens.shape[1]).reshape(parts, -1, micro_rows // parts)
    order = order.swapaxes(0, 1).reshape(-1, micro_rows)
    batch = jax.tree.map(
        lambda x: shards.constrain(x[0, order], (None, "batch", "seq")), batch
    )  # [A, b, T]
    layers = staging.place(cfg, staging.cast(params.layers, dtype), rounds, shards)
    rest = params.replace(layers=None)
    out = pipeline.forward(
        cfg,
        rest,
        layers,
        None,
        batch.tokens,
        rounds=rounds,
        shards=shards,
        segment_ids=batch.segment_ids,
        positions=batch.positions,
        dtype=dtype,
    )
    targets, _ = staging.at_the_end(batch.targets, out.end.after, shards)
    weights, numbers = staging.at_the_end(batch.weights, out.end.after, shards)  # [S, rows, T]
    losses = shards.over("stages", _losses(cfg, rest, dtype, logits_dtype))(
        out.end.hidden, targets, weights
    )
    sums = jnp.stack([losses.sum(-1), weights.sum(-1)]).reshape(2, -1)
    sums = jax.lax.with_sharding_constraint(sums, replicated(mesh))
    # Where in them the rows of the batch are, in its order.
    real = np.flatnonzero(numbers.ravel() >= 0)
    places = np.empty(order.size, int)
    places[order.ravel()[numbers.ravel()[real]]] = real
    return sums[0, places], sums[1, places]


def _losses(
    cfg: ModelConfig, params: Params, dtype: str, logits_dtype: str
) -> Callable[[Shards, Array, Array, Array], Array]:
    """Return the function that gives `token_losses` of hidden states, targets and weights."""

    def losses(shards: Shards, hidden: Array, targets: Array, weights: Array) -> Array:
        return token_losses(
            hidden,
            gpt.head(cfg, params),
            targets,
            weights,
            softcap=cfg.logit_softcap,
            dtype=dtype,
            logits_dtype=logits_dtype,
            shards=shards,
        )

    return losses
