"""metrics.jsonl, TensorBoard, throughput, utilisation, resume, full disks, the progress display."""

from __future__ import annotations

import errno
import io
import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxgpt import config
from jaxgpt.errors import StorageError
from jaxgpt.model import gpt
from jaxgpt.model import params as parameters
from jaxgpt.runtime import processor
from jaxgpt.training import metrics, peak, rows
from jaxgpt.training.metrics import RunLog
from jaxgpt.training.peak import Peak
from jaxgpt.training.progress import WAITING_LINES, Progress

FLOPS = (80.0, 100.0)  # per token: causal, full square


class Clock:
    """A clock that tests set; seconds."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def open_log(folder, every=1, total=100, tensorboard=False, **options) -> RunLog:
    cfg = config.Config(log=config.LogConfig(every=every, tensorboard=tensorboard))
    options.setdefault("stream", io.StringIO())
    return RunLog(folder, cfg, total, FLOPS, Peak(10_000.0, "by decree"), **options)


def push(log: RunLog, step: int, loss_sum=6.0, weight=2.0, **options):
    values = {"loss_sum": loss_sum, "weight": weight, "lr": 1e-3, "grad_norm": 0.5, "skipped": 0}
    values |= options.pop("values", {})
    scalars = {key: jnp.float32(value) for key, value in values.items()}
    return log.push(step, scalars, position=4 * step, **options)


def written(folder) -> list[dict]:
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


def test_a_row_has_the_keys_that_scripts_rely_on(tmp_path):
    log = open_log(tmp_path)
    push(log, 1)
    log.close()
    expected = "step tokens loss lr grad_norm tokens_per_sec mfu mfu_full data_wait skipped time"
    assert set(expected.split()) <= set(written(tmp_path)[0])


def test_loss_is_the_sum_over_the_window_divided_by_its_weight(tmp_path):
    log = open_log(tmp_path, every=2)
    push(log, 1, loss_sum=3.0, weight=2.0)
    push(log, 2, loss_sum=56.0, weight=8.0)
    log.close()
    assert written(tmp_path)[0]["loss"] == pytest.approx(5.9)  # not (1.5 + 7) / 2


def test_a_step_without_loss_tokens_does_not_pull_the_mean_to_zero(tmp_path):
    log = open_log(tmp_path, every=2)
    push(log, 1, loss_sum=8.0, weight=4.0)
    push(log, 2, loss_sum=0.0, weight=0.0)
    log.close()
    assert written(tmp_path)[0]["loss"] == 2.0


def test_a_window_without_loss_tokens_has_no_loss_rather_than_zero(tmp_path):
    log = open_log(tmp_path)
    push(log, 1, loss_sum=0.0, weight=0.0)
    log.close()
    assert written(tmp_path)[0]["loss"] is None


def test_a_non_finite_step_is_counted_and_leaves_the_mean_of_the_others(tmp_path):
    log = open_log(tmp_path, every=2)
    push(log, 1, loss_sum=8.0, weight=4.0, values={"grad_norm": 0.5})
    push(log, 2, loss_sum=jnp.nan, weight=4.0, values={"grad_norm": jnp.inf, "skipped": 1})
    log.close()
    row = written(tmp_path)[0]
    assert (row["loss"], row["grad_norm"], row["skipped"]) == (2.0, 0.5, 1)


def test_spikes_are_counted_and_not_averaged(tmp_path):
    log = open_log(tmp_path, every=2)
    push(log, 1, values={"spikes": 0, "skipped": 0})
    push(log, 2, values={"spikes": 1, "skipped": 1})
    log.close()
    assert (written(tmp_path)[0]["spikes"], written(tmp_path)[0]["skipped"]) == (1, 1)


def test_other_scalars_are_averaged_and_their_sums_divided_by_the_loss_weight(tmp_path):
    log = open_log(tmp_path, every=2)
    push(log, 1, weight=1.0, values={"aux_1_sum": 3.0, "balance": 1.0})
    push(log, 2, weight=3.0, values={"aux_1_sum": 5.0, "balance": 2.0})
    log.close()
    row = written(tmp_path)[0]
    assert (row["aux_1"], row["balance"]) == (2.0, 1.5)


def test_metrics_are_fetched_one_step_late(tmp_path):
    log = open_log(tmp_path)
    assert push(log, 1, loss_sum=6.0) is None
    assert written(tmp_path) == []
    assert push(log, 2, loss_sum=7.0)["loss_sum"] == 6.0
    assert [row["step"] for row in written(tmp_path)] == [1]
    assert log.flush()["loss_sum"] == 7.0
    assert [row["step"] for row in written(tmp_path)] == [1, 2]
    log.close()


def test_rows_come_every_n_steps_and_for_the_last_step(tmp_path):
    log = open_log(tmp_path, every=3, total=7)
    for step in range(1, 8):
        push(log, step)
    log.close()
    assert [row["step"] for row in written(tmp_path)] == [3, 6, 7]


def run_timed(folder, pause=0.0, **options) -> dict:
    """Return the row of 5 steps: each 2 s long with 0.5 s of data wait, a `pause` after the third.

    Each step trains on 40 tokens; the step that is pushed is done when the next one is pushed.
    """
    clock = Clock()
    log = open_log(folder, every=5, total=5, clock=clock)
    for step in range(1, 6):
        push(log, step, weight=40.0, data_wait=0.5, **options)
        clock.now += 2.0
        if step == 3 and pause:
            with log.paused():
                clock.now += pause
    log.close()
    return written(folder)[0]


def test_throughput_leaves_out_the_first_step_which_may_have_compiled(tmp_path):
    row = run_timed(tmp_path)
    assert row["tokens_per_sec"] == pytest.approx(4 * 40 / 8.0)
    assert row["tokens"] == 200


def test_time_spent_evaluating_or_saving_is_not_training_time(tmp_path):
    row = run_timed(tmp_path, pause=1000.0)
    assert row["tokens_per_sec"] == pytest.approx(4 * 40 / 8.0)


def test_a_started_clock_counts_the_first_step(tmp_path):
    clock = Clock()
    log = open_log(tmp_path, clock=clock)
    log.start()
    push(log, 1, weight=40.0)
    clock.now += 4.0
    log.close()
    assert written(tmp_path)[0]["tokens_per_sec"] == pytest.approx(10.0)


def test_nested_pauses_are_counted_once(tmp_path):
    clock = Clock()
    log = open_log(tmp_path, clock=clock)
    log.start()
    with log.paused():
        clock.now += 1.0
        with log.paused():
            clock.now += 1.0
    push(log, 1, weight=40.0)
    clock.now += 4.0
    log.close()
    assert written(tmp_path)[0]["tokens_per_sec"] == pytest.approx(10.0)


def test_utilisation_is_useful_operations_over_the_peak_by_both_counts(tmp_path):
    row = run_timed(tmp_path)
    assert row["mfu"] == pytest.approx(20.0 * 80 / 10_000)
    assert row["mfu_full"] == pytest.approx(20.0 * 100 / 10_000)


def test_data_wait_is_the_share_of_time_the_loop_waited_for_input(tmp_path):
    assert run_timed(tmp_path)["data_wait"] == pytest.approx(0.25)


def test_given_tokens_take_the_place_of_the_loss_weight(tmp_path):
    assert run_timed(tmp_path, tokens=30)["tokens"] == 150


@pytest.mark.parametrize("finite", [0, 1])  # a spike is finite
def test_tokens_of_a_skipped_step_were_not_trained_on(tmp_path, finite):
    log = open_log(tmp_path, every=2)
    push(log, 1, weight=40.0, values={"finite": 1, "applied": 1})
    push(log, 2, weight=40.0, values={"finite": finite, "applied": 0, "skipped": 1})
    log.close()
    assert written(tmp_path)[0]["tokens"] == 40


def test_token_counts_beyond_32_bits_are_exact(tmp_path):
    state = {"tokens": 2**33 + 1, "window": {}}
    log = open_log(tmp_path, start_step=5, state=state)
    push(log, 6, weight=3.0)
    log.close()
    assert written(tmp_path)[0]["tokens"] == 2**33 + 4


def test_rows_tell_what_was_consumed_of_each_source(tmp_path):
    log = open_log(tmp_path, ledger=lambda position: {"epoch/a": position / 8, "seen/a": position})
    push(log, 1)  # position 4
    push(log, 3)  # position 12
    log.close()
    assert [(row["epoch/a"], row["seen/a"]) for row in written(tmp_path)] == [(0.5, 4), (1.5, 12)]


def test_the_digest_of_the_rows_is_written_in_hexadecimal(tmp_path):
    log = open_log(tmp_path)
    scalars = {"loss_sum": jnp.float32(1), "weight": jnp.float32(1)}
    log.push(1, scalars | {"rows_digest": jnp.uint32(0xFFFFFFFE)}, position=4)
    log.close()
    assert written(tmp_path)[0]["rows_digest"] == "fffffffe"


def test_after_a_resume_each_step_is_readable_once_and_the_later_attempt_wins(tmp_path):
    log = open_log(tmp_path, total=10)
    for step in range(1, 6):
        push(log, step)
    state = json.loads(json.dumps(log.state()))  # as it would come out of a checkpoint
    for step in range(6, 9):
        push(log, step, loss_sum=999.0)
    log.close()
    log = open_log(tmp_path, total=10, start_step=5, state=state)
    for step in range(6, 11):
        push(log, step, loss_sum=4.0)
    log.close()
    found = written(tmp_path)
    assert [row["step"] for row in found] == list(range(1, 11))
    assert [row["loss"] for row in found] == [3.0] * 5 + [2.0] * 5
    assert found[-1]["tokens"] == 20


def test_rows_of_a_run_resumed_within_a_window_equal_those_of_an_unbroken_one(tmp_path):
    def losses(log, first, last):
        for step in range(first, last + 1):
            push(log, step, loss_sum=0.1 * step, weight=step, values={"grad_norm": 1 / step})

    for name in "ab":
        (tmp_path / name).mkdir()
    log = open_log(tmp_path / "a", every=4, total=8)
    losses(log, 1, 8)
    log.close()
    log = open_log(tmp_path / "b", every=4, total=8)
    losses(log, 1, 6)
    state = json.loads(json.dumps(log.state()))
    losses(log, 7, 7)
    log.close()
    log = open_log(tmp_path / "b", every=4, total=8, start_step=6, state=state)
    losses(log, 7, 8)
    log.close()
    timing = {"tokens_per_sec", "mfu", "mfu_full", "data_wait", "time"}
    unbroken, resumed = (
        [{k: v for k, v in row.items() if k not in timing} for row in written(tmp_path / name)]
        for name in "ab"
    )
    assert resumed == unbroken


def test_a_torn_last_line_is_left_out_on_resume(tmp_path):
    Path(tmp_path, "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "lo')
    log = open_log(tmp_path, start_step=2, state={"tokens": 4, "window": {}})
    push(log, 3)
    log.close()
    assert [row["step"] for row in written(tmp_path)] == [1, 3]


def test_a_resume_without_the_saved_counters_is_refused(tmp_path):
    with pytest.raises(ValueError, match="start_step 5"):
        open_log(tmp_path, start_step=5)


def test_an_evaluation_joins_the_row_of_its_step(tmp_path):
    log = open_log(tmp_path)
    push(log, 1)
    log.record_eval(1, "valid", {"loss": 2.5, "tokens": 10})
    push(log, 2)
    log.close()
    first, second = written(tmp_path)
    assert (first["loss"], first["eval/valid/loss"], first["eval/valid/tokens"]) == (3.0, 2.5, 10)
    assert "eval/valid/loss" not in second


def test_an_evaluation_between_rows_gets_a_row_of_its_own(tmp_path):
    log = open_log(tmp_path, every=10)
    push(log, 1)
    log.record_eval(1, "valid", {"loss": 2.5})
    log.close()
    assert written(tmp_path) == [{"step": 1, "eval/valid/loss": 2.5}]


def test_an_evaluation_repeated_after_a_resume_replaces_the_first(tmp_path):
    log = open_log(tmp_path)
    push(log, 1)
    log.record_eval(1, "valid", {"loss": 2.123456789})  # a longer line than the second
    state = log.state()
    log.close()
    log = open_log(tmp_path, start_step=1, state=state)
    log.record_eval(1, "valid", {"loss": 2.0})
    log.close()
    assert [row["eval/valid/loss"] for row in written(tmp_path)] == [2.0]


def test_a_full_disk_does_not_stop_training_and_leaves_whole_lines(tmp_path, monkeypatch):
    stream = io.StringIO()
    log = open_log(tmp_path, stream=stream)
    push(log, 1)
    log.flush()
    pwrite = os.pwrite

    def half(fd, data, offset):
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(fd, data[: len(data) // 2], offset)

    monkeypatch.setattr(os, "pwrite", half)
    push(log, 2)
    push(log, 3)  # writes the row of step 2, in vain
    monkeypatch.setattr(os, "pwrite", pwrite)
    log.close()
    assert [row["step"] for row in written(tmp_path)] == [1, 3]
    assert log.errors == 1
    assert "No space left" in stream.getvalue()


def test_a_failed_merge_leaves_the_line_as_it_was(tmp_path, monkeypatch):
    file = rows.RowFile(tmp_path / "metrics.jsonl", 0)
    file.write({"step": 1, "loss": 3.0})
    pwrite, calls = os.pwrite, []

    def fail_second(fd, data, offset):
        calls.append(offset)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(fd, data[:27] if len(calls) == 1 else data, offset)

    monkeypatch.setattr(os, "pwrite", fail_second)
    with pytest.raises(OSError):
        file.write({"step": 1, "eval/valid/loss": 2.5})
    monkeypatch.setattr(os, "pwrite", pwrite)
    file.write({"step": 2, "loss": 4.0})
    file.close()
    assert written(tmp_path) == [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 4.0}]


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path):
    with pytest.raises(StorageError, match="missing"):
        open_log(tmp_path / "missing")


def test_without_a_folder_nothing_is_written_or_printed(capfd):
    log = open_log(None, stream=None)
    push(log, 1)
    log.record_eval(1, "valid", {"loss": 2.5})
    log.note("hello")
    log.close()
    assert capfd.readouterr() == ("", "")


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = open_log(tmp_path, tensorboard=True)
    for step in range(1, 4):
        push(log, step)
    state = log.state()
    for step in range(4, 7):
        push(log, step, loss_sum=999.0)
    log.close()
    log = open_log(tmp_path, tensorboard=True, start_step=3, state=state)
    for step in range(4, 6):
        push(log, step, loss_sum=4.0)
    log.record_eval(5, "valid", {"loss": 2.5})
    log.close()
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    points = board.Scalars("train/loss")
    assert [(p.step, p.value) for p in points] == [(1, 3), (2, 3), (3, 3), (4, 2), (5, 2)]
    assert [(p.step, p.value) for p in board.Scalars("eval/valid/loss")] == [(5, 2.5)]


def test_writing_tensorboard_files_does_not_import_tensorflow(tmp_path):
    code = (
        "import pathlib, sys; from jaxgpt.training import metrics;"
        "writer = metrics.open_events(pathlib.Path(sys.argv[1]), 0);"
        "metrics.write_scalars(writer, {'step': 1, 'loss': 2.0}); writer.close();"
        "sys.exit('tensorflow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60).returncode == 0


def test_plain_lines_come_at_most_every_two_seconds_and_for_the_last_step(tmp_path):
    clock, stream = Clock(), io.StringIO()
    log = open_log(tmp_path, total=10, clock=clock, stream=stream, plain=True)
    for step in range(1, 11):
        push(log, step)
        clock.now += 0.5
    log.close()
    steps = [line.split()[1] for line in stream.getvalue().splitlines()]
    assert steps == ["1/10", "5/10", "9/10", "10/10"]


def test_a_pipe_that_nobody_reads_holds_up_nothing_and_dropped_lines_are_counted():
    reader, writer = os.pipe()
    with os.fdopen(reader), os.fdopen(writer, "w") as stream:
        progress = Progress(0, 10, stream)
        began = time.monotonic()
        for _ in range(3 * WAITING_LINES):
            progress.note("x" * 1000)  # three times what a 64 KiB pipe and the queue hold
        assert time.monotonic() - began < 1.0
        progress.close(seconds=0.6)
        assert progress.dropped > WAITING_LINES
        assert time.monotonic() - began < 3.0
        os.set_blocking(reader, False)
        while progress._thread.is_alive():  # let the blocked thread go before the pipe is closed
            try:
                os.read(reader, 1 << 16)
            except BlockingIOError:
                time.sleep(0.01)


def test_a_closed_pipe_is_no_error(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        log = open_log(tmp_path, stream=stream)
        for step in range(1, 4):
            push(log, step)
        log.close()
    assert [row["step"] for row in written(tmp_path)] == [1, 2, 3]


def test_a_terminal_gets_a_live_bar_and_its_cursor_back(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as stream:
        log = open_log(tmp_path, total=4, stream=stream)
        for step in range(1, 5):
            push(log, step)
        log.note("saved")
        log.close()
        shown = ""
        while "\x1b[?25h" not in shown and select.select([leader], [], [], 10)[0]:
            shown += os.read(leader, 1 << 16).decode()
    os.close(leader)
    assert "step 4/4" in shown and "loss 3.0000" in shown and "saved" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_control_characters_in_a_note_are_escaped(tmp_path):
    stream = io.StringIO()
    log = open_log(tmp_path, stream=stream)
    log.note("store \x1b[2Jevil\x9b")
    log.close()
    assert stream.getvalue() == "store \\x1b[2Jevil\\x9b\n"


def test_the_first_line_states_what_is_counted_for_gpt2_small():
    model = config.ModelConfig(
        num_layers=12, embed_dim=768, num_heads=12, vocab_size=50257, seq_len=1024,
        attn_bias=True, out_bias=True, mlp_bias=True,
    )  # fmt: skip
    cfg = config.Config(model=model)
    flops = gpt.flops_per_token(model, causal=True), gpt.flops_per_token(model, causal=False)
    assert flops == (798_543_360, 855_166_464)
    line = metrics.describe(cfg, 124_439_808, flops, Peak(989e12, "published"))
    for part in ("124,439,808", "798.5", "855.2", "989.000 TFLOP/s (published)", "16,384 tokens"):
        assert part in line


@pytest.mark.parametrize("stacked", [False, True])
def test_the_first_line_counts_the_experts_that_a_token_is_sent_to(stacked):
    # Attention 4 D², router 4 D, experts 3 D F each, of which 2 of 4, shared 3 D F', two norms.
    D, F, shared, layers, V = 32, 24, 16, 2, 64
    model = config.ModelConfig(
        num_layers=layers, embed_dim=D, num_heads=4, vocab_size=V, seq_len=16, positions="none",
        norm="rmsnorm", mlp="swiglu", num_experts=4, experts_per_token=2, expert_dim=F,
        shared_dim=shared, stacked=stacked,
    )  # fmt: skip
    rest = V * D + D + layers * (4 * D**2 + 4 * D + 3 * D * shared + 2 * D)
    whole, active = (rest + layers * count * 3 * D * F for count in (4, 2))
    assert parameters.count(parameters.specs(model)) == whole
    flops = gpt.flops_per_token(model, causal=True), gpt.flops_per_token(model, causal=False)
    assert flops[1] == 6 * active + 12 * layers * 32 * 16
    line = metrics.describe(config.Config(model=model), whole, flops, None)
    assert line.startswith(f"{whole:,} parameters, {active:,} active per token; ")


def devices(kind: str, platform: str, count: int) -> list:
    return [SimpleNamespace(device_kind=kind, platform=platform, process_index=0)] * count


@pytest.mark.parametrize(
    ("kind", "per_device"), [("NVIDIA H200", 989e12), ("TPU v5 lite", 197e12), ("TPU7x", 1153.5e12)]
)
def test_accelerators_are_measured_against_published_dense_bfloat16_peaks(kind, per_device):
    found = metrics.measure_matmul_peak(jnp.bfloat16, devices(kind, "tpu", 4))
    assert found.flops == 4 * per_device
    assert found.source.startswith("published")


def test_float32_is_not_measured_against_the_bfloat16_peak(monkeypatch):
    monkeypatch.setattr(peak, "_best_rate", lambda dtype, platform: 5.0)
    found = peak.measure_matmul_peak("float32", devices("NVIDIA H200", "gpu", 2))
    assert found.flops == 10.0 and "measured" in found.source


def test_simulated_cpu_devices_are_one_processor(monkeypatch):
    monkeypatch.setattr(peak, "_best_rate", lambda dtype, platform: 5.0)
    assert peak.measure_matmul_peak("float32", devices("cpu", "cpu", 8)).flops == 5.0


def test_cpus_count_as_the_processors_that_the_processes_have_between_them(monkeypatch):
    monkeypatch.setattr(peak, "_best_rate", lambda dtype, platform: 5.0)
    found = peak.measure_matmul_peak("float32", devices("cpu", "cpu", 8), processors=2)
    assert found.flops == 10.0 and found.source.endswith(" x 2")


def test_the_measured_peak_is_kept_for_later_processes_and_only_rises(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    peak._best_rate.cache_clear()
    first = peak.measure_matmul_peak("float32", jax.devices("cpu"))
    stored = json.loads((tmp_path / "jaxgpt" / "matmul_peak.json").read_text())
    assert list(stored.values()) == [first.flops]
    better = {key: 100 * rate for key, rate in stored.items()}
    (tmp_path / "jaxgpt" / "matmul_peak.json").write_text(json.dumps(better))
    peak._best_rate.cache_clear()
    assert peak.measure_matmul_peak("float32", jax.devices("cpu")).flops == 100 * first.flops
    peak._best_rate.cache_clear()


def test_a_start_takes_the_rate_that_is_stored_and_measures_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    peak._best_rate.cache_clear()
    first = peak.measure_matmul_peak("float32", jax.devices("cpu"), again=False)
    peak._best_rate.cache_clear()
    monkeypatch.setattr(peak, "_matmul_rate", lambda *_, **__: 2 * first.flops)
    assert peak.measure_matmul_peak("float32", jax.devices("cpu"), again=False) == first
    assert peak.measure_matmul_peak("float32", jax.devices("cpu")).flops == 2 * first.flops
    peak._best_rate.cache_clear()


def test_a_measured_rate_is_one_that_a_product_reaches(tmp_path, monkeypatch):
    monkeypatch.setattr(peak, "CPU_SHAPES", ((256, 256, 256),))
    rate = peak._matmul_rate("float32", jax.devices("cpu")[0], seconds=0.2)
    # A core of any machine that runs JAX does more than 1 and less than 1,000 GFLOP/s.
    assert 1e9 < rate < 1e12 * processor.num_cores()
