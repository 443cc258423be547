"""Opening tiktoken rank files: lines of a token in base64 and its rank, which is its id.

Such a file holds neither the pattern that cuts texts nor the special symbols. For the published
ones both follow from the number of ranks; for others they must be given.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import re
from typing import Any

import numpy as np

from jaxgpt.errors import DataError
from jaxgpt.tokenization import engine, words
from jaxgpt.tokenization.engine import FORMAT, Engine

log = logging.getLogger(__name__)

# The patterns published with the vocabularies (tiktoken_ext/openai_public.py, and Llama 3).
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = (
    _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = (
    *("<|begin_of_text|>", "<|end_of_text|>"),
    *(f"<|reserved_special_token_{i}|>" for i in range(4)),
    *("<|start_header_id|>", "<|end_header_id|>", "<|reserved_special_token_4|>", "<|eot_id|>"),
    *(f"<|reserved_special_token_{i}|>" for i in range(5, 251)),
)
_CL100K_SPECIALS = {
    "<|endoftext|>": 100257, "<|fim_prefix|>": 100258, "<|fim_middle|>": 100259,
    "<|fim_suffix|>": 100260, "<|endofprompt|>": 100276,
}  # fmt: skip
# By number of ranks: name, pattern, special symbols.
PUBLISHED: dict[int, tuple[str, str, dict[str, int]]] = {
    50256: ("r50k_base (GPT-2)", GPT2, {"<|endoftext|>": 50256}),
    50280: ("p50k_base", GPT2, {"<|endoftext|>": 50256}),
    100256: ("cl100k_base", CL100K, _CL100K_SPECIALS),
    128000: ("Llama 3", CL100K, {name: 128000 + i for i, name in enumerate(_LLAMA3)}),
    199998: ("o200k_base", O200K, {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}),
}

_LINE = re.compile(rb"([A-Za-z0-9+/]+={0,2}) ([0-9]{1,7})\s*")


def looks_like_ranks(raw: bytes) -> bool:
    """Tell whether the first line is that of a rank file."""
    return _LINE.fullmatch(raw[:4096].partition(b"\n")[0]) is not None


def open_ranks(raw: bytes, path: str, eos: str | None, pattern: str | None) -> Engine:
    """Open a rank file; DataError when it is damaged, or pattern and E are neither known nor given.

    A pattern that is given goes with one special symbol, `eos`, whose id is the next after all
    ranks.
    """
    ranks = _parse(raw, path)
    if pattern is None:
        if len(ranks) not in PUBLISHED:
            raise DataError(
                f"{path}: {len(ranks)} ranks, no published vocabulary; give its pattern and "
                "end-of-text symbol: `jaxgpt tokenizer import PATH OUT --eos NAME --pattern REGEX`"
            )
        name, pattern, specials = PUBLISHED[len(ranks)]
        log.warning("%s: taken for %s by its %d ranks", path, name, len(ranks))
    elif eos is None:
        raise DataError(f"{path}: a pattern is given without the name of the end-of-text symbol")
    else:
        specials = {eos: max(ranks.values()) + 1}
    return _open(ranks, path, pattern, specials, engine.choose_eos(path, specials, eos))


def open_wrapper(wrapper: dict[str, Any], path: str, eos: str | None) -> Engine:
    """Open a self-contained file; raises KeyError, TypeError or ValueError for a damaged one."""
    specials = {str(name): int(number) for name, number in wrapper["specials"].items()}
    ranks = _parse(wrapper["model"].encode(), path)
    name = engine.choose_eos(path, specials, eos or wrapper["eos"])
    return _open(ranks, path, str(wrapper["pattern"]), specials, name)


def _parse(raw: bytes, path: str) -> dict[bytes, int]:
    """Return the rank of each token; DataError names the first bad line."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(raw.splitlines(), 1):
        found = _LINE.fullmatch(line)
        try:
            token = base64.b64decode(found[1], validate=True) if found else b""
        except binascii.Error:
            token = b""
        if line.strip():
            if not token or token in ranks:
                raise DataError(f"{path}: line {number}: needs a token in base64, once, and a rank")
            ranks[token] = int(found[2])
    if len(set(ranks.values())) < len(ranks):
        raise DataError(f"{path}: two tokens have the same rank")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise DataError(f"{path}: byte 0x{missing[0]:02X} has no rank, so not every text has ids")
    return ranks


def _open(
    ranks: dict[bytes, int], path: str, pattern: str, specials: dict[str, int], eos: str
) -> Engine:
    import tiktoken

    taken = set(ranks.values()) & set(specials.values())
    if taken or len(set(specials.values())) < len(specials):
        raise DataError(f"{path}: special symbols with ids that others have: {sorted(taken)[:5]}")
    by_id = {rank: token for token, rank in ranks.items()}
    pieces = engine.table(path, by_id | dict.fromkeys(specials.values(), b""))
    with engine.native_errors(f"{path}: not a usable pattern or vocabulary"):
        encoding = tiktoken.Encoding(
            "jaxgpt", pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials
        )

    def encode_some(units: list[str]) -> list[np.ndarray]:
        with engine.native_errors(f"{path}: the pattern fails on a text", detail=False):
            return [encoding.encode_to_numpy(unit, disallowed_special=()) for unit in units]

    units, skip_space = words.choose_sections(by_id.values(), encode_some)
    text = "".join(f"{base64.b64encode(by_id[i]).decode()} {i}\n" for i in sorted(by_id))
    ordered = dict(sorted(specials.items(), key=lambda item: item[1]))
    wrapper = {"format": FORMAT, "version": 1, "engine": "tiktoken", "eos": eos}
    wrapper |= {"pattern": pattern, "specials": ordered}
    return Engine(
        name="tiktoken",
        raw=json.dumps(wrapper | {"model": text}).encode(),
        identity=[json.dumps(wrapper).encode(), text.encode()],
        eos_id=specials[eos],
        pad_id=engine.choose_pad(specials, specials[eos]),
        specials=ordered,
        pieces=pieces,
        is_byte=np.array([len(piece) == 1 and piece >= b"\x80" for piece in pieces], bool),
        encode=lambda units, threads: engine.in_threads(encode_some, units, threads),
        units=units,
        words=None,
        skip_space=skip_space,
    )
