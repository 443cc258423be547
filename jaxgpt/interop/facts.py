"""Facts about transformers' families: their fields, the defaults of these, and what words mean."""

from __future__ import annotations

from typing import Any

from jaxgpt.interop import rope

FAMILIES = (
    "gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "mixtral", "qwen3_moe"
)  # fmt: skip
GEMMA = ("gemma2", "gemma3")
ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
# The fields of each family and what transformers 5 takes where they are absent.
_ROTARY: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": None, "hidden_act": "silu",
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "initializer_range": 0.02,
    "tie_word_embeddings": False, "rope_theta": 10_000.0, "rope_scaling": None,
    "rope_parameters": None, "attention_dropout": 0.0,
}  # fmt: skip
_QWEN = _ROTARY | {
    "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32,
    "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096,
    "max_window_layers": 28, "layer_types": None,
}  # fmt: skip
_GEMMA = {key: value for key, value in _ROTARY.items() if key != "hidden_act"} | {
    "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192,
    "tie_word_embeddings": True, "attention_bias": False, "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "layer_types": None, "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0, "use_bidirectional_attention": None,
}  # fmt: skip
_ROUTED = {"num_experts_per_tok": 2, "num_local_experts": 8}
DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
        "n_inner": None, "activation_function": "gelu_new", "resid_pdrop": 0.1, "embd_pdrop": 0.1,
        "attn_pdrop": 0.1, "layer_norm_epsilon": 1e-5, "initializer_range": 0.02,
        "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False, "tie_word_embeddings": True,
    },
    "llama": _ROTARY | {
        "intermediate_size": 11008, "num_key_value_heads": None, "max_position_embeddings": 2048,
        "attention_bias": False, "mlp_bias": False,
    },
    "mistral": _ROTARY | {"sliding_window": 4096},
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128, "attention_bias": False},
    "gemma2": _GEMMA,
    "gemma3": _GEMMA | {
        "vocab_size": 262208, "max_position_embeddings": 131072, "final_logit_softcapping": None,
        "attn_logit_softcapping": None, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0,
        "sliding_window_pattern": 6,
    },
    "mixtral": _ROTARY | _ROUTED | {
        "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "sliding_window": None,
    },
    "qwen3_moe": _QWEN | {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
        "num_key_value_heads": 4, "attention_bias": False, "decoder_sparse_step": 1,
        "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128,
        "num_local_experts": None, "norm_topk_prob": False, "mlp_only_layers": None,
        "max_window_layers": 0,
    },
}  # fmt: skip
# Other names of these fields that transformers takes as well.
ALIASES: dict[str, dict[str, str]] = {
    "gpt2": {
        "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    },
    "mixtral": {"num_experts": "num_local_experts"},
    "qwen3_moe": {"num_local_experts": "num_experts"},  # the name of version 5, and that of 4
}  # fmt: skip
# Fields that change nothing a trained model computes, or nothing at all.
INERT = {
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "_name_or_path", "_commit_hash",
    "_sliding_window_pattern", "partial_rotary_factor", "pretraining_tp", "gradient_checkpointing",
    "original_max_position_embeddings", "is_causal",  # looked at where they count
    "cache_implementation", "n_ctx", "task_specific_params", "output_router_logits",
    "router_aux_loss_coef", "router_jitter_noise", "reorder_and_upcast_attn", "is_decoder",
    "is_encoder_decoder", "output_attentions", "output_hidden_states", "return_dict", "num_labels",
    "id2label", "label2id", "problem_type", "_attn_implementation", "_attn_implementation_autoset",
}  # fmt: skip
SAID_ELSEWHERE = ("summary_", "finetuning_task", "chunk_size_feed_forward", "unsloth_")
TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast", "gelu_accurate")
PLAIN_MLP = {name: "gelu_tanh" for name in TANH} | {
    "gelu": "gelu", "gelu_python": "gelu", "relu": "relu", "relu2": "relu2"
}  # fmt: skip
GATED_MLP = {"silu": "swiglu", "swish": "swiglu"} | {name: "geglu" for name in TANH}
SLIDING, FULL = rope.LOCAL, rope.GLOBAL


def type_name(family: str) -> str:
    """Return transformers' model_type of a family."""
    return "gemma3_text" if family == "gemma3" else family
