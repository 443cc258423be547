"""The nnx module computes what the functions compute, and trains like any nnx module."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxgpt.config import ModelConfig
from jaxgpt.model import gpt
from jaxgpt.model.cache import init_cache
from jaxgpt.model.flax_module import GPT
from jaxgpt.model.params import specs

CFG = ModelConfig(num_layers=2, embed_dim=32, num_heads=4, vocab_size=64, seq_len=16)
TOKENS = np.random.default_rng(0).integers(0, 64, (4, 16)).astype(np.int32)


def test_outputs_equal_those_of_the_functions():
    params = gpt.init(CFG, jax.random.key(3))
    model = GPT(CFG, params=params, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(
        nnx.jit(lambda m, t: m(t))(model, TOKENS),
        jax.jit(lambda p, t: gpt.apply(CFG, p, t, dtype=jnp.bfloat16))(params, TOKENS),
    )
    right = gpt.hidden(CFG, params, TOKENS[:, :1], dtype=jnp.bfloat16)
    hidden, cache = model.hidden(TOKENS[:, :1], cache=init_cache(CFG, 4, 16))
    assert hidden.dtype == jnp.bfloat16 and cache.length.tolist() == [1] * 4
    np.testing.assert_allclose(np.float32(hidden), np.float32(right), atol=0.05)


def test_parameters_are_nnx_params_under_the_names_of_the_tree():
    model = GPT(CFG, rngs=nnx.Rngs(0))
    names = {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    assert {"params/embed", "params/layers/0/wq", "params/layers/1/w_down"} <= names
    assert len(names) == len(jax.tree.leaves(specs(CFG)))


def test_the_rngs_stream_decides_the_values():
    one, same, other = (GPT(CFG, rngs=nnx.Rngs(seed)).pure().embed for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()


def test_ten_steps_of_an_nnx_optimizer_lower_the_loss():
    model = GPT(CFG, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model: GPT, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
        def loss_of(model: GPT) -> jax.Array:
            logits = model(tokens)[:, :-1]
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, TOKENS)) for _ in range(10)]
    assert losses[0] == pytest.approx(np.log(64), abs=0.1)
    assert losses[-1] < losses[0] - 1


def test_neither_or_both_of_rngs_and_params_are_refused():
    with pytest.raises(ValueError, match="either rngs"):
        GPT(CFG)
