"""A tokenizer.json gives the ids of its own library, but no symbol of its own comes from text."""

from __future__ import annotations

import json
import shutil

import pytest
from corpora import LINES
from foreign_models import E, byte_level, library, llama_style, metaspace
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from jaxgpt.errors import DataError
from jaxgpt.tokenization import hf_engine, tokenizer

MAKERS = {"byte_level": byte_level, "metaspace": metaspace, "llama_style": llama_style}
ENDS = {"byte_level": E, "metaspace": "</s>", "llama_style": "</s>"}
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@pytest.fixture(scope="module", params=MAKERS)
def pair(request, tmp_path_factory):
    """A tokenizer, and that of the library."""
    path = tmp_path_factory.mktemp("hf") / "tokenizer.json"
    made = MAKERS[request.param](path)
    return tokenizer.load(path), made


@pytest.fixture
def path(tmp_path):
    byte_level(tmp_path / "tokenizer.json")
    return tmp_path / "tokenizer.json"


def edit(path, change):
    """Change the content of a tokenizer.json in place."""
    spec = json.loads(path.read_text())
    change(spec)
    path.write_text(json.dumps(spec))
    return path


def ids_of(made, text):
    return made.encode(text, add_special_tokens=False).ids


def test_ids_in_batches_are_those_of_the_library(pair):
    tok, made = pair
    texts = ["", " a", "a\r\n  b\t", "\U0001f680 caf\u00e9 \u4e2d", *LINES[:50]]
    for threads in (1, 3):
        batch = tok.encode_batch(texts, threads=threads)
        assert [ids.tolist() for ids in batch] == [ids_of(made, text) for text in texts]


@settings(max_examples=100, deadline=None)
@given(text=TEXT)
def test_any_text_has_the_ids_of_the_library_and_decodes_as_there(pair, text):
    tok, made = pair
    ids = tok.encode(text)
    assert ids == ids_of(made, text)
    assert tok.decode(ids) == made.decode(ids)


@settings(max_examples=100, deadline=None)
@given(text=TEXT)
def test_any_text_survives_a_byte_level_vocabulary(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "survives.json"
    if not path.exists():
        byte_level(path)
    tok = tokenizer.load(path)
    assert tok.lossless and tok.decode_bytes(tok.encode(text)) == text.encode()


def test_the_256_bytes_have_the_characters_of_gpt2():
    # encoder.json of GPT-2 writes a space as U+0120, a newline as U+010A, 0xAD as U+0143.
    alphabet = hf_engine.BYTE_OF
    assert (alphabet["\u0120"], alphabet["\u010a"], alphabet["\u0143"]) == (0x20, 0x0A, 0xAD)
    assert (alphabet["!"], alphabet["\u00ff"]) == (0x21, 0xFF)
    assert sorted(alphabet.values()) == list(range(256))


def test_pieces_are_the_bytes_of_every_id(pair):
    tok, made = pair
    for number, piece in enumerate(tok.pieces):
        assert tok.decode_bytes([number]) == piece
        if piece and piece.isascii() and not piece.startswith(b" "):
            assert made.decode([number]) == piece.decode()
    assert {bytes([byte]) for byte in range(128, 256)} <= set(tok.pieces)
    assert [tok.pieces[i] for i in range(tok.vocab_size) if tok.is_byte[i]]
    assert all(len(tok.pieces[i]) == 1 for i in range(tok.vocab_size) if tok.is_byte[i])


def test_specials_in_a_text_are_text(pair):
    tok, _ = pair
    for name in tok.specials:
        ids = tok.encode(f"a{name}b {name}")
        assert not set(ids) & set(tok.specials.values())
        assert tok.decode(ids) == f"a{name}b {name}"


def test_the_end_of_texts_is_the_known_name(pair):
    tok, made = pair
    name = tok.specials and next(n for n in (E, "</s>") if n in tok.specials)
    assert tok.eos_id == made.token_to_id(name) == tok.pad_id
    assert tok.decode([tok.eos_id]) == ""


def test_what_a_metaspace_vocabulary_does_to_texts_is_said(tmp_path):
    metaspace(tmp_path / "m.json")
    expected = ("a space is put before each text", "the character U+2581 becomes a space")
    assert tokenizer.load(tmp_path / "m.json").losses == expected


def test_a_normaliser_is_said(path):
    edit(path, lambda spec: spec.update(normalizer={"type": "NFKC"}))
    assert tokenizer.load(path).losses == ("characters take their normal forms",)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", {"eos_token": "<|user|>"}),
        ("tokenizer_config.json", {"eos_token": {"content": "<|user|>", "lstrip": False}}),
        ("special_tokens_map.json", {"eos_token": "<|user|>"}),
        ("generation_config.json", {"eos_token_id": 1}),
        ("generation_config.json", {"eos_token_id": [1, 0]}),
    ],
)
def test_files_beside_it_name_the_end_of_texts(path, name, content):
    path.with_name(name).write_text(json.dumps(content))
    assert tokenizer.load(path).eos_id == 1
    assert tokenizer.load(path, eos=E).eos_id == 0


