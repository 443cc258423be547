"""The train step compiled in a child process, also for TPU and GPU where their compilers are."""

from __future__ import annotations

import importlib.util
import json
import os
import stat

import jax
import pytest

from jaxgpt import config
from jaxgpt.chips import CHIPS
from jaxgpt.config import Config
from jaxgpt.errors import ConfigError, HangError, JaxgptError
from jaxgpt.planning import child, gpu_targets
from jaxgpt.planning import compile as compiling
from jaxgpt.planning.collectives import table
from jaxgpt.planning.hardware import parse

GIB = 2**30
WIDTH, LAYERS, VOCAB, T, MLP = 256, 2, 512, 256, 512
CPU = {"platform": "cpu", "num_devices": 8}


def tiny(mesh: str, **train: int) -> Config:
    """Return two layers of a Llama of width 256, heads of 128, with document masks."""
    train = {"global_batch": 16, "micro_batch": 8, "num_steps": 10} | train
    sizes = {
        "num_layers": LAYERS, "embed_dim": WIDTH, "num_heads": 2, "head_dim": 128, "mlp_dim": MLP,
        "vocab_size": VOCAB, "seq_len": T, "positions": "rope", "norm": "rmsnorm",
        "norm_bias": "false", "mlp": "swiglu", "tie_embeddings": "false", "stacked": "true",
        "remat": "full",
    }  # fmt: skip
    settings = [f"model.{name}={value}" for name, value in sizes.items()]
    settings += [f"train.{name}={value}" for name, value in train.items()]
    axes = [f"mesh.{axis}" for axis in mesh.split()]
    return config.load(None, [*settings, *axes, "data.document_mask=true"])


def num_params() -> int:
    block = 4 * WIDTH * WIDTH + 3 * WIDTH * MLP + 2 * WIDTH
    return 2 * VOCAB * WIDTH + LAYERS * block + WIDTH


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    """Return the child's answer for 8 devices, from this process, which has them; and the text."""
    path = tmp_path_factory.mktemp("text") / "step.txt"
    request = {"config": config.to_dict(tiny("data=2 fsdp=4")), "target": CPU, "text": str(path)}
    return child.respond(request | {"layers": None}), path.read_text()


def test_the_state_is_donated_to_the_last_byte(on_cpu):
    answer, _ = on_cpu
    assert answer["outcome"] == "compiled"
    assert answer["alias_bytes"] == answer["state_bytes"]


def test_the_state_has_12_bytes_per_parameter_split_over_fsdp(on_cpu):
    answer, _ = on_cpu
    whole = 12 * (LAYERS * 2 + 1) * WIDTH * 3 // 4  # norms are not split
    counters = 5 * 4
    assert abs(answer["state_bytes"] - 3 * num_params() - whole - counters) < 64


def test_the_peak_is_what_the_compiler_adds_up(on_cpu):
    answer, _ = on_cpu
    parts = (answer[f"{part}_bytes"] for part in ("argument", "output", "temp"))
    assert answer["peak_bytes"] == sum(parts) - answer["alias_bytes"]
    assert answer["argument_bytes"] < answer["live_bytes"] <= answer["peak_bytes"]


