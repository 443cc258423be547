"""TOML values as Python field types: reading and writing, converting, pointing at lines.

Knows nothing of the schema; every message says what was found and what would be right.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from jaxgpt.errors import ConfigError

MAX_BYTES = 1 << 20  # no hand-written configuration comes near; bounds what a hostile file costs


def type_name(hint: Any) -> str:
    """Return how `--help` and messages call a type: `integer`, `"a" | "b"`, `list of string`, …"""
    origin = typing.get_origin(hint)
    if origin is Literal:
        return " | ".join(f'"{choice}"' for choice in typing.get_args(hint))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(type_name(part) for part in typing.get_args(hint))
    if origin is tuple:
        return f"list of {type_name(typing.get_args(hint)[0])}"
    if origin is dict:
        return f"table of {type_name(typing.get_args(hint)[1])}"
    return {int: "integer", float: "number", bool: "true or false", str: "string"}[hint]


def convert(value: Any, hint: Any) -> Any:
    """Return a TOML value as the type `hint`; raises ValueError that says what would be right."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    wrong = ValueError(f"{value!r} is not {type_name(hint)}")
    if origin is Literal:
        if value in args and isinstance(value, str):
            return value
        raise ValueError(f"{value!r} is not one of {type_name(hint)}{nearest(str(value), args)}")
    if origin in (types.UnionType, typing.Union):
        parts = [p for p in args if isinstance(value, dict) == (typing.get_origin(p) is dict)]
        if len(parts) == 1:
            return convert(value, parts[0])
        for part in parts:
            with contextlib.suppress(ValueError):
                return convert(value, part)
        raise wrong
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise wrong
        return tuple(convert(item, args[0]) for item in value)
    if origin is dict:
        if not isinstance(value, dict):
            raise wrong
        return {str(key): convert(item, args[1]) for key, item in value.items()}
    if hint is bool:
        if isinstance(value, bool):
            return value
        raise ValueError(f"{value!r} is not true or false (TOML spells them in lower case)")
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise wrong
    if hint is str and isinstance(value, str):
        return value
    if hint is float and isinstance(value, int | float):
        if not math.isfinite(value):
            raise ValueError(f"{value!r} is not a finite number")
        return float(value)
    if hint is int and isinstance(value, int | float) and math.isfinite(value):
        if int(value) == value:  # 1e9 is a handy way to write a token budget
            return int(value)
    raise wrong


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return `; did you mean X?` for the closest of `choices`, or nothing."""
    match = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f"; did you mean {match[0]}?" if match else ""


# What users of other systems type first, for suggestions only.
SYNONYMS = {
    "learning_rate": "optim.lr",
    "max_lr": "optim.lr",
    "min_lr": "optim.end_lr_ratio",
    "warmup": "optim.warmup_steps",
    "batch_size": "train.global_batch",
    "steps": "train.num_steps",
    "max_steps": "train.num_steps",
    "dtype": "train.compute_dtype",
    "grad_clip": "optim.clip_norm",
    "n_layer": "model.num_layers",
    "n_head": "model.num_heads",
    "n_embd": "model.embed_dim",
    "hidden_dim": "model.embed_dim",
    "block_size": "model.seq_len",
    "context_length": "model.seq_len",
    "out_dir": "run.dir",
}


def suggestion(name: str, valid: list[str]) -> str:
    """Return `; did you mean section.key?` for an unknown (section.)key, or nothing.

    The same key in another section comes first, then spellings within the section, then anywhere.
    """
    name = name.replace("-", "_")
    section, _, key = name.rpartition(".")
    same_key = [full for full in valid if full.split(".")[1] == key]
    synonym = difflib.get_close_matches(key, SYNONYMS, n=1, cutoff=0.8)
    own = difflib.get_close_matches(
        key, [full.split(".")[1] for full in valid if full.startswith(f"{section}.")], n=1
    )
    anywhere = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    key_anywhere = difflib.get_close_matches(key, {full.split(".")[1] for full in valid}, n=1)
    found = (
        same_key
        or [SYNONYMS[word] for word in synonym]
        or [f"{section}.{word}" for word in own]
        or anywhere
        or [full for full in valid if full.split(".")[1] in key_anywhere]
    )
    return f"; did you mean {found[0]}?" if found else ""


def line_of(text: str, section: str, key: str) -> int:
    """Return the line of `key` in `[section]` (0: not found); messages point there."""
    current = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[([^\]]+)\]", line):
            current = header[1].strip()
            if current == f"{section}.{key}":
                return number
        elif re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[.=]", line) and current == section:
            return number
    return 0


def read_toml(path: Path) -> tuple[dict[str, Any], str]:
    """Return (parsed, text) of a TOML file; every failure is one line that names the file."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_BYTES} bytes, not a configuration")
        text = path.read_bytes().decode()
        return tomllib.loads(text), text
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{path}: {reason or type(error).__name__}") from None


def dump(tree: dict[str, dict[str, Any]], comments: dict[str, str]) -> str:
    """Return sections of plain values as TOML text, each line followed by its comment.

    JSON's strings, numbers and arrays are TOML too; only tables are written differently.
    """

    def text(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{json.dumps(k)} = {text(v)}" for k, v in value.items()) + "}"
        return json.dumps(value, ensure_ascii=False)

    lines = []
    for section, values in tree.items():
        lines.append(f"[{section}]")
        for key, value in values.items():
            # A comment cannot hold control characters, which a shell argument can.
            comment = comments.get(f"{section}.{key}", "")
            comment = f"  # {comment}" if comment else ""
            lines.append(f"{key} = {text(value)}" + re.sub(r"[\x00-\x1f\x7f]", " ", comment))
        lines.append("")
    return "\n".join(lines)
