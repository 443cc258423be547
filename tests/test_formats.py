"""Documents come out of files unchanged, and what is no text is refused, mended or left out."""

from __future__ import annotations

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from jaxgpt.data import formats
from jaxgpt.data.formats import BadRecords, Document
from jaxgpt.errors import DataError


def write(path, data):
    path.write_bytes(data)
    return str(path)


def texts(path, policy="error"):
    return [text for text, _ in formats.text_document(path, "name", BadRecords(policy))]


def records(path, policy="error", start=0, stop=None, bad=None):
    bad = bad or BadRecords(policy)
    return [text for text, _ in formats.json_documents(path, start, stop, "text", bad)]


def lines(*values):
    return b"".join(
        json.dumps({"text": value}, ensure_ascii=False).encode() + b"\n" for value in values
    )


def zst(data):
    return zstandard.ZstdCompressor().compress(data)


# Plain text


def test_a_text_file_is_one_document_kept_byte_for_byte(tmp_path):
    text = "\ufeffa\r\nb\r c\td \x0c\u2028\u2029\x85\0 \n\n"
    path = write(tmp_path / "a.txt", text.encode())
    assert list(formats.text_document(path, "name", BadRecords("error"))) == [
        Document(text, "name")
    ]


@pytest.mark.parametrize(("suffix", "pack"), [("gz", gzip.compress), ("zst", zst)])
def test_compressed_text_of_several_members_is_one_document(tmp_path, suffix, pack):
    path = write(tmp_path / f"a.txt.{suffix}", pack(b"first\n") + pack(b"second\n"))
    assert texts(path) == ["first\nsecond\n"]


@pytest.mark.parametrize(("suffix", "pack"), [("gz", gzip.compress), ("zst", zst)])
@pytest.mark.parametrize("kept", [0.1, 0.5, 0.99])
def test_a_truncated_archive_is_refused_with_file_and_position(tmp_path, suffix, pack, kept):
    data = pack("".join(f"line {i * i}\n" for i in range(9000)).encode())
    path = write(tmp_path / f"a.txt.{suffix}", data[: int(len(data) * kept)])
    with pytest.raises(DataError, match=r"a\.txt\.\w+: damaged or truncated near byte \d+"):
        texts(path)


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_file_that_is_not_what_its_suffix_says_is_refused(tmp_path, suffix):
    with pytest.raises(DataError, match="damaged or truncated"):
        texts(write(tmp_path / f"a.txt.{suffix}", b"plain text"))


def test_a_corrupt_archive_is_refused(tmp_path):
    data = bytearray(gzip.compress(b"some text " * 1000))
    data[-6] ^= 1  # in the checksum
    with pytest.raises(DataError, match="damaged or truncated"):
        texts(write(tmp_path / "a.gz", bytes(data)))


def test_bad_utf8_is_refused_with_file_and_byte(tmp_path):
    path = write(tmp_path / "a.txt", b"abc\xff\xfedef")
    with pytest.raises(DataError, match="name: byte 3: 0xFF is not UTF-8"):
        texts(path)


def test_bad_utf8_is_mended_or_left_out_by_policy_and_counted(tmp_path):
    path = write(tmp_path / "a.txt", b"abc\xffdef")
    bad = BadRecords("replace")
    assert [text for text, _ in formats.text_document(path, "a", bad)] == ["abc\ufffddef"]
    assert (bad.replaced, bad.skipped, bad.places) == (1, 0, ["a: byte 3: 0xFF is not UTF-8"])
    bad = BadRecords("skip")
    assert list(formats.text_document(path, "a", bad)) == []
    assert (bad.replaced, bad.skipped, bad.places) == (0, 1, ["a: byte 3: 0xFF is not UTF-8"])


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_wide_encodings_are_refused_with_the_way_to_convert(tmp_path, encoding):
    path = write(tmp_path / "a.txt", "hello".encode(encoding))
    with pytest.raises(DataError, match=f"iconv -f {encoding.upper()} -t UTF-8"):
        texts(path, "replace")


WIDE = "ordinary text".encode("utf-16-le") * 9


