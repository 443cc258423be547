"""Fault points: nothing without the variable, and exactly what it says with it."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time

import pytest

from jaxgpt.checkpoint import faults
from jaxgpt.checkpoint.faults import fault


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAXGPT_FAULT", raising=False)
    monkeypatch.setattr(faults, "_reached", {})


def outcomes(point: str, times: int) -> list[bool]:
    """Whether the point failed, each time that it was reached."""
    failed = []
    for _ in range(times):
        try:
            fault(point)
            failed.append(False)
        except RuntimeError:
            failed.append(True)
    return failed


@pytest.mark.parametrize(
    ("setting", "failed"),
    [
        (None, [False, False, False]),
        ("there:1:raise", [False, False, False]),
        ("here:1:raise", [True, False, False]),
        ("here:3:raise", [False, False, True]),
        ("here:2+:raise", [False, True, True]),
    ],
)
def test_a_point_acts_at_its_occurrence_only(monkeypatch, setting, failed):
    if setting:
        monkeypatch.setenv("JAXGPT_FAULT", setting)
    assert outcomes("here", 3) == failed


def test_a_full_disk_looks_like_one(monkeypatch):
    monkeypatch.setenv("JAXGPT_FAULT", "here:1:enospc")
    with pytest.raises(OSError) as failure:
        fault("here")
    assert failure.value.errno == errno.ENOSPC


def test_a_pause_ends_when_a_signal_has_been_handled(monkeypatch):
    monkeypatch.setenv("JAXGPT_FAULT", "here:1:pause")
    handled: list[int] = []
    previous = signal.signal(signal.SIGUSR1, lambda number, frame: handled.append(number))
    began = time.monotonic()
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    fault("here")
    signal.signal(signal.SIGUSR1, previous)
    assert handled == [signal.SIGUSR1] and 0.1 < time.monotonic() - began < 30
