"""One update as a pure function of (state, batch), and its compiled, donated form.

A batch is [A, B, T]: A micro-batches in time, whose gradients and losses are summed in float32 and
divided once, by the weight of all of them. A step whose loss or gradient is not finite, or a spike
(`optim.spike_sigma`), or that has no loss token, changes nothing but the counters, on all hosts
alike. Dropout is drawn by (seed, step, row of the global batch), so it depends neither on
micro-batches nor on the mesh.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxgpt.config import Config
from jaxgpt.data.packing import Batch
from jaxgpt.model import gpt, narrow, pipeline, staging
from jaxgpt.model import params as parameters
from jaxgpt.model.attention import asked
from jaxgpt.model.moe import RouterSums
from jaxgpt.model.params import Params
from jaxgpt.parallel.mesh import check_run
from jaxgpt.parallel.sharding import Placement, batch_sharding, replicated
from jaxgpt.parallel.xla_options import step_options
from jaxgpt.training import routing
from jaxgpt.training.audit import rows_digest
from jaxgpt.training.loss import LossSums, next_token_sums
from jaxgpt.training.optimizer import Optimizer
from jaxgpt.training.state import TrainState

Array = jax.Array
Metrics = dict[str, Array]


def train_step(
    cfg: Config, optimizer: Optimizer, state: TrainState, batch: Batch, *, mesh: Mesh | None = None
) -> tuple[TrainState, Metrics]:
    """Return the state after one update, and its float32 (counters: int32) scalar metrics.

    batch leaves [A, B, T]. The loss is next-token cross-entropy, smoothed, + z-loss +
    `aux_loss_weights` times that of each block of `model.aux_layers` + the losses of routers, per
    unit of weight.
    Metrics: `loss_sum` (main cross-entropy, nats) and `weight`, `z_loss_sum`, `aux_loss_sum` and
    `label_smoothing_sum` where they are switched on (what they add to the loss), those of
    `routing`, `grad_norm` before clipping, `lr`, `finite` and `applied` (1 or 0), and the state's
    `skipped`, `skipped_in_row`, `rows_digest` and, with `optim.spike_sigma`, `spikes` (also in
    `skipped`).
    """
    grads, sums = gradients(cfg, state.params, batch, state.step, mesh=mesh)
    total, weight = sums.pop("total"), sums["weight"]
    if cfg.model.num_experts:
        grads = routing.with_load(grads, sums[routing.LOAD])
        sums = routing.statistics(sums)
    some = weight > 0
    per = jnp.where(some, weight, 1.0)
    params, opt_state, stats = optimizer.update(
        grads,
        state.opt_state,
        state.params,
        state.step,
        weight=per,
        loss=total / per,
        usable=some & jnp.isfinite(total),
    )
    finite, applied = jnp.isfinite(total) & stats.pop("finite"), stats.pop("applied")
    in_row = jnp.where(finite, state.skipped_in_row, state.skipped_in_row + 1)
    state = TrainState(
        step=state.step + 1,
        params=params,
        opt_state=opt_state,
        skipped=state.skipped + jnp.where(applied, 0, 1),
        skipped_in_row=jnp.where(applied, 0, in_row),
        rows_digest=state.rows_digest + rows_digest(batch),
    )
    counters = {
        "finite": finite.astype(jnp.int32),
        "applied": applied.astype(jnp.int32),
        "skipped": state.skipped,
        "skipped_in_row": state.skipped_in_row,
        "rows_digest": state.rows_digest,
    }
    return state, sums | stats | counters


def gradients(
    cfg: Config,
    params: Params,
    batch: Batch,
    step: Array | int,
    *,
    mesh: Mesh | None = None,
    chunk: int | None = None,
) -> tuple[Params, Metrics]:
    """Return the gradient of the loss summed over the batch, and the sums it is made of.

    Neither is divided by the weight. Gradients are float32, except with A = 1, where they have
    the parameters' dtype, or on accelerators that of the product that gives them. Sums: `total`
    (what is differentiated), `loss_sum`, `weight`, and `z_loss_sum`, `label_smoothing_sum`,
    `aux_loss_sum` and those of `routing.losses` where configured. `chunk` is passed to the loss.
    """
    A, B, _ = batch.tokens.shape
    seed = jax.random.fold_in(jax.random.key(cfg.run.seed), step)
    if mesh is not None and mesh.shape["stage"] > 1:
        return _of_pipeline(cfg, mesh, chunk, params, batch, seed)
    # With several micro-batches each replica sums its own gradients, and they meet once, at the
    # end. Left to the partitioner they would meet after each micro-batch.
    replicas = mesh.shape["data"] if mesh is not None and A > 1 else 1
    shards = Placement(mesh, ("data",) if replicas > 1 else ())
    trained, whole = params, lambda trained: trained
    if narrowed(cfg, shards.platform):
        trained = params.replace(
            layers=narrow.sink(cfg.model, params.layers, cfg.train.compute_dtype)
        )
        whole = lambda p: p.replace(layers=narrow.Stacked(params.layers, p.layers))  # noqa: E731

    def loss(trained: Params, micro: Batch, keys: Array | None) -> tuple[Array, Metrics]:
        return _loss(cfg, shards, chunk, whole(trained), micro, keys)

    differentiate = jax.value_and_grad(loss, has_aux=True)

    def one(micro: Batch, rows: Array) -> tuple[Params, Metrics]:
        keys = jax.vmap(lambda row: jax.random.fold_in(seed, row))(rows)
        (_, sums), grads = differentiate(trained, micro, keys if cfg.model.dropout else None)
        return grads, sums

    rows = jnp.arange(A * B).reshape(A, B)  # of the global batch
    if A == 1:
        return one(jax.tree.map(lambda x: x[0], batch), rows[0])
    if replicas > 1:
        one = jax.vmap(one, spmd_axis_name="data")
        batch, rows = jax.tree.map(
            lambda x: x.reshape(A, replicas, B // replicas, *x.shape[2:]), (batch, rows)
        )

    def body(carry: Any, part: tuple[Batch, Array]) -> tuple[Any, None]:
        new = one(*part)
        if shards.platform == "cpu":
            # Else XLA hands the sum to oneDNN's product, rounded to bfloat16: it adds up in 8 bits.
            new = jax.lax.optimization_barrier(new)
        return jax.tree.map(lambda total, new: total + new, carry, new), None

    # float32 sums whatever the parameters' dtype; they start as zeros, not as a first micro-batch
    # outside of the loop, which would compile the model twice.
    start = jax.eval_shape(one, *jax.tree.map(lambda x: x[0], (batch, rows)))
    grads, sums = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), start)
    start = _placed(cfg, mesh, grads, "replicas" if replicas > 1 else ""), sums
    (grads, sums), _ = jax.lax.scan(body, start, (batch, rows))
    if replicas > 1:
        grads, sums = jax.tree.map(lambda x: x.sum(0), (grads, sums))
        grads = _placed(cfg, mesh, grads)
    return grads, sums


def narrowed(cfg: Config, platform: str) -> bool:
    """Tell whether a micro-batch's gradients of layers have the compute dtype: `model.narrow`."""
    widths = jnp.dtype(cfg.train.compute_dtype).itemsize, jnp.dtype(cfg.train.param_dtype).itemsize
    return cfg.model.stacked and widths[0] < widths[1] and platform != "cpu"


