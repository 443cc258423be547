"""Parameters: counts by arithmetic, initial distributions, and independence of layout and mesh."""

from __future__ import annotations

import dataclasses
import math
from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxgpt.config import ModelConfig
from jaxgpt.errors import ConfigError
from jaxgpt.model import params as parameters
from jaxgpt.model.params import ParamSpec, abstract, count, init, restack, specs, table

TINY = ModelConfig(num_layers=2, embed_dim=32, num_heads=4, vocab_size=64, seq_len=16)
FULL = dataclasses.replace(
    TINY, num_kv_heads=2, norm_placement="sandwich", mlp="swiglu", attn_bias=True, out_bias=True,
    mlp_bias=True, qk_norm=True, tie_embeddings=False,
)  # fmt: skip
WIDE = ModelConfig(num_layers=3, embed_dim=64, num_heads=4, num_kv_heads=2, vocab_size=128,
                   seq_len=64, mlp="swiglu", tie_embeddings=False)  # fmt: skip
MATRICES = {  # fan-in, fan-out of the matrices of WIDE
    "wq": (64, 64), "wk": (64, 32), "wv": (64, 32), "wo": (64, 64), "w_gate": (64, 256),
    "w_up": (64, 256), "w_down": (256, 64),
}  # fmt: skip
KEY = jax.random.key(7)


def with_stacked(cfg: ModelConfig, stacked: bool) -> ModelConfig:
    return dataclasses.replace(cfg, stacked=stacked)


def leaves(tree) -> list[tuple[str, jax.Array]]:
    pairs = jax.tree.leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in pairs]


def assert_same(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (name, x), (_, y) in zip(leaves(a), leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=name)


def test_gpt2_small_has_124439808_parameters():
    cfg = ModelConfig(
        num_layers=12, embed_dim=768, num_heads=12, vocab_size=50257, seq_len=1024,
        attn_bias=True, out_bias=True, mlp_bias=True,
    )  # fmt: skip
    assert count(specs(cfg)) == 124_439_808


def test_every_option_adds_the_parameters_it_should():
    D, N, K, H, F, V, T, L = 32, 4, 2, 8, 128, 64, 16, 2
    attention = 2 * D * N * H + 2 * D * K * H + (N + 2 * K) * H + D + 2 * H
    mlp = 3 * D * F + 2 * F + D
    norms = 4 * 2 * D  # before and after both sub-layers, with biases
    assert count(specs(FULL)) == 2 * V * D + T * D + L * (attention + mlp + norms) + 2 * D


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("cfg", [TINY, FULL])
def test_specs_abstract_and_values_have_the_same_shapes(cfg, stacked):
    tree = specs(with_stacked(cfg, stacked))
    values = jax.eval_shape(lambda key: init(tree, key, jnp.bfloat16), KEY)
    shapes = abstract(tree, jnp.bfloat16)
    assert jax.tree.structure(tree) == jax.tree.structure(values) == jax.tree.structure(shapes)
    for (name, spec), (_, value), (_, shape) in zip(
        leaves(tree), leaves(values), leaves(shapes), strict=True
    ):
        assert spec.shape == value.shape == shape.shape, name
        assert len(spec.axes) == len(spec.shape), name
        assert value.dtype == shape.dtype == jnp.bfloat16, name


@pytest.mark.parametrize(
    "initialiser, traced", [("xavier", False), ("kaiming", False), ("normal", True)]
)
def test_both_layouts_hold_the_same_values_for_the_same_key(initialiser, traced):
    def values(stacked: bool) -> parameters.Params:
        tree = specs(dataclasses.replace(FULL, init=initialiser, stacked=stacked))
        make = jax.jit(lambda key: init(tree, key)) if traced else lambda key: init(tree, key)
        return make(KEY)

    assert_same(values(True), restack(values(False), stacked=True))
    assert_same(values(False), restack(values(True), stacked=False))


def test_values_born_sharded_over_eight_devices_equal_those_of_one_device():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    rules = {"vocab": "b", "embed": "a", "mlp": "b", "heads": "b"}
    tree = specs(with_stacked(FULL, True))
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, PartitionSpec(*map(rules.get, spec.axes))), tree
    )
    sharded = jax.jit(lambda key: init(tree, key), out_shardings=shardings)(KEY)
    assert len(sharded.embed.sharding.device_set) == 8
    assert_same(sharded, jax.jit(lambda key: init(tree, key))(KEY))


def test_a_value_does_not_depend_on_which_other_weights_exist():
    plain = init(specs(TINY), KEY)
    more = init(specs(dataclasses.replace(FULL, num_kv_heads=0)), KEY)
    for name in ("wq", "wk", "wv", "wo", "w_up", "w_down"):
        np.testing.assert_array_equal(
            getattr(plain.layers[1], name), getattr(more.layers[1], name), err_msg=name
        )
    np.testing.assert_array_equal(plain.embed, more.embed)


def test_no_two_matrices_share_values():
    values = init(specs(WIDE), KEY)
    starts = [
        tuple(np.asarray(leaf).ravel()[:8] / np.abs(leaf).max())
        for name, leaf in leaves(values)
        if "norm" not in name
    ]
    assert len(starts) == 3 * len(MATRICES) + 3
    assert len(set(starts)) == len(starts)


def expected_std(cfg: ModelConfig, name: str) -> float:
    fan_in, fan_out = MATRICES.get(name, (64, 128))
    std = {
        "normal": 0.02,
        "xavier": math.sqrt(2 / (fan_in + fan_out)),
        "kaiming": math.sqrt(2 / fan_in),
    }[cfg.init]
    if name in ("embed", "pos_embed"):
        return 0.02
    return std / math.sqrt(2 * 3) if name in ("wo", "w_down") else std


@pytest.mark.parametrize("initialiser", ["normal", "xavier", "kaiming"])
def test_every_matrix_of_every_layer_has_the_mean_and_deviation_of_its_initialiser(initialiser):
    cfg = dataclasses.replace(WIDE, init=initialiser)
    checked = 0
    for name, leaf in leaves(init(specs(cfg), KEY)):
        name = name.split("/")[-1]
        if leaf.ndim < 2:
            continue
        x, std = np.asarray(leaf, np.float64).ravel(), expected_std(cfg, name)
        # Five standard errors of the mean, and of the deviation (largest for a normal).
        assert abs(x.mean()) < 5 * std / math.sqrt(x.size), name
        assert abs(x.std() / std - 1) < 5 / math.sqrt(2 * x.size), name
        checked += 1
    assert checked == 3 * len(MATRICES) + 3


def test_xavier_is_uniform_and_the_others_are_normal():
    largest = {}
    for initialiser in ("normal", "xavier", "kaiming"):
        w = init(specs(dataclasses.replace(WIDE, init=initialiser)), KEY).layers[0].w_up
        largest[initialiser] = float(jnp.abs(w).max() / w.std())
    # The largest of 16384: √3 deviations if uniform; 3.3 or more if normal (p > 0.9999).
    assert largest["xavier"] == pytest.approx(math.sqrt(3), rel=0.02)
    assert 3.3 < largest["normal"] < 5 and 3.3 < largest["kaiming"] < 5


def test_normal_values_have_the_distribution_function_of_the_normal():
    w = np.asarray(init(specs(WIDE), KEY).embed, np.float64).ravel() / 0.02
    for quantile in (-3.0, -2.0, -1.0, 0.0, 0.5, 1.5, 2.5):
        share = NormalDist().cdf(quantile)
        error = 5 * math.sqrt(share * (1 - share) / w.size)
        assert abs((w <= quantile).mean() - share) < error, quantile


def test_depth_scale_off_leaves_residual_outputs_at_the_usual_deviation():
    values = init(specs(dataclasses.replace(WIDE, init_depth_scale=False)), KEY)
    assert float(values.layers[2].w_down.std()) == pytest.approx(0.02, rel=0.03)


def test_norm_scales_start_at_one_and_biases_at_zero():
    for name, leaf in leaves(init(specs(FULL), KEY)):
        name = name.split("/")[-1]
        if name in ("embed", "pos_embed", "lm_head") or name.startswith("w"):
            continue
        is_bias = name.endswith("bias") or name.startswith("b")
        np.testing.assert_array_equal(leaf, 0.0 if is_bias else 1.0, err_msg=name)


def test_bfloat16_values_are_the_float32_ones_rounded():
    exact, rounded = init(specs(TINY), KEY), init(specs(TINY), KEY, jnp.bfloat16)
    assert_same(jax.tree.map(lambda x: x.astype(jnp.bfloat16), exact), rounded)


def test_rmsnorm_has_no_bias_whatever_norm_bias_says():
    tree = specs(dataclasses.replace(TINY, norm="rmsnorm", norm_bias=True))
    assert not [name for name, _ in leaves(tree) if "norm_bias" in name]


def test_post_norm_has_no_final_norm():
    assert specs(dataclasses.replace(TINY, norm_placement="post")).final_norm is None


def test_unknown_vocabulary_is_refused_by_name():
    with pytest.raises(ConfigError, match="model.vocab_size = 0"):
        specs(dataclasses.replace(TINY, vocab_size=0))


def test_restack_round_trip_changes_nothing():
    values = init(specs(FULL), KEY)
    assert_same(restack(restack(values, True), False), values)
    assert restack(values, False) is not None and isinstance(values.layers, tuple)
    assert restack(values, True).layers.wq.shape == (2, 32, 4, 8)


def test_table_is_the_same_for_both_layouts_and_adds_up_to_count():
    unrolled, stacked = (table(specs(with_stacked(FULL, s))) for s in (False, True))
    assert unrolled == stacked
    assert sum(row.count for row in unrolled) == count(specs(FULL))
    row = next(row for row in unrolled if row.name == "layers/wk")
    assert row == ("layers/wk", (32, 2, 8), ("embed", "kv_heads", "head_dim"), 2, 2 * 32 * 2 * 8)


def test_stacked_leaves_have_a_leading_layers_axis_and_nothing_else_changes():
    one, many = specs(FULL).layers[0], specs(with_stacked(FULL, True)).layers
    assert many == jax.tree.map(
        lambda spec: ParamSpec((2, *spec.shape), ("layers", *spec.axes), spec.init), one
    )
