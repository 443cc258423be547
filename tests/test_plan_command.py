"""`jaxgpt plan`: what it prints, its JSON, its exit codes; nothing here compiles."""

from __future__ import annotations

import json
import re
import sys

import pytest
from verbs import ask, refused, text_of

from jaxgpt import cli, config
from jaxgpt.commands import plan as plan_command
from jaxgpt.errors import ConfigError, JaxgptError
from jaxgpt.planning import compile as compiler
from jaxgpt.planning.audit import Finding
from jaxgpt.planning.collectives import Collective

PRESET = "configs/llama3_8b.toml"
SMALL = "configs/gpt2_124m.toml"
NEEDS = {"platform": "tpu", "device_kind": "TPU v5", "num_devices": 64, "mesh": {}}


def answer(monkeypatch: pytest.MonkeyPatch, outcome: compiler.Compiled | Exception) -> None:
    """Make this the outcome of compiling."""

    def compile_step(*args: object) -> compiler.Compiled:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(compiler, "compile_step", compile_step)


def test_a_run_that_fits_is_exit_code_0_and_names_its_numbers(capsys):
    text = text_of(capsys, "plan", PRESET, "--on", "v5p-128", "--analytic")
    assert "64 x TPU v5 (4x4x4 chips, 16 hosts)" in text
    assert "8,030,261,248 parameters; mesh: fsdp 64" in text
    assert "fits: " in text and "51,472.0 MFLOP per token (causal; 57,914.4" in text
    assert "38,147 steps of 4,194,304 tokens" in text and "checkpoint: 96.4 GB" in text


def test_one_that_does_not_fit_is_exit_code_64_with_the_report_and_three_fixes(capsys):
    assert cli.main(["plan", PRESET, "--on", "h100x8", "--analytic"]) == 64
    text = capsys.readouterr().out
    assert re.search(r"DOES NOT FIT: [\d.]+ of [\d.]+ GB a device by arithmetic\n", text)
    fixes = re.findall(r"^  (.*): ([\d,.]+) GB less, ([+-][\d,.]+) ms a step, (.*)$", text, re.M)
    assert len(fixes) == 3 and fixes[0][3] == "fits then"


def test_json_has_bytes_formulas_collectives_and_times(capsys):
    plan = ask(capsys, "plan", PRESET, "--on", "v5p-128", "--analytic")
    parts = {part["cause"]: part for part in plan["memory"]["parts"]}
    assert parts["saved block_in"]["bytes"] == 32 * 32_768 * 4096 * 2
    assert all(part["how"] for part in parts.values())
    assert {t["axis"] for t in plan["collectives"]} == {"fsdp"}
    assert plan["time"]["flops_per_token"] == pytest.approx(51.472e9, rel=1e-4)
    assert plan["fits"] and plan["exit_code"] == 0 and plan["compiled"] is None


def test_the_vocabulary_of_no_store_is_guessed_and_said(capsys):
    plan = ask(capsys, "plan", "tokenizer.vocab_size=1000", "--on", "h200x1", "--analytic")
    assert any("tokenizer.vocab_size = 1,000" in note for note in plan["notes"])


def test_an_unknown_machine_is_one_line(capsys):
    line = refused(capsys, 64, "plan", PRESET, "--on", "v5p-100", "--analytic")
    assert "v5p-128" in line


def test_a_mesh_that_does_not_divide_is_refused(capsys):
    line = refused(capsys, 64, "plan", PRESET, "--on", "v5p-128", "--analytic", "mesh.tensor=3")
    assert "mesh.tensor = 3" in line and "64" in line


def test_without_a_compiler_it_says_which_extra_and_goes_on(capsys, monkeypatch):
    line = "compiling for tpu needs libtpu: pip install 'jaxgpt[tpu]'"
    answer(monkeypatch, JaxgptError(line))
    plan = ask(capsys, "plan", PRESET, "--on", "v5p-128")
    assert plan["compiled"] is None and plan["exit_code"] == 0
    assert f"not compiled, so all numbers are analytic: {line}" in plan["notes"]


@pytest.mark.parametrize(("target", "extra"), [("v5p-64", "tpu"), ("h100x8", "cuda")])
def test_analytic_numbers_are_called_so_with_the_extra_that_compiles(capsys, target, extra):
    words = (SMALL, "--on", target, "--analytic", "train.micro_batch=512")
    notes = ask(capsys, "plan", *words)["notes"]
    (note,) = (note for note in notes if "all numbers are analytic" in note)
    assert f"pip install 'jaxgpt[{extra}]'" in note


def test_what_the_compiled_step_exchanges_stands_beside_what_is_expected(capsys, monkeypatch):
    def gather(sent: int, overlapped: bool) -> Collective:
        return Collective(
            "x", "all-gather", ("fsdp",), False, 8, "bf16", (1,), 1, sent, 2, overlapped, ""
        )

    exchanges = (gather(90 * 10**9, True), gather(9 * 10**9, False))
    fault = Finding("not_donated", "step", 4, (), "step: 4 bytes are not donated")
    done = compiler.Compiled(**NEEDS, peak_bytes=10**9, collectives=exchanges, findings=(fault,))
    answer(monkeypatch, done)
    text = text_of(capsys, "plan", PRESET, "--on", "h100x8", "train.micro_batch=64")
    row = re.search(r"^fsdp +([\d.]+) +198\.000 +([\d.]+) +18\.000 +40\.00 +4 all", text, re.M)
    assert float(row[2]) == pytest.approx(198 / float(row[1]), abs=0.01)
    assert re.search(
        r"^as compiled: at least [\d,.]+ ms, of which 40\.0 are exchanges in the", text, re.M
    )
    assert "\nfinding: step: 4 bytes are not donated\n" in text


