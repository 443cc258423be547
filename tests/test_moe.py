"""Experts: routing and losses by arithmetic, every way to compute them against the dense one."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import VARIETY, random_params

from jaxgpt.config import Config, MeshConfig, ModelConfig, TrainConfig
from jaxgpt.data.packing import Batch
from jaxgpt.model import dispatch, gpt, moe
from jaxgpt.model.cache import init_cache
from jaxgpt.model.params import LayerParams, count, restack, specs
from jaxgpt.model.shards import Whole
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.parallel.sharding import to_global, tree_shardings
from jaxgpt.training.step import gradients

MODEL = dataclasses.replace(VARIETY["experts"], num_layers=1)  # E = 4, k = 2, D = 32, F = 24
ROUTERS = {
    "mixtral": {"router_bias": False},
    "qwen3_moe without norm_topk_prob": {"router_bias": False, "router_norm": False},
    "deepseek_v3": {"router": "sigmoid"},
    "one expert": {"experts_per_token": 1, "router_norm": False},
    "all experts": {"experts_per_token": 4},
    "not gated": {"mlp": "relu2"},
}
B, T, D = 2, 24, 32
H = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)
SLOPE = np.random.default_rng(1).normal(size=(B, T, D)).astype(np.float32)
ONES = np.ones((B, T), np.float32)
HERE = Whole("cpu")


def layer(cfg: ModelConfig) -> LayerParams:
    return random_params(cfg).layers[0]


@functools.partial(jax.jit, static_argnames=("cfg", "impl"))
def run(
    cfg: ModelConfig,
    p: LayerParams,
    h: Any,
    impl: str | None = None,
    weights: Any = None,
    segment_ids: Any = None,
) -> tuple[jax.Array, moe.RouterSums | None]:
    return moe.mlp(cfg, p, h, weights=weights, segment_ids=segment_ids, impl=impl)


@functools.cache
def differentiated(cfg: ModelConfig, impl: str, dtype: str) -> tuple[jax.Array, Any]:
    """Return the output for H, and the gradients of SLOPE . output of H and all weights."""

    def total(p: LayerParams, h: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = run(cfg, p, h.astype(dtype), impl)[0]
        return (out.astype(jnp.float32) * SLOPE).sum(), out

    (_, out), grads = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(layer(cfg), H)
    return out.astype(jnp.float32), grads


def close(found: Any, right: Any, tolerance: float) -> None:
    """Compare all leaves by norm; what is 0 on one side is 0 on both."""
    pairs = zip(jax.tree.leaves_with_path(found), jax.tree.leaves(right), strict=True)
    for (path, a), b in pairs:
        a, b = np.float64(a), np.float64(b)
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b), (path, a, b)


# Values, by a loop over tokens in float64.


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def slow(cfg: ModelConfig, p: LayerParams, h: np.ndarray) -> np.ndarray:
    """Return the experts' sum for tokens h [n, D], float64."""
    router, up, down = (np.float64(w) for w in (p.router, p.w_up, p.w_down))
    out = np.zeros(h.shape)
    for t, token in enumerate(np.float64(h)):
        logits = token @ router
        scores = np.exp(logits - logits.max())
        scores = scores / scores.sum() if cfg.router == "softmax" else 1 / (1 + np.exp(-logits))
        order = scores if p.router_bias is None else scores + p.router_bias
        chosen = np.argsort(-order)[: cfg.experts_per_token]
        total = scores[chosen].sum() if cfg.router_norm else 1.0
        for e in chosen:
            hidden = token @ up[e]
            gated = cfg.gated and silu(token @ np.float64(p.w_gate[e])) * hidden
            hidden = gated if cfg.gated else np.maximum(hidden, 0) ** 2
            out[t] += scores[e] / total * (hidden @ down[e])
    return out


@pytest.mark.parametrize("options", ROUTERS.values(), ids=ROUTERS)
def test_dense_experts_equal_a_loop_over_tokens_in_float64(options):
    cfg = dataclasses.replace(MODEL, **options)
    found, _ = differentiated(cfg, "dense", "float32")
    right = slow(cfg, layer(cfg), H.reshape(-1, D)).reshape(B, T, D)
    np.testing.assert_allclose(found, right, atol=2e-6 * np.abs(right).max())


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_the_gradient_of_the_router_flows_through_the_weights_of_the_chosen(name):
    cfg = dataclasses.replace(MODEL, **ROUTERS[name])
    p = layer(cfg)
    _, (grads, _) = differentiated(cfg, "dense", "float32")
    for place in [(0, 0), (3, 1), (17, 2), (31, 3)]:  # by central differences in float64
        moved = [np.float64(p.router) for _ in range(2)]
        moved[0][place] += 1e-6
        moved[1][place] -= 1e-6
        high, low = (slow(cfg, p.replace(router=w), H.reshape(-1, D)) for w in moved)
        right = ((high - low).reshape(B, T, D) * SLOPE).sum() / 2e-6
        assert grads.router[place] == pytest.approx(right, rel=1e-4)
    if p.router_bias is not None:
        assert not grads.router_bias.any()  # it decides who is chosen and nothing else


