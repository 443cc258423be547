"""The commit record: what one saved step holds, as JSON with a version and a checksum of its own.

A record read back is data from an untrusted place. Its size, nesting, types, names and numbers are
checked before anything is done with it, and nothing in it is ever executed. Nothing here knows
folders.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from dataclasses import dataclass
from typing import Any

from jaxgpt import strict_json
from jaxgpt.errors import ConfigError, NothingRestorable

FORMAT = 1
MAX_BYTES = 1 << 26  # 64 MiB: about 300,000 leaves
MAX_ELEMENTS = 1 << 48  # of one leaf
MAX_INTEGER = 1 << 62
MAX_DEPTH = 16


class Damaged(NothingRestorable):
    """A step whose record, files or values are not what was saved; the reason is one line."""


@dataclass(frozen=True)
class Leaf:
    """One array of the state: its path, shape, dtype name and fingerprint."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    fingerprint: int


@dataclass(frozen=True)
class StoredFile:
    """One file of the step: its path relative to the step's folder, bytes and SHA-256 (hex)."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Record:
    """What one step holds; `meta` and `config` are plain JSON."""

    step: int  # optimiser updates done
    position: int  # samples consumed: the whole data state
    finite: bool  # no NaN or infinity in any leaf
    layout: str  # of the parameters: "stacked", "per-layer", or "none" without parameters
    leaves: tuple[Leaf, ...]
    files: tuple[StoredFile, ...]
    identity: dict[str, str]  # named digests that must agree on resume
    meta: dict[str, Any]
    config: dict[str, Any]
    mesh: dict[str, int]  # devices per axis, and "processes"
    versions: dict[str, str]


def encode(record: Record) -> bytes:
    """Return the record as JSON; raises ValueError or TypeError if that would not be equal."""
    body = {"format": FORMAT, **dataclasses.asdict(record)}
    raw = json.dumps({**body, "checksum": _checksum(body)}, indent=1, allow_nan=False).encode()
    try:
        same = decode(raw, "record") == record
    except Damaged as error:
        raise ValueError(str(error)) from error
    if not same:
        raise ValueError(
            "meta and config of a checkpoint must be plain JSON: no tuples, str keys only"
        )
    return raw


def decode(raw: bytes, where: str) -> Record:
    """Return the record in `raw`; raises Damaged, or ConfigError for a format newer than ours."""
    try:
        _require(len(raw) <= MAX_BYTES, f"larger than {MAX_BYTES} bytes")
        body = strict_json.loads(raw)
        _require(type(body) is dict, "not an object")
        checksum = body.pop("checksum", None)
        _require(checksum == _checksum(body), "its checksum does not match")
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{where}: the commit record cannot be read: {error}") from error
    version = body.pop("format", None)
    if type(version) is int and version > FORMAT:
        raise ConfigError(
            f"{where}: is of format {version}, this jaxgpt reads up to {FORMAT}; use a newer one"
        )
    try:
        _require(type(version) is int and version == FORMAT, f"format is {version!r}, not {FORMAT}")
        return _parse(body)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{where}: the commit record is invalid: {error}") from error


def _checksum(body: dict[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _parse(body: dict[str, Any]) -> Record:
    _fields(body, Record)
    for key in ("step", "position"):
        _natural(body[key], key, MAX_INTEGER)
    _require(type(body["finite"]) is bool, "finite is not true or false")
    _require(body["layout"] in ("stacked", "per-layer", "none"), f"layout is {body['layout']!r}")
    for key in ("identity", "versions", "meta", "config", "mesh"):
        _require(type(body[key]) is dict, f"{key} is not an object")
        _shallow(body[key], key, MAX_DEPTH)
    for key in ("identity", "versions"):
        strings = all(type(value) is str for value in body[key].values())
        _require(strings, f"{key} holds more than strings")
    for axis, devices in body["mesh"].items():
        _natural(devices, f"mesh.{axis}", 1 << 32)
    for key in ("leaves", "files"):
        _require(type(body[key]) is list, f"{key} is not a list")
    leaves = tuple(_parse_leaf(leaf) for leaf in body["leaves"])
    files = tuple(_parse_file(file) for file in body["files"])
    _require(len({leaf.path for leaf in leaves}) == len(leaves), "a leaf is listed twice")
    _require(len({file.name for file in files}) == len(files), "a file is listed twice")
    return Record(**{**body, "leaves": leaves, "files": files})


def _parse_leaf(leaf: Any) -> Leaf:
    _fields(leaf, Leaf)
    path, shape, dtype = leaf["path"], leaf["shape"], leaf["dtype"]
    _require(type(path) is str and 0 < len(path) <= 1024, "a leaf has no proper path")
    _require(type(dtype) is str and 0 < len(dtype) <= 32, f"{path}: dtype is not a name")
    _require(type(shape) is list and len(shape) <= 32, f"{path}: shape is not a list")
    for size in shape:
        _natural(size, f"{path}: a size", MAX_ELEMENTS)
    _require(math.prod(shape) <= MAX_ELEMENTS, f"{path}: more than {MAX_ELEMENTS} elements")
    _natural(leaf["fingerprint"], f"{path}: fingerprint", (1 << 32) - 1)
    return Leaf(path, tuple(shape), dtype, leaf["fingerprint"])


def _parse_file(file: Any) -> StoredFile:
    _fields(file, StoredFile)
    name, sha256 = file["name"], file["sha256"]
    _require(type(name) is str and 0 < len(name) <= 4096, "a file has no proper name")
    _require("\0" not in name and "\\" not in name, f"file name {name!r} is not allowed")
    inside = not {"", ".", ".."} & set(name.split("/"))
    _require(inside, f"file name {name!r} leaves the folder of the step")
    _natural(file["size"], f"{name}: size", MAX_INTEGER)
    proper = type(sha256) is str and re.fullmatch("[0-9a-f]{64}", sha256) is not None
    _require(proper, f"{name}: sha256 is {sha256!r}")
    return StoredFile(name, file["size"], sha256)


def _fields(table: Any, kind: type) -> None:
    expected = {field.name for field in dataclasses.fields(kind)}
    _require(type(table) is dict, f"a {kind.__name__} is not an object")
    wrong = sorted(set(table) ^ expected)
    _require(not wrong, f"a {kind.__name__} has missing or unknown fields {wrong[:8]}")


def _natural(value: Any, name: str, limit: int) -> None:
    _require(type(value) is int and 0 <= value <= limit, f"{name} is {value!r}, not in 0..{limit}")


def _shallow(value: Any, name: str, depth: int) -> None:
    _require(depth > 0, f"{name} is nested more than {MAX_DEPTH} deep")
    children = value.values() if type(value) is dict else value if type(value) is list else ()
    for child in children:
        _shallow(child, name, depth - 1)
