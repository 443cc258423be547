"""Is jaxgpt right and fast on this GPU? Gradients, steps and PyTorch's steps, in 10 minutes.

Every part is a process of its own under a time limit, so that memory is clean and a hang costs one
row; `gpu_check.json` and `gpu_check.md` are written anew after each. The most important parts come
first. Neither data nor TensorFlow is needed. This process never starts JAX on the GPU.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt import __version__
from jaxgpt.bench import gpu_report, shapes
from jaxgpt.durable import storage_errors, write_atomic
from jaxgpt.errors import ConfigError, HangError, NumericsError, one_line

ROOT = Path(__file__).parents[2]
# Layers, width, heads, context, vocabulary. Heads of 64 as in GPT-2, and of 128.
SIZES = {
    "gpu": {"124M": (12, 768, 12, 1024, 50304), "1B": (16, 2304, 18, 2048, 50304)},
    "cpu": {"124M": (1, 32, 2, 64, 256), "1B": (1, 32, 2, 64, 256)},
}
ROWS = {"gpu": {"124M": 32, "1B": 8}, "cpu": {"124M": 4, "1B": 2}}
LIMITS = {"device": 90.0, "gradients": 150.0, "step": 240.0, "torch": 240.0}  # seconds of a part
STEPS = {"gpu": (30, 5), "cpu": (3, 1)}  # timed, and before them
AT_ONCE = {"gpu": 7, "cpu": 2}  # checks of gradients; nothing that is timed shares the GPU
LEAST = 20.0  # seconds that are worth starting a part for
SAMPLE = "clocks.sm,power.draw,temperature.gpu"
CARD = "name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit"


class Part(NamedTuple):
    """What one process does. `rows` are those of an update, which is one micro-batch."""

    kind: str  # gradients, step, torch
    shape: str
    attention: str = ""
    logits: str = "chunked"  # or whole: how the loss holds them
    rows: int = 0
    dtype: str = "bfloat16"
    more: tuple[str, ...] = ()  # of the configuration


def measure(
    out: str | Path, *, platform: str, minutes: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return, and write into the folder `out`, what `parts` found on the first device.

    `platform`: gpu, or cpu with tiny models, to try it. Raises ConfigError where JAX has no GPU,
    StorageError where `out` cannot be written. `exit_code` is there where it is not 0: gradients
    are wrong (79), or no step could be timed (76 after a time limit, else 70).
    """
    end = time.monotonic() + 60 * minutes
    out = Path(out)
    with storage_errors(out), tempfile.TemporaryDirectory() as cache:
        out.mkdir(parents=True, exist_ok=True)
        environment = child_environment(os.environ, platform, cache)
        say("looking for a GPU ..." if platform == "gpu" else "trying it on the CPU")
        found = execute(part_command("device"), LIMITS["device"], environment)
        if found["outcome"] != "done" or found["platform"] != platform:
            raise ConfigError(no_device(found, platform))
        result = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "framework": f"jaxgpt {__version__}",
            "python": sys.version.split()[0],
            **{name: value for name, value in found.items() if name not in ("outcome", "seconds")},
            "card": card(CARD),
            "minutes": minutes,
            "rows": [],
        }
        for row in rows(platform, end, environment, say):
            result["rows"].append(elsewhere(row, found["device_kind"]) or row)
            result["targets"] = gpu_report.targets(result)
            write(out, result)
    code = exit_code(result["rows"])
    return result | ({"exit_code": code} if code else {})


