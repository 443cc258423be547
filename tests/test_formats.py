"""Documents come out of files unchanged, and what is no text is refused, mended or left out."""

from __future__ import annotations

import gzip
import json

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgpt.corpus import files, formats
from jaxgpt.corpus.files import UnreadableFile
from jaxgpt.corpus.formats import BadRecords, Piece
from jaxgpt.errors import DataError


def write(path, data):
    path.write_bytes(data)
    return str(path)


def joined(pieces):
    """Return (text, origin) of each document that is not taken back."""
    documents, parts = [], []
    for text, origin, last in pieces:
        parts.append((text, origin))
        if last:
            assert len({origin for _, origin in parts}) == 1
            assert all(text is not None for text, _ in parts[:-1])
            if text is not None:
                documents.append(("".join(text for text, _ in parts), origin))
            parts = []
    assert not parts
    return documents


def texts(path, policy="error", bad=None):
    pieces = formats.text_document(path, "name", bad or BadRecords(policy))
    return [text for text, _ in joined(pieces)]


def records(path, policy="error", start=0, stop=None, bad=None):
    pieces = formats.json_documents(path, start, stop, "text", bad or BadRecords(policy))
    return [text for text, _ in joined(pieces)]


@pytest.fixture
def small_pieces(monkeypatch):
    """Make documents beyond 40 bytes come in pieces of up to 7."""
    monkeypatch.setattr(formats, "HELD_BYTES", 40)
    monkeypatch.setattr(formats, "PIECE_BYTES", 7)
    monkeypatch.setattr(files, "BLOCK_BYTES", 7)


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
    pieces = formats.text_document(path, "name", BadRecords("error"))
    assert list(pieces) == [Piece(text, "name", last=True)]


@pytest.mark.parametrize(("suffix", "pack"), [("gz", gzip.compress), ("zst", zst)])
def test_compressed_text_of_several_members_is_one_document(tmp_path, suffix, pack):
    path = write(tmp_path / f"a.txt.{suffix}", pack(b"first\n") + pack(b"second\n"))
    assert texts(path) == ["first\nsecond\n"]


def test_bad_utf8_is_refused_with_file_and_byte(tmp_path):
    path = write(tmp_path / "a.txt", b"abc\xff\xfedef")
    with pytest.raises(DataError, match="name: byte 3: 0xFF is not UTF-8"):
        texts(path)


def test_bad_utf8_is_mended_or_left_out_by_policy_and_counted(tmp_path):
    path = write(tmp_path / "a.txt", b"abc\xff\xfedef")
    bad = BadRecords("replace")
    assert texts(path, bad=bad) == ["abc\ufffd\ufffddef"]
    assert (bad.replaced, bad.skipped, bad.places) == (1, 0, ["name: byte 3: 0xFF is not UTF-8"])
    bad = BadRecords("skip")
    assert texts(path, bad=bad) == []
    assert (bad.replaced, bad.skipped, bad.places) == (0, 1, ["name: byte 3: 0xFF is not UTF-8"])


def test_text_that_looks_like_latin_1_is_refused_with_the_way_to_convert(tmp_path):
    path = write(tmp_path / "a.txt", "un caf\u00e9 noir".encode("latin-1"))
    with pytest.raises(DataError, match=r"byte 6: 0xE9 is not UTF-8 \(Latin-1\? iconv -f LATIN1"):
        texts(path)


def test_text_in_an_encoding_that_mending_would_destroy_is_refused(tmp_path):
    russian = "\u0432\u0441\u0435 \u0441\u0447\u0430\u0441\u0442\u043b\u0438\u0432\u044b\u0435 "
    path = write(tmp_path / "a.txt", russian.encode("koi8-r") * 20)
    with pytest.raises(DataError, match=r"text in another encoding: \d+ places in the first 300"):
        texts(path, "replace")
    assert texts(write(tmp_path / "b.txt", russian.encode() * 20)) == [russian * 20]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_wide_encodings_are_refused_with_the_way_to_convert(tmp_path, encoding):
    path = write(tmp_path / "a.txt", "hello".encode(encoding))
    with pytest.raises(DataError, match=f"iconv -f {encoding.upper()} -t UTF-8"):
        texts(path, "replace")


