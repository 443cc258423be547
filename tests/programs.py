"""Programs that tests start in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Locking a plain mutex twice blocks in C for ever, and no signal interrupts it.
STUCK_IN_C = """
import ctypes
def stuck_in_c(library):
    mutex = ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    print("stuck", flush=True)
    library.pthread_mutex_lock(mutex)
"""


def python(code: str, *args: str, env: dict[str, str] | None = None, **options) -> subprocess.Popen:
    """Start a program, given as code or as the path of a file."""
    unset = ("GLIBC_TUNABLES", "JAXGPT_REEXEC", "JAX_COMPILATION_CACHE_DIR", "PYTHONUNBUFFERED")
    environment = {key: value for key, value in os.environ.items() if key not in unset}
    environment |= {"PYTHONPATH": str(ROOT)} | (env or {})
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    source = [code] if code.endswith(".py") else ["-c", code]
    return subprocess.Popen([sys.executable, *source, *args], env=environment, **options)


def outcome(process: subprocess.Popen, timeout: float = 30.0) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err
