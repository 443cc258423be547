"""Meshes compute what one device computes; and the check of it finds one that does not."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from tiny import VARIETY

from jaxgpt.config import Config, DataConfig, TrainConfig
from jaxgpt.parallel import sharding
from jaxgpt.training import parity
from jaxgpt.validation import MESH_AXES

EXPERTS = dataclasses.replace(VARIETY["experts"], num_experts=8)
PAIRS = [dict(zip(pair, (2, 4), strict=True)) for pair in itertools.combinations(MESH_AXES, 2)]


def config(model=EXPERTS) -> Config:
    return Config(model=model, data=DataConfig(document_mask=True), train=TrainConfig(num_steps=8))


def test_what_makes_percents_of_rounding_is_left_out_of_a_twin():
    # Scores shifted for all keys alike: softmax cancels it, so key biases have no gradient. ReLU
    # has no one slope at 0. Both ended as faults of meshes that have none.
    post = dataclasses.replace(VARIETY["post"], attn_bias=True, dropout=0.1)
    small = parity.shrunk(config(post))
    assert small.model.mlp == "relu2" and small.optim.groups == {"/bk$": {"lr": 0.0}}
    llama = dataclasses.replace(VARIETY["llama"], attn_bias=True)
    assert parity.shrunk(config(llama)).optim.groups == {}  # positions turn keys: it has one
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
    small = parity.shrunk(config(model)).model
    sizes = {
        "num_layers", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim", "vocab_size",
        "seq_len", "sliding_window", "global_every", "num_experts", "experts_per_token",
        "expert_dim", "shared_dim", "rope_original_len", "aux_layers", "init_std",
        "init_depth_scale", "stacked",
    }  # fmt: skip
    for field in dataclasses.fields(model):
        if field.name == "mlp" and model.mlp == "relu":
            assert small.mlp == "relu2"
        elif field.name not in sizes:
            assert getattr(small, field.name) == getattr(model, field.name), field.name
    assert (small.num_experts > 0) == (model.num_experts > 0)
    assert (small.sliding_window > 0) == (model.sliding_window > 0)
    assert (small.kv_heads < small.num_heads) == (model.kv_heads < model.num_heads)


@pytest.fixture(scope="module")
def rows() -> dict[str, parity.Row]:
    """Every pair of axes, 2 x 4, with documents: a model with rotary positions and grouped heads,
    and one with experts where experts are split."""
    found = []
    for model, layouts in (
        (VARIETY["llama"], [sizes for sizes in PAIRS if "expert" not in sizes]),
        (EXPERTS, [sizes for sizes in PAIRS if "expert" in sizes]),
    ):
        found += parity.compare(config(model), layouts)
    return {name(row.sizes): row for row in found}


def name(sizes: dict[str, int]) -> str:
    return "-".join(f"{axis}{n}" for axis, n in sizes.items())


@pytest.mark.parametrize("sizes", PAIRS, ids=name)
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
            batch.tokens[:, 4:] = batch.tokens[:, :4]
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
