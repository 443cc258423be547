"""Optimisers against those of PyTorch, three steps with clipping, decay and a schedule."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
import torch

from jaxgpt.config import Config, OptimConfig
from jaxgpt.training.optimizer import build

OPTIM = OptimConfig(
    lr=0.02, warmup_steps=2, weight_decay=0.1, clip_norm=1.0, beta1=0.9, beta2=0.95, eps=1e-8
)
STEPS = 8


def matrices(seed: int, spread: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    draw = lambda *shape: np.float32(spread * rng.normal(size=shape))  # noqa: E731
    return {"w_up": draw(130, 160), "w_down": draw(160, 130)}


def ours(optim: OptimConfig) -> dict[str, np.ndarray]:
    params = matrices(0, 0.3)
    tx = build(Config(optim=optim), STEPS, params)
    update, state = jax.jit(tx.update), tx.init(params)
    for step in range(3):
        params, state, _ = update(matrices(step + 1), state, params, step)
    return jax.device_get(params)


def theirs(optim: OptimConfig, make: Any) -> dict[str, np.ndarray]:
    weights = {k: torch.nn.Parameter(torch.from_numpy(v)) for k, v in matrices(0, 0.3).items()}
    rate = build(Config(optim=optim), STEPS, matrices(0)).schedule
    tx = make(list(weights.values()))
    for step in range(3):
        for key, grad in matrices(step + 1).items():
            weights[key].grad = torch.from_numpy(grad)
        torch.nn.utils.clip_grad_norm_(weights.values(), optim.clip_norm)
        for group in tx.param_groups:
            group["lr"] = float(rate(step + 1))
        tx.step()
    return {key: value.detach().numpy() for key, value in weights.items()}


def same(optim: OptimConfig, make: Any, error: float = 1e-5) -> None:
    mine, right = ours(optim), theirs(optim, make)
    for key, value in right.items():
        np.testing.assert_allclose(mine[key], value, rtol=error, atol=error / 10)


def test_adamw_is_pytorchs():
    same(
        OPTIM,
        lambda w: torch.optim.AdamW(w, lr=0.02, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
    )


def test_sgd_with_momentum_is_pytorchs():
    optim = dataclasses.replace(OPTIM, name="sgd", weight_decay=0.0)  # its decay is not decoupled
    same(optim, lambda w: torch.optim.SGD(w, lr=0.02, momentum=0.9))


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adafactor_is_pytorchs(decay):
    optim = dataclasses.replace(OPTIM, name="adafactor", weight_decay=decay)
    # PyTorch also caps the rate at 1 / sqrt(t), which 0.02 stays below.
    same(optim, lambda w: torch.optim.Adafactor(w, lr=0.02, weight_decay=decay))
