"""Mixing: exact counts, even spread, closed-form counters, refused weights."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxgpt.data.mixture import MAX_BLOCK, draws, make_mixture, visits_before
from jaxgpt.errors import ConfigError

MIXES = [
    {"a": 1.0},
    {"a": 0.999, "b": 0.001},
    {"a": 0.7, "b": 0.3},
    {"a": 3, "b": 3, "c": 3},
    {"a": 1, "b": 2, "c": 4, "d": 8, "e": 16, "f": 1000},
    {"big": 0.5} | {f"small{i}": 0.005 for i in range(100)},
    {f"s{i}": 1 + i * i for i in range(30)},
    # Serving the largest deficit first would miss a share here by 1.56.
    {"big": 400} | {f"mid{i}": 30 for i in range(10)} | {f"small{i}": 1 for i in range(50)},
]


@pytest.mark.parametrize("weights, counts", [((0.999, 0.001), (999, 1)), ((0.7, 0.3), (700, 300))])
def test_a_thousand_draws_are_shared_out_exactly(weights, counts):
    mixture = make_mixture(dict(zip("ab", weights, strict=True)))
    source, _ = draws(mixture, np.arange(1000))
    assert tuple(np.bincount(source)) == counts


@pytest.mark.parametrize(
    "weights, block",
    [
        ({"a": 0.7, "b": 0.3}, 10),
        ({"a": 0.1, "b": 0.2}, 3),
        ({"a": 2, "b": 6}, 4),
        ({"a": 1 / 3, "b": 2 / 3}, 3),
        ({"a": 0.999, "b": 0.001}, 1000),
        ({"only": 0.2}, 1),
        ({"a": 0.500001, "b": 0.499999}, MAX_BLOCK),
    ],
)
def test_the_block_is_the_shortest_with_the_exact_shares(weights, block):
    assert len(make_mixture(weights).slots) == block


def test_shares_that_fit_no_block_are_rounded_by_largest_remainder():
    weights = {"a": math.pi, "b": math.e, "c": math.sqrt(2)}
    counts = make_mixture(weights).counts
    shares = np.array(list(weights.values())) / sum(weights.values()) * MAX_BLOCK
    assert counts.sum() == MAX_BLOCK
    floors, parts = np.floor(shares), shares % 1
    up = np.argsort(-parts)[: MAX_BLOCK - int(floors.sum())]
    floors[up] += 1
    np.testing.assert_array_equal(counts, floors)


@pytest.mark.parametrize("weights", MIXES)
def test_every_prefix_is_within_one_of_each_share(weights):
    mixture = make_mixture(weights)
    block = len(mixture.slots)
    drawn = np.cumsum(mixture.slots[:, None] == np.arange(len(weights)), axis=0)
    exact = np.arange(1, block + 1)[:, None] * mixture.counts / block
    assert np.abs(drawn - exact).max() < 1


@pytest.mark.parametrize("weights", MIXES)
def test_each_source_is_visited_in_order_without_gap_or_repeat(weights):
    mixture = make_mixture(weights)
    source, visit = draws(mixture, np.arange(3 * len(mixture.slots) + 7))
    for number in range(len(weights)):
        mine = visit[source == number]
        np.testing.assert_array_equal(mine, np.arange(len(mine)))


@pytest.mark.parametrize("start", [0, 1, 500, 999, 1000, 2**33 + 7, 2**40])
def test_counters_at_a_position_equal_the_visits_made_before_it(start):
    mixture = make_mixture({"a": 0.7, "b": 0.3})
    source, visit = draws(mixture, np.arange(start, start + 50))
    for number in range(2):
        assert visit[source == number][0] == visits_before(mixture, start)[number]
    assert visits_before(mixture, start).sum() == start


def test_the_second_half_is_the_same_whether_or_not_one_starts_there():
    mixture = make_mixture({"a": 0.999, "b": 0.001})
    whole = draws(mixture, np.arange(1000))
    half = draws(mixture, np.arange(500, 1000))
    np.testing.assert_array_equal(np.stack(whole)[:, 500:], np.stack(half))


@pytest.mark.parametrize("weight", [0, 0.0, -1, math.nan, math.inf, -math.inf, True, "0.5", None])
def test_a_weight_that_is_not_a_positive_number_is_refused_by_name(weight):
    with pytest.raises(ConfigError, match="weight of 'bad'") as caught:
        make_mixture({"good": 1.0, "bad": weight})
    assert len(str(caught.value).splitlines()) == 1


def test_a_source_that_could_never_be_drawn_is_refused_by_name():
    with pytest.raises(ConfigError, match="'rare' is a share of 1e-09, never drawn") as caught:
        make_mixture({"common": 1.0, "rare": 1e-9})
    assert len(str(caught.value).splitlines()) == 1


def test_an_empty_table_is_refused():
    with pytest.raises(ConfigError, match="is empty"):
        make_mixture({})


def test_weights_need_not_sum_to_one():
    np.testing.assert_array_equal(make_mixture({"a": 14, "b": 6}).counts, [7, 3])