@pytest.mark.parametrize("data", [WIDE, bytes(range(256)) * 20, gzip.compress(b"a") * 40])
def test_binary_data_is_refused_even_when_text_would_be_mended(tmp_path, data):
    with pytest.raises(DataError, match="binary, not text"):
        texts(write(tmp_path / "a.txt", data), "replace")


def test_an_empty_file_is_an_empty_document(tmp_path):
    assert texts(write(tmp_path / "a.txt", b"")) == [""]


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(DataError, match="none.txt: cannot read it: No such file"):
        texts(str(tmp_path / "none.txt"))


def test_names_that_are_no_utf8_are_escaped():
    assert formats.show_path("/d/\udcff\n.txt") == "/d/\\xff\n.txt"


# JSON lines


def test_records_end_at_line_feeds_only(tmp_path):
    first, second, third = "a\u2028b\u2029c", "d\x85e", "f\x0b\x0c\x1cg"
    data = "\ufeff" + "\r\n".join(
        json.dumps({"text": text}, ensure_ascii=False) for text in (first, second, "")
    )
    data += '\r\n\r\n  \r\n{"text": ' + json.dumps(third) + "}"
    assert records(write(tmp_path / "a.jsonl", data.encode())) == [first, second, "", third]


def test_a_malformed_line_is_refused_with_its_number(tmp_path):
    path = write(tmp_path / "a.jsonl", lines("a", "b") + b"\n" + b'{"text": "c",}\n' + lines("d"))
    with pytest.raises(DataError, match=r"a\.jsonl:4: not JSON: .*data.bad_text"):
        records(path)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"[1]", "a list, not an object with 'text'"),
        (b'"text"', "a str, not an object"),
        (b'{"body": "x"}', "no field 'text', only body"),
        (b'{"text": null}', "field 'text' holds NoneType, not a string"),
        (b'{"text": 7}', "field 'text' holds int, not a string"),
        (b'{"text": "a"} {"text": "b"}', "not JSON: Extra data"),
        (b'{"text": "a"', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"text": "\xff"}', "byte 10: 0xFF is not UTF-8"),
        (b'{"text": "\\ud800"}', r"lone surrogate U\+D800 at character 0"),
    ],
)
def test_a_bad_record_is_refused_or_left_out_and_counted(tmp_path, line, problem):
    path = write(tmp_path / "a.jsonl", lines("a") + line + b"\n" + lines("b"))
    with pytest.raises(DataError, match=rf"a\.jsonl:2: {problem}"):
        records(path)
    bad = BadRecords("skip")
    assert records(path, bad=bad) == ["a", "b"]
    assert (bad.skipped, bad.replaced, len(bad.places)) == (1, 0, 1)


def test_undecodable_strings_are_mended_by_policy(tmp_path):
    path = write(tmp_path / "a.jsonl", b'{"text": "a\\ud800b"}\n{"text": "c\xffd"}\n')
    bad = BadRecords("replace")
    assert records(path, bad=bad) == ["a\ufffdb", "c\ufffdd"]
    assert bad.replaced == 2


def test_a_record_without_text_cannot_be_mended(tmp_path):
    with pytest.raises(DataError, match="holds int"):
        records(write(tmp_path / "a.jsonl", b'{"text": 7}\n'), "replace")


def test_escaped_pairs_are_one_character(tmp_path):
    path = write(tmp_path / "a.jsonl", b'{"text": "\\ud83d\\ude80"}\n')
    assert records(path) == ["\U0001f680"]


@pytest.mark.parametrize("ending", [b"", b"\n"])
def test_cutting_a_file_anywhere_gives_each_record_once(tmp_path, ending):
    data = (lines("a", "bb", "c\u2028") + b"\n\r\n" + lines("dd", "e")).rstrip(b"\n") + ending
    path = write(tmp_path / "a.jsonl", data)
    for cut in range(len(data) + 1):
        assert records(path, stop=cut) + records(path, start=cut) == [
            "a",
            "bb",
            "c\u2028",
            "dd",
            "e",
        ]


