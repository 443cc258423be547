"""From ids to the residual stream: rows of the embedding, scaled, with positions and dropout."""

from __future__ import annotations

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
            x = x + call.shards.constrain(params.pos_embed, (None, None))[positions]
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
            rows = jax.lax.psum(jnp.where(held[..., None], rows, 0), ids)
        if width:
            rows = jax.lax.all_to_all(rows, width, split_axis=0, concat_axis=2, tiled=True)
        return rows

    names = (("vocab", "embed"), ("batch", "seq"))
    return shards.on_shards(
        of_device, (table, tokens), names, ("batch", "seq", None), exchange=("embed", "vocab")
    )
