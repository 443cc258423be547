"""Named fault points, so that tests can end, fail or hold the process at an exact place.

They do nothing unless the environment variable JAXGPT_FAULT holds "point:occurrence:action". A save
passes save.begin, save.copied (the values are off the device), save.written (Orbax is done),
publish.temporary, publish.done, retention.demoted and retention.done; setting a damaged step aside
passes quarantine.moved twice; the training loop passes step after each step.
"""

from __future__ import annotations

import errno
import os
import select
import signal

PAUSE = 60.0  # seconds
_reached: dict[str, int] = {}


def fault(point: str) -> None:
    """Act if JAXGPT_FAULT names this point and this occurrence of it (from 1; "2+": from then on).

    Actions: kill (SIGKILL to this process), raise (RuntimeError), enospc (OSError, disk full), and
    in the main thread pause (until a signal has been handled, at most 60 s).
    """
    setting = os.environ.get("JAXGPT_FAULT")
    if setting is None:
        return
    name, occurrence, action = setting.split(":")
    if name != point:
        return
    _reached[point] = _reached.get(point, 0) + 1
    due = int(occurrence.removesuffix("+"))
    if _reached[point] != due and not (occurrence.endswith("+") and _reached[point] > due):
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "enospc":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"injected at {point}")
    elif action == "pause":
        _pause()
    else:
        raise RuntimeError(f"injected at {point}: {action}")


def _pause() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        select.select([reader], [], [], PAUSE)
    finally:
        signal.set_wakeup_fd(previous)
        os.close(reader)
        os.close(writer)
