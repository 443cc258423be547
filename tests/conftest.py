"""Test process set-up before JAX is imported: CPU, 8 simulated devices, a compile cache."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

CACHE = Path(tempfile.gettempdir(), "jaxgpt-test-cache")

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")

# A shell starts background jobs with Ctrl-C ignored, and the programs that tests start inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
