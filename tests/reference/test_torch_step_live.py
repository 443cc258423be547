"""The PyTorch step that ours is timed against: the same model, the same loss, a real update."""

from __future__ import annotations

import json

import jax
import numpy as np
import torch

from jaxgpt.bench import shapes, torch_step
from jaxgpt.bench.step import random_batch
from jaxgpt.model import gpt
from jaxgpt.model import params as parameters
from jaxgpt.training import step

LAYERS, WIDTH, HEADS, CONTEXT, VOCAB, ROWS = 2, 32, 4, 16, 64, 3
WORDS = [
    f"--layers={LAYERS}", f"--width={WIDTH}", f"--heads={HEADS}", f"--context={CONTEXT}",
    f"--vocab={VOCAB}", f"--rows={ROWS}", "--device=cpu", "--eager",
]  # fmt: skip
CONFIG = shapes.load(
    "gpt2",
    "f32",
    [
        f"model.num_layers={LAYERS}", f"model.embed_dim={WIDTH}", f"model.num_heads={HEADS}",
        f"model.seq_len={CONTEXT}", f"model.vocab_size={VOCAB}", f"train.global_batch={ROWS}",
    ],
)  # fmt: skip


def weights_of(params: parameters.Params) -> dict:
    """Return our weights as `torch_step` has them."""

    def flat(*arrays: jax.Array) -> torch.Tensor:
        """[D, N, H] and [D, F] as [out, in]."""
        return torch.tensor(np.concatenate([np.asarray(a).reshape(WIDTH, -1).T for a in arrays]))

    blocks = [
        {
            "norm1": torch.tensor(np.asarray(p.attn_norm)),
            "norm2": torch.tensor(np.asarray(p.mlp_norm)),
            "qkv": flat(p.wq, p.wk, p.wv),
            "out": torch.tensor(np.asarray(p.wo).reshape(-1, WIDTH).T.copy()),
            "up": flat(p.w_up),
            "down": torch.tensor(np.asarray(p.w_down).T.copy()),
        }
        for p in params.layers
    ]
    return {
        "tokens": torch.tensor(np.asarray(params.embed)),
        "positions": torch.tensor(np.asarray(params.pos_embed)),
        "norm": torch.tensor(np.asarray(params.final_norm)),
        "blocks": blocks,
    }


def test_the_model_in_pytorch_has_the_loss_of_ours():
    params = gpt.init(CONFIG.model, jax.random.key(0))
    params = jax.tree.map(lambda x: 3 * x, params)  # away from the uniform loss, log V
    batch = random_batch(CONFIG)
    _, sums = step.gradients(CONFIG, params, batch, 0)
    ids, targets = (torch.tensor(np.asarray(x[0], np.int64)) for x in (batch.tokens, batch.targets))
    theirs = torch_step.loss_of(weights_of(params), ids, targets, HEADS)
    ours = float(sums["total"]) / float(sums["weight"])
    assert abs(ours - np.log(VOCAB)) > 0.01
    np.testing.assert_allclose(ours, float(theirs), rtol=1e-5)


def test_the_figures_are_of_a_model_of_the_same_size_that_learns(capsys):
    assert torch_step.main([*WORDS, "--steps=20", "--warm-up=2", "--dtype=f32"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == parameters.count(parameters.specs(CONFIG.model))
    assert found["tokens_per_step"] == ROWS * CONTEXT
    assert found["repeats"] == 20
    assert found["loss"] < np.log(VOCAB) - 0.1  # one batch, again and again
    assert found["tokens_per_sec_median"] <= found["tokens_per_sec_best"]


def test_a_machine_without_a_gpu_has_no_figure(capsys):
    words = [word for word in WORDS if word != "--device=cpu"]
    assert torch_step.main(words) == 0
    assert "finds no GPU" in json.loads(capsys.readouterr().out)["missing"]
