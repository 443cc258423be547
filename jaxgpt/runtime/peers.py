"""The watch of the processes of a run over each other: none waits for one that will not come.

Every process leaves a beat in the store: a count, its phase, the step, and since when. Process 0
looks at the beats of all, the others at that of process 0, each by its own monotonic clock; clocks
of hosts are never compared. Whoever finds a process lost, stuck or failed writes that down as the
verdict, which is the first and only one, and by which all processes end with one code and line.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from jaxgpt.errors import DisagreementError, HangError, Interrupted, one_line
from jaxgpt.runtime import leaving, store
from jaxgpt.runtime.stragglers import Speeds
from jaxgpt.runtime.watchdog import Watchdog

SILENT = 40.0  # seconds without a beat after which a process is lost; JAXGPT_PEER_SECONDS
BEATS = 20  # beats in this time
GOODBYE = 600.0  # seconds that a process which is done waits for those that still clean up
# What a runtime error begins with that is no consequence of a process that was lost.
OWN_FAULT = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED", "NOT_FOUND")


@dataclass(frozen=True)
class Times:
    """The times of the watch in seconds, all from the one that can be chosen."""

    silent: float = SILENT

    @property
    def beat(self) -> float:
        return self.silent / BEATS

    @property
    def longest(self) -> float:
        """From the loss of a process until the last of the others has ended.

        Its last beat is seen after at most two (of the writer and of the reader), the silence is
        noticed within a quarter of one, and process 0, which holds the store, leaves two after it
        wrote the verdict, for which it may take two.
        """
        return self.silent + 6.25 * self.beat


def times(environ: Mapping[str, str]) -> Times:
    """Return the times of the watch; a variable that is no number of seconds counts as unset."""
    with contextlib.suppress(KeyError, ValueError):
        return Times(max(1.0, float(environ["JAXGPT_PEER_SECONDS"])))
    return Times()


class Peers:
    """Watches the other processes, and tells them of this one, inside `with Peers(dog) as peers:`.

    `dog` knows the phase and the step. `say` is told of hosts that are slow. With one process
    nothing happens. Ends the process with the code of the verdict; its exit waits until all
    processes are there, so that none takes the store away from another.
    """

    def __init__(
        self,
        dog: Watchdog,
        say: Callable[[str], None] = lambda line: leaving.say(f"{line}\n"),
        timing: Times | None = None,
    ):
        self._dog, self._say = dog, say
        self._times = timing or times(os.environ)
        self._me = 0
        self._board: dict[str, Any] = {}  # what process 0 tells: beat, verdict, all_done
        self._beats: dict[str, dict[str, Any]] = {}  # the newest of each process; 0 only
        self._seen: dict[str, tuple[int, float]] = {}  # newest count of a process, and when
        self._answered = time.monotonic()  # when the store last did
        self._failed = False  # this process, which ends by itself
        self._leaving = False
        self._wake, self._done = threading.Event(), threading.Event()

    def __enter__(self) -> Peers:
        try:
            store.meet()
        except ConnectionError as error:
            raise HangError(f"process 0 cannot be reached: {one_line(error)}") from None
        self.num_processes, self._me = store.num_processes(), store.process_index()
        if self.num_processes > 1:
            delay_abort()
            self._dog.explain = self._explain
            for name, work in (("beats", self._talk), ("peers", self._judge)):
                thread = threading.Thread(target=self._guarded, args=(work,), name=name)
                thread.daemon = True
                thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.num_processes == 1:
            return
        self._dog.explain = None
        if error is not None:
            self._report(error)
        if self._failed:
            store.leave()
            if self._me == 0:  # the store ends with it: let the others read first
                time.sleep(2 * self._times.beat)
        else:
            self._leaving = True
            self._wake.set()
            deadline = time.monotonic() + GOODBYE
            while "all_done" not in self._board and time.monotonic() < deadline:
                time.sleep(self._times.beat / 20)
        self._done.set()
        self._wake.set()

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the others at once when the enclosed work raises, before anything is cleaned up."""
        try:
            yield
        except BaseException as error:
            if self.num_processes > 1:
                self._report(error)
            raise

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # a run that nobody watches may wait for ever
            text = f"the watch over the other processes failed: {type(error).__name__}: "
            self._leave({"text": text + one_line(error), "code": 70})

    # What this process tells.

    def _talk(self) -> None:
        count = 0
        while not self._done.is_set():
            count += 1
            with contextlib.suppress(ConnectionError):
                beat = self._beat(count)
                store.put(f"beats/{self._me}", beat)
                if self._me == 0:
                    self._beats = store.read("beats")
                    store.put("board/beat", beat)
                    done = [b["done"] for b in self._beats.values()]
                    if len(done) == self.num_processes and all(done):
                        store.put("board/all_done", True)
                self._board = store.read("board")
                self._answered = time.monotonic()
            if self._leaving:
                self._done.wait(self._times.beat / 20)
            else:
                self._wake.wait(self._times.beat)

    def _beat(self, count: int) -> dict[str, Any]:
        phase, seconds = self._dog.current()
        mark = self._dog.mark
        return {
            "count": count,
            "host": socket.gethostname(),
            "phase": phase,
            "seconds": seconds,
            "step": mark.step,
            "clock": mark.clock,
            "spent": mark.spent,
            "done": self._leaving,
        }

    def _report(self, error: BaseException) -> None:
        """Write down that this process fails, unless all do, or another was lost before."""
        if self._failed or isinstance(error, Interrupted | DisagreementError):
            return
        import jax

        lost = isinstance(error, jax.errors.JaxRuntimeError | ConnectionError)
        if lost and not str(error).startswith(OWN_FAULT):
            # Often what is left of a collective with a process that is no more: by then it is
            # found, and this process ended.
            self._done.wait(self._times.longest)
        code = getattr(error, "exit_code", 130 if isinstance(error, KeyboardInterrupt) else 70)
        words = one_line(error) or type(error).__name__
        name = "" if hasattr(error, "exit_code") else f"{type(error).__name__}: "
        self._failed = True
        where = f"step {self._dog.mark.step}"
        if self._dog.failed_in:
            where = f"phase {self._dog.failed_in} of {where}"
        text = f"process {self._me} ({socket.gethostname()}) failed in {where}: {name}{words}"
        self._write_verdict(text, code, socket.gethostname())

    def _explain(self, text: str) -> str:
        """Return whom a stuck phase of this process is due to, and write it down."""
        beats = _bounded(lambda: store.read("beats"), self._times.beat) or {}
        name = laggard(beats)
        mine = f"process {self._me} ({socket.gethostname()}), step {self._dog.mark.step}: {text}"
        text = mine if name is None else f"{mine}; furthest behind: {describe(name, beats[name])}"
        host = beats[name]["host"] if name else ""
        leaving.blame(host)
        self._write_verdict(text, HangError.exit_code, host)
        if self._me == 0:
            time.sleep(2 * self._times.beat)
        return text

    def _write_verdict(self, text: str, code: int, host: str) -> dict[str, Any]:
        """Write the verdict, and the host it blames, unless there is one, and return it.

        All within two beats.
        """
        verdict = {"text": text, "code": code, "host": host, "process": self._me}
        put = functools.partial(store.put, "board/verdict", verdict, replace=False)
        if _bounded(put, self._times.beat) is False:
            board = _bounded(lambda: store.read("board"), self._times.beat) or {}
            verdict = board.get("verdict", verdict)
        return verdict

    # What it makes of the others.

    def _judge(self) -> None:
        t, before = self._times, time.monotonic()
        speeds = Speeds(self.num_processes)
        while not self._done.wait(t.beat / 4):
            now = time.monotonic()
            if now - before > 5 * t.beat:  # it was this process that was suspended
                self._seen.clear()
                self._answered = now
            before = now
            if verdict := self._board.get("verdict"):
                self._obey(verdict)
            elif lost := self._lost(now):
                name, why = lost
                beat = self._beat_of(name)
                text = f"lost {describe(name, beat)}: {why}"
                host = beat["host"] if beat else store.host(name)
                verdict = {"text": text, "code": HangError.exit_code, "host": host}
                if self._me == 0:  # otherwise it is the one with the store that is lost
                    verdict = self._write_verdict(text, HangError.exit_code, host)
                self._leave(verdict)
            elif self._me == 0:
                for line in speeds.slow(self._beats):
                    self._say(line)

    def _lost(self, now: float) -> tuple[str, str] | None:
        """Return the number of a process that gives no sign of life, and what is missing of it."""
        t = self._times
        if self._me:
            late = now - self._answered
            if late > 1.2 * t.beat and not (store.is_served() or store.is_served()):
                return "0", "it has ended, nobody serves the coordinator's address"
            if late > t.silent:
                return "0", f"no answer for {late:.0f} s"
        for name in map(str, range(1, self.num_processes)) if self._me == 0 else ("0",):
            beat = self._beat_of(name)
            count = beat["count"] if beat else 0
            if count != self._seen.get(name, (-1, now))[0]:
                self._seen[name] = count, now
            since = now - self._seen[name][1]
            if since > t.silent and not (beat and beat["done"]):
                return name, f"no sign of life for {since:.0f} s"
        return None

    def _beat_of(self, name: str) -> dict[str, Any] | None:
        return self._beats.get(name) if self._me == 0 else self._board.get("beat")

    def _obey(self, verdict: Mapping[str, Any]) -> None:
        """End by the verdict; a process that has failed is on its way out, and gets a while."""
        if self._failed:
            self._done.wait(self._times.silent / 8)
        elif verdict["process"] == self._me:  # the thread that wrote it ends the process
            return
        if not self._done.is_set():
            self._leave(verdict)

    def _leave(self, verdict: Mapping[str, Any]) -> NoReturn:
        if self._me == 0:  # the store ends with it: let the others read first
            time.sleep(2 * self._times.beat)
        leaving.blame(verdict["host"])
        line = leaving.error_line(f"{verdict['text']}; exit {verdict['code']}\n")
        leaving.say(f"{leaving.cursor()}{line}", seconds=5.0)
        os._exit(verdict["code"])


