"""Timing: what repeated seconds say, turns, and the age of a process."""

from __future__ import annotations

import time

import pytest
from programs import outcome, python

from jaxgpt.bench import timing


def test_rates_are_the_amount_over_the_median_and_the_least_seconds():
    found = timing.rates(30, [5.0, 1.0, 3.0, 2.0, 4.0])
    assert found["tokens_per_sec_median"] == 10.0
    assert found["tokens_per_sec_best"] == 30.0
    assert found["seconds_median"] == 3.0
    assert found["repeats"] == 5


def test_the_spread_is_half_the_range_between_the_quartiles_over_the_median():
    assert timing.rates(1, [5.0, 1.0, 3.0, 2.0, 4.0])["spread"] == 0.3333  # (4 - 2) / 2 / 3


def test_rates_are_named_after_the_unit():
    assert timing.rates(8, [2.0], "bytes")["bytes_per_sec_median"] == 4.0


def test_calls_take_turns():
    order = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    timing.in_turns(calls, times=2, warm_up=0)
    assert order == ["a", "b", "a", "b"]


def test_calls_to_warm_up_are_made_but_not_timed():
    waits = iter([0.2, 0.0, 0.0])
    seconds = timing.repeat(lambda: time.sleep(next(waits)), times=2, warm_up=1)
    assert len(seconds) == 2
    assert max(seconds) < 0.2


def test_a_time_is_that_of_the_call():
    (seconds,) = timing.repeat(lambda: time.sleep(0.05), times=1, warm_up=0)
    assert seconds >= 0.05


def test_the_time_since_the_start_counts_from_before_the_imports():
    began = time.monotonic()
    code = "import time; time.sleep(0.3)\nfrom jaxgpt.bench import timing\n"
    code += "print(timing.since_start())"
    status, out, err = outcome(python(code))
    assert status == 0, err
    # The kernel counts in ticks of 10 ms.
    assert 0.29 <= float(out) <= time.monotonic() - began + 0.02


def test_where_the_start_of_the_process_is_not_known_it_is_none(monkeypatch):
    monkeypatch.setattr(timing, "PROC_START", 10_000)
    assert timing.since_start() is None


@pytest.mark.parametrize("seconds", [[2.0], [2.0, 2.0]])
def test_equal_times_have_no_spread(seconds):
    assert timing.rates(4, seconds)["spread"] == 0.0
