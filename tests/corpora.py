"""Small corpora, tokenizers and configurations for the tests of the data room."""

from __future__ import annotations

import json
from dataclasses import replace

from jaxgpt.config import Config, DataConfig, TokenizerConfig
from jaxgpt.data import tokenizer

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
    """Write TEXTS as JSON lines and files; return a configuration of about 20 partitions."""
    write_jsonl(folder / "records.jsonl", TEXTS[:250])
    (folder / "files").mkdir()
    for i, text in enumerate(TEXTS[250:]):
        (folder / "files" / f"{i:02}.txt").write_text(text)
    return configure(folder, models, [folder / "records.jsonl", folder / "files"])


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
