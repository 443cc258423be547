"""What the verbs `tokenizer`, `prepare` and `data merge` do: from text to token stores.

Every function returns the JSON object of its verb; text for people goes to stdout unless --json
asked for the object alone. Looking into stores is in `survey` and `inspect`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from jaxgpt.commands.terminal import load_config, progress_line, say, show, visible
from jaxgpt.config import Config
from jaxgpt.errors import ConfigError, DataError, Interrupted

# Of the texts found, what is not among the documents or was changed: key of the report, in words.
LEFT_OUT = (
    ("empty", "empty"),
    ("empty_files", "files without a record"),
    ("too_short", "too short"),
    ("too_long", "too long"),
    ("duplicates", "equal to an earlier one"),
    ("bad_skipped", "bad, left out"),
    ("bad_replaced", "bad, mended"),
    ("forced_cuts", "words cut for their length"),
)


# Tokenizer.


def tokenizer_path(cfg: Config) -> Path:
    """Return where the tokenizer of a configuration lies: named, or in the store."""
    if cfg.tokenizer.path:
        return Path(cfg.tokenizer.path)
    if isinstance(cfg.data.store, str) and cfg.data.store:
        return Path(cfg.data.store, "tokenizer.model")
    raise ConfigError("tokenizer.path: name a file, for data.store names no single store")


def make_tokenizer(cfg: Config) -> dict[str, Any]:
    """Train the tokenizer of a configuration on its sources; an equal one is left as it is."""
    from jaxgpt.corpus import counts, formats, sources
    from jaxgpt.tokenization import tokenizer

    path, settings = tokenizer_path(cfg), cfg.tokenizer
    bad: list[formats.BadRecords] = []
    fresh = path.with_name(f"{path.name}.new")
    try:
        tok = tokenizer.train(
            sources.text_pieces(cfg.data, bad),
            fresh,
            kind=settings.kind,
            vocab_size=settings.vocab_size,
            user_symbols=settings.user_symbols,
            max_bytes=settings.train_bytes,
            seed=cfg.run.seed,
            progress=progress_line(
                lambda read, kept: f"tokenizer: {read / 1e6:,.1f} MB read, {kept / 1e6:,.1f} kept"
            ),
        )
        with held(path.parent):
            same = path.exists() and tokenizer.load(path).digest == tok.digest
            if path.exists() and not same and is_prepared(path.parent):
                raise ConfigError(
                    f"{path}: the tokens in {path.parent} were made with this tokenizer, and the "
                    "new one differs; set tokenizer.path or use another data.store"
                )
            fresh.replace(path)
    finally:
        with contextlib.suppress(OSError):  # nothing there: training was refused, or it is in place
            fresh.unlink()
    found = {"path": str(path), "vocab_size": tok.vocab_size, "digest": tok.digest}
    report = tok.report
    if report is None:
        return found
    left = counts.report_of_bad(bad)
    lines = [*report.lines(), *left_out(left)]
    return found | {"report": dataclasses.asdict(report) | left, "lines": lines}


def is_prepared(folder: Path) -> bool:
    """Tell whether a folder holds a finished token store."""
    return any((folder / split / "manifest.json").exists() for split in ("train", "valid"))


def held(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Hold a folder in which `prepare` has worked: it must not lose its tokenizer at work."""
    from jaxgpt.corpus import journal

    return journal.hold(folder) if (folder / ".lock").exists() else contextlib.nullcontext()


def tokenizer_train(args: argparse.Namespace) -> dict[str, Any]:
    """Train a tokenizer and report its size, digest, and how well it fits its text."""
    cfg = load_config(args.config)
    say(f"tokenizer: training {cfg.tokenizer.vocab_size} ids on {', '.join(cfg.data.sources)}")
    result = make_tokenizer(cfg)
    lines = result.pop("lines", [])
    show(args, "\n".join([f"tokenizer: {result['vocab_size']} ids in {result['path']}", *lines]))
    return result


def tokenizer_import(args: argparse.Namespace) -> dict[str, Any]:
    """Write a tokenizer of another program as one file that needs nothing else."""
    from jaxgpt.tokenization import tokenizer, tokenizer_check

    out = Path(args.out)
    if out.exists() and is_prepared(out.parent):
        raise ConfigError(
            f"{out}: the tokens in {out.parent} were made with this tokenizer; choose another OUT"
        )
    with held(out.parent):
        tok = tokenizer.import_model(args.path, out, eos=args.eos, pattern=args.pattern)
    result = tokenizer_check.describe(tok)
    show(args, "\n".join(f"{key}: {value}" for key, value in result.items()))
    return result


def open_tokenizer(name: str) -> Any:
    """Return the tokenizer that `name` means: a model file, or the folder of one."""
    from jaxgpt.tokenization import tokenizer

    path = Path(name)
    if path.is_dir():  # of a store or a run; else of a Hugging Face model
        names = tokenizer.MODEL_NAMES
        path /= next((name for name in names if (path / name).exists()), names[0])
    return tokenizer.load(path)


