"""Which stage of a pipeline computes what when, as tables that are known before anything runs.

A micro-batches pass S stages R times, one part of the layers at each stage each time. New
micro-batches and finished ones lie on a belt of q places at each stage, which moves on towards the
first stage by one column at a time, and from there to the last.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np


class Plan(NamedTuple):
    """Who does what in each of N turns, t = 0, 1, ...; what arrives at turn N is only taken off."""

    micro: np.ndarray  # [N, S], the micro-batch that each stage computes; -1: none
    round: np.ndarray  # [N, S], for the how-manieth time it passes
    fresh: np.ndarray  # [N + 1], the first stage takes a micro-batch off the belt
    done: np.ndarray  # [N + 1], what arrives at the first stage is finished, and goes on the belt
    column: np.ndarray  # [N + 1], the places of the belt that move on in this turn
    late: np.ndarray  # [N], the first stage takes what arrived `wait` turns ago
    wait: int  # 0 where S divides A
    before: np.ndarray  # [S, q], the micro-batch on each place at first; -1: none
    after: np.ndarray  # [S, q], and at last

    @property
    def bubble(self) -> float:
        """Return the share of the stages' turns in which they have nothing to do."""
        return float((self.micro < 0).mean())


@functools.cache
def plan(micro_batches: int, stages: int, rounds: int) -> Plan:
    """Return the turns in which A micro-batches pass S stages R times: A R + S - 1 if A >= S.

    S micro-batches at a time pass all rounds, so that what the last stage hands on is what the
    first needs next; the last of these groups is the larger one where S does not divide A, and
    waits. A group smaller than S (only where A < S) leaves the rest of each round empty.
    """
    A, S, R = micro_batches, stages, rounds
    starts = range(0, max(A // S, 1) * S, S)
    last = range(starts[-1], A)
    entries: list[tuple[int, int] | None] = []  # what enters the first stage, by turn
    for start in starts:
        group = last if start == last.start else range(start, start + S)
        for r in range(R):
            entries += [(m, r) for m in group]
            entries += [None] * (S - len(group) if r < R - 1 else 0)
    N = len(entries) + S - 1
    table = np.full((2, N + 1, S), -1, np.int32)
    for stage in range(S):
        for turn, entry in enumerate(entries, stage):
            table[:, turn, stage] = (-1, -1) if entry is None else entry
    micro, round_ = table
    finished = np.full(N + 1, -1)  # the micro-batch that arrives at the first stage as the result
    finished[1:] = np.where(round_[:N, -1] == R - 1, micro[:N, -1], -1)
    fresh, done = round_[:, 0] == 0, finished >= 0
    for places in range(-(-A // S), 2 * A + 2):  # as few as keep all that is finished on the belt
        before = np.full(S * places, -1)
        before[:A] = np.arange(A)
        before = before.reshape(S, places)
        belt, steps, column = before.copy(), 0, np.zeros(N + 1, np.int32)
        results = np.full_like(belt, -1)
        for turn in np.flatnonzero(fresh | done):
            c = column[turn] = steps % places
            belt[0, c], results[0, c] = -1, finished[turn]
            results[:, c] = np.roll(results[:, c], -1)
            steps += 1
        if len(np.unique(results[results >= 0])) == A:
            break
    wait = max(len(last) - S, 0) if R > 1 else 0
    late = (micro[:N, 0] >= last.start) & (round_[:N, 0] > 0) & (wait > 0)
    return Plan(micro[:N], round_[:N].clip(0), fresh, done, column, late, wait, before, results)


class Tap(NamedTuple):
    """When what one stage has computed in one round is laid on a belt of results alone."""

    stage: int
    taken: np.ndarray  # [N], after these turns
    column: np.ndarray  # [N], on these places, which then move on
    after: np.ndarray  # [S, q], the micro-batch on each place at last; -1: none


@functools.cache
def tap(micro_batches: int, stages: int, rounds: int, part: int) -> Tap:
    """Return when the micro-batches of a `plan` leave a part of the layers, of S R parts."""
    p, (round_, stage) = plan(micro_batches, stages, rounds), divmod(part, stages)
    taken = (p.micro[:, stage] >= 0) & (p.round[:, stage] == round_)
    after = np.full((stages, -(-micro_batches // stages)), -1)
    column = np.zeros(len(taken), np.int32)
    for step, turn in enumerate(np.flatnonzero(taken)):
        c = column[turn] = step % after.shape[1]  # of S steps of a column none meets another
        after[stage, c] = p.micro[turn, stage]
        after[:, c] = np.roll(after[:, c], -1)
    return Tap(stage, taken, column, after)


def describe(micro_batches: int, stages: int, rounds: int) -> str:
    """Return one line on the turns of an update, and the share of them that is lost."""
    p = plan(micro_batches, stages, rounds)
    return (
        f"pipeline: {micro_batches} micro-batches pass {stages} stages in {len(p.micro)} turns; "
        f"stages have nothing to do for {p.bubble:.0%} of an update"
    )
