"""The presets load, have the shapes of the released models, and open with what is true of them."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jaxgpt import config
from jaxgpt.interop import families
from jaxgpt.model import params
from jaxgpt.model.canonical import computed
from jaxgpt.training.schedules import schedule
from jaxgpt.validation import num_steps

CONFIGS = Path(__file__).parent.parent / "configs"
PRESETS = sorted(CONFIGS.glob("*.toml"))
NAMES = [path.stem for path in PRESETS]


class Released(NamedTuple):
    """What the config.json of the released weights says, and how many parameters these hold."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp: int
    context: int
    parameters: int
    more: dict[str, Any] = {}  # noqa: RUF012


LLAMA2 = {
    "model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "initializer_range": 0.02, "rope_scaling": None,
    "tie_word_embeddings": False,
}  # fmt: skip
LLAMA3_ROPE = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3",
}  # fmt: skip
LLAMA3 = LLAMA2 | {"vocab_size": 128256, "rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE}
LLAMA32 = LLAMA3 | {"tie_word_embeddings": True, "rope_scaling": LLAMA3_ROPE | {"factor": 32.0}}
MISTRAL = LLAMA2 | {"model_type": "mistral", "rope_theta": 10000.0, "sliding_window": 4096}
MIXTRAL = MISTRAL | {
    "model_type": "mixtral", "rope_theta": 1e6, "sliding_window": None, "num_local_experts": 8,
    "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02,
}  # fmt: skip
QWEN25 = LLAMA2 | {
    "model_type": "qwen2", "vocab_size": 152064, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    "sliding_window": 131072, "max_window_layers": 28, "use_sliding_window": False,
}  # fmt: skip
SMALL_QWEN25 = {"vocab_size": 151936, "tie_word_embeddings": True}
QWEN3 = QWEN25 | {
    "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "attention_bias": False,
    "sliding_window": None,
}  # fmt: skip
QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "max_window_layers": 0, "router_aux_loss_coef": 0.001,
}  # fmt: skip
GEMMA2 = {
    "model_type": "gemma2", "vocab_size": 256000, "head_dim": 256, "rope_theta": 10000.0,
    "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "sliding_window": 4096,
    "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
}  # fmt: skip
GEMMA3 = GEMMA2 | {
    "model_type": "gemma3_text", "vocab_size": 262144, "rope_theta": 1e6, "sliding_window": 512,
    "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6, "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}  # fmt: skip
