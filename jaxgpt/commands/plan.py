"""The verb `jaxgpt plan`: what a configuration needs on a machine that need not be here.

No data, no devices and no run folder are touched. The step is also compiled ahead of time where
the packages for that are installed, unless `--analytic` says not to.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxgpt.commands.terminal import load_config, say, show, table
from jaxgpt.errors import ConfigError, JaxgptError

if TYPE_CHECKING:
    from jaxgpt.planning.compile import Compiled
    from jaxgpt.planning.hardware import Target
    from jaxgpt.planning.search import Candidate

GB = 1e9
MANY = 64  # devices; for more of them libtpu takes longer


def plan(args: argparse.Namespace) -> dict[str, Any]:
    """Print the plan and return it; with --search, of the best configuration found."""
    import jax

    jax.config.update("jax_platforms", "cpu")  # takes no accelerator from a run on this host
    from jaxgpt.planning import fixes, hardware, report, search
    from jaxgpt.planning.layout import with_vocabulary

    target = hardware.parse(args.on)
    cfg, guess = with_vocabulary(load_config(args.config))
    notes = [guess] if guess else []
    if args.write and not args.search:
        raise ConfigError(f"--write {args.write}: only with --search, which finds what to write")
    found = []
    if args.search:
        found = search.search(cfg, target)
        if not found:
            raise ConfigError(
                f"{args.on}: no mesh, recomputation and micro-batch of train.global_batch = "
                f"{cfg.train.global_batch} rows fits; take more devices, or shorter model.seq_len"
            )
        cfg = found[0].cfg
        show(args, search_text(report.candidates(found)))
    candidate = search.evaluate(cfg, target)
    compiled = None if args.analytic else compile_it(candidate, notes)
    if args.analytic:
        notes.append(f"--analytic: all numbers are analytic; compiling needs {extra(target)}")
    fits = candidate.fits if compiled is None else report.compiler_fits(candidate, compiled)
    ways_out = [] if fits else fixes.fixes(candidate)
    result = report.report(candidate, ways_out, compiled, notes)
    if args.search:
        result["candidates"] = report.candidates(found)
    show(args, plan_text(result))
    if args.write:
        presets = [word for word in args.config if "=" not in word]
        step = result["time"]["step_seconds"]
        search.write_preset(
            Path(args.write), cfg, presets[0] if presets else None,
            f"Found by `jaxgpt plan --search --on {args.on}`: at least {step:.4g} s a step,\n"
            f"{result['memory']['device_bytes'] / GB:.1f} GB of a device.",
        )  # fmt: skip
        say(f"{args.write}: written; jaxgpt train {args.write}")
        result["written"] = args.write
    return result


def compile_it(candidate: Candidate, notes: list[str]) -> Compiled | None:
    """Return what the compiler says, or None with a note on why it says nothing.

    Raises ConfigError where the compiler refuses the configuration.
    """
    from jaxgpt.planning import compile as compiler

    target = candidate.layout.target
    try:
        with waiting(f"compiling for {target.num_devices:,} x {target.chip.kinds[0]}, "
                     f"{usually(target)}; --analytic leaves it out"):  # fmt: skip
            done = compiler.compile_step(candidate.cfg, target)
    except ConfigError:
        raise
    except JaxgptError as error:
        notes.append(f"not compiled, so all numbers are analytic: {error}")
        return None
    say(compiler.summary(done))
    return done


def extra(target: Target) -> str:
    """Return how to install what compiles for a target."""
    return f"`pip install 'jaxgpt[{'tpu' if target.chip.platform == 'tpu' else 'cuda'}]'`"


def usually(target: Target) -> str:
    """Return in words how long compiling takes, measured on 2 cores: 22 s to 7 minutes."""
    if target.chip.platform == "gpu":
        return "usually less than a minute"
    return f"usually {'2 to 7' if target.num_devices > MANY else '1 to 2'} minutes"


@contextlib.contextmanager
def waiting(text: str) -> Iterator[None]:
    """Say what is waited for; on a terminal, also for how long already."""
    say(text)
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

    columns, console = (SpinnerColumn(), TimeElapsedColumn()), Console(stderr=True)
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as bar:
        bar.add_task("", total=None)
        yield


# Text for people.


def plan_text(plan: dict[str, Any]) -> str:
    """Return the plan for a terminal."""
    train = plan["train"]
    lines = [
        plan["machine"],
        f"{plan['parameters']:,} parameters; mesh: {mesh_words(plan)}",
        f"{train['global_batch']:,} rows a step, {train['accum_steps']} micro-batch"
        f"{'es' * (train['accum_steps'] > 1)} of "
        f"{train['micro_batch']:,} rows, {train['tokens_per_device']:,} tokens of each on a "
        f"device; remat {remat_words(train)}",
        plan["attention"],
        "",
        memory_text(plan),
        "",
        *verdict(plan),
    ]
    if plan["collectives"]:
        rows = [
            (t["axis"], t["what"], t["link"], f"{t['bytes'] / GB:,.3f}",
             f"{t['seconds'] * 1e3:,.2f}", "can overlap" if t["overlaps"] else "in the open")
            for t in merged(plan["collectives"])
        ]  # fmt: skip
        headers = ("axis", "exchanged in a step", "over", "GB sent", "ms", "")
        lines += ["", table(headers, rows, left=(0, 1, 2, 5))]
    lines += compiled_text(plan["compiled"])
    return "\n".join([*lines, "", time_text(plan), "", *(f"note: {n}" for n in plan["notes"])])


def compiled_text(compiled: dict[str, Any] | None) -> list[str]:
    """Return what the compiled step exchanges, beside what is expected, and what is wrong."""
    if compiled is None:
        return []
    lines = []
    if compiled["exchanges"]:
        rows = [
            (r["axis"], f"{r['expected'] / GB:,.3f}", f"{r['compiled'] / GB:,.3f}",
             f"{r['compiled'] / r['expected']:.2f}" if r["expected"] else "",
             f"{r['open_bytes'] / GB:,.3f}", f"{r['open_seconds'] * 1e3:,.2f}",
             ", ".join(f"{n:,} {kind} {sent / GB:,.3f}" for kind, (n, sent) in r["kinds"].items()))
            for r in compiled["exchanges"]
        ]  # fmt: skip
        headers = ("axis", "GB expected", "compiled", "ratio", "in the open", "ms", "made of, GB")
        lines += ["", table(headers, rows, left=(0, 6))]
    found = [f"finding: {line}" for line in compiled["findings"]]
    return [*lines, *(["", *found] if found else [])]


def mesh_words(plan: dict[str, Any]) -> str:
    """Return the axes of a plan or a candidate that have more than one device."""
    words = ", ".join(f"{axis} {n}" for axis, n in plan["mesh"].items() if n > 1) or "one device"
    if plan["rounds"] > 1:
        words += f", {plan['rounds']} rounds"
    slow = ", ".join(f"{n} parts of {axis}" for axis, n in plan["mesh_slow"].items())
    return words + (f" (across slices or hosts: {slow})" if slow else "")


def merged(transfers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one entry for each kind of exchange and link, summed over the weights."""
    total: dict[tuple, dict[str, Any]] = {}
    for t in transfers:
        key = (t["axis"], t["what"], t["link"], t["overlaps"])
        have = total.setdefault(key, {**t, "bytes": 0.0, "seconds": 0.0})
        have["bytes"] += t["bytes"]
        have["seconds"] += t["seconds"]
    return list(total.values())


