"""The chips that training runs on, as data: rates, memories and links, each with its source.

All figures are of one JAX device (a chip; half a chip for TPU7x, whose two cores are two devices),
rates are per second and for one direction, and sizes are bytes. Only the standard library is
imported; `planning.hardware` makes whole machines of chips, `training.peak` takes the matmul rates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

GiB = 2**30


@dataclass(frozen=True)
class Chip:
    """One JAX device. `sources` says of each figure where it is from, or how it was found."""

    name: str
    platform: Literal["tpu", "gpu"]
    kinds: tuple[str, ...]  # what JAX calls it: `device_kind`
    flops: float  # dense bfloat16; sparse or 8-bit figures would halve every utilisation
    memory: float  # as sold
    usable: float  # by programs, with what the system keeps taken off
    bandwidth: float  # of its memory
    link: float  # a TPU's link to one neighbour; a GPU's way into its NVLink switch
    network: float  # its share of the way out of its host, or of its slice
    host_link: float  # to or from the host's memory
    host_memory: float  # of a host
    per_host: int  # devices; of a slice of several hosts, if it is a TPU
    per_chip: int = 1  # devices
    torus: int = 0  # dimensions of the interconnect; 0: a switch
    counted: Literal["cores", "chips", "devices"] = "devices"  # by the number in a product's name
    sources: dict[str, str] = field(default_factory=dict, compare=False, repr=False)


_BOOK = "jax-ml/scaling-book, tpus.md"
_DOCS = "docs.cloud.google.com/tpu/docs/{}"
_LIBTPU = "available HBM in libtpu 0.0.50's out-of-memory error"
_LINK = "scaling-book, training.md: 90 GB/s one way (nominally 100)"
_HOST_TPU = "scaling-book, tpus.md: 15 GB/s of PCIe per chip"


def _tpu(name: str, **sources: str) -> dict[str, str]:
    docs = _DOCS.format(name)
    return {
        "flops": docs, "memory": docs, "usable": _LIBTPU, "bandwidth": docs, "link": _LINK,
        "network": docs, "host_link": _HOST_TPU, "host_memory": docs, "per_host": docs,
    } | sources  # fmt: skip


def _gpu(sheet: str, **sources: str) -> dict[str, str]:
    return {
        "flops": f"{sheet}, dense", "memory": sheet, "usable": "nvidia-smi, total",
        "bandwidth": sheet, "link": f"{sheet}: NVLink, half of both ways",
        "network": f"{sheet}: one InfiniBand port per GPU", "host_link": f"{sheet}: PCIe x16",
        "host_memory": f"{sheet}: system memory", "per_host": sheet,
    } | sources  # fmt: skip


CHIPS: tuple[Chip, ...] = (
    Chip(
        name="v4", platform="tpu", kinds=("TPU v4",), flops=275e12, memory=32 * GiB,
        usable=30.75 * GiB, bandwidth=1.2e12, link=45e9, network=6.25e9, host_link=15e9,
        host_memory=407e9, per_host=4, torus=3, counted="cores",
        sources=_tpu("v4", link=_BOOK, network=f"{_BOOK}: 25 GB/s per host of 4 chips"),
    ),
    Chip(
        name="v5e", platform="tpu", kinds=("TPU v5 lite", "TPU v5e"), flops=197e12,
        memory=16 * GiB, usable=15.75 * GiB, bandwidth=0.82e12, link=45e9, network=3.125e9,
        host_link=15e9, host_memory=192e9, per_host=4, torus=2, counted="chips",
        sources=_tpu(
            "v5e", link="scaling-book, training.md: 45 GB/s one way (nominally 50)",
            network=f"{_BOOK}: 25 GB/s per host of 8 chips",
        ),
    ),
    Chip(
        name="v5p", platform="tpu", kinds=("TPU v5", "TPU v5p"), flops=459e12, memory=96 * GiB,
        usable=95.73 * GiB, bandwidth=2.765e12, link=90e9, network=6.25e9, host_link=15e9,
        host_memory=448e9, per_host=4, torus=3, counted="cores",
        sources=_tpu("v5p", memory=f"{_BOOK} (the docs say 95)"),
    ),
    Chip(
        name="v6e", platform="tpu", kinds=("TPU v6 lite", "TPU v6e"), flops=918e12,
        memory=32 * GiB, usable=31.24 * GiB, bandwidth=1.64e12, link=90e9, network=12.5e9,
        host_link=32e9, host_memory=720e9, per_host=4, torus=2, counted="chips",
        sources=_tpu(
            "v6e", network=f"{_DOCS.format('v6e')}: 25.6 Tb/s per pod of 256",
            host_link=f"{_BOOK}: 32 GB/s of PCIe per chip",
        ),
    ),
    Chip(
        name="tpu7x", platform="tpu", kinds=("TPU7x",), flops=1153.5e12, memory=96 * GiB,
        usable=94.74 * GiB, bandwidth=3.69e12, link=45e9, network=6.25e9, host_link=16e9,
        host_memory=960e9, per_host=8, per_chip=2, torus=3, counted="cores",
        sources=_tpu(
            "tpu7x", link=f"{_LINK} per chip, half of it per device",
            network=f"{_DOCS.format('tpu7x')}: 100 Gb/s per chip",
            host_link="as a v6e chip, half of it per device; no figure is published",
        ),
    ),
    Chip(
        name="a100-40", platform="gpu", kinds=("NVIDIA A100-SXM4-40GB",), flops=312e12,
        memory=40 * GiB, usable=40_960 * 2**20, bandwidth=1.555e12, link=300e9, network=25e9,
        host_link=32e9, host_memory=1e12, per_host=8, sources=_gpu("NVIDIA DGX A100 data sheet"),
    ),
    Chip(
        name="a100-80", platform="gpu", kinds=("NVIDIA A100-SXM4-80GB",), flops=312e12,
        memory=80 * GiB, usable=81_920 * 2**20, bandwidth=2.039e12, link=300e9, network=25e9,
        host_link=32e9, host_memory=2e12, per_host=8, sources=_gpu("NVIDIA DGX A100 data sheet"),
    ),
    Chip(
        name="h100", platform="gpu", kinds=("NVIDIA H100 80GB HBM3",), flops=989e12,
        memory=80 * GiB,
        usable=81_559 * 2**20, bandwidth=3.35e12, link=450e9, network=50e9, host_link=64e9,
        host_memory=2e12, per_host=8, sources=_gpu("NVIDIA H100 and DGX H100 data sheets"),
    ),
    Chip(
        name="h200", platform="gpu", kinds=("NVIDIA H200",), flops=989e12, memory=141 * GiB,
        usable=143_771 * 2**20, bandwidth=4.8e12, link=450e9, network=50e9, host_link=64e9,
        host_memory=2e12, per_host=8, sources=_gpu("NVIDIA H200 and DGX H200 data sheets"),
    ),
    Chip(
        name="b200", platform="gpu", kinds=("NVIDIA B200",), flops=2250e12, memory=180 * GiB,
        usable=183_359 * 2**20, bandwidth=8e12, link=900e9, network=50e9, host_link=64e9,
        host_memory=2e12, per_host=8, sources=_gpu("NVIDIA DGX B200 data sheet"),
    ),
)  # fmt: skip


def by_kind(kind: str) -> Chip | None:
    """Return the chip that JAX calls `kind`, or None if it is not in the table."""
    return next((chip for chip in CHIPS if kind in chip.kinds), None)
