"""Which tokenizer a Hugging Face folder holds, where its texts begin and end; nothing is run.

Of several files, tokenizer.json counts before tokenizer.model, and that before vocab.json with
merges.txt. Every file is bounded in size, and refused in one line if it is not as it should be.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxgpt.errors import DataError
from jaxgpt.interop import tokenizer_json
from jaxgpt.tokenization import tokenizer
from jaxgpt.tokenization.frame import with_frame
from jaxgpt.tokenization.tokenizer import MAX_MODEL_BYTES, Tokenizer

SMALL = 16 << 20  # bytes; the largest tokenizer_config.json in use has 1.2 MB
# Classes whose vocab.json and merges.txt are cut into words as GPT-2 cuts them.
_GPT2_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast")
# Classes that put the begin-of-text symbol in front unless told otherwise.
_OPENING_CLASSES = ("LlamaTokenizer", "GemmaTokenizer", "CodeLlamaTokenizer")
_CONFIG = "tokenizer_config.json"


def open_directory(directory: Path) -> Tokenizer | None:
    """Return the tokenizer of a Hugging Face folder; None if there are no files of one.

    The end-of-text symbol is the first `eos_token_id` of generation_config.json or config.json,
    else that of tokenizer_config.json; generation also stops at the others. The text begins with
    the begin-of-text symbol if the folder's tokenizer puts one there. Raises DataError for files
    that are too large, damaged, or cannot be used, and for more ids than the model has.
    """
    ends = _end_ids(directory)
    spec = _json(directory / "tokenizer.json", MAX_MODEL_BYTES)
    if spec:
        tok = tokenizer.load(directory / "tokenizer.json", _name_of(spec, ends))
    elif (directory / "tokenizer.model").is_file():
        tok = _open_sentencepiece(directory / "tokenizer.model", ends)
    elif (directory / "vocab.json").is_file() and (directory / "merges.txt").is_file():
        spec = _gpt2_spec(directory)
        tok = _load_spec(spec, directory, _name_of(spec, ends) or _named(directory, "eos_token"))
    else:
        return None
    model_ids = _model_ids(directory)
    if model_ids and tok.vocab_size > model_ids:
        raise DataError(
            f"{directory}: the tokenizer has {tok.vocab_size} ids, the model by config.json only "
            f"{model_ids}; these files do not belong together"
        )
    start = _start_id(directory, spec, tok)
    return with_frame(tok, tok.eos_id if start is None else start, ends)


def read_small(path: Path, limit: int) -> bytes | None:
    """Return a file of at most `limit` bytes, None if there is none; raises DataError."""
    try:
        with open(path, "rb") as file:
            data = file.read(limit + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > limit:
        raise DataError(f"{path}: over {limit >> 20} MiB, so no file of its name")
    return data


def _json(path: Path, limit: int = SMALL) -> dict[str, Any]:
    """Return the object in a file, {} if there is no file; raises DataError for anything else."""
    data = read_small(path, limit)
    try:
        found = {} if data is None else json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise DataError(f"{path}: holds a {type(found).__name__}, not an object")
    return found


def _end_ids(directory: Path) -> tuple[int, ...]:
    """Return the ids at which generation stops, the end of text first; () if not said."""
    for name in ("generation_config.json", "config.json"):
        config = _json(directory / name)
        config = config if "eos_token_id" in config else config.get("text_config") or {}
        found = config.get("eos_token_id")
        ids = found if isinstance(found, list) else [] if found is None else [found]
        if not all(type(number) is int for number in ids):
            raise DataError(f"{directory / name}: eos_token_id = {found!r}: not an id or ids")
        if ids:
            return tuple(ids)
    return ()


def _model_ids(directory: Path) -> int:
    """Return the rows of the model's embedding by config.json; 0: not said."""
    config = _json(directory / "config.json")
    config = config if "vocab_size" in config else config.get("text_config") or {}
    size = config.get("vocab_size")
    return size if type(size) is int else 0


def _named(directory: Path, key: str) -> str | None:
    """Return a symbol such as `eos_token` by tokenizer_config.json or special_tokens_map.json."""
    for name in (_CONFIG, "special_tokens_map.json"):
        found = _json(directory / name).get(key)
        found = found.get("content") if isinstance(found, dict) else found
        if isinstance(found, str):
            return found
    return None


def _name_of(spec: dict[str, Any], ends: Sequence[int]) -> str | None:
    """Return the name of the end-of-text id in a tokenizer.json, None if it is not said."""
    added = spec.get("added_tokens")
    if not ends or not isinstance(added, list):
        return None
    tokens = [token for token in added if isinstance(token, dict) and token.get("id") == ends[0]]
    return str(tokens[0].get("content")) if tokens else None


