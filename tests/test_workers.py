"""Workers turn partitions into shards: huge documents as if whole, failures told all at once."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from corpora import make_models, write_jsonl

from jaxgpt.config import DataConfig
from jaxgpt.corpus import files, formats, sources, workers
from jaxgpt.data.shard import open_shard, read_digests
from jaxgpt.errors import DataError, Interrupted, StorageError
from jaxgpt.tokenization import tokenizer

HUGE = [
    "the king  went to hall 12.\n\tif x:\n" * 60,
    "\u4e2d\u6587 caf\u00e9 \U0001f680\u2581 </s><0x41>" * 40,
    base64.b64encode(random.Random(0).randbytes(6000)).decode(),
    "z" * 9000,
    " " * 9000,
]
SMALL = [f"Document {i}: a small one.\n" for i in range(40)]
MIXED = [text for i, small in enumerate(SMALL) for text in (small, *HUGE[i // 8 :][: i % 8 == 0])]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def small_pieces(monkeypatch):
    """Make documents beyond 1000 bytes huge, and their pieces about 300 bytes."""
    monkeypatch.setattr(formats, "HELD_BYTES", 1000)
    monkeypatch.setattr(formats, "PIECE_BYTES", 300)
    monkeypatch.setattr(files, "BLOCK_BYTES", 300)


def tasks_for(folder, models, *entries, **options):
    """Return the tasks of a configuration, with a fresh folder for their shards."""
    cfg = DataConfig(sources=tuple(map(str, entries)), **({"valid_share": 0.0} | options))
    for split in workers.SPLITS:
        (folder / "out" / split).mkdir(parents=True, exist_ok=True)
    model = str(models / "a.model")
    digest = tokenizer.load(model).digest
    return [
        workers.Task(i, part, str(folder / "out"), cfg, model, digest)
        for i, part in enumerate(sources.partitions(cfg))
    ]


def prepare_one(folder, models, *entries, **options):
    """Return the result of the only partition."""
    (task,) = tasks_for(folder, models, *entries, **options)
    return workers.prepare_partition(task)


def documents(folder, result, split="train"):
    """Return the ids of the documents of a result, and their digests."""
    found, digests = [], []
    for entry in result[split]:
        shard = open_shard(folder / "out" / split / entry["name"], {"size": entry["size"]})
        tokens = np.fromfile(shard.file.path, shard.dtype, shard.stream_len, "", shard.tokens_at)
        bounds = list(shard.starts)
        found += [tokens[a + 1 : b].tolist() for a, b in zip(bounds, bounds[1:], strict=False)]
        digests += [row.tobytes() for row in read_digests(shard)]
    return found, digests


# Huge documents


def test_huge_documents_have_the_ids_of_whole_encoding(tmp_path, models, small_pieces):
    write_jsonl(tmp_path / "a.jsonl", MIXED)
    found, digests = documents(tmp_path, prepare_one(tmp_path, models, tmp_path / "a.jsonl"))
    tok = tokenizer.load(models / "a.model")
    assert found == [tok.encode(text) for text in MIXED]
    assert digests == [hashlib.sha256(text.encode()).digest()[:16] for text in MIXED]


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("partition_bytes", [5000, 10**6])
def test_shards_do_not_depend_on_what_counts_as_huge(
    tmp_path, models, monkeypatch, share, partition_bytes
):
    write_jsonl(tmp_path / "a.jsonl", MIXED)
    tasks = tasks_for(
        tmp_path, models, tmp_path / "a.jsonl", valid_share=share, partition_bytes=partition_bytes
    )
    whole = [workers.prepare_partition(task) for task in tasks]
    for held, piece in ((1000, 300), (0, 50)):
        monkeypatch.setattr(formats, "HELD_BYTES", held)
        monkeypatch.setattr(formats, "PIECE_BYTES", piece)
        monkeypatch.setattr(files, "BLOCK_BYTES", piece)
        assert [workers.prepare_partition(task) for task in tasks] == whole
    assert any(result["train"] for result in whole) == (share < 1.0)
    assert any(result["valid"] for result in whole) == (share > 0.0)
    assert sum(result["counts"]["forced_cuts"] for result in whole) == 4  # 9000 = 2 * 4096 + 808


def test_held_out_documents_keep_their_order_and_ids(tmp_path, models, small_pieces):
    write_jsonl(tmp_path / "a.jsonl", MIXED)
    result = prepare_one(tmp_path, models, tmp_path / "a.jsonl", valid_share=0.5)
    tok = tokenizer.load(models / "a.model")
    digests = [hashlib.sha256(text.encode()).digest() for text in MIXED]
    held_out = [digest[0] < 128 for digest in digests]  # half of all digests
    assert documents(tmp_path, result, "valid")[0] == [
        tok.encode(text) for text, out in zip(MIXED, held_out, strict=True) if out
    ]
    assert documents(tmp_path, result, "train")[0] == [
        tok.encode(text) for text, out in zip(MIXED, held_out, strict=True) if not out
    ]


def test_a_huge_document_that_turns_out_bad_leaves_nothing_behind(tmp_path, models, small_pieces):
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    write_jsonl(good, [HUGE[0], SMALL[0], HUGE[1]])
    first, second, third = good.read_bytes().splitlines(keepends=True)
    broken = [first[:-2] + b",}\n", first[:-3] + b'\xff"}\n']
    bad.write_bytes(broken[0] + first + broken[1] + second + broken[0] + third + broken[1])
    for split in workers.SPLITS:
        options = {"valid_share": float(split == "valid"), "bad_text": "skip"}
        result = prepare_one(tmp_path, models, bad, **options)
        assert result["counts"]["bad_skipped"] == 4
        found = documents(tmp_path, result, split)
        assert found == documents(tmp_path, prepare_one(tmp_path, models, good, **options), split)


MEMORY = """
import sys
from dataclasses import replace
from pathlib import Path
from jaxgpt.config import DataConfig
from jaxgpt.corpus import sources, workers
from jaxgpt.tokenization import tokenizer

