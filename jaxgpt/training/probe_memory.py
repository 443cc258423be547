"""What the gradient check found before, kept beside the compiled programs.

The check is a function of the twin that it differentiates, of the libraries and their settings, of
the processor or accelerator, and of our own code. Where all of these are as they were, so is the
answer, and a start is some seconds shorter: programs that call oneDNN cannot be kept compiled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import jax
import jaxlib

from jaxgpt import config
from jaxgpt.config import Config
from jaxgpt.training.probe import Probe, in_chunks, probe_gradients, twin

# What a run may change without another program for the twin.
FREE = {"num_steps", "num_tokens", "batch_ramp", "max_nonfinite"}
# Of the environment, what JAX, XLA and the libraries below them read.
SETTINGS = ("JAX_", "XLA_", "LIBTPU_", "TPU_", "DNNL_", "ONEDNN_", "NVIDIA_", "CUDNN_", "CUBLAS_")
PLACES = {"JAX_COMPILATION_CACHE_DIR", "XLA_PYTHON_CLIENT_MEM_FRACTION", "TPU_WORKER_HOSTNAMES"}
OURS = ("model", "training", "parallel")  # rooms whose code the check runs


def check(cfg: Config, processor: str) -> tuple[Probe, bool]:
    """Return what is found, and whether at an earlier start; raises what `probe_gradients` does.

    `processor` tells the kind of this one from others, as `runtime.processor.cpu_key`.
    """
    known = recall(cfg, processor)
    if known:
        return known, True
    found = probe_gradients(cfg)
    remember(cfg, processor, found)
    return found, False


def recall(cfg: Config, processor: str) -> Probe | None:
    """Return what was found for the same; None: nothing is known, or it cannot be read."""
    path = _path(cfg, processor)
    if path is None:
        return None
    try:
        return Probe(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def remember(cfg: Config, processor: str, probe: Probe) -> None:
    """Keep what was found, if there is a compile cache and it can be written."""
    path = _path(cfg, processor)
    if path is None:
        return
    part = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):  # a cache: without it the check is made again
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(dataclasses.asdict(probe)))
        part.replace(path)


def _path(cfg: Config, processor: str) -> Path | None:
    folder = jax.config.jax_compilation_cache_dir
    if not folder:
        return None
    return Path(folder) / f"jaxgpt-gradients-{_key(cfg, processor)}.json"


def _key(cfg: Config, processor: str) -> str:
    """Return 32 hex digits of everything that the check depends on."""
    device, small = jax.local_devices()[0], config.to_dict(twin(cfg))
    train = {name: value for name, value in small["train"].items() if name not in FREE}
    facts: list[Any] = [
        small["model"],
        train,
        cfg.data.document_mask,
        in_chunks(cfg),
        [jax.__version__, jaxlib.__version__, device.client.platform_version],
        [device.device_kind, processor, jax.config.jax_default_matmul_precision],
        sorted(
            item
            for item in os.environ.items()
            if item[0].startswith(SETTINGS) and item[0] not in PLACES
        ),
    ]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    package = Path(__file__).parent.parent
    for room in OURS:
        for path in sorted((package / room).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:32]