def test_the_arguments_are_the_state_and_a_batch_with_documents(on_cpu):
    answer, _ = on_cpu
    batch = 5 * 4 * (16 // 8) * T  # five leaves of 4 bytes: 16 rows on 8 devices
    assert answer["argument_bytes"] - answer["state_bytes"] == batch


def test_the_text_that_is_kept_is_of_the_train_step(on_cpu):
    assert on_cpu[1].startswith("HloModule jit_train_step")


def test_exchanges_over_data_are_made_once_a_step(on_cpu):
    answer, _ = on_cpu
    over = [one for one in answer["collectives"] if "data" in one["axes"]]
    assert over
    assert all(one["runs"] == 1 for one in over if one["whole_bytes"] > 64 * 1024)


def test_fewer_layers_are_compiled_on_request(on_cpu):
    request = {"config": config.to_dict(tiny("data=2 fsdp=4")), "target": CPU, "layers": 3}
    cfg = child.configuration(request)
    assert cfg.model.num_layers == 3


def test_a_mesh_that_does_not_fit_the_devices_is_refused():
    request = {"config": config.to_dict(tiny("data=1 fsdp=3")), "target": CPU}
    answer = child.respond(request)
    assert answer["outcome"] == "refused"
    assert "mesh.fsdp = 3" in answer["line"]


def test_a_configuration_without_vocabulary_is_refused():
    cfg = config.with_values(tiny("data=8"), "test", model={"vocab_size": 0})
    answer = child.respond({"config": config.to_dict(cfg), "target": CPU})
    assert answer["outcome"] == "refused"
    assert "model.vocab_size" in answer["line"]


def test_the_batch_has_the_leaves_that_training_reads():
    cfg = tiny("data=8")
    assert len(jax.tree.leaves(child.batch_like(cfg))) == 5
    plain = config.with_values(cfg, "test", data={"document_mask": False})
    leaves = jax.tree.leaves(child.batch_like(plain))
    assert [leaf.shape for leaf in leaves] == [(2, 8, T)] * 3


@pytest.mark.parametrize(
    ("message", "sizes"),
    [
        # libtpu 0.0.50, libtpu 0.0.42, and the form of older ones.
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total "
            "memory required for HLO temporaries (26.84G) exceeds available HBM (15.75G). HLO",
            (26.84 * GIB, 15.75 * GIB),
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (900.50M) exceeds available HBM (1.75G).",
            (900.5 * 2**20, 1.75 * GIB),
        ),
        (
            "Ran out of memory in memory space hbm. Used 23.4G of 15.75G hbm.",
            (23.4 * GIB, 15.75 * GIB),
        ),
        ("Ran out of memory in memory space vmem. Used 23.4M of 16.00M vmem.", None),
        ("INVALID_ARGUMENT: something else (1 of 2)", None),
    ],
)
def test_what_a_compiler_says_of_memory_is_read_as_bytes(message, sizes):
    found = child.over_full(message)
    if sizes is None:
        assert found is None
    else:
        assert found == tuple(int(size) for size in sizes)


def test_errors_of_a_compiler_are_told_apart():
    memory = child.refusal("Ran out of memory in memory space hbm. Used 3.0G of 2.0G hbm.")
    assert (memory["outcome"], memory["needed_bytes"]) == ("does_not_fit", 3 * GIB)
    other = child.refusal("INTERNAL: Mosaic failed\nto compile")
    assert (other["outcome"], other["line"]) == (
        "failed", "the compiler refused: INTERNAL: Mosaic failed to compile",
    )  # fmt: skip


def test_a_package_that_is_missing_is_named_by_its_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    body = {"config": config.to_dict(tiny("data=-1"))}
    tpu = child.respond(body | {"target": {"platform": "tpu", "topology": "v5e:2x2"}})
    gpu = child.respond(body | {"target": {"platform": "gpu", "chip": "h100", "num_devices": 8}})
    assert tpu["outcome"] == gpu["outcome"] == "missing"
    assert "jaxgpt[tpu]" in tpu["line"]
    assert "jaxgpt[cuda]" in gpu["line"]


def test_a_gpu_that_is_not_described_is_no_target():
    target = {"platform": "gpu", "chip": "h900", "num_devices": 8}
    answer = child.respond({"config": config.to_dict(tiny("data=-1")), "target": target})
    assert answer["outcome"] == "target"
    assert "h900" in answer["line"]


