"""How updates and positions correspond where the batch grows: `train.batch_ramp`.

The rows of an update are a function of its first position alone. So a run that is resumed, also
with another ramp or batch, goes on as its configuration says, and nothing about it is saved. A
position counts rows from 0, and updates count from 1. Only the standard library is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from jaxgpt.schema import Config, TrainConfig

ENDLESS = 1 << 62  # updates of the last span, which has no end


class Span(NamedTuple):
    """Updates of the same number of rows, one after the other."""

    rows: int
    step: int  # updates before the first of these
    position: int  # rows before it
    updates: int


def spans(cfg: Config, step: int = 0, position: int = 0) -> tuple[Span, ...]:
    """Return the spans from `step` updates on, which have consumed `position` rows; the last one
    is endless.

    An update begins before the limit of its span in tokens, and may end after it.
    """
    found = []
    for tokens, rows in _limits(cfg.train.batch_ramp):
        last = -(-tokens // cfg.model.seq_len)  # the first position that is not of this span
        if updates := max(0, -(-(last - position) // rows)):
            found.append(Span(rows, step, position, updates))
            step, position = step + updates, position + updates * rows
    return (*found, Span(cfg.train.global_batch, step, position, ENDLESS))


def cut(spans: tuple[Span, ...], last: int) -> tuple[Span, ...]:
    """Return the spans up to update `last`."""
    return tuple(s._replace(updates=min(s.updates, last - s.step)) for s in spans if s.step < last)


def batch_rows(cfg: Config, position: int) -> int:
    """Return the rows of the update that begins at a position."""
    return spans(cfg, 0, position)[0].rows


def place(spans: tuple[Span, ...], position: int) -> tuple[int, int]:
    """Return the update that consumes the row at a position, and the row's number in it, from 1."""
    span = next(s for s in reversed(spans) if s.position <= position)
    updates, row = divmod(position - span.position, span.rows)
    return span.step + updates + 1, row + 1


def position_after(spans: tuple[Span, ...], step: int) -> int:
    """Return the rows that the first `step` updates consume."""
    span = next(s for s in reversed(spans) if s.step <= step)
    return span.position + (step - span.step) * span.rows


def whole_steps(spans: tuple[Span, ...], end: int) -> int:
    """Return the updates that find all their rows before position `end`."""
    return place(spans, max(end, spans[0].position))[0] - 1


def steps_until(spans: tuple[Span, ...], end: int) -> int:
    """Return the updates after which all rows before position `end` are consumed."""
    start = spans[0]
    return start.step if end <= start.position else place(spans, end - 1)[0]


def batch_sizes(train: TrainConfig) -> dict[int, str]:
    """Return the rows per update that may occur, each with the key that asks for it."""
    ramp = {rows: f"train.batch_ramp[{tokens!r}]" for tokens, rows in train.batch_ramp.items()}
    return ramp | {train.global_batch: "train.global_batch"}


def describe(batch_ramp: Mapping[str, int]) -> str:
    """Return a ramp in words that go before the rows per update it ends with; empty for none."""
    return "".join(f"{r:,} until {tokens:,} tokens, then " for tokens, r in _limits(batch_ramp))


def _limits(batch_ramp: Mapping[str, int]) -> list[tuple[int, int]]:
    """Return (tokens, rows until then) of a ramp."""
    return [(int(tokens), rows) for tokens, rows in batch_ramp.items()]
