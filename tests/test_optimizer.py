"""Each optimiser against its paper's arithmetic, and what holds for all of them."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optimizers import ALL, DECAYING, direction, flat, stacked, values

from jaxgpt.checkpoint.arrays import convert
from jaxgpt.checkpoint.fingerprint import named_leaves, tree_fingerprints
from jaxgpt.config import Config, ModelConfig, OptimConfig, TrainConfig
from jaxgpt.errors import ConfigError
from jaxgpt.model.params import Params
from jaxgpt.training.optimizer import Optimizer, build
from jaxgpt.training.spikes import ENOUGH
from jaxgpt.validation import problems_of

BASE = OptimConfig(lr=1e-3, warmup_steps=10, end_lr_ratio=0.1)
USUAL = OptimConfig(lr=0.01, warmup_steps=2, weight_decay=0.1, clip_norm=1.0, end_lr_ratio=0.1)


def make(optim: OptimConfig, num_steps: int, like: Any, **train: Any) -> Optimizer:
    return build(Config(optim=optim, train=TrainConfig(**train)), num_steps, like)


def small() -> tuple[dict, list[dict]]:
    """Return float32 parameters named as the model's, and three gradients."""
    rng = np.random.default_rng(0)
    draw = lambda: {  # noqa: E731
        "wq": rng.normal(size=(3, 2, 2)).astype(np.float32),
        "attn_norm": rng.normal(size=4).astype(np.float32),
    }
    return draw(), [draw() for _ in range(3)]


# What each optimiser computes.


@functools.cache
def compiled(name: str, layout: str) -> tuple[Optimizer, Any]:
    """Return an optimiser of everything that has a state, and its compiled update."""
    optim = dataclasses.replace(USUAL, name=name, ema_decay=0.9, spike_sigma=6.0)
    tx = make(optim, 10, FORMS[layout](values(0)))
    return tx, jax.jit(tx.update)


FORMS = {"per-layer": lambda tree: tree, "stacked": stacked}


@functools.cache
def trained(name: str, layout: str = "per-layer") -> tuple[Params, Any, list[dict[str, Any]]]:
    """Return weights, state and statistics after three updates."""
    form, (tx, update) = FORMS[layout], compiled(name, layout)
    params, history = form(values(0, 0.3)), []
    state = tx.init(params)
    for step in range(3):
        params, state, stats = update(form(values(1 + step)), state, params, step)
        history.append(stats)
    return jax.device_get((params, state, history))


@pytest.mark.parametrize("name", ALL)
def test_three_steps_equal_the_papers_arithmetic_in_float64(name):
    cfg = dataclasses.replace(USUAL, name=name)
    found, _, history = trained(name)
    weights = flat(values(0, 0.3))
    moments: dict[str, dict] = {leaf: {} for leaf in weights}
    for step in range(3):
        # After clipping, with the decay times the rate (Loshchilov & Hutter 2019, algorithm 2).
        t, grads = step + 1, flat(values(1 + step))
        norm = math.sqrt(sum((g**2).sum() for g in grads.values()))
        lr = 0.01 * min(t / 2, 1) * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * max(t - 2, 0) / 8)))
        for leaf, w in weights.items():
            last = leaf.split(".")[-1]
            d = direction(cfg, last, moments[leaf], grads[leaf] * min(1, 1 / norm), w, t)
            weights[leaf] = w - lr * (d + (0.1 * w if last in DECAYING else 0))
        assert float(history[step]["grad_norm"]) == pytest.approx(norm, rel=1e-5)
        assert float(history[step]["lr"]) == pytest.approx(lr, rel=1e-6)
    for leaf, w in flat(found).items():
        np.testing.assert_allclose(w, weights[leaf], rtol=1e-5, atol=1e-6, err_msg=leaf)


@pytest.mark.parametrize("name", ALL)
def test_stacked_layers_are_moved_as_single_ones_are(name):
    mine, right = trained(name, "stacked")[0], stacked(trained(name)[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), mine, right)


@pytest.mark.parametrize("name", ALL)
def test_a_state_of_stacked_layers_goes_on_unrolled(name):
    update, grads = compiled(name, "per-layer")[1], values(4)
    params, right, _ = trained(name)
    converted, state = convert(trained(name, "stacked")[:2], "per-layer")
    assert jax.tree.structure(state) == jax.tree.structure(right)
    found, right = update(grads, state, converted, 3), update(grads, right, params, 3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, right)


@pytest.mark.parametrize("name", ALL)
def test_every_array_of_a_state_has_a_name_and_a_fingerprint(name):
    _, state, _ = trained(name)
    assert len(named_leaves(state)) == len(tree_fingerprints(state)) == len(jax.tree.leaves(state))


