"""The launch scripts: clean shell, the right interpreter, an environment made once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted([*ROOT.glob("launch/*.sh"), ROOT / "launch/slurm.sbatch", ROOT / ".ci/run"])
# What is not sourced by others opens with its usage.
RUN = [path for path in SCRIPTS if path.read_text().startswith("#!")]


def shell(script: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", "-c", f"set -euo pipefail; source launch/environment.sh; {script}"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", **environment},
        capture_output=True,
        text=True,
    )


def fake_python(path: Path, version: str) -> Path:
    """A program that answers find_python's question as an interpreter of `version` would."""
    path.parent.mkdir(parents=True, exist_ok=True)
    supported = 0 if version in ("3.11", "3.12", "3.13") else 1
    path.write_text(f"#!/bin/sh\nexit {supported}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_scripts_pass_shellcheck(script):
    shellcheck = Path(sys.executable).parent / "shellcheck"
    result = subprocess.run([shellcheck, "-x", script], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_scripts_stay_short(script):
    assert len(script.read_text().splitlines()) < 80


@pytest.mark.parametrize("script", RUN, ids=lambda p: p.name)
def test_scripts_open_with_a_comment_and_stop_at_the_first_error(script):
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash" and lines[1].startswith("# ")
    code = [line.strip() for line in lines if line and not line.startswith("#")]
    assert "set -euo pipefail" in code
    assert os.access(script, os.X_OK)


def test_an_interpreter_that_is_named_is_used_as_it_is():
    assert shell("jaxgpt_python", JAXGPT_PYTHON="/opt/conda/bin/python").stdout == (
        "/opt/conda/bin/python\n"
    )


def test_the_newest_python_on_path_or_in_pyenv_is_chosen(tmp_path):
    bin_dir = tmp_path / "bin"
    fake_python(bin_dir / "python3.11", "3.11")
    newer = fake_python(tmp_path / "pyenv/versions/3.12.1/bin/python3", "3.12")
    fake_python(tmp_path / "pyenv/versions/3.14.0/bin/python3", "3.14")
    found = shell(
        "find_python", PATH=f"{bin_dir}:/usr/bin:/bin", PYENV_ROOT=str(tmp_path / "pyenv")
    )
    assert found.stdout.strip() == str(newer), found.stderr


def test_a_shim_that_does_not_run_is_passed_over(tmp_path):
    broken = fake_python(tmp_path / "bin/python3.13", "3.10")
    works = fake_python(tmp_path / "bin/python3.12", "3.12")
    found = shell("find_python", PATH=f"{broken.parent}:/usr/bin:/bin", PYENV_ROOT=str(tmp_path))
    assert found.stdout.strip() == str(works)


def test_the_named_python_is_used_or_refused_in_one_line(tmp_path):
    named = fake_python(tmp_path / "mine", "3.11")
    assert shell("find_python", PYTHON=str(named)).stdout.strip() == str(named)
    old = fake_python(tmp_path / "old", "3.8")
    refused = shell("find_python", PYTHON=str(old))
    assert refused.returncode == 64 and "3.11, 3.12 or 3.13" in refused.stderr


def test_constraints_hold_names_and_versions_only():
    for line in (ROOT / "launch/constraints.txt").read_text().splitlines():
        assert line.startswith("#") or "==" in line.split(";")[0], line
        assert "://" not in line and "@" not in line and "/" not in line, line


def test_the_constraints_name_every_direct_dependency():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = {
        line.split("==")[0].strip()
        for line in (ROOT / "launch/constraints.txt").read_text().splitlines()
    }
    for requirement in project["dependencies"]:
        name = requirement.split(">")[0].split("=")[0].strip()
        assert name in pinned, name


def recording_python(path: Path) -> Path:
    """An interpreter that makes environments whose python records what pip was asked for."""
    path.write_text(
        "#!/bin/sh\n"
        'if [ "$2" = venv ]; then\n'
        '  mkdir -p "$4/bin"\n'
        '  printf \'#!/bin/sh\\necho "$@" >>%s/asked\\n\' "$4" >"$4/bin/python"\n'
        '  chmod +x "$4/bin/python"\n'
        "fi\n"
    )
    path.chmod(0o755)
    return path


def test_an_environment_is_made_once_and_only_missing_extras_are_added(tmp_path):
    python, made = recording_python(tmp_path / "python"), tmp_path / "env"
    for extras in ("", "", "dev", "dev", ""):
        result = shell(f"make_environment {made} {python} '{extras}'")
        assert result.returncode == 0, result.stderr
    asked = [line.split(" -e ")[1] for line in (made / "asked").read_text().splitlines()]
    assert asked == [".", ".[dev]"]


def python_that(path: Path, *, cuda: bool, jax: bool = True) -> Path:
    """An interpreter that has JAX or not, with a GPU or not, and else prints its arguments."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "#!/bin/sh\n"
        f'case "$2" in *cuda*) exit {0 if cuda else 1};; import*) exit {0 if jax else 1};; esac\n'
        'case "$1" in --version) echo fake;; *) echo "$0 $*";; esac\n'
    )
    path.chmod(0o755)
    return path


def gpu_check(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess:
    """Run the copy of the GPU check that lies in a folder of its own, without a .venv."""
    (folder / "launch").mkdir()
    script = folder / "launch/gpu_check.sh"
    script.write_text((ROOT / "launch/gpu_check.sh").read_text())
    path = f"{folder}/bin:/usr/bin:/bin"
    return subprocess.run(
        ["bash", script, *words], env={"PATH": path, **environment}, capture_output=True, text=True
    )


def test_the_gpu_check_takes_the_python_that_has_a_gpu(tmp_path):
    python_that(tmp_path / "bin/python3", cuda=False)
    wanted = python_that(tmp_path / "bin/python", cuda=True)
    done = gpu_check(tmp_path, "--out", "here")
    assert done.stdout == f"{wanted} -m jaxgpt.cli bench gpu --out here\n", done.stderr


def test_the_gpu_check_is_tried_with_a_python_without_a_gpu(tmp_path):
    wanted = python_that(tmp_path / "own/python", cuda=False)
    done = gpu_check(tmp_path, "--platform", "cpu", JAXGPT_PYTHON=str(wanted))
    assert done.stdout == f"{wanted} -m jaxgpt.cli bench gpu --platform cpu\n", done.stderr


def test_the_gpu_check_without_jax_is_one_line(tmp_path):
    python_that(tmp_path / "bin/python3", cuda=False, jax=False)
    python_that(tmp_path / "bin/python", cuda=False, jax=False)
    done = gpu_check(tmp_path)
    assert done.returncode == 64 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "JAXGPT_PYTHON" in done.stderr
