"""Start of JAX: compile cache, devices, advice; mostly in processes of their own."""

from __future__ import annotations

import pytest
from programs import outcome, python

from jaxgpt import config
from jaxgpt.runtime import devices, processor

START = """
import jax
from jaxgpt import config, errors
from jaxgpt.runtime.devices import start_jax
try:
    print(*start_jax(config.load()).lines, sep="\\n")
    print(jax.config.jax_compilation_cache_dir)
except errors.ConfigError as error:
    print(error)
"""


def test_jax_starts_with_a_compile_cache_of_this_processor_and_names_the_device(tmp_path):
    env = {"XDG_CACHE_HOME": str(tmp_path), "JAX_NUM_CPU_DEVICES": "2"}
    line, folder = outcome(python(START, env=env))[1].splitlines()
    assert folder.startswith(f"{tmp_path}/jaxgpt/xla/{processor.cpu_key()}-")
    assert "on cpu" in line and "2 device(s)" in line and folder in line


def test_a_missing_device_is_a_refused_configuration_not_a_traceback(tmp_path):
    env = {"XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cuda"}
    status, out, _ = outcome(python(START, env=env))
    assert status == 0
    assert out.startswith("JAX_PLATFORMS=cuda: no usable device") and out.count("\n") == 1


def test_a_chosen_compile_cache_wins(monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/chosen")
    monkeypatch.setattr(devices, "cache_folder", lambda *_: pytest.fail("made another"))
    assert "compile cache /chosen" in devices.start_jax(config.Config()).lines[0]


def test_emulated_bfloat16_is_advised_against(monkeypatch):
    monkeypatch.setattr(devices, "has_native_bf16", lambda: False)
    assert "train.compute_dtype=float32" in devices.start_jax(config.Config()).lines[-1]
