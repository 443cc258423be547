"""`prepare` killed at any moment, run twice or run on something else ends right or is refused."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from corpora import TEXTS, change, make_corpus, make_models, tree, write_jsonl

from jaxgpt.config import TokenizerConfig
from jaxgpt.corpus import prepare as prepare_module
from jaxgpt.corpus.prepare import prepare
from jaxgpt.data.store import open_store
from jaxgpt.errors import DataError
from jaxgpt.tokenization import tokenizer


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def cfg(tmp_path, models):
    return make_corpus(tmp_path, models)


SCENARIOS = (
    "fresh", "after another", "another after", "dedup", "grown", "grown dedup", "grown and back",
    "share", "merge",
)  # fmt: skip


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_work_killed_before_any_change_on_disk_ends_in_the_same_files(tmp_path, models, scenario):
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:90])
    write_jsonl(tmp_path / "b.jsonl", TEXTS[85:140])
    write_jsonl(tmp_path / "copies.jsonl", TEXTS[60:100] + TEXTS[60:70])
    child = Path(__file__).with_name("prepare_child.py")
    command = [sys.executable, str(child), scenario, str(tmp_path), str(models / "a.model")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    outcome = json.loads(result.stdout)
    whole, *trees = outcome["trees"]
    assert outcome["kills"] >= 10 and len(trees) == outcome["kills"] + 1
    assert "prepared.json" in whole and not any("partial" in name for name in whole)
    assert all(tree == whole for tree in trees)


HALTED = """
import sys, time
from jaxgpt import config
from jaxgpt.corpus.prepare import prepare

def progress(done, total, documents):
    print(done, flush=True)
    if done > total // 2:
        time.sleep(600)

if __name__ == "__main__":
    prepare(config.load(sys.argv[1]), progress, workers=2)
