"""Packing: every token a target exactly once, nothing crosses a document, nothing is dropped."""

from __future__ import annotations

import numpy as np
import pytest
from stores import E, random_documents, stream_of, write_store

from jaxgpt.data.packing import PAD_ID, Batch, Rows, cut, gather, num_rows
from jaxgpt.data.store import open_store

LENGTHS = (10, 11, 16, 17)


def shards_around(T: int) -> list:
    """Documents of 1 token, around T and 2T, and of 3T+1 tokens, in shards of different sizes."""
    lengths = [1, T, 3 * T + 1, T - 1, 1, T + 1, 2 * T - 1, 2 * T, 2 * T + 1, 1, 1, 1, 3 * T + 1]
    return [random_documents(part, seed=T) for part in (lengths[:4], [], lengths[4:5], lengths[5:])]


def epoch(directory, shards, T: int, document_mask: bool) -> Batch:
    """Return all rows of a store in order, as one Batch [N, T]."""
    write_store(directory, shards)
    store = open_store(directory)
    return read_rows(Rows(store, T), document_mask)


def read_rows(source: Rows, document_mask: bool) -> Batch:
    layout = source.layout(document_mask)
    return cut(gather([(source, r) for r in range(source.num_rows)], layout), layout)


@pytest.mark.parametrize("T", LENGTHS)
def test_every_token_and_one_end_per_document_is_a_target_exactly_once(tmp_path, T):
    shards = shards_around(T)
    batch = epoch(tmp_path, shards, T, False)
    targets = batch.targets[batch.weights == 1].tolist()
    assert targets == stream_of(shards)[1:]
    documents = [doc for shard in shards for doc in shard]
    assert targets.count(E) == len(documents)
    assert len(targets) == sum(len(doc) + 1 for doc in documents)


