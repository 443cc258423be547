"""How the processes of a run find each other by the command line, or say who is missing."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from runs import finished, free_port, jaxgpt, make_store, overrides, together

HERE = socket.gethostname()


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return make_store(tmp_path_factory.mktemp("hosts"))


def test_a_dry_run_shows_hosts_devices_and_rows_and_leaves_the_run_alone(root):
    words = overrides(root, "dry", mesh__fsdp=2)
    first, other = finished(together(2, "train", "--dry-run", "--json", *words, devices=2))
    report = json.loads(first.stdout)
    host = {"host": HERE, "devices": 2, "kind": "cpu", "rows": 4}
    assert report["hosts"] == [{"process": 0, **host}, {"process": 1, **host}]
    assert (report["processes"], report["devices"], report["launch"]) == (2, 4, "flags")
    assert {k: n for k, n in report["mesh"].items() if n > 1} == {"data": 2, "fsdp": 2}
    assert report["rows_per_device"] == 2
    assert report["coordinator"].startswith("localhost:")
    assert (other.stdout, other.stderr) == ("", "")
    assert not (root / "dry").exists()


def test_a_batch_that_does_not_divide_over_the_processes_is_refused_by_each(root):
    words = overrides(root, "ten", train__global_batch=10)
    processes = together(3, "train", "--dry-run", *words)
    assert [process.returncode for process in processes] == [64] * 3
    first, second, _ = (process.stderr.splitlines()[-1] for process in processes)
    assert first.startswith("jaxgpt: error: train.global_batch = 10 rows do not divide over 3 ")
    assert "of 3 processes" in first
    assert second == first.replace("jaxgpt: ", f"jaxgpt: [{HERE}, process 1] ", 1)


def test_a_process_that_finds_nobody_ends_in_time_with_one_line(root):
    address = f"localhost:{free_port()}"
    words = ["train", "--dry-run", *overrides(root, "none"), "--process=1", "--processes=2"]
    process = jaxgpt(*words, f"--coordinator={address}", JAXGPT_START_TIMEOUT="1")
    assert process.returncode == 76
    (line,) = process.stderr.splitlines()
    assert line.startswith(f"jaxgpt: [{HERE}, process 1] error: process 1 ({HERE}) found no ")
    assert address in line


def test_process_0_names_those_who_did_not_come(root):
    words = ["train", "--dry-run", *overrides(root, "none"), "--process=0", "--processes=3"]
    process = jaxgpt(*words, f"--coordinator=localhost:{free_port()}", JAXGPT_START_TIMEOUT="1")
    assert process.returncode == 76
    (line,) = process.stderr.splitlines()
    assert line.endswith(
        f"1 of 3 processes have started after 1 s: present 0 ({HERE}); missing 1, 2"
    )


def test_leftovers_of_a_slurm_job_are_said_and_do_not_hold_up_a_start(root):
    words = ["train", "--dry-run", *overrides(root, "slurm", train__global_batch=8)]
    left = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]"}
    process = jaxgpt(*words, "--json", **left)
    assert process.returncode == 0
    assert json.loads(process.stdout)["processes"] == 1
    assert "SLURM_STEP_NODELIST" in process.stderr and "--processes 1" in process.stderr
