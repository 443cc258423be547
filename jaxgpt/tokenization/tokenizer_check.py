"""What a tokenizer is tried on before it is used: texts that tokenizers are known to change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxgpt.errors import DataError
from jaxgpt.tokenization.words import SPACE

if TYPE_CHECKING:
    from jaxgpt.tokenization.tokenizer import Tokenizer

NASTY = (
    " a", "a ", "a  b", "   ", "a\tb", "a\nb", "a\r\nb\r\n", "\n\n\n", "\0", "a\0b", "\x0b\x0c\x1f",
    "def f(x):\n    if x:\n\t\treturn 'a,b'\n", "0123 45.6e-7", "</s><s><pad><unk>",
    "<|endoftext|>", "<0x41>", f"a{SPACE}b", f" {SPACE}{SPACE} ", "\u2585\u2047 \u2047",
    "caf\u00e9 cafe\u0301(", "\ufb01\uff11\u00bd\u2122", "\u00a0\u00ad\u200b\u2028\u2029\x85\ufeff",
    "\ufffd\ufffe\ufdd0", "\U0001f680 \U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\u4e2d\u6587 \u3042", "\U0010ffff",
)  # fmt: skip

# What a text that changes shows.
_SHOWS = (
    ("characters take their normal forms", ("cafe\u0301", "\ufb01", "\uff11", "\u00bd")),
    ("tabs, newlines or runs of spaces change", ("a  b", "a\tb", "a\nb", "a\r\nb", "a   ")),
    ("the character U+2581 becomes a space", (f"a{SPACE}b",)),
    ("characters that it has no piece for are lost", ("\U0001f680", "\0", "\u4e2d", "\U0010ffff")),
)
_REPLACED = ("\ufffd", "\u2047")  # stand for an unknown id


def check(tok: Tokenizer, examples: Sequence[str], exact: bool) -> tuple[str, ...]:
    """Return what a tokenizer does to texts besides cutting them; nothing if they come back whole.

    Raises DataError when a text produces a special id, or changes although `exact` was promised.
    """
    texts = ["a", *NASTY, *tok.specials, *(f"a {name} b" for name in tok.specials), *examples]
    changed = []
    for text, ids in zip(texts, tok.encode_batch(texts), strict=True):
        if not all(tok.pieces[number] for number in ids):
            raise DataError(f"{tok.path}: refused: the text {text!r} produces a special id")
        if tok.decode_bytes(ids) != text.encode():
            changed.append(text)
    if changed and exact:
        text = changed[0]
        raise DataError(
            f"{tok.path}: refused: it changes texts, {text!r} becomes "
            f"{tok.decode(tok.encode(text))!r}; train one with `jaxgpt tokenizer train`"
        )
    return tuple(_losses(tok, changed)) if changed else ()


def _losses(tok: Tokenizer, changed: list[str]) -> list[str]:
    prefix = b" " if tok.decode_bytes(tok.encode("a")) == b" a" else b""

    def becomes(text: str) -> str:
        return tok.decode_bytes(tok.encode(text)).removeprefix(prefix).decode("utf-8", "replace")

    def shows(texts: tuple[str, ...], lost: bool) -> bool:
        """Tell whether one of the texts changes, by a loss or, not `lost`, into something else."""
        found = [becomes(text) for text in texts if becomes(text) != text]
        return any(lost or not any(sign in text for sign in _REPLACED) for text in found)

    losses = ["a space is put before each text"] if prefix else []
    losses += [loss for loss, texts in _SHOWS if shows(texts, loss.endswith("lost"))]
    others = [text for text in changed if becomes(text) != text]
    return losses or [f"some texts change, such as {others[0]!r}"]


def describe(tok: Tokenizer) -> dict[str, Any]:
    """Return what is to be known of a tokenizer, as JSON values."""
    return {
        "path": tok.path,
        "engine": tok.engine,
        "vocab_size": tok.vocab_size,
        "eos_id": tok.eos_id,
        "pad_id": tok.pad_id,
        "start_id": tok.start_id,
        "stop_ids": list(tok.stop_ids),
        "specials": tok.specials,
        "single_bytes": int(tok.is_byte.sum()),
        "longest_piece": max(map(len, tok.pieces)),
        "lossless": tok.lossless,
        "losses": list(tok.losses),
        "digest": tok.digest,
    }


def measure(tok: Tokenizer, texts: Sequence[str]) -> tuple[float, float, bool]:
    """Return bytes per token, the share of tokens that are single bytes, and whether texts return.

    The share is that of bytes of characters that have no piece; a text returns if decoding its ids
    gives it back.
    """
    encoded = tok.encode_batch(texts)
    num_bytes = sum(len(text.encode()) for text in texts)
    num_tokens = sum(map(len, encoded))
    byte_tokens = sum(int(np.count_nonzero(tok.is_byte[ids])) for ids in encoded)
    returns = all(tok.decode(ids) == text for text, ids in zip(texts, encoded, strict=True))
    return num_bytes / max(num_tokens, 1), byte_tokens / max(num_tokens, 1), returns
