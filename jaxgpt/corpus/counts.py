"""What `prepare` reports: the counts of all partitions added up, per source and in all.

A tally holds, per source, what its partitions counted, the first bad places and the files that were
left out. It is plain JSON: that of a finished store is kept, and added to when the store grows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxgpt.corpus.encoding import no_counts
from jaxgpt.corpus.formats import SHOWN

Tally = dict[str, dict[str, Any]]


def add(tally: Tally, sources: Iterable[str], results: Iterable[dict]) -> Tally:
    """Return the tally of `sources` with the results of partitions added, in their order."""
    blank = {"counts": no_counts() | {"duplicates": 0}, "places": [], "skipped_files": []}
    total = {source: tally.get(source, blank) for source in sources}
    for result in results:
        entry = total[result["source"]]
        total[result["source"]] = {
            "counts": _sum(entry["counts"], result["counts"]),
            "places": (entry["places"] + result["places"])[:SHOWN],
            "skipped_files": entry["skipped_files"] + result["skipped_files"],
        }
    return total


def _sum(a: Any, b: Any) -> Any:
    """Add numbers, and nested counts key by key."""
    if not isinstance(a, dict) and not isinstance(b, dict):
        return a + b
    a, b = a or {}, b or {}
    return {name: _sum(a.get(name, 0), b.get(name, 0)) for name in a | b}


def report(tally: Tally) -> dict:
    """Return the counts of all sources together, and of each under "sources".

    Of `documents` (those with text, within the limits of length) `duplicates` are equal to an
    earlier one; they are counted in `bytes` and `tokens` also where they are then left out.
    """
    together = [entry | {"source": ""} for entry in tally.values()]
    whole = add({}, [""], together)[""]
    return _summary(whole) | {
        "sources": [{"source": source} | _summary(entry) for source, entry in tally.items()]
    }


def _summary(entry: dict[str, Any]) -> dict:
    counts = entry["counts"]
    tokens = max(1, counts["tokens"])
    lengths = sorted(counts["lengths"].items(), key=lambda item: int(item[0]))
    return counts | {
        "lengths": dict(lengths),
        "bytes_per_token": round(counts["bytes"] / tokens, 4),
        "byte_token_share": round(counts["byte_tokens"] / tokens, 6),
        "bad_places": entry["places"],
        "skipped_files": entry["skipped_files"],
    }
