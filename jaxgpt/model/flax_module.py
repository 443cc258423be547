"""The same model as a `flax.nnx.Module`, for code that expects one.

    model = GPT(cfg, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    logits = model(tokens)                                   # [B, T, V]

Parameters are `nnx.Param`s in the tree of `model.params`; the functions of `model.gpt` do the work.
A model with experts trains with `forward`, which also returns the sums that their losses are made
of. No gradient reaches a `router_bias`: whoever uses one moves it by those sums, and gives the
optimiser a mask, lest weight decay pull it to 0.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxgpt.config import ModelConfig
from jaxgpt.model import gpt
from jaxgpt.model.gpt import Forward
from jaxgpt.model.params import Params

Array = jax.Array


class GPT(nnx.Module):
    """A GPT whose attribute `params` is a `Params` of `nnx.Param`; `cfg` and `dtype` are static.

    Give `rngs` (stream `params`) for new parameters in float32, or `params` to wrap existing ones.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        *,
        rngs: nnx.Rngs | None = None,
        params: Params | None = None,
        dtype: DTypeLike = jnp.float32,
    ):
        if (rngs is None) == (params is None):
            raise ValueError("GPT: give either rngs, for new parameters, or params")
        params = gpt.init(cfg, rngs.params()) if params is None else params
        self.cfg, self.dtype = cfg, jnp.dtype(dtype)
        self.params = nnx.data(jax.tree.map(nnx.Param, params))

    def __call__(self, tokens: Array, **options: Any) -> Any:
        """Return `gpt.apply`: float32 logits [B, T, V], or with a cache (logits, cache)."""
        return gpt.apply(self.cfg, self.pure(), tokens, dtype=self.dtype, **options)

    def forward(self, tokens: Array, **options: Any) -> Forward:
        """Return `gpt.forward`: hidden states, taps, and with loss `weights` the routers' sums."""
        return gpt.forward(self.cfg, self.pure(), tokens, dtype=self.dtype, **options)

    def logits(self, hidden: Array) -> Array:
        """Return `gpt.logits`: float32 logits [..., V] of hidden states [..., D]."""
        return gpt.logits(self.cfg, self.pure(), hidden)

    def hidden(self, tokens: Array, **options: Any) -> Any:
        """Return `gpt.hidden`: [B, T, D] in `dtype`, or with a cache (hidden, cache)."""
        return gpt.hidden(self.cfg, self.pure(), tokens, dtype=self.dtype, **options)

    def pure(self) -> Params:
        """Return the parameters as a tree of plain arrays."""
        return nnx.as_pure(self.params)
