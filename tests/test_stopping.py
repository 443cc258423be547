"""One signal, all hosts: they stop and save at the same step."""

from __future__ import annotations

import json
import os
import signal
import socket
import time

from peers import ends, pretended_run

from jaxgpt.runtime.signals import Stop
from jaxgpt.runtime.stopping import SharedStop
from jaxgpt.runtime.watchdog import Watchdog

HOST = socket.gethostname()


def outcomes(children) -> list[dict]:
    found = []
    for child in children:
        out, err = child.communicate(timeout=60)
        assert child.returncode == 0, err
        found.append(json.loads(out.splitlines()[-1]))
    return found


def test_a_signal_to_one_of_three_stops_all_after_the_same_step():
    with pretended_run(3) as children:
        children[1].send_signal(signal.SIGTERM)
        found = outcomes(children)
    assert found[0]["step"] >= 10 and found[1:] == found[:1] * 2
    assert found[0]["reason"] == f"SIGTERM to process 1 ({HOST})"


def test_signals_to_all_at_once_are_one():
    with pretended_run(2) as children:
        for child in children:
            child.send_signal(signal.SIGINT)
        first, second = outcomes(children)
    assert first == second and first["step"] >= 10


def test_sigusr1_to_one_saves_on_all_after_the_same_step_and_the_run_goes_on():
    with pretended_run(2) as children:
        for child in children:
            child.send_signal(signal.SIGUSR1)
            time.sleep(2.0)
        children[0].send_signal(signal.SIGTERM)
        first, second = outcomes(children)
    assert first == second and len(first["saved"]) == 2
    assert 10 <= first["saved"][0] < first["saved"][1] < first["step"]


def test_a_signal_before_the_first_step_stops_all_before_it():
    with pretended_run(2, "late") as children:
        children[0].send_signal(signal.SIGTERM)
        found = outcomes(children)
    assert [each["step"] for each in found] == [0, 0]


def test_ctrl_c_twice_ends_a_process_at_once_and_the_others_soon():
    with pretended_run(2) as children:
        children[1].send_signal(signal.SIGSTOP)  # so that the first waits for it
        children[0].send_signal(signal.SIGINT)
        time.sleep(1.0)
        began = time.monotonic()
        children[0].send_signal(signal.SIGINT)
        assert children[0].wait(timeout=20) == 130
        assert time.monotonic() - began < 2.0
        children[1].send_signal(signal.SIGCONT)
        ((code, line),) = ends(children[1:], within=25.0)
    assert code == 76 and f"lost process 0 ({HOST})" in line


def test_alone_a_process_stops_and_saves_as_its_own_signals_say():
    with Stop(notify=lambda text: None) as signals, SharedStop(signals, Watchdog()) as stop:
        assert not stop.reached(3) and not stop.save_due(3) and stop.reason == ""
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.save_due(4) and not stop.save_due(4) and not stop.reached(4)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.reached(4) and stop.reason == "SIGTERM"
