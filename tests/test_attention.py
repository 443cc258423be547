"""Attention: every implementation equals a naive one, gradients included, and masks are exact."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.config import Config, DataConfig, MeshConfig, ModelConfig, TrainConfig
from jaxgpt.errors import ConfigError
from jaxgpt.model import attention
from jaxgpt.model.attention import Task, attend_cached, choose, describe
from jaxgpt.model.block_attention import BLOCK, block_attention
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.parallel.sharding import Placement

# Compiled as a whole: run op by op, these tests would compile ten times as much.
attend = jax.jit(
    attention.attend, static_argnames=("window", "scale", "softcap", "dropout", "impl")
)
B, T, H = 2, 150, 8  # one whole block of 128 rows and a part of one
SEGMENTS = np.asarray([[1] * 40 + [2] * 93 + [3] * 17, [1] * 140 + [0] * 10])
CASES = {
    "mha": dict(heads=(4, 4)),
    "gqa": dict(heads=(4, 2)),
    "mqa": dict(heads=(4, 1)),
    "window": dict(heads=(4, 2), window=37),
    "segments": dict(heads=(4, 2), segment_ids=SEGMENTS),
    "window and segments": dict(heads=(2, 2), window=30, segment_ids=SEGMENTS),
    "scale": dict(heads=(4, 2), scale=0.1),
    "softcap": dict(heads=(4, 2), scale=0.5, softcap=1.5),
}


def inputs(heads: tuple[int, int], length: int = T, seed: int = 0) -> list[jax.Array]:
    rng = np.random.default_rng(seed)
    shapes = [(B, length, n, H) for n in (heads[0], heads[1], heads[1])]
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def naive(q, k, v, *, window=0, scale=0.0, softcap=0.0, segment_ids=None):
    """Return attention as the textbook writes it, one boolean per pair of tokens."""
    length, groups = q.shape[1], q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, groups, axis=2), jnp.repeat(v, groups, axis=2)
    scores = jnp.einsum("bqnh,bknh->bnqk", q, k) * (scale or 1 / math.sqrt(q.shape[-1]))
    scores = softcap * jnp.tanh(scores / softcap) if softcap else scores
    segments = np.ones((len(q), length)) if segment_ids is None else segment_ids
    sees = np.zeros((len(q), length, length), bool)
    for query in range(length):
        first = max(0, query - window + 1) if window else 0
        sees[:, query, first : query + 1] = True
    sees &= segments[:, :, None] == segments[:, None]
    weights = jax.nn.softmax(jnp.where(sees[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bnqk,bknh->bqnh", weights, v)


def with_gradients(function, q, k, v):
    probe = jnp.cos(jnp.arange(q.size, dtype=jnp.float32)).reshape(q.shape)
    out, pull = jax.vjp(function, q, k, v)
    return out, *pull(probe)


@functools.cache
def right(case: str) -> tuple[jax.Array, ...]:
    options = dict(CASES[case])
    qkv = inputs(options.pop("heads"))
    return jax.jit(lambda *x: with_gradients(lambda *y: naive(*y, **options), *x))(*qkv)


@pytest.mark.parametrize(
    "case, impl",
    [
        (case, impl)
        for case in CASES
        for impl in ("blocks", "dot_product", "reference")
        if not (case == "softcap" and impl == "dot_product")  # refused, see below
    ],
)
def test_values_and_gradients_equal_the_naive_ones(case, impl):
    options = dict(CASES[case])
    qkv = inputs(options.pop("heads"))
    run = jax.jit(lambda *x: with_gradients(lambda *y: attend(*y, impl=impl, **options), *x))
    for a, b in zip(run(*qkv), right(case), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-6)


def test_worked_example_of_three_tokens_and_two_heads():
    q = [[.5, -.2, .1, .4, .2, .7, -.1, 0], [-.1, .6, .3, -.3, 0, .4, .8, .2],
         [.4, .2, -.5, .1, .6, -.2, .3, .5]]  # fmt: skip
    k = [[.2, .8, -.1, .3, .5, .1, 0, .4], [.6, -.4, .5, 0, -.2, .9, .3, .1],
         [-.2, .5, .1, .7, .4, -.1, .6, 0]]  # fmt: skip
    v = [[1, -.5, .2, .6, 0, .8, -.3, 1.1], [0, 1.2, -.4, .1, 1.5, -.2, .7, 0],
         [.4, .1, .8, -.3, -.5, .6, .2, .9]]  # fmt: skip
    right = [[1, -.5, .2, .6, 0, .8, -.3, 1.1],
             [.560945, .246393, -.063433, .380473, .843265, .237823, .262177, .481606],
             [.502139, .210325, .212230, .156727, .221377, .459250, .149406, .732418]]  # fmt: skip
    q, k, v = (jnp.asarray(x, jnp.float32).reshape(1, 3, 2, 4) for x in (q, k, v))
    for impl in ("blocks", "dot_product", "reference"):
        out = attend(q, k, v, impl=impl).reshape(3, 8)
        np.testing.assert_allclose(out, right, atol=1e-6, err_msg=impl)


@pytest.mark.parametrize("impl", ["blocks", "dot_product", "reference"])
def test_what_a_token_may_not_see_changes_nothing_bit_for_bit(impl):
    q, k, v = inputs((4, 2))
    sees = np.zeros(T, bool)
    sees[40:101] = True  # query 100 of row 0: its segment, up to itself

    def of_query_100(k, v):
        return attend(q, k, v, segment_ids=jnp.asarray(SEGMENTS), impl=impl)[0, 100]

    other_k, other_v = (jnp.where(sees[None, :, None, None], x, 7 * x + 3) for x in (k, v))
    np.testing.assert_array_equal(of_query_100(k, v), of_query_100(other_k, other_v))
    grads = jax.jit(jax.grad(lambda k, v: of_query_100(k, v).sum(), argnums=(0, 1)))(k, v)
    for grad in grads:
        reached = np.abs(np.asarray(grad[0])).max(axis=(1, 2)) > 0
        np.testing.assert_array_equal(reached, sees)


@pytest.mark.parametrize("impl", ["blocks", "dot_product", "reference"])
def test_a_token_that_sees_only_itself_gets_its_own_value(impl):
    q, k, v = inputs((2, 2))
    np.testing.assert_array_equal(attend(q, k, v, window=1, impl=impl), v)


def products(function: Callable[..., jax.Array], *arrays: Any) -> list[tuple[int, ...]]:
    """Return the last two axes of each matrix product of a function, also of the nested ones."""

    def of(jaxpr: Any) -> list[tuple[int, ...]]:
        found = []
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                found.append(equation.outvars[0].aval.shape[-2:])
            inner = [getattr(value, "jaxpr", None) for value in equation.params.values()]
            found += sum(map(of, filter(None, inner)), [])
        return found

    return of(jax.make_jaxpr(function)(*arrays).jaxpr)


@pytest.mark.parametrize("window", [0, 64])
def test_blocks_do_no_work_above_the_diagonal_or_left_of_the_window(window):
    shapes = [jax.ShapeDtypeStruct((1, 4 * BLOCK, 1, H), jnp.float32)] * 3
    scores = products(lambda *x: attention.attend(*x, window=window, impl="blocks"), *shapes)
    pairs = sum(rows * keys for rows, keys in scores if keys != H)
    blocks = [BLOCK * i for i in range(1, 5)] if not window else [BLOCK] + [BLOCK + 63] * 3
    assert pairs == BLOCK * sum(blocks)


def test_long_rows_have_at_most_16_blocks_on_cpu():
    shapes = [jax.ShapeDtypeStruct((1, 100 * BLOCK, 1, H), jnp.float32)] * 3
    assert len(products(lambda *x: attention.attend(*x, impl="blocks"), *shapes)) == 2 * 16


def test_bfloat16_inputs_give_bfloat16_near_the_float32_values():
    q, k, v = inputs((4, 2))
    low = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    right = naive(*(x.astype(jnp.float32) for x in low))
    for impl in ("blocks", "dot_product", "reference"):
        out = attend(*low, impl=impl)
        assert out.dtype == jnp.bfloat16
        # bfloat16 keeps 8 bits: weights and values are off by 2^-9 each, relative to |v| < 4.
        np.testing.assert_allclose(out.astype(jnp.float32), right, atol=0.03, err_msg=impl)


def test_huge_scores_keep_values_and_gradients_finite():
    q, k, v = inputs((2, 2))
    for impl in ("blocks", "dot_product", "reference"):
        run = jax.jit(lambda *x, i=impl: with_gradients(lambda *y: attend(*y, impl=i), *x))
        for x in run(1e4 * q, k, v):
            assert np.isfinite(x).all(), impl


@pytest.mark.parametrize("window", [0, 20])
def test_dropout_draws_the_same_masks_in_every_implementation(window):
    q, k, v = inputs((4, 2))
    keys = jax.random.split(jax.random.key(0), B)
    options = dict(dropout=0.4, dropout_keys=keys, window=window)
    blocks, whole = (attend(q, k, v, impl=impl, **options) for impl in ("blocks", "reference"))
    np.testing.assert_allclose(blocks, whole, atol=3e-6)
    assert np.abs(blocks - attend(q, k, v, window=window)).max() > 0.1


def test_dropout_keeps_its_share_of_the_weights_and_scales_them_up():
    length = 96
    q = jnp.zeros((B, length, 2, length))  # equal scores
    v = jnp.broadcast_to(jnp.eye(length)[None, :, None], q.shape)  # the output is the weights
    keys = jax.random.split(jax.random.key(0), B)
    weights = np.asarray(attend(q, q, v, dropout=0.3, dropout_keys=keys))
    counts = np.arange(1, length + 1)[None, :, None, None]
    causal = np.broadcast_to(np.tri(length, dtype=bool)[None, :, None], weights.shape)
    scaled = (weights * counts)[causal]
    kept = scaled > 0
    np.testing.assert_allclose(scaled[kept], 1 / 0.7, rtol=1e-5)
    assert kept.mean() == pytest.approx(0.7, abs=5 * math.sqrt(0.21 / kept.size))
    assert (weights[~causal] == 0).all()
    assert (weights[0] != weights[1]).any() and (weights[:, :, 0] != weights[:, :, 1]).any()


def test_dropout_of_a_row_does_not_depend_on_the_batch():
    q, k, v = inputs((2, 2), length=20)
    keys = jax.random.split(jax.random.key(0), B)
    whole = attend(q, k, v, dropout=0.5, dropout_keys=keys)
    row = attend(q[1:], k[1:], v[1:], dropout=0.5, dropout_keys=keys[1:])
    np.testing.assert_allclose(row, whole[1:], atol=1e-6)


def test_what_an_implementation_cannot_do_is_refused():
    q, k, v = inputs((2, 2), length=4)
    with pytest.raises(ConfigError, match="'dot_product': model.attn_softcap = 2 would have to be"):
        attend(q, k, v, softcap=2.0, impl="dot_product")
    with pytest.raises(ValueError, match="dropout = 0.5 needs dropout_keys"):
        attend(q, k, v, dropout=0.5)
    with pytest.raises(ConfigError, match="'flash': must be auto or one of blocks, "):
        attend(q, k, v, impl="flash")


TPU = Task("tpu", "bfloat16", 4096, 128)
GPU = Task("gpu", "bfloat16", 4096, 128)
CPU = Task("cpu", "float32", 256, 64)
EVERYTHING = dict(documents=True, window=64, softcap=30.0)


@pytest.mark.parametrize(
    "task, right",
    [
        (CPU._replace(**EVERYTHING, dropout=0.1), "blocks"),
        (TPU._replace(**EVERYTHING), "splash"),
        (TPU._replace(dtype="float32", H=80, T=1000), "splash"),
        (TPU._replace(dropout=0.1), "blocks"),
        (GPU._replace(documents=True, window=64), "cudnn"),
        (GPU._replace(dtype="float32"), "blocks"),
        (GPU._replace(softcap=30.0), "blocks"),
        (GPU._replace(H=100), "blocks"),
        (GPU._replace(H=256), "blocks"),
        (GPU._replace(T=257), "blocks"),
        (TPU._replace(**EVERYTHING, context=4), "ring"),
    ],
)
def test_the_fastest_way_that_can_do_all_that_is_asked_is_chosen(task, right):
    assert choose(task) == right


@pytest.mark.parametrize(
    "task, wanted, message",
    [
        (CPU, "splash", "'splash': a TPU is needed, not a cpu"),
        (TPU, "cudnn", "'cudnn': an NVIDIA GPU is needed, not a tpu"),
        (TPU._replace(dropout=0.1), "splash", "model.dropout = 0.1 would have to be 0"),
        (GPU._replace(softcap=30.0), "cudnn", "model.attn_softcap = 30 would have to be 0"),
        (GPU._replace(dtype="float32"), "cudnn", "train.compute_dtype = float32 would have"),
        (GPU._replace(H=264), "cudnn", "the head width 264 would have to be at most 256"),
        (GPU._replace(context=2), "cudnn", "mesh.context = 2 needs the ring"),
    ],
)
def test_a_way_that_cannot_do_what_is_asked_is_refused_with_the_reason(task, wanted, message):
    with pytest.raises(ConfigError, match=message) as refused:
        choose(task, wanted)
    assert "\n" not in str(refused.value)


def test_heads_that_only_new_gpus_take_are_left_to_those_who_ask():
    assert choose(GPU._replace(H=256), "cudnn") == "cudnn"


MODEL = ModelConfig(embed_dim=512, num_heads=4, seq_len=2048)


@pytest.mark.parametrize(
    "platform, context, changes, right",
    [
        ("cpu", 1, {}, "attention: blocks"),
        ("tpu", 1, {"sliding_window": 64, "global_every": 2}, "attention: splash"),
        ("gpu", 1, {"documents": True},
         "attention: cudnn, documents as a mask of 8.4 MB per row on a device"),
        ("gpu", 1, {"attn_softcap": 30.0},
         "attention: blocks, slower than cudnn, for which model.attn_softcap = 30 would have to "
         "be 0"),
        ("tpu", 1, {"attention": "reference"},
         "attention: reference, as train.attention says; auto would take splash, which is faster"),
        ("tpu", 4, {"sliding_window": 100, "global_every": 2},
         "attention: ring over 4 devices, each 512 tokens of a row; splash, with the last 99 keys "
         "of the devices before"),
    ],
)  # fmt: skip
def test_what_is_chosen_is_told_in_a_line_with_what_would_be_faster(
    platform, context, changes, right
):
    changes = dict(changes)
    cfg = Config(
        data=DataConfig(document_mask=changes.pop("documents", False)),
        train=TrainConfig(attention=changes.pop("attention", "auto")),
        model=dataclasses.replace(MODEL, **changes),
    )
    assert describe(cfg, platform, context) == right


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_each_device_gets_the_kv_heads_of_its_queries(kv_heads):
    # 8 query heads on 4 devices, 2 each: with 2 kv heads, devices 0 and 1 need the first.
    qkv = inputs((8, kv_heads), length=20)
    shards = Placement(make_mesh(MeshConfig(data=2, tensor=4)))
    found, right = (
        jax.jit(lambda *x, s=s: with_gradients(lambda *y: attention.attend(*y, shards=s), *x))(*qkv)
        for s in (shards, None)
    )
    for mine, other in zip(found, right, strict=True):
        np.testing.assert_allclose(mine, other, atol=2e-6)


def test_dropout_is_the_same_whatever_rows_and_heads_a_device_holds():
    q, k, v = inputs((4, 2), length=20)
    options = dict(dropout=0.4, dropout_keys=jax.random.split(jax.random.key(0), B))
    shards = Placement(make_mesh(MeshConfig(data=2, tensor=4)))
    split = jax.jit(lambda *x: attention.attend(*x, shards=shards, **options))(q, k, v)
    np.testing.assert_allclose(split, attend(q, k, v, **options), atol=1e-6)


def test_blocks_that_are_computed_again_give_the_same_and_keep_no_weights():
    qkv = inputs((4, 2))
    again, once = (
        lambda *x, r=r: block_attention(*x, rows=64, recompute=r) for r in (True, False)
    )  # fmt: skip
    for mine, other in zip(
        *(jax.jit(lambda *x, f=f: with_gradients(f, *x))(*qkv) for f in (again, once)), strict=True
    ):
        np.testing.assert_allclose(mine, other, atol=1e-6)
    kept = [
        x.shape for x in jax.tree.leaves(jax.eval_shape(lambda *x: jax.vjp(again, *x)[1], *qkv))
    ]
    assert kept and all(T not in shape[-1:] and 64 not in shape[-1:] for shape in kept)


@pytest.mark.parametrize("options", [{}, {"window": 5}, {"softcap": 1.5}, {"scale": 0.1}])
def test_cached_attention_of_unequal_positions_equals_the_naive_rows(options):
    q, k, v = inputs((4, 2), length=30)
    positions = jnp.asarray([[11, 12], [3, 4]])
    queries = jnp.take_along_axis(q, positions[..., None, None], axis=1)
    # Slots beyond a query's position hold other numbers than the row would.
    later = np.arange(30)[None, :] > np.asarray(positions[:, -1:])
    k_slots, v_slots = (
        jnp.where(later[..., None, None], 50.0, x).swapaxes(1, 2) for x in (k, v)
    )  # fmt: skip
    right = jnp.take_along_axis(naive(q, k, v, **options), positions[..., None, None], axis=1)
    out = attend_cached(queries, k_slots, v_slots, positions, **options)
    np.testing.assert_allclose(out, right, atol=1e-6)


def test_cached_attention_of_one_query_per_row_in_bfloat16_is_that_of_float32_rounded():
    q, k, v = inputs((4, 4), length=30)
    positions = jnp.asarray([[11], [3]])
    at = positions[..., None, None]
    right = jnp.take_along_axis(naive(q, k, v), at, axis=1)
    queries = jnp.take_along_axis(q, at, axis=1).astype(jnp.bfloat16)
    k_slots, v_slots = (x.swapaxes(1, 2).astype(jnp.bfloat16) for x in (k, v))
    out = attend_cached(queries, k_slots, v_slots, positions)
    assert out.shape == right.shape and out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(out), right, atol=0.03)  # of values up to 3


def test_keys_before_the_window_of_all_queries_have_no_gradient():
    T, S, window = 300, 520, 130  # three blocks; keys 0 to 90 are seen by none
    q, k, v = (
        jax.random.normal(jax.random.key(n), (1, length, 2, H))
        for n, length in enumerate((T, S, S))
    )

    def by_blocks(q, k, v):
        return (block_attention(q, k, v, window=window) ** 2).sum()

    def whole(q, k, v):
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) / H**0.5
        query, key = S - T + jnp.arange(T)[:, None], jnp.arange(S)
        seen = (key <= query) & (key > query - window)
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
        return (jnp.einsum("bnts,bsnh->btnh", weights, v) ** 2).sum()

    found, right = (jax.grad(f, argnums=(0, 1, 2))(q, k, v) for f in (by_blocks, whole))
    for ours, theirs in zip(found, right, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    unseen = S - T - window + 1
    assert not found[1][:, :unseen].any() and found[1][:, unseen].all()
