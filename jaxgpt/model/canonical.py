"""One way of writing each model: configurations that compute the same function become equal."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jaxgpt.config import ModelConfig

# What acts in training alone: no obstacle to an export, and not part of a config.json.
TRAINING = (
    "dropout", "init", "init_std", "init_depth_scale", "stacked", "remat", "aux_layers",
    "capacity_factor",
)  # fmt: skip


def canonical(cfg: ModelConfig) -> ModelConfig:
    """Return `cfg` with derived sizes written out and fields that have no effect at their defaults.

    Two configurations that compute the same function become equal, as far as fields can tell.
    """
    blank = ModelConfig()
    experts = bool(cfg.num_experts)
    values: dict[str, Any] = dict(
        num_kv_heads=cfg.kv_heads,
        head_dim=cfg.head_width,
        mlp_dim=cfg.expert_width if experts else cfg.mlp_width,
        expert_dim=cfg.expert_width if experts else 0,
    )
    if cfg.norm == "rmsnorm":
        values["norm_bias"] = blank.norm_bias
    if math.isclose(cfg.attn_scale, cfg.head_width**-0.5, rel_tol=1e-9):
        values["attn_scale"] = 0.0
    windows = {cfg.window(i) > 0 for i in range(min(cfg.num_layers, 1 << 16))}
    if windows != {False, True}:
        values["global_every"] = 0
    if windows == {False}:
        values |= dict(sliding_window=0, rope_local_base=0.0)
    inert = [] if experts else ["experts_per_token", "router", "router_norm", "router_bias"]
    if cfg.positions != "rope":
        inert += ["rope_base", "rope_local_base", "rope_scaling"]
    elif cfg.rope_scaling == "none" and cfg.rope_local_base == cfg.rope_base:
        inert += ["rope_local_base"]
    scaling = cfg.rope_scaling if cfg.positions == "rope" else "none"
    if scaling == "none":
        inert += ["rope_factor"]
    if scaling in ("none", "linear"):
        inert += ["rope_original_len", "rope_low_freq", "rope_high_freq"]
    else:
        length = cfg.rope_original_len or cfg.seq_len / cfg.rope_factor
        values |= dict(rope_high_freq=cfg.rope_high)
        values |= dict(rope_original_len=int(length)) if length == int(length) else {}
    return dataclasses.replace(cfg, **values | {key: getattr(blank, key) for key in inert})


def computed(cfg: ModelConfig) -> ModelConfig:
    """Return `canonical(cfg)` without what acts in training alone."""
    blank = ModelConfig()
    return dataclasses.replace(canonical(cfg), **{key: getattr(blank, key) for key in TRAINING})
