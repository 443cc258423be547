"""Weights in safetensors files: opened with every byte of their headers checked, read by mapping.

A file is 8 bytes of length, a JSON header, and data that the header's offsets tile without overlap
or hole. Nothing is allocated on the word of a header, no code is ever loaded, and pickled files are
refused. Bfloat16 arrays have the NumPy dtype of ml_dtypes.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxgpt import strict_json
from jaxgpt.durable import storage_errors, sync_directory
from jaxgpt.errors import DataError, one_line

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER = 1 << 24  # bytes: 100,000 tensors; a hostile one of this size costs about 0.5 GB
MAX_NAME = 512  # characters
MAX_INDEX = 1 << 24
MAX_CONFIG = 1 << 20
SHARD_BYTES = 5 << 30
# Of what the format can hold, what weights may be; the rest is told apart to check sizes.
FLOATS = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I16": 2, "U16": 2}
SIZES |= {"F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8}
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf")


class Tensor(NamedTuple):
    """Where a tensor lies and what it is; `dtype` as the format names it."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file


@dataclass(frozen=True)
class Weights:
    """The tensors of a directory by name."""

    directory: Path
    tensors: dict[str, Tensor]

    def read(self, name: str) -> np.ndarray:
        """Return a tensor as a read-only array that is mapped, not copied, until it is let go.

        Raises DataError for one that is not of float32, float16 or bfloat16.
        """
        path, dtype, shape, offset = self.tensors[name]
        if dtype not in FLOATS:
            raise DataError(f"{path}: {name} is of {dtype}; weights must be {', '.join(FLOATS)}")
        if math.prod(shape) == 0:
            return np.zeros(shape, FLOATS[dtype])
        with storage_errors(path):
            flat = np.memmap(path, FLOATS[dtype], "r", offset, (math.prod(shape),))
        return flat.view(np.ndarray).reshape(shape)


def read_json(path: Path, limit: int) -> dict[str, Any]:
    """Return the JSON object in a file of at most `limit` bytes; raises DataError."""
    try:
        with open(path, "rb") as file:
            raw = file.read(limit + 1)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    if len(raw) > limit:
        raise DataError(f"{path}: is larger than {limit} bytes")
    return parse_json(raw, path)


def parse_json(raw: bytes, path: Path) -> dict[str, Any]:
    """Return the JSON object in `raw`; a key that comes twice, NaN and the like are refused."""
    try:
        value = strict_json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: is not proper JSON: {one_line(error)}") from None
    if type(value) is not dict:
        raise DataError(f"{path}: holds a {type(value).__name__}, not a JSON object")
    return value


def open_weights(directory: str | Path) -> Weights:
    """Return the tensors of all safetensors files of a model, with every header checked.

    The files are `model.safetensors`, those that an index names, or, without either, all there are.
    Raises DataError, one line, naming the file and what is wrong in it.
    """
    directory = Path(directory)
    named = None
    if (directory / SINGLE).is_file():
        files = [SINGLE]
    elif (directory / INDEX).is_file():
        named = _read_index(directory / INDEX)
        files = sorted(set(named.values()))
    else:
        files = sorted(path.name for path in directory.glob("*.safetensors"))
        if not files:
            raise DataError(_nothing(directory))
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in read_header(directory / file).items():
            if name in tensors:
                raise DataError(f"{directory}: {name} is in {tensors[name].path.name} and {file}")
            if named is not None and named.get(name) != file:
                raise DataError(
                    f"{directory / INDEX}: {name} is in {file}, by the index in {named.get(name)}"
                )
            tensors[name] = tensor
    if lost := [name for name in named or () if name not in tensors]:
        name = lost[0]
        raise DataError(f"{directory / INDEX}: {name[:80]!r} is not in {named[name]}")
    return Weights(directory, tensors)


def _read_index(path: Path) -> dict[str, str]:
    table = read_json(path, MAX_INDEX).get("weight_map")
    if type(table) is not dict or not table:
        raise DataError(f"{path}: has no weight_map of tensors and their files")
    for name, file in table.items():
        plain = type(file) is str and file.endswith(".safetensors") and file == Path(file).name
        if not plain or "\\" in file or "\0" in file:
            raise DataError(
                f"{path}: {name[:80]!r} is in {str(file)[:80]!r}: must be the name of a file "
                "beside it"
            )
    return table


def _nothing(directory: Path) -> str:
    if not directory.is_dir():
        return f"{directory}: is not a folder; name one that holds config.json and *.safetensors"
    other = sorted(path.name for pattern in PICKLED for path in directory.glob(pattern))
    if not other:
        return f"{directory}: holds no *.safetensors"
    return (
        f"{directory}: holds {other[0]}, but no *.safetensors; files that can run code are not "
        "read: convert it with model.save_pretrained(DIR, safe_serialization=True)"
    )


