"""The check of one GPU, tried on the CPU: every part, its limits, and what is said of them."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxgpt.bench import gpu_check, gpu_part, gpu_report, shapes
from jaxgpt.bench.gpu_check import Part
from jaxgpt.errors import ConfigError
from jaxgpt.model import params as parameters
from jaxgpt.planning.compile import compile_step
from jaxgpt.planning.hardware import parse
from jaxgpt.training import step as steps

ROOT = Path(__file__).parent.parent
# What a machine with a GPU need not have. PyTorch too: its row must say so.
BLOCKED = ("tensorflow", "tensorflow_datasets", "orbax", "tensorstore", "sentencepiece", "grain")
BLOCKER = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {(*BLOCKED, "torch")}:
            raise ImportError(f"{{name}} is not on this machine")
sys.meta_path.insert(0, Blocker())
"""


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    """Run the script on the CPU, where none of `BLOCKED` can be imported."""
    folder = tmp_path_factory.mktemp("check")
    (folder / "sitecustomize.py").write_text(BLOCKER)
    environment = os.environ | {"JAXGPT_PYTHON": sys.executable, "PYTHONPATH": str(folder)}
    words = ["bash", str(ROOT / "launch/gpu_check.sh"), "--platform=cpu", "--out=out", "--json"]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done, folder / "out"


def rows_of(tried, kind: str) -> list[dict]:
    return [row for row in json.loads(tried[0].stdout)["rows"] if row["kind"] == kind]


def test_all_parts_run_without_a_gpu_and_without_tensorflow_or_orbax(tried):
    for row in rows_of(tried, "gradients") + rows_of(tried, "step"):
        assert row["outcome"] == "done", row
    assert len(rows_of(tried, "gradients")) == 1 and len(rows_of(tried, "step")) == 2


def test_gradients_agree_with_float32_within_the_tolerance(tried):
    (row,) = rows_of(tried, "gradients")
    assert row["right"] and 0 < row["leaf_error"] <= row["tolerance"] == 0.1


def test_a_machine_without_pytorch_has_a_row_that_says_so(tried):
    (row,) = rows_of(tried, "torch")
    assert row["outcome"] == "missing" and "PyTorch" in row["line"]


def test_whole_and_chunked_loss_train_alike(tried):
    first, second = rows_of(tried, "step")
    assert {first["logits"], second["logits"]} == {"chunked", "whole"}
    assert first["loss"] == pytest.approx(second["loss"], rel=0.01)


def test_utilisation_is_tokens_times_flops_over_the_peak(tried):
    row = rows_of(tried, "step")[0]
    layers, width, heads, context, vocabulary = gpu_check.SIZES["cpu"]["124M"]
    # 6 per weight in a product, of which norms (3 D here) are counted, too; 12 L N H T / 2.
    weights = 12 * layers * width**2 + vocabulary * width + (2 * layers + 1) * width
    flops = 6 * weights + 12 * layers * width * context / 2
    assert row["flops_per_token"] == flops
    wanted = row["tokens_per_sec_median"] * flops / row["peak_flops"]
    assert row["mfu"] == pytest.approx(wanted, abs=1e-4)


def test_the_files_hold_what_was_printed(tried):
    done, out = tried
    printed, kept = json.loads(done.stdout), json.loads((out / "gpu_check.json").read_text())
    assert kept == printed
    page = (out / "gpu_check.md").read_text()
    assert page == gpu_report.markdown(kept)
    assert "not judged here" in page and "PyTorch is not installed" in page
    assert all(gpu_report.name(row) in page for row in kept["rows"])


def test_a_row_names_the_command_that_repeats_it(tried):
    row = next(row for row in rows_of(tried, "step") if row["logits"] == "chunked")
    words = shlex.split(row["command"])
    assert words[:5] == ["python", "-m", "jaxgpt.cli", "bench", "step"]
    assert "train.attention=blocks" in words


