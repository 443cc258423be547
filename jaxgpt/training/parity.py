"""Does a mesh compute what one device computes? The user's own model, shrunk, on simulated devices.

Two updates of a small twin in float32 are made on one device and on each mesh: loss, norm of the
gradient, moments and weights must agree up to the order of sums. What a mesh gets wrong (a sum
taken twice, a mask of another part, a weight left out) is wrong by percents.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxgpt.config import Config, MeshConfig
from jaxgpt.data.packing import Batch
from jaxgpt.errors import ConfigError
from jaxgpt.model import params as parameters
from jaxgpt.parallel import mesh as meshes
from jaxgpt.parallel import sharding
from jaxgpt.runtime.processor import num_cores
from jaxgpt.training import optimizer, step
from jaxgpt.training import state as states
from jaxgpt.training.comparison import HASTY, leaf_errors, named_leaves, random_documents, share
from jaxgpt.validation import MESH_AXES

STEPS = 2
MICRO_BATCHES, ROWS = 4, 8  # rows of a micro-batch: they divide over 8 devices
LENGTH, VOCAB, HEADS, HEAD_WIDTH, EXPERTS = 32, 64, 8, 8, 8
LAYERS, STAGED_LAYERS = 4, 8  # without stages, and over 2 stages twice, 2 in each part
ROUNDS = 2
# Float32 sums in another order: 1e-7 a term.
BOUNDS = {"loss": 1e-5, "grad_norm": 1e-4, "moments": 1e-4, "weights": 1e-4}
COMPILERS = 4  # meshes compiled at the same time, at most; each may take 1 GB


class Row(NamedTuple):
    """One mesh beside one device; errors are relative, None where the mesh is refused."""

    sizes: dict[str, int]  # as of `layouts`
    errors: dict[str, float] | None  # by the names of `BOUNDS`
    leaf: str  # the worst of moments and weights
    refused: str  # why, in one line
    seconds: float  # waited for it

    @property
    def passed(self) -> bool:
        errors = self.errors or {}
        return all(error <= BOUNDS[name] for name, error in errors.items())


def all_sizes(devices: int) -> list[dict[str, int]]:
    """Return every way to lay so many devices out over the six axes, fewest axes first."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    found = [
        {axis: n for axis, n in zip(MESH_AXES, sizes, strict=True) if n > 1}
        for sizes in itertools.product(divisors, repeat=len(MESH_AXES))
        if math.prod(sizes) == devices
    ]
    return sorted(found, key=len)


def layouts(cfg: Config, devices: int) -> list[dict[str, int]]:
    """Return the layouts that are tried for `cfg`: `all_sizes`, and circular pipelines.

    Where there is a pipeline it passes "rounds" 2 times if that of the run is circular; if not, it
    does so besides on each mesh of at most two axes.
    """
    found = []
    for sizes in all_sizes(devices):
        can = 1 < sizes.get("stage", 1) <= MICRO_BATCHES
        if not (can and cfg.mesh.rounds > 1):
            found.append(sizes)
        if can and (cfg.mesh.rounds > 1 or len(sizes) <= 2):
            found.append(sizes | {"rounds": ROUNDS})
    return found


