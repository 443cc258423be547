"""JSON from untrusted places: what Python reads, but JSON does not mean, is refused."""

from __future__ import annotations

import json
from typing import Any


def loads(raw: bytes) -> Any:
    """Return the value in `raw`.

    Raises ValueError, also for a key that comes twice, NaN and infinity; RecursionError for what is
    nested too deep.
    """
    return json.loads(raw, object_pairs_hook=_unique, parse_constant=_refuse_constant)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)[:80]!r} appears twice")
    return table


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")
