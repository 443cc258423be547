"""Compiled functions on one device, ready to be timed: with the options of training, not from a
cache of compiled programs."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import monitoring
from jax.typing import DTypeLike

from jaxgpt.errors import ConfigError, one_line
from jaxgpt.parallel.xla_options import of_dtype, preset

AT_LEAST = 0.01  # seconds that an accelerator is timed for; to start a program takes it 1e-4
MOST_CALLS = 100
CACHE_HIT = "/jax/compilation_cache/cache_hits"


class Program(NamedTuple):
    """A compiled function with its arguments."""

    run: Callable[[], None]  # computes `calls` times, and waits for the last result
    calls: int
    outputs: Any
    compile_seconds: float
    temporary_bytes: int | None  # besides arguments and results; None: not known


def compiled(function: Callable[..., Any], *arrays: jax.Array, dtype: DTypeLike) -> Program:
    """Return a function of arrays on the first device, compiled and called once.

    `dtype` is that of its products. CPUs compute one call at a time; accelerators, which keep the
    order, as many as take `AT_LEAST` seconds. Raises ConfigError if memory is short.
    """
    device = jax.local_devices()[0]
    options = of_dtype(dtype, device.platform) | preset(device.platform, device.device_kind, 1)
    try:
        with uncached():
            began = time.perf_counter()
            call = jax.jit(function).lower(*arrays).compile(options)
            compile_seconds = time.perf_counter() - began
        outputs = jax.block_until_ready(call(*arrays))
        began = time.perf_counter()
        jax.block_until_ready(call(*arrays))
        seconds = time.perf_counter() - began
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ConfigError(f"too large for {device.device_kind}: {one_line(error)}") from None
    calls = 1
    if device.platform != "cpu":
        calls = min(MOST_CALLS, math.ceil(AT_LEAST / seconds))

    def run() -> None:
        for _ in range(calls):
            result = call(*arrays)
        jax.block_until_ready(result)

    analysis = call.memory_analysis()
    temporary = None if analysis is None else analysis.temp_size_in_bytes
    return Program(run, calls, outputs, compile_seconds, temporary)


def deviation(arrays: Sequence[jax.Array], others: Sequence[jax.Array]) -> float:
    """Return the largest difference from `others`, as a share of each one's largest value."""
    in_float32 = ([np.asarray(x.astype(jnp.float32)) for x in side] for side in (arrays, others))
    pairs = zip(*in_float32, strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Compile anew inside the block, though the process has a cache of compiled programs."""
    from jax.experimental.compilation_cache.compilation_cache import reset_cache

    enabled = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    reset_cache()  # JAX looks at the switch once
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        reset_cache()


@contextlib.contextmanager
def cache_hits() -> Iterator[list[str]]:
    """Collect an event for each program that comes from the cache inside the block."""
    hits: list[str] = []

    def listen(event: str, **details: Any) -> None:
        if event == CACHE_HIT:
            hits.append(event)

    monitoring.register_event_listener(listen)
    try:
        yield hits
    finally:
        monitoring.unregister_event_listener(listen)
