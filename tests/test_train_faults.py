"""Faults of several real processes that train: they stop or end together, or do not begin.

What they compute is in test_train_processes.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from peers import ends, group
from runs import jaxgpt, make_store, overrides, rows

ENDLESS = {"train__num_steps": 1_000_000, "optim__schedule": "constant", "checkpoint__every": 0}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return make_store(tmp_path_factory.mktemp("train_hosts"))


@contextlib.contextmanager
def training(
    root: Path,
    run: str,
    silent: float,
    *more: str,
    last: dict[str, str] | None = None,
    **changes: object,
) -> Iterator[list]:
    """Train in two processes; `more` and the variables of `last` are for the second alone."""

    def command(port: int, process: int) -> list[str]:
        words = ["train", *overrides(root, run, **ENDLESS | changes), *(more if process else ())]
        flags = ["--coordinator", f"localhost:{port}", "--process", str(process), "--processes=2"]
        return ["-m", "jaxgpt.cli", *words, *flags]

    with group(2, command, silent, last) as children:
        yield children


def wait_for_step(run: Path, step: int, children: list) -> None:
    deadline, metrics = time.monotonic() + 300, run / "metrics.jsonl"
    while time.monotonic() < deadline and all(child.poll() is None for child in children):
        if metrics.exists() and f'"step": {step},' in metrics.read_text():
            return
        time.sleep(0.05)
    for child in children:
        child.kill()
    raise AssertionError([child.communicate() for child in children])


def test_sigterm_to_one_of_two_saves_one_step_exits_75_on_both_and_one_process_goes_on(root):
    run = root / "stopped"
    with training(root, "stopped", 60) as children:
        wait_for_step(run, 3, children)
        children[1].send_signal(signal.SIGTERM)
        (code, line), (other, its) = ends(children, within=120)
    assert (code, other) == (75, 75), (line, its)
    (saved,) = (int(path.name.split(".")[0]) for path in (run / "ckpt").glob("*.ok.json"))
    assert saved == rows(run)[-1]["step"]
    for text in (line, its):
        assert "SIGTERM to process 1" in text and f"step {saved} of 1000000 is saved" in text
    words = overrides(root, "stopped", **ENDLESS | {"train__num_steps": saved + 2})
    resumed = jaxgpt("train", *words, "--json")
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["step"] == saved + 2
    assert [row["step"] for row in rows(run) if "loss" in row] == list(range(1, saved + 3))


def test_a_process_killed_in_training_ends_the_other_which_names_it(root):
    run = root / "killed"
    with training(root, "killed", 10) as children:
        wait_for_step(run, 3, children)
        children[1].kill()
        began = time.monotonic()
        ((code, line),) = ends(children[:1], within=60)
    assert code == 76, line
    assert "lost process 1" in line and "of step" in line
    assert time.monotonic() - began < 10 + 12  # of silence, and for a busy machine


def test_processes_with_other_configurations_all_exit_78_before_anything_is_made(root):
    with training(root, "unlike", 60, "optim.lr=0.5", "model.num_layers=3") as children:
        said = [child.communicate(timeout=120)[1] for child in children]
    assert [child.returncode for child in children] == [78, 78], said
    for text in said:
        lines = [line for line in text.splitlines() if "has" in line]
        assert len(lines) == 2 and "model.num_layers: process 1" in lines[0]
        assert "optim.lr: process 1" in lines[1] and "has 0.5, process 0" in lines[1]
    assert not (root / "unlike").exists()


def test_a_save_that_fails_on_one_host_is_tried_again_by_all_at_one_step(root):
    ckpt, fault = root / "retried" / "ckpt", {"JAXGPT_FAULT": "save.written:1:enospc"}

    def saved() -> list[int]:
        return sorted(int(path.name.split(".")[0]) for path in ckpt.glob("*.ok.json"))

    with training(root, "retried", 60, last=fault) as children:
        wait_for_step(root / "retried", 3, children)
        children[0].send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + 120
        while len(saved()) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        # What process 1 reports as failed is whole, so it stays; the second is the second try.
        first, second = saved()
        children[0].send_signal(signal.SIGTERM)
        said = [child.communicate(timeout=120)[1] for child in children]
    assert [child.returncode for child in children] == [75, 75], said
    assert len(saved()) == 3 and first < second
    for number, text in enumerate(said):
        (failure,) = (line for line in text.splitlines() if "trying again" in line)
        assert "No space left on device" in failure
        assert ("[" in failure) == (number == 1)  # signed
    assert "process 1: " in said[0]
