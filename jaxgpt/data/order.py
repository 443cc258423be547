"""The order of rows: a keyed permutation in closed form, computed for any position in O(1).

Position p of a source of N rows is visit p mod N of epoch p div N. Each epoch has a permutation of
0..N-1 of its own, with keys hashed from (seed, source digest, epoch): a balanced Feistel network
on the next even number of bits, repeated until the value lands below N (cycle walking). The round
function is a 64-bit multiply-xorshift; with fewer rounds or an affine function neighbours correlate
(up to 0.4) and the lowest bit is predictable. All arithmetic is on uint64, modulo 2^64.
"""

from __future__ import annotations

import hashlib

import numpy as np

VERSION = 1  # part of every key; raise it with any change of the order
ROUNDS = 8  # one per 64-bit word of SHA-512; 6 already pass the statistics
MAX_ROWS = 1 << 62  # counters are int64


def epoch_keys(seed: int, digest: str, epoch: int) -> np.ndarray:
    """Return the round keys, uint64 [ROUNDS], of one epoch of the source with this digest."""
    text = f"jaxgpt order {VERSION}|{seed}|{digest}|{epoch}"
    return np.frombuffer(hashlib.sha512(text.encode()).digest(), "<u8").astype(np.uint64)


def visit(seed: int, digest: str, n: int, counter: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (epoch, row), both int64 [M], of visits number `counter` [M] to a source of n rows."""
    epoch, index = np.divmod(np.asarray(counter, np.int64), n)
    distinct, which = np.unique(epoch, return_inverse=True)
    keys = np.stack([epoch_keys(seed, digest, int(e)) for e in distinct])
    return epoch, permute(keys[which], n, index).astype(np.int64)


def permute(keys: np.ndarray, n: int, index: np.ndarray) -> np.ndarray:
    """Map indices [M] in 0..n-1 one to one onto rows uint64 [M] in 0..n-1; n <= 2^62.

    Keys are [ROUNDS], or [M, ROUNDS] for indices of different epochs.
    """
    return _walk(_encrypt, keys, n, index)


def invert(keys: np.ndarray, n: int, row: np.ndarray) -> np.ndarray:
    """Undo `permute`: return the index uint64 [M] of each row [M]."""
    return _walk(_decrypt, keys, n, row)


def _walk(cipher, keys: np.ndarray, n: int, value: np.ndarray) -> np.ndarray:
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