def _of_pipeline(
    cfg: Config, mesh: Mesh, chunk: int | None, params: Params, batch: Batch, seed: Array
) -> tuple[Params, Metrics]:
    """Return `gradients` on a mesh with stages, through which the micro-batches of the batch pass.

    One differentiation of the whole update. Gradients of layers are summed over turns in float32.
    """
    A, B, _ = batch.tokens.shape
    dtype, rounds = jnp.dtype(cfg.train.compute_dtype), cfg.mesh.rounds
    replicas = mesh.shape["data"]
    shards = Placement(mesh, ("data",) if replicas > 1 else ())
    layers = staging.cast(params.layers, dtype)
    layers = staging.place(cfg.model, layers, rounds, Placement(mesh))
    rest = jax.tree.map(lambda x: x.astype(jnp.float32), params.replace(layers=None))
    sink = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), layers)

    def total(trained: tuple, batch: Batch, keys: Array | None) -> tuple[Array, Metrics]:
        rest, sink = trained
        out = pipeline.forward(
            cfg.model,
            rest,
            layers,
            sink,
            batch.tokens,
            rounds=rounds,
            shards=shards,
            weights=batch.weights,
            segment_ids=batch.segment_ids,
            positions=batch.positions,
            dtype=dtype,
            dropout_key=keys,
            impl=asked(cfg),
            taps=True,
        )
        loss = shards.over(
            "stages",
            lambda shards, *of_stage: _token_loss(cfg, shards, chunk, rest)(*of_stage),
        )

        def of(end: pipeline.End) -> LossSums:
            targets, _ = staging.at_the_end(batch.targets, end.after, shards)
            weights, numbers = staging.at_the_end(batch.weights, end.after, shards)
            weights = jnp.where(numbers[..., None] < 0, 0, weights)
            return jax.tree.map(lambda x: x.sum(0), loss(end.hidden, targets, weights))

        others = [of(out.taps[n]).total for n in cfg.model.aux_layers]
        return _total(cfg, of(out.end), others, out.router)

    def one(batch: Batch, rows: Array) -> tuple[tuple, Metrics]:
        keys = jax.vmap(jax.vmap(lambda row: jax.random.fold_in(seed, row)))(rows)
        differentiate = jax.value_and_grad(total, has_aux=True)
        (_, sums), grads = differentiate((rest, sink), batch, keys if cfg.model.dropout else None)
        return grads, sums

    rows = jnp.arange(A * B).reshape(A, B)  # of the global batch
    if replicas == 1:
        grads, sums = one(batch, rows)
    else:  # they meet once, at the end
        one = jax.vmap(one, in_axes=1, spmd_axis_name="data")
        parts = jax.tree.map(lambda x: x.reshape(A, replicas, -1, *x.shape[2:]), (batch, rows))
        grads, sums = jax.tree.map(lambda x: x.sum(0), one(*parts))
    of_layers = staging.unplace(cfg.model, grads[1], rounds, Placement(mesh))
    return _placed(cfg, mesh, grads[0].replace(layers=of_layers)), sums