def read_header(path: Path) -> dict[str, Tensor]:
    """Return the tensors of one file by name, every length, shape and offset checked."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise DataError(
                    f"{path}: is cut off: {size} bytes, its header alone should take {length}"
                )
            if length > MAX_HEADER:
                raise DataError(
                    f"{path}: a header of {length} bytes; at most {MAX_HEADER} are read"
                )
            header = parse_json(file.read(length), path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    header.pop("__metadata__", None)
    begin = 8 + length
    spans = []
    tensors = {}
    for name, entry in header.items():
        dtype, shape, (first, last) = _entry(path, name, entry)
        if last - first != math.prod(shape) * SIZES[dtype]:
            raise DataError(
                f"{path}: {name} takes {last - first} bytes, but {dtype}{list(shape)} "
                f"{math.prod(shape) * SIZES[dtype]}"
            )
        spans.append((first, last, name))
        tensors[name] = Tensor(path, dtype, shape, begin + first)
    end = 0
    for first, last, name in sorted(spans):
        if first != end:
            what = "overlaps the one before it" if first < end else "comes after a hole"
            raise DataError(f"{path}: {name} {what}: it begins at byte {first}, not {end}")
        end = last
    if end != size - begin:
        raise DataError(f"{path}: holds {size - begin} bytes of data, its header names {end}")
    return tensors


def _entry(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    keys = {"dtype", "shape", "data_offsets"}
    if len(name) > MAX_NAME or not name.isprintable():
        raise DataError(f"{path}: a tensor is called {name[:80]!r}, {len(name)} characters")
    if type(entry) is not dict or set(entry) != keys:
        raise DataError(f"{path}: {name} is not described by {', '.join(sorted(keys))}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(dtype) is not str or dtype not in SIZES:
        raise DataError(
            f"{path}: {name} has dtype {str(dtype)[:40]!r}; weights must be {', '.join(FLOATS)}"
        )
    for what, numbers in (("shape", shape), ("data_offsets", offsets)):
        proper = type(numbers) is list and len(numbers) <= 32
        if not proper or not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers):
            raise DataError(f"{path}: {name}: {what} is not a list of sizes")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise DataError(f"{path}: {name}: data_offsets = {offsets[:3]} is no range")
    return dtype, tuple(shape), (offsets[0], offsets[1])


# Writing.


def write_weights(
    directory: str | Path,
    arrays: Iterable[tuple[str, np.ndarray]],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write tensors as they come, in files of about `shard_bytes`, and an index if there are many.

    One tensor is held at a time. The files get their names when all are on disk. Raises
    StorageError, and ValueError for a name that comes twice or a dtype that is none of `FLOATS`.
    """
    directory = Path(directory)
    shards: list[dict[str, Any]] = []  # headers
    where: dict[str, int] = {}
    total = 0
    words = {dtype: word for word, dtype in FLOATS.items()}
    with storage_errors(directory):
        data = None
        for name, array in arrays:
            if name in where or array.dtype not in words:
                raise ValueError(f"{name}: {array.dtype}, or written twice")
            if data is None or data.tell() and data.tell() + array.nbytes > shard_bytes:
                if data is not None:
                    _finish(directory, data, shards[-1], len(shards))
                shards.append({"__metadata__": {"format": "pt"}})
                data = open(directory / f"{SINGLE}.data", "w+b")
            first = data.tell()
            data.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            shards[-1][name] = {
                "dtype": words[array.dtype],
                "shape": list(array.shape),
                "data_offsets": [first, data.tell()],
            }
            where[name] = len(shards)
            total += array.nbytes
        if data is None:
            raise ValueError("no tensors to write")
        _finish(directory, data, shards[-1], len(shards))
        if len(shards) == 1:
            _partial(directory, 1).rename(directory / SINGLE)
        else:
            _name_shards(directory, len(shards), where, total)
        sync_directory(directory)


def _partial(directory: Path, number: int) -> Path:
    return directory / f"model-{number:05}.partial"


def _finish(directory: Path, data: Any, header: dict[str, Any], number: int) -> None:
    """Put the header, whose length is known only now, before the data of a shard."""
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with data, open(_partial(directory, number), "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        data.seek(0)
        shutil.copyfileobj(data, file, 1 << 22)
        file.flush()
        os.fsync(file.fileno())
    os.unlink(data.name)


def _name_shards(directory: Path, count: int, where: dict[str, int], total: int) -> None:
    names = {n: f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)}
    for number, name in names.items():
        _partial(directory, number).rename(directory / name)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: names[number] for name, number in where.items()},
    }
    with open(directory / INDEX, "w") as file:
        json.dump(index, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
