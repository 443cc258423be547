"""The loss and its own derivative: against arithmetic, NumPy in float64, and autodiff."""

from __future__ import annotations

import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxgpt.config import MeshConfig
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.parallel.sharding import Placement
from jaxgpt.parallel.xla_options import of_dtype
from jaxgpt.planning.collectives import collectives
from jaxgpt.training.loss import chunk_size, chunk_tokens, next_token_sums, token_losses

B, T, D, V = 4, 10, 8, 24
# Everything that may be added to plain cross-entropy, and all of it together.
OPTIONS = [
    dict(zip(("z_loss", "softcap", "label_smoothing"), values, strict=True))
    for values in itertools.product((0.0, 0.1), (0.0, 3.0), (0.0, 0.2))
]


def next_token(*arrays, **options) -> tuple[jax.Array, jax.Array]:
    """Return what is minimised and its weight."""
    sums = next_token_sums(*arrays, **options)
    return sums.total, sums.weight


def example(seed: int = 0) -> tuple[np.ndarray, ...]:
    """Return hidden, head, targets and weights (some 0, some fractions)."""
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(B, T, D)).astype(np.float32)
    head = rng.normal(size=(V, D)).astype(np.float32)
    weights = rng.choice([0.0, 0.5, 1.0], size=(B, T)).astype(np.float32)
    return hidden, head, rng.integers(0, V, (B, T)).astype(np.int32), weights


