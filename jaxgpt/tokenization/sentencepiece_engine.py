"""Opening SentencePiece models, those trained here and any other.

A model that keeps texts byte for byte is encoded word by word with a memory of words seen: for BPE
exactly as if encoded whole and about three times as fast. Another model keeps its own semantics.
User-defined symbols that are markers, such as `<|im_end|>`, are made control symbols, which no text
produces; other user-defined symbols, such as runs of spaces, are text.
"""

from __future__ import annotations

import base64
import json
import re
import struct

import numpy as np
import sentencepiece

from jaxgpt.errors import DataError
from jaxgpt.tokenization import engine, model_file, words
from jaxgpt.tokenization.engine import FORMAT, Engine
from jaxgpt.tokenization.model_file import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from jaxgpt.tokenization.words import SPACE

_MARKER = re.compile(r"[<\[{|].+[>\]}|]")


def open_model(raw: bytes, path: str, eos: str | None) -> Engine:
    """Open the bytes of a model; `eos` names the end-of-text symbol if it is not the model's own.

    Raises DataError when they are no model, or one that cannot be used safely.
    """
    version = sentencepiece.__version__
    if tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < (0, 2, 1):
        raise DataError(f"sentencepiece {version} is unsafe with crafted models; install >= 0.2.1")
    processor = sentencepiece.SentencePieceProcessor()
    try:
        found = list(model_file.pieces(raw))
        names = [raw[piece.start : piece.stop].decode() for piece in found]
        rules = model_file.rules(raw)
        safe, kinds = _markers_as_controls(raw, found, names, eos)
        is_byte = np.array([kind == BYTE for kind in kinds], bool)
        spells_all = is_byte.sum() == 256
        pieces = tuple(
            _meaning(name, kind, spells_all) for name, kind in zip(names, kinds, strict=True)
        )
        processor.LoadFromSerializedProto(safe)
        if processor.piece_size() != len(found):
            raise ValueError("pieces that the library does not see")
    except (RuntimeError, ValueError, IndexError, struct.error) as error:
        raise DataError(
            f"{path}: not a SentencePiece model, or a damaged one; put it back, or delete it and "
            "make one with `jaxgpt tokenizer train`"
        ) from error
    if rules.model_type not in (model_file.UNIGRAM, model_file.BPE):
        raise DataError(f"{path}: a SentencePiece model of whole words or characters; not usable")
    if rules.space_as_suffix or rules.denormalizes or not rules.escape_spaces:
        raise DataError(f"{path}: a SentencePiece model with spaces as suffixes; not usable")

    specials = {
        name: number
        for number, (name, kind) in enumerate(zip(names, kinds, strict=True))
        if kind == CONTROL
    }
    eos_id = processor.eos_id()
    if eos is not None or eos_id < 0:
        eos_id = specials[engine.choose_eos(path, specials, eos)]
    keeps = spells_all and not (rules.char_map or rules.dummy_prefix or rules.remove_extra_spaces)
    text = [p.decode() for p, kind in zip(pieces, kinds, strict=True) if kind in _TEXT]
    pattern = words.choose(text) if keeps else None

    def encode(units: list[str], threads: int) -> list[list[int]]:
        return processor.encode(units, num_threads=threads)

    units, skip_space, known = pattern, False, None
    if pattern is None:
        units, skip_space = words.choose_sections(
            (piece.encode() for piece in text), lambda texts: encode(texts, 1)
        )
    else:  # a space mark in a text is spelled in its three bytes
        spelled = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]
        known = {SPACE: struct.pack("3i", *spelled)}
    return Engine(
        name="sentencepiece",
        raw=raw if eos is None else wrap(raw, eos),
        identity=_identity(found, names, kinds, rules, eos_id),
        eos_id=eos_id,
        pad_id=processor.pad_id() if processor.pad_id() >= 0 else eos_id,
        specials=specials,
        pieces=pieces,
        is_byte=is_byte,
        encode=encode,
        units=units,
        words=known,
        skip_space=skip_space,
        strip="pieces" if rules.remove_extra_spaces else "space" if rules.dummy_prefix else "",
        exact=pattern is not None,
        examples=tuple(n for n, kind in zip(names, kinds, strict=True) if kind == USER_DEFINED),
    )


_TEXT = (NORMAL, USER_DEFINED)  # types of pieces that texts are cut into


def _markers_as_controls(
    raw: bytes, found: list[model_file.Piece], names: list[str], eos: str | None
) -> tuple[bytes, list[int]]:
    """Return the model with its markers as control symbols, and the types of its pieces."""
    safe, kinds = bytearray(raw), [piece.kind for piece in found]
    for number, (piece, name) in enumerate(zip(found, names, strict=True)):
        if piece.kind == USER_DEFINED and (_MARKER.fullmatch(name) or name == eos):
            if safe[piece.kind_at] != USER_DEFINED:
                raise ValueError(f"the type of {name!r} is not written as one byte")
            safe[piece.kind_at] = kinds[number] = CONTROL
    return bytes(safe), kinds


def _meaning(name: str, kind: int, spells_all: bool) -> bytes:
    """Return the bytes that an id stands for."""
    if kind == BYTE:
        return bytes([int(name[3:5], 16)])
    if kind == UNKNOWN:
        return b"" if spells_all else engine.LOST
    return name.replace(SPACE, " ").encode() if kind in (*_TEXT, UNUSED) else b""


def _identity(
    found: list[model_file.Piece],
    names: list[str],
    kinds: list[int],
    rules: model_file.Rules,
    eos_id: int,
) -> list[bytes]:
    """Return what ids depend on: pieces, scores, types and rules, but no notes of the trainer."""
    head = json.dumps([*rules[:2], rules.char_map.hex(), *rules[3:], eos_id]).encode()
    return [head] + [
        struct.pack("<fi", piece.score, kind) + name.encode()
        for piece, name, kind in zip(found, names, kinds, strict=True)
    ]


def wrap(raw: bytes, eos: str) -> bytes:
    """Return a self-contained file of a model and the name of its end-of-text symbol."""
    model = base64.b64encode(raw).decode()
    wrapper = {"format": FORMAT, "version": 1, "engine": "sentencepiece", "eos": eos}
    return json.dumps(wrapper | {"model": model}).encode()
