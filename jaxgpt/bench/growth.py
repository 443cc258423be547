"""How do the seconds of a step grow with depth, width, context, batch and devices, and as FLOPs do?

Around a small base model each size is doubled alone. `python -m jaxgpt.bench.growth` is the process
that measures: cases on stdin, a line of JSON for each on stdout. CPU devices are simulated, each
number of them in a process of its own, so they share cores and memory; accelerators are real.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxgpt import config
from jaxgpt.bench import shapes
from jaxgpt.bench.chart import Line, Panel
from jaxgpt.config import Config
from jaxgpt.errors import HangError, JaxgptError, one_line
from jaxgpt.runtime.environment import prepare_environment

ROOT = Path(__file__).parents[2]
# Layers, width, heads, context, vocabulary, rows; heads stay as wide as they are here.
BASES = {"cpu": (2, 128, 2, 128, 1024, 8), "accelerator": (4, 1024, 8, 1024, 16384, 8)}
SIZES = {
    "depth": ("layers", ("num_layers",)),
    "width": ("width", ("embed_dim", "num_heads")),
    "context": ("tokens of a row", ("seq_len",)),
}
UNITS = {name: unit for name, (unit, _) in SIZES.items()} | {"batch": "rows", "devices": "devices"}
# AdamW in float32 reads weight, gradient and two moments, and writes all but the gradient.
UPDATE_BYTES = 7 * 4
NEAR = 0.1  # of 1: measured growth and that of FLOPs are the same
LEAST_SECONDS = 2.0  # of a point: a virtual machine may pause for half a second
LIMIT = 600.0  # seconds for the cases of one process
HEADS = ("axis", "size", "seconds", "GFLOP", "update MB", "grown", "FLOPs grown", "MFU")


def measure(
    dtype: str,
    overrides: Sequence[str],
    *,
    axes: Sequence[str],
    points: int,
    steps: int,
    warm_up: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Return `axes`, each with its `points` what `of_axis` says of them, and the `platform`.

    `dtype` and `overrides` are those of `shapes.load`. Of a point: `size`, `seconds_median`,
    `spread`, `flops` and `update_bytes` of a processor, `tokens_per_sec_median`, `mfu`,
    `peak_flops`. `base_variation` is that of `variation`. Simulated devices are one processor.
    Raises HangError after `LIMIT` s, JaxgptError where a step fails.
    """
    load(dtype, overrides, "cpu")  # is refused here if it is wrong
    cases = [{"dtype": dtype, "words": list(overrides), "points": points, "axis": axis}
             for axis in axes if axis != "devices"]  # fmt: skip
    counts = [2**n for n in range(points)]
    runs = [(1, cases)] if cases else []
    if "devices" in axes:
        wide = {"dtype": dtype, "words": list(overrides), "axis": "devices"}
        runs += [(n, [wide | {"devices": n}]) for n in counts]
    rows: list[dict[str, Any]] = []
    for count, asked in runs:
        rows += child({"cases": asked, "steps": steps, "warm_up": warm_up}, count, say)
    by_axis = {axis: [row for row in rows if row["axis"] == axis] for axis in axes}
    varied = variation(rows[0] for rows in by_axis.values() if "left_out" not in rows[0])
    found = [of_axis(axis, rows, varied) for axis, rows in by_axis.items()]
    platforms = {row["platform"] for row in rows if "platform" in row}
    return {
        "platform": platforms.pop() if platforms else "",
        "base_variation": varied,
        "axes": found,
    }


