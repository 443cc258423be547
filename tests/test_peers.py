"""Processes that watch each other: whoever is lost, stuck or fails ends all of them, named."""

from __future__ import annotations

import signal
import socket
import time

import pytest
from peers import ends, pretended_run

from jaxgpt.runtime import peers
from jaxgpt.runtime.hosts import HEARTBEAT_TIMEOUT
from jaxgpt.runtime.peers import Times, laggard
from jaxgpt.runtime.stragglers import Speeds

HOST = socket.gethostname()
ENOUGH = 25.0  # seconds for what takes 6.5 on an idle machine: 4 of silence, 2.5 beats


def test_by_default_a_lost_process_ends_all_within_a_minute_and_before_jax_aborts():
    # JAX's client noticed a frozen coordinator 88 s after it was stopped, with its limit of 100.
    assert Times().longest < 60 < 0.85 * HEARTBEAT_TIMEOUT
    assert Times().silent > 10 * Times().beat


def test_the_time_until_a_process_counts_as_lost_is_one_variable():
    assert peers.times({"JAXGPT_PEER_SECONDS": "90"}).silent == 90
    assert peers.times({}).silent == peers.times({"JAXGPT_PEER_SECONDS": "soon"}).silent == 40


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_frozen_process_ends_the_others_which_name_it(number):
    with pretended_run(3) as (first, victim, last):
        victim.send_signal(number)
        for code, line in ends([first, last], within=ENOUGH):
            assert code == 76
            assert f"lost process 1 ({HOST}), last in " in line and "step " in line
            assert line.endswith("exit 76")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_frozen_coordinator_ends_the_others_which_name_it(number):
    with pretended_run(2) as (coordinator, other):
        coordinator.send_signal(number)
        ((code, line),) = ends([other], within=ENOUGH)
    assert code == 76 and f"lost process 0 ({HOST}), last in " in line and "step " in line


def test_a_process_frozen_for_less_is_not_lost_and_blames_nobody_afterwards():
    with pretended_run(2) as children:
        for child in children:
            child.send_signal(signal.SIGSTOP)
            time.sleep(1.5)
            child.send_signal(signal.SIGCONT)
            time.sleep(0.5)
        children[0].send_signal(signal.SIGTERM)
        assert [code for code, _ in ends(children, within=ENOUGH)] == [0, 0]


def test_a_phase_over_its_limit_ends_all_processes_with_its_name():
    with pretended_run(2, "data") as children:
        for code, line in ends(children, within=ENOUGH):
            assert code == 76
            assert f"process 1 ({HOST}), step 20: phase data has taken" in line


def test_a_process_that_waits_too_long_names_the_one_that_is_behind():
    with pretended_run(2, "short") as children:
        for code, line in ends(children, within=ENOUGH):
            assert code == 76
            assert "phase wait has taken" in line
            assert f"furthest behind: process 1 ({HOST}), last in phase data of step 20" in line


def test_a_process_that_keeps_the_interpreter_lock_ends_the_others():
    with pretended_run(2, "lock") as children:
        ((code, line),) = ends(children[:1], within=ENOUGH)
    assert code == 76 and f"lost process 1 ({HOST}), last in phase data of step 20" in line


def test_an_error_of_one_process_ends_all_with_its_code_and_its_words():
    with pretended_run(2, "error") as children:
        (first, said), (second, own) = ends(children, within=ENOUGH)
    assert (first, second) == (74, 74)
    assert f"process 1 ({HOST}) failed in phase save of step 20: disk full" in said
    assert own == "jaxgpt: disk full"


def test_the_host_that_ended_a_run_is_left_for_whoever_starts_it_again(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXGPT_BLAME", str(tmp_path / "blame"))
    with pretended_run(2, "error") as children:
        ends(children, within=ENOUGH)
    assert (tmp_path / "blame").read_text() == f"{HOST}\n"


def test_at_the_end_processes_wait_for_those_that_still_clean_up():
    with pretended_run(2, "linger") as children:
        assert [code for code, _ in ends(children, within=ENOUGH + 8)] == [0, 0]


def test_a_slow_host_is_reported_while_the_run_goes_on():
    with pretended_run(2, "slow") as children:
        said = [child.communicate(timeout=60)[1] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    (line,) = said[0].splitlines()
    assert line.startswith(f"WARNING: process 1 ({HOST}) is slow: data takes 0.2")
    assert "WARNING" not in said[1]


def beat(step: int, phase: str = "wait", seconds: float = 1.0, **spent: float) -> dict:
    clock = spent.pop("clock", 0.0)
    return {
        "host": "h", "step": step, "phase": phase, "seconds": seconds, "clock": clock,
        "spent": spent,
    }  # fmt: skip


def run_of(windows: int, slow: dict[str, float], **extra: float) -> list[str]:
    """Return what is said of three processes, of which the third has `slow` seconds a step."""
    speeds, lines = Speeds(3), []
    for number in range(windows + 1):
        steps = 10 * number
        normal = {"data": 0.1, "wait": 0.8}
        spent = [normal, normal, {"data": 0.1, "wait": 0.4} | slow]
        beats = {
            str(i): beat(
                steps,
                clock=1.0 * steps + number * sum(extra.values()),
                **{k: v * steps for k, v in each.items()},
                **{k: v * number for k, v in extra.items()},
            )
            for i, each in enumerate(spent)
        }
        lines += speeds.slow(beats)
    return lines


def test_a_slow_phase_is_reported_once_after_20_steps_with_host_phase_and_ratio():
    assert run_of(1, {"data": 0.5}) == []
    (line,) = run_of(6, {"data": 0.5})
    assert "process 2 (h) is slow: data takes 0.5 s a step, 5.0 times as long" in line


def test_time_in_no_phase_is_the_hosts_own():
    # 1 s a step of which 0.1 + 0.4 are in phases; the others leave 0.1 s.
    (line,) = run_of(3, {})
    assert "is slow: host takes 0.5 s a step, 5.0 times" in line


def test_compiling_evaluating_and_saving_alarm_nobody():
    busy = {"data": 0.1, "wait": 0.8}
    assert run_of(6, busy, compile=60.0, eval=30.0, save=20.0) == []


def test_a_little_more_of_little_alarms_nobody():
    assert run_of(6, {"data": 0.15, "wait": 0.75}) == []  # half as long again
    assert run_of(6, {"data": 0.1, "wait": 0.71}) == []  # 0.19 for 0.1, but 9 % of a step


def test_the_laggard_is_in_the_lowest_step_and_does_not_wait():
    assert laggard({"0": beat(7), "1": beat(6), "2": beat(7)}) == "1"
    assert laggard({"0": beat(7), "1": beat(7, "data"), "2": beat(7, "save", 9.0)}) == "2"
    assert laggard({"0": beat(7), "1": beat(7, "step")}) is None
    assert laggard({}) is None
