"""Spikes against the median and the median absolute deviation of NumPy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.training import spikes
from jaxgpt.training.spikes import ENOUGH, LENGTH, Window


@functools.partial(jax.jit, static_argnums=3)
def fill(window: Window, losses: jax.Array, norms: jax.Array, count: int) -> Window:
    yes, no = jnp.array(True), jnp.array(False)
    return jax.lax.fori_loop(
        0, count, lambda i, w: spikes.record(w, losses[i], norms[i], yes, no), window
    )


is_spike = jax.jit(spikes.is_spike)


def history(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return np.float32(3 + 0.1 * rng.normal(size=count)), np.float32(1 + rng.random(count))


def seen(losses: np.ndarray, norms: np.ndarray) -> Window:
    return fill(spikes.empty(), losses, norms, len(losses))


def threshold(values: np.ndarray, sigma: float) -> float:
    middle = np.median(values)
    return middle + sigma * 1.4826 * np.median(np.abs(values - middle))


@pytest.mark.parametrize("count", [32, 33, 128, 200])
def test_what_is_above_median_and_deviations_of_the_last_128_is_a_spike(count):
    losses, norms = history(count)
    window = seen(losses, norms)
    for at, (usual, last) in enumerate([(3.0, losses[-128:]), (1.5, norms[-128:])]):
        limit = threshold(last.astype(np.float64), 5.0)
        for factor, right in ((0.999, False), (1.001, True)):
            values = [3.0, 1.5]
            values[at] = limit * factor
            assert bool(is_spike(window, *np.float32(values), 5.0)) is right, (usual, factor)


def test_nothing_is_a_spike_before_32_values_are_known():
    losses, norms = history(ENOUGH)
    assert not is_spike(seen(losses[:-1], norms[:-1]), 1e9, 1e9, 5.0)
    assert is_spike(seen(losses, norms), 1e9, 1e9, 5.0)


def test_a_low_value_is_no_spike():
    assert not is_spike(seen(*history(64)), 0.0, 0.0, 5.0)


def test_equal_values_leave_room_for_rounding():
    window = seen(np.full(64, 3, np.float32), np.full(64, 1, np.float32))
    assert not is_spike(window, 3.001, 1.001, 5.0)  # the limit: 1 + 5 * 0.001
    assert is_spike(window, 3.02, 1.0, 5.0)


def test_a_lasting_change_of_level_stops_being_a_spike_after_half_a_window():
    window = seen(*history(LENGTH))
    verdicts = []
    for _ in range(80):
        verdicts.append(bool(is_spike(window, 9.0, 1.5, 6.0)))
        window = fill(window, np.float32([9.0]), np.float32([1.5]), 1)
    assert verdicts[0] and not verdicts[-1]
    assert 32 <= verdicts.index(False) <= 65


def test_a_pair_that_is_not_valid_leaves_the_window_as_it_is():
    before = seen(*history(40))
    no = jnp.array(False)
    after = spikes.record(before, jnp.float32(np.nan), jnp.float32(np.inf), no, no)
    jax.tree.map(np.testing.assert_array_equal, after, before)


def test_spikes_are_counted():
    yes = jnp.array(True)
    window = spikes.record(spikes.empty(), jnp.float32(1), jnp.float32(1), yes, yes)
    assert [int(window.seen), int(window.skipped)] == [1, 1]