def shrunk(cfg: Config, sizes: Mapping[str, int]) -> Config:
    """Return a small configuration of the same kind for a layout, in sizes that 8 devices divide.

    Kept: everything but sizes, number formats, what is specific to a machine, and what makes
    percents of rounding. Micro-batches are taken one by one where the run does, and by pipelines.
    """
    m, heads = cfg.model, HEADS
    stages, rounds = sizes.get("stage", 1), sizes.get("rounds", 1)
    pattern = min(m.global_every, 2) if m.sliding_window else 0
    least = STAGED_LAYERS if stages > 1 else LAYERS
    layers = max(least, stages * rounds * max(pattern, 1))
    width = heads * HEAD_WIDTH
    experts = min(m.num_experts, EXPERTS)
    model = dataclasses.replace(
        m,
        num_layers=layers,
        embed_dim=width,
        num_heads=heads,
        num_kv_heads=_kv_heads(cfg, heads),
        head_dim=HEAD_WIDTH,
        mlp_dim=2 * width,
        vocab_size=VOCAB,
        seq_len=LENGTH,
        # The slope of ReLU jumps at 0, to which one of a million sums is as near as their rounding.
        mlp="relu2" if m.mlp == "relu" else m.mlp,
        sliding_window=min(m.sliding_window, LENGTH // 4),
        global_every=pattern,
        num_experts=experts,
        experts_per_token=min(m.experts_per_token, max(experts // 2, 1)),
        expert_dim=width if experts else 0,
        shared_dim=width if m.shared_dim else 0,
        rope_original_len=LENGTH // 2 if m.rope_original_len else 0,
        aux_layers=(layers // 2 - 1, layers - 1)[: len(m.aux_layers)],
        stacked=m.stacked or stages > 1,
        init_std=width**-0.5,
        init_depth_scale=False,
    )
    train = dataclasses.replace(
        cfg.train,
        num_steps=8,
        num_tokens=0,
        global_batch=MICRO_BATCHES * ROWS,
        micro_batch=ROWS if stages > 1 or cfg.train.accum_steps > 1 else 0,
        batch_ramp={},
        compute_dtype="float32",
        param_dtype="float32",
        logits_dtype="float32",
        aux_loss_weights=cfg.train.aux_loss_weights[:2],
        attention="auto",
        xla_options=HASTY,
    )
    optim = dataclasses.replace(
        cfg.optim,
        schedule="constant",
        warmup_steps=0,
        warmup_tokens=0,
        decay_steps=0,
        moment_dtype="float32",
        # Scores of a query that all move alike are the same to softmax, so that without rotary
        # positions gradients of key biases are rounding alone, of which AdamW makes whole steps.
        groups={"/bk$": {"lr": 0.0}} if m.attn_bias and m.positions != "rope" else {},
    )
    mesh = MeshConfig(rounds=rounds)
    return dataclasses.replace(cfg, model=model, train=train, optim=optim, mesh=mesh)


def _kv_heads(cfg: Config, heads: int) -> int:
    """Return as many of `heads` as the model has of its own, at least 2 where it has several."""
    kv = cfg.model.kv_heads
    if kv == 1:
        return 1
    return max(2, heads * kv // cfg.model.num_heads // 2 * 2)


def compare(cfg: Config, layouts: list[dict[str, int]]) -> Iterator[Row]:
    """Yield one `Row` for each layout of the devices of this process, as soon as it is computed.

    `cfg` is that of a run. A mesh that refuses the model is yielded with the reason. Programs are
    compiled ahead by several threads, and run one after the other.
    """
    alone: dict[tuple[int, bool], Any] = {}  # by what tells the weights of twins apart
    began = time.monotonic()
    with ThreadPoolExecutor(min(num_cores(), COMPILERS)) as pool:
        programs = pool.map(lambda sizes: _compiled(shrunk(cfg, sizes), sizes), layouts)
        for sizes, program in zip(layouts, programs, strict=True):
            errors, leaf, refused = None, "", ""
            if isinstance(program, ConfigError):
                refused = program.problems[0]
            else:
                model = program.cfg.model
                kind = model.num_layers, model.stacked
                alone[kind] = alone.get(kind) or _alone(program.cfg)
                start, right = alone[kind]
                errors, leaf = _errors(_updates(program, start), right)
            yield Row(sizes, errors, leaf, refused, time.monotonic() - began)
            began = time.monotonic()


class _Program(NamedTuple):
    cfg: Config
    mesh: Mesh
    placed: states.TrainState  # shardings
    update: Any


def _compiled(cfg: Config, sizes: Mapping[str, int]) -> _Program | ConfigError:
    """Return the compiled step of a twin on a layout, or why there is none."""
    tx = _optimizer(cfg)
    try:
        size = MeshConfig(**{axis: sizes.get(axis, 1) for axis in MESH_AXES})
        devices = jax.devices()[: math.prod(getattr(size, axis) for axis in MESH_AXES)]
        mesh = meshes.make_mesh(size, devices)
        state = states.abstract_state(cfg, tx, mesh)
        placed = states.shardings(state)
        update = step.make_train_step(cfg, tx, mesh, placed)
    except ConfigError as error:
        return error
    return _Program(cfg, mesh, placed, update.lower(state, _batch(cfg, 0)).compile())


def _alone(cfg: Config) -> tuple[states.TrainState, Any]:
    """Return the state in which a twin starts, and what one device makes of it.

    The device takes the rows in micro-batches, which changes nothing but the order of sums.
    """
    train = dataclasses.replace(cfg.train, micro_batch=ROWS)
    program = _compiled(dataclasses.replace(cfg, train=train, mesh=MeshConfig()), {})
    tx = _optimizer(cfg)
    init = jax.jit(lambda key: states.init_state(cfg, tx, key), compiler_options=HASTY)
    start = jax.device_get(init(jax.random.key(cfg.run.seed)))
    return start, _updates(program, start)


def _optimizer(cfg: Config) -> optimizer.Optimizer:
    abstract = parameters.abstract(parameters.specs(cfg.model))
    return optimizer.build(cfg, cfg.train.num_steps, abstract)


def _updates(
    program: _Program, start: states.TrainState
) -> tuple[list[Mapping[str, float]], dict[str, Any], dict[str, Any]]:
    """Return the metrics of each update, and the last moments and weights by name."""
    cfg, mesh, placed, update = program
    state, metrics = jax.device_put(start, placed), []
    for seed in range(STEPS):
        state, scalars = update(state, sharding.to_global(mesh, _batch(cfg, seed)))
        metrics.append({name: float(value) for name, value in scalars.items()})
    moments, weights = jax.device_get((state.opt_state.inner, state.params))
    return metrics, named_leaves(moments), named_leaves(weights)


def _errors(mine: Any, right: Any) -> tuple[dict[str, float], str]:
    """Return the largest relative errors, and the name of the leaf that is the furthest off."""
    (metrics, *trees), (right_metrics, *right_trees) = mine, right
    pairs = list(zip(metrics, right_metrics, strict=True))
    loss, norm = (
        max(share(abs(a[name] - b[name]), abs(b[name])) for a, b in pairs)
        for name in ("loss_sum", "grad_norm")
    )
    errors, worst = {"loss": loss, "grad_norm": norm}, ("", 0.0)
    for name, tree, of in zip(("moments", "weights"), trees, right_trees, strict=True):
        each = leaf_errors(tree, of)
        leaf = max(each, key=each.__getitem__, default="")
        errors[name] = each.get(leaf, 0.0)
        worst = max(worst, (leaf, errors[name]), key=lambda pair: pair[1])
    return errors, worst[0]


def _batch(cfg: Config, seed: int) -> Batch:
    """Return random rows with padding at the end of some, and documents if the run masks them."""
    rng = np.random.default_rng(seed)
    shape = MICRO_BATCHES * ROWS, LENGTH
    tokens, targets = rng.integers(0, VOCAB, (2, *shape)).astype(np.int32)
    weights = (
        np.arange(LENGTH) < rng.integers(LENGTH // 2, LENGTH + 1, shape[:1])[:, None]
    ).astype(np.float32)
    batch = Batch(tokens, targets, weights)
    if cfg.data.document_mask:
        segments, positions = random_documents(rng, shape)
        batch = Batch(tokens, targets, weights, np.where(weights > 0, segments, 0), positions)
    return jax.tree.map(lambda x: x.reshape(cfg.train.accum_steps, -1, LENGTH), batch)
