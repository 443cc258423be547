"""Which hosts are slow, from the time that each spends on a step by itself.

Processes in step all take as long as the slowest: what differs is the time in the phase `data`, and
that in no phase (`host`). Compiling, evaluating and saving are phases of their own, and so is
waiting for the others; a slow device shows in none of these and is not found here.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

# A host is slow when a phase takes twice the time of the others, and a tenth of a step more, in
# two windows of 10 steps in a row.
SLOW, SHARE, WINDOW = 2.0, 0.1, 10


class Speeds:
    """What is remembered of the time that each process spent on its steps."""

    def __init__(self, num_processes: int):
        self._num_processes = num_processes
        self._from: dict[str, dict[str, Any]] = {}
        self._flagged: set[tuple[str, str]] = set()
        self._said: set[tuple[str, str]] = set()

    def slow(self, beats: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Return a line for each host that has become slow, given the newest beat of each."""
        if len(beats) < self._num_processes:
            return []
        if self._from.keys() != beats.keys():
            self._from = dict(beats)
        steps = {name: beats[name]["step"] - self._from[name]["step"] for name in beats}
        if min(steps.values()) < WINDOW:
            return []
        spent = {name: _per_step(self._from[name], beats[name]) for name in beats}
        self._from = dict(beats)
        found = {}
        for name, of_one in spent.items():
            for phase in ("data", "host"):
                rest = statistics.median(spent[n][phase] for n in spent if n != name)
                more = of_one[phase] - rest
                if more > max((SLOW - 1) * rest, SHARE * of_one["all"]):
                    found[name, phase] = (of_one[phase], rest)
        lines = []
        for (name, phase), (mine, rest) in found.items():
            if (name, phase) in self._flagged and (name, phase) not in self._said:
                ratio = f"{mine / rest:.1f} times" if rest > 1e-4 else "many times"
                lines.append(
                    f"WARNING: process {name} ({beats[name]['host']}) is slow: {phase} takes "
                    f"{mine:.3g} s a step, {ratio} as long as elsewhere, for {2 * WINDOW} steps"
                )
                self._said.add((name, phase))
        self._said &= found.keys()
        self._flagged = set(found)
        return lines


def _per_step(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, float]:
    steps, clock = new["step"] - old["step"], new["clock"] - old["clock"]
    phases = {name: total - old["spent"].get(name, 0.0) for name, total in new["spent"].items()}
    other = sum(phases.get(name, 0.0) for name in ("open", "compile", "eval", "save", "stop"))
    return {
        "data": phases.get("data", 0.0) / steps,
        "host": max(0.0, clock - sum(phases.values())) / steps,
        "all": max(0.0, clock - other) / steps,
    }
