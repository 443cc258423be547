"""A signal to one host stops all hosts, or saves on all, at the same step.

The request goes through the store and is seen by a thread of every process. The thread holds its
main loop before the next step and tells which step was the last to begin; the largest of these is
the last of the run. Nobody has begun a later one, and all steps up to it are still begun by all, so
no process waits for a step that another does not take. Without a request a step costs a lock.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

from jaxgpt.errors import HangError, one_line
from jaxgpt.runtime import leaving, store
from jaxgpt.runtime.signals import Stop
from jaxgpt.runtime.watchdog import LIMITS, Watchdog

POLL = 0.5  # seconds between two looks at the store


class SharedStop:
    """What signals to any process ask of all of them, inside `with SharedStop(...) as stop:`.

    `reason` is why all stop ("" as long as they do not). The loop asks `reached` before it begins a
    step, and `save_due` after one. With one process these are the wishes of `signals`.
    """

    def __init__(
        self,
        signals: Stop,
        dog: Watchdog,
        say: Callable[[str], None] = lambda line: leaving.say(f"{line}\n"),
    ):
        self._signals, self._dog, self._say = signals, dog, say
        self._together = False
        self._reason = ""
        self._begun: int | None = None  # newest step begun here; None before the loop
        self._settling = False  # a request is being settled: no new step begins
        self._last: int | None = None  # the step to stop after
        self._final: int | None = None  # the last step of the run, once it is done
        self._save_at: set[int] = set()
        self._failure = ""
        self._changed = threading.Condition()
        self._done = threading.Event()

    def __enter__(self) -> SharedStop:
        self._together = store.num_processes() > 1
        if self._together:
            self._thread = threading.Thread(target=self._listen, daemon=True, name="stopping")
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        if self._together:
            self._thread.join(2 * POLL)

    @property
    def reason(self) -> str:
        return self._reason if self._together else self._signals.reason

    def reached(self, done: int, more: bool = True) -> bool:
        """Return whether to stop after `done` steps; if not, the next one counts as begun.

        Without `more` there is none: what counts as one is the work after the last step.
        """
        if not self._together:
            return bool(self._signals.reason)
        with self._changed:
            self._begun = done
            self._final = None if more else done
            self._changed.notify_all()
            if self._settling:
                with self._dog.phase("stop"):
                    while self._settling:
                        self._changed.wait(1.0)
            if self._failure:
                raise HangError(self._failure)
            if self._last is not None and done >= self._last:
                return True
            self._begun = done + 1
            return False

    def save_due(self, done: int) -> bool:
        """Return whether to save after `done` steps because a signal asked for it."""
        if not self._together:
            due, self._signals.save_now = self._signals.save_now, False
            return due
        with self._changed:
            return done in self._save_at

    def ask_to_save(self) -> None:
        """Ask for a save at the next step that all can agree on, as SIGUSR1 does."""
        self._signals.save_now = True

    def _listen(self) -> None:
        try:
            self._serve()
        except Exception as error:  # nobody is above a thread: `reached` raises it
            self._failure = f"stopping together: {type(error).__name__}: {one_line(error)}"

    def _serve(self) -> None:
        number = 0
        while not self._done.wait(POLL):
            with contextlib.suppress(ConnectionError):  # then `peers` ends the process
                requests = store.read("requests")
                if str(number) not in requests and (mine := self._wish()):
                    store.put(f"requests/{number}", mine, replace=False)
                    requests = store.read("requests")
                if request := requests.get(str(number)):
                    self._settle(number, request)
                    number += 1

    def _wish(self) -> dict[str, str]:
        """Return what a signal to this process asks for and was not asked yet."""
        where = f"process {store.process_index()} ({socket.gethostname()})"
        if self._signals.reason and not self._reason:
            return {"stop": f"{self._signals.reason} to {where}"}
        return {"save": f"a save is asked for by {where}"} if self._signals.save_now else {}

    def _settle(self, number: int, request: dict[str, Any]) -> None:
        with self._changed:
            self._settling = True
            while self._begun is None and not self._done.is_set():
                self._changed.wait(POLL)
            begun = self._begun
        try:
            if begun is None:  # the run ended before its first step
                return
            newest = store.decide(f"begun/{number}", begun, max, LIMITS["stop"])
            if "stop" in request:
                self._last, self._reason = newest, request["stop"]
                at_end = self._final is not None and newest > self._final
                end = "all are at the end of the run" if at_end else f"all stop after step {newest}"
                self._say(f"{self._reason}: {end}")
            else:  # some have passed the end of the newest begun step
                self._save_at.add(newest + 1)
                self._signals.save_now = False
                self._say(f"{request['save']}: all save after step {newest + 1}")
        except (TimeoutError, ConnectionError) as error:
            self._failure = f"stopping together: {error}"
        finally:
            with self._changed:
                self._settling = False
                self._changed.notify_all()