"""


@pytest.fixture
def halted(cfg, tmp_path):
    """Start `prepare` with two workers in a process that halts after half of the work."""
    data = cfg.data
    (tmp_path / "c.toml").write_text(
        f"[tokenizer]\npath = {json.dumps(cfg.tokenizer.path)}\n[data]\n"
        f"sources = {json.dumps(data.sources)}\nstore = {json.dumps(data.store)}\n"
        f"valid_share = {data.valid_share}\npartition_bytes = {data.partition_bytes}\n"
    )
    (tmp_path / "halted.py").write_text(HALTED)
    command = [sys.executable, str(tmp_path / "halted.py"), str(tmp_path / "c.toml")]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    total = sum(
        os.path.getsize(p) for p in [tmp_path / "records.jsonl", *(tmp_path / "files").iterdir()]
    )
    for line in process.stdout:
        if int(line) > total // 2:
            break
    yield process
    process.kill()
    process.wait()


def test_a_killed_run_with_workers_goes_on_to_the_same_store(cfg, tmp_path, halted):
    halted.kill()
    halted.wait()
    finished = len(list(Path(cfg.data.store, ".prepare").glob("[0-9]*.json")))
    seen = []
    report = prepare(cfg, lambda *state: seen.append(state), workers=1)
    assert finished >= 2 and seen[0][0] > seen[0][1] // 2  # what was done was not done again
    assert report == prepare(change(cfg, store=str(tmp_path / "whole")), workers=1)
    assert tree(cfg.data.store) == tree(tmp_path / "whole")


def test_a_second_prepare_of_the_same_folder_is_refused_with_the_holder(cfg, halted):
    with pytest.raises(
        DataError, match=f"another process prepares here already: pid {halted.pid} on"
    ):
        prepare(cfg)


def test_workers_end_when_their_parent_is_killed(cfg, halted):
    children = Path(f"/proc/{halted.pid}/task/{halted.pid}/children").read_text().split()
    assert len(children) >= 2
    halted.send_signal(signal.SIGKILL)
    halted.wait()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_sigterm_to_all_of_its_processes_ends_prepare_with_75_and_keeps_its_work(
    tmp_path, models, workers
):
    text = " ".join(TEXTS)
    write_jsonl(tmp_path / "a.jsonl", [f"{number} {text}" for number in range(200)])
    store = tmp_path / "store"
    words = [
        f'data.sources=["{tmp_path / "a.jsonl"}"]', f"data.store={store}",
        f"tokenizer.path={models / 'a.model'}", "data.partition_bytes=500000",
    ]  # fmt: skip
    command = [sys.executable, "-m", "jaxgpt.cli", "prepare", *words, "--workers", workers]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not (done := list(store.glob(".prepare/[0-9]*.json"))) and process.poll() is None:
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGTERM)
    problem = process.communicate()[1]
    assert process.returncode == 75
    assert problem == "jaxgpt: SIGTERM: prepare goes on from here when it is started again\n"
    assert all(path.exists() for path in done)


def test_the_lock_of_a_dead_process_is_taken_over(cfg):
    Path(cfg.data.store).mkdir()
    Path(cfg.data.store, ".lock").write_text("pid 999999999 on elsewhere")
    assert prepare(cfg)["documents"] == 300


def test_a_lock_that_is_held_is_released_after_an_error(cfg, monkeypatch):
    monkeypatch.setattr(prepare_module, "publish", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare(cfg)
    with open(Path(cfg.data.store, ".lock")) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_finished_store_is_recognised(cfg):
    first = prepare(cfg)
    before = {path: path.stat().st_mtime_ns for path in Path(cfg.data.store).rglob("*.shard")}
    assert prepare(cfg) == first | {"already_prepared": True}
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"valid_share": 0.2}, "data.valid_share was 0.1, now 0.2"),
        ({"bad_text": "skip"}, "data.bad_text was 'error', now 'skip'"),
        ({"text_field": "body"}, "data.text_field was 'text', now 'body'"),
    ],
)
def test_a_store_of_other_settings_is_refused_by_name(cfg, options, named):
    prepare(cfg)
    with pytest.raises(DataError, match="was prepared from something else") as refused:
        prepare(change(cfg, **options))
    assert named in str(refused.value)


def test_a_store_of_other_input_is_refused(cfg, tmp_path):
    prepare(cfg)
    write_jsonl(tmp_path / "records.jsonl", TEXTS[:200])
    with pytest.raises(
        DataError, match=r"something else: \S+records\.jsonl has changed \(size or time\); delete"
    ):
        prepare(cfg)


def test_a_tokenizer_swapped_at_the_same_path_is_refused(cfg, tmp_path, models):
    model = tmp_path / "t.model"
    cfg = replace(cfg, tokenizer=TokenizerConfig(path=str(model)))
    model.write_bytes((models / "a.model").read_bytes())
    prepare(cfg)
    model.write_bytes((models / "b.model").read_bytes())
    with pytest.raises(
        DataError, match="something else: tokenizer was '[0-9a-f]{64}', now '[0-9a-f]{64}'"
    ):
        prepare(cfg)
    Path(cfg.data.store, "tokenizer.model").write_bytes((models / "b.model").read_bytes())
    with pytest.raises(DataError, match="something else: tokenizer"):
        prepare(replace(cfg, tokenizer=TokenizerConfig()))


def test_unfinished_work_of_another_tokenizer_is_thrown_away(cfg, tmp_path, models):
    def stop(done, total, documents):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(cfg, stop, workers=1)
    other = replace(cfg, tokenizer=TokenizerConfig(path=str(models / "b.model")))
    report = prepare(other)
    clean = prepare(change(other, store=str(tmp_path / "clean")))
    assert report == clean
    assert len(list(Path(cfg.data.store).rglob("*.shard"))) == len(
        list((tmp_path / "clean").rglob("*.shard"))
    )


def test_the_tokenizer_beside_the_data_is_used_by_default(cfg, models):
    Path(cfg.data.store).mkdir()
    Path(cfg.data.store, "tokenizer.model").write_bytes((models / "b.model").read_bytes())
    prepare(replace(cfg, tokenizer=TokenizerConfig()))
    assert open_store(cfg.data.store).tokenizer_digest == tokenizer.load(models / "b.model").digest


def test_a_store_damaged_since_is_not_taken_for_finished(cfg):
    prepare(cfg)
    next(Path(cfg.data.store, "train").glob("*.shard")).unlink()
    with pytest.raises(DataError, match=r"is damaged: .*\.shard: .*; restore the file, or delete"):
        prepare(cfg)


def test_a_partition_whose_shard_is_lost_is_prepared_again(cfg, tmp_path):
    def stop(done, total, documents):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(cfg, stop, workers=1)
    next(Path(cfg.data.store, "train").glob("*.shard")).unlink()
    assert prepare(cfg) == prepare(change(cfg, store=str(tmp_path / "whole")))
