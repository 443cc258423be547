"""Parameters: counts by arithmetic, initial distributions, and independence of layout and mesh."""

from __future__ import annotations

import dataclasses
import functools
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
from jaxgpt.model.params import ParamSpec, abstract, count, init, on_host, restack, specs, table

TINY = ModelConfig(num_layers=2, embed_dim=32, num_heads=4, vocab_size=64, seq_len=16)
FULL = dataclasses.replace(
    TINY, num_kv_heads=2, norm_placement="sandwich", mlp="swiglu", attn_bias=True, out_bias=True,
    mlp_bias=True, qk_norm=True, tie_embeddings=False,
)  # fmt: skip
WIDE = ModelConfig(num_layers=3, embed_dim=64, num_heads=4, num_kv_heads=2, vocab_size=128,
                   seq_len=64, mlp="swiglu", tie_embeddings=False)  # fmt: skip
EXPERTS = dataclasses.replace(
    WIDE, num_heads=8, head_dim=12, norm="rmsnorm", norm_plus_one=True, num_experts=4,
    expert_dim=96, shared_dim=48, router_bias=True,
)  # fmt: skip
ATTENTION = {"wq": (64, 64), "wk": (64, 32), "wv": (64, 32), "wo": (64, 64)}
ENDS = {"embed": (64, 128), "pos_embed": (64, 64), "lm_head": (64, 128)}
FANS = {  # fan-in, fan-out of every matrix: D 64, F 256, V 128; of experts 96 wide, of E 4, N H 96
    WIDE: ENDS | ATTENTION | {"w_gate": (64, 256), "w_up": (64, 256), "w_down": (256, 64)},
    EXPERTS: ENDS | {
        "wq": (64, 96), "wk": (64, 24), "wv": (64, 24), "wo": (96, 64), "router": (64, 4),
        "w_gate": (64, 96), "w_up": (64, 96), "w_down": (96, 64),
        "shared_gate": (64, 48), "shared_up": (64, 48), "shared_down": (48, 64),
    },
}  # fmt: skip
BOTH = pytest.mark.parametrize("cfg", [WIDE, EXPERTS], ids=["dense", "experts"])
INITIALISERS = pytest.mark.parametrize("initialiser", ["normal", "xavier", "kaiming"])
KEY = jax.random.key(7)


def with_stacked(cfg: ModelConfig, stacked: bool) -> ModelConfig:
    return dataclasses.replace(cfg, stacked=stacked)


def leaves(tree) -> list[tuple[str, jax.Array]]:
    pairs = jax.tree.leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in pairs]


@functools.cache
def initial(cfg: ModelConfig) -> parameters.Params:
    return init(specs(cfg), KEY)


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
    ("cfg", "traced"),
    [(dataclasses.replace(FULL, init="xavier"), False), (FULL, True), (EXPERTS, False)],
    ids=["dense", "traced", "experts"],
)
def test_both_layouts_hold_the_same_values_for_the_same_key(cfg, traced):
    def values(stacked: bool) -> parameters.Params:
        tree = specs(with_stacked(cfg, stacked))
        return (
            jax.jit(lambda key: init(tree, key))(KEY)
            if traced
            else initial(with_stacked(cfg, stacked))
        )

    assert_same(values(True), restack(values(False), stacked=True))
    assert_same(values(False), restack(values(True), stacked=False))


def test_values_and_experts_born_sharded_over_eight_devices_equal_those_of_one_device():
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    rules = {"vocab": "b", "embed": "a", "mlp": "b", "heads": "b", "experts": "c"}
    tree = specs(with_stacked(EXPERTS, True))
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, PartitionSpec(*map(rules.get, spec.axes))), tree
    )
    sharded = jax.jit(lambda key: init(tree, key), out_shardings=shardings)(KEY)
    assert len(sharded.embed.sharding.device_set) == 8
    w_up = sharded.layers.w_up  # [L, E, D, F]
    assert w_up.sharding.shard_shape(w_up.shape) == (3, 2, 32, 48)
    assert_same(sharded, initial(with_stacked(EXPERTS, True)))


