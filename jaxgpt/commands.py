"""What each verb of the command does: call one function of a room, print its result.

Every function returns the JSON object of its verb; text for people goes to stdout unless --json
asked for the object alone. The rooms are imported where they are used: a verb loads only its own.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxgpt import config
from jaxgpt.config import Config
from jaxgpt.errors import ConfigError, DataError


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run the verb of the parsed arguments and return its JSON object."""
    verbs = {
        "prepare": prepare,
        "train": train,
        "eval": evaluate,
        "generate": generate,
        "tokenizer train": tokenizer_train,
        "tokenizer info": tokenizer_info,
        "tokenizer encode": tokenizer_encode,
        "tokenizer decode": tokenizer_decode,
    }
    action = getattr(args, "action", None)
    return verbs[f"{args.verb} {action}" if action else args.verb](args)


def load_config(words: list[str]) -> Config:
    """Return the configuration of `[CONFIG.toml] [section.field=value ...]`, in any order."""
    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise ConfigError(f"one CONFIG.toml at most, but got {', '.join(files)}")
    return config.load(files[0] if files else None, [word for word in words if "=" in word])


def show(args: argparse.Namespace, text: str) -> None:
    """Print a result for people; with --json only the object is printed."""
    if not args.json:
        print(text, flush=True)


def say(text: str) -> None:
    """Print one line of progress."""
    print(text, file=sys.stderr, flush=True)


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
    from jaxgpt.data import sources, tokenizer

    path, settings = tokenizer_path(cfg), cfg.tokenizer
    fresh = path.with_name(f"{path.name}.new")
    try:
        tok = tokenizer.train(
            sources.texts(cfg.data),
            fresh,
            kind=settings.kind,
            vocab_size=settings.vocab_size,
            user_symbols=settings.user_symbols,
            max_bytes=settings.train_bytes,
            seed=cfg.run.seed,
        )
        if path.exists() and tokenizer.load(path).digest != tok.digest and is_prepared(path.parent):
            raise ConfigError(
                f"{path}: the tokens in {path.parent} were made with this tokenizer, and the new "
                "one differs; set tokenizer.path or use another data.store"
            )
        fresh.replace(path)
    finally:
        with contextlib.suppress(OSError):  # nothing there: training was refused, or it is in place
            fresh.unlink()
    return {
        "path": str(path),
        "vocab_size": tok.vocab_size,
        "digest": tok.digest,
    }


def is_prepared(folder: Path) -> bool:
    """Tell whether a folder holds a finished token store."""
    return any((folder / split / "manifest.json").exists() for split in ("train", "valid"))


def tokenizer_train(args: argparse.Namespace) -> dict[str, Any]:
    """Train a tokenizer and report its size and digest."""
    cfg = load_config(args.config)
    say(f"tokenizer: training {cfg.tokenizer.vocab_size} ids on {', '.join(cfg.data.sources)}")
    result = make_tokenizer(cfg)
    show(args, f"tokenizer: {result['vocab_size']} ids in {result['path']}")
    return result


def open_tokenizer(name: str) -> Any:
    """Return the tokenizer that `name` means: a model file, a token store or a run folder."""
    from jaxgpt.data import tokenizer

    path = Path(name)
    return tokenizer.load(path / "tokenizer.model" if path.is_dir() else path)


def tokenizer_info(args: argparse.Namespace) -> dict[str, Any]:
    """Describe a tokenizer."""
    tok = open_tokenizer(args.model)
    result = {
        "path": tok.path,
        "vocab_size": tok.vocab_size,
        "eos_id": tok.eos_id,
        "pad_id": tok.pad_id,
        "specials": tok.specials,
        "digest": tok.digest,
    }
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
        if not word.isdigit() or int(word) >= tok.vocab_size:
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


# Data.