def test_a_mesh_over_a_whole_torus_is_told_what_libtpu_makes_of_it(capsys):
    def notes(*words: str) -> bool:
        plan = ask(capsys, "plan", PRESET, "--on", "v5p-128", "--analytic", *words)
        return any("all of a 3-D torus" in note for note in plan["notes"])

    assert notes()
    assert not notes("mesh.data=4", "mesh.fsdp=16")


def test_a_configuration_that_the_compiler_refuses_is_exit_code_64_and_one_line(
    capsys, monkeypatch
):
    answer(monkeypatch, ConfigError("the compiler refused: INTERNAL: Mosaic failed"))
    line = refused(capsys, 64, "plan", PRESET, "--on", "v5p-128")
    assert line.endswith("the compiler refused: INTERNAL: Mosaic failed")


def test_it_says_at_once_that_it_compiles_and_for_how_long(capsys, monkeypatch):
    said = []

    def compile_step(*args: object) -> compiler.Compiled:
        said.append(capsys.readouterr())
        return compiler.Compiled(**NEEDS)

    monkeypatch.setattr(compiler, "compile_step", compile_step)
    assert cli.main(["plan", PRESET, "--on", "v6e-256", "--json"]) == 0
    (before,) = said
    assert before.err.startswith("compiling for 256 x TPU v6 lite, usually 2 to 7 minutes")
    assert before.out == "" and json.loads(capsys.readouterr().out)["fits"]


def test_on_a_terminal_it_shows_the_time_that_has_passed(capsys, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with plan_command.waiting("compiling"):
        pass
    assert "0:00:00" in capsys.readouterr().err


def test_the_way_to_compute_attention_is_named_and_one_that_cannot_be_is_refused(capsys):
    text = text_of(capsys, "plan", PRESET, "--on", "v5p-128", "--analytic")
    assert "\nattention: splash\n" in text
    plan = ask(capsys, "plan", SMALL, "--on", "h200x1", "--analytic", "train.micro_batch=64")
    assert plan["attention"] == "attention: cudnn"
    words = ("plan", PRESET, "--on", "v5p-128", "--analytic", "train.attention=cudnn")
    assert "an NVIDIA GPU is needed" in refused(capsys, 64, *words)


def test_the_compilers_totals_stand_beside_and_decide(capsys, monkeypatch):
    sizes = {"peak_bytes": 30 * 10**9, "temp_bytes": 25 * 10**9, "live_bytes": 21 * 10**9}
    done = compiler.Compiled(**NEEDS, **sizes)
    answer(monkeypatch, done)
    text = text_of(capsys, "plan", PRESET, "--on", "v5p-128")
    assert "peak 30.000" in text and "30.0 by the compiler" in text
    assert "of these 21.000 are in use at once" in text
    misfit = compiler.Compiled(**NEEDS, misfit="does not fit", needed_bytes=200 * 10**9)
    answer(monkeypatch, misfit)
    plan = ask(capsys, "plan", PRESET, "--on", "v5p-128")
    assert not plan["fits"] and plan["exit_code"] == 64 and plan["fixes"]
    assert plan["compiled"]["peak_bytes"] == 200 * 10**9


def test_search_writes_a_preset_that_train_loads(capsys, tmp_path):
    path = tmp_path / "best.toml"
    words = ["plan", SMALL, "--on", "h100x8", "--analytic", "--search", "--write", str(path)]
    plan = ask(capsys, *words)
    assert len(plan["candidates"]) == 10 and plan["written"] == str(path)
    again = ask(capsys, "plan", str(path), "--on", "h100x8", "--analytic")
    assert again["time"] == plan["time"] and again["memory"] == plan["memory"]
    assert config.load(path).train.micro_batch == plan["train"]["micro_batch"]


def test_search_prints_the_ten_best(capsys):
    text = text_of(capsys, "plan", SMALL, "--on", "h100x8", "--analytic", "--search")
    assert len(re.findall(r"^ ?\d+  .*%", text, re.M)) == 10


def test_a_search_without_a_result_is_refused(capsys):
    words = ("plan", "configs/llama3_405b.toml", "--on", "v5e-8", "--analytic", "--search")
    assert "take more devices" in refused(capsys, 64, *words)


def test_write_needs_a_search(capsys):
    line = refused(capsys, 64, "plan", PRESET, "--on", "v5p-128", "--analytic", "--write", "x.toml")
    assert "--search" in line


def test_the_object_is_json_without_surprises(capsys):
    words = [PRESET, "train.micro_batch=512", "--on", "2*v6e-256", "--analytic", "--json"]
    assert cli.main(["plan", *words]) == 0
    plan = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(word))
    assert plan["mesh_slow"] == {"fsdp": 2}
    assert {t["link"] for t in plan["collectives"]} == {"links of fsdp", "network"}