@pytest.mark.parametrize("gpu", [chip.name for chip in CHIPS if chip.platform == "gpu"])
def test_every_gpu_of_the_table_has_a_description(gpu):
    text = gpu_targets.description(gpu)
    chip = next(chip for chip in CHIPS if chip.name == gpu)
    assert f"device_memory_size: {int(chip.usable)}\n" in text
    assert text.count("{") == text.count("}")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("v5p-32", {"topology": "v5p:2x2x4", "slices": 1, "num_devices": 16}),
        ("2*v6e-16", {"topology": "v6e:4x4", "slices": 2, "num_devices": 32}),
        ("h100x16", {"chip": "h100", "hosts": 2, "num_devices": 16}),
    ],
)
def test_a_machine_becomes_a_request_of_its_parts(name, wanted):
    request = compiling.request(parse(name))
    assert wanted.items() <= request.items()
    assert json.loads(json.dumps(request)) == request


@pytest.mark.parametrize(
    ("topology", "options"),
    [
        ("v5p:2x2x4", {}),
        ("v6e:1x1", {"chips_per_host_bounds": [1, 1, 1]}),
        ("v5e:2x4", {"chips_per_host_bounds": [2, 4, 1]}),
        ("v4:2x2x2", {"chip_config_name": "megacore"}),
    ],
)
def test_libtpu_is_told_of_hosts_that_are_not_of_four(topology, options):
    assert child.tpu_topology(topology, 1) == (topology, options)
    assert child.tpu_topology(topology, 2) == (topology, {**options, "num_slices": 2})


@pytest.mark.parametrize(
    ("target", "devices", "torus"),
    [
        ({"topology": "v5p:4x4x8", "slices": 1}, 128, 128),
        ({"topology": "v5p:4x4x4", "slices": 2}, 128, 64),
        ({"topology": "v5p:2x4x4", "slices": 1}, 32, 0),
        ({"topology": "v6e:16x16", "slices": 1}, 256, 0),
        ({"chip": "h100"}, 64, 0),
    ],
)
def test_only_whole_cubes_have_rings_along_three_dimensions(target, devices, torus):
    assert child.torus_of(target, devices) == torus


def test_the_child_has_this_environment_without_its_cache_and_devices():
    ours = {"HOME": "/h", "JAX_COMPILATION_CACHE_DIR": "/c", "JAX_NUM_CPU_DEVICES": "8"}
    found = compiling.child_environment(ours, {"platform": "tpu", "topology": "v5e:2x2"})
    assert found["HOME"] == "/h"
    assert "JAX_COMPILATION_CACHE_DIR" not in found
    assert found["JAX_NUM_CPU_DEVICES"] == "1"
    assert compiling.child_environment(ours, CPU)["JAX_NUM_CPU_DEVICES"] == "8"


