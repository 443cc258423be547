"""How the processes of a run find each other by the command line, or say who is missing."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
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


def test_a_dry_run_shows_two_nodes_of_one_slurm_task_with_all_their_devices(root):
    """JAX's own detection would give a task one device, whatever its node has."""
    for job in itertools.count(1):
        with socket.socket() as server, contextlib.suppress(OSError):
            server.bind(("localhost", 61440 + job))
            break
    step = {"SLURM_JOB_ID": str(job), "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "localhost,n2"}
    step |= {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    words = ["train", "--dry-run", "--json", *overrides(root, "slurm-dry", mesh__fsdp=2)]

    def task(number: str) -> subprocess.CompletedProcess:
        of_task = {"SLURM_PROCID": number, "SLURM_NODEID": number, "SLURM_LOCALID": "0"}
        return jaxgpt(*words, devices=2, **step, **of_task)

    with ThreadPoolExecutor(2) as pool:
        first, other = finished(list(pool.map(task, "01")))
    report = json.loads(first.stdout)
    assert (report["processes"], report["devices"], report["launch"]) == (2, 4, "slurm")
    assert [host["devices"] for host in report["hosts"]] == [2, 2]
    assert report["coordinator"] == f"localhost:{61440 + job}"
    assert (other.stdout, other.stderr) == ("", "")


def test_a_host_on_which_a_device_is_missing_is_named_by_a_dry_run(root):
    """Five devices would do for ten rows: no other check would find it."""
    words = ["train", "--dry-run", *overrides(root, "uneven", train__global_batch=10)]
    address = f"localhost:{free_port()}"

    def host(process: int) -> subprocess.CompletedProcess:
        flags = [f"--coordinator={address}", f"--process={process}", "--processes=2"]
        return jaxgpt(*words, *flags, devices=3 - process)

    with ThreadPoolExecutor(2) as pool:
        processes = list(pool.map(host, range(2)))
    assert [process.returncode for process in processes] == [78] * 2
    for process in processes:
        assert f"process 1 ({HERE}) has 2 x cpu, process 0 ({HERE}) has 3 x cpu" in process.stderr


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
