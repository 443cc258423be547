"""Training a tokenizer is reproducible, quiet, complete, and refused with the setting to change."""

from __future__ import annotations

import os

import pytest
from corpora import LINES, SYMBOLS

from jaxgpt.errors import DataError, StorageError
from jaxgpt.tokenization import tokenizer, tokenizer_check, tokenizer_training


def test_tabs_newlines_and_indentation_enter_pieces(tmp_path):
    texts = ["x\n\ty\n\tz\n\t\tw\n\t\tv        u        "] * 20
    tok = tokenizer.train(texts, tmp_path / "t.model", vocab_size=275)
    learnt = {piece for piece, is_byte in zip(tok.pieces, tok.is_byte, strict=True) if not is_byte}
    assert {b"\t", b"\n\t", b"\n\t\t", b"        "} <= learnt
    assert tok.decode(tok.encode(texts[0])) == texts[0]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_too_small_a_corpus_names_the_reachable_size_which_then_works(tmp_path, kind, capfd):
    path, texts = tmp_path / "small.model", [f"line {i} says hello" for i in range(20)]
    with pytest.raises(DataError) as refused:
        tokenizer.train(texts, path, kind=kind, vocab_size=8000)
    assert list(tmp_path.iterdir()) == []
    message = str(refused.value)
    assert message.startswith("tokenizer.vocab_size = 8000 is too large") and "\n" not in message
    reachable = int(message.split("at most ")[1].split()[0])
    assert tokenizer.train(texts, path, kind=kind, vocab_size=reachable).vocab_size == reachable
    assert capfd.readouterr().err == ""


def test_too_small_a_vocabulary_names_the_least_that_is_needed(tmp_path):
    # 3 specials, 256 bytes, and the characters of "line 0..9 says hello": 10 digits, 8 letters
    # and the space, but for those among the rarest 0.05 %.
    texts = [f"line {i} says hello" for i in range(20)]
    with pytest.raises(DataError, match=r"vocab_size = 100 is too small.* need 27\d"):
        tokenizer.train(texts, tmp_path / "t.model", vocab_size=100)


@pytest.mark.parametrize("texts", [[], [""], ["\0\u2581\u2585"]])
def test_training_on_no_text_is_refused(tmp_path, texts):
    with pytest.raises(DataError, match="there is no text to train a tokenizer on"):
        tokenizer.train(texts, tmp_path / "t.model", vocab_size=300)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "symbol", ["", " ", "a b", "a\tb", "a\n", "\u2581", "\ud800", "</s>", "<pad>", "<0x41>"]
)
def test_an_unusable_symbol_is_refused_by_name(tmp_path, symbol):
    with pytest.raises(DataError, match="user symbol"):
        tokenizer.train(LINES, tmp_path / "t.model", vocab_size=330, user_symbols=[symbol])


def test_a_symbol_given_twice_is_refused(tmp_path):
    with pytest.raises(DataError, match="each may be given once"):
        tokenizer.train(LINES, tmp_path / "t.model", vocab_size=330, user_symbols=["<a>", "<a>"])


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_the_same_texts_and_seed_give_the_same_file(tmp_path, kind):
    options = {"kind": kind, "vocab_size": 330, "user_symbols": SYMBOLS}
    once = tokenizer.train(LINES, tmp_path / "1.model", **options)
    again = tokenizer.train(iter(LINES), tmp_path / "2.model", **options)
    assert once.digest == again.digest


def test_the_seed_chooses_the_sample(tmp_path):
    def digest(seed):
        options = {"vocab_size": 340, "max_bytes": 5_000, "seed": seed}
        return tokenizer.train(LINES, tmp_path / f"{seed}.model", **options).digest

    assert digest(1) == digest(1) != digest(2)


def test_a_sample_keeps_every_byte_with_the_same_chance():
    texts = ["a" * 100 + "\n", "b" * 1000 + "\n"] * 500  # 50 kB of a, 500 kB of b
    sample = "".join(tokenizer_training.take_sample(texts, 110_000, 0).pieces)
    # One in five of 1000 pieces: 100 of each kind are kept, with standard deviation 9.
    assert 100_000 < len(sample) <= 110_000
    assert abs(sample.count("a") - 10_000) < 4_000


def test_a_sample_with_room_for_all_is_everything_in_order():
    pieces = tokenizer_training.take_sample(LINES, 10**9, 0).pieces
    assert "".join(pieces) == "".join(LINES).replace("\t", tokenizer_training.TAB_STAND_IN)


def test_training_pieces_are_cut_at_lines_or_words_and_lose_nothing():
    text = "word " * 3000 + "\n" + "line\n" * 3000 + "x" * 9000
    pieces = list(tokenizer_training._training_pieces(text))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 4096
    assert all(p.endswith(("word", "\n")) or set(p) <= set("x") for p in pieces)


def test_one_long_line_is_learnt_from_to_its_end(tmp_path):
    line = "abc " * 50_000 + "zzyzx " * 2_000
    tok = tokenizer.train([line], tmp_path / "t.model", vocab_size=275)
    assert b" zzyzx" in tok.pieces


