"""Hugging Face folders that tests make themselves: a tiny model of each family, files included."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tiny import random_params

from jaxgpt.checkpoint.fingerprint import named_leaves
from jaxgpt.config import ModelConfig
from jaxgpt.interop import families, tensors

ROTARY = ModelConfig(
    num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=6, mlp_dim=40, vocab_size=64,
    seq_len=16, positions="rope", norm="rmsnorm", mlp="swiglu", tie_embeddings=False,
)  # fmt: skip
GEMMA = dataclasses.replace(
    ROTARY, norm_placement="sandwich", norm_plus_one=True, embed_scale=True, mlp="geglu",
    tie_embeddings=True, sliding_window=5, global_every=2,
)  # fmt: skip
ROUTED = dict(num_experts=3, experts_per_token=2, expert_dim=24)
MODELS = {
    "gpt2": ModelConfig(
        num_layers=2, embed_dim=32, num_heads=4, vocab_size=64, seq_len=16, attn_bias=True,
        out_bias=True, mlp_bias=True,
    ),
    "llama": ROTARY,
    "llama_biased": dataclasses.replace(ROTARY, attn_bias=True, out_bias=True, mlp_bias=True),
    "mistral": dataclasses.replace(ROTARY, sliding_window=5),
    "qwen2": dataclasses.replace(ROTARY, attn_bias=True),
    "qwen3": dataclasses.replace(ROTARY, qk_norm=True),
    "gemma2": GEMMA,
    "gemma3": dataclasses.replace(GEMMA, qk_norm=True, rope_local_base=100.0),
    "mixtral": dataclasses.replace(ROTARY, **ROUTED),
    "qwen3_moe": dataclasses.replace(ROTARY, **ROUTED, qk_norm=True, router_norm=False),
}  # fmt: skip


def random_tensors(name: str, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Return all tensors of a model with random values, by the names of transformers."""
    cfg = MODELS[name]
    leaves = named_leaves(random_params(cfg))
    return {
        name: np.ascontiguousarray(array, dtype)
        for entry in tensors.table(families.family_of(cfg), cfg)
        for name, array in zip(
            entry.names, entry.to_hf([leaves[leaf] for leaf in entry.leaves]), strict=True
        )
    }


def write_folder(
    folder: Path, name: str, weights: dict[str, np.ndarray] | None = None, **config: Any
) -> Path:
    """Write config.json and, by the safetensors library, the weights; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    cfg = MODELS[name]
    written = families.write_config(families.family_of(cfg), cfg, "float32") | config
    (folder / "config.json").write_text(json.dumps(written))
    save_file(random_tensors(name) if weights is None else weights, folder / "model.safetensors")
    return folder
