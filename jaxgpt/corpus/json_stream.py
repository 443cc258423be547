"""Reading one string out of a JSON object that is too long to hold.

The object comes in chunks of text and the string leaves in pieces of about a chunk; everything else
is checked for its form and forgotten, so memory is that of a few chunks. Accepts what `json.loads`
accepts, save numbers beyond MAX_DIGITS digits and nesting beyond MAX_DEPTH, and refuses a field
that occurs twice, of which `json.loads` silently keeps the last.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator

MAX_DIGITS = 1000  # in each part of a number
MAX_DEPTH = 1000

# The inside of a string as far as it is certain. An escaped high surrogate waits for what follows
# it, as the two halves of a character must be decoded together.
_INSIDE = re.compile(
    r"""(?s)(?:
        [^"\\]+ | \\[^u] | \\u(?![dD][89abAB])....
        | \\u[dD][89abAB]..(?: \\u[dD][c-fC-F].. | (?=[^\\]|\\[^u]|\\u[^dD]|\\u.[^c-fC-F]) )
    )*+""",
    re.VERBOSE,
)
_SPACE = r"[ \t\r\n]*+"
_DIGITS = f"[0-9]{{1,{MAX_DIGITS}}}+"
_NUMBER = rf"-?(?:0|(?!0){_DIGITS})(?:\.{_DIGITS})?(?:[eE][-+]?{_DIGITS})?"
_SCALAR = re.compile(f"{_NUMBER}|true|false|null|NaN|-?Infinity")
_TOKEN = re.compile(rf'{_SPACE}(?:([][{{}}:,"])|([-+.0-9A-Za-z]+))?')
_NUMBERS = re.compile(rf"(?:{_SPACE}{_NUMBER}{_SPACE},){{8,}}+")  # many at once: 20 times faster

# Kinds of tokens: brackets, colon, comma and '"' (a string begins) stand for themselves, "s" is a
# scalar (number, true, false or null), "n" several numbers, each with a comma after it.
_VALUE, _ELEMENT = '{["s', '{["sn'
_AFTER_VALUE = {"": "", "{": ",}", "[": ",]"}  # by the innermost bracket that is open
_NAMES = {"{": "an object", "[": "an array", '"': "a string"}
_SCALAR_NAMES = {"null": "null", "true": "a boolean", "false": "a boolean"}


def string_field(chunks: Iterable[str], name: str) -> Iterator[str]:
    """Yield the string that field `name` of one JSON object holds, in pieces.

    Raises ValueError with a reason when the chunks are no JSON, no object, or when the object has
    no such field, has it twice, or does not hold a string there. Some pieces may be out by then.
    """
    brackets: list[str] = []  # those that are open
    allowed, key = _VALUE, ""
    found = naming = taking = False  # naming, taking: the string at hand is a key, is what we want
    char = 0
    for kind, text, char in _tokens(chunks):
        if kind == "part":
            if taking:
                yield text
            elif naming and len(brackets) == 1:
                key = (key + text)[: len(name) + 1]  # enough to tell that a longer key differs
            continue
        if kind == "end":
            allowed = ":" if naming else _AFTER_VALUE[brackets[-1]]
            naming = taking = False
            continue
        if kind not in allowed:
            shown = "value" if kind == "s" else repr(text)  # a value is content, and may be long
            raise ValueError(f"not JSON: unexpected {shown} (char {char})")
        if not brackets and kind != "{":
            raise ValueError(f"{_describe(kind, text)}, not an object with {name!r}")
        if brackets == ["{"] and allowed == _VALUE and key == name:
            if found:
                raise ValueError(f"field {name!r} occurs twice")
            if kind != '"':
                raise ValueError(f"field {name!r} holds {_describe(kind, text)}, not a string")
            found = taking = True
        if kind == '"':
            naming = "s" not in allowed
            key = "" if naming and len(brackets) == 1 else key
        elif kind in "{[":
            brackets.append(kind)
            if len(brackets) > MAX_DEPTH:
                raise ValueError(f"not JSON: nested more than {MAX_DEPTH} deep (char {char})")
            allowed = '"}' if kind == "{" else _ELEMENT + "]"
        elif kind == ":":
            allowed = _VALUE
        elif kind in ",n":
            allowed = '"' if brackets[-1] == "{" else _ELEMENT
        else:  # a scalar, or a bracket closes
            if kind != "s":
                brackets.pop()
            allowed = _AFTER_VALUE[brackets[-1] if brackets else ""]
    if allowed:
        raise ValueError(f"not JSON: it ends too early (char {char})")
    if not found:
        raise ValueError(f"no field {name!r}")


def _describe(kind: str, text: str) -> str:
    return _NAMES.get(kind) or _SCALAR_NAMES.get(text, "a number")


def _tokens(chunks: Iterable[str]) -> Iterator[tuple[str, str, int]]:
    """Yield (kind, text, position in characters) of each token.

    A string is a '"', any number of "part", whose texts are decoded, and an "end".
    """
    rest, base, inside = "", 0, False
    for chunk in itertools.chain(chunks, (None,)):
        buffer, at = rest + (chunk or ""), 0
        while True:
            if inside:
                stop = _INSIDE.match(buffer, at).end()
                if stop > at:
                    yield "part", _decoded(buffer[at:stop], base + at), base + at
                at = stop
                if not buffer.startswith('"', at):
                    break
                at, inside = at + 1, False
                yield "end", "", base + at
            elif numbers := _NUMBERS.match(buffer, at):
                yield "n", ",", base + at
                at = numbers.end()
            else:
                token = _TOKEN.match(buffer, at)
                mark, scalar = token.groups()
                if scalar:
                    at = token.start(2)
                    if token.end() == len(buffer) < at + 4 * MAX_DIGITS and chunk is not None:
                        break  # it may go on
                    if not _SCALAR.fullmatch(scalar):
                        raise ValueError(f"not JSON: not a value (char {base + at})")
                    yield "s", scalar, base + at
                    at = token.end()
                elif mark:
                    at, inside = token.end(), mark == '"'
                    yield mark, mark, base + at - 1
                else:
                    at = token.end()
                    if at < len(buffer):
                        raise ValueError(f"not JSON: unexpected character (char {base + at})")
                    break
        rest, base = buffer[at:], base + at
    if inside:
        raise ValueError(f"not JSON: a string does not end (char {base})")


def _decoded(part: str, position: int) -> str:
    """Return the inside of a string without its escapes."""
    try:
        return json.loads(f'"{part}"')
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} (char {position + error.pos - 1})") from None
