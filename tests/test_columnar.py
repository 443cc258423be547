"""Rows of parquet, Arrow and saved datasets are documents, in order, whole and unchanged."""

from __future__ import annotations

import errno
import json
import os
import random
import tracemalloc

import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest

from jaxgpt.corpus import columnar, files, formats
from jaxgpt.corpus.files import UnreadableFile
from jaxgpt.corpus.formats import BadRecords, Piece
from jaxgpt.errors import DataError

VALUES = ["a", "b\u2028 \r\n", "", "caf\u00e9 \U0001f680", " c\n"]
TEXT_TYPES = [
    pyarrow.string(), pyarrow.large_string(), pyarrow.string_view(), pyarrow.binary(),
    pyarrow.large_binary(), pyarrow.binary_view(),
    pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
]  # fmt: skip


def write_parquet(path, table, **options):
    pyarrow.parquet.write_table(table, path, **options)


def write_file(path, table, rows=2):
    with pyarrow.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, rows)


def write_stream(path, table, rows=2):
    with pyarrow.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, rows)


WRITERS = {
    "parquet": write_parquet, "file.arrow": write_file, "stream.arrow": write_stream,
    "feather": lambda path, table: pyarrow.feather.write_feather(table, path, chunksize=2),
}  # fmt: skip


def read(path, start=0, stop=None, field="text", bad=None):
    parquet = str(path).endswith("parquet")
    documents = columnar.parquet_documents if parquet else columnar.arrow_documents
    return list(documents(str(path), start, stop, field, bad or BadRecords("error")))


def texts(path, *args, **options):
    return [piece.text for piece in read(path, *args, **options)]


def table(values, kind=None):
    return pyarrow.table({"n": [7] * len(values), "text": pyarrow.array(values, kind)})


def write(tmp_path, suffix, values, kind=None, **options):
    path = str(tmp_path / f"a.{suffix}")
    WRITERS[suffix](path, table(values, kind), **options)
    return path


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("kind", TEXT_TYPES, ids=str)
def test_every_type_of_text_is_read_in_order(tmp_path, suffix, kind):
    if suffix == "parquet" and kind == pyarrow.binary_view():
        kind = pyarrow.binary()  # which parquet stores it as
    path = str(tmp_path / f"a.{suffix}")
    array = pyarrow.array(VALUES)
    array = array.dictionary_encode() if pyarrow.types.is_dictionary(kind) else array.cast(kind)
    WRITERS[suffix](path, pyarrow.table({"n": [1, 2, 3, 4, 5], "text": array}))
    assert texts(path) == VALUES


@pytest.mark.parametrize("codec", ["lz4", "zstd", "uncompressed"])
def test_feather_files_of_any_compression_are_read(tmp_path, codec):
    path = str(tmp_path / "a.feather")
    pyarrow.feather.write_feather(table(VALUES), path, compression=codec)
    assert texts(path) == VALUES


def test_row_groups_and_batches_join_to_the_whole_with_origins_of_their_own(tmp_path):
    values = [f"row {i}" for i in range(11)]
    path = write(tmp_path, "parquet", values, row_group_size=3)
    assert len(columnar.group_sizes(path, "text")) == 4
    joined = [piece for i in range(4) for piece in read(path, i, i + 1)]
    assert joined == [Piece(value, f"{path}:{i}") for i, value in enumerate(values)]
    path = write(tmp_path, "file.arrow", values, rows=3)
    assert len(columnar.group_sizes(path, "text")) == 4
    joined = [piece for i in range(4) for piece in read(path, i, i + 1)]
    assert joined == [
        Piece(value, f"{path}:{i // 3}.{i % 3}") for i, value in enumerate(values)
    ]  # fmt: skip
    path = write(tmp_path, "stream.arrow", values, rows=3)
    assert columnar.group_sizes(path, "text") == []
    assert read(path) == [Piece(value, f"{path}:{i}") for i, value in enumerate(values)]


def test_the_size_of_a_row_group_is_that_of_its_text(tmp_path):
    path = str(tmp_path / "a.parquet")
    values = [random.Random(i).randbytes(1000).hex() for i in range(20)]
    columns = {"text": values, "image": [random.Random(i).randbytes(50_000) for i in range(20)]}
    write_parquet(path, pyarrow.table(columns), row_group_size=10)
    for size in columnar.group_sizes(path, "text"):
        assert 20_000 <= size < 30_000  # and 500,000 of images


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_table_without_rows_has_no_documents(tmp_path, suffix):
    assert texts(write(tmp_path, suffix, [], pyarrow.string())) == []


# Long values


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_huge_value_leaves_in_pieces_that_join_to_it(tmp_path, suffix):
    huge = "\u20ac\U0001f680x" * 700_000  # 5.6 MB; characters of 3, 4 and 1 bytes at the cuts
    path = write(tmp_path, suffix, ["first", huge, "last"])
    first, *pieces, last = read(path)
    assert (first.text, first.last, last.text, last.last) == ("first", True, "last", True)
    assert "".join(piece.text for piece in pieces) == huge
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert len({piece.origin for piece in pieces}) == 1
    assert max(len(piece.text.encode()) for piece in pieces) <= formats.PIECE_BYTES