@pytest.mark.parametrize("T", LENGTHS)
def test_inputs_are_the_stream_and_all_but_the_last_row_are_full(tmp_path, T):
    shards = shards_around(T)
    batch = epoch(tmp_path, shards, T, False)
    stream = stream_of(shards)[:-1]
    assert batch.tokens.shape == (-(-len(stream) // T), T)
    assert batch.tokens.ravel()[: len(stream)].tolist() == stream
    assert (batch.weights.ravel() == (np.arange(batch.tokens.size) < len(stream))).all()


@pytest.mark.parametrize("T", LENGTHS)
def test_padding_has_no_weight_no_segment_and_no_token(tmp_path, T):
    batch = epoch(tmp_path, [random_documents([T + 3])], T, True)
    padding = batch.weights == 0
    assert padding.sum() == 2 * T - (T + 4)
    for leaf in (batch.tokens, batch.segment_ids, batch.positions):
        assert (leaf[padding] == PAD_ID).all()
    assert (batch.targets[padding] == PAD_ID).all()
    assert (batch.segment_ids[~padding] > 0).all()


@pytest.mark.parametrize("T", LENGTHS)
def test_a_segment_is_a_piece_of_one_document_and_its_targets_stay_in_it(tmp_path, T):
    shards = shards_around(T)
    batch = epoch(tmp_path, shards, T, True)
    inputs, targets = [], []  # of each segment, rows in order
    for row in range(len(batch.tokens)):
        ids = batch.segment_ids[row]
        assert ids[0] == 1
        for number in range(1, ids.max() + 1):
            where = np.flatnonzero(ids == number)
            assert (np.diff(where) == 1).all()
            assert batch.positions[row, where].tolist() == list(range(len(where)))
            inputs.append(batch.tokens[row, where].tolist())
            targets.append(batch.targets[row, where].tolist())
    # Pieces of a document that began in an earlier row are joined to it again.
    whole: list[tuple[list[int], list[int]]] = []
    for x, y in zip(inputs, targets, strict=True):
        if x[0] == E:
            whole.append(([], []))
        whole[-1][0].extend(x)
        whole[-1][1].extend(y)
    documents = [doc for shard in shards for doc in shard]
    assert whole == [([E, *doc], [*doc, E]) for doc in documents]


@pytest.mark.parametrize("T", LENGTHS)
def test_positions_stay_below_the_row_length(tmp_path, T):
    batch = epoch(tmp_path, shards_around(T), T, True)
    assert batch.positions.min() == 0
    assert batch.positions.max() == T - 1  # reached by the long documents


def test_a_document_longer_than_two_rows_keeps_order_and_loses_nothing(tmp_path):
    doc = list(range(3, 26))  # 23 tokens
    batch = epoch(tmp_path, [[doc]], 10, True)
    assert batch.tokens.tolist() == [[E, *doc[:9]], doc[9:19], [*doc[19:], *[PAD_ID] * 6]]
    assert batch.targets.tolist() == [doc[:10], doc[10:20], [*doc[20:], E, *[PAD_ID] * 6]]
    assert batch.positions.tolist() == [[*range(10)], [*range(10)], [*range(4), *[0] * 6]]
    assert batch.weights.sum() == 24


def test_four_documents_in_rows_of_four_lose_no_token(tmp_path):
    documents = [[10, 11, 12, 13, 14], [20, 21], [30, 31, 32], [40]]
    batch = epoch(tmp_path, [documents], 4, True)
    assert batch.tokens.tolist() == [
        [E, 10, 11, 12],
        [13, 14, E, 20],
        [21, E, 30, 31],
        [32, E, 40, 0],
    ]
    assert batch.targets.tolist() == [
        [10, 11, 12, 13],
        [14, E, 20, 21],
        [E, 30, 31, 32],
        [E, 40, E, 0],
    ]
    assert batch.segment_ids.tolist() == [[1] * 4, [1, 1, 2, 2], [1, 2, 2, 2], [1, 2, 2, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 3], [0, 1, 0, 1], [0, 0, 1, 2], [0, 0, 1, 0]]


@pytest.mark.parametrize("T", LENGTHS)
def test_without_the_document_mask_tokens_are_the_same_and_there_are_no_segments(tmp_path, T):
    masked = epoch(tmp_path / "a", shards_around(T), T, True)
    plain = epoch(tmp_path / "b", shards_around(T), T, False)
    assert plain.segment_ids is None and plain.positions is None
    for name in ("tokens", "targets", "weights"):
        np.testing.assert_array_equal(getattr(masked, name), getattr(plain, name))


def test_documents_of_one_token_fill_a_row_with_half_as_many_segments(tmp_path):
    batch = epoch(tmp_path, [[[7]] * 1000], 16, True)
    assert batch.segment_ids.tolist() == [[n for n in range(1, 9) for _ in range(2)]] * 125
    assert batch.positions.tolist() == [[0, 1] * 8] * 125


@pytest.mark.parametrize("stream_len, T, rows", [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2)])
def test_an_epoch_has_as_many_rows_as_the_stream_needs(stream_len, T, rows):
    assert num_rows(stream_len, T) == rows


def test_rows_of_padding_have_no_weight(tmp_path):
    write_store(tmp_path, [[[5, 6, 7]]])
    store = open_store(tmp_path)
    source = Rows(store, 4)
    batch = cut(gather([None, (source, 0), None], source.layout(True)), source.layout(True))
    assert batch.weights.tolist() == [[0] * 4, [1] * 4, [0] * 4]
    assert batch.segment_ids.tolist() == [[0] * 4, [1] * 4, [0] * 4]


@pytest.mark.parametrize("document_mask", [False, True])
def test_a_begin_of_text_id_is_the_input_before_a_document_and_the_end_its_last_target(
    tmp_path, document_mask
):
    write_store(tmp_path, [[[5, 6], [7]]], start_id=1)
    batch = read_rows(Rows(open_store(tmp_path), 6), document_mask)
    assert batch.tokens.tolist() == [[1, 5, 6, 1, 7, PAD_ID]]
    assert batch.targets.tolist() == [[5, 6, E, 7, E, PAD_ID]]
    assert batch.weights.tolist() == [[1, 1, 1, 1, 1, 0]]


def test_dtypes_are_those_of_the_contract(tmp_path):
    batch = epoch(tmp_path, [[[5, 6, 7]]], 4, True)
    names = ("tokens", "targets", "weights", "segment_ids", "positions")
    dtypes = [getattr(batch, name).dtype.name for name in names]
    assert dtypes == ["int32", "int32", "float32", "int32", "int32"]


def test_an_empty_document_cannot_be_stored(tmp_path):
    with pytest.raises(AssertionError, match="document 1 is empty: skip and count it before"):
        write_store(tmp_path, [[[3], [], [4]]])
