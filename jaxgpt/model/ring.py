"""Attention over sequences that lie split over C devices, each holding T / C tokens of a row.

Keys and values go round the ring of devices and meet the queries, which stay (Liu et al. 2023, Ring
Attention). A causal mask gives the device with the last tokens the most work, so the devices swap
half chunks first: of 2 C half chunks device c takes c (early) and 2 C - 1 - c (late). Then each
step has exactly two pairs of half chunks to do on every device: late queries with early keys, and
either early with early or late with late. Softmax is put together in float32 as results come in,
and the backward pass sends keys, values and their gradients round the ring again; nothing of T x T
or of C chunks is ever kept. With a window of few chunks, devices only send each other the keys that
the first queries of the next chunk still see.

In the ring arrays are q [2, B, K, G, h, H], k and v [2, B, K, h, H], segment ids [2, B, h]: early
and late half chunks of h = T / 2 C tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxgpt.model.block_attention import by_head, by_token
from jaxgpt.model.dropout import Draws
from jaxgpt.model.pairs import (
    Drawn,
    Limits,
    State,
    merge,
    pair,
    pair_gradients,
    triangle,
    triangle_gradients,
)

Array = jax.Array
NOWHERE = jnp.iinfo(jnp.int32).min  # the segment of tokens before the first


@dataclass(frozen=True)
class Ring:
    """The devices among which a sequence is split: `axes` are mesh axes, `parts` their size C."""

    axes: tuple[str, ...]
    parts: int

    def send(self, x: Any, to: Callable[[int], int]) -> Any:
        """Return what device d with to(d) = here holds; `to` is one-to-one among the devices."""
        pairs = [(d, to(d) % self.parts) for d in range(self.parts)]
        return jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, self.axes, pairs), x)

    def here(self) -> Array:
        """Return the number of this device."""
        return jax.lax.axis_index(self.axes)


def ring_attention(
    ring: Ring,
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array | None,
    *,
    window: int,
    scale: float,
    softcap: float,
    dropout: float = 0.0,
    draws: Draws | None = None,
) -> Array:
    """Return attention [B, T / C, N, H] of this device's tokens, in natural order like q, k and v.

    q [B, T / C, N, H], k and v [B, T / C, K, H], segment_ids [B, T / C]; T / C is even. Dropout
    draws what one device would: its masks depend on positions in the row.
    """
    q = q * jnp.asarray(scale or q.shape[-1] ** -0.5, q.dtype)
    q, k, v = by_head(q, k, v)
    halves = partial(_swapped, ring)
    q, k, v = halves(q, -2), halves(k, -2), halves(v, -2)
    if segment_ids is not None:
        segment_ids = halves(segment_ids, -1)
    out = _ring(ring, Limits(window, softcap, dropout), q, k, v, segment_ids, draws)
    return by_token(_swapped_back(ring, out, -2))


def near(window: int, length: int, parts: int) -> bool:
    """Return whether devices should rather send each other the few keys that a window needs.

    They then hold up to a quarter of the row's keys; in the ring they would compute up to T / 2 w
    times as much.
    """
    return 0 < window - 1 <= max(length // parts, length // 4)


def with_keys_before(
    ring: Ring, k: Array, v: Array, segment_ids: Array | None, window: int
) -> tuple[Array, Array, Array, Array]:
    """Return k and v with the window - 1 tokens before them, and the segments of queries and keys.

    k and v [B, T / C, K, H] come back as [B, window - 1 + T / C, K, H]. What would be before the
    first token of a row is in a segment of its own.
    """
    B, chunk = k.shape[:2]
    if segment_ids is None:
        segment_ids = jnp.zeros((B, chunk), jnp.int32)
    wanted, parts = window - 1, [(k, v, segment_ids)]
    for step in range(1, -(-wanted // chunk) + 1):
        kept = min(chunk, wanted - (step - 1) * chunk)
        last = jax.tree.map(lambda x, kept=kept: x[:, chunk - kept :], (k, v, segment_ids))
        before = ring.send(last, lambda d, step=step: d + step)
        ids = jnp.where(ring.here() >= step, before[2], NOWHERE)
        parts.insert(0, (*before[:2], ids))
    k, v, ids = (jnp.concatenate(leaves, axis=1) for leaves in zip(*parts, strict=True))
    return k, v, segment_ids, ids


def _swapped(ring: Ring, x: Array, axis: int) -> Array:
    """Return the early and the late half chunk of this device, [2, ...], of one natural chunk.

    Of the half chunks of device d the first is 2 d and the second 2 d + 1; either kind goes to all
    devices, one to each.
    """
    even, odd = jnp.split(x, 2, axis)
    even, odd = ring.send(even, partial(_taker, ring, 0)), ring.send(odd, partial(_taker, ring, 1))
    first = ring.here() % 2 == 0
    return jnp.stack([jnp.where(first, even, odd), jnp.where(first, odd, even)])


def _swapped_back(ring: Ring, x: Array, axis: int) -> Array:
    first = ring.here() % 2 == 0
    even, odd = jnp.where(first, x[0], x[1]), jnp.where(first, x[1], x[0])
    giver = [{_taker(ring, half, d): d for d in range(ring.parts)} for half in (0, 1)]
    halves = ring.send(even, giver[0].__getitem__), ring.send(odd, giver[1].__getitem__)
    return jnp.concatenate(halves, axis)


def _taker(ring: Ring, half: int, d: int) -> int:
    """Return which device takes half chunk 2 d + half."""
    chunk = 2 * d + half
    return min(chunk, 2 * ring.parts - 1 - chunk)


class _Turn(NamedTuple):
    """Which two pairs a device does with the keys of another."""

    earlier: Array  # bool: those keys' early half comes before this device's
    offsets: Array | None  # [2]: first query less first key, in tokens; only with a window
    drawn: Drawn | None  # for dropout


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ring(
    ring: Ring,
    limits: Limits,
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array | None,
    draws: Draws | None,
) -> Array:
    return _forward(ring, limits, q, k, v, segment_ids, draws)[0]


def _forward(
    ring: Ring,
    limits: Limits,
    q: Array,
    k: Array,
    v: Array,
    ids: Array | None,
    draws: Draws | None,
) -> tuple[Array, tuple]:
    travel = ring.send((k, v, ids), _next)  # on its way while the device attends to itself
    places = _places(ring, ring.here(), q)
    early, late = _parts(triangle(limits, q, k, v, ids, _drawn(draws, places, places)))
    own = pair(
        limits, q[1:], k[:1], v[:1], _at(ids, 1), _at(ids, 0), _own_offset(ring, limits, q),
        _drawn(draws, places[1:], places[:1]),
    )  # fmt: skip
    late = merge(late, _parts(own)[0])

    def turn(state: tuple[State, State], step: Array | int, keys: tuple) -> tuple[State, State]:
        early, late = state
        now = _turn(ring, limits, step, q, draws)
        found = pair(limits, *_chosen(now, q, *keys, ids), now.offsets, now.drawn)
        always, other = _parts(found)
        late = merge(late, always)
        joined = merge(_where(now.earlier, early, late), other)
        return _where(now.earlier, joined, early), _where(now.earlier, late, joined)

    def body(carry: tuple, step: Array) -> tuple[tuple, None]:
        state, keys = carry
        following = ring.send(keys, _next)
        return (turn(state, step, keys), following), None

    steps = jnp.arange(1, ring.parts - 1)
    (state, travel), _ = jax.lax.scan(body, ((early, late), travel), steps)
    state = turn(state, ring.parts - 1, travel)
    state = jax.tree.map(lambda *halves: jnp.stack(halves), *state)
    out = checkpoint_name((state.total / state.weight).astype(q.dtype), "attn")
    log_sum = checkpoint_name(state.top + jnp.log(state.weight), "attn")
    return out, (q, k, v, ids, draws, out, log_sum)


def _backward(ring: Ring, limits: Limits, kept: tuple, grad: Array) -> tuple:
    q, k, v, ids, draws, out, log_sum = kept
    travel = ring.send((k, v, ids), _next)
    delta = (grad.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1, keepdims=True)
    places = _places(ring, ring.here(), q)
    dq, dk, dv = triangle_gradients(
        limits, q, k, v, ids, grad, log_sum, delta, _drawn(draws, places, places)
    )
    own_q, own_k, own_v = pair_gradients(
        limits, q[1:], k[:1], v[:1], _at(ids, 1), _at(ids, 0), _own_offset(ring, limits, q),
        grad[1:], log_sum[1:], delta[1:], _drawn(draws, places[1:], places[:1]),
    )  # fmt: skip
    dq = dq.at[1].add(own_q[0])
    dk, dv = dk.at[0].add(own_k[0]), dv.at[0].add(own_v[0])

    def turn(dq: Array, dkv: tuple, step: Array | int, keys: tuple) -> tuple[Array, tuple]:
        dkv = ring.send(dkv, _next)  # follows its keys, on its way while more is computed
        now = _turn(ring, limits, step, q, draws)
        chosen = [_queries(now, x) for x in (grad, log_sum, delta)]
        pairs = _chosen(now, q, *keys, ids)
        more_q, *more = pair_gradients(limits, *pairs, now.offsets, *chosen, now.drawn)
        dq = dq + _spread(now, more_q, 1)
        return dq, tuple(x + _spread(now, y, 0) for x, y in zip(dkv, more, strict=True))

    def body(carry: tuple, step: Array) -> tuple[tuple, None]:
        dq, dkv, keys = carry
        following = ring.send(keys, _next)
        return (*turn(dq, dkv, step, keys), following), None

    steps = jnp.arange(1, ring.parts - 1)
    (dq, dkv, travel), _ = jax.lax.scan(body, (dq, (dk, dv), travel), steps)
    dq, dkv = turn(dq, dkv, ring.parts - 1, travel)
    dk, dv = ring.send(dkv, _next)  # home
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None


_ring.defvjp(_forward, _backward)


def _next(d: int) -> int:
    return d + 1


def _turn(ring: Ring, limits: Limits, step: Array | int, q: Array, draws: Draws | None) -> _Turn:
    """Return what to do with the keys that come `step` devices round the ring."""
    here = ring.here()
    there = (here - step) % ring.parts
    now = _Turn(there < here, None, None)
    queries = _queries(now, _places(ring, here, q))
    keys = _keys(now, _places(ring, there, q))
    offsets = queries - keys if limits.window else None
    return now._replace(offsets=offsets, drawn=_drawn(draws, queries, keys))


def _places(ring: Ring, device: Array, q: Array) -> Array:
    """Return the positions in the row of the first tokens of a device's half chunks, [2]."""
    return q.shape[-2] * jnp.stack([device, 2 * ring.parts - 1 - device])