def parts(platform: str) -> list[Part]:
    """Return what is done, the most important first."""
    if platform == "cpu":
        gradients = [Part("gradients", "124M", "blocks")]
        step = Part("step", "124M", "blocks", rows=ROWS["cpu"]["124M"])
        return [
            *gradients,
            step,
            Part("torch", "124M", rows=step.rows),
            step._replace(logits="whole"),
        ]
    base, big = ROWS["gpu"]["124M"], ROWS["gpu"]["1B"]
    small, large = Part("step", "124M", "cudnn", rows=base), Part("step", "1B", "cudnn", rows=big)
    return [
        *gradient_parts(),
        small,
        Part("torch", "124M", rows=base),
        large,
        Part("torch", "1B", rows=big),
        small._replace(rows=2 * base),
        small._replace(logits="whole"),
        small._replace(attention="dot_product"),
        small._replace(attention="blocks"),
        large._replace(rows=2 * big),
        large._replace(logits="whole"),
        small._replace(more=("train.xla_options={xla_gpu_enable_triton_gemm=false}",)),
        small._replace(rows=base // 2),
        large._replace(attention="blocks"),
        large._replace(attention="dot_product"),
        large._replace(rows=big // 2),
    ]


def gradient_parts() -> list[Part]:
    """Return a check of each dtype, attention and loss, of documents, and of heads of 128."""
    both = ("chunked", "whole")
    kinds = [("bfloat16", a) for a in ("cudnn", "dot_product", "blocks")]
    kinds += [("float32", a) for a in ("dot_product", "blocks")]  # cuDNN has no float32
    found = [
        Part("gradients", "124M", attention, logits, dtype=dtype)
        for dtype, attention in kinds
        for logits in both
    ]
    documents = ("data.document_mask=true",)
    found += [part._replace(more=documents) for part in found[:6:2]]
    return [*found, Part("gradients", "1B", "cudnn")]


def overrides(part: Part, platform: str) -> list[str]:
    """Return a part's words of the configuration, over those of `bench.shapes`."""
    return [
        *shapes.words((*SIZES[platform][part.shape], part.rows or 2)),
        f"train.compute_dtype={part.dtype}",
        f"train.attention={part.attention or 'auto'}",
        *part.more,
    ]


def command(part: Part, platform: str) -> list[str]:
    """Return the program of a part; that of a step repeats the row when it is run alone."""
    steps, warm_up = STEPS[platform]
    counts = [f"--steps={steps}", f"--warm-up={warm_up}"]
    words = overrides(part, platform)
    if part.kind == "torch":
        names = ("layers", "width", "heads", "context", "vocab")
        sizes = zip(names, SIZES[platform][part.shape], strict=True)
        where = ["--device=cuda"] if platform == "gpu" else ["--device=cpu", "--eager"]
        flags = [f"--{name}={value}" for name, value in sizes]
        module = [sys.executable, "-m", "jaxgpt.bench.torch_step"]
        return [*module, *flags, f"--rows={part.rows}", *counts, *where]
    if part.kind == "gradients" or part.logits == "whole":
        whole = ["--whole-loss"] if part.logits == "whole" else []
        return part_command(part.kind, *whole, *(counts if part.kind == "step" else []), *words)
    return [sys.executable, "-m", "jaxgpt.cli", "bench", "step", "--json", "--shape=gpt2",
            "--no-check", *counts, *words]  # fmt: skip


def part_command(kind: str, *words: str) -> list[str]:
    """Return the command line of `bench.gpu_part`."""
    return [sys.executable, "-m", "jaxgpt.bench.gpu_part", kind, *words]


def child_environment(environment: Mapping[str, str], platform: str, cache: str) -> dict[str, str]:
    """Return the environment of the parts: one device, and on a GPU a compile cache of their own.

    Programs are then compiled as on a new machine, while the timings by which XLA chooses its
    kernels for a product are made once.
    """
    found = dict(environment)
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), found.get("PYTHONPATH")]))
    if platform == "cpu":
        return found | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    # CUDA or an error; the CPU computes the reference of gradients.
    found |= {"JAX_PLATFORMS": "cuda,cpu", "JAX_COMPILATION_CACHE_DIR": cache}
    found.setdefault("CUDA_VISIBLE_DEVICES", "0")
    return found


