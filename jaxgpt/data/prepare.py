"""From sources to token stores: `<store>/train`, `<store>/valid` and `<store>/tokenizer.model`.

Partitions are read, tokenised and written by processes, each into shards of its own; a journal of
the finished ones lets a killed run go on, to the same bytes that an unbroken run with any number of
workers gives. Shards appear under their names only when complete, manifests after all shards,
`prepared.json` last: it says what was prepared from what. A document is held out by its content.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxgpt.config import Config, DataConfig
from jaxgpt.data import sources, tokenizer
from jaxgpt.data.formats import SHOWN
from jaxgpt.data.shard import storage_errors, sync_directory
from jaxgpt.data.sources import Partition
from jaxgpt.data.store import open_store, write_atomic, write_manifest
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.data.workers import COUNTED, SHARD_SUFFIX, SPLITS, Task, run_tasks
from jaxgpt.errors import ConfigError, DataError, StorageError

VERSION = 1  # of the documents, ids and shards that a key stands for
FINISHED, JOURNAL, MODEL = "prepared.json", ".prepare", "tokenizer.model"
WORTH_A_PROCESS = 4 << 20  # bytes; starting one costs about a second

Progress = Callable[[int, int, int], None]


def prepare(cfg: Config, progress: Progress | None = None, workers: int = 0) -> dict:
    """Make the token store `data.store` of `data.sources`, or go on making it; return its report.

    `progress(bytes done, bytes in all, documents)` is called after each partition. `workers` is the
    number of processes, 0 for one per core; it never changes the result. The report counts, per
    source and in all, documents (empty ones are skipped), bytes, tokens, bytes per token, the share
    of byte-fallback tokens, and bad records with the first places.

    Raises DataError for unusable sources or tokenizer, for a store of something else, or while
    another process prepares it; StorageError when the folder cannot be written.
    """
    if not isinstance(cfg.data.store, str) or not cfg.data.store:
        raise ConfigError("data.store: `prepare` needs the folder of one store")
    store = Path(cfg.data.store)
    parts = sources.partitions(cfg.data)
    tok = _load_tokenizer(cfg, store)
    key = _key(cfg.data, tok, parts)
    with storage_errors(store):
        store.mkdir(parents=True, exist_ok=True)
        with _exclusive(store):
            if (report := _finished(store, key)) is not None:
                return report | {"already_prepared": True}
            results = _open_journal(store, key)
            _keep_model(tok, store / MODEL)
            _run(cfg.data, store, tok, parts, results, progress, workers)
            return _publish(cfg.data, store, tok, key, [results[i] for i in range(len(parts))])


def _load_tokenizer(cfg: Config, store: Path) -> Tokenizer:
    path = Path(cfg.tokenizer.path or store / MODEL)
    if not path.exists():
        raise DataError(f"{path}: no tokenizer there; make one with `jaxgpt tokenizer train`")
    return tokenizer.load(path)


def _key(cfg: DataConfig, tok: Tokenizer, parts: list[Partition]) -> dict:
    """Return everything that the contents of the store depend on."""
    files, size = sum(len(p.slices) for p in parts), sum(p.size for p in parts)
    return {
        "version": VERSION,
        "tokenizer": tok.digest,
        "data.sources": list(cfg.sources),
        "data.text_field": cfg.text_field,
        "data.bad_text": cfg.bad_text,
        "data.valid_share": cfg.valid_share,
        "data.partition_bytes": cfg.partition_bytes,
        "input": f"{size} bytes in {files} pieces, state {sources.fingerprint(parts)[:16]}",
    }


@contextlib.contextmanager
def _exclusive(store: Path) -> Iterator[None]:
    """Hold the folder's lock, which the system releases when its holder dies."""
    with open(store / ".lock", "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read(200).strip() or "just started"
            raise DataError(f"{store}: another process prepares here already: {holder}") from None
        except OSError:
            pass  # a file system without locks; shards are still written apart and renamed
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def _finished(store: Path, key: dict) -> dict | None:
    """Return the report of a finished store of this very key; DataError for one of another key."""
    path = store / FINISHED
    if not path.exists():
        if not (store / JOURNAL).exists():
            taken = [name for name in ("manifest.json", *SPLITS) if (store / name).exists()]
            if taken:
                raise DataError(f"{store}: has {taken[0]}, not made by `prepare`; choose another")
        return None
    try:
        found = json.loads(path.read_bytes())
        old, report = found["key"], found["report"]
    except (ValueError, KeyError) as error:
        raise DataError(f"{path}: damaged; delete the folder and prepare again") from error
    if changed := _changes(old, key):
        raise DataError(
            f"{store} was prepared from something else: {changed}; "
            "delete the folder or choose another data.store"
        )
    for split in SPLITS:
        try:
            intact = open_store(store / split).digest == report[split]["digest"]
            problem = f"{store / split} holds other data than `prepare` wrote"
        except (DataError, StorageError) as error:
            intact, problem = False, str(error)
        if not intact:
            raise DataError(f"{store} is damaged, delete it and prepare again: {problem}")
    shutil.rmtree(store / JOURNAL, ignore_errors=True)
    return report


def _changes(old: dict, new: dict) -> str:
    names = [name for name in new if old.get(name) != new[name]]
    return "; ".join(f"{name} was {old.get(name)!r}, now {new[name]!r}" for name in names)


def _open_journal(store: Path, key: dict) -> dict[int, dict]:
    """Return the results of finished partitions; the work of another key is thrown away."""
    journal = store / JOURNAL
    key_file, results = journal / "key.json", {}
    with contextlib.suppress(FileNotFoundError, ValueError):
        if json.loads(key_file.read_bytes()) == key:
            for path in journal.glob("[0-9]*.json"):
                result = json.loads(path.read_bytes())
                if _shards_exist(store, result):
                    results[int(path.stem)] = result
    if not results:
        key_file.unlink(missing_ok=True)  # first, so that no later run trusts what remains
        for folder in (*(store / split for split in reversed(SPLITS)), journal):
            shutil.rmtree(folder, ignore_errors=True)
    for folder in (journal, *(store / split for split in SPLITS)):
        folder.mkdir(exist_ok=True)
    for left in journal.glob("run-*"):  # of a killed run; its last workers may still write there
        shutil.rmtree(left, ignore_errors=True)
    write_atomic(key_file, json.dumps(key).encode())
    return results


def _shards_exist(store: Path, result: dict) -> bool:
    shards = [
        (store / split / shard["name"], shard["size"])
        for split in SPLITS
        for shard in result[split]
    ]
    return all(path.is_file() and path.stat().st_size == size for path, size in shards)


def _keep_model(tok: Tokenizer, path: Path) -> None:
    data = Path(tok.path).read_bytes()
    if hashlib.sha256(data).hexdigest() != tok.digest:
        raise DataError(f"{tok.path}: changed just now; prepare again")
    if Path(tok.path).resolve() != path.resolve():
        write_atomic(path, data)


def _run(
    cfg: DataConfig,
    store: Path,
    tok: Tokenizer,
    parts: list[Partition],
    results: dict[int, dict],
    progress: Progress | None,
    workers: int,
) -> None:
    """Prepare the partitions that have no result, and journal each as it is finished.

    Workers write into a folder of this run; only this process moves shards into the store, so what
    a killed run left running cannot touch what a later one has published.
    """
    folder = store / JOURNAL / f"run-{os.getpid()}"
    for split in SPLITS:
        (folder / split).mkdir(parents=True)
    tasks = [
        Task(i, partition, str(folder), cfg, str(store / MODEL), tok.digest)
        for i, partition in enumerate(parts)
        if i not in results
    ]
    total = sum(partition.size for partition in parts)
    done = total - sum(task.partition.size for task in tasks)
    documents = sum(result["counts"]["documents"] for result in results.values())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = workers or min(cores or 1, 1 + (total - done) // WORTH_A_PROCESS)
    with contextlib.closing(run_tasks(tasks, min(workers, len(tasks)))) as finished:
        for task, result in finished:
            for split in SPLITS:
                for shard in result[split]:
                    os.replace(folder / split / shard["name"], store / split / shard["name"])
                sync_directory(store / split)
            entry = json.dumps(result).encode()
            write_atomic(store / JOURNAL / f"{task.index:06}.json", entry)
            results[task.index] = result
            done, documents = done + task.partition.size, documents + result["counts"]["documents"]
            if progress:
                progress(done, total, documents)


def _publish(cfg: DataConfig, store: Path, tok: Tokenizer, key: dict, results: list[dict]) -> dict:
    """Write both manifests and `prepared.json`, remove the journal, and return the report."""
    counts = _report(cfg, results)
    if not counts["documents"]:
        raise DataError(f"data.sources: not one document with text in {', '.join(cfg.sources)}")
    shards = {split: [shard for result in results for shard in result[split]] for split in SPLITS}
    if not any(shard["num_docs"] for shard in shards["train"]):
        raise DataError(
            f"all {counts['documents']} documents fell into the held-out part; lower "
            f"data.valid_share = {cfg.valid_share}"
        )
    policies = {name: key[name] for name in key if name.startswith("data.")}
    report = dict(counts)
    for split in SPLITS:
        listed = {shard["name"] for shard in shards[split]}
        for path in (store / split).glob(f"*{SHARD_SUFFIX}"):
            if path.name not in listed:  # of a partition that was killed before it was journaled
                path.unlink()
        digest = write_manifest(
            store / split,
            shards[split],
            tokenizer_digest=tok.digest,
            vocab_size=tok.vocab_size,
            eos_id=tok.eos_id,
            policies=policies | {"split": split},
            report=counts,
        )
        sizes = {name: sum(s[f"num_{name}"] for s in shards[split]) for name in ("docs", "tokens")}
        report[split] = {"documents": sizes["docs"], "tokens": sizes["tokens"], "digest": digest}
    write_atomic(store / FINISHED, json.dumps({"key": key, "report": report}, indent=1).encode())
    shutil.rmtree(store / JOURNAL, ignore_errors=True)
    return report


def _report(cfg: DataConfig, results: list[dict]) -> dict:
    """Return counts of all sources together, and of each under "sources"."""
    zero = dict.fromkeys(COUNTED, 0)
    per_source = {source: (Counter(zero), []) for source in cfg.sources}
    for result in results:
        counts, places = per_source[result["source"]]
        counts.update(result["counts"])
        places += result["places"]
    everything, all_places = Counter(zero), []
    entries = []
    for source, (counts, places) in per_source.items():
        entries.append({"source": source} | _summary(counts, places))
        everything.update(counts)
        all_places += places
    return _summary(everything, all_places) | {"sources": entries}


def _summary(counts: Counter, places: list[str]) -> dict:
    tokens = max(1, counts["tokens"])
    return dict(counts) | {
        "bytes_per_token": round(counts["bytes"] / tokens, 4),
        "byte_token_share": round(counts["byte_tokens"] / tokens, 6),
        "bad_places": places[:SHOWN],
    }
