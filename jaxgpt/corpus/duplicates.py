"""Documents that are equal byte for byte to an earlier one of the store, found and left out.

They are found by the 128-bit digests that shards keep of their texts. All first halves are sorted
to learn which occur twice, and only of those the second halves are compared, in store order: 8
bytes of memory per document, two passes over 16 bytes per document on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from jaxgpt.data.shard import copy_shard, open_shard, read_digests

UNIQUE = "-unique"  # in the name of a shard of which duplicates were left out


def mark(digests: Callable[[], Iterable[np.ndarray]], total: int) -> Iterator[np.ndarray]:
    """Yield for each shard a bool [docs]: true where an earlier document has the same digest.

    `digests()` starts a pass over the shards in order, each uint64 [docs, 2], `total` documents.
    """
    first = np.empty(total, np.uint64)
    at = 0
    for shard in digests():
        first[at : at + len(shard)] = shard[:, 0]
        at += len(shard)
    first.sort()
    repeated = np.unique(first[1:][first[1:] == first[:-1]])
    del first
    second = np.zeros(len(repeated), np.uint64)  # of the first document with this first half
    seen = np.zeros(len(repeated), bool)
    others: set[tuple[int, int]] = set()  # equal first halves, different documents: 1 in 2**64
    for shard in digests():
        equal = np.zeros(len(shard), bool)
        rank = np.searchsorted(repeated, shard[:, 0])
        docs = np.flatnonzero(rank < len(repeated))
        docs = docs[repeated[rank[docs]] == shard[docs, 0]]
        ranks, opening = np.unique(rank[docs], return_index=True)  # the first in this shard
        opening = docs[opening[~seen[ranks]]]
        second[rank[opening]], seen[rank[opening]] = shard[opening, 1], True
        equal[docs] = shard[docs, 1] == second[rank[docs]]
        for doc in docs[~equal[docs]].tolist():
            digest = tuple(shard[doc].tolist())
            equal[doc] = digest in others
            others.add(digest)
        equal[opening] = False
        yield equal


def leave_out(folder: Path, old: list[dict], new: list[dict], remove: bool) -> list[tuple]:
    """Return (manifest entry or None, number of duplicates) for each of the `new` shards.

    `folder` holds the shards of one split, `old` are those of earlier generations, which stay as
    they are. With `remove`, a shard with duplicates is written again without them, under a name of
    its own so that the work can be repeated after a kill, and its entry is None if none is left.
    """

    def digests() -> Iterator[np.ndarray]:
        for entry in (*old, *new):
            yield read_digests(open_shard(folder / entry["name"], entry))

    total = sum(entry["num_docs"] for entry in (*old, *new))
    found = []
    for number, equal in enumerate(mark(digests, total)):
        if number < len(old):
            continue
        entry, count = new[number - len(old)], int(equal.sum())
        if remove and count == len(equal):
            entry = None
        elif remove and count:
            path = folder / entry["name"]
            target = path.with_name(path.stem + UNIQUE + path.suffix)
            entry = copy_shard(open_shard(path, entry), target, ~equal)
        found.append((entry, count))
    return found
