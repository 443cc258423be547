"""The optimisers as rules: from gradients to directions, with Optax's transforms.

A rule knows neither rate, nor decay, nor clipping; `optimizer` adds them, alike for all. Layers,
stacked or not, and experts are matrices of their own, so both layouts of a model move alike.
Moments are stored as configured and computed in float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from jaxgpt.config import OptimConfig
from jaxgpt.training.leaves import Axes, axes_of, hidden_matrices, only

Array = jax.Array

MUON_RMS = 0.2  # of an update's entries, as AdamW's are found to be (arXiv 2502.16982, section 2.2)


class Rule(NamedTuple):
    """An optimiser as two pure functions of trees without leaves that no gradient moves.

    `init(weights) -> state`; `step(apply, grads, state, weights) -> (directions, state)`: float32
    gradients and weights, the state as it was where `apply` is False, and directions that are
    subtracted from the weights after multiplication with the rate.
    """

    init: Callable[[Any], Any]
    step: Callable[[Array, Any, Any, Any], tuple[Any, Any]]


def rule(cfg: OptimConfig, weights_like: Any) -> Rule:
    """Return the optimiser `cfg.name`.

    - `adamw`: Kingma & Ba 2015, algorithm 1 (the decay is the caller's).
    - `adafactor`: Shazeer & Stern 2018, algorithms 4 and 5: decay 1 - t^-0.8, no first moment,
      factored where both sides of a matrix are 128 or more, updates clipped to RMS 1 and multiplied
      by the RMS of the weight (at least 1e-3), so that the rate is relative to it.
    - `lion`: Chen et al. 2023, algorithm 2.
    - `muon`: Jordan et al. 2024 with Nesterov momentum `beta1`, scaled to the RMS of AdamW's
      updates (Liu et al. 2025), for the matrices of blocks; AdamW for all else.
    - `sgd`: momentum `beta1`, m = beta1 m + g, as PyTorch's.
    """
    dtype = jnp.dtype(cfg.moment_dtype)
    if cfg.name == "adafactor":
        return _from_optax(_adafactor())
    if cfg.name == "lion":
        return _from_optax(optax.scale_by_lion(cfg.beta1, cfg.beta2, mu_dtype=dtype))
    if cfg.name == "sgd":
        momentum = optax.trace(cfg.beta1, accumulator_dtype=dtype)
        return _from_optax(momentum if cfg.beta1 else optax.identity())
    if cfg.name == "muon":
        matrix = hidden_matrices(weights_like)
        shapes = jax.tree.map_with_path(lambda p, w: axes_of(p, len(w.shape)), weights_like)
        muon = _from_optax(_muon(cfg.beta1, dtype, only(shapes, matrix)))
        return _split(matrix, {"muon": muon, "adamw": _adam(cfg, dtype)})
    return _adam(cfg, dtype)


def _adam(cfg: OptimConfig, dtype: jnp.dtype) -> Rule:
    """Return Adam in Optax's parts, with directions from the moments as they are stored.

    `optax.scale_by_adam` gives directions from moments before the selection, which XLA:CPU would
    compute twice and copy the old ones for: 263 MB of temporary memory at 28M parameters, not 180.
    """

    def init(weights: Any) -> optax.ScaleByAdamState:
        mu, nu = (optax.tree.zeros_like(weights, dtype=dtype) for _ in range(2))
        return optax.ScaleByAdamState(jnp.int32(0), mu, nu)

    def step(
        apply: Array, grads: Any, state: optax.ScaleByAdamState, weights: Any
    ) -> tuple[Any, optax.ScaleByAdamState]:
        def moment(old: Any, decay: float, order: int) -> Any:
            new = optax.tree.update_moment(grads, _float32(old), decay, order)
            return select(apply, optax.tree.cast(new, dtype), old)

        mu, nu = moment(state.mu, cfg.beta1, 1), moment(state.nu, cfg.beta2, 2)
        count = select(apply, state.count + 1, state.count)
        mu, nu = stored((mu, nu))
        age = jnp.maximum(count, 1)  # 0 only if nothing was ever applied
        direction = jax.tree.map(
            lambda m, v: m / (jnp.sqrt(v) + cfg.eps),
            optax.tree.bias_correction(_float32(mu), cfg.beta1, age),
            optax.tree.bias_correction(_float32(nu), cfg.beta2, age),
        )
        return direction, optax.ScaleByAdamState(count, mu, nu)

    return Rule(init, step)


def _from_optax(tx: optax.GradientTransformation) -> Rule:
    """Return a transform as a rule; what it stores in bfloat16 it is given in float32."""

    def step(apply: Array, grads: Any, state: Any, weights: Any) -> tuple[Any, Any]:
        wide = jax.tree.map(
            lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, state
        )
        directions, new = tx.update(grads, wide, weights)
        return directions, select(apply, new, state)

    return Rule(tx.init, step)


def _split(mask: Any, rules: dict[str, Rule]) -> Rule:
    """Return the first rule for the leaves of the mask and the second for the others."""
    part = {
        name: functools.partial(only, mask=jax.tree.map(lambda m, i=i: m == (i == 0), mask))
        for i, name in enumerate(rules)
    }

    def init(weights: Any) -> dict[str, Any]:
        return {name: each.init(part[name](weights)) for name, each in rules.items()}

    def step(
        apply: Array, grads: Any, state: dict[str, Any], weights: Any
    ) -> tuple[Any, dict[str, Any]]:
        found = {
            name: each.step(apply, part[name](grads), state[name], part[name](weights))
            for name, each in rules.items()
        }
        first, second = (directions for directions, _ in found.values())
        merged = jax.tree.map(lambda m, a, b: a if m else b, mask, first, second)
        return merged, {name: new for name, (_, new) in found.items()}

    return Rule(init, step)


def _muon(beta: float, dtype: jnp.dtype, axes: Any) -> optax.GradientTransformation:
    """Return Muon; the entries of every update have the RMS of AdamW's, whatever the shape."""
    is_axes = lambda node: isinstance(node, Axes)  # noqa: E731

    def numbers(a: Axes) -> MuonDimensionNumbers:
        first, last = a.batch + a.inputs, a.batch + a.inputs + a.outputs
        return MuonDimensionNumbers(tuple(range(a.batch, first)), tuple(range(first, last)))

    def scale(update: Array, a: Axes) -> Array:
        first = a.batch + a.inputs
        sides = math.prod(update.shape[a.batch : first]), math.prod(update.shape[first:])
        return update * (MUON_RMS * math.sqrt(max(sides)))  # orthogonal rows: RMS 1 / sqrt(max)

    core = scale_by_muon(
        beta=beta,
        mu_dtype=dtype,
        weight_dimension_numbers=jax.tree.map(numbers, axes, is_leaf=is_axes),
    )
    return optax.chain(core, optax.stateless(lambda updates, _: jax.tree.map(scale, updates, axes)))


def _adafactor() -> optax.GradientTransformation:
    """Return Adafactor, which factors, clips and scales each matrix or vector by itself.

    The state of a leaf stands in its place in the tree of weights. Optax's transform alone would
    factor by the two longest axes, be they layers, or a head's width, and clip all layers together.
    """
    tx = optax.chain(
        optax.scale_by_factored_rms(),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms(),
    )

    def each(function: Callable, path: Any, *leaves: Array, state: Any = None) -> Any:
        """Call `function(*matrices[, state])` over all batch axes of the leaves."""
        axes, shape = axes_of(path, leaves[0].ndim), leaves[0].shape
        batch, rest = shape[: axes.batch], shape[axes.batch :]
        sides = math.prod(rest[: axes.inputs]), math.prod(rest[axes.inputs :])
        views = [x.reshape(*batch, *(sides if axes.inputs else sides[1:])) for x in leaves]
        for _ in batch:
            function = jax.vmap(function)
        return function(*views) if state is None else function(*views, state)

    def init(weights: Any) -> Any:
        return jax.tree.map_with_path(functools.partial(each, tx.init), weights)

    def update(grads: Any, state: Any, weights: Any) -> tuple[Any, Any]:
        def one(path: Any, g: Array, w: Array, old: Any) -> tuple[Array, Any]:
            new, after = each(lambda g, w, s: tx.update(g, s, w), path, g, w, state=old)
            return new.reshape(g.shape), after

        pairs = jax.tree.map_with_path(one, grads, weights, state)
        pick = lambda i: jax.tree.map(lambda _, pair: pair[i], grads, pairs)  # noqa: E731
        return pick(0), pick(1)

    return optax.GradientTransformation(init, update)


def select(apply: Array, new: Any, old: Any) -> Any:
    """Return the new tree where `apply` holds, the old one bit for bit where not."""
    return jax.tree.map(lambda a, b: jnp.where(apply, a, b), new, old)


def stored(tree: Any) -> Any:
    """Return the tree, which XLA:CPU must have written before anything that uses it.

    There it makes the AdamW update of 28M parameters need 180 MB of temporary memory instead of
    220, and 10 % less time. Elsewhere one fused kernel over all of the state is better.
    """
    return jax.lax.platform_dependent(tree, cpu=jax.lax.optimization_barrier, default=lambda x: x)


def _float32(tree: Any) -> Any:
    return optax.tree.cast(tree, jnp.float32)
