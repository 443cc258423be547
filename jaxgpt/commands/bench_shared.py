"""What the verbs of `jaxgpt bench` have in common: start, report, --against, and versions."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxgpt import __version__
from jaxgpt.bench import history
from jaxgpt.commands.terminal import say, show, table
from jaxgpt.config import Config

# In the namespace, but not asked for by the user; or not to be passed on by --against.
COMMON = {"verb", "action", "figure", "json", "against", "pairs", "save"}
POSITIONAL = ("config", "files")


def start(cfg: Config) -> None:
    """Start JAX and say on what."""
    from jaxgpt.runtime.devices import start_jax

    for line in start_jax(cfg).lines:
        say(line)


def report(args: argparse.Namespace, found: dict[str, Any], text: str = "") -> dict[str, Any]:
    """Keep and print figures, and return them with `versions`; `text` instead of lists in them."""
    result = {**found, **versions()}
    keep(args, result)
    plain = [(name, shown(value)) for name, value in result.items() if not isinstance(value, list)]
    show(args, "\n\n".join(filter(None, [text, table([args.action, ""], plain)])))
    return result


def keep(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Append a result to the file of --save; before it is printed, for a reader may have left."""
    if not args.save:
        return
    options = asked(args)
    by_default = {name: result.get(name) for name, value in options.items() if value is None}
    history.save(Path(args.save), args.action, options | by_default, args.figure, result)


def ways_table(
    ways: Sequence[dict[str, Any]], names: Sequence[str], parts: Sequence[str] = ("",)
) -> str:
    """Return the figures of several ways to compute the same, the one of training first.

    `names` are the keys that tell them apart, `parts` what the keys of figures begin with.
    """
    figures = ("tokens_per_sec_median", "mfu", "temporary_bytes", "compile_seconds")
    columns = [*names, *(part + figure for part in parts for figure in figures), "deviation"]
    rows = [[shown(way[column]) for column in columns] for way in ways]
    return table([column.replace("_", " ") for column in columns], rows)


def beside(args: argparse.Namespace) -> dict[str, Any]:
    """Measure in fresh processes, turn by turn with the program of --against."""
    from jaxgpt.bench.against import alternate

    own = [sys.executable, "-m", "jaxgpt.cli", "bench", args.action, "--json", *own_words(args)]
    found = alternate(own, args.against, args.pairs, say, args.figure)
    given = {name: value for name, value in asked(args).items() if value is not None}
    result = {**given, **found, **versions()}
    keep(args, result)
    low, high = found["ratio_range"]
    show(args, f"{found['ratio_median']:.3f} times as fast ({low:.3f} to {high:.3f})")
    return result


def asked(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the verb as they were given, or by default."""
    kept = {name: value for name, value in vars(args).items() if name not in COMMON}
    return kept | ({"against": args.against} if args.against else {})


def own_words(args: argparse.Namespace) -> list[str]:
    """Return the words that ask for the same measurement again."""
    words, last = [], []
    for name, value in vars(args).items():
        if name in COMMON or value is None or value is False:
            continue
        if name in POSITIONAL:
            last += value
            continue
        option = f"--{name.replace('_', '-')}"
        values = value if isinstance(value, list) else [value]
        words += [option] if value is True else [f"{option}={each}" for each in values]
    return words + last


def versions() -> dict[str, Any]:
    """Return what a figure depends on besides the code: libraries, devices, processor."""
    import platform

    import jax

    from jaxgpt.runtime.processor import cpu_name, num_cores

    return {
        "framework": f"jaxgpt {__version__}, jax {jax.__version__}",
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "processor": cpu_name(),
        "cores": num_cores(),
    }


def shown(value: Any) -> Any:
    """Return a value as people read it: numbers that are not whole with four figures."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return value
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
