"""Next-token cross-entropy as (sum, weight) pairs, without ever holding all the logits.

The tokens of hidden states [B, T, D] are cut into chunks. While the loss of a chunk is computed,
its logits [tokens, V] also give the gradients of its hidden states and of the head, which the
backward pass only scales: no logits are stored and none are computed twice. Products take `dtype`
and give it (logits also float32); softmax, sums and the accumulated head gradient are float32.
Masks select, they never multiply.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxgpt.model.shards import Shards, here

Array = jax.Array

TILE = 128  # rows of a matrix unit's tile: products of other numbers of rows are padded
NOTHING = (np.float32(0),) * 4  # the sums of no tokens, see `_sums`
# Logical axes of the head, and of its gradient's partial sums [S, C, V, D].
HEAD, PARTIAL = ("vocab", "embed"), ("vocab", None)


class LossSums(NamedTuple):
    """Sums over the tokens of a batch, float32 scalars; divide by `weight` last of all."""

    total: Array  # what is minimised: nll + smoothing + z, nats, weighted as they are
    nll: Array  # cross-entropy alone; no gradient flows through it nor through the following
    smoothing: Array  # what label smoothing adds, which may be negative
    z: Array  # what the log-partition penalty adds
    weight: Array


class _Options(NamedTuple):
    """What is static in the compiled loss."""

    z_loss: float
    smoothing: float
    softcap: float
    dtype: Any
    logits_dtype: Any  # of their product; they are float32 from there on
    chunk: int  # tokens per chunk of a device
    shards: Shards
    rows: str  # logical name of the axis of rows


def next_token_sums(
    hidden: Array,
    head: Array,
    targets: Array,
    weights: Array,
    *,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    dtype: DTypeLike = jnp.float32,
    logits_dtype: DTypeLike | None = None,
    chunk: int | None = None,
    shards: Shards | None = None,
    rows: str = "batch",
) -> LossSums:
    """Return the weighted sums of -log softmax(logits)[target], nats, and of the weights.

    hidden [B, T, D] and head [V, D] of any float dtype are cast to `dtype`, their product is
    `logits_dtype` (None: `dtype`), and logits are c tanh(logits / c) for a `softcap` c > 0. To be
    minimised, (1 - s) of the target's loss counts and s of the mean loss of all V ids, where s is
    `label_smoothing` (Szegedy et al. 2016, section 7), and z_loss * logsumexp(logits)^2 is added
    per token (PaLM, section 5). targets [B, T] int32, weights [B, T] float32. Where a weight is 0
    neither target nor hidden state has any effect, whatever they are; a target outside [0, V) with
    a weight makes the loss NaN, for JAX would wrap it silently. Gradients flow to hidden and head
    only. `chunk`: tokens per chunk on each device; None: `chunk_tokens`; 0: all at once, by
    ordinary differentiation. With `shards` each device computes the loss of the tokens it holds;
    `rows` is the logical name of B.
    """
    weights = jax.lax.stop_gradient(weights.astype(jnp.float32))
    used = weights != 0
    hidden = jnp.where(used[..., None], hidden, 0)
    targets = jnp.where(used, targets, 0)
    shards = shards or here()
    opt = _Options(
        z_loss=float(z_loss),
        smoothing=float(label_smoothing),
        softcap=float(softcap),
        dtype=jnp.dtype(dtype),
        logits_dtype=jnp.dtype(logits_dtype or dtype),
        chunk=_tokens(hidden.shape, head.shape[0], chunk, shards, rows),
        shards=shards,
        rows=rows,
    )
    with jax.named_scope("loss"):
        if chunk == 0:
            total, *parts = _sums(_logits(hidden, head, opt)[0], targets, weights, opt)
        else:
            total, *parts = _chunked(hidden, head, targets, weights, opt)
        return LossSums(total, *map(jax.lax.stop_gradient, parts), weights.sum())


def token_losses(
    hidden: Array,
    head: Array,
    targets: Array,
    weights: Array,
    *,
    softcap: float = 0.0,
    dtype: DTypeLike = jnp.float32,
    logits_dtype: DTypeLike | None = None,
    chunk: int | None = None,
    shards: Shards | None = None,
) -> Array:
    """Return the cross-entropy of each token, [B, T] float32 nats; 0 where the weight is 0.

    Arguments as `next_token_sums`; a weight only selects here, it does not scale.
    """
    used = weights != 0
    hidden = jnp.where(used[..., None], hidden, 0)
    targets = jnp.where(used, targets, 0)
    shards = shards or here()
    opt = _Options(
        z_loss=0.0,
        smoothing=0.0,
        softcap=float(softcap),
        dtype=jnp.dtype(dtype),
        logits_dtype=jnp.dtype(logits_dtype or dtype),
        chunk=_tokens(hidden.shape, head.shape[0], chunk, shards, "batch"),
        shards=shards,
        rows="batch",
    )
    hidden, head, t, _ = _prepare(hidden, head, targets, weights, opt)

    def body(carry: None, part: tuple[Array, ...]) -> tuple[None, Array]:
        logits, _ = _logits(part[0], head, opt)
        return carry, _token_terms(logits, part[1], opt)[0]

    _, losses = _scan(body, None, (hidden, t), opt.chunk)
    return jnp.where(used, _join(losses, targets.shape), 0.0)


def chunk_tokens(vocab_size: int, platform: str) -> int:
    """Return the tokens per chunk on each device.

    On CPU 32 MiB of float32 logits, about the last-level cache, but at least 512 tokens: each chunk
    also adds [V, D] to the head gradient, which costs as much as the products of 120 tokens. On
    accelerators 512 MiB and at least 4096, where larger products are no faster.
    """
    mebibytes, least = (32, 512) if platform == "cpu" else (512, 4096)
    return max(least, mebibytes * 2**20 // (4 * vocab_size))


def chunk_size(tokens: int, most: int) -> int:
    """Return into chunks of how many tokens a device's `tokens` are cut, `most` or a little more.

    Equal ones, of a multiple of `TILE`, where there are such of more than half of `most`; else
    nearly equal ones, the last one shorter: another program for the compiler.
    """
    if tokens <= most:
        return tokens
    for size in range(most // TILE * TILE, most // 2, -TILE):
        if tokens % size == 0:
            return size
    size = -(-tokens // -(-tokens // most))
    return -(-size // TILE) * TILE if size > TILE else size


def _tokens(
    shape: tuple[int, ...], vocab_size: int, chunk: int | None, shards: Shards, rows: str
) -> int:
    """Return the tokens per chunk of a device's part of [B, T, D]."""
    S, C = _parts(shape, shards, rows)
    most = chunk or chunk_tokens(vocab_size, shards.platform)
    return chunk_size(shape[0] // S * (shape[1] // C), most)


def _parts(shape: tuple[int, ...], shards: Shards, rows: str) -> tuple[int, int]:
    """Return into how many parts B and T are split; what does not divide stays whole."""
    S, C = shards.split(rows), shards.split("seq")
    return (1 if shape[0] % S else S), (1 if shape[1] % C else C)


def _logits(hidden: Array, head: Array, opt: _Options) -> tuple[Array, Array]:
    """Return float32 logits [..., V], and before the cap (the same array if there is none)."""
    hidden, head = hidden.astype(opt.dtype), head.astype(opt.dtype)
    raw = jnp.einsum("...d,vd->...v", hidden, head, preferred_element_type=opt.logits_dtype)
    if opt.shards.platform != "cpu":
        raw = jax.lax.optimization_barrier(raw)  # else XLA for TPU keeps them in float32 as well
    raw = raw.astype(jnp.float32)
    return (opt.softcap * jnp.tanh(raw / opt.softcap) if opt.softcap else raw), raw


def _logsumexp(logits: Array) -> Array:
    """Return log sum exp over the last axis, which is kept with size 1."""
    top = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    return top + jnp.log(jnp.exp(logits - top).sum(-1, keepdims=True))


def _token_terms(logits: Array, targets: Array, opt: _Options) -> tuple[Array, Array]:
    """Return -log softmax(logits)[target] and log sum exp(logits), [...] of logits [..., V]."""
    lse = _logsumexp(logits)[..., 0]
    if opt.shards.platform == "cpu":
        label = jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="clip")[..., 0]
    else:  # in the sweep that sums; a gather would want the float32 logits in memory
        label = jnp.where(_one_hot(logits, targets), logits, 0.0).sum(-1)
    inside = (targets >= 0) & (targets < logits.shape[-1])
    return jnp.where(inside, lse - label, jnp.nan), lse


