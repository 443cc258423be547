"""Programs that stand in for those the launch scripts call: each notes its words in one file."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent


def program(path: Path, body: str) -> Path:
    """Write a Bash program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)
    return path


def recorder(path: Path, calls: Path, body: str = "") -> Path:
    """Write a program that appends its name and words to `calls`, as a line of NAME|WORD|WORD.

    In one write, so that whoever reads meanwhile sees whole lines.
    """
    words = f"{path.name}$(printf '|%s' \"$@\")"
    note = f"printf '%s\\n' \"{words}\" >>{calls}"
    return program(path, f"{note}\n{body}")


def stand_in(path: Path, body: str) -> Path:
    """Write what JAXGPT_PYTHON can name: it runs `body` in place of `jaxgpt WORDS`."""
    return program(path, f'[ "$1" = -m ] || exec {sys.executable} "$@"\nshift 2\n{body}')


def planned(folder: Path, *ends: str) -> str:
    """Return a body that ends as the next of `ends` says, CODE or CODE:STEP, after saving STEP.

    The step is a commit record in `folder`/run/ckpt; `folder`/starts has a line for each start.
    """
    (folder / "run/ckpt").mkdir(parents=True, exist_ok=True)
    (folder / "plan").write_text("".join(f"{end}\n" for end in ends))
    return f"""
    echo "$@" >>{folder}/starts
    IFS=: read -r code step <{folder}/plan
    sed -i 1d {folder}/plan
    if [ -n "$step" ]; then mkdir -p {folder}/run/ckpt && touch {folder}/run/ckpt/$step.ok.json; fi
    exit "$code"
    """


def starts(folder: Path) -> list[str]:
    path = folder / "starts"
    return path.read_text().splitlines() if path.exists() else []


def environment(bin_dir: Path, **variables: str) -> dict[str, str]:
    """Return an environment in which the programs of `bin_dir` come first, and nothing waits."""
    path = f"{bin_dir}:{os.environ['PATH']}"
    quick = {"JAXGPT_BACKOFF": "0", "JAXGPT_POLL": "0", "HOME": "/nonexistent"}
    return {"PATH": path, "PYTHONPATH": str(ROOT), "TMPDIR": "/tmp"} | quick | variables


def bash(*words: str, env: dict[str, str], cwd: Path = ROOT) -> subprocess.Popen:
    return subprocess.Popen(
        ["bash", *words],
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen, timeout: float = 30.0) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for something another process does."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not happen in time"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Tell whether a process runs; one that ended and was not asked for its code does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
