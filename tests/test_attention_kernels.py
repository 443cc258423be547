"""The kernels of accelerators: splash interpreted on CPU, cuDNN's arguments computed by XLA."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.ad_checkpoint import saved_residuals  # what print_saved_residuals prints

from jaxgpt.model import attention, kernels
from jaxgpt.model.block_attention import block_attention
from jaxgpt.model.shards import Whole

T, H = 200, 32  # neither a multiple of 128
DOCUMENTS = np.repeat([4, 1, 9], [70, 100, 30])[None].astype(np.int32)


def inputs(keys: int = T, dtype: str = "float32") -> list[jax.Array]:
    rng = np.random.default_rng(0)
    shapes = [(1, T, 2, H), (1, keys, 1, H), (1, keys, 1, H)]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def with_gradients(function, *qkv):
    def run(*qkv):
        out, pull = jax.vjp(function, *qkv)
        return out, *pull(jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))

    return jax.jit(run)(*qkv)


def check(found, right):
    np.testing.assert_allclose(found[0], right[0], atol=1e-6)
    for mine, other in zip(found[1:], right[1:], strict=True):
        np.testing.assert_allclose(mine, other, atol=2e-6 * np.abs(other).max())


def test_splash_equals_the_reference_with_documents_window_softcap_and_scale():
    options = dict(segment_ids=DOCUMENTS, window=50, softcap=1.5, scale=0.4)
    found = with_gradients(lambda *x: kernels.splash(*x, **options, interpret=True), *inputs())
    reference = functools.partial(attention.attend, impl="reference", **options)
    check(found, with_gradients(reference, *inputs()))


def test_splash_takes_keys_before_the_first_query():
    # As from another device: 49 keys before the first query, 20 of them of no document.
    qkv = inputs(keys=T + 49)
    ids = np.concatenate([np.full((1, 20), -5), np.full((1, 29), 4), DOCUMENTS], axis=1)
    found, right = (
        jax.jit(lambda *x, f=f: f(*x, DOCUMENTS, ids, window=50))(*qkv)
        for f in (functools.partial(kernels.splash, interpret=True), block_attention)
    )
    np.testing.assert_allclose(found, right, atol=1e-6)


@pytest.mark.parametrize(
    "length, most, right",
    [(128, 1024, 128), (4096, 1024, 1024), (4096, 512, 512), (1152, 1024, 384), (640, 512, 128)],
)
def test_splash_blocks_divide_the_row_and_fit(length, most, right):
    assert kernels.splash_block(length, most) == right


@pytest.mark.parametrize("options", [{}, {"segment_ids": DOCUMENTS, "window": 50}])
def test_a_tpu_program_holds_a_kernel_for_either_pass_and_no_scores(options):
    shards, shape = Whole("tpu"), jax.ShapeDtypeStruct((1, 2048, 2, 128), jnp.bfloat16)
    if options:
        options = dict(options, segment_ids=jnp.zeros((1, 2048), jnp.int32))
    loss = lambda *x: attention.attend(*x, shards=shards, **options).sum()  # noqa: E731
    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(shape, shape, shape)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("@tpu_custom_call") == 2
    assert "2048x2048" not in text


@pytest.mark.parametrize("options", [{}, {"segment_ids": DOCUMENTS, "window": 50, "scale": 0.4}])
def test_cudnn_is_asked_for_what_the_reference_computes(monkeypatch, options):
    library, asked = jax.nn.dot_product_attention, []

    def by_xla(*args, implementation, **more):
        asked.append((implementation, None if more["mask"] is None else more["mask"].shape))
        return library(*args, implementation="xla", **more)

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
    qkv = inputs(dtype="bfloat16")
    found = attention.attend(*qkv, shards=Whole("gpu"), **options)
    assert asked == [("cudnn", (1, 1, T, T) if options else None)]  # one mask for all heads
    right = attention.attend(*(x.astype(jnp.float32) for x in qkv), impl="reference", **options)
    # bfloat16 keeps 8 bits: weights and values are off by 2^-9 each, relative to |v| < 4.
    np.testing.assert_allclose(found.astype(jnp.float32), right, atol=0.03)


@jax.custom_vjp
def one_mask(q, k, v, mask):
    """Return attention [B, T, N, H], which like cuDNN's takes masks [B, 1, T, T] and no others."""
    return one_mask_forward(q, k, v, mask)[0]


def one_mask_weights(q, k, mask, log_sum=None):
    assert q.ndim == 4 and mask.shape == (len(q), 1, q.shape[1], q.shape[1])
    k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(mask & np.tri(q.shape[1], dtype=bool), scores, -1e30)
    if log_sum is None:
        log_sum = jax.nn.logsumexp(scores, axis=-1)
    return jnp.exp(scores - log_sum[..., None]), log_sum


