"""The verb `jaxgpt bench`: how fast are the parts on this machine?"""

from __future__ import annotations

import argparse
import platform
import sys
from typing import Any

import jax

from jaxgpt import __version__
from jaxgpt.bench import shapes
from jaxgpt.commands.terminal import say, show, table


def bench(args: argparse.Namespace) -> dict[str, Any]:
    """Measure one part, print the figures and return them."""
    measures = {"step": of_step}
    return measures[args.action](args)


def of_step(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the train step of a shape."""
    from jaxgpt.bench import step
    from jaxgpt.runtime.devices import start_jax

    if args.against:
        from jaxgpt.bench.against import alternate

        words = [f"--shape={args.shape}", f"--dtype={args.dtype}", f"--steps={args.steps}"]
        own = [sys.executable, "-m", "jaxgpt.cli", "bench", "step", "--json", *words, *args.config]
        result = alternate(own, args.against, args.pairs, say)
        low, high = result["ratio_range"]
        show(args, f"{result['ratio_median']:.3f} times as fast ({low:.3f} to {high:.3f})")
        return result | {"shape": args.shape, "dtype": args.dtype, **versions()}
    cfg = shapes.load(args.shape, args.dtype, args.config)
    for line in start_jax(cfg).lines:
        say(line)
    found = step.measure(cfg, steps=args.steps, warm_up=args.warm_up, say=say)
    result = {"shape": args.shape, "dtype": args.dtype, **found, **versions()}
    show(args, table(["step", ""], [(name, value) for name, value in result.items()]))
    return result


def versions() -> dict[str, str]:
    """Return what a figure depends on besides the code: libraries, device, processor."""
    from jaxgpt.runtime.processor import cpu_name

    return {
        "framework": f"jaxgpt {__version__}, jax {jax.__version__}",
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
        "processor": cpu_name(),
    }
