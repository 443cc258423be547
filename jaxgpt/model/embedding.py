"""From ids to the residual stream: rows of the embedding, scaled, with positions and dropout."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from jaxgpt.config import ModelConfig
from jaxgpt.model.blocks import EMBED_SITE, Call, drop, keys_at
from jaxgpt.model.params import Params
from jaxgpt.model.positions import sinusoids
from jaxgpt.model.shards import MeshAxes, Shards

Array = jax.Array


def embed(cfg: ModelConfig, params: Params, tokens: Array, positions: Array, call: Call) -> Array:
    """Return the residual stream [B, T, D] before the first block, in the compute dtype."""
    with jax.named_scope("embed"):
        x = lookup(params.embed, tokens, call.shards).astype(jnp.float32)  # [B, T, D]
        if cfg.embed_scale:
            x = x * math.sqrt(cfg.embed_dim)
        if cfg.positions == "learned":
            x = x + learned(params.pos_embed, positions, tokens, call.shards)
        elif cfg.positions == "sinusoidal":
            x = x + sinusoids(positions, cfg.embed_dim)
        x = drop(cfg, x, keys_at(call, 0, EMBED_SITE))
        # The dtype of the residual stream, for the whole model, is decided here.
        return call.shards.constrain(x.astype(call.dtype), ("batch", "seq", None))


def lookup(table: Array, tokens: Array, shards: Shards) -> Array:
    """Return table[tokens], [B, T, D], of a table [V, D] of which each device holds a part.

    Devices that hold parts of D look up each other's tokens and exchange the parts: as many bytes
    as the result has, where the compiler would gather the table, or all rows of the batch. One that
    holds a part of V gives zeros for the rest, and they add up.
    """

    def of_device(table: Array, tokens: Array, axes: MeshAxes) -> Array:
        width, ids = axes["embed"], axes["vocab"]
        if width:
            tokens = jax.lax.all_gather(tokens, width, axis=0, tiled=True)
        index = tokens - (jax.lax.axis_index(ids) * len(table) if ids else 0)
        rows = table[index]
        if ids:
            held = (index >= 0) & (index < len(table))
            rows = _sum(jnp.where(held[..., None], rows, 0), ids)
        if width:
            rows = jax.lax.all_to_all(rows, width, split_axis=0, concat_axis=2, tiled=True)
        return rows

    names = (("vocab", "embed"), ("batch", "seq"))
    return shards.on_shards(
        of_device, (table, tokens), names, ("batch", "seq", None), exchange=("embed", "vocab")
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _sum(rows: Array, axes: tuple[str, ...]) -> Array:
    """Return the sum of rows over devices, whose gradient all of them know.

    Differentiated by hand: that of `psum` would add up their parts of it, as many bytes again.
    """
    return jax.lax.psum(rows, axes)


def _sum_forward(rows: Array, axes: tuple[str, ...]) -> tuple[Array, None]:
    return _sum(rows, axes), None


def _sum_backward(axes: tuple[str, ...], saved: None, grad: Array) -> tuple[Array]:
    return (grad * jax.lax.axis_size(axes),)  # `shard_map` gives each an equal part of it


_sum.defvjp(_sum_forward, _sum_backward)


def learned(table: Array, positions: Array, tokens: Array, shards: Shards) -> Array:
    """Return table[positions], [B, T, D], of a table [T, D] of which each device holds a part of D.

    positions [T] or [B, T], tokens [B, T]. Unlike that of a vocabulary the table is smaller than
    the result: devices gather it, and reduce-scatter its gradient. Left to the partitioner each
    would get the whole gradient: twice the bytes.
    """

    def of_device(table: Array, positions: Array, tokens: Array, axes: MeshAxes) -> Array:
        if axes["embed"]:
            table = jax.lax.all_gather(table, axes["embed"], axis=1, tiled=True)
        return jnp.broadcast_to(table[positions], (*tokens.shape, table.shape[-1]))

    of_positions = ("batch", "seq")[-positions.ndim :]
    return shards.on_shards(
        of_device,
        (table, positions, tokens),
        ((None, "embed"), of_positions, ("batch", "seq")),
        ("batch", "seq", None),
        exchange=("embed",),
    )
