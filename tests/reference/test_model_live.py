"""Parts of the model against PyTorch and transformers, side by side; needs torch and transformers.

Whole models: `test_families_live`.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from golden import make_hf

from jaxgpt.config import ModelConfig
from jaxgpt.model.activations import ACTIVATIONS
from jaxgpt.model.attention import attend
from jaxgpt.model.blocks import norm
from jaxgpt.model.positions import rope_frequencies, rope_phases, rotate

GOLDEN = Path(make_hf.__file__).parent


def test_golden_rope_frequencies_are_what_transformers_computes_today():
    for case in json.loads((GOLDEN / "rope.json").read_text()):
        frequencies, factor = make_hf.rope(case["kind"], case)
        np.testing.assert_allclose(case["frequencies"], frequencies, rtol=1e-6)
        assert case["attention_factor"] == pytest.approx(factor, rel=1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_scaled_frequencies_of_random_settings_equal_those_of_transformers(seed):
    rng = np.random.default_rng(seed)
    kind = ("llama3", "yarn", "linear")[seed % 3]
    case = dict(
        head_dim=int(rng.choice([32, 64, 80, 128])), base=float(rng.choice([1e4, 5e5, 1e6])),
        factor=float(rng.uniform(1.5, 40)), original_len=int(rng.integers(512, 32768)),
        low=1.0, high=4.0 if kind == "llama3" else 32.0, seq_len=1 << 17,
    )  # fmt: skip
    right, right_factor = make_hf.rope(kind, case)
    cfg = ModelConfig(
        num_heads=1, embed_dim=case["head_dim"], positions="rope", rope_base=case["base"],
        rope_scaling=kind, rope_factor=case["factor"], rope_original_len=case["original_len"],
        rope_low_freq=case["low"], rope_high_freq=case["high"],
    )  # fmt: skip
    frequencies, factor = rope_frequencies(cfg)
    np.testing.assert_allclose(frequencies, right, rtol=3e-6)
    assert factor == pytest.approx(right_factor, rel=1e-7)


def test_rotation_equals_that_of_transformers():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    cfg = ModelConfig(num_heads=2, embed_dim=32, positions="rope")
    x = np.random.default_rng(0).normal(size=(1, 20, 2, 16)).astype(np.float32)
    angles = np.arange(20)[:, None] * rope_frequencies(cfg)[0]
    both = torch.tensor(np.concatenate([angles, angles], 1)[None])
    right, _ = apply_rotary_pos_emb(
        *[torch.tensor(x).transpose(1, 2)] * 2, both.cos().float(), both.sin().float()
    )
    mine = rotate(x, rope_phases(cfg, jnp.arange(20)))
    np.testing.assert_allclose(mine, right.transpose(1, 2).numpy(), atol=5e-6)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("impl", ["blocks", "dot_product", "reference"])
def test_attention_and_its_gradients_equal_those_of_torch(heads, impl):
    rng = np.random.default_rng(0)
    shapes = [(2, 150, n, 16) for n in (heads[0], heads[1], heads[1])]
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    probe = rng.normal(size=shapes[0]).astype(np.float32)
    out, pull = jax.vjp(lambda *x: attend(*x, impl=impl), *arrays)
    tensors = [torch.tensor(x, requires_grad=True) for x in arrays]
    right = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in tensors), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    right.backward(torch.tensor(probe))
    np.testing.assert_allclose(out, right.detach().numpy(), atol=3e-6)
    for mine, tensor in zip(pull(jnp.asarray(probe)), tensors, strict=True):
        np.testing.assert_allclose(mine, tensor.grad.numpy(), atol=1e-5)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_normalisation_equals_that_of_torch(kind):
    rng = np.random.default_rng(0)
    x, scale, bias = (rng.normal(size=s).astype(np.float32) for s in ((5, 48), 48, 48))
    tensors = [torch.tensor(a) for a in (x, scale, bias)]
    functional = torch.nn.functional
    if kind == "layernorm":
        right = functional.layer_norm(tensors[0], (48,), *tensors[1:], eps=1e-5)
    else:
        right = functional.rms_norm(tensors[0], (48,), tensors[1], eps=1e-5)
    cfg = ModelConfig(norm=kind, norm_eps=1e-5)
    mine = norm(cfg, x, scale, bias if kind == "layernorm" else None, jnp.float32)
    np.testing.assert_allclose(mine, right.numpy(), atol=2e-6)


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu", "swiglu", "geglu"])
def test_activations_equal_those_of_torch(kind):
    functional = torch.nn.functional
    right = {
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "geglu": lambda x: functional.gelu(x, approximate="tanh"),
        "relu": functional.relu,
        "swiglu": functional.silu,
    }[kind]
    x = np.linspace(-6, 6, 241, dtype=np.float32)
    np.testing.assert_allclose(ACTIVATIONS[kind](x), right(torch.tensor(x)).numpy(), atol=2e-6)
