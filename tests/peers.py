"""Groups of real processes on this machine, for tests of what they do together."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from runs import process_environment

FAST = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # compiles in a third of the time
CHILD = Path(__file__).with_name("peers_child.py")


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


@contextmanager
def group(
    size: int,
    command: Callable[[int, int], list[str]],
    silent: float = 60.0,
    last: dict[str, str] | None = None,
) -> Iterator[list[subprocess.Popen]]:
    """Start Python on `command(port, process)` for each process; kill what is left at the end.

    A process counts as lost after `silent` seconds; `last` is more environment for the last one.
    """
    port, running = free_port(), []
    try:
        for process in range(size):
            running.append(
                subprocess.Popen(
                    [sys.executable, *command(port, process)],
                    env=process_environment(1, **FAST, JAXGPT_PEER_SECONDS=str(silent))
                    | (last or {} if process == size - 1 else {}),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        yield running
    finally:
        for child in running:
            child.kill()
            child.communicate()


@contextmanager
def pretended_run(size: int, fault: str = "none") -> Iterator[list[subprocess.Popen]]:
    """Start a pretended run and go on when all its processes are ready."""
    with group(
        size, lambda port, process: [str(CHILD), *map(str, (port, process, size, fault))]
    ) as all_of_them:
        for child in all_of_them:
            assert child.stdout.readline() == "ready\n", child.stderr.read()
        yield all_of_them


def ends(children: list[subprocess.Popen], within: float) -> list[tuple[int, str]]:
    """Return exit code and last line of stderr of each, which ends `within` seconds."""
    deadline, found = time.monotonic() + within, []
    for child in children:
        _, err = child.communicate(timeout=max(0.1, deadline - time.monotonic()))
        found.append((child.returncode, ([*err.strip().splitlines()] or [""])[-1]))
    return found
