"""Meshes compute what one device computes; and the check of it finds one that does not."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from tiny import VARIETY

from jaxgpt.config import Config, DataConfig, MeshConfig, TrainConfig
from jaxgpt.parallel import mesh as meshes
from jaxgpt.parallel import sharding
from jaxgpt.training import parity
from jaxgpt.validation import MESH_AXES

# Stacked, as a scan compiles faster.
LLAMA = dataclasses.replace(VARIETY["llama"], stacked=True)
EXPERTS = dataclasses.replace(VARIETY["experts"], num_experts=8, stacked=True)
PAIRS = [dict(zip(pair, (2, 4), strict=True)) for pair in itertools.combinations(MESH_AXES, 2)]


CIRCULAR = [{"stage": 2, "tensor": 4, "rounds": 2}, {"stage": 4, "expert": 2, "rounds": 2}]


def config(model=EXPERTS) -> Config:
    return Config(model=model, data=DataConfig(document_mask=True), train=TrainConfig(num_steps=8))


def test_what_makes_percents_of_rounding_is_left_out_of_a_twin():
    # Scores shifted for all keys alike: softmax cancels it, so key biases have no gradient. ReLU
    # has no one slope at 0. Both ended as faults of meshes that have none.
    post = dataclasses.replace(VARIETY["post"], attn_bias=True, dropout=0.1)
    small = parity.shrunk(config(post), {})
    assert small.model.mlp == "relu2" and small.optim.groups == {"/bk$": {"lr": 0.0}}
    llama = dataclasses.replace(VARIETY["llama"], attn_bias=True)
    assert parity.shrunk(config(llama), {}).optim.groups == {}  # positions turn keys: it has one
    (row,) = parity.compare(config(post), [{"tensor": 2}])
    assert row.passed, row


def test_every_layout_of_eight_devices_is_tried():
    # 8 = 2 * 2 * 2: as many ways as to put three twos on six axes, C(8, 3).
    layouts = parity.all_sizes(8)
    assert len(layouts) == 56 == len({tuple(sorted(sizes.items())) for sizes in layouts})
    assert {"context": 8} in layouts and {"fsdp": 2, "tensor": 2, "stage": 2} in layouts


@pytest.mark.parametrize("name", sorted(VARIETY))
def test_a_twin_keeps_the_kind_of_its_model(name):
    model = VARIETY[name]
    small = parity.shrunk(config(model), {}).model
    sizes = {
        "num_layers", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim", "vocab_size",
        "seq_len", "sliding_window", "global_every", "num_experts", "experts_per_token",
        "expert_dim", "shared_dim", "rope_original_len", "aux_layers", "init_std",
        "init_depth_scale",
    }  # fmt: skip
    for field in dataclasses.fields(model):
        if field.name == "mlp" and model.mlp == "relu":
            assert small.mlp == "relu2"
        elif field.name not in sizes:
            assert getattr(small, field.name) == getattr(model, field.name), field.name
    assert (small.num_experts > 0) == (model.num_experts > 0)
    windows = {small.window(layer) > 0 for layer in range(small.num_layers)}
    assert windows == {model.window(layer) > 0 for layer in range(model.num_layers)}
    assert (small.kv_heads < small.num_heads) == (model.kv_heads < model.num_heads)


def test_a_window_of_five_blocks_in_six_is_in_the_twin_on_every_mesh():
    # Gemma 3: a twin of 4 blocks with every block global had no window at all.
    gemma = dataclasses.replace(VARIETY["gemma3"], num_layers=26, global_every=6, stacked=True)
    for sizes in ({}, {"stage": 2}, {"stage": 4, "rounds": 2}, {"stage": 8}):
        small = parity.shrunk(config(gemma), sizes)
        layers = range(small.model.num_layers)
        assert {small.model.window(layer) > 0 for layer in layers} == {True, False}
        meshes.check_sizes(dict.fromkeys(meshes.AXES, 1) | sizes | {"rounds": 1}, small)


def test_a_mesh_of_stages_is_also_a_circular_pipeline_or_only_that_where_the_run_is():
    plain, circular = config(), dataclasses.replace(config(), mesh=MeshConfig(rounds=3))
    stages = [sizes for sizes in parity.layouts(plain, 8) if "stage" in sizes]
    # 21 = C(7, 2) meshes of 8 have stages; of the 10 with one more axis each also has 2 rounds.
    assert len(stages) == 21 + 10 == len(parity.layouts(plain, 8)) - 35
    assert {"stage": 2, "fsdp": 4} in stages and {"stage": 2, "fsdp": 4, "rounds": 2} in stages
    for sizes in parity.layouts(circular, 8):
        assert ("rounds" in sizes) == (sizes.get("stage", 1) in (2, 4))  # 8 stages: 4 micro-batches
        assert parity.shrunk(circular, sizes).mesh.rounds == sizes.get("rounds", 1)


def test_a_twin_accumulates_and_stacks_layers_where_the_run_does_and_in_pipelines():
    whole = config(VARIETY["llama"])
    parts = dataclasses.replace(whole, train=TrainConfig(num_steps=8, micro_batch=4))
    assert [parity.shrunk(cfg, {}).train.accum_steps for cfg in (whole, parts)] == [1, 4]
    assert not parity.shrunk(whole, {}).model.stacked
    staged = parity.shrunk(whole, {"stage": 2})
    assert staged.train.accum_steps == 4 and staged.model.stacked


def test_losses_of_blocks_are_taken_within_a_stage_and_at_its_end():
    model = dataclasses.replace(VARIETY["llama"], num_layers=9, aux_layers=(3, 6, 8))
    cfg = dataclasses.replace(
        config(model), train=TrainConfig(num_steps=8, aux_loss_weights=(0.1, 0.2, 0.3))
    )
    small = parity.shrunk(cfg, {"stage": 2})  # of 4 blocks each
    assert small.model.aux_layers == (3, 7) and small.train.aux_loss_weights == (0.1, 0.2)


@pytest.fixture(scope="module")
def rows() -> dict[str, parity.Row]:
    """Every pair of axes, 2 x 4, and circular pipelines, with documents: a model with rotary
    positions and grouped heads, and one with experts where experts are split."""
    found = []
    for model, layouts in (
        (LLAMA, [sizes for sizes in PAIRS + CIRCULAR if "expert" not in sizes]),
        (EXPERTS, [sizes for sizes in PAIRS + CIRCULAR if "expert" in sizes]),
    ):
        found += parity.compare(config(model), layouts)
    return {name(row.sizes): row for row in found}


def name(sizes: dict[str, int]) -> str:
    return "-".join(f"{axis}{n}" for axis, n in sizes.items())


@pytest.mark.parametrize("sizes", PAIRS + CIRCULAR, ids=name)
def test_a_pair_of_axes_computes_what_one_device_computes(sizes, rows):
    row = rows[name(sizes)]
    assert not row.refused
    assert row.errors["loss"] <= 1e-5 and row.errors["grad_norm"] <= 1e-4, row
    assert row.errors["moments"] <= 1e-4 and row.errors["weights"] <= 1e-4, row


def test_a_mesh_that_loses_rows_is_found_out(monkeypatch):
    right = sharding.to_global

    def wrong(mesh, batch):
        if mesh.size > 1:  # the second half of the rows is a copy of the first
            batch = jax.tree.map(lambda x: x.copy(), batch)
            half = batch.tokens.shape[1] // 2
            batch.tokens[:, half:] = batch.tokens[:, :half]
        return right(mesh, batch)

    monkeypatch.setattr(sharding, "to_global", wrong)
    (row,) = parity.compare(config(VARIETY["gpt2"]), [{"data": 2}])
    assert not row.passed and row.errors["loss"] > 1e-3


def test_a_weight_that_is_no_number_is_as_wrong_as_can_be():
    metrics = [{"loss_sum": 1.0, "grad_norm": 1.0}]
    right = metrics, {"mu/a": np.ones(2)}, {"a": np.ones(2), "b": np.ones(2)}
    wrong = metrics, {"mu/a": np.ones(2)}, {"a": np.ones(2), "b": np.array([1.0, np.nan])}
    errors, leaf = parity._errors(wrong, right)
    assert errors["weights"] == np.inf and leaf == "b"
    assert not parity.Row({"data": 2}, errors, leaf, "", 0.0).passed


def test_a_mesh_that_the_model_rules_out_is_named_with_the_reason():
    (row,) = parity.compare(config(VARIETY["gpt2"]), [{"expert": 2}])
    assert row.errors is None and "mesh.expert = 2: the model has no experts" in row.refused
