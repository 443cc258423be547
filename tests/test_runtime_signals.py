"""Signals of a run, sent to this process and to processes of their own."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from programs import STUCK_IN_C, outcome, python

from jaxgpt.runtime.signals import Stop


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_asks_for_a_stop_by_name_and_the_old_handler_comes_back(number):
    outside = signal.signal(number, signal.default_int_handler)  # nohup ignores SIGHUP
    before = signal.getsignal(number)
    said: list[str] = []
    with Stop(notify=said.append) as stop:
        assert stop.reason == ""
        os.kill(os.getpid(), number)
        assert stop.reason == number.name
        assert not stop.save_now
        deadline = time.monotonic() + 5
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
    assert signal.getsignal(number) is before
    signal.signal(number, outside)
    assert len(said) == 1 and said[0].startswith(number.name)


def test_the_first_signal_gives_the_reason():
    with Stop(notify=lambda text: None) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.reason == "SIGTERM"


def test_sigusr1_asks_for_a_save_and_not_for_a_stop():
    with Stop(notify=lambda text: pytest.fail(text)) as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.save_now
        assert stop.reason == ""


def test_a_signal_ignored_on_entry_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.reason == ""
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_the_main_thread_signals_are_left_alone():
    before, during = signal.getsignal(signal.SIGTERM), []

    def enter():
        with Stop():
            during.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert during == [before]


def test_ctrl_c_twice_ends_a_process_stuck_in_c_within_two_seconds():
    code = f"""{STUCK_IN_C}
from jaxgpt.runtime.signals import Stop
with Stop(): stuck_in_c(ctypes.CDLL(None))
"""
    process = python(code)
    assert process.stdout.readline() == "stuck\n"
    process.send_signal(signal.SIGINT)
    assert "SIGINT: finishing the step" in process.stderr.readline()
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert outcome(process)[0] == 130
    assert time.monotonic() - began < 2.0


def test_ctrl_c_twice_ends_a_process_whose_output_nobody_reads():
    code = """
import os, time
from jaxgpt.runtime.signals import Stop
with Stop():
    os.set_blocking(2, False)
    try:
        while True: os.write(2, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(2, True)
    print("full", flush=True)
    while True: time.sleep(1)
"""
    process = python(code)
    assert process.stdout.readline() == "full\n"
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)  # two signals at once would be one
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == 130
    process.communicate()
