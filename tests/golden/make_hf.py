"""Write the golden files of test_families and test_positions: needs torch and transformers.

    PYTHONPATH=tests .venv-reference/bin/python tests/golden/make_hf.py [FAMILY ...]

`hf/FAMILY/` is a tiny random model as transformers saves it, and `expected.safetensors` beside it
what transformers computes with it in float32:

    ids [2, T], logits [2, T, V], loss, grad_norm    next-token loss, labels = ids
    grad.NAME [2]                 of the gradient of each saved tensor: norm, product with cos(0..n)
    packed_ids, segments [1, T]   documents in one row, 0: padding
    packed_logits [1, T, V]       each document computed alone
    greedy [2, P + 20], prompts [2]    prompts of these lengths and what follows; padded with -1

`rope.json` holds scaled RoPE frequencies.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from golden.digests import digest
from safetensors.numpy import load_file, save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

HERE = Path(__file__).parent
T, V, NEW = 32, 61, 20
DOCUMENTS, PROMPTS = (6, 15, 9), (3, 9)
# D = 24, N H = 32, K H = 16, F = 40 and V all differ, so that a transposed matrix does not fit.
SIZES = dict(
    vocab_size=V, hidden_size=24, intermediate_size=40, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
    # or the embedding of the pad id would get no gradient, and generation would stop
    pad_token_id=None, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
WINDOW = 7  # shorter than the rows and the longer ones of documents and prompts
EXPERTS = dict(intermediate_size=20, num_experts_per_tok=2)
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
SCALED = {"factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0} | SCALED
# With these, two of the four frequencies of a head lie between the ends of the ramp.
YARN = {"rope_type": "yarn", "beta_fast": 0.7, "beta_slow": 0.25, "rope_theta": 100.0} | SCALED
LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0}
SHARDED, BFLOAT16 = "llama", "mistral"  # in several files; stored in bfloat16


def configs() -> dict[str, transformers.PreTrainedConfig]:
    """Return the tiny models; every option that jaxgpt maps is set somewhere and matters."""
    sliding, full = "sliding_attention", "full_attention"
    return {
        "gpt2": transformers.GPT2Config(
            vocab_size=V, n_positions=T, n_embd=24, n_layer=2, n_head=4, n_inner=40,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
        ),
        "llama": transformers.LlamaConfig(
            **SIZES | dict(num_key_value_heads=4), rms_norm_eps=1e-5, tie_word_embeddings=False,
            rope_parameters=PLAIN,
        ),
        "llama3": transformers.LlamaConfig(
            **SIZES, rms_norm_eps=1e-5, tie_word_embeddings=True,
            rope_parameters=LLAMA3 | {"rope_theta": 500_000.0},
        ),
        "mistral": transformers.MistralConfig(
            **SIZES, rms_norm_eps=1e-5, tie_word_embeddings=False, sliding_window=WINDOW,
            rope_parameters=PLAIN | {"rope_theta": 1_000.0},
        ),
        "qwen2": transformers.Qwen2Config(
            **{name: size for name, size in SIZES.items() if name != "head_dim"},
            rms_norm_eps=1e-6, tie_word_embeddings=True,
            rope_parameters=PLAIN | {"rope_theta": 1_000_000.0},
        ),
        "qwen3": transformers.Qwen3Config(
            **SIZES, rms_norm_eps=1e-6, tie_word_embeddings=False,
            rope_parameters=YARN,
        ),
        "gemma2": transformers.Gemma2Config(
            **SIZES | dict(num_hidden_layers=3), rms_norm_eps=1e-6, query_pre_attn_scalar=20,
            layer_types=[sliding, full, sliding], sliding_window=WINDOW,
            attn_logit_softcapping=5.0, final_logit_softcapping=3.0, rope_parameters=PLAIN,
        ),
        "gemma3": transformers.Gemma3TextConfig(
            **SIZES | dict(num_hidden_layers=4), rms_norm_eps=1e-6, query_pre_attn_scalar=20,
            layer_types=[sliding, sliding, full, sliding], sliding_window=WINDOW,
            rope_parameters={full: LINEAR, sliding: PLAIN | {"rope_theta": 100.0}},
        ),
        "mixtral": transformers.MixtralConfig(
            **SIZES | EXPERTS, num_local_experts=4, rms_norm_eps=1e-5, tie_word_embeddings=False,
            rope_parameters=PLAIN | {"rope_theta": 1_000_000.0},
        ),
        "qwen3_moe": qwen3_moe(norm_topk_prob=False),
    }  # fmt: skip


def qwen3_moe(norm_topk_prob: bool) -> transformers.PreTrainedConfig:
    return transformers.Qwen3MoeConfig(
        **SIZES | EXPERTS | dict(intermediate_size=44), moe_intermediate_size=20, num_experts=5,
        norm_topk_prob=norm_topk_prob, rms_norm_eps=1e-6, tie_word_embeddings=False,
        rope_parameters=PLAIN,
    )  # fmt: skip


def make(
    config: transformers.PreTrainedConfig, seed: int, weights: Path, gradients: Path,
    bfloat16: bool = False, sharded: bool = False,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Save a random model and, as if they were weights, its gradients; return what is expected."""
    rng = torch.Generator().manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    gemma = "gemma" in config.model_type
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=rng)
            # All parameters differ from their usual initial values, or a swap would not be seen.
            usual = 1.0 if parameter.ndim == 1 and "bias" not in name and not gemma else 0.0
            spread = 0.3 if parameter.ndim > 1 else 0.2
            # Scaled up by the model, and a larger tied embedding only ever predicts itself.
            spread = 0.1 if gemma and "embed" in name else spread
            parameter.copy_(usual + spread * noise)
            if bfloat16:
                parameter.copy_(parameter.bfloat16())
    ids = torch.randint(0, V, (2, T), generator=rng)
    model.train()  # without dropout this changes nothing but what some kernels do
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    grads = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()  # or they would change dtype with the model
    model.eval()
    expected = {"ids": ids.numpy().astype(np.int32), "logits": out.logits.detach().numpy()}
    expected |= {"loss": np.float32([out.loss.item()])} | _packed(model, rng) | _greedy(model, rng)

    model.to(torch.bfloat16 if bfloat16 else torch.float32)
    model.save_pretrained(weights, max_shard_size="20KB" if sharded else "1GB")
    model.to(torch.float32)
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), grads, strict=True):
            parameter.copy_(gradient)
    model.save_pretrained(gradients)
    saved = load_file(gradients / "model.safetensors")
    digests = {f"grad.{name}": digest(saved[name]) for name in sorted(saved)}
    norm = math.sqrt(sum(float(square) for square, _ in np.square(list(digests.values()))))
    return expected | {"grad_norm": np.float32([norm])} | digests


