"""The head and the cross-entropy alone, with their gradients: in chunks of several sizes and whole.

They take turns on the same random hidden states, on one device, and are compiled as in training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxgpt.bench import programs, timing
from jaxgpt.errors import ConfigError
from jaxgpt.training import loss
from jaxgpt.training.peak import measure_matmul_peak

WHOLE = 0  # as `loss.next_token_sums` takes it: all logits at once


def measure(
    *,
    rows: int,
    context: int,
    width: int,
    vocab: int,
    dtype: DTypeLike,
    chunks: Sequence[int] = (),
    repeats: int = 10,
    warm_up: int = 2,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Return the figures of the chunks that training takes, and of all ways in a list.

    `chunks` are tokens per chunk at most, 0 all at once; without any, those of training, a quarter
    and four times as many, and 0. `deviation` is the largest difference of a gradient from those
    of training, as a share of the largest value. Raises ConfigError if memory is short.
    """
    device = jax.local_devices()[0]
    tokens = rows * context
    usual = min(tokens, loss.chunk_tokens(vocab, device.platform))
    arrays = random_arrays(rows, context, width, vocab, dtype)
    ready: dict[int, programs.Program] = {}
    for size in sizes(chunks, usual, tokens):
        try:
            ready[size] = programs.compiled(with_gradients(size, dtype), *arrays, dtype=dtype)
        except ConfigError as error:
            if size == usual:
                raise
            say(f"{'whole' if size == WHOLE else f'chunks of {size}'}: {error}")
    calls = {size: program.run for size, program in ready.items()}
    seconds = timing.in_turns(calls, repeats, warm_up)

    peak = measure_matmul_peak(dtype, [device])
    per_token = 6.0 * width * vocab  # one product forward and two backward
    found = {}
    for size, program in ready.items():
        rates = timing.rates(tokens, [taken / program.calls for taken in seconds[size]])
        found[size] = {
            "way": "whole" if size == WHOLE else "chunked",
            "chunk_tokens": size or tokens,
            "chunks": -(-tokens // (size or tokens)),
            **rates,
            "mfu": round(tokens / rates["seconds_median"] * per_token / peak.flops, 4),
            "compile_seconds": round(program.compile_seconds, 3),
            "temporary_bytes": program.temporary_bytes,
            "loss": round(float(program.outputs[0]), 4),
            "deviation": programs.deviation(program.outputs[1], ready[usual].outputs[1]),
        }
    return {
        **found[usual],
        "ways": list(found.values()),
        "peak_flops": peak.flops,
        "peak_source": peak.source,
        "tokens": tokens,
        "flops_per_token": per_token,
        "logits_bytes": 4 * tokens * vocab,
    }


def sizes(chunks: Sequence[int], usual: int, tokens: int) -> list[int]:
    """Return the different sizes to measure, tokens per chunk, with `usual` first."""
    wanted = chunks or (usual // 4, 4 * usual, WHOLE)
    return list(dict.fromkeys([usual, *(min(size, tokens) for size in wanted if size >= 0)]))


def random_arrays(
    rows: int, context: int, width: int, vocab: int, dtype: DTypeLike
) -> tuple[jax.Array, ...]:
    """Return hidden [B, T, D] in `dtype`, the head [V, D] float32, targets and weights [B, T]."""
    rng = np.random.default_rng(0)
    shape = rows, context
    hidden = jnp.asarray(rng.standard_normal((*shape, width), np.float32), dtype)
    head = jnp.asarray(0.02 * rng.standard_normal((vocab, width), np.float32))
    targets = jnp.asarray(rng.integers(0, vocab, shape).astype(np.int32))
    return hidden, head, targets, jnp.ones(shape, jnp.float32)


def with_gradients(size: int, dtype: DTypeLike) -> Callable[..., Any]:
    """Return a function of `random_arrays`: the mean loss, and gradients of hidden and head."""

    def mean(hidden: jax.Array, head: jax.Array, *of_tokens: jax.Array) -> jax.Array:
        sums = loss.next_token_sums(hidden, head, *of_tokens, dtype=dtype, chunk=size)
        return sums.total / sums.weight

    return jax.value_and_grad(mean, argnums=(0, 1))
