"""Tiny tokenizers of every engine, made with the engines' own libraries."""

from __future__ import annotations

import base64
import io
import json

import sentencepiece
import tiktoken
import tokenizers
from corpora import LINES
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from jaxgpt.tokenization import tokenizer
from jaxgpt.tokenization.tiktoken_engine import CL100K, GPT2, O200K

E = "<|endoftext|>"
PATTERNS = {"gpt2": GPT2, "cl100k": CL100K, "o200k": O200K}
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentencepiece_file(path, **options):
    """Train with SentencePiece alone, by default a lossless model, and return the path."""
    model = io.BytesIO()
    options = {
        "vocab_size": 420, "model_type": "bpe", "byte_fallback": True, "minloglevel": 3,
        "normalization_rule_name": "identity", "add_dummy_prefix": False,
        "remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True,
    } | options  # fmt: skip
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=model, **options
    )
    path.write_bytes(model.getvalue())
    return path


def byte_level(path, **options):
    """Write a tokenizer.json as of GPT-2 and return the library's tokenizer."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(**({"add_prefix_space": False} | options))
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _trained(made, path, 360, [E, "<|user|>"], initial_alphabet=alphabet)


def metaspace(path):
    """Write a tokenizer.json with Metaspace and byte fallback; return the library's tokenizer."""
    made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        + [decoders.Strip(" ", 1, 0)]
    )
    return _with_bytes(_trained(made, path, 400, ["<unk>", "<s>", "</s>", *BYTES]), path)


def llama_style(path):
    """Write a tokenizer.json whose normaliser puts U+2581 before every text, as Llama 2 has."""
    spec = json.loads(metaspace(path).to_str())
    spec["pre_tokenizer"] = None
    spec["normalizer"] = json.loads(
        normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        ).__getstate__()
    )
    path.write_text(json.dumps(spec))
    return library(path)


def _trained(made, path, vocab_size, symbols, **options):
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=symbols, show_progress=False, **options
    )
    made.train_from_iterator(LINES, trainer)
    made.save(str(path))
    return library(path)


def _with_bytes(made, path):
    """Make the byte pieces ordinary ones, as they are in the files in use."""
    spec = json.loads(made.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["id"] < 3]
    path.write_text(json.dumps(spec))
    return library(path)


def library(path):
    """Return the library's tokenizer of a tokenizer.json, for which specials in a text are text."""
    made = tokenizers.Tokenizer.from_file(str(path))
    made.encode_special_tokens = True
    return made


def ranks():
    """Return the ranks of all bytes and some pieces of text."""
    found = {bytes([byte]): byte for byte in range(256)}
    pieces = [
        b" t",
        b"he",
        b" the",
        b"in",
        b"in\n",
        b" k",
        b"ing",
        b"  ",
        b"    ",
        b"\xe4\xb8",
        b"12",
    ]
    return found | {piece: 256 + i for i, piece in enumerate(pieces)}


def rank_lines(found):
    """Return a rank file."""
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in found.items())
    return "".join(lines).encode()


def rank_file(path, found=None):
    """Write a rank file and return its path."""
    path.write_bytes(rank_lines(found or ranks()))
    return path


def encoding(pattern):
    """Return the encoding that tiktoken itself makes of `ranks`."""
    return tiktoken.Encoding(
        "t", pat_str=pattern, mergeable_ranks=ranks(), special_tokens={E: len(ranks())}
    )


def every_engine(folder):
    """Return tokenizers of every engine by name, with a function that encodes as the library."""
    made = {}
    path = folder / "own.model"
    tok = tokenizer.train(LINES, path, vocab_size=330)
    made["own"] = tok, sentencepiece.SentencePieceProcessor(str(path)).encode
    for name, options in (("sp_llama", {"add_dummy_prefix": True}),
                          ("sp_nfkc", {"normalization_rule_name": "nfkc"})):  # fmt: skip
        path = sentencepiece_file(folder / f"{name}.model", **options)
        made[name] = (
            tokenizer.load(path),
            sentencepiece.SentencePieceProcessor(str(path)).encode,
        )
    for make in (byte_level, metaspace, llama_style):
        path = folder / f"{make.__name__}.json"
        made[make.__name__] = _beside_library(make(path), path)
    for name, pattern in PATTERNS.items():
        tok = tokenizer.load(rank_file(folder / name), eos=E, pattern=pattern)
        made[name] = tok, encoding(pattern).encode_ordinary
    return made


def _beside_library(made, path):
    return tokenizer.load(path), lambda text: made.encode(text, add_special_tokens=False).ids
