"""Mesh sizes are filled in, or refused with the numbers that do not fit."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxgpt.config import MeshConfig
from jaxgpt.errors import ConfigError
from jaxgpt.parallel.mesh import AXES, axis_sizes, batch_shards, check_batch, make_mesh


@pytest.mark.parametrize(
    "cfg, devices, sizes",
    [
        ({}, 1, (1, 1, 1)),
        ({}, 8, (8, 1, 1)),
        ({"fsdp": 4}, 8, (2, 4, 1)),
        ({"data": 1, "fsdp": -1, "tensor": 2}, 8, (1, 4, 2)),
        ({"data": 2, "fsdp": 2, "tensor": 2}, 8, (2, 2, 2)),
        ({"data": 1, "fsdp": -1, "tensor": 16}, 8192, (1, 512, 16)),
    ],
)
def test_one_axis_takes_the_devices_that_remain(cfg, devices, sizes):
    assert tuple(axis_sizes(MeshConfig(**cfg), devices).values()) == (*sizes, 1, 1, 1)


@pytest.mark.parametrize(
    "cfg, devices, parts",
    [
        ({"fsdp": 3}, 8, ["mesh.fsdp = 3", "multiple of 3", "there are 8"]),
        ({"data": 2}, 8, ["mesh.data = 2", "needs 2 devices", "there are 8"]),
        ({"data": 16}, 8, ["mesh.data = 16", "there are 8"]),
        ({"fsdp": 16}, 8, ["mesh.fsdp = 16", "there are 8"]),
        ({"fsdp": -1}, 8, ["mesh.data = -1, mesh.fsdp = -1", "once"]),
        ({"data": 0}, 8, ["mesh.data = 0"]),
        ({"data": 4, "stage": 2}, 8, ["mesh.stage = 2", "only 1"]),
        ({"data": 1, "context": -1}, 2, ["mesh.context = 2", "only 1"]),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_both_numbers(cfg, devices, parts):
    with pytest.raises(ConfigError) as refused:
        axis_sizes(MeshConfig(**cfg), devices)
    assert all(part in str(refused.value) for part in parts)
    assert "\n" not in str(refused.value)


def test_the_mesh_has_all_axes_and_leaves_placement_to_the_compiler():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    assert mesh.axis_names == AXES and mesh.devices.shape == (2, 2, 2, 1, 1, 1)
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert batch_shards(mesh) == 4


def test_a_mesh_may_use_some_of_the_devices():
    mesh = make_mesh(MeshConfig(), jax.devices()[3:4])
    assert mesh.devices.ravel().tolist() == jax.devices()[3:4]


def test_neighbouring_devices_are_neighbours_in_tensor():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    ids = np.vectorize(lambda device: device.id)(mesh.devices)[..., 0, 0, 0]
    np.testing.assert_array_equal(ids, np.arange(8).reshape(2, 2, 2))


def test_devices_of_several_slices_are_refused():
    with pytest.raises(ConfigError, match="2 slices"):
        make_mesh(MeshConfig(), [SimpleNamespace(slice_index=0), SimpleNamespace(slice_index=1)])


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
        check_batch(make_mesh(MeshConfig()), rows, micro)
    assert all(part in str(refused.value) for part in parts)


def test_rows_are_refused_by_the_key_that_asks_for_them():
    with pytest.raises(ConfigError, match=r"^train.batch_ramp\['9'\] = 12 rows.* 8 devices"):
        check_batch(make_mesh(MeshConfig()), 12, 12, "train.batch_ramp['9']")


def test_rows_that_divide_are_accepted():
    check_batch(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)), 12, 4)


def test_a_batch_of_10_rows_over_3_processes_is_refused_with_both_numbers():
    devices = np.array([SimpleNamespace(process_index=i) for i in range(3)], object)
    mesh = SimpleNamespace(
        devices=devices.reshape(3, 1, 1, 1, 1, 1), shape=dict.fromkeys(AXES, 1) | {"data": 3}
    )
    with pytest.raises(ConfigError, match="= 10 rows.* 3 devices.*3 processes; nearest: 9 or 12"):
        check_batch(mesh, 10, 10)
