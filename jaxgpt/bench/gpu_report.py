"""What `jaxgpt bench gpu` says of its rows: short lines, targets met or not, and a page of tables.

Rows are the dicts of `bench.gpu_check`; nothing here runs or imports anything heavy.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
# What one H200 has to reach. 475,000 tokens/s is what each of 8 H100 did with llm.c at this size.
TARGETS = (
    ("124M", "tokens_per_sec_median", 475_000.0, "tokens/s of the 124M model"),
    ("1B", "mfu", 0.5, "of the peak (causal count) for the 1B model"),
)
CARD = "NVIDIA H200"


def name(row: Row) -> str:
    """Return what a row is of, in words."""
    words = [row["kind"], row["shape"]]
    if row["kind"] == "torch":
        return " ".join([*words, f"{row['rows']} rows"])
    words += [row["dtype"], row["attention"], f"{row['logits']} loss"]
    words += [f"{row['rows']} rows"] if row["rows"] else []
    return " ".join([*words, *row["more"]])


def in_short(row: Row) -> str:
    """Return the outcome of a row in a few words."""
    if row["outcome"] != "done":
        return f"{row['outcome']}: {row['line']}"
    if row["kind"] == "gradients":
        return f"right, worst leaf off by {row['leaf_error']:.2%}"
    return f"{row['tokens_per_sec_median']:,.0f} tokens/s, loss {row['loss']}"


def strain(samples: Iterable[Mapping[str, str]]) -> dict[str, float]:
    """Return the most power of the samples of nvidia-smi, the clock then, the most heat."""
    found = []
    for sample in samples:
        try:
            power, clock = float(sample["power.draw"]), float(sample["clocks.sm"])
            found.append((power, clock, float(sample["temperature.gpu"])))
        except (KeyError, ValueError):  # no nvidia-smi, or "[N/A]"
            continue
    if not found:
        return {}
    power, clock, _ = max(found)
    hottest = max(heat for _, _, heat in found)
    return {
        "power_watts": power,
        "sm_clock_mhz": clock,
        "temperature_celsius": hottest,
    }


def timed(rows: Iterable[Row], kind: str, shape: str) -> list[Row]:
    """Return the rows of a kind and shape that have a rate."""
    return [
        row for row in rows if (row["kind"], row["shape"], row["outcome"]) == (kind, shape, "done")
    ]


def targets(result: Row) -> list[dict[str, Any]]:
    """Return each of `TARGETS` with what was found, and whether that is enough.

    `met` is None while nothing was found, and on other GPUs.
    """
    found = []
    for shape, key, wanted, words in TARGETS:
        rows = timed(result["rows"], "step", shape)
        best = max(rows, key=lambda row: row[key], default=None)
        known = best is not None and result["device_kind"] == CARD
        found.append(
            {
                "target": words,
                "wanted": wanted,
                "found": best and best[key],
                "row": best and name(best),
                "met": best[key] >= wanted if known else None,
            }
        )
    return found


def against_torch(row: Row, rows: Sequence[Row]) -> float | None:
    """Return the rate of a row as a multiple of PyTorch's at its shape; None: it has none.

    PyTorch with as many rows where that was timed, else its best.
    """
    theirs = timed(rows, "torch", row["shape"])
    alike = [other for other in theirs if other["rows"] == row["rows"]] or theirs
    rate = max((other["tokens_per_sec_median"] for other in alike), default=None)
    return rate and row["tokens_per_sec_median"] / rate


def shares(row: Row, rows: Sequence[Row]) -> tuple[float, float] | None:
    """Return the MFU of a row, causal and full count; PyTorch's by our count of the same model."""
    if "mfu" in row:
        return row["mfu"], row["mfu_full"]
    ours = timed(rows, "step", row["shape"])
    if not ours:
        return None
    per = row["tokens_per_sec_median"] / ours[0]["peak_flops"]
    return per * ours[0]["flops_per_token"], per * ours[0]["flops_per_token_full"]


