"""Routers and experts against transformers, run side by side; needs torch and transformers."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tiny import VARIETY, random_params

from jaxgpt.model import moe

CFG = dataclasses.replace(VARIETY["experts"], router_bias=False, shared_dim=0)
H = np.random.default_rng(0).normal(size=(1, 40, 32)).astype(np.float32)
P = random_params(CFG).layers[0]


def sums(cfg, p=P) -> tuple[np.ndarray, moe.RouterSums]:
    weights = jnp.ones(H.shape[:2])
    return moe.mlp(cfg, p, H, weights=weights, segment_ids=None)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_balance_loss_is_that_of_mixtral_over_k(k):
    # Theirs adds up the shares of the k choices, so that it is k when all experts get the same;
    # ours is 1. For one layer and one row there is no other difference.
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = torch.tensor(H[0]) @ torch.tensor(P.router)
    right = float(load_balancing_loss_func((logits,), num_experts=4, top_k=k))
    _, found = sums(dataclasses.replace(CFG, experts_per_token=k))
    assert k * float(found.balance) / H.shape[1] == pytest.approx(right, rel=1e-5)


@pytest.mark.parametrize("normed", [True, False])
def test_experts_equal_those_of_qwen3_moe(normed):
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=32, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2,
        norm_topk_prob=normed, hidden_act="silu",
    )  # fmt: skip
    block = Qwen3MoeSparseMoeBlock(config)
    gate_up = np.concatenate([P.w_gate, P.w_up], axis=-1).transpose(0, 2, 1)
    with torch.no_grad():
        block.gate.weight.copy_(torch.tensor(P.router.T))
        block.experts.gate_up_proj.copy_(torch.tensor(gate_up))
        block.experts.down_proj.copy_(torch.tensor(P.w_down.transpose(0, 2, 1)))
        right = block(torch.tensor(H))
    right = right[0] if isinstance(right, tuple) else right
    found, _ = sums(dataclasses.replace(CFG, router_norm=normed))
    np.testing.assert_allclose(found, right.numpy(), atol=2e-6 * np.abs(right.numpy()).max())


def test_sigmoid_routing_equals_that_of_deepseek_v3():
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    config = DeepseekV3Config(
        hidden_size=32, moe_intermediate_size=24, intermediate_size=24, n_routed_experts=4,
        num_experts_per_tok=2, n_group=1, topk_group=1, norm_topk_prob=True, n_shared_experts=1,
        routed_scaling_factor=1.0,
    )  # fmt: skip
    block, bias = DeepseekV3MoE(config), np.float32([0.3, -0.2, 0.1, 0.0])
    gate_up = np.concatenate([P.w_gate, P.w_up], axis=-1).transpose(0, 2, 1)
    with torch.no_grad():
        block.gate.weight.copy_(torch.tensor(P.router.T))
        block.gate.e_score_correction_bias.copy_(torch.tensor(bias))
        block.experts.gate_up_proj.copy_(torch.tensor(gate_up))
        block.experts.down_proj.copy_(torch.tensor(P.w_down.transpose(0, 2, 1)))
        for parameter in block.shared_experts.parameters():
            parameter.zero_()
        right = block(torch.tensor(H)).numpy()
    cfg = dataclasses.replace(CFG, router="sigmoid", router_bias=True)
    found, _ = sums(cfg, P.replace(router_bias=bias))
    np.testing.assert_allclose(found, right, atol=2e-6 * np.abs(right).max())
