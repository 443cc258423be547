"""XLA's compiler options of the training step, by platform: one table, with the reason of each.

They are given to the one program (`jax.jit(compiler_options=...)`), never to the process, so that
nothing else is compiled otherwise and XLA_FLAGS stay the user's. `train.xla_options` adds to them
and wins; an option the compiler does not know is refused by it, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxgpt.errors import ConfigError, one_line
from jaxgpt.parallel.mesh import platform as platform_of

Value = bool | int | float | str
ONEDNN = "xla_cpu_experimental_onednn_custom_call"
YNN = "xla_cpu_experimental_ynn_fusion_type"
WIDTH = "xla_cpu_prefer_vector_width"
YNN_REPLACES = jax.__version_info__ >= (0, 12)  # before, its absence makes products slower


class Option(NamedTuple):
    """One row of the table."""

    platform: str
    kind: str  # a word in the name of the device's kind; empty: all of the platform
    devices: int  # from so many devices on
    name: str
    value: Value
    reason: str


# Accepted by libtpu 0.0.42 and 0.0.50; timed by those who published them, not by us.
PRESETS = (
    Option("tpu", "TPU v6", 1, "xla_tpu_scoped_vmem_limit_kib", 98304,
           "of 128 MiB; the default of 16 MiB cuts fusions short (Trillium recipes of Google)"),
    Option("tpu", "", 2, "xla_tpu_enable_async_collective_fusion", True,
           "gathers of weights run inside the products before them"),
    Option("tpu", "", 2, "xla_tpu_enable_async_collective_fusion_fuse_all_gather", True,
           "the same, for all-gather"),
    Option("tpu", "", 2, "xla_tpu_overlap_compute_collective_tc", True,
           "the same, on the tensor core"),
    Option("tpu", "", 2, "xla_tpu_assign_all_reduce_scatter_layout", True,
           "fewer changes of layout around the scatter of gradients"),
    Option("tpu", "", 2, "xla_tpu_enable_data_parallel_all_reduce_opt", True,
           "sums of gradients over replicas overlap with the backward pass"),
    Option("tpu", "", 2, "xla_tpu_data_parallel_opt_different_sized_ops", True,
           "the same, for gradients of different sizes"),
    Option("tpu", "", 2, "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter", True,
           "or gradients over all chips of a torus are summed whole on each: twice the bytes (seen "
           "in programs for 2x2x2 and 2x2x4 chips of v5p and 4x4 of v6e)"),
    Option("tpu", "", 2, "xla_tpu_use_minor_sharding_for_major_trivial_input", True,
           "or the gradient of the head [V, D], split over D in parts of under 128, is summed "
           "whole on each (seen for 16x16 chips of v6e and 4x8x8 of v5p)"),
    Option("tpu", "", 2, "xla_tpu_relayout_group_size_threshold_for_reduce_scatter", 1,
           "the same for the MLP's second matrix, over 64 of 4x8x8 chips of v5p"),
    Option("gpu", "", 2, "xla_gpu_enable_latency_hiding_scheduler", True,
           "gathers of the next layer run beside this one (GPU performance tips of JAX)"),
)  # fmt: skip


def preset(platform: str, kind: str, devices: int) -> dict[str, Value]:
    """Return the options of the table for so many devices of a kind, as JAX names it."""
    return {
        option.name: option.value
        for option in PRESETS
        if option.platform == platform and option.kind in kind and devices >= option.devices
    }


def of_dtype(compute_dtype: DTypeLike, platform: str) -> dict[str, Value]:
    """Return the options that products in this dtype need to be fast, and right.

    On CPU, JAX 0.12 leaves weight gradients to a slower kernel, in bfloat16 to a float32 one, and
    sends them to oneDNN with the first option; with the second, which leaves YNNPACK nothing but
    reductions, oneDNN has all other products as well: against XLA's own choice GPT-2 124M takes
    half the time in bfloat16, in float32 nine tenths. oneDNN is handed sums of products as well,
    and not all of them rightly: see `model.block_attention`. JAX 0.10 accepts the first option
    without effect. The third lets activations and softmax use all of AVX-512.
    """
    if platform != "cpu":
        return {}
    narrow = jnp.dtype(compute_dtype) == jnp.bfloat16
    if not YNN_REPLACES:
        return {ONEDNN: narrow}
    if not narrow and jnp.dtype(compute_dtype) != jnp.float32:
        return trusted(platform)
    return {ONEDNN: True, YNN: "LIBRARY_FUSION_TYPE_REDUCE", WIDTH: 512}


def trusted(platform: str) -> dict[str, Value]:
    """Return the options of a program that others are compared with: XLA's own kernels alone."""
    return {ONEDNN: False} if platform == "cpu" else {}  # also where XLA_FLAGS asks for it


def step_options(
    compute_dtype: DTypeLike, mesh: Mesh, more: Mapping[str, Value]
) -> dict[str, Value]:
    """Return all options of the step on a mesh; `more` are the user's, which win."""
    platform, device = platform_of(mesh), mesh.devices.flat[0]
    options = of_dtype(compute_dtype, platform) | preset(platform, device.device_kind, mesh.size)
    return options | dict(more)


def compile_with(lowered: jax.stages.Lowered, more: Mapping[str, Value]) -> Any:
    """Return the compiled program; `more` are `train.xla_options`.

    Raises ConfigError for an option that the compiler refuses, one of these or of its own.
    """
    try:
        return lowered.compile()
    except Exception as error:
        wrong = [name for name in more if name in str(error)]
        if not wrong and "No such compile option" in str(error):
            raise ConfigError(
                f"the compiler of JAX {jax.__version__} is too new or too old for an option that "
                f"jaxgpt sets: {one_line(error)}; tested versions are in launch/constraints.txt"
            ) from None
        if not wrong:
            raise
        raise ConfigError(
            f"train.xla_options.{wrong[0]} = {more[wrong[0]]}: refused by the compiler: "
            f"{one_line(error)}"
        ) from None