def test_the_router_chooses_in_float32_when_all_else_is_bfloat16():
    # In bfloat16 both logits would be 256, and the first would win.
    cfg = dataclasses.replace(MODEL, num_experts=2, experts_per_token=1, router_bias=False)
    router = np.zeros((D, 2), np.float32)
    router[0], router[1, 1] = 256, 0.5  # logits 256 and 256.5
    h = jnp.zeros((1, 1, D), jnp.bfloat16).at[0, 0, :2].set(1)
    p = layer(cfg).replace(router=router)
    _, sums = run(cfg, p, h, weights=np.ones((1, 1), np.float32))
    np.testing.assert_array_equal(sums.load, [0, 1])


def test_sigmoid_scores_that_are_all_0_give_0_and_not_nan():
    cfg = dataclasses.replace(MODEL, router="sigmoid")
    p = layer(cfg)
    out, _ = run(cfg, p.replace(router=np.full_like(p.router, -1e3)), np.ones_like(H))
    np.testing.assert_array_equal(out, 0)


# Every way to compute them.


@pytest.mark.parametrize("options", ROUTERS.values(), ids=ROUTERS)
@pytest.mark.parametrize("impl", ["ragged", "blocks"])
def test_every_impl_gives_the_values_and_gradients_of_the_dense_one(impl, options):
    cfg = dataclasses.replace(MODEL, **options)
    found, right = (differentiated(cfg, i, "float32") for i in (impl, "dense"))
    close(found, right, 1e-6)


@pytest.mark.parametrize("impl", ["dense", "ragged", "blocks"])
def test_every_impl_in_bfloat16_gives_what_float32_does_within_its_rounding(impl):
    close(differentiated(MODEL, impl, "bfloat16"), differentiated(MODEL, "dense", "float32"), 0.02)


@pytest.mark.parametrize("impl", ["dense", "ragged", "blocks"])
def test_one_token_alone_gives_what_it_does_among_others(impl):
    whole, _ = differentiated(MODEL, impl, "float32")
    alone, _ = run(MODEL, layer(MODEL), H[1:, 5:6], impl)
    np.testing.assert_allclose(alone[0, 0], whole[1, 5], atol=1e-6)


def test_an_unknown_impl_is_refused():
    with pytest.raises(ValueError, match="'sparse': dense, ragged or blocks"):
        run(MODEL, layer(MODEL), H, "sparse")


@pytest.mark.parametrize("slots, experts, rows", [
    (1, 8, 8), (4096, 8, 128), (4096, 64, 32), (2 * 10**6, 8, 128), (100, 1, 32),
])  # fmt: skip
def test_blocks_on_cpu_are_half_the_fair_load_or_less_from_8_to_128_rows(slots, experts, rows):
    assert dispatch.block_rows(slots, experts, "cpu") == rows


def test_only_blocks_in_use_are_computed():
    # 4 blocks of 2 rows, 2 in use: whatever lies in the others stays out of values and gradients.
    x = jnp.full((4, 2, 3), jnp.nan).at[:2].set(1.0)
    w, owner = jnp.full((3, 3, 5), jnp.inf).at[1].set(2.0), jnp.asarray([1, 1, 3, 3])
    product = functools.partial(dispatch._block_product, owner=owner, used=jnp.int32(2))
    out, pull = jax.vjp(lambda x, w: product(x, w), x, w)
    np.testing.assert_array_equal(out, np.repeat([6.0, 6, 0, 0], 10).reshape(4, 2, 5))
    x_grad, w_grad = pull(jnp.ones_like(out))
    np.testing.assert_array_equal(x_grad, np.repeat([10.0, 10, 0, 0], 6).reshape(4, 2, 3))
    np.testing.assert_array_equal(w_grad, np.repeat([0.0, 4, 0], 15).reshape(3, 3, 5))


