"""`prepare` under Apache Beam makes the store of a local run, and tells what went wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from corpora import TEXTS, change, configure, make_models, tree, write_jsonl

from jaxgpt.corpus import beam_runner, files
from jaxgpt.corpus.files import UnreadableFile
from jaxgpt.corpus.prepare import prepare
from jaxgpt.errors import ConfigError, DataError

PROCESSES = ("--direct_num_workers=2", "--direct_running_mode=multi_processing")
THREADS = ("--direct_num_workers=2", "--direct_running_mode=multi_threading")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def cfg(tmp_path, models):
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:60])
    write_jsonl(tmp_path / "b.jsonl", TEXTS[50:80])
    names = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    return configure(tmp_path, models, names, partition_bytes=4000)


@pytest.mark.parametrize("options", [PROCESSES, THREADS, ()])
def test_beam_makes_the_store_of_a_local_run(cfg, tmp_path, options):
    local = prepare(cfg, workers=1)
    seen = []
    elsewhere = change(cfg, store=str(tmp_path / "beam"))
    report = prepare(
        elsewhere, lambda *state: seen.append(state), runner="beam", runner_options=options
    )
    assert report == local and report["duplicates"] == 10
    assert tree(tmp_path / "beam") == tree(cfg.data.store)
    assert seen[-1][0] == seen[-1][1] and seen[-1][2] == 90


def test_a_partition_that_fails_is_reported_after_all_others_are_done(cfg, tmp_path):
    with open(tmp_path / "a.jsonl", "ab") as file:
        file.write(b"no json\n")
    with pytest.raises(DataError, match=r"a\.jsonl:61: not JSON") as caught:
        prepare(cfg, runner="beam")
    assert "Traceback" not in str(caught.value) and "beam" not in str(caught.value)
    key = json.loads(Path(cfg.data.store, ".prepare", "key.json").read_bytes())
    done = len(list(Path(cfg.data.store, ".prepare").glob("[0-9]*.json")))
    assert done == key["partitions"] - 1
    report = prepare(change(cfg, bad_text="skip"), workers=1)
    assert report["bad_skipped"] == 1


def test_an_unreadable_file_is_reported_as_a_local_run_does(cfg, monkeypatch):
    def refuse(path, start=0):
        raise UnreadableFile(f"{path}: Input/output error")

    monkeypatch.setattr(files, "blocks", refuse)
    for runner in ("beam", "local"):
        with pytest.raises(DataError, match="partitions cannot be prepared:\n.*a.jsonl: Input/out"):
            prepare(cfg, workers=1, runner=runner)


def test_options_that_beam_refuses_are_named(cfg):
    with pytest.raises(ConfigError, match="Beam refuses the runner options --direct_num_workers=x"):
        prepare(cfg, runner="beam", runner_options=["--direct_num_workers=x"])


def test_a_partition_may_be_done_twice_at_once(cfg, tmp_path, monkeypatch):
    local = prepare(cfg, workers=1)
    once = beam_runner.prepare_attempt

    def twice(task):
        other = threading.Thread(target=once, args=(task,))
        other.start()
        once(task)
        other.join()
        return once(task)

    monkeypatch.setattr(beam_runner, "prepare_attempt", twice)
    elsewhere = change(cfg, store=str(tmp_path / "beam"))
    assert prepare(elsewhere, runner="beam") == local
    assert tree(tmp_path / "beam") == tree(cfg.data.store)


def test_a_share_may_be_done_by_beam(cfg, tmp_path):
    local = prepare(cfg, workers=1)
    elsewhere = change(cfg, store=str(tmp_path / "beam"))
    prepare(elsewhere, partitions=(1, 2), runner="beam")
    assert prepare(elsewhere, workers=1) == local


def test_workers_that_do_not_see_the_folder_are_reported(cfg, monkeypatch):
    monkeypatch.setattr(beam_runner, "LATEST", 0.1)
    monkeypatch.setattr(beam_runner, "prepare_attempt", lambda task: task.index)
    with pytest.raises(DataError, match=r"partitions left no result in .* must see this folder"):
        prepare(cfg, runner="beam")


def test_a_failure_of_beam_itself_is_passed_on(cfg, monkeypatch):
    def broken(task):
        raise ZeroDivisionError("no disk of this size")

    monkeypatch.setattr(beam_runner, "prepare_attempt", broken)
    with pytest.raises(Exception, match="no disk of this size"):
        prepare(cfg, runner="beam")


def test_without_beam_the_extra_to_install_is_named(cfg, monkeypatch):
    monkeypatch.setitem(sys.modules, "apache_beam", None)
    with pytest.raises(ConfigError, match=r"pip install jaxgpt\[beam\]"):
        prepare(cfg, runner="beam")
    assert not Path(cfg.data.store).exists()


def test_runners_and_options_that_mean_nothing_are_refused(cfg):
    with pytest.raises(ConfigError, match="runner 'spark': choose local or beam"):
        prepare(cfg, runner="spark")
    with pytest.raises(ConfigError, match="--streaming are for Beam; choose runner beam"):
        prepare(cfg, runner_options=["--streaming"])


def test_beam_is_imported_only_to_run_it():
    code = (
        "import sys, jaxgpt.corpus.prepare, jaxgpt.corpus.merge, jaxgpt.corpus.beam_runner; "
        "print('apache_beam' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout == "False\n"
