"""The train state: abstract, placed, and born where it lies."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optimizers import ALL
from tiny import TINY as WITH_TABLE

from jaxgpt.checkpoint.fingerprint import named_leaves
from jaxgpt.config import Config, MeshConfig, OptimConfig, TrainConfig
from jaxgpt.model.params import abstract, specs
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.parallel.sharding import replicated, tree_shardings
from jaxgpt.training.optimizer import Optimizer, build
from jaxgpt.training.state import TrainState, abstract_state, create, shardings, state_shardings

# Few shapes of weights, as each costs a second of compiling its random numbers.
TINY = dataclasses.replace(WITH_TABLE, num_layers=1, num_heads=1, positions="none", mlp_dim=32)


def example(param_dtype: str = "float32", **mesh: int) -> tuple:
    cfg = Config(model=TINY, mesh=MeshConfig(**mesh), train=TrainConfig(param_dtype=param_dtype))
    return cfg, build(cfg, 10, abstract(specs(cfg.model), param_dtype))


@functools.cache
def on_one_device(param_dtype: str) -> TrainState:
    return create(*example(param_dtype), make_mesh(MeshConfig(), jax.devices()[:1]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_abstract_state_has_the_shapes_and_dtypes_of_the_real_one(dtype):
    real, found = on_one_device(dtype), abstract_state(*example(dtype))
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
    assert shapes(found) == shapes(real)
    assert real.params.embed.dtype == dtype


def test_the_initial_counters_and_moments_are_zero():
    state = on_one_device("float32")
    assert [int(x) for x in (state.step, state.skipped, state.skipped_in_row)] == [0, 0, 0]
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(state.opt_state))


def test_master_weights_start_as_the_parameters():
    state = on_one_device("bfloat16")
    jax.tree.map(
        lambda w, p: np.testing.assert_array_equal(w, p.astype(jnp.float32)),
        state.opt_state.master,
        state.params,
    )


def test_everything_shaped_like_the_parameters_lies_as_they_do():
    cfg, tx = example("bfloat16", data=2, fsdp=2, tensor=2)
    mesh = make_mesh(cfg.mesh)
    placed = state_shardings(mesh, cfg, tx)
    right = tree_shardings(mesh, specs(cfg.model))
    for tree in (
        placed.params,
        placed.opt_state.inner.mu,
        placed.opt_state.inner.nu,
        placed.opt_state.master,
    ):
        assert tree == right
    assert placed.step == placed.opt_state.count == replicated(mesh)


# Wide enough for Adafactor to factor, with matrices, vectors and a leaf that has no moments.
WIDE = dataclasses.replace(
    TINY, embed_dim=128, num_heads=4, mlp_dim=128, num_experts=2, router_bias=True, stacked=True,
    norm="rmsnorm", vocab_size=160,
)  # fmt: skip


def wide(name: str, **mesh: int) -> tuple[Config, Optimizer]:
    optim = OptimConfig(name=name, lr=0.01, ema_decay=0.9, spike_sigma=6.0)
    cfg = Config(model=WIDE, mesh=MeshConfig(**mesh), optim=optim)
    return cfg, build(cfg, 10, abstract(specs(WIDE)))


@pytest.mark.parametrize("name", ALL)
def test_whatever_has_a_parameters_shape_lies_as_it_does_and_all_else_on_each_device(name):
    cfg, tx = wide(name, data=2, fsdp=2, tensor=2)
    mesh = make_mesh(cfg.mesh)
    state, placed = abstract_state(cfg, tx), state_shardings(mesh, cfg, tx)
    assert jax.tree.structure(state) == jax.tree.structure(placed)
    weights, right = named_leaves(specs(WIDE)), named_leaves(tree_shardings(mesh, specs(WIDE)))
    where, like = named_leaves(placed.opt_state), 0
    for path, leaf in named_leaves(state.opt_state).items():
        weight = next((w for w in weights if path.endswith(w) or f".{w}." in path), None)
        alike = weight is not None and leaf.shape == weights[weight].shape
        assert where[path] == (right[weight] if alike else replicated(mesh)), path
        like += alike
    assert like >= len(weights)  # the average at least


@pytest.mark.parametrize("name", ALL)
def test_three_updates_on_a_mesh_equal_those_of_one_device(name):
    cfg, tx = wide(name, data=2, fsdp=2, tensor=2)
    placed = state_shardings(make_mesh(cfg.mesh), cfg, tx)
    rng = np.random.default_rng(0)
    draw = lambda spec: np.float32(rng.normal(size=spec.shape))  # noqa: E731
    start, *grads = (jax.tree.map(draw, specs(WIDE)) for _ in range(4))
    results = []
    for where in ((placed.params, placed.opt_state), (None, None)):
        put = lambda tree, where=where: tree if where[0] is None else jax.device_put(tree, where[0])  # noqa: E731
        update = jax.jit(lambda g, s, p, k: tx.update(g, s, p, k)[:2], out_shardings=where)
        params, state = put(start), tx.init(start)
        state = state if where[1] is None else jax.device_put(state, where[1])
        for step, grad in enumerate(grads):
            params, state = update(put(grad), state, params, step)
        results.append(jax.device_get((params, state)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *results)


def test_the_abstract_state_of_a_mesh_lies_as_the_state_does():
    cfg, tx = example(data=1, fsdp=8)
    mesh = make_mesh(cfg.mesh)
    assert shardings(abstract_state(cfg, tx, mesh)) == shardings(create(cfg, tx, mesh))


def test_a_state_is_born_split_and_equals_that_of_one_device_bit_for_bit():
    cfg, tx = example(data=1, fsdp=4, tensor=2)
    state = create(cfg, tx, make_mesh(cfg.mesh))
    assert state.params.embed.addressable_shards[0].data.shape == (64 // 2, 32 // 4)
    assert state.opt_state.inner.mu.embed.sharding == state.params.embed.sharding
    jax.tree.map(np.testing.assert_array_equal, state, on_one_device("float32"))


def test_the_seed_of_the_run_decides_the_values():
    cfg, tx = example()
    other = dataclasses.replace(cfg, run=dataclasses.replace(cfg.run, seed=1))
    state = create(other, tx, make_mesh(MeshConfig(), jax.devices()[:1]))
    assert not np.array_equal(state.params.embed, on_one_device("float32").params.embed)
