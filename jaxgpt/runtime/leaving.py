"""The way out of the process: exit that waits for nobody, last words that block for no reader.

Every write to stderr from here is bounded in time: a full pipe or a stopped terminal must not keep
a process alive that has decided to go.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import sys
import threading
from typing import NoReturn

SHOW_CURSOR = "\x1b[?25h"
_signature = ""  # of a process that is not the first


def sign(name: str) -> None:
    """From now on lines of errors tell which process they come from."""
    global _signature
    _signature = f"[{name}] "


def is_first() -> bool:
    """Tell whether this process speaks for the run: it is alone, or process 0."""
    return not _signature


def signed(text: str) -> str:
    """Return a text each line of which tells which process it comes from, if not from the first."""
    return "".join(f"{_signature}{line}" for line in text.splitlines(keepends=True))


def error_line(text: str) -> str:
    """Return a line of an error as the command prints it, with the name of the process."""
    return f"jaxgpt: {_signature}{text}"


def blame(host: str) -> None:
    """Leave the name of the host that ended the run in the file that JAXGPT_BLAME names, if any.

    Whoever starts runs again (launch/restart.sh) reads there whether it is always the same one.
    """
    path = os.environ.get("JAXGPT_BLAME")
    if not path or not host:
        return

    def write() -> None:
        with contextlib.suppress(OSError), open(path, "w") as file:
            file.write(f"{host}\n")

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(1.0)


def hard_exit(code: int, after: float = 10.0) -> NoReturn:
    """Run exit handlers, flush, and leave with `code`; at the latest `after` seconds from now.

    The interpreter's own shutdown is not entered: it can wait for ever for a thread of a library
    (a live tf.data iterator over a Python function hung it in 12 of 12 trials).
    """
    timer = threading.Timer(after, os._exit, args=(code,))
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(after + 1.0, exit=True, file=2)  # if C holds the lock
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def cursor() -> str:
    """Return what shows the terminal's cursor again, which a progress bar hides."""
    return SHOW_CURSOR if os.isatty(2) else ""


def say(text: str, seconds: float = 1.0) -> None:
    """Write to stderr, but wait no longer than `seconds` for whoever reads it."""

    def write() -> None:
        data = text.encode(errors="backslashreplace")
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(2, data) :]

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(seconds)