def test_a_value_does_not_depend_on_which_other_weights_exist():
    plain = initial(TINY)
    more = initial(dataclasses.replace(FULL, num_kv_heads=0))
    for name in ("wq", "wk", "wv", "wo", "w_up", "w_down"):
        np.testing.assert_array_equal(
            getattr(plain.layers[1], name), getattr(more.layers[1], name), err_msg=name
        )
    np.testing.assert_array_equal(plain.embed, more.embed)


@functools.cache
def drawn(cfg: ModelConfig) -> dict[str, np.ndarray]:
    """Return the initial values of each matrix by name, of each layer and each expert apart."""
    pieces = {}
    for path, leaf in leaves(initial(cfg)):
        name, matrix = path.split("/")[-1], np.asarray(leaf, np.float64)
        if name not in FANS[dataclasses.replace(cfg, init="normal")]:
            assert "norm" in name or name == "router_bias", name
        elif cfg.num_experts and name in ("w_gate", "w_up", "w_down"):
            pieces |= {f"{path}/{e}": expert.ravel() for e, expert in enumerate(matrix)}
        else:
            pieces[path] = matrix.ravel()
    return pieces


def expected_std(cfg: ModelConfig, path: str) -> float:
    """Return the published deviation: 0.02; Glorot 2010, eq. 16; He 2015, eq. 10; GPT-2's depth."""
    name = next(part for part in path.split("/") if part != "layers" and not part.isdigit())
    fan_in, fan_out = FANS[dataclasses.replace(cfg, init="normal")][name]
    if name in ("embed", "pos_embed"):
        return 0.02
    std = {
        "normal": 0.02,
        "xavier": math.sqrt(2 / (fan_in + fan_out)),
        "kaiming": math.sqrt(2 / fan_in),
    }[cfg.init]
    return std / math.sqrt(2 * 3) if name in ("wo", "w_down", "shared_down") else std


def test_every_matrix_of_every_layer_and_expert_is_looked_at_below():
    assert len(drawn(WIDE)) == 3 + 3 * 7
    assert len(drawn(EXPERTS)) == 3 + 3 * (4 + 1 + 3 * 4 + 3)


@BOTH
@INITIALISERS
def test_no_stretch_of_64_signs_occurs_twice_in_any_layer_leaf_or_expert(cfg, initialiser):
    stretches = []
    for values in drawn(dataclasses.replace(cfg, init=initialiser)).values():
        signs = np.lib.stride_tricks.sliding_window_view(values > 0, 64)
        stretches.append(np.packbits(signs, axis=1).view(np.uint64).ravel())
    stretches = np.concatenate(stretches)
    # 300,000 stretches of 64 random bits: a chance of 2e-9 that two are equal.
    assert len(np.unique(stretches)) == len(stretches) > 150_000


@BOTH
@INITIALISERS
def test_every_layer_and_expert_has_the_mean_and_deviation_of_its_initialiser(cfg, initialiser):
    cfg = dataclasses.replace(cfg, init=initialiser)
    for path, x in drawn(cfg).items():
        std = expected_std(cfg, path)
        # Five standard errors of the mean, and of the deviation (largest for a normal).
        assert abs(x.mean()) < 5 * std / math.sqrt(x.size), path
        assert abs(x.std() / std - 1) < 5 / math.sqrt(2 * x.size), path


