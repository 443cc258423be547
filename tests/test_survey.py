"""Stores counted and verified: every damaged file is named, and no whole one."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from corpora import LINES, TEXTS, change, configure, make_models, write_jsonl
from stores import random_documents, write_store

from jaxgpt.config import ModelConfig
from jaxgpt.corpus import survey
from jaxgpt.corpus.prepare import prepare
from jaxgpt.data.store import open_store
from jaxgpt.errors import DataError
from jaxgpt.tokenization import tokenizer


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """A store of two generations and two sources, each split with a packing index."""
    root = tmp_path_factory.mktemp("survey")
    models = make_models(root)
    (root / "more").mkdir()
    write_jsonl(root / "a.jsonl", TEXTS[:120])
    write_jsonl(root / "more/b.jsonl", ["", *TEXTS[120:160], *LINES[:20]])
    cfg = configure(
        root, models, [root / "a.jsonl", root / "more"], partition_bytes=1 << 20, valid_share=0.2
    )
    cfg = change(replace(cfg, model=ModelConfig(seq_len=64)), packing="best_fit")
    prepare(cfg, workers=1)
    write_jsonl(root / "more/c.jsonl", LINES[20:60])
    report = prepare(cfg, workers=1)
    assert report["generation"] == 2
    return root / "store"


@pytest.fixture
def store(original, tmp_path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "store"))


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def problems(store: Path) -> list[str]:
    found = survey.verify(store)["problems"]
    assert all(len(line.splitlines()) == 1 for line in found)
    return found


def test_a_whole_store_has_no_problems_and_all_of_it_was_read(store):
    found = survey.verify(store)
    assert found["problems"] == []
    sizes = [path.stat().st_size for path in store.rglob("*.shard")]
    assert found["shards"] == len(sizes) > 2 and found["bytes"] == sum(sizes)
    assert found["manifests"] == len([*store.rglob("manifest*.json")]) == 4
    assert found["indices"] == len([*store.rglob("packing-*.index")]) > 2
    assert found["tokenizers"] == 1


def test_progress_ends_with_all_bytes(store):
    calls = []
    survey.verify(store, lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] > 0


def test_a_flipped_bit_anywhere_in_a_shard_or_index_is_found_and_named(store):
    for path in (next(store.glob("train/*.shard")), next(store.glob("valid/packing-*.index"))):
        whole = path.read_bytes()
        step = len(whole) // 20
        for offset in (*range(0, 96, 32), *range(97, len(whole), step), len(whole) - 1):
            flip(path, offset)
            (line,) = problems(store)
            assert line.startswith(f"{path}: "), offset
            path.write_bytes(whole)


@pytest.mark.parametrize("name", ["train/manifest.json", "valid/manifest-000001.json"])
def test_a_flipped_bit_anywhere_in_a_manifest_is_found(store, name):
    path = store / name
    whole = path.read_bytes()
    for offset in range(0, len(whole), len(whole) // 25):
        flip(path, offset)
        (line,) = problems(store)
        assert line.startswith(f"{path}: "), offset
        path.write_bytes(whole)


def test_every_damaged_file_is_listed_and_only_those(store):
    shards = sorted(store.rglob("*.shard"))
    flip(shards[0], 5000)
    shards[-1].write_bytes(shards[-1].read_bytes()[:-1])
    shards[1].unlink()
    index = next(store.glob("train/packing-*.index"))
    flip(index, 4097)
    named = {line.partition(": ")[0] for line in problems(store)}
    assert named == {str(path) for path in (shards[0], shards[1], shards[-1], index)}


def test_shards_of_earlier_generations_only_are_verified_too(tmp_path):
    write_store(tmp_path / "train", [random_documents([5, 6])])
    manifest = (tmp_path / "train/manifest.json").read_bytes()
    write_store(tmp_path / "other", [random_documents([5, 7])])
    (tmp_path / "train/manifest-000001.json").write_bytes(manifest)
    shutil.copy(tmp_path / "other/manifest.json", tmp_path / "train")
    shard = tmp_path / "train/00000.shard"
    assert any(line.startswith(f"{shard}: ") for line in problems(tmp_path))


def test_a_shard_rewritten_with_checksums_of_its_own_differs_from_the_manifest(tmp_path):
    write_store(tmp_path / "train", [random_documents([5, 6], seed=1)])
    write_store(tmp_path / "other", [random_documents([5, 6], seed=2)])
    shutil.copy(tmp_path / "other/00000.shard", tmp_path / "train")
    found = [line for line in problems(tmp_path) if "tokenizer" not in line]
    assert len(found) == 1 and found[0].startswith(f"{tmp_path / 'train/00000.shard'}: ")


def test_another_tokenizer_or_none_is_a_problem(store):
    path = store / "tokenizer.model"
    other = tokenizer.train(TEXTS[:50], store.parent / "other.model", vocab_size=300)
    path.write_bytes((store.parent / "other.model").read_bytes())
    (line,) = problems(store)
    assert str(path) in line and other.digest[:12] in line
    path.unlink()
    (line,) = problems(store)
    assert str(path) in line


def test_a_split_that_is_gone_or_of_another_store_is_a_problem(store):
    shutil.rmtree(store / "valid")
    (line,) = problems(store)
    assert line.startswith(f"{store / 'valid'}: ")
    shutil.copytree(store / "train", store / "valid")
    (line,) = problems(store)
    assert line.startswith(f"{store / 'valid'}: ")


def test_one_split_alone_can_be_verified_and_counted(store):
    assert survey.verify(store / "train")["manifests"] == 2
    assert list(survey.survey(store / "train")["splits"]) == ["train"]


def test_a_folder_without_a_store_is_refused(tmp_path):
    for look in (survey.verify, survey.survey):
        with pytest.raises(DataError, match="not a token store"):
            look(tmp_path)


@pytest.mark.parametrize("look", [survey.verify, survey.survey])
def test_a_share_of_a_store_is_said_to_be_unfinished(tmp_path, look):
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:40])
    cfg = configure(tmp_path, make_models(tmp_path), [tmp_path / "a.jsonl"])
    prepare(cfg, workers=1, partitions=(1, 2))
    with pytest.raises(DataError, match="not finished.*data merge"):
        look(tmp_path / "store")


def test_counts_of_splits_are_those_of_the_documents(store):
    facts = survey.survey(store)
    for split in ("train", "valid"):
        opened = open_store(store, split)
        spans = [opened.document_span(i) for i in range(opened.num_docs)]
        tokens = [stop - start - 1 for start, stop in spans]
        found = facts["splits"][split]
        assert (found["documents"], found["tokens"]) == (len(tokens), sum(tokens))
        assert found["bytes"] == int(opened.doc_bytes(0, opened.num_docs).sum())
        right = Counter(str(2 ** (len(bin(n)) - 3)) for n in tokens)
        assert found["lengths"] == dict(right)
        assert found["generation"] == found["generations"] == 2
        assert found["digest"] == opened.digest


def test_sources_are_reported_with_what_was_left_out(store):
    facts = survey.survey(store)
    first, second = facts["sources"]
    texts = [*TEXTS[120:160], *LINES[:60]]
    assert first["documents"] == 120 and second["documents"] == len(texts)
    assert second["bytes"] == sum(len(text.encode()) for text in texts)
    assert second["empty"] == 1 and second["bad_skipped"] == 0
    assert second["duplicates"] == len(texts) - len(set(texts))
    both = sum(facts["splits"][split]["documents"] for split in ("train", "valid"))
    assert first["documents"] + second["documents"] == both


def test_facts_are_plain_json(store):
    for facts in (survey.survey(store), survey.verify(store)):
        assert json.loads(json.dumps(facts)) == facts


@pytest.mark.parametrize(
    "length", [1, 2, 3, 4, 7, 8, 1023, 1024, 1025], ids=lambda length: f"{length}-ids"
)
def test_lengths_are_counted_under_the_power_of_two_at_or_below_them(tmp_path, length):
    write_store(tmp_path / "train", [random_documents([length])])
    bound = max(2**power for power in range(12) if 2**power <= length)
    assert survey.lengths(open_store(tmp_path)) == {str(bound): 1}