@pytest.mark.parametrize("way", ["dense", "ragged", "blocks", "limited"])
def test_infinite_weights_of_an_expert_that_no_token_chose_reach_nothing(way):
    p = layer(MODEL)
    bias = np.float32([0, 0, 0, -100])
    spoiled = {
        name: np.where(np.arange(4)[:, None, None] == 3, np.inf, getattr(p, name))
        for name in ("w_gate", "w_up", "w_down")
    }
    cfg = dataclasses.replace(MODEL, capacity_factor=0.5 if way == "limited" else 0.0)
    impl = None if way == "limited" else way

    def total(p: LayerParams, h: jax.Array) -> jax.Array:
        return (run(cfg, p, h, impl, weights=ONES)[0] * SLOPE).sum()

    compute = jax.jit(jax.value_and_grad(total, (0, 1)))
    found = compute(p.replace(router_bias=bias, **spoiled), H)
    right = compute(p.replace(router_bias=bias), H)
    jax.tree.map(np.testing.assert_array_equal, found, right)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))


# Capacity.


def places(chosen: np.ndarray, counted: np.ndarray, most: int) -> np.ndarray:
    """Return which slots [T, k] of a row get one of `most` places per expert, first come."""
    kept, taken = np.zeros(chosen.shape, bool), np.zeros(99, int)
    for t, choice in np.ndindex(chosen.shape):
        expert = chosen[t, choice]
        kept[t, choice] = counted[t] and taken[expert] < most
        taken[expert] += counted[t]
    return kept


LIMITED = dataclasses.replace(MODEL, capacity_factor=0.75)  # ceil(0.75 * 24 * 2 / 4) = 9 places
PADDED = np.where(np.arange(T) < [[24], [17]], 1, 0).astype(np.float32)


def routed(cfg: ModelConfig, h: np.ndarray) -> tuple[jax.Array, jax.Array]:
    p = layer(cfg)
    return moe.route(cfg, jnp.asarray(h) @ p.router, p.router_bias, HERE)[1:]


def test_places_are_taken_in_order_of_tokens_then_choices_and_padding_takes_none():
    cfg = dataclasses.replace(MODEL, num_experts=3, capacity_factor=0.5)  # ceil(0.5 * 6 * 2 / 3)
    chosen = jnp.asarray([[[0, 1], [1, 0], [0, 2], [1, 2], [1, 2], [2, 0]]])
    counted = jnp.asarray([[True, True, True, False, True, True]])
    p = random_params(cfg).layers[0]
    matrices = (p.w_gate, p.w_up, p.w_down)
    _, kept = dispatch.limited(cfg, H[:1, :6], chosen, jnp.ones((1, 6, 2)), matrices, counted, HERE)
    right = [[1, 1], [1, 1], [0, 1], [0, 0], [0, 1], [0, 0]]
    np.testing.assert_array_equal(kept[0], right)


def test_with_capacity_values_and_gradients_are_those_of_dense_without_the_dropped_slots():
    p, weights = layer(LIMITED), jnp.asarray(PADDED)
    chosen = np.asarray(routed(LIMITED, H)[0])
    kept = np.stack([places(c, w > 0, 9) for c, w in zip(chosen, PADDED, strict=True)])
    assert 4 < (PADDED[..., None] * ~kept).sum() < 40  # some are dropped, and not all

    def limited(p: LayerParams, h: jax.Array) -> tuple[jax.Array, Any]:
        out, sums = run(LIMITED, p, h, weights=weights)
        return (out * SLOPE).sum(), (out, sums)

    def dense(p: LayerParams, h: jax.Array) -> tuple[jax.Array, Any]:
        _, chosen, gates = moe.route(LIMITED, h @ p.router, p.router_bias, HERE)
        matrices = (p.w_gate, p.w_up, p.w_down)
        out = dispatch.dropless(
            LIMITED, h, jnp.where(kept, chosen, 4), gates, matrices, "cpu", "dense"
        )
        return (out * SLOPE).sum(), (out, None)

    ((_, (out, sums)), grads), ((_, (right, _)), right_grads) = (
        jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(p, jnp.asarray(H))
        for f in (limited, dense)
    )
    close((out, grads), (right, right_grads), 1e-6)
    assert sums.dropped == (PADDED[..., None] * ~kept).sum()
    assert sums.load.sum() == 2 * PADDED.sum()  # what was asked, dropped or not
    np.testing.assert_array_equal(out[1, 17:], 0)  # nobody needs the experts of padding