@torch.no_grad()
def _packed(model: torch.nn.Module, rng: torch.Generator) -> dict[str, np.ndarray]:
    documents = [torch.randint(0, V, (1, length), generator=rng) for length in DOCUMENTS]
    logits = [model(input_ids=ids).logits.numpy() for ids in documents]
    segments = np.repeat(np.arange(1, len(DOCUMENTS) + 1, dtype=np.int32), DOCUMENTS)
    rest = ((0, 0), (0, T - sum(DOCUMENTS)))
    return {
        "packed_ids": np.pad(np.concatenate(documents, axis=1).astype(np.int32), rest),
        "segments": np.pad(segments[None], rest),
        "packed_logits": np.pad(np.concatenate(logits, axis=1), (*rest, (0, 0))),
    }


@torch.no_grad()
def _greedy(model: torch.nn.Module, rng: torch.Generator) -> dict[str, np.ndarray]:
    rows = []
    for length in PROMPTS:
        prompt = torch.randint(0, V, (1, length), generator=rng)
        prompt[0, 0] = 0  # stands for the id that opens every document
        mask = torch.ones_like(prompt)
        one, other = (
            model.generate(
                prompt, attention_mask=mask, do_sample=False, max_new_tokens=NEW, use_cache=cache
            )[0].numpy()
            for cache in (True, False)
        )
        assert (one == other).all() and len(one) == length + NEW
        rows.append(np.pad(one, (0, max(PROMPTS) - length), constant_values=-1))
    return {"greedy": np.int32(rows), "prompts": np.int32(PROMPTS)}


def write(family: str) -> None:
    """Write the golden directory of a family: of the first seed whose checks see enough."""
    folder = HERE / "hf" / family
    for seed in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        with tempfile.TemporaryDirectory() as gradients:
            expected = make(
                configs()[family], seed, folder, Path(gradients), family == BFLOAT16,
                family == SHARDED,
            )  # fmt: skip
        rows = zip(expected["greedy"], PROMPTS, strict=True)
        distinct = [len(set(row[length : length + NEW])) for row, length in rows]
        norms = [array[0] for name, array in expected.items() if name.startswith("grad.")]
        # No text that goes round in a small circle, and no weight that hardly matters.
        if min(distinct) >= 8 and min(norms) > 2e-3 * expected["grad_norm"][0]:
            break
    else:
        raise AssertionError(f"{family}: no seed will do")
    (folder / "generation_config.json").unlink()
    save_file(expected | {"seed": np.int32([seed])}, folder / "expected.safetensors")
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{family}: seed {seed}, {size / 1e3:.0f} kB, loss {expected['loss'][0]:.4f}")


def rope(kind: str, case: dict[str, float | int]) -> tuple[list[float], float]:
    """Return the scaled frequencies and the attention factor of transformers."""
    parameters = {"rope_type": kind, "rope_theta": case["base"], "factor": case["factor"]}
    if kind != "linear":
        names = {
            "llama3": ("low_freq_factor", "high_freq_factor"),
            "yarn": ("beta_slow", "beta_fast"),
        }
        low, high = names[kind]
        parameters |= {low: case["low"], high: case["high"]}
        parameters["original_max_position_embeddings"] = case["original_len"]
    config = transformers.LlamaConfig(
        hidden_size=case["head_dim"], num_attention_heads=1, num_key_value_heads=1,
        max_position_embeddings=case["seq_len"], rope_parameters=parameters,
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
    ("linear", dict(head_dim=256, base=1_000_000.0, factor=8.0, original_len=16384, low=1.0,
                    high=4.0, seq_len=131072)),
]  # fmt: skip


def main() -> None:
    for family in sys.argv[1:] or configs():
        write(family)
    cases = []
    for kind, case in ROPE_CASES:
        frequencies, factor = rope(kind, case)
        cases.append({"kind": kind, **case, "frequencies": frequencies, "attention_factor": factor})
    (HERE / "rope.json").write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
    main()
