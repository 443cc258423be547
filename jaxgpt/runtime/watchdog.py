"""The watchdog: a phase that takes far longer than it can is ended, with the stacks of all threads.

It also knows what this process does and since when, which `peers` tells the others. Durations come
from a monotonic clock, without the time for which the process itself was suspended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, NoReturn

from jaxgpt.errors import HangError
from jaxgpt.runtime.leaving import cursor, error_line, say

# Seconds that a phase may take before the run counts as stuck: about ten times what the slowest
# healthy case needs (a 70B compile, a checkpoint to slow storage, a long evaluation). To open data
# may mean to pack it first: 2.5 h for 15 T tokens on one core. `step` is what a host does for one,
# `wait` is for its result, and `stop` for hosts that still compile when one is asked to stop.
LIMITS = {
    "open": 86400.0,
    "compile": 7200.0,
    "data": 900.0,
    "step": 1800.0,
    "wait": 1800.0,
    "save": 3600.0,
    "eval": 14400.0,
    "stop": 14400.0,
}
# Phases that repeat so evenly that a stuck one is known early: when it takes 20 times as long as
# the longest of at least 20 before it, and two minutes.
EVEN = ("step", "wait")
TIMES, ENOUGH, AT_LEAST = 20.0, 20, 120.0
SUSPENDED = 5.0  # seconds that a thread does not run although it is due


class Phase(NamedTuple):
    """What is being done, for how long it may be (seconds), and since when (monotonic)."""

    name: str
    limit: float
    began: float
    deadline: float
    suspended: float  # for how long the process had been suspended before
    spare: float  # by how much `limit` was made shorter by what was learned
    detail: Callable[[], str] | None  # tells more when the phase is stuck


class Mark(NamedTuple):
    """What was done until a step began: seconds of the process, and of those in each phase."""

    step: int
    clock: float
    spent: dict[str, float]


class Watchdog:
    """Ends a stuck process: stacks of all threads and one line on stderr, then exit 76.

    `with Watchdog() as dog:` and, on one thread, `with dog.phase("step"):` around what may hang.
    An inner phase suspends the clock of the outer one. If the interpreter lock itself is never
    released, so that no Python thread can run, faulthandler's C thread prints the stacks and ends
    the process `lock_margin` seconds later, with exit code 1. `explain`, where it is set, returns
    the last line to say instead of the given one.
    """

    def __init__(
        self,
        limits: Mapping[str, float] = LIMITS,
        tick: float = 0.5,
        lock_margin: float = 60.0,
    ):
        self.limits = dict(limits)
        self.explain: Callable[[str], str] | None = None
        self.mark = Mark(0, time.monotonic(), {})
        self.failed_in = ""  # the innermost phase that an exception left
        self._tick = tick
        self._lock_margin = lock_margin
        self._phases: list[Phase] = []
        self._spent: dict[str, float] = {}
        self._even: dict[str, tuple[int, float]] = {}  # how often, and the longest
        self._suspended = 0.0
        self._done = threading.Event()

    def __enter__(self) -> Watchdog:
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()  # it disarms faulthandler on its way out

    def begin(self, step: int) -> None:
        """Note that the update numbered `step` (from 1) begins."""
        self.mark = Mark(step, time.monotonic(), dict(self._spent))

    def current(self) -> tuple[str, float]:
        """Return the phase that this process is in ("" for none), and for how many seconds."""
        phases = self._phases
        return (phases[-1].name, time.monotonic() - phases[-1].began) if phases else ("", 0.0)

    @contextlib.contextmanager
    def phase(
        self,
        name: str,
        limit: float | None = None,
        detail: Callable[[], str] | None = None,
    ) -> Iterator[None]:
        """Watch the enclosed work; `limit` in seconds, by default that of `limits[name]`.

        `detail` is asked what was waited for when the work is found stuck.
        """
        seconds = self._limit(name) if limit is None else limit
        spare = self.limits[name] - seconds if limit is None else 0.0
        began, inner = time.monotonic(), sum(self._spent.values())
        phase = Phase(name, seconds, began, began + seconds, self._suspended, spare, detail)
        outer = self._phases
        self._phases = [*outer, phase]
        try:
            yield
        except BaseException:
            self.failed_in = self.failed_in or name
            raise
        finally:
            spent = time.monotonic() - began
            # A new list each time: the thread always sees a whole one, without a lock.
            self._phases = [phase._replace(deadline=phase.deadline + spent) for phase in outer]
            own = spent - (sum(self._spent.values()) - inner)
            self._spent[name] = self._spent.get(name, 0.0) + own
            self._learn(name, own)

    def _limit(self, name: str) -> float:
        count, longest = self._even.get(name, (0, 0.0))
        if count < ENOUGH:
            return self.limits[name]
        return min(self.limits[name], max(AT_LEAST, TIMES * longest))

    def _learn(self, name: str, seconds: float) -> None:
        if name == "compile":  # what follows is another program
            self._even.clear()
        elif name in EVEN:
            count, longest = self._even.get(name, (0, 0.0))
            self._even[name] = (count + 1, max(longest, seconds))

    def _watch(self) -> None:
        armed: object = None
        before = time.monotonic()
        while not self._done.wait(self._tick):
            phases, now = self._phases, time.monotonic()
            if now - before > self._tick + SUSPENDED:  # stopped by a terminal, a paused machine
                self._suspended += now - before - self._tick
            before = now
            if phases and now > phases[-1].deadline + self._suspended - phases[-1].suspended:
                self._end(phases[-1], now)
            if phases is not armed:  # at most once a tick: it costs 0.2 ms
                armed = phases
                faulthandler.cancel_dump_traceback_later()
                if phases:
                    # Without what was learned: this timer also runs in a suspended process.
                    left = phases[-1].deadline - now + phases[-1].spare + self._lock_margin
                    faulthandler.dump_traceback_later(left, exit=True, file=2)
        faulthandler.cancel_dump_traceback_later()

    def _end(self, phase: Phase, now: float) -> NoReturn:
        name = f"{phase.name} ({phase.detail()})" if phase.detail else phase.name
        text = (
            f"phase {name} has taken {now - phase.began:.1f} s, limit {phase.limit:g} s: stuck; "
            "stacks of all threads above"
        )
        say(f"{cursor()}{_stacks()}", seconds=5.0)
        if self.explain:
            text = self.explain(text)
        say(error_line(f"{text}; exit {HangError.exit_code}\n"), seconds=5.0)
        os._exit(HangError.exit_code)


def _stacks() -> str:
    """Return the Python stacks of all threads; by way of a file, as faulthandler wants one."""
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            return file.read().decode(errors="replace")
    except OSError as error:
        return f"(no stacks: {error})\n"
