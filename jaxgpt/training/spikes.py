"""Losses and gradient norms that stand out from those of the last updates.

A robust z-score: median and median absolute deviation of a window are not moved by the outliers
they are to detect. Every finite value enters the window, also one that stood out, so that a lasting
change of level stops being one after half a window. All values are scalars, equal on all devices.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

Array = jax.Array

LENGTH = 128  # updates in the window
ENOUGH = 32  # known values below which nothing stands out
NORMAL = 1.4826  # standard deviation of a normal distribution over its median absolute deviation
FLOOR = 1e-3  # of the median: the least deviation, should half of the window be equal


@struct.dataclass
class Window:
    """The last finite (loss, gradient norm), in float32, and two int32 counters."""

    losses: Array  # [LENGTH] per unit of weight; update number n lies at n % LENGTH
    norms: Array  # [LENGTH] before clipping
    seen: Array  # pairs that ever entered
    skipped: Array  # of these, how many were too high


def empty() -> Window:
    """Return the window of a run that has not begun."""
    losses, norms = (jnp.zeros(LENGTH, jnp.float32) for _ in range(2))
    return Window(losses, norms, jnp.int32(0), jnp.int32(0))


def is_spike(window: Window, loss: Array, norm: Array, sigma: float) -> Array:
    """Return whether loss or norm lie more than `sigma` deviations above the window's median.

    Never before 32 values are known. The deviation is 1.4826 times the median absolute deviation,
    and at least a thousandth of the median.
    """
    known = jnp.arange(LENGTH) < window.seen

    def high(values: Array, value: Array) -> Array:
        middle = _median(values, known)
        spread = NORMAL * _median(jnp.abs(values - middle), known)
        return value > middle + sigma * jnp.maximum(spread, FLOOR * jnp.abs(middle))

    return (window.seen >= ENOUGH) & (high(window.losses, loss) | high(window.norms, norm))


def record(window: Window, loss: Array, norm: Array, valid: Array, spike: Array) -> Window:
    """Return the window with a pair in the oldest one's place if `valid`, and `spike` counted."""
    at = window.seen % LENGTH
    put = lambda values, new: values.at[at].set(jnp.where(valid, new, values[at]))  # noqa: E731
    return Window(
        losses=put(window.losses, loss),
        norms=put(window.norms, norm),
        seen=window.seen + valid.astype(jnp.int32),
        skipped=window.skipped + spike.astype(jnp.int32),
    )


def _median(values: Array, known: Array) -> Array:
    """Return the median of the known values; of none, infinity."""
    ordered, count = jnp.sort(jnp.where(known, values, jnp.inf)), known.sum()
    return 0.5 * (ordered[(count - 1) // 2] + ordered[count // 2])
