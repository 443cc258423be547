"""What a compiled step exchanges, beside what its layout implies: by mesh axis, and the least time.

The compiler decides what is sent and whether anything else goes on meanwhile; an exchange that it
did not spread over other work is in the open. Offloaded tensors are copies, no exchanges: those of
the layout are kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxgpt.parallel.mesh import AXES
from jaxgpt.planning.collectives import Collective
from jaxgpt.planning.layout import Layout
from jaxgpt.planning.roofline import Bound
from jaxgpt.planning.transfers import Links, Transfer, all_to_all, links_of, neighbour, over

MORE, SHARE = 1.5, 0.01  # a finding: so many times what is expected, and this part of all bytes


class Row(NamedTuple):
    """One mesh axis: bytes that a device sends in a step, and the seconds that nothing hides."""

    axis: str
    expected: float  # by the layout
    compiled: float
    open_bytes: float  # of `compiled`
    open_seconds: float
    kinds: dict[str, tuple[int, float]]  # of exchange: how often in a step, and bytes

    @property
    def excess(self) -> float:
        return self.compiled - self.expected


def exchanges(layout: Layout, found: Sequence[Collective]) -> list[Transfer]:
    """Return the exchanges of a compiled step as transfers, `what` being their kind."""
    links = links_of(layout)
    return [transfer for one in found for transfer in _of(links, one)]


def as_compiled(layout: Layout, analytic: Bound, found: Sequence[Collective]) -> Bound:
    """Return the least time of a step with the exchanges of the compiled one."""
    host = (transfer for transfer in analytic.transfers if transfer.axis == "host")
    return dataclasses.replace(analytic, transfers=(*exchanges(layout, found), *host))


def by_axis(layout: Layout, analytic: Bound, found: Sequence[Collective]) -> list[Row]:
    """Return a row for each mesh axis over which anything is or should be exchanged."""
    compiled = exchanges(layout, found)
    rows = []
    for axis in AXES:
        of_axis = [t for t in compiled if t.axis == axis]
        kinds: dict[str, tuple[int, float]] = {}
        for one in found:
            if axis in one.axes:
                count, sent = kinds.get(one.kind, (0, 0.0))
                kinds[one.kind] = (count + one.runs, sent)
        for t in of_axis:
            kinds[t.what] = (kinds[t.what][0], kinds[t.what][1] + t.bytes)
        expected = sum(t.bytes for t in analytic.transfers if t.axis == axis)
        in_open = [t for t in of_axis if not t.overlaps]
        if of_axis or expected:
            rows.append(
                Row(
                    axis,
                    expected,
                    sum(t.bytes for t in of_axis),
                    sum(t.bytes for t in in_open),
                    sum(t.seconds for t in in_open),
                    dict(sorted(kinds.items(), key=lambda item: -item[1][1])),
                )
            )
    return rows


def findings(rows: Sequence[Row]) -> list[str]:
    """Return a line for each axis over which the compiled step sends far more than it should."""
    everything = sum(row.compiled for row in rows)
    return [
        f"over {row.axis}: {row.compiled / 1e9:,.2f} GB sent in a step, "
        + (
            f"{row.compiled / row.expected:.1f} times the {row.expected / 1e9:,.2f} GB that the "
            "layout implies"
            if row.expected
            else "though the layout implies no exchange there"
        )
        for row in rows
        if row.compiled > MORE * row.expected and row.excess > SHARE * everything
    ]


def _of(links: Links, one: Collective) -> Iterator[Transfer]:
    """Yield what one exchange sends over each of its axes, the fastest taking the most.

    The parts over several axes add up to its bytes: of n bytes over b in a that is n (b-1)/b, and
    of the n/b that are left (a-1)/a.
    """
    axes = [axis for axis in AXES if axis in one.axes]
    if not axes:
        return
    sent = float(one.bytes_per_step)
    if one.kind == "collective-permute":
        for axis in axes:  # to one neighbour, but a gather in pieces sends both ways around
            part = neighbour(links, one.kind, axis, sent / len(axes), overlaps=one.overlapped)
            if part.link != "network":
                part = part._replace(seconds=part.bytes / links.rate(axis))
            yield part
        return
    spread = all_to_all if one.kind.endswith("all-to-all") else over
    whole, parts = 1.0, []
    for axis in reversed(axes):
        parts += spread(links, one.kind, axis, whole, overlaps=one.overlapped)
        whole /= links.fast[axis] * links.slow[axis]
    scale = sent / sum(part.bytes for part in parts)
    for part in parts:
        yield part._replace(bytes=part.bytes * scale, seconds=part.seconds * scale)
