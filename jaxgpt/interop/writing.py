"""From `ModelConfig` to the fields of a config.json: what the family cannot say is left out.

The caller reads the result back and compares.
"""

from __future__ import annotations

from typing import Any

from jaxgpt.config import ModelConfig
from jaxgpt.interop import rope
from jaxgpt.interop.facts import ARCHITECTURES, DEFAULTS, FULL, GEMMA, SLIDING, type_name
from jaxgpt.model.canonical import canonical


def write(family: str, cfg: ModelConfig) -> dict[str, Any]:
    """Return the fields that describe `cfg`, or the nearest that the family has."""
    cfg = canonical(cfg)
    fields = _write_gpt2(cfg) if family == "gpt2" else _write_rotary(family, cfg)
    written = {key: value for key, value in fields.items() if key in DEFAULTS[family]}
    return {
        "architectures": [ARCHITECTURES[family]],
        "model_type": type_name(family),
        "vocab_size": cfg.vocab_size,
        "tie_word_embeddings": cfg.tie_embeddings,
        "initializer_range": float(cfg.init_std),
        **written,
    }


def _write_gpt2(cfg: ModelConfig) -> dict[str, Any]:
    words = {"gelu": "gelu", "relu": "relu", "relu2": "relu2"}
    return {
        "n_positions": cfg.seq_len,
        "n_embd": cfg.embed_dim,
        "n_layer": cfg.num_layers,
        "n_head": cfg.num_heads,
        "n_inner": cfg.mlp_width,
        "activation_function": words.get(cfg.mlp, "gelu_new"),
        "layer_norm_epsilon": cfg.norm_eps,
        "scale_attn_weights": cfg.attn_scale != 1.0,
        "resid_pdrop": cfg.dropout,
        "embd_pdrop": cfg.dropout,
        "attn_pdrop": cfg.dropout,
    }


def _write_rotary(family: str, cfg: ModelConfig) -> dict[str, Any]:
    act = "gelu_pytorch_tanh" if cfg.mlp == "geglu" else "silu"
    experts = family == "qwen3_moe"
    return {
        "hidden_size": cfg.embed_dim,
        "intermediate_size": cfg.mlp_width,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_width,
        "max_position_embeddings": cfg.seq_len,
        "rms_norm_eps": cfg.norm_eps,
        "hidden_act": act,
        "hidden_activation": act,
        "attention_bias": cfg.attn_bias and cfg.out_bias,
        "mlp_bias": cfg.mlp_bias,
        "attention_dropout": 0.0,
        **_write_window(family, cfg),
        **rope.write(cfg, by_layer_type=family == "gemma3"),
        # transformers 5 takes a whole number alone.
        "query_pre_attn_scalar": max(1, round((cfg.attn_scale or cfg.head_width**-0.5) ** -2)),
        "attn_logit_softcapping": (family == "gemma2" and cfg.attn_softcap) or None,
        "final_logit_softcapping": cfg.logit_softcap or None,
        "use_bidirectional_attention": False,
        "num_local_experts": max(1, cfg.num_experts),
        "num_experts": max(1, cfg.num_experts),
        "num_experts_per_tok": min(cfg.experts_per_token, max(1, cfg.num_experts)),
        "moe_intermediate_size": cfg.expert_width,
        "norm_topk_prob": cfg.router_norm,
        **({"decoder_sparse_step": 1, "mlp_only_layers": []} if experts else {}),
    }


def _write_window(family: str, cfg: ModelConfig) -> dict[str, Any]:
    types = [SLIDING if cfg.window(layer) else FULL for layer in range(cfg.num_layers)]
    fields = {
        "sliding_window": cfg.sliding_window or None,
        "use_sliding_window": cfg.sliding_window > 0,
        "layer_types": types,
        # Layers without a window come first where only this number is known (transformers 4).
        "max_window_layers": 0 if cfg.sliding_window else cfg.num_layers,
        # Greater than the number of layers: none is without a window.
        "sliding_window_pattern": cfg.global_every or cfg.num_layers + 1,
    }
    if not cfg.sliding_window:
        fields["sliding_window_pattern"] = 1
        if family in GEMMA:  # transformers makes the mask of a window that no layer uses
            fields["sliding_window"] = cfg.seq_len
    if family == "qwen3_moe":
        del fields["max_window_layers"]
    return fields