BIG_GEMMA3 = GEMMA3 | {
    "sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}
}  # fmt: skip
TIED = {"tie_word_embeddings": True}
RELEASED = {
    "llama2_7b": Released(32, 4096, 32, 32, 11008, 4096, 6_738_415_616, LLAMA2),
    "llama2_13b": Released(40, 5120, 40, 40, 13824, 4096, 13_015_864_320, LLAMA2),
    "llama2_70b": Released(80, 8192, 64, 8, 28672, 4096, 68_976_648_192, LLAMA2),
    "llama3_1b": Released(16, 2048, 32, 8, 8192, 131072, 1_235_814_400, LLAMA32),
    "llama3_3b": Released(28, 3072, 24, 8, 8192, 131072, 3_212_749_824, LLAMA32),
    "llama3_8b": Released(32, 4096, 32, 8, 14336, 131072, 8_030_261_248, LLAMA3),
    "llama3_70b": Released(80, 8192, 64, 8, 28672, 131072, 70_553_706_496, LLAMA3),
    "llama3_405b": Released(126, 16384, 128, 8, 53248, 131072, 405_853_388_800, LLAMA3),
    "mistral_7b": Released(32, 4096, 32, 8, 14336, 32768, 7_241_732_096, MISTRAL),
    "mixtral_8x7b": Released(32, 4096, 32, 8, 14336, 32768, 46_702_792_704, MIXTRAL),
    "mixtral_8x22b": Released(
        56, 6144, 48, 8, 16384, 65536, 140_620_634_112, MIXTRAL | {"router_aux_loss_coef": 0.001}
    ),
    "qwen2.5_0.5b": Released(24, 896, 14, 2, 4864, 32768, 494_032_768, QWEN25 | SMALL_QWEN25),
    "qwen2.5_1.5b": Released(28, 1536, 12, 2, 8960, 131072, 1_543_714_304, QWEN25 | SMALL_QWEN25),
    "qwen2.5_3b": Released(36, 2048, 16, 2, 11008, 32768, 3_085_938_688, QWEN25 | SMALL_QWEN25),
    "qwen2.5_7b": Released(28, 3584, 28, 4, 18944, 131072, 7_615_616_512, QWEN25),
    "qwen2.5_14b": Released(
        48, 5120, 40, 8, 13824, 131072, 14_770_033_664, QWEN25 | {"rms_norm_eps": 1e-5}
    ),
    "qwen2.5_32b": Released(
        64, 5120, 40, 8, 27648, 131072, 32_763_876_352, QWEN25 | {"rms_norm_eps": 1e-5}
    ),
    "qwen2.5_72b": Released(
        80, 8192, 64, 8, 29568, 131072, 72_706_203_648, QWEN25 | {"rms_norm_eps": 1e-5}
    ),
    "qwen3_0.6b": Released(28, 1024, 16, 8, 3072, 40960, 596_049_920, QWEN3 | TIED),
    "qwen3_1.7b": Released(28, 2048, 16, 8, 6144, 40960, 1_720_574_976, QWEN3 | TIED),
    "qwen3_4b": Released(36, 2560, 32, 8, 9728, 40960, 4_022_468_096, QWEN3 | TIED),
    "qwen3_8b": Released(36, 4096, 32, 8, 12288, 40960, 8_190_735_360, QWEN3),
    "qwen3_14b": Released(40, 5120, 40, 8, 17408, 40960, 14_768_307_200, QWEN3),
    "qwen3_32b": Released(64, 5120, 64, 8, 25600, 40960, 32_762_123_264, QWEN3),
    "qwen3_30b_a3b": Released(48, 2048, 32, 4, 6144, 40960, 30_532_122_624, QWEN3_MOE),
    "qwen3_235b_a22b": Released(
        94, 4096, 64, 4, 12288, 40960, 235_093_634_560, QWEN3_MOE | {"moe_intermediate_size": 1536}
    ),
    "gemma2_2b": Released(26, 2304, 8, 4, 9216, 8192, 2_614_341_888, GEMMA2),
    "gemma2_9b": Released(42, 3584, 16, 8, 14336, 8192, 9_241_705_984, GEMMA2),
    "gemma2_27b": Released(
        46, 4608, 32, 16, 36864, 8192, 27_227_128_320,
        GEMMA2 | {"head_dim": 128, "query_pre_attn_scalar": 144},
    ),
    "gemma3_270m": Released(18, 640, 4, 1, 2048, 32768, 268_098_176, GEMMA3),
    "gemma3_1b": Released(26, 1152, 4, 1, 6912, 32768, 999_885_952, GEMMA3),
    "gemma3_4b": Released(34, 2560, 8, 4, 10240, 131072, 3_880_099_328, BIG_GEMMA3),
    "gemma3_12b": Released(48, 3840, 16, 8, 15360, 131072, 11_765_788_416, BIG_GEMMA3),
    "gemma3_27b": Released(
        62, 5376, 32, 16, 21504, 131072, 27_009_002_240,
        BIG_GEMMA3 | {"head_dim": 128, "query_pre_attn_scalar": 168},
    ),
}  # fmt: skip
GPT2 = {  # layers, width, heads
    "gpt2_124m": (12, 768, 12, 124_439_808),
    "gpt2_355m": (24, 1024, 16, 354_823_168),
    "gpt2_774m": (36, 1280, 20, 774_030_080),
    "gpt2_1558m": (48, 1600, 25, 1_557_611_200),
}
# Of the released weights; the last two by hand from their shapes.
SIZES = (
    {name: found.parameters for name, found in RELEASED.items()}
    | {name: found[-1] for name, found in GPT2.items()}
    | {
        # V D + 6 (4 D² attention + 2 D F + F + D MLP + 4 D norms), D 512, F 2048, V 37000
        "original": 37_000 * 512 + 6 * (4 * 512**2 + 2 * 512 * 2048 + 2048 + 512 + 4 * 512),
        # V D + T D + 6 (12 D² + 2 D) + D, D 384, V 8192, T 256
        "bench_small": 8192 * 384 + 256 * 384 + 6 * (12 * 384**2 + 2 * 384) + 384,
    }
)