def remat_words(train: dict[str, Any]) -> str:
    """Return how blocks are recomputed."""
    if train["remat"] == "none":
        return "none"
    words = "full"
    if train["remat_save"]:
        words += f" but {', '.join(train['remat_save'])}"
    if train["remat_offload"]:
        words += f", {', '.join(train['remat_offload'])} in the host's memory"
    return words


def memory_text(plan: dict[str, Any]) -> str:
    """Return the table of bytes by cause."""
    memory = plan["memory"]
    rows = [
        (f"{p['bytes'] / GB:,.3f}", p["cause"], "" if p["moment"] == "always" else p["moment"],
         p["how"])
        for p in memory["parts"]
    ]  # fmt: skip
    if unused := (plan["compiled"] or {}).get("unused_bytes", 0):
        rows.append((f"{unused / GB:,.3f}", "reserved by the compiler, unused", "its peak",
                     "gaps between temporaries, not in the sums below"))  # fmt: skip
    text = table(("GB/device", "for", "while", "how it is counted"), rows, left=(1, 2, 3))
    moments = ", ".join(f"{name} {size / GB:,.3f}" for name, size in memory["moments"].items())
    return f"{text}\nGB at each moment: {moments}; the {memory['peak']} needs most"


def verdict(plan: dict[str, Any]) -> list[str]:
    """Return whether it fits, what the compiler says, and what to change."""
    memory, compiled = plan["memory"], plan["compiled"]
    need, room = memory["device_bytes"], memory["usable_bytes"]
    lines = []
    if compiled and compiled["misfit"]:
        lines.append(f"the compiler: {compiled['misfit']}")
    elif compiled:
        parts = ", ".join(
            f"{name} {compiled[f'{name}_bytes'] / GB:,.3f}"
            for name in ("argument", "output", "alias", "temp", "code", "host")
        )
        lines.append(
            f"the compiler's totals, GB a device: peak {compiled['peak_bytes'] / GB:,.3f} "
            f"({parts}), in {compiled['seconds']:.0f} s"
        )
        if live := compiled["live_bytes"]:
            lines.append(
                f"of these {live / GB:,.3f} are in use at once, {need / GB:,.3f} by arithmetic"
            )
    word = "fits" if plan["fits"] else "DOES NOT FIT"
    lines.append(
        f"{word}: {need / GB:,.1f} of {room / GB:,.1f} GB a device by arithmetic"
        + (f", {compiled['peak_bytes'] / GB:,.1f} by the compiler" if compiled else "")
        + (f"; host {memory['host_bytes'] / GB:,.1f} GB" if memory["host_bytes"] else "")
    )
    for fix in plan["fixes"]:
        cost = f"{fix['added_seconds'] * 1e3:+,.1f} ms a step"
        enough = "fits then" if fix["fits"] else "not enough alone"
        lines.append(f"  {fix['change']}: {fix['saved_bytes'] / GB:,.3f} GB less, {cost}, {enough}")
    return lines