def test_a_machine_without_a_gpu_is_refused_in_one_line(tmp_path, monkeypatch):
    found = {"outcome": "failed", "line": "exit code 64: no cuda", "seconds": 1.0}
    monkeypatch.setattr(gpu_check, "execute", lambda *_: found)
    with pytest.raises(ConfigError, match="no NVIDIA GPU that JAX can use: .*no cuda") as caught:
        gpu_check.measure(tmp_path, platform="gpu", minutes=1, say=print)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_every_attention_is_checked_with_both_losses_in_both_dtypes():
    checked = {(p.dtype, p.attention, p.logits) for p in gpu_check.gradient_parts() if not p.more}
    ways = [("bfloat16", a) for a in ("cudnn", "dot_product", "blocks")]
    ways += [("float32", a) for a in ("dot_product", "blocks")]  # cuDNN has no float32
    assert checked == {(*way, logits) for way in ways for logits in ("chunked", "whole")}


@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_every_part_is_a_configuration_that_is_accepted(platform):
    for part in gpu_check.parts(platform):
        cfg = shapes.load("gpt2", "bf16", gpu_check.overrides(part, platform))
        assert cfg.train.attention == (part.attention or "auto")
        assert cfg.train.accum_steps == 1


@pytest.mark.parametrize(("shape", "low", "high"), [("124M", 122e6, 126e6), ("1B", 1e9, 1.2e9)])
def test_models_have_the_size_they_are_called_by(shape, low, high):
    cfg = shapes.load("gpt2", "bf16", gpu_check.overrides(Part("step", shape), "gpu"))
    assert low < parameters.count(parameters.specs(cfg.model)) < high


def test_pytorch_is_asked_for_the_sizes_of_ours():
    part = Part("torch", "1B", rows=8)
    words = gpu_check.command(part, "gpu")
    cfg = shapes.load("gpt2", "bf16", gpu_check.overrides(part, "gpu")).model
    wanted = {
        "layers": cfg.num_layers, "width": cfg.embed_dim, "heads": cfg.num_heads,
        "context": cfg.seq_len, "vocab": cfg.vocab_size, "rows": 8, "steps": 30,
    }  # fmt: skip
    assert {f"--{name}={value}" for name, value in wanted.items()} <= set(words)
    assert "--eager" not in words and cfg.mlp_width == 4 * cfg.embed_dim


def test_a_step_of_the_check_compiles_for_an_h200_with_the_attention_of_cudnn():
    """With the compiler for GPUs; without it, how that is said."""
    part = gpu_check.parts("gpu")[len(gpu_check.gradient_parts())]
    assert (part.kind, part.shape, part.attention) == ("step", "124M", "cudnn")
    words = gpu_check.overrides(part._replace(rows=2), "gpu")
    cfg = shapes.load("gpt2", "bf16", [*words, "model.vocab_size=1024"])
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        with pytest.raises(Exception, match=r"jaxgpt\[cuda\]"):
            compile_step(cfg, parse("h200x1"), layers=1)
        return
    done = compile_step(cfg, parse("h200x1"), layers=1)
    assert done.device_kind == gpu_report.CARD
    assert any("__cudnn$fmha" in name for name in done.kernels), done.kernels


def test_the_whole_loss_is_only_asked_for_inside():
    before = steps.gradients
    with gpu_part.loss_at_once():
        assert steps.gradients.keywords == {"chunk": 0}
    assert steps.gradients is before


@pytest.mark.parametrize(
    ("grads", "loss", "leaf", "error", "right"),
    [
        ({"a": [3.0, 4.0], "b": [0.0, 2.2]}, 1.0, "b", 0.1, True),
        ({"a": [3.0, 5.0], "b": [0.0, 2.0]}, 1.0, "a", 0.2, False),
        ({"a": [3.0, 4.0], "b": [0.0, 2.0]}, 1.2, "a", 0.0, False),  # by its loss
        ({"a": [3.0, float("nan")], "b": [0.0, 2.0]}, 1.0, "a", float("inf"), False),
        ({"a": [3.0, 4.0], "b": [0.0, 2.0]}, float("nan"), "a", 0.0, False),
    ],
)
def test_the_worst_leaf_and_the_loss_decide(grads, loss, leaf, error, right):
    reference = {"a": [3.0, 4.0], "b": [0.0, 2.0]}
    tested, trusted = ({k: np.array(v) for k, v in g.items()} for g in (grads, reference))
    found = gpu_part.compared((tested, loss), (trusted, 1.0), 0.1 + 1e-9)
    assert (found["leaf"], found["right"]) == (leaf, right)
    assert found["leaf_error"] == pytest.approx(error)


# Processes and their limits.


