"""What the verbs `data verify` and `data stats` do: whether stores are whole, and what they hold.

Every function returns the JSON object of its verb; text for people goes to stdout unless --json
asked for the object alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxgpt import ramp
from jaxgpt.commands.data import LEFT_OUT
from jaxgpt.commands.inspect import Steps, opened
from jaxgpt.commands.terminal import progress_line, say, show, table, visible
from jaxgpt.config import Config
from jaxgpt.corpus import survey
from jaxgpt.data.mixture import ends
from jaxgpt.data.store import Store
from jaxgpt.data.stream import Data, epochs
from jaxgpt.errors import ConfigError, DataError
from jaxgpt.validation import num_steps

ALWAYS = ("empty", "duplicates", "bad_skipped")  # told also where there were none


def data_verify(args: argparse.Namespace) -> dict[str, Any]:
    """Check every byte of token stores; the exit code is 65 if anything is wrong."""
    stores, problems = [], []
    for name in args.stores:
        try:
            found = survey.verify(Path(name), _read_line(name))
        except DataError as error:
            found = {"store": name, "problems": [str(error)]}
        stores.append(found)
        problems += found["problems"]
        if "shards" in found:
            show(
                args,
                f"{name}: {found['shards']:,} shards, {found['bytes'] / 1e6:,.1f} MB, "
                f"{found['manifests']} manifests, {found['indices']} packing indices: "
                f"{len(found['problems']) or 'nothing'} wrong",
            )
    for problem in problems:
        say(f"jaxgpt: error: {visible(problem)}")
    code = DataError.exit_code if problems else 0
    return {"stores": stores, "damaged": len(problems), "exit_code": code}


def _read_line(name: str) -> Callable[[int, int], None]:
    return progress_line(
        lambda done, total: f"verify: {name}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB"
    )


def data_stats(args: argparse.Namespace) -> dict[str, Any]:
    """Print what is in stores, or in those of a configuration and how its run will use them."""
    words = [word for word in args.config if "=" not in word]
    if words and all(
        Path(word).is_dir() and not Path(word, "config.toml").is_file() for word in words
    ):
        if len(args.config) > len(words):
            raise ConfigError(f"{words[0]}: a token store takes no section.field=value")
        surveys = {word: survey.survey(Path(word), _lengths_line(word)) for word in words}
        show(args, "\n\n".join(map(store_tables, surveys.values())))
        return {"stores": surveys} if len(words) > 1 else surveys[words[0]]
    with opened(args.config) as (cfg, data, steps):
        usage = run_usage(cfg, data, steps)
        folders: dict[Path, str] = {}
        for name, rows in zip(data.names, data.sources, strict=True):
            if rows:  # NAME@N, an earlier generation, lies in the folder of NAME
                path = folder(rows.store)
                folders[path] = min(name, folders.get(path, name))
        stores = {name: survey.survey(path, _lengths_line(name)) for path, name in folders.items()}
    for facts in stores.values():
        show(args, store_tables(facts) + "\n")
    show(args, usage_text(usage))
    return {"run": usage, "stores": stores}


def folder(store: Store) -> Path:
    """Return the folder that `prepare` wrote, given one of its splits."""
    return store.directory.parent if store.directory.name == "train" else store.directory


def _lengths_line(name: str) -> Any:
    return progress_line(lambda done, total: f"stats: {name}: {done} of {total} shards")


def run_usage(cfg: Config, data: Data, steps: Steps) -> dict[str, Any]:
    """Return how the run of a configuration will use its stores, as JSON values."""
    wanted = num_steps(cfg, steps.start.step, steps.start.position)
    there = steps.last(data)
    endless = data.mixture.end is None
    total = min(wanted, there) if wanted else None if endless else there
    stop = None if total is None else steps.end(total)
    passes = {} if stop is None else epochs(data, stop)
    out = ends(data.mixture)
    names = dict(zip(data.mixture.names, data.names, strict=True))
    stores = []
    for digest, name, rows in zip(data.mixture.names, data.names, data.sources, strict=True):
        if rows is None:
            continue
        inputs = rows.num_rows * data.seq_len
        cut = rows.index.truncated if rows.index else None
        tokens = rows.store.stream_len - (cut.tokens if cut else 0)
        stores.append(
            {
                "store": name,
                "digest": digest,
                "rows_per_epoch": rows.num_rows,
                "padding_share": 1 - tokens / inputs,
                "truncated_tokens": cut.tokens if cut else 0,
                "truncated_documents": cut.documents if cut else 0,
                "epochs": passes.get(name),
                "runs_out_at_position": out.get(digest),
                "runs_out_in_step": steps.of(out[digest] - 1)[0] if digest in out else None,
            }
        )
    return {
        "seq_len": data.seq_len,
        "packing": cfg.data.packing,
        "order": cfg.data.order,
        "global_batch": cfg.train.global_batch,
        "batch_ramp": cfg.train.batch_ramp,
        "steps": total,
        "data_ends_after_step": None if endless else there,
        "rows_left_over": None if endless else max(0, data.end - steps.end(there)),
        "plan": [
            {"start": start, "weights": {names[digest]: w for digest, w in weights.items()}}
            for start, weights in data.mixture.plan
        ],
        "stores": stores,
    }


def usage_text(usage: dict[str, Any]) -> str:
    """Return what `run_usage` found as text."""
    headers = ["store", "rows/epoch", "padding", "cut off", "epochs", "runs out in step"]
    rows = [
        (
            s["store"],
            s["rows_per_epoch"],
            f"{s['padding_share']:.3%}",
            s["truncated_tokens"],
            "" if s["epochs"] is None else f"{s['epochs']:.3f}",
            s["runs_out_in_step"] or "",
        )
        for s in usage["stores"]
    ]
    steps = "no end" if usage["steps"] is None else f"{usage['steps']:,} steps"
    text = (
        f"rows of {usage['seq_len']:,} packed {usage['packing']} in {usage['order']} order, "
        f"{ramp.describe(usage['batch_ramp'])}{usage['global_batch']:,} a step, {steps}"
    )
    if usage["data_ends_after_step"] is not None:
        text += (
            f"; the data ends after step {usage['data_ends_after_step']:,}, "
            f"{usage['rows_left_over']:,} rows left over"
        )
    for stage in usage["plan"] if len(usage["stores"]) > 1 or usage["plan"][1:] else []:
        weights = " + ".join(f"{weight:g} {name}" for name, weight in stage["weights"].items())
        text += f"\nfrom row {stage['start']:,} on: {visible(weights)}"
    return f"{text}\n{table(headers, rows)}"


def store_tables(facts: dict[str, Any]) -> str:
    """Return what `survey.survey` found as text: splits, sources and lengths of documents."""
    tokenizer = facts["tokenizer"]
    blocks = [
        f"{facts['store']}: tokenizer {tokenizer['digest'][:12]}, {tokenizer['vocab_size']:,} ids, "
        f"end of text {tokenizer['eos_id']}"
    ]
    keys = ("documents", "tokens", "bytes", "shards", "bytes_on_disk", "generation")
    headers = ["split", *(key.replace("_", " ") for key in keys), "digest"]
    splits = facts["splits"]
    rows = [(name, *(s[key] for key in keys), s["digest"][:12]) for name, s in splits.items()]
    blocks.append(table(headers, rows))
    sources = facts["sources"]
    keys = ("documents", "bytes", "tokens")
    left_out = [
        (key, words)
        for key, words in LEFT_OUT
        if key in ALWAYS or any(source.get(key) for source in sources)
    ]
    headers = ["source", *keys, "bytes/token", "single bytes", *(words for _, words in left_out)]
    rows = [
        (
            source["source"],
            *(source[key] for key in keys),
            f"{source['bytes_per_token']:.2f}",
            f"{source['byte_token_share']:.2%}",
            *(source.get(key, 0) for key, _ in left_out),
        )
        for source in sources
    ]
    blocks += [table(headers, rows)] if rows else []
    columns = {name: s["lengths"] for name, s in splits.items()}
    if len(sources) in range(2, 7):
        columns |= {s["source"]: s["lengths"] for s in sources if "lengths" in s}
    lower = sorted({int(bound) for counts in columns.values() for bound in counts})
    rows = [
        (_range(bound), *(counts.get(str(bound), 0) for counts in columns.values()))
        for bound in lower
    ]
    if rows:
        blocks.append(table(["tokens", *columns], rows))
    return "\n\n".join(blocks)


def _range(bound: int) -> str:
    return "1" if bound == 1 else f"{bound:,} to {2 * bound - 1:,}"