def laggard(beats: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the process that the others wait for: in the lowest step, longest in other work.

    None where all are alike, waiting for a step.
    """
    waiting = ("step", "wait", "stop")
    first = min((beat["step"] for beat in beats.values()), default=0)
    behind = {name: beat for name, beat in beats.items() if beat["step"] == first}
    busy = {name: beat for name, beat in behind.items() if beat["phase"] not in waiting}
    if not busy and len(behind) == len(beats):
        return None
    candidates = busy or behind
    return max(candidates, key=lambda name: candidates[name]["seconds"])


def describe(name: str, beat: Mapping[str, Any] | None) -> str:
    """Return which process a beat is from and what it did then, in words."""
    if beat is None:
        return f"process {name} ({store.host(name)}), not heard of yet"
    doing = f"phase {beat['phase']} of " if beat["phase"] else ""
    seconds = f" for {beat['seconds']:.0f} s" if beat["phase"] else ""
    return f"process {name} ({beat['host']}), last in {doing}step {beat['step']}{seconds}"


def delay_abort() -> None:
    """Let six seconds pass between an abort of this process and its end.

    When process 0 is gone, JAX's client aborts at once, before anybody can say who was lost. It
    takes a function to call instead, but none of Python's (std::bad_cast in jaxlib 0.10.2 and
    0.12.0.1). So the C library's `sleep` handles SIGABRT, and is called with its number, 6.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library: JAX is faster
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
        libc.signal.restype = ctypes.c_void_p
        libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))


def _bounded(action: Callable[[], Any], seconds: float) -> Any:
    """Return `action()`, or None if it takes longer or fails."""
    result: list[Any] = []

    def work() -> None:
        with contextlib.suppress(ConnectionError):
            result.append(action())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return result[0] if result else None
