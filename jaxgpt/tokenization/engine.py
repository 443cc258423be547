"""What every tokenizer engine provides, and what their readers share."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxgpt.errors import DataError, one_line

MAX_IDS = 1 << 22  # a vocabulary beyond four million ids is a crafted or damaged file
FORMAT = "jaxgpt-tokenizer"  # names the self-contained files that hold a model and its settings

# End-of-text symbols in use, the usual one of a base model first.
EOS_NAMES = (
    "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]",
    "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|im_end|>",
)  # fmt: skip
LOST = " \u2047 ".encode()  # what SentencePiece shows for an unknown id
PAD_NAMES = ("<pad>", "<|pad|>", "<|padding|>", "[PAD]")


class Engine(NamedTuple):
    """A model opened by its library.

    `encode(units, threads)` returns the ids of each unit of text; `identity` is all that the ids
    and their meaning depend on, in a canonical form; `raw` is a file that opens as this again.
    """

    name: Literal["sentencepiece", "hf", "tiktoken"]
    raw: bytes
    identity: Sequence[bytes]
    eos_id: int
    pad_id: int
    specials: dict[str, int]
    pieces: tuple[bytes, ...]  # by id, in UTF-8; special ids and holes stand for b""
    is_byte: np.ndarray  # [V] bool: ids for a byte of a character without piece
    encode: Callable[[list[str], int], Sequence[Sequence[int] | np.ndarray]]
    units: re.Pattern  # what is encoded alone, see `words`
    words: Mapping[str, bytes] | None  # ids (int32 bytes) of words known beforehand; None: sections
    skip_space: bool = False  # a section after the first is encoded without its first space
    strip: Literal["", "space", "pieces"] = ""  # the leading space that `decode` takes away
    exact: bool = True  # texts must come back byte for byte, or the model is refused
    examples: tuple[str, ...] = ()  # further texts to try, such as symbols with rules of their own


def choose_eos(path: str, specials: Mapping[str, int], name: str | None) -> str:
    """Return the name of the end-of-text symbol: the one given, else the best known; DataError."""
    if name is not None:
        if name not in specials:
            known = ", ".join(list(specials)[:20]) or "none"
            raise DataError(f"{path}: no special symbol {name!r} to end texts; there are: {known}")
        return name
    for known in EOS_NAMES:
        if known in specials:
            return known
    raise DataError(
        f"{path}: which symbol ends a text is not known; name it with "
        "`jaxgpt tokenizer import PATH OUT --eos NAME`"
    )


def choose_pad(specials: Mapping[str, int], eos_id: int) -> int:
    """Return the id of the padding symbol, or E where there is none."""
    return next((specials[name] for name in PAD_NAMES if name in specials), eos_id)


def table(path: str, pieces: Mapping[int, bytes]) -> tuple[bytes, ...]:
    """Return the pieces by id, with holes filled by b""; DataError for ids out of bounds."""
    if not pieces or min(pieces) < 0 or max(pieces) >= MAX_IDS:
        low, high = (min(pieces), max(pieces)) if pieces else (0, -1)
        raise DataError(f"{path}: ids {low}..{high}; a tokenizer here has ids from 0 to {MAX_IDS}")
    return tuple(pieces.get(number, b"") for number in range(max(pieces) + 1))


@contextlib.contextmanager
def native_errors(message: str, detail: bool = True) -> Iterator[None]:
    """Turn any failure of a native library inside the block into a DataError of one line.

    A panic in Rust is no Exception, so it is told by its name. `detail` adds the library's words.
    """
    try:
        yield
    except DataError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        words = f": {one_line(error)}" if detail else ""
        raise DataError(f"{message}{words}") from (error if detail else None)


def in_threads(
    encode: Callable[[list[str]], list[Any]], units: list[str], threads: int
) -> list[Any]:
    """Encode units with a library that has no threads of its own to choose."""
    if threads <= 1 or len(units) < 2 * threads:
        return encode(units)
    bounds = [len(units) * i // threads for i in range(threads + 1)]
    shares = [units[low:high] for low, high in zip(bounds, bounds[1:], strict=False)]
    with ThreadPoolExecutor(threads) as pool:
        return [ids for share in pool.map(encode, shares) for ids in share]