@BOTH
@INITIALISERS
def test_every_layer_and_expert_has_the_distribution_function_of_its_initialiser(cfg, initialiser):
    cfg = dataclasses.replace(cfg, init=initialiser)
    table = np.linspace(-6, 6, 12_001)
    normal = np.array([NormalDist().cdf(z) for z in table])  # interpolated: errors below 1e-7
    for path, x in drawn(cfg).items():
        z = np.sort(x) / expected_std(cfg, path)
        uniform = initialiser == "xavier" and "embed" not in path
        right = (
            np.clip((z / math.sqrt(3) + 1) / 2, 0, 1) if uniform else np.interp(z, table, normal)
        )
        steps = np.arange(x.size + 1) / x.size
        distance = max((steps[1:] - right).max(), (right - steps[:-1]).max())
        # Kolmogorov-Smirnov with Massart's bound, P(distance > e) <= 2 exp(-2 n e^2), at 1e-9.
        assert distance < math.sqrt(math.log(2e9) / (2 * x.size)), path


def test_xavier_values_fill_their_interval_and_never_leave_it():
    for path, x in drawn(dataclasses.replace(EXPERTS, init="xavier")).items():
        if "embed" in path:
            continue
        bound = math.sqrt(3) * expected_std(dataclasses.replace(EXPERTS, init="xavier"), path)
        # The largest of n is below 1 - 20 / n of the bound with a chance of e^-20.
        assert (1 - 20 / x.size) * bound < np.abs(x).max() <= bound * (1 + 1e-6), path


def test_normal_values_reach_beyond_three_deviations_and_not_beyond_five():
    for initialiser in ("normal", "kaiming"):
        cfg = dataclasses.replace(WIDE, init=initialiser)
        w = drawn(cfg)["layers/0/w_up"] / expected_std(cfg, "layers/0/w_up")
        # The largest of 16,384: 3.3 deviations or more with p > 0.9999.
        assert 3.3 < np.abs(w).max() < 5


def test_depth_scale_off_leaves_residual_outputs_at_the_usual_deviation():
    values = initial(dataclasses.replace(EXPERTS, init_depth_scale=False)).layers[2]
    for name in ("wo", "w_down", "shared_down"):
        w = getattr(values, name)
        assert float(w.std()) == pytest.approx(0.02, rel=5 / math.sqrt(2 * w.size)), name


def test_norm_scales_start_at_one_and_biases_at_zero():
    for name, leaf in leaves(initial(FULL)):
        name = name.split("/")[-1]
        if name in ("embed", "pos_embed", "lm_head") or name.startswith("w"):
            continue
        is_bias = name.endswith("bias") or name.startswith("b")
        np.testing.assert_array_equal(leaf, 0.0 if is_bias else 1.0, err_msg=name)


def test_norm_scales_stored_minus_one_and_router_biases_start_at_zero():
    found = [(n, leaf) for n, leaf in leaves(initial(EXPERTS)) if "norm" in n or "bias" in n]
    assert len(found) == 3 * 3 + 1  # two norms and a router bias per layer, and the final norm
    for name, leaf in found:
        np.testing.assert_array_equal(leaf, 0.0, err_msg=name)


def test_bfloat16_values_are_the_float32_ones_rounded():
    exact, rounded = initial(TINY), init(specs(TINY), KEY, jnp.bfloat16)
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
    values = initial(FULL)
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


@pytest.mark.parametrize("kind", ["kaiming", "xavier"])
def test_values_drawn_on_the_host_have_the_distributions_of_the_specs(kind):
    cfg = ModelConfig(
        num_layers=1, embed_dim=64, num_heads=2, vocab_size=512, seq_len=64, init=kind
    )
    wanted = specs(cfg)
    found = on_host(wanted, np.random.default_rng(0))

    def agrees(spec: ParamSpec, values: np.ndarray) -> None:
        drawn, scale = spec.init
        assert (values.shape, values.dtype) == (spec.shape, np.float32)
        if drawn == "constant":
            assert (values == scale).all()
        else:  # of [-b, b] the deviation is b / sqrt(3); 4096 values or more: 6 errors are 7 %
            right = scale if drawn == "normal" else scale / 3**0.5
            assert values.std() == pytest.approx(right, rel=0.07)

    jax.tree.map(agrees, wanted, found)
