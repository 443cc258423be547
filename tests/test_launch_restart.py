"""Restarts: which exit codes are tried again, how often, and what a signal does."""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path

import pytest
from recorders import ROOT, alive, bash, ended, environment, planned, program, starts, until

from jaxgpt import errors
from jaxgpt.checkpoint import commit

RETRIED = (75, 76, 134, 137)
ONCE = (1, 70, 74, 139)
NEVER = (2, 64, 65, 66, 78, 79, 127, 130, 143)


def run(folder: Path, *ends: str, **variables: str) -> tuple[int, str, str]:
    """Run a command that ends as planned under launch/restart.sh."""
    command = program(folder / "command", planned(folder, *ends))
    env = environment(folder, **variables)
    return ended(bash("launch/restart.sh", str(folder / "run"), str(command), env=env))


def function(script: str, **variables: str) -> str:
    """Return what a script prints after sourcing launch/restart.sh."""
    env = environment(Path("/nonexistent"), **variables)
    code, out, err = ended(
        bash("-c", f"set -euo pipefail; source launch/restart.sh; {script}", env=env)
    )
    assert code == 0, err
    return out.strip()


def test_an_interrupted_run_is_started_again_until_it_is_done(tmp_path):
    code, _, err = run(tmp_path, "75:10", "75:20", "0:30")
    assert (code, len(starts(tmp_path))) == (0, 3)
    assert [line.split(":")[1] for line in err.splitlines()] == [
        " exit code 75, newest saved step 10 (was -1)",
        " exit code 75, newest saved step 20 (was 10)",
    ]


@pytest.mark.parametrize("exit_code", RETRIED)
def test_three_restarts_that_save_no_later_step_are_the_last(tmp_path, exit_code):
    code, _, err = run(tmp_path, f"{exit_code}:5", *[str(exit_code)] * 9)
    assert (code, len(starts(tmp_path))) == (exit_code, 4)
    assert err.splitlines()[-1] == (
        f"jaxgpt: exit code {exit_code}: still at step 5 after 3 restart(s)"
    )


def test_restarts_go_on_while_steps_advance(tmp_path):
    ends = ["76:1", "76", "76", "76:2", "76", "76", "134:3", "76", "137:4", "0"]
    code, _, _ = run(tmp_path, *ends)
    assert (code, len(starts(tmp_path))) == (0, len(ends))


def test_the_number_of_restarts_without_progress_can_be_set(tmp_path):
    code, _, _ = run(tmp_path, *["76"] * 9, JAXGPT_RESTARTS="1")
    assert (code, len(starts(tmp_path))) == (76, 2)


def test_a_host_that_ends_every_start_is_named_with_how_often_it_did(tmp_path):
    blame = f'echo "${{hosts[$(wc -l <{tmp_path}/starts)]}}" >"$JAXGPT_BLAME"\n'
    plan = planned(tmp_path, "76:5", *["76"] * 9).replace(
        "IFS=", f"hosts=(x n7 n9 n7 n7)\n{blame}IFS="
    )
    command = program(tmp_path / "command", plan)
    env = environment(tmp_path)
    code, _, err = ended(bash("launch/restart.sh", str(tmp_path / "run"), str(command), env=env))
    assert (code, len(starts(tmp_path))) == (76, 4)
    assert [line.partition("; ")[2] for line in err.splitlines()] == [
        "host n7 ended it",
        "host n9 ended it",
        "host n7 ended it 2 times: look at it, or leave it out",
        "host n7 ended it 3 times: look at it, or leave it out",
    ]
    assert err.splitlines()[-1].startswith("jaxgpt: exit code 76: still at step 5 after 3 restart")


@pytest.mark.parametrize("exit_code", ONCE)
def test_a_bug_and_failing_storage_are_tried_once_more(tmp_path, exit_code):
    code, _, err = run(tmp_path, *[str(exit_code)] * 5)
    assert (code, len(starts(tmp_path))) == (exit_code, 2)
    assert "not tried a third time" in err


def test_what_was_tried_once_may_be_again_after_a_later_step(tmp_path):
    code, _, _ = run(tmp_path, "70:1", "74:2", "70:3", "0")
    assert (code, len(starts(tmp_path))) == (0, 4)


@pytest.mark.parametrize("exit_code", NEVER)
def test_what_needs_a_person_is_not_tried_again(tmp_path, exit_code):
    code, _, err = run(tmp_path, f"{exit_code}:7", "0")
    assert (code, len(starts(tmp_path))) == (exit_code, 1)
    assert err == f"jaxgpt: exit code {exit_code}: not tried again, it needs a person\n"


def test_the_codes_are_those_of_the_errors():
    assert {errors.Interrupted.exit_code, errors.HangError.exit_code} <= set(RETRIED)
    assert {errors.StorageError.exit_code, errors.JaxgptError.exit_code} <= set(ONCE)
    others = (errors.ConfigError, errors.DataError, errors.NothingRestorable)
    others += (errors.DisagreementError, errors.NumericsError)
    assert {error.exit_code for error in others} <= set(NEVER)


