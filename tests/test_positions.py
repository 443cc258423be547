"""Sinusoids and RoPE: values by hand, from the paper's formula, and from transformers."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.config import ModelConfig
from jaxgpt.model.positions import restart, rope_frequencies, rope_phases, rotate, sinusoids

CASES = json.loads((Path(__file__).parent / "golden" / "rope.json").read_text())
ONE_HEAD = ModelConfig(num_heads=1, embed_dim=4, positions="rope", seq_len=64)


def test_rope_pairs_feature_i_with_feature_i_plus_half():
    x = jnp.asarray([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4)
    rotated = rotate(x, rope_phases(ONE_HEAD, jnp.asarray([[1]])))
    # cos 1 - 3 sin 1, 2 cos .01 - 4 sin .01, 3 cos 1 + sin 1, 4 cos .01 + 2 sin .01
    np.testing.assert_allclose(rotated.ravel(), [-1.98411, 1.95990, 2.46238, 4.01980], atol=5e-6)


def test_files_that_pair_neighbouring_features_need_their_lanes_permuted():
    x = jnp.asarray([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4)
    lanes = jnp.asarray([0, 2, 1, 3])  # evens, then odds; its own inverse
    rotated = rotate(x[..., lanes], rope_phases(ONE_HEAD, jnp.asarray([[1]])))[..., lanes]
    # cos 1 - 2 sin 1, 2 cos 1 + sin 1, 3 cos .01 - 4 sin .01, 4 cos .01 + 3 sin .01
    np.testing.assert_allclose(rotated.ravel(), [-1.14264, 1.92208, 2.95985, 4.02980], atol=5e-6)


def test_rope_base_changes_the_slowest_frequency():
    cfg = dataclasses.replace(ONE_HEAD, embed_dim=128, rope_base=500_000.0)
    frequencies, _ = rope_frequencies(cfg)
    np.testing.assert_allclose(frequencies[[0, -1]], [1.0, 500_000.0 ** (-126 / 128)], rtol=1e-6)


def test_rope_scores_depend_on_the_distance_alone():
    cfg = dataclasses.replace(ONE_HEAD, embed_dim=16)
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 1, 16)), jnp.float32) for _ in range(2))

    def score(i: int, j: int) -> float:
        at = [rope_phases(cfg, jnp.asarray([[p]])) for p in (i, j)]
        return float((rotate(q, at[0]) * rotate(k, at[1])).sum())

    assert score(9, 5) == pytest.approx(score(44, 40), abs=1e-5)
    assert abs(score(9, 5) - score(9, 6)) > 1e-2


def test_rotation_keeps_bfloat16_but_phases_are_float32():
    phases = rope_phases(ONE_HEAD, jnp.asarray([60_001]))
    assert phases[0].dtype == phases[1].dtype == jnp.float32
    # bfloat16 would round position 60001 to 59904: cos -0.99 in place of -0.13.
    assert float(phases[0].ravel()[0]) == pytest.approx(math.cos(60_001), abs=1e-5)
    assert rotate(jnp.ones((1, 1, 1, 4), jnp.bfloat16), phases).dtype == jnp.bfloat16


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['kind']}-{c['head_dim']}-{c['factor']}")
def test_scaled_frequencies_equal_those_of_transformers(case):
    cfg = dataclasses.replace(
        ONE_HEAD, embed_dim=case["head_dim"], seq_len=case["seq_len"], rope_base=case["base"],
        rope_scaling=case["kind"], rope_factor=case["factor"],
        rope_original_len=case["original_len"], rope_low_freq=case["low"],
        rope_high_freq=case["high"],
    )  # fmt: skip
    frequencies, attention_factor = rope_frequencies(cfg)
    np.testing.assert_allclose(frequencies, case["frequencies"], rtol=3e-6)
    assert attention_factor == pytest.approx(case["attention_factor"], rel=1e-7)


def test_blocks_with_a_window_may_have_a_base_of_their_own_that_is_never_scaled():
    cfg = dataclasses.replace(
        ONE_HEAD, embed_dim=128, rope_base=1e6, rope_scaling="linear", rope_factor=8.0
    )
    np.testing.assert_array_equal(rope_frequencies(cfg, local=True)[0], rope_frequencies(cfg)[0])
    cfg = dataclasses.replace(cfg, rope_local_base=10_000.0)
    exponents = -np.arange(0, 128, 2) / 128
    np.testing.assert_allclose(rope_frequencies(cfg, local=True)[0], 1e4**exponents, rtol=1e-6)
    np.testing.assert_allclose(rope_frequencies(cfg)[0], 1e6**exponents / 8, rtol=1e-6)


def test_original_length_defaults_to_the_context_over_the_factor():
    cfg = dataclasses.replace(
        ONE_HEAD, embed_dim=128, seq_len=65536, rope_scaling="llama3", rope_factor=8.0
    )
    named = dataclasses.replace(cfg, rope_original_len=8192)
    np.testing.assert_array_equal(rope_frequencies(cfg)[0], rope_frequencies(named)[0])


def test_yarn_attention_factor_scales_queries_and_keys():
    cfg = dataclasses.replace(
        ONE_HEAD, rope_scaling="yarn", rope_factor=4.0, rope_original_len=16, rope_high_freq=32.0
    )
    cos, sin = rope_phases(cfg, jnp.arange(3))
    np.testing.assert_allclose(cos**2 + sin**2, (0.1 * math.log(4) + 1) ** 2, rtol=1e-6)


def test_sinusoids_follow_the_formula_of_the_paper():
    table = np.asarray(sinusoids(jnp.arange(50), 6))
    right = np.zeros((50, 6))
    for p in range(50):
        for i in range(3):
            right[p, 2 * i] = math.sin(p / 10_000 ** (2 * i / 6))
            right[p, 2 * i + 1] = math.cos(p / 10_000 ** (2 * i / 6))
    np.testing.assert_allclose(table, right, atol=4e-6)


def test_positions_restart_where_the_segment_changes():
    segments = jnp.asarray([[1, 1, 1, 2, 2, 3, 0, 0], [5, 5, 5, 5, 5, 5, 5, 5]])
    right = [[0, 1, 2, 0, 1, 0, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7]]
    np.testing.assert_array_equal(restart(segments), right)
