"""Seconds of what is repeated, and what is said of them: the median, the best and the spread."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

Name = TypeVar("Name", bound=Hashable)
PROC_START = 19  # of the fields of /proc/self/stat after the command's name: its start, in ticks


def repeat(call: Callable[[], Any], times: int, warm_up: int = 1) -> list[float]:
    """Return the seconds of `times` calls, each of which ends when its result is there."""
    return in_turns({"": call}, times, warm_up)[""]


def in_turns(
    calls: Mapping[Name, Callable[[], Any]], times: int, warm_up: int = 1
) -> dict[Name, list[float]]:
    """Return the seconds of `times` calls of each, one of each per turn.

    A slow spell of the machine then meets all of them. A call ends when its result is there.
    """
    seconds: dict[Name, list[float]] = {name: [] for name in calls}
    for _ in range(warm_up + times):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - began)
    return {name: taken[warm_up:] for name, taken in seconds.items()}


def rates(amount: float, seconds: Sequence[float], unit: str = "tokens") -> dict[str, float]:
    """Return `amount` per second at the median and the best of `seconds`, and their spread.

    The spread is half the range between the quartiles, as a share of the median.
    """
    ordered = sorted(seconds)
    median = statistics.median(ordered)
    spread = 0.0
    if len(ordered) > 1:
        low, _, high = statistics.quantiles(ordered, n=4, method="inclusive")
        spread = (high - low) / 2 / median
    return {
        f"{unit}_per_sec_median": round(amount / median, 1),
        f"{unit}_per_sec_best": round(amount / ordered[0], 1),
        "seconds_median": median,
        "spread": round(spread, 4),
        "repeats": len(ordered),
    }


def since_start() -> float | None:
    """Return the seconds since this process was started, its imports included; None: unknown.

    A command that is executed once more, as for huge pages, is the same process.
    """
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[PROC_START]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks
    except (OSError, AttributeError, ValueError, IndexError):
        return None
