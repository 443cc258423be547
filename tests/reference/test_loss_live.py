"""The loss against PyTorch's, run side by side; needs torch."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch

from jaxgpt.training.loss import next_token_sums

B, T, D, V = 3, 10, 8, 24
IGNORED = -100


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("chunk", [0, 12])
def test_loss_and_gradients_equal_those_of_pytorch_with_label_smoothing(smoothing, chunk):
    rng = np.random.default_rng(0)
    hidden, head = (rng.normal(size=size).astype(np.float32) for size in ((B, T, D), (V, D)))
    targets = rng.integers(0, V, (B, T)).astype(np.int32)
    targets[0, :4], targets[2] = IGNORED, IGNORED

    def loss(hidden, head):
        sums = next_token_sums(
            hidden, head, targets, np.float32(targets != IGNORED),
            label_smoothing=smoothing, chunk=chunk,
        )  # fmt: skip
        return sums.total / sums.weight

    value, grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(hidden, head)
    leaves = [torch.tensor(array, requires_grad=True) for array in (hidden, head)]
    right = torch.nn.functional.cross_entropy(
        (leaves[0] @ leaves[1].T).reshape(-1, V),
        torch.tensor(targets.ravel(), dtype=torch.long),
        ignore_index=IGNORED,
        label_smoothing=smoothing,
    )
    right.backward()
    assert float(value) == pytest.approx(right.item(), rel=1e-6)
    for mine, leaf in zip(grads, leaves, strict=True):
        np.testing.assert_allclose(mine, leaf.grad, rtol=1e-5, atol=1e-6)
