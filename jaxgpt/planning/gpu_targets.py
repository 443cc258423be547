"""GPUs as the XLA compiler has them described, for compiling without one.

The figures are NVIDIA's published ones: the architecture papers of A100, H100 and Blackwell, and
the "technical specifications per compute capability" of the CUDA C++ programming guide. The text is
XLA's `GpuTargetConfigProto`. Rates of single units are left out: they only feed cost models.
"""

from __future__ import annotations

from importlib import metadata
from typing import NamedTuple

from jaxgpt.chips import CHIPS

MIB = 2**20


class Gpu(NamedTuple):
    """What `chips` does not say of one product. Sizes in bytes."""

    capability: tuple[int, int]  # compute capability: major, minor
    cores: int  # streaming multiprocessors
    l2_cache: int
    clock_ghz: float  # boost
    units_per_core: int = 128  # float32
    shared_per_core: int = 228 * 1024


GPUS = {
    "a100-40": Gpu((8, 0), 108, 40 * MIB, 1.41, 64, 164 * 1024),
    "a100-80": Gpu((8, 0), 108, 40 * MIB, 1.41, 64, 164 * 1024),
    "h100": Gpu((9, 0), 132, 50 * MIB, 1.98),
    "h200": Gpu((9, 0), 132, 50 * MIB, 1.98),
    "b200": Gpu((10, 0), 148, 126 * MIB, 1.965),
}


def description(name: str) -> str:
    """Return the textual target of a GPU, with the CUDA and cuDNN versions installed here.

    `name` is one of `GPUS`, as in `chips.CHIPS`.
    """
    gpu, chip = GPUS[name], next(chip for chip in CHIPS if chip.name == name)
    major, minor = gpu.capability
    # From Hopper on, the instructions of just this architecture (wgmma, tcgen05) are used.
    features = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    cuda, cudnn = _version("nvidia-cuda-runtime", "13.0.0"), _version("nvidia-cudnn-cu13", "9.12.0")
    # 1 KiB of each block's shared memory belongs to the system.
    return f"""
gpu_device_info {{
  name: "{chip.kinds[0]}"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
  core_count: {gpu.cores}
  fpus_per_core: {gpu.units_per_core}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {int(chip.usable)}
  memory_bandwidth: {int(chip.bandwidth)}
  l2_cache_size: {gpu.l2_cache}
  shared_memory_per_core: {gpu.shared_per_core}
  shared_memory_per_block: {48 * 1024}
  shared_memory_per_block_optin: {gpu.shared_per_core - 1024}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_core_limit: 2048
  threads_per_block_limit: 1024
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  device_address_bits: 64
  ecc_enabled: true
  driver_version: "{_dotted(cuda)}"
  runtime_version: "{_dotted(cuda)}"
  compile_time_toolkit_version: "{_dotted(cuda)}"
  dnn_version: "{_dotted(cudnn)}"
}}
platform_name: "CUDA"
runtime_version {{ major: {cuda[0]} minor: {cuda[1]} patch: {cuda[2]} }}
dnn_version_info {{ major: {cudnn[0]} minor: {cudnn[1]} patch: {cudnn[2]} }}
device_description_str: "{chip.kinds[0]}"
"""


def _version(package: str, otherwise: str) -> tuple[int, int, int]:
    """Return the first three numbers of a package's version, or those of `otherwise`."""
    try:
        text = metadata.version(package)
    except metadata.PackageNotFoundError:
        text = otherwise
    major, minor, patch = (int(number) for number in f"{text}.0.0".split(".")[:3])
    return major, minor, patch


def _dotted(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))
