"""The ids around a text: the one that a model wants in front, and those that end what it writes.

For a tokenizer made here both are E. Models from elsewhere may want a begin-of-text symbol, exactly
one, and may end a text in several ways. A self-contained file keeps this as `start_id` and
`stop_ids`; the digest leaves it out, for the ids of texts do not depend on it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from jaxgpt.errors import DataError
from jaxgpt.tokenization import sentencepiece_engine

if TYPE_CHECKING:
    from jaxgpt.tokenization.tokenizer import Tokenizer


def with_frame(tok: Tokenizer, start_id: int, stop_ids: Sequence[int]) -> Tokenizer:
    """Return `tok` with the id that stands before texts and those that end them besides E.

    Raises DataError for ids that it does not have, and for a start that a text could produce.
    """
    for number in (start_id, *stop_ids):
        if type(number) is not int or not 0 <= number < tok.vocab_size:
            raise DataError(
                f"{tok.path}: start or stop id {number!r}: not in [0, {tok.vocab_size})"
            )
    if tok.pieces[start_id]:
        raise DataError(f"{tok.path}: id {start_id} stands for text, so it cannot open texts")
    stops = tuple(dict.fromkeys((tok.eos_id, *stop_ids)))
    if (start_id, stops) == (tok.start_id, tok.stop_ids):
        return tok
    plain = is_json(tok.raw)
    spec = json.loads(tok.raw if plain else sentencepiece_engine.wrap(tok.raw, tok.eos_name))
    raw = json.dumps(spec | {"start_id": start_id, "stop_ids": stops}).encode()
    return replace(tok, start_id=start_id, stop_ids=stops, raw=raw)


def is_json(raw: bytes) -> bool:
    """Tell whether a file is JSON by how it begins."""
    return raw[:64].lstrip().startswith(b"{")