def child(
    request: dict[str, Any], devices: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return the rows of a process with so many CPU devices; the accelerators it finds are real."""
    environment = dict(os.environ) | {"JAX_NUM_CPU_DEVICES": str(devices)}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), environment.get("PYTHONPATH")])
    )
    try:
        done = subprocess.run(
            [sys.executable, "-m", "jaxgpt.bench.growth"], input=json.dumps(request), text=True,
            capture_output=True, env=environment, timeout=LIMIT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise HangError(
            f"bench growth: steps on {devices} device(s) took more than {LIMIT:g} s; "
            "fewer --points, or a smaller base, take less"
        ) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise JaxgptError(f"bench growth: a step on {devices} device(s) failed: {one_line(last)}")
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for row in rows:
        if "left_out" not in row:
            say(f"{row['axis']} {row['size']}: {row['seconds_median']:.4f} s a step")
    return rows


def main() -> int:
    """Measure the cases of the request on stdin; the answers go to stdout."""
    prepare_environment([])
    import jax

    from jaxgpt.bench.step import measure as measure_step
    from jaxgpt.runtime.devices import start_jax

    request = json.load(sys.stdin)
    for case in request["cases"]:
        start_jax(load(case["dtype"], case["words"], "cpu"))
        devices = jax.devices()
        count = case.get("devices", 1)
        if count > len(devices):
            print(json.dumps({"axis": case["axis"], "left_out": count}), flush=True)
            continue
        platform = devices[0].platform
        base = load(case["dtype"], case["words"], platform)
        sizes = [2**n for n in range(case["points"])] if "points" in case else [count]
        for size in sizes:
            cfg = scaled(base, case["axis"], size)
            counts = {"steps": request["steps"], "warm_up": request["warm_up"]}
            found = measure_step(
                cfg,
                **counts,
                least_seconds=LEAST_SECONDS,
                say=lambda _: None,
                devices=devices[:count],
                check=False,
            )
            row = point(cfg, case["axis"], found, count, platform)
            print(json.dumps(row), flush=True)
    return 0


def load(dtype: str, overrides: Sequence[str], platform: str) -> Config:
    """Return the base model of a platform, over which the words of the user win."""
    base = BASES["cpu" if platform == "cpu" else "accelerator"]
    return shapes.load("small", dtype, [*shapes.words(base), *overrides])


def scaled(cfg: Config, axis: str, times: int) -> Config:
    """Return a configuration whose size along an axis is so many times larger.

    Rows grow with the devices, so that each has the same work.
    """
    if axis in ("batch", "devices"):
        rows = {"global_batch": cfg.train.global_batch * times}
        if cfg.train.micro_batch:
            rows["micro_batch"] = cfg.train.micro_batch * times
        return config.with_values(cfg, "bench growth", train=rows)
    names = SIZES[axis][1]
    sizes = {name: getattr(cfg.model, name) * times for name in names}
    if axis == "width":  # with all that is given beside it
        more = ("num_kv_heads", "mlp_dim")
        sizes |= {n: getattr(cfg.model, n) * times for n in more if getattr(cfg.model, n)}
    return config.with_values(cfg, "bench growth", model=sizes)


def point(
    cfg: Config, axis: str, found: Mapping[str, Any], devices: int, platform: str
) -> dict[str, Any]:
    """Return a row of `measure`: what was found, beside its work on one processor.

    The work of simulated devices is done by the same cores.
    """
    shared = platform == "cpu"
    tokens = found["tokens_per_step"] / (1 if shared else devices)
    size = {
        "batch": cfg.train.global_batch,
        "devices": devices,
    }
    kept = ("seconds_median", "spread", "tokens_per_sec_median", "mfu", "peak_flops", "repeats")
    return {
        "axis": axis,
        "platform": platform,
        "size": size[axis] if axis in size else getattr(cfg.model, SIZES[axis][1][0]),
        "flops": found["flops_per_token"] * tokens,
        "update_bytes": UPDATE_BYTES * found["parameters"] * (devices if shared else 1),
        **{name: found[name] for name in kept},
    }


def variation(bases: Iterable[Mapping[str, Any]]) -> float:
    """Return by what share the same step, the first of each axis, took longer at its slowest.

    On a busy machine it says how far the seconds of other steps can be trusted.
    """
    seconds = [base["seconds_median"] for base in bases]
    return max(seconds) / min(seconds) - 1 if seconds else 0.0


def of_axis(axis: str, rows: Sequence[Mapping[str, Any]], varied: float = 0.0) -> dict[str, Any]:
    """Return an axis with its points and what they say: growth from the first to the last.

    `varied`: see `variation`.

    Keys: `growth` of seconds, `growth_by_flops`, `ratio` of these, `within_10_percent` and a
    `verdict` in words; None where there are not two points.
    """
    points = [dict(row) for row in rows if "left_out" not in row]
    about = {"axis": axis, "unit": UNITS[axis], "points": points}
    if len(points) < 2:
        nothing = dict.fromkeys(("growth", "growth_by_flops", "ratio", "within_10_percent"))
        return about | nothing | {"verdict": "there is only one device: nothing to compare"}
    first, last = points[0], points[-1]
    growth = last["seconds_median"] / first["seconds_median"]
    by_flops = last["flops"] / first["flops"]
    ratio = growth / by_flops
    near = abs(ratio - 1) <= NEAR
    grown = f"seconds grow {growth:.2f} times, FLOPs {by_flops:.2f} times"
    varied = max(varied, first["spread"] + last["spread"])
    why = "within 10 %" if near else because(axis, points, ratio)
    if varied > NEAR and varied > max(ratio, 1 / ratio) - 1:
        why = f"no finding, as the same step varied by {varied:.0%}; repeat it on an idle machine"
    return about | {
        "growth": growth,
        "growth_by_flops": by_flops,
        "ratio": ratio,
        "within_10_percent": near,
        "verdict": f"{grown}: {why}",
    }


def because(axis: str, points: Sequence[Mapping[str, Any]], ratio: float) -> str:
    """Return why seconds grow otherwise than FLOPs, with the figures that say so."""
    first, last = points[0], points[-1]
    rates = [p["flops"] / p["seconds_median"] / 1e9 for p in (first, last)]
    speeds = f"{rates[0]:,.1f} GFLOP/s at {first['size']} and {rates[1]:,.1f} at {last['size']}"
    if ratio < 1:
        slope = (last["seconds_median"] - first["seconds_median"]) / (
            last["flops"] - first["flops"]
        )
        fixed = 1e3 * max(0.0, first["seconds_median"] - slope * first["flops"])
        update = f"the update moves {first['update_bytes'] / 1e6:,.1f} MB at any {axis}, and "
        return (
            f"{speeds}: the smallest step, {first['mfu']:.1%} of the peak, is too small to be "
            f"compute-bound; {fixed:,.2f} of its {1e3 * first['seconds_median']:,.2f} ms are fixed "
            f"costs: {update if axis in ('batch', 'context') else ''}every operation has a start"
        )
    if axis != "devices":
        return (
            f"{speeds}: the larger steps are slower for their FLOPs, most likely because what they "
            "hold no longer fits the caches and memory bandwidth sets the pace"
        )
    if first["platform"] == "cpu":
        return (
            f"{speeds}: simulated devices share the cores and one memory bandwidth; each updates "
            f"weights of its own, {last['update_bytes'] / 1e6:,.1f} MB in place of "
            f"{first['update_bytes'] / 1e6:,.1f}, and all wait for each other to sum gradients"
        )
    gradients = first["update_bytes"] / UPDATE_BYTES * 4 / 1e6
    return (
        f"{speeds} per device: {gradients:,.1f} MB of gradients are summed over the devices, and "
        "the work of this small model does not hide it"
    )


def lines(axes: Iterable[Mapping[str, Any]]) -> list[list[object]]:
    """Return the cells of all points under `HEADS`."""
    cells = []
    for axis in axes:
        for one in axis["points"]:
            first = axis["points"][0]
            cells.append(
                [
                    axis["axis"],
                    one["size"],
                    f"{one['seconds_median']:.5f}",
                    f"{one['flops'] / 1e9:,.3f}",
                    f"{one['update_bytes'] / 1e6:,.1f}",
                    f"{one['seconds_median'] / first['seconds_median']:.2f}",
                    f"{one['flops'] / first['flops']:.2f}",
                    f"{one['mfu']:.1%}",
                ]
            )
    return cells


def panels(axes: Iterable[Mapping[str, Any]]) -> list[Panel]:
    """Return a chart for each axis with points: seconds, and the first's grown as FLOPs do."""
    found = []
    for axis in axes:
        points = axis["points"]
        if len(points) < 2:
            continue
        measured = tuple((p["size"], p["seconds_median"]) for p in points)
        scale = points[0]["seconds_median"] / points[0]["flops"]
        by_flops = tuple((p["size"], p["flops"] * scale) for p in points)
        both = (Line("measured", measured), Line("as FLOPs", by_flops, dashed=True))
        found.append(Panel(axis["axis"], axis["unit"], "s per step", both))
    return found


if __name__ == "__main__":
    sys.exit(main())
