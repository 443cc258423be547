"""Small corpora, tokenizers and configurations for the tests of the data room."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxgpt.config import Config, DataConfig, TokenizerConfig
from jaxgpt.data.store import open_store
from jaxgpt.tokenization import tokenizer

TEXTS = [f"Document {i}: the king went to hall {i * i}.\n" * (1 + i % 5) for i in range(300)]

SYMBOLS = ("<|user|>", "<x,y>", '<q"r>', "<a'b>")
LINES = [
    f"{verb} the {noun} no {number}:\n\tif {noun}.{verb}(x) > {number}:\n        return '{noun}'\n"
    for number, verb in enumerate(
        ["see", "find", "caf\u00e9", "keep", "sort", "walk", "give", "take"] * 9
    )
    for noun in ["king", "hall", "list", "\u4e2d\u6587", "house", "tree", "paper", "window"]
]


def make_models(folder):
    """Write a.model and b.model, tokenizers of the same size with different pieces."""
    for name, texts in (("a", TEXTS), ("b", [text[::-1] for text in TEXTS])):
        tokenizer.train(texts, folder / f"{name}.model", vocab_size=320)
    return folder


def make_corpus(folder, models):
    """Write TEXTS as JSON lines and files; return a configuration of about 25 partitions."""
    write_jsonl(folder / "records.jsonl", TEXTS[:250])
    (folder / "files").mkdir()
    for i, text in enumerate(TEXTS[250:]):
        (folder / "files" / f"{i:02}.txt").write_text(text)
    sources = [folder / "records.jsonl", folder / "files"]
    return configure(folder, models, sources, partition_bytes=12_000)


def configure(folder, models, sources, **options):
    """Return a configuration that prepares `sources` into `folder`/store with a.model."""
    options = {
        "valid_share": 0.1,
        "partition_bytes": 2000,
        "store": str(folder / "store"),
    } | options
    data = DataConfig(sources=tuple(map(str, sources)), **options)
    return Config(data=data, tokenizer=TokenizerConfig(path=str(models / "a.model")))


def change(cfg, **options):
    """Return a configuration with other fields of its data section."""
    return replace(cfg, data=replace(cfg.data, **options))


def write_jsonl(path, texts):
    path.write_bytes(b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts))


def stored_documents(cfg, split):
    """Return the texts of a store, decoded between its end-of-text ids."""
    store = open_store(cfg.data.store, split)
    tok = tokenizer.load(store.tokenizer_path)
    ids = store.read(0, store.stream_len + 1)
    bounds = np.flatnonzero(ids == store.eos_id)
    assert bounds[0] == 0 and bounds[-1] == store.stream_len
    return [tok.decode(ids[a + 1 : b]) for a, b in zip(bounds, bounds[1:], strict=False)]


def tree(folder):
    """Return the bytes of all files below a folder by name, without those of locks."""
    paths = (p for p in Path(folder).rglob("*") if p.is_file() and not p.name.startswith(".lock"))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
