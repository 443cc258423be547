"""AdamW with clipping, a decay mask by name and a schedule of the step: all that is Optax's.

The step is an argument, so the learning rate is a function of the configuration and the number of
updates done, never of a counter inside the optimiser's state. Update number k (from 1) uses
`schedule(k)`: the first update is not wasted on rate 0 and the last uses the final rate exactly.
Clipping, moments and weights are float32 whatever the parameters' dtype.
"""

from __future__ import annotations

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

    `init(params) -> OptState`; `update(grads, opt_state, params, step) -> (params, opt_state,
    stats)`, where `step` counts the updates done before; `schedule(k) -> learning rate` of update
    k. stats: `lr` and `grad_norm` (before clipping), float32 scalars.
    """

    init: Callable[[Any], OptState]
    update: Callable[[Any, OptState, Any, Array], tuple[Any, OptState, dict[str, Array]]]
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
    adam = optax.scale_by_adam(cfg.beta1, cfg.beta2, cfg.eps)
    decay = optax.add_decayed_weights(cfg.weight_decay, decay_mask(params_like))
    mixed = any(leaf.dtype != jnp.float32 for leaf in jax.tree.leaves(params_like))

    def init(params: Any) -> OptState:
        weights = _float32(params)
        start = adam.init(weights)
        return OptState(start.count, start.mu, start.nu, weights if mixed else None)

    def update(
        grads: Any, opt_state: OptState, params: Any, step: Array
    ) -> tuple[Any, OptState, dict[str, Array]]:
        grads = _float32(grads)
        norm = optax.tree.norm(grads)
        if cfg.clip_norm:
            scale = jnp.minimum(1.0, cfg.clip_norm / jnp.maximum(norm, 1e-30))
            grads = jax.tree.map(lambda g: g * scale, grads)
        weights = params if opt_state.master is None else opt_state.master
        moments = optax.ScaleByAdamState(opt_state.count, opt_state.mu, opt_state.nu)
        direction, moments = adam.update(grads, moments)
        direction, _ = decay.update(direction, decay.init(weights), weights)
        lr = rate(step + 1)
        new = jax.tree.map(lambda w, d: w - lr * d, weights, direction)
        master = None if opt_state.master is None else new
        state = OptState(moments.count, moments.mu, moments.nu, master)
        new = jax.tree.map(lambda w, old: w.astype(old.dtype), new, params)
        return new, state, {"lr": lr, "grad_norm": norm}

    return Optimizer(init, update, rate)


def schedule(cfg: OptimConfig, num_steps: int) -> Schedule:
    """Return the learning rate of update k = 1 .. num_steps, float32; at k = 0 it is the start's.

    `warmup_steps` are a line from 0 at k = 0 to `lr`; then, to `end_lr_ratio * lr` at k =
    `num_steps` (which includes the warm-up), half a cosine, or a line (`linear`), or `lr` until
    the last `decay_steps` (0: a fifth of the run) which are a line (`wsd`), or `lr` throughout
    (`constant`). A warm-up at least as long as the run is a plain ramp. Raises ConfigError for
    fewer than one step.
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
