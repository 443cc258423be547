"""Cached computation equals the uncached one, token for token, for rows of unequal length."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TINY, random_params

from jaxgpt.config import ModelConfig
from jaxgpt.model import gpt
from jaxgpt.model.cache import KVCache, init_cache, read, write
from jaxgpt.model.params import Params, restack

GQA = dataclasses.replace(TINY, num_kv_heads=2)
TOKENS = np.random.default_rng(0).integers(0, 64, (3, 12)).astype(np.int32)
apply = jax.jit(gpt.apply, static_argnums=0, static_argnames=("dtype",))


def setup(stacked: bool = False, **options) -> tuple[ModelConfig, Params]:
    cfg = dataclasses.replace(GQA, **options)
    return cfg, restack(random_params(cfg), stacked)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rope", "none"])
def test_cached_logits_equal_uncached_ones_for_prompts_of_unequal_length(positions, stacked):
    cfg, params = setup(stacked, positions=positions)
    lengths = np.asarray([1, 7, 4])
    right = apply(cfg, params, TOKENS)
    # Prompts are padded on the right with another token, as generation does.
    prompts = np.where(np.arange(7) < lengths[:, None], TOKENS[:, :7], 63)
    logits, cache = apply(cfg, params, prompts, cache=init_cache(cfg, 3, 12, jnp.float32))
    cache = cache.replace(length=jnp.asarray(lengths, jnp.int32))
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(logits[row, :length], right[row, :length], atol=1e-5)
    for step in range(5):
        at = lengths + step
        logits, cache = apply(cfg, params, TOKENS[np.arange(3), at][:, None], cache=cache)
        np.testing.assert_allclose(logits[:, 0], right[np.arange(3), at], atol=1e-5)
    np.testing.assert_array_equal(cache.length, lengths + 5)


@pytest.mark.parametrize("options", [
    {"sliding_window": 3}, {"attn_softcap": 2.0, "logit_softcap": 2.0}, {"qk_norm": True},
    {"remat": "full"},
])  # fmt: skip
def test_cached_logits_equal_uncached_ones_with_other_options(options):
    cfg, params = setup(positions="rope", **options)
    cache = init_cache(cfg, 3, 12, jnp.float32)
    steps = []
    for t in range(12):
        logits, cache = apply(cfg, params, TOKENS[:, t : t + 1], cache=cache)
        steps.append(logits)
    np.testing.assert_allclose(np.concatenate(steps, 1), apply(cfg, params, TOKENS), atol=1e-5)


def test_a_prompt_in_two_pieces_equals_the_whole():
    cfg, params = setup()
    first, cache = apply(cfg, params, TOKENS[:, :5], cache=init_cache(cfg, 3, 12, jnp.float32))
    second, _ = apply(cfg, params, TOKENS[:, 5:], cache=cache)
    right = apply(cfg, params, TOKENS)
    np.testing.assert_allclose(np.concatenate([first, second], 1), right, atol=1e-5)


def test_explicit_positions_place_a_token_anywhere():
    cfg, params = setup()
    _, cache = apply(cfg, params, TOKENS[:, :8], cache=init_cache(cfg, 3, 12, jnp.float32))
    at = jnp.asarray([[2], [5], [7]])
    again, cache = apply(cfg, params, jnp.take_along_axis(TOKENS, at, 1), cache=cache, positions=at)
    right = np.take_along_axis(np.asarray(apply(cfg, params, TOKENS)), at[..., None], axis=1)
    np.testing.assert_allclose(again, right, atol=1e-5)
    np.testing.assert_array_equal(cache.length, [3, 6, 8])


@pytest.mark.parametrize("cache_dtype, dtype", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_a_cache_of_another_dtype_runs_and_stays_near_float32(cache_dtype, dtype):
    cfg, params = setup(positions="rope")
    cache = init_cache(cfg, 3, 12, cache_dtype)
    logits, cache = apply(cfg, params, TOKENS[:, :11], cache=cache, dtype=dtype)
    logits, cache = apply(cfg, params, TOKENS[:, 11:], cache=cache, dtype=dtype)
    assert {x.dtype for x in (*cache.k, *cache.v)} == {
        jnp.dtype(cache_dtype)
    } and logits.dtype == jnp.float32
    right = apply(cfg, params, TOKENS)[:, 11:]
    assert np.abs(logits - right).max() < 0.05 * np.abs(right).max()


def test_write_puts_each_row_at_its_own_positions_and_drops_what_is_beyond():
    cache = init_cache(GQA, batch=2, length=6, dtype=jnp.float32)
    k = jnp.arange(2 * 3 * 2 * 8, dtype=jnp.float32).reshape(2, 3, 2, 8) + 1
    cache = write(cache, 1, jnp.asarray([[0, 1, 2], [4, 5, 6]]), k, 10 * k)
    right = np.zeros((2, 6, 2, 8))
    right[0, :3], right[1, 4:] = k[0], k[1, :2]
    right = right.swapaxes(1, 2)  # [B, K, S, H]
    np.testing.assert_array_equal(read(cache, 1, jnp.float32)[0], right)
    np.testing.assert_array_equal(read(cache, 1, jnp.float32)[1], 10 * right)
    np.testing.assert_array_equal(cache.k[0], 0)


def test_segments_and_dropout_are_refused_with_a_cache():
    cfg, params = setup(dropout=0.1)
    cache = init_cache(cfg, 3, 12)
    for option in ({"segment_ids": jnp.ones((3, 12))}, {"dropout_key": jax.random.key(0)}):
        with pytest.raises(ValueError, match="a KV cache holds one document per row"):
            gpt.hidden(cfg, params, TOKENS, cache=cache, **option)


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="JAX 0.10.2 copies it all the same")
def test_a_step_of_one_row_writes_into_a_donated_cache_and_copies_none_of_it():
    cfg, params = setup()
    cache = init_cache(cfg, 1, 12, jnp.float32)

    def step(params: Params, tokens: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
        return gpt.hidden(cfg, params, tokens, cache=cache)

    program = jax.jit(step, donate_argnums=2).lower(params, TOKENS[:1, :1], cache).compile()
    shape = ",".join(map(str, cache.k[0].shape))  # 1,2,12,8: of no other array
    lines = program.as_text().splitlines()
    assert any(f"f32[{shape}]" in line for line in lines)
    assert not [line for line in lines if re.search(rf"= f32\[{shape}\]\S* copy\(", line)]
