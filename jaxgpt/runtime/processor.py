"""The processor of this machine, and the folder for caches that belong to it."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path


def _cpu_info() -> dict[str, str]:
    """Return the first processor's entries of /proc/cpuinfo; empty where there is none."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def cpu_name() -> str:
    """Return the processor's model name as the system gives it."""
    return _cpu_info().get("model name") or platform.processor() or platform.machine()


def cpu_key() -> str:
    """Return 16 hex digits that tell processor types apart: model and instruction sets.

    Compiled CPU code of another microarchitecture is accepted by XLA with only a warning and may
    crash, so caches on a shared home directory are kept apart by this key.
    """
    info = _cpu_info()
    flags = sorted((info.get("flags") or info.get("Features") or "").split())
    identity = (platform.machine(), cpu_name(), info.get("CPU part"), flags)
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:16]


def has_native_bf16() -> bool:
    """Tell whether matmuls in bfloat16 are done in hardware (x86: AVX512-BF16 or AMX-BF16)."""
    flags = _cpu_info().get("flags")
    return flags is None or bool({"avx512_bf16", "amx_bf16"} & set(flags.split()))


def num_cores() -> int:
    """Return the cores this process may use (its affinity mask, which XLA obeys too)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cores_key() -> str:
    """Return what tells the cores this process may use from those of any other machine.

    Processes in containers of one machine have other host names, and perhaps the same cores.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        machine = platform.node()
    return f"{machine} {','.join(map(str, cores))}"


def cache_folder(*names: str) -> tuple[Path | None, str]:
    """Return (folder, "") below the user's cache, owner-only; or (None, why it cannot be used).

    Compiled programs are executed, so a folder that belongs to someone else is refused.
    """
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        base.mkdir(parents=True, exist_ok=True)
        folder = base
        for name in ("jaxgpt", *names):
            folder = folder / name
            folder.mkdir(mode=0o700, exist_ok=True)
            status = folder.stat()
            if status.st_uid != os.getuid():
                return None, f"{folder} belongs to user {status.st_uid}, not to {os.getuid()}"
            if status.st_mode & 0o077:
                folder.chmod(0o700)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
        return None, str(error)
    return folder, ""