def test_later_tokens_other_rows_and_padding_do_not_change_who_gets_a_place():
    compute = functools.partial(run, LIMITED, layer(LIMITED))
    right, _ = compute(H, weights=ONES)
    other = H.copy()
    other[0], other[1, 12:] = 3 * H[0, ::-1], -H[1, 12:]
    found, _ = compute(other, weights=ONES)
    np.testing.assert_allclose(found[1, :12], right[1, :12], atol=1e-6)
    first = np.where(np.arange(T) < 3, 0, ONES)  # three tokens of padding in front of all others
    shifted, sums = compute(np.roll(H, 3, axis=1), weights=first, segment_ids=np.int32(first))
    np.testing.assert_allclose(shifted[:, 3:], right[:, :-3], atol=1e-6)
    assert (shifted[:, :3] == 0).all() and sums.load.sum() == 2 * 2 * (T - 3)


def test_without_weights_as_in_inference_no_capacity_is_applied():
    free = dataclasses.replace(LIMITED, capacity_factor=0.0)
    found, sums = run(LIMITED, layer(LIMITED), H)
    assert sums is None
    np.testing.assert_array_equal(found, run(free, layer(free), H)[0])


def test_capacity_that_holds_every_choice_drops_nothing():
    cfg = dataclasses.replace(MODEL, capacity_factor=4.0)
    out, sums = run(cfg, layer(cfg), H, weights=ONES)
    assert sums.dropped == 0
    np.testing.assert_allclose(out, differentiated(MODEL, "dense", "float32")[0], atol=2e-6)


@pytest.mark.parametrize("factor, experts, tokens, places", [
    (1.0, 4, 16, 8), (1.25, 4, 16, 10), (1.3, 4, 16, 11), (1.1, 4, 20, 11), (8.0, 4, 16, 16),
    (1.0, 64, 16, 1), (0.001, 4, 16, 1),
])  # fmt: skip
def test_capacity_is_the_share_of_the_fair_load_rounded_up(factor, experts, tokens, places):
    cfg = dataclasses.replace(MODEL, capacity_factor=factor, num_experts=experts)
    assert dispatch.capacity(cfg, tokens) == places


# Sums.


def test_a_router_that_knows_nothing_has_balance_1_entropy_ln_e_and_z_ln_e_squared():
    p = layer(MODEL)
    _, sums = run(MODEL, p.replace(router=np.zeros_like(p.router)), H, weights=PADDED)
    # Ties go by the bias: two experts get all slots, but each has probability 1/4.
    assert float(sums.balance) == pytest.approx(PADDED.sum())
    assert float(sums.entropy) == pytest.approx(PADDED.sum() * math.log(4))
    assert float(sums.z) == pytest.approx(PADDED.sum() * math.log(4) ** 2)
    assert sorted(sums.load) == [0, 0, PADDED.sum(), PADDED.sum()]


def test_the_balance_loss_is_e_times_shares_times_probabilities_row_by_row():
    p, weights = layer(MODEL), PADDED * [[0.5], [2.0]]
    logits = np.float64(H) @ p.router
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = np.argsort(-(probs + p.router_bias))[..., :2]
    right = 0.0
    for row in range(B):
        real = PADDED[row] > 0
        shares = np.bincount(chosen[row][real].ravel(), minlength=4) / (2 * real.sum())
        right += weights[row].sum() * 4 * (shares * probs[row][real].mean(0)).sum()
    _, sums = run(MODEL, p, H, weights=np.float32(weights))
    assert float(sums.balance) == pytest.approx(right, rel=1e-5)
    z = (weights * np.log(np.exp(logits).sum(-1)) ** 2).sum()
    assert float(sums.z) == pytest.approx(z, rel=1e-5)


def test_what_is_in_padding_cannot_be_seen_in_sums_or_in_their_gradients():
    def total(h: jax.Array) -> tuple[jax.Array, moe.RouterSums]:
        sums = run(LIMITED, layer(LIMITED), h, weights=PADDED)[1]
        return sums.balance + sums.z, sums

    compute = jax.jit(jax.grad(total, has_aux=True))
    spoiled = np.where(PADDED[..., None] > 0, H, np.nan)
    (_, sums), (grad, right) = compute(spoiled), compute(H)
    jax.tree.map(np.testing.assert_array_equal, sums, right)
    assert (grad[1, 17:] == 0).all() and (np.abs(grad[1, :17]) > 0).all()


