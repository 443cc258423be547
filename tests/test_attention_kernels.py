"""The kernels of accelerators: splash interpreted on CPU, cuDNN's arguments computed by XLA."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