@pytest.mark.parametrize("content", ["{", "[]", '{"eos_token": null}', '{"eos_token_id": 99}'])
def test_useless_files_beside_it_are_passed_over(path, content):
    for name in ("tokenizer_config.json", "generation_config.json"):
        path.with_name(name).write_text(content)
    assert tokenizer.load(path).eos_id == 0


def test_without_a_known_end_of_texts_the_way_to_name_it_is_told(path):
    def rename(spec):
        spec["added_tokens"][0]["content"] = "<a>"
        spec["model"]["vocab"]["<a>"] = spec["model"]["vocab"].pop(E)

    edit(path, rename)
    with pytest.raises(DataError, match="`jaxgpt tokenizer import PATH OUT --eos NAME`"):
        tokenizer.load(path)
    assert tokenizer.load(path, eos="<a>").eos_id == 0
    with pytest.raises(DataError, match=r"no special symbol '<b>' .* there are: <a>, <\|user\|>"):
        tokenizer.load(path, eos="<b>")


def test_a_symbol_that_ends_texts_is_special_even_if_the_file_does_not_say_so(path):
    edit(path, lambda spec: spec["added_tokens"][1].update(special=False))
    tok = tokenizer.load(path, eos="<|user|>")
    assert tok.eos_id == 1 and 1 not in tok.encode("a <|user|> b")


def test_an_added_symbol_that_is_not_special_is_text(path):
    token = {"id": 360, "content": "    ", "special": False, "single_word": False,
             "lstrip": False, "rstrip": False, "normalized": False}  # fmt: skip
    edit(path, lambda spec: spec["added_tokens"].append(token))
    tok = tokenizer.load(path)
    assert tok.vocab_size == 361 and tok.lossless
    assert 360 in tok.encode("a    b") and tok.pieces[360] == b"    "


def test_a_symbol_that_takes_spaces_away_is_said(path):
    token = {"id": 360, "content": "<x>", "special": False, "single_word": False,
             "lstrip": True, "rstrip": True, "normalized": False}  # fmt: skip
    edit(path, lambda spec: spec["added_tokens"].append(token))
    assert tokenizer.load(path).losses == ("some texts change, such as 'a <x> b'",)


def test_truncation_padding_added_symbols_and_dropout_are_off(path):
    made = library(path)
    made.enable_truncation(4)
    made.enable_padding(length=50)
    made.post_processor = TemplateProcessing(f"{E} $A {E}", None, [(E, 0)])
    made.save(str(path))
    edit(path, lambda spec: spec["model"].update(dropout=0.9))
    tok = tokenizer.load(path)
    byte_level(path.with_name("plain.json"))
    plain = tokenizer.load(path.with_name("plain.json"))
    text = "the king went to the hall " * 20
    assert tok.encode(text) == plain.encode(text) and tok.digest == plain.digest


