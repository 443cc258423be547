"""The digest of consumed rows: exact, and blind to everything but the rows."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxgpt.data.packing import Batch
from jaxgpt.training.audit import rows_digest

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 50_000, (2, 8, 16)).astype(np.int32)


def batch_of(tokens: np.ndarray) -> Batch:
    targets = np.roll(tokens, -1, axis=-1)
    return Batch(tokens, targets, np.ones(tokens.shape, np.float32))


def mixed(word: int) -> int:
    """The finaliser of MurmurHash3 on Python integers."""
    word = (word ^ word >> 16) * 0x85EBCA6B % 2**32
    word = (word ^ word >> 13) * 0xC2B2AE35 % 2**32
    return word ^ word >> 16


def by_hand(batch: Batch) -> int:
    total = 0
    rows = zip(batch.tokens.reshape(-1, 16), batch.targets.reshape(-1, 16), strict=True)
    for tokens, targets in rows:
        row = 0
        for place, (x, y) in enumerate(zip(tokens.tolist(), targets.tolist(), strict=True)):
            row += mixed((mixed(x) + 3 * y) % 2**32) * (2 * place + 1)
        total += mixed(row % 2**32)
    return total % 2**32


def test_the_digest_is_that_of_integer_arithmetic():
    batch = batch_of(TOKENS)
    assert int(jax.jit(rows_digest)(batch)) == by_hand(batch)


def test_rows_may_come_in_any_order_and_in_any_number_of_batches():
    whole = int(rows_digest(batch_of(TOKENS)))
    shuffled = RNG.permutation(TOKENS.reshape(16, 16))
    parts = [int(rows_digest(batch_of(part[None]))) for part in np.split(shuffled, [3, 4, 11])]
    assert sum(parts) % 2**32 == whole


@pytest.mark.parametrize("change", ["token", "target", "places", "rows", "twice"])
def test_any_change_of_a_row_changes_it(change):
    batch, tokens = batch_of(TOKENS), TOKENS.copy()
    if change == "token":
        tokens[1, 3, 5] += 1
    if change == "places":
        tokens[0, 0, [3, 4]] = tokens[0, 0, [4, 3]]
    if change == "rows":
        tokens[0, 0], tokens[0, 1] = (
            np.concatenate([tokens[0, 0, :8], tokens[0, 1, 8:]]),
            (np.concatenate([tokens[0, 1, :8], tokens[0, 0, 8:]])),
        )
    if change == "twice":
        tokens[0, 0] = tokens[0, 1]
    other = batch_of(tokens)
    if change == "target":
        other.targets[0, 0, 0] += 1
    assert int(rows_digest(other)) != int(rows_digest(batch))


def test_the_digest_is_the_same_on_every_mesh():
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("a", "b"))
    place = NamedSharding(mesh, PartitionSpec(None, ("a", "b")))
    spread = jax.tree.map(lambda x: jax.device_put(x, place), batch_of(TOKENS))
    assert int(jax.jit(rows_digest)(spread)) == int(rows_digest(batch_of(TOKENS)))
