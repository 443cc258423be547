"""What a person sees while a run is going: one live bar on a terminal, plain lines elsewhere.

A thread of its own does all writing, to the file descriptor itself. The training loop only leaves
values behind for it, so a full pipe, a closed pipe or a terminal stopped with Ctrl-S costs the run
nothing: lines that nobody takes are dropped and counted.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections import deque
from typing import TextIO

WAITING_LINES = 256  # more than these unread lines: the oldest are dropped
REFRESH_SECONDS = 0.25


class Progress:
    """A progress display from `start` to `total` steps; `close` it on every path.

    `stream` is stderr by default. `plain` forces lines instead of the bar, which needs a terminal.
    """

    def __init__(
        self, start: int, total: int, stream: TextIO | None = None, plain: bool | None = None
    ):
        self._stream = stream or sys.stderr
        dumb = not self._stream.isatty() or os.environ.get("TERM") == "dumb"
        self.plain = dumb if plain is None else plain
        self.dropped = 0
        self._lines: deque[str] = deque(maxlen=WAITING_LINES)
        self._now = (start, "")
        self._start, self._total = start, total
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="progress")
        self._thread.start()

    def update(self, step: int, text: str) -> None:
        """Show `step` and the numbers of `text` in the bar (nothing in plain form)."""
        self._now = (step, text)

    def note(self, text: str) -> None:
        """Print a line above the bar; control characters are escaped."""
        self.dropped += len(self._lines) == WAITING_LINES
        self._lines.append(re.sub(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", _escape, text))

    def close(self, seconds: float = 2.0) -> None:
        """Write what is left, waiting no longer than `seconds` for the reader."""
        self._closing.set()
        self._thread.join(seconds)
        self.dropped += len(self._lines)

    def _run(self) -> None:
        out = _Descriptor(self._stream)
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more: training goes on
            if self.plain:
                self._write_lines(out)
            else:
                self._draw_bar(out)

    def _write_lines(self, out: _Descriptor) -> None:
        closing = False
        while not closing:
            closing = self._closing.wait(REFRESH_SECONDS)
            for line in self._taken():
                out.write(f"{line}\n")

    def _draw_bar(self, out: _Descriptor) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[text]}", markup=False),
            TimeRemainingColumn(),
        )
        console = Console(file=out, force_terminal=True)
        # Standard streams are not redirected: nothing else may come to wait for this thread.
        bar = Bar(
            *columns,
            console=console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        with bar:
            task = bar.add_task("", total=self._total, completed=self._start, text="")
            closing = False
            while not closing:
                closing = self._closing.wait(REFRESH_SECONDS)
                for line in self._taken():
                    console.print(line, markup=False, highlight=False, soft_wrap=True)
                step, text = self._now
                bar.update(task, completed=step, text=text)
                bar.refresh()

    def _taken(self) -> list[str]:
        lines = []
        while self._lines:
            lines.append(self._lines.popleft())
        return lines


class _Descriptor:
    """A text stream without lock or buffer, so that a stuck write can hold up nothing else."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        try:
            self._fd = stream.fileno()
        except (OSError, AttributeError):  # a stream in memory
            self._fd = -1

    def write(self, text: str) -> int:
        if self._fd < 0:
            return self._stream.write(text)
        data = text.encode("utf-8", errors="backslashreplace")
        while data:
            data = data[os.write(self._fd, data) :]
        return len(text)

    def flush(self) -> None:
        pass


def _escape(match: re.Match[str]) -> str:
    return f"\\x{ord(match[0]):02x}"
