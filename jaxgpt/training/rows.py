"""metrics.jsonl: one JSON object per line and step, safe against crashes, resumes and full disks.

Knows nothing of what the numbers mean; a row is a dict with an integer "step".
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl, one per step, in order of steps.

    Lines that are not rows (torn by a crash) are left out; of rows with the same step, later
    values win. A missing file has no rows.
    """
    rows: dict[int, dict[str, Any]] = {}
    lines = path.read_bytes().splitlines() if path.exists() else []
    for line in lines:
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows[row["step"]] = rows.get(row["step"], {}) | row
    return [rows[step] for step in sorted(rows)]


class RowFile:
    """A metrics.jsonl open for writing: one line per step, those after `start_step` removed.

    A row whose step is that of the last line is merged into it, so an evaluation and the training
    row of one step are one object.
    """

    def __init__(self, path: Path, start_step: int):
        rows = [row for row in read_rows(path) if row["step"] <= start_step]
        lines = [_line(row) for row in rows]
        if not path.exists() or path.read_bytes() != b"".join(lines):
            temporary = path.with_suffix(".tmp")
            with open(temporary, "wb") as file:
                file.writelines(lines)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)  # so that a crash leaves either all old rows or the kept ones
        self._last = rows[-1] if rows else {}
        self._end = sum(map(len, lines))
        self._fd = os.open(path, os.O_RDWR)

    def write(self, row: dict[str, Any]) -> None:
        """Append the row, or merge it into the last line; an OSError leaves the file as it was."""
        merge = self._last.get("step") == row["step"]
        old = _line(self._last) if merge else b""
        row = self._last | row if merge else row
        new, begin = _line(row), self._end - len(old)
        try:
            _write_all(self._fd, new, begin)
            os.ftruncate(self._fd, begin + len(new))
        except OSError:
            with contextlib.suppress(OSError):
                _write_all(self._fd, old, begin)
                os.ftruncate(self._fd, self._end)
            raise
        self._last, self._end = row, begin + len(new)

    def sync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def _line(row: dict[str, Any]) -> bytes:
    return (json.dumps(row, allow_nan=False) + "\n").encode()


def _write_all(fd: int, data: bytes, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
