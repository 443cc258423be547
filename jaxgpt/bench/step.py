"""The train step alone: forward, backward, clip, update, on random tokens.

It is the very program of `jaxgpt train`, compiled the same way, without data, log and checkpoints;
neither TensorFlow nor a store is needed.
"""

from __future__ import annotations

import itertools
import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxgpt.bench import programs, timing
from jaxgpt.config import Config
from jaxgpt.data.packing import Batch
from jaxgpt.model import attention, gpt
from jaxgpt.model import params as parameters
from jaxgpt.parallel import mesh as meshes
from jaxgpt.parallel import sharding
from jaxgpt.parallel.xla_options import compile_with
from jaxgpt.runtime.memory import give_back
from jaxgpt.runtime.processor import cpu_key
from jaxgpt.training import optimizer, probe_memory, step
from jaxgpt.training import state as states
from jaxgpt.training.comparison import random_documents
from jaxgpt.training.peak import measure_matmul_peak


def measure(
    cfg: Config,
    *,
    steps: int,
    warm_up: int,
    say: Callable[[str], None],
    least_seconds: float = 0.0,
    devices: Sequence[jax.Device] | None = None,
    check: bool = True,
) -> dict[str, Any]:
    """Return rates, utilisation, compile time and memory of `steps` updates after `warm_up` more.

    More than `steps` are timed until they have taken `least_seconds`.
    On `devices`; None: on all. One update is on its way while the one before is waited for, as in
    training, so a time is that between two results. `check`: compare the gradients of a small twin
    first, as a run does.
    """
    mesh = meshes.make_mesh(cfg.mesh, devices)
    meshes.check_run(mesh, cfg)
    say(attention.describe(cfg, meshes.platform(mesh), mesh.shape["context"]))
    specs = parameters.specs(cfg.model)
    tx = optimizer.build(
        cfg, cfg.train.num_steps, parameters.abstract(specs, cfg.train.param_dtype)
    )
    placed = states.state_shardings(mesh, cfg, tx)
    state = states.create(cfg, tx, mesh, placed)
    batch = sharding.to_global(mesh, random_batch(cfg))
    # What is timed must be right.
    gradient_error = probe_memory.check(cfg, cpu_key())[0].leaf_error if check else None
    began = time.perf_counter()
    with programs.cache_hits() as hits:
        lowered = step.make_train_step(cfg, tx, mesh, placed).lower(state, batch)
        update = compile_with(lowered, cfg.train.xla_options)
    give_back()
    compile_seconds = time.perf_counter() - began

    ends: list[float] = []
    pending, to_first = None, None
    for number in itertools.count():
        if number > warm_up + steps and ends[-1] - ends[warm_up - 1] >= least_seconds:
            break
        state, metrics = update(state, batch)
        if pending is not None:
            pending.block_until_ready()
            ends.append(time.perf_counter())
        if number == 1:
            to_first = timing.since_start()
            say(f"first update done {to_first or 0:.1f} s after the start of the process")
        pending = metrics["loss_sum"]
    loss = float(metrics["loss_sum"]) / float(metrics["weight"])
    seconds = np.diff(ends[warm_up - 1 :]).tolist()

    tokens = cfg.train.global_batch * cfg.model.seq_len
    peak = measure_matmul_peak(cfg.train.compute_dtype, mesh.devices.ravel().tolist())
    rates = timing.rates(tokens, seconds)
    rate = rates["tokens_per_sec_median"]
    return {
        **rates,
        "mfu": round(rate * gpt.flops_per_token(cfg.model, True) / peak.flops, 4),
        "mfu_full": round(rate * gpt.flops_per_token(cfg.model, False) / peak.flops, 4),
        "peak_flops": peak.flops,
        "peak_source": peak.source,
        "flops_per_token": gpt.flops_per_token(cfg.model, True),
        "flops_per_token_full": gpt.flops_per_token(cfg.model, False),
        "tokens_per_step": tokens,
        "parameters": parameters.count(specs),
        "loss": round(loss, 4),
        "gradient_error": gradient_error and round(gradient_error, 4),
        "compile_seconds": round(compile_seconds, 2),
        "compile_cached": bool(hits),
        "seconds_to_first_step": to_first and round(to_first, 2),
        **memory(mesh.devices.flat[0]),
    }


def random_batch(cfg: Config) -> Batch:
    """Return an update's random tokens and targets, [A, B, T], of about four documents a row if the
    run keeps documents apart."""
    rng = np.random.default_rng(cfg.run.seed)
    shape = cfg.train.accum_steps, cfg.train.micro_rows, cfg.model.seq_len
    tokens, targets = rng.integers(0, cfg.model.vocab_size, (2, *shape)).astype(np.int32)
    documents = random_documents(rng, shape) if cfg.data.document_mask else (None, None)
    return Batch(tokens, targets, np.ones(shape, np.float32), *documents)


def memory(device: jax.Device) -> dict[str, int]:
    """Return the most bytes that this process, and its first device, have held at once."""
    unit = 1 if sys.platform == "darwin" else 1024
    found = {"peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    of_device = device.memory_stats() or {}
    if "peak_bytes_in_use" in of_device:
        found["peak_device_bytes"] = of_device["peak_bytes_in_use"]
    return found