@pytest.mark.parametrize("name", ALL)
def test_no_two_arrays_of_a_new_state_share_a_buffer_so_that_it_can_be_donated(name):
    params = jax.tree.map(jnp.asarray, values(0))
    state = compiled(name, "per-layer")[0].init(params)
    buffers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((params, state)) if x.ndim]
    assert len(set(buffers)) == len(buffers)


def test_adafactor_follows_the_size_of_the_weight():
    # Five updates of rate 1e-3 by gradient 1: each takes a thousandth of the weight.
    params = {"attn_norm": jnp.ones(1)}
    tx = make(OptimConfig(name="adafactor", lr=1e-3, schedule="constant"), 5, params)
    state = tx.init(params)
    for step in range(5):
        params, state, _ = jax.jit(tx.update)({"attn_norm": jnp.ones(1)}, state, params, step)
    assert float(params["attn_norm"][0]) == pytest.approx(0.999**5, abs=1e-6)  # 0.99501


def test_muon_moves_matrices_of_every_shape_by_the_rms_of_adamw():
    moved = flat(jax.tree.map(lambda a, b: a - b, trained("muon")[0], values(0, 0.3)))
    rms = [math.sqrt((moved[f"layers.0.{name}"] ** 2).mean()) for name in ("wq", "wo", "w_up")]
    assert max(rms) < 1.1 * min(rms)
    # Three updates of 0.2 times rates of about 0.005, 0.01 and 0.01, in directions half alike.
    assert 1e-3 < min(rms) < 5e-3


# Clipping, rate, master weights.


def test_clipping_scales_by_the_global_norm_and_zero_turns_it_off():
    params, (grad, *_) = small()
    norm = math.sqrt(sum(float((g**2).sum()) for g in grad.values()))
    for clip, scale in ((0.5, 0.5 / norm), (2 * norm, 1.0), (0.0, 1.0)):
        tx = make(OptimConfig(clip_norm=clip), 10, params)
        _, state, _ = tx.update(grad, tx.init(params), params, 0)
        np.testing.assert_allclose(state.inner.mu["wq"], 0.1 * scale * grad["wq"], rtol=1e-5)


def test_the_rate_depends_on_the_step_alone():
    params, (grad, *_) = small()
    tx = make(BASE, 20, params)
    update = jax.jit(tx.update)
    fresh = update(grad, tx.init(params), params, 8)[2]["lr"]
    state = tx.init(params)
    for step in range(8):
        _, state, _ = update(grad, state, params, step)
    continued = update(grad, state, params, 8)[2]["lr"]
    assert float(fresh) == float(continued) == pytest.approx(9e-4)  # update 9 of a 10-step ramp


def test_a_warm_up_in_tokens_is_one_in_steps():
    optim = OptimConfig(lr=1e-3, warmup_tokens=1001)
    cfg = Config(model=ModelConfig(seq_len=10), train=TrainConfig(global_batch=10), optim=optim)
    rate = build(cfg, 20, small()[0]).schedule
    assert [float(rate(k)) for k in (1, 11)] == pytest.approx([1e-3 / 11, 1e-3], rel=1e-6)


def test_bfloat16_parameters_keep_float32_masters():
    # Adam, rate 1e-3, gradient 1: after 100 steps w = 1 - 100 * 1e-3. In bfloat16 alone every
    # single update rounds away and w stays 1.
    cfg = OptimConfig(lr=1e-3, schedule="constant", weight_decay=0.0)
    params = {"wq": jnp.ones((1, 1, 1), jnp.bfloat16)}
    tx = make(cfg, 100, params)
    state = tx.init(params)
    update = jax.jit(tx.update)
    for step in range(100):
        params, state, _ = update({"wq": jnp.ones((1, 1, 1), jnp.bfloat16)}, state, params, step)
    assert state.master["wq"].item() == pytest.approx(0.9, abs=1e-4)
    assert params["wq"] == state.master["wq"].astype(jnp.bfloat16)
    assert params["wq"].dtype == jnp.bfloat16
    trees = (state.inner.mu, state.inner.nu, state.master)
    assert {leaf.dtype for leaf in jax.tree.leaves(trees)} == {jnp.dtype("float32")}


def test_float32_parameters_have_no_second_copy():
    params, _ = small()
    assert make(BASE, 10, params).init(params).master is None


# Updates that change nothing.