WIDE = "ordinary text".encode("utf-16-le") * 9
PNG = (  # of one pixel
    b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\1\0\0\0\1\x08\0\0\0\0:~\x9bU"
    b"\0\0\0\nIDATx\x9cc`\0\0\0\2\0\1H\xaf\xa4q\0\0\0\0IEND\xaeB`\x82"
)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (WIDE, r"117 control characters in the first 234 bytes \(UTF-16 without its mark\?\)"),
        ("text".encode("utf-16-be") * 9, r"36 .* 72 bytes \(UTF-16 without its mark\?\)"),
        (bytes(range(256)) * 20, r"\d+ control characters in the first 5120 bytes \(data"),
        (gzip.compress(b"a"), "it begins like gzip data"),
        (zst(b"a"), "it begins like zstd data"),
        (PNG, "it begins like PNG data"),
        (bytes(200) + PNG, r"\d+ control characters in the first \d+ bytes \(data"),
    ],
    ids=["utf-16-le", "utf-16-be", "bytes", "gzip", "zstd", "png", "png later"],
)
def test_binary_data_is_refused_even_when_text_would_be_mended(tmp_path, data, reason):
    path = write(tmp_path / "a.txt", data)
    with pytest.raises(DataError, match=f"name: binary, not text: {reason}"):
        texts(path, "replace")
    bad = BadRecords("skip")
    assert texts(path, bad=bad) == [] and bad.skipped == 1


def test_an_empty_file_is_an_empty_document(tmp_path):
    assert texts(write(tmp_path / "a.txt", b"")) == [""]


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UnreadableFile, match="none.txt: cannot read it: No such file"):
        texts(str(tmp_path / "none.txt"))


# Huge text

WIDE_TEXT = "\ufeffa\r\nb\u2028\U0001f680\u4e2d\0 caf\u00e9  x\u0301 " * 9


def test_a_huge_text_comes_in_small_pieces_of_the_same_document(tmp_path, small_pieces):
    path = write(tmp_path / "a.txt", WIDE_TEXT.encode())
    pieces = list(formats.text_document(path, "name", BadRecords("error")))
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert max(len(piece.text) for piece in pieces) <= 7
    assert joined(pieces) == [(WIDE_TEXT, "name")]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                b"a",
                b"\xff",
                b"\xe2\x80\xa8",
                b"\xf0\x9f\x9a\x80",
                b"\xed\xa0\x80",
                b"\xc3",
                b"\xf0\x9f",
            ]
        ),
        max_size=12,
    ),
    st.integers(1, 6),
)
def test_blocks_are_mended_as_the_whole_would_be(parts, size):
    data = b"".join(parts)
    blocks = [data[at : at + size] for at in range(0, len(data), size)]
    bad = BadRecords("replace")
    found = "".join(formats._decoded(blocks, lambda: "name", bad))
    assert found == data.decode("utf-8", "replace")
    expected = BadRecords("replace")
    assert formats.decode(data, "name", expected) == found
    assert bad.replaced == expected.replaced
    place = [place.partition(" (Latin-1?")[0] for place in expected.places]
    assert [place.partition(" (Latin-1?")[0] for place in bad.places] == place


@pytest.mark.parametrize("at", [0, 39, 41, 300])
def test_bad_utf8_deep_in_a_huge_text_goes_by_policy(tmp_path, small_pieces, at):
    data = b"x" * at + b"\xff" + b"y" * 300 + b"\xff"
    path = write(tmp_path / "a.txt", data)
    place = f"name: byte {at}: 0xFF is not UTF-8"
    with pytest.raises(DataError, match=place):
        texts(path)
    bad = BadRecords("replace")
    assert texts(path, bad=bad) == [data.decode("utf-8", "replace")]
    assert (bad.replaced, bad.skipped) == (1, 0) and bad.places[0].startswith(place)
    bad = BadRecords("skip")
    pieces = list(formats.text_document(path, "name", bad))
    assert pieces[-1] == Piece(None, "name", last=True)
    assert joined(pieces) == [] and (bad.replaced, bad.skipped) == (0, 1)