def rows(
    platform: str, end: float, environment: Mapping[str, str], say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Run all parts until `time.monotonic()` is `end`, and give the row of each.

    Checks of gradients run beside each other, with memory as they need it.
    """
    everything = parts(platform)
    shared = dict(environment) | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

    def row(part: Part, environment: Mapping[str, str]) -> dict[str, Any]:
        words = command(part, platform)
        limit = min(LIMITS[part.kind], end - time.monotonic())
        again = shlex.join(["python", *words[1:]])
        about = part._asdict() | {"more": list(part.more), "command": again}
        if limit < LEAST:
            return about | {"outcome": "skipped", "line": "no time left", "seconds": 0.0}
        found = execute(words, limit, environment)
        if line := wrong(found):
            found |= {"outcome": "wrong", "line": line}
        say(f"{gpu_report.name(about)}: {gpu_report.in_short(found | about)}")
        return found | about  # a step calls its shape otherwise

    checks = [part for part in everything if part.kind == "gradients"]
    with ThreadPoolExecutor(AT_ONCE[platform]) as pool:
        yield from pool.map(lambda part: row(part, shared), checks)
    for part in everything:
        if part.kind != "gradients":
            yield row(part, environment)


def execute(words: list[str], limit: float, environment: Mapping[str, str]) -> dict[str, Any]:
    """Run a program and return the JSON object it printed last, with `outcome` and `seconds`.

    Outcomes: done; missing, failed or timed out, with `line`. On a GPU also the most `power_watts`,
    the clock with it, and the most `temperature_celsius`, asked every second.
    """
    began, samples = time.monotonic(), []
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=dict(environment),
            start_new_session=True,
        )  # fmt: skip
        try:
            while time.monotonic() < began + limit:
                try:
                    process.wait(1.0)
                    break
                except subprocess.TimeoutExpired:
                    samples.append(card(SAMPLE))
        finally:
            timed_out = process.poll() is None
            if timed_out:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        seconds = time.monotonic() - began
        texts = []
        for file in (stdout, stderr):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    found = answer(texts[0]) or {}
    if timed_out:
        found = {"outcome": "timed out", "line": f"stopped after {limit:.0f} s"}
    elif process.returncode or not found:
        line = found.get("error") or reason(texts[1])
        found = {"outcome": "failed", "line": f"exit code {process.returncode}: {one_line(line)}"}
    elif "missing" in found:
        found = {"outcome": "missing", "line": found["missing"]}
    else:
        found = {"outcome": "done", **found}
    return found | {"seconds": round(seconds, 1)} | gpu_report.strain(samples)


def answer(text: str) -> dict[str, Any] | None:
    """Return the last line of a program's output that is a JSON object."""
    for line in reversed(text.splitlines()):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            return value
    return None


def reason(text: str) -> str:
    """Return the line of a program's messages that says most about its end."""
    lines = [line for line in text.splitlines() if line.strip() and "this is a bug" not in line]
    memory = [line for line in lines if "RESOURCE_EXHAUSTED" in line or "out of memory" in line]
    return ([*lines, *memory[-1:]] or ["it said nothing"])[-1]


def card(query: str) -> dict[str, str]:
    """Return what nvidia-smi says of the GPU in use; nothing where it does not answer."""
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    words = ["nvidia-smi", "-i", device, f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = [value.strip() for value in done.stdout.strip().split(",")]
    names = query.split(",")
    return dict(zip(names, values, strict=True)) if len(values) == len(names) else {}


def no_device(found: Mapping[str, Any], platform: str) -> str:
    """Return the line on a machine without the device that is asked for."""
    what = found.get("line") or f"it has {found.get('device_kind')}"
    if platform == "cpu":
        return f"{sys.executable}: JAX cannot be used here: {what}"
    return (
        f"no NVIDIA GPU that JAX can use: {what}; run it where nvidia-smi shows one, with a python "
        "that has jax[cuda13] (JAXGPT_PYTHON), or try it with --platform cpu"
    )


def wrong(found: Mapping[str, Any]) -> str:
    """Return the line on gradients that are off, or on a loss that is no number; else nothing."""
    if not math.isfinite(found.get("loss", 0.0)):
        return f"the loss is {found['loss']}"
    if found.get("right", True):
        return ""
    return (
        f"gradients of {found['leaf']} are off by {found['leaf_error']:.2%}, the loss by "
        f"{found['loss_error']:.2%}; {found['tolerance']:.2%} would be rounding"
    )


def elsewhere(row: dict[str, Any], kind: str) -> dict[str, Any] | None:
    """Return a row as one that failed if JAX gave up the GPU and computed it on the CPU."""
    if row["outcome"] not in ("done", "wrong") or row["kind"] == "torch" or row["device"] == kind:
        return None
    return row | {"outcome": "failed", "line": f"it ran on {row['device']}, not on {kind}"}


def exit_code(found: list[dict[str, Any]]) -> int:
    """Return the exit code of these rows, see `measure`."""
    if any(row["outcome"] == "wrong" for row in found):
        return NumericsError.exit_code
    steps = [row["outcome"] for row in found if row["kind"] == "step"]
    if "done" in steps:
        return 0
    return HangError.exit_code if "timed out" in steps else 70


def write(out: Path, result: dict[str, Any]) -> None:
    """Write the result for programs and for people."""
    write_atomic(out / "gpu_check.json", (json.dumps(result, indent=1) + "\n").encode())
    write_atomic(out / "gpu_check.md", gpu_report.markdown(result).encode())