def _open_sentencepiece(path: Path, ends: Sequence[int]) -> Tokenizer:
    eos = _named(path.parent, "eos_token")
    tok = tokenizer.load(path, eos) if eos else tokenizer.load(path)
    names = {number: name for name, number in tok.specials.items()}
    if not ends or ends[0] == tok.eos_id:
        return tok
    if ends[0] not in names:
        raise DataError(f"{path}: eos_token_id = {ends[0]} is no special symbol of this model")
    return tokenizer.load(path, names[ends[0]])


def _gpt2_spec(directory: Path) -> dict[str, Any]:
    """Return the tokenizer.json of vocab.json and merges.txt; DataError if not as GPT-2's."""
    settings, vocab = _json(directory / _CONFIG), _json(directory / "vocab.json")
    kind = settings.get("tokenizer_class")
    if kind not in (None, *_GPT2_CLASSES):
        raise DataError(
            f"{directory}: how {kind} cuts texts is not in vocab.json; make a tokenizer.json with "
            "transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    vocab |= _json(directory / "added_tokens.json")
    if not vocab or not all(type(number) is int for number in vocab.values()):
        raise DataError(f"{directory}/vocab.json: must map every piece to an id")
    lines = (
        (read_small(directory / "merges.txt", SMALL) or b"").decode("utf-8", "replace").split("\n")
    )
    pairs = [line.rstrip("\r").split(" ") for line in lines if line and line[:9] != "#version:"]
    wrong = [pair for pair in pairs if len(pair) != 2]
    if wrong:
        raise DataError(f"{directory}/merges.txt: {' '.join(wrong[0])!r}: needs two pieces a line")
    listed = settings.get("added_tokens_decoder")
    marks = {_named(directory, f"{kind}_token") for kind in ("eos", "bos", "unk", "pad")}
    marks |= set(_json(directory / "added_tokens.json"))
    marks |= {str(t.get("content")) for t in listed.values()} if isinstance(listed, dict) else set()
    marks |= {"<|endoftext|>"} if not _named(directory, "eos_token") else set()
    added = [
        tokenizer_json.added_token(vocab[name], name)
        for name in sorted(marks - {None}, key=lambda name: vocab.get(name, 0))
        if name in vocab
    ]
    prefix = settings.get("add_prefix_space") is True
    return tokenizer_json.byte_level(vocab, pairs, added, None, prefix=prefix)


def _load_spec(spec: dict[str, Any], directory: Path, eos: str | None) -> Tokenizer:
    """Open the content of a tokenizer.json that is in no file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        path.write_bytes(dump(spec))
        tok = tokenizer.load(path, eos)
    return replace(tok, path=str(directory / "vocab.json"))


def _start_id(directory: Path, spec: dict[str, Any], tok: Tokenizer) -> int | None:
    """Return the id that the folder's tokenizer puts before each text, None if it puts none there.

    The post-processor of its tokenizer.json decides, as in transformers 5; without one
    `add_bos_token` of its settings, which version 4 asks; without either its class. DataError if
    several are put there, or it is not known which.
    """
    settings = _json(directory / _CONFIG)
    adds = settings.get("add_bos_token")
    try:
        template = _template(spec)
    except (LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{directory}/tokenizer.json: a damaged post_processor: {error}") from None
    if template:
        if len(template) > 1:
            raise DataError(f"{directory}: puts ids {template} before each text; one at most")
        return template[0]
    if adds is None and not spec:
        adds = str(settings.get("tokenizer_class")).removesuffix("Fast") in _OPENING_CLASSES
    if not adds:
        return None
    name = _named(directory, "bos_token")
    if name is None and "<s>" in tok.specials:
        name = "<s>"
    if name not in tok.specials:
        raise DataError(
            f"{directory}: texts begin with {name!r}, no special symbol of its tokenizer"
        )
    return tok.specials[name]


def _template(spec: dict[str, Any]) -> list[int]:
    """Return the ids that the post-processor of a tokenizer.json puts before a text."""
    part = spec.get("post_processor") or {}
    ids: list[int] = []
    for step in part.get("processors") or [part]:
        for piece in step["single"] if step.get("type") == "TemplateProcessing" else ():
            if "SpecialToken" not in piece:
                break
            ids += step["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
    return ids


def dump(content: dict[str, Any]) -> bytes:
    """Return an object as the text of a file."""
    return json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"
