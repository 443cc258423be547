"""The words of `jaxgpt bench`: what it can measure, and the options of each."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from jaxgpt.option_types import whole

AXES = ("depth", "width", "context", "batch", "devices")  # of `bench growth`


def add_bench_verbs(
    verb: Callable[..., argparse.ArgumentParser], parser: argparse.ArgumentParser
) -> None:
    """Add what `jaxgpt bench` can measure to its parser."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def measured(
        name: str,
        summary: str,
        *,
        configured: bool = False,
        figure: str | None = "tokens_per_sec_median",
    ) -> argparse.ArgumentParser:
        """Add a verb; `figure` is the key of what other programs can be compared by."""
        sub = verb(actions, name, summary, configured=configured)
        sub.set_defaults(figure=figure, against=None, pairs=None)
        sub.add_argument("--save", metavar="FILE",
                         help="append the result to this file, for `bench history`")  # fmt: skip
        if figure:
            sub.add_argument("--against", metavar="COMMAND",
                             help=f"program that prints a JSON line with {figure}: take turns with "
                             "it, in fresh processes, and report the ratio")  # fmt: skip
            sub.add_argument("--pairs", type=whole(1), default=3,
                             help="with --against: turns of both; default: 3")  # fmt: skip
        return sub

    sub = measured("step", "tokens per second of the train step alone", configured=True)
    sub.add_argument("--shape", choices=("small", "gpt2"),
                     help="6 layers of width 384, or GPT-2 124M; default: small, or the model of "
                     "CONFIG.toml")  # fmt: skip
    sub.add_argument("--dtype", choices=("bf16", "f32"),
                     help="of matmul inputs; default: bf16, or as CONFIG.toml says")  # fmt: skip
    sub.add_argument("--steps", type=whole(1), default=12, help="that are timed")
    sub.add_argument("--warm-up", type=whole(1), default=3, help="steps before them")
    sub.add_argument("--no-check", action="store_true",
                     help="time it without comparing gradients first")  # fmt: skip

    sub = measured("attention", "tokens per second of attention alone, by each implementation")
    for name, default, meaning in (
        ("--rows", 4, "sequences at once"),
        ("--context", 1024, "tokens of a sequence"),
        ("--heads", 12, "of queries"),
        ("--head-dim", 64, "width of a head"),
    ):
        sub.add_argument(name, type=whole(1), default=default, metavar="N",
                         help=f"{meaning}; default: {default}")  # fmt: skip
    sub.add_argument("--kv-heads", type=whole(1), metavar="N",
                     help="of keys and values; default: as --heads")  # fmt: skip
    for name, meaning in (
        ("--documents", "documents in a row, kept apart by a mask; default: 0, no mask"),
        ("--window", "tokens that each one sees, itself included; default: 0, all"),
    ):
        sub.add_argument(name, type=whole(0), default=0, metavar="N", help=meaning)
    add_dtype(sub)
    add_repeats(sub)

    sub = measured("loss", "tokens per second of the head and the cross-entropy alone")
    sub.add_argument("--shape", choices=("small", "gpt2"), default="small",
                     help="where sizes are taken from that are not given")  # fmt: skip
    for name, meaning in (
        ("--rows", "sequences at once"),
        ("--context", "tokens of a sequence"),
        ("--width", "of hidden states"),
        ("--vocab", "rows of the head"),
    ):
        sub.add_argument(name, type=whole(1), metavar="N", help=meaning)
    sub.add_argument("--chunk", type=whole(0), action="append", default=[], metavar="N",
                     help="tokens per chunk, 0: all at once; repeatable; default: those of "
                     "training, a quarter and four times as many, and 0")  # fmt: skip
    add_dtype(sub)
    add_repeats(sub)

    add_io_verbs(measured)

    sub = verb(actions, "gpu", "gradients, steps and PyTorch's steps on one GPU, in 10 minutes")
    sub.add_argument("--out", metavar="FOLDER", default=".",
                     help="for gpu_check.json and gpu_check.md; default: here")  # fmt: skip
    sub.add_argument("--platform", choices=("gpu", "cpu"), default="gpu",
                     help="cpu: tiny models, to try the check without a GPU")  # fmt: skip
    sub.add_argument("--minutes", type=whole(1), default=10, metavar="N",
                     help="all in all; what does not fit is left out; default: 10")  # fmt: skip

    sub = verb(actions, "growth", "seconds per step against depth, width, context, rows, devices",
               configured=True)  # fmt: skip
    sub.add_argument("--out", metavar="FILE.png", help="draw it into this file")
    sub.add_argument("--points", type=whole(2, 6), default=4, metavar="N",
                     help="on each axis, each twice the one before; default: 4")  # fmt: skip
    sub.add_argument("--axis", action="append", choices=AXES, default=[], metavar="AXIS",
                     help=f"of {', '.join(AXES)}; repeatable; default: all")  # fmt: skip
    sub.add_argument("--dtype", choices=("bf16", "f32"), default="bf16", help="of matmul inputs")
    sub.add_argument(
        "--steps",
        type=whole(1),
        default=12,
        help="that are timed; more where they take less than 2 s",
    )
    sub.add_argument("--warm-up", type=whole(1), default=3, help="steps before them")

    sub = verb(actions, "history", "what has become slower or faster, of results kept by --save")
    sub.add_argument("files", nargs="+", metavar="FILE",
                     help="results; of two files the newest of the second is compared with the "
                     "newest of the first, of one with those of the version before")  # fmt: skip
    sub.add_argument("--fail-below", type=float, metavar="RATIO",
                     help="exit code 1 if a speed is less than this share of the "
                     "earlier one, as 0.95")  # fmt: skip


