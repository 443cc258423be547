"""Position information that has no parameters: sinusoids and rotary phases, all in float32."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config import ModelConfig

Array = jax.Array


def restart(segment_ids: Array) -> Array:
    """Return positions [B, T] that count from 0 within each run of equal segment ids [B, T]."""
    index = jnp.arange(segment_ids.shape[-1], dtype=jnp.int32)
    first = jnp.concatenate(
        [jnp.ones_like(segment_ids[..., :1], bool), segment_ids[..., 1:] != segment_ids[..., :-1]],
        axis=-1,
    )
    return index - jax.lax.cummax(jnp.where(first, index, 0), axis=segment_ids.ndim - 1)


def sinusoids(positions: Array, embed_dim: int) -> Array:
    """Return the position vectors [..., D] of Vaswani et al. 2017 §3.5.

    Feature 2i is sin(p / 10000^(2i/D)), feature 2i + 1 the cosine.
    """
    wavelengths = np.float32(10_000.0 ** (np.arange(0, embed_dim, 2) / embed_dim))
    angles = positions[..., None].astype(jnp.float32) / wavelengths
    pairs = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)  # [..., D/2, 2]
    return pairs.reshape(*positions.shape, embed_dim)


def rope_frequencies(cfg: ModelConfig, *, local: bool = False) -> tuple[np.ndarray, float]:
    """Return the angles per position [H/2], float32, and the factor on the rotated vectors.

    Without scaling base^(-2i/H) (Su et al. 2021). `linear` divides all angles by rope_factor (Chen
    et al. 2023). `llama3` slows wavelengths beyond the original context by rope_factor, keeps short
    ones, and blends between (Llama 3.1). `yarn` does so by number of rotations, linear in the
    feature index, and multiplies queries and keys by 0.1 ln(factor) + 1 (Peng et al. 2023, eq. 22).
    `local`: those of blocks with a window where `rope_local_base` is set (Gemma 3): unscaled.
    """
    H = cfg.head_width
    if local and cfg.rope_local_base:
        return np.float32(cfg.rope_local_base ** (-np.arange(0, H, 2) / H)), 1.0
    original_len = cfg.rope_original_len or cfg.seq_len / cfg.rope_factor
    kept = cfg.rope_base ** (-np.arange(0, H, 2) / H)
    slowed = kept / cfg.rope_factor
    if cfg.rope_scaling == "none":
        return np.float32(kept), 1.0
    if cfg.rope_scaling == "linear":
        return np.float32(slowed), 1.0
    if cfg.rope_scaling == "llama3":
        rotations = original_len * kept / (2 * math.pi)  # within the original context
        keep = (rotations - cfg.rope_low_freq) / (cfg.rope_high - cfg.rope_low_freq)
        attention_factor = 1.0
    else:

        def feature(rotations: float) -> float:  # the index that makes this many rotations
            wavelength = original_len / (2 * math.pi * rotations)
            return H * math.log(wavelength) / (2 * math.log(cfg.rope_base))

        first = max(math.floor(feature(cfg.rope_high)), 0)
        last = min(math.ceil(feature(cfg.rope_low_freq)), H - 1)
        keep = 1 - (np.arange(H // 2) - first) / max(last - first, 1e-3)
        attention_factor = 0.1 * math.log(cfg.rope_factor) + 1 if cfg.rope_factor > 1 else 1.0
    keep = np.clip(keep, 0.0, 1.0)
    return np.float32(keep * kept + (1 - keep) * slowed), attention_factor


def rope_phases(cfg: ModelConfig, positions: Array, *, local: bool = False) -> tuple[Array, Array]:
    """Return cos and sin [..., T, 1, H/2] in float32 of `positions` [..., T]."""
    frequencies, factor = rope_frequencies(cfg, local=local)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    return factor * jnp.cos(angles), factor * jnp.sin(angles)


def rotate(x: Array, phases: tuple[Array, Array]) -> Array:
    """Rotate x [B, T, N, H] in float32; feature i pairs with i + H/2 (half-split, as HF files)."""
    cos, sin = phases
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
