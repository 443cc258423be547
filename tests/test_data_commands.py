"""The verbs that make tokenizers and stores: results, options, and refusals."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from runs import overrides
from verbs import ask, make_two_stores, refused, text_of

from jaxgpt import cli
from jaxgpt.commands import data as data_commands
from jaxgpt.corpus import journal
from jaxgpt.corpus.journal import Share
from jaxgpt.data.store import open_store


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return make_two_stores(tmp_path_factory.mktemp("verbs"))


@pytest.mark.parametrize("action", ["stats", "show", "find", "verify", "merge"])
def test_every_action_has_help(capsys, action):
    with pytest.raises(SystemExit) as left:
        cli.main(["data", action, "--help"])
    assert left.value.code == 0 and "--json" in capsys.readouterr().out


def test_shares_merged_are_the_store_of_one_run(capsys, root, tmp_path):
    model = f"tokenizer.path={json.dumps(str(root / 'store/tokenizer.model'))}"
    for number in (1, 2):
        folder = tmp_path / f"share{number}"
        args = overrides(root, "x", data__store=str(folder))
        found = ask(capsys, "prepare", *args, model, "--partitions", f"{number}/2")
        assert found["share"] == f"{number}/2"
    folders = [str(tmp_path / f"share{number}") for number in (1, 2)]
    report = ask(capsys, "data", "merge", str(tmp_path / "whole"), *folders)
    assert report["train"]["digest"] == open_store(root / "store").digest
    assert ask(capsys, "data", "verify", str(tmp_path / "whole"))["damaged"] == 0


def test_a_hundred_partitions_over_eight_shares_differ_by_at_most_one():
    shares = [Share(number, 8) for number in range(1, 9)]
    held = [[index for index in range(100) if share.holds(index)] for share in shares]
    assert [len(part) for part in held] == [13] * 4 + [12] * 4
    assert sorted(index for part in held for index in part) == list(range(100))


def test_twenty_files_over_eight_shares_are_even_and_all_there_once(capsys, root, tmp_path):
    (tmp_path / "files").mkdir()
    for number in range(20):
        (tmp_path / "files" / f"{number:02}.txt").write_text(f"the king {number}")
    args = overrides(
        root,
        "x",
        data__sources=[str(tmp_path / "files")],
        data__store=str(tmp_path / "whole"),
        data__partition_bytes=1,
        tokenizer__path=str(root / "store/tokenizer.model"),
    )
    shares = [ask(capsys, "prepare", *args, "--partitions", f"{i}/8") for i in range(1, 9)]
    assert sorted(share["partitions"] for share in shares) == [2] * 4 + [3] * 4
    assert sum(share["documents"] for share in shares) == 20
    report = ask(capsys, "data", "merge", str(tmp_path / "whole"))
    stores = [open_store(tmp_path / "whole", split) for split in ("train", "valid")]
    origins = [store.provenance(i) for store in stores for i in range(store.num_docs)]
    assert sorted(origins) == sorted(map(str, (tmp_path / "files").iterdir()))
    assert report["documents"] == 20


def test_words_after_dashes_and_beam_options_go_to_the_runner(capsys, root, monkeypatch):
    calls = []
    monkeypatch.setattr(
        data_commands, "make_store", lambda cfg, workers, **options: calls.append(options) or {}
    )
    monkeypatch.setattr(data_commands, "store_summary", lambda report: "")
    args = ["prepare", *overrides(root, "x"), "--runner", "beam", "--beam-option=--a=1"]
    assert cli.main([*args, "--", "--b", "c=2"]) == 0
    assert calls == [
        {"partitions": None, "runner": "beam", "runner_options": ("--a=1", "--b", "c=2")}
    ]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--partitions", "0/2"], "I from 1 to N"),
        (["--partitions", "3/2"], "I from 1 to N"),
        (["--partitions", "two"], "two"),
        (["--runner", "spark"], "spark"),
        (["--beam-option=--x"], "beam"),
    ],
)
def test_wrong_words_of_prepare_are_refused(capsys, root, args, said):
    assert said in refused(capsys, 64, "prepare", *overrides(root, "x"), *args)


def test_training_a_tokenizer_reports_what_it_saw(capsys, root, tmp_path):
    args = overrides(root, "x", tokenizer__path=str(tmp_path / "t.model"))
    result = ask(capsys, "tokenizer", "train", *args)
    sizes = [path.stat().st_size for path in (root / "corpus").iterdir()]
    assert result["report"]["bytes_read"] == sum(sizes)
    assert result["report"]["texts"] == len(sizes)
    text = text_of(capsys, "tokenizer", "train", *args)
    assert f"{sum(sizes):,} bytes" in text and "bytes per token" in text


def test_training_a_tokenizer_counts_what_is_bad_and_names_it(capsys, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(b'{"text": "the king"}\n' * 60 + b"no\n")
    (folder / "b.txt").write_bytes(b"the hall \xff" + b" of the king" * 20)
    os.symlink(tmp_path / "gone", folder / "c.txt")
    model = {"tokenizer__path": str(tmp_path / "t.model"), "tokenizer__vocab_size": 270}
    args = overrides(tmp_path, "x", data__sources=[str(folder)], data__bad_text="skip", **model)
    report = ask(capsys, "tokenizer", "train", *args)["report"]
    assert (report["bad_skipped"], report["bad_replaced"]) == (2, 0)
    first, second = report["bad_places"]
    assert f"{folder}/a.jsonl:61: not JSON" in first and f"{folder}/b.txt: byte 9" in second
    assert [file["path"] for file in report["skipped_files"]] == [f"{folder}/c.txt"]
    text = text_of(capsys, "tokenizer", "train", *args)
    assert "2 bad, left out" in text and f"{folder}/c.txt: cannot read it" in text


def test_an_imported_tokenizer_stands_alone_and_gives_the_same_ids(capsys, root, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(["the king of the hall"] * 50, vocab_size=300,
                             special_tokens=["<eos>"])  # fmt: skip
    made.save(str(tmp_path / "tokenizer.json"))
    out = tmp_path / "out.model"
    args = ["tokenizer", "import", str(tmp_path / "tokenizer.json"), str(out), "--eos", "<eos>"]
    result = ask(capsys, *args)
    assert result["engine"] == "hf" and result["vocab_size"] == made.get_vocab_size()
    ids = ask(capsys, "tokenizer", "encode", str(out), "the king")["ids"]
    assert ids == made.encode("the king").ids


def test_a_tokenizer_is_not_replaced_while_a_store_is_prepared_beside_it(capsys, root, tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    shutil.copy(root / "store/tokenizer.model", store)
    before = (store / "tokenizer.model").read_bytes()
    train = overrides(root, "x", data__store=str(store), tokenizer__path="",
                      tokenizer__vocab_size=300)  # fmt: skip
    source = str(root / "second/tokenizer.model")
    with journal.hold(store):
        for words in (["train", *train], ["import", source, str(store / "tokenizer.model")]):
            assert f"pid {os.getpid()}" in refused(capsys, 65, "tokenizer", *words)
    assert (store / "tokenizer.model").read_bytes() == before
    ask(capsys, "tokenizer", "train", *train)
    assert (store / "tokenizer.model").read_bytes() != before


def test_an_import_does_not_replace_the_tokenizer_of_a_store(capsys, root, tmp_path):
    store = Path(shutil.copytree(root / "second", tmp_path / "store"))
    before = (store / "tokenizer.model").read_bytes()
    source = str(root / "store/tokenizer.model")
    assert "OUT" in refused(capsys, 64, "tokenizer", "import", source,
                            str(store / "tokenizer.model"))  # fmt: skip
    assert (store / "tokenizer.model").read_bytes() == before
