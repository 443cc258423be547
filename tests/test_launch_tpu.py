"""The TPU script on a cloud of folders: calls of gcloud, restarts, preemption, finding again."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from recorders import ROOT, bash, ended, environment, planned, recorder, stand_in, starts, until

HOSTS = 2


@pytest.fixture
def cloud(tmp_path) -> Iterator[Path]:
    """A checkout with a commit and a changed file in `checkout`, and `gcloud` in `bin`."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "launch").mkdir()
    for path in ROOT.glob("launch/*.sh"):
        (checkout / "launch" / path.name).write_text(path.read_text())
    (checkout / "jaxgpt.txt").write_text("old")
    (checkout / "gone.txt").write_text("x")
    (checkout / ".gitignore").write_text("runs/\n")
    git = ("git", "-c", "user.name=t", "-c", "user.email=t@localhost")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], cwd=checkout, check=True)
    (checkout / "jaxgpt.txt").write_text("new")
    (checkout / "gone.txt").unlink()
    (checkout / "runs").mkdir()
    (checkout / "runs/big").write_text("big")
    (checkout / "untracked").write_text("x")
    child = f'exec {sys.executable} -S {ROOT}/tests/gcloud_child.py "$@"'
    recorder(tmp_path / "bin/gcloud", tmp_path / "calls", child)
    (tmp_path / "cloud").mkdir()
    yield tmp_path
    (tmp_path / "cloud/enough").touch()  # for jobs that nobody has ended


def launch(folder: Path, body: str, *words: str, **more: str) -> subprocess.Popen:
    variables = {
        "JAXGPT_PYTHON": str(stand_in(folder / "python", body)),
        "CLOUD": str(folder / "cloud"),
        "HOSTS": str(HOSTS),
        "POD": "pod",
        "ZONE": "zone-a",
        "TYPE": "v5p-16",
        "GIT_CONFIG_GLOBAL": "/dev/null",
    }
    words = words or ("train", f"run.dir={folder}/run")
    env = environment(folder / "bin", **variables | more)
    return bash("launch/tpu_pod.sh", *words, env=env, cwd=folder / "checkout")


def calls(folder: Path) -> list[list[str]]:
    """Return the calls of gcloud without what all have in common."""
    found = []
    for line in (folder / "calls").read_text().splitlines():
        words = line.split("|")
        assert words[:4] == ["gcloud", "compute", "tpus", "queued-resources"], line
        assert words[-3:] == ["--zone", "zone-a", "--quiet"], line
        found.append(words[4:-3])
    return found


def summary(folder: Path) -> list[str]:
    """Return the calls in short: the verb, and of ssh who is asked for what."""
    short = []
    for words in calls(folder):
        if words[0] == "ssh":
            command = words[-1].split("launch/pod_worker.sh ")[-1].split()[0]
            command = "unpack" if "tar -x" in words[-1] else command
            words = ["ssh", words[5], command]
        short.append(" ".join(words if words[0] == "ssh" else words[:1]))
    return short


ON_FIRST_HOST = '[[ "$HOME" = *host0 ]] || exit 0\n'
TO_THE_END = ["ssh all start", "ssh 0 follow", "ssh all state"]
READY = ["describe", "ssh all state", "scp", "ssh all unpack", "ssh 0 step"]
FROM_NOTHING = ["describe", "create", *READY]


def test_from_nothing_to_the_end(cloud):
    body = f'echo "training $HOME"; echo "$@" >$HOME/words; {ON_FIRST_HOST} exit 0'
    code, out, err = ended(launch(cloud, body, "train", "my.toml", "run.dir=a b", "x=$HOME"))
    assert (code, err.splitlines()[0]) == (0, "jaxgpt: slice pod in zone-a: ABSENT")
    assert summary(cloud) == FROM_NOTHING + TO_THE_END
    assert out == f"training {cloud}/cloud/host0\n"  # of the first host alone, and nothing else
    for host in range(HOSTS):
        home = cloud / f"cloud/host{host}"
        assert (home / "words").read_text() == "train my.toml run.dir=a b x=$HOME\n"


