"""The run: what it promises about resuming, stopping, saving, logging, and refusing."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from runs import (
    fingerprints,
    jaxgpt,
    make_store,
    overrides,
    process_environment,
    rows,
    tiny,
    write_corpus,
)

from jaxgpt import config
from jaxgpt.commands import data as data_commands
from jaxgpt.data.store import open_store
from jaxgpt.errors import (
    ConfigError,
    DataError,
    DisagreementError,
    Interrupted,
    NothingRestorable,
    NumericsError,
    StorageError,
)
from jaxgpt.parallel import mesh as meshes
from jaxgpt.start import compile_step
from jaxgpt.tokenization import tokenizer
from jaxgpt.train import train


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return make_store(tmp_path_factory.mktemp("train"))


@pytest.fixture(scope="module")
def golden(root) -> Path:
    """A run of 20 steps that nothing disturbed, saved at 5, 10, 15 and 20."""
    train(tiny(root, "golden"))
    return root / "golden"


def stop_after(monkeypatch, step: int) -> None:
    """Make the run behave as if SIGTERM came while it computed `step`."""
    from jaxgpt.runtime.signals import Stop
    from jaxgpt.training import metrics

    push = metrics.RunLog.push
    stops: list[Stop] = []
    enter = Stop.__enter__

    def remember(self):
        stops.append(self)
        return enter(self)

    def push_and_stop(self, number, *args, **kwargs):
        if number == step:
            stops[-1].reason = "SIGTERM"
        return push(self, number, *args, **kwargs)

    monkeypatch.setattr(Stop, "__enter__", remember)
    monkeypatch.setattr(metrics.RunLog, "push", push_and_stop)


def interrupt_and_finish(monkeypatch, root: Path, run: str, step: int, **changes) -> Path:
    with monkeypatch.context() as patch:
        stop_after(patch, step)
        with pytest.raises(Interrupted) as stopped:
            train(tiny(root, run, **changes))
    assert stopped.value.exit_code == 75 and f"step {step} of 20" in str(stopped.value)
    train(tiny(root, run, **changes))
    return root / run


def test_the_loss_falls(golden):
    losses = [row["loss"] for row in rows(golden) if "loss" in row]
    assert len(losses) == 20 and losses[-1] < losses[0] - 0.5


def test_a_run_stopped_at_any_step_continues_bit_for_bit(monkeypatch, root, golden):
    for step in (1, 7, 10, 13, 19):  # 145 rows an epoch at 8 a step: 19 is in the second
        resumed = interrupt_and_finish(monkeypatch, root, f"stopped-{step}", step)
        assert fingerprints(resumed, 20) == fingerprints(golden, 20)


def test_dropout_too_is_the_same_after_resuming(monkeypatch, root):
    train(tiny(root, "dropout", model__dropout=0.1))
    resumed = interrupt_and_finish(monkeypatch, root, "dropout-stopped", 9, model__dropout=0.1)
    assert fingerprints(resumed, 20) == fingerprints(root / "dropout", 20)
    losses = [[row.get("loss") for row in rows(run)] for run in (resumed, root / "dropout")]
    assert losses[0] == losses[1]


def test_logged_losses_rates_and_evaluations_come_as_in_an_unbroken_run(monkeypatch, root, golden):
    resumed = interrupt_and_finish(monkeypatch, root, "logged", 8, eval__every=3)
    exact = ("step", "loss", "lr", "grad_norm", "tokens", "position")

    def table(run: Path) -> list[tuple]:
        return [tuple(row[key] for key in exact) for row in rows(run) if "loss" in row]

    assert table(resumed) == table(golden)
    evaluated = [row["step"] for row in rows(resumed) if "eval/valid/loss" in row]
    assert evaluated == [3, 6, 9, 12, 15, 18, 20]


def test_tokens_per_step_are_stated_and_the_same_on_one_device_and_on_eight(
    monkeypatch, root, golden
):
    said: list[str] = []
    on_one_device(monkeypatch)
    one_step = {"train__num_steps": 1, "optim__warmup_steps": 0}
    train(tiny(root, "one-device", **one_step), said.append)
    stated = [line.rpartition("; ")[2] for line in said if "tokens per step" in line]
    assert stated == ["8 rows x 16 = 128 tokens per step"]
    assert rows(root / "one-device")[0]["tokens"] == rows(golden)[0]["tokens"] == 128


def test_evaluation_logging_and_saving_never_change_the_trajectory(root, golden):
    train(
        tiny(root, "watched", eval__every=3, log__every=7, log__tensorboard=True,
             checkpoint__every=4)
    )  # fmt: skip
    assert fingerprints(root / "watched", 20) == fingerprints(golden, 20)
    assert (root / "watched" / "tensorboard").is_dir()


def test_the_last_step_is_saved_when_the_interval_does_not_divide(root):
    train(tiny(root, "last", train__num_steps=10, checkpoint__every=4))
    saved = sorted(int(p.name.split(".")[0]) for p in (root / "last/ckpt").glob("*.ok.json"))
    assert saved == [4, 8, 10]


def test_a_finished_run_is_found_out_before_any_step_and_left_alone(root, golden, capsys):
    before = fingerprints(golden, 20), (golden / "metrics.jsonl").read_bytes()
    result = train(tiny(root, "golden"))
    assert result.step == 20
    said = capsys.readouterr().err
    assert "train.num_steps" in said and "run.overwrite" in said and "run.dir" in said
    assert (fingerprints(golden, 20), (golden / "metrics.jsonl").read_bytes()) == before


def test_overwrite_sets_the_old_run_aside_and_starts_again(root):
    short = {"train__num_steps": 2, "optim__warmup_steps": 0}
    train(tiny(root, "again", **short))
    first = fingerprints(root / "again", 2)
    train(tiny(root, "again", run__overwrite=True, run__seed=1, **short))
    assert fingerprints(root / "again/previous-1", 2) == first
    assert fingerprints(root / "again", 2) != first  # saved anew at the same last step


def test_a_longer_run_goes_on_from_a_shorter_one(root, capsys):
    constant = {"optim__schedule": "constant", "optim__warmup_steps": 2}
    train(tiny(root, "longer", train__num_steps=4, **constant))
    train(tiny(root, "longer", train__num_steps=6, **constant))
    assert "resuming" in capsys.readouterr().err
    assert [row["step"] for row in rows(root / "longer") if "loss" in row] == [1, 2, 3, 4, 5, 6]


def test_the_rows_consumed_have_one_digest_whatever_the_batch_and_the_interruptions(
    monkeypatch, root, golden
):
    right = {row["position"]: row["rows_digest"] for row in rows(golden) if "loss" in row}
    assert len(set(right.values())) == 20
    resumed = interrupt_and_finish(monkeypatch, root, "digest", 7)
    assert {r["position"]: r["rows_digest"] for r in rows(resumed) if "loss" in r} == right
    train(tiny(root, "double", train__global_batch=16, train__num_steps=10))
    double = {row["position"]: row["rows_digest"] for row in rows(root / "double") if "loss" in row}
    assert len(double) == 10 and double.items() <= right.items()


def test_the_ledger_goes_on_over_an_interruption(monkeypatch, root, golden):
    keys = ("position", "epoch", "seen", "padded", "masked")
    right = [tuple(row[key] for key in keys) for row in rows(golden) if "loss" in row]
    resumed = interrupt_and_finish(monkeypatch, root, "ledger", 7)
    assert [tuple(row[key] for key in keys) for row in rows(resumed) if "loss" in row] == right
    assert all(seen + padded == 16 * position for position, _, seen, padded, _ in right)


def test_a_run_without_a_number_of_steps_ends_with_the_data(root, golden):
    said = []
    cfg = tiny(root, "ends", train__num_steps=0, data__max_epochs=1.0)
    outcome = train(cfg, said.append)
    (words,) = [line for line in said if "the data ends after" in line]
    last = [row for row in rows(root / "ends") if "loss" in row][-1]
    assert outcome.step == last["step"] and f"ends after {outcome.step} steps" in words
    assert (
        1 - 8 * last["epoch"] / last["position"] < last["epoch"] <= 1
    )  # less than a batch is left


def test_a_batch_changed_on_resume_goes_on_to_the_end_of_the_data(monkeypatch, root):
    ends = {"train__num_steps": 0, "data__max_epochs": 1.0, "optim__warmup_steps": 0}
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(Interrupted):
            train(tiny(root, "halved", train__global_batch=16, **ends))
    outcome = train(tiny(root, "halved", train__global_batch=8, **ends))
    more = (145 - 3 * 16) // 8  # 145 rows an epoch
    assert (outcome.step, outcome.position) == (3 + more, 3 * 16 + 8 * more)


# 2 rows until token 64 (updates at rows 0 and 2), 4 until token 160 (at 4 and 8), then 8.
GROWING = {
    "train__global_batch": 8,
    "train__batch_ramp": {"64": 2, "160": 4},
    "train__micro_batch": 2,
    "train__num_steps": 6,
    "optim__warmup_steps": 0,
    "optim__warmup_tokens": 64,
    "optim__schedule": "constant",
    "checkpoint__every": 0,
}


@pytest.fixture(scope="module")
def growing(root) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        on_one_device(patch)
        train(tiny(root, "growing", **GROWING))
    return root / "growing"


def on_one_device(monkeypatch) -> None:
    make_mesh = meshes.make_mesh
    monkeypatch.setattr(meshes, "make_mesh", lambda cfg: make_mesh(cfg, jax.devices()[:1]))


def test_a_growing_batch_takes_the_rows_that_its_position_says(growing, golden):
    table = [row for row in rows(growing) if "loss" in row]
    assert [row["position"] for row in table] == [2, 4, 8, 12, 20, 28]
    assert [row["tokens"] for row in table] == [16 * row["position"] for row in table]
    assert [row["seen"] + row["padded"] for row in table] == [row["tokens"] for row in table]
    # 64 tokens of warm-up are 2 updates of 2 rows.
    assert [row["lr"] for row in table] == pytest.approx([5e-3, *[1e-2] * 5])
    right = {row["position"]: row["rows_digest"] for row in rows(golden) if "loss" in row}
    assert table[2]["rows_digest"] == right[8]


def test_a_growing_batch_passes_stages_as_it_passes_one_device(monkeypatch, root, growing):
    make_mesh = meshes.make_mesh
    monkeypatch.setattr(meshes, "make_mesh", lambda cfg: make_mesh(cfg, jax.devices()[:2]))
    staged = {"mesh__data": 1, "mesh__stage": 2, "model__stacked": True, "train__num_steps": 3}
    train(tiny(root, "growing-staged", **GROWING | staged))
    mine, right = (
        [row for row in rows(run) if "grad_norm" in row][:3]
        for run in (root / "growing-staged", growing)
    )
    assert [row["rows_digest"] for row in mine] == [row["rows_digest"] for row in right]
    for key in ("loss", "grad_norm"):
        found, wanted = ([row[key] for row in table] for table in (mine, right))
        assert found == pytest.approx(wanted, rel=1e-5), key


def test_the_wait_for_another_batch_size_is_no_training_time(monkeypatch, root):
    from jaxgpt.data import pipeline

    opened = pipeline.batches

    def slow(*args, **options):
        time.sleep(0.5)
        return opened(*args, **options)

    monkeypatch.setattr(pipeline, "batches", slow)
    on_one_device(monkeypatch)
    train(tiny(root, "slow-growing", **GROWING))
    table = [row for row in rows(root / "slow-growing") if "loss" in row]
    # Steps 3 and 5 are the first of 4 and of 8 rows; a share of more than 1 would be a wait that
    # is not part of the time it is a share of.
    assert [row["data_wait"] for row in table][2::2] == [0, 0]
    assert table[2]["tokens_per_sec"] > 64 / 0.5


@pytest.mark.parametrize("step", [2, 4])  # at a change, and between the last change and the end
def test_a_growing_batch_goes_on_bit_for_bit_after_an_interruption(
    monkeypatch, root, growing, capsys, step
):
    on_one_device(monkeypatch)
    with monkeypatch.context() as patch:
        stop_after(patch, step)
        with pytest.raises(Interrupted):
            train(tiny(root, f"growing-{step}", **GROWING))
    train(tiny(root, f"growing-{step}", **GROWING))
    exact = ("step", "position", "tokens", "loss", "lr", "grad_norm", "rows_digest", "seen")
    tables = [
        [[row[key] for key in exact] for row in rows(run) if "loss" in row]
        for run in (growing, root / f"growing-{step}")
    ]
    assert tables[0] == tables[1]
    assert fingerprints(root / f"growing-{step}", 6) == fingerprints(growing, 6)
    said = [line for line in capsys.readouterr().err.splitlines() if "rows per update" in line]
    assert said == [
        f"from step {number} on {count} rows per update (train.batch_ramp)"
        for number, count in ((3, 4), (5, 8))
        if number not in (step + 1,)  # the first of a process is said with the tokens per step
    ]


def test_another_ramp_on_resume_goes_on_with_the_next_row(monkeypatch, root):
    on_one_device(monkeypatch)
    changed = GROWING | {"train__batch_ramp": {"160": 4, "192": 6}}
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(Interrupted):
            train(tiny(root, "regrown", **GROWING))
    train(tiny(root, "regrown", **changed))
    table = [row for row in rows(root / "regrown") if "loss" in row]
    assert [row["position"] for row in table] == [2, 4, 8, 12, 20, 28]


def test_a_ramp_ends_with_the_data(monkeypatch, root):
    on_one_device(monkeypatch)
    said: list[str] = []
    few = {"train__num_steps": 0, "data__max_epochs": 0.1}
    outcome = train(tiny(root, "short-ramp", **GROWING | few), said.append)
    # A tenth of 145 rows are 14: updates of 2, 2, 4 and 4 rows, and 2 left over.
    assert (outcome.step, outcome.position) == (4, 12)
    assert "the data ends after 4 steps (data.max_epochs), 2 rows left over" in said
    (stated,) = [line for line in said if "tokens per step" in line]
    assert "; 2 until 64 tokens, then 4 until 160 tokens, then 8 rows x 16 = 128" in stated
    (formats,) = [line for line in said if line.startswith("dtypes:")]
    assert "compute float32" in formats


def test_a_batch_of_a_ramp_that_does_not_divide_over_the_devices_is_refused(root):
    with pytest.raises(ConfigError, match=r"train.batch_ramp\['64'\] = 4 rows.* 8 devices"):
        train(tiny(root, "refused", train__batch_ramp={"64": 4}))


def test_evaluations_use_the_moving_average_where_there_is_one(root, capsys):
    from jaxgpt.checkpoint.store import load_params
    from jaxgpt.evaluation.perplexity import evaluate

    averaging = {"optim__ema_decay": 0.9, "eval__every": 3, "train__num_steps": 6}
    said: list[str] = []
    outcome = train(tiny(root, "averaged", **averaging), said.append)
    words = "evaluations use the moving average of the weights"
    assert len([line for line in said if words in line]) == 1
    found = {}
    for weights in ("ema", "last", "best"):
        cfg, params = load_params(root / "averaged", weights=weights)
        with contextlib.closing(open_store(root / "store", "valid")) as store:
            found[weights] = evaluate(cfg, params, store).loss
    assert outcome.results["valid"].loss == pytest.approx(found["ema"], rel=1e-6)
    assert found["best"] == found["ema"] and abs(found["ema"] - found["last"]) > 1e-3


def test_a_run_starts_from_the_weights_of_another_and_resumes_as_itself(root, golden):
    heir = {"run__init_from": str(golden), "train__num_steps": 2, "optim__warmup_steps": 0}
    said: list[str] = []
    train(tiny(root, "heir", **heir), said.append)
    assert [line for line in said if "run.init_from" in line] == [
        f"starting from the weights of {golden}/ckpt/20, step 20 (run.init_from)"
    ]
    trained, fresh = (rows(run)[0] for run in (root / "heir", golden))
    assert (trained["step"], trained["position"]) == (1, 8)  # the same rows with better weights
    assert trained["loss"] < fresh["loss"] - 0.5
    assert config.load(root / "heir/config.toml").run.init_from == str(golden)
    train(tiny(root, "heir", **heir | {"run__init_from": "/gone", "train__num_steps": 3}))
    assert rows(root / "heir")[-1]["step"] == 3


def test_steps_that_were_skipped_have_consumed_their_rows(root, golden):
    broken = {"optim__lr": 1e30, "optim__warmup_steps": 0, "train__max_nonfinite": 100}
    with pytest.raises(NumericsError):  # when the end is evaluated
        train(tiny(root, "skipping", train__num_steps=8, **broken))
    keys = ("step", "position", "rows_digest", "epoch", "seen")
    found = rows(root / "skipping")
    assert found[7]["skipped"] >= 4 and found[7]["tokens"] < found[7]["seen"]
    right = [[row[key] for key in keys] for row in rows(golden)[:8]]
    assert [[row[key] for key in keys] for row in found] == right


def test_waiting_for_data_is_reported(monkeypatch, root):
    from jaxgpt.data import pipeline

    gather = pipeline.gather

    def slow(*args):
        time.sleep(0.1)
        return gather(*args)

    monkeypatch.setattr(pipeline, "gather", slow)
    few = {"data__prefetch": 1, "checkpoint__every": 100}
    train(tiny(root, "waiting", train__num_steps=16, log__every=8, **few))
    assert rows(root / "waiting")[1]["data_wait"] > 0.5


def test_a_disk_that_fails_while_training_ends_the_run_and_the_same_command_goes_on(
    monkeypatch, root, golden
):
    from jaxgpt.data import blocks

    preadv, reads = os.preadv, itertools.count()

    def failing(*args):
        if next(reads) > 90:
            raise OSError(errno.EIO, "Input/output error")
        return preadv(*args)

    with monkeypatch.context() as patch:
        patch.setattr(blocks, "RETRY_AFTER", (0, 0, 0))
        patch.setattr(os, "preadv", failing)
        with pytest.raises(StorageError) as stopped:
            train(tiny(root, "failing-disk"))
    said = str(stopped.value)
    assert stopped.value.exit_code == 74 and len(said.splitlines()) == 1
    assert "000000-000.shard" in said and "Input/output error" in said
    done = [row["step"] for row in rows(root / "failing-disk") if "loss" in row]
    assert f"(batch at position {8 * len(done)})" in said and 5 <= len(done) < 20
    train(tiny(root, "failing-disk"))
    assert fingerprints(root / "failing-disk", 20) == fingerprints(golden, 20)


def test_processes_compare_their_data_before_anything_is_made(monkeypatch, root):
    compared = {}

    def differ(name, facts, timeout):
        compared[name] = facts()
        if name == "data":
            raise DisagreementError("data.store: process 1 has a, process 0 has b")

    monkeypatch.setattr("jaxgpt.train.check_agreement", differ)
    with pytest.raises(DisagreementError) as stopped:
        train(tiny(root, "disagree"))
    assert stopped.value.exit_code == 78 and not (root / "disagree").exists()
    assert list(compared) == ["start", "data"]
    assert compared["start"]["train.num_steps"] == 20
    facts = compared["data"]
    assert facts["data.store"] == [open_store(root / "store").digest]
    assert facts["eval.store"] == [open_store(root / "store", "valid").digest]
    assert [facts[key] for key in facts if key.startswith("last step")] == [20]


def test_other_weights_need_permission_and_begin_where_the_run_is(monkeypatch, root):
    other = root / "other"
    write_corpus(other / "corpus", num_files=12)
    store, second = str(root / "store"), str(other / "second")
    data_commands.make_store(
        tiny(other, "x", data__store=second, tokenizer__path=f"{store}/tokenizer.model")
    )
    run = {"train__num_steps": 6, "optim__schedule": "constant", "eval__store": store}
    train(tiny(root, "mixed", data__store={store: 0.5, second: 0.5}, **run))
    run["train__num_steps"] = 12
    with pytest.raises(ConfigError, match="from row 48 on.*allow_change"):
        train(tiny(root, "mixed", data__store={store: 1.0}, **run))
    allowed = {"checkpoint__allow_change": ["mixture"]}
    train(tiny(root, "mixed", data__store={store: 1.0}, **allowed, **run))
    table = [row for row in rows(root / "mixed") if "loss" in row]
    assert [row["step"] for row in table] == list(range(1, 13))
    before, after = table[5], table[11]
    assert before[f"seen/{second}"] > 0 and before[f"seen/{store}"] > 0
    assert after["seen"] >= before[f"seen/{store}"] + 6 * 8 * 16 - 16


def copy_run(root: Path, golden: Path, name: str) -> Path:
    shutil.rmtree(root / name, ignore_errors=True)
    shutil.copytree(golden, root / name)
    return root / name


def flip_a_bit(step_dir: Path) -> None:
    largest = max((p for p in step_dir.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)


def test_a_flipped_bit_sends_the_run_to_the_previous_checkpoint(root, golden, capsys):
    run = copy_run(root, golden, "flipped")
    flip_a_bit(run / "ckpt/20")
    train(tiny(root, "flipped"))
    said = [line for line in capsys.readouterr().err.splitlines() if "quarantine" in line]
    assert len(said) == 1 and "20" in said[0]
    assert list((run / "ckpt/quarantine").iterdir())
    assert fingerprints(run, 20) == fingerprints(golden, 20)


def test_when_all_checkpoints_are_damaged_nothing_starts_afresh(root, golden):
    run = copy_run(root, golden, "ruined")
    for step in (5, 10, 15, 20):
        flip_a_bit(run / "ckpt" / str(step))
    with pytest.raises(NothingRestorable) as refused:
        train(tiny(root, "ruined"))
    assert refused.value.exit_code == 66 and "\n" not in str(refused.value)


def test_a_run_whose_checkpoints_are_gone_does_not_start_afresh(root, golden):
    run = copy_run(root, golden, "no-ckpt")
    shutil.rmtree(run / "ckpt")
    with pytest.raises(NothingRestorable, match="step 20"):
        train(tiny(root, "no-ckpt"))


def test_a_run_killed_before_its_first_checkpoint_starts_again(root, golden, capsys):
    run = copy_run(root, golden, "early")
    shutil.rmtree(run / "ckpt")
    (run / "metrics.jsonl").write_text('{"step": 4, "loss": 5.0}\n')
    train(tiny(root, "early"))
    assert "before its first checkpoint" in capsys.readouterr().err
    assert fingerprints(run, 20) == fingerprints(golden, 20)
    assert len(rows(run)) == 20


def test_an_empty_folder_named_like_a_step_is_ignored(root, golden):
    run = copy_run(root, golden, "stray")
    (run / "ckpt/30").mkdir()
    assert train(tiny(root, "stray")).step == 20


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model__embed_dim": 64}, "embed_dim"),
        ({"model__num_heads": 2}, "num_heads"),
        ({"model__seq_len": 8}, "seq_len"),
        ({"run__seed": 1}, "seed"),
        ({"optim__beta1": 0.8}, "optim"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_by_name(root, golden, change, word):
    run = copy_run(root, golden, "other")
    with pytest.raises(ConfigError) as refused:
        train(tiny(root, "other", **change))
    assert word in str(refused.value)
    assert fingerprints(run, 20) == fingerprints(golden, 20)


def test_a_moved_run_goes_on(monkeypatch, root, golden):
    with monkeypatch.context() as patch:
        stop_after(patch, 6)
        with pytest.raises(Interrupted):
            train(tiny(root, "here"))
    (root / "here").rename(root / "there")
    train(tiny(root, "there"))
    assert fingerprints(root / "there", 20) == fingerprints(golden, 20)


def test_the_run_folder_holds_its_configuration_with_origins_and_its_tokenizer(root, golden):
    text = (golden / "config.toml").read_text()
    cfg = config.load(golden / "config.toml")
    assert cfg.train.num_steps == 20 and "# override" in text
    assert cfg.model.vocab_size == 320 and "# tokenizer of" in text
    assert (golden / "tokenizer.model").read_bytes() == (
        root / "store/tokenizer.model"
    ).read_bytes()


def test_accumulation_changes_nothing_but_rounding(root):
    short = {"train__num_steps": 3, "optim__warmup_steps": 0, "train__global_batch": 32}
    train(tiny(root, "whole-32", **short))
    train(tiny(root, "parts-32", train__micro_batch=8, **short))
    for a, b in zip(rows(root / "whole-32"), rows(root / "parts-32"), strict=True):
        if "loss" in a:
            assert b["loss"] == pytest.approx(a["loss"], rel=1e-6)
            assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-6)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"data__store": "/nonexistent/store"}, DataError, ["/nonexistent/store"]),
        ({"data__store": ""}, ConfigError, ["data.store"]),
        ({"model__vocab_size": 300}, ConfigError, ["300", "320"]),
        ({"train__num_steps": 0}, ConfigError, ["train.num_steps", "train.num_tokens"]),
        ({"train__global_batch": 12}, ConfigError, ["12", "8"]),
        ({"model__seq_len": 100_000}, DataError, ["100000"]),
        ({"eval__store": "/nonexistent/eval"}, DataError, ["/nonexistent/eval"]),
    ],
)
def test_what_cannot_run_is_refused_in_one_line_before_the_first_step(root, change, error, words):
    with pytest.raises(error) as refused:
        train(tiny(root, "refused", **change))
    assert all(word in str(refused.value) for word in words), str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (root / "refused/ckpt").exists()


def test_a_store_whose_tokenizer_was_swapped_is_refused_before_the_first_step(root, tmp_path):
    store = shutil.copytree(root / "store", tmp_path / "store")
    texts = [path.read_text()[::-1] for path in sorted((root / "corpus").iterdir())]
    tokenizer.train(texts, store / "tokenizer.model", vocab_size=320)
    with pytest.raises(DataError, match="tokenizer.model"):
        train(tiny(root, "swapped", data__store=str(store)))
    assert not (root / "swapped").exists()


def test_a_run_folder_that_cannot_be_made_is_refused(root):
    (root / "a-file").write_text("")
    with pytest.raises(ConfigError) as refused:
        train(tiny(root, "a-file/run"))
    assert "a-file" in str(refused.value) and "\n" not in str(refused.value)


def test_too_many_non_finite_steps_end_the_run(root):
    with pytest.raises(NumericsError) as stopped:
        # Updates of 1e30 overflow float32 within a few steps.
        train(tiny(root, "nan", optim__lr=1e30, optim__warmup_steps=0, train__max_nonfinite=3))
    assert stopped.value.exit_code == 79 and "3 steps in a row" in str(stopped.value)
    assert "lower optim.lr" in str(stopped.value)


def test_weights_that_no_update_made_not_finite_are_told_from_a_rate_that_is_too_high(
    monkeypatch, root
):
    def flip(cfg, train_step, state, batch, ahead):
        update = compile_step(cfg, train_step, state, batch, ahead)

        def broken(state, batch):
            params = jax.tree.map(lambda leaf: leaf * float("nan"), state.params)
            return update(dataclasses.replace(state, params=params), batch)

        return broken

    monkeypatch.setattr("jaxgpt.start.compile_step", flip)
    with pytest.raises(NumericsError, match="the state is not finite, which no update did"):
        train(tiny(root, "broken-weights", train__max_nonfinite=3))


def test_after_the_last_step_a_signal_leaves_the_evaluation_to_the_next_start(monkeypatch, root):
    with monkeypatch.context() as patch:
        stop_after(patch, 20)
        with pytest.raises(Interrupted, match="step 20 of 20 is saved .* evaluates it"):
            train(tiny(root, "last-step"))
    assert not any("eval/valid/loss" in row for row in rows(root / "last-step"))
    outcome = train(tiny(root, "last-step"))
    assert outcome.step == 20 and outcome.results["valid"].loss > 0


def wait_for_step(run: Path, step: int, process: subprocess.Popen) -> None:
    """Return when `step` is in the metrics of a run that goes on in another process."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        metrics = run / "metrics.jsonl"
        if metrics.exists() and f'"step": {step},' in metrics.read_text():
            return
        time.sleep(0.05)
    raise AssertionError(f"step {step} was not reached: {process.stderr.read()}")


