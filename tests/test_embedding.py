"""Rows of a vocabulary and of positions, looked up by devices that hold parts of the tables."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxgpt.config import MeshConfig
from jaxgpt.model.embedding import learned, lookup
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.parallel.sharding import Placement, partition
from jaxgpt.planning.collectives import collectives

B, T, D = 8, 16, 32
RNG = np.random.default_rng(0)
TABLE = RNG.normal(size=(T, D)).astype(np.float32)
FACTORS = RNG.normal(size=(B, T, D)).astype(np.float32)
OF_ALL, RANDOM = np.arange(T), RNG.integers(0, T, (B, T))


@functools.cache
def computed(sizes: tuple[tuple[str, int], ...], kind: str):
    """Return rows, the gradient of their weighted sum, the exchanges, and which rows are right."""
    mesh = make_mesh(MeshConfig(**dict(sizes)))
    shards, index = Placement(mesh), OF_ALL if kind == "positions" else RANDOM

    def loss(table):
        if kind == "ids":
            rows = lookup(table, index, shards)
        else:
            rows = learned(table, index, RANDOM, shards)
        return (rows * FACTORS).sum(), rows

    axes = ("vocab" if kind == "ids" else None, "embed")
    placed = NamedSharding(mesh, partition(mesh, TABLE.shape, axes))
    step = jax.jit(
        jax.value_and_grad(loss, has_aux=True), in_shardings=placed, out_shardings=(None, placed)
    )
    compiled = step.lower(TABLE).compile()
    (_, rows), grad = compiled(jax.device_put(TABLE, placed))
    found = collectives(compiled.as_text(), dict(mesh.shape))
    return np.asarray(rows), np.asarray(grad), found, np.broadcast_to(index, (B, T))


SPLIT = (("data", 1), ("fsdp", 4), ("context", 2))
CUBE = (("data", 2), ("fsdp", 2), ("tensor", 2))
MESHES = [SPLIT, CUBE, (("data", 1), ("fsdp", 2), ("expert", 4))]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("kind", ["ids", "positions", "positions of documents"])
def test_rows_and_their_gradient_are_those_of_one_device(sizes, kind):
    rows, grad, _, index = computed(sizes, kind)
    np.testing.assert_array_equal(rows, TABLE[index])
    right = np.zeros(TABLE.shape)
    np.add.at(right, index, FACTORS)
    np.testing.assert_allclose(grad, right, atol=1e-5)


def test_no_device_gets_the_whole_gradient_of_the_positions():
    found = computed(SPLIT, "positions")[2]
    whole = [one for one in found if one.kind == "all-reduce"]
    assert all(np.prod(one.shape) <= TABLE.size // 4 for one in whole)
    assert any(one.kind == "reduce-scatter" for one in found)


def test_parts_of_a_vocabulary_are_summed_forward_and_never_backward():
    found = [one for one in computed(CUBE, "ids")[2] if "tensor" in one.axes]
    # Of the 2 x 2 devices that look up each other's tokens, half of D each.
    assert [(one.kind, one.shape) for one in found] == [("all-reduce", (B // 2, T, D // 2))]