def shell(script: str, limit: float = 30.0) -> dict:
    return gpu_check.execute(["sh", "-c", script], limit, os.environ)


def test_a_part_that_hangs_is_stopped_with_its_children(tmp_path):
    began = time.monotonic()
    found = shell(f"(sleep 3; touch {tmp_path}/alive) & sleep 62", limit=1.0)
    assert found["outcome"] == "timed out" and "1 s" in found["line"]
    assert time.monotonic() - began < 10
    time.sleep(max(0.0, began + 4 - time.monotonic()))
    assert not (tmp_path / "alive").exists()


@pytest.mark.parametrize(
    ("script", "outcome", "line"),
    [
        ("echo noise; echo '{\"a\": 1}'", "done", None),
        ('echo \'{"missing": "no torch"}\'', "missing", "no torch"),
        ("echo first >&2; echo last >&2; exit 3", "failed", "exit code 3: last"),
        ('echo \'{"error": "bad"}\'; exit 64', "failed", "exit code 64: bad"),
        ("exit 0", "failed", "exit code 0: it said nothing"),
        (
            "echo RESOURCE_EXHAUSTED: 9 GB >&2; echo end >&2; exit 70",
            "failed",
            "exit code 70: RESOURCE_EXHAUSTED: 9 GB",
        ),
    ],
)
def test_the_ways_in_which_a_part_ends_are_told_apart(script, outcome, line):
    found = shell(script)
    assert (found["outcome"], found.get("line")) == (outcome, line)


def run(monkeypatch, tmp_path, answers, minutes: float = 10.0):
    """Return the result of the check for a GPU whose parts answer as `answers(words)` says."""

    def execute(words, limit, environment):
        if words[3:4] == ["device"]:
            device = {"platform": "gpu", "device_kind": "NVIDIA H200", "jax": "1", "torch": "2"}
            return {"outcome": "done", "seconds": 1.0, **device}
        return {"seconds": 1.0, "device": "NVIDIA H200", **answers(words)}

    monkeypatch.setattr(gpu_check, "execute", execute)
    return gpu_check.measure(tmp_path, platform="gpu", minutes=minutes, say=lambda _: None)


def figures(rate: float, loss: float = 5.0) -> dict:
    return {
        "outcome": "done", "tokens_per_sec_median": rate, "tokens_per_sec_best": rate,
        "spread": 0.0, "compile_seconds": 1.0, "loss": loss, "mfu": 0.51, "mfu_full": 0.6,
        "peak_flops": 1e15, "flops_per_token": 1e9, "flops_per_token_full": 2e9, "repeats": 30,
    }  # fmt: skip


def checked(error: float) -> dict:
    right = error <= 0.1
    numbers = {"leaf": "embed", "leaf_error": error, "loss_error": 0.0, "tolerance": 0.1}
    return {"outcome": "done", "right": right, **numbers}


def test_a_part_that_fails_loses_one_row_and_the_rest_is_written(monkeypatch, tmp_path):
    def answers(words):
        if "gradients" in words:
            return checked(0.01)
        if "train.attention=blocks" in words:
            return {"outcome": "failed", "line": "exit code 70: out of memory"}
        return figures(480_000.0)

    result = run(monkeypatch, tmp_path, answers)
    assert "exit_code" not in result
    kept = json.loads((tmp_path / "gpu_check.json").read_text())
    assert len(kept["rows"]) == len(gpu_check.parts("gpu"))
    page = (tmp_path / "gpu_check.md").read_text()
    assert page.count("exit code 70: out of memory") == 2  # of both models
    assert [target["met"] for target in kept["targets"]] == [True, True]


def test_wrong_gradients_end_with_79(monkeypatch, tmp_path):
    def answers(words):
        return checked(0.5 if "train.attention=cudnn" in words else 0.0) | figures(1.0)

    result = run(monkeypatch, tmp_path, answers)
    assert result["exit_code"] == 79
    wrong = [row for row in result["rows"] if row["outcome"] == "wrong"]
    assert wrong and all("embed are off by 50.00%" in row["line"] for row in wrong)


def test_a_part_that_fell_back_to_the_cpu_has_no_figure(monkeypatch, tmp_path):
    result = run(
        monkeypatch, tmp_path, lambda words: checked(0.0) | figures(9e9) | {"device": "cpu"}
    )
    assert result["exit_code"] == 70
    ours = [row for row in result["rows"] if row["kind"] != "torch"]
    assert {row["line"] for row in ours} == {"it ran on cpu, not on NVIDIA H200"}