def one_mask_forward(q, k, v, mask):
    weights, log_sum = one_mask_weights(q, k, mask)
    out = jnp.einsum("bnts,bsnh->btnh", weights, jnp.repeat(v, q.shape[2] // v.shape[2], axis=2))
    return out, (q, k, v, mask, jnp.zeros(0), log_sum, out)


def one_mask_backward(kept, grad):
    q, k, v, mask, _, log_sum, out = kept
    G = q.shape[2] // k.shape[2]
    weights, _ = one_mask_weights(q, k, mask, log_sum)
    of_weights = jnp.einsum("btnh,bsnh->bnts", grad, jnp.repeat(v, G, axis=2))
    delta = (out * grad).sum(-1).swapaxes(1, 2)
    of_scores = weights * (of_weights - delta[..., None]) * q.shape[-1] ** -0.5
    dq = jnp.einsum("bnts,bsnh->btnh", of_scores, jnp.repeat(k, G, axis=2))
    dk = jnp.einsum("bnts,btnh->bsnh", of_scores, q)
    dv = jnp.einsum("bnts,btnh->bsnh", weights, grad)
    return dq, *(x.reshape(*k.shape[:3], G, -1).sum(3) for x in (dk, dv)), None


one_mask.defvjp(one_mask_forward, one_mask_backward)


@pytest.fixture
def by_one_mask(monkeypatch):
    """Put `one_mask` in the place of cuDNN, and return the shapes of the queries it is given."""
    asked, library = [], jax.nn.dot_product_attention

    def attention(q, k, v, *, mask, implementation, **options):
        if implementation == "xla":
            return library(q, k, v, mask=mask, implementation="xla", **options)
        asked.append(q.shape)
        return one_mask(q, k, v, mask)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    return asked


M, ROWS, SHORT = 3, 2, 12
MAPPED = np.sort(np.random.default_rng(1).integers(0, 3, (M, ROWS, SHORT)), -1).astype(np.int32)


def loss_of(implementation, q, k, v, ids):
    return jnp.sin(kernels.dot_product(q, k, v, ids, implementation=implementation)).sum()


def gradient_of_mapped(loss, *qkv):
    mapped = jax.vmap(loss, in_axes=(0, 0, 0, None))
    return jax.grad(lambda *x: mapped(*x, MAPPED[0]).sum(), (0, 1, 2))(*qkv)


def gradient_of_twice_mapped(loss, *qkv):
    rows = [x[:, :, None] for x in qkv]
    grads = jax.grad(lambda *x: jax.vmap(jax.vmap(loss))(*x, MAPPED[:, :, None]).sum(), (0, 1, 2))
    return [x[:, :, 0] for x in grads(*rows)]


WAYS = {
    "mapped gradient": lambda loss, *x: jax.vmap(jax.grad(loss, (0, 1, 2)))(*x, MAPPED),
    "gradient of mapped": gradient_of_mapped,
    "gradient of twice mapped": gradient_of_twice_mapped,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_kernel_with_one_mask_is_mapped_over_all_rows_at_once(by_one_mask, way):
    rng = np.random.default_rng(0)
    shapes = [(M, ROWS, SHORT, heads, 8) for heads in (4, 2, 2)]
    qkv = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    found = jax.jit(lambda *x: WAYS[way](functools.partial(loss_of, "cudnn"), *x))(*qkv)
    assert (M * ROWS, SHORT, 4, 8) in by_one_mask
    right = jax.jit(lambda *x: WAYS[way](functools.partial(loss_of, "xla"), *x))(*qkv)
    for mine, other in zip(found, right, strict=True):
        np.testing.assert_allclose(mine, other, atol=2e-6)


def test_the_backward_pass_of_a_kernel_keeps_its_output_and_statistics_by_name(by_one_mask):
    rng = np.random.default_rng(0)
    qkv = [jnp.asarray(rng.normal(size=(ROWS, SHORT, 2, 8)), jnp.float32) for _ in range(3)]
    found = saved_residuals(lambda *x: loss_of("cudnn", *x, MAPPED[0]), *qkv)
    named = {shape.shape for shape, why in found if "named 'attn'" in why}
    assert named == {(ROWS, SHORT, 2, 8), (ROWS, 2, SHORT)}
    assert not any(shape.shape[-2:] == (SHORT, SHORT) for shape, _ in found)  # no mask


def test_without_a_derivative_no_statistics_are_asked_for(by_one_mask):
    x = jnp.ones((ROWS, SHORT, 2, 8))
    program = jax.make_jaxpr(functools.partial(loss_of, "cudnn"))(x, x, x, MAPPED[0])
    assert "name=attn" not in str(program)