@functools.cache
def loaded(name: str) -> config.Config:
    return config.load(CONFIGS / f"{name}.toml")


def opening(name: str) -> str:
    lines = (CONFIGS / f"{name}.toml").read_text().splitlines()
    return "\n".join(lines[: next(n for n, line in enumerate(lines) if not line.startswith("#"))])


def config_json(name: str) -> dict[str, Any]:
    """Return the config.json of the released weights, as far as it says something of the model."""
    if name in GPT2:
        layers, width, heads, _ = GPT2[name]
        return {
            "model_type": "gpt2", "n_layer": layers, "n_embd": width, "n_head": heads,
            "n_ctx": 1024, "n_positions": 1024, "vocab_size": 50257, "layer_norm_epsilon": 1e-5,
            "activation_function": "gelu_new", "initializer_range": 0.02,
        }  # fmt: skip
    found = RELEASED[name]
    return found.more | {
        "num_hidden_layers": found.layers, "hidden_size": found.width,
        "num_attention_heads": found.heads, "num_key_value_heads": found.kv_heads,
        "intermediate_size": found.mlp, "max_position_embeddings": found.context,
    }  # fmt: skip


def test_every_preset_but_the_quickstart_has_a_size_to_be_compared_with():
    assert {*NAMES} == {*SIZES, "quickstart"}


@pytest.mark.parametrize("name", SIZES)
def test_a_preset_has_exactly_the_published_number_of_parameters(name):
    assert params.count(params.specs(loaded(name).model)) == SIZES[name]


@pytest.mark.parametrize(
    ("name", "released"),
    [("gemma3_4b", 4_300_079_472), ("gemma3_12b", 12_187_325_040), ("gemma3_27b", 27_432_406_640)],
)
def test_big_gemma_3_is_the_released_model_without_what_it_has_for_images(name, released):
    D = loaded(name).model.embed_dim
    vision = 416_866_032  # SigLIP, 27 layers of 1152
    projector, rows = 1152 * D + 1152, 64 * D
    assert SIZES[name] + vision + projector + rows == released


@pytest.mark.parametrize("name", [*RELEASED, *GPT2])
def test_a_preset_computes_what_the_config_json_of_the_released_weights_says(name):
    source = families.read_config(config_json(name), name)
    # Rows may be shorter than the longest that the released weights can be used with.
    released = dataclasses.replace(source.model, seq_len=loaded(name).model.seq_len)
    assert computed(loaded(name).model) == computed(released)
    assert loaded(name).model.seq_len <= source.model.seq_len
    assert loaded(name).model.init_std == source.model.init_std
    assert not source.ignored


@pytest.mark.parametrize("name", [*RELEASED, *GPT2])
def test_the_family_of_a_preset_is_recognised_from_its_shape_alone(name):
    wanted = config_json(name)["model_type"].removesuffix("_text")
    assert families.family_of(loaded(name).model) == wanted


@pytest.mark.parametrize("name", [name for name in RELEASED if loaded(name).model.num_experts])
def test_experts_are_balanced_by_the_published_weight_of_a_loss_normalised_here(name):
    # transformers' loss is experts_per_token where all experts get the same, ours is 1.
    published, cfg = RELEASED[name].more["router_aux_loss_coef"], loaded(name)
    assert cfg.train.balance_loss == pytest.approx(published * cfg.model.experts_per_token)
    assert cfg.model.capacity_factor == 0  # none of them drops a token


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_opens_with_hardware_tokens_expected_result_and_its_own_command(name):
    words = [line.split()[1] for line in opening(name).splitlines() if len(line.split()) > 1]
    assert {"Hardware", "Tokens", "Expected", "Command"} <= {*words}
    assert f" configs/{name}.toml" in opening(name)


@pytest.mark.parametrize("name", SIZES)
def test_the_opening_of_a_preset_counts_its_parameters_and_the_tokens_of_a_step(name):
    cfg = loaded(name)
    assert f" {SIZES[name]:,} parameters" in opening(name).replace("\n# ", " ")
    assert f" {cfg.train.global_batch * cfg.model.seq_len:,} per step" in opening(name)


