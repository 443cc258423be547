"""Processes that were started differently all stop, told what differs and whose it is."""

from __future__ import annotations

import functools
import json
import socket

import jax
import jax.numpy as jnp
import pytest
from peers import group

from jaxgpt import config
from jaxgpt.parallel import agreement
from jaxgpt.parallel.agreement import differences, facts_of_start, program_digest
from jaxgpt.runtime import store

HOST = socket.gethostname()


def said(*facts: dict[str, str]) -> list[str]:
    return differences([{"host": f"h{i}", "facts": each} for i, each in enumerate(facts)])


def test_a_difference_is_one_line_with_the_key_the_hosts_and_both_values():
    (line,) = said({"x": "1", "optim.lr": "0.1"}, {"x": "1", "optim.lr": "0.2"})
    assert line.startswith("optim.lr: process 1 (h1) has 0.2, process 0 (h0) has 0.1; ")


def test_of_several_processes_that_differ_the_first_is_shown_and_the_others_are_counted():
    (line,) = said({"x": "1"}, {"x": "1"}, {"x": "2"}, {"x": "3"})
    assert "x: process 2 (h2) has 2, process 0 (h0) has 1 (1 more differ)" in line


def test_the_odd_one_is_named_first_also_where_it_is_process_0():
    (line,) = said({"x": "1"}, {"x": "2"}, {"x": "2"})
    assert line.startswith("x: process 0 (h0) has 1, process 1 (h1) has 2; start all with")


def test_of_a_device_that_is_missing_on_a_host_it_is_not_the_command_that_is_said():
    facts = agreement.facts_of_devices()
    ((key, kinds),) = facts.items()
    assert kinds == f"{jax.local_device_count()} x {jax.devices()[0].device_kind}"
    (line,) = said({key: "7 x H100"}, {key: "8 x H100"}, {key: "8 x H100"})
    assert "process 0 (h0) has 7 x H100, process 1 (h1) has 8 x H100; look for a device" in line


def test_a_key_that_one_lacks_differs():
    first, second = said({"a": "1"}, {"b": "2"})
    assert "a: process 1 (h1) has none, process 0 (h0) has 1" in first
    assert "b: process 1 (h1) has 2, process 0 (h0) has none" in second


def test_at_most_eight_lines_are_said_and_the_rest_is_counted():
    assert len(said({f"k{i}": "0" for i in range(8)}, {})) == 8
    lines = said({f"k{i}": "0" for i in range(20)}, {})
    assert len(lines) == 8 and lines[-1] == "13 more keys differ"


def test_digests_are_shown_by_their_first_12_characters():
    (line,) = said({"x": "a" * 64}, {"x": ", ".join(["b" * 64, "c" * 64])})
    assert f"has {'b' * 12}, {'c' * 12}, process 0 (h0) has {'a' * 12};" in line


def test_every_value_of_the_configuration_is_compared_but_paths_of_a_host(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    cfg = config.load(None, ["data.store=/here", "optim.lr=0.5", "run.seed=7"])
    facts = facts_of_start(cfg)
    assert facts["optim.lr"] == 0.5 and facts["run.seed"] == 7 and "data.store" not in facts
    other = facts_of_start(config.load(None, ["data.store=/there", "optim.lr=0.6", "run.seed=7"]))
    assert [key for key in facts if facts[key] != other[key]] == ["optim.lr"]
    versions = {"jaxgpt", "source of jaxgpt", "Python", "version of jax", "version of jaxlib"}
    assert versions <= facts.keys() and facts["version of jax"] == jax.__version__


def test_flags_in_the_environment_are_compared_one_by_one(monkeypatch):
    flags = []
    for value in ("--xla_a=1 --xla_b", "--xla_a=2 --xla_b"):
        monkeypatch.setenv("XLA_FLAGS", value)
        flags.append({k: v for k, v in facts_of_start(config.Config()).items() if "XLA" in k})
    assert flags[0] == {"XLA_FLAGS --xla_a": "1", "XLA_FLAGS --xla_b": "set"}
    assert flags[1] == flags[0] | {"XLA_FLAGS --xla_a": "2"}


def test_other_programs_have_other_digests_and_the_same_one_has_the_same():
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)

    def digest(scale: float) -> str:
        return program_digest(jax.jit(lambda x: x * scale).lower(shape))

    assert digest(2.0) == digest(2.0) != digest(3.0)


def test_one_process_compares_nothing(monkeypatch):
    monkeypatch.setattr(store, "decide", lambda *_: pytest.fail("asked the store"))
    agreement.check_agreement("start", lambda: {"x": 1}, 1.0)


DISAGREE = """
import json, sys, time
import jax
from jaxgpt.errors import DisagreementError
from jaxgpt.parallel.agreement import check_agreement
from jaxgpt.runtime import store

port, process = sys.argv[1], int(sys.argv[2])
jax.distributed.initialize(f"localhost:{port}", 2, process)
store.meet()
check_agreement("data", lambda: {"data.store": ["a" * 64, "b" * 64], "eval.store": []}, 60)
said = []
for facts in (
    {"data.store": ["a" * 64, "bc"[process] * 64], "steps": 5},
    {"data.store": ["a" * 64, "b" * 64][: 1 + process]},
    {"data.store": ["a" * 64], "steps": 5 + process},
    {"data.store": ["a" * 64]} if process == 0 else {"data.store": ["a" * 64], "eval.store": ["d"]},
):
    try:
        check_agreement("data", lambda: facts, 60)
        said.append(None)
    except DisagreementError as error:
        said.append(str(error))
if process:
    time.sleep(2)  # too late
began = time.monotonic()
try:
    check_agreement("late", lambda: {"x": 1}, 1.0)
except DisagreementError as error:
    said.append(str(error))
print(json.dumps([said, time.monotonic() - began]), flush=True)
"""


@functools.cache
def disagreeing() -> list:
    with group(2, lambda port, process: ["-c", DISAGREE, str(port), str(process)]) as running:
        outputs = [child.communicate(timeout=120) for child in running]
    assert [child.returncode for child in running] == [0, 0], outputs
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


def test_processes_that_differ_are_all_told_the_same():
    (one, _), (other, _) = disagreeing()
    a, b, c = (letter * 12 for letter in "abc")
    assert one == other
    second, first = f"process 1 ({HOST}) has", f"process 0 ({HOST}) has"
    assert [line.partition(";")[0] for line in one[:4]] == [
        f"data.store: {second} {a}, {c}, {first} {a}, {b}",
        f"data.store: {second} {a}, {b}, {first} {a}",
        f"steps: {second} 6, {first} 5",
        f"eval.store: {second} d, {first} none",
    ]
    assert all("\n" not in line for line in one)


def test_a_process_that_is_missing_is_named_in_time():
    (one, waited), (other, _) = disagreeing()
    assert one[4] == other[4]
    assert f"nothing from process 1 ({HOST}) after 1 s" in one[4]
    assert waited < 5.0
