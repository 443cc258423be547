"""The nnx module computes what the functions compute, and trains like any nnx module."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from jaxgpt.model import gpt
from jaxgpt.model.cache import init_cache
from jaxgpt.model.flax_module import GPT
from jaxgpt.model.params import specs
from tests.tiny import TINY, VARIETY, random_params

TOKENS = np.random.default_rng(0).integers(0, 64, (4, 16)).astype(np.int32)
REPEATING = np.tile(np.arange(4, dtype=np.int32), (4, 4)) * 9  # [4, 16]: 0 9 18 27 0 9 ...
CONFIGS = {
    "dense": TINY,
    "stacked": dataclasses.replace(TINY, stacked=True),
    "gemma3": VARIETY["gemma3"],
    "experts": VARIETY["experts"],
}
KINDS = pytest.mark.parametrize("kind", ["dense", "gemma3", "experts"])


def names(tree) -> set[str]:
    paths = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths}


def cross_entropy(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the mean loss of predicting each token from those before it."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    return losses.mean()


@nnx.jit
def step(model: GPT, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    """Train on tokens [B, T] once and return the loss before; experts share one more loss."""

    def loss_of(model: GPT) -> jax.Array:
        out = model.forward(tokens, weights=jnp.ones(tokens.shape))
        loss = cross_entropy(model.logits(out.hidden), tokens)
        if out.router is not None:
            loss += 0.01 * out.router.balance.mean() / tokens.size
        return loss

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


@KINDS
def test_ten_steps_of_an_nnx_optimizer_learn_a_repeating_sequence(kind):
    model = GPT(CONFIGS[kind], rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    losses = [float(step(model, optimizer, REPEATING)) for _ in range(10)]
    # At first all 64 ids are about equally likely; to know the four that occur gives ln 4 = 1.39,
    # to know their order 0. Half of ln 64 lies above the former.
    assert losses[0] == pytest.approx(math.log(64), abs=0.1)
    assert losses[-1] < math.log(64) / 2


@functools.cache
def compiled(kind: str):
    return jax.jit(functools.partial(gpt.apply, CONFIGS[kind], dtype=jnp.bfloat16))


@KINDS
def test_outputs_equal_those_of_the_functions(kind):
    params = random_params(CONFIGS[kind])
    model = GPT(CONFIGS[kind], params=params, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(
        nnx.jit(lambda m, t: m(t))(model, TOKENS), compiled(kind)(params, TOKENS)
    )


def test_hidden_states_go_with_a_cache():
    params = random_params(TINY)
    model = GPT(TINY, params=params, dtype=jnp.bfloat16)
    right = jax.jit(lambda p: gpt.hidden(TINY, p, TOKENS[:, :1], dtype=jnp.bfloat16))(params)
    step = nnx.jit(lambda model, cache: model.hidden(TOKENS[:, :1], cache=cache))
    hidden, cache = step(model, init_cache(TINY, 4, 16))
    assert hidden.dtype == jnp.bfloat16 and cache.length.tolist() == [1] * 4
    np.testing.assert_allclose(np.float32(hidden), np.float32(right), atol=0.05)


def test_forward_returns_the_sums_of_routers_to_those_who_have_weights():
    cfg, params = CONFIGS["experts"], random_params(CONFIGS["experts"])
    weights = np.ones(TOKENS.shape, np.float32)
    found = nnx.jit(lambda m: m.forward(TOKENS, weights=weights).router)(GPT(cfg, params=params))
    right = jax.jit(lambda p: gpt.forward(cfg, p, TOKENS, weights=weights).router)(params)
    jax.tree.map(np.testing.assert_array_equal, found, right)
    # Two blocks, each of which sends each token to two experts.
    assert found.load.shape == (2, 4) and found.load.sum(-1).tolist() == [TOKENS.size * 2] * 2


def test_no_gradient_reaches_a_router_bias():
    model = GPT(CONFIGS["experts"], params=random_params(CONFIGS["experts"]))

    @nnx.jit
    def gradients(model: GPT) -> nnx.State:
        return nnx.grad(lambda model: cross_entropy(model(TOKENS), TOKENS))(model)

    layers = gradients(model)["params"]["layers"]
    for index in (0, 1):
        np.testing.assert_array_equal(layers[index]["router_bias"][...], 0.0)
        assert np.abs(layers[index]["router"][...]).max() > 0


@pytest.mark.parametrize("kind", CONFIGS)
def test_parameters_are_nnx_params_under_the_names_of_the_spec_tree(kind):
    model = GPT(CONFIGS[kind], params=random_params(CONFIGS[kind]))
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    found = {"/".join(map(str, path)) for path, _ in state}
    assert found == {f"params/{name}" for name in names(specs(CONFIGS[kind]))}
    assert len(found) == len(jax.tree.leaves(nnx.state(model)))  # and there is no other state


def test_split_and_merge_give_the_same_model():
    model = GPT(TINY, params=random_params(TINY), dtype=jnp.bfloat16)
    graph, state = nnx.split(model)
    np.testing.assert_array_equal(
        nnx.jit(lambda m, t: m(t))(nnx.merge(graph, state), TOKENS),
        compiled("dense")(model.pure(), TOKENS),
    )


def test_training_goes_on_the_same_after_its_state_was_saved_and_restored(tmp_path):
    def fresh(seed: int) -> tuple[GPT, nnx.Optimizer]:
        model = GPT(TINY, rngs=nnx.Rngs(seed))
        return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

    unbroken = fresh(0)
    losses = [float(step(*unbroken, REPEATING)) for _ in range(4)]

    stopped = fresh(0)
    for _ in range(2):
        step(*stopped, REPEATING)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.state(stopped))
        checkpointer.wait_until_finished()
        resumed = fresh(1)
        nnx.update(resumed, checkpointer.restore(tmp_path / "state", nnx.state(resumed)))
    assert [float(step(*resumed, REPEATING)) for _ in range(2)] == losses[2:]


def test_the_rngs_stream_decides_the_values():
    one, same, other = (GPT(TINY, rngs=nnx.Rngs(seed)).pure().embed for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()


def test_neither_or_both_of_rngs_and_params_are_refused():
    with pytest.raises(ValueError, match="either rngs"):
        GPT(TINY)
    with pytest.raises(ValueError, match="either rngs"):
        GPT(TINY, rngs=nnx.Rngs(0), params=random_params(TINY))