@pytest.mark.parametrize(
    "name, dtype", [("adamw", "float32"), *((name, "bfloat16") for name in ALL)]
)
def test_an_update_of_a_gradient_that_is_not_finite_changes_no_bit(name, dtype):
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), small()[0])
    params["router_bias"] = jnp.zeros(3, dtype)
    optim = dataclasses.replace(USUAL, name=name, ema_decay=0.9, spike_sigma=6.0)
    tx = make(optim, 10, params)
    update = jax.jit(tx.update)
    good = small()[1][0] | {"router_bias": np.float32([1, -1, 0])}
    before = update(good, tx.init(params), params, 0, loss=3.0)[:2]
    bad = [good | {key: np.full_like(good[key], np.nan)} for key in good]
    for grads, usable in [*((g, True) for g in bad), (good, False)]:
        *after, stats = update(grads, before[1], before[0], 1, loss=3.0, usable=usable)
        jax.tree.map(np.testing.assert_array_equal, tuple(after), before)
        assert not stats["applied"] and bool(stats["finite"]) is (not usable)


def test_a_spike_is_skipped_and_counted_and_still_enters_the_window():
    params, (grad, *_) = small()
    tx = make(dataclasses.replace(BASE, spike_sigma=6.0), 100, params)
    update, state = jax.jit(tx.update), tx.init(params)
    rng = np.random.default_rng(0)
    for step in range(ENOUGH):
        params, state, _ = update(grad, state, params, step, loss=3 + 0.1 * rng.normal())
    for number, (loss, scale) in enumerate([(30.0, 1.0), (3.0, 1e3)]):  # a loss, then a norm
        much = jax.tree.map(lambda g, s=scale: s * g, grad)
        after, new, stats = update(much, state, params, ENOUGH, loss=loss)
        jax.tree.map(np.testing.assert_array_equal, after, params)
        same = new.replace(spikes=state.spikes)
        jax.tree.map(np.testing.assert_array_equal, same, state)
        assert int(stats["spikes"]) == number + 1 and not stats["applied"] and stats["finite"]
        assert int(new.spikes.seen) == ENOUGH + number + 1
        state = new
    assert update(grad, state, params, ENOUGH, loss=3.0)[2]["applied"]


def test_there_is_no_window_unless_spikes_are_looked_for():
    assert make(BASE, 10, small()[0]).init(small()[0]).spikes is None


# Moments in bfloat16.


@pytest.mark.parametrize("name", [name for name in ALL if name != "adafactor"])
def test_moments_in_bfloat16_are_rounded_once_and_computed_in_float32(name):
    optim = dataclasses.replace(USUAL, name=name, clip_norm=0.0, beta1=0.9, beta2=0.95)
    params, grads = small()
    right, found = (
        make(dataclasses.replace(optim, moment_dtype=dtype), 10, params)
        for dtype in ("float32", "bfloat16")
    )
    like, state = right.init(params), found.init(params)
    for step, grad in enumerate(grads):
        # From the same stored moments, the new ones are those of float32, rounded once.
        like = jax.tree.map(lambda a, b: jnp.asarray(b, a.dtype), like, state)
        _, like, _ = jax.jit(right.update)(grad, like, params, step)
        _, state, _ = jax.jit(found.update)(grad, state, params, step)
        narrow = jax.tree.map(lambda a, b: jnp.asarray(a, b.dtype), like, state)
        jax.tree.map(np.testing.assert_array_equal, narrow, state)
    stored = [x for x in jax.tree.leaves(state.inner) if x.dtype == jnp.bfloat16]
    assert len(stored) >= 2


def test_a_bfloat16_moment_at_the_limit_still_decays_to_nothing():
    # 1 - 0.992 is just above 2^-8; at 1 - 0.998 the moment would stay at its first value.
    params = {"wq": jnp.ones((1, 1, 1))}
    optim = OptimConfig(beta1=0.992, beta2=0.992, moment_dtype="bfloat16", clip_norm=0.0)
    tx = make(optim, 10, params)
    update, state = jax.jit(tx.update), tx.init(params)
    for step in range(400):
        grad = {"wq": jnp.full((1, 1, 1), float(step == 0))}
        _, state, _ = update(grad, state, params, step)
    assert state.inner.nu["wq"].item() < 0.1 * 0.008  # exactly: 0.04 of the first


@pytest.mark.parametrize(
    "name, key, refused",
    [
        ("adamw", "beta2", True), ("adamw", "beta1", True), ("muon", "beta1", True),
        ("lion", "beta2", True), ("lion", "beta1", False), ("sgd", "beta1", True),
        ("sgd", "beta2", False),
    ],
)  # fmt: skip
def test_a_bfloat16_moment_that_would_not_move_is_refused(name, key, refused):
    optim = OptimConfig(name=name, moment_dtype="bfloat16", **{key: 0.999})
    problems = problems_of(Config(optim=optim))
    assert [p.split(":")[0] for p in problems] == [f"optim.{key} = 0.999"] * refused
    assert problems_of(Config(optim=dataclasses.replace(optim, moment_dtype="float32"))) == []


