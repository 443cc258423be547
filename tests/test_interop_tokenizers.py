"""Tokenizers out of and into Hugging Face folders: the same ids, the same files, one start."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import pytest
import tokenizers
from corpora import LINES
from foreign_models import E, byte_level, library, llama_style, metaspace, rank_file
from foreign_models import sentencepiece_file as sentencepiece_model

from jaxgpt.errors import DataError
from jaxgpt.interop import tokenizer_json
from jaxgpt.interop.tokenizer_folder import open_directory
from jaxgpt.interop.tokenizers import carry_in, carry_out, compare, texts
from jaxgpt.tokenization import tokenizer
from jaxgpt.tokenization.tiktoken_engine import CL100K

CONFIG = {"model_type": "llama", "vocab_size": 512, "eos_token_id": 2}
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"


def folder(path, make, settings=None, config=None, generation=None):
    """Write a folder with tokenizer.json and the files that go with it; return it."""
    path.mkdir()
    make(path / "tokenizer.json")
    return described(path, settings, config, generation)


def described(path, settings=None, config=None, generation=None):
    contents = {
        "tokenizer_config.json": {"eos_token": "</s>"} | (settings or {}),
        "config.json": CONFIG if config is None else config,
        "generation_config.json": generation,
    }
    for name, content in contents.items():
        if content is not None:
            (path / name).write_text(json.dumps(content))
    return path


def with_processor(path, *names):
    """Put symbols before each text by the post-processor of a tokenizer.json."""
    spec = json.loads((path / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in spec["added_tokens"]}
    spec["post_processor"] = tokenizer_json.opening(names[0], ids[names[0]])
    for name in names[1:]:
        entry = {"id": name, "ids": [ids[name]], "tokens": [name]}
        spec["post_processor"]["single"].insert(1, {"SpecialToken": {"id": name, "type_id": 0}})
        spec["post_processor"]["special_tokens"][name] = entry
    (path / "tokenizer.json").write_text(json.dumps(spec))
    return path


@functools.cache
def own(kind, vocab_size=330):
    """A tokenizer of the kind that jaxgpt trains."""
    with tempfile.TemporaryDirectory() as root:
        path = Path(root) / "own.model"
        return tokenizer.train(
            LINES, path, kind=kind, vocab_size=vocab_size, user_symbols=["<|user|>"]
        )


# Out: tokenizers made here.


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_the_tokenizer_json_of_our_own_gives_our_ids_and_the_text_back(tmp_path, kind):
    tok = own(kind)
    out = carry_out(tok, tmp_path, tmp_path, 64)
    assert [note[:20] for note in out.notes] == ["a unigram tokenizer:"] * (kind == "unigram")
    theirs = library(tmp_path / "tokenizer.json")  # the library itself, not our reader
    for text in [*texts(tok), *LINES[:50]]:
        ids = theirs.encode(text).ids
        assert ids == tok.encode(text), text
        assert theirs.decode(ids, skip_special_tokens=False) == text


def test_the_sentencepiece_model_goes_out_as_it_is(tmp_path):
    tok = own("bpe")
    carry_out(tok, tmp_path, tmp_path, 64)
    assert (tmp_path / "tokenizer.model").read_bytes() == tok.raw


def test_special_symbols_have_their_ids_and_are_declared(tmp_path):
    tok = own("bpe")
    carry_out(tok, tmp_path, tmp_path, 64)
    theirs = library(tmp_path / "tokenizer.json")
    assert {name: theirs.token_to_id(name) for name in tok.specials} == tok.specials
    assert theirs.get_vocab_size() == tok.vocab_size
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "</s>" and settings["pad_token"] == "<pad>"
    assert settings["split_special_tokens"] is True and settings["add_bos_token"] is False
    assert settings["model_max_length"] == 64
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 2, "pad_token_id": 0, "eos_token_id": 2}


def test_ranks_of_tiktoken_become_a_tokenizer_json_with_the_same_ids(tmp_path):
    path = rank_file(tmp_path / "ranks")
    tok = tokenizer.load(path, eos=E, pattern=CL100K)
    out = carry_out(tok, tmp_path / "run", tmp_path, 64)
    theirs = library(tmp_path / "tokenizer.json")
    assert not out.notes and theirs.token_to_id(E) == tok.eos_id
    for text in [*texts(tok), *LINES[:50]]:
        assert theirs.encode(text).ids == tok.encode(text), text


def test_an_imported_tokenizer_json_without_its_folder_goes_out_as_what_it_is(tmp_path):
    byte_level(tmp_path / "tokenizer.json")
    tok = tokenizer.import_model(tmp_path / "tokenizer.json", tmp_path / "tokenizer.model")
    carry_out(tok, tmp_path / "run", tmp_path, 64)
    theirs = library(tmp_path / "tokenizer.json")
    for text in texts(tok):
        assert theirs.encode(text).ids == tok.encode(text), text


def test_a_model_whose_rules_no_tokenizer_json_says_goes_out_alone_and_says_so(tmp_path):
    tok = tokenizer.load(sentencepiece_model(tmp_path / "t.model", add_dummy_prefix=True))
    out = carry_out(tok, tmp_path / "run", tmp_path, 64)
    assert not (tmp_path / "tokenizer.json").exists()
    assert "only the SentencePiece model" in out.notes[0]


def test_another_vocabulary_is_refused_with_the_first_text_that_differs():
    tok, other = own("bpe"), own("bpe", 329)
    with pytest.raises(DataError, match=r"there: the text '.*' becomes other ids .* at 0 \["):
        compare(tok, texts(tok), other.encode, tok.decode, "there")


def test_a_decoder_that_loses_text_is_refused():
    tok = own("bpe")
    with pytest.raises(DataError, match="the ids of ' a' become 'a', another text"):
        compare(tok, texts(tok), tok.encode, lambda ids: tok.decode(ids).lstrip(" "), "there")


def test_only_segmentations_of_equal_score_and_text_count_as_ties(tmp_path):
    lines = [*LINES, *["// / /a //a b// c/"] * 60]
    tok = tokenizer.train(lines, tmp_path / "t.model", kind="unigram", vocab_size=320)
    right = tok.encode("///")
    one, two = sorted(right, key=lambda number: len(tok.pieces[number]))
    assert (tok.pieces[one], tok.pieces[two]) == (b"/", b"//")
    notes = compare(tok, ["///"], lambda _: right[::-1], tok.decode, "there")
    assert notes == (
        "there: 1 of 1 awkward texts were cut in another way of equal probability, with the same "
        "text",
    )
    for worse in ([one] * 3, [one, one], [two, two]):
        with pytest.raises(DataError, match="becomes other ids"):
            compare(tok, ["///"], lambda _, ids=worse: ids, tok.decode, "there")


# In: folders of others.


@pytest.mark.parametrize("make", [byte_level, metaspace, llama_style])
def test_the_runs_tokenizer_gives_the_ids_of_the_folder(tmp_path, make):
    eos = E if make is byte_level else "</s>"
    config = CONFIG | {"eos_token_id": 0 if make is byte_level else 2}
    source = folder(tmp_path / "in", make, {"eos_token": eos}, config)
    carry_in(source, tmp_path / "run")
    tok = tokenizer.load(tmp_path / "run" / "tokenizer.model")
    theirs = library(source / "tokenizer.json")
    for text in [*LINES[:50], "a  b\n", "</s>", f"x{E}"]:
        assert tok.encode(text) == theirs.encode(text, add_special_tokens=False).ids
    assert tok.eos_id == theirs.token_to_id(eos)


def test_the_files_of_a_folder_go_out_byte_for_byte(tmp_path):
    source = folder(tmp_path / "in", metaspace, {"chat_template": TEMPLATE})
    (source / "chat_template.jinja").write_text(TEMPLATE)
    (source / "generation_config.json").write_text('{ "eos_token_id": [2, 1],  "top_p":0.9 }')
    (source / "modeling_evil.py").write_text("raise SystemExit(1)")
    (tmp_path / "out").mkdir()
    tok = carry_in(source, tmp_path / "run")
    out = carry_out(tok, tmp_path / "run", tmp_path / "out", 64)
    names = {path.name for path in source.iterdir()} - {"modeling_evil.py", "config.json"}
    assert set(out.files) == names == {path.name for path in (tmp_path / "out").iterdir()}
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()


def test_a_kept_folder_of_another_tokenizer_is_refused(tmp_path):
    carry_in(folder(tmp_path / "in", metaspace), tmp_path / "run")
    with pytest.raises(DataError, match="holds another tokenizer"):
        carry_out(own("bpe"), tmp_path / "run", tmp_path, 64)


def test_a_folder_without_a_tokenizer_gives_none(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert carry_in(tmp_path, tmp_path / "run") is None
    assert not (tmp_path / "run" / "tokenizer.model").exists()


@pytest.mark.parametrize(
    ("settings", "config", "generation", "eos", "stops"),
    [
        ({}, {"eos_token_id": 0}, {"eos_token_id": [2, 1]}, 2, (2, 1)),
        ({"eos_token": "<s>"}, {"eos_token_id": [2, 0]}, None, 2, (2, 0)),
        ({"eos_token": {"content": "<s>"}}, {}, None, 1, (1,)),
        ({}, {"text_config": {"eos_token_id": 1}}, {}, 1, (1,)),
    ],
)
def test_the_end_of_text_is_the_first_id_that_generation_stops_at(
    tmp_path, settings, config, generation, eos, stops
):
    source = folder(tmp_path / "in", metaspace, settings, config, generation)
    carry_in(source, tmp_path / "run")
    tok = tokenizer.load(tmp_path / "run" / "tokenizer.model")
    assert (tok.eos_id, tok.stop_ids) == (eos, stops)


def test_a_vocabulary_may_be_smaller_than_the_model_but_never_larger(tmp_path):
    source = folder(tmp_path / "in", metaspace, config=CONFIG | {"vocab_size": 400})
    assert open_directory(source).vocab_size == 400
    (source / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 399}))
    with pytest.raises(DataError, match="the tokenizer has 400 ids, the model .* only 399"):
        carry_in(source, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_too_large_and_damaged_files_are_refused_in_one_line(tmp_path):
    source = folder(tmp_path / "in", metaspace)
    with open(source / "chat_template.jinja", "wb") as file:
        file.truncate((16 << 20) + 1)
    with pytest.raises(DataError, match="chat_template.jinja: over 16 MiB"):
        carry_in(source, tmp_path / "run")
    (source / "chat_template.jinja").unlink()
    for content in ("[" * 10**5, "[1]", "{"):
        (source / "generation_config.json").write_text(content)
        with pytest.raises(DataError, match="generation_config.json: "):
            carry_in(source, tmp_path / "run")


def test_a_sentencepiece_model_is_read_where_there_is_no_tokenizer_json(tmp_path):
    sentencepiece_model(tmp_path / "tokenizer.model", vocab_size=400, add_dummy_prefix=True)
    described(tmp_path, {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>"})
    tok = carry_in(tmp_path, tmp_path / "run")
    assert (tok.engine, tok.eos_id, tok.start_id) == ("sentencepiece", 2, 1)
    assert tokenizer.load(tmp_path / "run" / "tokenizer.model").start_id == 1
    plain = tokenizer.load(tmp_path / "tokenizer.model")
    assert (plain.start_id, plain.digest) == (2, tok.digest)


def test_vocabulary_and_merges_are_read_as_those_of_gpt2(tmp_path):
    theirs = byte_level(tmp_path / "made.json")
    model = json.loads(theirs.to_str())["model"]
    merges = "".join(f"{left} {right}\n" for left, right in model["merges"])
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + merges)
    described(tmp_path, {"eos_token": E, "tokenizer_class": "GPT2Tokenizer"}, {"eos_token_id": 0})
    tok = carry_in(tmp_path, tmp_path / "run")
    assert tok.eos_id == tok.start_id == theirs.token_to_id(E)
    for text in [*LINES[:50], "a  b\n", E]:
        assert tok.encode(text) == theirs.encode(text).ids
    described(tmp_path, {"tokenizer_class": "Qwen2Tokenizer"}, {})
    with pytest.raises(DataError, match="how Qwen2Tokenizer cuts texts is not in vocab.json"):
        carry_in(tmp_path, tmp_path / "run")


# What stands before a text.


@pytest.mark.parametrize(
    ("settings", "processor", "start"),
    [
        ({"add_bos_token": True, "bos_token": "<s>"}, (), 1),
        ({"add_bos_token": True, "bos_token": {"content": "<s>"}}, (), 1),
        ({"bos_token": "<s>"}, ("<s>",), 1),
        ({"add_bos_token": False, "bos_token": "<s>"}, ("<s>",), 1),
        ({"add_bos_token": False, "bos_token": "<s>"}, (), 2),
        ({"bos_token": "<s>"}, (), 2),
        ({"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>"}, (), 2),
    ],
)
def test_texts_begin_with_the_symbol_that_the_folder_puts_there_else_with_e(
    tmp_path, settings, processor, start
):
    source = folder(tmp_path / "in", metaspace, settings)
    if processor:
        with_processor(source, *processor)
    tok = carry_in(source, tmp_path / "run")
    assert tokenizer.load(tmp_path / "run" / "tokenizer.model").start_id == tok.start_id == start


def test_several_symbols_before_a_text_are_refused(tmp_path):
    source = with_processor(folder(tmp_path / "in", metaspace), "<s>", "<unk>")
    with pytest.raises(DataError, match="puts ids .* before each text; one at most"):
        carry_in(source, tmp_path / "run")


def test_the_name_of_the_begin_in_a_text_is_text(tmp_path):
    source = folder(tmp_path / "in", metaspace, {"add_bos_token": True, "bos_token": "<s>"})
    tok = carry_in(source, tmp_path / "run")
    assert tok.start_id == 1 and 1 not in tok.encode("<s>Hello<s>")


def test_start_and_stops_are_kept_in_the_file_but_not_in_the_digest(tmp_path):
    settings = {"add_bos_token": True, "bos_token": "<s>"}
    source = folder(tmp_path / "in", metaspace, settings, generation={"eos_token_id": [2, 0]})
    tok = carry_in(source, tmp_path / "run")
    again = tokenizer.import_model(tmp_path / "run" / "tokenizer.model", tmp_path / "copy")
    assert (again.start_id, again.stop_ids, again.raw) == (1, (2, 0), tok.raw)
    assert tok.digest == tokenizer.load(source / "tokenizer.json").digest


def test_a_begin_that_goes_out_without_its_folder_is_put_there_by_the_tokenizer_json(tmp_path):
    settings = {"add_bos_token": True, "bos_token": "<s>"}
    tok = carry_in(folder(tmp_path / "in", metaspace, settings), tmp_path / "run")
    carry_out(tok, tmp_path / "elsewhere", tmp_path, 64)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert theirs.encode("the king").ids == [1, *tok.encode("the king")]
