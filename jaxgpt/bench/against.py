"""One program beside another: both as fresh processes, turn by turn, so that a slow spell of the
machine meets both.

A program is a command line whose last line of output that is a JSON object has the figure.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxgpt.errors import ConfigError, one_line
from jaxgpt.runtime.environment import GPU_SHARE, QUIET

FIGURE = "tokens_per_sec_median"


def alternate(
    own: Sequence[str],
    other: str,
    pairs: int,
    say: Callable[[str], None],
    name: str = FIGURE,
) -> dict[str, Any]:
    """Return both figures of each pair, their ratios (own to other), the median and its spread.

    `own` are words, `other` is a command line as for a shell, which runs without our settings for
    GPU memory and TensorFlow, but with our huge pages. `name` is the figure's key in what both
    print: the more, the faster. The spread is half the range of the ratios, as a share of the
    median. Who begins changes from pair to pair. Raises ConfigError where a program fails, or its
    output has no figure.
    """
    commands = list(own), words(other)
    settings = QUIET | GPU_SHARE
    kept = {key: value for key, value in os.environ.items() if settings.get(key) != value}
    environments: tuple[Mapping[str, str], ...] = (os.environ, kept)
    figures: tuple[list[float], list[float]] = ([], [])
    for number in range(pairs):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            figures[side].append(figure(commands[side], name, environments[side]))
        mine, theirs = figures[0][-1], figures[1][-1]
        say(f"pair {number + 1}: {name} {mine:,.1f} and {theirs:,.1f}: {mine / theirs:.3f}")
    ratios = [mine / theirs for mine, theirs in zip(*figures, strict=True)]
    median = statistics.median(ratios)
    return {
        "against": other,
        "figure": name,
        "figures": figures[0],
        "figures_of_other": figures[1],
        "ratios": ratios,
        "ratio_median": median,
        "ratio_range": [min(ratios), max(ratios)],
        "spread": round((max(ratios) - min(ratios)) / 2 / median, 4),
        "repeats": pairs,
    }


def words(command: str) -> list[str]:
    """Return the words of a command line; raises ConfigError for quotes left open, or no words."""
    try:
        found = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"--against {command!r}: {error}; close it") from None
    if not found:
        raise ConfigError("--against '': name a program")
    return found


def figure(
    command: Sequence[str], name: str = FIGURE, environment: Mapping[str, str] | None = None
) -> float:
    """Run a program and return its figure; raises ConfigError, see `alternate`."""
    text = one_line(shlex.join(command))
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            env=environment,
        )  # fmt: skip
    except OSError as error:
        raise ConfigError(f"{text}: cannot be started: {error.strerror}") from None
    if done.returncode:
        last = done.stderr.strip().splitlines()[-2:] or ["it said nothing"]
        raise ConfigError(f"{text}: ended with {done.returncode}: {one_line(' '.join(last))}")
    for line in reversed(done.stdout.splitlines()):
        try:
            value = json.loads(line)[name]
        except (ValueError, TypeError, KeyError):
            continue
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e30:
            return float(value)
    raise ConfigError(f"{text}: no line of its output is a JSON object with {name} above 0")
