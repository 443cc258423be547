"""Tokenizers of Hugging Face folders in and out: nothing is run, and no id may change.

In: the tokenizer becomes the run's own self-contained `tokenizer.model`, and its small files are
kept in RUN/hf/ as they are. Out: those files again, byte for byte; or, for a tokenizer made here,
a tokenizer.json that gives the same ids. Chat templates are only carried, never rendered.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxgpt.durable import storage_errors, write_atomic
from jaxgpt.errors import DataError
from jaxgpt.interop import tokenizer_json
from jaxgpt.interop.tokenizer_folder import SMALL, dump, open_directory, read_small
from jaxgpt.run_folder import KEPT
from jaxgpt.tokenization import tokenizer
from jaxgpt.tokenization.tokenizer import MAX_MODEL_BYTES, Tokenizer
from jaxgpt.tokenization.tokenizer_check import NASTY

# What is carried, and how large each may be.
FILES = {
    "config.json": SMALL,
    "generation_config.json": SMALL,
    "tokenizer.json": MAX_MODEL_BYTES,
    "tokenizer.model": MAX_MODEL_BYTES,
    "tokenizer_config.json": SMALL,
    "special_tokens_map.json": SMALL,
    "added_tokens.json": SMALL,
    "vocab.json": SMALL,
    "merges.txt": SMALL,
    "chat_template.jinja": SMALL,
}
_CONFIG = "tokenizer_config.json"
_TIES = (
    "a unigram tokenizer: where two ways to cut a text are equally likely, as in long runs of one "
    "character, transformers may take the other one (the text stays the same)"
)


class CarriedOut(NamedTuple):
    """The names of the files written, and what somebody who uses them should know."""

    files: tuple[str, ...]
    notes: tuple[str, ...]
    carried: bool  # as they came in


def carry_in(directory: str | Path, run_dir: str | Path) -> Tokenizer | None:
    """Write RUN/tokenizer.model and RUN/hf/ for the tokenizer of a folder; None if it has none.

    Raises DataError for files that are too large, damaged, or cannot be used, as
    `open_directory`, and StorageError when the run folder cannot be written.
    """
    directory, run_dir = Path(directory), Path(run_dir)
    kept = {name: read_small(directory / name, limit) for name, limit in FILES.items()}
    kept = {name: data for name, data in kept.items() if data is not None}
    tok = open_directory(directory)
    with storage_errors(run_dir):
        (run_dir / KEPT).mkdir(parents=True, exist_ok=True)
    for name, data in kept.items():
        write_atomic(run_dir / KEPT / name, data)
    if tok is not None:
        write_atomic(run_dir / tokenizer.MODEL_NAMES[0], tok.raw)
    return tok


def carry_out(tok: Tokenizer, run_dir: str | Path, out: str | Path, max_length: int) -> CarriedOut:
    """Write the tokenizer files of a run into the folder `out`, and generation_config.json.

    `tok` is the tokenizer of the run, `max_length` the context of the model. Files of an imported
    tokenizer go out as they came in. DataError if they are of another tokenizer than `tok`, or if
    what was made of a tokenizer of our own gives other ids, naming the first text.
    """
    run_dir, out = Path(run_dir), Path(out)
    kept = run_dir / KEPT
    if (theirs := open_directory(kept) if kept.is_dir() else None) is not None:
        if theirs.digest != tok.digest:
            raise DataError(
                f"{kept}: holds another tokenizer (SHA-256 {theirs.digest[:12]}) than that of the "
                f"run ({tok.digest[:12]}); move the folder away to export the run's own"
            )
        names = [name for name in FILES if name != "config.json" and (kept / name).is_file()]
        for name in names:
            write_atomic(out / name, (kept / name).read_bytes())
        notes: tuple[str, ...] = ()
    else:
        made, notes = _made_files(tok, max_length)
        names = list(made)
        for name, data in made.items():
            write_atomic(out / name, data)
        if "tokenizer.json" in made:
            again = tokenizer.load(out / "tokenizer.json", tok.eos_name)
            notes += compare(tok, texts(tok), again.encode, again.decode, "tokenizer.json")
    if "generation_config.json" not in names:
        content = {"bos_token_id": tok.start_id, "pad_token_id": tok.pad_id}
        content |= {"eos_token_id": end_ids(tok)}
        write_atomic(out / "generation_config.json", dump(content))
        names.append("generation_config.json")
    return CarriedOut(tuple(names), notes, theirs is not None)


def end_ids(tok: Tokenizer) -> int | list[int]:
    """Return the ids at which generation stops, as config.json and generation_config.json do."""
    return tok.eos_id if len(tok.stop_ids) == 1 else list(tok.stop_ids)


def loadable(directory: Path) -> bool:
    """Tell whether transformers can make ids of a folder; a SentencePiece model alone says less."""
    names = ("tokenizer.json", "tokenizer_config.json", "vocab.json")
    return any((directory / name).is_file() for name in names)


def texts(tok: Tokenizer) -> list[str]:
    """Return what tokenizers are compared on: awkward texts, special symbols, mixed pieces."""
    rng = random.Random(0)
    pieces = [piece.decode("utf-8", "ignore") for piece in tok.pieces if piece]
    mixed = ["".join(rng.choices(pieces, k=rng.randrange(1, 40))) for _ in range(300)]
    marks = list(tok.specials)[:200]
    return ["", "a", *NASTY, *marks, *(f"a {name} b" for name in marks), *mixed]


def compare(
    tok: Tokenizer,
    samples: Sequence[str],
    encode: Callable[[str], Sequence[int]],
    decode: Callable[[list[int]], str],
    where: str,
) -> tuple[str, ...]:
    """Check that another reader of a tokenizer gives its ids, and the texts back; return notes.

    DataError names the first of the samples that differs. Segmentations of a Unigram model that
    are equally likely are no difference, but noted.
    """
    scores, ties = tokenizer_json.scores(tok), 0
    for text, ours in zip(samples, tok.encode_batch(samples), strict=True):
        ids, right = list(encode(text)), ours.tolist()
        if ids != right and not (scores and _is_tie(tok, scores, ids, right)):
            at = next(i for i in range(len(right) + 1) if ids[i : i + 1] != right[i : i + 1])
            raise DataError(
                f"{where}: the text {text!r} becomes other ids than in training: at {at} "
                f"{ids[at : at + 4]} instead of {right[at : at + 4]}"
            )
        ties += ids != right
        back = decode(ids)
        if back != tok.decode(right):
            raise DataError(f"{where}: the ids of {text!r} become {back!r}, another text")
    if not ties:
        return ()
    return (
        f"{where}: {ties} of {len(samples)} awkward texts were cut in another way of equal "
        "probability, with the same text",
    )


def _is_tie(tok: Tokenizer, scores: list[float], ids: list[int], right: list[int]) -> bool:
    """Tell whether two segmentations are of one text and equal up to float32 rounding."""
    if tok.decode_bytes(ids) != tok.decode_bytes(right):
        return False
    theirs, ours = (sum(scores[number] for number in found) for found in (ids, right))
    return abs(theirs - ours) <= 1e-5 * abs(ours)


def _made_files(tok: Tokenizer, max_length: int) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Return the files of a tokenizer that did not come from such a folder, and notes."""
    files, spec = {}, tokenizer_json.make(tok)
    if tok.engine == "sentencepiece":
        files["tokenizer.model"] = tokenizer_json.sentencepiece_bytes(tok)
    if spec is None:
        note = "its rules cannot be said in a tokenizer.json; only the SentencePiece model is there"
        return files, (f"{tok.path}: {note}, which transformers would read by rules of its own",)
    names = {number: name for name, number in tok.specials.items()}
    opens = tok.start_id != tok.eos_id
    if opens:
        spec |= {"post_processor": tokenizer_json.opening(names[tok.start_id], tok.start_id)}
    unknown = spec["model"].get("unk_token") or names.get(spec["model"].get("unk_id"))
    marks = {"bos_token": names[tok.start_id], "eos_token": tok.eos_name}
    marks |= {"pad_token": names[tok.pad_id]} | ({"unk_token": unknown} if unknown else {})
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **marks,
        "add_bos_token": opens,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # a special symbol spelled in a text is text
        "model_max_length": max_length,
    }
    files["tokenizer.json"] = json.dumps(spec, ensure_ascii=False).encode()
    files |= {_CONFIG: dump(settings), "special_tokens_map.json": dump(marks)}
    return files, (_TIES,) if tokenizer_json.scores(tok) else ()
