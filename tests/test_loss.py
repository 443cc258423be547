"""The loss and its own derivative: against arithmetic, NumPy in float64, and autodiff."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.config import MeshConfig
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.training.loss import chunk_tokens, next_token, next_token_sums, token_losses

B, T, D, V = 4, 10, 8, 24


def example(seed: int = 0) -> tuple[np.ndarray, ...]:
    """Return hidden, head, targets and weights (some 0, some fractions)."""
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(B, T, D)).astype(np.float32)
    head = rng.normal(size=(V, D)).astype(np.float32)
    weights = rng.choice([0.0, 0.5, 1.0], size=(B, T)).astype(np.float32)
    return hidden, head, rng.integers(0, V, (B, T)).astype(np.int32), weights


def losses_in_float64(
    hidden: np.ndarray, head: np.ndarray, targets: np.ndarray, softcap: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return -log softmax(logits)[target] and log sum exp(logits) by the textbook."""
    logits = hidden.astype(np.float64) @ head.astype(np.float64).T
    logits = softcap * np.tanh(logits / softcap) if softcap else logits
    lse = np.log(np.exp(logits).sum(-1))
    return lse - np.take_along_axis(logits, targets[..., None], -1)[..., 0], lse


def test_two_logits_give_the_worked_loss_and_gradient():
    hidden, head = jnp.array([[[2.5, 2.2]]]), jnp.eye(2)  # so the logits are 2.5 and 2.2
    targets, weights = jnp.array([[0]]), jnp.ones((1, 1))
    loss, grad = jax.value_and_grad(lambda h: next_token(h, head, targets, weights)[0])(hidden)
    assert float(loss) == pytest.approx(0.554355, abs=1e-6)  # log(1 + e^-0.3)
    np.testing.assert_allclose(grad[0, 0], [-0.425557, 0.425557], atol=1e-6)


@pytest.mark.parametrize("chunk", [0, 8, 12, 1000])  # all at once, 2 and 3 positions, one chunk
@pytest.mark.parametrize("z_loss, softcap", [(0.0, 0.0), (0.1, 3.0)])
def test_sums_equal_the_formula_in_float64(chunk, z_loss, softcap):
    hidden, head, targets, weights = example()
    nll, lse = losses_in_float64(hidden, head, targets, softcap)
    sums = next_token_sums(
        hidden, head, targets, weights, z_loss=z_loss, softcap=softcap, chunk=chunk
    )
    assert float(sums.total) == pytest.approx((weights * (nll + z_loss * lse**2)).sum(), rel=1e-6)
    assert float(sums.nll) == pytest.approx((weights * nll).sum(), rel=1e-6)
    assert float(sums.weight) == weights.sum()


@pytest.mark.parametrize("chunk", [8, 12, 1000])
@pytest.mark.parametrize("z_loss, softcap", [(0.0, 0.0), (0.1, 3.0)])
def test_gradients_of_the_chunks_equal_automatic_differentiation(chunk, z_loss, softcap):
    hidden, head, targets, weights = example()

    def gradients(chunk):
        def scaled(hidden, head):  # the factor tests that the cotangent is used
            options = {"z_loss": z_loss, "softcap": softcap, "chunk": chunk}
            return 3.0 * next_token(hidden, head, targets, weights, **options)[0]

        return jax.jit(jax.grad(scaled, (0, 1)))(hidden, head)

    for mine, right in zip(gradients(chunk), gradients(0), strict=True):
        np.testing.assert_allclose(mine, right, rtol=1e-5, atol=1e-5)


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
    loss, weight = jax.jit(lambda *a: next_token(*a, chunk=2, mesh=mesh))(
        hidden, np.eye(2, dtype=np.float32), np.ones((2, 8), np.int32), weights
    )
    assert float(loss / weight) == pytest.approx(5.9, abs=1e-5)


@pytest.mark.parametrize("sizes", [{"data": 4, "tensor": 2}, {"data": 1, "fsdp": 4, "tensor": 2}])
def test_gradients_on_a_mesh_equal_those_of_one_device(sizes):
    mesh = make_mesh(MeshConfig(**sizes))
    hidden, head, targets, weights = example()

    def run(mesh):  # 3 positions per chunk and a rest of 1, which is joined along a split array
        def loss(h, w):
            return next_token(h, w, targets, weights, z_loss=0.1, chunk=12 // (4 if mesh else 1),
                              mesh=mesh)[0]  # fmt: skip

        return jax.jit(jax.value_and_grad(loss, (0, 1)))(hidden, head)

    for mine, right in zip(*map(jax.tree.leaves, (run(mesh), run(None))), strict=True):
        np.testing.assert_allclose(mine, right, rtol=1e-5, atol=1e-5)


def test_no_collective_runs_inside_the_loop_over_chunks():
    mesh = make_mesh(MeshConfig(data=1, fsdp=8))
    hidden, targets, weights = jnp.zeros((8, T, D)), jnp.zeros((8, T), int), jnp.ones((8, T))
    loss = lambda h, w: next_token(h, w, targets, weights, chunk=2, mesh=mesh)[0]  # noqa: E731
    text = jax.jit(jax.grad(loss, (0, 1))).lower(hidden, jnp.zeros((V, D))).compile().as_text()
    bodies = [part for part in text.split("\n\n") if part.startswith("%") and "dot(" in part]
    assert " while(" in text and bodies
    assert not any("all-reduce(" in body or "all-gather(" in body for body in bodies)


def test_rows_that_do_not_divide_over_the_mesh_are_still_right():
    mesh = make_mesh(MeshConfig(data=8))
    arrays = example()
    split = jax.jit(lambda *a: next_token(*a, chunk=8, mesh=mesh)[0])(*arrays)
    assert float(split) == pytest.approx(float(next_token(*arrays, chunk=0)[0]), rel=1e-6)


def test_memory_stays_below_one_float32_array_of_all_logits():
    rows, length, vocab = 4, 64, 4096
    shapes = [(rows, length, 8), (vocab, 8), (rows, length), (rows, length)]
    dtypes = [jnp.float32, jnp.float32, jnp.int32, jnp.float32]
    arrays = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, dtypes, strict=True)]

    def temporaries(chunk):
        loss = jax.grad(lambda *a: next_token(*a, chunk=chunk)[0], (0, 1))
        return jax.jit(loss).lower(*arrays).compile().memory_analysis().temp_size_in_bytes

    all_logits = 4 * rows * length * vocab  # 4 MiB
    assert temporaries(0) >= all_logits
    assert temporaries(32) < all_logits / 2  # a chunk's logits are 0.5 MiB


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


def test_token_losses_are_those_of_the_formula_and_zero_where_masked():
    hidden, head, targets, weights = example()
    losses = token_losses(hidden, head, targets, weights, softcap=3.0, chunk=12)
    right = np.where(weights != 0, losses_in_float64(hidden, head, targets, 3.0)[0], 0)
    assert losses.dtype == jnp.float32
    np.testing.assert_allclose(losses, right, rtol=1e-5, atol=1e-6)


def test_chunks_are_sized_by_the_cache_on_cpu_and_by_the_product_elsewhere():
    assert chunk_tokens(8192, "cpu") == 1024  # 1024 tokens x 8192 logits x 4 bytes = 32 MiB
    assert chunk_tokens(50304, "cpu") == 256  # 51 MB: adding to the head gradient costs more
    assert chunk_tokens(8192, "tpu") == 32768  # 1 GiB
    assert chunk_tokens(128256, "gpu") == 4096
