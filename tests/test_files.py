"""Files are found in byte order and read from anywhere, or refused by name with the reason."""

from __future__ import annotations

import bz2
import errno
import gzip
import io
import lzma
import os
import random
import subprocess
import sys
import tracemalloc

import fsspec
import pyarrow
import pytest
import zstandard

from jaxgpt.corpus import compression, files
from jaxgpt.corpus.files import UnreadableFile
from jaxgpt.errors import DataError, show_path

PACK = {
    "gz": gzip.compress, "zst": zstandard.ZstdCompressor().compress, "bz2": bz2.compress,
    "xz": lzma.compress,
}  # fmt: skip


def write(path, data=b"x"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return str(path)


def content(path, start=0):
    return b"".join(files.blocks(str(path), start))


def found(source):
    return [os.path.relpath(path, os.path.dirname(source)) for path in files.expand(str(source))]


def problems(source):
    return [str(s) for _, s in files.listing(str(source)) if isinstance(s, UnreadableFile)]


# Finding


def test_a_folder_is_all_files_below_it_in_byte_order_of_the_whole_path(tmp_path):
    names = ["Z", "a.txt", "a/b.c/d", "a/b/e", "a0", "\u00e9", "~", ".hidden", "a b", "a\nb"]
    for name in names:
        write(tmp_path / "top" / name)
    expected = sorted((f"{tmp_path}/top/{name}" for name in names), key=os.fsencode)
    assert files.expand(str(tmp_path / "top")) == expected
    assert expected[4:6] == [f"{tmp_path}/top/a.txt", f"{tmp_path}/top/a/b.c/d"]


def test_names_that_are_no_utf8_are_found_and_read(tmp_path):
    path = os.path.join(os.fsencode(tmp_path), b"a\xff \n.txt")
    with open(path, "wb") as file:
        file.write(b"text")
    for source in (tmp_path, tmp_path / "*.txt", os.fsdecode(path)):
        ((name, status),) = files.listing(str(source))
        assert os.fsencode(name) == path and status.size == 4
        assert content(name) == b"text"


LISTED = """
import os, sys
from jaxgpt.corpus import files
for path in files.expand(sys.argv[1]):
    print(os.fsencode(path).hex())
"""


@pytest.mark.parametrize("source", ["", "/*"])
@pytest.mark.parametrize("utf8", ["0", "1"])
def test_the_order_is_that_of_bytes_whatever_the_locale(tmp_path, source, utf8):
    # As text, the character beyond the first plane comes after the byte that is no UTF-8.
    names = ["\U0001f680".encode(), b"\xff", "\u00e9".encode(), b"f", b"Z", b"a b", b"a\nb", b"a"]
    for name in names:
        write(tmp_path / os.fsdecode(name))
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": utf8, "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", LISTED, f"{tmp_path}{source}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    listed = [bytes.fromhex(line) for line in done.stdout.split()]
    assert listed == sorted(os.path.join(os.fsencode(tmp_path), name) for name in names)


def test_a_pattern_is_its_files_in_byte_order_hidden_ones_included(tmp_path):
    for name in ("b.txt", "a.txt", ".c.txt", "sub/d.txt", "sub/.e/f.txt", "folder.txt/g"):
        write(tmp_path / name)
    assert found(tmp_path / "*.txt") == [".c.txt", "a.txt", "b.txt"]
    below = [os.path.relpath(p, tmp_path) for p in files.expand(f"{tmp_path}/**/*.txt")]
    assert below == [".c.txt", "a.txt", "b.txt", "sub/.e/f.txt", "sub/d.txt"]


def test_a_name_with_pattern_characters_is_found_as_a_name(tmp_path):
    assert files.expand(write(tmp_path / "a[1]*.txt")) == [str(tmp_path / "a[1]*.txt")]


@pytest.mark.parametrize("source", ["missing", "no*pe", "empty", "memory://no", "memory://no*pe"])
def test_what_matches_nothing_is_refused_with_the_pattern(tmp_path, source):
    (tmp_path / "empty").mkdir()
    source = source if ":" in source else str(tmp_path / source)
    with pytest.raises(DataError) as refused:
        files.expand(source)
    assert str(refused.value) == f"data.sources: {source!r} matches no file"


def test_links_to_files_and_folders_are_followed(tmp_path):
    write(tmp_path / "elsewhere" / "a.txt")
    (tmp_path / "top").mkdir()
    os.symlink(tmp_path / "elsewhere", tmp_path / "top" / "link")
    assert files.expand(str(tmp_path / "top")) == [f"{tmp_path}/top/link/a.txt"]


def test_a_folder_that_is_reached_twice_is_refused(tmp_path):
    write(tmp_path / "a" / "a.txt")
    os.symlink(tmp_path, tmp_path / "a" / "link")
    with pytest.raises(DataError, match=r"a/link and .* are the same folder"):
        files.expand(str(tmp_path))


# What cannot be read


def test_each_thing_that_is_no_readable_file_is_reported_with_its_reason(tmp_path):
    write(tmp_path / "fine.txt")
    os.symlink(tmp_path / "gone", tmp_path / "broken")
    os.symlink(tmp_path / "loop", tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    assert problems(tmp_path) == [
        f"{tmp_path}/broken: cannot read it: No such file or directory",
        f"{tmp_path}/loop: cannot read it: Too many levels of symbolic links",
        f"{tmp_path}/pipe: not a regular file",
    ]
    assert problems(tmp_path / "broken") == problems(tmp_path)[:1]
    assert problems(tmp_path / "*o*p*") == problems(tmp_path)[1:2]


def test_a_file_without_permission_is_reported(tmp_path, monkeypatch):
    write(tmp_path / "a.txt")
    monkeypatch.setattr(os, "access", lambda path, mode: not path.endswith("a.txt"))
    assert problems(tmp_path) == [f"{tmp_path}/a.txt: cannot read it: Permission denied"]


def test_a_folder_that_cannot_be_listed_is_not_passed_over(tmp_path, monkeypatch):
    write(tmp_path / "closed" / "a.txt")
    write(tmp_path / "open" / "a.txt")
    expected = [f"{tmp_path}/closed: a folder that cannot be listed"]
    real = os.scandir

    def scandir(path):
        if os.fspath(path).rstrip("/").endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert problems(tmp_path) == expected
    monkeypatch.setattr(os, "access", lambda path, _: not path.rstrip("/").endswith("closed"))
    for pattern in ("*/*.txt", "**/*.txt", "**", "*/**"):
        assert problems(tmp_path / pattern)[0] == expected[0]


def test_an_input_error_names_file_and_byte(tmp_path, monkeypatch):
    path = write(tmp_path / "a.txt", b"x" * 3_000_000)
    real = open

    class Failing:
        def __init__(self, *args):
            self.file = real(*args)
            self.seek, self.close = self.file.seek, self.file.close

        def read(self, size):
            if self.file.tell() >= 2 << 20:
                raise OSError(errno.EIO, "Input/output error")
            return self.file.read(size)

    monkeypatch.setattr("builtins.open", Failing)
    with pytest.raises(UnreadableFile) as refused:
        content(path)
    assert str(refused.value) == f"{path}: cannot read it at byte 2097152: Input/output error"


def test_a_file_that_is_gone_is_unreadable(tmp_path):
    for read in (content, files.status, files.open_binary):
        with pytest.raises(UnreadableFile, match="gone.txt: cannot read it: No such file"):
            read(str(tmp_path / "gone.txt"))


# Status


def test_the_stamp_changes_with_size_and_time(tmp_path):
    path = write(tmp_path / "a.txt")
    os.utime(path, ns=(5, 5))
    first = files.status(path)
    assert first.size == 1 and files.status(path) == first
    os.utime(path, ns=(5, 6))
    touched = files.status(path)
    write(tmp_path / "a.txt", b"xy")
    os.utime(path, ns=(5, 5))
    assert len({first.stamp, touched.stamp, files.status(path).stamp}) == 3


def test_the_identity_is_the_same_under_all_names(tmp_path):
    path = write(tmp_path / "a.txt")
    os.link(path, tmp_path / "hard")
    os.symlink(path, tmp_path / "soft")
    names = (path, f"{tmp_path}/hard", f"{tmp_path}/soft", f"file://{path}")
    assert len({files.status(name).identity for name in names}) == 1
    assert files.status(path).identity != files.status(write(tmp_path / "b")).identity


def test_shown_paths_are_printable_lines_and_different_for_different_paths():
    assert show_path("/d/caf\u00e9 1.txt") == "/d/caf\u00e9 1.txt"
    assert show_path("/d/\udcff\n.txt") == "/d/\\xff\\x0a.txt"
    paths = [
        "a\n",
        "a\\x0a",
        "a\\n",
        "\udcc3\udca9",
        "\\xc3\\xa9",
        "\x85",
        "\udc85",
        "\u2028",
        "\x1b[2J",
    ]
    assert len({show_path(path) for path in paths}) == len(paths)
    assert all(show_path(path).isprintable() for path in paths)


# Compressed files


@pytest.mark.parametrize("suffix", PACK)
def test_all_members_of_a_compressed_file_are_read(tmp_path, suffix):
    parts = [random.Random(i).randbytes(300_000) for i in range(4)] + [b"", b"end"]
    path = write(tmp_path / f"a.{suffix.upper()}", b"".join(map(PACK[suffix], parts)))
    assert content(path) == b"".join(parts)


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("kept", [0, 3, 0.1, 0.5, 0.99, -1])
def test_a_truncated_archive_is_refused_with_file_and_position(tmp_path, suffix, kept):
    data = PACK[suffix]("".join(f"line {i * i}\n" for i in range(9000)).encode())
    data = data[: int(len(data) * kept) if isinstance(kept, float) else kept]
    path = write(tmp_path / f"a.txt.{suffix}", data)
    expected = rf"a\.txt\.{suffix}: damaged or truncated near byte {len(data)} of the file"
    with pytest.raises(DataError, match=expected) as refused:
        content(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("suffix", PACK)
def test_a_second_member_that_is_damaged_is_not_passed_over(tmp_path, suffix):
    for second in (b"no member at all", PACK[suffix](b"second" * 99)[:-9]):
        path = write(tmp_path / f"a.{suffix}", PACK[suffix](b"first") + second)
        with pytest.raises(DataError, match="damaged or truncated"):
            content(path)


@pytest.mark.parametrize("suffix", PACK)
def test_a_flipped_bit_is_refused(tmp_path, suffix):
    pack = PACK[suffix]
    if suffix == "zst":
        pack = zstandard.ZstdCompressor(write_checksum=True).compress
    data = bytearray(pack(random.Random(0).randbytes(9000)))
    data[len(data) // 2] ^= 1
    with pytest.raises(DataError, match="damaged or truncated"):
        content(write(tmp_path / f"a.{suffix}", bytes(data)))


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("other", [*PACK, "plain"])
def test_a_file_that_is_not_what_its_suffix_says_is_refused(tmp_path, suffix, other):
    data = PACK[other](b"text" * 99) if other != "plain" else b"plain text"
    path = write(tmp_path / f"a.txt.{suffix}", data)
    if other == suffix:
        assert content(path) == b"text" * 99
    else:
        with pytest.raises(DataError, match="damaged or truncated"):
            content(path)


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz"])
def test_zero_bytes_after_a_member_are_padding(tmp_path, suffix):
    path = write(tmp_path / f"a.{suffix}", PACK[suffix](b"text") + bytes(100_000))
    assert content(path) == b"text"


@pytest.mark.parametrize("suffix", PACK)
def test_a_decompression_bomb_does_not_fill_the_memory(tmp_path, suffix):
    path = write(tmp_path / f"a.{suffix}", PACK[suffix](bytes(32 << 20)))
    assert os.path.getsize(path) < 64 << 10
    in_arrow, size = [], 0
    before = pyarrow.total_allocated_bytes()
    tracemalloc.start()
    for block in files.blocks(path):
        assert 0 < len(block) <= files.BLOCK_BYTES
        size += len(block)
        in_arrow.append(pyarrow.total_allocated_bytes() - before)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size == 32 << 20
    assert peak + max(in_arrow) < 16 << 20  # 8 MiB are the dictionary of xz


def test_an_archive_that_demands_a_huge_dictionary_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(compression, "MAX_DICTIONARY", 1 << 20)  # and xz -6 wants 8 MiB
    with pytest.raises(DataError, match="Memory usage limit exceeded"):
        content(write(tmp_path / "a.xz", lzma.compress(b"text", preset=6)))


def test_a_plain_file_is_read_from_any_byte_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK_BYTES", 7)
    path = write(tmp_path / "a.txt", bytes(range(20)))
    assert [content(path, start) for start in range(22)] == [
        bytes(range(20))[i:] for i in range(22)
    ]
    assert [len(block) for block in files.blocks(path)] == [7, 7, 6]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.jsonl", "json"), ("a.json.gz", "json"), ("a.jsonl.xz", "json"), ("a.jsonl.zst", "json"),
        ("a.JSONL", "json"), ("a.json", "json"), ("a.ndjson.bz2", "json"), ("a.txt", "text"),
        ("a.md.gz", "text"), ("a.parquet", "parquet"), ("README", "text"), ("a.csv", "text"),
        ("a.arrow", "arrow"), ("a.feather", "arrow"), ("a.ipc", "arrow"),
        ("s3://b/a.PARQUET", "parquet"),
    ],
)  # fmt: skip
def test_the_suffix_decides_how_a_file_is_read(name, kind):
    assert files.base_name_kind(name) == kind


# Other file systems


class Failing(fsspec.AbstractFileSystem):
    """A store of files with `text` in them, some of which fail in the ways of a network."""

    protocol = "failing"
    names = ("d/flaky", "d/secret", "e/fine.txt", "e/sub/fine.txt", "f/sub/forbidden/a.txt")

    def ls(self, path, detail=True, **kwargs):
        top = f"{path}/".lstrip("/")
        if top.endswith("forbidden/"):
            raise PermissionError("403 storage.objects.list\ndenied")
        parts = {
            name.removeprefix(top).partition("/")[:2] for name in self.names if name.startswith(top)
        }
        if not parts:
            raise FileNotFoundError(path)
        kinds = {"/": "directory", "": "file"}
        return [{"name": top + name, "size": 4, "type": kinds[slash]} for name, slash in parts]

    def _open(self, path, **kwargs):
        if path.endswith("secret"):
            raise PermissionError(f"{path}: AccessDenied")
        if path not in self.names:
            raise FileNotFoundError(path)
        file = io.BytesIO(b"text")
        return Flaky(file) if path.endswith("flaky") else file


class Flaky(io.BufferedReader):
    """A connection that breaks at the first byte."""

    def read(self, size=-1):
        raise RuntimeError("connection reset\nby peer")


@pytest.fixture
def failing():
    fsspec.register_implementation("failing", Failing, clobber=True)


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_url_is_read_like_a_path(tmp_path, scheme):
    system = fsspec.filesystem(scheme)
    for name in ("b.txt", "a.txt", "sub/c.txt", "sub.txt"):
        system.makedirs(f"{tmp_path}/{name}".rpartition("/")[0], exist_ok=True)
        system.pipe(f"{tmp_path}/{name}", name.encode())
    top = f"{scheme}://{tmp_path}"
    names = {
        "": ["a.txt", "b.txt", "sub.txt", "sub/c.txt"],
        "/*.txt": ["a.txt", "b.txt", "sub.txt"],
    }
    names |= {"/**/*.txt": names[""], "/s*/*": ["sub/c.txt"], "/[b].txt": ["b.txt"]}
    for pattern, expected in names.items():
        assert files.expand(top + pattern) == [f"{top}/{name}" for name in expected]
    assert content(f"{top}/sub/c.txt", 4) == b"c.txt"
    for url, status in files.listing(top):
        assert status == files.status(url) and status.size == len(content(url))
    assert files.exists(f"{top}/a.txt") and not files.exists(f"{top}/no.txt")


def test_the_stamp_of_a_remote_file_changes_with_it():
    system = fsspec.filesystem("memory")
    system.pipe("/stamp/a.txt", b"x")
    first = files.status("memory://stamp/a.txt")
    system.pipe("/stamp/a.txt", b"y")
    assert files.status("memory://stamp/a.txt").stamp != first.stamp


def test_compressed_remote_files_are_unpacked():
    fsspec.filesystem("memory").pipe("/packed/a.txt.zst", PACK["zst"](b"text" * 9))
    assert content("memory://packed/a.txt.zst") == b"text" * 9


def test_failures_of_remote_files_name_the_url_in_one_line(failing):
    with pytest.raises(UnreadableFile) as refused:
        content("failing://d/flaky")
    expected = "cannot read it at byte 0: RuntimeError: connection reset by peer"
    assert str(refused.value) == f"failing://d/flaky: {expected}"
    with pytest.raises(
        UnreadableFile, match="^failing://d/secret: cannot read it: .*AccessDenied$"
    ):
        content("failing://d/secret")
    with pytest.raises(UnreadableFile, match="^failing://d/gone: cannot read it: No such file"):
        content("failing://d/gone")
    with pytest.raises(UnreadableFile, match="^nosuch://d/x: cannot read it: .*not known: nosuch$"):
        files.expand("nosuch://d/x")


@pytest.mark.parametrize("pattern", ["f", "f/**/*.txt", "f/*/*/*.txt"])
def test_a_remote_folder_that_cannot_be_listed_is_not_passed_over(failing, pattern):
    with pytest.raises(UnreadableFile, match=r"failing://.*403 storage.objects.list denied$"):
        files.expand(f"failing://{pattern}")
    assert len(files.expand("failing://e/**/*.txt")) == 2


def test_a_missing_package_is_named(monkeypatch):
    def resolve(url):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", resolve)
    with pytest.raises(DataError) as refused:
        files.expand("s3://bucket/a.txt")
    wanted = "s3://bucket/a.txt: Install s3fs to access S3: pip install jaxgpt[cloud]"
    assert str(refused.value) == wanted
