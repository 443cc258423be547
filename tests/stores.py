"""Tiny token stores for tests, and their stream written out from the definition."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from jaxgpt.data.shard import Encoded, document_digest, write_shard
from jaxgpt.data.store import open_store, write_manifest
from jaxgpt.errors import DataError

E = 2
COMMON = {"tokenizer_digest": "tokenizer-a", "vocab_size": 64, "eos_id": E}
Documents = Sequence[Sequence[int]]


def encoded(ids: Sequence[int], num_bytes: int = 1, origin: str = "a") -> Encoded:
    """Return a document to be written, with a digest made of its ids."""
    ids = np.array(ids, np.int64)
    return Encoded(ids, num_bytes, origin, document_digest(ids.tobytes()))


def write_store(
    directory: Path,
    shards: Sequence[Documents],
    *,
    tokenizer: str = "tokenizer-a",
    vocab_size: int = 64,
    start_id: int | None = None,
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
                encoded(doc, 2 * len(doc) + index % 3, f"{origin}:{number}:{index}")
                for index, doc in enumerate(documents)
            ),
            **common,
        )
        for number, documents in enumerate(shards)
    ]
    given = {"start_id": start_id, "policies": policies or {}, "report": {}}
    return write_manifest(directory, infos, **given, **common)


def stream_of(shards: Sequence[Documents]) -> list[int]:
    """Return E d1 E d2 ... E dn E."""
    return [i for documents in shards for doc in documents for i in (E, *doc)] + [E]


def random_documents(lengths: Sequence[int], seed: int = 0, vocab_size: int = 64) -> Documents:
    """Return documents of the given lengths with ids in 3..vocab_size-1."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab_size, length).tolist() for length in lengths]


def refusal(directory: Path) -> str:
    """Open a store and read all of it; return the one line of the DataError this must raise."""
    with pytest.raises(DataError) as caught:
        open_store(directory).verify()
    message = str(caught.value)
    assert len(message.splitlines()) == 1 and str(directory) in message
    return message


SHARDS = [
    random_documents([5, 1, 1, 9], seed=1),
    [],
    random_documents([1], seed=2),
    random_documents([3, 12], seed=3),
    [],
]
