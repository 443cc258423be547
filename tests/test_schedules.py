"""Learning rates at the points that matter, against their formulas."""

from __future__ import annotations

import dataclasses
import math

import pytest

from jaxgpt.config import Config, ModelConfig, OptimConfig, TrainConfig
from jaxgpt.errors import ConfigError
from jaxgpt.training.schedules import schedule
from jaxgpt.validation import problems_of, warmup_steps

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


@pytest.mark.parametrize(
    "shape, left",  # of the way from the end to the peak, a quarter and half into the decay
    [
        ("linear", (0.75, 0.5)),
        ("sqrt", (0.5, 1 - math.sqrt(0.5))),  # 1 - sqrt
        ("cosine", (0.5 + math.sqrt(0.125), 0.5)),
    ],
)
def test_the_decay_of_wsd_has_the_shape_that_is_asked_for(shape, left):
    cfg = dataclasses.replace(BASE, schedule="wsd", decay_steps=40, decay_shape=shape)
    right = [1e-3, *(1e-4 + 9e-4 * share for share in left), 1e-4]
    assert rates(cfg, 100, 60, 70, 80, 100) == pytest.approx(right, rel=1e-5)


def test_inverse_sqrt_is_that_of_vaswani_et_al():
    # Equation 3, d^-0.5 min(k^-0.5, k w^-1.5), in units of its peak (d w)^-0.5.
    cfg = dataclasses.replace(BASE, schedule="inverse_sqrt", warmup_steps=16)
    steps = (1, 4, 16, 17, 64, 400, 10_000)
    right = [1e-3 * 4 * min(k**-0.5, k * 16**-1.5) for k in steps]
    assert rates(cfg, 400, *steps) == pytest.approx(right, rel=1e-5)


def test_inverse_sqrt_without_a_warm_up_begins_at_the_peak():
    cfg = dataclasses.replace(BASE, schedule="inverse_sqrt", warmup_steps=0)
    assert rates(cfg, 100, 1, 4, 25) == pytest.approx([1e-3, 5e-4, 2e-4], rel=1e-6)


def in_tokens(tokens: int, steps: int = 0, **train) -> Config:
    return Config(
        model=ModelConfig(seq_len=16),
        optim=OptimConfig(warmup_tokens=tokens, warmup_steps=steps),
        train=TrainConfig(**{"global_batch": 8, "num_steps": 50} | train),
    )


@pytest.mark.parametrize("tokens, steps", [(0, 0), (1, 1), (128, 1), (129, 2), (1280, 10)])
def test_a_warm_up_in_tokens_is_rounded_up_to_whole_steps(tokens, steps):
    assert warmup_steps(in_tokens(tokens)) == steps


def test_a_warm_up_in_steps_goes_before_one_in_tokens():
    assert warmup_steps(in_tokens(1280, steps=3)) == 3


def test_a_warm_up_in_tokens_counts_the_smaller_batches_of_a_ramp():
    # 2 rows of 16 tokens until 64 tokens: 2 updates; then 128 tokens each, 2 updates to 320.
    assert warmup_steps(in_tokens(320, batch_ramp={"64": 2})) == 4


def test_a_warm_up_in_tokens_that_is_longer_than_the_run_is_refused_by_its_name():
    problems = problems_of(in_tokens(128 * 51))
    assert problems == [
        "optim.warmup_tokens = 6528 (51 steps) is longer than the run, train.num_steps = 50"
    ]


@pytest.mark.parametrize(
    "optim, named",
    [
        ({}, "optim.warmup_steps = 0"),
        ({"warmup_steps": 5}, "optim.warmup_steps = 5"),
        ({"warmup_tokens": 640}, "optim.warmup_tokens = 640 (5 steps)"),
    ],
)
def test_a_wsd_that_does_not_fit_is_refused_with_the_warm_up_that_was_asked_for(optim, named):
    wsd = OptimConfig(schedule="wsd", decay_steps=60, **optim)
    assert problems_of(dataclasses.replace(in_tokens(0), optim=wsd)) == [
        f"{named} and optim.decay_steps = 60 do not fit in train.num_steps = 50"
    ]


@pytest.mark.parametrize("key, value", [("decay_steps", 5), ("decay_shape", "sqrt")])
def test_what_only_wsd_uses_is_refused_elsewhere(key, value):
    cfg = dataclasses.replace(in_tokens(0), optim=OptimConfig(**{key: value}))
    assert problems_of(cfg) == [f'optim.{key} = {value}: needs optim.schedule = "wsd"']
    wsd = dataclasses.replace(cfg.optim, schedule="wsd")
    assert problems_of(dataclasses.replace(cfg, optim=wsd)) == []