def test_pauses_double_while_nothing_advances_and_none_follows_an_interruption():
    script = """
    sleep() { echo "slept $1"; }
    attend() { code=${ends[0]}; ends=("${ends[@]:1}"); return "$code"; }
    ends=(76 76 134 75 0)
    JAXGPT_RESTARTS=9 JAXGPT_BACKOFF=10
    until_done /nonexistent x 2>/dev/null
    """
    assert function(script).split("\n") == ["slept 10", "slept 20", "slept 40", "slept 0"]


def test_the_newest_step_is_that_of_the_commit_records(tmp_path):
    ckpt = tmp_path / "ckpt"
    (ckpt / "quarantine").mkdir(parents=True)
    (ckpt / "500").mkdir()
    for name in ("7.ok.json", "120.ok.json", "0900.ok.json", "x.ok.json", "800.ok.json.tmp",
                 "600.pending", "quarantine/999.ok.json"):  # fmt: skip
        (ckpt / name).touch()
    newest = int(function(f"newest_step {tmp_path}"))
    assert newest == 120 == max(commit.list_steps(ckpt))
    assert function("newest_step /nonexistent") == "-1"


@pytest.mark.parametrize(
    ("codes", "told"),
    [
        ("0 0", 0), ("0 75", 75), ("75 76", 76), ("76 134 76", 134), ("76 137", 137),
        ("76 65 134", 65), ("137 70", 70), ("76 1", 1), ("74 70", 70), ("130 137 76", 130),
        ("76 143", 143), ("79 76", 79), ("64 79", 64), ("76 78 64", 78), ("", 0),
    ],
)  # fmt: skip
def test_the_most_telling_code_is_that_of_a_cause(codes, told):
    assert int(function(f"most_telling {codes}")) == told


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_reaches_the_command_and_is_the_end(tmp_path, number):
    command = program(
        tmp_path / "command",
        f"""
        trap 'echo {number.name} >>{tmp_path}/got; exit 75' {number.name[3:]}
        echo started >>{tmp_path}/starts
        for ((i = 0; i < 100; i++)); do sleep 0.05; done
        """,
    )
    env = environment(tmp_path)
    process = bash("launch/restart.sh", str(tmp_path / "run"), str(command), env=env)
    until(lambda: bool(starts(tmp_path)))
    process.send_signal(number)
    code, _, err = ended(process)
    assert code == 75 and starts(tmp_path) == ["started"]
    assert (tmp_path / "got").read_text() == f"{number.name}\n"
    assert err.splitlines()[-1] == f"jaxgpt: stopped by {number.name}, exit code 75"


def test_a_request_to_save_is_passed_on_and_not_the_end(tmp_path):
    command = program(
        tmp_path / "command",
        f"""
        trap 'echo saved >>{tmp_path}/got' USR1
        echo started >>{tmp_path}/starts
        until [ -f {tmp_path}/got ]; do sleep 0.05; done
        """,
    )
    env = environment(tmp_path)
    process = bash("launch/restart.sh", str(tmp_path / "run"), str(command), env=env)
    until(lambda: bool(starts(tmp_path)))
    process.send_signal(signal.SIGUSR1)
    assert ended(process) == (0, "", "")


def test_a_script_that_is_changed_while_it_runs_goes_on_as_it_was(tmp_path):
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    script = tmp_path / "launch/restart.sh"
    change = f"truncate -s 0 {script}; for ((i = 0; i < 2000; i++)); do echo ')'; done >{script}"
    command = program(tmp_path / "command", f"{change}; exit 0")
    process = bash(str(script), str(tmp_path), str(command), env=environment(tmp_path))
    assert ended(process) == (0, "", "")


def test_nothing_of_a_command_that_ended_is_left(tmp_path):
    left = program(tmp_path / "command", f"sleep 1000 & echo $! >{tmp_path}/pid; exit 64")
    process = bash("launch/restart.sh", str(tmp_path), str(left), env=environment(tmp_path))
    process.wait(timeout=20)
    until(lambda: not alive(int((tmp_path / "pid").read_text())))


def test_without_a_command_it_says_how_it_is_used():
    code, _, err = ended(bash("launch/restart.sh", "run", env=environment(ROOT)))
    assert code == 64 and err.startswith("jaxgpt: usage:")


def test_the_folder_of_the_run_is_read_as_the_command_reads_it(tmp_path):
    preset = tmp_path / "my.toml"
    preset.write_text('[run]\ndir = "runs/mine"\n')

    for words, folder in (
        (f"train {preset} --dry-run", "runs/mine"),
        (f"train --json {preset} run.dir=/a/b", "/a/b"),
        (f"train {preset} --run.dir=/a/c", "/a/c"),
        ("train run.seed=1", "runs/default"),
        ("train run.dri=1", ""),
    ):
        assert function(f"run_dir_of {sys.executable} {words}") == folder
