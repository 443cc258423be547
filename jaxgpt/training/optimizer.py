"""One update of the weights: clipping, an optimiser's rule, rate, decay, average, or nothing.

The step is an argument, so the learning rate is a function of the configuration and the number of
updates done, never of a counter inside the optimiser's state. Update number k (from 1) uses
`schedule(k)`: the first update is not wasted on rate 0 and the last uses the final rate exactly.
Clipping, directions and weights are float32 whatever the parameters' dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxgpt.config import Config
from jaxgpt.training import leaves, spikes
from jaxgpt.training.schedules import Schedule, schedule
from jaxgpt.training.transforms import rule, select, stored
from jaxgpt.validation import warmup_steps

Array = jax.Array


@dataclass(frozen=True)
class Optimizer:
    """The functions of one optimiser; all are pure and may be traced.

    `init(params) -> OptState`; `schedule(k) -> learning rate` of update k;
    `update(grads, opt_state, params, step, weight=1, loss=0, usable=True) -> (params, opt_state,
    stats)`: step counts the updates done before, the gradient is `grads / weight`, and `loss` is
    per unit of weight. Where `usable` is False, a gradient is not finite, or loss or norm are a
    spike, parameters and state are returned bit for bit, but for the window of spikes.
    stats: `lr` and `grad_norm` (before clipping), float32; `finite` (gradients) and `applied`,
    bool; and `spikes`, int32 (skipped as such so far), where they are looked for.
    """

    init: Callable[[Any], OptState]
    update: Callable[..., tuple[Any, OptState, dict[str, Array]]]
    schedule: Schedule


@struct.dataclass
class OptState:
    """What an optimiser carries; trees of the parameters' form are float32 but for moments."""

    count: Array  # int32: updates that were applied
    inner: Any  # of the optimiser's rule: moments
    master: Any = None  # weights, if the parameters are not float32 themselves
    ema: Any = None  # moving average of the weights, where optim.ema_decay asks for it
    spikes: spikes.Window | None = None  # where optim.spike_sigma asks for it


def build(cfg: Config, num_steps: int, params_like: Any) -> Optimizer:
    """Return the optimiser of `cfg.optim` for these parameters.

    num_steps: updates of the whole run. params_like: the parameters or anything with their paths,
    shapes and dtypes, which decide what is a matrix, what decays, and whether master weights are
    kept: an update of bfloat16 weights alone would round away (1 - 0.001 is 1 in bfloat16).

    Weight decay is decoupled and multiplied with the rate (Loshchilov & Hutter 2019). The average
    has decay min(ema_decay, (1 + t) / (10 + t)) after t updates, so that it forgets the initial
    weights soon. Router biases move by `train.router_bias_rate` against the sign of their
    "gradient", the excess load (Wang et al. 2024, algorithm 1), and by nothing else. Raises
    ConfigError for a run of no steps, and for a pattern of `optim.groups` without a weight.
    """
    optim = cfg.optim
    rate = schedule(optim, num_steps, warmup_steps(cfg))
    factors, decays = leaves.rates_and_decays(optim, params_like)
    by_load = leaves.balanced(params_like)
    by_gradient = jax.tree.map(lambda balanced: not balanced, by_load)
    mixed = any(leaf.dtype != jnp.float32 for leaf in jax.tree.leaves(params_like))
    moving = rule(optim, leaves.only(params_like, by_gradient))

    def init(params: Any) -> OptState:
        weights = optax.tree.cast(params, jnp.float32)
        return OptState(
            count=jnp.int32(0),
            inner=moving.init(leaves.only(weights, by_gradient)),
            master=weights if mixed else None,
            ema=jax.tree.map(jnp.copy, weights) if optim.ema_decay else None,
            spikes=spikes.empty() if optim.spike_sigma else None,
        )

    def update(
        grads: Any,
        opt_state: OptState,
        params: Any,
        step: Array | int,
        *,
        weight: Array | float = 1.0,
        loss: Array | float = 0.0,
        usable: Array | bool = True,
    ) -> tuple[Any, OptState, dict[str, Array]]:
        excess = leaves.only(grads, by_load)
        grads = optax.tree.cast(leaves.only(grads, by_gradient), jnp.float32)
        norm = optax.tree.norm(grads) / weight
        finite = jnp.isfinite(norm)
        for leaf in jax.tree.leaves(excess):
            finite &= jnp.isfinite(leaf).all()
        apply, window, more = usable & finite, opt_state.spikes, {}
        if window is not None:
            spike = apply & spikes.is_spike(window, loss, norm, optim.spike_sigma)
            window = spikes.record(window, loss, norm, valid=apply, spike=spike)
            apply, more = apply & ~spike, {"spikes": window.skipped}
        scale = 1.0 / weight
        if optim.clip_norm:
            scale = scale * jnp.minimum(1.0, optim.clip_norm / jnp.maximum(norm, 1e-30))
        grads = jax.tree.map(lambda g: g * scale, grads)
        lr = rate(step + 1)
        weights = stored(params if opt_state.master is None else opt_state.master)
        directions, inner = moving.step(
            apply, grads, opt_state.inner, leaves.only(weights, by_gradient)
        )

        def move(
            factor: float, decay: float, w: Array, direction: Array | None, load: Array | None
        ) -> Array:
            if direction is None:
                return w - cfg.train.router_bias_rate * jnp.sign(load)
            return w - lr * factor * (direction + decay * w if decay else direction)

        moved = jax.tree.map(move, factors, decays, weights, directions, excess)
        new, ema = select(apply, moved, weights), opt_state.ema
        if ema is not None:
            age = opt_state.count.astype(jnp.float32)
            d = jnp.minimum(optim.ema_decay, (1 + age) / (10 + age))
            ema = select(apply, jax.tree.map(lambda e, w: d * e + (1 - d) * w, ema, new), ema)
        state = OptState(
            count=select(apply, opt_state.count + 1, opt_state.count),
            inner=inner,
            master=None if opt_state.master is None else new,
            ema=ema,
            spikes=window,
        )
        new = jax.tree.map(lambda w, old: w.astype(old.dtype), new, params)
        stats = {"lr": lr, "grad_norm": norm, "finite": finite, "applied": apply}
        return new, state, stats | more

    return Optimizer(init, update, rate)
