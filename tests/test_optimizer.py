"""AdamW against the paper's arithmetic, the decay mask, and schedules at the points that matter."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TINY, VARIETY

from jaxgpt.config import OptimConfig
from jaxgpt.errors import ConfigError
from jaxgpt.model.params import specs
from jaxgpt.training.optimizer import build, decay_mask, schedule

BASE = OptimConfig(lr=1e-3, warmup_steps=10, end_lr_ratio=0.1)


def rates(cfg: OptimConfig, num_steps: int, *steps: int) -> list[float]:
    rate = schedule(cfg, num_steps)
    return [float(rate(step)) for step in steps]


@pytest.mark.parametrize(
    "kind, at_55",
    [("cosine", 5.5e-4), ("linear", 5.5e-4), ("wsd", 1e-3), ("constant", 1e-3)],
)
def test_the_run_includes_its_warm_up(kind, at_55):
    cfg = dataclasses.replace(BASE, schedule=kind)
    end = 1e-3 if kind == "constant" else 1e-4
    found = rates(cfg, 100, 0, 1, 10, 55, 100)
    assert found == pytest.approx([0, 1e-4, 1e-3, at_55, end], rel=1e-6, abs=1e-12)


def test_cosine_is_half_a_cosine_between_warm_up_and_end():
    for step in (20, 40, 77):
        right = 1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi * (step - 10) / 90))
        assert rates(BASE, 100, step) == pytest.approx([right], rel=1e-5)


def test_wsd_stays_at_the_peak_and_ends_in_a_line():
    wsd = dataclasses.replace(BASE, schedule="wsd", decay_steps=30)
    assert rates(wsd, 100, 70, 85, 100) == pytest.approx([1e-3, 5.5e-4, 1e-4], rel=1e-6)
    fifth = dataclasses.replace(wsd, decay_steps=0)  # the last 20 of 100
    assert rates(fifth, 100, 80, 90, 100) == pytest.approx([1e-3, 5.5e-4, 1e-4], rel=1e-6)


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd", "constant"])
@pytest.mark.parametrize("total, warmup", [(10, 10), (10, 12), (1, 1)])
def test_a_warm_up_as_long_as_the_run_is_a_plain_ramp(kind, total, warmup):
    cfg = dataclasses.replace(BASE, schedule=kind, warmup_steps=warmup)
    steps = range(1, total + 1)
    assert rates(cfg, total, *steps) == pytest.approx([1e-3 * k / warmup for k in steps], rel=1e-6)


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd", "constant"])
def test_past_the_end_the_rate_stays_and_no_rate_is_outside_end_and_peak(kind):
    cfg = dataclasses.replace(BASE, schedule=kind, warmup_steps=0)
    found = rates(cfg, 7, *range(20))
    assert min(found) >= 1e-4 * (1 - 1e-6) and max(found) <= 1e-3 * (1 + 1e-6)
    assert found[7] == found[19]


def test_a_run_of_no_steps_has_no_schedule():
    with pytest.raises(ConfigError, match="train.num_steps = 0"):
        schedule(BASE, 0)


def small() -> tuple[dict, list[dict]]:
    """Return float32 parameters named as the model's, and three gradients."""
    rng = np.random.default_rng(0)
    make = lambda: {  # noqa: E731
        "wq": rng.normal(size=(3, 4)).astype(np.float32),
        "attn_norm": rng.normal(size=4).astype(np.float32),
    }
    return make(), [make() for _ in range(3)]