def test_the_calls_are_those_of_the_documentation(cloud):
    ended(launch(cloud, "exit 0", "train"))
    create, state = calls(cloud)[1], calls(cloud)[3]
    assert create == ["create", "pod", "--node-id", "pod", "--accelerator-type", "v5p-16",
                      "--runtime-version", "v2-alpha-tpuv5"]  # fmt: skip
    assert state == ["ssh", "pod", "--node", "all", "--worker", "all", "--command",
                     "bash jaxgpt/launch/pod_worker.sh state"]  # fmt: skip
    assert calls(cloud)[0] == ["describe", "pod", "--format", "value(state.state)"]
    (scp,) = (words for words in calls(cloud) if words[0] == "scp")
    assert scp[2:] == ["pod:jaxgpt.tgz", "--node", "all", "--worker", "all"]
    assert not Path(scp[1]).exists()  # the archive was removed


@pytest.mark.parametrize(
    ("asked", "size", "kind"),
    [
        ({"TYPE": "v6e-16"}, "--node-id pod", "v6e-16 --runtime-version v2-alpha-tpuv6e"),
        (
            {"TYPE": "v4-32", "SPOT": "1"},
            "--node-id pod",
            "v4-32 --runtime-version tpu-ubuntu2204-base --spot",
        ),
        (
            {"SLICES": "2", "VERSION": "mine"},
            "--node-count 2 --node-prefix pod",
            "v5p-16 --runtime-version mine",
        ),
    ],
)
def test_kind_number_and_price_of_slices_are_asked_for(cloud, asked, size, kind):
    ended(launch(cloud, "exit 0", "train", **asked))
    assert " ".join(calls(cloud)[1][2:]) == f"{size} --accelerator-type {kind}"


def test_hosts_get_the_tracked_files_as_they_are_and_keep_what_else_they_have(cloud):
    ended(launch(cloud, "exit 0", "train"))
    copy = cloud / "cloud/host1/jaxgpt"
    assert (copy / "jaxgpt.txt").read_text() == "new"
    assert not any((copy / name).exists() for name in ("gone.txt", "untracked", "runs", ".git"))
    (copy / "runs").mkdir()
    (copy / "runs/mine").write_text("kept")
    (cloud / "checkout/jaxgpt.txt").unlink()
    ended(launch(cloud, "exit 0", "train"))
    assert (copy / "runs/mine").read_text() == "kept" and not (copy / "jaxgpt.txt").exists()
    status = subprocess.run(["git", "stash", "list"], cwd=cloud / "checkout", capture_output=True)
    assert status.stdout == b""


def test_an_interrupted_job_is_started_again_on_the_same_slice(cloud):
    body = ON_FIRST_HOST + planned(cloud, "75:10", "0:20")
    code, _, err = ended(launch(cloud, body))
    assert code == 0 and len(starts(cloud)) == 2
    assert "exit code 75, newest saved step 10 (was -1): restart 1 in 0 s" in err
    assert summary(cloud) == FROM_NOTHING + TO_THE_END + READY + TO_THE_END


def test_lost_hosts_without_progress_come_to_an_end(cloud):
    body = ON_FIRST_HOST + planned(cloud, "76:5", *["76"] * 9)
    code, _, err = ended(launch(cloud, body, JAXGPT_RESTARTS="1"))
    assert code == 76 and len(starts(cloud)) == 2
    assert "still at step 5 after 1 restart(s)" in err


@pytest.mark.parametrize("exit_code", [64, 78])
def test_what_needs_a_person_is_started_once_and_the_slice_kept(cloud, exit_code):
    code, _, _ = ended(launch(cloud, ON_FIRST_HOST + planned(cloud, str(exit_code))))
    assert code == exit_code and len(starts(cloud)) == 1
    assert "delete" not in summary(cloud)


def test_the_most_telling_code_is_that_of_any_host(cloud):
    code, _, _ = ended(launch(cloud, 'if [[ "$HOME" = *host0 ]]; then exit 76; fi; exit 65'))
    assert code == 65