def make_store(cfg: Config, workers: int = 0) -> dict[str, Any]:
    """Prepare the token store of a configuration, with progress on stderr."""
    from jaxgpt.data import prepare as preparation

    return preparation.prepare(cfg, progress=say_progress("prepare"), workers=workers)


def say_progress(label: str) -> Any:
    """Return a function of (done bytes, all bytes, documents) that prints about every 5 seconds."""
    import time

    last = time.monotonic()

    def progress(done: int, total: int, documents: int) -> None:
        nonlocal last
        if time.monotonic() - last >= 5:
            last = time.monotonic()
            share = done / total if total else 1.0
            say(f"{label}: {share:.0%} of {total / 1e6:.1f} MB, {documents} documents")

    return progress


def prepare(args: argparse.Namespace) -> dict[str, Any]:
    """Make a token store and report what went into it."""
    cfg = load_config(args.config)
    report = make_store(cfg, args.workers)
    show(args, store_summary(report))
    return report


def store_summary(report: dict[str, Any]) -> str:
    """Return the report of `prepare` in a few lines, one per source and one per part."""
    lines = ["already prepared; nothing to do"] if report.get("already_prepared") else []
    for source in report["sources"]:
        lines.append(
            f"{source['source']}: {source['documents']:,} documents, "
            f"{source['bytes'] / 1e6:,.1f} MB, {source['tokens']:,} tokens, "
            f"{source['bytes_per_token']:.2f} bytes per token, "
            f"{source['byte_token_share']:.1%} single bytes; {source['empty']} empty, "
            f"{source['bad_skipped']} bad skipped, {source['bad_replaced']} mended"
        )
        lines += [f"  {place}" for place in source["bad_places"]]
    for part in ("train", "valid"):
        lines.append(
            f"{part}: {report[part]['documents']:,} documents, {report[part]['tokens']:,} tokens"
        )
    return "\n".join(lines)


# Training.


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train or continue a run, and report its final evaluation."""
    cfg = load_config(args.config)
    if args.show_config:
        show(args, config.to_toml(cfg))
        return {"config": config.to_dict(cfg), "origins": cfg.origins}
    from jaxgpt.evaluation.perplexity import report_table
    from jaxgpt.train import train as train_run

    outcome = train_run(cfg, say)
    if outcome.results:
        show(args, report_table(outcome.results, outcome.baselines))
    return outcome.to_dict()


# Checkpoints at work.


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """Evaluate a checkpoint on held-out stores or text."""
    from jaxgpt import runtime
    from jaxgpt.checkpoint.load import find_tokenizer, load_step
    from jaxgpt.data import tokenizer
    from jaxgpt.evaluation import perplexity

    cfg, params, record = load_step(args.run, step=args.step)
    for line in runtime.start_jax(cfg).lines:
        say(line)
    digest = record.identity.get("tokenizer")
    results, baselines = {}, {}
    for name, store_or_texts in eval_inputs(args, cfg):
        if isinstance(store_or_texts, list):
            tok = tokenizer.load(find_tokenizer(args.run))
            result = perplexity.evaluate_text(
                cfg, params, tok, store_or_texts, batch=args.batch, name=name
            )
            raw = "".join(store_or_texts).encode()
        else:
            with_store = store_or_texts
            if digest not in (None, with_store.tokenizer_digest):
                raise DataError(
                    f"{name} ({with_store.directory}): made with tokenizer "
                    f"{with_store.tokenizer_digest[:12]}, the run was trained with {digest[:12]}; "
                    "prepare it with the tokenizer of the run, or give the text itself"
                )
            result = perplexity.evaluate(
                cfg, params, with_store, batch=args.batch, max_rows=args.max_rows
            )
            raw = perplexity.store_bytes(with_store, perplexity.store_tokenizer(with_store))
            with_store.close()
        results[name] = result
        baselines[name] = perplexity.compressor_baselines(raw)
    show(args, perplexity.report_table(results, baselines))
    return {
        name: result.to_dict() | {"baselines": baselines[name]} for name, result in results.items()
    }


def eval_inputs(args: argparse.Namespace, cfg: Config) -> Iterator[tuple[str, Any]]:
    """Yield (name, store or documents) of --data, or of the run's own held-out sets."""
    from jaxgpt.data import sources
    from jaxgpt.data.store import open_store

    wanted = dict(split_name(text) for text in args.data)
    if not wanted:
        from jaxgpt.checkpoint.load import run_folder
        from jaxgpt.train import eval_stores

        yield from eval_stores(cfg, search=run_folder(args.run)).items()
        return
    for name, path in wanted.items():
        if is_prepared(Path(path)) or Path(path, "manifest.json").exists():
            yield name, open_store(path, "valid")
        else:
            given = dataclasses.replace(cfg.data, sources=(path,))
            yield name, [text for text in sources.texts(given) if text]


