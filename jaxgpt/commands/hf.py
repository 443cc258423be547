"""The verbs `jaxgpt hf import` and `hf export`: call a function of interop, print what it did."""

from __future__ import annotations

import argparse
from typing import Any

from jaxgpt.commands.terminal import say, show, visible


def hf_import(args: argparse.Namespace) -> dict[str, Any]:
    """Make a run of a Hugging Face folder."""
    from jaxgpt.interop import hf

    summary = hf.import_run(args.directory, args.run, param_dtype=args.dtype, say=say)
    show(args, import_text(summary))
    return summary


def import_text(summary: dict[str, Any]) -> str:
    """Return what was imported for people, a few lines."""
    s = summary
    stored = ", ".join(f"{dtype} ({count} tensors)" for dtype, count in s["dtypes_stored"].items())
    rope = ""
    if s["rope_base"] is not None:
        scaling = "unscaled"
        if s["rope_scaling"] != "none":
            scaling = f"{s['rope_scaling']} by {s['rope_factor']:g}"
        local = f", {s['rope_local_base']:,.10g} with a window" if s["rope_local_base"] else ""
        rope = f"RoPE base {s['rope_base']:,.10g}{local}, {scaling}, {s['rope_layout']}"
    lines = [
        f"{s['run_dir']}: {s['family']}, {s['parameters']:,} parameters, "
        f"{'tied' if s['tied'] else 'untied'} head",
        f"  stored as {stored}; written as {s['dtype_written']}",
        f"  {rope or s['positions'] + ' positions'}, context {s['seq_len']:,}",
        f"  {s['tensors_read']:,} tensors read, "
        f"{len(s['tensors_unused'])} that hold no weight of their own left out",
    ]
    if s["ignored"]:
        lines.append(f"  ignored in config.json: {visible(', '.join(s['ignored']))}")
    return "\n".join(lines)


def hf_export(args: argparse.Namespace) -> dict[str, Any]:
    """Write a checkpoint as a folder that transformers loads."""
    from jaxgpt.interop import export

    summary = export.export_run(
        args.run,
        args.directory,
        step=args.step,
        dtype=args.dtype,
        weights=args.weights or "best",
        check=args.verify,
        shard_bytes=args.shard_bytes,
        say=say,
    )
    show(args, export_text(summary))
    return summary


def export_text(summary: dict[str, Any]) -> str:
    """Return what was exported for people, a few lines; what is not as usual comes last."""
    s = summary
    kind = "moving average of the weights" if s["weights"] == "ema" else "last weights"
    size = sum(s["files"].values())
    cast = "" if s["dtype"] == s["dtype_saved"] else f" after a cast from {s['dtype_saved']}"
    lines = [
        f"{s['directory']}: {s['family']}, step {s['step']}, {kind} in {s['dtype']}, "
        f"{s['parameters']:,} parameters in {s['tensors']:,} tensors, {size:,} bytes",
        f"  files: {', '.join(s['files'])}",
        f"  every tensor is, bit for bit, that of the checkpoint{cast}",
    ]
    for key, what in (("twin_difference", "a tiny model like it"), ("difference", "the model")):
        if key in s:
            lines.append(
                f"  transformers agrees on {what}: logits within {s[key]:.1e} of the largest, "
                "with and without cache, and greedy text"
            )
    if s.get("tokenizer_agrees"):
        lines.append("  its tokenizer gives the same ids, and texts come back")
    return "\n".join([*lines, *(f"  NOTE: {note}" for note in s["notes"])])
