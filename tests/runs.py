"""Tiny corpora, stores and configurations for tests that run the whole system."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from jaxgpt import config
from jaxgpt.config import Config

WORDS = "the king of rain went to hall and sang while old stones slept under a red moon".split()


def write_corpus(folder: Path, num_files: int = 40) -> Path:
    """Write text files of different lengths that only ever repeat a few words."""
    folder.mkdir(parents=True, exist_ok=True)
    state = 1
    for number in range(num_files):
        words = []
        for _ in range(5 + 7 * (number % 9)):
            state = (state * 1103515245 + 12345) % 2**31
            words.append(WORDS[(state >> 16) % len(WORDS)])
        (folder / f"{number:03d}.txt").write_text(" ".join(words) + f" {number}\n")
    return folder


def overrides(root: Path, run: str, **changes: object) -> list[str]:
    """Return the overrides of a tiny run in `root/run` on the store `root/store`."""
    values: dict[str, object] = {
        "run.dir": str(root / run),
        "data.store": str(root / "store"),
        "data.sources": [str(root / "corpus")],
        "data.valid_share": 0.2,
        "tokenizer.vocab_size": 320,
        "model.num_layers": 2,
        "model.embed_dim": 32,
        "model.num_heads": 4,
        "model.seq_len": 16,
        "train.global_batch": 8,
        "train.num_steps": 20,
        "train.compute_dtype": "float32",
        "optim.warmup_steps": 5,
        "optim.lr": 1e-2,
        "checkpoint.every": 5,
        "checkpoint.keep": 100,
        "log.every": 1,
        "log.tensorboard": False,
    }
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    return [f"{key}={toml(value)}" for key, value in values.items()]


def toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


def tiny(root: Path, run: str, **changes: object) -> Config:
    return config.load(None, overrides(root, run, **changes))


def make_store(root: Path) -> Path:
    """Train a tokenizer on a small corpus and prepare it as `root/store`."""
    from jaxgpt.commands import data as data_commands

    write_corpus(root / "corpus")
    cfg = tiny(root, "unused")
    data_commands.make_tokenizer(cfg)
    data_commands.make_store(cfg)
    return root


def jaxgpt(*args: str, devices: int = 1, **environment: str) -> subprocess.CompletedProcess:
    """Run the command in a process of its own and return it with its output."""
    return subprocess.run(
        [sys.executable, "-m", "jaxgpt.cli", *args],
        env=process_environment(devices, **environment),
        capture_output=True,
        text=True,
        timeout=300,
    )


def together(
    count: int, *args: str, devices: int = 1, **environment: str
) -> list[subprocess.CompletedProcess]:
    """Run the command in `count` processes that meet on this machine, and return all of them."""
    address = f"localhost:{free_port()}"
    environment = process_environment(devices, **environment)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2 * count)]
        running = [
            subprocess.Popen(
                [sys.executable, "-m", "jaxgpt.cli", *args]
                + [f"--coordinator={address}", f"--process={process}", f"--processes={count}"],
                env=environment,
                stdout=files[2 * process],
                stderr=files[2 * process + 1],
            )
            for process in range(count)
        ]
        for each in running:
            stack.callback(each.kill)
        codes = [each.wait(timeout=400) for each in running]
        for file in files:
            file.seek(0)
        texts = [file.read() for file in files]
    return [
        subprocess.CompletedProcess(running[i].args, codes[i], texts[2 * i], texts[2 * i + 1])
        for i in range(count)
    ]


def finished(processes: list[subprocess.CompletedProcess]) -> list[subprocess.CompletedProcess]:
    """Return processes that have all succeeded."""
    errors = [process.stderr for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), errors
    return processes


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


def process_environment(devices: int = 1, **environment: str) -> dict[str, str]:
    return os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "JAXGPT_NO_REEXEC": "1"} | environment


def fingerprints(run_dir: Path, step: int) -> dict[str, int]:
    """Return the fingerprint of every leaf of the state saved at `step`."""
    record = json.loads((run_dir / "ckpt" / f"{step}.ok.json").read_text())
    return {leaf["path"]: leaf["fingerprint"] for leaf in record["leaves"]}


def rows(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