@pytest.mark.parametrize("name", RELEASED)
def test_the_opening_of_a_preset_states_its_budget_and_what_that_is_per_parameter(name):
    amount, unit, ratio, active = re.search(
        r"Tokens +([\d.]+) (billion|trillion) \((\d+) per (active )?parameter", opening(name)
    ).groups()
    cfg = loaded(name)
    tokens = float(amount) * {"billion": 1e9, "trillion": 1e12}[unit]
    assert cfg.train.num_tokens == tokens
    parameters = SIZES[name]
    if active:
        m = cfg.model
        idle = m.num_experts - m.experts_per_token
        parameters -= m.num_layers * idle * 3 * m.embed_dim * m.expert_width
    assert tokens / parameters == pytest.approx(int(ratio), rel=0.04)


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_can_be_run_as_it_is(name):
    cfg = loaded(name)
    assert cfg.run.dir == f"runs/{name}"
    assert cfg.data.store
    assert num_steps(cfg) > cfg.optim.warmup_steps
    # The tokenizer that `prepare` trains has the ids that the model has rows for.
    assert cfg.tokenizer.vocab_size == cfg.model.vocab_size


def test_presets_that_share_a_store_have_the_same_tokenizer():
    shared: dict[str, set] = {}
    for name in NAMES:
        shared.setdefault(loaded(name).data.store, set()).add(loaded(name).tokenizer)
    assert all(len(tokenizers) == 1 for tokenizers in shared.values())


@pytest.mark.parametrize("name", RELEASED)
def test_big_models_are_stacked_recomputed_split_and_kept_to_their_documents(name):
    cfg = loaded(name)
    assert (cfg.model.stacked, cfg.model.remat) == (True, "full")
    # libtpu gathers over two dimensions of a torus, not over the three of v5p-512.
    assert (cfg.mesh.data, cfg.mesh.fsdp) == (4 if name == "llama3_70b" else 1, -1)
    assert cfg.data.document_mask


@pytest.mark.parametrize("name", RELEASED)
def test_a_preset_fits_the_hardware_that_it_names(name):
    cfg = loaded(name)
    devices, gigabytes = map(int, re.search(r"(\d+) x [\w ]+? (\d+) GB", opening(name)).groups())
    groups = devices // cfg.mesh.tensor  # whose devices share rows and split heads and widths
    assert cfg.train.micro_rows % groups == 0
    m, rows = cfg.model, cfg.train.micro_rows // groups
    # Split among all: float32 weights, gradients and two moments. Kept of each block under full
    # recomputation: its input in bfloat16. Gathered: a block's weights, gradients, the next's.
    state = 16 * SIZES[name] / devices
    streams = 2 * m.num_layers * rows * m.seq_len * m.embed_dim
    block = params.count(params.specs(dataclasses.replace(m, num_layers=1)).layers)
    assert state + streams + 3 * 4 * block / cfg.mesh.tensor < 0.8 * gigabytes * 1e9


@pytest.mark.parametrize(
    ("name", "lr"),
    [("llama2_7b", 3e-4), ("llama2_13b", 3e-4), ("llama2_70b", 1.5e-4), ("llama3_8b", 3e-4),
     ("llama3_70b", 1.5e-4), ("llama3_405b", 8e-5)],
)  # fmt: skip
def test_llama_presets_have_the_published_peak_rates_and_adam(name, lr):
    optim = loaded(name).optim
    assert (optim.name, optim.lr, optim.schedule) == ("adamw", lr, "cosine")
    assert (optim.beta1, optim.beta2, optim.weight_decay, optim.clip_norm) == (0.9, 0.95, 0.1, 1.0)
    assert optim.warmup_steps == (8000 if name in ("llama3_70b", "llama3_405b") else 2000)


def test_the_rate_of_llama_3_405b_ends_at_8e_7():
    optim = loaded("llama3_405b").optim
    assert optim.lr * optim.end_lr_ratio == pytest.approx(8e-7)


@pytest.mark.parametrize("k", [1, 1000, 4000, 16_000, 100_000])
def test_the_original_preset_has_the_rates_and_the_label_smoothing_of_the_paper(k):
    cfg = loaded("original")
    rate = schedule(cfg.optim, num_steps(cfg))(k)
    assert float(rate) == pytest.approx(512**-0.5 * min(k**-0.5, k * 4000**-1.5), rel=1e-4)
    assert cfg.train.label_smoothing == 0.1
