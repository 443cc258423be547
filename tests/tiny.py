"""Tiny model configurations and random parameters that the tests of several modules share."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from jaxgpt.config import ModelConfig
from jaxgpt.model.params import Params, ParamSpec, specs

TINY = ModelConfig(num_layers=2, embed_dim=32, num_heads=4, vocab_size=64, seq_len=16)
LLAMA = dataclasses.replace(
    TINY, positions="rope", num_kv_heads=2, norm="rmsnorm", mlp="swiglu", tie_embeddings=False
)
# Between them these use every option that has parameters or code of its own.
VARIETY = {
    "gpt2": dataclasses.replace(TINY, attn_bias=True, out_bias=True, mlp_bias=True),
    "llama": LLAMA,
    "biased": dataclasses.replace(
        LLAMA, attn_bias=True, out_bias=True, mlp_bias=True, qk_norm=True, sliding_window=5
    ),
    "sandwich": dataclasses.replace(
        TINY, norm_placement="sandwich", mlp="geglu", embed_scale=True, attn_softcap=5.0,
        logit_softcap=3.0, positions="rope",
    ),
    "gemma3": dataclasses.replace(
        LLAMA, num_layers=3, norm_placement="sandwich", mlp="geglu", embed_scale=True,
        norm_plus_one=True, qk_norm=True, sliding_window=5, global_every=2, attn_scale=0.3,
        rope_local_base=1000.0, rope_scaling="linear", rope_factor=8.0, tie_embeddings=True,
    ),
    "experts": dataclasses.replace(
        LLAMA, num_experts=4, experts_per_token=2, expert_dim=24, shared_dim=16, router_bias=True,
    ),
    "post": dataclasses.replace(TINY, norm_placement="post", mlp="relu", positions="sinusoidal"),
    "none": dataclasses.replace(
        TINY, positions="none", mlp="relu2", num_kv_heads=1, head_dim=6, norm_bias=False
    ),
}  # fmt: skip


def random_params(cfg: ModelConfig, spread: float = 0.2) -> Params:
    """Return parameters that all differ from their initial values, drawn by numpy (no compiling).

    The spread is wide enough that every logit depends visibly on every token it may see.
    """
    rng = np.random.default_rng(0)

    def draw(spec: ParamSpec) -> np.ndarray:
        usual = spec.init[1] if spec.init[0] == "constant" else 0.0
        return np.float32(usual + spread * rng.normal(size=spec.shape))

    return jax.tree.map(draw, specs(cfg))