def markdown(result: Row) -> str:
    """Return the page on a result."""
    rows, card = result["rows"], result["card"]
    facts = [result["date"], f"{result['device_kind']}, {result['framework']}"]
    facts += [f"jax {result['jax']}, python {result['python']}, torch {result['torch'] or 'none'}"]
    facts += [", ".join(f"{key} {value}" for key, value in card.items())] if card else []
    lines = ["# jaxgpt on this GPU", "", *(f"* {fact}" for fact in facts), "", "## Targets", ""]
    lines += [f"* {of_target(target)}" for target in result.get("targets", ())]
    speeds = [row for row in rows if row["kind"] != "gradients" and row["outcome"] == "done"]
    heads = "what|tokens/s|best|spread|MFU causal|MFU full|to PyTorch|peak GB|compile s|loss|W|MHz"
    lines += ["", "## Speed", "", *grid(heads.split("|"), [speed(row, rows) for row in speeds])]
    lines += ["", *(f"* {line}" for line in fairness(rows))]
    checks = [row for row in rows if row["kind"] == "gradients"]
    heads = "what|outcome|worst leaf|off by|loss off by|allowed"
    lines += ["", "## Gradients against float32", "", *grid(heads.split("|"), map(check, checks))]
    others = [row for row in rows if row["kind"] != "gradients" and row["outcome"] != "done"]
    if others:
        lines += ["", "## Without a figure", "", *(f"* {name(r)}: {in_short(r)}" for r in others)]
    return "\n".join(lines) + "\n"


def of_target(target: Row) -> str:
    """Return one line on a target."""
    wanted, found = (
        value and (f"{value:.3f}" if value < 1 else f"{value:,.0f}")
        for value in (target["wanted"], target["found"])
    )
    if found is None:
        return f"{wanted} {target['target']}: nothing measured"
    met = {True: "met", False: "NOT met", None: f"a target for one {CARD}, not judged here"}
    return f"{wanted} {target['target']}: {met[target['met']]}: {found} ({target['row']})"


def fairness(rows: Sequence[Row]) -> list[str]:
    """Return what a reader has to know of these figures."""
    count = statistics.median([r["repeats"] for r in rows if "repeats" in r] or [0])
    return [
        f"each row is a fresh process; tokens/s are the median of {count:.0f} updates on random "
        "tokens, without data, log and checkpoints",
        "MFU is a share of the published dense bfloat16 peak, if there is one; nothing recomputed "
        "counts",
        "PyTorch: torch.compile, scaled_dot_product_attention, fused AdamW, bfloat16 autocast, the "
        "same sizes; the ratio is to its run with as many rows, else to its best",
        "compile s: ours are tracing and compiling, PyTorch's the whole first update",
    ]


def speed(row: Row, rows: Sequence[Row]) -> list[str]:
    """Return the cells of a timed row."""
    mfu, ratio = shares(row, rows), against_torch(row, rows)
    peak = row.get("peak_device_bytes")
    return [
        name(row),
        f"{row['tokens_per_sec_median']:,.0f}",
        f"{row['tokens_per_sec_best']:,.0f}",
        f"{row['spread']:.1%}",
        *([f"{share:.1%}" for share in mfu] if mfu else ["", ""]),
        f"{ratio:.2f}" if ratio else "",
        f"{peak / 1e9:.1f}" if peak else "",
        f"{row['compile_seconds']:.0f}",
        f"{row['loss']}",
        f"{row['power_watts']:.0f}" if "power_watts" in row else "",
        f"{row['sm_clock_mhz']:.0f}" if "sm_clock_mhz" in row else "",
    ]


def check(row: Row) -> list[str]:
    """Return the cells of a check of gradients."""
    if "leaf" not in row:
        return [name(row), f"{row['outcome']}: {row['line']}", "", "", "", ""]
    right = "right" if row["outcome"] == "done" else "WRONG"
    numbers = (row[key] for key in ("leaf_error", "loss_error", "tolerance"))
    return [name(row), right, row["leaf"], *(f"{number:.3%}" for number in numbers)]


def grid(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return ["| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines]