def test_places_do_not_depend_on_where_a_file_is_cut(tmp_path):
    data = lines("a", "b") + b"no\n" + lines("c")
    path = write(tmp_path / "a.jsonl", data)
    for start in range(data.index(b"no") + 1):
        bad = BadRecords("skip")
        found = list(formats.json_documents(path, start, None, "text", bad))
        assert bad.places == [f"{path}:3: not JSON: Expecting value: line 1 column 1 (char 0)"]
        assert found[-1] == Document("c", f"{path}:{data.index(b'no') + 3}")


@pytest.mark.parametrize(("suffix", "pack"), [("gz", gzip.compress), ("zst", zst)])
def test_compressed_records_are_those_of_the_plain_file(tmp_path, suffix, pack):
    data = lines(*(f"text {i}" for i in range(500)))
    plain = list(
        formats.json_documents(
            write(tmp_path / "a.jsonl", data), 0, None, "text", BadRecords("error")
        )
    )
    path = write(tmp_path / f"a.jsonl.{suffix}", pack(data[:777]) + pack(data[777:]))
    packed = list(formats.json_documents(path, 0, None, "text", BadRecords("error")))
    assert [(d.text, d.origin.rpartition(":")[2]) for d in packed] == [
        (d.text, d.origin.rpartition(":")[2]) for d in plain
    ]


def test_lines_longer_than_a_block_are_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "BLOCK_BYTES", 7)
    values = ["x" * n for n in (0, 1, 40, 7, 100)]
    assert records(write(tmp_path / "a.jsonl", lines(*values))) == values


def test_a_document_beyond_the_limit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "MAX_DOCUMENT_BYTES", 50)
    monkeypatch.setattr(formats, "BLOCK_BYTES", 16)
    with pytest.raises(DataError, match="over 1 GiB in one document"):
        texts(write(tmp_path / "a.txt", b"x" * 99))
    with pytest.raises(DataError, match="over 1 GiB in the line at byte 14"):
        records(write(tmp_path / "a.jsonl", lines("a", "x" * 99)))


# Parquet


@pytest.fixture
def parquet(tmp_path):
    path = str(tmp_path / "a.parquet")
    table = pyarrow.table({"text": ["a", "b\u2028", "", "c"], "n": [1, 2, 3, 4]})
    pyarrow.parquet.write_table(table, path, row_group_size=2)
    return path


def rows(path, start, stop, field="text", bad=None):
    return list(formats.parquet_documents(path, start, stop, field, bad or BadRecords("error")))


def test_parquet_rows_are_documents_in_order(parquet):
    assert len(formats.parquet_groups(parquet)) == 2
    assert [d.text for d in rows(parquet, 0, 2)] == ["a", "b\u2028", "", "c"]
    assert rows(parquet, 1, 2) == [Document("", f"{parquet}:2"), Document("c", f"{parquet}:3")]


def test_a_wrong_parquet_column_is_refused_with_the_right_ones(parquet):
    with pytest.raises(DataError, match="no column 'body', only text, n; set data.text_field"):
        rows(parquet, 0, 2, "body")


def test_a_parquet_column_of_numbers_is_refused(parquet):
    with pytest.raises(DataError, match="column 'n' holds int64, not text"):
        rows(parquet, 0, 2, "n")


def test_bad_parquet_values_go_by_policy(tmp_path):
    path = str(tmp_path / "b.parquet")
    values = pyarrow.array([b"ok", None, b"\xff"], pyarrow.binary())
    pyarrow.parquet.write_table(pyarrow.table({"text": values}), path)
    with pytest.raises(DataError, match="row 1: column 'text' is null"):
        rows(path, 0, 1)
    bad = BadRecords("skip")
    assert [d.text for d in rows(path, 0, 1, bad=bad)] == ["ok"]
    assert bad.places == [
        f"{path}: row 1: column 'text' is null", f"{path}: row 2: byte 0: 0xFF is not UTF-8"
    ]  # fmt: skip


def test_a_damaged_parquet_file_is_refused(parquet):
    data = open(parquet, "rb").read()
    with open(parquet, "wb") as file:
        file.write(data[:-20])
    with pytest.raises(DataError, match="not a readable parquet file"):
        formats.parquet_groups(parquet)
