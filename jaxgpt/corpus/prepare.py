"""From sources to token stores: `<store>/train`, `<store>/valid` and `<store>/tokenizer.model`.

Partitions are read, tokenised and written by processes, each into shards of its own; a journal of
the finished ones lets a killed run go on, to the same bytes that an unbroken run with any number of
workers, in shares on several machines or under Beam gives. Shards appear under their names only
when complete, manifests after all shards, `prepared.json` last. Documents are held out by content.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from jaxgpt.config import Config, DataConfig
from jaxgpt.corpus import counts, generations, journal, sources
from jaxgpt.corpus.duplicates import leave_out
from jaxgpt.corpus.generations import FINISHED, Finished
from jaxgpt.corpus.journal import MODEL, Share
from jaxgpt.corpus.sources import Partition
from jaxgpt.corpus.workers import SPLITS, Task, run_tasks
from jaxgpt.data.store import open_store, write_manifest
from jaxgpt.durable import storage_errors, write_atomic
from jaxgpt.errors import ConfigError, DataError
from jaxgpt.tokenization import tokenizer
from jaxgpt.tokenization.tokenizer import Tokenizer

VERSION = 2  # of the documents, ids and shards that a key stands for
WORTH_A_PROCESS = 4 << 20  # bytes; starting one costs about a second
SETTINGS = (
    "text_field", "bad_text", "min_bytes", "max_bytes", "dedup", "valid_share", "partition_bytes",
)  # fmt: skip

Progress = Callable[[int, int, int], None]
Run = Callable[[list[Task], int], Iterator[tuple[Task, dict]]]


def prepare(
    cfg: Config,
    progress: Progress | None = None,
    workers: int = 0,
    *,
    partitions: tuple[int, int] | None = None,
    runner: Literal["local", "beam"] = "local",
    runner_options: Sequence[str] = (),
) -> dict:
    """Make the token store `data.store` of `data.sources`, go on making it, or extend it.

    `progress(bytes done, bytes in all, documents)` is called after each partition. `workers` is the
    number of processes, 0 for one per core. `partitions` = (i, n) prepares only the i-th of n
    shares of the partitions, i from 1, and publishes nothing: n such runs may share the folder or
    have folders of their own, and `merge.merge` publishes. `runner` = "beam" does the work in an
    Apache Beam pipeline with `runner_options`. None of these changes the store.

    The report counts documents, bytes, tokens, what was left out and why, per source and in all,
    and the documents and tokens of each split. A store whose sources have grown since gets a new
    generation; one of anything else is refused.

    Raises DataError for unusable sources or tokenizer, for a store of something else, or while
    another process prepares it; StorageError when the folder cannot be written; ConfigError for
    arguments that mean nothing.
    """
    if not isinstance(cfg.data.store, str) or not cfg.data.store:
        raise ConfigError("data.store: `prepare` needs the folder of one store")
    share = _share(partitions)
    run = _runner(runner, runner_options)
    store = Path(cfg.data.store)
    parts = sources.partitions(cfg.data)
    tok = _load_tokenizer(cfg, store)
    key = _key(cfg.data, tok, parts)
    with storage_errors(store):
        store.mkdir(parents=True, exist_ok=True)
        with journal.hold(store, share):
            finished = generations.read_finished(store, key)
            new = generations.added(store, finished, cfg.data, key, parts)
            if finished.generation and not new:
                if not share:  # the last one may have been killed while it cleared up
                    journal.close_journal(store, finished)
                return finished.report | {"already_prepared": True} | _packing(cfg, store)
            key |= {
                "generation": finished.generation + 1,
                "base": finished.digests,
                "first": finished.partitions,
                "partitions": len(new),
            }
            inputs = generations.describe(new, finished.partitions)
            results = journal.open_journal(store, key, inputs, tok.raw, finished, share)
            folder = journal.run_folder(store, share)
            tasks = [
                Task(i, part, str(folder), cfg.data, str((store / MODEL).absolute()), tok.digest)
                for i, part in enumerate(new, finished.partitions)
                if not share or share.holds(i)
            ]
            try:
                _run(store, tasks, results, run, progress, workers)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            if share:
                return _share_report(key, results, share)
            report = publish(store, key, finished, results)
    return report | _packing(cfg, store)


def _share(partitions: tuple[int, int] | None) -> Share | None:
    if partitions is None:
        return None
    share = Share(*partitions)
    if not 1 <= share.number <= share.count:
        raise ConfigError(f"partitions {share}: give I/N with I from 1 to N")
    return share


def _runner(name: str, options: Sequence[str]) -> Run:
    if name == "beam":
        from jaxgpt.corpus import beam_runner

        beam_runner.require_beam()
        return functools.partial(beam_runner.run_tasks, options=options)
    if name != "local":
        raise ConfigError(f"runner {name!r}: choose local or beam")
    if options:
        raise ConfigError(f"runner options {' '.join(options)} are for Beam; choose runner beam")
    return run_tasks


def _load_tokenizer(cfg: Config, store: Path) -> Tokenizer:
    path = Path(cfg.tokenizer.path or store / MODEL)
    if not path.exists():
        raise DataError(f"{path}: no tokenizer there; make one with `jaxgpt tokenizer train`")
    return tokenizer.load(path)


def _key(cfg: DataConfig, tok: Tokenizer, parts: list[Partition]) -> dict[str, Any]:
    """Return everything that the contents of the store depend on."""
    files, size = len(sources.file_keys(parts)), sum(part.size for part in parts)
    return {
        "version": VERSION,
        "tokenizer": tok.digest,
        **{f"data.{name}": getattr(cfg, name) for name in SETTINGS},
        "data.sources": list(cfg.sources),
        "input": f"{size} bytes in {files} files, state {sources.fingerprint(parts)[:16]}",
    }


def _run(
    store: Path,
    tasks: list[Task],
    results: dict[int, dict],
    run: Run,
    progress: Progress | None,
    workers: int,
) -> None:
    """Prepare the partitions that have no result, and journal each as it is finished."""
    left = [task for task in tasks if task.index not in results]
    total = sum(task.partition.size for task in tasks)
    done = total - sum(task.partition.size for task in left)
    documents = sum(results[t.index]["counts"]["documents"] for t in tasks if t.index in results)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = workers or min(cores or 1, 1 + (total - done) // WORTH_A_PROCESS)
    with contextlib.closing(run(left, min(workers, len(left)))) as finished:
        for task, result in finished:
            journal.record(store, task.index, result, Path(task.folder))
            results[task.index] = result
            done, documents = done + task.partition.size, documents + result["counts"]["documents"]
            if progress:
                progress(done, total, documents)


def _share_report(key: dict, results: dict[int, dict], share: Share) -> dict:
    """Return the counts of one share, and which partitions its folder still lacks."""
    mine = {i: results[i] for i in sorted(results) if share.holds(i)}
    tally = counts.add({}, key["data.sources"], mine.values())
    return counts.report(tally) | {
        "share": str(share),
        "partitions": len(mine),
        "partitions_in_all": key["partitions"],
        "missing": journal.missing(key, results),
    }


def publish(store: Path, key: dict, finished: Finished, results: dict[int, dict]) -> dict:
    """Write both manifests and `prepared.json`, remove the journal, and return the report.

    `results` has every partition of `key`, whose generation follows that of `finished`; the caller
    holds the folder alone. Killed anywhere and called again, it ends in the same files.
    """
    tok = tokenizer.load(store / MODEL)
    if tok.digest != key["tokenizer"]:
        raise DataError(f"{store / MODEL}: changed while it was used; prepare again")
    ordered = [results[i] for i in sorted(results)]
    for source, entry in counts.add({}, key["data.sources"], ordered).items():
        counts.refuse_mostly_bad(source, entry["counts"], entry["places"])
    entries: dict[str, list[dict]] = {}
    duplicates = [0] * len(ordered)
    for split in SPLITS:
        owners = [(i, shard) for i, result in enumerate(ordered) for shard in result[split]]
        unique = leave_out(
            store / split, finished.shards[split], [s for _, s in owners], key["data.dedup"]
        )
        entries[split] = finished.shards[split] + [shard for shard, _ in unique if shard]
        for (i, _), (_, count) in zip(owners, unique, strict=True):
            duplicates[i] += count
    counted = [
        result | {"counts": result["counts"] | {"duplicates": count}}
        for result, count in zip(ordered, duplicates, strict=True)
    ]
    inputs = (store / journal.JOURNAL / journal.INPUTS).read_bytes()
    earlier = finished.tally
    if any(entry["skipped_files"] for entry in earlier.values()):
        earlier = counts.forget_files(earlier, generations.paths_read(inputs))
    tally = counts.add(earlier, key["data.sources"], counted)
    report = counts.report(tally)
    _refuse_nothing(key, report, entries)
    name = generations.inputs_name(key["generation"])
    write_atomic(store / name, inputs)
    policies = {name: key[name] for name in key if name.startswith("data.")}
    published = dict(report) | {"generation": key["generation"]}
    for split in SPLITS:
        digest = write_manifest(
            store / split,
            entries[split],
            tokenizer_digest=tok.digest,
            vocab_size=tok.vocab_size,
            eos_id=tok.eos_id,
            start_id=tok.start_id,
            policies=policies | {"split": split},
            report=report,
            generation=key["generation"],
        )
        sums = [sum(s[f"num_{n}"] for s in entries[split]) for n in ("docs", "bytes", "tokens")]
        published[split] = dict(zip(("documents", "bytes", "tokens"), sums, strict=True))
        published[split]["digest"] = digest
    record = {
        "key": key,
        "generation": key["generation"],
        "partitions": key["first"] + key["partitions"],
        "report": published,
        "tally": tally,
    }
    write_atomic(store / FINISHED, json.dumps(record, indent=1).encode())
    journal.close_journal(store, generations.read_finished(store, key))
    return published


def _refuse_nothing(key: dict, report: dict, entries: dict[str, list[dict]]) -> None:
    if not report["documents"]:
        raise DataError(
            f"data.sources: not one document with text in {', '.join(key['data.sources'])}"
            + "".join(
                f"; {report['bad_skipped']} bad records were left out, the first: {place}"
                for place in report["bad_places"][:1]
            )
        )
    if not any(shard["num_docs"] for shard in entries["train"]):
        raise DataError(
            f"all {report['documents']} documents fell into the held-out part; lower "
            f"data.valid_share = {key['data.valid_share']}"
        )


def _packing(cfg: Config, store: Path) -> dict:
    """Build the packing index of both splits where data.packing needs one; report what it costs."""
    if cfg.data.packing == "concat":
        return {}
    from jaxgpt.data import best_fit

    whole, found = cfg.data.packing == "best_fit_whole", {}
    for split in SPLITS:
        with contextlib.closing(open_store(store / split)) as opened:
            try:
                index = best_fit.open_index(opened, cfg.model.seq_len, whole=whole)
            except DataError:  # none yet, or a damaged one
                best_fit.build_index(opened, cfg.model.seq_len, whole=whole)
                index = best_fit.open_index(opened, cfg.model.seq_len, whole=whole)
        found[split] = {
            "rows": index.num_rows,
            "padding_share": round(index.padding, 6),
            "truncated_tokens": index.truncated.tokens,
            "truncated_documents": index.truncated.documents,
        }
    return {"packing": found | {"kind": cfg.data.packing, "seq_len": cfg.model.seq_len}}