def test_how_merges_are_written_does_not_change_the_identity(path):
    before = tokenizer.load(path).digest
    edit(path, lambda s: s["model"].update(merges=[" ".join(m) for m in s["model"]["merges"]]))
    edit(path, lambda s: s["model"].pop("type"))
    assert tokenizer.load(path).digest == before


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s["model"]["merges"].pop(),
        lambda s: s.update(normalizer={"type": "NFC"}),
        lambda s: s["pre_tokenizer"].update(add_prefix_space=True),
        lambda s: s["added_tokens"].pop(),
    ],
)
def test_whatever_changes_ids_changes_the_identity(path, change):
    before = tokenizer.load(path).digest
    assert tokenizer.load(edit(path, change)).digest != before


def test_holes_in_the_ids_stand_for_nothing(path):
    token = {"id": 400, "content": "<far>", "special": True, "single_word": False,
             "lstrip": False, "rstrip": False, "normalized": False}  # fmt: skip

    def add(spec):
        spec["model"]["vocab"]["<far>"] = 400
        spec["added_tokens"].append(token)

    tok = tokenizer.load(edit(path, add))
    assert tok.vocab_size == 401 and tok.special_id("<far>") == 400
    assert tok.decode(list(range(361, 400))) == ""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s: s["model"]["vocab"].update({"x" * 9: 1 << 31}), "ids 0..2147483648"),
        (lambda s: s["model"]["vocab"].update({"x" * 9: -1}), "not a tokenizer.json, or a damaged"),
        (lambda s: s["model"]["merges"].append(["q7", "zz"]), "not a tokenizer.json, or a damaged"),
        (lambda s: s.pop("model"), r"damaged one \(KeyError\)"),
        (lambda s: s.update(added_tokens=7), r"damaged one \(TypeError\)"),
        (lambda s: s.update(model=[]), r"damaged one"),
        (lambda s: s.update(pre_tokenizer=None), "byte-level or Metaspace"),
        (lambda s: s.update(pre_tokenizer={"type": "Magic"}), "not a tokenizer.json, or a damaged"),
        (lambda s: s["model"].update(end_of_word_suffix="</w>"), "does not keep spaces"),
        (lambda s: s.update(model={"type": "WordLevel", "vocab": {"a": 9}, "unk_token": "a"}),
         "kind WordLevel that does not keep spaces"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_refused_in_one_line(path, change, reason):
    with pytest.raises(DataError, match=reason) as refused:
        tokenizer.load(edit(path, change))
    assert str(refused.value).startswith(str(path)) and "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["{", '{"a": 1}', "{}", "[" * 9, '{"a":' * 100_000, "{\0"])
def test_json_that_is_no_tokenizer_is_refused(tmp_path, text):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(DataError, match=r"t\.json: (JSON, but no tokenizer|not a SentenceP)"):
        tokenizer.load(tmp_path / "t.json")


def test_the_copy_in_one_file_needs_no_neighbours_and_is_the_same_tokenizer(path, tmp_path):
    path.with_name("tokenizer_config.json").write_text('{"eos_token": "<|user|>"}')
    tok = tokenizer.import_model(path, tmp_path / "alone" / "tokenizer.model")
    shutil.copy(tmp_path / "alone" / "tokenizer.model", tmp_path / "copy")
    path.with_name("tokenizer_config.json").unlink()
    again = tokenizer.load(tmp_path / "copy")
    assert (again.digest, again.eos_id, again.raw) == (tok.digest, 1, tok.raw)
    assert again.encode(LINES[0]) == tok.encode(LINES[0])


def test_a_unigram_vocabulary_whose_symbols_come_from_text_is_refused(tmp_path):
    spec = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
        "post_processor": None, "decoder": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "never"},
        "added_tokens": [{"id": 1, "content": "</s>", "special": True, "single_word": False,
                          "lstrip": False, "rstrip": False, "normalized": False}],
        "model": {"type": "Unigram", "unk_id": 0, "byte_fallback": False,
                  "vocab": [["<unk>", 0.0], ["</s>", 0.0], ["\u2581", -1.0], ["a", -2.0]]},
    }  # fmt: skip
    (tmp_path / "t.json").write_text(json.dumps(spec))
    with pytest.raises(DataError, match="refused: the text '</s>.*' produces a special id"):
        tokenizer.load(tmp_path / "t.json")
