"""A tokenizer of any engine as the content of a Hugging Face tokenizer.json, where that is exact.

SentencePiece spells a space as U+2581 and that character itself in bytes. Here the vocabulary holds
plain spaces and there is no normaliser, so U+2581 has no piece and is spelled in bytes too. Merges
are every way to join two pieces to a third, in the order of the third's score (or rank).
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from jaxgpt.tokenization import model_file, words
from jaxgpt.tokenization.frame import is_json
from jaxgpt.tokenization.hf_engine import BYTE_OF
from jaxgpt.tokenization.model_file import BPE, BYTE, NORMAL, UNIGRAM, UNUSED, USER_DEFINED
from jaxgpt.tokenization.tokenizer import Tokenizer
from jaxgpt.tokenization.words import SPACE


def make(tok: Tokenizer) -> dict[str, Any] | None:
    """Return the content of a tokenizer.json that gives the ids of `tok`; None if there is none.

    For a Unigram model, ids may differ between segmentations of equal score, which float32 sums of
    SentencePiece and float64 sums of the other library order by their rounding.
    """
    if tok.engine == "sentencepiece":
        exact = tok.word_pattern in (words.FINE, words.COARSE)
        return _of_sentencepiece(sentencepiece_bytes(tok)) if exact else None
    spec = json.loads(tok.raw)
    return spec["model"] if tok.engine == "hf" else _of_ranks(spec)


def sentencepiece_bytes(tok: Tokenizer) -> bytes:
    """Return the serialized model of a SentencePiece tokenizer, without its wrapper."""
    if not is_json(tok.raw):
        return tok.raw
    return base64.b64decode(json.loads(tok.raw)["model"])


def scores(tok: Tokenizer) -> list[float] | None:
    """Return the log-probabilities of the pieces of a Unigram model; None for any other."""
    if tok.engine != "sentencepiece":
        return None
    raw = sentencepiece_bytes(tok)
    unigram = model_file.rules(raw).model_type == UNIGRAM
    return [piece.score for piece in model_file.pieces(raw)] if unigram else None


def byte_level(
    vocab: Mapping[str, int],
    merges: Iterable[tuple[str, str]],
    added: list[dict[str, Any]],
    pattern: str | None,
    *,
    whole_words: bool = False,
    prefix: bool = False,
) -> dict[str, Any]:
    """Return a byte-level BPE; `pattern` cuts texts, None: as GPT-2 does.

    `whole_words`: a word that is a piece is that piece, whatever the merges; `prefix`: a space is
    put before a text.
    """
    to_bytes = {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True}
    cut: dict[str, Any] = to_bytes | {"use_regex": pattern is None}
    if pattern is not None:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
        cut = {"type": "Sequence", "pretokenizers": [split | {"invert": False}, cut]}
    model = _bpe(vocab, merges) | {"ignore_merges": whole_words}
    return _spec(model, added, cut, to_bytes | {"use_regex": True})


def added_token(number: int, name: str, special: bool = True) -> dict[str, Any]:
    """Return the entry of a symbol that is no piece of the model."""
    rules = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": name, **rules, "special": special}


def opening(name: str, number: int) -> dict[str, Any]:
    """Return the post-processor that puts one special symbol before each text."""
    first = {"SpecialToken": {"id": name, "type_id": 0}}
    texts = [{"Sequence": {"id": which, "type_id": i}} for i, which in enumerate("AB")]
    return {
        "type": "TemplateProcessing",
        "single": [first, texts[0]],
        "pair": [first, texts[0], first, texts[1]],
        "special_tokens": {name: {"id": name, "ids": [number], "tokens": [name]}},
    }


def _of_sentencepiece(raw: bytes) -> dict[str, Any] | None:
    found = list(model_file.pieces(raw))
    names = [raw[piece.start : piece.stop].decode() for piece in found]
    kinds = [piece.kind for piece in found]
    names = [
        name.replace(SPACE, " ") if kind in (NORMAL, USER_DEFINED) else name
        for name, kind in zip(names, kinds, strict=True)
    ]
    vocab = {name: number for number, name in enumerate(names)}
    if UNUSED in kinds or len(vocab) < len(names):
        return None
    normal = {
        name: found[number].score for name, number in vocab.items() if kinds[number] == NORMAL
    }
    marks = [name for name in names if kinds[vocab[name]] not in (NORMAL, USER_DEFINED)]
    added = [
        added_token(number, name, kinds[number] != USER_DEFINED)
        for name, number in vocab.items()
        if kinds[number] not in (NORMAL, BYTE)
    ]
    unknown = names[kinds.index(model_file.UNKNOWN)]
    cut = None
    if model_file.rules(raw).model_type == BPE:
        joins = _joins({name: (-score, vocab[name]) for name, score in normal.items()})
        model = _bpe(vocab, joins) | {"byte_fallback": True, "unk_token": unknown}
    else:
        # The library looks for every entry in a text. One spelled like "<0x41>" must lose against
        # its single characters; a character without a piece ends a word, as no piece goes over it.
        lowest = 2 * min(normal.values()) * max(map(len, marks))
        entries = [[name, normal.get(name, lowest)] for name in names]
        model = {"type": "Unigram", "unk_id": vocab[unknown], "vocab": entries}
        model |= {"byte_fallback": True}
        lost = sorted(set("".join(marks)) - set(normal))
        if lost:
            regex = "[" + "".join(map(re.escape, lost)) + "]"
            cut = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated"}
            cut |= {"invert": False}
    steps = [{"type": "ByteFallback"}, {"type": "Fuse"}]
    return _spec(model, added, cut, {"type": "Sequence", "decoders": steps})


def _of_ranks(wrapper: dict[str, Any]) -> dict[str, Any]:
    lines = (line.split() for line in wrapper["model"].splitlines() if line.strip())
    name_of = {value: name for name, value in BYTE_OF.items()}
    vocab = {
        "".join(name_of[byte] for byte in base64.b64decode(token)): int(rank)
        for token, rank in lines
    }
    joins = _joins({name: (rank, 0) for name, rank in vocab.items()})
    specials = wrapper["specials"]
    added = [added_token(number, name) for name, number in specials.items()]
    # Specials are in the vocabulary too: only so are their ids those given, whatever is between.
    return byte_level(vocab | specials, joins, added, wrapper["pattern"], whole_words=True)


def _joins(order: Mapping[str, tuple[float, int]]) -> list[tuple[str, str]]:
    """Return each way to make a piece of two others, pieces that come first in `order` first."""
    found = [
        (order[name], order[name[:cut]], name[:cut], name[cut:])
        for name in order
        for cut in range(1, len(name))
        if name[:cut] in order and name[cut:] in order
    ]
    return [(left, right) for _, _, left, right in sorted(found)]


def _bpe(vocab: Mapping[str, int], merges: Iterable[tuple[str, str]]) -> dict[str, Any]:
    nothing = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix"))
    rules = {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False}
    pairs = [list(pair) for pair in merges]
    return {"type": "BPE", **nothing, **rules, "vocab": dict(vocab), "merges": pairs}


def _spec(
    model: dict[str, Any], added: list[dict[str, Any]], cut: Any, decoder: dict[str, Any]
) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": cut,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }
