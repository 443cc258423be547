"""What decays, what is a matrix, and what an exception matches: by name, in both layouts."""

from __future__ import annotations

import dataclasses
import math

import jax
import pytest
from tiny import TINY, VARIETY

from jaxgpt.config import OptimConfig
from jaxgpt.model.params import specs, weight_name
from jaxgpt.training.leaves import (
    axes_of,
    balanced,
    decay_mask,
    hidden_matrices,
    only,
    rates_and_decays,
)

BOTH = pytest.mark.parametrize("stacked", [False, True])


def tree_of(name: str, stacked: bool):
    return specs(dataclasses.replace(VARIETY[name], stacked=stacked))


@pytest.mark.parametrize("name", VARIETY)
@BOTH
def test_matrices_and_embeddings_decay_and_vectors_do_not(name, stacked):
    tree = tree_of(name, stacked)
    for spec, decays in zip(jax.tree.leaves(tree), jax.tree.leaves(decay_mask(tree)), strict=True):
        axes = [axis for axis in spec.axes if axis != "layers"]
        bias = spec.init == ("constant", 0.0)
        assert decays == (len(axes) > 1 and not bias)


def test_a_table_of_positions_decays_as_an_embedding():
    assert decay_mask(specs(TINY)).pos_embed is True


@pytest.mark.parametrize("name", VARIETY)
@BOTH
def test_a_matrix_is_read_by_its_inputs_and_outputs_and_layers_and_experts_apart(name, stacked):
    D = 32
    for path, spec in jax.tree.leaves_with_path(tree_of(name, stacked)):
        axes = axes_of(path, len(spec.shape))
        apart = [a for a in spec.axes[: axes.batch] if a in ("layers", "experts")]
        assert len(apart) == axes.batch == sum(a in ("layers", "experts") for a in spec.axes)
        rest = spec.shape[axes.batch :]
        sides = math.prod(rest[: axes.inputs]), math.prod(rest[axes.inputs :])
        last = weight_name(path)[0].split("/")[-1]
        if last in ("wq", "wk", "wv", "w_up", "w_gate", "shared_up", "shared_gate", "router"):
            assert sides[0] == D and axes.inputs == 1
        elif last in ("wo", "w_down", "shared_down"):
            assert sides[1] == D and axes.outputs == 1
        elif last in ("embed", "pos_embed", "lm_head"):
            assert axes == (0, 1, 1)
        else:
            assert axes.inputs == axes.outputs == 0


@BOTH
def test_muons_matrices_are_those_of_blocks_without_the_router(stacked):
    tree = tree_of("experts", stacked)
    names = {weight_name(path)[0] for path, _ in jax.tree.leaves_with_path(
        only(tree, hidden_matrices(tree))
    )}  # fmt: skip
    assert names == {
        f"layers/{name}"
        for name in "wq wk wv wo w_gate w_up w_down shared_gate shared_up shared_down".split()
    }


@BOTH
def test_only_router_biases_are_moved_by_load(stacked):
    tree = tree_of("experts", stacked)
    paths = jax.tree.leaves_with_path(only(tree, balanced(tree)))
    assert {weight_name(path)[0] for path, _ in paths} == {"layers/router_bias"}


@BOTH
def test_the_first_pattern_that_matches_counts_in_both_layouts(stacked):
    groups = {
        "^embed$": {"lr": 0.1},
        "layers/w[qk]": {"lr": 0.5, "weight_decay": 0.0},
        "layers/w": {"lr": 2.0},
        "norm": {"weight_decay": 0.3},
    }
    tree = tree_of("experts", stacked)
    factors, decays = rates_and_decays(OptimConfig(weight_decay=0.1, groups=groups), tree)
    found = {
        weight_name(path)[0].split("/")[-1]: (factor, decay)
        for (path, factor), decay in zip(
            jax.tree.leaves_with_path(factors), jax.tree.leaves(decays), strict=True
        )
    }
    assert found["embed"] == (0.1, 0.1) and found["lm_head"] == (1.0, 0.1)
    assert found["wq"] == found["wk"] == (0.5, 0.0)
    assert found["wv"] == found["w_down"] == (2.0, 0.1)
    assert found["attn_norm"] == found["final_norm"] == (1.0, 0.3)