def test_training_reports_what_it_read_and_kept(tmp_path):
    seen = []
    tokenizer.train(LINES, tmp_path / "t.model", vocab_size=330, progress=lambda *a: seen.append(a))
    assert seen and all(kept <= read for read, kept in seen)


def test_training_prints_nothing(tmp_path, capfd):
    tokenizer.train(LINES, tmp_path / "t.model", vocab_size=330)
    assert capfd.readouterr() == ("", "")


def test_a_model_that_fails_the_self_test_is_not_written(tmp_path, monkeypatch):
    def fail(tok, examples, exact):
        raise DataError("no")

    monkeypatch.setattr(tokenizer_check, "check", fail)
    with pytest.raises(DataError):
        tokenizer.train(LINES, tmp_path / "t.model", vocab_size=330)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="Not a directory|File exists"):
        tokenizer.train(LINES, tmp_path / "file" / "t.model", vocab_size=330)


def test_text_of_every_awkward_kind_is_trained_on_and_comes_back(tmp_path):
    lines = [
        "a\0b\r\n",
        "x\u2028y\x0c",
        "\u2581 \u2585",
        "\x01\x1f",
        "\ufeff\ufffe",
        "\U0001f680\n",
    ]
    texts = ["".join(lines) * 20, "z" * 2_000_000, "word " * 20_000, "", "\n" * 9_000]
    tok = tokenizer.train(texts, tmp_path / "t.model", vocab_size=275)
    assert all(tok.decode(tok.encode(text)) == text for text in texts)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_one_core_and_all_cores_give_the_same_file(tmp_path, kind):
    cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(cores)})
        one = tokenizer.train(LINES, tmp_path / "1.model", kind=kind, vocab_size=330)
    finally:
        os.sched_setaffinity(0, cores)
    every = tokenizer.train(LINES, tmp_path / "2.model", kind=kind, vocab_size=330)
    assert one.raw == every.raw


def test_the_report_counts_every_byte_read(tmp_path):
    texts = ["ab cd\n" * 400, "\0\u2581" * 10, "caf\u00e9 " * 100]
    tok = tokenizer.train(texts, tmp_path / "t.model", vocab_size=270, max_bytes=2000)
    report, size = tok.report, sum(len(text.encode()) for text in texts)
    assert (report.texts, report.bytes_read) == (3, size)
    # Ten NULs of one byte and ten U+2581 of three are kept from the trainer.
    assert report.skipped["in U+0000, U+0001, U+001F, U+2581, U+2585, marks of the trainer"] == 40
    assert report.bytes_used + sum(report.skipped.values()) == size
    assert report.bytes_used <= 2000


def test_the_report_measures_the_tokenizer_on_its_sample(tmp_path):
    report = (tok := tokenizer.train(LINES, tmp_path / "t.model", vocab_size=330)).report
    ids = tok.encode_batch(LINES)
    num_tokens = sum(map(len, ids))
    assert report.bytes_per_token == sum(len(line.encode()) for line in LINES) / num_tokens
    assert report.byte_share == sum(int(tok.is_byte[i].sum()) for i in ids) / num_tokens
    assert report.round_trips == len(LINES) + len(tokenizer_check.NASTY)
    assert 0 < report.seconds < 60


def test_a_tiny_sample_is_warned_of_with_the_text_that_would_do(tmp_path):
    report = tokenizer.train(LINES[:400], tmp_path / "t.model", vocab_size=310).report
    assert [w for w in report.warnings if "give 31,000 or more" in w]
    enough = tokenizer.train(LINES * 3, tmp_path / "t.model", vocab_size=310).report
    assert enough.warnings == ()


def test_many_bytes_without_a_piece_are_warned_of(tmp_path):
    tok = tokenizer.train(LINES, tmp_path / "t.model", vocab_size=330)
    sample = tokenizer_training.take_sample(["\U0001f680" * 10_000], 10**9, 0)
    report = tokenizer_training.make_report(tok, sample, 1.0)
    assert report.byte_share == 1.0 and report.bytes_per_token == 1.0
    assert [w for w in report.warnings if w.startswith("100% of tokens are single bytes")]


def test_little_memory_makes_the_sample_smaller_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_training, "available_memory", lambda: 220_000)
    report = tokenizer.train(LINES, tmp_path / "t.model", vocab_size=310).report
    assert report.bytes_used <= 10_000  # 22 bytes of memory for each byte of the sample
    assert "memory for a sample of 10,000 bytes only" in report.warnings[0]


def test_enough_memory_is_not_a_limit_and_is_not_told(tmp_path):
    assert tokenizer_training.available_memory() > 100 << 20
    assert tokenizer_training.take_sample(LINES, 5_000, 0).memory_limit is None


def test_the_report_is_lines_of_text_with_the_warnings_last(tmp_path):
    lines = tokenizer.train(LINES, tmp_path / "t.model", vocab_size=400).report.lines()
    size = sum(len(line.encode()) for line in LINES)
    assert lines[0].startswith(f"trained on {size:,} of {size:,} bytes in 576 texts in ")
    assert lines[1] == "left out, bytes: none"
    assert lines[-1].startswith("warning: ") and not any("\n" in line for line in lines)
