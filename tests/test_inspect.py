"""Rows explained and documents found: both agree with the rows that training gets."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from corpora import make_models
from foreign_models import sentencepiece_file
from stores import E, encoded, random_documents, write_store

from jaxgpt.config import DataConfig
from jaxgpt.data import inspect
from jaxgpt.data.history import recall, record
from jaxgpt.data.pipeline import sample_rows
from jaxgpt.data.shard import write_shard
from jaxgpt.data.store import open_store, write_manifest
from jaxgpt.data.stream import Data, open_data
from jaxgpt.errors import DataError
from jaxgpt.tokenization import tokenizer

T = 16
STORES = {
    "a": [random_documents([7, 30, 1, 55, 12], 0), [], random_documents([15, 16, 17, 2, 1, 40], 1)],
    "b": [random_documents([25, 3, 9, 33], 2)],
}
PACKINGS, ORDERS = ("concat", "best_fit", "best_fit_whole"), ("global", "block", "sequential")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("inspect")
    for name, shards in STORES.items():
        write_store(path / name / "train", shards, origin=f"corpus/{name}.jsonl")
    return path


def opened(root: Path, packing: str = "concat", order: str = "global", **options) -> Data:
    store = {str(root / "a"): 2.0, str(root / "b"): 1.0}
    history = options.pop("history", None)
    cfg = DataConfig(**({"store": store, "packing": packing, "order": order} | options))
    return open_data(cfg, seq_len=T, seed=3, history=history)


def two_epochs(data: Data) -> int:
    """Return a position before which every source was read twice."""
    most = 4 * sum(data.num_rows)
    _, epoch, _ = inspect.locate(data, np.arange(most))
    assert epoch.max() >= 2
    return most


def documents(data: Data, source: int) -> list[list[int]]:
    name = Path(data.names[source]).name
    return [[E, *doc] for shard in STORES[name] for doc in shard]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("packing", PACKINGS)
def test_the_parts_of_every_row_are_the_ids_that_training_reads(root, packing, order):
    data = opened(root, packing, order)
    stop = two_epochs(data)
    tokens = sample_rows(data, np.arange(stop)).tokens
    for sample in inspect.samples(data, np.arange(stop)):
        texts = documents(data, data.names.index(sample.name))
        row = []
        for part in sample.parts:
            assert part.row_start == len(row) and part.length == len(texts[part.document])
            row += texts[part.document][part.offset :][: part.row_stop - part.row_start]
        assert len(row) == T - sample.padding
        assert tokens[sample.position].tolist() == row + [0] * sample.padding


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("packing", PACKINGS)
def test_every_document_is_found_exactly_where_the_rows_show_it(root, packing, order):
    data = opened(root, packing, order)
    stop = two_epochs(data)
    tokens = sample_rows(data, np.arange(stop)).tokens
    shown: dict[tuple[int, int], set] = {}
    for sample in inspect.samples(data, np.arange(stop)):
        for part in sample.parts:
            key = data.names.index(sample.name), part.document
            place = inspect.Place(sample.row, part.row_start, part.row_stop, part.offset)
            shown.setdefault(key, set()).add((sample.position, sample.epoch, place))
    for source in range(2):
        for document, ids in enumerate(documents(data, source)):
            found = list(inspect.sightings(data, source, document, 0, stop))
            assert len(found) == len(set(found))
            assert [s.position for s in found] == sorted(s.position for s in found)
            assert set(found) == shown[source, document]
            for position, _, place in found:
                part = ids[place.offset :][: place.row_stop - place.row_start]
                assert tokens[position, place.row_start : place.row_stop].tolist() == part


@pytest.mark.parametrize("packing", PACKINGS)
def test_sightings_from_a_position_on_are_a_slice_of_all_and_are_counted(root, packing):
    data = opened(root, packing)
    stop = two_epochs(data)
    for document in range(4):
        everything = list(inspect.sightings(data, 0, document, 0, stop))
        for start, end in ((0, 0), (0, 9), (5, stop - 7), (17, stop), (stop - 1, stop)):
            right = [s for s in everything if start <= s.position < end]
            assert list(inspect.sightings(data, 0, document, start, end)) == right
            assert inspect.count_sightings(data, 0, document, start, end) == len(right)


@pytest.mark.parametrize("packing", PACKINGS)
def test_each_input_of_a_document_is_in_one_row_unless_it_is_cut_off(root, packing):
    data = opened(root, packing)
    for source in range(2):
        for document, ids in enumerate(documents(data, source)):
            held = inspect.places(data.sources[source], document)
            covered = [
                place.offset + inside
                for place in held
                for inside in range(place.row_stop - place.row_start)
            ]
            kept = min(len(ids), T) if packing == "best_fit_whole" else len(ids)
            assert covered == list(range(kept))


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_position_as_far_as_5e9_steps_is_explained_and_found_in_a_second(root, packing):
    data = opened(root, packing)
    first = 5 * 10**9 * 512
    began = time.monotonic()
    sample = next(inspect.samples(data, np.array([first])))
    part, source = sample.parts[0], data.names.index(sample.name)
    place = inspect.Place(sample.row, part.row_start, part.row_stop, part.offset)
    found = inspect.sightings(data, source, part.document, first, first + 512)
    assert next(found) == (first, sample.epoch, place)
    assert inspect.count_sightings(data, source, part.document, 0, first) > 10**9
    assert time.monotonic() - began < 1


def test_fifty_steps_over_six_documents_pass_over_all_of_them_in_an_order_of_each_epoch(tmp_path):
    write_store(tmp_path / "train", [random_documents([20, 30], seed) for seed in range(3)])
    cfg = DataConfig(store=str(tmp_path))
    runs = [open_data(cfg, seq_len=T, seed=seed) for seed in (0, 0, 1)]
    rows = runs[0].num_rows[0]
    passes, other, third = (
        [
            [s.row for s in inspect.samples(data, np.arange(e * rows, (e + 1) * rows))]
            for e in range(9)
        ]
        for data in runs
    )
    assert rows == -(-(150 + 6) // T) and 50 * 2 > 9 * rows
    assert all(sorted(order) == list(range(rows)) for order in passes)
    assert len(set(map(tuple, passes))) == 9
    assert passes == other != third
    seen = list(inspect.sightings(runs[0], 0, 5, 0, 100))
    assert [s.epoch for s in seen] == sorted(s.epoch for s in seen) and seen[-1].epoch >= 8


def test_parts_say_where_they_come_from_and_whether_they_go_on(root):
    data = opened(root, order="sequential", store=str(root / "a"))
    (first, second) = inspect.samples(data, np.arange(2))
    # Inputs: E 7 ids, E 30 ids, E 1 id, ...; rows of 16.
    assert [p[:6] for p in first.parts] == [
        (0, "corpus/a.jsonl:0:0", 0, 8, 0, 8),
        (1, "corpus/a.jsonl:0:1", 8, 16, 0, 31),
    ]
    assert [p[:6] for p in second.parts] == [(1, "corpus/a.jsonl:0:1", 0, 16, 8, 31)]
    flags = [(p.continues_before, p.continues_after) for p in (*first.parts, *second.parts)]
    assert flags == [(False, False), (False, True), (True, True)]


def test_text_of_parts_is_that_of_the_documents_without_end_of_text(tmp_path):
    models = make_models(tmp_path)
    tok = tokenizer.load(models / "a.model")
    texts = ["the king went to hall 1.", "Document 7: caf\u00e9 \U0001f680\n"]
    common = {"tokenizer_digest": tok.digest, "vocab_size": tok.vocab_size, "eos_id": tok.eos_id}
    (tmp_path / "store/train").mkdir(parents=True)
    docs = (encoded(tok.encode(text)) for text in texts)
    entry = write_shard(tmp_path / "store/train/0.shard", docs, **common)
    write_manifest(tmp_path / "store/train", [entry], policies={}, report={}, **common)
    size = open_store(tmp_path / "store").stream_len
    for seq_len in (size, 8):
        cfg = DataConfig(store=str(tmp_path / "store"), order="sequential")
        data = open_data(cfg, seq_len=seq_len, seed=0)
        written = {0: b"", 1: b""}
        for sample in inspect.samples(data, np.arange(data.num_rows[0])):
            for part in sample.parts:
                ids = inspect.part_ids(sample.store, part)
                assert tok.eos_id not in ids
                assert inspect.part_text(tok, sample.store, part) == tok.decode(ids)
                written[part.document] += tok.decode_bytes(ids)
        assert [written[i].decode() for i in range(2)] == texts


def test_text_of_parts_keeps_the_spaces_where_an_engine_puts_one_before_texts(tmp_path):
    tok = tokenizer.load(sentencepiece_file(tmp_path / "sp.model", add_dummy_prefix=True))
    text = "the king found the hall, the king found the house"
    common = {"tokenizer_digest": tok.digest, "vocab_size": tok.vocab_size, "eos_id": tok.eos_id}
    (tmp_path / "store/train").mkdir(parents=True)
    entry = write_shard(tmp_path / "store/train/0.shard", [encoded(tok.encode(text))], **common)
    write_manifest(tmp_path / "store/train", [entry], policies={}, report={}, **common)
    for seq_len in (1, 3):  # 1: E is a row by itself
        cfg = DataConfig(store=str(tmp_path / "store"), order="sequential")
        data = open_data(cfg, seq_len=seq_len, seed=0)
        shown = ""
        for sample in inspect.samples(data, np.arange(data.num_rows[0])):
            shown += "".join(inspect.part_text(tok, sample.store, p) for p in sample.parts)
        assert text.startswith(shown) and len(shown) > 20  # a last row that is not full is no row


@dataclass(frozen=True)
class Wanted:
    words: str
    source: str
    document: int
    name: str = ""


@pytest.mark.parametrize(
    "wanted",
    [
        Wanted("3", "b", 3, name="b"),
        Wanted("corpus/a.jsonl:0:4", "a", 4),
        Wanted("a.jsonl:2:0", "a", 5),
        Wanted("corpus/b.jsonl:0:2", "b", 2),
        Wanted("l:2:5", "a", 10),
    ],
)
def test_a_document_is_named_by_number_origin_or_a_unique_end_of_it(root, wanted):
    data = opened(root)
    source, document = inspect.find_document(data, wanted.words, wanted.name)
    assert (Path(data.names[source]).name, document) == (wanted.source, wanted.document)


@pytest.mark.parametrize(
    ("words", "name", "said"),
    [
        ("3", "", "name its store"),
        ("11", "/a", "0..10"),
        ("99999999999999999999", "/a", "0..10"),
        ("nowhere.txt", "", "no document"),
        ("\x1b[2Jx", "", "\\x1b[2Jx"),
        ("a.jsonl:0", "", "0 from corpus/a.jsonl:0:0"),
        ("corpus/", "", "15 documents fit"),
        ("0", "c", "c: 0 of the stores fit"),
    ],
)
def test_what_names_no_document_or_several_is_refused_with_candidates(root, words, name, said):
    with pytest.raises(DataError) as caught:
        inspect.find_document(opened(root), words, name)
    message = str(caught.value)
    assert said in message and len(message.splitlines()) == 1 and message.isprintable()


def test_an_origin_in_two_stores_is_told_apart_by_the_store(root, tmp_path):
    write_store(tmp_path / "c/train", [random_documents([9, 20], 7)], origin="corpus/a.jsonl")
    data = opened(root, store={str(root / "a"): 1.0, str(tmp_path / "c"): 1.0})
    with pytest.raises(DataError, match="2 documents fit"):
        inspect.find_document(data, "corpus/a.jsonl:0:0")
    source, document = inspect.find_document(data, "corpus/a.jsonl:0:0", str(tmp_path / "c"))
    assert (data.names[source], document) == (str(tmp_path / "c"), 0)


def test_a_position_beyond_the_end_has_no_sample(root):
    data = opened(root, max_epochs=1.0)
    with pytest.raises(IndexError):
        list(inspect.samples(data, np.array([data.end])))


def test_what_came_before_another_layout_of_rows_is_not_told_wrongly(root):
    before = opened(root)
    history = recall(record(before), 50)
    data = opened(root, "best_fit", history=history)
    assert data.since == 50
    with pytest.raises(DataError, match="position 49: rows before 50 were laid out otherwise"):
        next(inspect.samples(data, np.array([49, 60])))
    assert next(inspect.samples(data, np.array([50]))).position == 50
    stop = two_epochs(data)
    seen = [s.position for s in inspect.sightings(data, 0, 1, 0, stop)]
    assert seen and min(seen) >= 50
    assert len(seen) == inspect.count_sightings(data, 0, 1, 0, stop)
    assert inspect.count_sightings(data, 0, 1, 0, 50) == 0
