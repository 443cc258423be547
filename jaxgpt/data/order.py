"""The order of rows: keyed permutations in closed form, computed for any position in O(1).

Position p of a source of N rows is visit p mod N of epoch p div N. In `global` order each epoch has
a permutation of 0..N-1 of its own, with keys hashed from (seed, source digest, epoch): a balanced
Feistel network on the next even number of bits, repeated until the value lands below N (cycle
walking). Its round function is a 64-bit multiply-xorshift; with fewer rounds or an affine function
neighbours correlate (up to 0.4) and the lowest bit is predictable. `block` order permutes stretches
of neighbouring rows, then the rows inside each; `sequential` order is the order on disk. All
arithmetic is on int64, or on uint64 modulo 2^64.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

VERSION = 1  # part of every key; raise it with any change of the order
ROUNDS = 8  # one per 64-bit word of SHA-512; 6 already pass the statistics
MAX_ROWS = 1 << 62  # counters are int64
Order = Literal["global", "block", "sequential"]


def visit(
    seed: int,
    digest: str,
    n: int,
    counter: np.ndarray,
    *,
    order: Order = "global",
    stretch: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """Return (epoch, row), both int64 [M], of visits number `counter` [M] to a source of n rows.

    `stretch` is the number of rows of a stretch in block order; the last stretch may be shorter.
    """
    assert 1 <= n <= MAX_ROWS, f"a source of {n} rows"
    epoch, index = np.divmod(np.asarray(counter, np.int64), n)
    match order:
        case "global":
            row = permute(_global_keys(seed, digest, epoch), n, index).astype(np.int64)
        case "block":
            row = _block_row(_stretches(seed, digest, epoch, n, stretch), index)
        case "sequential":
            row = index
        case _:
            raise ValueError(f"order {order!r} is not global, block or sequential")
    return epoch, row


def ordinal(
    seed: int,
    digest: str,
    n: int,
    epoch: np.ndarray | int,
    row: np.ndarray,
    *,
    order: Order = "global",
    stretch: int = 1,
) -> np.ndarray:
    """Undo `visit`: return when in its epoch each row [M] comes, int64 [M] in 0..n-1.

    `epoch` is one for all rows, or [M]; counter = epoch * n + ordinal.
    """
    assert 1 <= n <= MAX_ROWS, f"a source of {n} rows"
    epoch, row = np.broadcast_arrays(np.asarray(epoch, np.int64), np.asarray(row, np.int64))
    match order:
        case "global":
            return invert(_global_keys(seed, digest, epoch), n, row).astype(np.int64)
        case "block":
            return _block_index(_stretches(seed, digest, epoch, n, stretch), row)
        case "sequential":
            return row.copy()
        case _:
            raise ValueError(f"order {order!r} is not global, block or sequential")


def epoch_keys(seed: int, digest: str, epoch: int, part: str = "") -> np.ndarray:
    """Return round keys, uint64 [ROUNDS], of one epoch of the source with this digest.

    `part` tells apart the permutations that an epoch needs; the global one has no name.
    """
    text = f"jaxgpt order {VERSION}|{seed}|{digest}|{epoch}" + (part and f"|{part}")
    return np.frombuffer(hashlib.sha512(text.encode()).digest(), "<u8").astype(np.uint64)


def _keys(seed: int, digest: str, epochs: np.ndarray, part: str = "") -> np.ndarray:
    """Return the keys of epochs [E], uint64 [E, ROUNDS]."""
    keys = [epoch_keys(seed, digest, epoch, part) for epoch in epochs.tolist()]
    return np.array(keys, np.uint64).reshape(-1, ROUNDS)


def _global_keys(seed: int, digest: str, epoch: np.ndarray) -> np.ndarray:
    epochs, which = np.unique(epoch, return_inverse=True)
    return _per_visit(_keys(seed, digest, epochs), which)


def _per_visit(values: np.ndarray, which: np.ndarray) -> np.ndarray:
    """Turn values per epoch into values per visit; of a single epoch, leave them to broadcast."""
    return values if len(values) == 1 else values[which]


class _Stretches(NamedTuple):
    """Block order for M visits: `count` stretches of `length` rows, the last one of `tail`.

    The arrays are [M, ...], or [1, ...] where all visits are in the same epoch.
    """

    count: int
    length: int
    tail: int
    outer: np.ndarray  # uint64 [M, ROUNDS], keys of the order of stretches
    inner: np.ndarray  # uint64 [M, ROUNDS], from which the keys inside a stretch are mixed
    last_at: np.ndarray  # int64 [M], the turn at which the last, perhaps short stretch comes


def _stretches(seed: int, digest: str, epoch: np.ndarray, n: int, length: int) -> _Stretches:
    assert length >= 1, f"stretches of {length} rows"
    length = min(length, n)
    count = -(-n // length)
    epochs, which = np.unique(epoch, return_inverse=True)
    outer = _keys(seed, digest, epochs, "stretches")
    inner = _keys(seed, digest, epochs, "rows")
    last_at = invert(outer, count, np.full(len(epochs), count - 1)).astype(np.int64)
    each = (_per_visit(values, which) for values in (outer, inner, last_at))
    return _Stretches(count, length, n - (count - 1) * length, *each)


def _block_row(s: _Stretches, index: np.ndarray) -> np.ndarray:
    # As if the last stretch were as long as the others, whose turns then begin at multiples.
    missing = s.length - s.tail
    after = index >= s.last_at * s.length + s.tail
    turn, inside = np.divmod(index + missing * after, s.length)
    stretch = permute(s.outer, s.count, turn).astype(np.int64)
    return stretch * s.length + _inside(permute, s, stretch, inside)


def _block_index(s: _Stretches, row: np.ndarray) -> np.ndarray:
    stretch, inside = np.divmod(row, s.length)
    turn = invert(s.outer, s.count, stretch).astype(np.int64)
    missing = (s.length - s.tail) * (turn > s.last_at)
    return turn * s.length + _inside(invert, s, stretch, inside) - missing


def _inside(walk: Callable, s: _Stretches, stretch: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Apply `permute` or `invert` to places [M] inside stretches [M], each with keys of its own."""
    keys = _mix(s.inner ^ stretch.astype(np.uint64)[:, None])  # 15 ns each; SHA-512: 2 us
    result = np.empty_like(value)
    last = stretch == s.count - 1
    for mine, length in ((~last, s.length), (last, s.tail)):
        result[mine] = walk(keys[mine], length, value[mine])
    return result