def start(root: Path, run: str, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "jaxgpt.cli", "train", *overrides(root, run)],
        env=process_environment(8, **environment),
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_killed_process_continues_bit_for_bit(root, golden):
    killed = jaxgpt("train", *overrides(root, "killed"), devices=8, JAXGPT_FAULT="step:12:kill")
    assert killed.returncode == -signal.SIGKILL
    finished = jaxgpt("train", *overrides(root, "killed"), "--json", devices=8)
    assert finished.returncode == 0, finished.stderr
    assert "resuming" in finished.stderr
    assert json.loads(finished.stdout)["step"] == 20
    assert fingerprints(root / "killed", 20) == fingerprints(golden, 20)
    assert [row["step"] for row in rows(root / "killed") if "loss" in row] == list(range(1, 21))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_exits_75_and_the_same_command_goes_on(root, golden, number):
    run = f"signal-{number.name}"
    process = start(root, run, JAXGPT_FAULT="step:4:pause")
    wait_for_step(root / run, 3, process)
    process.send_signal(number)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 75, said
    assert "Traceback" not in said
    finished = jaxgpt("train", *overrides(root, run), devices=8)
    assert finished.returncode == 0, finished.stderr
    assert fingerprints(root / run, 20) == fingerprints(golden, 20)


def test_a_second_job_in_the_same_folder_is_refused(root):
    process = start(root, "shared", JAXGPT_FAULT="step:2:pause")
    wait_for_step(root / "shared", 1, process)
    second = jaxgpt("train", *overrides(root, "shared"), devices=8)
    process.kill()
    process.communicate()
    assert second.returncode == 64 and str(process.pid) in second.stderr


def test_a_full_disk_ends_the_run_with_74_and_keeps_the_good_checkpoint(root):
    failing = jaxgpt("train", *overrides(root, "full"), devices=8,
                     JAXGPT_FAULT="publish.temporary:2+:enospc")  # fmt: skip
    assert failing.returncode == 74, failing.stderr
    assert "No space left" in failing.stderr and "Traceback" not in failing.stderr
    assert [p.name for p in (root / "full/ckpt").glob("*.ok.json")] == ["5.ok.json"]
    assert jaxgpt("train", *overrides(root, "full"), devices=8).returncode == 0
