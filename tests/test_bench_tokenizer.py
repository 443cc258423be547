"""What `bench tokenizer` reports: bytes and tokens that add up, and what it is compared with."""

from __future__ import annotations

import pytest
from foreign_models import every_engine

from jaxgpt.bench import tokenizer as bench
from jaxgpt.errors import DataError
from jaxgpt.tokenization import tokenizer

TEXTS = [f"The {n}th of many lines, with (brackets) and naïve words.\n" * 40 for n in range(12)]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("texts")
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text)
    return [str(folder / f"{number}.txt") for number in range(len(TEXTS))]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model") / "tokenizer.model"
    tokenizer.train(TEXTS, path, vocab_size=310)
    return str(path)


def measured(files, **options) -> dict:
    given = {"model": None, "kind": "bpe", "vocab_size": 310, "workers": 1, "repeats": 1}
    return bench.measure(files, say=lambda line: None, **given | options)


def test_bytes_and_tokens_are_those_of_the_texts(files, model):
    found = measured(files, model=model)
    tok = tokenizer.load(model)
    assert found["documents"] == len(TEXTS)
    assert found["text_bytes"] == sum(len(text.encode()) for text in TEXTS)
    assert found["tokens"] == sum(len(tok.encode(text)) for text in TEXTS)
    assert found["bytes_per_token"] == round(found["text_bytes"] / found["tokens"], 4)
    rate = found["tokens"] / found["seconds_median"]
    assert found["tokens_per_sec_median"] == pytest.approx(rate, rel=1e-6)
    assert found["prepare_mb_per_sec_median"] == pytest.approx(
        found["text_bytes"] / 1e6 / found["seconds_median"], abs=0.001
    )


def test_workers_encode_all_texts_between_them(files, monkeypatch):
    done = []

    class Pool:
        def __init__(self, workers, *_):
            assert workers == 5

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def map(self, call, models, shares):
            done.extend(shares)
            return [0.5, 2.0, 1.0, 1.0, 1.0]

    monkeypatch.setattr(bench.concurrent.futures, "ProcessPoolExecutor", Pool)
    found = measured(files, workers=5)
    assert sorted(text for share in done for text in share) == sorted(TEXTS)
    size = found["text_bytes"] / 1e6
    assert found["all_cores_mb_per_sec_median"] == round(size / 2.0, 3)  # that of the slowest
    assert (found["workers"], found["engine"], found["vocab_size"]) == (5, "sentencepiece", 310)
    assert found["train_seconds"] >= 0


def test_the_text_is_pythons_own_library_unless_another_is_named(monkeypatch, files):
    monkeypatch.setattr(bench.stdlib, "python_files", lambda: files[:3])
    monkeypatch.setattr(bench, "_in_processes", lambda *_: [1.0])
    assert measured([])["documents"] == 3


def test_every_library_alone_makes_the_ids_that_the_tokenizer_does(tmp_path):
    texts = ["the king went\n  away", "", "x = [1, 22]\n\n\ty"]
    for name, (tok, _) in every_engine(tmp_path).items():
        alone = [list(map(int, ids)) for ids in tok.encode_whole(texts)]
        assert alone == [tok.encode(text) for text in texts], name


@pytest.mark.parametrize(
    "content, problem", [(b"a\xffb", "byte 1 is not UTF-8"), (None, "cannot be read")]
)
def test_a_file_that_is_no_text_is_refused(tmp_path, content, problem):
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=problem):
        measured([str(path)])


def test_no_text_at_all_is_refused(tmp_path):
    (tmp_path / "empty").write_text("")
    with pytest.raises(DataError, match="no text"):
        measured([str(tmp_path / "empty")])