def permute(keys: np.ndarray, n: int, index: np.ndarray) -> np.ndarray:
    """Map indices [M] in 0..n-1 one to one onto rows uint64 [M] in 0..n-1; n <= 2^62.

    Keys are [ROUNDS] or [1, ROUNDS], or [M, ROUNDS] for indices of different epochs.
    """
    return _walk(_encrypt, keys, n, index)


def invert(keys: np.ndarray, n: int, row: np.ndarray) -> np.ndarray:
    """Undo `permute`: return the index uint64 [M] of each row [M]."""
    return _walk(_decrypt, keys, n, row)


def _walk(cipher: Callable, keys: np.ndarray, n: int, value: np.ndarray) -> np.ndarray:
    assert 1 <= n <= MAX_ROWS, f"a permutation of {n} rows"
    half = max(1, ((n - 1).bit_length() + 1) // 2)  # bits; 4^half < 4n, so under 4 tries on average
    keys = np.broadcast_to(keys, (len(value), ROUNDS)).T  # [ROUNDS, M]
    value = cipher(keys, half, np.asarray(value, np.uint64))
    outside = np.flatnonzero(value >= n)
    while outside.size:
        value[outside] = cipher(keys[:, outside], half, value[outside])
        outside = outside[value[outside] >= n]
    return value


def _encrypt(keys: np.ndarray, half: int, value: np.ndarray) -> np.ndarray:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = value >> shift, value & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return left << shift | right


def _decrypt(keys: np.ndarray, half: int, value: np.ndarray) -> np.ndarray:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = value >> shift, value & mask
    for key in keys[::-1]:
        left, right = right ^ (_mix(left ^ key) & mask), left
    return left << shift | right


def _mix(x: np.ndarray) -> np.ndarray:
    """Scramble 64 bits: the finaliser of MurmurHash3, in which every bit depends on every bit."""
    x = (x ^ x >> np.uint64(33)) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ x >> np.uint64(33)) * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ x >> np.uint64(33)