def test_a_preempted_slice_is_made_anew_and_the_job_goes_on(cloud):
    body = f"""
    {ON_FIRST_HOST}
    ({planned(cloud, "143:10", "0:20")})
    code=$?
    if [ "$code" = 143 ]; then echo SUSPENDED >$CLOUD/state; fi
    exit "$code"
    """
    code, _, err = ended(launch(cloud, body, SPOT="1"))
    assert code == 0 and len(starts(cloud)) == 2
    assert "slice pod in zone-a: SUSPENDED" in err
    assert "exit code 76, newest saved step 10 (was -1): restart 1" in err
    verbs = [line.split()[0] for line in summary(cloud)]
    assert verbs.count("create") == 2 and verbs.count("delete") == 1


def test_a_slice_that_is_refused_ends_it_with_the_clouds_words(cloud):
    (cloud / "cloud/refusal").write_text("ERROR: quota exceeded\n")
    code, _, err = ended(launch(cloud, "exit 0"))
    assert code == 1 and "ERROR: quota exceeded" in err
    assert summary(cloud) == ["describe", "create"]


def test_a_cloud_that_does_not_answer_is_asked_again_and_not_for_another_slice(cloud):
    (cloud / "cloud/state").write_text("ACTIVE")
    for host in range(HOSTS):
        (cloud / f"cloud/host{host}").mkdir()
    (cloud / "cloud/offline").touch()
    code, _, err = ended(launch(cloud, "exit 0"))
    assert code == 0 and "reset by peer" in err
    assert summary(cloud) == ["describe", *READY, *TO_THE_END]


def test_stop_without_an_answer_still_saves_before_it_deletes(cloud):
    leave_running(cloud)
    (cloud / "cloud/offline").touch()
    assert ended(launch(cloud, "exit 1", "--stop"))[0] == 0
    assert [path.read_text() for path in cloud.glob("cloud/gone*/got")] == ["TERM\n"] * HOSTS


def test_a_configuration_that_hosts_would_not_get_is_refused_before_a_slice_is_paid_for(cloud):
    (cloud / "checkout/found.toml").write_text("")
    code, _, err = ended(launch(cloud, "exit 0", "train", "found.toml"))
    assert code == 64 and not (cloud / "calls").exists()
    assert err == (
        "jaxgpt: found.toml: git does not track it, so the hosts do not get it; git add it first\n"
    )


def test_a_slice_that_fails_is_shown_and_not_asked_for_again(cloud):
    code, _, err = ended(launch(cloud, "exit 0", NEW="FAILED"))
    assert code == 74 and summary(cloud) == ["describe", "create", "describe", "describe"]


def test_it_waits_in_the_queue(cloud):
    (cloud / "cloud/next").write_text("PROVISIONING\nPROVISIONING\nACTIVE\n")
    code, _, err = ended(launch(cloud, "exit 0", NEW="WAITING_FOR_RESOURCES"))
    assert code == 0 and summary(cloud)[:6] == ["describe", "create", *["describe"] * 4]
    told = [line.split(": ")[-1] for line in err.splitlines() if "slice pod" in line]
    assert told == ["ABSENT", "WAITING_FOR_RESOURCES", "PROVISIONING"]


def test_hosts_that_do_not_answer_yet_are_asked_again(cloud):
    for host in range(HOSTS):
        (cloud / f"cloud/host{host}").mkdir()
        (cloud / f"cloud/host{host}/deaf").touch()
    (cloud / "cloud/state").write_text("ACTIVE")
    # The last host that is started makes itself deaf, and the first ends after that: to be asked
    # for its state then, not to be started.
    last = f"touch $CLOUD/host1/deaf; touch {cloud}/once"
    first = f"until [ -e {cloud}/once ]; do sleep 0.05; done"
    body = f'if [ "${{HOME##*/}}" = host1 ]; then {last}; else {first}; fi'
    code, _, _ = ended(launch(cloud, body))
    assert code == 0
    assert summary(cloud) == [*READY, *TO_THE_END, "ssh all state"]