def test_a_text_that_ends_within_a_character_is_not_utf8(tmp_path, small_pieces):
    path = write(tmp_path / "a.txt", b"x" * 99 + "\U0001f680".encode()[:3])
    with pytest.raises(DataError, match="byte 99: 0xF0 is not UTF-8"):
        texts(path)


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
        (b"[1]", "an array, not an object with 'text'"),
        (b'"text"', "a string, not an object"),
        (b'{"body": "x"}', "no field 'text', only 'body'"),
        (b'{"text": null}', "field 'text' holds null, not a string"),
        (b'{"text": 7}', "field 'text' holds a number, not a string"),
        (b'{"text": "a"} {"text": "b"}', "not JSON: Extra data"),
        (b'{"text": "a"', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"{}", "no field 'text', only an empty object"),
        (b'{"text": true}', "field 'text' holds a boolean"),
        (b'{"text": ["a"]}', "field 'text' holds an array"),
        (b'{"text": {"text": "a"}}', "field 'text' holds an object"),
        (b'{"text": "a", "b": 1, "text": "a"}', "field 'text' occurs 2 times"),
        (b'{"te\\u0078t": "a", "text": null}', "field 'text' occurs 2 times"),
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
    with pytest.raises(DataError, match="holds a number"):
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
        assert found[-1] == Piece("c", f"{path}:{data.index(b'no') + 3}")


@pytest.mark.parametrize(("suffix", "pack"), [("gz", gzip.compress), ("zst", zst)])
def test_compressed_records_are_those_of_the_plain_file(tmp_path, suffix, pack):
    data = lines(*(f"text {i}" for i in range(500)))
    path = write(tmp_path / "a.jsonl", data)
    plain = list(formats.json_documents(path, 0, None, "text", BadRecords("error")))
    path = write(tmp_path / f"a.jsonl.{suffix}", pack(data[:777]) + pack(data[777:]))
    packed = list(formats.json_documents(path, 0, None, "text", BadRecords("error")))
    assert [(p.text, p.origin.rpartition(":")[2]) for p in packed] == [
        (p.text, p.origin.rpartition(":")[2]) for p in plain
    ]


def test_lines_longer_than_a_block_are_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK_BYTES", 7)
    values = ["x" * n for n in (0, 1, 40, 7, 100)]
    assert records(write(tmp_path / "a.jsonl", lines(*values))) == values


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_records_in_a_wide_encoding_are_refused_or_a_skipped_file(tmp_path, encoding):
    path = write(tmp_path / "a.jsonl", ('{"text": "a"}\n' * 50).encode(encoding))
    with pytest.raises(DataError, match=f"a.jsonl: {encoding.upper()} text; convert it"):
        records(path, "replace")
    bad = BadRecords("skip")
    assert records(path, bad=bad) == []
    (skipped,) = bad.skipped_files
    assert skipped["path"] == path and f"{encoding.upper()} text" in skipped["reason"]


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("koi8-r", "\u0432\u0441\u0435 \u0441\u0447\u0430\u0441\u0442\u043b\u0438\u0432\u044b"),
        ("gb18030", "\u4e2d\u6587\u3002"),
        ("latin-1", "\u00e0 la caf\u00e9"),
    ],
)
def test_a_record_in_an_encoding_that_mending_would_destroy_is_refused(tmp_path, encoding, text):
    data = lines("a") + lines(text * 20).decode().encode(encoding) + lines("b")
    path = write(tmp_path / "a.jsonl", data)
    with pytest.raises(DataError, match=r"a\.jsonl:2: text in another encoding: .* with iconv"):
        records(path, "replace")
    bad = BadRecords("skip")
    assert records(path, bad=bad) == ["a", "b"] and bad.skipped == 1