def _placed(cfg: Config, mesh: Mesh | None, grads: Params, lead: str = "") -> Params:
    """Return gradients, each where its parameter lies; `lead` names an axis before its own."""
    place = Placement(mesh).constrain
    names = (lead,) if lead else ()
    return jax.tree.map(
        lambda spec, x: place(x, (*names, *spec.axes)), parameters.specs(cfg.model), grads
    )


def _loss(
    cfg: Config,
    shards: Placement,
    chunk: int | None,
    params: Params,
    batch: Batch,
    keys: Array | None,
) -> tuple[Array, Metrics]:
    """Return (total, sums) of one micro-batch [B, T]."""
    hidden, taps, router = gpt.forward(
        cfg.model,
        params,
        batch.tokens,
        weights=batch.weights,
        segment_ids=batch.segment_ids,
        positions=batch.positions,
        dtype=jnp.dtype(cfg.train.compute_dtype),
        dropout_key=keys,
        impl=asked(cfg),
        shards=shards,
    )
    loss = _token_loss(cfg, shards, chunk, params)
    main = loss(hidden, batch.targets, batch.weights)
    others = [loss(taps[n], batch.targets, batch.weights).total for n in cfg.model.aux_layers]
    return _total(cfg, main, others, router)


def _token_loss(
    cfg: Config, shards: Placement, chunk: int | None, params: Params
) -> Callable[[Array, Array, Array], LossSums]:
    """Return the loss as a function of hidden states [B, T, D], targets and weights [B, T]."""

    def loss(hidden: Array, targets: Array, weights: Array) -> LossSums:
        return next_token_sums(
            hidden,
            gpt.head(cfg.model, params),
            targets,
            weights,
            z_loss=cfg.train.z_loss,
            label_smoothing=cfg.train.label_smoothing,
            softcap=cfg.model.logit_softcap,
            dtype=jnp.dtype(cfg.train.compute_dtype),
            logits_dtype=logits_dtype(cfg),
            chunk=chunk,
            shards=shards,
        )

    return loss


def _total(
    cfg: Config, main: LossSums, others: list[Array], router: RouterSums | None
) -> tuple[Array, Metrics]:
    """Return what is minimised, and the sums it is made of; `others`: of `model.aux_layers`."""
    total = main.total
    sums = {"loss_sum": main.nll, "weight": main.weight}
    if cfg.train.z_loss:
        sums["z_loss_sum"] = main.z
    if cfg.train.label_smoothing:
        sums["label_smoothing_sum"] = main.smoothing
    if others:
        weights = cfg.train.aux_loss_weights
        if len(weights) == 1:
            weights *= len(others)
        aux = sum(weight * other for weight, other in zip(weights, others, strict=True))
        total = total + aux
        sums["aux_loss_sum"] = aux
    if router is not None:
        more, of_router = routing.losses(cfg, router)
        total, sums = total + more, sums | of_router
    return total, sums | {"total": total}


def logits_dtype(cfg: Config) -> Any:
    """Return the dtype of the product with the head; sums over it are float32 either way."""
    compute = cfg.train.logits_dtype == "compute"
    return jnp.dtype(cfg.train.compute_dtype if compute else jnp.float32)


def make_train_step(cfg: Config, optimizer: Optimizer, mesh: Mesh, shardings: TrainState) -> Any:
    """Return `train_step` compiled for a mesh: `(state, batch) -> (state, metrics)`.

    The state is donated: its buffers are reused and the argument is gone afterwards. `shardings`
    is `state_shardings(...)`; batches come from `to_global`. Nothing compiles before the first
    call. Raises ConfigError, with all reasons, unless model and batches divide over the mesh.
    """
    check_run(mesh, cfg)
    return jax.jit(
        functools.partial(train_step, cfg, optimizer, mesh=mesh),
        in_shardings=(shardings, batch_sharding(mesh)),
        out_shardings=(shardings, replicated(mesh)),
        donate_argnums=0,
        compiler_options=step_options(cfg.train.compute_dtype, mesh, cfg.train.xla_options),
    )