def test_a_token_is_counted_in_a_document_or_up_to_the_last_that_has_a_weight():
    weights = jnp.asarray([[0, 0, 1, 0, 1, 0, 0], [0] * 7], jnp.float32)
    np.testing.assert_array_equal(moe.is_counted(weights, None), [[1, 1, 1, 1, 1, 0, 0], [0] * 7])
    documents = jnp.asarray([[0, 1, 1, 1, 0, 2, 2], [0] * 7])
    right = [[0, 1, 1, 1, 1, 1, 1], [0] * 7]
    np.testing.assert_array_equal(moe.is_counted(weights, documents), right)


# Whole models.

ONE_LAYER, TWO_LAYERS = MODEL, VARIETY["experts"]
CAPACITIES = [0.0, 1.0]


def config(model: ModelConfig, **train: Any) -> Config:
    train = {"global_batch": 8, "compute_dtype": "float32", "router_z_loss": 1e-2} | train
    return Config(model=model, train=TrainConfig(**train))


def rows(micro_batches: int = 1) -> Batch:
    tokens = np.random.default_rng(3).integers(0, 64, (8, 16)).astype(np.int32)
    weights = np.ones((8, 16), np.float32)
    weights[::2, 11:] = 0
    batch = Batch(tokens, np.roll(tokens, -1, axis=1), weights)
    return jax.tree.map(lambda x: x.reshape(micro_batches, -1, 16), batch)


def differentiate(cfg: Config, params: Any, batch: Batch) -> tuple[Any, dict[str, Any]]:
    return jax.jit(functools.partial(gradients, cfg, step=0))(params, batch)


@functools.cache
def on_one_device(model: ModelConfig) -> tuple[Any, dict[str, Any]]:
    return differentiate(config(model), random_params(model), rows())


apply = jax.jit(gpt.apply, static_argnums=0)


def limit(model: ModelConfig, capacity: float) -> ModelConfig:
    return dataclasses.replace(model, capacity_factor=capacity)


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_micro_batches_change_neither_gradients_nor_any_loss_or_count(capacity):
    model = limit(ONE_LAYER, capacity)
    found = differentiate(config(model, micro_batch=2), random_params(model), rows(4))
    close(found, on_one_device(model), 1e-6)
    assert (found[1]["router_dropped"] > 0).all() == bool(capacity)


def same_in_a_scan(model: ModelConfig) -> None:
    scanned = config(dataclasses.replace(model, stacked=True, remat="full"))
    grads, sums = differentiate(scanned, restack(random_params(model), stacked=True), rows())
    close((restack(grads, stacked=False), sums), on_one_device(model), 1e-6)


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_stacked_and_recomputed_layers_give_the_gradients_of_unrolled_ones(capacity):
    same_in_a_scan(limit(TWO_LAYERS, capacity))


@pytest.mark.parametrize("impl", ["dense", "ragged"])
def test_a_model_with_another_impl_has_the_same_gradients(impl, monkeypatch):
    on_one_device(TWO_LAYERS)  # with the default, before another takes its place
    monkeypatch.setattr(dispatch, "default_impl", lambda platform: impl)
    same_in_a_scan(TWO_LAYERS)


@functools.cache
def on_mesh(model: ModelConfig, **sizes: int) -> tuple[Any, str]:
    """Return gradients and sums on 8 devices, and the compiled program."""
    cfg = config(model)
    mesh = make_mesh(MeshConfig(**sizes))
    params = jax.device_put(random_params(cfg.model), tree_shardings(mesh, specs(cfg.model)))
    batch = to_global(mesh, rows())
    compiled = jax.jit(functools.partial(gradients, cfg, step=0, mesh=mesh)).lower(params, batch)
    compiled = compiled.compile()
    return jax.device_get(compiled(params, batch)), compiled.as_text()


MESHES = [(0.0, {"data": 2, "fsdp": 2, "tensor": 2}), (1.0, {"data": 2, "fsdp": 2, "tensor": 2}),
          (0.0, {"data": 2, "fsdp": 4})]  # fmt: skip


@pytest.mark.parametrize("capacity, sizes", MESHES, ids=str)
def test_gradients_and_sums_on_a_mesh_are_those_of_one_device(capacity, sizes):
    model = limit(ONE_LAYER, capacity)
    close(on_mesh(model, **sizes)[0], on_one_device(model), 1e-5)


