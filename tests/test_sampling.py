"""Sampling rules against hand arithmetic."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.errors import ConfigError
from jaxgpt.evaluation.sampling import Sampling, candidates, mask_ids, penalize, sample


def kept(probs: list[float], **rules: float) -> list[int]:
    """Ids that may be drawn from these probabilities, sorted."""
    rules = {"temperature": 1.0} | rules
    scaled, ids = candidates(jnp.log(jnp.array([probs], jnp.float32)), **rules)
    return sorted(np.asarray(ids)[np.isfinite(np.asarray(scaled))].tolist())


@pytest.mark.parametrize(
    "probs, top_p, count",
    [
        ([0.45, 0.3, 0.15, 0.1], 0.7, 2),
        ([0.4, 0.3, 0.2, 0.1], 0.95, 4),
        ([0.6, 0.2, 0.1, 0.1], 0.5, 1),
    ],
)
def test_nucleus_keeps_the_token_that_crosses_the_threshold(probs, top_p, count):
    assert kept(probs, top_p=top_p) == list(range(count))


def test_nucleus_of_almost_nothing_keeps_the_best_token():
    assert kept([0.1, 0.2, 0.4, 0.3], top_p=1e-9) == [2]


def test_top_p_of_one_keeps_every_token_of_a_large_vocabulary():
    # In float32 the running sum of 50,000 probabilities can reach 1 before the end.
    probs = np.full(50_000, 1 / 50_000)
    assert len(kept(probs.tolist(), top_p=1.0)) == 50_000


def test_top_k_keeps_exactly_k_and_ties_go_to_the_lower_id():
    assert kept([0.2, 0.2, 0.2, 0.2, 0.2], top_k=3) == [0, 1, 2]


def test_top_k_above_the_vocabulary_keeps_everything():
    assert kept([0.7, 0.2, 0.1], top_k=100) == [0, 1, 2]


def test_min_p_is_relative_to_the_best_token():
    # 0.3 of the largest 0.5 is 0.15: 0.16 stays, 0.14 goes; an absolute 0.3 would keep one.
    assert kept([0.5, 0.2, 0.16, 0.14], min_p=0.3) == [0, 1, 2]


def test_temperature_comes_before_the_nucleus():
    # Squared (T = 0.5) and normalised, [.4 .3 .2 .1] is [.533 .3 .133 .033]: two reach .8.
    assert kept([0.4, 0.3, 0.2, 0.1], temperature=0.5, top_p=0.8) == [0, 1]
    assert kept([0.4, 0.3, 0.2, 0.1], temperature=1.0, top_p=0.8) == [0, 1, 2]


def test_the_nucleus_is_taken_of_what_top_k_left():
    # Of the two left, 0.4 holds 4/7 = 0.571: enough for 0.55, while of all four it holds 0.4 only.
    assert kept([0.4, 0.3, 0.2, 0.1], top_k=2, top_p=0.55) == [0]
    assert kept([0.4, 0.3, 0.2, 0.1], top_p=0.55) == [0, 1]


def test_penalty_divides_positive_and_multiplies_negative_logits_of_seen_ids():
    logits = jnp.array([[2.0, -2.0, 3.0, -3.0]])
    seen = jnp.array([[True, True, False, False]])
    assert penalize(logits, seen, 2.0).tolist() == [[1.0, -4.0, 3.0, -3.0]]


def test_greedy_takes_the_lower_id_of_equal_logits():
    logits = jnp.array([[0.0, 5.0, 5.0], [1.0, 1.0, 1.0]])
    assert sample(logits, jax.random.key(0), temperature=0).tolist() == [1, 0]


def test_a_tiny_temperature_is_greedy_and_not_nan():
    logits = jnp.array([[900.0, 1000.0, -1000.0]])
    assert sample(logits, jax.random.key(3), temperature=1e-6).tolist() == [1]


def test_padding_of_the_vocabulary_is_never_drawn():
    logits = mask_ids(jnp.zeros((10_000, 8)), 5)
    ids = np.asarray(sample(logits, jax.random.key(0), temperature=2.0))
    assert set(ids.tolist()) == {0, 1, 2, 3, 4}


def test_draws_follow_the_probabilities():
    probs = np.array([0.5, 0.3, 0.15, 0.05])
    logits = jnp.log(jnp.broadcast_to(jnp.asarray(probs, jnp.float32), (20_000, 4)))
    ids = np.asarray(sample(logits, jax.random.key(1)))
    share = np.bincount(ids, minlength=4) / 20_000
    # Four standard deviations of the largest share: 4 * sqrt(.25 / 20000) = 0.0141.
    np.testing.assert_allclose(share, probs, atol=0.0142)


def test_draws_after_a_nucleus_follow_the_renormalised_probabilities():
    logits = jnp.log(jnp.broadcast_to(jnp.array([0.1, 0.5, 0.1, 0.3]), (20_000, 4)))
    ids = np.asarray(sample(logits, jax.random.key(2), top_p=0.7))
    share = np.bincount(ids, minlength=4) / 20_000
    np.testing.assert_allclose(share, [0, 0.625, 0, 0.375], atol=0.0142)


def test_with_a_key_per_row_the_draw_does_not_depend_on_the_other_rows():
    logits = jax.random.normal(jax.random.key(0), (6, 50))
    keys = jax.random.split(jax.random.key(1), 6)
    together = sample(logits, keys, top_p=0.9)
    alone = [int(sample(logits[i : i + 1], keys[i : i + 1], top_p=0.9)[0]) for i in range(6)]
    assert together.tolist() == alone


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 1e-9),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("min_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("nan")),
    ],
)
def test_a_value_out_of_range_is_refused_in_one_line_that_names_it(field, value):
    with pytest.raises(ConfigError) as caught:
        Sampling(**{field: value})
    (line,) = caught.value.problems
    assert f"sampling.{field}" in line and repr(value) in line and "\n" not in line


def test_all_problems_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        Sampling(temperature=-1, top_p=2)
    assert len(caught.value.problems) == 2


def test_sample_refuses_what_the_record_refuses():
    with pytest.raises(ConfigError, match=r"sampling\.top_p"):
        sample(jnp.zeros((1, 4)), jax.random.key(0), top_p=0.0)
