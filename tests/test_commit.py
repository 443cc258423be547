"""Commit records and the folder they rule: what is accepted, exists, is kept or removed."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from jaxgpt.checkpoint import commit
from jaxgpt.checkpoint.record import Damaged, Leaf, Record, StoredFile, decode, encode
from jaxgpt.errors import ConfigError, NothingRestorable


def make_record(step: int = 7, **changes: object) -> Record:
    fields = {
        "step": step,
        "position": 2**41 + 3,
        "finite": True,
        "layout": "per-layer",
        "leaves": (Leaf("params.w", (8, 4), "float32", 2**32 - 1), Leaf("step", (), "int32", 0)),
        "files": (StoredFile("d/data", 128, "0" * 64),),
        "identity": {"model": "abc"},
        "meta": {"tokens": 2**50, "loss": 1.5, "names": ["a", None, True]},
        "config": {"model": {"vocab_size": 64}},
        "mesh": {"data": 8, "processes": 1},
        "versions": {"jax": "0.12"},
    }
    return Record(**{**fields, **changes})


def signed(body: dict) -> bytes:
    """A record with a right checksum around whatever `body` holds."""
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return json.dumps({**body, "checksum": hashlib.sha256(canonical.encode()).hexdigest()}).encode()


def body() -> dict:
    made = json.loads(encode(make_record()))
    del made["checksum"]
    return made


def changed(path: str, value: object) -> bytes:
    """The record with one value replaced (or, for None, removed) and signed again."""
    made = body()
    *parents, last = [int(key) if key.isdigit() else key for key in path.split("/")]
    node = made
    for key in parents:
        node = node[key]
    if value is None:
        del node[last]
    else:
        node[last] = value
    return signed(made)


# Records.


def test_a_record_comes_back_equal():
    record = make_record()
    assert decode(encode(record), "here") == record


def test_the_signature_of_these_tests_is_that_of_the_records():
    assert decode(signed(body()), "here") == make_record()


def test_a_flipped_bit_anywhere_in_a_record_never_changes_what_is_read():
    record, raw = make_record(), encode(make_record())
    for index in range(len(raw)):
        flipped = bytearray(raw)
        flipped[index] ^= 1 << (index % 8)
        try:
            assert decode(bytes(flipped), "here") == record  # a spelling of the same JSON
        except Damaged:
            pass


def test_a_record_cut_anywhere_is_damaged():
    raw = encode(make_record())
    for length in range(0, len(raw) - 1, 17):
        with pytest.raises(Damaged):
            decode(raw[:length], "here")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("leaves/0/shape", [2**62]),
        ("leaves/0/shape", [2**31, 2**31]),
        ("leaves/0/shape", [-1, 4]),
        ("leaves/0/shape", [8.0, 4]),
        ("leaves/0/shape", [True, 4]),
        ("leaves/0/shape", [1] * 33),
        ("leaves/0/shape", "84"),
        ("leaves/0/fingerprint", 2**32),
        ("leaves/0/fingerprint", -1),
        ("leaves/0/dtype", "f" * 33),
        ("leaves/0/path", ""),
        ("leaves/1/path", "params.w"),
        ("leaves/0/extra", 1),
        ("leaves/0", {}),
        ("leaves", {}),
        ("files/0/size", -5),
        ("files/0/size", 2**63),
        ("files/0/sha256", "xyz"),
        ("files/0/sha256", 5),
        ("files/0/name", "../../etc/passwd"),
        ("files/0/name", "/etc/passwd"),
        ("files/0/name", "a\0b"),
        ("files/0/name", "a//b"),
        ("files/0/name", "..\\b"),
        ("step", -1),
        ("step", True),
        ("position", 1.0),
        ("position", 10**30),
        ("finite", 1),
        ("layout", "diagonal"),
        ("identity/model", 5),
        ("versions", []),
        ("mesh/data", -2),
        ("meta", []),
        ("config", json.loads("[" * 30 + "]" * 30)),
        ("step", None),
        ("leaves", None),
        ("files/0/size", None),
        ("unknown", 1),
        ("format", 0),
        ("format", "1"),
    ],
)
def test_an_impossible_record_is_refused_though_its_checksum_is_right(path, value):
    with pytest.raises(Damaged) as refused:
        decode(changed(path, value), "here")
    assert "\n" not in str(refused.value) and str(refused.value).startswith("here: ")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b"\xff\xfe{}",
        b'{"step": 1, "step": 2}',
        b'{"step": NaN}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"step": 1' + b"0" * 100_000 + b"}",
    ],
)
def test_what_is_not_a_record_is_damaged(raw):
    with pytest.raises(Damaged):
        decode(raw, "here")


def test_a_newer_format_is_a_message_and_not_damage():
    with pytest.raises(ConfigError, match="format 2"):
        decode(changed("format", 2), "here")


def test_a_damaged_step_ends_the_command_with_66():
    assert issubclass(Damaged, NothingRestorable) and Damaged("x").exit_code == 66


@pytest.mark.parametrize("meta", [{"a": float("nan")}, {"a": (1, 2)}, {1: "a"}, {"a": object()}])
def test_what_json_cannot_hold_is_refused_before_it_is_written(meta):
    with pytest.raises((ValueError, TypeError)):
        encode(make_record(meta=meta))


# The folder.


def make_step(root: Path, step: int) -> Record:
    """A published step with two files."""
    folder = root / str(step) / "d"
    folder.mkdir(parents=True)
    (folder / "data").write_bytes(bytes(range(256)) * 8)
    (folder.parent / "meta").write_bytes(b"{}")
    record = make_record(step, files=commit.seal(root / str(step)))
    commit.publish(root, record)
    return record


def names(root: Path) -> list[str]:
    return sorted(os.listdir(root))


def test_a_published_step_is_listed_and_read_back(tmp_path):
    records = {step: make_step(tmp_path, step) for step in (3, 12, 7)}
    assert commit.list_steps(tmp_path) == [3, 7, 12]
    assert all(commit.read_record(tmp_path, step) == records[step] for step in records)


def test_the_file_table_holds_names_sizes_and_hashes(tmp_path):
    table = {file.name: file for file in make_step(tmp_path, 1).files}
    assert set(table) == {"d/data", "meta"}
    assert table["d/data"].size == 2048
    assert table["meta"].sha256 == hashlib.sha256(b"{}").hexdigest()


def test_only_well_named_records_are_steps(tmp_path):
    for name in ("5", "05.ok.json", "x.ok.json", "5.ok.json.tmp", "-1.ok.json", "9" * 30):
        (tmp_path / name).write_text("")
    (tmp_path / "6.ok.json").mkdir()
    assert commit.list_steps(tmp_path) == []


def test_an_absent_folder_has_no_steps(tmp_path):
    assert commit.list_steps(tmp_path / "none") == []


def test_a_record_under_another_name_is_damaged(tmp_path):
    make_step(tmp_path, 3)
    (tmp_path / "3.ok.json").rename(tmp_path / "4.ok.json")
    with pytest.raises(Damaged, match="step 3"):
        commit.read_record(tmp_path, 4)


def test_an_endless_record_is_refused_without_being_read(tmp_path):
    with (tmp_path / "1.ok.json").open("wb") as file:
        file.truncate(2**40)  # takes no space, and no machine has the memory
    with pytest.raises(Damaged, match="larger"):
        commit.read_record(tmp_path, 1)


@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "delete", "link"])
def test_a_changed_file_is_found(tmp_path, damage):
    record = make_step(tmp_path, 1)
    path = tmp_path / "1/d/data"
    content = path.read_bytes()
    if damage == "flip":
        path.write_bytes(content[:99] + bytes([content[99] ^ 4]) + content[100:])
    elif damage == "cut":
        path.write_bytes(content[:-1])
    elif damage == "grow":
        path.write_bytes(content + b"x")
    else:
        path.unlink()
    if damage == "link":
        (tmp_path / "elsewhere").write_bytes(content)
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Damaged, match="1/d/data"):
        commit.check_files(tmp_path / "1", record.files, hash_up_to=1 << 20)


def test_large_files_are_hashed_only_when_asked(tmp_path):
    record = make_step(tmp_path, 1)
    (tmp_path / "1/d/data").write_bytes(bytes(2048))
    commit.check_files(tmp_path / "1", record.files, hash_up_to=2047)
    with pytest.raises(Damaged):
        commit.check_files(tmp_path / "1", record.files, hash_up_to=2048)


def test_everything_a_record_vouches_for_is_durable_before_it_is_published(tmp_path, monkeypatch):
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def note_sync(handle: int) -> None:
        events.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    def note_rename(self: Path, target: Path) -> Path:
        events.append(f"-> {target}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    make_step(tmp_path, 1)
    published = events.index(f"-> {tmp_path}/1.ok.json")
    before, after = events[:published], events[published + 1 :]
    for path in ("1/d/data", "1/d", "1/meta", "1", "", "1.ok.json.tmp"):
        assert str(tmp_path / path) in before, path
    assert after == [str(tmp_path)]


def test_quarantine_keeps_folder_and_record_and_never_overwrites(tmp_path):
    for _ in range(2):
        make_step(tmp_path, 5)
        commit.quarantine(tmp_path, 5, "damaged")
    assert names(tmp_path) == ["quarantine"]
    assert names(tmp_path / "quarantine") == [
        "5-damaged-1",
        "5-damaged-1.ok.json",
        "5-damaged-2",
        "5-damaged-2.ok.json",
    ]


def test_quarantine_works_without_the_folder_or_without_the_record(tmp_path):
    make_step(tmp_path, 1)
    (tmp_path / "1.ok.json").unlink()
    (tmp_path / "2.ok.json").write_text("")
    for step in (1, 2):
        commit.quarantine(tmp_path, step, "damaged")
    assert names(tmp_path / "quarantine") == ["1-damaged-1", "2-damaged-1.ok.json"]


def test_a_deleted_step_leaves_nothing(tmp_path):
    make_step(tmp_path, 5)
    commit.delete(tmp_path, 5)
    assert names(tmp_path) == []


def test_cleaning_removes_what_is_ours_and_unfinished_and_nothing_else(tmp_path):
    make_step(tmp_path, 4)
    commit.mark_pending(tmp_path, 4)  # cut off between publishing and unmarking
    commit.mark_pending(tmp_path, 5)  # cut off while writing
    (tmp_path / "5.orbax-checkpoint-tmp/d").mkdir(parents=True)
    commit.mark_pending(tmp_path, 6)  # cut off before publishing
    (tmp_path / "6").mkdir()
    (tmp_path / "6.ok.json.tmp").write_text("{")
    (tmp_path / "9").mkdir()  # somebody's
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "quarantine/3-damaged-1").mkdir(parents=True)
    commit.clean(tmp_path)
    assert names(tmp_path) == ["4", "4.ok.json", "9", "notes.txt", "quarantine"]
    assert (tmp_path / "quarantine/3-damaged-1").exists()
    assert commit.strangers(tmp_path) == ["9"]


@pytest.mark.parametrize(
    ("finite", "keep", "keep_every", "gone"),
    [
        ("1+ 2+ 3+", 2, 0, [1]),
        ("1+ 2+ 3+ 4+", 1, 0, [1, 2, 3]),
        ("1+", 1, 0, []),
        ("1+ 2-", 1, 0, []),  # the newest holds NaN: the last good one stays
        ("1+ 2- 3+", 1, 0, [1, 2]),
        ("1- 2-", 1, 0, []),
        ("10+ 15+ 20+ 25+ 30+", 1, 10, [15, 25]),
        ("10- 15+ 20+", 1, 10, [10, 15]),
        ("1+ 2+", 0, 0, [1]),  # one is always kept
    ],
)
def test_retention_keeps_the_newest_finite_steps_and_the_periodic_ones(
    finite, keep, keep_every, gone
):
    steps = {int(entry[:-1]): entry[-1] == "+" for entry in finite.split()}
    assert commit.superfluous(steps, keep, keep_every) == gone
