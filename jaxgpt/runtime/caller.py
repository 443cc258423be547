"""Process 0's side of the roll call: it listens, hears who comes, and answers all alike.

One thread serves all connections. Nobody is answered before all are there, something is wrong or
time is up; until then those who wait are sent a sign of life now and then.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import socket
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from jaxgpt.errors import ConfigError, HangError

MAGIC = "jaxgpt roll call 1"
MAX_LINE = 4096  # bytes that a process may say about itself
PATIENCE = 15.0  # seconds after which it is said what is waited for, and again
GRACE = 10.0  # seconds that the answer may come after the time limit, as nobody starts at once
LINGER = 3.0  # seconds for which late ones are told what is wrong
PULSE = 2.0  # seconds between the signs of life of process 0 while it waits
GONE = 40.0  # seconds after which a process that came is given up: without a sign, or not back
SHOWN = 8  # processes that are named one by one


class Present(NamedTuple):
    """A process that has come: its number, how many it thinks there are, and where it runs."""

    process: int
    processes: int
    host: str
    pid: int


def listen(port: int) -> socket.socket:
    """Return a socket that listens there on all addresses; raises ConfigError for a taken port."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=both)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise ConfigError(
            f"coordinator port {port} on {socket.gethostname()}: {reason}; another run uses it, or "
            "one that has not ended yet: choose another port"
        ) from None


def allow_connections(number: int) -> None:
    """Raise the limit of open files, often 1024, so that all can be connected at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number + 256 if hard == resource.RLIM_INFINITY else min(number + 256, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def call(
    server: socket.socket,
    processes: int,
    timeout: float,
    say: Callable[[str], None],
    frozen: list[Present],
) -> None:
    """Listen until all are there, something is wrong or time is up, and answer all alike.

    Those who do not take the answer, though all are there, are added to `frozen`.
    """
    began = noted = pulse = time.monotonic()
    heard: dict[socket.socket, bytes] = {}
    here: dict[socket.socket, Present] = {}
    left: dict[int, tuple[Present, float]] = {}  # by number: who came and is gone, and since when
    answer: dict[str, Any] | None = None
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        while time.monotonic() - began < timeout + LINGER:
            for key, _ in selector.select(0.2):
                connection = key.fileobj
                if connection is server:
                    with contextlib.suppress(OSError):
                        connection = server.accept()[0]
                        connection.setblocking(False)
                        selector.register(connection, selectors.EVENT_READ)
                        heard[connection] = b""
                elif not _hear(connection, heard, here):  # gone, or not one of us
                    selector.unregister(connection)
                    connection.close()
                    del heard[connection]
                    if gone := here.pop(connection, None):
                        left[gone.process] = gone, time.monotonic()
            now = time.monotonic()
            if answer is None:
                for one in here.values():
                    left.pop(one.process, None)
                still = [one for connection, one in here.items() if not _has_left(connection)]
                answer = _verdict(still, processes) or _deserted(left, now)
                if answer is None and now - began > timeout:
                    error = _missing(here, processes, timeout)
                    answer = {"code": HangError.exit_code, "error": error}
                if answer:  # those who come a little later are still told what is wrong
                    began, timeout = now, 0.0
                elif now - noted > PATIENCE:
                    noted = now
                    say(_missing(here, processes, now - began))
            if answer:
                for connection in here:
                    selector.unregister(connection)
                    del heard[connection]
                silent = _tell(here, answer)
                here.clear()
                if answer["code"] == 0:
                    frozen += silent
                    break
            elif now - pulse > PULSE:
                pulse = now
                for connection in here:
                    with contextlib.suppress(OSError):
                        connection.send(b" ")
    for connection in heard:
        connection.close()


def _tell(here: dict[socket.socket, Present], answer: dict[str, Any]) -> list[Present]:
    """Give all the answer, and return those who have not taken it after GRACE seconds."""
    line = json.dumps({"roll": MAGIC, **answer}).encode() + b"\n"
    waiting = dict(here)
    with selectors.DefaultSelector() as selector:
        for connection in here:
            with contextlib.suppress(OSError):
                connection.settimeout(LINGER)
                connection.sendall(line)
                connection.shutdown(socket.SHUT_WR)
            selector.register(connection, selectors.EVENT_READ)
        deadline = time.monotonic() + GRACE
        while waiting and time.monotonic() < deadline:
            # They close first, which leaves the port free for JAX.
            for key, _ in selector.select(0.2):
                selector.unregister(key.fileobj)
                del waiting[key.fileobj]
    for connection in here:
        connection.close()
    return list(waiting.values())


def _hear(
    connection: socket.socket, heard: dict[socket.socket, bytes], here: dict[socket.socket, Present]
) -> bool:
    """Take what a connection says; False if it has ended or says what no process of a run does."""
    try:
        data = connection.recv(MAX_LINE)
    except BlockingIOError:
        return True
    except OSError:
        return False
    heard[connection] += data
    if not data or connection in here or len(heard[connection]) > MAX_LINE:
        return False
    if not heard[connection].endswith(b"\n"):
        return True
    said = parse(heard[connection])
    types = {"process": int, "processes": int, "host": str, "pid": int}
    if any(type(said.get(name)) is not kind for name, kind in types.items()):
        return False
    here[connection] = Present(*(said[name] for name in types))
    return True


def _has_left(connection: socket.socket) -> bool:
    """Tell whether the other side has closed the connection, without taking what it said."""
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def parse(line: bytes) -> dict[str, Any]:
    """Return the object of a line, empty if it is none of the roll call's."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) and said.get("roll") == MAGIC else {}


def _verdict(present: Collection[Present], processes: int) -> dict[str, Any] | None:
    """Return the answer to all: their host names, or what is wrong; None while some are missing."""
    first: dict[int, Present] = {}
    for one in sorted(present):
        wrong = ""
        if one.processes != processes:
            wrong = (
                f"process {one.process} ({one.host}) was started as one of {one.processes}, "
                f"process 0 as one of {processes}; start all with the same number"
            )
        elif not 0 <= one.process < processes:
            wrong = f"process {one.process} ({one.host}): the numbers are 0 to {processes - 1}"
        elif other := first.get(one.process):
            wrong = (
                f"process {one.process} was started twice: on {other.host} (pid {other.pid}) and "
                f"on {one.host} (pid {one.pid}); give each its own number, 0 to {processes - 1}"
            )
        if wrong:
            return {"code": ConfigError.exit_code, "error": wrong}
        first[one.process] = one
    if len(first) < processes:
        return None
    return {"code": 0, "hosts": [first[number].host for number in range(processes)]}


def _deserted(left: dict[int, tuple[Present, float]], now: float) -> dict[str, Any] | None:
    """Return the answer to all when a process came, left, and is not back in time."""
    for one, since in left.values():
        if now - since > GONE:
            error = (
                f"process {one.process} ({one.host}, pid {one.pid}) came and ended before the "
                f"others were there, and was not started again for {now - since:.0f} s"
            )
            return {"code": HangError.exit_code, "error": error}
    return None


def _missing(here: dict[socket.socket, Present], processes: int, seconds: float) -> str:
    present = {one.process: one.host for one in here.values()}
    missing = some(str(number) for number in range(processes) if number not in present)
    there = some(f"{number} ({host})" for number, host in sorted(present.items())) or "none"
    return (
        f"{len(present)} of {processes} processes have started after {seconds:.0f} s: present "
        f"{there}; missing {missing}"
    )


def some(names: Iterable[str]) -> str:
    """Return names in one line, at most 8 of them."""
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
