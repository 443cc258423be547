"""Compiler options by platform: what CPUs need, the table of presets, and what the user adds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.config import MeshConfig
from jaxgpt.errors import ConfigError
from jaxgpt.parallel import xla_options
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.parallel.xla_options import of_dtype, preset, step_options, trusted

NAME = "xla_cpu_experimental_onednn_custom_call"
# Before JAX 0.12 oneDNN has none of the products that YNNPACK would leave.
NEW = jax.__version_info__ >= (0, 12)
MORE = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE",
    "xla_cpu_prefer_vector_width": 512,
}
BFLOAT16 = {NAME: True} | (MORE if NEW else {})


def test_onednn_has_the_products_on_cpu_only():
    assert of_dtype("bfloat16", "cpu") == BFLOAT16
    assert of_dtype("float32", "cpu") == ({NAME: True} | MORE if NEW else {NAME: False})
    assert of_dtype("float64", "cpu") == {NAME: False}  # which oneDNN does not know
    assert of_dtype("bfloat16", "tpu") == of_dtype("float32", "gpu") == {}


def test_what_others_are_compared_with_has_no_product_of_onednn():
    assert trusted("cpu") == {NAME: False}  # also where XLA_FLAGS sets it
    assert trusted("tpu") == trusted("gpu") == {}


def test_options_of_collectives_are_for_several_devices():
    one, many = preset("tpu", "TPU v5 lite", 1), preset("tpu", "TPU v5 lite", 4)
    assert one == {} and many["xla_tpu_enable_async_collective_fusion"] is True
    assert preset("cpu", "cpu", 8) == {}


def test_options_of_one_generation_are_not_given_to_another():
    name = "xla_tpu_scoped_vmem_limit_kib"
    assert preset("tpu", "TPU v6 lite", 1) == {name: 98304}
    assert name not in preset("tpu", "TPU v5", 64)


def test_every_option_has_a_reason():
    assert all(len(option.reason) > 20 for option in xla_options.PRESETS)
    names = [(o.platform, o.kind, o.name) for o in xla_options.PRESETS]
    assert len(set(names)) == len(names)


def test_the_options_of_the_user_win():
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    assert step_options("bfloat16", mesh, {}) == BFLOAT16
    more = {NAME: False, "xla_x": 1}
    assert step_options("bfloat16", mesh, more) == BFLOAT16 | more


def test_an_option_that_the_compiler_does_not_know_is_refused_by_its_key():
    more = {"xla_cpu_no_such_option": 3}
    lowered = jax.jit(jnp.sin, compiler_options=more).lower(np.float32(1))
    with pytest.raises(ConfigError, match="^train.xla_options.xla_cpu_no_such_option = 3: refused"):
        xla_options.compile_with(lowered, more)


def test_an_option_of_our_own_that_a_compiler_does_not_know_is_no_fault_of_the_user():
    own = {"xla_cpu_no_such_option": True}
    lowered = jax.jit(lambda x: x, compiler_options=own).lower(np.float32(0))
    with pytest.raises(ConfigError, match=f"JAX {jax.__version__} is .*xla_cpu_no_such_option"):
        xla_options.compile_with(lowered, {})


def test_an_option_that_the_compiler_knows_is_used():
    more = {"xla_cpu_enable_fast_math": True}
    lowered = jax.jit(jnp.sin, compiler_options=more).lower(np.float32(1))
    assert float(xla_options.compile_with(lowered, more)(np.float32(0))) == 0.0
