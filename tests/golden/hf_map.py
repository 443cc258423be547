"""Weights of four transformers families in jaxgpt's layout: the name table of the golden tests.

The mapping is linear except that Gemma stores norm scales minus one; `scale_offset` 0 maps
gradients.
"""

from __future__ import annotations

import numpy as np

from jaxgpt.config import ModelConfig
from jaxgpt.model.params import LayerParams, Params

SIZES = dict(num_layers=2, embed_dim=32, num_heads=4, mlp_dim=48, vocab_size=64, seq_len=64)
LLAMA_LIKE = SIZES | dict(norm="rmsnorm", positions="rope", num_kv_heads=2)
CONFIGS = {
    "gpt2": ModelConfig(
        **SIZES, mlp="gelu_tanh", norm_eps=1e-5, attn_bias=True, out_bias=True, mlp_bias=True
    ),
    "llama": ModelConfig(
        **LLAMA_LIKE, mlp="swiglu", norm_eps=1e-5, tie_embeddings=False, rope_base=500_000.0,
        rope_scaling="llama3", rope_factor=4.0, rope_original_len=16,
    ),
    "qwen3": ModelConfig(
        **LLAMA_LIKE, mlp="swiglu", norm_eps=1e-6, tie_embeddings=False, head_dim=16, qk_norm=True,
        rope_scaling="yarn", rope_factor=4.0, rope_original_len=16, rope_high_freq=32.0,
    ),
    "gemma2": ModelConfig(
        **LLAMA_LIKE, mlp="geglu", norm_eps=1e-6, head_dim=16, norm_placement="sandwich",
        embed_scale=True, attn_softcap=5.0, logit_softcap=3.0,
    ),
}  # fmt: skip
NORMS = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}
GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def to_params(
    family: str, weights: dict[str, np.ndarray], scale_offset: float | None = None
) -> Params:
    """Return the weights of a transformers state dict as unrolled `Params` of numpy arrays."""
    cfg = CONFIGS[family]
    if family == "gpt2":
        return _gpt2(cfg, weights)
    offset = (family == "gemma2") * 1.0 if scale_offset is None else scale_offset
    return Params(
        embed=weights["model.embed_tokens.weight"],
        layers=tuple(_llama_layer(cfg, family, weights, i, offset) for i in range(cfg.num_layers)),
        final_norm=weights["model.norm.weight"] + offset,
        lm_head=None if cfg.tie_embeddings else weights["lm_head.weight"],
    )


def _llama_layer(
    cfg: ModelConfig, family: str, weights: dict[str, np.ndarray], layer: int, offset: float
) -> LayerParams:
    D, N, K, H = cfg.embed_dim, cfg.num_heads, cfg.kv_heads, cfg.head_width
    norms = GEMMA_NORMS if family == "gemma2" else NORMS

    def weight(name: str) -> np.ndarray | None:
        return weights.get(f"model.layers.{layer}.{name}.weight")

    return LayerParams(
        wq=weight("self_attn.q_proj").T.reshape(D, N, H),
        wk=weight("self_attn.k_proj").T.reshape(D, K, H),
        wv=weight("self_attn.v_proj").T.reshape(D, K, H),
        wo=weight("self_attn.o_proj").T.reshape(N, H, D),
        w_gate=weight("mlp.gate_proj").T,
        w_up=weight("mlp.up_proj").T,
        w_down=weight("mlp.down_proj").T,
        **{ours: weight(hf) + offset for ours, hf in norms.items() if weight(hf) is not None},
    )


def _gpt2(cfg: ModelConfig, weights: dict[str, np.ndarray]) -> Params:
    D, N, H = cfg.embed_dim, cfg.num_heads, cfg.head_width

    def layer(i: int) -> LayerParams:
        w = {name: weights[f"transformer.h.{i}.{name}"] for name in GPT2_LAYER}
        wq, wk, wv = (m.reshape(D, N, H) for m in np.split(w["attn.c_attn.weight"], 3, axis=1))
        bq, bk, bv = (b.reshape(N, H) for b in np.split(w["attn.c_attn.bias"], 3))
        return LayerParams(
            wq=wq, wk=wk, wv=wv, bq=bq, bk=bk, bv=bv,
            wo=w["attn.c_proj.weight"].reshape(N, H, D), bo=w["attn.c_proj.bias"],
            w_up=w["mlp.c_fc.weight"], b_up=w["mlp.c_fc.bias"],
            w_down=w["mlp.c_proj.weight"], b_down=w["mlp.c_proj.bias"],
            attn_norm=w["ln_1.weight"], attn_norm_bias=w["ln_1.bias"],
            mlp_norm=w["ln_2.weight"], mlp_norm_bias=w["ln_2.bias"],
        )  # fmt: skip

    return Params(
        embed=weights["transformer.wte.weight"],
        pos_embed=weights["transformer.wpe.weight"],
        layers=tuple(layer(i) for i in range(cfg.num_layers)),
        final_norm=weights["transformer.ln_f.weight"],
        final_norm_bias=weights["transformer.ln_f.bias"],
    )


GPT2_LAYER = [
    f"{module}.{kind}"
    for module in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    for kind in ("weight", "bias")
]
