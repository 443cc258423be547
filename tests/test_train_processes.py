"""What several real processes train and evaluate, beside one process that does the same.

Their faults are in test_train_faults, and how they find each other in test_hosts_commands.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from peers import FAST
from runs import (
    fingerprints,
    finished,
    free_port,
    jaxgpt,
    make_store,
    overrides,
    rows,
    tiny,
    together,
)

from jaxgpt.commands import data as data_commands
from jaxgpt.data.store import open_store
from jaxgpt.train import train

SIZES = {
    "model__num_layers": 1,
    "model__embed_dim": 16,
    "model__num_heads": 2,
    "train__num_steps": 6,
    "checkpoint__every": 2,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return make_store(tmp_path_factory.mktemp("hosts"))


@pytest.fixture(scope="module")
def alone(root) -> Path:
    """Six steps of one process."""
    train(tiny(root, "alone", **SIZES))
    return root / "alone"


@pytest.fixture(scope="module")
def two(root) -> list[subprocess.CompletedProcess]:
    """Two processes that split the parameters take the same six steps, in `root/two`."""
    words = overrides(root, "two", **SIZES, mesh__fsdp=2)
    return finished(together(2, "train", "--json", *words, **FAST))


@pytest.fixture(scope="module")
def four(root, two) -> Path:
    """Four processes go on from step 2 of the two."""
    rewind(root / "two", root / "four", 2)
    words = overrides(root, "four", **SIZES, mesh__fsdp=2)
    finished(together(4, "train", *words, **FAST))
    return root / "four"


@pytest.fixture(scope="module")
def again(root, four) -> dict[int, Path]:
    """One process, and two, go on from step 4 of the four."""
    runs = {1: root / "again-1", 2: root / "again-2"}
    for run in runs.values():
        rewind(four, run, 4)
    train(tiny(root, "again-1", **SIZES))
    finished(together(2, "train", *overrides(root, "again-2", **SIZES), **FAST))
    return runs


def rewind(run: Path, copy: Path, step: int) -> None:
    """Copy a run without what it saved after `step`."""
    shutil.copytree(run, copy)
    for path in (copy / "ckpt").iterdir():
        if (number := path.name.partition(".")[0]).isdecimal() and int(number) > step:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def column(run: Path, name: str) -> dict[int, float | str]:
    """Return a column of the metrics by step; of a step that was taken again, the last."""
    return {row["step"]: row[name] for row in rows(run) if name in row}


def test_two_processes_have_the_losses_of_one(root, alone, two):
    assert set(column(alone, "loss")) == {1, 2, 3, 4, 5, 6}
    assert column(root / "two", "loss") == pytest.approx(column(alone, "loss"), rel=1e-5)
    norms = column(alone, "grad_norm")
    assert column(root / "two", "grad_norm") == pytest.approx(norms, rel=1e-5)


def test_two_processes_train_on_the_rows_of_one(root, alone, two):
    assert len(set(column(alone, "rows_digest").values())) == 6
    assert column(root / "two", "rows_digest") == column(alone, "rows_digest")


def test_two_processes_evaluate_as_one(alone, two):
    result = json.loads(two[0].stdout)["results"]["valid"]
    (loss,) = column(alone, "eval/valid/loss").values()
    (tokens,) = column(alone, "eval/valid/tokens").values()
    assert result["tokens"] == tokens
    assert result["loss"] == pytest.approx(loss, rel=1e-5)


def test_only_process_0_prints(two):
    first, other = two
    assert first.stdout.count("\n") == 1  # one JSON object, and nothing of Gloo's
    assert "step 1/6" in first.stderr and "2 device(s) in 2 processes" in first.stderr
    assert (other.stdout, other.stderr) == ("", "")


def test_four_processes_go_on_where_two_were(root, alone, two, four):
    assert fingerprints(four, 2) == fingerprints(root / "two", 2)
    assert column(four, "loss") == pytest.approx(column(alone, "loss"), rel=1e-5)
    assert column(four, "rows_digest") == column(alone, "rows_digest")


@pytest.mark.parametrize("processes", [1, 2])
def test_fewer_processes_go_on_where_four_were(alone, four, again, processes):
    run = again[processes]
    assert json.loads((run / "ckpt" / "6.ok.json").read_text())["step"] == 6
    assert column(run, "loss") == pytest.approx(column(alone, "loss"), rel=1e-5)
    assert column(run, "rows_digest") == column(alone, "rows_digest")


def test_no_checkpoint_was_given_up_on_the_way(root, again):
    assert not list(root.glob("*/ckpt/quarantine*"))
    steps = {run.name: sorted(p.name for p in run.glob("ckpt/*.ok.json")) for run in again.values()}
    assert set(map(tuple, steps.values())) == {("2.ok.json", "4.ok.json", "6.ok.json")}


def test_two_processes_evaluate_a_run_of_one_as_one_does(alone):
    first, other = finished(together(2, "eval", str(alone), "--json", **FAST))
    (loss,) = column(alone, "eval/valid/loss").values()
    assert json.loads(first.stdout)["valid"]["loss"] == pytest.approx(loss, rel=1e-5)
    assert (other.stdout, other.stderr) == ("", "")


def test_two_processes_that_evaluate_other_steps_are_told_so(alone):
    address = f"localhost:{free_port()}"

    def evaluate(process: int) -> subprocess.CompletedProcess:
        flags = [f"--coordinator={address}", f"--process={process}", "--processes=2"]
        return jaxgpt("eval", str(alone), "--step", str(4 + 2 * process), *flags, **FAST)

    with ThreadPoolExecutor(2) as pool:
        processes = list(pool.map(evaluate, range(2)))
    assert [process.returncode for process in processes] == [78, 78], processes
    for process in processes:
        assert "error: step: process 1 " in process.stderr and "has 6, process 0" in process.stderr


def test_an_epoch_and_an_evaluation_end_whatever_the_processes_leave_over(tmp_path):
    """Nine documents, two rows per update: the epoch leaves rows over, the evaluation none."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(9):
        (corpus / f"{number}.txt").write_text(f"document {number} of nine " * (1 + number % 3))
    changes = {"data__valid_share": 0.0, "tokenizer__vocab_size": 280, "model__seq_len": 16}
    cfg = tiny(tmp_path, "unused", **changes)
    data_commands.make_tokenizer(cfg)
    data_commands.make_store(cfg)
    stored = open_store(tmp_path / "store")
    assert stored.num_docs == 9
    num_rows = -(-stored.stream_len // 16)
    assert num_rows % 2 == 1  # or the epoch would leave nothing over
    changes |= SIZES | {"train__num_steps": 0, "train__global_batch": 2, "data__max_epochs": 1.0}
    words = overrides(tmp_path, "run", **changes, eval__store=str(tmp_path / "store" / "train"))
    first, _ = finished(together(2, "train", "--json", *words, **FAST))
    outcome = json.loads(first.stdout)
    assert outcome["step"] == num_rows // 2
    (result,) = outcome["results"].values()
    assert result["tokens"] == stored.stream_len  # each id once, the end of each document too
    assert result["bytes"] == sum(path.stat().st_size for path in corpus.iterdir())