def _drawn(draws: Draws | None, queries: Array, keys: Array) -> Drawn | None:
    return None if draws is None else Drawn(draws, queries, keys)


def _own_offset(ring: Ring, limits: Limits, q: Array) -> Array | None:
    """Return how many tokens this device's late queries lie after its early keys, [1]."""
    if not limits.window:
        return None
    return q.shape[-2] * (2 * ring.parts - 1 - 2 * ring.here())[None]


def _chosen(
    now: _Turn, q: Array, k: Array, v: Array, key_ids: Array | None, ids: Array | None
) -> tuple:
    """Return q, k, v and the segments of the two pairs of a turn."""
    keys = [None if x is None else _keys(now, x) for x in (k, v, key_ids)]
    return _queries(now, q), *keys[:2], None if ids is None else _queries(now, ids), keys[2]


def _queries(now: _Turn, x: Array) -> Array:
    return jnp.stack([x[1], jnp.where(now.earlier, x[0], x[1])])


def _keys(now: _Turn, x: Array) -> Array:
    return jnp.stack([x[0], jnp.where(now.earlier, x[0], x[1])])


def _spread(now: _Turn, x: Array, half: int) -> Array:
    """Return the gradients of the two pairs, [2, ...], as early and late; the first is of `half`.

    The transpose of `_queries` (half 1) and of `_keys` (half 0).
    """
    early, late = jnp.where(now.earlier, x[1], 0), jnp.where(now.earlier, 0, x[1])
    return jnp.stack([early, late + x[0]] if half else [early + x[0], late])


def _at(ids: Array | None, half: int) -> Array | None:
    return None if ids is None else ids[half : half + 1]


def _parts(state: State) -> list[State]:
    return [jax.tree.map(lambda leaf, i=i: leaf[i], state) for i in range(len(state.top))]


def _where(condition: Array, yes: State, no: State) -> State:
    return jax.tree.map(partial(jnp.where, condition), yes, no)