def test_a_slice_that_never_answers_is_given_up(cloud):
    (cloud / "cloud/state").write_text("ACTIVE")
    (cloud / "cloud/host0").mkdir()
    recorder(cloud / "bin/tar", cloud / "other", "exit 1")
    code, _, _ = ended(launch(cloud, "exit 0"))
    assert code == 76
    assert summary(cloud) == ["describe", "ssh all state", "scp", *["ssh all unpack"] * 5]


RUNS_UNTIL_TOLD = """
trap 'echo TERM >>$HOME/got; exit 75' TERM
echo "at work"; echo x >>$HOME/starts
while [ ! -e $CLOUD/enough ]; do sleep 0.05; done
"""


def leave_running(folder: Path, **variables: str) -> str:
    """Start a job, interrupt the script that watches it, and return what that says."""
    watching = launch(folder, RUNS_UNTIL_TOLD, **variables)
    started = [folder / f"cloud/host{host}/starts" for host in range(HOSTS)]
    until(lambda: all(path.exists() for path in started))
    until((folder / "cloud/following").exists)
    watching.send_signal(signal.SIGINT)
    return ended(watching)[2]


def test_after_an_interrupt_the_job_goes_on_and_is_found_again(cloud):
    said = leave_running(cloud)
    assert said.endswith("the job goes on; the same command goes on watching it\n")
    before = len(summary(cloud))
    second = launch(cloud, RUNS_UNTIL_TOLD)
    until(lambda: "ssh 0 follow" in summary(cloud)[before:])
    (cloud / "cloud/enough").touch()
    code, out, _ = ended(second)
    assert code == 0 and out == "at work\n"
    assert not {"scp", "create"} & set(summary(cloud)[before:])
    assert [(cloud / f"cloud/host{i}/starts").read_text() for i in range(HOSTS)] == ["x\n"] * 2


@pytest.mark.parametrize("taken", ["1", "lost"])  # as a failure, and not at all
def test_an_interrupt_is_one_however_gcloud_takes_it(cloud, taken):
    said = leave_running(cloud, INTERRUPTED=taken)
    assert said.endswith("the job goes on; the same command goes on watching it\n")
    assert summary(cloud)[-1] == "ssh 0 follow" and summary(cloud).count("ssh 0 follow") == 1


def test_a_job_that_runs_on_some_hosts_only_is_ended_and_started_on_all(cloud):
    leave_running(cloud)
    host = cloud / "cloud/host1/.jaxgpt-job"
    pid = (host / "pid").read_text().strip()
    subprocess.run(["pkill", "-KILL", "-P", pid], check=True)
    until(lambda: (host / "code").exists())
    second = launch(cloud, RUNS_UNTIL_TOLD)
    until(lambda: (cloud / "cloud/host0/starts").read_text() == "x\nx\n")
    (cloud / "cloud/enough").touch()
    assert ended(second)[0] == 0
    assert (cloud / "cloud/host0/got").read_text() == "TERM\n"


def test_stop_saves_and_deletes(cloud):
    leave_running(cloud)
    before = len(calls(cloud))
    code, _, _ = ended(launch(cloud, "exit 1", "--stop"))
    assert code == 0
    assert [path.read_text() for path in cloud.glob("cloud/gone*/got")] == ["TERM\n"] * HOSTS
    assert summary(cloud)[before:] == ["describe", "ssh all stop", "delete"]
    assert calls(cloud)[-1] == ["delete", "pod", "--force"]


def test_stop_that_learns_nothing_of_the_slice_deletes_nothing(cloud):
    (cloud / "cloud/state").write_text("ACTIVE")
    (cloud / "cloud/offline").write_text("for ever")
    code, _, err = ended(launch(cloud, "exit 1", "--stop"))
    assert code == 76 and summary(cloud) == ["describe"] * 5
    assert err.endswith(
        "slice pod in zone-a: no answer; it is as it was, and paid for: try again\n"
    )