def _one_hot(logits: Array, targets: Array) -> Array:
    """Return where in logits [..., V] the targets [...] are."""
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return ids == targets[..., None]


def _sums(logits: Array, targets: Array, weights: Array, opt: _Options) -> tuple[Array, ...]:
    """Return the weighted sums (total, nll, smoothing, z) of logits [..., V]."""
    nll, lse = _token_terms(logits, targets, opt)

    def weighted(terms: Array) -> Array:
        return jnp.where(weights != 0, weights * terms, 0.0).sum()

    smoothing = z = jnp.float32(0)
    if opt.smoothing:
        smoothing = opt.smoothing * weighted(lse - logits.mean(-1) - nll)
    if opt.z_loss:
        z = opt.z_loss * weighted(jnp.square(lse))
    nll = weighted(nll)
    return nll + smoothing + z, nll, smoothing, z


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _chunked(
    hidden: Array, head: Array, targets: Array, weights: Array, opt: _Options
) -> tuple[Array, ...]:
    """Return `_sums` by chunks; this body runs where no gradient is asked for."""
    hidden, head, targets, weights = _prepare(hidden, head, targets, weights, opt)

    def body(sums: tuple, part: tuple[Array, ...]) -> tuple[tuple, None]:
        logits, _ = _logits(part[0], head, opt)
        return _add(sums, _sums(logits, part[1], part[2], opt)), None

    return _scan(body, NOTHING, (hidden, targets, weights), opt.chunk)[0]


