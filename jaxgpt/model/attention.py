"""Causal attention over grouped heads: q [B, T, N, H] against k, v [B, S, K, H], G = N / K.

`choose` says which of several ways to the same values is taken, and `describe` why. Each is run on
the part of one device (rows, heads), so that no kernel is left to the partitioner: `blocks` (plain
JAX, every platform), `splash` (TPU), `cudnn` and `dot_product` (`jax.nn`), `reference`, the whole
score matrix, and `ring`, where the devices hold parts of a sequence.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxgpt.config import Config
from jaxgpt.errors import ConfigError
from jaxgpt.model import kernels
from jaxgpt.model.block_attention import (
    BLOCK,
    TALL_BLOCK,
    block_attention,
    by_token,
    grouped,
    weighted,
)
from jaxgpt.model.dropout import Draws, seeds
from jaxgpt.model.remat import named
from jaxgpt.model.ring import Ring, near, ring_attention, with_keys_before
from jaxgpt.model.shards import MeshAxes, Names, Shards, here

Array = jax.Array
Impl = Literal["blocks", "dot_product", "cudnn", "splash", "reference", "ring"]
Wanted = Literal["blocks", "dot_product", "cudnn", "splash", "reference"]
HALVES = (jnp.bfloat16, jnp.float16)
CUDNN_WIDTH, HOPPER_WIDTH = 128, 256  # cuDNN's widest head: all generations, and Hopper and later


class Task(NamedTuple):
    """What attention is asked to do; T and H are those of a whole row and of one head."""

    platform: str  # cpu, gpu, tpu
    dtype: DTypeLike
    T: int
    H: int
    documents: bool = False
    window: int = 0
    softcap: float = 0.0
    dropout: float = 0.0
    context: int = 1  # parts into which a sequence is split over devices


def attend(
    q: Array,
    k: Array,
    v: Array,
    *,
    segment_ids: Array | None = None,
    window: int = 0,
    scale: float = 0.0,
    softcap: float = 0.0,
    dropout: float = 0.0,
    dropout_keys: Array | None = None,
    impl: Wanted | None = None,
    shards: Shards | None = None,
) -> Array:
    """Return softmax(scale q kᵀ + mask) v, [B, T, N, H]: causal self-attention, S = T.

    `scale` 0 is 1 / √H.

    A token sees itself and those before it in its row; with `segment_ids` [B, T] only those of its
    own segment, with `window` w > 0 only the last w, itself included. `softcap` c > 0 replaces a
    score s by c tanh(s / c). Dropout needs one key per row, [B]; whether a weight stays depends on
    that key, its head and two positions alone: the same for every `impl` and mesh. `shards` are
    the devices, None a single one. Raises ConfigError for an `impl` that cannot do what is asked.
    """
    if dropout and dropout_keys is None:
        raise ValueError(f"attention dropout = {dropout} needs dropout_keys, one per row")
    shards = shards or here()
    T, N, H = q.shape[1:]
    parts = shards.split("seq")
    split = parts > 1 and T % (2 * parts) == 0  # else each device has whole rows
    task = Task(
        shards.platform, q.dtype, T, H, segment_ids is not None, window, softcap, dropout,
        parts if split else 1,
    )  # fmt: skip
    k, v = (_for_each_device(x, N, shards.split("heads")) for x in (k, v))
    seq = "seq" if split else None
    of_queries: Names = ("batch", seq, "heads", None)
    of_keys: Names = ("batch", seq, "kv_heads", None)
    on_device = partial(_on_device, task=task, impl=choose(task, impl), scale=scale)
    return shards.on_shards(
        on_device,
        (q, k, v, segment_ids, dropout_keys if dropout else None),
        (of_queries, of_keys, of_keys, ("batch", seq), ("batch",)),
        of_queries,
        exchange=("seq", "heads"),
    )


def attend_cached(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    *,
    window: int = 0,
    scale: float = 0.0,
    softcap: float = 0.0,
) -> Array:
    """Return attention over a cache whose slot s holds position s, for queries at `positions`.

    q [B, T, N, H], k and v [B, K, S, H], positions [B, T] int32. The caller has already written
    the queries' own keys; slots above a query's position are not seen, whatever they hold.
    """
    (_, T, N, _), (K, S) = q.shape, k.shape[1:3]
    slots, query = jnp.arange(S), positions[:, :, None]
    visible = slots <= query
    if window:
        visible &= slots > query - window
    visible = visible[:, None, None]  # [B, 1, 1, T, S]
    q = grouped(q, K)
    if T == 1 and N == K and q.dtype == jnp.bfloat16 and here().platform == "cpu":
        # XLA:CPU would write the keys and values down in float32 for the product with one row; for
        # two it does not: 12 layers, 16 rows, 12 heads, 256 slots take one core 19 ms, not 58.
        q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, 1), (0, 0)))
    out = weighted(q, k, v, visible, scale=scale, softcap=softcap)
    return by_token(out[:, :, :, :T])


def choose(task: Task, wanted: Wanted | None = None) -> Impl:
    """Return the fastest way to do a task, or the `wanted` one (`train.attention`; None: auto).

    Raises ConfigError if it cannot be done that way.
    """
    if wanted is None:
        best = _best(task)
        reason = _cannot(task, best)
        return best if reason is None else "blocks"
    if wanted not in get_args(Wanted):
        raise ConfigError(
            f"train.attention = {wanted!r}: must be auto or one of {', '.join(get_args(Wanted))}"
        )
    if reason := _cannot(task, wanted, HOPPER_WIDTH):
        raise ConfigError(f"train.attention = {wanted!r}: {reason}; set it to auto")
    return wanted


def tasks(cfg: Config, platform: str, context: int = 1) -> tuple[Task, ...]:
    """Return what training asks of attention: one task, or two where some blocks have a window.

    `context` is the size of that mesh axis.
    """
    m = cfg.model
    task = Task(
        platform, jnp.dtype(cfg.train.compute_dtype), m.seq_len, m.head_width,
        cfg.data.document_mask, 0, m.attn_softcap, m.dropout, context,
    )  # fmt: skip
    windows = sorted({m.window(layer) for layer in range(m.num_layers)})
    return tuple(task._replace(window=window) for window in windows)


def asked(cfg: Config) -> Wanted | None:
    """Return what `train.attention` asks for; None for auto."""
    return None if cfg.train.attention == "auto" else cfg.train.attention


def describe(cfg: Config, platform: str, context: int = 1) -> str:
    """Return one line on how training computes attention, and why if it is a slow way.

    Raises ConfigError as `choose` does.
    """
    wanted = asked(cfg)
    lines = dict.fromkeys(_described(task, wanted) for task in tasks(cfg, platform, context))
    return "attention: " + "; ".join(lines)


def _described(task: Task, wanted: Wanted | None) -> str:
    impl, best = choose(task, wanted), _best(task)
    if impl == "ring":
        if near(task.window, task.T, task.context):
            local = _beside(task)
            return f"{local}, with the last {task.window - 1} keys of the devices before"
        return f"ring over {task.context} devices, each {task.T // task.context} tokens of a row"
    if impl == best == "cudnn" and task.documents:
        return f"cudnn, documents as a mask of {2 * task.T**2 / 1e6:,.1f} MB per row on a device"
    if impl == best:
        return impl
    if reason := _cannot(task, best):
        return f"{impl}, slower than {best}, for which {reason}"
    return f"{impl}, as train.attention says; auto would take {best}, which is faster"


def _best(task: Task) -> Impl:
    """Return what is fastest on a platform, if it can do the task."""
    if task.context > 1:
        return "ring"
    return {"gpu": "cudnn", "tpu": "splash"}.get(task.platform, "blocks")


def _beside(task: Task) -> Impl:
    """Return how a device attends to its keys and those of the devices before it."""
    return "splash" if task.platform == "tpu" and not task.dropout else "blocks"


def _cannot(task: Task, impl: Impl, widest: int = CUDNN_WIDTH) -> str | None:
    """Return why a task cannot be done in this way; None: it can. `widest`: head of cuDNN."""
    dropout = f"model.dropout = {task.dropout:g} would have to be 0" if task.dropout else None
    softcap = f"model.attn_softcap = {task.softcap:g} would have to be 0" if task.softcap else None
    if impl == "ring":
        return None
    if task.context > 1:
        return f"mesh.context = {task.context} needs the ring, which auto takes"
    if impl == "splash":
        return dropout if task.platform == "tpu" else f"a TPU is needed, not a {task.platform}"
    if impl == "dot_product":
        return dropout or softcap
    if impl == "cudnn":
        return _cudnn_cannot(task, widest) or dropout or softcap
    return None


def _cudnn_cannot(task: Task, widest: int) -> str | None:
    if task.platform != "gpu":
        return f"an NVIDIA GPU is needed, not a {task.platform}"
    if jnp.dtype(task.dtype) not in map(jnp.dtype, HALVES):
        return f"train.compute_dtype = {jnp.dtype(task.dtype)} would have to be bfloat16"
    if task.H % 8:
        return f"the head width {task.H} would have to be a multiple of 8"
    if task.H > widest:
        hint = f" (Hopper takes {HOPPER_WIDTH} if asked: train.attention = 'cudnn')"
        return f"the head width {task.H} would have to be at most {widest}" + (
            hint if task.H <= HOPPER_WIDTH else ""
        )
    if task.T % 2:
        return f"model.seq_len = {task.T} would have to be even"
    return None


def _on_device(
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array | None,
    dropout_keys: Array | None,
    axes: MeshAxes,
    *,
    task: Task,
    impl: Impl,
    scale: float,
) -> Array:
    """Return attention [b, t, n, H] of the rows, tokens and heads that one device holds."""
    limits: dict[str, Any] = {"window": task.window, "scale": scale, "softcap": task.softcap}
    dropped: dict[str, Any] = {}
    if dropout_keys is not None:
        first_head = jax.lax.axis_index(axes["heads"]) * q.shape[2] if axes["heads"] else 0
        dropped = {"dropout": task.dropout, "draws": Draws(seeds(dropout_keys), first_head)}
    key_ids, position = None, 0
    if impl == "ring":
        ring = Ring(axes["seq"], task.context)
        if not near(task.window, task.T, task.context):
            return ring_attention(ring, q, k, v, segment_ids, **limits, **dropped)
        k, v, segment_ids, key_ids = with_keys_before(ring, k, v, segment_ids, task.window)
        impl, position = _beside(task), ring.here() * q.shape[1]
    if impl == "splash":
        return kernels.splash(q, k, v, segment_ids, key_ids, **limits)
    if impl in ("cudnn", "dot_product"):
        implementation = "cudnn" if impl == "cudnn" else "xla"
        out = kernels.dot_product(
            q, k, v, segment_ids, window=task.window, scale=scale, implementation=implementation
        )
        return out if impl == "cudnn" else named(out, "attn")
    accelerator = task.platform != "cpu"
    rows = TALL_BLOCK if accelerator else BLOCK
    out = block_attention(
        q, k, v, segment_ids, key_ids, **limits, **dropped, position=position,
        rows=q.shape[1] if impl == "reference" else rows,
        recompute=accelerator and impl == "blocks",
    )  # fmt: skip
    return named(out, "attn")


def _for_each_device(x: Array, num_heads: int, parts: int) -> Array:
    """Return keys or values [B, T, K, H], repeated where K heads do not divide over devices.

    Each device then holds the heads that its own queries attend to, and no others.
    """
    K = x.shape[2]
    needed = math.lcm(K, parts) if num_heads % parts == 0 else K
    return x if needed == K else jnp.repeat(x, needed // K, axis=2)
