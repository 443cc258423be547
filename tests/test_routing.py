"""Losses and statistics of routers by arithmetic, and biases that balance the load."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TINY, VARIETY, random_params

from jaxgpt.config import Config, TrainConfig
from jaxgpt.model import moe
from jaxgpt.model.moe import RouterSums
from jaxgpt.model.params import restack
from jaxgpt.model.shards import Whole
from jaxgpt.training import routing

LOAD = np.float32([[6, 2, 0, 0], [2, 2, 2, 2]])
SUMS = RouterSums(
    balance=jnp.asarray([3.0, 1.0]),
    z=jnp.asarray([10.0, 30.0]),
    entropy=jnp.asarray([2.0, 6.0]),
    load=jnp.asarray(LOAD),
    dropped=jnp.asarray([3.0, 1.0]),
)
CFG = Config(train=TrainConfig(balance_loss=0.5, router_z_loss=0.01))


def test_losses_are_means_over_blocks_times_their_weights():
    total, sums = routing.losses(CFG, SUMS)
    assert float(total) == pytest.approx(0.5 * 2 + 0.01 * 20)
    assert float(sums["balance_loss_sum"]) == pytest.approx(1.0)
    assert float(sums["router_z_loss_sum"]) == pytest.approx(0.2)
    assert float(sums["router_entropy_sum"]) == pytest.approx(4.0)


def test_only_what_is_minimised_carries_gradients():
    def total(sums: RouterSums) -> jax.Array:
        total, logged = routing.losses(CFG, sums)
        return total + sum(x.sum() for x in jax.tree.leaves(logged))

    grad = jax.grad(total)(SUMS)
    np.testing.assert_allclose(grad.balance, [0.25, 0.25])
    np.testing.assert_allclose(grad.z, [0.005, 0.005])
    assert not np.any(grad.entropy) and not np.any(grad.load) and not np.any(grad.dropped)


def test_statistics_show_the_extremes_of_all_blocks_and_what_was_dropped():
    _, sums = routing.losses(CFG, SUMS)
    found = routing.statistics(sums)
    assert all(value.shape == () for value in found.values())
    assert found["expert_load_max"] == 3  # 6 of 8 slots, fair is 2
    assert found["expert_load_min"] == 0
    assert found["experts_unused"] == 2 / 8
    assert found["slots_dropped"] == 4 / 16


def test_statistics_of_a_step_without_tokens_are_finite():
    empty = jax.tree.map(jnp.zeros_like, SUMS)
    found = routing.statistics(routing.losses(CFG, empty)[1])
    assert all(math.isfinite(value) for value in found.values())


@pytest.mark.parametrize("stacked", [False, True])
def test_the_gradient_of_a_router_bias_is_the_excess_load_of_its_block(stacked):
    grads = restack(random_params(VARIETY["experts"]), stacked)
    found = restack(routing.with_load(grads, jnp.asarray(LOAD)), stacked=False)
    for index, layer in enumerate(found.layers):
        np.testing.assert_array_equal(layer.router_bias, LOAD[index] - 2)
    before = restack(grads, stacked=False)
    np.testing.assert_array_equal(found.layers[1].router, before.layers[1].router)


@pytest.mark.parametrize("stacked", [False, True])
def test_models_without_a_router_bias_keep_their_gradients(stacked):
    grads = restack(random_params(TINY), stacked)
    assert routing.with_load(grads, jnp.asarray(LOAD)) is grads or jax.tree.all(
        jax.tree.map(np.array_equal, routing.with_load(grads, jnp.asarray(LOAD)), grads)
    )


def test_descent_along_the_sign_of_the_excess_balances_a_router_with_favourites():
    # Scores with a favourite: of 512 tokens most ask the first of 8 experts. Wang et al. 2024,
    # algorithm 1: the bias alone evens the load out, and no weight of a token changes by it.
    cfg = dataclasses.replace(
        VARIETY["experts"], num_experts=8, experts_per_token=2, router="sigmoid"
    )
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(1, 512, 8)) + [3, 2, 1, 0, 0, -1, -2, -3], jnp.float32)
    grads = random_params(dataclasses.replace(cfg, num_layers=1))

    @jax.jit
    def load_of(bias: jax.Array) -> jax.Array:
        _, chosen, _ = moe.route(cfg, logits, bias, Whole("cpu"))
        return (chosen[..., None] == jnp.arange(8)).sum((0, 1, 2)).astype(jnp.float32)

    bias = jnp.zeros(8)
    assert load_of(bias).max() > 3 * 128  # of the fair 128
    for _ in range(300):
        excess = routing.with_load(grads, load_of(bias)[None]).layers[0].router_bias
        bias = bias - 3e-3 * jnp.sign(excess)
    assert 0.9 * 128 < load_of(bias).min() and load_of(bias).max() < 1.1 * 128
