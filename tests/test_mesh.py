"""Mesh sizes are filled in, or refused with the numbers that do not fit."""

from __future__ import annotations

import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxgpt.config import Config, MeshConfig, with_values
from jaxgpt.errors import ConfigError
from jaxgpt.parallel.mesh import (
    AXES,
    arrange,
    axis_sizes,
    batch_shards,
    check_run,
    check_sizes,
    make_mesh,
    slow_sizes,
)


@pytest.mark.parametrize(
    "cfg, devices, sizes",
    [
        ({}, 1, {}),
        ({}, 8, {"data": 8}),
        ({"fsdp": 4}, 8, {"data": 2, "fsdp": 4}),
        ({"data": 1, "fsdp": -1, "tensor": 2}, 8, {"fsdp": 4, "tensor": 2}),
        ({"data": 2, "fsdp": 2, "tensor": 2}, 8, {"data": 2, "fsdp": 2, "tensor": 2}),
        ({"data": 1, "fsdp": -1, "tensor": 16}, 8192, {"fsdp": 512, "tensor": 16}),
        ({"data": 1, "context": -1}, 2, {"context": 2}),
        ({"expert": 2, "stage": 2}, 8, {"data": 2, "expert": 2, "stage": 2}),
    ],
)
def test_one_axis_takes_the_devices_that_remain(cfg, devices, sizes):
    assert axis_sizes(MeshConfig(**cfg), devices) == dict.fromkeys(AXES, 1) | sizes