def test_a_loss_that_is_no_number_is_no_speed(monkeypatch, tmp_path):
    def answers(words):
        return checked(0.0) if "gradients" in words else figures(1.0, loss=float("nan"))

    result = run(monkeypatch, tmp_path, answers)
    assert result["exit_code"] == 79
    assert gpu_report.timed(result["rows"], "step", "124M") == []


@pytest.mark.parametrize(("outcome", "code"), [("timed out", 76), ("failed", 70)])
def test_no_step_at_all_is_a_failure(monkeypatch, tmp_path, outcome, code):
    result = run(monkeypatch, tmp_path, lambda words: {"outcome": outcome, "line": "x"})
    assert result["exit_code"] == code


def test_parts_that_do_not_fit_into_the_time_are_left_out(monkeypatch, tmp_path):
    result = run(monkeypatch, tmp_path, lambda words: figures(1.0), minutes=0.1)
    assert {row["outcome"] for row in result["rows"]} == {"skipped"}


def test_parts_have_one_gpu_and_a_compile_cache_of_their_own():
    found = gpu_check.child_environment({"JAX_PLATFORMS": "cpu"}, "gpu", "/cache")
    assert found["CUDA_VISIBLE_DEVICES"] == "0"
    assert found["JAX_PLATFORMS"].split(",")[0] == "cuda"
    assert found["JAX_COMPILATION_CACHE_DIR"] == "/cache"
    assert gpu_check.child_environment({"CUDA_VISIBLE_DEVICES": "3"}, "gpu", "")[
        "CUDA_VISIBLE_DEVICES"
    ] == "3"  # fmt: skip


# The report.


def row(kind: str, shape: str, rows: int, **more) -> dict:
    return {**Part(kind, shape, rows=rows)._asdict(), **figures(1.0), **more}


def test_the_ratio_is_to_pytorch_with_as_many_rows():
    rows = [
        row("torch", "124M", 32, tokens_per_sec_median=200.0),
        row("torch", "124M", 64, tokens_per_sec_median=400.0),
        row("torch", "1B", 32, tokens_per_sec_median=1.0),
    ]
    ours = row("step", "124M", 32, tokens_per_sec_median=300.0)
    assert gpu_report.against_torch(ours, rows) == 1.5
    assert gpu_report.against_torch({**ours, "rows": 16}, rows) == 0.75  # its best
    assert gpu_report.against_torch(ours, []) is None


def test_utilisation_of_pytorch_has_our_count_of_the_model():
    ours = row("step", "124M", 32)
    theirs = row("torch", "124M", 32, tokens_per_sec_median=1e5)
    del theirs["mfu"]
    assert gpu_report.shares(theirs, [ours]) == (0.1, 0.2)  # 1e5 * 1e9 / 1e15
    assert gpu_report.shares(theirs, []) is None


@pytest.mark.parametrize(
    ("card", "rate", "met"),
    [("NVIDIA H200", 475_000.0, True), ("NVIDIA H200", 474_999.0, False), ("cpu", 1e9, None)],
)
def test_the_target_at_124m_is_475_thousand_tokens_a_second(card, rate, met):
    rows = [row("step", "124M", 32, tokens_per_sec_median=rate)]
    small, large = gpu_report.targets({"device_kind": card, "rows": rows})
    assert small["met"] is met
    assert (large["found"], large["met"]) == (None, None)


def test_strain_is_that_of_the_sample_with_the_most_power():
    names = ("power.draw", "clocks.sm", "temperature.gpu")
    samples = [
        dict(zip(names, s, strict=True)) for s in (("90", "345", "30"), ("650", "1755", "6"))
    ]
    samples += [{}, dict.fromkeys(names, "[N/A]")]
    found = gpu_report.strain(samples)
    assert found == {"power_watts": 650.0, "sm_clock_mhz": 1755.0, "temperature_celsius": 30.0}
    assert gpu_report.strain([{}]) == {}


def test_the_reference_is_computed_by_the_cpu():
    assert gpu_part.cpu_or(None) == jax.local_devices(backend="cpu")[0]
