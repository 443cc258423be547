"""From the fields of a config.json to those of `ModelConfig`, family by family."""

from __future__ import annotations

from typing import Any

from jaxgpt.config import ModelConfig
from jaxgpt.interop import rope
from jaxgpt.interop.facts import FULL, GATED_MLP, GEMMA, PLAIN_MLP, SLIDING
from jaxgpt.interop.fields import Fields


def read_gpt2(f: Fields) -> dict[str, Any]:
    width, heads = f.whole("n_embd"), f.whole("n_head")
    if width % heads:
        f.refuse("n_embd", width, f"must be a multiple of n_head = {heads}")
    f.only("scale_attn_by_inverse_layer_idx", False)
    f.only("add_cross_attention", False)
    dropout = {f.share(key) for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    return dict(
        num_layers=f.whole("n_layer"),
        embed_dim=width,
        num_heads=heads,
        mlp_dim=f.whole("n_inner", null=4 * width),
        vocab_size=f.whole("vocab_size"),
        seq_len=f.whole("n_positions"),
        norm_eps=f.number("layer_norm_epsilon"),
        mlp=f.choice("activation_function", PLAIN_MLP),
        attn_bias=True,
        out_bias=True,
        mlp_bias=True,
        attn_scale=0.0 if f.flag("scale_attn_weights") else 1.0,
        tie_embeddings=f.flag("tie_word_embeddings"),
        dropout=dropout.pop() if len(dropout) == 1 else 0.0,
        init_std=f.number("initializer_range"),
    )


def read_rotary(family: str, f: Fields) -> dict[str, Any]:
    width, heads = f.whole("hidden_size"), f.whole("num_attention_heads")
    layers, seq_len = f.whole("num_hidden_layers"), f.whole("max_position_embeddings")
    gemma = family in GEMMA
    if f.value("head_dim") is None and width % heads:
        f.refuse("hidden_size", width, f"must be a multiple of num_attention_heads = {heads}")
    values: dict[str, Any] = dict(
        num_layers=layers,
        embed_dim=width,
        num_heads=heads,
        num_kv_heads=f.whole("num_key_value_heads", null=heads),
        head_dim=f.whole("head_dim", null=max(1, width // heads)),
        mlp_dim=f.whole("intermediate_size"),
        vocab_size=f.whole("vocab_size"),
        seq_len=seq_len,
        positions="rope",
        norm="rmsnorm",
        norm_eps=f.number("rms_norm_eps"),
        mlp=f.choice("hidden_activation" if gemma else "hidden_act", GATED_MLP),
        qk_norm=family in ("qwen3", "qwen3_moe", "gemma3"),
        attn_bias=family == "qwen2" or f.flag("attention_bias"),
        out_bias=family != "qwen2" and f.flag("attention_bias"),
        mlp_bias=f.flag("mlp_bias"),
        tie_embeddings=f.flag("tie_word_embeddings"),
        init_std=f.number("initializer_range"),
    )
    f.share("attention_dropout")
    if "attention_bias" not in f.defaults and family != "qwen2":
        values |= dict(attn_bias=False, out_bias=False)
    if "mlp_bias" not in f.defaults:
        values["mlp_bias"] = False
    if gemma:
        values |= _read_gemma(family, f)
    if family in ("mixtral", "qwen3_moe"):
        values |= _read_experts(family, f)
    values |= rope.read(f, seq_len, by_layer_type=family == "gemma3")
    return values | _read_window(family, f, layers)


def _read_gemma(family: str, f: Fields) -> dict[str, Any]:
    f.only("use_bidirectional_attention", False)
    if family == "gemma3" and (cap := f.value("attn_logit_softcapping")) is not None:
        f.refuse("attn_logit_softcapping", cap, "must be null: transformers does not apply it")
        return {}
    scalar = f.number("query_pre_attn_scalar")
    capped = {
        key: 0.0 if f.value(field) is None else f.number(field)
        for key, field in (
            ("attn_softcap", "attn_logit_softcapping"),
            ("logit_softcap", "final_logit_softcapping"),
        )
    }
    return capped | dict(
        norm_placement="sandwich", norm_plus_one=True, embed_scale=True, attn_scale=scalar**-0.5
    )


def _read_experts(family: str, f: Fields) -> dict[str, Any]:
    if family == "mixtral":
        count, width, norm = f.whole("num_local_experts"), f.whole("intermediate_size"), True
    else:
        f.only("decoder_sparse_step", 1)
        f.only("mlp_only_layers", [])
        count, width = f.whole("num_experts"), f.whole("moe_intermediate_size")
        norm = f.flag("norm_topk_prob")
    return dict(
        num_experts=count,
        experts_per_token=f.whole("num_experts_per_tok"),
        expert_dim=width,
        router_norm=norm,
    )


def _read_window(family: str, f: Fields, layers: int) -> dict[str, Any]:
    """Return the sliding window and its pattern, or note that no pattern of ours is like it."""
    switched_off = "use_sliding_window" in f.defaults and not f.flag("use_sliding_window")
    window = 0
    if "sliding_window" in f.defaults and not switched_off:
        window = f.whole("sliding_window", null=0)
    given = f.config.get("layer_types")
    types = _usual_types(family, f, layers, window)
    if given is not None:
        listed = type(given) is list and len(given) == layers
        if not (listed and all(kind in (SLIDING, FULL) for kind in given)):
            f.refuse("layer_types", given, f"must name {SLIDING} or {FULL} for {layers} layers")
        elif "layer_types" not in f.defaults or not window and SLIDING in given:
            if given != types:
                f.refuse("layer_types", given, "not with the sliding_window of this family")
        else:
            types = given
    if SLIDING not in types:
        return {}
    if not window:
        f.refuse("sliding_window", None, f"layers of {SLIDING} need one")
    every = types.index(FULL) + 1 if FULL in types else 0
    model = ModelConfig(num_layers=layers, sliding_window=window, global_every=every)
    if any((kind == SLIDING) != (model.window(i) > 0) for i, kind in enumerate(types)):
        f.refuse("layer_types", types, "full attention must come in every n-th layer")
    return {"sliding_window": window, "global_every": every}


def _usual_types(family: str, f: Fields, layers: int, window: int) -> list[str]:
    """Return the type of each layer where the file does not list them."""
    layers = min(layers, 1 << 16)
    if family in GEMMA:
        every = 2 if family == "gemma2" else f.whole("sliding_window_pattern")
        return [SLIDING if (i + 1) % every else FULL for i in range(layers)]
    if not window:
        return [FULL] * layers
    first = f.whole("max_window_layers", lowest=0) if "max_window_layers" in f.defaults else 0
    if family == "qwen3_moe" and first:
        f.refuse("max_window_layers", first, "transformers gives every layer the window")
    return [SLIDING if i >= first else FULL for i in range(layers)]
