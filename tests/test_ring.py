"""Attention over a split sequence equals one device's, gradients included, and sends no more."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.config import MeshConfig
from jaxgpt.model import pairs
from jaxgpt.model.attention import attend
from jaxgpt.model.ring import Ring, _taker, near
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.parallel.sharding import Placement

B, T, N, K, H = 2, 64, 4, 2, 8
# Documents that begin and end on both sides of the borders of chunks of 8 and of half chunks of 4.
DOCUMENTS = np.stack(
    [np.repeat([3, 1, 7, 2, 9], [5, 14, 13, 2, 30]), np.repeat([1, 2, 0], [37, 16, 11])]
).astype(np.int32)
# Half the time of a compilation goes into optimising what here takes a millisecond.
QUICK = {"xla_cpu_experimental_onednn_custom_call": False, "xla_backend_optimization_level": 0}
CASES = {
    "plain": {},
    "documents": {"segment_ids": DOCUMENTS},
    "one kv head": {"kv_heads": 1},
    "window of a part of a chunk": {"window": 7, "segment_ids": DOCUMENTS},
    "window beyond a chunk": {"window": 13},
    "window beyond several chunks": {"window": 41, "segment_ids": DOCUMENTS},
    "scale and softcap": {"scale": 0.6, "softcap": 1.5, "segment_ids": DOCUMENTS},
}


@functools.cache
def placement(**axes: int) -> Placement:
    return Placement(make_mesh(MeshConfig(**{"data": -1} | axes)))


def inputs(kv_heads: int = K, rows: int = B, length: int = T) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    shapes = [(rows, length, heads, H) for heads in (N, kv_heads, kv_heads)]
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def values_and_gradients(shards: Placement | None, rows: int = B, **options) -> tuple:
    qkv = inputs(options.pop("kv_heads", K), rows)
    probe = jnp.cos(jnp.arange(qkv[0].size, dtype=jnp.float32)).reshape(qkv[0].shape)

    def run(q, k, v):
        impl = None if shards else "reference"
        out, pull = jax.vjp(lambda *x: attend(*x, shards=shards, impl=impl, **options), q, k, v)
        return out, *pull(probe)

    return jax.jit(run, compiler_options=QUICK)(*qkv)


@functools.cache
def right(case: str) -> tuple:
    return values_and_gradients(None, **CASES[case])


def check(found: tuple, right: tuple) -> None:
    np.testing.assert_allclose(found[0], right[0], atol=1e-6)
    for mine, other in zip(found[1:], right[1:], strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize("case", CASES)
def test_four_devices_of_a_ring_equal_one(case):
    check(values_and_gradients(placement(context=4), **CASES[case]), right(case))


@pytest.mark.parametrize("axes", [{"context": 8}, {"context": 2, "fsdp": 2, "tensor": 2}])
def test_other_meshes_equal_one_device(axes):
    check(values_and_gradients(placement(**axes), **CASES["documents"]), right("documents"))


def test_kv_heads_that_do_not_divide_over_tensor_go_where_their_queries_are():
    found = values_and_gradients(placement(context=2, tensor=4), **CASES["documents"])
    check(found, right("documents"))


def test_bfloat16_stays_near_float32():
    qkv = [x.astype(jnp.bfloat16) for x in inputs()]
    right = attend(*(x.astype(jnp.float32) for x in qkv), impl="reference")
    found = jax.jit(lambda *x: attend(*x, shards=placement(context=4)))(*qkv)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(jnp.float32), right, atol=0.03)  # 2^-9 of |v| < 4


def test_huge_scores_keep_values_and_gradients_finite():
    q, k, v = inputs()
    loss = lambda *x: attend(*x, segment_ids=DOCUMENTS, shards=placement(context=4)).sum()  # noqa: E731
    value, grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(1e4 * q, k, v)
    assert np.isfinite(value) and all(np.isfinite(x).all() for x in grads)


@pytest.mark.parametrize("window", [0, 100])
def test_strips_of_a_triangle_equal_the_whole(monkeypatch, window):
    monkeypatch.setattr(pairs, "MIN_STRIP", 16)
    monkeypatch.setattr(pairs, "SCORES", 512)  # strips are taken in blocks, too
    qkv, limits = inputs(kv_heads=N, rows=1), pairs.Limits(window, 0.0)
    out, pull = jax.vjp(lambda *x: attend(*x, window=window, scale=1.0, impl="reference"), *qkv)
    grad = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
    q, k, v = (x.swapaxes(1, 2)[None] for x in qkv)  # [1, B, heads, T, H]
    state = pairs.triangle(limits, q[:, :, :, None], k, v, None)
    found = (state.total / state.weight)[0, :, :, 0].swapaxes(1, 2)
    np.testing.assert_allclose(found, out, atol=1e-6)
    per_head = [x.swapaxes(1, 2)[None, :, :, None] for x in (grad, grad * out)]
    grads = pairs.triangle_gradients(
        limits, q[:, :, :, None], k, v, None, per_head[0],
        state.top + jnp.log(state.weight), per_head[1].sum(-1, keepdims=True),
    )  # fmt: skip
    for mine, other in zip((grads[0][:, :, :, 0], *grads[1:]), pull(grad), strict=True):
        np.testing.assert_allclose(mine[0].swapaxes(1, 2), other, atol=1e-5)


@pytest.mark.parametrize("parts", [2, 3, 4, 8])
def test_each_device_takes_an_early_and_the_matching_late_half(parts):
    ring = Ring(("context",), parts)
    took = {}
    for half in (0, 1):
        takers = [_taker(ring, half, d) for d in range(parts)]
        assert sorted(takers) == list(range(parts))  # what one ppermute can do
        for d, taker in enumerate(takers):
            took.setdefault(taker, set()).add(2 * d + half)
    assert took == {d: {d, 2 * parts - 1 - d} for d in range(parts)}


@pytest.mark.parametrize(
    "window, right", [(0, False), (2, True), (9, True), (17, True), (18, False), (64, False)]
)
def test_a_window_up_to_a_chunk_or_a_quarter_of_the_row_needs_no_ring(window, right):
    assert near(window, 64, 8) == right


@functools.cache
def compiled(parts: int, length: int = 1024, window: int = 0):
    """Return the program of attention and its gradient for rows of so many tokens."""
    shards = placement(context=parts)
    loss = lambda *x: attend(*x, shards=shards, window=window).sum()  # noqa: E731
    names = [("batch", "seq", "heads", None)] + 2 * [("batch", "seq", "kv_heads", None)]
    grad = lambda *x: jax.grad(loss, (0, 1, 2))(*map(shards.constrain, x, names))  # noqa: E731
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs(rows=8, length=length)]
    return jax.jit(grad).lower(*shapes).compile()


def test_keys_go_round_by_permutes_and_are_never_gathered():
    text = compiled(4).as_text()
    # Forward: q, k, v to their halves and back, 2 each; k and v round the ring. Backward the same,
    # and the gradients of k and v.
    assert len(re.findall(r" collective-permute(-start)?\(", text)) >= 8 + 2 + 8 + 4
    assert not re.search(r" (all-gather|all-to-all)(-start)?\(", text)


def test_a_window_sends_its_keys_alone():
    text = compiled(4, window=17).as_text()
    sent = set(re.findall(r"= f32(\[[\d,]+\])\S* collective-permute", text))
    # 16 keys of two heads, of the 8 / 2 rows that a device of data = 2 holds
    assert sent == {f"[4,16,{K},{H}]"}


def test_memory_falls_with_the_devices_of_the_ring():
    temporary = [compiled(c).memory_analysis().temp_size_in_bytes for c in (2, 4)]
    # 8 rows x 1,024 tokens on 8 devices either way, but scores of half as many keys each.
    assert temporary[1] < 0.6 * temporary[0]


@pytest.mark.parametrize(
    "axes, options",
    [
        ({"context": 4}, {"segment_ids": DOCUMENTS, "kv_heads": 1, "softcap": 1.5}),
        ({"context": 2, "tensor": 4}, {"window": 41}),  # one head a device: odd and even ones
        ({"context": 4}, {"window": 7, "segment_ids": DOCUMENTS}),  # keys of the devices before
    ],
)
def test_dropout_draws_the_masks_of_one_device(axes, options):
    options = dict(options, dropout=0.3, dropout_keys=jax.random.split(jax.random.key(0), B))
    check(values_and_gradients(placement(**axes), **options), values_and_gradients(None, **options))


def test_rows_that_do_not_divide_into_halves_are_whole_on_each_device():
    qkv = inputs(length=36)  # 36 = 4 x 9
    found = jax.jit(lambda *x: attend(*x, shards=placement(context=4)))(*qkv)
    np.testing.assert_allclose(found, attend(*qkv, impl="reference"), atol=1e-6)