def peak():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) << 10

def prepare(path, head, tail, size):
    with open(path, "wb") as file:
        file.write(head)
        for _ in range(size // 23_000):
            file.write(b"the king went to hall, " * 1000)
        file.write(tail)
    cfg = DataConfig(sources=(path,), valid_share=0.0, partition_bytes=1 << 30)
    digest = tokenizer.load(model).digest
    parts = enumerate(sources.partitions(cfg))
    tasks = [workers.Task(i, part, folder, cfg, model, digest) for i, part in parts]
    counts = [workers.prepare_partition(task)["counts"] for task in tasks]
    print(*(sum(count[name] for count in counts) for name in ("documents", "bytes")), end=" ")
    Path(path).unlink()
    return peak()

model, folder, name, head, tail = sys.argv[1:]
for split in workers.SPLITS:
    Path(folder, split).mkdir()
small = prepare(f"{folder}/{name}", head.encode(), tail.encode(), 6_000_000)
large = prepare(f"{folder}/{name}", head.encode(), tail.encode(), 30_000_000)
print(large - small)
"""


@pytest.mark.parametrize(
    ("name", "head", "tail"), [("a.txt", "", ""), ("a.jsonl", '{"n": [1], "text": "', '"}')]
)
def test_memory_does_not_grow_with_a_document_of_one_line(tmp_path, models, name, head, tail):
    command = [sys.executable, "-c", MEMORY, str(models / "a.model"), str(tmp_path)]
    done = subprocess.run(
        [*command, name, head, tail], capture_output=True, text=True, check=True, timeout=120
    )
    one, small, two, large, growth = map(int, done.stdout.split())
    assert (one, two) == (1, 1) and large - small >= 23_900_000
    assert growth < 16 << 20  # not even the 24 MB by which the text is longer


# What is counted


def test_a_huge_record_with_an_empty_text_is_empty(tmp_path, models, small_pieces):
    rows = [{"other": "x" * 2000, "text": text} for text in ("", "\ufeff", "a")]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    counts = prepare_one(tmp_path, models, tmp_path / "a.jsonl")["counts"]
    assert (counts["empty"], counts["documents"], counts["bytes"]) == (2, 1, 1)


def test_a_result_is_plain_json(tmp_path, models):
    write_jsonl(tmp_path / "a.jsonl", ["a", "b"])
    result = prepare_one(tmp_path, models, tmp_path / "a.jsonl")
    assert json.loads(json.dumps(result)) == result
    assert result["skipped_files"] == [] and result["counts"]["too_short"] == 0


@pytest.mark.parametrize(("good", "bad"), [(50, 50), (40, 59)])
def test_up_to_half_of_the_records_may_be_left_out(tmp_path, models, good, bad):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n' * good + b'{"body": "a"}\n' * bad)
    counts = prepare_one(tmp_path, models, tmp_path / "a.jsonl", bad_text="skip")["counts"]
    assert (counts["documents"], counts["bad_skipped"]) == (good, bad)


def test_leaving_out_most_of_many_records_is_refused_with_counts(tmp_path, models):
    (tmp_path / "a.jsonl").write_bytes(b'{"body": "a"}\n' * 51 + b'{"text": ""}\n' * 49)
    with pytest.raises(DataError, match=r"a\.jsonl: 51 of 100 records .*jsonl:1: no field 'text'"):
        prepare_one(tmp_path, models, tmp_path / "a.jsonl", bad_text="skip")


def test_files_without_a_record_are_counted(tmp_path, models):
    (tmp_path / "a.jsonl").write_bytes(b"")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"\n\n"))
    with pyarrow.ipc.new_stream(str(tmp_path / "c.arrow"), pyarrow.schema({"text": "string"})):
        pass
    (tmp_path / "d.txt").write_bytes(b"")
    (tmp_path / "e.jsonl.gz").write_bytes(gzip.compress(b"no\n"))
    (tmp_path / "f.jsonl").write_bytes(b'{"text": ""}\n')
    counts = prepare_one(tmp_path, models, tmp_path / "*.*", bad_text="skip")["counts"]
    assert (counts["empty_files"], counts["empty"], counts["bad_skipped"]) == (3, 2, 1)


def test_a_file_that_cannot_be_read_is_recorded_and_the_others_go_on(tmp_path, models):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"text {name}")
    (task,) = tasks_for(tmp_path, models, tmp_path / "*.txt", bad_text="skip")
    (tmp_path / "b.txt").unlink()
    result = workers.prepare_partition(task)
    (skipped,) = result["skipped_files"]
    assert skipped["path"] == str(tmp_path / "b.txt") and "No such file" in skipped["reason"]
    assert result["counts"]["documents"] == 2


def test_a_file_that_fails_midway_leaves_no_part_of_its_document(
    tmp_path, models, small_pieces, monkeypatch
):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"text {name} " * 1000)
    (task,) = tasks_for(tmp_path, models, tmp_path / "*.txt", bad_text="skip")
    real = files.blocks

    def failing(path, start=0):
        for number, block in enumerate(real(path, start)):
            if path.endswith("b.txt") and number == 20:  # of 24; the first 4 are held
                raise files.UnreadableFile("Input/output error")
            yield block

    monkeypatch.setattr(files, "blocks", failing)
    result = workers.prepare_partition(task)
    tok = tokenizer.load(models / "a.model")
    assert documents(tmp_path, result)[0] == [tok.encode(f"text {c} " * 1000) for c in "ac"]
    assert [entry["path"] for entry in result["skipped_files"]] == [str(tmp_path / "b.txt")]


def test_the_held_out_share_is_what_was_asked_for():
    digests = [hashlib.sha256(str(i).encode()).digest()[:16] for i in range(20_000)]
    found = sum(workers.is_held_out(digest, 0.15) for digest in digests)
    assert abs(found - 3000) < 4 * (20_000 * 0.15 * 0.85) ** 0.5
    assert not any(workers.is_held_out(digest, 0.0) for digest in digests)
    assert all(workers.is_held_out(digest, 1.0) for digest in [*digests, b"\xff" * 16])


def test_a_tokenizer_that_changed_is_refused(tmp_path, models):
    write_jsonl(tmp_path / "a.jsonl", ["a"])
    (task,) = tasks_for(tmp_path, models, tmp_path / "a.jsonl")
    other = replace(task, model=str(models / "b.model"))
    with pytest.raises(DataError, match="the tokenizer changed while it was used"):
        workers.prepare_partition(other)


# Many partitions


def failing_tasks(tmp_path, models, count, bad):
    """Return a task for each of `count` sources; those in `bad` have no JSON in their line 2."""
    paths = [tmp_path / f"{i:02}.jsonl" for i in range(count)]
    for i, path in enumerate(paths):
        path.write_bytes(b'{"text": "a"}\n' + (b"no\n" if i in bad else b""))
    return tasks_for(tmp_path, models, *paths)


@pytest.mark.parametrize("count", [1, 2])
def test_all_partitions_that_fail_are_named_after_the_others_are_finished(tmp_path, models, count):
    tasks, finished = failing_tasks(tmp_path, models, 5, {0, 3}), []
    with pytest.raises(DataError) as refused:
        finished.extend(workers.run_tasks(tasks, count))
    assert sorted(task.index for task, _ in finished) == [1, 2, 4]
    first, *lines = str(refused.value).split("\n")
    assert first == "2 partitions cannot be prepared:"
    assert len(lines) == 2
    assert sorted(line.strip().partition(": not JSON")[0] for line in lines) == [
        f"{tmp_path}/00.jsonl:2", f"{tmp_path}/03.jsonl:2"
    ]  # fmt: skip


def test_a_single_failure_is_raised_as_it_is(tmp_path, models):
    tasks = failing_tasks(tmp_path, models, 3, {1})
    with pytest.raises(DataError, match=r"^[^\n]*01\.jsonl:2: not JSON[^\n]*$"):
        list(workers.run_tasks(tasks, 1))


def test_very_many_failures_are_counted_and_not_all_listed(tmp_path, models, monkeypatch):
    monkeypatch.setattr(workers, "SHOWN_PROBLEMS", 20)
    tasks = failing_tasks(tmp_path, models, 23, set(range(23)))
    with pytest.raises(DataError) as refused:
        list(workers.run_tasks(tasks, 1))
    lines = str(refused.value).split("\n")
    assert len(lines) == 22 and lines[0].startswith("23 partitions")
    assert lines[-1].strip() == "... and 3 more"


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), StorageError("disk full"), Interrupted("x")]
)
def test_what_is_no_fault_of_the_data_ends_the_run_at_once(tmp_path, models, monkeypatch, error):
    tasks, started = failing_tasks(tmp_path, models, 3, {0}), []

    def prepare(task):
        started.append(task.index)
        raise error if task.index else DataError("bad")

    monkeypatch.setattr(workers, "prepare_partition", prepare)
    with pytest.raises(type(error)):
        list(workers.run_tasks(tasks, 1))
    assert started == [0, 1]


def test_a_killed_worker_ends_the_run_with_what_to_do(tmp_path, models):
    for i in range(40):  # 0.1 s of work each, so that much is left to do
        (tmp_path / f"{i:02}.txt").write_text(f"the king {i} " * 60_000)
    tasks = tasks_for(tmp_path, models, *sorted(tmp_path.glob("*.txt")))
    finished = workers.run_tasks(tasks, 2)
    next(finished)
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    spawned = [
        child for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    assert len(spawned) == 2
    os.kill(int(spawned[0]), signal.SIGKILL)
    with pytest.raises(DataError, match="a worker process was killed .* fewer workers"):
        list(finished)
