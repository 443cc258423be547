"""What each verb of the command does: call one function of a room, print its result.

Every function returns the JSON object of its verb; text for people goes to stdout unless --json
asked for the object alone. The rooms are imported where they are used: a verb loads only its own.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxgpt import config
from jaxgpt.commands import data as data_commands
from jaxgpt.commands.data import is_prepared
from jaxgpt.commands.terminal import load_config, say, show
from jaxgpt.config import Config
from jaxgpt.errors import DataError


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run the verb of the parsed arguments and return its JSON object."""
    verbs = {
        "prepare": data_commands.prepare,
        "train": train,
        "eval": evaluate,
        "generate": generate,
        "plan": plan,
        "tokenizer train": data_commands.tokenizer_train,
        "tokenizer import": data_commands.tokenizer_import,
        "tokenizer info": data_commands.tokenizer_info,
        "tokenizer encode": data_commands.tokenizer_encode,
        "tokenizer decode": data_commands.tokenizer_decode,
        "data merge": data_commands.merge,
        "data stats": look,
        "data verify": look,
        "data show": look,
        "data find": look,
        "doctor": examine,
        "bench step": bench,
        "bench attention": bench,
        "bench loss": bench,
        "bench loader": bench,
        "bench tokenizer": bench,
        "bench checkpoint": bench,
        "bench generate": bench,
        "bench gpu": bench,
        "bench growth": bench,
        "bench history": bench,
        "hf import": hugging_face,
        "hf export": hugging_face,
    }
    action = getattr(args, "action", None)
    return verbs[f"{args.verb} {action}" if action else args.verb](args)


def look(args: argparse.Namespace) -> dict[str, Any]:
    """Run a verb that looks into stores."""
    from jaxgpt.commands import inspect as inspect_commands
    from jaxgpt.commands import survey as survey_commands

    verbs = {
        "stats": survey_commands.data_stats,
        "verify": survey_commands.data_verify,
        "show": inspect_commands.data_show,
        "find": inspect_commands.data_find,
    }
    return verbs[args.action](args)


def plan(args: argparse.Namespace) -> dict[str, Any]:
    """Plan a run for a machine that need not be here."""
    from jaxgpt.commands import plan as plan_commands

    return plan_commands.plan(args)


def examine(args: argparse.Namespace) -> dict[str, Any]:
    """Check what this machine or a mesh computes."""
    from jaxgpt.commands.doctor import doctor

    return doctor(args)


def bench(args: argparse.Namespace) -> dict[str, Any]:
    """Measure a part."""
    from jaxgpt.commands.bench import bench

    return bench(args)


def hugging_face(args: argparse.Namespace) -> dict[str, Any]:
    """Run a verb that takes models in or out."""
    from jaxgpt.commands import hf as hf_commands

    return hf_commands.hf_import(args) if args.action == "import" else hf_commands.hf_export(args)


# Training.


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train or continue a run, and report its final evaluation."""
    cfg = load_config(args.config)
    if args.show_config:
        show(args, config.to_toml(cfg))
        return {"config": config.to_dict(cfg), "origins": cfg.origins}
    from jaxgpt.commands import hosts as host_commands

    if args.dry_run:
        return host_commands.dry_run(args, cfg)
    # Before the others are met, as from then on each has to give signs of life.
    from jaxgpt.evaluation.perplexity import report_table
    from jaxgpt.train import train as train_run

    host_commands.start(args)
    outcome = train_run(cfg, say)
    if outcome.results:
        show(args, report_table(outcome.results, outcome.baselines))
    return outcome.to_dict()


# Checkpoints at work.


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """Evaluate a checkpoint on held-out stores or text, on all devices of all hosts."""
    from jaxgpt.commands import hosts as host_commands

    _, names = host_commands.start(args)
    with host_commands.watched(names, args):
        return evaluate_weights(args, host_commands.spread if len(names) > 1 else None)


def evaluate_weights(
    args: argparse.Namespace, shardings: Callable[[Config], Any] | None
) -> dict[str, Any]:
    """Evaluate with weights that lie as `shardings` says; None: on the first device."""
    from jaxgpt.checkpoint.load import find_tokenizer
    from jaxgpt.evaluation import perplexity
    from jaxgpt.parallel.agreement import check_agreement
    from jaxgpt.runtime.devices import start_jax
    from jaxgpt.runtime.watchdog import LIMITS
    from jaxgpt.tokenization import tokenizer

    cfg, params, record = load_weights(args, shardings)
    for line in start_jax(cfg).lines:
        say(line)
    digest = record.identity.get("tokenizer")
    results, baselines = {}, {}
    for name, store_or_texts in eval_inputs(args, cfg, record):
        facts = functools.partial(facts_of_data, store_or_texts)
        check_agreement("data", facts, LIMITS["open"])
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


def facts_of_data(store_or_texts: Any) -> dict[str, str]:
    """Return the digest of a store, or the SHA-256 of documents, for the hosts to compare."""
    if not isinstance(store_or_texts, list):
        return {"--data": store_or_texts.digest}
    digest = hashlib.sha256()
    for text in store_or_texts:
        digest.update(f"{len(text)} {text}".encode(errors="surrogatepass"))
    return {"--data": digest.hexdigest()}


def load_weights(
    args: argparse.Namespace, shardings: Callable[[Config], Any] | None = None
) -> tuple[Config, Any, Any]:
    """Return configuration, weights and commit record of a checkpoint, as --weights and --dtype
    ask for them, and say what was taken."""
    from jaxgpt.checkpoint.load import averaged, load_step

    cfg, params, record = load_step(
        args.run, step=args.step, weights=args.weights or "best", shardings=shardings
    )
    if args.dtype:
        cfg = config.with_values(cfg, f"--dtype {args.dtype}", train={"compute_dtype": args.dtype})
    average = averaged(record) and args.weights != "last"
    say(
        f"step {record.step}: {'moving average of the weights' if average else 'last weights'} in "
        f"{params.embed.dtype}, computing in {cfg.train.compute_dtype}"
    )
    return cfg, params, record


def eval_inputs(args: argparse.Namespace, cfg: Config, record: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, store or documents) of --data, or of the run's own held-out sets."""
    from jaxgpt.corpus import sources
    from jaxgpt.data.store import open_store

    wanted = dict(split_name(text) for text in args.data)
    if not wanted:
        from jaxgpt.checkpoint.load import run_folder
        from jaxgpt.data.history import recall
        from jaxgpt.evaluation.sets import eval_stores

        mixture = record.meta.get("mixture")
        history = recall(mixture, record.position) if mixture else None
        yield from eval_stores(cfg, history, search=run_folder(args.run), say=say).items()
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
    from jaxgpt.checkpoint.load import find_tokenizer
    from jaxgpt.evaluation import generate as generation
    from jaxgpt.evaluation.sampling import Sampling
    from jaxgpt.runtime.devices import start_jax
    from jaxgpt.tokenization import tokenizer

    sampling = Sampling(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
    )
    prompts = [*args.prompt, *(read_lines(args.prompt_file) if args.prompt_file else [])] or [""]
    prompts = [prompt for prompt in prompts for _ in range(args.samples)]
    cfg, params, record = load_weights(args)
    start_jax(cfg)
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
