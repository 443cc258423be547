"""What stands in the environment before JAX starts."""

from __future__ import annotations

import os
import subprocess
import sys
from fnmatch import fnmatch

import pytest
from programs import outcome, python

from jaxgpt.runtime import environment
from jaxgpt.runtime.environment import may_have_accelerator


@pytest.fixture
def program(tmp_path) -> str:
    """A program that says each time it starts, then settles its environment."""
    path = tmp_path / "program.py"
    path.write_text(
        "import os, sys\n"
        "print('start', flush=True)\n"
        "from jaxgpt.runtime import environment\n"
        "environment.prepare_environment(sys.argv[1:])\n"
        "print(os.environ.get('GLIBC_TUNABLES'), sys.argv[1:], sys.stdin.read())\n"
    )
    return str(path)


def test_the_command_runs_again_once_with_huge_pages_and_keeps_its_arguments_and_input(
    program, monkeypatch
):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)  # the test command itself may set it
    process = python(program, "train", "a b", stdin=subprocess.PIPE)
    out, err = process.communicate("text", timeout=30)
    # Where the kernel or the C library has no use for the setting, there is no second start.
    helps = environment._huge_pages_would_help()
    starts, tunables = ("start\nstart\n", "glibc.malloc.hugetlb=1") if helps else ("start\n", None)
    assert out == f"{starts}{tunables} ['train', 'a b'] text\n"
    assert err == ""


def test_other_tunables_are_kept(program, monkeypatch):
    calls = []
    monkeypatch.setattr(os, "execve", lambda *call: calls.append(call))
    monkeypatch.setattr(environment, "_huge_pages_would_help", lambda: True)
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=3")
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    monkeypatch.setattr(sys, "argv", ["jaxgpt", "train"])
    monkeypatch.setattr(sys, "gettrace", lambda: None)
    environment.prepare_environment(["train"])
    tunables = calls[0][2]["GLIBC_TUNABLES"]
    assert tunables == "glibc.malloc.tcache_count=3:glibc.malloc.hugetlb=1"


def test_an_explicit_choice_of_the_user_is_left_alone(program):
    out = outcome(python(program, env={"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}))[1]
    assert out.startswith("start\nglibc.malloc.hugetlb=0")


def test_a_variable_prevents_the_second_start(program):
    assert outcome(python(program, env={"JAXGPT_NO_REEXEC": "1"}))[1].count("start") == 1


def test_a_stripped_environment_does_not_start_again_for_ever(program):
    assert outcome(python(program, env={"JAXGPT_REEXEC": "1"}))[1].count("start") == 1


def test_code_given_on_the_command_line_is_not_run_again():
    code = (
        "print('start', flush=True)\n"
        "from jaxgpt.runtime.environment import prepare_environment\nprepare_environment()"
    )
    assert outcome(python(code))[1] == "start\n"


def test_a_call_from_python_never_replaces_the_process(monkeypatch):
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("replaced the caller's process"))
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.delenv("JAXGPT_REEXEC", raising=False)
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    environment.prepare_environment(["train", "config.toml"])


def test_log_levels_set_by_the_user_win(monkeypatch):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS", raising=False)
    environment.prepare_environment(["not", "this", "process"])
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "0"
    assert os.environ.pop("TF_ENABLE_ONEDNN_OPTS") == "0"


def test_most_of_a_gpu_is_for_the_run_unless_the_user_says_otherwise(monkeypatch):
    name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    monkeypatch.delenv(name, raising=False)
    environment.prepare_environment(["not", "this", "process"])
    assert os.environ[name] == "0.92"
    monkeypatch.setenv(name, "0.5")
    environment.prepare_environment(["not", "this", "process"])
    assert os.environ[name] == "0.5"


def test_a_machine_without_an_accelerator_computes_on_its_cpu():
    assert not may_have_accelerator([], {"PATH": "/bin", "TPU_LIBRARY_PATH": "/x"})
    assert not may_have_accelerator([], {"SLURM_GPUS_ON_NODE": "0", "TPU_NAME": ""}, ["xla_cuda13"])


@pytest.mark.parametrize(
    "file",
    ["/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/dev/accel0", "/dev/vfio/0"],
)
def test_the_file_of_a_driver_is_an_accelerator(file):
    assert may_have_accelerator([file], {})
    assert any(fnmatch(file, pattern) for pattern in environment.DEVICE_FILES)


@pytest.mark.parametrize(
    "environ",
    [
        {"TPU_WORKER_ID": "0"},
        {"TPU_NAME": "pod"},
        {"TPU_PROCESS_ADDRESSES_PATH": "/etc/tpu"},
        {"JAX_FORCE_TPU_INIT": "1"},
        {"SLURM_GPUS_ON_NODE": "8"},
    ],
)
def test_a_variable_of_whoever_hands_out_accelerators_is_one(environ):
    assert may_have_accelerator([], environ)


def test_a_plugin_for_other_hardware_is_left_to_look_for_it():
    assert may_have_accelerator([], {}, ["xla_cuda13", "neuron"])


def test_without_an_accelerator_jax_starts_on_the_cpu_and_says_nothing(program, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS")
    code = "\n".join(
        (
            "from jaxgpt.runtime import environment",
            "environment.DEVICE_FILES = ()",  # also where this test has some
            "environment.prepare_environment(['x'])",
            "import jax",
            "print(jax.devices()[0].platform)",
        )
    )
    unset = {name: "" for name in environment.DEVICE_VARIABLES}
    assert outcome(python(code, env=unset | {"SLURM_GPUS_ON_NODE": "0"})) == (0, "cpu\n", "")


def test_the_platform_that_the_user_chose_wins(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    monkeypatch.setattr(environment, "may_have_accelerator", lambda *_: False)
    environment.prepare_environment(["x"])
    assert os.environ["JAX_PLATFORMS"] == "cuda,cpu"
