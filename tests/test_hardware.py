"""Machines by name: published sizes and shapes, sources for every figure, links of mesh axes."""

from __future__ import annotations

import dataclasses

import pytest

from jaxgpt.chips import CHIPS, by_kind
from jaxgpt.errors import ConfigError
from jaxgpt.planning.hardware import Target, axis_rings, parse

# docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}: name, topology, JAX devices, hosts.
PUBLISHED = [
    ("v4-4096", (8, 16, 16), 2048, 512),
    ("v5p-8", (2, 2, 1), 4, 1),
    ("v5p-16", (2, 2, 2), 8, 2),
    ("v5p-64", (2, 4, 4), 32, 8),
    ("v5p-128", (4, 4, 4), 64, 16),
    ("v5p-384", (4, 4, 12), 192, 48),
    ("v5p-1536", (8, 8, 12), 768, 192),
    ("v5p-2048", (8, 8, 16), 1024, 256),
    ("v5p-12288", (16, 16, 24), 6144, 1536),
    ("v5e-8", (2, 4), 8, 1),
    ("v5e-256", (16, 16), 256, 64),
    ("v6e-256", (16, 16), 256, 64),
    ("tpu7x-128", (4, 4, 4), 128, 16),
    ("tpu7x-16", (2, 2, 2), 16, 2),
]


@pytest.mark.parametrize(("name", "shape", "devices", "hosts"), PUBLISHED)
def test_a_slice_has_its_published_shape(name, shape, devices, hosts):
    target = parse(name)
    assert (target.topology, target.num_devices, target.num_hosts) == (shape, devices, hosts)


def test_gpus_come_eight_a_host():
    target = parse("h100x64")
    assert (target.num_devices, target.num_hosts, target.topology) == (64, 8, (8,))
    assert parse("h200x1").num_devices == 1


def test_slices_multiply_and_shapes_can_be_asked_for():
    assert parse("2*v6e-256").num_devices == 512 and parse("2*v6e-256").num_slices == 2
    assert parse("v5p-4x4x8").num_devices == 128


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("v5p-100", "v5p-128"),
        ("v5p-2", "v5p-8"),  # a host has 4 chips, and is not divided
        ("tpu7x-2", "tpu7x-8"),
        ("h100x12", "h100x8, h100x16"),
        ("h100-8", "h100x8"),
        ("v6-256", "v6e-256"),
        ("v5p-4x4x6", "4x4x4"),
        ("3*", "v5p-128"),
    ],
)
def test_an_unknown_machine_is_one_line_with_the_nearest(name, words):
    with pytest.raises(ConfigError) as refused:
        parse(name)
    assert words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("chip", CHIPS, ids=lambda c: c.name)
def test_every_figure_has_a_source(chip):
    figures = {
        "flops", "memory", "usable", "bandwidth", "link", "network", "host_link", "host_memory",
        "per_host",
    }  # fmt: skip
    assert set(chip.sources) == figures <= {f.name for f in dataclasses.fields(chip)}
    assert all(chip.sources.values())


@pytest.mark.parametrize(
    ("kind", "teraflops"),
    # NVIDIA's and Google's data sheets, dense bfloat16; half a chip of TPU7x (2,307) is a device.
    [("NVIDIA H200", 989.0), ("TPU v5", 459.0), ("TPU v6 lite", 918.0), ("TPU7x", 1153.5)],
)
def test_the_peak_that_utilisation_divides_by_is_that_of_the_same_table(kind, teraflops):
    assert by_kind(kind).flops == teraflops * 1e12


def axis_bandwidth(target: Target, fast: dict[str, int]) -> dict[str, float]:
    rings = axis_rings(target, fast).items()
    return {axis: target.chip.link * sum(links for _, links in of_axis) for axis, of_axis in rings}


@pytest.mark.parametrize(
    ("name", "tokens"),
    # Tokens per device that hide a gather over one ring: peak / both ways of a link
    # (scaling-book, training.md: v5p 2,550, v6e 5,100; tpu7x 12,800).
    [("v5p-128", 2550), ("v6e-256", 5100), ("tpu7x-128", 12_817)],
)
def test_one_ring_sends_both_ways(name, tokens):
    target = parse(name)
    side = target.topology[0]
    dies = {"tensor": target.chip.per_chip} if target.chip.per_chip > 1 else {}
    ring = axis_bandwidth(target, {"fsdp": side, **dies})["fsdp"]
    assert target.chip.flops / ring == pytest.approx(tokens, rel=1e-3)


def test_an_axis_over_the_whole_torus_has_all_its_dimensions():
    chip = parse("v5p-128").chip
    assert axis_bandwidth(parse("v5p-128"), {"fsdp": 64})["fsdp"] == 6 * chip.link
    shared = axis_bandwidth(parse("v5p-128"), {"fsdp": 16, "tensor": 4})
    assert (shared["tensor"], shared["fsdp"]) == (2 * chip.link, 4 * chip.link)


def test_a_slice_without_links_around_its_ends_is_a_line():
    chip = parse("v6e-16").chip
    assert axis_bandwidth(parse("v6e-16"), {"fsdp": 16})["fsdp"] == 2 * chip.link
    assert axis_bandwidth(parse("v6e-256"), {"fsdp": 256})["fsdp"] == 4 * chip.link


def test_gpus_of_a_host_have_their_switch_on_every_axis():
    rates = axis_bandwidth(parse("h100x64"), {"fsdp": 4, "tensor": 2})
    assert rates == {"fsdp": 450e9, "tensor": 450e9}


def test_jax_takes_three_quarters_of_a_gpu_unless_told(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    target = parse("h100x8")
    assert target.usable == 0.75 * 81_559 * 2**20
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    assert target.usable == 0.92 * 81_559 * 2**20