def test_adafactor_keeps_its_small_moments_in_float32():
    (problem,) = problems_of(Config(optim=OptimConfig(name="adafactor", moment_dtype="bfloat16")))
    assert "use float32" in problem


# The moving average.


def test_the_average_follows_the_weights_with_a_decay_that_grows():
    params, grads = small()
    tx = make(dataclasses.replace(USUAL, ema_decay=0.25), 10, params)
    update, state = jax.jit(tx.update), tx.init(params)
    right = {k: v.astype(np.float64) for k, v in params.items()}
    for t, grad in enumerate([*grads, *grads]):
        params, state, _ = update(grad, state, params, t)
        d = min(0.25, (1 + t) / (10 + t))  # 0.1, 2/11, 3/12 and no more
        right = {k: d * right[k] + (1 - d) * np.float64(params[k]) for k in right}
    for key, value in right.items():
        np.testing.assert_allclose(state.ema[key], value, rtol=1e-6)


def test_the_average_of_bfloat16_weights_is_that_of_their_masters():
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), small()[0])
    tx = make(dataclasses.replace(USUAL, ema_decay=0.5), 10, params)
    start = tx.init(params)
    _, state, _ = jax.jit(tx.update)(small()[1][0], start, params, 0)
    right = 0.1 * start.master["wq"] + 0.9 * state.master["wq"]
    np.testing.assert_allclose(state.ema["wq"], right, rtol=1e-6)
    assert state.ema["wq"].dtype == jnp.float32


# Groups and router biases.


def test_groups_change_rate_and_decay_of_the_names_they_match():
    params, (grad, *_) = small()
    groups = {"norm$": {"lr": 0.5, "weight_decay": 0.2}, "w": {"lr": 0.0}}
    optim = OptimConfig(lr=0.01, name="sgd", beta1=0.0, clip_norm=0.0, groups=groups)
    tx = make(dataclasses.replace(optim, schedule="constant"), 10, params)
    after, _, _ = jax.jit(tx.update)(grad, tx.init(params), params, 0)
    np.testing.assert_array_equal(after["wq"], params["wq"])
    w, g = params["attn_norm"], grad["attn_norm"]
    np.testing.assert_allclose(after["attn_norm"], w - 0.005 * (g + 0.2 * w), rtol=1e-6)


def test_a_pattern_without_a_weight_is_refused():
    optim = OptimConfig(groups={"w": {"lr": 0.5}, "wq": {"lr": 2.0}, "lm_head": {"lr": 1.0}})
    with pytest.raises(ConfigError) as error:
        make(optim, 10, small()[0])
    assert [p.split(";")[0] for p in error.value.problems] == [
        "optim.groups['wq']: matches no weight that an earlier pattern leaves",
        "optim.groups['lm_head']: matches no weight",
    ]


@pytest.mark.parametrize(
    "groups, problem",
    [
        ({"wq": {"decay": 0.1}}, "has 'decay': choose from lr, weight_decay"),
        ({"w(": {"lr": 0.1}}, "not a regular expression"),
        ({"wq": {}}, "is empty: give it lr or weight_decay"),
        ({"wq": {"lr": -1.0}}, "lr = -1.0: must be at least 0"),
        ({"wq": {"lr": math.inf}}, "lr = inf: must be at least 0 and finite"),
    ],
)
def test_a_group_that_cannot_be_is_refused_in_one_line(groups, problem):
    (found,) = problems_of(Config(optim=OptimConfig(groups=groups)))
    assert problem in found and "\n" not in found


def test_a_router_bias_moves_against_the_sign_of_the_load_and_by_nothing_else():
    params, (grad, *_) = small()
    bias, load = np.float32([0.3, 0.0, -0.2, 0.1]), np.float32([7.0, -3.0, 0.0, -4.0])
    rest = dict(params)
    params["router_bias"], grad["router_bias"] = bias, load
    optim = dataclasses.replace(USUAL, ema_decay=0.5, groups={"w": {"lr": 0.5}})
    tx, without = (make(optim, 10, p, router_bias_rate=0.01) for p in (params, rest))
    after, state, stats = jax.jit(tx.update)(grad, tx.init(params), params, 0)
    np.testing.assert_allclose(
        after["router_bias"], [0.29, 0.01, -0.2, 0.11], rtol=1e-6
    )  # b - rate * sign(excess)
    right, _, alone = jax.jit(without.update)(
        {k: grad[k] for k in rest}, without.init(rest), rest, 0
    )
    assert float(stats["grad_norm"]) == float(alone["grad_norm"])
    for key, value in right.items():
        np.testing.assert_array_equal(after[key], value)
    assert state.inner.mu["router_bias"] is None
    np.testing.assert_allclose(state.ema["router_bias"], 0.1 * bias + 0.9 * after["router_bias"])