def split_name(text: str) -> tuple[str, str]:
    """Return (name, path) of `[NAME=]PATH`; the name is by default the path."""
    name, equals, path = text.partition("=")
    return (name, path) if equals else (text, text)


def generate(args: argparse.Namespace) -> dict[str, Any]:
    """Write text with a checkpoint: one row as it comes, several when they are done."""
    from jaxgpt import runtime
    from jaxgpt.checkpoint.load import find_tokenizer, load_step
    from jaxgpt.data import tokenizer
    from jaxgpt.evaluation import generate as generation
    from jaxgpt.evaluation.sampling import Sampling

    sampling = Sampling(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
    )
    prompts = [*args.prompt, *(read_lines(args.prompt_file) if args.prompt_file else [])] or [""]
    prompts = [prompt for prompt in prompts for _ in range(args.samples)]
    cfg, params, record = load_step(args.run, step=args.step)
    runtime.start_jax(cfg)
    tok = tokenizer.load(find_tokenizer(args.run))
    streaming = len(prompts) == 1 and not args.json
    shown = False

    def stream(row: int, piece: str) -> None:
        nonlocal shown
        print(piece if shown else prompts[row] + piece, end="", flush=True)
        shown = True

    rows = generation.generate(
        cfg.model,
        params,
        tok,
        prompts,
        sampling,
        max_new_tokens=args.max_new_tokens,
        seed=args.seed,
        stop_at_eos=not args.ignore_eos,
        window=args.window,
        on_text=stream if streaming else None,
        dtype=cfg.train.compute_dtype,
    )
    keep_samples(args, record.step, prompts, rows)
    if streaming:
        print("" if shown else prompts[0])
    else:
        for number, (prompt, row) in enumerate(zip(prompts, rows, strict=True), 1):
            show(args, f"--- sample {number} ({row.finished_reason})\n{prompt}{row.text}")
    return {
        "samples": [
            {"prompt": prompt, **dataclasses.asdict(row)}
            for prompt, row in zip(prompts, rows, strict=True)
        ]
    }


def keep_samples(args: argparse.Namespace, step: int, prompts: list[str], rows: list[Any]) -> None:
    """Append what was written to `samples.jsonl` of the run, if its folder can be written."""
    from jaxgpt.checkpoint.load import run_folder

    options = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    common = {"step": step} | {name: getattr(args, name) for name in options}
    lines = [
        json.dumps(common | {"prompt": prompt, "text": row.text, "finished": row.finished_reason})
        for prompt, row in zip(prompts, rows, strict=True)
    ]
    with contextlib.suppress(OSError), open(run_folder(args.run) / "samples.jsonl", "a") as file:
        file.write("\n".join(lines) + "\n")


def read_lines(name: str) -> list[str]:
    """Return the lines of a file of prompts."""
    try:
        return Path(name).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"{name}: cannot read the prompts: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name}: byte {error.start}: 0x{error.object[error.start]:02X} is not UTF-8; convert "
            "the file of prompts"
        ) from None