def add_io_verbs(measured: Callable[..., argparse.ArgumentParser]) -> None:
    """Add what moves data: the loader, tokenizers and checkpoints."""
    sub = measured("loader", "tokens per second of the training pipeline alone", configured=True)
    sub.add_argument("--shape", choices=("small", "gpt2"), default="small",
                     help="whose rows and context are read; default: small")  # fmt: skip
    sub.add_argument("--store", metavar="DIR",
                     help="token store to read; default: one of random ids")  # fmt: skip
    for name, default, meaning in (
        ("--tokens", 100_000_000, "in the store that is made"),
        ("--doc-tokens", 700, "of its documents on average"),
    ):
        sub.add_argument(name, type=whole(2), default=default, metavar="N",
                         help=f"{meaning}; default: {default:,}")  # fmt: skip
    sub.add_argument("--seconds", type=whole(1), default=2, metavar="N",
                     help="that are timed, each of --repeats times; default: 2")  # fmt: skip
    sub.add_argument("--repeats", type=whole(1), default=5, metavar="N", help="default: 5")
    sub.add_argument("--steps", type=whole(0), default=3, metavar="N",
                     help="of training that wait for it; 0: none; default: 3")  # fmt: skip

    sub = measured("tokenizer", "MB/s of text to ids, on one core and on all",
                   figure="prepare_mb_per_sec_median")  # fmt: skip
    sub.add_argument("--model", metavar="FILE",
                     help="tokenizer of any kind; default: one trained on the text")  # fmt: skip
    sub.add_argument("--kind", choices=("bpe", "unigram"), default="bpe", help="that is trained")
    sub.add_argument("--vocab", type=whole(256), default=8192, metavar="N",
                     help="ids that are trained; default: 8,192")  # fmt: skip
    sub.add_argument("--text", metavar="FILE", action="append", default=[],
                     help="to encode, in UTF-8; repeatable; default: the sources of Python's "
                     "standard library")  # fmt: skip
    sub.add_argument("--workers", type=whole(0), default=0, metavar="N",
                     help="processes; default: one for each core")  # fmt: skip
    sub.add_argument("--repeats", type=whole(1), default=3, metavar="N", help="default: 3")

    sub = measured("checkpoint", "seconds of saving and restoring, beside plain files",
                   configured=True, figure="save_bytes_per_sec_median")  # fmt: skip
    sub.add_argument("--shape", choices=("small", "gpt2"), default="small",
                     help="whose state is saved: 0.17 or 1.5 GB; default: small")  # fmt: skip
    sub.add_argument("--dir", metavar="DIR",
                     help="folder on the disk to measure; default: the temporary one")  # fmt: skip
    sub.add_argument("--repeats", type=whole(1), default=3, metavar="N", help="default: 3")

    sub = measured("generate", "tokens per second of greedy generation", configured=True)
    sub.add_argument("--shape", choices=("small", "gpt2"), default="gpt2",
                     help="with biases, a context of 1,024 and, of gpt2, 50,257 ids as "
                     "transformers has it; default: gpt2")  # fmt: skip
    add_dtype(sub)
    for name, default, least, meaning in (
        ("--batch", 1, 1, "prompts at once"),
        ("--prompt", 128, 1, "ids of a prompt"),
        ("--new", 128, 2, "ids that are made for each"),
        ("--repeats", 5, 1, "calls that are timed, after one that compiles"),
    ):
        sub.add_argument(name, type=whole(least), default=default, metavar="N",
                         help=f"{meaning}; default: {default}")  # fmt: skip


def add_dtype(sub: argparse.ArgumentParser) -> None:
    """Add the number format of matmul inputs."""
    sub.add_argument("--dtype", choices=("bf16", "f32"), default="bf16", help="of matmul inputs")


def add_repeats(sub: argparse.ArgumentParser) -> None:
    """Add how often is timed."""
    sub.add_argument("--repeats", type=whole(1), default=10, metavar="N",
                     help="times that each is timed, in turns; default: 10")  # fmt: skip
