"""Weighted mixing of sources as a repeating block of slots: exact, even, and in closed form.

Weights become integer counts of a block of M slots; a slot names a source, and its rank is how
often that source came before in the block. A stage repeats one block from its start on: position p
then is, without any state, visit number base + (p - start) div M * count + rank of the source in
slot (p - start) mod M, where base is how often the source was drawn before the stage. The slots are
laid out so that after any number of positions each source was drawn within one of its exact share.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np

from jaxgpt.data import slots
from jaxgpt.errors import ConfigError

MAX_POSITION = 1 << 62  # positions and visits are int64

RunOut = Literal["stop", "drop"]
Plan = tuple[tuple[int, dict[str, float]], ...]  # (start position, {source key: weight})


@dataclass(frozen=True, eq=False)
class Stage:
    """Sources in fixed proportions from position `start` on; `counts` sum to the block length M.

    A stage shorter than a block has only the slots that it needs.
    """

    start: int
    counts: np.ndarray  # [sources] int64, draws per block
    slots: np.ndarray  # [M] int32, source of each slot
    ranks: np.ndarray  # [M] int32, earlier slots of the same source
    base: np.ndarray  # [sources] int64, draws before the stage

    @property
    def block(self) -> int:
        return int(self.counts.sum())


@dataclass(frozen=True, eq=False)
class Mixture:
    """Which source each position draws from, in stages; sources are numbered by sorted key.

    `plan` says the same as `stages`: those of the plan that the mixture was made from, and those
    that begin because a source has run out. `end` is the first position that does not exist any
    more, None where all do.
    """

    names: tuple[str, ...]
    stages: tuple[Stage, ...]
    plan: Plan
    end: int | None
    limits: np.ndarray  # [sources] int64, draws after which each has run out; MAX_POSITION: never


def make_mixture(
    plan: Plan,
    num_rows: Mapping[str, int] | None = None,
    *,
    max_epochs: float = 0.0,
    run_out: RunOut = "stop",
) -> Mixture:
    """Build the stages of a plan: which weights hold from which position on.

    The first stage starts at 0, starts rise; weights may have any sum. A block begins anew with
    each stage, the counters of all sources go on.

    Where max_epochs > 0, a source has run out after max_epochs * num_rows[key] draws, rounded down
    but at least one; a source without num_rows never does. With `stop`, positions end where it
    would be drawn next. With `drop`, a stage with the weights of the others starts there, and
    stages that start later leave it out; positions end when no source is left.

    Raises ConfigError for a plan that is not in order, an empty table, weights that are not
    positive numbers or too small ever to be drawn, and a max_epochs that is negative or no number.
    """
    _check(plan)
    names = _names(plan)
    return _build(plan, names, _limits(names, num_rows or {}, max_epochs), run_out)


def _names(plan: Plan) -> tuple[str, ...]:
    return tuple(sorted({name for _, table in plan for name in table}))


def _build(
    plan: Plan, names: tuple[str, ...], limits: np.ndarray, run_out: RunOut, since: int = 0
) -> Mixture:
    """Turn a plan into stages; those that start before `since` are history, taken as they are."""
    base = np.zeros(len(names), np.int64)
    stages: list[Stage] = []
    made: list[tuple[int, dict[str, float]]] = []
    for (start, table), (until, _) in zip(plan, (*plan[1:], (MAX_POSITION, {})), strict=True):
        while start < until:
            if run_out == "drop" and start >= since:
                table = _without(table, _run_out(names, base, limits))
            if not table:
                return Mixture(names, tuple(stages), tuple(made), start, limits)
            share = _block(table, start)
            counts = np.array([share.get(name, 0) for name in names], np.int64)
            stage, stop = _stage(start, until, counts, base, limits)
            stages.append(stage)
            made.append((start, table))
            if stop < until and run_out == "stop":
                return Mixture(names, tuple(stages), tuple(made), stop, limits)
            start, base = stop, _visits(stage, stop)
    return Mixture(names, tuple(stages), tuple(made), None, limits)


def _run_out(names: tuple[str, ...], drawn: np.ndarray, limits: np.ndarray) -> set[str]:
    return {names[number] for number in np.flatnonzero(drawn >= limits)}


def _without(table: dict[str, float], names: set[str]) -> dict[str, float]:
    return {name: weight for name, weight in table.items() if name not in names}


def _check(plan: Plan) -> None:
    if not plan:
        raise ConfigError("data.store: the table of stores is empty; name at least one")
    starts = [start for start, _ in plan]
    if starts[0] != 0 or starts != sorted(set(starts)) or starts[-1] >= MAX_POSITION:
        raise ConfigError(
            f"data.stages: stages start at rows {starts}; the first must start at 0 and each later "
            f"one after the one before, below {MAX_POSITION}"
        )
    problems = [
        f"{_where(start)}: the table of stores is empty; name at least one"
        for start, table in plan
        if not table
    ]
    problems += [
        f"{_where(start)}: weight of {name!r} is {weight!r}; it must be a positive number"
        for start, table in plan
        for name, weight in table.items()
        if not _positive(weight)
    ]
    if problems:
        raise ConfigError(*problems)
    for start, table in plan:
        _block(table, start)


def _where(start: int) -> str:
    return "data.store" if start == 0 else f"data.stages[{str(start)!r}]"


def _positive(weight: object) -> bool:
    number = isinstance(weight, int | float) and not isinstance(weight, bool)
    return number and 0 < weight < 1e300


def _limits(names: Sequence[str], num_rows: Mapping[str, int], max_epochs: float) -> np.ndarray:
    if not 0 <= max_epochs < math.inf:
        raise ConfigError(f"data.max_epochs: {max_epochs!r} passes; 0 is no limit, 1 is one pass")
    passes = Fraction(repr(float(max_epochs)))  # 0.29 of 100 rows are 29, in floats 28
    limits = np.full(len(names), MAX_POSITION)
    for number, name in enumerate(names):
        if passes and name in num_rows:
            limits[number] = min(max(1, int(passes * num_rows[name])), MAX_POSITION)
    return limits


def _block(table: Mapping[str, float], start: int) -> dict[str, int]:
    """Return the draws per block of each source of a stage; none is 0."""
    # Through its shortest decimal text 0.1 is a tenth, which its binary value is not.
    exact = [Fraction(repr(float(weight))) for weight in table.values()]
    counts = dict(zip(table, slots.count(exact), strict=True))
    total = sum(exact)
    never = [
        f"{_where(start)}: weight {table[name]!r} of {name!r} is a share of "
        f"{float(share / total):.3g}, never drawn in a block of {slots.MAX_BLOCK} rows; "
        f"raise it above {1 / slots.MAX_BLOCK:.2g} or drop the store"
        for (name, count), share in zip(counts.items(), exact, strict=True)
        if count == 0
    ]
    if never:
        raise ConfigError(*never)
    return counts


def _stage(
    start: int, until: int, counts: np.ndarray, base: np.ndarray, limits: np.ndarray
) -> tuple[Stage, int]:
    """Build a stage; return it and where it stops: at a draw beyond a limit, or at `until`."""
    block = int(counts.sum())
    room = limits - base
    drawn = counts > 0
    whole = int((room[drawn] // counts[drawn]).min())  # blocks that no limit cuts short
    length = min(block, until - start)
    if whole == 0:
        close = drawn & (room < counts)
        last = -(-(room[close] + 1) * block // counts[close])  # see slots.spread
        length = min(length, int(last.min()))
    layout = slots.spread(counts, length)
    order = np.argsort(layout, kind="stable")
    made = np.bincount(layout, minlength=len(counts))
    ranks = np.empty_like(layout)
    ranks[order] = np.arange(length) - np.repeat(np.cumsum(made) - made, made)
    beyond = np.flatnonzero(whole * counts[layout] + ranks >= room[layout])
    stop = min(until, start + whole * block + int(beyond[0])) if beyond.size else until
    return Stage(start, counts, layout, ranks, base), stop


def draws(mixture: Mixture, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (source, visit number in it), both int64 [M], of global positions [M].

    Raises IndexError for a position that does not exist.
    """
    positions = np.asarray(positions, np.int64)
    if positions.size and not 0 <= positions.min() <= positions.max() < _stop(mixture):
        raise IndexError(
            f"positions {positions.min()} to {positions.max()} are not all in 0.."
            f"{_stop(mixture) - 1}"
        )
    starts = [stage.start for stage in mixture.stages]
    which = np.searchsorted(starts, positions, side="right") - 1
    source, visit = np.empty_like(positions), np.empty_like(positions)
    for number in np.unique(which).tolist():
        stage, mine = mixture.stages[number], which == number
        block, slot = np.divmod(positions[mine] - stage.start, stage.block)
        drawn = stage.slots[slot]
        source[mine] = drawn
        visit[mine] = stage.base[drawn] + block * stage.counts[drawn] + stage.ranks[slot]
    return source, visit


