"""One program beside another: both as fresh processes, turn by turn, so that a slow spell of the
machine meets both.

A program is a command line whose last line of output that is a JSON object has the figure.
"""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

from jaxgpt.errors import ConfigError, one_line

FIGURE = "tokens_per_sec_median"


def alternate(
    own: Sequence[str], other: str, pairs: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return both figures of each pair, their ratios (own to other) and the median with its range.

    Who begins changes from pair to pair. Raises ConfigError where a program fails, or its output
    has no figure.
    """
    commands = {"own": list(own), "other": shlex.split(other)}
    figures: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(pairs):
        order = list(commands) if number % 2 == 0 else list(reversed(commands))
        for name in order:
            figures[name].append(figure(commands[name]))
        mine, theirs = figures["own"][-1], figures["other"][-1]
        say(f"pair {number + 1}: {mine:,.1f} and {theirs:,.1f} tokens/s: {mine / theirs:.3f}")
    ratios = [mine / theirs for mine, theirs in zip(*figures.values(), strict=True)]
    return {
        "against": other,
        "figures": figures["own"],
        "figures_of_other": figures["other"],
        "ratios": ratios,
        "ratio_median": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
    }


def figure(command: Sequence[str]) -> float:
    """Run a program and return its figure; raises ConfigError, see `alternate`."""
    text = " ".join(command)
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise ConfigError(f"{text}: cannot be started: {error.strerror}") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ConfigError(f"{text}: ended with {done.returncode}: {one_line(last)}")
    for line in reversed(done.stdout.splitlines()):
        try:
            value = json.loads(line)[FIGURE]
        except (ValueError, TypeError, KeyError):
            continue
        if isinstance(value, int | float) and value > 0:
            return float(value)
    raise ConfigError(f"{text}: no line of its output is a JSON object with {FIGURE} above 0")
