"""A tiny model with every option of a big one, for comparing what the big one has no memory for."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from jaxgpt.checkpoint.fingerprint import named_leaves
from jaxgpt.config import ModelConfig
from jaxgpt.model.canonical import canonical
from jaxgpt.model.params import specs

HEAD, LENGTH, WINDOW = 8, 64, 7


def shrink(cfg: ModelConfig) -> ModelConfig:
    """Return `cfg` with small sizes: layers, widths, heads, experts, vocabulary, context, window.

    Query heads per kv head stay as they are; there is a block without window where there was one.
    """
    cfg = canonical(cfg)
    groups = cfg.num_heads // cfg.kv_heads
    kv_heads = min(cfg.kv_heads, 2)
    num_heads = groups * kv_heads
    square = cfg.num_heads * cfg.head_width == cfg.embed_dim
    every = min(cfg.global_every, 3)
    experts = min(cfg.num_experts, 6)
    scaled = cfg.rope_scaling != "none"
    length = max(LENGTH, math.ceil(16 * cfg.rope_factor)) if scaled else LENGTH
    return replace(
        cfg,
        num_layers=min(cfg.num_layers, max(2, every + 1)),
        global_every=every,
        # transformers wants a multiple of the heads in either case.
        embed_dim=num_heads * (HEAD if square else HEAD - 2),
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=HEAD,
        mlp_dim=24 if experts else 56,
        expert_dim=24 if experts else 0,
        num_experts=experts,
        experts_per_token=min(cfg.experts_per_token, max(experts, 1)),
        vocab_size=96,
        seq_len=length,
        sliding_window=min(cfg.sliding_window, WINDOW),
        rope_original_len=16 if cfg.rope_original_len else 0,
        stacked=False,
    )


def random_leaves(cfg: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Return float32 parameters by path, all different, so wide that every one of them matters."""
    rng = np.random.default_rng(seed)
    return {
        name: np.float32(
            (spec.init[1] if spec.init[0] == "constant" else 0.0)
            + 0.3 * rng.standard_normal(spec.shape)
        )
        for name, spec in named_leaves(specs(cfg)).items()
    }
