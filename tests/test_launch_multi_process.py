"""Several processes on one machine: words, output, signals, exit code, and that none is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import runs
from recorders import alive, bash, ended, environment, program, recorder, stand_in, until

# What each process notes: its words, its number as `i`, and what a test asks of it.
NOTE = """
words=("$@")
while [ "$1" != --process ]; do shift; done
i=$2
echo "${words[*]}" >"$NOTES/$i.words"
env >"$NOTES/$i.env"
"""
RUNNING = 'sleep 1000 & echo "$$ $!" >"$NOTES/$i.pids"; wait'


def launch(folder: Path, count: int | str, body: str, *words: str, **variables: str):
    python = stand_in(folder / "bin/python", NOTE + body)
    variables = {"JAXGPT_PYTHON": str(python), "NOTES": str(folder)} | variables
    env = environment(folder / "bin", **variables)
    return bash("launch/multi_process.sh", str(count), *words, env=env)


def pids(folder: Path, count: int) -> list[int]:
    """Return the ids of `count` processes, and of one more that each has started."""
    files = [folder / f"{i}.pids" for i in range(count)]
    until(lambda: all(file.exists() and file.read_text().endswith("\n") for file in files))
    return [int(word) for file in files for word in file.read_text().split()]


def seen(folder: Path, process: int) -> dict[str, str]:
    lines = (folder / f"{process}.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def test_each_process_is_told_its_number_and_one_address_of_this_machine(tmp_path):
    words = ("train", "my.toml", "run.dir=a b", "--json")
    assert ended(launch(tmp_path, 3, "", *words))[0] == 0
    told = [(tmp_path / f"{i}.words").read_text().split() for i in range(3)]
    address = told[0][2]
    host, port = address.split(":")
    assert host == "127.0.0.1" and 1024 <= int(port) <= 65535
    for i in range(3):
        flags = f"--coordinator {address} --process {i} --processes 3"
        assert told[i] == f"train {flags} my.toml run.dir=a b --json".split()


def test_processes_compute_on_simulated_devices_as_many_as_asked(tmp_path):
    for devices, right in (({}, "1"), ({"DEVICES": "4"}, "4")):
        assert ended(launch(tmp_path, 2, "", "train", **devices))[0] == 0
        for i in range(2):
            given = seen(tmp_path, i)
            assert (given["JAX_NUM_CPU_DEVICES"], given["JAX_PLATFORMS"]) == (right, "cpu")


def test_the_first_process_prints_and_of_the_others_errors_are_marked(tmp_path):
    body = 'echo "result $i"; echo "trouble $i" >&2; printf "no end $i" >&2'
    _, out, err = ended(launch(tmp_path, 3, body, "train"))
    assert out == "result 0\n"
    lines = sorted(err.replace("no end 0", "no end 0\n").splitlines())
    assert lines == ["[1] no end 1", "[1] trouble 1", "[2] no end 2", "[2] trouble 2",
                     "no end 0", "trouble 0"]  # fmt: skip


@pytest.mark.parametrize(("codes", "job"), [("65 76 134", 65), ("76 75 75", 76), ("0 0 0", 0)])
def test_the_exit_code_is_the_most_telling(tmp_path, codes, job):
    code, _, err = ended(launch(tmp_path, 3, f'codes=({codes}); exit "${{codes[i]}}"', "train"))
    assert code == job
    told = {f"jaxgpt: process {i} ended with exit code {c}" for i, c in enumerate(codes.split())}
    assert set(err.splitlines()) == {line for line in told if not line.endswith(" 0")}


def test_a_process_that_does_not_end_after_the_failure_of_another_is_ended(tmp_path):
    body = f"trap '' TERM INT; [ $i = 1 ] && exit 65; {RUNNING}"
    process = launch(tmp_path, 2, body, "train", JAXGPT_GRACE="0.2")
    assert ended(process)[0] == 65
    until(lambda: not any(map(alive, pids(tmp_path, 1))))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_reaches_every_process_once(tmp_path, number):
    body = f"""
    trap 'echo {number.name} >>"$NOTES/$i.got"; exit 75' {number.name[3:]}
    touch "$NOTES/$i.up"
    for ((k = 0; k < 200; k++)); do sleep 0.05; done
    """
    process = launch(tmp_path, 3, body, "train")
    until(lambda: all((tmp_path / f"{i}.up").exists() for i in range(3)))
    process.send_signal(number)
    assert ended(process)[0] == 75
    assert [(tmp_path / f"{i}.got").read_text() for i in range(3)] == [f"{number.name}\n"] * 3


def test_a_second_interrupt_reaches_them_too(tmp_path):
    body = """
    trap 'echo x >>"$NOTES/$i.got"; ((n += 1)); if [ $n = 2 ]; then exit 130; fi' INT
    touch "$NOTES/$i.up"
    for ((k = 0; k < 200; k++)); do sleep 0.05; done
    """
    process = launch(tmp_path, 2, body, "train")
    until(lambda: all((tmp_path / f"{i}.up").exists() for i in range(2)))
    process.send_signal(signal.SIGINT)
    until(lambda: all((tmp_path / f"{i}.got").exists() for i in range(2)))
    process.send_signal(signal.SIGINT)
    assert ended(process)[0] == 130


def test_a_terminals_interrupt_reaches_every_process_once(tmp_path):
    body = """
    trap 'echo x >>"$NOTES/$i.got"; exit 75' INT
    touch "$NOTES/$i.up"
    for ((k = 0; k < 200; k++)); do sleep 0.05; done
    """
    python = stand_in(tmp_path / "bin/python", NOTE + body)
    env = environment(tmp_path / "bin", JAXGPT_PYTHON=str(python), NOTES=str(tmp_path))
    script = "launch/multi_process.sh"
    process = subprocess.Popen(
        ["bash", script, "2", "train"],
        env=env,
        cwd=Path(__file__).parent.parent,
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    until(lambda: all((tmp_path / f"{i}.up").exists() for i in range(2)))
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does: the whole foreground group
    assert process.wait(timeout=20) == 75
    assert [(tmp_path / f"{i}.got").read_text() for i in range(2)] == ["x\n"] * 2


def test_a_reader_that_leaves_ends_nothing(tmp_path):
    body = """
    touch "$NOTES/$i.up"
    until [ -e "$NOTES/enough" ]; do sleep 0.05; done
    echo "more $i"; echo "trouble $i" >&2
    touch "$NOTES/$i.done"
    exit 75
    """
    process = launch(tmp_path, 2, body, "train")
    until(lambda: all((tmp_path / f"{i}.up").exists() for i in range(2)))
    process.stdout.close()
    process.stderr.close()
    (tmp_path / "enough").touch()
    assert process.wait(timeout=20) == 75
    assert all((tmp_path / f"{i}.done").exists() for i in range(2))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_is_left_however_the_launcher_ends(tmp_path, how):
    process = launch(tmp_path, 2, RUNNING, "train")
    started = pids(tmp_path, 2)
    assert len(started) == 4 and all(map(alive, started))
    process.send_signal(how)
    ended(process)
    until(lambda: not any(map(alive, started)))


def test_no_process_is_left_when_all_have_ended(tmp_path):
    body = 'sleep 1000 & echo "$$ $!" >"$NOTES/$i.pids"; exit 0'
    process = launch(tmp_path, 2, body, "train")
    assert process.wait(timeout=20) == 0
    until(lambda: not any(map(alive, pids(tmp_path, 2))))


def test_each_process_gets_a_gpu_of_its_own(tmp_path):
    recorder(tmp_path / "bin/nvidia-smi", tmp_path / "calls", "printf '0\\n1\\n2\\n'")
    assert ended(launch(tmp_path, 2, "", "train", GPUS="1"))[0] == 0
    assert [seen(tmp_path, i)["CUDA_VISIBLE_DEVICES"] for i in range(2)] == ["0", "1"]
    assert "JAX_PLATFORMS" not in seen(tmp_path, 0)
    given = {"GPUS": "1", "CUDA_VISIBLE_DEVICES": "5,3"}
    assert ended(launch(tmp_path, 2, "", "train", **given))[0] == 0
    assert [seen(tmp_path, i)["CUDA_VISIBLE_DEVICES"] for i in range(2)] == ["5", "3"]


def test_more_processes_than_gpus_are_refused(tmp_path):
    code, _, err = ended(launch(tmp_path, 3, "", "train", GPUS="1", CUDA_VISIBLE_DEVICES="0,1"))
    assert (code, err) == (64, "jaxgpt: GPUS=1: 3 processes need 3 GPUs, here are 2\n")


@pytest.mark.parametrize("word", ["x", "0", "-1", "2 3"])
def test_a_number_of_devices_that_is_none_is_refused_in_one_line(tmp_path, word):
    code, _, err = ended(launch(tmp_path, 2, "", "train", DEVICES=word))
    assert (code, err) == (64, f"jaxgpt: DEVICES={word}: must be a number from 1 to 9999\n")


@pytest.mark.parametrize("words", [("0", "train"), ("two", "train"), ("-1", "train"), ("2",)])
def test_a_wrong_number_of_processes_is_refused_in_one_line(tmp_path, words):
    env = environment(tmp_path, JAXGPT_PYTHON=str(program(tmp_path / "python", "exit 1")))
    code, out, err = ended(bash("launch/multi_process.sh", *words, env=env))
    assert (code, out) == (64, "") and err.startswith("jaxgpt: usage:") and err.count("\n") == 1


def test_the_processes_of_a_real_run_find_each_other_and_share_a_mesh(tmp_path):
    runs.make_store(tmp_path)
    words = runs.overrides(tmp_path, "run", mesh__data=2, mesh__fsdp=2)
    variables = {"JAXGPT_PYTHON": sys.executable, "DEVICES": "2", "JAXGPT_NO_REEXEC": "1"}
    env = environment(tmp_path, HOME=str(tmp_path), **variables)
    script = ("launch/multi_process.sh", "2", "train", "--dry-run", "--json", *words)
    code, out, err = ended(bash(*script, env=env), timeout=120)
    assert code == 0, err
    result = json.loads(out)
    assert result["processes"] == 2 and result["devices"] == 4
