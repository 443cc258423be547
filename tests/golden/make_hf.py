"""Write the golden files of test_gpt and test_positions: needs torch and transformers.

    .venv-reference/bin/python tests/golden/make_hf.py

`FAMILY.safetensors` holds the weights of a tiny random model (names as in transformers), token ids,
and the float32 logits, loss and gradient norm that transformers computes. `rope.json` holds scaled
RoPE frequencies.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

HERE = Path(__file__).parent
SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
SCALED = {"factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0} | SCALED
YARN = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0} | SCALED


def configs() -> dict[str, transformers.PreTrainedConfig]:
    """Return the four tiny models; every option that jaxgpt maps is set and matters."""
    return {
        "gpt2": transformers.GPT2Config(
            vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4, n_inner=48,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
        ),
        "llama": transformers.LlamaConfig(
            **SIZES, rms_norm_eps=1e-5, tie_word_embeddings=False,
            rope_parameters=LLAMA3 | {"rope_theta": 500_000.0},
        ),
        "qwen3": transformers.Qwen3Config(
            **SIZES, head_dim=16, rms_norm_eps=1e-6, tie_word_embeddings=False,
            rope_parameters=YARN | {"rope_theta": 10_000.0},
        ),
        "gemma2": transformers.Gemma2Config(
            **SIZES, head_dim=16, query_pre_attn_scalar=16, rms_norm_eps=1e-6,
            layer_types=["full_attention"] * 2, sliding_window=64,
            attn_logit_softcapping=5.0, final_logit_softcapping=3.0,
            pad_token_id=None,  # or the embedding of id 0 would get no gradient from the input
        ),
    }  # fmt: skip


def record(family: str, seed: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return (weights, ids, logits, loss, gradient norm) in one dict, and the gradients by name."""
    rng = torch.Generator().manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        configs()[family], attn_implementation="eager", dtype=torch.float32
    )
    model.train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=rng)
            # All parameters differ from their usual initial values, or a swap would not be seen.
            usual = 1.0 if parameter.ndim == 1 and "bias" not in name else 0.0
            usual = 0.0 if family == "gemma2" else usual
            parameter.copy_(usual + 0.2 * noise)
    ids = torch.randint(0, 64, (2, 24), generator=rng)
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    weights = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    grads = {name: p.grad.numpy() for name, p in model.named_parameters()}
    norm = math.sqrt(sum(float(np.square(g, dtype=np.float64).sum()) for g in grads.values()))
    return weights | {
        "ids": ids.numpy().astype(np.int32),
        "logits": out.logits.detach().numpy(),
        "loss": np.float32(out.loss.item()).reshape(1),
        "grad_norm": np.float32(norm).reshape(1),
    }, grads


def rope(kind: str, case: dict[str, float | int]) -> tuple[list[float], float]:
    """Return the scaled frequencies and the attention factor of transformers."""
    low, high = ("low_freq_factor", "high_freq_factor") if kind == "llama3" else (
        "beta_slow", "beta_fast"
    )  # fmt: skip
    config = transformers.LlamaConfig(
        hidden_size=case["head_dim"], num_attention_heads=1, num_key_value_heads=1,
        max_position_embeddings=case["seq_len"],
        rope_parameters={
            "rope_type": kind, "rope_theta": case["base"], "factor": case["factor"],
            "original_max_position_embeddings": case["original_len"],
            low: case["low"], high: case["high"],
        },
    )  # fmt: skip
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    return [float(f) for f in frequencies], float(factor)


ROPE_CASES = [
    ("llama3", dict(head_dim=128, base=500_000.0, factor=8.0, original_len=8192, low=1.0, high=4.0,
                    seq_len=65536)),
    ("llama3", dict(head_dim=64, base=500_000.0, factor=32.0, original_len=8192, low=1.0, high=4.0,
                    seq_len=131072)),
    ("yarn", dict(head_dim=128, base=10_000.0, factor=16.0, original_len=4096, low=1.0, high=32.0,
                  seq_len=65536)),
    ("yarn", dict(head_dim=64, base=1_000_000.0, factor=4.0, original_len=32768, low=1.0, high=32.0,
                  seq_len=131072)),
]  # fmt: skip


def main() -> None:
    for family in configs():
        arrays, _ = record(family, seed=0)
        save_file(arrays, HERE / f"{family}.safetensors")
    cases = []
    for kind, case in ROPE_CASES:
        frequencies, factor = rope(kind, case)
        cases.append({"kind": kind, **case, "frequencies": frequencies, "attention_factor": factor})
    (HERE / "rope.json").write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
    main()