def position_of(mixture: Mixture, source: int, visits: np.ndarray) -> np.ndarray:
    """Undo `draws`: return the positions int64 [M] of visits [M] to a source; -1: never made."""
    visits = np.asarray(visits, np.int64)
    total = visits_before(mixture, _stop(mixture))[source]
    bases = [*(int(stage.base[source]) for stage in mixture.stages), int(total)]
    which = np.searchsorted(bases, visits, side="right") - 1
    positions = np.full_like(visits, -1)
    for number in np.unique(which[(visits >= 0) & (visits < total)]).tolist():
        stage, mine = mixture.stages[number], which == number
        block, rank = np.divmod(visits[mine] - stage.base[source], stage.counts[source])
        slot = np.flatnonzero(stage.slots == source)[rank]
        positions[mine] = stage.start + block * stage.block + slot
    return positions


def visits_before(mixture: Mixture, position: int) -> np.ndarray:
    """Return how often each source was drawn at positions below `position`, int64 [sources].

    Raises IndexError for a position beyond the end.
    """
    if not 0 <= position <= _stop(mixture):
        raise IndexError(f"position {position} is not in 0..{_stop(mixture)}")
    after = bisect.bisect_right(mixture.stages, position, key=lambda stage: stage.start)
    return _visits(mixture.stages[after - 1], position)