@pytest.mark.parametrize("capacity, sizes", MESHES, ids=str)
def test_no_device_gathers_the_tokens_of_others(capacity, sizes):
    _, text = on_mesh(limit(ONE_LAYER, capacity), **sizes)
    gathered = {
        tuple(map(int, shape.split(",")))
        for shape in re.findall(r"= \(?\w+\[([\d,]+)\]\S* all-gather(?:-start)?\(", text)
    }
    # Weights are gathered over fsdp; their shapes, all in all, of whole or split F, N H and V.
    weights = {math.prod(leaf.shape) for leaf in jax.tree.leaves(specs(ONE_LAYER))}
    split = weights | {size // 2 for size in weights}
    assert gathered and all(math.prod(shape) in split for shape in gathered), gathered
    assert not any(shape[:2] == (8, 16) or shape[0] in (8 * 16, 8 * 16 * 2) for shape in gathered)


def test_a_document_in_a_packed_row_gives_what_it_does_alone():
    params, tokens = random_params(TWO_LAYERS), rows().tokens[0, :1]
    packed = apply(TWO_LAYERS, params, tokens, segment_ids=np.repeat([[1, 2]], [6, 10], axis=1))
    alone = apply(TWO_LAYERS, params, tokens[:, 6:])
    np.testing.assert_allclose(packed[:, 6:], alone, atol=1e-5)


def test_cached_generation_with_experts_equals_the_uncached_forward_token_by_token():
    params, tokens = random_params(TWO_LAYERS), rows().tokens[0, :3]
    right = apply(TWO_LAYERS, params, tokens)
    cache = init_cache(TWO_LAYERS, 3, 16, jnp.float32)
    logits, cache = apply(TWO_LAYERS, params, tokens[:, :5], cache=cache)
    np.testing.assert_allclose(logits, right[:, :5], atol=1e-5)
    for t in range(5, 10):
        logits, cache = apply(TWO_LAYERS, params, tokens[:, t : t + 1], cache=cache)
        np.testing.assert_allclose(logits[:, 0], right[:, t], atol=1e-5)


def test_experts_lower_for_tpu_to_one_ragged_product_per_matrix_and_gradient(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")

    def total(p: LayerParams, h: jax.Array) -> jax.Array:
        return (run(MODEL, p, h.astype(jnp.bfloat16))[0] * SLOPE).sum()

    traced = jax.jit(jax.grad(total, (0, 1))).trace(layer(MODEL), jnp.asarray(H))
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert (
        text.count('"chlo.ragged_dot"(') == 9
    )  # 3 matrices: values, and gradients of both factors


# Counts.

MIXTRAL = ModelConfig(
    num_layers=32, embed_dim=4096, mlp_dim=14336, num_heads=32, num_kv_heads=8, vocab_size=32000,
    seq_len=4096, positions="rope", norm="rmsnorm", mlp="swiglu", tie_embeddings=False,
    num_experts=8, experts_per_token=2, stacked=True,
)  # fmt: skip


def test_mixtral_8x7b_has_46_7_billion_parameters_and_uses_12_9_per_token():
    expert, attention = 3 * 4096 * 14336, 2 * 4096 * 4096 + 2 * 4096 * 1024
    rest = 32 * (attention + 4096 * 8 + 2 * 4096) + 4096
    total = rest + 32 * 8 * expert + 2 * 32000 * 4096
    assert count(specs(MIXTRAL)) == total and round(total / 1e9, 1) == 46.7
    used = rest + 32 * 2 * expert + 32000 * 4096  # the embedding is looked up
    assert round((used + 32000 * 4096) / 1e9, 1) == 12.9
    scores = 12 * 32 * 4096  # layers, width of all heads
    assert gpt.flops_per_token(MIXTRAL, causal=False) == 6 * used + scores * 4096
    assert gpt.flops_per_token(MIXTRAL, causal=True) == 6 * used + scores * 2048


def test_flops_of_a_window_pattern_count_the_keys_that_each_block_sees():
    plain = dataclasses.replace(MIXTRAL, num_layers=12, num_experts=0)
    pattern = dataclasses.replace(plain, sliding_window=1024, global_every=6)
    per_key = 12 * 4096
    for causal, of_all, of_window in (
        (False, 4096, 1024),
        (True, 2048, 1024 - 1024**2 / (2 * 4096)),
    ):
        saved = gpt.flops_per_token(plain, causal) - gpt.flops_per_token(pattern, causal)
        assert saved == 10 * per_key * (of_all - of_window)  # blocks 6 and 12 see all
