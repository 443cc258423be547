"""AdamW with clipping, a decay mask by name and a schedule of the step: all that is Optax's.

The step is an argument, so the learning rate is a function of the configuration and the number of
updates done, never of a counter inside the optimiser's state. Update number k (from 1) uses
`schedule(k)`: the first update is not wasted on rate 0 and the last uses the final rate exactly.
Clipping, moments and weights are float32 whatever the parameters' dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxgpt.config import OptimConfig
from jaxgpt.errors import ConfigError

Array = jax.Array
Schedule = Callable[[Array | int], Array]


@dataclass(frozen=True)
class Optimizer:
    """The functions of one optimiser; all are pure and may be traced.

    `init(params) -> OptState`; `schedule(k) -> learning rate` of update k;
    `update(grads, opt_state, params, step, weight=1, usable=True) -> (params, opt_state, stats)`:
    step counts the updates done before, the gradient is `grads / weight`, and where `usable` is
    False or the gradient's norm is not finite, parameters and state are returned bit for bit.
    stats: `lr` and `grad_norm` (before clipping), float32 scalars.
    """

    init: Callable[[Any], OptState]
    update: Callable[..., tuple[Any, OptState, dict[str, Array]]]
    schedule: Schedule


@struct.dataclass
class OptState:
    """Adam's count and moments (float32), and float32 master weights if the parameters are not."""

    count: Array  # int32: updates that were applied, for bias correction
    mu: Any
    nu: Any
    master: Any = None


def build(cfg: OptimConfig, num_steps: int, params_like: Any) -> Optimizer:
    """Return AdamW (Loshchilov & Hutter 2019, decoupled decay times the rate) for these parameters.

    num_steps: updates of the whole run. params_like: the parameters or anything with their paths
    and dtypes, which decide the decay mask and whether master weights are kept: an update of
    bfloat16 weights alone would round away (1 - 0.001 is 1 in bfloat16). Raises ConfigError for a
    run of no steps.
    """
    rate = schedule(cfg, num_steps)
    mask = decay_mask(params_like)
    mixed = any(leaf.dtype != jnp.float32 for leaf in jax.tree.leaves(params_like))

    def init(params: Any) -> OptState:
        weights = _float32(params)
        mu, nu = optax.tree.zeros_like(weights), optax.tree.zeros_like(weights)
        return OptState(jnp.int32(0), mu, nu, weights if mixed else None)

    def update(
        grads: Any,
        opt_state: OptState,
        params: Any,
        step: Array | int,
        *,
        weight: Array | float = 1.0,
        usable: Array | bool = True,
    ) -> tuple[Any, OptState, dict[str, Array]]:
        norm = optax.tree.norm(_float32(grads)) / weight
        apply = usable & jnp.isfinite(norm)
        scale = 1.0 / weight
        if cfg.clip_norm:
            scale = scale * jnp.minimum(1.0, cfg.clip_norm / jnp.maximum(norm, 1e-30))
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) * scale, grads)
        # Whatever follows uses the moments as they are stored. From moments before the selection,
        # XLA:CPU would compute them twice and copy the old ones: 1 GB at 124M parameters.
        select = functools.partial(jax.tree.map, lambda new, old: jnp.where(apply, new, old))
        count = select(opt_state.count + 1, opt_state.count)
        mu = select(optax.tree.update_moment(grads, opt_state.mu, cfg.beta1, 1), opt_state.mu)
        nu = select(optax.tree.update_moment(grads, opt_state.nu, cfg.beta2, 2), opt_state.nu)
        lr = rate(step + 1)

        def move(decays: bool, w: Array, m: Array, v: Array) -> Array:
            direction = m / (jnp.sqrt(v) + cfg.eps)
            return w - lr * (direction + cfg.weight_decay * w if decays else direction)

        weights = params if opt_state.master is None else opt_state.master
        unbiased = optax.tree.bias_correction
        age = jnp.maximum(count, 1)  # 0 only if nothing was ever applied
        moved = jax.tree.map(
            move, mask, weights, unbiased(mu, cfg.beta1, age), unbiased(nu, cfg.beta2, age)
        )
        new = select(moved, weights)
        state = OptState(count, mu, nu, None if opt_state.master is None else new)
        new = jax.tree.map(lambda w, old: w.astype(old.dtype), new, params)
        return new, state, {"lr": lr, "grad_norm": norm}

    return Optimizer(init, update, rate)


def schedule(cfg: OptimConfig, num_steps: int) -> Schedule:
    """Return the learning rate of update k = 1 .. num_steps, a float32 scalar.

    `warmup_steps` are a line from 0 at k = 0 (which no update uses) to `lr`. From there to
    `end_lr_ratio * lr` at k = `num_steps`, which includes the warm-up: half a cosine, or a line
    (`linear`), or `lr` until the last `decay_steps` (0: a fifth of the run), which are a line
    (`wsd`); or `lr` throughout (`constant`). A warm-up at least as long as the run is a plain
    ramp. Raises ConfigError for fewer than one step.
    """
    if num_steps < 1:
        raise ConfigError(f"train.num_steps = {num_steps}: must be at least 1 for a schedule")
    warmup, peak, end = cfg.warmup_steps, cfg.lr, cfg.lr * cfg.end_lr_ratio
    decay = num_steps - warmup
    if cfg.schedule == "wsd":
        decay = min(decay, cfg.decay_steps or max(1, num_steps // 5))
    decay = max(decay, 1)  # a warm-up that fills the run leaves nothing to divide

    def rate(k: Array | int) -> Array:
        k = jnp.asarray(k, jnp.float32)
        ramp = jnp.minimum(k / max(warmup, 1), 1.0) if warmup else jnp.float32(1.0)
        done = jnp.clip((k - (num_steps - decay)) / decay, 0.0, 1.0)  # of the decay
        if warmup >= num_steps or cfg.schedule == "constant":
            done = jnp.zeros_like(done)
        elif cfg.schedule == "cosine":
            done = 0.5 * (1.0 - jnp.cos(jnp.pi * done))
        return ramp * (peak + (end - peak) * done)

    return rate


def decay_mask(params_like: Any) -> Any:
    """Return a tree of bool: weight decay acts on matrices and embeddings.

    By the leaf's name, as the layout adds axes: names that end in `norm`, `norm_bias` or begin
    with `b` and a projection (`bq`, `bk`, `bv`, `bo`, `b_gate`, `b_up`, `b_down`) do not decay.
    """

    def decays(path: Any, _: Any) -> bool:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return not (name.endswith(("norm", "bias")) or name in BIASES)

    return jax.tree.map_with_path(decays, params_like)


BIASES = {"bq", "bk", "bv", "bo", "b_gate", "b_up", "b_down"}


def _float32(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)
