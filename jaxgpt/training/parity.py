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
from jaxgpt.training import optimizer, step
from jaxgpt.training import state as states
from jaxgpt.training.probe import random_documents, share
from jaxgpt.validation import MESH_AXES

STEPS = 2
MICRO_BATCHES, ROWS = 4, 8  # rows of a micro-batch: they divide over 8 devices
LENGTH, VOCAB, HEADS, HEAD_WIDTH, LAYERS, EXPERTS = 32, 64, 8, 8, 4, 8
# Float32 sums in another order: 1e-7 a term. A gradient that is nearly 0 by symmetry is all
# rounding, so leaves are compared with at least this share of the norm of all of them.
BOUNDS = {"loss": 1e-5, "grad_norm": 1e-4, "moments": 1e-4, "weights": 1e-4}
FLOOR = 0.01


class Row(NamedTuple):
    """One mesh beside one device; errors are relative, None where the mesh is refused."""

    sizes: dict[str, int]  # of the axes with more than one device
    errors: dict[str, float] | None  # by the names of `BOUNDS`
    leaf: str  # the worst of moments and weights
    refused: str  # why, in one line
    seconds: float

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


def shrunk(cfg: Config) -> Config:
    """Return a small configuration of the same kind, in sizes that 8 devices divide.

    Kept: everything but sizes, number formats, what is specific to a machine, and what makes
    percents of rounding.
    """
    m, heads = cfg.model, HEADS
    width = heads * HEAD_WIDTH
    experts = min(m.num_experts, EXPERTS)
    model = dataclasses.replace(
        m,
        num_layers=LAYERS,
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
        global_every=min(m.global_every, 1 if LAYERS < 2 * m.global_every else 2),
        num_experts=experts,
        experts_per_token=min(m.experts_per_token, max(experts // 2, 1)),
        expert_dim=width if experts else 0,
        shared_dim=width if m.shared_dim else 0,
        rope_original_len=LENGTH // 2 if m.rope_original_len else 0,
        aux_layers=(2,) if m.aux_layers else (),
        stacked=True,  # as stages need it, and fast to compile; both layouts hold the same values
        init_std=width**-0.5,
        init_depth_scale=False,
    )
    train = dataclasses.replace(
        cfg.train,
        num_steps=8,
        num_tokens=0,
        global_batch=MICRO_BATCHES * ROWS,
        micro_batch=ROWS,
        batch_ramp={},
        compute_dtype="float32",
        param_dtype="float32",
        logits_dtype="float32",
        aux_loss_weights=cfg.train.aux_loss_weights[:1],
        attention="auto",
        xla_options={"xla_backend_optimization_level": 0},  # halves the time to compile
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
    return dataclasses.replace(cfg, model=model, train=train, optim=optim, mesh=MeshConfig())


def _kv_heads(cfg: Config, heads: int) -> int:
    """Return as many of `heads` as the model has of its own, at least 2 where it has several."""
    kv = cfg.model.kv_heads
    if kv == 1:
        return 1
    return max(2, heads * kv // cfg.model.num_heads // 2 * 2)


def compare(cfg: Config, layouts: list[dict[str, int]]) -> Iterator[Row]:
    """Yield one `Row` for each layout of the devices of this process, as soon as it is computed.

    `cfg` is that of a run. A mesh that refuses the model is yielded with the reason.
    """
    small = shrunk(cfg)
    batches = [_batch(small, seed) for seed in range(STEPS)]
    tx = optimizer.build(
        small, small.train.num_steps, parameters.abstract(parameters.specs(small.model))
    )
    start = jax.device_get(states.create(small, tx, _mesh({})))
    right = _updates(small, tx, _mesh({}), start, batches)
    for sizes in layouts:
        began = time.monotonic()
        errors, leaf, refused = None, "", ""
        try:
            mesh = _mesh(sizes)
            meshes.check_model(mesh.shape, small)
            errors, leaf = _errors(_updates(small, tx, mesh, start, batches), right)
        except ConfigError as error:
            refused = error.problems[0]
        yield Row(sizes, errors, leaf, refused, time.monotonic() - began)


def _mesh(sizes: Mapping[str, int]) -> Mesh:
    size = MeshConfig(**{axis: sizes.get(axis, 1) for axis in MESH_AXES})
    return meshes.make_mesh(size, jax.devices()[: math.prod(sizes.values())])


def _updates(
    cfg: Config,
    tx: optimizer.Optimizer,
    mesh: Mesh,
    start: states.TrainState,
    batches: list[Batch],
) -> tuple[list[Mapping[str, float]], dict[str, Any], dict[str, Any]]:
    """Return the metrics of each update, and the last moments and weights by name."""
    placed = states.state_shardings(mesh, cfg, tx)
    update = step.make_train_step(cfg, tx, mesh, placed)
    state, metrics = jax.device_put(start, placed), []
    for batch in batches:
        state, scalars = update(state, sharding.to_global(mesh, batch))
        metrics.append({name: float(value) for name, value in scalars.items()})
    moments, weights = jax.device_get((state.opt_state.inner, state.params))
    return metrics, _named(moments), _named(weights)


def _named(tree: Any) -> dict[str, np.ndarray]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf, np.float64)
        for path, leaf in jax.tree.leaves_with_path(tree)
        if leaf.ndim
    }


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
        whole = np.linalg.norm([np.linalg.norm(leaf) for leaf in of.values()])
        each = {
            leaf: share(
                float(np.linalg.norm(tree[leaf] - of[leaf])),
                max(float(np.linalg.norm(of[leaf])), FLOOR * float(whole)),
            )
            for leaf in of
        }
        leaf = max(each, key=each.__getitem__, default="")
        errors[name] = each.get(leaf, 0.0)
        worst = max(worst, (leaf, errors[name]), key=lambda pair: pair[1])
    return errors, worst[0]


def _batch(cfg: Config, seed: int) -> Batch:
    """Return random rows with padding at the end of some, and documents if the run masks them."""
    rng = np.random.default_rng(seed)
    shape = MICRO_BATCHES, ROWS, LENGTH
    tokens, targets = rng.integers(0, VOCAB, (2, *shape)).astype(np.int32)
    weights = (
        np.arange(LENGTH) < rng.integers(LENGTH // 2, LENGTH + 1, shape[:2])[..., None]
    ).astype(np.float32)
    if not cfg.data.document_mask:
        return Batch(tokens, targets, weights)
    segments, positions = random_documents(rng, shape)
    return Batch(tokens, targets, weights, np.where(weights > 0, segments, 0), positions)
