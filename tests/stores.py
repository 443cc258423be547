"""Tiny token stores for tests, and their stream written out from the definition."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxgpt.data.store import write_manifest, write_shard

E = 2
Documents = Sequence[Sequence[int]]


def write_store(
    directory: Path,
    shards: Sequence[Documents],
    *,
    tokenizer: str = "tokenizer-a",
    vocab_size: int = 64,
    policies: dict | None = None,
    origin: str = "corpus/file.txt",
) -> str:
    """Write a store of the given documents (content ids) and return its digest."""
    directory.mkdir(parents=True, exist_ok=True)
    common = {"tokenizer_digest": tokenizer, "vocab_size": vocab_size, "eos_id": E}
    infos = [
        write_shard(
            directory / f"{number:05d}.shard",
            (
                (np.array(doc), 2 * len(doc) + index % 3, f"{origin}:{number}:{index}")
                for index, doc in enumerate(documents)
            ),
            **common,
        )
        for number, documents in enumerate(shards)
    ]
    return write_manifest(directory, infos, policies=policies or {}, report={}, **common)


def stream_of(shards: Sequence[Documents]) -> list[int]:
    """Return E d1 E d2 ... E dn E."""
    return [i for documents in shards for doc in documents for i in (E, *doc)] + [E]


def random_documents(lengths: Sequence[int], seed: int = 0, vocab_size: int = 64) -> Documents:
    """Return documents of the given lengths with ids in 3..vocab_size-1."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab_size, length).tolist() for length in lengths]