def _visits(stage: Stage, position: int) -> np.ndarray:
    number, slot = divmod(position - stage.start, stage.block)
    part = np.bincount(stage.slots[:slot], minlength=len(stage.counts))
    return stage.base + number * stage.counts + part


def _stop(mixture: Mixture) -> int:
    return MAX_POSITION if mixture.end is None else mixture.end


def ends(mixture: Mixture) -> dict[str, int]:
    """Return, for each source that runs out, the position after its last draw."""
    last = {
        name: int(position_of(mixture, number, mixture.limits[number : number + 1] - 1)[0])
        for number, name in enumerate(mixture.names)
        if mixture.limits[number] < MAX_POSITION
    }
    return {name: position + 1 for name, position in last.items() if position >= 0}


def same_from(recorded: Plan, configured: Plan, position: int) -> bool:
    """Tell whether both plans have the same shares in force at `position`, and the same later on.

    What they say of positions before does not matter.
    """
    ours, theirs = _from(recorded, position), _from(configured, position)
    return [start for start, _ in ours] == [start for start, _ in theirs] and all(
        _alike(a, b, start) for (start, a), (_, b) in zip(ours, theirs, strict=True)
    )


def replan(recorded: Plan, configured: Plan, position: int) -> Plan:
    """Return the plan with the past of `recorded` and, from `position` on, that of `configured`.

    A stage begins at `position` only where the shares in force there differ.
    """
    if same_from(recorded, configured, position):
        return recorded
    (_, before), *_ = _from(recorded, position)
    (_, now), *later = _from(configured, position)
    if _alike(before, now, position):
        return (*(stage for stage in recorded if stage[0] <= position), *later)
    return (*(stage for stage in recorded if stage[0] < position), (position, now), *later)


def resume(
    recorded: Plan,
    configured: Plan,
    position: int,
    num_rows: Mapping[str, int],
    *,
    max_epochs: float = 0.0,
    run_out: RunOut = "stop",
) -> Mixture:
    """Build the mixture of a run that goes on at `position` with perhaps other settings.

    `recorded` is the `Mixture.plan` of the run so far: its past stands as it was drawn, whatever
    weights, limits or sources are configured now. Limits count what was drawn before; a source that
    is beyond a new one has run out. Arguments and errors are else those of `make_mixture`. Where
    `same_from(recorded, result.plan, position)`, the run goes on as it would have.
    """
    _check(configured)
    past = tuple(stage for stage in recorded if stage[0] <= position)
    names = _names((*past, *configured))
    before = make_mixture(past)
    visits = dict(zip(before.names, visits_before(before, position).tolist(), strict=True))
    drawn = np.array([visits.get(name, 0) for name in names], np.int64)
    limits = np.maximum(_limits(names, num_rows, max_epochs), drawn)
    if run_out == "drop":
        # A stage that began without a source goes on, although the configuration names it.
        gone = _run_out(names, drawn, limits) - past[-1][1].keys()
        (_, now), *later = _from(configured, position)
        configured = ((0, _without(now, gone)), *later)
    return _build(replan(past, configured, position), names, limits, run_out, since=position)


def _from(plan: Plan, position: int) -> Plan:
    """Return the weights in force at `position`, as a stage that starts there, and later stages."""
    past = [table for start, table in plan if start <= position]
    return ((position, past[-1]), *(stage for stage in plan if stage[0] > position))


def _alike(first: dict[str, float], second: dict[str, float], start: int) -> bool:
    """Tell whether two tables have the same shares, as they are drawn."""
    a, b = _block(first, start), _block(second, start)
    total_a, total_b = sum(a.values()), sum(b.values())
    return a.keys() == b.keys() and all(a[name] * total_b == b[name] * total_a for name in a)