def test_three_steps_equal_the_papers_arithmetic_in_float64():
    cfg = OptimConfig(lr=0.01, warmup_steps=2, weight_decay=0.1, clip_norm=1.0, end_lr_ratio=0.1)
    params, grads = small()
    tx = build(cfg, 10, params)
    found, state = jax.tree.map(jnp.asarray, params), tx.init(params)
    w = {k: v.astype(np.float64) for k, v in params.items()}
    m, v = ({k: np.zeros_like(x) for k, x in w.items()} for _ in range(2))
    for step, grad in enumerate(grads):
        found, state, stats = jax.jit(tx.update)(grad, state, found, step)
        # Algorithm 2 of Loshchilov & Hutter 2019 with the decay times the rate, after clipping.
        t = step + 1
        norm = math.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grad.values()))
        lr = 0.01 * min(t / 2, 1) * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * max(t - 2, 0) / 8)))
        for k in w:
            g = grad[k].astype(np.float64) * min(1, 1 / norm)
            m[k] = 0.9 * m[k] + 0.1 * g
            v[k] = 0.95 * v[k] + 0.05 * g**2
            step_ = (m[k] / (1 - 0.9**t)) / (np.sqrt(v[k] / (1 - 0.95**t)) + 1e-8)
            w[k] = w[k] - lr * (step_ + (0.1 * w[k] if k == "wq" else 0))
        assert float(stats["grad_norm"]) == pytest.approx(norm, rel=1e-6)
        assert float(stats["lr"]) == pytest.approx(lr, rel=1e-6)
    for k in w:
        np.testing.assert_allclose(found[k], w[k], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(state.mu[k], m[k], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(state.nu[k], v[k], rtol=1e-5, atol=1e-7)


def test_clipping_scales_by_the_global_norm_and_zero_turns_it_off():
    params, (grad, *_) = small()
    norm = math.sqrt(sum(float((g**2).sum()) for g in grad.values()))
    for clip, scale in ((0.5, 0.5 / norm), (2 * norm, 1.0), (0.0, 1.0)):
        tx = build(OptimConfig(clip_norm=clip), 10, params)
        _, state, _ = tx.update(grad, tx.init(params), params, 0)
        np.testing.assert_allclose(state.mu["wq"], 0.1 * scale * grad["wq"], rtol=1e-5)


def test_the_rate_depends_on_the_step_alone():
    params, (grad, *_) = small()
    tx = build(BASE, 20, params)
    fresh = tx.update(grad, tx.init(params), params, 8)[2]["lr"]
    state = tx.init(params)
    for step in range(8):
        _, state, _ = tx.update(grad, state, params, step)
    continued = tx.update(grad, state, params, 8)[2]["lr"]
    assert float(fresh) == float(continued) == pytest.approx(9e-4)  # update 9 of a 10-step ramp


def test_bfloat16_parameters_keep_float32_masters():
    # Adam, rate 1e-3, gradient 1: after 100 steps w = 1 - 100 * 1e-3. In bfloat16 alone every
    # single update rounds away and w stays 1.
    cfg = OptimConfig(lr=1e-3, schedule="constant", weight_decay=0.0)
    params = {"wq": jnp.ones((), jnp.bfloat16)}
    tx = build(cfg, 100, params)
    state = tx.init(params)
    update = jax.jit(tx.update)
    for step in range(100):
        params, state, _ = update({"wq": jnp.ones((), jnp.bfloat16)}, state, params, step)
    assert float(state.master["wq"]) == pytest.approx(0.9, abs=1e-4)
    assert params["wq"] == state.master["wq"].astype(jnp.bfloat16)
    assert params["wq"].dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves((state.mu, state.nu, state.master))} == {
        jnp.dtype("float32")
    }


def test_float32_parameters_have_no_second_copy():
    params, _ = small()
    assert build(BASE, 10, params).init(params).master is None


@pytest.mark.parametrize("name", VARIETY)
@pytest.mark.parametrize("stacked", [False, True])
def test_matrices_and_embeddings_decay_and_vectors_do_not(name, stacked):
    tree = specs(dataclasses.replace(VARIETY[name], stacked=stacked))
    for spec, decays in zip(jax.tree.leaves(tree), jax.tree.leaves(decay_mask(tree)), strict=True):
        axes = [axis for axis in spec.axes if axis != "layers"]
        bias = spec.init == ("constant", 0.0)
        assert decays == (len(axes) > 1 and not bias)


def test_a_table_of_positions_decays_as_an_embedding():
    assert decay_mask(specs(TINY)).pos_embed is True
