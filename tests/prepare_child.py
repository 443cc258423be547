"""Run one scenario of `prepare` again and again, killed before each of its changes on disk.

Prints as JSON how often it was killed, and the tree of files (name -> SHA-256) that finishing the
work left each time, after the tree of an unbroken run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path

from jaxgpt.config import Config, DataConfig, TokenizerConfig
from jaxgpt.corpus import prepare as prepare_module
from jaxgpt.corpus.merge import merge
from jaxgpt.corpus.prepare import prepare
from jaxgpt.durable import write_atomic

scenario, root, model = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
store, base = root / "store", root / "base"


def configure(*names, **options):
    options = {"valid_share": 0.2, "partition_bytes": 8000, "store": str(store)} | options
    data = DataConfig(sources=tuple(str(root / name) for name in names), **options)
    return Config(data=data, tokenizer=TokenizerConfig(path=model))


def change(cfg, **options):
    return dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, **options))


def die_at(count):
    """Kill this process before its `count`-th change on disk."""
    calls = 0

    def counted(function):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for name in ("replace", "mkdir", "unlink", "rmdir", "link"):
        setattr(os, name, counted(getattr(os, name)))


def in_child(function):
    """Run a function in a fork; return whether it was killed."""
    if pid := os.fork():
        return os.waitpid(pid, 0)[1] != 0
    try:
        function()
    finally:
        os._exit(0)


def unpublished(cfg):
    """Prepare, but end right before it counts."""

    def end_at_last(path, data):
        if path.name == "prepared.json":
            os._exit(0)
        write_atomic(path, data)

    prepare_module.write_atomic = end_at_last
    prepare(cfg, workers=1)


def stop_after_one(*_):
    raise KeyboardInterrupt


def tree():
    files = (path for path in store.rglob("*") if path.is_file() and path.name != ".lock")
    return {
        path.relative_to(store).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(files)
    }


plain = configure("a.jsonl")
grown = configure("a.jsonl", "b.jsonl")
unique = configure("a.jsonl", "copies.jsonl", dedup=True)
unique_grown = configure("a.jsonl", "b.jsonl", "copies.jsonl", dedup=True)


def run(cfg, stop=None):
    return lambda: prepare(cfg, stop, workers=1)


def shares():
    for number in (1, 2):
        prepare(change(unique, store=str(root / f"share{number}")), partitions=(number, 2))


def finish_shares():
    for number in (1, 2):
        prepare(unique, partitions=(number, 2), workers=1)
    merge(store, [])


# name -> (what is in the folder before, what is killed, what finishes the work)
SCENARIOS = {
    "fresh": (None, run(plain), run(plain)),
    "after another": (
        run(change(plain, valid_share=0.5), stop_after_one),
        run(plain),
        run(plain),
    ),
    "another after": (
        run(plain, stop_after_one),
        run(change(plain, valid_share=0.5), stop_after_one),
        run(plain),
    ),
    "dedup": (None, run(unique), run(unique)),
    "grown": (run(plain), run(grown), run(grown)),
    "grown dedup": (run(change(unique, sources=plain.data.sources)), *[run(unique_grown)] * 2),
    "grown and back": (run(plain), lambda: unpublished(grown), run(plain)),
    "share": (None, lambda: prepare(unique, partitions=(2, 2), workers=1), finish_shares),
    "merge": (shares, *[lambda: merge(store, [root / "share1", root / "share2"])] * 2),
}

before, killed, finish = SCENARIOS[scenario]
if before:
    in_child(before)
base.mkdir()
if store.exists():
    shutil.copytree(store, base, dirs_exist_ok=True)


os.fsync = lambda file: None  # a kill loses nothing that is written


def fresh_folder():
    shutil.rmtree(store, ignore_errors=True)
    if before:
        shutil.copytree(base, store)


fresh_folder()
finish()
trees, count, again = [tree()], 0, True
while again:
    count += 1
    fresh_folder()

    def work(count=count):
        die_at(count)
        killed()

    again = in_child(work)
    finish()
    trees.append(tree())
print(json.dumps({"kills": count - 1, "trees": trees}))
