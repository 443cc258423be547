"""Learning rates as functions of the number of an update, in closed form.

Optax's schedules are not used: their decay lengths silently include the warm-up, and a warm-up as
long as the run divides by zero there. Nothing here has state, so a run that is resumed goes on
with the rates of an unbroken one.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxgpt.config import OptimConfig
from jaxgpt.errors import ConfigError

Array = jax.Array
Schedule = Callable[[Array | int], Array]


def schedule(cfg: OptimConfig, num_steps: int, warmup: int | None = None) -> Schedule:
    """Return the learning rate of update k = 1 .. num_steps, a float32 scalar.

    The first `warmup` updates (default: `warmup_steps`) are a line from 0 at k = 0 (which no update
    uses) to `lr`. From there to `end_lr_ratio * lr` at k = `num_steps`, which includes the warm-up:

    - `cosine`, `linear`: half a cosine, or a line;
    - `wsd`: `lr` until the last `decay_steps` (0: a fifth of the run), which fall as `decay_shape`
      says: a line, half a cosine, or 1 - sqrt of the share that is done (Hägele et al. 2024);
    - `inverse_sqrt`: lr * sqrt(warmup / k), to no set end (Vaswani et al. 2017, equation 3);
    - `constant`: `lr` throughout.

    A warm-up at least as long as the run is a plain ramp. Raises ConfigError for fewer than one
    step.
    """
    if num_steps < 1:
        raise ConfigError(f"train.num_steps = {num_steps}: must be at least 1 for a schedule")
    warmup = cfg.warmup_steps if warmup is None else warmup
    peak, end = cfg.lr, cfg.lr * cfg.end_lr_ratio
    shape, decay = cfg.schedule, num_steps - warmup
    if shape == "wsd":
        shape, decay = cfg.decay_shape, min(decay, cfg.decay_steps or max(1, num_steps // 5))
    decay = max(decay, 1)  # a warm-up that fills the run leaves nothing to divide

    def rate(k: Array | int) -> Array:
        k = jnp.asarray(k, jnp.float32)
        ramp = jnp.minimum(k / max(warmup, 1), 1.0) if warmup else jnp.float32(1.0)
        if warmup >= num_steps or shape == "constant":
            return ramp * peak
        if shape == "inverse_sqrt":
            first = max(warmup, 1)
            return ramp * peak * jnp.sqrt(first / jnp.maximum(k, first))
        done = jnp.clip((k - (num_steps - decay)) / decay, 0.0, 1.0)  # of the decay
        if shape == "cosine":
            done = 0.5 * (1.0 - jnp.cos(jnp.pi * done))
        elif shape == "sqrt":
            done = jnp.sqrt(done)
        return ramp * (peak + (end - peak) * done)

    return rate
