"""What is settled and said before the first step: how many there are, and in which formats."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from runs import tiny

from jaxgpt import config, start
from jaxgpt.errors import ConfigError
from jaxgpt.runtime import store
from jaxgpt.start import describe_devices, describe_dtypes, last_step


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
