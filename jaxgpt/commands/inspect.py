"""What the verbs `data show` and `data find` do: looking into rows and for documents.

They take a configuration, or a run folder: then the mixture is as the run recorded it. Steps and
the rows of a batch count from 1; positions, epochs, documents and rows of a store from 0. Every
function returns the JSON object of its verb.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxgpt import config, ramp
from jaxgpt.commands.data import is_prepared
from jaxgpt.commands.terminal import excerpt, load_config, say, show, table, visible
from jaxgpt.config import Config
from jaxgpt.data import inspect
from jaxgpt.data.history import History
from jaxgpt.data.stream import Data, open_data
from jaxgpt.errors import ConfigError
from jaxgpt.ramp import Span
from jaxgpt.validation import num_steps

PRINTED = 100  # sightings in the text for people; --json has all up to --limit


class Steps(NamedTuple):
    """How steps and positions correspond: from a saved step and its position on, batch by batch."""

    spans: tuple[Span, ...]

    @property
    def start(self) -> Span:
        """The span in which the first known step lies: what came before had other batches."""
        return self.spans[0]

    def first(self, step: int) -> int:
        """Return the position of the first row of a step."""
        if step <= self.start.step:
            raise ConfigError(
                f"step {step}: batches of this run had other sizes before step "
                f"{self.start.step + 1}; give a --position (metrics.jsonl has the one after each "
                "logged step)"
            )
        return ramp.position_after(self.spans, step - 1)

    def end(self, step: int) -> int:
        """Return the position after the last row of a step; an estimate before the first known."""
        if step < self.start.step:
            return max(0, self.start.position - (self.start.step - step) * self.start.rows)
        return ramp.position_after(self.spans, step)

    def of(self, position: int) -> tuple[int | None, int | None]:
        """Return the step and the row in its batch at a position; None where it is not known."""
        if position < self.start.position:
            return None, None
        return ramp.place(self.spans, position)

    def last(self, data: Data) -> int:
        """Return the last step that has a whole batch."""
        return ramp.whole_steps(self.spans, data.end)


class Subject(NamedTuple):
    """What the verbs look into: a configuration, its data, and its steps."""

    cfg: Config
    data: Data
    steps: Steps


@contextlib.contextmanager
def opened(words: list[str], held_out: bool = False, store: str = "") -> Iterator[Subject]:
    """Open the data of a configuration or run folder; `held_out`: as evaluation reads it."""
    folders = [word for word in words if "=" not in word and Path(word).is_dir()]
    history, steps = None, None
    if folders:
        cfg, history, steps = _run(folders[0], [word for word in words if word != folders[0]])
    else:
        cfg = load_config(words)
    steps = steps or Steps(ramp.spans(cfg))
    if held_out:
        cfg, history = _held_out(cfg, store), None
    data = open_data(
        cfg.data,
        seq_len=cfg.model.seq_len,
        seed=cfg.run.seed,
        split="valid" if held_out else "train",
        history=history,
        say=say,
    )
    try:
        yield Subject(cfg, data, steps)
    finally:
        for source in data.stores:
            source.close()


def _run(folder: str, words: list[str]) -> tuple[Config, History | None, Steps | None]:
    """Return the configuration of a run folder, what its newest checkpoint recorded, its steps."""
    path = Path(folder, "config.toml")
    if not path.is_file():
        store = (
            f"; for a store, CONFIG.toml data.store={folder}" if is_prepared(Path(folder)) else ""
        )
        raise ConfigError(
            f"{folder}: no config.toml in it; name a CONFIG.toml or a run folder{store}"
        )
    from jaxgpt.checkpoint.load import newest_record
    from jaxgpt.start import recorded_history

    cfg = load_config([str(path), *words])
    cfg = config.with_values(cfg, folder, run={"dir": folder, "overwrite": False})
    record = newest_record(Path(folder))
    steps = None
    if record and record.position != ramp.position_after(ramp.spans(cfg), record.step):
        steps = Steps(ramp.spans(cfg, record.step, record.position))
    return cfg, recorded_history(cfg, record), steps


def _held_out(cfg: Config, name: str) -> Config:
    """Return a configuration whose stream is the held-out rows of one store, in order, once."""
    names = [cfg.data.store] if isinstance(cfg.data.store, str) else list(cfg.data.store)
    chosen = [n for n in names if n == name] or [n for n in names if n.endswith(name)]
    if len(chosen) != 1:
        raise ConfigError(f"--store: choose one of {', '.join(names)} to see its held-out rows")
    plain = {"store": chosen[0], "stages": {}, "order": "sequential", "packing": "concat"}
    return config.with_values(cfg, "--split valid", data=plain | {"max_epochs": 1.0})


# data show.


def data_show(args: argparse.Namespace) -> dict[str, Any]:
    """Print the rows of a step, or one of them with its text, and where they came from."""
    held_out = args.split == "valid"
    if (args.step is None) == (args.position is None) or args.row and args.step is None:
        raise ConfigError("give --step (and perhaps --row), or --position")
    if held_out and args.step is not None:
        raise ConfigError("--split valid: evaluation has no steps; give --position, its row from 0")
    if args.store and not held_out:
        raise ConfigError(
            "--store: the mixture chooses the stores of a step; for --split valid only"
        )
    with opened(args.config, held_out, args.store) as (cfg, data, steps):
        positions = _positions(args, data, steps)
        wanted = list(inspect.samples(data, positions))
        whole = len(wanted) > 1 or args.position is None and not args.row
        rows = [row_facts(sample, *steps.of(sample.position)) for sample in wanted]
        if held_out or rows[0]["step"] is not None and rows[0]["step"] > steps.last(data):
            rows = [row | {"step": None, "batch_row": None} for row in rows]
        if whole:
            show(args, rows_table(rows))
        else:
            _add_text(wanted[0], rows[0])
            show(args, row_text(rows[0]))
    total = num_steps(cfg, steps.start.step, steps.start.position)
    if args.step is not None and 0 < total < args.step:
        say(f"step {args.step} comes after the last of this run, {total}")
    return {"split": args.split, "seq_len": data.seq_len, "rows": rows}


def _positions(args: argparse.Namespace, data: Data, steps: Steps) -> np.ndarray:
    if args.position is not None:
        if args.position >= data.end:
            raise ConfigError(f"--position {args.position}: the last position is {data.end - 1}")
        return np.array([args.position])
    if args.step > steps.last(data):
        raise ConfigError(f"--step {args.step}: the data ends after step {steps.last(data)}")
    first, end = steps.first(args.step), steps.end(args.step)
    if args.row and args.row > end - first:
        raise ConfigError(
            f"--row {args.row}: step {args.step} has rows 1 to {end - first} (train.global_batch)"
        )
    if args.row:
        return np.array([first + args.row - 1])
    return np.arange(first, end)


def row_facts(sample: inspect.Sample, step: int | None, row: int | None) -> dict[str, Any]:
    """Return a sample as JSON values."""
    return {
        "position": sample.position,
        "step": step,
        "batch_row": row,
        "store": sample.name,
        "store_digest": sample.store.digest,
        "epoch": sample.epoch,
        "row": sample.row,
        "padding": sample.padding,
        "parts": [
            {
                "document": part.document,
                "origin": part.origin,
                "row_start": part.row_start,
                "row_stop": part.row_stop,
                "offset": part.offset,
                "document_inputs": part.length,
                "continues_before": part.continues_before,
                "continues_after": part.continues_after,
            }
            for part in sample.parts
        ],
    }


def _add_text(sample: inspect.Sample, row: dict[str, Any]) -> None:
    from jaxgpt.evaluation.perplexity import store_tokenizer

    tok = store_tokenizer(sample.store)
    for part, facts in zip(sample.parts, row["parts"], strict=True):
        facts["ids"] = inspect.part_ids(sample.store, part).tolist()
        facts["text"] = inspect.part_text(tok, sample.store, part)


def _place(row: dict[str, Any]) -> str:
    where = f"position {row['position']:,}"
    if row["step"] is not None:
        where = f"step {row['step']:,}, row {row['batch_row']:,} ({where})"
    return f"{where}: row {row['row']:,} of {visible(row['store'])}, epoch {row['epoch']}"


def row_text(row: dict[str, Any]) -> str:
    """Return a row with its text: a line for each document in it, and what it shows of that."""
    lines = [f"{_place(row)}, {row['padding']} inputs of padding"]
    for part in row["parts"]:
        stop = part["offset"] + part["row_stop"] - part["row_start"]
        notes = ["begins before this row"] if part["continues_before"] else []
        notes += ["goes on after it"] if part["continues_after"] else []
        lines.append(
            f"--- inputs {part['row_start']}..{part['row_stop'] - 1}: document {part['document']} "
            f"from {visible(part['origin'])}, its inputs {part['offset']}..{stop - 1} of "
            f"{part['document_inputs']}" + (f"; {' and '.join(notes)}" if notes else "")
        )
        lines.append(visible(part["text"], lines=True))
    return "\n".join(lines)


def rows_table(rows: list[dict[str, Any]]) -> str:
    """Return the rows of a step, a line each."""
    headers = ["row", "position", "store", "epoch", "store row", "padding", "documents", "first"]
    lines = [
        (
            row["batch_row"] or "",
            row["position"],
            row["store"],
            row["epoch"],
            row["row"],
            row["padding"],
            len(row["parts"]),
            excerpt(row["parts"][0]["origin"], 60),
        )
        for row in rows
    ]
    return table(headers, lines, left=(2, 7))


# data find.


def data_find(args: argparse.Namespace) -> dict[str, Any]:
    """Print the steps and rows at which a run sees a document."""
    with opened(args.config) as (cfg, data, steps):
        total = num_steps(cfg, steps.start.step, steps.start.position)
        last = min(args.steps or total, total or args.steps or 0)
        last = min(last or steps.last(data), steps.last(data))
        if not (args.steps or total) and data.mixture.end is None:
            raise ConfigError(
                "--steps: say how many, for train.num_steps is 0 and the data endless"
            )
        source, document = inspect.find_document(data, args.doc, args.store)
        rows = data.sources[source]
        begin, end = rows.store.document_span(document)
        places = inspect.places(rows, document)
        stop = steps.end(last)
        start = min(stop, steps.first(args.first_step) if args.first_step > 1 else 0)
        count = inspect.count_sightings(data, source, document, start, stop)
        found = inspect.sightings(data, source, document, start, stop)
        sightings = [
            {"step": steps.of(s.position)[0], "batch_row": steps.of(s.position)[1]}
            | {"position": s.position, "epoch": s.epoch}
            | s.place._asdict()
            for s in itertools.islice(found, args.limit)
        ]
        result = {
            "store": data.names[source],
            "store_digest": rows.store.digest,
            "document": document,
            "origin": rows.store.provenance(document),
            "inputs": end - begin,
            "inputs_left_out": end - begin - sum(p.row_stop - p.row_start for p in places),
            "steps": [args.first_step, last],
            "count": count,
            "sightings": sightings,
        }
    show(args, find_text(result))
    return result


def find_text(result: dict[str, Any]) -> str:
    """Return what `data find` found as text."""
    first, last = result["steps"]
    lines = [
        f"document {result['document']} of {visible(result['store'])} from "
        f"{visible(result['origin'])}: {result['inputs'] - 1:,} tokens, seen {result['count']:,} "
        f"times in steps {first:,} to {last:,}"
    ]
    if left := result["inputs_left_out"]:
        lines.append(f"its last {left:,} tokens are in no row (data.packing cuts long documents)")
    headers = [
        "step",
        "row",
        "position",
        "epoch",
        "store row",
        "inputs of the row",
        "from its input",
    ]
    rows = [
        (
            *(s[key] for key in ("step", "batch_row", "position", "epoch", "row")),
            f"{s['row_start']}..{s['row_stop'] - 1}",
            s["offset"],
        )
        for s in result["sightings"][:PRINTED]
    ]
    lines += [table(headers, rows, left=())] if rows else []
    if result["count"] > len(rows):
        lines.append(f"and {result['count'] - len(rows):,} more (--json, --limit, --first-step)")
    return "\n".join(lines)
