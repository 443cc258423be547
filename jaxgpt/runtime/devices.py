"""Start of JAX: compile cache, devices, and what is said about them.

JAX is imported only inside `start_jax`, after `environment` is settled.
"""

from __future__ import annotations

import dataclasses
import os
import warnings

from jaxgpt.config import Config
from jaxgpt.errors import ConfigError
from jaxgpt.runtime import store
from jaxgpt.runtime.processor import cache_folder, cpu_key, cpu_name, has_native_bf16, num_cores


@dataclasses.dataclass(frozen=True)
class Platform:
    """What JAX runs on; `lines` is the summary to print, advice included."""

    backend: str
    device_kind: str
    num_devices: int
    num_processes: int
    lines: tuple[str, ...]


def start_jax(cfg: Config) -> Platform:
    """Start JAX with a compile cache and describe the devices; raises ConfigError without any.

    `JAX_COMPILATION_CACHE_DIR` wins over ~/.cache/jaxgpt/xla/<processor>-<jaxlib version>.
    """
    import jax
    import jaxlib

    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    note = f"compile cache {cache}" if cache else "no compile cache"
    if cache is None:
        folder, problem = cache_folder("xla", f"{cpu_key()}-{jaxlib.__version__}")
        note = f"compile cache {folder}" if folder else f"no compile cache: {problem}"
        if folder:
            jax.config.update("jax_compilation_cache_dir", str(folder))
        # Of several processes JAX lets only the first write, as file systems of many hosts bear no
        # contention; all read. Not below run.dir: to load a run must never mean to run its code.
        if folder and store.num_processes() > 1:
            note += " (process 0 writes; JAX_COMPILATION_CACHE_DIR: one folder for all hosts)"
    # XLA:CPU cannot write down a program that calls oneDNN; it is compiled anew each time.
    warnings.filterwarnings("ignore", "Error writing persistent compilation cache entry")
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter: a platform not installed
        reason = (str(error) or "not installed").splitlines()[0]
        raise ConfigError(
            f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}: no usable device ({reason}); "
            "unset it, or install the extra for this hardware (jaxgpt[cuda], jaxgpt[tpu])"
        ) from None
    kind, backend, processes = devices[0].device_kind, devices[0].platform, jax.process_count()
    hardware = f"{cpu_name()}, {num_cores()} cores" if backend == "cpu" else kind
    where = f" in {processes} processes" if processes > 1 else ""
    lines = [
        f"jax {jax.__version__} on {backend} ({hardware}), {len(devices)} device(s){where}; {note}"
    ]
    if backend == "cpu" and cfg.train.compute_dtype == "bfloat16" and not has_native_bf16():
        lines.append(
            "this CPU has no bfloat16 arithmetic (AVX512-BF16 or AMX); "
            "train.compute_dtype=float32 will be faster"
        )
    return Platform(backend, kind, len(devices), processes, tuple(lines))
