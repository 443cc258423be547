"""Write the golden files of test_tokenizer_golden: needs only the tokenizer libraries.

    PYTHONPATH=tests .venv/bin/python tests/golden/make_tokenizers.py

`tokenizers/` holds a tiny tokenizer of each engine. `tokenizers.json` holds for each the ids that
its own library gives to TEXTS, and its digest, which must never change: stores name it.
"""

from __future__ import annotations

import json
from pathlib import Path

import sentencepiece
from corpora import LINES
from foreign_models import E, byte_level, encoding, metaspace, rank_file, sentencepiece_file

from jaxgpt.tokenization import tokenizer
from jaxgpt.tokenization.tiktoken_engine import CL100K

HERE = Path(__file__).parent
TEXTS = [*LINES[:8], "caf\u00e9 \u4e2d\u6587 \U0001f680", " a  b\t\r\n\n", "</s><|endoftext|>", ""]


def main() -> None:
    folder = HERE / "tokenizers"
    folder.mkdir(exist_ok=True)
    tokenizer.train(LINES, folder / "own.model", vocab_size=330)
    sentencepiece_file(folder / "llama.model", vocab_size=330, add_dummy_prefix=True)
    libraries = {
        name: sentencepiece.SentencePieceProcessor(str(folder / name)).encode
        for name in ("own.model", "llama.model")
    }
    for name, make in (("byte_level.json", byte_level), ("metaspace.json", metaspace)):
        made = make(folder / name)
        libraries[name] = lambda text, made=made: made.encode(text, add_special_tokens=False).ids
    rank_file(folder / "ranks.tiktoken")
    tokenizer.import_model(
        folder / "ranks.tiktoken", folder / "cl100k.model", eos=E, pattern=CL100K
    )
    (folder / "ranks.tiktoken").unlink()
    libraries["cl100k.model"] = encoding(CL100K).encode_ordinary
    expected = {
        name: {
            "digest": tokenizer.load(folder / name).digest,
            "ids": [list(encode(text)) for text in TEXTS],
        }
        for name, encode in libraries.items()
    }
    content = {"texts": TEXTS, "expected": expected}
    (HERE / "tokenizers.json").write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()