def _chunked_forward(
    hidden: Array, head: Array, targets: Array, weights: Array, opt: _Options
) -> tuple[tuple[Array, ...], tuple[Array, Array]]:
    """Return `_sums` and, as residuals, the gradients of total: hidden's and the head's."""
    h, cast, t, w = _prepare(hidden, head, targets, weights, opt)

    def body(carry: tuple, part: tuple[Array, ...]) -> tuple[tuple, Array]:
        (sums, head_grad), (h, t, w) = carry, part
        logits, raw = _logits(h, cast, opt)
        sums = _add(sums, _sums(logits, t, w, opt))
        grad = _logits_grad(logits, raw, t, w, opt).astype(opt.dtype)  # [S, C, n, V]
        h_grad = jnp.einsum("...v,vd->...d", grad, cast)
        # A partial sum per shard of the tokens: devices meet once, after the last chunk.
        part = jnp.einsum("scnv,scnd->scvd", grad, h)
        if opt.shards.platform == "cpu":
            # Else XLA hands the sum to oneDNN's product, rounded to the product's dtype.
            part = jax.lax.optimization_barrier(part)
        head_grad = head_grad + part.astype(jnp.float32)
        return (sums, _place(head_grad, opt, PARTIAL)), h_grad

    start = _place(jnp.zeros((*h.shape[:2], *head.shape), jnp.float32), opt, PARTIAL)
    (sums, head_grad), h_grad = _scan(body, (NOTHING, start), (h, t, w), opt.chunk)
    h_grad = _join(h_grad, hidden.shape).astype(hidden.dtype)
    head_grad = _sum_shards(head_grad, opt).astype(head.dtype)
    if opt.shards.platform != "cpu":
        # Else XLA may end it after the backward passes of the blocks, and keep [V, D] until then.
        h_grad, head_grad = jax.lax.optimization_barrier((h_grad, head_grad))
    return sums, (h_grad, head_grad)


def _logits_grad(logits: Array, raw: Array, t: Array, w: Array, opt: _Options) -> Array:
    """Return the gradient of `_sums`' total, float32 [..., V], at the logits before the cap."""
    top = logits.max(-1, keepdims=True)
    powers = jnp.exp(logits - top)  # once for sum and gradient: it costs more than all the rest
    total = powers.sum(-1, keepdims=True)
    scale = w[..., None]
    share = scale / total
    if opt.z_loss:
        share = share * (1.0 + 2.0 * opt.z_loss * (top + jnp.log(total)))
    one_hot = _one_hot(logits, t)
    wanted = jnp.where(one_hot, 1.0 - opt.smoothing, 0.0) + opt.smoothing / logits.shape[-1]
    grad = powers * share - scale * wanted
    if opt.softcap:
        grad = grad * (1.0 - jnp.square(jnp.tanh(raw / opt.softcap)))
    return grad