def test_a_huge_value_is_not_copied_whole():
    value = pyarrow.scalar("x" * (32 << 20)).as_buffer()
    tracemalloc.start()
    size = 0
    for piece in columnar.value_pieces(value, "", "", BadRecords("error")):
        size += len(piece.text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size == 32 << 20 and peak < 4 << 20


@pytest.mark.parametrize("at", [0, 9, 15, 16, 17, 31, 40])
@pytest.mark.parametrize("wrong", [b"\xff", b"\x80\x80\x80\x80\x80", b"\xe2\x82", b"\xf0\x9f\x9a"])
def test_bad_bytes_in_long_values_go_by_policy_once_per_value(monkeypatch, at, wrong):
    monkeypatch.setattr(columnar, "PIECE_BYTES", 16)
    value = b"x" * at + wrong + "\u20ac".encode() * 9 + b"\xff"
    bad = BadRecords("replace")
    pieces = list(columnar.value_pieces(value, "here", "origin", bad))
    assert "".join(piece.text for piece in pieces) == value.decode("utf-8", "replace")
    assert (bad.replaced, pieces[-1].last) == (1, True)
    bad = BadRecords("skip")
    pieces = list(columnar.value_pieces(value, "here", "origin", bad))
    assert bad.skipped == 1 and (pieces == [] or pieces[-1] == Piece(None, "origin"))
    with pytest.raises(DataError, match="here.*: byte .* is not UTF-8"):
        list(columnar.value_pieces(value, "here", "origin", BadRecords("error")))


def test_a_row_group_is_read_page_by_page(tmp_path):
    path = str(tmp_path / "a.parquet")
    values = [random.Random(i).randbytes(50_000).hex() for i in range(320)]  # 32 MB
    write_parquet(path, table(values), write_batch_size=8, use_dictionary=False)
    values.clear()
    before, most, size = pyarrow.total_allocated_bytes(), 0, 0
    for piece in columnar.parquet_documents(path, 0, 1, "text", BadRecords("error")):
        most = max(most, pyarrow.total_allocated_bytes() - before)
        size += len(piece.text)
    assert size == 32_000_000 and most < 16 << 20  # a batch of 8 MiB and pages of 1


# What is refused


@pytest.mark.parametrize("suffix", WRITERS)
def test_nulls_and_bad_bytes_go_by_policy(tmp_path, suffix):
    path = write(tmp_path, suffix, [b"ok", None, b"a\xff"], pyarrow.binary())
    place = {"parquet": "1", "stream.arrow": "1"}.get(suffix, "0.1")
    with pytest.raises(DataError, match=f"row {place}: column 'text' is null"):
        read(path)
    bad = BadRecords("skip")
    assert texts(path, bad=bad) == ["ok"]
    place = {"parquet": "2", "stream.arrow": "2"}.get(suffix, "1.0")
    assert bad.skipped == 2 and f"row {place}: byte 1: 0xFF is not UTF-8" in bad.places[1]


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_column_that_is_missing_or_holds_no_text_is_refused_with_what_there_is(tmp_path, suffix):
    path = str(tmp_path / f"a.{suffix}")
    WRITERS[suffix](path, pyarrow.table({"n": [1], "parts": [["a"]], "d": [b"four"]}))
    for read_it in (lambda field: columnar.group_sizes(path, field), lambda f: read(path, field=f)):
        with pytest.raises(DataError, match="no column 'text', only n, parts, d; set data.text_f"):
            read_it("text")
        with pytest.raises(DataError, match="column 'n' holds int64, not text"):
            read_it("n")
        with pytest.raises(DataError, match="column 'parts' holds list<.*>, not text"):
            read_it("parts")


def test_two_columns_of_one_name_are_refused(tmp_path):
    path = str(tmp_path / "a.file.arrow")
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, ["text", "text"])
    write_file(path, twice)
    with pytest.raises(DataError, match="2 columns called 'text'"):
        columnar.group_sizes(path, "text")


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_file_truncated_anywhere_is_refused(tmp_path, suffix):
    path = write(tmp_path, suffix, [f"text {i} " * 20 for i in range(9)])
    data = open(path, "rb").read()
    for size in sorted({*range(0, len(data), 97), *range(len(data) - 20, len(data))}):
        with open(path, "wb") as file:
            file.write(data[:size])
        with pytest.raises(DataError, match=r"not a readable|damaged in|truncated at") as refused:
            columnar.group_sizes(path, "text")
            read(path)
        assert "\n" not in str(refused.value)


