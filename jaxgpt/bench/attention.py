"""Attention alone, forward and with its backward pass: each implementation that can run here.

They take turns on the same random q, k and v, on one device, and are compiled as in training. What
they compute is compared too: a fast wrong one would be no use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxgpt.bench import programs, timing
from jaxgpt.errors import ConfigError
from jaxgpt.model import attention
from jaxgpt.training.peak import measure_matmul_peak

SLOW = ("reference",)  # the whole score matrix: there to be compared with, not to be taken
# Products of two matrices per pair of tokens: two forward, and four more backward.
PRODUCTS = {"": 6, "forward_": 2}


def measure(
    *,
    rows: int,
    context: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: DTypeLike,
    documents: int = 0,
    window: int = 0,
    repeats: int = 10,
    warm_up: int = 2,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Return the figures of the implementation that training takes, and of all in a list, it first.

    Those of the forward pass alone begin with `forward_`, the others are of both passes. `mfu`
    counts the keys that a causal mask and the window leave on average, `mfu_full` all in the
    window; neither knows of documents, random ones, `documents` per row. `deviation` is the largest
    difference of output or gradients from those of the one training takes, as a share of the
    largest value. Raises ConfigError for sizes that do not go together.
    """
    check(context, heads, kv_heads, documents)
    device = jax.local_devices()[0]
    task = attention.Task(
        device.platform, jnp.dtype(dtype), context, head_dim, documents > 0, window
    )
    chosen = attention.choose(task)
    q, k, v, grad = random_arrays(rows, context, heads, kv_heads, head_dim, dtype)
    ids = random_segments(rows, context, documents) if documents else None

    segments = () if ids is None else (jnp.asarray(ids),)
    ready: dict[tuple[str, str], programs.Program] = {}
    for name in sorted(names_here(task, say), key=lambda name: name != chosen):
        forward = functools.partial(attend, window=window, impl=name)
        both = with_gradients(forward)
        try:
            of_name = {
                "": programs.compiled(both, q, k, v, grad, *segments, dtype=dtype),
                "forward_": programs.compiled(forward, q, k, v, *segments, dtype=dtype),
            }
        except ConfigError as error:
            if name == chosen:
                raise
            say(f"{name}: {error}")
            continue
        ready |= {(name, prefix): program for prefix, program in of_name.items()}
    calls = {key: program.run for key, program in ready.items()}
    seconds = timing.in_turns(calls, repeats, warm_up)

    tokens, peak = rows * context, measure_matmul_peak(dtype, [device])
    counts = {
        prefix: (flops(count, heads, head_dim, context, window, causal=True),
                 flops(count, heads, head_dim, context, window, causal=False))
        for prefix, count in PRODUCTS.items()
    }  # fmt: skip
    found = {}
    for (name, prefix), program in ready.items():
        rates = timing.rates(tokens, [taken / program.calls for taken in seconds[name, prefix]])
        rate = tokens / rates["seconds_median"]
        causal, full = (rate * count / peak.flops for count in counts[prefix])
        figures = {
            **rates,
            "mfu": round(causal, 4),
            "mfu_full": round(full, 4),
            "compile_seconds": round(program.compile_seconds, 3),
            "temporary_bytes": program.temporary_bytes,
        }
        entry = found.setdefault(name, {"implementation": name})
        entry |= {prefix + key: value for key, value in figures.items()}
        if prefix == "":
            entry["deviation"] = programs.deviation(program.outputs, ready[chosen, ""].outputs)
    return {
        **found[chosen],
        "implementations": list(found.values()),
        "peak_flops": peak.flops,
        "peak_source": peak.source,
        "tokens": tokens,
        "flops_per_token": counts[""][0],
        "flops_per_token_full": counts[""][1],
        "forward_flops_per_token": counts["forward_"][0],
        "forward_flops_per_token_full": counts["forward_"][1],
        "visible_share": visible_share(ids, context, window),
    }


def check(context: int, heads: int, kv_heads: int, documents: int) -> None:
    """Raise ConfigError for sizes that do not go together."""
    if heads % kv_heads:
        raise ConfigError(f"--kv-heads {kv_heads}: does not divide --heads {heads}")
    if documents > context:
        raise ConfigError(f"--documents {documents}: must be at most --context {context}")


def names_here(task: attention.Task, say: Callable[[str], None]) -> list[attention.Wanted]:
    """Return the implementations that can do a task here; say why the others cannot."""
    names = []
    for name in get_args(attention.Wanted):
        if name in SLOW:
            continue
        try:
            attention.choose(task, name)
            names.append(name)
        except ConfigError as error:
            say(f"left out: {str(error).removesuffix('; set it to auto')}")
    return names


def random_arrays(
    rows: int, context: int, heads: int, kv_heads: int, head_dim: int, dtype: DTypeLike
) -> tuple[jax.Array, ...]:
    """Return q [B, T, N, H], k and v [B, T, K, H], and the gradient of the output, as q."""
    rng = np.random.default_rng(0)
    return tuple(
        jnp.asarray(rng.standard_normal((rows, context, n, head_dim), np.float32), dtype)
        for n in (heads, kv_heads, kv_heads, heads)
    )


def random_segments(rows: int, context: int, documents: int) -> np.ndarray:
    """Return the segments [B, T], int32 from 0, of `documents` of random lengths in each row."""
    rng = np.random.default_rng(1)
    starts = np.zeros((rows, context), np.int32)
    for row in starts:
        row[1 + rng.choice(context - 1, documents - 1, replace=False)] = 1
    return starts.cumsum(1, dtype=np.int32)


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, *segments: jax.Array, window: int, impl: str
) -> jax.Array:
    """Return attention with documents as an argument: known numbers would be compiled in."""
    ids = segments[0] if segments else None
    return attention.attend(q, k, v, segment_ids=ids, window=window, impl=impl)


def with_gradients(forward: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, ...]]:
    """Return a function of q, k, v, the output's gradient and what forward takes besides: the
    output and dq, dk, dv."""

    def both(
        q: jax.Array, k: jax.Array, v: jax.Array, grad: jax.Array, *others: jax.Array
    ) -> tuple[jax.Array, ...]:
        out, pull = jax.vjp(lambda q, k, v: forward(q, k, v, *others), q, k, v)
        return out, *pull(grad)

    return both


def flops(
    products: int, heads: int, head_dim: int, context: int, window: int, *, causal: bool
) -> float:
    """Return the floating-point operations per token of so many products, as `gpt.flops_per_token`
    counts keys: S = T or w, and if `causal` those seen on average, S - S² / 2T."""
    keys = min(window or context, context)
    seen = keys - keys**2 / (2 * context) if causal else keys
    return 2 * products * heads * head_dim * seen


def visible_share(ids: np.ndarray | None, context: int, window: int) -> float:
    """Return how many of the pairs that mask and window leave lie inside a document."""
    if ids is None:
        return 1.0

    def pairs(length: int) -> int:
        seen = min(window or length, length)
        return seen * length - seen * (seen - 1) // 2

    inside = sum(pairs(int(length)) for row in ids for length in np.bincount(row))
    return round(inside / (len(ids) * pairs(context)), 4)
