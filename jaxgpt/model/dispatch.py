"""Tokens to their experts and back: places, the matrix products of groups, the weighted sum.

Three ways without any limit give the same values: `dense` (all experts on all tokens, the
reference), `ragged` (tokens sorted by expert, `jax.lax.ragged_dot`) and `blocks` (each expert gets
whole blocks of rows, and a loop runs over those in use). `limited` gives each expert so many places
per row. A slot is one of a token's k choices, numbered token * k + choice. Tokens move by gathers
in both directions, so no gradient depends on the order of a scatter. Numbers that are not finite
stay with the tokens that chose them: what is not chosen is selected away, never multiplied by 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxgpt.config import ModelConfig
from jaxgpt.model import remat
from jaxgpt.model.activations import activated
from jaxgpt.model.shards import Shards

Array = jax.Array
Matrices = tuple[Array | None, Array, Array]  # gate (None: not gated), up [E, D, F], down [E, F, D]
Impl = Literal["dense", "ragged", "blocks"]

LEAST_BLOCK = 8  # rows; decoding has few slots, and blocks of 128 would be padding


def default_impl(platform: str) -> Impl:
    """Return the fastest `impl` of a platform.

    2,048 tokens, D = 256, F = 512, E = 8, k = 2, forward and backward on 2 busy cores, float32 and
    bfloat16: blocks 220 and 224 ms, dense 1084 and 561, ragged 2296 and 904, for without a kernel
    of its own `ragged_dot` multiplies every token by every expert. TPU has such a kernel. That for
    NVIDIA (openxla/xla#40189) was reported to find no plan on Blackwell, and XLA's other lowering
    to run at 2 % of the chip's speed (marin-community/marin#7012): blocks, not measured there.
    """
    return "ragged" if platform == "tpu" else "blocks"


def dropless(
    cfg: ModelConfig,
    h: Array,
    chosen: Array,
    gates: Array,
    matrices: Matrices,
    platform: str,
    impl: Impl | None = None,
    nobody: bool = False,
) -> Array:
    """Return sum_i gates_i MLP_chosen_i(h), [..., D] in h's dtype, for tokens h [..., D].

    chosen int32 and gates float32 are [..., k]; experts are numbered as in `matrices`. With
    `nobody`, a choice may be their number: nobody, which adds 0. Raises ValueError for an unknown
    `impl`.
    """
    impl = impl or default_impl(platform)
    if impl not in ("dense", "ragged", "blocks"):
        raise ValueError(f"expert impl {impl!r}: dense, ragged or blocks")
    (*lead, D), k = h.shape, chosen.shape[-1]
    x, chosen, gates = h.reshape(-1, D), chosen.reshape(-1, k), gates.reshape(-1, k)
    if impl == "dense":
        return _dense(cfg, platform, x, chosen, gates, matrices).reshape(*lead, D)
    E = len(matrices[1])
    place, sizes = queue(chosen.reshape(-1), E)
    rows = block_rows(place.size, E, platform) if impl == "blocks" else 1
    taken = -(-sizes // rows)  # blocks of each expert
    ends = jnp.cumsum(taken)
    position = (((ends - taken) * rows)[chosen.reshape(-1)] + place).reshape(-1, k)
    if impl == "ragged":
        # A lowering to dense products multiplies the weights of an expert that nobody chose by 0.
        if platform != "tpu":
            used = (sizes > 0)[:, None, None]
            matrices = tuple(w if w is None else jnp.where(used, w, 0) for w in matrices)
        product, count = partial(jax.lax.ragged_dot, group_sizes=sizes), place.size
    else:
        # At worst all experts but one end in a block of one slot.
        blocks = min(-(-place.size // rows) + E - 1, place.size)
        owner = (jnp.arange(blocks)[:, None] >= ends).sum(-1)  # E beyond those in use
        product, count = partial(_by_block, owner=owner, used=ends[-1]), blocks * rows
    if nobody:
        position = jnp.where(chosen < E, position, count)
        product = _first(product, ends[-1] * rows)
    source = inverse(position.reshape(-1), count)
    hidden = take(x, source // k, position)  # [count, D]
    out = _mlp(cfg, platform, product, hidden, matrices)
    out = take(out, position.reshape(-1), source[:, None]).reshape(-1, k, D)
    return _mix(cfg, platform, out, gates).reshape(*lead, D)


def limited(
    cfg: ModelConfig,
    h: Array,
    chosen: Array,
    gates: Array,
    matrices: Matrices,
    counted: Array,
    shards: Shards,
) -> tuple[Array, Array]:
    """Return the sum of `dropless` over the slots that found a place, and which did, [B, T, k].

    h [B, T, D]; counted [B, T] bool: only these ask. Each row has `capacity(cfg, T)` places per
    expert, taken in order of tokens, then of choices: neither later tokens nor other rows matter.
    """
    B, T, D = h.shape
    E, C, k = cfg.num_experts, capacity(cfg, T), cfg.experts_per_token

    def of_row(chosen: Array, counted: Array) -> tuple[Array, Array]:
        experts = jnp.where(counted[:, None], chosen, E).reshape(-1)
        place, _ = queue(experts, E)
        found = (experts < E) & (place < C)
        position = jnp.where(found, experts * C + place, E * C)
        return position, inverse(position, E * C)

    position, source = jax.vmap(of_row)(chosen, counted)  # [B, T k], [B, E C]
    rows = ("batch", None, "seq", None)  # who holds parts of a row computes parts of the places
    x = jax.vmap(take)(h, source // k, position.reshape(B, T, k))  # empty places hold zeros
    x = shards.constrain(x.reshape(B, E, C, D), rows)
    # Where rows are split over the devices that share experts: an all-to-all each way, to experts
    # first, as rows take what they leave. Elsewhere no axis moves.
    shared = shards.split("experts") > 1
    lead, axes = ("eb", ("experts", "batch")) if shared else ("be", ("batch", "experts"))

    def turn(x: Array) -> Array:
        return x.swapaxes(0, 1) if shared else x

    def product(x: Array, w: Array) -> Array:
        return jnp.where(taken, jnp.einsum(f"{lead}ci,eio->{lead}co", x, w), 0)

    def place(hidden: Array) -> Array:
        return shards.constrain(hidden, (*axes, "seq", "mlp"))

    taken = turn((source < T * k).reshape(B, E, C, 1))
    x = shards.constrain(turn(x), (*axes, "seq", None))
    out = _mlp(cfg, shards.platform, product, x, matrices, place)
    out = shards.constrain(out, (*axes, "seq", None))
    out = shards.constrain(turn(out), rows).reshape(B, E * C, D)
    out = jax.vmap(take)(out, position, source[..., None]).reshape(B, T, k, D)
    out = shards.constrain(_mix(cfg, shards.platform, out, gates), ("batch", "seq", None))
    return out, (position < E * C).reshape(B, T, k)


def capacity(cfg: ModelConfig, tokens: int) -> int:
    """Return the places of an expert in a row: ceil(factor T k / E), at most T, for all choose it.

    Rounded at the sixth digit before: 1.1 * 40 / 4 is 11.000000000000002 in binary.
    """
    share = cfg.capacity_factor * tokens * cfg.experts_per_token / cfg.num_experts
    return min(math.ceil(round(share, 6)), tokens)


def block_rows(slots: int, num_experts: int, platform: str) -> int:
    """Return the rows of a block, a power of two: half of the fair load or less, within bounds.

    On average half a block per expert is padding. On CPU 64 rows or more are equally fast in
    float32; in bfloat16 128 or 256 take a third of the time of 32. 512 for a GPU is a guess.
    """
    most = 128 if platform == "cpu" else 512
    fair = max(slots // (2 * num_experts), 1)
    return min(max(1 << (fair.bit_length() - 1), LEAST_BLOCK), most)


@jax.custom_vjp
def take(x: Array, index: Array, back: Array) -> Array:
    """Return x[index], [n, D] of x [m, D], with zeros where an index is m or more.

    back [m, r] is the inverse: the places among the n that hold x's row, n or more for none. The
    gradient is gathered with it and summed in float32.
    """
    return jnp.take(x, index, axis=0, mode="fill", fill_value=0)


def _take_forward(x: Array, index: Array, back: Array) -> tuple[Array, Array]:
    return take(x, index, back), back


def _take_backward(back: Array, grad: Array) -> tuple[Array, None, None]:
    found = jnp.take(grad, back, axis=0, mode="fill", fill_value=0)  # [m, r, D]
    return found.astype(jnp.float32).sum(1).astype(grad.dtype), None, None


take.defvjp(_take_forward, _take_backward)


def queue(experts: Array, num_experts: int) -> tuple[Array, Array]:
    """Return how many slots before it have a slot's expert, [S], and the slots of each, [E]."""
    sizes = (experts[:, None] == jnp.arange(num_experts)).sum(0, dtype=jnp.int32)
    rank = inverse(jnp.argsort(experts, stable=True), experts.size)
    return rank - (jnp.cumsum(sizes) - sizes)[experts], sizes


def inverse(position: Array, count: int) -> Array:
    """Return which of the S entries of `position` is p, for each p < count; S for none."""
    S = position.size
    return jnp.full(count, S, jnp.int32).at[position].set(jnp.arange(S, dtype=jnp.int32))


def _mlp(
    cfg: ModelConfig,
    platform: str,
    product: Callable[[Array, Array], Array],
    x: Array,
    matrices: Matrices,
    place: Callable[[Array], Array] = lambda hidden: hidden,
) -> Array:
    """Return the experts' MLP of rows that `product` multiplies by their expert's matrix."""
    gate, up, down = matrices
    activate = remat.cheap(cfg, platform, partial(activated, cfg.mlp, dtype=x.dtype))
    hidden = activate(product(x, up), None if gate is None else product(x, gate))
    return product(place(hidden), down)


def _mix(cfg: ModelConfig, platform: str, out: Array, gates: Array) -> Array:
    """Return sum_i gates_i out_i, [..., D] of out [..., k, D] and gates [..., k]."""

    def weighted(out: Array, gates: Array) -> Array:
        return (out.astype(jnp.float32) * gates[..., None]).sum(-2).astype(out.dtype)

    return remat.cheap(cfg, platform, weighted)(out, gates)


def _first(product: Callable[[Array, Array], Array], used: Array) -> Callable:
    """Return a product whose rows from `used` on are 0, whatever is computed of them."""
    return lambda x, w: jnp.where(jnp.arange(len(x))[:, None] < used, product(x, w), 0)


def _dense(
    cfg: ModelConfig, platform: str, x: Array, chosen: Array, gates: Array, matrices: Matrices
) -> Array:
    total = jnp.zeros(x.shape, jnp.float32)
    for expert in range(len(matrices[1])):
        mine = chosen == expert  # [S, k]
        asked = mine.any(-1, keepdims=True)
        own = tuple(w if w is None else jnp.where(asked.any(), w[expert], 0) for w in matrices)
        out = _mlp(cfg, platform, jnp.matmul, x, own).astype(jnp.float32)
        gate = jnp.where(mine, gates, 0).sum(-1, keepdims=True)
        total += jnp.where(asked, gate * out, 0)
    return total.astype(x.dtype)


def _by_block(x: Array, w: Array, owner: Array, used: Array) -> Array:
    """Return x [n, I] times w [E, I, O], where n / len(owner) rows have the matrix of an owner."""
    blocks = _block_product(x.reshape(owner.size, -1, x.shape[-1]), w, owner, used)
    return blocks.reshape(len(x), -1)


def one_by_one(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return f, which `jax.vmap` is to call once per element.

    For loops whose number of turns is data: batched, each turn would copy all that they carry.
    """
    return jax.custom_batching.sequential_vmap(f)


@jax.custom_vjp
def _block_product(x: Array, w: Array, owner: Array, used: Array) -> Array:
    """Return x[i] @ w[owner[i]] for i < used, else zeros; x is [blocks, rows, I].

    Differentiated by hand, as the number of turns is data: JAX would run through all blocks, and
    add [E, I, O] zeros with one expert's gradient in each.
    """

    def product(x: Array, w: Array, owner: Array, used: Array) -> Array:
        def body(i: Array, out: Array) -> Array:
            return _put(out, x[i] @ _at(w, owner[i]), i)

        return jax.lax.fori_loop(0, used, body, jnp.zeros((*x.shape[:2], w.shape[-1]), x.dtype))

    return one_by_one(product)(x, w, owner, used)


def _block_forward(x: Array, w: Array, owner: Array, used: Array) -> tuple[Array, tuple]:
    return _block_product(x, w, owner, used), (x, w, owner, used)


def _block_backward(saved: tuple, grad: Array) -> tuple[Array | None, ...]:
    def gradients(x: Array, w: Array, owner: Array, used: Array, grad: Array) -> tuple:
        def body(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            x_grad, w_grad = carry
            x_grad = _put(x_grad, grad[i] @ _at(w, owner[i]).T, i)
            more = (x[i].T @ grad[i]).astype(jnp.float32)
            return x_grad, _put(w_grad, _at(w_grad, owner[i]) + more, owner[i])

        start = jnp.zeros_like(x), jnp.zeros(w.shape, jnp.float32)  # sums of many blocks
        x_grad, w_grad = jax.lax.fori_loop(0, used, body, start)
        return x_grad, w_grad.astype(w.dtype)

    return *one_by_one(gradients)(*saved, grad), None, None


_block_product.defvjp(_block_forward, _block_backward)


def _at(x: Array, index: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False)


def _put(x: Array, part: Array, index: Array) -> Array:
    return jax.lax.dynamic_update_index_in_dim(x, part, index, 0)
