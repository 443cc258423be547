"""What `prepare` reports: the counts of all partitions added up, per source and in all.

A tally holds, per source, what its partitions counted, the first bad places and the files that were
left out. It is plain JSON: that of a finished store is kept, and added to when the store grows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from jaxgpt.corpus.encoding import Counts, no_counts
from jaxgpt.corpus.formats import SHOWN, BadRecords
from jaxgpt.errors import DataError

MANY_RECORDS = 100  # of so many, no more than half may be bad and left out
FOUND = ("documents", "empty", "too_short", "too_long")  # that are not bad

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
            "skipped_files": _each_once(entry["skipped_files"] + result["skipped_files"]),
        }
    return total


def forget_files(tally: Tally, paths: Collection[str]) -> Tally:
    """Return a tally without the skipped files that are read now: `paths`, as `show_path` gives."""
    return {
        source: entry
        | {"skipped_files": [file for file in entry["skipped_files"] if file["path"] not in paths]}
        for source, entry in tally.items()
    }


def _each_once(skipped: list[dict[str, str]]) -> list[dict[str, str]]:
    """Leave out repetitions: a file that is cut fails in each partition that reads of it."""
    return list({tuple(file.items()): file for file in skipped}.values())


def _sum(a: Any, b: Any) -> Any:
    """Add numbers, and nested counts key by key."""
    if not isinstance(a, dict) and not isinstance(b, dict):
        return a + b
    a, b = a or {}, b or {}
    return {name: _sum(a.get(name, 0), b.get(name, 0)) for name in a | b}


def refuse_mostly_bad(source: str, counts: Counts, places: list[str], where: str = "") -> None:
    """Raise DataError when more than half of many records of a source were left out as bad."""
    bad = counts["bad_skipped"]
    total = bad + sum(counts[name] for name in FOUND)
    if total >= MANY_RECORDS and bad * 2 > total:
        raise DataError(
            f"{source}: {bad} of {total} records{where} are bad, too many to leave out; "
            f"the first: {places[0]}"
        )


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


def report_of_bad(found: list[BadRecords]) -> dict:
    """Return what a reading has left out or mended, under the names of `report`."""
    return {
        "bad_skipped": sum(bad.skipped for bad in found),
        "bad_replaced": sum(bad.replaced for bad in found),
        "bad_places": [place for bad in found for place in bad.places][:SHOWN],
        "skipped_files": _each_once([file for bad in found for file in bad.skipped_files]),
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