def test_a_stream_cut_between_batches_or_followed_by_another_is_refused(tmp_path):
    path = write(tmp_path, "stream.arrow", VALUES)
    data = open(path, "rb").read()
    with open(path, "wb") as file:
        file.write(data[:-8])
    with pytest.raises(DataError, match=rf"truncated at byte {len(data) - 8}: no end-of-stream"):
        read(path)
    with open(path, "wb") as file:
        file.write(data + data)
    with pytest.raises(DataError, match=f"data after the end of the stream at byte {len(data)}"):
        read(path)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("a.parquet", "not a readable parquet file"), ("a.arrow", "not a readable Arrow file"),
        ("a.feather", "not a readable Arrow file"), ("a.parquet.gz", "a compressed table"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_table_is_refused(tmp_path, name, problem):
    (tmp_path / name).write_bytes(b"just some text, no table\n" * 9)
    with pytest.raises(DataError, match=problem):
        columnar.group_sizes(str(tmp_path / name), "text")


def test_version_1_of_feather_is_refused(tmp_path):
    (tmp_path / "a.feather").write_bytes(b"FEA1" + bytes(64) + b"FEA1")
    with pytest.raises(DataError, match="Feather version 1; write it again"):
        columnar.group_sizes(str(tmp_path / "a.feather"), "text")


@pytest.mark.parametrize("suffix", WRITERS)
def test_an_input_error_is_that_of_the_file(tmp_path, suffix, monkeypatch):
    path = write(tmp_path, suffix, [random.Random(i).randbytes(9000).hex() for i in range(99)])
    reads = files.RawFile.read

    def failing(self, size=-1):
        if 4 <= self.tell() < 500_000:
            raise files._unreadable(path, OSError(errno.EIO, "Input/output error"))
        return reads(self, size)

    monkeypatch.setattr(files.RawFile, "read", failing)
    with pytest.raises(UnreadableFile, match="cannot read it: Input/output error"):
        read(path)


# Saved datasets


def save(folder, values, shards=2, **changes):
    """Write what `datasets.Dataset.save_to_disk` of version 5.2.0 writes."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05}-of-{shards:05}.arrow" for i in range(shards)]
    size = -(-len(values) // shards)
    for i, name in enumerate(names):
        write_stream(str(folder / name), table(values[i * size : (i + 1) * size]), 1000)
    features = {"n": {"dtype": "int64", "_type": "Value"}, "text": {"dtype": "string"}}
    info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    state = {
        "_data_files": [{"filename": name} for name in names], "_fingerprint": "8525b811d2191d8f",
        "_format_columns": None, "_format_kwargs": {}, "_format_type": None,
        "_output_all_columns": False, "_split": None,
    }  # fmt: skip
    (folder / "dataset_info.json").write_text(json.dumps(info, indent=2))
    (folder / "state.json").write_text(json.dumps(state | changes, indent=2))
    return [str(folder / name) for name in names]


def test_a_saved_dataset_is_its_files_in_the_order_of_its_state(tmp_path):
    values = [f"row {i}" for i in range(25)]
    paths = save(tmp_path / "set", values, 3)
    assert columnar.saved_dataset(f"{tmp_path}/set/") == paths
    assert [text for path in paths for text in texts(path)] == values
    order = [{"filename": os.path.basename(path)} for path in reversed(paths)]
    save(tmp_path / "back", values, 3, _data_files=order)
    backwards = [f"{tmp_path}/back/{os.path.basename(path)}" for path in reversed(paths)]
    assert columnar.saved_dataset(str(tmp_path / "back")) == backwards


def test_other_folders_and_files_are_no_saved_datasets(tmp_path):
    (tmp_path / "state.json").write_text("{}")
    for source in (tmp_path, tmp_path / "state.json", tmp_path / "*", tmp_path / "no"):
        assert columnar.saved_dataset(str(source)) is None


def test_several_splits_are_refused_by_name_and_each_can_be_named(tmp_path):
    paths = save(tmp_path / "set" / "train", ["a"], 1)
    save(tmp_path / "set" / "test", ["b"], 1)
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match=r"several splits \(train, test\); name one, .*set/train"):
        columnar.saved_dataset(str(tmp_path / "set"))
    assert columnar.saved_dataset(f"{tmp_path}/set/train") == paths
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert columnar.saved_dataset(f"{tmp_path}/set") == paths


@pytest.mark.parametrize("key", ["_indices_data_files", "_indices_files"])
def test_an_indices_mapping_is_refused(tmp_path, key):
    save(tmp_path / "set", ["a", "b"], **{key: [{"filename": "indices.arrow"}]})
    with pytest.raises(DataError, match="indices mapping; .*flatten_indices"):
        columnar.saved_dataset(str(tmp_path / "set"))


@pytest.mark.parametrize(
    "names", [None, "x", [{"filename": "../../etc/passwd"}], [{}], [{"filename": ""}]]
)
def test_a_state_that_names_no_files_of_its_folder_is_refused(tmp_path, names):
    save(tmp_path / "set", ["a"], _data_files=names)
    with pytest.raises(DataError, match="state.json: names no data files in this folder"):
        columnar.saved_dataset(str(tmp_path / "set"))


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_damaged_state_is_refused(tmp_path, text):
    save(tmp_path / "set", ["a"])
    (tmp_path / "set" / "state.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match="state.json: (damaged|holds no JSON object)"):
        columnar.saved_dataset(str(tmp_path / "set"))
