"""Rules against the optimisers that Optax itself offers, where a tree is one that these can do."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizers import values

from jaxgpt.config import OptimConfig
from jaxgpt.training.transforms import rule

CFG = OptimConfig(beta1=0.8, beta2=0.9, eps=1e-6)


def matrices(seed: int) -> dict[str, np.ndarray]:
    """Return two-dimensional weights of one layer only, and a vector."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: np.float32(rng.normal(size=shape))  # noqa: E731
    return {"w_up": draw(128, 160), "w_down": draw(160, 128), "attn_norm": draw(128)}


def as_muon(_: Any) -> dict[str, Any]:
    numbers = optax.contrib.MuonDimensionNumbers(0, 1)
    return {"w_up": numbers, "w_down": numbers, "attn_norm": None}


# Learning rate 1, no decay: what is subtracted from the weights.
OPTAX = {
    "adamw": optax.adam(1.0, 0.8, 0.9, 1e-6),
    "adafactor": optax.adafactor(1.0),
    "lion": optax.lion(1.0, 0.8, 0.9, weight_decay=0.0),
    "sgd": optax.sgd(1.0, 0.8),
    "muon": optax.contrib.muon(
        1.0, beta=0.8, adam_b1=0.8, adam_b2=0.9, eps=1e-6, consistent_rms=0.2,
        muon_weight_dimension_numbers=as_muon,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTAX)
def test_the_directions_of_three_steps_are_those_of_optax(name):
    weights, tx = matrices(0), OPTAX[name]
    mine = rule(dataclasses.replace(CFG, name=name), weights)
    step, update = jax.jit(mine.step), jax.jit(tx.update)
    state, like = mine.init(weights), tx.init(weights)
    for seed in (1, 2, 3):
        directions, state = step(jnp.array(True), matrices(seed), state, weights)
        right, like = update(matrices(seed), like, weights)
        nesterov = name == "muon"  # Optax also gives it to Adam's part of Muon
        for key in ("w_up", "w_down", *(() if nesterov else ("attn_norm",))):
            np.testing.assert_allclose(directions[key], -right[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPTAX)
def test_a_state_is_kept_bit_for_bit_where_a_step_does_not_apply(name):
    weights = jax.tree.map(jnp.asarray, values(0))
    mine = rule(dataclasses.replace(CFG, name=name), weights)
    step = jax.jit(functools.partial(mine.step, weights=weights))
    _, before = step(jnp.array(True), values(1), mine.init(weights))
    broken = jax.tree.map(lambda x: np.full_like(x, np.nan), values(2))
    _, after = step(jnp.array(False), broken, before)
    jax.tree.map(np.testing.assert_array_equal, after, before)


def test_sgd_without_momentum_has_no_state():
    mine = rule(OptimConfig(name="sgd", beta1=0.0), matrices(0))
    assert jax.tree.leaves(mine.init(matrices(0))) == []


def test_adafactor_keeps_a_row_and_a_column_for_each_matrix():
    weights = values(0)
    state = rule(OptimConfig(name="adafactor"), weights).init(weights)
    factored = state.layers[0].w_up[0]  # three experts of [128, 130]
    assert {factored.v_row.shape, factored.v_col.shape} == {(3, 128), (3, 130)}
    assert state.layers[0].wo[0].v_row.shape == (128,)  # [160, 128] behind four heads
    assert state.layers[0].router[0].v.shape == (128, 3)  # too narrow to factor
