"""The verb `jaxgpt bench history`: what has become slower or faster, of kept results."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxgpt.bench import history
from jaxgpt.commands.bench_shared import POSITIONAL, shown
from jaxgpt.commands.terminal import say, show, table
from jaxgpt.errors import ConfigError, DataError


def of_history(args: argparse.Namespace) -> dict[str, Any]:
    """Compare the newest results in a file with those of an earlier version, or of two files."""
    if len(args.files) > 2:
        raise ConfigError(f"bench history: one or two files, but got {len(args.files)}")
    if args.fail_below is not None and not 0 < args.fail_below < math.inf:
        raise ConfigError(f"--fail-below {args.fail_below}: must be a ratio above 0, as 0.95")
    read = [history.read(Path(name), say) for name in args.files]
    for name, (results, _) in zip(args.files, read, strict=True):
        if not results:
            raise DataError(f"{name}: holds no result of jaxgpt bench")
    earlier = read[0][0] if len(read) == 2 else None
    rows = history.compare(earlier, read[-1][0])
    show(args, history_table(rows))
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["verdict"]] = counts.get(row["verdict"], 0) + 1
    show(args, "; ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    result = {
        "comparisons": rows,
        "verdicts": counts,
        "damaged_lines": sum(damaged for _, damaged in read),
    }
    if args.fail_below is None:
        return result
    low = [row for row in rows if row.get("ratio", args.fail_below) < args.fail_below]
    for row in low:
        say(f"{name_of(row)}: {row['ratio']} is below {args.fail_below} ({row['verdict']})")
    return result | {"below": len(low), "exit_code": 1 if low else 0}


def history_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a line for each comparison; where they are of several machines, with the machine."""
    machines = {tuple(row[place] for place in history.WHERE) for row in rows}
    headers = ["measured", "figure", "earlier", "newest", "ratio", "spread", "verdict"]
    lines = []
    for row in rows:
        name = name_of(row)
        if len(machines) > 1:
            name += f" on {row['devices']} x {row['device']}, {row['processor']}"
        numbers = [shown(row.get(key)) for key in ("earlier", "newest", "ratio", "spread")]
        lines.append([name, row["figure"], *numbers, row["verdict"]])
    last = [
        f"{row['earlier_version']} -> {row['newest_version']}" for row in rows if "ratio" in row
    ]
    return "\n".join([table(headers, lines, left=(0, 1, 6)), *dict.fromkeys(last)])


def name_of(row: dict[str, Any]) -> str:
    """Return what was measured as words: the verb, and the options that say something."""
    words = []
    for name, value in row["options"].items():
        if name in history.EFFORT or value in (None, False, 0, []):
            continue
        if name in POSITIONAL:
            words += map(str, value)
        else:
            words.append(f"{name}={value}")
    return " ".join([row["verb"], *words])
