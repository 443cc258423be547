"""The Slurm script, with programs in place of Slurm: what is called, when a job is requeued."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from recorders import ROOT, bash, ended, environment, planned, recorder, stand_in, starts, until

from jaxgpt.runtime import launchers

SCRIPT = ROOT / "launch/slurm.sbatch"
# Starts the tasks of a step as srun does, one a node, and returns the highest of their codes.
SRUN = """
while [[ "$1" == --* ]]; do [[ "$1" == --ntasks=* ]] && tasks=${1#*=}; shift; done
pids=() code=0
trap 'kill -TERM "${pids[@]}"' TERM
for ((i = 0; i < tasks; i++)); do
  SLURM_PROCID=$i SLURM_NODEID=$i SLURM_LOCALID=0 SLURM_NTASKS=$tasks SLURM_STEP_NUM_NODES=$tasks \\
    SLURM_STEP_NODELIST="node[01-0$tasks]" SLURM_STEP_TASKS_PER_NODE="1(x$tasks)" "$@" &
  pids+=("$!")
done
for pid in "${pids[@]}"; do
  while kill -0 "$pid" 2>/dev/null; do wait "$pid"; done
  wait "$pid"; ended=$?
  ((ended > code)) && code=$ended
done
exit "$code"
"""


def submit(folder: Path, body: str, *words: str, state: str = "RUNNING", nodes: int = 2, **more):
    """Start the script as Slurm would on the first node, in a checkout of its own."""
    checkout, programs, calls = folder / "checkout", folder / "bin", folder / "calls"
    checkout.mkdir(exist_ok=True)
    for name in ("launch", "jaxgpt"):
        if not (checkout / name).exists():
            (checkout / name).symlink_to(ROOT / name)
    recorder(programs / "srun", calls, SRUN)
    recorder(programs / "squeue", calls, f"echo {state}")
    recorder(programs / "scontrol", calls)
    variables = {
        "JAXGPT_PYTHON": str(stand_in(folder / "python", body)),
        "SLURM_SUBMIT_DIR": str(checkout),
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_GPUS_ON_NODE": "8",
    }
    words = words or (f"run.dir={folder}/run",)
    return bash(str(SCRIPT), *words, env=environment(programs, **variables | more), cwd=folder)


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []


def programs_called(folder: Path) -> list[str]:
    return [call.split("|")[0] for call in calls(folder)]


def left(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "checkout").iterdir() if p.name.startswith("slurm"))


def each(*codes: int) -> str:
    """A body in which the tasks end with these codes."""
    return f'codes=({" ".join(map(str, codes))}); exit "${{codes[SLURM_PROCID]}}"'


def test_a_step_with_one_task_a_node_is_started_and_that_is_all(tmp_path):
    body = f'echo "$@" >{tmp_path}/words.$SLURM_PROCID'
    words = ("my.toml", f"run.dir={tmp_path}/a b")
    code, _, err = ended(submit(tmp_path, body, *words))
    assert (code, err) == (0, "")
    (call,) = calls(tmp_path)
    options = "srun|--ntasks=2|--ntasks-per-node=1|--cpu-bind=none|--kill-on-bad-exit=0|--wait=300"
    assert call.startswith(f"{options}|bash|-c|")
    assert call.endswith(f"|{tmp_path}/python|-m|jaxgpt.cli|train|my.toml|run.dir={tmp_path}/a b")
    for task in range(2):
        assert (tmp_path / f"words.{task}").read_text().strip() == f"train {' '.join(words)}"
    assert left(tmp_path) == []


def test_tasks_find_each_other_from_what_slurm_tells_them(tmp_path):
    ended(submit(tmp_path, f"env >{tmp_path}/env.$SLURM_PROCID"))
    for task in range(2):
        lines = (tmp_path / f"env.{task}").read_text().splitlines()
        launch = launchers.detect(dict(line.split("=", 1) for line in lines if "=" in line))
        assert (launch.kind, launch.process, launch.processes) == ("slurm", task, 2)
        assert launch.coordinator.startswith("node01:") and launch.local_devices is None
        assert launch.expected == 8


def test_an_interrupted_job_is_requeued(tmp_path):
    code, _, err = ended(submit(tmp_path, planned(tmp_path, "75:10"), nodes=1))
    assert code == 75 and "exit code 75, newest saved step 10 (was -1): restart 1" in err
    assert programs_called(tmp_path) == ["srun", "squeue", "scontrol"]
    assert calls(tmp_path)[1:] == [
        "squeue|--noheader|--job|77|--format|%T",
        "scontrol|requeue|77",
    ]
    assert left(tmp_path) == ["slurm-77.restarts"]


@pytest.mark.parametrize("state", ["CANCELLED", "COMPLETING", "PREEMPTED", ""])
def test_a_job_that_slurm_ends_is_not_requeued_from_here(tmp_path, state):
    ended(submit(tmp_path, planned(tmp_path, "75:10"), nodes=1, state=state))
    assert programs_called(tmp_path) == ["srun", "squeue"]
    assert left(tmp_path) == []


def test_what_needs_a_person_stops_the_job(tmp_path):
    code, _, err = ended(submit(tmp_path, each(64, 64)))
    assert code == 64 and err.endswith("exit code 64: not tried again, it needs a person\n")
    assert programs_called(tmp_path) == ["srun"]


def test_the_cause_counts_and_not_what_it_did_to_the_others(tmp_path):
    assert ended(submit(tmp_path, each(76, 65)))[0] == 65
    assert programs_called(tmp_path) == ["srun"]


def test_a_task_that_could_not_tell_its_code_is_seen_by_that_of_the_step(tmp_path):
    # Killed with the shell around it, as by the kernel for want of memory.
    code, _, _ = ended(submit(tmp_path, "kill -KILL $PPID; kill -KILL $$", nodes=1))
    assert code == 137 and programs_called(tmp_path)[-1] == "scontrol"


def test_requeued_starts_without_progress_are_counted_and_come_to_an_end(tmp_path):
    body = planned(tmp_path, "76:5", *["76"] * 9)
    for _ in range(4):
        code, _, err = ended(submit(tmp_path, body, nodes=1))
        assert code == 76
    assert "still at step 5 after 3 restart(s)" in err
    assert len(starts(tmp_path)) == 4
    assert programs_called(tmp_path).count("scontrol") == 3
    assert left(tmp_path) == []


def test_the_host_that_ended_the_job_is_counted_over_its_starts(tmp_path):
    body = f'echo node02 >"$JAXGPT_BLAME"\n{planned(tmp_path, "76:5", "76:6")}'
    said = [ended(submit(tmp_path, body, nodes=1))[2].splitlines()[-1] for _ in range(2)]
    assert said[0].endswith("restart 1 in 0 s; host node02 ended it")
    assert said[1].endswith("; host node02 ended it 2 times: look at it, or leave it out")
    assert left(tmp_path) == ["slurm-77.restarts"]


def test_the_signal_before_the_time_limit_reaches_every_task(tmp_path):
    body = f"""
    trap 'echo TERM >>{tmp_path}/got.$SLURM_PROCID; exit 75' TERM
    touch {tmp_path}/up.$SLURM_PROCID
    for ((k = 0; k < 200; k++)); do sleep 0.05; done
    """
    process = submit(tmp_path, body)
    until(lambda: all((tmp_path / f"up.{i}").exists() for i in range(2)))
    process.send_signal(signal.SIGTERM)  # as on cancellation: to the script
    for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        os.kill(int(pid), signal.SIGTERM)  # and to srun, which passes it to its tasks
    assert ended(process)[0] == 75
    assert [(tmp_path / f"got.{i}").read_text() for i in range(2)] == ["TERM\n"] * 2


def test_a_cluster_that_does_not_requeue_is_named(tmp_path):
    process = submit(tmp_path, planned(tmp_path, "75:1"), nodes=1)
    recorder(tmp_path / "bin/scontrol", tmp_path / "calls", "exit 1")
    code, _, err = ended(process)
    assert code == 75 and err.endswith("does not requeue; submit the same command again\n")


@pytest.mark.parametrize("missing", ["SLURM_JOB_ID", "checkout"])
def test_outside_of_a_job_or_checkout_it_says_how_it_is_used(tmp_path, missing):
    changed = {"SLURM_JOB_ID": ""} if missing == "SLURM_JOB_ID" else {"SLURM_SUBMIT_DIR": "/tmp"}
    code, _, err = ended(submit(tmp_path, "", **changed))
    assert code == 64 and "submit this script with sbatch" in err and err.count("\n") == 1
    assert calls(tmp_path) == []


def test_the_directives_ask_for_whole_nodes_and_for_time_to_save():
    lines = SCRIPT.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    found = [line.split(maxsplit=1)[1] for line in lines[:first] if line.startswith("#SBATCH ")]
    assert len(found) == sum(line.startswith("#SBATCH") for line in lines)  # none is too late
    options = dict(word.removeprefix("--").partition("=")[::2] for word in found)
    assert options["ntasks-per-node"] == "1" and options["mem"] == "0"
    assert {"exclusive", "requeue"} <= set(options) and options["open-mode"] == "append"
    name, seconds = re.fullmatch(r"([A-Z0-9]+)@(\d+)", options["signal"]).groups()
    assert name == "TERM" and 300 <= int(seconds) <= 3600