# Huge records

HUGE = WIDE_TEXT.replace("\u0301", '\u0301\\ " \x01/\ud83d\ude80')


@pytest.mark.parametrize("ascii_only", [True, False])
def test_huge_records_among_small_ones_are_read_wherever_the_file_is_cut(
    tmp_path, small_pieces, ascii_only
):
    huge = HUGE.encode("utf-16", "surrogatepass").decode("utf-16")  # pairs joined, as JSON does
    rows = [{"text": "a"}, {"id": [1] * 99, "text": huge, "n": {"text": 0}}, {"text": "b"}]
    data = "\n".join(json.dumps(row, ensure_ascii=ascii_only) for row in rows).encode()
    path = write(tmp_path / "a.jsonl", data)
    pieces = list(formats.json_documents(path, 0, None, "text", BadRecords("error")))
    assert max(len(piece.text) for piece in pieces) <= 40
    expected = list(zip(["a", huge, "b"], [0, 14, data.rindex(b"{")], strict=True))
    assert joined(pieces) == [(text, f"{path}:{offset}") for text, offset in expected]
    for cut in range(0, len(data) + 1, 11):
        assert records(path, stop=cut) + records(path, start=cut) == ["a", huge, "b"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"text": "%s",}', "not JSON: unexpected '}'"),
        (b'{"text": "%s"', "not JSON: it ends too early"),
        (b'{"text": "%s', "not JSON: Invalid control character at"),
        (b'{"text": "%s"} {"text": "b"}', "not JSON: unexpected '{'"),
        (b'{"text": "%s", "text": "a"}', "field 'text' occurs twice"),
        (b'{"text": "%s\xff"}', "byte 510: 0xFF is not UTF-8"),
        (b'{"text": "%s\\ud800"}', r"lone surrogate U\+D800 at character 500"),
        (b'{"text": "a", "b": "%s\xff"}', "byte 520: 0xFF is not UTF-8"),
        (b'{"body": "%s"}', "no field 'text'"),
        (b'["%s"]', "an array, not an object with 'text'"),
        (b'{"b": "%s", "text": 7}', "field 'text' holds a number, not a string"),
    ],
)
def test_a_bad_huge_record_goes_by_policy_with_its_line(tmp_path, small_pieces, line, problem):
    path = write(tmp_path / "a.jsonl", lines("a") + line % (b"x" * 500) + b"\n" + lines("b"))
    with pytest.raises(DataError, match=rf"a\.jsonl:2: {problem}"):
        records(path)
    bad = BadRecords("skip")
    assert records(path, bad=bad) == ["a", "b"]
    assert (bad.skipped, bad.replaced, len(bad.places)) == (1, 0, 1)


def test_huge_records_are_mended_once_each(tmp_path, small_pieces):
    first = b'{"text": "' + b"a\\ud800b" * 50 + b'"}\n'
    second = b'{"text": "' + b"c\xffd" * 50 + b'"}\n'
    bad = BadRecords("replace")
    path = write(tmp_path / "a.jsonl", first + second)
    assert records(path, bad=bad) == ["a\ufffdb" * 50, "c\ufffdd" * 50]
    assert bad.replaced == 2


def test_the_number_of_a_bad_line_counts_huge_lines_once(tmp_path, small_pieces):
    data = lines("x" * 300, "a", "y" * 300) + b"no\n"
    path = write(tmp_path / "a.jsonl", data)
    for start in (0, 100, data.index(b"no")):
        with pytest.raises(DataError, match=r"a\.jsonl:4: not JSON"):
            records(path, start=start)


def test_looking_for_the_first_line_ends_with_the_partition(tmp_path, small_pieces, monkeypatch):
    path = write(tmp_path / "a.jsonl", lines("x" * 3000))
    read = []
    real = files.blocks
    monkeypatch.setattr(files, "blocks", lambda *place: (read.append(b) or b for b in real(*place)))
    assert records(path, start=50, stop=100) == []
    assert sum(map(len, read)) < 100
