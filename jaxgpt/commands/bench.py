"""The verb `jaxgpt bench`: how fast are the parts on this machine?

`of_<verb>` measures one part with the verb's options and returns the figures with what they are of;
what all have in common (--against, --save, versions, printing) is done around them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from jaxgpt.bench import history, shapes
from jaxgpt.commands.bench_history import of_history
from jaxgpt.commands.bench_shared import beside, report, start, versions, ways_table
from jaxgpt.commands.terminal import load_config, say, show, table
from jaxgpt.config import Config
from jaxgpt.errors import ConfigError


def bench(args: argparse.Namespace) -> dict[str, Any]:
    """Measure one part, print the figures and return them; or compare kept ones."""
    alone = {"history": of_history, "gpu": of_gpu, "growth": of_growth}
    if args.action in alone:
        return alone[args.action](args)
    measures = {
        "step": of_step,
        "attention": of_attention,
        "loss": of_loss,
        "loader": of_loader,
        "tokenizer": of_tokenizer,
        "checkpoint": of_checkpoint,
        "generate": of_generate,
    }
    if args.save:
        history.check_writable(Path(args.save))
    return beside(args) if args.against else measures[args.action](args)


def of_step(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the train step of a shape, or of a configuration."""
    from jaxgpt.bench import step

    cfg, shape = step_config(args)
    start(cfg)
    found = step.measure(
        cfg, steps=args.steps, warm_up=args.warm_up, say=say, check=not args.no_check
    )
    names = {name: short for short, name in shapes.DTYPES.items()}
    dtype = names.get(cfg.train.compute_dtype, cfg.train.compute_dtype)
    return report(args, {"shape": shape, "dtype": dtype, **found})


def step_config(args: argparse.Namespace) -> tuple[Config, str]:
    """Return what to measure the step of, and its name: a shape, or a file given in its place."""
    files = [word for word in args.config if "=" not in word]
    if not files:
        shape = args.shape or "small"
        return shapes.load(shape, args.dtype or "bf16", args.config), shape
    if args.shape:
        raise ConfigError(f"--shape {args.shape} and {files[0]}: give one of them")
    words = [*args.config]
    if args.dtype:
        words.append(f"train.compute_dtype={shapes.DTYPES[args.dtype]}")
    cfg = load_config(words)
    if cfg.model.vocab_size == 0:
        raise ConfigError(
            f"{files[0]}: model.vocab_size = 0 takes that of the tokenizer, and none is read here; "
            "give model.vocab_size=N"
        )
    return cfg, Path(files[0]).stem


def of_attention(args: argparse.Namespace) -> dict[str, Any]:
    """Measure each implementation of attention that can run here."""
    from jaxgpt.bench import attention

    sizes = {
        "rows": args.rows,
        "context": args.context,
        "heads": args.heads,
        "kv_heads": args.kv_heads or args.heads,
        "head_dim": args.head_dim,
        "documents": args.documents,
        "window": args.window,
    }
    start(shapes.load("small", args.dtype))
    found = attention.measure(
        **sizes, dtype=shapes.DTYPES[args.dtype], repeats=args.repeats, say=say
    )
    ways = ways_table(found["implementations"], ("implementation",), ("", "forward_"))
    return report(args, {**sizes, "dtype": args.dtype, **found}, ways)


def of_loss(args: argparse.Namespace) -> dict[str, Any]:
    """Measure head and cross-entropy, in chunks and whole."""
    from jaxgpt.bench import loss

    cfg = shapes.load(args.shape, args.dtype)
    sizes = {
        "rows": args.rows or cfg.train.global_batch,
        "context": args.context or cfg.model.seq_len,
        "width": args.width or cfg.model.embed_dim,
        "vocab": args.vocab or cfg.model.vocab_size,
    }
    start(cfg)
    found = loss.measure(
        **sizes, dtype=shapes.DTYPES[args.dtype], chunks=args.chunk, repeats=args.repeats, say=say
    )
    ways = ways_table(found["ways"], ("way", "chunk_tokens"))
    return report(args, {"shape": args.shape, **sizes, "dtype": args.dtype, **found}, ways)


def of_loader(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the training pipeline, and what steps wait for it."""
    from jaxgpt.bench import loader

    cfg = shapes.load(args.shape, "bf16", args.config)
    start(cfg)
    found = loader.measure(
        cfg,
        store=args.store,
        tokens=args.tokens,
        doc_tokens=args.doc_tokens,
        seconds=args.seconds,
        repeats=args.repeats,
        steps=args.steps,
        say=say,
    )
    return report(args, {"shape": args.shape, "store": args.store or "made up", **found})


def of_tokenizer(args: argparse.Namespace) -> dict[str, Any]:
    """Measure encoding."""
    from jaxgpt.bench import tokenizer

    found = tokenizer.measure(
        args.text,
        model=args.model,
        kind=args.kind,
        vocab_size=args.vocab,
        workers=args.workers,
        repeats=args.repeats,
        say=say,
    )
    return report(args, {"model": args.model or f"{args.kind}, trained on the text", **found})


def of_checkpoint(args: argparse.Namespace) -> dict[str, Any]:
    """Measure saving and restoring a training state."""
    from jaxgpt.bench import checkpoint

    cfg = shapes.load(args.shape, "bf16", args.config)
    start(cfg)
    found = checkpoint.measure(cfg, folder=args.dir, repeats=args.repeats, say=say)
    return report(args, {"shape": args.shape, **found})


def of_generate(args: argparse.Namespace) -> dict[str, Any]:
    """Measure greedy generation from random weights."""
    from jaxgpt.bench import generate

    cfg = shapes.load(args.shape, args.dtype, [*generate.overrides(args.shape), *args.config])
    start(cfg)
    sizes = {"batch": args.batch, "prompt": args.prompt, "new": args.new}
    found = generate.measure(cfg, **sizes, repeats=args.repeats, say=say)
    return report(args, {"shape": args.shape, "dtype": args.dtype, **found})


def of_gpu(args: argparse.Namespace) -> dict[str, Any]:
    """Check and measure one GPU, beside PyTorch; JAX is not started in this process."""
    from jaxgpt.bench import gpu_check, gpu_report

    found = gpu_check.measure(args.out, platform=args.platform, minutes=args.minutes, say=say)
    show(args, gpu_report.markdown(found))
    return found


def of_growth(args: argparse.Namespace) -> dict[str, Any]:
    """Measure how seconds per step grow with each size, and draw it."""
    from jaxgpt.bench import chart, growth

    if args.out:
        chart.check(Path(args.out))
    sizes = {"axes": args.axis or list(growth.UNITS), "points": args.points}
    counts = {"steps": args.steps, "warm_up": args.warm_up}
    found = growth.measure(args.dtype, args.config, **sizes, **counts, say=say)
    if args.out:
        chart.draw(growth.panels(found["axes"]), Path(args.out))
    show(args, table(growth.HEADS, growth.lines(found["axes"])))
    show(args, "\n".join(f"{axis['axis']}: {axis['verdict']}" for axis in found["axes"]))
    return {"dtype": args.dtype, **found, **versions()}
