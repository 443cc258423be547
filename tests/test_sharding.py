"""Placement by logical names: what is split, what is not and reported, and batches on a mesh."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxgpt.config import MeshConfig, ModelConfig
from jaxgpt.data.packing import Batch
from jaxgpt.errors import ConfigError
from jaxgpt.model.params import ParamSpec, specs
from jaxgpt.parallel import sharding
from jaxgpt.parallel.mesh import AXES, make_mesh

ZERO = ("constant", 0.0)


def cube():
    return make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))


@pytest.mark.parametrize(
    "shape, axes, split",
    [
        ((64, 32), ("vocab", "embed"), P("tensor", "fsdp")),
        ((32, 4, 8), ("embed", "heads", "head_dim"), P("fsdp", "tensor", None)),
        ((2, 128, 32), ("layers", "mlp", "embed"), P(None, "tensor", "fsdp")),
        ((32,), ("norm",), P(None)),
        ((16, 32), (None, "embed"), P(None, "fsdp")),
        ((32, 1, 8), ("embed", "kv_heads", "head_dim"), P("fsdp", None, None)),  # one kv head
        ((63, 32), ("vocab", "embed"), P(None, "fsdp")),
        ((8, 16, 32), ("batch", "seq", None), P(("data", "fsdp"), None, None)),
    ],
)
def test_dimensions_are_split_by_name_where_they_divide(shape, axes, split):
    assert sharding.partition(cube(), shape, axes) == split


def test_a_mesh_axis_splits_at_most_one_dimension():
    assert sharding.partition(cube(), (8, 8), ("embed", "embed")) == P(("fsdp",), None)


def test_parameters_that_cannot_be_split_are_listed_with_their_size():
    # Width 30 does not divide over 8 devices; what names its width "embed" is whole everywhere.
    model = ModelConfig(num_layers=1, embed_dim=30, num_heads=3, vocab_size=64, seq_len=16)
    mesh = make_mesh(MeshConfig(data=1, fsdp=8))
    rows = sharding.unsharded_table(mesh, specs(model))
    layer = [f"layers/0/{name}" for name in ("wq", "wk", "wv", "wo", "w_up", "w_down")]
    assert {row.path for row in rows} == {"embed", "pos_embed", *layer}
    by_path = {row.path: row for row in rows}
    assert by_path["embed"] == ("embed", (64, 30), "embed", 30, 8, 64 * 30 * 4)
    assert [row.bytes for row in rows] == sorted((row.bytes for row in rows), reverse=True)
    said = sharding.describe_unsharded(mesh, specs(model))
    weights = 64 * 30 + 16 * 30 + 4 * 30 * 30 + 2 * 30 * 120  # all but six norms of 30
    assert sharding.bytes_per_device(mesh, specs(model)) == 4 * (weights + 6 * 30)
    assert said.startswith(
        f"8 parameters are not split as the mesh would allow, {4e-6 * weights:.1f} MB"
    )
    assert f"({weights / (weights + 6 * 30):.0%} of" in said and "= 30 does not divide by 8" in said


def test_a_width_that_divides_leaves_nothing_unsharded_and_an_eighth_per_device():
    model = ModelConfig(num_layers=1, embed_dim=32, num_heads=4, vocab_size=64, seq_len=16)
    mesh = make_mesh(MeshConfig(data=1, fsdp=8))
    assert sharding.unsharded_table(mesh, specs(model)) == []
    assert sharding.describe_unsharded(mesh, specs(model)) is None
    whole = 64 * 32 + 16 * 32 + 4 * 32 * 32 + 2 * 32 * 128  # embeddings, attention, MLP
    norms = 6 * 32  # three LayerNorms with bias are held by every device
    assert sharding.bytes_per_device(mesh, specs(model)) == 4 * (whole // 8 + norms)


def test_a_dimension_that_does_not_divide_does_not_hide_one_that_does():
    spec = ParamSpec((63, 32), ("vocab", "embed"), ZERO)
    (row,) = sharding.unsharded_table(cube(), {"w": spec})
    assert (row.axis, row.size, row.parts, row.bytes) == ("vocab", 63, 2, 63 * 32 * 4 // 2)


def test_every_axis_name_of_the_parameters_has_a_rule_or_is_meant_to_be_whole():
    dense = ModelConfig(vocab_size=64, attn_bias=True, out_bias=True, mlp_bias=True, qk_norm=True)
    experts = ModelConfig(vocab_size=64, num_experts=4, shared_dim=8, router_bias=True)
    specs_of_both = jax.tree.leaves([specs(dense), specs(experts)])
    names = {axis for spec in specs_of_both for axis in spec.axes}
    assert names - set(sharding.RULES) == {"head_dim", "norm", None}


def batch(rows: int = 8) -> Batch:
    tokens = np.arange(2 * rows * 3, dtype=np.int32).reshape(2, rows, 3)
    return Batch(tokens, tokens + 1, np.ones(tokens.shape, np.float32))


def test_a_batch_is_split_by_rows_over_data_and_fsdp():
    placed = sharding.to_global(cube(), batch())
    np.testing.assert_array_equal(placed.tokens, batch().tokens)
    assert placed.segment_ids is None
    for shard in placed.tokens.addressable_shards:
        assert shard.data.shape == (2, 2, 3)  # all micro-batches, 8 / 4 rows, all positions
        np.testing.assert_array_equal(shard.data, batch().tokens[shard.index])


def test_one_process_supplies_all_rows():
    assert sharding.rows_of_process(cube(), 8) == slice(0, 8)


def stub(sizes: tuple[int, ...], processes: list[int]) -> SimpleNamespace:
    """Return what `rows_of_process` reads of a mesh whose devices belong to other processes too.

    `sizes` are those of data, fsdp and tensor.
    """
    devices = np.array([SimpleNamespace(process_index=i) for i in processes], object)
    data, fsdp, tensor = sizes
    sizes = (1, data, fsdp, 1, 1, tensor)
    return SimpleNamespace(
        devices=devices.reshape(sizes),
        shape=dict(zip(AXES, sizes, strict=True)),
        axis_names=AXES,
    )


@pytest.mark.parametrize(
    "sizes, processes, rows",
    [
        ((4, 1, 1), [1, 0, 2, 3], slice(2, 4)),
        ((1, 4, 1), [0, 0, 1, 1], slice(0, 4)),
        ((2, 1, 2), [1, 1, 0, 0], slice(4, 8)),
        ((2, 1, 2), [0, 1, 0, 1], slice(0, 8)),  # tensor parts of all rows
    ],
)
def test_a_process_supplies_the_rows_that_its_devices_hold(sizes, processes, rows):
    assert sharding.rows_of_process(stub(sizes, processes), 8) == rows


def test_rows_that_are_not_one_range_are_refused():
    with pytest.raises(ConfigError, match=r"holds the row shards \[0, 2\]"):
        sharding.rows_of_process(stub((4, 1, 1), [0, 1, 0, 1]), 8)


def test_constrain_places_by_name_and_is_nothing_on_one_device():
    place = sharding.Placement(cube()).constrain
    placed = jax.jit(lambda x: place(x, ("batch", None)))(np.ones((8, 4)))
    assert placed.sharding.shard_shape(placed.shape) == (2, 4)
    x = np.ones((8, 4))
    one = make_mesh(MeshConfig(), jax.devices()[:1])
    for nowhere in (sharding.Placement(None), sharding.Placement(one)):
        assert nowhere.constrain(x, ("batch", None)) is x
        assert nowhere.split("batch") == 1


def test_an_axis_that_is_split_around_the_call_is_left_alone_inside():
    inside = sharding.Placement(cube(), taken=("data",))
    assert (inside.split("batch"), sharding.Placement(cube()).split("batch")) == (2, 4)

    def double(x: jax.Array) -> jax.Array:  # [rows of a replica, 4]
        x = inside.constrain(x, ("batch", None))
        return inside.on_shards(lambda part: 2 * part, (x,), (("batch", None),), ("batch", None))

    each = jax.jit(jax.vmap(double, spmd_axis_name="data"))
    placed = each(np.arange(32.0).reshape(2, 4, 4))
    np.testing.assert_array_equal(placed, 2 * np.arange(32.0).reshape(2, 4, 4))
    assert placed.sharding.shard_shape(placed.shape) == (1, 2, 4)


def test_a_function_that_exchanges_gets_the_mesh_axes_of_the_names_it_asks_for():
    seen = {}

    def swap(x: jax.Array, axes: dict[str, tuple[str, ...]]) -> jax.Array:
        seen.update(axes)
        size = jax.lax.axis_size(axes["seq"]) if axes["seq"] else 1
        ring = [(i, (i + 1) % size) for i in range(size)]
        return jax.lax.ppermute(x, axes["seq"], ring) if axes["seq"] else x

    mesh = make_mesh(MeshConfig(data=2, context=4))
    x = np.arange(16.0).reshape(2, 8)
    run = lambda place, x: place.on_shards(  # noqa: E731
        swap, (x,), (("batch", "seq"),), ("batch", "seq"), exchange=("seq", "vocab")
    )
    np.testing.assert_array_equal(
        jax.jit(lambda x: run(sharding.Placement(mesh), x))(x), np.roll(x, 2, axis=1)
    )
    assert seen == {"seq": ("context",), "vocab": ()}
    np.testing.assert_array_equal(run(sharding.Placement(None), x), x)
    assert seen == {"seq": (), "vocab": ()}


def test_experts_take_their_axis_and_leave_the_rest_to_the_width():
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, expert=4))
    assert sharding.partition(mesh, (8, 32, 16), ("experts", "embed", "mlp")) == P(
        ("expert",), ("fsdp",), None
    )
    assert sharding.partition(mesh, (32, 16), ("embed", "mlp")) == P(("fsdp", "expert"), None)


def test_sequences_are_split_over_context():
    mesh = make_mesh(MeshConfig(data=2, context=4))
    tokens = np.arange(64, dtype=np.int32).reshape(1, 4, 16)
    placed = sharding.to_global(mesh, {"tokens": tokens})["tokens"]
    np.testing.assert_array_equal(placed, tokens)
    assert placed.sharding.shard_shape(placed.shape) == (1, 2, 4)


TOKENS, INTO = ("batch", "seq", None), (None, "mlp")


def shapes_of_parts(mesh, x: np.ndarray, w: np.ndarray) -> list[tuple[int, ...]]:
    """Return the shapes that a function on shards sees, checking its value and its gradients."""
    seen, place = [], sharding.Placement(mesh)

    def squares(x: jax.Array, w: jax.Array, absent: None) -> jax.Array:
        seen[:] = [x.shape, w.shape]
        return jax.numpy.square(x @ w).sum(-1, keepdims=True)[None]

    def total(x: jax.Array, w: jax.Array) -> jax.Array:
        axes = (TOKENS, INTO, INTO)
        parts = place.on_shards(squares, (x, w, None), axes, ("mlp", *TOKENS))
        return (parts.sum(0) * np.arange(x.shape[0])[:, None, None]).sum()

    found = jax.jit(jax.value_and_grad(total, (0, 1)))(x, w)
    weights = np.arange(x.shape[0])[:, None, None]
    right = (
        (weights * (x @ w) ** 2).sum(),
        (
            2 * weights * (x @ w) @ w.T,
            np.einsum("btd,btf->df", x, 2 * weights * (x @ w)),
        ),
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)
    return seen


@pytest.mark.parametrize(
    "rows, width, parts",
    [
        (8, 6, [(2, 3, 4), (4, 3)]),
        (6, 6, [(6, 3, 4), (4, 3)]),  # rows that do not divide by 4
        (8, 5, [(2, 3, 4), (4, 5)]),  # a width that does not divide by 2
    ],
)
def test_a_function_on_shards_sees_parts_and_gives_the_values_and_gradients_of_the_whole(
    rows, width, parts
):
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=size).astype(np.float32) for size in ((rows, 3, 4), (4, width)))
    assert shapes_of_parts(cube(), x, w) == parts
    assert shapes_of_parts(None, x, w) == [x.shape, w.shape]


@pytest.mark.parametrize(
    "splits", [("data", "data"), ("tensor", "tensor"), ("data", "tensor"), (None, "data")], ids=str
)
def test_arrays_split_over_a_mesh_are_joined_without_doubling(splits):
    mesh = make_mesh(MeshConfig(data=4, tensor=2))
    values = np.arange(1, 5, dtype=np.float32), np.ones(12, np.float32)
    parts = [
        jax.device_put(value, sharding.NamedSharding(mesh, P(split)))
        for value, split in zip(values, splits, strict=True)
    ]
    for join in (jax.numpy.concatenate, jax.jit(jax.numpy.concatenate)):
        np.testing.assert_array_equal(join(parts), np.concatenate(values))
