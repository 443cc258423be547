"""What the verbs of the command share: the configuration of their words, and printing.

Results go to stdout, everything else to stderr. Text that comes from documents or file names is
shown so that it cannot move the cursor, colour the screen or hide in it.
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Callable, Iterable, Sequence

from jaxgpt import config
from jaxgpt.config import Config
from jaxgpt.errors import ConfigError
from jaxgpt.runtime import leaving

EVERY = 5.0  # seconds between lines of progress


def load_config(words: list[str]) -> Config:
    """Return the configuration of `[CONFIG.toml] [section.field=value ...]`, in any order."""
    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise ConfigError(f"one CONFIG.toml at most, but got {', '.join(files)}")
    return config.load(files[0] if files else None, [word for word in words if "=" in word])


def show(args: argparse.Namespace, text: str) -> None:
    """Print a result for people; with --json only the object is printed, and by process 0."""
    if not args.json and leaving.is_first():
        print(text, flush=True)


def say(text: str) -> None:
    """Print one line of progress, unless another process speaks for the run."""
    if leaving.is_first():
        print(text, file=sys.stderr, flush=True)


def progress_line(describe: Callable[..., str]) -> Callable[..., None]:
    """Return a function that says `describe(*its arguments)`, but only about every 5 seconds."""
    last = time.monotonic()

    def progress(*numbers: int) -> None:
        nonlocal last
        if time.monotonic() - last >= EVERY:
            last = time.monotonic()
            say(describe(*numbers))

    return progress


def visible(text: str, *, lines: bool = False) -> str:
    r"""Return a text with what a terminal would obey or not show written out, as \x1b.

    Line feeds and tabs stay where `lines` is set; else the result is one line.
    """
    keep = "\n\t" if lines else ""
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def excerpt(text: str, width: int) -> str:
    """Return the start of a text as one visible line of at most `width` characters."""
    line = visible(" ".join(text[: 4 * width].split()))
    return line if len(line) <= width else line[: width - 3] + "..."


def table(
    headers: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    left: Iterable[int] = (0,),
    terminal: bool | None = None,
) -> str:
    """Return rows under headers, aligned right but for the columns `left`, 1234567 as 1,234,567.

    `terminal`: colours and rules, or plain text; None: as stdout is.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    terminal = sys.stdout.isatty() if terminal is None else terminal
    cells = [[visible(f"{c:,}" if isinstance(c, int) else str(c)) for c in row] for row in rows]
    grid = Table(box=box.SIMPLE_HEAD if terminal else None, pad_edge=False)
    for number, header in enumerate(headers):
        justify = "left" if number in left else "right"
        grid.add_column(header, justify=justify, no_wrap=True)
    for row in cells:
        grid.add_row(*map(Text, row))
    # Wide enough that nothing is cut, whatever the terminal says; wide characters take two columns.
    width = 4 * len(headers) + sum(
        2 * max(map(len, column)) for column in zip(headers, *cells, strict=True)
    )
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width)
    console.print(grid)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines() if line.strip())