@pytest.mark.parametrize(
    "cfg, devices, parts",
    [
        ({"fsdp": 3}, 8, ["mesh.fsdp = 3", "multiple of 3", "there are 8", "that divide"]),
        ({"data": 2}, 8, ["mesh.data = 2", "needs 2 devices", "there are 8"]),
        ({"data": 16}, 8, ["mesh.data = 16", "there are 8"]),
        ({"fsdp": 16}, 8, ["mesh.fsdp = 16", "there are 8"]),
        ({"fsdp": -1}, 8, ["mesh.data = -1, mesh.fsdp = -1", "once"]),
        ({"data": 0}, 8, ["mesh.data = 0"]),
        ({"data": 4, "stage": 4}, 8, ["mesh.data = 4, mesh.stage = 4", "needs 16", "there are 8"]),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_both_numbers(cfg, devices, parts):
    with pytest.raises(ConfigError) as refused:
        axis_sizes(MeshConfig(**cfg), devices)
    assert all(part in str(refused.value) for part in parts)
    assert "\n" not in str(refused.value)


def test_the_mesh_has_all_axes_and_leaves_placement_to_the_compiler():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    assert mesh.axis_names == AXES and mesh.devices.shape == (1, 2, 2, 1, 1, 2)
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert batch_shards(mesh) == 4


def test_a_mesh_may_use_some_of_the_devices():
    mesh = make_mesh(MeshConfig(), jax.devices()[3:4])
    assert mesh.devices.ravel().tolist() == jax.devices()[3:4]


def test_neighbouring_devices_are_neighbours_in_tensor():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    ids = np.vectorize(lambda device: device.id)(mesh.devices)[0, :, :, 0, 0]
    np.testing.assert_array_equal(ids, np.arange(8).reshape(2, 2, 2))


@pytest.mark.parametrize("axes", [{"data": 2, "fsdp": 128}, {"fsdp": 16, "tensor": 16}])
def test_an_axis_that_no_dimensions_of_the_torus_make_up_is_placed_all_the_same(axes):
    class Device(SimpleNamespace):
        __hash__ = object.__hash__

    devices = [
        Device(coords=coords, core_on_chip=0, platform="tpu", device_kind="TPU v5", process_index=0)
        for coords in np.ndindex(4, 8, 8)
    ]
    placed = make_mesh(MeshConfig(**axes), devices).devices
    assert {device.coords for device in placed.flat} == set(np.ndindex(4, 8, 8))
    # What talks most is close together: the devices of each row of the last axis are a box.
    for row in placed.reshape(-1, 16 if "tensor" in axes else 128):
        across = [set(values) for values in zip(*(d.coords for d in row), strict=True)]
        assert math.prod(map(len, across)) == len(row)


def sizes_of(**axes: int) -> dict[str, int]:
    return dict.fromkeys(AXES, 1) | axes


@pytest.mark.parametrize(
    "slow, sizes, slices, parts",
    [
        ({}, {"data": 4, "fsdp": 2}, 1, {}),
        ({}, {"data": 4, "fsdp": 2}, 2, {"data": 2}),
        ({}, {"data": 3, "fsdp": 8}, 4, {"fsdp": 4}),
        ({}, {"stage": 2, "fsdp": 8}, 2, {"stage": 2}),
        ({"data": 2, "fsdp": 2}, {"data": 4, "fsdp": 4}, 4, {"data": 2, "fsdp": 2}),
    ],
)
def test_the_axis_that_lies_across_slices_is_chosen_or_given(slow, sizes, slices, parts):
    found = slow_sizes(MeshConfig(slow=slow), sizes_of(**sizes), slices)
    assert found == sizes_of(**parts)


@pytest.mark.parametrize(
    "slow, sizes, slices, words",
    [
        ({}, {"fsdp": 8}, 3, ["3 slices", "mesh.fsdp = 8"]),
        ({"data": 2}, {"data": 4}, 4, ["2 parts", "4 slices"]),
        ({"data": 2}, {"data": 4}, 1, ["2 parts", "1 slices"]),
        ({"data": 2}, {"data": 3}, 2, ["mesh.slow.data = 2", "mesh.data = 3"]),
    ],
)
def test_parts_across_slices_that_do_not_fit_are_refused(slow, sizes, slices, words):
    with pytest.raises(ConfigError) as refused:
        slow_sizes(MeshConfig(slow=slow), sizes_of(**sizes), slices)
    assert all(word in str(refused.value) for word in words)


def test_the_slow_part_of_an_axis_is_its_coarsest():
    class Device(SimpleNamespace):
        __hash__ = object.__hash__

    # Two slices of four; ids count within a slice, as those of TPUs need not.
    devices = [
        Device(id=i, slice_index=i // 4, process_index=i // 4, platform="cpu", device_kind="cpu")
        for i in range(8)
    ]
    placed = arrange(devices, sizes_of(data=4, tensor=2), sizes_of(data=2))
    assert placed.shape == (1, 4, 1, 1, 1, 2)
    slices = np.vectorize(lambda device: device.slice_index)(placed)[0, :, 0, 0, 0]
    np.testing.assert_array_equal(slices, [[0, 0], [0, 0], [1, 1], [1, 1]])


def test_hosts_stand_for_slices_where_devices_name_no_slice():
    class Device(SimpleNamespace):
        __hash__ = object.__hash__

    # As GPUs that are only compiled for: all in slice 0, two hosts of four.
    devices = [
        Device(id=i, slice_index=0, process_index=i // 4, platform="gpu", device_kind="gpu")
        for i in range(8)
    ]
    placed = arrange(devices, sizes_of(data=4, tensor=2), sizes_of(data=2), "process_index")
    hosts = np.vectorize(lambda device: device.process_index)(placed)[0, :, 0, 0, 0]
    np.testing.assert_array_equal(hosts, [[0, 0], [0, 0], [1, 1], [1, 1]])


def test_batches_and_model_are_refused_in_one_go():
    cfg = with_values(
        Config(), "test", train={"global_batch": 12, "micro_batch": 6}, model={"seq_len": 20}
    )
    with pytest.raises(ConfigError) as refused:
        check_sizes(sizes_of(data=4, context=4), cfg)
    rows, length = refused.value.problems
    assert "train.micro_batch = 6 rows" in rows and "seq_len = 20" in length


@pytest.mark.parametrize(
    "values, axes, words",
    [
        ({"model": {"seq_len": 20}}, {"context": 4}, ["seq_len = 20", "multiple of", "= 8"]),
        ({}, {"expert": 2}, ["mesh.expert = 2", "no experts"]),
        ({"model": {"num_experts": 6}}, {"expert": 4}, ["num_experts = 6", "mesh.expert = 4"]),
        ({"model": {"num_layers": 4}}, {"stage": 2}, ["mesh.stage = 2", "model.stacked"]),
        (
            {"model": {"num_layers": 6, "stacked": True}},
            {"stage": 4},
            ["num_layers = 6", "mesh.stage x mesh.rounds = 4"],
        ),
        (
            {
                "model": {"num_layers": 4, "stacked": True},
                "mesh": {"stage": 2, "rounds": 2},
                "train": {"global_batch": 8, "micro_batch": 8},
            },
            {"stage": 2},
            ["train.global_batch = 8", "1 micro-batches", "mesh.stage = 2"],
        ),
    ],
)
def test_a_model_that_an_axis_does_not_divide_is_refused_with_the_numbers(values, axes, words):
    cfg = with_values(Config(), "test", **values)
    with pytest.raises(ConfigError) as refused:
        check_sizes(sizes_of(**axes), cfg)
    assert all(word in str(refused.value) for word in words)
    assert len(refused.value.problems) == 1
    check_sizes(sizes_of(), cfg)  # on one device there is nothing to divide


def rows_of(rows: int, micro: int, ramp: dict[str, int] | None = None) -> Config:
    train = {"global_batch": rows, "micro_batch": micro, "batch_ramp": ramp or {}}
    return with_values(Config(), "test", train=train)


@pytest.mark.parametrize(
    "rows, micro, parts",
    [
        (12, 12, ["train.global_batch = 12", "8 devices", "nearest: 8 or 16"]),
        (24, 12, ["train.micro_batch = 12", "8 devices", "nearest: 8 or 16"]),
        (4, 4, ["train.global_batch = 4", "8 devices", "nearest: 8"]),
        (24, 16, ["train.global_batch = 24", "train.micro_batch = 16"]),
    ],
)
def test_rows_that_do_not_divide_are_refused_with_the_nearest_sizes(rows, micro, parts):
    with pytest.raises(ConfigError) as refused:
        check_sizes(sizes_of(data=8), rows_of(rows, micro))
    assert all(part in str(refused.value) for part in parts)


def test_rows_are_refused_by_the_key_that_asks_for_them():
    with pytest.raises(ConfigError, match=r"^train.batch_ramp\['9'\] = 12 rows.* 8 devices"):
        check_sizes(sizes_of(data=8), rows_of(16, 0, {"9": 12}))


def test_rows_that_divide_are_accepted():
    check_sizes(sizes_of(data=2, fsdp=2, tensor=2), rows_of(12, 4))


def test_a_batch_of_10_rows_over_3_processes_is_refused_with_both_numbers():
    devices = np.array([SimpleNamespace(process_index=i) for i in range(3)], object)
    mesh = SimpleNamespace(
        devices=devices.reshape(1, 3, 1, 1, 1, 1), shape=dict.fromkeys(AXES, 1) | {"data": 3}
    )
    with pytest.raises(ConfigError, match="= 10 rows.* 3 devices.*3 processes; nearest: 9 or 12"):
        check_run(mesh, rows_of(10, 10))
