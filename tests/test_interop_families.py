"""config.json of transformers: what it says, what is refused, and the way back."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import tiny

from jaxgpt.config import ModelConfig
from jaxgpt.errors import ConfigError, DataError
from jaxgpt.interop.facts import DEFAULTS
from jaxgpt.interop.families import FAMILIES, family_of, read_config, write_config
from jaxgpt.model.canonical import canonical

# As published, in the spelling of transformers 4; only what matters here.
PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"],
        "activation_function": "gelu_new",
        "attn_pdrop": 0.1, "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256,
        "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "n_ctx": 1024, "n_embd": 768,
        "n_head": 12, "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1,
        "summary_type": "cls_index", "vocab_size": 50257,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    },
    "llama": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "bos_token_id": 128000, "eos_token_id": 128001,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 128256,
    },
    "mistral": {
        "model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
        "vocab_size": 32000, "torch_dtype": "bfloat16",
    },
    "qwen2": {
        "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864,
        "max_position_embeddings": 32768, "max_window_layers": 24, "num_attention_heads": 14,
        "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
        "use_mrope": False, "use_sliding_window": False, "vocab_size": 151936,
    },
    "qwen3": {
        "model_type": "qwen3", "attention_bias": False, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960,
        "max_window_layers": 28, "num_attention_heads": 16, "num_hidden_layers": 28,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
        "use_sliding_window": False, "vocab_size": 151936,
    },
    "gemma2": {
        "model_type": "gemma2", "attention_bias": False, "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid", "final_logit_softcapping": 30.0, "head_dim": 128,
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 4608, "intermediate_size": 36864, "max_position_embeddings": 8192,
        "num_attention_heads": 32, "num_hidden_layers": 46, "num_key_value_heads": 16,
        "query_pre_attn_scalar": 144, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
        "sliding_window": 4096, "vocab_size": 256000,
    },
    "gemma3": {
        "model_type": "gemma3_text", "attention_bias": False, "attn_logit_softcapping": None,
        "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 3840, "intermediate_size": 15360, "max_position_embeddings": 131072,
        "num_attention_heads": 16, "num_hidden_layers": 48, "num_key_value_heads": 8,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "rope_theta": 1000000,
        "sliding_window": 1024, "sliding_window_pattern": 6, "vocab_size": 262208,
    },
    "mixtral": {
        "model_type": "mixtral", "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "output_router_logits": False, "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
        "tie_word_embeddings": False, "vocab_size": 32000,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144,
        "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
        "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
        "use_sliding_window": False, "vocab_size": 151936,
    },
}  # fmt: skip
ROPE = dict(positions="rope", norm="rmsnorm", mlp="swiglu")
GEMMA = ROPE | dict(
    mlp="geglu", norm_placement="sandwich", norm_plus_one=True, embed_scale=True, norm_eps=1e-6,
)  # fmt: skip
SAID = {
    "gpt2": ModelConfig(
        num_layers=12, embed_dim=768, num_heads=12, num_kv_heads=12, head_dim=64, mlp_dim=3072,
        vocab_size=50257, seq_len=1024, mlp="gelu_tanh", norm_eps=1e-5, attn_bias=True,
        out_bias=True, mlp_bias=True, dropout=0.1,
    ),
    "llama": ModelConfig(
        **ROPE, num_layers=32, embed_dim=4096, num_heads=32, num_kv_heads=8, head_dim=128,
        mlp_dim=14336, vocab_size=128256, seq_len=131072, norm_eps=1e-5, rope_base=500_000.0,
        rope_scaling="llama3", rope_factor=8.0, rope_low_freq=1.0, rope_high_freq=4.0,
        rope_original_len=8192, tie_embeddings=False,
    ),
    "mistral": ModelConfig(
        **ROPE, num_layers=32, embed_dim=4096, num_heads=32, num_kv_heads=8, head_dim=128,
        mlp_dim=14336, vocab_size=32000, seq_len=32768, norm_eps=1e-5, sliding_window=4096,
        tie_embeddings=False,
    ),
    "qwen2": ModelConfig(
        **ROPE, num_layers=24, embed_dim=896, num_heads=14, num_kv_heads=2, head_dim=64,
        mlp_dim=4864, vocab_size=151936, seq_len=32768, norm_eps=1e-6, rope_base=1e6,
        attn_bias=True,
    ),
    "qwen3": ModelConfig(
        **ROPE, num_layers=28, embed_dim=1024, num_heads=16, num_kv_heads=8, head_dim=128,
        mlp_dim=3072, vocab_size=151936, seq_len=40960, norm_eps=1e-6, rope_base=1e6, qk_norm=True,
    ),
    "gemma2": ModelConfig(
        **GEMMA, num_layers=46, embed_dim=4608, num_heads=32, num_kv_heads=16, head_dim=128,
        mlp_dim=36864, vocab_size=256000, seq_len=8192, attn_scale=1 / 12, attn_softcap=50.0,
        logit_softcap=30.0, sliding_window=4096, global_every=2,
    ),
    "gemma3": ModelConfig(
        **GEMMA, num_layers=48, embed_dim=3840, num_heads=16, num_kv_heads=8, head_dim=256,
        mlp_dim=15360, vocab_size=262208, seq_len=131072, qk_norm=True, sliding_window=1024,
        global_every=6, rope_base=1e6, rope_local_base=10_000.0, rope_scaling="linear",
        rope_factor=8.0,
    ),
    "mixtral": ModelConfig(
        **ROPE, num_layers=32, embed_dim=4096, num_heads=32, num_kv_heads=8, head_dim=128,
        mlp_dim=14336, expert_dim=14336, vocab_size=32000, seq_len=32768, norm_eps=1e-5,
        rope_base=1e6, tie_embeddings=False, num_experts=8, experts_per_token=2,
    ),
    "qwen3_moe": ModelConfig(
        **ROPE, num_layers=48, embed_dim=2048, num_heads=32, num_kv_heads=4, head_dim=128,
        mlp_dim=768, expert_dim=768, vocab_size=151936, seq_len=40960, norm_eps=1e-6, rope_base=1e6,
        qk_norm=True, tie_embeddings=False, num_experts=128, experts_per_token=8,
    ),
}  # fmt: skip


def read(family: str, **changes: Any) -> ModelConfig:
    return read_config(PUBLISHED[family] | changes, "config.json").model


def refused(family: str, **changes: Any) -> str:
    with pytest.raises(DataError) as error:
        read(family, **changes)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("config.json: ")
    return str(error.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_published_configurations_are_what_their_papers_say(family):
    assert read(family) == SAID[family]


def test_dtype_is_read_in_both_spellings():
    assert read_config(PUBLISHED["llama"], "").dtype == "bfloat16"
    assert read_config(PUBLISHED["gpt2"] | {"dtype": "torch.float16"}, "").dtype == "float16"
    assert read_config(PUBLISHED["gpt2"], "").dtype is None


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_reads_a_file_with_no_field_but_its_type_as_transformers_does(family):
    kind = PUBLISHED[family]["model_type"]
    model = read_config({"model_type": kind}, "").model
    heads = DEFAULTS[family].get("num_attention_heads", 12)
    assert model.num_heads == heads
    assert model.rope_base == {"gemma3": 1e6, "mixtral": 1e6}.get(family, 1e4)
    assert model.norm_eps == (1e-5 if family in ("gpt2", "mixtral") else 1e-6)
    assert model.tie_embeddings == (family in ("gpt2", "gemma2", "gemma3"))
    assert model.sliding_window == (4096 if family in ("mistral", "gemma2", "gemma3") else 0)


# Both spellings.


def test_rope_parameters_of_transformers_5_say_the_same_as_the_fields_of_4():
    new = {k: v for k, v in PUBLISHED["llama"].items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = PUBLISHED["llama"]["rope_scaling"] | {"rope_theta": 500000.0}
    assert read_config(new, "").model == SAID["llama"]


def test_rope_parameters_by_layer_type_say_the_same_as_the_fields_of_4():
    old = ("rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window_pattern")
    new = {k: v for k, v in PUBLISHED["gemma3"].items() if k not in old}
    new["layer_types"] = (["sliding_attention"] * 5 + ["full_attention"]) * 8
    new["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert read_config(new, "").model == SAID["gemma3"]


def test_number_of_experts_is_read_under_both_names_and_a_contradiction_is_refused():
    new = {k: v for k, v in PUBLISHED["qwen3_moe"].items() if k != "num_experts"}
    assert read_config(new | {"num_local_experts": 128}, "").model == SAID["qwen3_moe"]
    assert "num_local_experts = 64" in refused("qwen3_moe", num_local_experts=64)


@pytest.mark.parametrize(
    ("family", "alias", "field"),
    [
        ("gpt2", "num_attention_heads", "n_head"),
        ("gpt2", "hidden_size", "n_embd"),
        ("mixtral", "num_experts", "num_local_experts"),
    ],
)
def test_names_that_transformers_takes_besides_are_read_and_a_contradiction_is_refused(
    family, alias, field
):
    other = PUBLISHED[family][field] * 2
    source = read_config({k: v for k, v in PUBLISHED[family].items() if k != field} |
                         {alias: other}, "")  # fmt: skip
    assert source == read_config(PUBLISHED[family] | {field: other}, "")
    assert f"{alias} = {other}" in refused(family, **{alias: other})


def test_a_length_before_scaling_outside_of_the_rope_fields_must_be_the_one_inside():
    # transformers 5 takes the one outside, 4 the other: either would be another model for somebody.
    field = "original_max_position_embeddings"
    assert f"{field} = 4096: rope_scaling means 8192" in refused("llama", **{field: 4096})
    same = read_config(PUBLISHED["llama"] | {field: 8192}, "")
    assert same == read_config(PUBLISHED["llama"], "")
    assert read("mistral", **{field: 4096}) == read("mistral")  # nothing is scaled


def test_two_spellings_that_disagree_are_refused():
    new = {"rope_theta": 10_000.0, "rope_type": "default"}
    assert "rope_theta = 500000.0" in refused("llama", rope_parameters=new)
    new = PUBLISHED["llama"]["rope_scaling"] | {"factor": 4.0}
    assert "rope_scaling.factor = 8.0" in refused("llama", rope_parameters=new)


# Numbers that come from the file or from transformers' defaults.


def test_the_base_frequency_is_copied_and_defaults_to_10000():
    without = {k: v for k, v in PUBLISHED["mistral"].items() if k != "rope_theta"}
    assert read("mistral", rope_theta=500_000).rope_base == 500_000.0
    assert read_config(without, "").model.rope_base == 10_000.0


def test_the_epsilon_is_that_of_the_file():
    assert read("gpt2").norm_eps == 1e-5
    assert read("llama", rms_norm_eps=1e-6).norm_eps == 1e-6


@pytest.mark.parametrize(
    ("family", "field", "name", "mlp"),
    [
        ("gpt2", "activation_function", "gelu_new", "gelu_tanh"),
        ("gpt2", "activation_function", "gelu_pytorch_tanh", "gelu_tanh"),
        ("gpt2", "activation_function", "gelu", "gelu"),
        ("gpt2", "activation_function", "relu", "relu"),
        ("gpt2", "activation_function", "relu2", "relu2"),
        ("llama", "hidden_act", "silu", "swiglu"),
        ("llama", "hidden_act", "gelu_pytorch_tanh", "geglu"),
        ("gemma2", "hidden_activation", "silu", "swiglu"),
    ],
)
def test_the_name_of_the_activation_decides(family, field, name, mlp):
    assert read(family, **{field: name}).mlp == mlp


@pytest.mark.parametrize(
    ("family", "field", "name"),
    [
        ("gpt2", "activation_function", "quick_gelu"),
        ("gpt2", "activation_function", "silu"),
        ("llama", "hidden_act", "gelu"),  # the exact form is not that of geglu
        ("llama", "hidden_act", "mish"),
        ("llama", "hidden_act", None),
    ],
)
def test_an_activation_that_is_not_computed_is_refused_by_name(family, field, name):
    assert f"{field} = {json.dumps(name)}" in refused(family, **{field: name})


def test_unscaled_attention_of_gpt2_has_factor_one():
    assert read("gpt2", scale_attn_weights=False).attn_scale == 1.0


def test_a_query_scale_that_is_that_of_the_head_width_is_the_usual_one():
    assert read("gemma2", query_pre_attn_scalar=128).attn_scale == 0.0
    assert read("gemma2", query_pre_attn_scalar=100).attn_scale == 0.1


def test_yarn_is_read_with_the_defaults_of_transformers():
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    model = read("qwen3", rope_scaling=rope)
    assert (model.rope_scaling, model.rope_factor, model.rope_original_len) == ("yarn", 4.0, 32768)
    assert (model.rope_low_freq, model.rope_high_freq) == (1.0, 32.0)
    usual = 0.1 * math.log(4.0) + 1
    assert read("qwen3", rope_scaling=rope | {"attention_factor": usual}) == model
    assert "attention_factor = 1.0" in refused(
        "qwen3", rope_scaling=rope | {"attention_factor": 1.0}
    )
    assert "truncate = false" in refused("qwen3", rope_scaling=rope | {"truncate": False})
    both = rope | {"mscale": 0.7, "mscale_all_dim": 1.0}
    assert "mscale = 0.7" in refused("qwen3", rope_scaling=both)


# Windows.


def test_a_window_that_is_null_or_switched_off_is_none():
    assert read("mistral", sliding_window=None).sliding_window == 0
    assert read("qwen2", use_sliding_window=False, sliding_window=64).sliding_window == 0


def test_a_window_in_every_layer_of_qwen_is_read():
    on = dict(use_sliding_window=True, sliding_window=64)
    assert read("qwen2", **on, max_window_layers=0).sliding_window == 64
    assert read("qwen2", **on, max_window_layers=24).sliding_window == 0
    types = ["sliding_attention", "full_attention"] * 12
    model = read("qwen2", **on, layer_types=types)
    assert (model.sliding_window, model.global_every) == (64, 2)


def test_a_window_from_some_layer_on_is_refused():
    on = dict(use_sliding_window=True, sliding_window=64)
    assert "layer_types" in refused("qwen2", **on, max_window_layers=12)
    assert "max_window_layers = 48" in refused("qwen3_moe", **on)


def test_layer_types_that_are_no_pattern_or_not_of_the_family_are_refused():
    alternate = ["sliding_attention", "full_attention"]
    assert "layer_types" in refused("gemma2", layer_types=alternate[::-1] * 23)
    assert "layer_types" in refused("gemma2", layer_types=alternate)
    assert "layer_types" in refused("gemma2", layer_types=[["full_attention"]] * 46)
    assert "layer_types" in refused("mistral", layer_types=alternate * 16)
    assert "layer_types" in refused("llama", layer_types=alternate * 16)


# What cannot be expressed, and what does not matter.


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("gpt2", "scale_attn_by_inverse_layer_idx", True),
        ("llama", "is_causal", False),
        ("llama", "is_causal", None),
        ("gpt2", "add_cross_attention", True),
        ("gemma2", "use_bidirectional_attention", True),
        ("gemma3", "attn_logit_softcapping", 50.0),
        ("gemma2", "final_logit_softcapping", 0.0),
        ("gemma2", "sliding_window", None),
        ("qwen3_moe", "decoder_sparse_step", 2),
        ("qwen3_moe", "mlp_only_layers", [0]),
        ("llama", "partial_rotary_factor", 0.5),
        ("llama", "rope_scaling.rope_type", "dynamic"),
        ("llama", "rope_scaling.rope_type", "longrope"),
        ("llama", "rope_scaling.low_freq_factor", None),
        ("llama", "rope_scaling.partial_rotary_factor", 0.5),
        ("llama", "rope_scaling.short_factor", [1.0]),
        ("llama", "rope_scaling.original_max_position_embeddings", 8192.5),
        ("llama", "quantization_config", {"quant_method": "fp8"}),
        ("llama", "num_hidden_layers", 0),
        ("llama", "hidden_size", "4096"),
        ("llama", "hidden_size", 4100),
        ("gpt2", "n_embd", 100),
        ("llama", "num_attention_heads", True),
        ("llama", "rms_norm_eps", -1e-6),
        ("llama", "tie_word_embeddings", "yes"),
        ("llama", "rope_theta", 0),
        ("qwen3", "head_dim", 7),
        ("mixtral", "num_experts_per_tok", 9),
    ],
)
def test_what_changes_the_model_and_cannot_be_expressed_is_refused_by_name_and_value(
    family, field, value
):
    outer, _, inner = field.partition(".")
    change = {outer: PUBLISHED[family].get(outer, {}) | {inner: value} if inner else value}
    message = refused(family, **change)
    named = {"head_dim": "head width 7", "num_experts_per_tok": "experts_per_token = 9"}
    assert named.get(field, field) in message
    if field not in named:
        assert json.dumps(value) in message


def test_all_problems_are_reported_at_once():
    message = refused("llama", hidden_act="mish", rope_theta=-1, hidden_size=None)
    assert all(word in message for word in ("hidden_act", "rope_theta", "hidden_size"))


def test_a_field_whose_name_would_break_the_line_is_shown_escaped():
    rope = PUBLISHED["llama"]["rope_scaling"] | {"a\n\x1b[31m": 1}
    assert r"a\n\x1b[31m" in refused("llama", rope_scaling=rope)


def test_another_kind_of_model_is_refused_with_those_that_can_be_read():
    with pytest.raises(DataError, match='"bert": must be one of gpt2, llama, .*gemma3_text'):
        read_config({"model_type": "bert"}, "config.json")
    with pytest.raises(DataError, match="images and text"):
        read_config({"model_type": "gemma3", "text_config": {}}, "config.json")
    with pytest.raises(DataError, match="model_type = null"):
        read_config({}, "config.json")


def test_fields_that_change_nothing_are_silent_and_unknown_ones_are_listed():
    assert read_config(PUBLISHED["gpt2"], "").ignored == ()
    assert read_config(PUBLISHED["qwen2"], "").ignored == ("use_mrope",)
    more = PUBLISHED["llama"] | {"zeta": 1, "alpha": [2], "nothing": None}
    assert read_config(more, "").ignored == ("alpha", "zeta")


def test_code_named_by_a_file_is_listed_and_not_run():
    code = PUBLISHED["llama"] | {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Model"}}
    assert read_config(code, "").ignored == ("auto_map (code is never run)",)


def test_dropout_is_carried_where_there_is_one_kind_and_listed_where_not():
    assert read("gpt2", attn_pdrop=0.1).dropout == 0.1
    source = read_config(PUBLISHED["gpt2"] | {"attn_pdrop": 0.0}, "")
    assert source.model.dropout == 0.0
    assert source.ignored == ("resid_pdrop", "embd_pdrop")


@pytest.mark.parametrize("family", FAMILIES)
def test_any_value_in_any_field_is_read_or_refused_in_one_line(family):
    junk = [None, True, -1, 0, 1, 3, 2**40, 10**400, 1.5, 1e300, "", "x", [], [1], {}, {"a": 1}]
    rope = ("rope_scaling", "rope_parameters")
    for field in [*DEFAULTS[family], "layer_types", "dtype", "quantization_config"]:
        for value in junk + [{"rope_type": v} for v in junk if field in rope]:
            try:
                read_config(PUBLISHED[family] | {field: value}, "config.json")
            except DataError as error:
                assert "\n" not in str(error) and len(str(error)) < 3000


# The way back.

SMALL = ModelConfig(
    **ROPE, num_layers=4, embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=48,
    vocab_size=64, seq_len=64, tie_embeddings=False,
)  # fmt: skip
SMALL_GEMMA = dataclasses.replace(
    SMALL, **GEMMA, tie_embeddings=True, sliding_window=8, global_every=2, attn_scale=24**-0.5
)
SMALL_GPT2 = ModelConfig(
    num_layers=2, embed_dim=32, num_heads=4, vocab_size=64, attn_bias=True, out_bias=True,
    mlp_bias=True,
)  # fmt: skip
YARN = dict(rope_scaling="yarn", rope_factor=4.0, rope_original_len=16, rope_high_freq=16.0)
LLAMA3 = dict(rope_scaling="llama3", rope_factor=4.0, rope_original_len=16, rope_high_freq=3.0)
LINEAR = dict(rope_scaling="linear", rope_factor=3.0)
BIASED = dict(attn_bias=True, out_bias=True)
ROUTED = dict(num_experts=4, experts_per_token=3, expert_dim=24)
VARIATIONS: dict[str, tuple[ModelConfig, list[dict[str, Any]]]] = {
    "gpt2": (
        SMALL_GPT2,
        [{}, {"mlp": "gelu"}, {"mlp": "relu"}, {"mlp": "relu2"}, {"attn_scale": 1.0},
         {"norm_eps": 1e-3}, {"tie_embeddings": False}, {"mlp_dim": 100}, {"dropout": 0.2}],
    ),
    "llama": (
        SMALL,
        [{}, YARN, LLAMA3, LINEAR, BIASED, {"mlp_bias": True}, {"mlp": "geglu"},
         {"head_dim": 16}, {"num_kv_heads": 0}, {"rope_base": 5e5}, {"tie_embeddings": True}],
    ),
    "mistral": (SMALL, [{"sliding_window": 9}, {"sliding_window": 9} | YARN]),
    "qwen2": (
        dataclasses.replace(SMALL, attn_bias=True),
        [{}, {"sliding_window": 9}, {"sliding_window": 9, "global_every": 2}, YARN],
    ),
    "qwen3": (
        dataclasses.replace(SMALL, qk_norm=True),
        [{}, BIASED, {"sliding_window": 9, "global_every": 3}, {"head_dim": 16}],
    ),
    "gemma2": (
        SMALL_GEMMA,
        [{}, {"attn_softcap": 20.0, "logit_softcap": 5.0}, {"global_every": 3}, LINEAR, BIASED,
         {"global_every": 0}, {"sliding_window": 0, "global_every": 0}, {"attn_scale": 0.0}],
    ),
    "gemma3": (
        dataclasses.replace(SMALL_GEMMA, qk_norm=True, rope_local_base=100.0),
        [{}, LINEAR, {"logit_softcap": 5.0}, {"global_every": 0}, {"mlp": "swiglu"},
         {"rope_local_base": 0.0},
         {"sliding_window": 0, "global_every": 0, "rope_local_base": 0.0}],
    ),
    "mixtral": (dataclasses.replace(SMALL, **ROUTED), [{}, {"sliding_window": 9}, YARN]),
    "qwen3_moe": (
        dataclasses.replace(SMALL, **ROUTED, qk_norm=True),
        [{}, {"router_norm": False}, {"sliding_window": 9}, BIASED],
    ),
}  # fmt: skip
CASES = [
    pytest.param(family, dataclasses.replace(base, **change), id=f"{family}-{number}")
    for family, (base, changes) in VARIATIONS.items()
    for number, change in enumerate(changes)
]


@pytest.mark.parametrize(("family", "cfg"), CASES)
def test_a_model_that_is_written_is_read_back_the_same_and_its_family_is_found(family, cfg):
    written = json.loads(json.dumps(write_config(family, cfg, "float32")))
    source = read_config(written, "config.json")
    assert source == (family, canonical(cfg), "float32", ())
    assert family_of(cfg) == family


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unchanged_model_goes_out_with_the_file_it_came_with(family):
    base = PUBLISHED[family] | {"surprise": [1, 2]}
    written = write_config(family, SAID[family], "float16", base)
    dtype = {"torch_dtype" if "torch_dtype" in base else "dtype": "float16"}
    assert written == base | dtype


def test_a_changed_model_keeps_the_other_fields_of_the_file_and_no_old_spelling():
    base = PUBLISHED["gemma3"] | {
        "surprise": 1,
        "_sliding_window_pattern": 6,
        "auto_map": {"a": "b"},
    }
    cfg = dataclasses.replace(SAID["gemma3"], vocab_size=1000, sliding_window=0, global_every=0,
                              rope_local_base=0.0)  # fmt: skip
    written = write_config("gemma3", cfg, "bfloat16", base)
    assert written["surprise"] == 1 and written["vocab_size"] == 1000
    assert "auto_map" not in written and "_sliding_window_pattern" not in written
    assert read_config(written, "").model == cfg


def test_special_ids_that_the_vocabulary_does_not_have_become_null():
    base = PUBLISHED["llama"]
    cut = dataclasses.replace(SAID["llama"], vocab_size=128001)
    written = write_config("llama", cut, "bfloat16", base)
    assert (written["bos_token_id"], written["eos_token_id"]) == (128000, None)
    fresh = write_config("llama", SMALL, "float32")
    assert {fresh[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")} == {None}


def test_a_written_file_has_both_spellings():
    cfg = dataclasses.replace(SMALL, rope_base=5e5, **LLAMA3)
    written = write_config("llama", cfg, "bfloat16")
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 5e5
    assert written["rope_parameters"] == written["rope_scaling"] | {"rope_theta": 5e5}
    assert written["torch_dtype"] == written["dtype"] == "bfloat16"
    gemma = write_config("gemma3", VARIATIONS["gemma3"][0], "float32")
    assert gemma["sliding_window_pattern"] == 2
    assert gemma["layer_types"] == ["sliding_attention", "full_attention"] * 2
    assert gemma["rope_local_base_freq"] == 100.0
    assert gemma["rope_parameters"]["sliding_attention"]["rope_theta"] == 100.0


@pytest.mark.parametrize(
    ("name", "obstacles"),
    [
        ("post", ["norm_placement", "positions", "mlp"]),
        ("none", ["positions", "norm_bias"]),
        ("sandwich", ["norm_plus_one", "norm"]),
        ("experts", ["shared_dim", "router_bias"]),
        ("biased", ["mlp_bias"]),
        ("gemma3", ["attn_scale"]),  # 0.3 is no root of a whole number
    ],
)
def test_what_no_family_expresses_is_refused_with_all_that_stands_in_the_way(name, obstacles):
    with pytest.raises(ConfigError) as error:
        family_of(tiny.VARIETY[name])
    for field in obstacles:
        assert f"model.{field} = {json.dumps(getattr(tiny.VARIETY[name], field))}" in str(
            error.value
        )


def test_a_family_that_cannot_express_a_model_does_not_write_it():
    with pytest.raises(ConfigError, match="model.sliding_window = 9"):
        write_config("llama", dataclasses.replace(SMALL, sliding_window=9), "float32")


def test_what_acts_in_training_alone_is_no_obstacle():
    training = dict(
        stacked=True, remat="full", init="xavier", dropout=0.1, aux_layers=(1,), init_std=0.5
    )
    assert family_of(dataclasses.replace(SMALL, **training)) == "llama"
    assert family_of(dataclasses.replace(SMALL, **ROUTED, capacity_factor=1.5)) == "mixtral"


def test_sizes_that_are_derived_and_sizes_that_are_said_are_the_same_model():
    derived = ModelConfig(
        num_layers=2, embed_dim=64, num_heads=4, vocab_size=64, seq_len=64, positions="rope",
        rope_scaling="yarn", rope_factor=4.0, rope_local_base=7.0, global_every=3, attn_scale=0.25,
    )  # fmt: skip
    said = dataclasses.replace(
        derived, num_kv_heads=4, head_dim=16, mlp_dim=256, rope_high_freq=32.0,
        rope_original_len=16, rope_local_base=0.0, global_every=0, attn_scale=0.0,
    )  # fmt: skip
    assert canonical(derived) == canonical(said) == said
