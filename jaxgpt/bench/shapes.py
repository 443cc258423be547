"""The models that speed is compared on: GPT-2 blocks without biases, the head tied.

Learned positions, LayerNorm, tanh GELU, AdamW with clipping: the step that other programs make with
the same sizes has the same FLOPs.
"""

from __future__ import annotations

from jaxgpt import config
from jaxgpt.config import Config

KIND = (
    "model.positions=learned",
    "model.norm=layernorm",
    "model.norm_bias=false",
    "model.mlp=gelu_tanh",
    "model.tie_embeddings=true",
    "optim.lr=1e-3",
    "optim.weight_decay=0.1",
    "optim.clip_norm=1.0",
    "train.num_steps=1000",
)
# Layers, width, heads, context, vocabulary, rows of an update.
SIZES = {
    "small": (6, 384, 6, 256, 8192, 16),
    "gpt2": (12, 768, 12, 512, 50304, 2),
}
DTYPES = {"bf16": "bfloat16", "f32": "float32"}


def load(shape: str, dtype: str, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Return the configuration of a shape, one of `SIZES`; `overrides` win over it.

    Raises ConfigError as `config.load` does.
    """
    dtype = f"train.compute_dtype={DTYPES[dtype]}"
    return config.load(overrides=[*KIND, *words(SIZES[shape]), dtype, *overrides])


def words(sizes: tuple[int, ...]) -> tuple[str, ...]:
    """Return the overrides for sizes in the order of `SIZES`."""
    names = (
        "model.num_layers",
        "model.embed_dim",
        "model.num_heads",
        "model.seq_len",
        "model.vocab_size",
        "train.global_batch",
    )
    return tuple(f"{name}={size}" for name, size in zip(names, sizes, strict=True))