def test_stop_saves_also_where_a_connection_drops_and_says_where_none_comes(cloud):
    leave_running(cloud)
    (cloud / "cloud/host1/deaf").touch()
    code, _, err = ended(launch(cloud, "exit 1", "--stop"))
    assert code == 0 and "not all hosts answer" not in err
    assert [path.read_text() for path in cloud.glob("cloud/gone*/got")] == ["TERM\n"] * HOSTS
    (cloud / "cloud/state").write_text("ACTIVE")
    (cloud / "cloud/host0").mkdir()  # of which nobody has started anything
    assert "not all hosts answer" in ended(launch(cloud, "exit 1", "--stop"))[2]
    assert summary(cloud)[-6:] == [*["ssh all stop"] * 5, "delete"]


def test_stop_of_a_slice_that_is_not_there_says_so(cloud):
    code, _, err = ended(launch(cloud, "exit 1", "--stop"))
    assert (code, err) == (0, "jaxgpt: slice pod in zone-a: ABSENT\n")
    assert summary(cloud) == ["describe"]


def test_a_job_is_not_ended_because_a_host_does_not_answer_once(cloud):
    leave_running(cloud)
    before = len(summary(cloud))
    (cloud / "cloud/host1/deaf").touch()
    second = launch(cloud, RUNS_UNTIL_TOLD)
    until(lambda: "ssh 0 follow" in summary(cloud)[before:])
    (cloud / "cloud/enough").touch()
    assert ended(second)[0] == 0
    assert "ssh all stop" not in summary(cloud) and not (cloud / "cloud/host0/got").exists()


def test_stop_without_a_slice_that_answers_deletes_all_the_same(cloud):
    (cloud / "cloud/state").write_text("SUSPENDED")
    assert ended(launch(cloud, "exit 1", "--stop"))[0] == 0
    assert summary(cloud) == ["describe", "delete"]


@pytest.mark.parametrize(("name", "words"), [("POD", ("train",)), ("ZONE", ("train",))])
def test_what_is_missing_is_said(cloud, name, words):
    code, _, err = ended(launch(cloud, "exit 0", *words, **{name: ""}))
    assert code == 64 and err == "jaxgpt: set POD and ZONE, and name a verb, or --stop\n"
    assert not (cloud / "calls").exists()


TOOLS = """bash cat chmod cp dirname flock grep mkdir mktemp nohup rm setsid sh sleep tail touch
""".split()


def test_a_host_with_an_old_python_gets_a_new_one_and_the_extra_for_tpus(tmp_path):
    tools, asked = tmp_path / "tools", tmp_path / "asked"
    tools.mkdir()
    for name in TOOLS:
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    new = tmp_path / "new/python3.13"
    recorder(
        new,
        asked,
        'if [ "$2" = venv ]; then mkdir -p "$4/bin" && cp "$0" "$4/bin/python"; fi\n'
        f'if [ "$2" = jaxgpt.cli ]; then touch {tmp_path}/trained; fi',
    )
    old = 'case "$*" in -c*) exit 1 ;; *find*) echo ' + str(new) + " ;; esac"
    recorder(tools / "python3", asked, old)
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    (tmp_path / "pyproject.toml").write_text("")
    env = environment(tools, HOME=str(tmp_path), PYENV_ROOT="/nonexistent") | {"PATH": str(tools)}
    script = (str(tmp_path / "launch/pod_worker.sh"), "start", "train", "x=1")
    code, _, err = ended(bash(*script, env=env, cwd=tmp_path))
    assert code == 0, err
    until(lambda: (tmp_path / "trained").exists())
    said = [line for line in asked.read_text().splitlines() if "|-c|import" not in line]
    assert said[:3] == [
        "python3|-m|pip|install|--quiet|--user|uv",
        "python3|-m|uv|python|install|3.13",
        "python3|-m|uv|python|find|3.13",
    ]
    assert any(line.endswith("|-e|.[tpu]") for line in said)
    assert said[-1].endswith("|-m|jaxgpt.cli|train|x=1")


def test_without_a_type_no_slice_can_be_made(cloud):
    code, _, err = ended(launch(cloud, "exit 0", "train", TYPE=""))
    assert code == 64 and err.endswith("jaxgpt: set TYPE, as in TYPE=v5p-128\n")
