"""Opening Hugging Face tokenizer.json files: byte-level vocabularies, Metaspace, plain spaces.

Texts are cut as the file says, but no symbol is added, nothing is truncated or padded, and special
symbols in a text are text.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.errors import DataError
from jaxgpt.tokenization import engine, words
from jaxgpt.tokenization.engine import FORMAT, Engine
from jaxgpt.tokenization.words import SPACE

_BYTE = re.compile("<0x([0-9A-F]{2})>")


def open_spec(spec: dict[str, Any], path: str, eos: str | None) -> Engine:
    """Open the content of a tokenizer.json; raises DataError for one that cannot be used.

    Raises KeyError, TypeError, ValueError or AttributeError for one that is damaged.
    """
    import tokenizers

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else it takes every core there is
    spec = copy.deepcopy(spec)
    added = spec["added_tokens"]
    special = {token["content"]: token["id"] for token in added if token["special"]}
    others = {token["content"]: token["id"] for token in added}
    eos = engine.choose_eos(path, others if eos in others or not special else special, eos)
    _settle(spec, eos)
    with engine.native_errors(f"{path}: not a tokenizer.json, or a damaged one"):
        library = tokenizers.Tokenizer.from_str(json.dumps(spec))
        library.encode_special_tokens = True
        vocabulary = library.get_vocab(with_added_tokens=False)
        symbols = sorted(library.get_added_tokens_decoder().items())
    kind, model = type(library.model).__name__, spec["model"]
    if kind not in ("BPE", "Unigram") or model.get("end_of_word_suffix"):
        raise DataError(f"{path}: a vocabulary of kind {kind} that does not keep spaces")
    cutting = [spec["pre_tokenizer"], spec["normalizer"]]
    byte_level = any("ByteLevel" in _types(part) for part in cutting)
    plain = {name for part in cutting for name in _types(part)} <= {"Split"}
    plain = plain and bool(model.get("byte_fallback"))  # a space is a piece, or spelled in bytes
    if not (byte_level or plain or SPACE in json.dumps(cutting, ensure_ascii=False)):
        raise DataError(f"{path}: needs a byte-level or Metaspace vocabulary, which keep spaces")

    meaning = _bytes_of if byte_level else str.encode if plain else _text_of
    by_id = {number: meaning(name) for name, number in vocabulary.items()}
    by_id |= {n: b"" if symbol.special else symbol.content.encode() for n, symbol in symbols}
    bytes_by_id: dict[int, bytes] = {}
    if model.get("byte_fallback"):
        found = [(number, _BYTE.fullmatch(name)) for name, number in vocabulary.items()]
        bytes_by_id = {number: bytes([int(m[1], 16)]) for number, m in found if m}
        by_id |= bytes_by_id
    spells_all = byte_level or len(set(bytes_by_id.values())) == 256
    unknown = model.get("unk_id") if kind == "Unigram" else vocabulary.get(model.get("unk_token"))
    if unknown is not None:
        by_id[unknown] = b"" if spells_all else "\ufffd".encode()
    pieces = engine.table(path, by_id)
    specials = {s.content: number for number, s in symbols if not pieces[number]}
    if eos not in specials:
        raise DataError(f"{path}: {eos!r} stands for text, so it cannot end texts; name another")

    def encode_some(units: list[str]) -> list[list[int]]:
        with engine.native_errors(f"{path}: a text that the vocabulary cannot spell", detail=False):
            return [e.ids for e in library.encode_batch_fast(units, add_special_tokens=False)]

    units, skip_space = words.choose_sections(by_id.values(), encode_some)
    is_byte = [n in bytes_by_id or (byte_level and _is_part(p)) for n, p in enumerate(pieces)]
    wrapper = {"format": FORMAT, "version": 1, "engine": "hf", "eos": eos, "model": spec}
    return Engine(
        name="hf",
        raw=json.dumps(wrapper).encode(),
        identity=_identity(spec, kind, eos),
        eos_id=specials[eos],
        pad_id=engine.choose_pad(specials, specials[eos]),
        specials=specials,
        pieces=pieces,
        is_byte=np.array(is_byte, bool),
        encode=lambda texts, threads: engine.in_threads(encode_some, texts, threads),
        units=units,
        words=None,
        skip_space=skip_space,
        strip=_strip(library, encode_some, pieces),
        exact=False,
        examples=tuple(f"a {s.content} b" for _, s in symbols if not s.special),
    )


def neighbours_eos(path: Path, spec: dict[str, Any]) -> str | None:
    """Return the end-of-text symbol that the files beside a tokenizer.json name, if any does."""
    for name, key in (
        ("tokenizer_config.json", "eos_token"),
        ("special_tokens_map.json", "eos_token"),
        ("generation_config.json", "eos_token_id"),
    ):
        try:
            value = json.loads(path.with_name(name).read_bytes())[key]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
        if isinstance(value, list):
            value = value[0] if value else None
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, int):
            names = [t["content"] for t in spec["added_tokens"] if t["id"] == value]
            value = names[0] if names else None
        if isinstance(value, str):
            return value
    return None


def _settle(spec: dict[str, Any], eos: str) -> None:
    """Take out of a specification what depends on chance or adds to texts; make E special."""
    spec |= {"truncation": None, "padding": None, "post_processor": None}
    spec |= {key: spec.get(key) for key in ("normalizer", "pre_tokenizer")}
    if "dropout" in spec["model"]:
        spec["model"]["dropout"] = None
    for token in spec["added_tokens"]:
        if token["content"] == eos:
            token["special"] = True


def _types(part: Any) -> list[str]:
    """Return the types of a part of the specification and of the parts inside it."""
    if not isinstance(part, dict):
        return []
    inner = part.get("pretokenizers") or part.get("normalizers") or ()
    return [str(part.get("type"))] + [name for each in inner for name in _types(each)]


def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each character stands for in a byte-level vocabulary (GPT-2).

    Visible characters of Latin-1 stand for themselves, the other bytes for U+0100 and onwards.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(b): b for b in visible} | {chr(0x100 + i): b for i, b in enumerate(hidden)}


BYTE_OF = _byte_alphabet()


def _bytes_of(name: str) -> bytes:
    known = [BYTE_OF.get(char) for char in name]
    return name.encode() if None in known else bytes(known)


def _text_of(name: str) -> bytes:
    return name.replace(SPACE, " ").encode()


def _is_part(piece: bytes) -> bool:
    return len(piece) == 1 and piece >= b"\x80"


def _strip(library: Any, encode: Callable, pieces: tuple[bytes, ...]) -> str:
    """Return whether decoding takes away the space that encoding puts before a text."""
    ids = encode(["a"])[0]
    ours = b"".join(pieces[number] for number in ids)
    return "space" if ours == b" " + library.decode(ids).encode() else ""


def _identity(spec: dict[str, Any], kind: str, eos: str) -> list[bytes]:
    """Return what ids depend on, in a form that all versions of the library agree on."""
    model = {
        key: value
        for key, value in spec["model"].items()
        if value is not None and value is not False and value != "" and key != "type"
    }
    if "merges" in model:  # older files join a pair by a space
        model["merges"] = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    added = [{key: value for key, value in t.items() if value} for t in spec["added_tokens"]]
    parts = [eos, kind, spec["normalizer"], spec["pre_tokenizer"], added, model]
    return [json.dumps(part, sort_keys=True).encode() for part in parts]
