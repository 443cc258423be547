"""One block of a mixture: which source each of its M slots draws from.

Weights become integer counts that sum to M; the slots are laid out so that after any number of them
each source was drawn within one of its exact share.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

MAX_BLOCK = 65536  # slots; the smallest share that can be drawn is about one in this many


def count(weights: Sequence[Fraction]) -> list[int]:
    """Return the draws per block of sources with these positive weights, [sources]; 0 is possible.

    The block is the shortest with the exact shares, else MAX_BLOCK slots shared out by largest
    remainder.
    """
    scale = math.lcm(*(weight.denominator for weight in weights))
    parts = [int(weight * scale) for weight in weights]
    total = sum(parts)
    simple: list[Fraction] = []
    block = 1
    for part in parts:
        share = Fraction(part, total)
        simple.append(share.limit_denominator(MAX_BLOCK))
        block = math.lcm(block, simple[-1].denominator)
        # 1e-12 forgives the rounding of floats such as 1/3, and nothing a person would write.
        if block > MAX_BLOCK or abs(share - simple[-1]) > 1e-12 * share:
            break
    else:
        counts = [int(share * block) for share in simple]
        if sum(counts) == block:
            return counts
    counts = [part * MAX_BLOCK // total for part in parts]
    largest = sorted(range(len(parts)), key=lambda i: -(parts[i] * MAX_BLOCK % total))
    for source in largest[: MAX_BLOCK - sum(counts)]:
        counts[source] += 1
    return counts


def spread(counts: np.ndarray, length: int) -> np.ndarray:
    """Lay out the first `length` slots of a block, int32, each source within one of its share.

    After any t slots of M a source was drawn t * count / M times, within one: draw k (from 0) must
    fall in slots [floor(k M / count), ceil((k + 1) M / count)). Such a layout exists (Baruah et al.
    1996, proportionate progress), so serving the released draw with the earliest deadline finds
    one. Serving the largest deficit drifts further, to 1.56 in a test with 61 sources.
    """
    block = int(counts.sum())
    needed = -(-length * counts // block)  # draws released before slot `length`
    source = np.repeat(np.arange(len(counts)), needed)
    draw = np.arange(len(source)) - np.repeat(np.cumsum(needed) - needed, needed)
    release = draw * block // counts[source]
    deadline = -(-(draw + 1) * block // counts[source])
    order = np.argsort(release, kind="stable")
    tasks = (deadline * len(counts) + source)[order].tolist()  # sorted by deadline, then source
    released = np.searchsorted(release[order], np.arange(length), side="right").tolist()
    waiting: list[int] = []
    served = []
    done = 0
    for now in released:
        for task in tasks[done:now]:
            heapq.heappush(waiting, task)
        done = now
        served.append(heapq.heappop(waiting) % len(counts))
    return np.array(served, np.int32)