def losses_in_float64(
    hidden: np.ndarray, head: np.ndarray, targets: np.ndarray, softcap: float = 0.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return by the textbook -log softmax(logits) of the target, its mean over ids, and log Z."""
    logits = hidden.astype(np.float64) @ head.astype(np.float64).T
    logits = softcap * np.tanh(logits / softcap) if softcap else logits
    lse = np.log(np.exp(logits).sum(-1))
    losses = lse[..., None] - logits
    return np.take_along_axis(losses, targets[..., None], -1)[..., 0], losses.mean(-1), lse


def test_two_logits_give_the_worked_loss_and_gradient():
    hidden, head = jnp.array([[[2.5, 2.2]]]), jnp.eye(2)  # so the logits are 2.5 and 2.2
    targets, weights = jnp.array([[0]]), jnp.ones((1, 1))
    loss, grad = jax.value_and_grad(lambda h: next_token(h, head, targets, weights)[0])(hidden)
    assert float(loss) == pytest.approx(0.554355, abs=1e-6)  # log(1 + e^-0.3)
    np.testing.assert_allclose(grad[0, 0], [-0.425557, 0.425557], atol=1e-6)


@pytest.mark.parametrize("chunk", [0, 8, 12, 1000])  # all at once, 2 and 3 positions, one chunk
@pytest.mark.parametrize("options", OPTIONS[:: len(OPTIONS) - 1], ids=["plain", "everything"])
def test_sums_equal_the_formula_in_float64(chunk, options):
    hidden, head, targets, weights = example()
    nll, uniform, lse = losses_in_float64(hidden, head, targets, options["softcap"])
    smoothing = options["label_smoothing"] * (uniform - nll)
    z = options["z_loss"] * lse**2
    sums = next_token_sums(hidden, head, targets, weights, **options, chunk=chunk)
    assert float(sums.total) == pytest.approx((weights * (nll + smoothing + z)).sum(), rel=1e-6)
    assert float(sums.nll) == pytest.approx((weights * nll).sum(), rel=1e-6)
    assert float(sums.smoothing) == pytest.approx((weights * smoothing).sum(), rel=1e-5)
    assert float(sums.z) == pytest.approx((weights * z).sum(), rel=1e-6)
    assert float(sums.weight) == weights.sum()


def values_and_gradients(chunk: int, options: dict, **more) -> tuple:
    """Return the loss of the example times 3, and the gradients of hidden and head."""
    hidden, head, targets, weights = example()

    def scaled(hidden, head):  # the factor tests that the cotangent is used
        return 3.0 * next_token(hidden, head, targets, weights, chunk=chunk, **options, **more)[0]

    return jax.jit(jax.value_and_grad(scaled, (0, 1)))(hidden, head)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_chunks_equal_all_logits_at_once_and_automatic_differentiation(options):
    right, right_grads = values_and_gradients(0, options)
    # Chunks of 3 positions and a rest of 1; one chunk.
    for chunk in (12, 1000) if options == OPTIONS[-1] else (12,):
        value, grads = values_and_gradients(chunk, options)
        assert float(value) == pytest.approx(float(right), rel=1e-6)
        for mine, other in zip(grads, right_grads, strict=True):
            assert np.linalg.norm(mine - other) <= 1e-5 * np.linalg.norm(other)


def test_label_smoothing_of_uniform_logits_changes_nothing():
    # Every id has the loss ln V, whatever share of the target goes to which.
    zeros = np.zeros((1, 3, D), np.float32)
    head = np.ones((V, D), np.float32)
    sums = next_token_sums(
        zeros, head, np.zeros((1, 3), np.int32), np.ones((1, 3)), label_smoothing=0.9
    )
    assert float(sums.total) == pytest.approx(3 * math.log(V), rel=1e-6)
    assert float(sums.smoothing) == pytest.approx(0, abs=1e-5)


def test_the_gradient_of_a_smoothed_loss_vanishes_at_its_targets_distribution():
    # Two ids, s = 0.2: the target's share is 0.8 + 0.1, so at logits (ln 9, 0) nothing is left.
    hidden = jnp.array([[[math.log(9), 0.0]]])
    loss = lambda h: next_token(h, jnp.eye(2), jnp.array([[0]]), jnp.ones((1, 1)),  # noqa: E731
                                label_smoothing=0.2)[0]  # fmt: skip
    np.testing.assert_allclose(jax.grad(loss)(hidden)[0, 0], [0, 0], atol=1e-7)


@pytest.mark.parametrize("chunk", [0, 8])
def test_tokens_of_weight_zero_are_harmless_whatever_they_are(chunk):
    hidden, head, targets, weights = example()
    weights[0], weights[1, 3:] = 0, 0
    masked = weights == 0

    def run(hidden, targets):
        loss = lambda h, w: next_token(h, w, targets, weights, chunk=chunk)[0]  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, (0, 1)))(hidden, head)

    right = run(np.where(masked[..., None], 0, hidden), np.where(masked, 0, targets))
    junk = np.random.default_rng(1).choice([-100, -1, V, 2**31 - 1], size=(B, T))
    loss = run(np.where(masked[..., None], np.nan, hidden), np.where(masked, junk, targets))
    jax.tree.map(np.testing.assert_array_equal, loss, right)
    assert not np.asarray(right[1][0])[masked].any()


@pytest.mark.parametrize("chunk", [0, 8])
def test_a_batch_without_a_loss_token_gives_zeros_and_no_nan(chunk):
    hidden, head, targets, _ = example()
    sums, grads = jax.value_and_grad(
        lambda h, w: next_token(h, w, targets, np.zeros((B, T), np.float32), chunk=chunk),
        (0, 1),
        has_aux=True,
    )(hidden, head)
    assert [float(x) for x in sums] == [0, 0]
    assert all(not np.asarray(g).any() for g in grads)


@pytest.mark.parametrize("target", [-1, V])
def test_a_target_outside_the_vocabulary_with_a_weight_is_not_silent(target):
    hidden, head, targets, weights = example()
    targets[2, 5], weights[2, 5] = target, 1
    assert math.isnan(float(next_token(hidden, head, targets, weights, chunk=8)[0]))


def test_the_head_has_exactly_its_rows_and_no_padding():
    zeros = np.zeros((1, 1, 3), np.float32)
    loss, _ = next_token(zeros, np.ones((5, 3), np.float32), np.array([[2]]), np.ones((1, 1)))
    assert float(loss) == pytest.approx(math.log(5), abs=1e-6)  # ln 8 if V = 5 were padded to 8


def test_sums_over_unequal_devices_are_not_means_of_means():
    # Two devices: 2 loss tokens that sum to 3.0, 8 loss tokens that sum to 56.0; 59 / 10 = 5.9.
    # With logits (x, 0) and target 1 the loss is log(1 + e^x).
    mesh = make_mesh(MeshConfig(data=2), jax.devices()[:2])
    x = np.log(np.expm1(np.repeat([[1.5], [7.0]], 8, axis=1))).astype(np.float32)
    hidden = np.stack([x, np.zeros_like(x)], -1)  # [2, 8, 2]
    weights = np.ones((2, 8), np.float32)
    weights[0, 2:] = 0
    loss, weight = jax.jit(lambda *a: next_token(*a, chunk=2, shards=Placement(mesh)))(
        hidden, np.eye(2, dtype=np.float32), np.ones((2, 8), np.int32), weights
    )
    assert float(loss / weight) == pytest.approx(5.9, abs=1e-5)


@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 4, "tensor": 2},
        {"data": 1, "fsdp": 4, "tensor": 2},
        {"data": 2, "fsdp": 2, "context": 2},
    ],
)
def test_gradients_on_a_mesh_equal_those_of_one_device(sizes):
    mesh = make_mesh(MeshConfig(**sizes))
    hidden, head, targets, weights = example()

    def run(mesh):  # 3 positions per chunk and a rest of 1, which is joined along a split array
        def loss(h, w):
            return next_token(h, w, targets, weights, z_loss=0.1, chunk=12 // (4 if mesh else 1),
                              shards=Placement(mesh))[0]  # fmt: skip

        return jax.jit(jax.value_and_grad(loss, (0, 1)))(hidden, head)

    for mine, right in zip(*map(jax.tree.leaves, (run(mesh), run(None))), strict=True):
        np.testing.assert_allclose(mine, right, rtol=1e-5, atol=1e-5)


def test_no_collective_runs_inside_the_loop_over_chunks():
    mesh = make_mesh(MeshConfig(data=1, fsdp=8))
    hidden, targets, weights = jnp.zeros((8, T, D)), jnp.zeros((8, T), int), jnp.ones((8, T))
    loss = lambda h, w: next_token(h, w, targets, weights, chunk=2, shards=Placement(mesh))[0]  # noqa: E731
    text = jax.jit(jax.grad(loss, (0, 1))).lower(hidden, jnp.zeros((V, D))).compile().as_text()
    bodies = [part for part in text.split("\n\n") if part.startswith("%") and "dot(" in part]
    assert " while(" in text and bodies
    assert not any("all-reduce(" in body or "all-gather(" in body for body in bodies)


@pytest.mark.parametrize("sizes", [{"data": 2, "fsdp": 4}, {"data": 1, "fsdp": 4, "context": 2}])
def test_replicas_exchange_only_the_part_of_the_heads_gradient_that_they_hold(sizes):
    mesh = make_mesh(MeshConfig(**sizes))
    hidden, targets, weights = jnp.zeros((8, 8, D)), jnp.zeros((8, 8), jnp.int32), jnp.ones((8, 8))
    loss = lambda w: next_token(hidden, w, targets, weights, chunk=2, shards=Placement(mesh))[0]  # noqa: E731
    split = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    head = jax.ShapeDtypeStruct((V, D), jnp.float32, sharding=split)
    text = jax.jit(jax.grad(loss), out_shardings=split).lower(head).compile().as_text()
    sums = [one for one in collectives(text, mesh.shape) if one.kind == "all-reduce"]
    of_parts = [one for one in sums if {"data", "context"} & set(one.axes)]
    assert max(one.whole_bytes for one in of_parts) == 4 * V * D // 4
    assert max(one.whole_bytes for one in sums) == 4 * V * D  # XLA:CPU has no reduce-scatter here


def test_rows_that_do_not_divide_over_the_mesh_are_still_right():
    mesh = make_mesh(MeshConfig(data=8))
    arrays = example()
    split = jax.jit(lambda *a: next_token(*a, chunk=8, shards=Placement(mesh))[0])(*arrays)
    assert float(split) == pytest.approx(float(next_token(*arrays, chunk=0)[0]), rel=1e-6)


@functools.cache
def compiled_where_logits_dominate(chunk: int | None, ids: int = 8192) -> jax.stages.Compiled:
    """Compile loss and gradients, with everything switched on, of 4096 tokens."""
    shapes = [(4, 1024, 32), (ids, 32), (4, 1024), (4, 1024)]
    dtypes = [jnp.float32, jnp.float32, jnp.int32, jnp.float32]
    arrays = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, dtypes, strict=True)]
    loss = jax.value_and_grad(lambda *a: next_token(*a, chunk=chunk, **OPTIONS[-1])[0], (0, 1))
    return jax.jit(loss).lower(*arrays).compile()


def test_memory_is_an_eighth_of_that_of_all_logits_at_once():
    whole, chunked = (
        compiled_where_logits_dominate(chunk).memory_analysis().temp_size_in_bytes
        for chunk in (0, 256)
    )
    assert whole >= 4 * 4096 * 8192  # float32 logits: 134 MB
    assert chunked <= whole / 8


def test_by_default_it_is_less_for_the_vocabulary_of_gpt2():
    whole, chunked = (
        compiled_where_logits_dominate(chunk, 50_257).memory_analysis().temp_size_in_bytes
        for chunk in (0, None)
    )
    assert chunked <= whole / 8


def test_no_array_of_the_compiled_loss_is_as_large_as_all_logits():
    def largest(chunk: int) -> int:
        shapes = re.findall(
            r"\b[a-z]+[0-9]+\[([0-9,]+)\]", compiled_where_logits_dominate(chunk).as_text()
        )
        return max(math.prod(map(int, shape.split(","))) for shape in shapes)

    assert largest(0) >= 4096 * 8192
    assert largest(256) == 256 * 8192


def test_nothing_is_differentiated_where_no_gradient_is_asked_for():
    arrays = example()
    loss = lambda h, w: next_token(h, w, *arrays[2:], chunk=8)[0]  # noqa: E731
    products = lambda f: str(jax.make_jaxpr(f)(*arrays[:2])).count("dot_general")  # noqa: E731
    assert products(loss) == 1  # the logits
    assert products(jax.grad(loss, (0, 1))) == 3  # and the gradients of hidden and head


def test_products_take_and_give_the_compute_dtype_and_the_head_gradient_is_float32():
    arrays = example()

    def loss(head, dtype):
        return next_token(arrays[0], head, *arrays[2:], dtype=dtype, chunk=8)[0]

    text = str(jax.make_jaxpr(jax.grad(lambda w: loss(w, jnp.bfloat16)))(arrays[1]))
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert products and all(":bf16[" in line.split("=")[0] for line in products)
    mine, right = (jax.grad(lambda w, d=d: loss(w, d))(arrays[1]) for d in ("bfloat16", "float32"))
    assert mine.dtype == jnp.float32
    assert np.linalg.norm(mine - right) < 0.02 * np.linalg.norm(right)  # 8 bits


@pytest.mark.parametrize("logits_dtype, error", [("float32", 1e-6), (None, 0.1)])
def test_float32_logits_of_bfloat16_inputs_are_not_rounded(logits_dtype, error):
    # Inputs that bfloat16 holds exactly: only the product can round, to 8 bits of logits up to 10.
    hidden, head, targets, weights = example()
    hidden, head = (np.asarray(jnp.bfloat16(x), np.float32) for x in (hidden, head))
    nll, _, _ = losses_in_float64(hidden, head, targets)
    loss, _ = next_token(
        hidden, head, targets, weights, dtype="bfloat16", logits_dtype=logits_dtype, chunk=8
    )
    off = abs(float(loss) / (weights * nll).sum() - 1)
    assert off < error and (logits_dtype or off > 1e-5)


def test_gradients_of_float32_logits_agree_with_automatic_differentiation():
    options = OPTIONS[-1] | {"dtype": "bfloat16", "logits_dtype": "float32"}
    (value, grads), (right, right_grads) = (values_and_gradients(c, options) for c in (12, 0))
    assert float(value) == pytest.approx(float(right), rel=1e-6)
    for mine, other in zip(grads, right_grads, strict=True):
        assert np.linalg.norm(mine - other) <= 0.01 * np.linalg.norm(other)  # gradients in bfloat16


def test_the_head_gradient_in_bfloat16_is_summed_over_chunks_in_float32():
    """64 times the same chunk: float32 sums of one and the same gradient are 32 times that of 2."""
    rng = np.random.default_rng(0)  # sizes at which XLA:CPU gives products to oneDNN
    hidden = rng.normal(size=(1, 256, 128)).astype(np.float32)
    head = rng.normal(size=(1024, 128)).astype(np.float32)
    targets = rng.integers(0, 1024, (1, 256)).astype(np.int32)

    @functools.partial(jax.jit, compiler_options=of_dtype("bfloat16", "cpu"))
    def head_gradient(head: jax.Array, hidden: jax.Array, targets: jax.Array) -> jax.Array:
        def total(head: jax.Array) -> jax.Array:
            weights = jnp.ones(targets.shape)
            options = {"dtype": jnp.bfloat16, "chunk": 256}
            return next_token_sums(hidden, head, targets, weights, **options).total

        return jax.grad(total)(head)

    of_2, of_64 = (
        np.asarray(head_gradient(head, np.tile(hidden, (1, n, 1)), np.tile(targets, (1, n))))
        for n in (2, 64)
    )
    np.testing.assert_allclose(of_64, 32 * of_2, atol=1e-5 * np.abs(of_64).max())


def test_token_losses_are_those_of_the_formula_and_zero_where_masked():
    hidden, head, targets, weights = example()
    losses = token_losses(hidden, head, targets, weights, softcap=3.0, chunk=12)
    nll, _, _ = losses_in_float64(hidden, head, targets, 3.0)
    right = np.where(weights != 0, nll, 0)
    assert losses.dtype == jnp.float32
    np.testing.assert_allclose(losses, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("tokens", "most", "size"),
    [
        (100, 256, 100),  # all at once
        (4096, 1024, 1024),
        (32_768, 5_341, 4_096),  # equal ones, of whole tiles
        (1_000, 300, 256),  # 3 of 256 and one of 232
        (200, 50, 50),  # less than a tile
    ],
)
def test_chunks_are_equal_and_whole_tiles_where_they_can_be(tokens, most, size):
    assert chunk_size(tokens, most) == size


def test_chunks_are_sized_by_the_cache_on_cpu_and_by_the_product_elsewhere():
    assert chunk_tokens(8192, "cpu") == 1024  # 1024 tokens x 8192 logits x 4 bytes = 32 MiB
    assert chunk_tokens(50304, "cpu") == 512  # 103 MB: adding to the head gradient costs more
    assert chunk_tokens(8192, "tpu") == 16384  # 512 MiB
    assert chunk_tokens(128256, "gpu") == 4096
