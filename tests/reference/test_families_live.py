"""Whole models against transformers, run side by side with fresh weights; needs torch.

Every family of the golden files, and options of theirs that those do not have.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import NamedTuple

import against_hf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from golden import make_hf
from safetensors.numpy import load_file
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from jaxgpt.checkpoint.fingerprint import named_leaves
from jaxgpt.config import ModelConfig
from jaxgpt.interop import hf
from jaxgpt.model import moe
from jaxgpt.model.params import Params

GOLDEN = Path(make_hf.__file__).parent / "hf"
ROPE = {"rope_parameters": make_hf.PLAIN}
SIZES, WINDOW = make_hf.SIZES, make_hf.WINDOW
FULL, SLIDING = "full_attention", "sliding_attention"


def variants() -> dict[str, transformers.PreTrainedConfig]:
    """Return models with options that the golden ones leave at their defaults."""
    return {
        "gpt2 of exact gelu, another epsilon and its own head": transformers.GPT2Config(
            vocab_size=make_hf.V, n_positions=make_hf.T, n_embd=24, n_layer=3, n_head=2,
            activation_function="gelu", layer_norm_epsilon=1e-3, tie_word_embeddings=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
        ),
        "llama with biases, multi-query and linear scaling": transformers.LlamaConfig(
            **SIZES | dict(num_key_value_heads=1), attention_bias=True, mlp_bias=True,
            tie_word_embeddings=False, rope_parameters=make_hf.LINEAR,
        ),
        "mistral without a window": transformers.MistralConfig(
            **SIZES, sliding_window=None, tie_word_embeddings=True, **ROPE
        ),
        "qwen2 with windows in all layers": transformers.Qwen2Config(
            **{name: size for name, size in SIZES.items() if name != "head_dim"},
            use_sliding_window=True, max_window_layers=0, sliding_window=WINDOW,
            tie_word_embeddings=False, **ROPE,
        ),
        "qwen3 with biases, tied": transformers.Qwen3Config(
            **SIZES, attention_bias=True, tie_word_embeddings=True, **ROPE
        ),
        "gemma2 without caps, full layers first": transformers.Gemma2Config(
            **SIZES, layer_types=[FULL] * 2, query_pre_attn_scalar=8, sliding_window=WINDOW,
            attn_logit_softcapping=None, final_logit_softcapping=None, **ROPE,
        ),
        "gemma3 with a cap on the logits, multi-query": transformers.Gemma3TextConfig(
            **SIZES | dict(num_hidden_layers=2, num_key_value_heads=1), query_pre_attn_scalar=8,
            layer_types=[SLIDING, FULL], sliding_window=WINDOW, final_logit_softcapping=3.0,
            rope_parameters={FULL: make_hf.PLAIN, SLIDING: make_hf.PLAIN | {"rope_theta": 50.0}},
        ),
        "mixtral with a window, three of five experts": transformers.MixtralConfig(
            **SIZES | make_hf.EXPERTS | dict(num_experts_per_tok=3), num_local_experts=5,
            sliding_window=WINDOW, tie_word_embeddings=False, **ROPE,
        ),
        "qwen3_moe of normalised scores": make_hf.qwen3_moe(norm_topk_prob=True),
    }  # fmt: skip


MODELS = make_hf.configs() | variants()


class Model(NamedTuple):
    cfg: ModelConfig
    params: Params
    grads: Params  # of transformers
    expected: dict[str, np.ndarray]


@functools.cache
def model(name: str) -> Model:
    with tempfile.TemporaryDirectory() as folder:
        weights, gradients = Path(folder, "weights"), Path(folder, "gradients")
        expected = make_hf.make(MODELS[name], 5, weights, gradients)
        cfg, params = hf.load(weights)
        # The mapping only moves numbers, so gradients pass through it like weights.
        return Model(cfg, params, hf.load(gradients)[1], expected)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_texts_equal_those_of_transformers(name):
    cfg, params, _, expected = model(name)
    logits = against_hf.apply(cfg, params, expected["ids"])
    assert against_hf.relative_error(logits, expected["logits"]) < 2e-5
    prompts, texts = zip(*against_hf.prompts_and_texts(expected), strict=True)
    assert against_hf.greedy(cfg, params, prompts, len(texts[0])) == list(texts)


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_the_gradient_of_every_weight_equal_those_of_transformers(name):
    cfg, params, right, expected = model(name)
    loss, grads = against_hf.loss_and_gradients(
        cfg, params, expected["ids"], stacked=False, remat="none"
    )
    assert loss == pytest.approx(float(expected["loss"][0]), rel=2e-5)
    norm = np.sqrt(sum(np.square(np.float64(g)).sum() for g in jax.tree.leaves(grads)))
    assert norm == pytest.approx(float(expected["grad_norm"][0]), rel=2e-5)
    ours = named_leaves(grads)
    assert ours.keys() == named_leaves(right).keys()
    for path, theirs in named_leaves(right).items():
        error = np.abs(ours[path] - theirs).max()
        assert error < 2e-5 * max(np.abs(theirs).max(), 0.01), (path, error)


@pytest.mark.parametrize("name", MODELS)
def test_documents_in_one_row_equal_those_of_transformers_run_alone(name):
    cfg, params, _, expected = model(name)
    segments = expected["segments"]
    logits = against_hf.apply(cfg, params, expected["packed_ids"], segment_ids=segments)
    error = against_hf.relative_error(
        np.asarray(logits)[segments > 0], expected["packed_logits"][segments > 0]
    )
    assert error < 1e-5


@pytest.mark.parametrize("name", make_hf.configs())
def test_golden_files_are_what_transformers_computes_today(name, tmp_path):
    golden = load_file(GOLDEN / name / "expected.safetensors")
    seed = int(golden.pop("seed")[0])
    today = make_hf.make(
        MODELS[name], seed, tmp_path / "weights", tmp_path / "gradients",
        bfloat16=name == make_hf.BFLOAT16, sharded=name == make_hf.SHARDED,
    )  # fmt: skip
    assert golden.keys() == today.keys()
    for key, array in today.items():
        scale = np.abs(np.float64(array)).max()
        np.testing.assert_allclose(golden[key], array, atol=1e-5 * scale, err_msg=key)
    files = sorted(p.name for p in (tmp_path / "weights").glob("*.safetensors*"))
    assert files == sorted(p.name for p in (GOLDEN / name).glob("model*.safetensors*"))
    for file in files:
        assert (tmp_path / "weights" / file).read_bytes() == (GOLDEN / name / file).read_bytes()


def test_the_balance_loss_of_a_row_is_that_of_transformers_for_each_choice():
    cfg, params, _, expected = model("mixtral")
    layer, ids = params.layers[0], expected["ids"][:1]
    h = params.embed[ids]
    right = load_balancing_loss_func((torch.tensor(np.asarray(h[0] @ layer.router)),), 4, 2)
    _, sums = moe.mlp(cfg, layer, h, weights=jnp.ones(ids.shape), segment_ids=None)
    # Transformers adds up the shares of first and second choices; here those of both sum to 1.
    assert float(sums.balance) / ids.size == pytest.approx(float(right) / 2, rel=1e-6)