def _chunked_backward(
    opt: _Options, gradients: tuple[Array, Array], cotangents: tuple[Array, ...]
) -> tuple[Array | None, ...]:
    scale = cotangents[0]  # those of its parts are cut by the caller
    hidden, head = ((scale * g).astype(g.dtype) for g in gradients)
    return hidden, head, None, None


_chunked.defvjp(_chunked_forward, _chunked_backward)


def _prepare(
    hidden: Array, head: Array, targets: Array, weights: Array, opt: _Options
) -> tuple[Array, Array, Array, Array]:
    """Cast once, gather the head over fsdp once, and show the devices' parts: [S, C, n, ...].

    S are the shards of the rows, C those of a row, n the tokens of each.
    """
    S, C = _parts(hidden.shape, opt.shards, opt.rows)

    def split(x: Array) -> Array:
        B, T, *rest = x.shape
        x = x.reshape(S, B // S, C, T // C, *rest).swapaxes(1, 2)  # [S, C, b, t, ...]
        return _place(x.reshape(S, C, -1, *rest), opt, (None,) * (1 + len(rest)))

    head = opt.shards.constrain(head.astype(opt.dtype), PARTIAL)
    return split(hidden.astype(opt.dtype)), head, split(targets), split(weights)


def _sum_shards(partial: Array, opt: _Options) -> Array:
    """Return the sum [V, D] of the shards' [S, C, V, D], placed as the head itself.

    First over the devices that hold parts of D, as a reduce-scatter, then over replicas of a part
    and over parts of the rows: asked for all at once, XLA all-reduces the whole: at 70B 8.4 GB sent
    in place of 4.2, at 8B with sequences over 4 devices 8.3 in place of 2.2.
    """
    S, C, *shape = partial.shape
    replicas = opt.shards.split("replicas")
    R = replicas if S % replicas == 0 else 1
    grouped = partial.reshape(R, S // R, C, *shape).sum(1)
    grouped = opt.shards.constrain(grouped, ("replicas", "seq", *HEAD))  # [R, C, V, D]
    return opt.shards.constrain(grouped.sum((0, 1)), HEAD)


def _join(x: Array, shape: tuple[int, ...]) -> Array:
    """Return [S, C, n, ...] as `shape`, which is [B, T, ...]."""
    S, C, _, *rest = x.shape
    return x.reshape(S, C, shape[0] // S, -1, *rest).swapaxes(1, 2).reshape(shape)


def _place(x: Array, opt: _Options, names: tuple[str | None, ...]) -> Array:
    """Place [S, C, ...], of which `names` are the axes after these two."""
    return opt.shards.constrain(x, (opt.rows, "seq", *names))


def _add(sums: tuple[Array, ...], more: tuple[Array, ...]) -> tuple[Array, ...]:
    return tuple(a + b for a, b in zip(sums, more, strict=True))


def _scan(body: Any, carry: Any, arrays: tuple[Array, ...], chunk: int) -> tuple[Any, Any]:
    """Scan `body` over chunks of n, and join what it puts out along n; a rest is a last call.

    arrays: hidden [..., n, D], targets [..., n], and perhaps weights [..., n].
    """
    axis = arrays[1].ndim - 1
    n = arrays[1].shape[axis]
    if chunk >= n:
        return body(carry, arrays)
    count = n // chunk

    def cut(x: Array) -> Array:
        x = jax.lax.slice_in_dim(x, 0, count * chunk, axis=axis)
        x = x.reshape(*x.shape[:axis], count, chunk, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)  # [count, ..., chunk, ...]

    carry, out = jax.lax.scan(body, carry, jax.tree.map(cut, arrays))
    if out is not None:
        out = jnp.moveaxis(out, 0, axis)
        out = out.reshape(*out.shape[:axis], count * chunk, *out.shape[axis + 2 :])
    if count * chunk < n:
        rest = tuple(jax.lax.slice_in_dim(x, count * chunk, n, axis=axis) for x in arrays)
        carry, last = body(carry, rest)
        out = None if out is None else jnp.concatenate([out, last], axis=axis)
    return carry, out