def program(tmp_path, monkeypatch, script: str) -> None:
    """Make the child's interpreter a shell script."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setattr(compiling.sys, "executable", str(path))


@pytest.mark.parametrize(
    ("script", "error", "words"),
    [
        ("kill -9 $$", JaxgptError, "killed, most likely for the memory"),
        ("echo Unknown flag --xla_x >&2; exit 3", JaxgptError, "status 3: Unknown flag --xla_x"),
        ("exec sleep 60", HangError, "more than 0.5 s"),
        ("kill -6 $$", ConfigError, "ended by signal 6"),
        ('cat > /dev/null; echo \'{"outcome": "missing", "line": "a"}\'', JaxgptError, "^a$"),
        ('cat > /dev/null; echo \'{"outcome": "failed", "line": "b"}\'', ConfigError, "^b$"),
    ],
)
def test_the_ways_in_which_a_child_fails_are_told_apart(
    tmp_path, monkeypatch, script, error, words
):
    program(tmp_path, monkeypatch, script)
    with pytest.raises(error, match=words) as caught:
        compiling.compile_step(tiny("data=8"), CPU, timeout=0.5 if "sleep" in script else 60)
    assert type(caught.value) is error
    assert "\n" not in str(caught.value)


def test_a_program_that_does_not_fit_is_a_result(tmp_path, monkeypatch):
    answer = {
        "outcome": "does_not_fit", "line": child.misfit(26.84e9, 16.91e9),
        "needed_bytes": 3, "available_bytes": 2, "platform": "tpu", "device_kind": "TPU v5 lite",
        "num_devices": 4, "mesh": {"fsdp": 4},
    }  # fmt: skip
    program(tmp_path, monkeypatch, f"cat > /dev/null; echo '{json.dumps(answer)}'")
    done = compiling.compile_step(tiny("data=8"), CPU)
    assert compiling.describe(done) == ["does not fit: needs 26.84 of 16.91 GB per device"]
    assert (done.needed_bytes, done.available_bytes, done.peak_bytes) == (3, 2, 0)


def test_what_libraries_print_is_not_in_the_answer(capfd):
    with child._answers() as out:
        os.write(1, b"noise")
        out.write("answer")
    assert capfd.readouterr() == ("answer", "noise")


def there(package: str) -> bool:
    """Tell whether a compiler is installed; what is tested without it is how that is said."""
    found = importlib.util.find_spec(package) is not None
    print(f"{package} is {'installed' if found else 'not installed: nothing is compiled with it'}")
    return found


def real(target: str, mesh: str, extra: str, package: str) -> compiling.Compiled | None:
    if there(package):
        return compiling.compile_step(tiny(mesh), parse(target))
    with pytest.raises(JaxgptError, match=rf"jaxgpt\[{extra}\]"):
        compiling.compile_step(tiny(mesh), parse(target))
    return None


def sent(done: compiling.Compiled) -> dict:
    return {(row.kind, row.axes): row.bytes for row in table(done.collectives)}


def check_fsdp_step(done: compiling.Compiled, kernel: str) -> None:
    """Check what any accelerator's step over fsdp = 4 must be, with bounds by arithmetic."""
    assert done.alias_bytes >= done.state_bytes  # tiles pad
    assert done.state_bytes == pytest.approx(3 * num_params(), rel=0.01)
    assert any(kernel in name for name in done.kernels)
    checks = {finding.check for finding in done.findings}
    assert not checks & {"full_logits", "not_donated", "missing_kernel"}, done.findings
    exchanged = sent(done)
    # Each of two micro-batches: gradients are scattered once, weights gathered in bfloat16 once
    # forward and once more where recomputed; of n bytes 3/4 are sent.
    assert exchanged["reduce-scatter", ("fsdp",)] <= 2 * 4 * num_params() * 3 // 4 * 1.1
    assert exchanged["all-gather", ("fsdp",)] <= 2 * 2 * 4 * num_params() * 3 // 4 * 1.1
    assert exchanged["all-gather", ("fsdp",)] >= 2 * 2 * (num_params() // 2) * 3 // 4


def test_a_step_for_tpu_is_compiled_without_one():
    done = real("v5e-4", "data=1 fsdp=4", "tpu", "libtpu")
    if done is not None:
        assert (done.platform, done.device_kind, done.num_devices) == ("tpu", "TPU v5 lite", 4)
        check_fsdp_step(done, "tpu_custom_call:splash")


def test_a_step_for_gpu_is_compiled_without_one():
    done = real("h100x4", "data=1 fsdp=4", "cuda", "jax_cuda13_plugin")
    if done is not None:
        assert (done.platform, done.num_devices) == ("gpu", 4)
        check_fsdp_step(done, "__cudnn$fmha")


def test_a_step_that_no_tpu_can_hold_does_not_fit():
    cfg = config.with_values(tiny("fsdp=1 data=4"), "test", model={"vocab_size": 8_000_000})
    if there("libtpu"):
        done = compiling.compile_step(cfg, parse("v5e-4"), layers=1)
        assert done.misfit.startswith("does not fit: needs ")
        assert done.available_bytes == pytest.approx(15.75 * GIB, rel=0.01)
        assert done.needed_bytes > 12 * 2 * 8_000_000 * WIDTH


def test_a_topology_that_libtpu_does_not_know_is_no_fault_of_the_configuration():
    if there("libtpu"):
        with pytest.raises(JaxgptError, match="v5p:3x5x7"):
            compiling.compile_step(tiny("data=-1"), {"platform": "tpu", "topology": "v5p:3x5x7"})
