"""`bench loss`: the figures are what they say, of chunks of the sizes asked for."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from programs import outcome, python

from jaxgpt.bench import loss, programs
from jaxgpt.errors import ConfigError

B, T, D, V = 2, 16, 8, 64


@pytest.fixture(scope="module")
def measured() -> dict:
    return loss.measure(
        rows=B, context=T, width=D, vocab=V, dtype="float32", chunks=[8, 0], repeats=3, warm_up=1
    )


def right_loss() -> float:
    """The mean cross-entropy of the same random numbers, in float64."""
    hidden, head, targets, _ = (np.asarray(x) for x in loss.random_arrays(B, T, D, V, "float32"))
    logits = hidden.astype(np.float64) @ head.astype(np.float64).T
    nll = (
        np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    )
    return float(nll.mean())


def test_all_ways_compute_the_mean_cross_entropy(measured):
    for way in measured["ways"]:
        assert way["loss"] == pytest.approx(right_loss(), abs=1e-4)


def test_all_ways_compute_the_same_gradients(measured):
    for way in measured["ways"]:
        assert way["deviation"] < 1e-5


def test_the_ways_are_training_s_and_those_asked_for(measured):
    ways = [(way["way"], way["chunk_tokens"], way["chunks"]) for way in measured["ways"]]
    # Training takes 32 MiB of logits at once on a CPU: here all 32 tokens, in its chunked way.
    assert ways == [("chunked", 32, 1), ("chunked", 8, 4), ("whole", 32, 1)]


def test_the_figures_above_are_those_of_training(measured):
    first = measured["ways"][0]
    assert first == {name: measured[name] for name in first}


def test_operations_are_three_products_with_the_head(measured):
    assert measured["flops_per_token"] == 6 * D * V


def test_utilisation_is_the_rate_times_the_operations_over_the_peak(measured):
    for way in measured["ways"]:
        rate = B * T / way["seconds_median"]
        right = rate * 6 * D * V / measured["peak_flops"]
        assert way["mfu"] == pytest.approx(right, abs=1e-4)


def test_logits_are_counted_in_float32(measured):
    assert measured["logits_bytes"] == 4 * B * T * V


def test_small_chunks_need_less_memory_than_all_logits(measured):
    in_chunks, whole = (measured["ways"][i]["temporary_bytes"] for i in (1, 2))
    assert 0 < in_chunks < whole


def test_by_default_a_quarter_four_times_as_many_and_whole_are_measured_too():
    assert loss.sizes((), 400, 10_000) == [400, 100, 1600, 0]


def test_a_chunk_is_at_most_all_tokens_and_measured_once():
    assert loss.sizes((50, 999, 0), 40, 40) == [40, 0]


# Programs on one device.


def test_the_deviation_is_the_largest_difference_over_the_largest_value():
    one, other = jnp.asarray([1.0, -4.0, 2.0]), jnp.asarray([1.0, -5.0, 2.0])
    assert programs.deviation([one], [other]) == pytest.approx(1 / 5)


def test_a_program_that_needs_too_much_memory_is_refused_in_one_line():
    from jax.errors import JaxRuntimeError

    def large(x):
        raise JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nwhile trying")

    with pytest.raises(ConfigError, match="too large for cpu: RESOURCE_EXHAUSTED: Out of memory w"):
        programs.compiled(large, jnp.zeros(2), dtype="float32")


def test_a_program_is_compiled_anew_and_later_ones_are_cached_again_which_can_be_seen(tmp_path):
    code = f"""
import os, jax, jax.numpy as jnp
jax.config.update("jax_compilation_cache_dir", {str(tmp_path)!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
from jaxgpt.bench import programs
x = jnp.zeros(4)
before = set(os.listdir({str(tmp_path)!r}))
programs.compiled(lambda x: jnp.sin(x) * 2, x, dtype="float32")
print(set(os.listdir({str(tmp_path)!r})) == before)
def f(x):
    return jnp.cos(x) * 3
with programs.cache_hits() as first:
    jax.jit(f)(x)
print(set(os.listdir({str(tmp_path)!r})) == before)
jax.clear_caches()
with programs.cache_hits() as second:
    jax.jit(f)(x)
jax.clear_caches()
jax.jit(f)(x)
print(len(first), len(second))
"""
    status, out, err = outcome(python(code, env={"JAX_ENABLE_COMPILATION_CACHE": "true"}))
    assert (status, out.split()) == (0, ["True", "False", "0", "1"]), err
