"""What is settled and said before the first step: how many there are, and in which formats."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from runs import tiny

from jaxgpt import config, start
from jaxgpt.data.packing import Batch
from jaxgpt.errors import ConfigError, DisagreementError
from jaxgpt.model import params as parameters
from jaxgpt.parallel import mesh as meshes
from jaxgpt.parallel.sharding import to_global
from jaxgpt.runtime import store
from jaxgpt.start import describe_devices, describe_dtypes, last_step
from jaxgpt.training import optimizer, step
from jaxgpt.training import state as states


@pytest.mark.parametrize(
    "step, position, batch, limit, last",
    [
        (0, 0, 16, 0, 9),  # of 145 rows, 1 is left over
        (3, 48, 8, 0, 15),
        (3, 48, 97, 0, 4),
        (3, 48, 98, 0, 3),
        (3, 24, 16, 0, 10),
        (3, 24, 16, 9, 9),
        (18, 144, 16, 0, 18),
    ],
)
def test_the_last_step_is_the_last_whole_batch_after_what_was_consumed(
    step, position, batch, limit, last
):
    record = SimpleNamespace(step=step, position=position) if step else None
    changes = {"train__num_steps": limit, "optim__warmup_steps": 0, "data__max_epochs": 1.0}
    cfg = tiny(Path("none"), "run", train__global_batch=batch, **changes)
    data = SimpleNamespace(end=145)
    said: list[str] = []
    assert last_step(cfg, data, record, said.append) == last
    left = (145 - position) % batch
    words = f"the data ends after {last} steps (data.max_epochs)"
    assert said == ([] if limit else [words + (f", {left} rows left over" if left else "")])


@pytest.mark.parametrize(
    "end, last, left",
    # Updates begin at rows 0, 2, 4, 8, and then at 12, 20, 28, ...
    [(145, 20, 5), (28, 6, 0), (27, 5, 7), (11, 3, 3), (3, 1, 1), (2, 1, 0)],
)
def test_the_data_may_end_inside_a_ramp(end, last, left):
    growing = {"train__batch_ramp": {"64": 2, "160": 4}, "train__num_steps": 0}
    cfg = tiny(Path("none"), "run", data__max_epochs=1.0, optim__warmup_steps=0, **growing)
    said: list[str] = []
    assert last_step(cfg, SimpleNamespace(end=end), None, said.append) == last
    over = f", {left} rows left over" if left else ""
    assert said == [f"the data ends after {last} steps (data.max_epochs){over}"]


@pytest.mark.parametrize(
    "optim, words",
    [
        ({"warmup_steps": 19}, "optim.warmup_steps = 19 is longer than the run"),
        ({"schedule": "wsd", "warmup_steps": 9, "decay_steps": 10}, "optim.warmup_steps = 9 and"),
    ],
)
def test_a_schedule_that_does_not_fit_in_the_data_is_refused(optim, words):
    changes = {f"optim__{key}": value for key, value in optim.items()}
    cfg = tiny(Path("none"), "run", data__max_epochs=1.0, train__num_steps=0, **changes)
    with pytest.raises(ConfigError) as refused:
        last_step(cfg, SimpleNamespace(end=145), None, lambda line: None)
    assert str(refused.value).startswith(words)
    assert str(refused.value).endswith("data.max_epochs = 1 (18 steps)")
    assert last_step(cfg, SimpleNamespace(end=152), None, lambda line: None) == 19


def test_data_too_short_for_the_first_update_of_a_ramp_is_refused_by_its_key():
    cfg = tiny(
        Path("none"), "run", data__max_epochs=1.0, train__batch_ramp={"64": 2}, train__num_steps=0
    )
    with pytest.raises(ConfigError, match=r"leaves 1 rows.* train.batch_ramp\['64'\] = 2"):
        last_step(cfg, SimpleNamespace(end=1), None, print)


@pytest.mark.parametrize(
    "overrides, words",
    [
        ([], "parameters float32, gradients float32, moments float32, compute bfloat16, logits "
             "bfloat16"),
        (["train.logits_dtype=float32", "optim.moment_dtype=bfloat16"],
         "parameters float32, gradients float32, moments bfloat16, compute bfloat16, logits "
         "float32"),
        (["train.compute_dtype=float32"],
         "parameters float32, gradients float32, moments float32, compute float32, logits float32"),
        # One micro-batch has gradients like the parameters; sums of several are float32.
        (["train.param_dtype=bfloat16"],
         "parameters bfloat16 with float32 masters, gradients bfloat16, moments float32, compute "
         "bfloat16, logits bfloat16"),
        (["train.param_dtype=bfloat16", "train.micro_batch=4"],
         "parameters bfloat16 with float32 masters, gradients float32, moments float32, compute "
         "bfloat16, logits bfloat16"),
    ],
)  # fmt: skip
def test_all_number_formats_are_one_line(overrides, words):
    cfg = config.load(None, overrides)
    assert describe_dtypes(cfg) == f"dtypes: {words}, loss and softmax float32"


def test_other_devices_than_those_of_the_checkpoint_are_said():
    record = SimpleNamespace(mesh={"data": 4, "fsdp": 2, "processes": 2})
    assert describe_devices(record, SimpleNamespace(shape={"data": 1, "fsdp": 2})) == (
        "saved on 8 device(s) in 2 process(es) (data 4, fsdp 2), going on with 2 device(s) in 1 "
        "process(es) (fsdp 2)"
    )


def test_the_same_devices_are_not_worth_a_word():
    record = SimpleNamespace(mesh={"data": 4, "expert": 1, "processes": 1})
    assert describe_devices(record, SimpleNamespace(shape={"data": 4, "fsdp": 1})) == ""


def hosts_of(monkeypatch, me: int, values: list[str]) -> None:
    """Let this be process `me` of several, whose answers are these."""
    monkeypatch.setattr(store, "num_processes", lambda: len(values))
    monkeypatch.setattr(store, "process_index", lambda: me)
    monkeypatch.setattr(store, "decide", lambda name, value, rule, timeout: rule(values))
    monkeypatch.setattr(store, "describe", lambda numbers: f"process {numbers}")


def test_gradients_are_checked_once_for_each_kind_of_processor(monkeypatch):
    monkeypatch.setattr(start.probe_memory, "check", lambda cfg, processor: ("probed", False))
    monkeypatch.setattr(start, "describe_probe", lambda probe: probe)
    monkeypatch.setattr(start, "cpu_key", lambda: kinds[me])
    kinds = ["amd", "amd", "intel", "intel", "amd"]
    said = []
    for me in range(5):  # noqa: B007 (read by the function above)
        hosts_of(monkeypatch, me, kinds)
        said.append(start.check_gradients(config.Config()))
    by = "gradients are checked by process"
    assert said == ["probed", f"{by} 0", "probed", f"{by} 2", f"{by} 0"]


def test_processes_that_share_cores_are_one_processor(monkeypatch):
    hosts_of(monkeypatch, 0, ["a 0,1", "a 0,1", "b 0,1", "b 2,3"])
    assert start.num_processors() == 3


def test_a_process_whose_copy_of_the_state_differs_is_named(monkeypatch):
    state = {"w": np.arange(4, dtype=np.float32)}
    flipped = {"w": np.array([0, 1, 2, np.nextafter(np.float32(3), 4)], np.float32)}
    seen = []
    monkeypatch.setattr(store, "num_processes", lambda: 3)
    monkeypatch.setattr(store, "decide", lambda name, value, *_: seen.append(value) or [value])
    assert start.compare_copies(7, state) == "" == start.compare_copies(7, flipped)
    hosts_of(monkeypatch, 0, [seen[0], seen[1], seen[0]])
    line = start.compare_copies(7, state)
    assert line.startswith("WARNING: step 7: process [1] of 3 processes hold another copy")
    hosts_of(monkeypatch, 0, [seen[0], seen[1]])
    line = start.compare_copies(7, state)
    assert "2 different copies of the state in 2 processes" in line and "cannot be told" in line


class Slow:
    """A step, also lowered, whose compiler ends when `may_end` is set; it notes what is asked."""

    def __init__(self, error: Exception | None = None):
        self.asked: list[Any] = []
        self.error, self.may_end = error, threading.Event()

    def lower(self, state: Any, batch: Batch) -> Slow:
        self.asked.append(batch.tokens.shape)
        return self

    def as_text(self) -> str:
        return "a program"

    def compile(self) -> str:
        self.asked.append("compile")
        assert self.may_end.wait(60)
        if self.error:
            raise self.error
        return f"for {self.asked[-2]}"


def rows_of(count: int) -> Batch:
    ids = np.zeros((1, count, 16), np.int32)
    return Batch(ids, ids, ids.astype(np.float32))


@pytest.fixture
def ahead_of(monkeypatch):
    """Return a function that has a `Slow` step for 8 rows compiled ahead, as on a CPU."""
    cfg = tiny(Path("none"), "run", train__xla_options={"xla_odd": 1})
    slow: list[Slow] = []

    def begin(error: Exception | None = None) -> tuple[Any, Slow, Any]:
        slow.append(Slow(error))
        mesh = meshes.make_mesh(cfg.mesh)
        return cfg, slow[-1], start.compile_ahead(cfg, slow[-1], None, mesh, 0)

    yield begin
    for each in slow:
        each.may_end.set()  # or the interpreter waits for the thread


def test_a_step_compiles_in_the_background_until_it_is_needed(ahead_of):
    cfg, slow, ahead = ahead_of()
    assert not ahead.compiled.done()
    slow.may_end.set()
    assert start.compile_step(cfg, slow, None, rows_of(8), ahead) == "for (1, 8, 16)"
    assert slow.asked == [(1, 8, 16), "compile"]  # once


def test_another_batch_than_was_foreseen_is_compiled_itself(ahead_of):
    cfg, slow, ahead = ahead_of()
    slow.may_end.set()
    ahead.compiled.result()
    assert start.compile_step(cfg, slow, None, rows_of(4), ahead) == "for (1, 4, 16)"


def test_what_the_compiler_refuses_in_the_background_is_refused_by_its_key(ahead_of):
    cfg, slow, ahead = ahead_of(ValueError("No such compile option: 'xla_odd'"))
    slow.may_end.set()
    with pytest.raises(ConfigError, match="train.xla_options.xla_odd = 1: refused") as refused:
        start.compile_step(cfg, slow, None, rows_of(8), ahead)
    assert refused.value.exit_code == 64


def test_waiting_for_the_compiler_can_be_interrupted(ahead_of):
    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    cfg, slow, ahead = ahead_of()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            start.compile_step(cfg, slow, None, rows_of(8), ahead)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not ahead.compiled.done()


def test_of_several_processes_none_compiles_before_all_have_lowered_the_same(monkeypatch, ahead_of):
    def refuse(name: str, facts: Any, timeout: float) -> None:
        slow.asked.append(sorted(facts()))
        raise DisagreementError("another program")

    hosts_of(monkeypatch, 0, ["a", "b"])
    monkeypatch.setattr(start, "check_agreement", refuse)
    cfg, slow, ahead = ahead_of()
    assert ahead is None and slow.asked == []
    with pytest.raises(DisagreementError):
        start.compile_step(cfg, slow, None, rows_of(8), ahead)
    assert slow.asked == [(1, 8, 16), ["program of the step"]]


def test_a_gpu_has_no_other_work_while_its_compiler_times_kernels(monkeypatch, ahead_of):
    monkeypatch.setattr(start, "platform", lambda mesh: "gpu")
    _, slow, ahead = ahead_of()
    assert ahead is None and slow.asked == []


@pytest.mark.parametrize("micro_batch", [0, 8])
@pytest.mark.parametrize("document_mask", [False, True])
def test_the_step_compiled_ahead_is_that_of_the_batches_that_come(
    monkeypatch, micro_batch, document_mask
):
    cfg = tiny(
        Path("none"),
        "run",
        train__global_batch=16,
        train__micro_batch=micro_batch,
        data__document_mask=document_mask,
        mesh__data=4,
        mesh__fsdp=2,
        model__vocab_size=320,
    )
    mesh = meshes.make_mesh(cfg.mesh)
    specs = parameters.abstract(parameters.specs(cfg.model), "float32")
    tx = optimizer.build(cfg, 20, specs)
    shapes = states.abstract_state(cfg, tx, mesh)
    placed = states.shardings(shapes)
    train_step = step.make_train_step(cfg, tx, mesh, placed)
    texts = []
    monkeypatch.setattr(
        start, "compile_with", lambda lowered, more: texts.append(lowered.as_text())
    )
    start.compile_ahead(cfg, train_step, shapes, mesh, 0).compiled.result()
    micro_rows = micro_batch or 16
    ids = np.zeros((16 // micro_rows, micro_rows, 16), np.int32)
    documents = ids if document_mask else None
    batch = to_global(mesh, Batch(ids, ids, ids.astype(np.float32), documents, documents))
    start.compile_step(cfg, train_step, states.create(cfg, tx, mesh), batch)
    assert texts[0] == texts[1]
