"""Weighted mixing of sources as a repeating block of slots: exact, even, and in closed form.

Weights become integer counts of a block of M slots; a slot names a source, and its rank is how
often that source came before in the block. Global position p then is, without any state, visit
number (p div M) * count + rank of source slots[p mod M]. The slots are laid out so that after any
number of positions each source was drawn within one of its exact share.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from jaxgpt.errors import ConfigError

MAX_BLOCK = 65536  # slots; the smallest share that can be drawn is about one in this many


@dataclass(frozen=True)
class Mixture:
    """Sources in fixed proportions; `counts` sum to the block length M."""

    names: tuple[str, ...]
    counts: np.ndarray  # [sources] int64, draws per block
    slots: np.ndarray  # [M] int64, source of each slot
    ranks: np.ndarray  # [M] int64, earlier slots of the same source


def make_mixture(weights: Mapping[str, float]) -> Mixture:
    """Build the block for positive weights of any sum.

    The block is the shortest that has the exact shares, else MAX_BLOCK slots shared out by largest
    remainder. Raises ConfigError for weights that are not positive numbers, or that could never
    be drawn from a block of MAX_BLOCK.
    """
    if not weights:
        raise ConfigError("data.store: the table of stores is empty; name at least one")
    bad = [
        f"data.store: weight of {name!r} is {weight!r}; it must be a positive number"
        for name, weight in weights.items()
        if not _positive(weight)
    ]
    if bad:
        raise ConfigError(*bad)
    # Through its shortest decimal text 0.1 is a tenth, which its binary value is not.
    parts = [Fraction(repr(float(weight))) for weight in weights.values()]
    shares = [part / sum(parts) for part in parts]
    counts = _counts(shares)
    never = [
        f"data.store: weight {weight!r} of {name!r} is a share of {float(share):.3g}, never drawn "
        f"in a block of {MAX_BLOCK} rows; raise it above {1 / MAX_BLOCK:.2g} or drop the store"
        for (name, weight), share, count in zip(weights.items(), shares, counts, strict=True)
        if count == 0
    ]
    if never:
        raise ConfigError(*never)
    slots = _spread(counts)
    ranks = np.empty_like(slots)
    for source, count in enumerate(counts):
        ranks[slots == source] = np.arange(count)
    return Mixture(tuple(weights), np.array(counts, np.int64), slots, ranks)


def _positive(weight: object) -> bool:
    number = isinstance(weight, int | float) and not isinstance(weight, bool)
    return number and 0 < weight < 1e300


def _counts(shares: list[Fraction]) -> list[int]:
    """Turn shares that sum to 1 into slots per block."""
    simple = [share.limit_denominator(MAX_BLOCK) for share in shares]
    block = math.lcm(*(share.denominator for share in simple))
    # 1e-12 forgives the rounding of floats such as 1/3, and nothing a person would write.
    exact = all(abs(a - b) <= 1e-12 * a for a, b in zip(shares, simple, strict=True))
    if block <= MAX_BLOCK and exact and sum(simple) == 1:
        return [int(share * block) for share in simple]
    counts = [int(share * MAX_BLOCK) for share in shares]
    largest = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i] * MAX_BLOCK)
    for source in largest[: MAX_BLOCK - sum(counts)]:
        counts[source] += 1
    return counts


def _spread(counts: list[int]) -> np.ndarray:
    """Lay out a block whose first t slots, for any t, hold t * count / M of a source, within one.

    Draw k (from 0) of a source must fall in slots [floor(k M / count), ceil((k + 1) M / count)).
    Such a layout exists (Baruah et al. 1996, proportionate progress), so serving the released draw
    with the earliest deadline finds one. Serving the largest deficit drifts further, to 1.56 in
    a test with 61 sources.
    """
    block = sum(counts)
    waiting = [(0, source, 0) for source in range(len(counts))]  # (release, source, draw)
    released: list[tuple[int, int, int]] = []  # (deadline, source, draw)
    slots = np.empty(block, np.int64)
    for slot in range(block):
        while waiting and waiting[0][0] <= slot:
            _, source, draw = heapq.heappop(waiting)
            deadline = -(-(draw + 1) * block // counts[source])
            heapq.heappush(released, (deadline, source, draw))
        _, source, draw = heapq.heappop(released)
        slots[slot] = source
        if draw + 1 < counts[source]:
            release = (draw + 1) * block // counts[source]
            heapq.heappush(waiting, (release, source, draw + 1))
    return slots


def draws(mixture: Mixture, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (source, visit number in it), both int64 [M], of global positions [M] >= 0."""
    block, slot = np.divmod(np.asarray(positions, np.int64), len(mixture.slots))
    source = mixture.slots[slot]
    return source, block * mixture.counts[source] + mixture.ranks[slot]


def visits_before(mixture: Mixture, position: int) -> np.ndarray:
    """Return how often each source was drawn at positions below `position`, int64 [sources]."""
    block, slot = divmod(position, len(mixture.slots))
    return block * mixture.counts + np.bincount(mixture.slots[:slot], minlength=len(mixture.counts))
