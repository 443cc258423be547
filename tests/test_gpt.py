"""The decoder: against itself in other forms, and what it must not see.

Against other implementations: `test_families`.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tiny import LLAMA, TINY, VARIETY, random_params

from jaxgpt.config import ModelConfig
from jaxgpt.model import gpt
from jaxgpt.model.blocks import keys_at
from jaxgpt.model.params import Params, restack
from jaxgpt.model.shards import Whole

TOKENS = np.random.default_rng(0).integers(0, 64, (2, 16)).astype(np.int32)
STATIC = ("dtype", "impl")
apply = jax.jit(gpt.apply, static_argnums=0, static_argnames=STATIC)


def loss_of(cfg: ModelConfig, params: Params, tokens, targets=None, weights=1.0, **options):
    logits = gpt.apply(cfg, params, tokens, **options)
    targets = jnp.roll(tokens, -1, axis=1) if targets is None else targets
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - picked
    weights = jnp.broadcast_to(weights, losses.shape)
    return jnp.where(weights > 0, losses * weights, 0.0).sum() / weights.sum()


grads_of = jax.jit(jax.value_and_grad(loss_of, argnums=1), static_argnums=0, static_argnames=STATIC)


def assert_near(a, b, rtol: float) -> None:
    """Compare two trees as vectors, and their leaves ten times less strictly."""
    off, size = [], []
    for (path, x), (_, y) in zip(
        jax.tree.leaves_with_path(a), jax.tree.leaves_with_path(b), strict=True
    ):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        off.append(np.linalg.norm(x - y))
        size.append(np.linalg.norm(y))
        # Leaves near 0 are all rounding.
        assert off[-1] <= 10 * rtol * max(size[-1], 0.01), path
    assert np.linalg.norm(off) <= rtol * np.linalg.norm(size)


# Against arithmetic


def test_flops_per_token_of_gpt2_small():
    cfg = ModelConfig(
        num_layers=12, embed_dim=768, num_heads=12, vocab_size=50257, seq_len=1024,
        attn_bias=True, out_bias=True, mlp_bias=True,
    )  # fmt: skip
    assert gpt.flops_per_token(cfg, causal=False) == 855_166_464
    assert gpt.flops_per_token(cfg, causal=True) == 798_543_360


def test_flops_leave_out_an_untied_embedding_and_what_a_window_hides():
    tied = dataclasses.replace(TINY, positions="rope", norm="rmsnorm")
    untied = dataclasses.replace(tied, tie_embeddings=False)
    assert gpt.flops_per_token(untied, causal=True) == gpt.flops_per_token(tied, causal=True)
    windowed = dataclasses.replace(tied, sliding_window=4)
    # Of 16 tokens: 16 or 8 seen on average; with a window 4, or 4 - 16 / 32.
    spared = [
        gpt.flops_per_token(tied, c) - gpt.flops_per_token(windowed, c) for c in (False, True)
    ]
    assert spared == [12 * 2 * 32 * (16 - 4), 12 * 2 * 32 * (8 - 3.5)]


def test_an_untrained_model_predicts_evenly():
    logits = apply(TINY, gpt.init(TINY, jax.random.key(0)), TOKENS)
    losses = jax.nn.logsumexp(logits, axis=-1) - logits.mean(-1)  # mean over all targets
    np.testing.assert_allclose(losses, math.log(64), atol=0.05)


# The same model in other forms


@functools.cache
def scanned(name: str) -> tuple[jax.Array, Params]:
    return grads_of(VARIETY[name], restack(random_params(VARIETY[name]), True), TOKENS)


@pytest.mark.parametrize("name", VARIETY)
def test_every_parameter_of_every_layer_has_a_gradient(name):
    for path, grad in jax.tree.leaves_with_path(restack(scanned(name)[1], False)):
        # A key bias adds the same to all scores of a query, so without RoPE it has no effect.
        idle = "bk" in str(path[-1]) and VARIETY[name].positions != "rope"
        idle |= "router_bias" in str(path[-1])  # moved by the load of experts instead
        assert np.isfinite(grad).all() and (np.abs(grad).max() > 1e-5) != idle, path


@pytest.mark.parametrize("name", ["biased", "sandwich", "post", "gemma3", "experts"])
def test_scanned_and_unrolled_layers_agree(name):
    loss, grads = grads_of(VARIETY[name], random_params(VARIETY[name]), TOKENS)
    loss_scanned, grads_scanned = scanned(name)
    assert float(loss) == pytest.approx(float(loss_scanned), rel=1e-6)
    assert_near(restack(grads_scanned, False), grads, 2e-6)


DROPOUT = dataclasses.replace(TINY, dropout=0.5)
ONE_LAYER = dataclasses.replace(DROPOUT, num_layers=1)
EIGHT_ROWS = np.random.default_rng(1).integers(0, 64, (8, 16)).astype(np.int32)


@functools.cache
def gradients_with_dropout():
    key = jax.random.key(1)
    return grads_of(ONE_LAYER, random_params(ONE_LAYER, 0.02), EIGHT_ROWS, dropout_key=key)[1]


@pytest.mark.parametrize("stacked", [False, True])
def test_remat_draws_the_same_dropout_and_gives_the_same_gradients(stacked):
    cfg = dataclasses.replace(ONE_LAYER, remat="full")
    params = restack(random_params(cfg, 0.02), stacked)
    _, grads = grads_of(cfg, params, EIGHT_ROWS, dropout_key=jax.random.key(1))
    assert_near(restack(grads, False), gradients_with_dropout(), 1e-6)


def test_eight_devices_with_remat_give_the_dropout_and_gradients_of_one_without():
    cfg = dataclasses.replace(ONE_LAYER, remat="full")
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,))
    rows, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["rows"], []))
    params, key = jax.device_put((random_params(cfg, 0.02), jax.random.key(1)), everywhere)
    _, grads = grads_of(cfg, params, jax.device_put(EIGHT_ROWS, rows), dropout_key=key)
    assert len(grads.embed.sharding.device_set) == 8
    assert_near(grads, gradients_with_dropout(), 1e-6)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_tap_is_the_hidden_state_of_the_model_cut_after_that_block(stacked):
    cfg = dataclasses.replace(TINY, num_layers=3, aux_layers=(1, 2))
    params = random_params(cfg)
    hidden, taps, _ = gpt.forward(cfg, restack(params, stacked), TOKENS)
    assert sorted(taps) == [1, 2]
    np.testing.assert_allclose(hidden, gpt.hidden(cfg, params, TOKENS), atol=1e-5)
    for depth, tap in taps.items():
        cut = dataclasses.replace(cfg, num_layers=depth, aux_layers=())
        right = gpt.hidden(cut, params.replace(layers=params.layers[:depth]), TOKENS)
        np.testing.assert_allclose(tap, right, atol=1e-5)


def test_bfloat16_compute_stays_near_float32_and_logits_are_float32():
    params = random_params(LLAMA)
    right, low = apply(LLAMA, params, TOKENS), apply(LLAMA, params, TOKENS, dtype="bfloat16")
    assert low.dtype == jnp.float32
    assert gpt.hidden(LLAMA, params, TOKENS, dtype="bfloat16").dtype == jnp.bfloat16
    assert 1e-4 < np.abs(low - right).max() / np.abs(right).max() < 0.05


def test_activations_are_placed_by_their_logical_axes():
    offered = {}

    class Recorder(Whole):
        def constrain(self, x: jax.Array, names: tuple[str | None, ...]) -> jax.Array:
            offered[names] = x.shape
            return x

    shards = Recorder("cpu")
    jax.eval_shape(lambda p: gpt.apply(LLAMA, p, TOKENS, shards=shards), random_params(LLAMA))
    assert offered == {
        ("batch", "seq", None): (2, 16, 32),
        ("batch", "seq", "heads", "head_dim"): (2, 16, 4, 8),
        ("batch", "seq", "kv_heads", "head_dim"): (2, 16, 2, 8),
        ("batch", "seq", "mlp"): (2, 16, 128),
        ("batch", "seq", "vocab"): (2, 16, 64),
    }


def test_head_has_exactly_the_rows_of_the_vocabulary():
    cfg = dataclasses.replace(TINY, vocab_size=61)
    params = random_params(cfg)
    assert gpt.head(cfg, params) is params.embed and params.embed.shape == (61, 32)
    untied = dataclasses.replace(cfg, tie_embeddings=False)
    assert gpt.head(untied, random_params(untied)) is not random_params(untied).embed
    assert apply(untied, random_params(untied), TOKENS % 61).shape == (2, 16, 61)


# What a token must not see


@pytest.mark.parametrize("name", VARIETY)
def test_changing_a_token_moves_no_earlier_logit(name):
    cfg = VARIETY[name]
    params, other = random_params(cfg), TOKENS.copy()
    other[:, 9] = (other[:, 9] + 1) % 64
    moved = np.abs(apply(cfg, params, TOKENS) - apply(cfg, params, other)).max(axis=(0, 2))
    assert (moved[:9] == 0).all() and (moved[9:] > 0)[: 2 if cfg.sliding_window else None].all()


@pytest.mark.parametrize("positions", ["learned", "rope", "sinusoidal"])
def test_packed_documents_do_not_see_each_other_and_equal_themselves_alone(positions):
    cfg = dataclasses.replace(TINY, positions=positions)
    params, row = random_params(cfg), TOKENS[:1, :12]
    segments = np.asarray([[1] * 6 + [2] * 6])
    options = {"segment_ids": segments, "positions": np.asarray([[*range(6), *range(6)]])}
    packed = apply(cfg, params, row, **options)
    other = row.copy()
    other[0, 2] = (other[0, 2] + 1) % 64
    changed = apply(cfg, params, other, **options)
    np.testing.assert_array_equal(packed[:, 6:], changed[:, 6:])
    assert np.abs(packed[:, 2:6] - changed[:, 2:6]).max() > 1e-3
    np.testing.assert_allclose(packed[:, 6:], apply(cfg, params, row[:, 6:]), atol=1e-5)
    # Positions left out restart with the segment.
    np.testing.assert_array_equal(packed, apply(cfg, params, row, segment_ids=segments))


def test_a_document_repeated_in_a_row_is_not_easier_the_second_time():
    # Each document is random; with a leak its copy could be predicted, so its logits would differ.
    params, doc = random_params(LLAMA), TOKENS[:, :8]
    row = np.concatenate([doc, doc], axis=1)
    segments = np.repeat([[1, 2]], 8, axis=1)
    separate, joined = apply(LLAMA, params, row, segment_ids=segments), apply(LLAMA, params, row)
    np.testing.assert_allclose(separate[:, 8:], separate[:, :8], atol=1e-5)
    assert np.abs(joined[:, 8:] - joined[:, :8]).max() > 1e-2


PADDED = np.asarray([[1] * 2 + [2] * 3 + [0] * 11, [1] * 16])


@functools.cache
def padded_gradients(impl: str, token: int) -> tuple[jax.Array, Params]:
    """Return loss and gradients of rows with padding, in which one token is `token`."""
    tokens = TOKENS.copy()
    tokens[0, 10] = token
    return grads_of(
        LLAMA, random_params(LLAMA), tokens, (TOKENS + 1) % 64,
        segment_ids=PADDED, weights=(PADDED > 0) * 1.0, impl=impl,
    )  # fmt: skip


@pytest.mark.parametrize("impl", ["blocks", "dot_product", "reference"])
def test_padding_changes_neither_loss_nor_gradients_bit_for_bit(impl):
    one, other = padded_gradients(impl, 7), padded_gradients(impl, 8)
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("impl", ["blocks", "dot_product", "reference"])
def test_a_row_of_nothing_but_padding_adds_nothing_to_loss_or_gradients(impl):
    def of(rows: list[int], segments: np.ndarray) -> tuple[jax.Array, Params]:
        return grads_of(
            LLAMA, random_params(LLAMA), TOKENS[rows], (TOKENS[rows] + 1) % 64,
            segment_ids=segments, weights=(segments > 0) * 1.0, impl=impl,
        )  # fmt: skip

    row = np.asarray([1] * 7 + [2] * 9)
    (loss, grads), (right, right_grads) = (
        of([0, 1], np.stack([0 * row, row])),
        of([1, 1], np.stack([row, row])),  # the mean of two equal rows is that of one
    )
    assert float(loss) == pytest.approx(float(right), rel=1e-6)
    assert_near(grads, right_grads, 2e-6)


@pytest.mark.parametrize("impl", ["dot_product", "reference"])
def test_every_attention_gives_the_same_loss_and_gradients(impl):
    (loss, grads), (loss_blocks, grads_blocks) = (padded_gradients(i, 7) for i in (impl, "blocks"))
    assert float(loss) == pytest.approx(float(loss_blocks), rel=1e-6)
    assert_near(grads, grads_blocks, 2e-6)


def test_a_sliding_window_of_two_reaches_one_token_back_per_layer():
    cfg = dataclasses.replace(TINY, num_layers=1, sliding_window=2)
    params, other = random_params(cfg), TOKENS.copy()
    other[:, 3] = (other[:, 3] + 1) % 64
    moved = np.abs(apply(cfg, params, TOKENS) - apply(cfg, params, other)).max(axis=(0, 2)) > 0
    np.testing.assert_array_equal(np.flatnonzero(moved), [3, 4])
    wide = dataclasses.replace(cfg, sliding_window=16)
    assert np.abs(apply(cfg, params, TOKENS) - apply(wide, params, TOKENS)).max() > 1e-3


# Dropout


def test_without_a_key_dropout_is_off():
    params = random_params(TINY)
    np.testing.assert_array_equal(apply(DROPOUT, params, TOKENS), apply(TINY, params, TOKENS))


def test_dropout_is_a_function_of_the_key():
    params, keys = random_params(TINY), [jax.random.split(jax.random.key(s), 2) for s in (0, 1)]
    one, same, other = (apply(DROPOUT, params, TOKENS, dropout_key=keys[i]) for i in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert np.abs(one - other).max() > 0.1


def test_with_a_key_per_row_a_row_is_the_same_in_any_batch():
    params, keys = random_params(TINY), jax.random.split(jax.random.key(0), 2)
    whole = apply(DROPOUT, params, TOKENS, dropout_key=keys)
    swapped = apply(DROPOUT, params, TOKENS[::-1], dropout_key=keys[::-1])
    np.testing.assert_allclose(swapped[::-1], whole, atol=1e-5)


def test_scanned_and_unrolled_layers_draw_the_same_dropout():
    params, keys = random_params(TINY), jax.random.split(jax.random.key(0), 2)
    unrolled = apply(DROPOUT, params, TOKENS, dropout_key=keys)
    scanned = apply(DROPOUT, restack(params, True), TOKENS, dropout_key=keys)
    np.testing.assert_allclose(unrolled, scanned, atol=1e-5)


def test_sites_and_layers_draw_different_masks():
    keys = gpt._dropout_keys(DROPOUT, jax.random.key(0), 2)
    numbers = jax.random.key_data(keys).reshape(-1, 2)
    assert keys.shape == (1 + 3 * 2, 2) and len(np.unique(numbers, axis=0)) == 7 * 2
    call = gpt.Call(
        dtype=jnp.float32, impl=None, fused=True, shards=Whole("cpu"), phases=None,
        local_phases=None, segment_ids=None, positions=None, dropout_keys=keys, weights=None,
    )  # fmt: skip
    used = [keys_at(call, layer, site) for layer in (0, 1) for site in (1, 2, 3)]
    np.testing.assert_array_equal(
        jax.random.key_data(jnp.stack([keys_at(call, 0, 0), *used])), jax.random.key_data(keys)
    )


def test_an_untyped_dropout_key_is_refused():
    with pytest.raises(TypeError, match="expected a typed key"):
        gpt.hidden(DROPOUT, random_params(TINY), TOKENS, dropout_key=jax.random.PRNGKey(0))
