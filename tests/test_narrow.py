"""Gradients kept in the dtype of their products: the same values, in half the memory."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import LLAMA, VARIETY, random_params

from jaxgpt.config import Config, MeshConfig, ModelConfig, OptimConfig, TrainConfig
from jaxgpt.data.packing import Batch
from jaxgpt.model import narrow
from jaxgpt.model.params import Params, abstract, restack, specs
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.parallel.sharding import Placement
from jaxgpt.training import step
from jaxgpt.training.optimizer import build

MATRICES = {"wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down", "shared_gate", "shared_up"}
MATRICES |= {"shared_down"}
VIA = {"wide": False, "narrow": True}


def config(model: ModelConfig, mesh: dict[str, int] | None = None, **train: Any) -> Config:
    model = dataclasses.replace(model, stacked=True, remat="full")
    train = {"global_batch": 8, "num_steps": 10, "compute_dtype": "bfloat16"} | train
    return Config(model=model, train=TrainConfig(**train), mesh=MeshConfig(**mesh or {}))


def stacked_params(model: ModelConfig) -> Params:
    return restack(random_params(dataclasses.replace(model, stacked=False)), stacked=True)


def batch(cfg: Config) -> Batch:
    rng = np.random.default_rng(0)
    shape = (cfg.train.accum_steps, 8 // cfg.train.accum_steps, cfg.model.seq_len)
    ids = rng.integers(0, cfg.model.vocab_size, shape).astype(np.int32)
    return Batch(ids, np.roll(ids, -1, 2), np.ones(shape, np.float32))


def gradients(monkeypatch: Any, cfg: Config, way: str, devices: int = 1) -> Params:
    monkeypatch.setattr(step, "narrowed", lambda *_: VIA[way])
    mesh = make_mesh(cfg.mesh, jax.devices()[:devices]) if devices > 1 else None
    find = jax.jit(functools.partial(step.gradients, cfg, mesh=mesh))
    return find(stacked_params(cfg.model), batch(cfg), 0)[0]


def close(found: Any, right: Any, share: float) -> None:
    """Check that leaves differ by at most a share of the largest entry of the right one."""

    def leaf(path: Any, a: Any, b: Any) -> None:
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.abs(a - b).max() <= share * np.abs(b).max(), jax.tree_util.keystr(path)

    jax.tree.map_with_path(leaf, found, right)


@pytest.mark.parametrize("name", ["biased", "gemma3", "experts"])
def test_gradients_are_those_of_ordinary_differentiation(name, monkeypatch):
    cfg = config(VARIETY[name])
    right = gradients(monkeypatch, cfg, "wide")
    # A unit in the last place of bfloat16: fusions may round a product's input once more or less.
    close(gradients(monkeypatch, cfg, "narrow"), right, 2**-7)


@pytest.mark.parametrize("mesh", [{"fsdp": 2, "tensor": 2}, {"fsdp": 4, "context": 2}])
def test_gradients_over_a_mesh_are_those_of_ordinary_differentiation_on_it(mesh, monkeypatch):
    cfg = config(LLAMA, {"data": 8 // math.prod(mesh.values())} | mesh)
    right = gradients(monkeypatch, cfg, "wide", 8)
    close(gradients(monkeypatch, cfg, "narrow", 8), right, 2**-7)


def test_matrices_have_gradients_in_the_compute_dtype_and_nothing_else_has(monkeypatch):
    found = gradients(monkeypatch, config(VARIETY["biased"]), "narrow")
    of = {path[-1].name: leaf.dtype for path, leaf in jax.tree.leaves_with_path(found)}
    assert {name for name, dtype in of.items() if dtype == jnp.bfloat16} == MATRICES & {*of}
    assert {dtype for name, dtype in of.items() if name not in MATRICES} == {jnp.dtype("float32")}


def test_experts_keep_float32_gradients_and_what_all_tokens_share_does_not():
    cfg = config(VARIETY["experts"])
    sink = narrow.sink(cfg.model, stacked_params(cfg.model).layers, jnp.bfloat16)
    assert sink.w_up.dtype == sink.w_gate.dtype == sink.w_down.dtype == jnp.float32
    assert sink.wq.dtype == sink.shared_up.dtype == jnp.bfloat16


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_an_update_is_that_of_the_same_gradients_in_float32(name):
    model = dataclasses.replace(LLAMA, stacked=True)
    cfg = Config(model=model, optim=OptimConfig(name=name, lr=1e-2, clip_norm=0.1))
    tx, params = build(cfg, 10, abstract(specs(model))), stacked_params(model)
    grads = jax.tree.map(lambda w: jnp.asarray(w, jnp.bfloat16), params)
    wide = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    update = jax.jit(lambda grads: tx.update(grads, tx.init(params), params, 0))
    (new, _, stats), (right, _, right_stats) = update(grads), update(wide)
    assert float(stats["grad_norm"]) == pytest.approx(float(right_stats["grad_norm"]), rel=1e-6)
    close(new, right, 1e-6)


@pytest.mark.parametrize(("mesh", "devices"), [({}, 1), ({"data": 2, "fsdp": 4}, 8)])
def test_several_micro_batches_are_summed_in_float32(mesh, devices, monkeypatch):
    cfg = config(LLAMA, mesh, micro_batch=4)
    right = gradients(monkeypatch, cfg, "wide", devices)
    found = gradients(monkeypatch, cfg, "narrow", devices)
    close(found, right, 2**-7)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype("float32")}


def test_gradients_are_kept_narrow_on_accelerators_only_and_where_it_saves_memory():
    def kept(platform: str, **train: str | int) -> bool:
        return step.narrowed(config(LLAMA, **train), platform)

    assert kept("tpu") and kept("gpu") and not kept("cpu")
    assert kept("tpu", micro_batch=4)
    assert not kept("tpu", param_dtype="bfloat16") and not kept("tpu", compute_dtype="float32")


def test_a_weight_is_rounded_as_by_a_cast():
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 65_536, dtype=np.uint64).astype(np.uint32)
    special = [0, 1 << 31, 0x7F800000, 0xFF800000, 0x3F808000, 0x3F818000, 0x7F7FFFFF, 1]
    w = np.concatenate([bits, np.array(special, np.uint32)]).view(np.float32)
    w = w[~np.isnan(w)]
    found = jax.jit(lambda w: narrow._used(Placement(None), (None,), w, jnp.zeros(1, jnp.bfloat16)))
    right = w.astype(jnp.bfloat16)
    assert np.array_equal(np.asarray(found(w)).view(np.uint16), right.view(np.uint16))
