"""What a run has consumed of each source, in numbers that are exact at every position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxgpt.data.stream import Data, epochs, locate

COUNTED = ("seen", "padded", "masked")
AT_ONCE = 1 << 16  # positions looked up together


class Ledger:
    """Counts, per source, the tokens of the rows before a position.

    `seen` are inputs that are tokens, `padded` inputs that are not, `masked` tokens in rows whose
    weight in the loss is 0 by the layout of the rows (none where all of a text is learnt from).
    A skipped step has consumed its rows like any other. `state` goes into the checkpoint.
    """

    def __init__(self, data: Data, position: int, state: Mapping[str, Any] | None = None):
        self._data, self._position = data, position
        recorded = state["counts"] if state else {}
        self._counts = {
            digest: np.array([recorded.get(digest, {}).get(name, 0) for name in COUNTED], np.int64)
            for digest in data.mixture.names
        }

    def advance(self, position: int) -> None:
        """Count the rows up to `position`."""
        for first in range(self._position, position, AT_ONCE):
            source, _, row = locate(self._data, np.arange(first, min(first + AT_ONCE, position)))
            for number in np.unique(source).tolist():
                rows = self._data.sources[number]
                counts = rows.usage(row[source == number])
                self._counts[self._data.mixture.names[number]] += counts
        self._position = max(position, self._position)

    def row(self, position: int) -> dict[str, float]:
        """Return the metrics of a position: epoch, seen, padded and masked, `/NAME` if several."""
        self.advance(position)
        passes = epochs(self._data, position)
        table = {}
        for digest, name in zip(self._data.mixture.names, self._data.names, strict=True):
            if name in passes:
                suffix = f"/{name}" if len(passes) > 1 else ""
                table[f"epoch{suffix}"] = passes[name]
                counts = self._counts[digest].tolist()
                table |= {f"{key}{suffix}": n for key, n in zip(COUNTED, counts, strict=True)}
        return table

    def state(self) -> dict[str, Any]:
        """Return the counts up to here as JSON values."""
        counts = {
            digest: dict(zip(COUNTED, counted.tolist(), strict=True))
            for digest, counted in self._counts.items()
        }
        return {"position": self._position, "counts": counts}
