"""Layers split over the stages of a pipeline, through which the micro-batches of an update pass.

In a turn all S stages compute at the same time, each on the micro-batch it holds, and hand what
they have computed on to the next; the last hands it to the first, R times (the circular pipeline of
Narayanan et al. 2021 and of praxis, as one loop of one program). A micro-batches need A R + S - 1
turns, in S - 1 of which a stage has nothing to do. New micro-batches and finished ones lie on a
belt of q places at each stage, [S, q, B, T, D], which brings the one to the first stage and takes
the other away: embeddings and the loss are computed by all stages, each for its own places.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxgpt.config import ModelConfig
from jaxgpt.model import embedding, gpt, remat
from jaxgpt.model.attention import Impl
from jaxgpt.model.blocks import Call, block
from jaxgpt.model.moe import RouterSums
from jaxgpt.model.params import LayerParams, Params
from jaxgpt.model.shards import Shards
from jaxgpt.model.staging import BELT, STREAM, at, collect, merge, on_belt, pick, shift
from jaxgpt.model.turns import Plan, Tap, plan, tap

Array = jax.Array

# What a turn without remat computes again, as `remat.cheap` has it: what moves or casts an array (a
# turn's weights, sliced out of those of a stage, would be kept for every turn), and arithmetic
# number by number, of which float32 results would be kept.
CHEAP = {
    "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "dynamic_slice", "gather",
    "reshape", "slice", "squeeze", "transpose",
    "add", "div", "erf", "exp", "integer_pow", "logistic", "mul", "neg", "one_minus_square",
    "rsqrt", "square", "sub", "tanh",
}  # fmt: skip


class End(NamedTuple):
    """What the head is applied to, as it lies at the stages."""

    hidden: Array  # [S, rows, T, D], in the order of `staging.at_the_end`
    after: np.ndarray  # [S, q], the micro-batch on each place; -1: none


class Output(NamedTuple):
    """What comes out of a pipeline."""

    end: End
    taps: dict[int, End]  # of `cfg.aux_layers` (from 1), if asked for
    router: RouterSums | None  # sums over the update, leaves [L, ...]; None for dense MLPs


class _Rows(NamedTuple):
    """What a stage must know of a micro-batch besides its activations; of all: leading axis A."""

    weights: Array | None  # [B, T]
    segment_ids: Array | None  # [B, T]
    positions: Array | None  # [B, T]
    keys: Array | None  # [B]


def forward(
    cfg: ModelConfig,
    params: Params,
    layers: LayerParams,
    sink: LayerParams | None,
    tokens: Array,
    *,
    rounds: int,
    shards: Shards,
    weights: Array | None = None,
    segment_ids: Array | None = None,
    positions: Array | None = None,
    dtype: DTypeLike = jnp.float32,
    dropout_key: Array | None = None,
    impl: Impl | None = None,
    taps: bool = False,
) -> Output:
    """Return what `gpt.forward` does of each of A micro-batches, tokens [A, B, T].

    `params` without its layers, which are `layers`, from `place` and `cast`. The gradient of these
    is that of `sink`, which is alike and whose values do not matter: it is summed over turns in the
    dtype of the sink. The other arguments are those of `gpt.forward` with an axis A before theirs;
    `dropout_key` [A, B], one per row. With `taps`, what the blocks of `cfg.aux_layers` have
    computed is laid on belts of its own, so that all stages compute losses of it, too.
    """
    S = shards.split("stages")
    of_part = cfg.num_layers // (S * rounds)
    blocks = cfg.aux_layers if taps else ()
    where = {block: divmod(block - 1, of_part) for block in blocks}  # part, and layer of it
    times = {block: tap(len(tokens), S, rounds, part) for block, (part, _) in where.items()}
    stops = tuple(sorted({layer + 1 for _, layer in where.values()}))
    steps = plan(len(tokens), S, rounds)
    rows = _Rows(weights, segment_ids, positions, dropout_key)
    belt = _embeddings(cfg, params, tokens, rows, steps, dtype, impl, shards)
    stage = functools.partial(_stage, cfg, rows, dtype=dtype, impl=impl, stops=stops)
    if cfg.remat == "full":
        stage = _again(stage, remat.policy(cfg, shards.platform))
    stages = shards.over("stages", stage)
    first = jnp.arange(S) == 0

    def belt_step(belt: Array, arrived: Array, of: Plan) -> Array:
        """Put what is finished at the first stage on the belt, and move it on: away from there."""
        moved = pick(first & of.done, arrived, at(belt, of.column))
        moved = shift(moved, -1, shards)
        moved = jnp.where(of.fresh | of.done, moved, at(belt, of.column))
        return jax.lax.dynamic_update_index_in_dim(belt, moved, of.column, 1)

    def tap_step(belt: Array, x: Array, of: Tap) -> Array:
        """Put what a stage has computed on a belt, and move it on."""
        moved = pick(jnp.arange(S) == of.stage, x, at(belt, of.column))
        moved = shift(moved, -1, shards)
        moved = jnp.where(of.taken, moved, at(belt, of.column))
        return jax.lax.dynamic_update_index_in_dim(belt, moved, of.column, 1)

    def turn(carry: tuple, each: tuple[Plan, dict[int, Tap]]) -> tuple[tuple, RouterSums | None]:
        (belt, out, waiting, number, tapped), (of, taken) = carry, each
        arrived = shift(out, 1, shards)
        entering = arrived
        if steps.wait:
            slot = number % steps.wait
            entering = jnp.where(of.late, at(waiting, slot), entering)
            waiting = jax.lax.dynamic_update_index_in_dim(waiting, arrived, slot, 1)
        entering = jnp.where(of.fresh, at(belt, of.column), entering)
        x = pick(first, entering, arrived)
        belt = belt_step(belt, arrived, of)
        busy = of.micro >= 0
        # Selected, so that neither values nor gradients of turns without work go anywhere.
        x = shards.constrain(pick(busy, x, jnp.zeros_like(x)), STREAM)
        number_of = jnp.arange(S) + of.round * S
        out, inner, router = stages(
            layers, sink, x, jnp.maximum(of.micro, 0), of.round, number_of, busy
        )
        tapped = {
            block: tap_step(belt, inner[where[block][1] + 1], taken[block])
            for block, belt in tapped.items()
        }
        return (belt, shards.constrain(out, STREAM), waiting, number + 1, tapped), router

    out = shards.constrain(jnp.zeros((S, *belt.shape[2:]), belt.dtype), STREAM)
    waiting = jnp.zeros((S, steps.wait, *out.shape[1:]), out.dtype)
    waiting = shards.constrain(waiting, BELT)
    turns = steps._replace(wait=None, before=None, after=None)
    N = len(steps.micro)
    each = jax.tree.map(lambda x: x[:N], turns)
    taken = {
        block: of._replace(stage=np.full(N, of.stage), after=None) for block, of in times.items()
    }
    # Places that stay empty hold what can be normalised.
    tapped = {
        block: jax.lax.stop_gradient(belt[:, : of.after.shape[1]]) for block, of in times.items()
    }
    carry = (belt, out, waiting, 0, tapped)
    (belt, out, _, _, tapped), sums = jax.lax.scan(turn, carry, (each, taken))
    final = turns._replace(fresh=steps.fresh[-1], done=steps.done[-1], column=steps.column[-1])
    belt = belt_step(belt, shift(out, 1, shards), final)

    def end(belt: Array, after: np.ndarray) -> End:
        return End(gpt.final_norm(cfg, params, merge(belt, shards), dtype), after)

    ends = {block: end(belt, times[block].after) for block, belt in tapped.items()}
    return Output(end(belt, steps.after), ends, _router_sums(cfg, steps, rounds, sums))


def _stage(
    cfg: ModelConfig,
    rows: _Rows,
    shards: Shards,
    layers: LayerParams,
    sink: LayerParams | None,
    x: Array,
    micro: Array,
    round_: Array,
    part: Array,
    busy: Array,
    *,
    dtype: DTypeLike,
    impl: Impl | None,
    stops: tuple[int, ...],
) -> tuple[Array, dict[int, Array], RouterSums | None]:
    """Return x [B, T, D] after the layers of one stage in one round, and their router sums.

    In between x after so many of the layers, for all `stops`.
    """
    rows = _rows_of(rows, micro, shards)
    call, _ = _call_of(cfg, rows, x.shape[:2], dtype, impl, shards)
    rounds, count = jax.tree.leaves(layers)[0].shape[:2]
    of_round = lambda w: w[0] if rounds == 1 else at(w, round_, axis=0)  # noqa: E731

    def run(x: Array, number: Array, p: Any, window: int) -> tuple[Array, Any]:
        index, sink = p
        # Taken here, the weights of a block are not among what its backward pass keeps.
        p = jax.tree.map(lambda w: at(of_round(w), index, axis=0), layers)
        p = p if sink is None else collect(cfg, shards, p, sink, busy)
        x, _, router = block(cfg, p, x, number, window, None, call)
        return x, router

    if cfg.remat == "none" or count > 1:
        full = cfg.remat == "full"
        keep = remat.policy(cfg, shards.platform) if full else _all_but_cheap
        run = jax.checkpoint(run, prevent_cse=False, static_argnums=3, policy=keep)
    each = (jnp.arange(count), jax.tree.map(of_round, sink))
    inner, sums, start = {}, [], 0
    for stop in sorted({*stops, count}):
        x, found = gpt.scan_layers(cfg, run, x, each, start, stop, part * count)
        inner[stop], start = x, stop
        sums += found
    inner = {stop: inner[stop] for stop in stops}
    router = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *sums)
    return x, inner, jax.tree.map(lambda leaf: jnp.where(busy, leaf, 0), router)


def _call_of(
    cfg: ModelConfig,
    rows: _Rows,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    impl: Impl | None,
    shards: Shards,
) -> tuple[Call, Array]:
    return gpt.call_of(
        cfg,
        shape,
        weights=rows.weights,
        segment_ids=rows.segment_ids,
        positions=rows.positions,
        dropout_key=rows.keys,
        dtype=dtype,
        impl=impl,
        shards=shards,
    )


def _all_but_cheap(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name not in CHEAP


def _again(stage: Any, keep: Any) -> Any:
    """Return a stage whose backward pass computes it again, but for what `keep` keeps."""

    def f(shards: Shards, *arrays: Any) -> Any:
        again = jax.checkpoint(functools.partial(stage, shards), policy=keep, prevent_cse=False)
        return again(*arrays)

    return f


def _embeddings(
    cfg: ModelConfig,
    params: Params,
    tokens: Array,
    rows: _Rows,
    steps: Plan,
    dtype: DTypeLike,
    impl: Impl | None,
    shards: Shards,
) -> Array:
    """Return the belt [S, q, B, T, D] as it is at first, each stage's part computed there."""
    rows = rows._replace(weights=None)
    arrays = jax.tree.map(lambda x: on_belt(x, steps.before, shards), (tokens, rows))

    def of_stage(shards: Shards, arrays: tuple[Array, _Rows]) -> Array:
        def of_micro_batch(arrays: tuple[Array, _Rows]) -> Array:
            tokens, rows = arrays
            call, positions = _call_of(cfg, rows, tokens.shape, dtype, impl, shards)
            return embedding.embed(cfg, params, tokens, positions, call)

        return jax.vmap(of_micro_batch)(arrays)

    return shards.over("stages", of_stage)(arrays)


def _rows_of(rows: _Rows, micro: Array, shards: Shards) -> _Rows:
    def one(x: Array) -> Array:
        x = at(x, micro, 0)
        return x if x.ndim == 1 else shards.constrain(x, ("batch", "seq"))

    return jax.tree.map(one, rows)


def _router_sums(cfg: ModelConfig, steps: Plan, rounds: int, sums: Any) -> RouterSums | None:
    """Return the sums over the update, [L, ...], of those of each turn, [N, S, L / (S R), ...]."""

    def leaf(x: Array) -> Array:
        of_round = [
            jnp.where((steps.round == r).reshape(*steps.round.shape, *(1,) * (x.ndim - 2)), x, 0)
            for r in range(rounds)
        ]
        total = jnp.stack([x.sum(0) for x in of_round])  # [R, S, L / (S R), ...]
        return total.reshape(cfg.num_layers, *x.shape[3:])

    return jax.tree.map(leaf, sums)