def time_text(plan: dict[str, Any]) -> str:
    """Return the bound of a step, and the length of the run."""
    time, save, compiled = plan["time"], plan["checkpoint"], plan["compiled"]
    resources = ", ".join(f"{k} {v * 1e3:,.1f}" for k, v in time["resources"].items())
    lines = [
        f"step: at least {time['step_seconds'] * 1e3:,.1f} ms ({time['limit']} limit it): "
        f"the longest of {resources}; then in the open {time['exposed'] * 1e3:,.1f}, update "
        f"{time['update'] * 1e3:,.1f}",
        f"MFU at most {time['mfu_ceiling']:.1%}: {time['flops_per_token'] / 1e6:,.1f} MFLOP per "
        f"token (causal; {time['flops_per_token_full'] / 1e6:,.1f} with the full square), "
        f"{time['recompute_share']:.1%} more recomputed, pipeline idle {time['bubble_share']:.1%}",
        f"{time['tokens_per_second']:,.0f} tokens/s, {time['tokens_per_second_per_device']:,.0f} "
        f"a device, {time['tokens_per_day'] / GB:,.1f} billion a day",
    ]
    if compiled and compiled["step_seconds"]:
        lines.insert(1, (
            f"as compiled: at least {compiled['step_seconds'] * 1e3:,.1f} ms, of which "
            f"{compiled['exposed'] * 1e3:,.1f} are exchanges in the open; MFU at most "
            f"{compiled['mfu_ceiling']:.1%}"
        ))  # fmt: skip
    if time["steps"]:
        lines.append(
            f"run: {time['steps']:,} steps of {time['tokens_per_step']:,} tokens, at least "
            f"{time['days']:,.2f} days, {time['device_hours']:,.0f} device-hours"
        )
    lines.append(
        f"checkpoint: {save['bytes'] / GB:,.1f} GB, training waits {save['blocking']:.2f} s; save "
        f"every {save['interval'] / 60:,.1f} minutes ({save['interval_steps']:,} steps at this "
        f"pace), for {save['failures_per_day']:.3f} failures a day"
    )
    return "\n".join(lines)


def search_text(rows: list[dict[str, Any]]) -> str:
    """Return what a search found as a table."""
    cells = [
        (number, mesh_words(row), row["micro_batch"], remat_words(row),
         f"{row['step_seconds'] * 1e3:,.1f}",
         f"{row['mfu_ceiling']:.1%}", f"{row['device_bytes'] / GB:,.1f}", row["limit"])
        for number, row in enumerate(rows, 1)
    ]  # fmt: skip
    headers = ("", "mesh", "micro-batch", "remat", "ms a step", "MFU", "GB", "limit")
    return table(headers, cells, left=(1, 3, 7)) + "\n"
