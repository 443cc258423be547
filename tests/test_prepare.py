"""`prepare` puts every document into one store, counts it, and is the same whoever works."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from corpora import TEXTS, change, configure, make_corpus, make_models, write_jsonl
from corpora import stored_documents as documents

from jaxgpt.config import ModelConfig, TokenizerConfig
from jaxgpt.corpus.prepare import prepare
from jaxgpt.data import best_fit
from jaxgpt.data.store import open_store
from jaxgpt.errors import ConfigError, DataError, StorageError
from jaxgpt.tokenization import tokenizer
from jaxgpt.tokenization.frame import with_frame


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def cfg(tmp_path, models):
    return make_corpus(tmp_path, models)


def encoded(cfg, split):
    """Return the ids of each text of a store."""
    tok = tokenizer.load(cfg.tokenizer.path)
    return [tok.encode(text) for text in documents(cfg, split)]


def test_every_document_is_in_one_split_unchanged_and_in_order(cfg):
    report = prepare(cfg)
    train, valid = documents(cfg, "train"), documents(cfg, "valid")
    assert sorted(train + valid) == sorted(TEXTS)
    assert train == [text for text in TEXTS if text in set(train)]
    assert (report["train"]["documents"], report["valid"]["documents"]) == (len(train), len(valid))


def test_the_report_counts_what_is_in_the_stores(cfg):
    report = prepare(cfg)
    tok = tokenizer.load(cfg.tokenizer.path)
    tokens = sum(len(tok.encode(text)) for text in TEXTS)
    assert report["documents"] == 300 and report["empty"] == 0
    assert report["bytes"] == sum(len(text.encode()) for text in TEXTS)
    assert report["tokens"] == tokens == sum(report[s]["tokens"] for s in ("train", "valid"))
    assert report["bytes_per_token"] == pytest.approx(report["bytes"] / tokens, abs=1e-4)
    assert [entry["documents"] for entry in report["sources"]] == [250, 50]
    assert (
        open_store(cfg.data.store).num_bytes + open_store(cfg.data.store, "valid").num_bytes
        == (report["bytes"])
    )
    json.dumps(report)


def test_stores_carry_provenance_and_the_tokenizer(cfg):
    prepare(cfg)
    store = open_store(cfg.data.store)
    tok = tokenizer.load(store.tokenizer_path)
    assert tok.digest == store.tokenizer_digest == tokenizer.load(cfg.tokenizer.path).digest
    path, _, offset = store.provenance(0).rpartition(":")
    line = Path(path).read_bytes()[int(offset) :].split(b"\n")[0]
    assert json.loads(line)["text"] == documents(cfg, "train")[0]
    assert store.provenance(store.num_docs - 1).endswith(".txt")


def test_the_held_out_share_is_by_content_so_duplicates_stay_together(tmp_path, models):
    texts = [f"text {i % 40}" for i in range(400)]
    write_jsonl(tmp_path / "a.jsonl", texts)
    cfg = configure(tmp_path, models, [tmp_path / "a.jsonl"], valid_share=0.3)
    prepare(cfg)
    train, valid = documents(cfg, "train"), documents(cfg, "valid")
    assert not set(train) & set(valid) and len(train) + len(valid) == 400
    assert 3 <= len(set(valid)) <= 21  # of 40 at 0.3: 12, standard deviation 2.9


def test_sizes_of_both_splits_are_reported_and_near_the_share(tmp_path, models):
    write_jsonl(tmp_path / "a.jsonl", [f"photo {i}" for i in range(3670)])
    cfg = configure(tmp_path, models, [tmp_path / "a.jsonl"], valid_share=0.15)
    report = prepare(change(cfg, partition_bytes=10**6))
    train, valid = report["train"]["documents"], report["valid"]["documents"]
    assert train + valid == report["documents"] == 3670
    assert abs(valid - 550.5) < 4 * (3670 * 0.15 * 0.85) ** 0.5
    assert (train, valid) == tuple(
        open_store(cfg.data.store, split).num_docs for split in ("train", "valid")
    )


def test_documents_stay_in_their_split_when_files_are_added(cfg, tmp_path):
    prepare(cfg)
    before = documents(cfg, "valid")
    write_jsonl(tmp_path / "more.jsonl", ["more", "text"])
    grown = change(
        cfg, sources=(*cfg.data.sources, str(tmp_path / "more.jsonl")), store=str(tmp_path / "s2")
    )
    prepare(grown)
    assert [text for text in documents(grown, "valid") if text in set(TEXTS)] == before


def test_a_store_knows_the_input_that_opens_its_documents(tmp_path, models):
    tok = tokenizer.load(models / "a.model")
    begin = tmp_path / "begin.model"
    begin.write_bytes(with_frame(tok, tok.pad_id, ()).raw)
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:20])
    for path, start in ((models / "a.model", tok.eos_id), (begin, tok.pad_id)):
        folder = tmp_path / path.stem
        cfg = configure(folder, models, [tmp_path / "a.jsonl"], valid_share=0.0)
        prepare(replace(cfg, tokenizer=TokenizerConfig(path=str(path))))
        assert open_store(cfg.data.store).start_id == start


def test_special_symbols_in_texts_add_no_end_of_text(tmp_path, models):
    texts = ["a </s> b", "<s>c</s>", "plain", "<pad><unk>", "d"]
    write_jsonl(tmp_path / "a.jsonl", texts)
    cfg = configure(tmp_path, models, [tmp_path / "a.jsonl"], valid_share=0.0)
    prepare(cfg)
    store = open_store(cfg.data.store)
    inputs = store.read(0, store.stream_len)
    assert np.count_nonzero(inputs == store.eos_id) == 5
    assert documents(cfg, "train") == texts


def test_partitions_without_documents_among_others_leave_no_rows(tmp_path, models):
    for i, texts in enumerate((TEXTS[:40], [""] * 1000, TEXTS[40:80])):
        write_jsonl(tmp_path / f"{i}.jsonl", texts)  # 1: 13 kB, in partitions of 2 kB
    cfg = configure(tmp_path, models, [tmp_path / "*.jsonl"], valid_share=0.0)
    report = prepare(cfg)
    assert report["empty"] == 1000 and documents(cfg, "train") == TEXTS[:80]
    assert all(shard["num_docs"] for shard in open_store(cfg.data.store).manifest["shards"])


def test_empty_documents_are_counted_and_whitespace_is_kept(tmp_path, models):
    write_jsonl(tmp_path / "a.jsonl", ["", " ", "a", ""])
    cfg = configure(tmp_path, models, [tmp_path / "a.jsonl"], valid_share=0.0)
    report = prepare(cfg)
    assert (report["documents"], report["empty"]) == (2, 2)
    assert documents(cfg, "train") == [" ", "a"]


def test_bad_records_are_counted_with_their_first_places(tmp_path, models):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\nbad\n{"text": "b"}\n{"no": 1}\n')
    cfg = configure(tmp_path, models, [tmp_path / "a.jsonl"], valid_share=0.0)
    with pytest.raises(DataError, match=r"a\.jsonl:2: not JSON"):
        prepare(cfg)
    report = prepare(change(cfg, bad_text="skip"))
    assert (report["documents"], report["bad_skipped"], report["bad_replaced"]) == (2, 2, 0)
    assert [place.split(": ")[0].rpartition(":")[2] for place in report["bad_places"]] == ["2", "4"]


def test_documents_outside_the_limits_of_length_are_left_out_and_counted(tmp_path, models):
    texts = ["ab", "abc", "abcd", "abcdefgh", "abcdefghi", "\u00e9\u00e9"]
    write_jsonl(tmp_path / "a.jsonl", texts)
    cfg = configure(tmp_path, models, [tmp_path / "a.jsonl"], valid_share=0.0)
    report = prepare(change(cfg, min_bytes=3, max_bytes=8))
    assert (report["documents"], report["too_short"], report["too_long"]) == (4, 1, 1)
    assert documents(cfg, "train") == ["abc", "abcd", "abcdefgh", "\u00e9\u00e9"]
    assert report["bytes"] == 3 + 4 + 8 + 4


def test_the_histogram_of_lengths_is_added_up_over_partitions(cfg):
    report = prepare(cfg)
    tok = tokenizer.load(cfg.tokenizer.path)
    powers = [1 << len(tok.encode(text)).bit_length() - 1 for text in TEXTS]
    expected = {str(power): powers.count(power) for power in sorted(set(powers))}
    assert report["lengths"] == expected and list(report["lengths"]) == list(expected)
    assert [sum(s["lengths"].values()) for s in report["sources"]] == [250, 50]


def test_byte_fallback_and_forced_cuts_are_counted(tmp_path, models):
    write_jsonl(tmp_path / "a.jsonl", ["\U0001f680", "z" * 5000])
    cfg = configure(tmp_path, models, [tmp_path / "a.jsonl"], valid_share=0.0)
    report = prepare(cfg)
    assert report["byte_tokens"] == 4 + 5000  # four bytes of a rocket; z is not in the vocabulary
    assert report["forced_cuts"] == 1
    assert documents(cfg, "train") == ["\U0001f680", "z" * 5000]


def test_the_number_of_workers_does_not_change_the_store(cfg, tmp_path):
    one = prepare(cfg, workers=1)
    two = prepare(change(cfg, store=str(tmp_path / "two")), workers=2)
    assert one == two
    for path in Path(cfg.data.store).rglob("*.*"):
        if path.name != ".lock":
            assert (
                path.read_bytes()
                == (tmp_path / "two" / path.relative_to(cfg.data.store)).read_bytes()
            )


def test_a_long_compressed_source_is_cut_into_shards(tmp_path, models):
    data = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in TEXTS)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(data))
    cfg = configure(tmp_path, models, [tmp_path / "a.jsonl.gz"])
    prepare(cfg)
    assert len(open_store(cfg.data.store).manifest["shards"]) > 10
    assert sorted(documents(cfg, "train") + documents(cfg, "valid")) == sorted(TEXTS)


@pytest.mark.parametrize("packing", ["best_fit", "best_fit_whole"])
def test_the_packing_index_is_built_and_what_it_costs_reported(cfg, packing):
    cfg = replace(change(cfg, packing=packing), model=ModelConfig(seq_len=16))
    report = prepare(cfg)
    for split in ("train", "valid"):
        store = open_store(cfg.data.store, split)
        index = best_fit.open_index(store, 16, whole=packing == "best_fit_whole")
        found = report["packing"][split]
        lost = sum(max(0, len(text) + 1 - 16) for text in encoded(cfg, split))
        lost = lost if packing == "best_fit_whole" else 0
        assert found["truncated_tokens"] == lost
        assert (lost > 0) == (packing == "best_fit_whole") == (found["truncated_documents"] > 0)
        inputs = store.stream_len - lost
        assert found["rows"] == index.num_rows >= inputs / 16
        assert found["padding_share"] == round(1 - inputs / (16 * index.num_rows), 6)


def test_a_finished_store_gets_the_index_of_another_row_length(cfg):
    assert "packing" not in prepare(cfg)
    cfg = replace(change(cfg, packing="best_fit"), model=ModelConfig(seq_len=32))
    report = prepare(cfg)
    assert report["already_prepared"] and report["packing"]["seq_len"] == 32
    assert best_fit.open_index(open_store(cfg.data.store), 32, whole=False).num_rows > 0
    assert prepare(cfg) == report


def test_a_damaged_packing_index_is_built_again(cfg):
    cfg = replace(change(cfg, packing="best_fit"), model=ModelConfig(seq_len=32))
    report = prepare(cfg)
    path = best_fit.index_path(open_store(cfg.data.store), 32, whole=False)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert prepare(cfg)["packing"] == report["packing"] and path.read_bytes() == whole


def test_workers_import_neither_jax_nor_tensorflow():
    code = (
        "import sys, jaxgpt.corpus.workers, jaxgpt.corpus.prepare; "
        "print([m for m in ('jax', 'flax', 'tensorflow', 'pyarrow') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"


def test_progress_reaches_the_total(cfg):
    seen = []
    prepare(cfg, lambda *state: seen.append(state))
    done, totals, counts = zip(*seen, strict=True)
    assert list(done) == sorted(done) and done[-1] == totals[0] and len(set(totals)) == 1
    assert counts[-1] == 300


# Refusals


def test_without_a_tokenizer_the_command_to_make_one_is_named(cfg):
    with pytest.raises(
        DataError, match=r"store/tokenizer\.model: no tokenizer .*`jaxgpt tokenizer train`"
    ):
        prepare(replace(cfg, tokenizer=TokenizerConfig()))


@pytest.mark.parametrize("store", ["", {"a": 1.0}])
def test_a_store_that_is_no_folder_is_refused(cfg, store):
    with pytest.raises(ConfigError, match="data.store"):
        prepare(change(cfg, store=store))


@pytest.mark.parametrize("name", ["manifest.json", "train/mine.txt", "valid/mine.txt"])
def test_a_folder_that_holds_something_else_is_left_alone(cfg, name):
    path = Path(cfg.data.store, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    with pytest.raises(DataError, match="not made by `prepare`"):
        prepare(cfg)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_sources_without_text_are_refused(tmp_path, models, texts):
    write_jsonl(tmp_path / "a.jsonl", texts)
    with pytest.raises(DataError, match="not one document with text"):
        prepare(configure(tmp_path, models, [tmp_path / "a.jsonl"]))


def test_sources_of_bad_records_alone_are_refused_with_the_first(tmp_path, models):
    (tmp_path / "a.jsonl").write_bytes(b'{"body": "a"}\n' * 7)
    cfg = configure(tmp_path, models, [tmp_path / "a.jsonl"], bad_text="skip")
    with pytest.raises(DataError, match=r"; 7 bad records .* first: .*a\.jsonl:1: no field 'text'"):
        prepare(cfg)


@pytest.mark.parametrize("bad", [10, 11])
def test_at_most_half_of_the_records_of_a_source_may_be_bad_however_it_is_cut(
    tmp_path, models, bad
):
    write_jsonl(tmp_path / "good.jsonl", TEXTS)
    (tmp_path / "in").mkdir()
    for i in range(8):  # partitions of 20 records each, too few to be judged alone
        data = b'{"body": "x"}\n' * bad + b'{"text": "y"}\n' * (20 - bad)
        (tmp_path / "in" / f"{i}.jsonl").write_bytes(data)
    entries = [tmp_path / "good.jsonl", tmp_path / "in"]
    cfg = configure(tmp_path, models, entries, bad_text="skip", partition_bytes=250)
    if bad == 10:
        assert prepare(cfg)["bad_skipped"] == 80
        return
    with pytest.raises(DataError, match=r"in: 88 of 160 records are bad, .*0\.jsonl:1: no field"):
        prepare(cfg)
    assert not Path(cfg.data.store, "prepared.json").exists()


def test_a_store_without_training_documents_is_refused(tmp_path, models):
    write_jsonl(tmp_path / "a.jsonl", ["a", "b"])
    with pytest.raises(DataError, match="all 2 documents fell into the held-out part"):
        prepare(configure(tmp_path, models, [tmp_path / "a.jsonl"], valid_share=1.0))


def test_a_store_without_held_out_documents_is_complete(tmp_path, models):
    write_jsonl(tmp_path / "a.jsonl", ["a", "b"])
    cfg = configure(tmp_path, models, [tmp_path / "a.jsonl"], valid_share=0.0)
    assert prepare(cfg)["valid"]["documents"] == 0
    assert open_store(cfg.data.store, "valid").num_docs == 0


def test_an_error_in_a_worker_reaches_the_user_whole(cfg, tmp_path):
    with open(tmp_path / "records.jsonl", "ab") as file:
        file.write(b"no json\n")
    with pytest.raises(DataError, match=r"records\.jsonl:251: not JSON"):
        prepare(cfg, workers=2)


def test_a_file_that_changes_after_it_was_listed_is_refused_and_the_rest_kept(cfg, tmp_path):
    last = tmp_path / "files" / "49.txt"
    changed = []

    def change_last(*_):
        if not changed:
            last.write_text("another text")
            changed.append(last)

    with pytest.raises(DataError, match=r"49\.txt: changed while it was read; prepare again"):
        prepare(cfg, change_last, workers=1)
    assert not Path(cfg.data.store, "prepared.json").exists()
    assert prepare(cfg)["documents"] == 300
    assert "another text" in documents(cfg, "train") + documents(cfg, "valid")


def test_a_file_that_goes_after_it_was_listed_is_refused(cfg, tmp_path):
    with pytest.raises(DataError, match=r"49\.txt: .*No such file"):
        prepare(cfg, lambda *_: (tmp_path / "files" / "49.txt").unlink(missing_ok=True), workers=1)


def test_all_partitions_that_fail_are_told_at_once(cfg, tmp_path):
    for name in ("10.txt", "40.txt"):
        (tmp_path / "files" / name).write_bytes(b"caf\xe9 au lait")
    with pytest.raises(DataError) as refused:
        prepare(cfg)
    assert "10.txt" in str(refused.value) and "40.txt" in str(refused.value)
    for name in ("10.txt", "40.txt"):
        (tmp_path / "files" / name).write_text("coffee")
    assert prepare(cfg)["documents"] == 300


def test_a_folder_that_cannot_be_made_is_a_storage_error(cfg, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="Not a directory|File exists"):
        prepare(change(cfg, store=str(tmp_path / "file" / "store")))


def test_a_full_disk_is_a_storage_error(cfg, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left on device"):
        prepare(cfg)
