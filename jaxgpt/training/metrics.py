"""The record of a run: rows of metrics.jsonl, TensorBoard files, throughput, utilisation.

The loop pushes device scalars after each step and they are fetched one step later, so the host
never waits for the step it has just dispatched. Sums and weights stay apart until a row is written.
Nothing here can change the trajectory, and a full disk or a closed terminal does not stop it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import jax

from jaxgpt import ramp
from jaxgpt.config import Config, ModelConfig
from jaxgpt.errors import StorageError
from jaxgpt.model import params as parameters
from jaxgpt.training.peak import Peak
from jaxgpt.training.peak import measure_matmul_peak as measure_matmul_peak  # part of this room
from jaxgpt.training.progress import Progress
from jaxgpt.training.rows import RowFile

# Counted, or written as they are at the row's own step; others are averaged over the row's steps.
NOT_AVERAGED = (
    "lr", "weight", "tokens", "finite", "applied", "skipped", "skipped_in_row", "spikes",
    "rows_digest",
)  # fmt: skip
PLAIN_SECONDS = 2.0  # at most one plain progress line in this time


def describe(
    cfg: Config, num_params: int, flops_per_token: tuple[float, float], peak: Peak | None
) -> str:
    """Return the line that says what is counted: parameters, FLOPs per token, peak, batch.

    `flops_per_token` is (causal, full square), both from `model.gpt.flops_per_token`.
    """
    causal, full = (f"{count / 1e6:,.1f}" for count in flops_per_token)
    rows, length = cfg.train.global_batch, cfg.model.seq_len
    share = f"{peak.flops / 1e12:,.3f} TFLOP/s ({peak.source})" if peak else "unknown"
    active = left_out = ""
    if cfg.model.num_experts:
        active = f", {num_params - _idle(cfg.model):,} active per token"
        left_out = " and of experts those that a token is sent to"
    return (
        f"{num_params:,} parameters{active}; 6 P + 12 L N H S = {causal} MFLOP per token with S = "
        f"T/2 (causal: mfu), {full} with S = T (mfu_full), P without position table and untied "
        f"embedding{left_out}; peak {share}; {ramp.describe(cfg.train.batch_ramp)}{rows} rows x "
        f"{length} = {rows * length:,} tokens per step"
    )


def _idle(model: ModelConfig) -> int:
    """Return the parameters of the experts that a token is not sent to."""
    specs = parameters.specs(model)
    layers = specs.layers if isinstance(specs.layers, tuple) else (specs.layers,)
    experts = parameters.count([(p.w_gate, p.w_up, p.w_down) for p in layers])
    return experts * (model.num_experts - model.experts_per_token) // model.num_experts


class RunLog:
    """Collects the metrics of a run and shows its progress; `close` it on every path.

    `push` after each step, `paused` around whatever is not training, `state` for each checkpoint
    and, on resume, the same dict as `state=` with the step as `start_step`: the rows are then
    those of an unbroken run. With `run_dir` None (all processes but the first) nothing is written.
    `ledger` tells from a position what was consumed of each source before it.
    Raises StorageError if the files cannot be opened; later failures are counted in `errors`.
    """

    def __init__(
        self,
        run_dir: str | Path | None,
        cfg: Config,
        total_steps: int,
        flops_per_token: tuple[float, float],
        peak: Peak | None,
        start_step: int = 0,
        *,
        state: Mapping[str, Any] | None = None,
        ledger: Callable[[int], Mapping[str, float]] | None = None,
        plain: bool | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        if start_step and state is None:
            raise ValueError(f"start_step {start_step} needs the state saved at that step")
        state = state or {"tokens": 0, "window": {}}
        self._every, self._total, self._peak = cfg.log.every, total_steps, peak
        self._flops, self._ledger = flops_per_token, ledger
        self.tokens: int = state["tokens"]  # trained on since step 0
        # What the next row averages: name -> [numerator, denominator].
        self._window: dict[str, list[float]] = {k: list(v) for k, v in state["window"].items()}
        self.last: dict[str, float] = {}
        self._held: tuple[int, dict[str, Any], int | None, int, float] | None = None
        self._clock = clock
        self._since: float | None = None  # when the row's timed steps began; None: not yet
        self._timed_tokens, self._waited, self._excluded = 0, 0.0, 0.0
        self._last_line = -math.inf
        self._text = ""
        self.errors = 0
        self._rows = self._events = self._progress = None
        if run_dir is not None:
            try:
                self._rows = RowFile(Path(run_dir, "metrics.jsonl"), start_step)
                if cfg.log.tensorboard:
                    self._events = open_events(Path(run_dir, "tensorboard"), start_step)
            except OSError as error:
                raise StorageError(f"{run_dir}: metrics cannot be written: {error}") from None
            self._progress = Progress(start_step, total_steps, stream, plain)

    def start(self) -> None:
        """Start the clock, just before a step that will not compile.

        Without this the first step pushed, which may have compiled, is left out of all rates.
        """
        self._since, self._excluded = self._clock(), 0.0

    def push(
        self,
        step: int,
        metrics: Mapping[str, jax.Array],
        *,
        tokens: int | None = None,
        position: int,
        data_wait: float = 0.0,
    ) -> dict[str, float] | None:
        """Take the metrics of update number `step` (from 1); return those of the step before.

        `metrics` are scalars: `loss_sum` and `weight` (their ratio is the loss), `lr`, `grad_norm`,
        `applied` (0: it changed nothing), `skipped` (such steps so far), and any others. `tokens`
        are those of this step (by default `metrics["tokens"]`, or the weight), trained on if it was
        applied; `position` is the sample counter after it; `data_wait` is in seconds. Returns None
        if the step before has been fetched already; `last` always holds the newest fetched values.
        """
        for value in metrics.values():
            if isinstance(value, jax.Array):
                value.copy_to_host_async()  # starts when the step is done; nobody waits for it
        fetched = self._absorb()
        self._held = (step, dict(metrics), tokens, position, data_wait)
        return fetched

    def flush(self) -> dict[str, float] | None:
        """Wait for the last pushed step and return its metrics, None if that was done before."""
        return self._absorb()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keep the enclosed time (evaluation, saving, compiling) out of the training rates."""
        self.flush()
        began, before = self._clock(), self._excluded
        try:
            yield
        finally:  # assigned, not added: a nested `paused` is part of this one
            self._excluded = before + self._clock() - began

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint of the last pushed step must hold, as plain JSON values.

        The rows up to here are on disk when it returns, as they are not written again on resume.
        """
        self.flush()
        self._guarded(lambda: self._rows and self._rows.sync())
        return {"tokens": self.tokens, "window": {k: list(v) for k, v in self._window.items()}}

    def record_eval(self, step: int, name: str, result: Any) -> None:
        """Add an evaluation (a dataclass or mapping of numbers) to the row of `step`."""
        values = dataclasses.asdict(result) if dataclasses.is_dataclass(result) else dict(result)
        values = {key: value for key, value in values.items() if isinstance(value, int | float)}
        self.flush()
        self._write({"step": step} | {f"eval/{name}/{key}": v for key, v in values.items()})
        shown = "  ".join(f"{key.replace('_', ' ')} {v:,.6g}" for key, v in values.items())
        self.note(f"eval {name} at step {step}: {shown}")

    def note(self, text: str) -> None:
        """Print one line on stderr, above the progress bar."""
        if self._progress:
            self._progress.note(text)

    def close(self) -> None:
        """Write what is held and release the files; call it on every path."""
        try:
            self.flush()
        finally:
            if self._progress:
                self._progress.close()
            for file in (self._rows, self._events):
                self._guarded(lambda file=file: file and file.close())
            self._rows = self._events = self._progress = None

    def _absorb(self) -> dict[str, float] | None:
        """Fetch the held step, add it to the window, and write the row if one is due."""
        if self._held is None:
            return None
        step, metrics, tokens, position, data_wait = self._held
        self._held = None
        values = {key: float(value) for key, value in jax.device_get(metrics).items()}
        self.last = values
        now = self._clock()  # the step is done
        tokens = round(values.get("tokens", values["weight"])) if tokens is None else tokens
        tokens *= bool(values.get("applied", 1))  # a skipped step trained on nothing
        self.tokens += tokens
        _add(self._window, values)
        if self._since is None:
            self._since, self._excluded = now, 0.0
        else:
            self._timed_tokens += tokens
            self._waited += data_wait
        loss = values["loss_sum"] / values["weight"] if values["weight"] else math.nan
        if step % self._every == 0 or step == self._total:
            self._write_row(step, values, position, now)
        elif self._progress:
            self._progress.update(step, f"loss {loss:.4f}  {self._text}")
        return values

    def _write_row(self, step: int, values: dict[str, float], position: int, now: float) -> None:
        means = {k: total / count if count else None for k, (total, count) in self._window.items()}
        seconds = now - self._since - self._excluded
        rate = self._timed_tokens / seconds if seconds > 0 and self._timed_tokens else None
        share = rate / self._peak.flops if rate and self._peak else None
        row = {
            "step": step,
            "tokens": self.tokens,
            "loss": means.pop("loss"),
            "lr": values.get("lr"),
            "grad_norm": means.pop("grad_norm", None),
            "tokens_per_sec": rate,
            "mfu": share and share * self._flops[0],
            "mfu_full": share and share * self._flops[1],
            "data_wait": self._waited / seconds if rate else None,
            "skipped": int(values.get("skipped", 0)),
            "time": round(time.time(), 3),
            "position": position,
        }
        row |= {key: mean for key, mean in means.items() if key not in row}
        row |= {"spikes": int(values["spikes"])} if "spikes" in values else {}
        row |= self._ledger(position) if self._ledger else {}
        if "rows_digest" in values:
            row["rows_digest"] = f"{int(values['rows_digest']):08x}"
        self._window, self._since = {}, now
        self._timed_tokens, self._waited, self._excluded = 0, 0.0, 0.0
        self._write(row)
        self._show(row)

    def _write(self, row: dict[str, Any]) -> None:
        """Write a row to both files; JSON has no NaN, so what is not finite becomes null."""
        row = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()
        }
        self._guarded(lambda: self._rows and self._rows.write(row))
        self._guarded(lambda: self._events and write_scalars(self._events, row))

    def _guarded(self, action: Callable[[], object]) -> None:
        """Run what touches the disk; a failure is said once and counted, never raised."""
        try:
            action()
        except OSError as error:
            self.errors += 1
            if self.errors == 1:
                self.note(f"metrics cannot be written, training goes on: {error}")

    def _show(self, row: dict[str, Any]) -> None:
        if not self._progress:
            return
        parts = [f"{row['tokens']:,} tokens"]
        if row["tokens_per_sec"]:
            parts.append(f"{row['tokens_per_sec']:,.0f} tokens/s")
            parts += [f"MFU {row['mfu']:.1%}"] if row["mfu"] else []
            parts.append(f"data wait {row['data_wait']:.1%}")
        parts += [f"skipped {row['skipped']}"] if row["skipped"] else []
        self._text = "  ".join(parts)
        loss = "loss none" if row["loss"] is None else f"loss {row['loss']:.4f}"
        self._progress.update(row["step"], f"{loss}  {self._text}")
        now = self._clock()
        due = now - self._last_line >= PLAIN_SECONDS or row["step"] == self._total
        if self._progress.plain and due:
            self._last_line = now
            self.note(f"step {row['step']}/{self._total}  {loss}  {self._text}")


def _add(window: dict[str, list[float]], values: Mapping[str, float]) -> None:
    """Add a step's scalars: `x_sum` is averaged by loss weight as `x`, others by step.

    What is not finite (a skipped step) is left out, so that it does not hide the row's other steps.
    """
    weight = values["weight"]
    for key, value in values.items():
        if key in NOT_AVERAGED:
            continue
        name, by_weight = key.removesuffix("_sum"), key.endswith("_sum")
        pair = window.setdefault(name, [0.0, 0.0])
        if math.isfinite(value) and math.isfinite(weight):
            pair[0] += value
            pair[1] += weight if by_weight else 1.0


def open_events(folder: Path, start_step: int) -> Any:
    """Return a TensorBoard record writer on a new file; steps after `start_step` are purged.

    The record writer of the `tensorboard` package is used on a plain file: its `EventFileWriter`
    imports all of TensorFlow (4 s) and writes from a thread whose errors would surface later.
    """
    from tensorboard.compat.proto import event_pb2
    from tensorboard.summary.writer.record_writer import RecordWriter

    folder.mkdir(parents=True, exist_ok=True)
    # TensorBoard reads files in order of names; the process id keeps two of one instant apart.
    file = open(folder / f"events.out.tfevents.{time.time():.6f}.{os.getpid()}", "wb")
    writer = RecordWriter(file)
    first = event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2")
    log = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    purge = event_pb2.Event(wall_time=time.time(), step=start_step + 1, session_log=log)
    for event in (first, purge):
        writer.write(event.SerializeToString())
    writer.flush()
    return writer


def write_scalars(writer: Any, row: Mapping[str, Any]) -> None:
    """Write the numbers of a row as scalars, `train/` before those that are not evaluations."""
    from tensorboard.compat.proto import event_pb2

    event = event_pb2.Event(wall_time=time.time(), step=row["step"])
    for key, value in row.items():
        if isinstance(value, int | float) and key not in ("step", "time"):
            tag = key if key.startswith("eval/") else f"train/{key}"
            event.summary.value.add(tag=tag, simple_value=value)
    writer.write(event.SerializeToString())
    writer.flush()