def tokenizer_info(args: argparse.Namespace) -> dict[str, Any]:
    """Describe a tokenizer."""
    from jaxgpt.tokenization import tokenizer_check

    result = tokenizer_check.describe(open_tokenizer(args.model))
    show(args, "\n".join(f"{key}: {value}" for key, value in result.items()))
    return result


def tokenizer_encode(args: argparse.Namespace) -> dict[str, Any]:
    """Print the ids of a text."""
    tok = open_tokenizer(args.model)
    text = " ".join(args.input) if args.input else read_stdin()
    ids = tok.encode(text)
    show(args, " ".join(map(str, ids)))
    return {"ids": ids, "bytes": len(text.encode())}


def tokenizer_decode(args: argparse.Namespace) -> dict[str, Any]:
    """Print the text of ids."""
    tok = open_tokenizer(args.model)
    words = args.input or read_stdin().split()
    for word in words:
        if not re.fullmatch("[0-9]{1,9}", word) or int(word) >= tok.vocab_size:
            raise DataError(f"{word!r} is not an id of {tok.path}, 0 to {tok.vocab_size - 1}")
    text = tok.decode([int(word) for word in words])
    show(args, text)
    return {"text": text}


def read_stdin() -> str:
    """Return standard input as text, byte for byte."""
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise DataError(f"standard input is not UTF-8 at byte {error.start}") from None


# Stores.


def make_store(cfg: Config, workers: int = 0, **options: Any) -> dict[str, Any]:
    """Prepare the token store of a configuration, with progress on stderr.

    `options` are those of `prepare.prepare`.
    """
    from jaxgpt.corpus import prepare as preparation

    def describe(done: int, total: int, documents: int) -> str:
        share = done / total if total else 1.0
        return f"prepare: {share:.0%} of {total / 1e6:.1f} MB, {documents} documents"

    return preparation.prepare(cfg, progress=progress_line(describe), workers=workers, **options)


def prepare(args: argparse.Namespace) -> dict[str, Any]:
    """Make a token store, or a share of the work for one, and report what went into it."""
    cfg = load_config(args.config)
    with _ended_by_signals():
        report = make_store(
            cfg,
            args.workers,
            partitions=args.partitions,
            runner=args.runner,
            runner_options=(*args.beam_option, *args.after_dashes),
        )
    show(args, store_summary(report))
    return report


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end preparation as Ctrl-C does, workers first; a second one at once.

    Schedulers that take a machine back send them, and start what ends with 75 again.
    """

    def end(number: int, frame: object) -> NoReturn:
        signal.signal(number, signal.SIG_DFL)
        name = signal.Signals(number).name
        raise Interrupted(f"{name}: prepare goes on from here when it is started again")

    handlers = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # ignored: nohup
                handlers[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def merge(args: argparse.Namespace) -> dict[str, Any]:
    """Publish one store of the shares that several `prepare` runs made."""
    from jaxgpt.corpus.merge import merge as merge_shares

    report = merge_shares(
        args.destination,
        args.folders,
        progress=progress_line(lambda done, total: f"merge: {done} of {total} partitions"),
    )
    show(args, store_summary(report))
    return report


def left_out(report: dict[str, Any]) -> list[str]:
    """Return in lines what is not among the documents or was changed, and the first bad places."""
    counted = [f"{report[key]:,} {what}" for key, what in LEFT_OUT if report.get(key)]
    problems = [*report["bad_places"], *(f["reason"] for f in report.get("skipped_files", []))]
    return ([", ".join(counted)] if counted else []) + [visible(problem) for problem in problems]


def store_summary(report: dict[str, Any]) -> str:
    """Return the report of `prepare` in a few lines, one per source and one per part."""
    lines = ["already prepared; nothing to do"] if report.get("already_prepared") else []
    for source in report["sources"]:
        lines.append(
            f"{visible(source['source'])}: {source['documents']:,} documents, "
            f"{source['bytes']:,} bytes, {source['tokens']:,} tokens, "
            f"{source['bytes_per_token']:.2f} bytes per token, "
            f"{source['byte_token_share']:.1%} single bytes"
        )
        lines += [f"  {line}" for line in left_out(source)]
    if "share" in report:
        lines.append(
            f"share {report['share']}: {report['partitions']} of {report['partitions_in_all']} "
            f"partitions, {len(report['missing'])} not yet in this folder; `jaxgpt data merge` "
            "publishes the store when all are there"
        )
    for part in ("train", "valid"):
        if part in report:
            facts = report[part]
            lines.append(f"{part}: {facts['documents']:,} documents, {facts['tokens']:,} tokens")
    packing = report.get("packing", {})
    for part in ("train", "valid"):
        if part in packing:
            facts = packing[part]
            cut = f", {facts['truncated_tokens']:,} tokens of longer documents left out"
            lines.append(
                f"{part}: {facts['rows']:,} rows of {packing['seq_len']:,} by {packing['kind']}, "
                f"{facts['padding_share']:.3%} padding" + cut * bool(facts["truncated_tokens"])
            )
    return "\n".join(lines)
