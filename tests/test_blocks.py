"""The parts of a block: activations and normalisations by hand, placements by an own formula."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiny import VARIETY, random_params

from jaxgpt.config import MeshConfig, ModelConfig
from jaxgpt.model import blocks, gpt
from jaxgpt.model.activations import ACTIVATIONS
from jaxgpt.model.blocks import drop, norm
from jaxgpt.model.params import abstract, specs
from jaxgpt.model.shards import Whole
from jaxgpt.parallel.mesh import BATCH_AXES, make_mesh
from jaxgpt.parallel.sharding import Placement, tree_shardings
from jaxgpt.planning.collectives import Collective, collectives

CFG = ModelConfig(num_layers=1, embed_dim=2, num_heads=1, vocab_size=8, seq_len=8)
SILU_3 = 3 / (1 + math.exp(-3))
SILU_MINUS_3 = -3 / (1 + math.exp(3))
# erf form: x Φ(x). tanh form: x/2 (1 + tanh(√(2/π) (x + 0.044715 x³))).
RIGHT = {
    "gelu": (2.995950, -0.004050),
    "gelu_tanh": (2.996363, -0.003637),
    "relu": (3.0, 0.0),
    "relu2": (9.0, 0.0),
    "swiglu": (SILU_3, SILU_MINUS_3),
    "geglu": (2.996363, -0.003637),
}


@pytest.mark.parametrize("kind", RIGHT)
def test_activation_of_plus_and_minus_three(kind):
    np.testing.assert_allclose(ACTIVATIONS[kind](jnp.asarray([3.0, -3.0])), RIGHT[kind], atol=1e-6)


@pytest.mark.parametrize(
    "kind, x, eps, right",
    [
        ("layernorm", [0.001, -0.001], 1e-5, [0.301511, -0.301511]),
        ("layernorm", [0.001, -0.001], 1e-6, [0.707107, -0.707107]),
        ("rmsnorm", [0.001, 0.002], 1e-5, [0.282843, 0.565685]),
        ("rmsnorm", [0.001, 0.002], 1e-6, [0.534522, 1.069045]),
    ],
)
def test_epsilon_is_inside_the_root_and_taken_from_the_config(kind, x, eps, right):
    cfg = dataclasses.replace(CFG, norm=kind, norm_eps=eps)
    out = norm(cfg, jnp.asarray(x), jnp.ones(2), None, jnp.float32)
    np.testing.assert_allclose(out, right, atol=2e-6)


def test_layernorm_is_float32_inside_for_bfloat16_input():
    x = np.float32(jnp.asarray([256.0, 258.0, 260.0, 254.0], jnp.bfloat16))
    out = norm(CFG, jnp.asarray(x, jnp.bfloat16), jnp.ones(4), None, jnp.float32)
    right = (x - x.mean()) / np.sqrt(x.var() + 1e-5)
    np.testing.assert_allclose(out, right, rtol=1e-6)  # a bfloat16 mean would be 256, not 257


def test_norm_applies_scale_then_bias():
    out = norm(CFG, jnp.asarray([3.0, 1.0]), jnp.asarray([2.0, 5.0]), jnp.asarray([0.5, -0.5]),
               jnp.float32)  # fmt: skip
    unit = 1 / math.sqrt(1 + 1e-5)
    np.testing.assert_allclose(out, [2 * unit + 0.5, -5 * unit - 0.5], rtol=1e-6)


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def layernorm(x: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * scale + bias


def attention_of(p, x: np.ndarray) -> np.ndarray:
    q, k, v = (np.einsum("td,dnh->nth", x, np.float64(w)) for w in (p.wq, p.wk, p.wv))
    scores = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1])
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    return np.einsum("nth,nhd->td", softmax(scores) @ v, np.float64(p.wo))


def mlp_of(p, x: np.ndarray) -> np.ndarray:
    return np.maximum(x @ np.float64(p.w_up), 0) @ np.float64(p.w_down)


def test_post_norm_is_the_original_transformer():
    # H1 = LayerNorm(X + Attention(X) Wo); H2 = LayerNorm(H1 + MLP(H1)); X = embedding + sinusoids.
    cfg = ModelConfig(
        num_layers=2, embed_dim=16, num_heads=2, vocab_size=32, seq_len=8, mlp="relu",
        norm_placement="post", positions="sinusoidal",
    )  # fmt: skip
    params, tokens = random_params(cfg), np.asarray([3, 1, 4, 1, 5, 9, 2, 6])
    wave = [[p / 10_000 ** (2 * (i // 2) / 16) + (i % 2) * math.pi / 2 for i in range(16)]
            for p in range(8)]  # fmt: skip
    x = np.float64(params.embed)[tokens] + np.sin(wave)
    for p in params.layers:
        x = layernorm(x + attention_of(p, x), p.attn_norm, p.attn_norm_bias)
        x = layernorm(x + mlp_of(p, x), p.mlp_norm, p.mlp_norm_bias)
    np.testing.assert_allclose(gpt.hidden(cfg, params, tokens[None])[0], x, atol=2e-5)


@pytest.mark.parametrize("mlp", ["swiglu", "gelu_tanh"])
def test_an_mlp_in_halves_is_the_whole_one_and_so_are_its_gradients(mlp):
    B, T, D, F = 2, 4, 8, 12
    cfg, draw = dataclasses.replace(CFG, mlp=mlp), np.random.default_rng(0).standard_normal
    call = SimpleNamespace(dtype=jnp.dtype("float32"), shards=Whole("tpu"))
    into = [(jnp.float32(draw((D, F))), jnp.float32(draw(F))) for _ in range(2)]
    gate = into[0] if cfg.gated else (None, None)
    matrices = gate, into[1], (jnp.float32(draw((F, D))), None)
    h, grad = (jnp.float32(draw((B, T, D))) for _ in range(2))
    found = []
    for one in (blocks._whole, blocks._halved):
        out, transposed = jax.vjp(lambda h, m, one=one: one(cfg, h, m, call), h, matrices)
        found.append((out, transposed(grad)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), *found)


def test_an_mlp_is_halved_where_memory_decides():
    full = dataclasses.replace(CFG, remat="full")

    def halved(cfg=full, F=64, held=1 << 28, split=1, platform="tpu"):
        return blocks.halves(cfg, F, held, split, platform)

    assert halved()
    assert not halved(dataclasses.replace(full, remat_save=("up",)))  # nothing is computed again
    assert not halved(CFG) and not halved(F=63) and not halved(held=(1 << 28) - 1)
    assert not halved(split=2) and not halved(platform="gpu") and not halved(platform="cpu")


def test_dropout_keeps_the_expected_share_and_the_mean():
    cfg = dataclasses.replace(CFG, dropout=0.25)
    keys = jax.random.split(jax.random.key(0), 4)
    out = np.asarray(drop(cfg, jnp.ones((4, 100, 100)), keys))
    assert set(np.unique(out)) == {0.0, np.float32(1 / 0.75)}
    assert (out > 0).mean() == pytest.approx(0.75, abs=5 * math.sqrt(0.25 * 0.75 / 40_000))


def test_dropout_of_a_row_depends_on_its_key_alone():
    cfg, x = dataclasses.replace(CFG, dropout=0.5), jnp.ones((3, 64))
    keys = jax.random.split(jax.random.key(0), 3)
    whole = drop(cfg, x, keys)
    np.testing.assert_array_equal(drop(cfg, x[:1], keys[2:]), whole[2:])
    assert (whole[0] != whole[1]).any()


# What devices that hold parts of a row exchange.


def exchanges_of_a_step(cfg: ModelConfig, sizes: dict[str, int]) -> list[Collective]:
    """Return those of a forward and backward pass over 8 rows, compiled for 8 devices."""
    mesh = make_mesh(MeshConfig(**sizes))
    shards, placed = Placement(mesh), tree_shardings(mesh, specs(cfg))
    tokens = jax.ShapeDtypeStruct((8, cfg.seq_len), jnp.int32)
    loss = lambda params, tokens: gpt.hidden(cfg, params, tokens, shards=shards).sum()  # noqa: E731
    rows = NamedSharding(mesh, PartitionSpec(BATCH_AXES, "context"))
    step = jax.jit(
        jax.grad(loss),
        in_shardings=(placed, rows),
        out_shardings=placed,
        compiler_options={"xla_backend_optimization_level": 0},  # half the time
    )
    text = step.lower(abstract(specs(cfg)), tokens).compile().as_text()
    return list(collectives(text, dict(mesh.shape)))


def test_no_product_gathers_tokens_over_the_devices_that_hold_parts_of_a_row():
    model = dataclasses.replace(VARIETY["biased"], num_layers=1, sliding_window=0)
    found = exchanges_of_a_step(model, {"data": 2, "context": 2, "tensor": 2})
    assert any(one.kind == "collective-permute" for one in found if "context" in one.axes)  # ring
    assert not [one for one in found if one.kind == "all-gather" and "context" in one.axes]
