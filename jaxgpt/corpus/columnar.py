"""Reading documents from tables: parquet, Arrow IPC files and streams, saved datasets.

Rows are read in small batches of one column: memory is that of a page (parquet) or of a record
batch (Arrow), and a huge value leaves in pieces without a copy of the whole. A saved Hugging Face
dataset is a folder with state.json, which names its Arrow files in order; the `datasets` library is
not needed to read it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from jaxgpt.corpus import files
from jaxgpt.corpus.files import RawFile, base_name_kind, is_compressed
from jaxgpt.corpus.formats import PIECE_BYTES, BadRecords, Piece, decode
from jaxgpt.errors import DataError, one_line, show_path

BATCH_BYTES = 8 << 20  # of text are decoded at a time where rows are of equal size
BATCH_ROWS = 256
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def saved_dataset(folder: str) -> list[str] | None:
    """Return the Arrow files of a saved Hugging Face dataset in row order; None for anything else.

    Raises DataError for a folder of several splits, one with an indices mapping (which would change
    the rows), or one whose state.json is damaged.
    """
    folder = (folder if files.is_remote(folder) else os.path.expanduser(folder)).rstrip("/")
    name = show_path(folder)
    if not files.exists(f"{folder}/state.json"):
        if not files.exists(f"{folder}/dataset_dict.json"):
            return None
        splits = _read_json(f"{folder}/dataset_dict.json").get("splits") or ["train"]
        if len(splits) == 1:
            return saved_dataset(f"{folder}/{splits[0]}")
        raise DataError(
            f"{name}: a saved dataset of several splits ({', '.join(splits)}); name one, such as "
            f"{name}/{splits[0]}"
        )
    if not files.exists(f"{folder}/dataset_info.json"):
        return None
    state = _read_json(f"{folder}/state.json")
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise DataError(
            f"{name}: rows are selected by an indices mapping; load it with `datasets` and save "
            "the result of flatten_indices()"
        )
    try:
        found = [entry["filename"] for entry in state["_data_files"]]
        if not all(file == os.path.basename(file) != "" for file in found):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise DataError(f"{name}/state.json: names no data files in this folder") from None
    return [f"{folder}/{file}" for file in found]


def group_sizes(path: str, text_field: str) -> list[int]:
    """Return the bytes of text in each part that can be read by itself; none: not divisible.

    Parts are the row groups of a parquet file or the record batches of an Arrow file (its bytes
    are taken to be evenly spread). Raises DataError for another format or a column without text.
    """
    if is_compressed(path):
        raise DataError(f"{show_path(path)}: a compressed table; decompress the file")
    with files.open_binary(path) as raw:
        if base_name_kind(path) == "parquet":
            file = _open_parquet(raw, path)
            column = _column(file.schema_arrow, text_field, path)
            metadata = file.metadata
            leaf = _leaf(metadata, column)
            groups = (metadata.row_group(i) for i in range(metadata.num_row_groups))
            return [group.column(leaf).total_uncompressed_size for group in groups]
        reader, is_stream = _open_arrow(raw, path, text_field)
        if is_stream:
            return []
        count = reader.num_record_batches
        return [raw.seek(0, os.SEEK_END) // count] * count if count else []


def parquet_documents(
    path: str, start: int, stop: int | None, text_field: str, bad: BadRecords
) -> Iterator[Piece]:
    """Yield column `text_field` of row groups [start, stop); origins are file:row.

    Nulls and values that are no UTF-8 are refused, mended or skipped as `bad` says. Raises
    DataError for a damaged file.
    """
    with files.open_binary(path) as raw:
        file = _open_parquet(raw, path)
        column = _column(file.schema_arrow, text_field, path)
        metadata = file.metadata
        leaf = _leaf(metadata, column)
        row = sum(metadata.row_group(group).num_rows for group in range(start))
        stop = metadata.num_row_groups if stop is None else stop
        for group in range(start, stop):
            size = metadata.row_group(group).column(leaf).total_uncompressed_size
            rows = BATCH_BYTES * metadata.row_group(group).num_rows // max(1, size)
            batches = file.iter_batches(
                max(1, min(rows, BATCH_ROWS)), [group], [column], use_threads=False
            )
            for batch in _checked(batches, path, f"row group {group}"):
                places = (str(row + i) for i in range(len(batch)))
                yield from _values(batch.column(0), path, places, text_field, bad)
                row += len(batch)


def arrow_documents(
    path: str, start: int, stop: int | None, text_field: str, bad: BadRecords
) -> Iterator[Piece]:
    """Yield column `text_field` of record batches [start, stop), or all of a stream.

    Origins are file:row for a stream and file:batch.row for a file, which is read in any order.
    Nulls and values that are no UTF-8 are refused, mended or skipped as `bad` says. Raises
    DataError for a damaged or truncated file.
    """
    with files.open_binary(path) as raw:
        reader, is_stream = _open_arrow(raw, path, text_field)
        if is_stream:
            row = 0
            for batch in _checked(reader, path, "its stream"):
                places = (str(row + i) for i in range(len(batch)))
                yield from _values(batch.column(0), path, places, text_field, bad)
                row += len(batch)
            _require_end(raw, path)
            return
        for number in range(start, reader.num_record_batches if stop is None else stop):
            read = (reader.get_batch(i) for i in (number,))
            for batch in _checked(read, path, f"record batch {number}"):
                places = (f"{number}.{i}" for i in range(len(batch)))
                yield from _values(batch.column(0), path, places, text_field, bad)


def value_pieces(value: Any, where: str, origin: str, bad: BadRecords) -> Iterator[Piece]:
    """Yield the pieces of the document that a value holds in UTF-8 (bytes, or a buffer of them).

    What is no UTF-8 is refused, mended or, with a piece of no text if others are out, skipped.
    """
    data, start, mended = memoryview(value), 0, False
    while True:
        stop = _boundary(data, start + PIECE_BYTES)
        piece, before = bytes(data[start:stop]), bad.replaced
        if mended:  # and counted: it is the same document
            text = piece.decode("utf-8", "replace")
        else:
            text = decode(piece, f"{where}, from byte {start}" if start else where, bad)
        if text is None:
            if start:
                yield Piece(None, origin)
            return
        yield Piece(text, origin, stop == len(data))
        start, mended = stop, mended or bad.replaced > before
        if start == len(data):
            return


def _boundary(data: memoryview, stop: int) -> int:
    """Return the last place up to `stop` that does not lie inside a character."""
    if stop >= len(data):
        return len(data)
    for at in range(stop, stop - 4, -1):
        if data[at] & 0xC0 != 0x80:
            return at
    return stop  # four continuation bytes: no UTF-8, and no sequence reaches across


def _values(
    array: Any, path: str, places: Iterator[str], text_field: str, bad: BadRecords
) -> Iterator[Piece]:
    import pyarrow

    name = show_path(path)
    for scalar, place in zip(array, places, strict=True):
        if isinstance(scalar, pyarrow.DictionaryScalar):
            scalar = scalar.value
        if scalar.is_valid:
            where = f"{name}: row {place}"
            yield from value_pieces(scalar.as_buffer(), where, f"{name}:{place}", bad)
        else:
            bad.skip(f"{name}: row {place}: column {text_field!r} is null")


def _checked(batches: Iterator[Any], path: str, place: str) -> Iterator[Any]:
    """Pass record batches through; DataError for damage."""
    import pyarrow

    try:
        yield from batches
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{show_path(path)}: damaged in {place}: {one_line(error)}") from error


def _open_parquet(raw: RawFile, path: str) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        # Without a buffer of its own, and with pre_buffer, it reads whole columns of a row group.
        return pyarrow.parquet.ParquetFile(
            pyarrow.PythonFile(raw, "r"), buffer_size=PIECE_BYTES, pre_buffer=False
        )
    except (pyarrow.ArrowException, OSError) as error:
        reason = one_line(error)
        raise DataError(f"{show_path(path)}: not a readable parquet file: {reason}") from error


def _open_arrow(raw: RawFile, path: str, text_field: str) -> tuple[Any, bool]:
    """Return a reader of one column, and whether it is a stream rather than a file."""
    import pyarrow

    name, magic = show_path(path), raw.read(8)
    is_stream = not magic.startswith(b"ARROW1")
    if magic.startswith(b"FEA1"):
        raise DataError(f"{name}: Feather version 1; write it again as version 2")
    open_reader = pyarrow.ipc.open_stream if is_stream else pyarrow.ipc.open_file

    def opened(options: Any = None) -> Any:
        raw.seek(0)
        return open_reader(pyarrow.PythonFile(raw, "r"), options=options)

    try:
        schema = opened().schema
        index = schema.get_field_index(_column(schema, text_field, path))
        return opened(pyarrow.ipc.IpcReadOptions(included_fields=[index])), is_stream
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{name}: not a readable Arrow file: {one_line(error)}") from error


def _require_end(raw: RawFile, path: str) -> None:
    """Refuse a stream that was cut off between batches, or has something after its end.

    Without its end mark a cut-off stream looks whole to Arrow's reader.
    """
    end = raw.tell()
    raw.seek(max(0, end - len(END_OF_STREAM)))
    if raw.read(len(END_OF_STREAM)) != END_OF_STREAM:
        raise DataError(f"{show_path(path)}: truncated at byte {end}: no end-of-stream mark")
    if raw.read(1):
        raise DataError(f"{show_path(path)}: data after the end of the stream at byte {end}")


def _column(schema: Any, text_field: str, path: str) -> str:
    """Return the column of the text; DataError when there is none of this name and such a type."""
    from pyarrow import types

    name, count = show_path(path), schema.names.count(text_field)
    if count != 1:
        problem = f"{count} columns called {text_field!r}"
        if not count:
            columns = ", ".join(schema.names)[:200]
            problem = f"no column {text_field!r}, only {columns}; set data.text_field"
        raise DataError(f"{name}: {problem}")
    kind = schema.field(text_field).type
    inner = kind.value_type if types.is_dictionary(kind) else kind
    texts = (
        types.is_string, types.is_large_string, types.is_string_view, types.is_binary,
        types.is_large_binary, types.is_binary_view,
    )  # fmt: skip
    if not any(is_text(inner) for is_text in texts):
        raise DataError(f"{name}: column {text_field!r} holds {kind}, not text")
    return text_field


def _leaf(metadata: Any, column: str) -> int:
    """Return the number of a column in the row groups' metadata, which has no nested columns."""
    schema = metadata.schema
    return next(i for i in range(len(schema)) if schema.column(i).path == column)


def _read_json(path: str) -> dict:
    try:
        found = json.loads(b"".join(files.blocks(path)))
    except ValueError as error:
        raise DataError(f"{show_path(path)}: damaged: {one_line(error)}") from error
    if not isinstance(found, dict):
        raise DataError(f"{show_path(path)}: holds no JSON object")
    return found
