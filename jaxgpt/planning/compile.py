"""The very train step, compiled for devices that are not there, and what the compiler says of it.

Compiling happens in a child process, see `planning.child`; nothing here imports JAX. It takes the
memory of this machine, not of the target: seconds and some GB for two layers, minutes for many
that are not stacked.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxgpt import config
from jaxgpt.config import Config
from jaxgpt.errors import ConfigError, HangError, JaxgptError, one_line
from jaxgpt.planning import audit, collectives
from jaxgpt.planning.audit import Finding
from jaxgpt.planning.collectives import Collective
from jaxgpt.planning.hardware import Target

TIMEOUT = 1800.0  # seconds; a step of 2 layers takes 10 to 100
# The compiler alone is wanted: no device is looked for, no metadata server asked, no lock taken
# (a process that only compiles may load libtpu beside one that trains), nothing cached.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "JAX_TRACEBACK_FILTERING": "off",  # else the last line of a traceback is not its error
    "TF_CPP_MIN_LOG_LEVEL": "1",  # warnings: the partitioner's are read; libtpu has its own levels
    "TPU_MIN_LOG_LEVEL": "1",
    "TPU_STDERR_LOG_LEVEL": "1",
    "TPU_LOG_DIR": "disabled",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of the train step. Bytes are of one device, unless said."""

    platform: str
    device_kind: str
    num_devices: int
    mesh: dict[str, int]
    misfit: str = ""  # "does not fit: needs X of Y per device"; for TPU there is no more then
    needed_bytes: int = 0  # where it does not fit
    available_bytes: int = 0  # for programs, if that is known
    lowering_seconds: float = 0.0
    seconds: float = 0.0  # of compiling
    argument_bytes: int = 0
    output_bytes: int = 0
    alias_bytes: int = 0  # results that reuse an argument
    temp_bytes: int = 0
    code_bytes: int = 0
    host_bytes: int = 0  # in the host's memory
    peak_bytes: int = 0  # arguments + results - reused + temporaries
    live_bytes: int = 0  # of these, in use at once; the rest are gaps. 0: not said
    state_bytes: int = 0  # of the arguments; all of it should be reused
    collectives: tuple[Collective, ...] = ()
    kernels: dict[str, int] = dataclasses.field(default_factory=dict)  # custom call: runs per step
    findings: tuple[Finding, ...] = ()  # of `planning.audit`
    notes: tuple[str, ...] = ()


def compile_step(
    cfg: Config,
    target: Target | Mapping[str, Any],
    *,
    layers: int | None = None,
    keep_text: str | Path | None = None,
    timeout: float = TIMEOUT,
) -> Compiled:
    """Return what the compiler of `target` makes of the train step of `cfg`.

    layers: so many instead of model.num_layers. keep_text: where to write the compiled HLO.
    A program that needs more memory than there is has `misfit`; the compiler for GPU does not mind,
    so its peak is compared with what JAX takes of the device by default.
    Raises ConfigError where the mesh does not fit the devices or the compiler refuses the step. The
    configuration may be right after another JaxgptError: a package is missing, the compiler does
    not know the devices or was killed, or it took more than `timeout` s (HangError).
    """
    wanted = request(target)
    environment = child_environment(os.environ, wanted)
    body = {
        "config": config.to_dict(cfg),
        "target": wanted,
        "layers": layers,
        "text": str(keep_text) if keep_text else None,
    }
    command = [sys.executable, "-m", "jaxgpt.planning.child"]
    try:
        done = subprocess.run(
            command, input=json.dumps(body).encode(), capture_output=True, env=environment,
            timeout=timeout,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise HangError(
            f"compiling took more than {timeout:g} s; fewer layers take less"
        ) from error
    return read_answer(done.returncode, done.stdout, done.stderr.decode(errors="replace"))


def request(target: Target | Mapping[str, Any]) -> dict[str, Any]:
    """Return a target as `planning.child` takes it."""
    if isinstance(target, Mapping):
        return dict(target)
    chip = target.chip
    return {
        "platform": chip.platform,
        "chip": chip.name,
        "topology": f"{chip.name}:{'x'.join(map(str, target.topology))}",
        "slices": target.num_slices,
        "hosts": target.num_hosts,
        "num_devices": target.num_devices,
        "available_bytes": int(target.usable) if chip.platform == "gpu" else 0,
    }


def child_environment(environment: Mapping[str, str], target: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment of the child: this one, without what concerns only this process."""
    ours = {k: v for k, v in environment.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    return ours | ENVIRONMENT | {"JAX_NUM_CPU_DEVICES": str(_simulated(target))}


def read_answer(status: int, stdout: bytes, stderr: str) -> Compiled:
    """Return what the child has answered; raises as `compile_step` does."""
    if status or not stdout:
        # A compiler aborts on what it does not like; only the kernel kills it.
        aborted = status < 0 and -status not in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
        raise (ConfigError if aborted else JaxgptError)(_end_of(status, stderr))
    answer = json.loads(stdout)
    outcome, line = answer.pop("outcome"), answer.pop("line", "")
    if outcome in ("refused", "failed"):
        raise ConfigError(*line.splitlines())
    if outcome in ("missing", "target"):
        raise JaxgptError(line)
    if outcome == "does_not_fit":
        return Compiled(misfit=line, **answer)
    exchanges = tuple(
        Collective(**one | {"axes": tuple(one["axes"]), "shape": tuple(one["shape"])})
        for one in answer.pop("collectives")
    )
    findings = tuple(
        Finding(**one | {"axes": tuple(one["axes"])}) for one in answer.pop("findings")
    )
    return Compiled(
        collectives=exchanges,
        findings=findings + audit.involuntary(stderr),
        notes=tuple(answer.pop("notes")),
        **answer,
    )


def describe(done: Compiled) -> list[str]:
    """Return lines on a compiled step: memory, exchanges by axes and kind, findings."""
    if done.misfit and not done.peak_bytes:
        return [done.misfit]
    lines = [summary(done)]
    for row in collectives.table(done.collectives):
        over = ", ".join(row.axes) or "nothing"
        lines.append(f"{row.kind} over {over}: {row.count} times, {row.bytes / 1e6:,.1f} MB sent")
    lines += [done.misfit] if done.misfit else []
    return [*lines, *audit.lines(done.findings), *done.notes]


def summary(done: Compiled) -> str:
    """Return one line on a compiled step: for what, how long it took, its memory."""
    if done.misfit and not done.peak_bytes:
        return done.misfit
    return (
        f"compiled for {done.num_devices} x {done.device_kind} in {done.seconds:.0f} s: "
        f"{done.peak_bytes / 1e9:.2f} GB per device at the peak (state "
        f"{done.state_bytes / 1e9:.2f}, temporaries {done.temp_bytes / 1e9:.2f}), of which "
        f"{done.live_bytes / 1e9:.2f} are in use at once"
    )


def _simulated(target: Mapping[str, Any]) -> int:
    return target["num_devices"] if target["platform"] == "cpu" else 1


def _end_of(status: int, stderr: str) -> str:
    """Return one line on a child that ended without an answer."""
    if status == -signal.SIGKILL:
        return (
            "the compiler was killed, most likely for the memory it took on this machine "
            f"({_memory()}); compile fewer layers, or model.stacked = true"
        )
    lines = [line for line in stderr.splitlines() if line.strip()]
    how = f"by signal {-status}" if status < 0 else f"with status {status}"
    return f"the compiler ended {how}: {one_line(lines[-1] if lines else 'it said nothing')}"


def _memory() -> str:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return "of unknown size"
    return f"{total / 1e9:.0f} GB"
