"""Names and layouts of Hugging Face tensors: each weight has one place, and moves bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hf_folders import MODELS

from jaxgpt.checkpoint.fingerprint import named_leaves
from jaxgpt.interop.families import family_of
from jaxgpt.interop.tensors import Entry, is_buffer, resolve, table
from jaxgpt.model.params import specs

# As transformers 5.24 named the tensors of layer 0 when it saved a model of each family.
NORMS = ["input_layernorm", "post_attention_layernorm"]
ATTENTION = [f"self_attn.{letter}_proj" for letter in "qkvo"]
MLP = [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
QK = ["self_attn.q_norm", "self_attn.k_norm"]
FOUR = [*NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm"]
GPT2 = ["ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"]
MIXTRAL = ["gate", *(f"experts.{e}.w{n}" for e in range(3) for n in (1, 2, 3))]
MOE = ["gate", *(f"experts.{e}.{n}_proj" for e in range(3) for n in ("gate", "up", "down"))]
SAVED = {
    "gpt2": [f"{name}.{kind}" for name in GPT2 for kind in ("weight", "bias")],
    "llama": [f"{name}.weight" for name in [*NORMS, *ATTENTION, *MLP]],
    "llama_biased": [f"{name}.weight" for name in [*NORMS, *ATTENTION, *MLP]]
    + [f"{name}.bias" for name in [*ATTENTION, *MLP]],
    "mistral": [f"{name}.weight" for name in [*NORMS, *ATTENTION, *MLP]],
    "qwen2": [f"{name}.weight" for name in [*NORMS, *ATTENTION, *MLP]]
    + [f"{name}.bias" for name in ATTENTION[:3]],
    "qwen3": [f"{name}.weight" for name in [*NORMS, *ATTENTION, *MLP, *QK]],
    "gemma2": [f"{name}.weight" for name in [*FOUR, *ATTENTION, *MLP]],
    "gemma3": [f"{name}.weight" for name in [*FOUR, *ATTENTION, *MLP, *QK]],
    "mixtral": [f"{name}.weight" for name in [*NORMS, *ATTENTION]]
    + [f"block_sparse_moe.{name}.weight" for name in MIXTRAL],
    "qwen3_moe": [f"{name}.weight" for name in [*NORMS, *ATTENTION, *QK]]
    + [f"mlp.{name}.weight" for name in MOE],
}


def table_of(name: str) -> tuple[Entry, ...]:
    return table(family_of(MODELS[name]), MODELS[name])


def entry_of(name: str, leaf: str) -> Entry:
    return next(entry for entry in table_of(name) if leaf in entry.leaves)


def counted(shape: tuple[int, ...]) -> np.ndarray:
    """Return an array whose every element tells where it is."""
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize("name", MODELS)
def test_names_are_those_that_transformers_writes(name):
    gpt2 = name == "gpt2"
    prefix = "transformer.h.0." if gpt2 else "model.layers.0."
    names = [n for entry in table_of(name) for n in entry.names]
    assert sorted(n for n in names if n.startswith(prefix)) == sorted(
        prefix + n for n in SAVED[name]
    )
    outer = ["wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias"]
    wanted = {f"transformer.{n}" for n in outer}
    if not gpt2:
        wanted = {"model.embed_tokens.weight", "model.norm.weight"}
        wanted |= set() if MODELS[name].tie_embeddings else {"lm_head.weight"}
    assert {n for n in names if ".layers." not in n and ".h." not in n} == wanted
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_of_the_model_is_in_the_table_once(name):
    leaves = [leaf for entry in table_of(name) for leaf in entry.leaves]
    assert sorted(leaves) == sorted(named_leaves(specs(MODELS[name])))


@pytest.mark.parametrize("name", MODELS)
def test_shapes_are_ours_and_the_way_there_and_back_moves_every_number_home(name):
    shapes = {leaf: spec.shape for leaf, spec in named_leaves(specs(MODELS[name])).items()}
    for entry in table_of(name):
        theirs = [counted(shape) + 1000 * n for n, shape in enumerate(entry.shapes)]
        ours = entry.to_ours(theirs)
        assert [a.shape for a in ours] == [shapes[leaf] for leaf in entry.leaves]
        back = entry.to_hf(ours)
        for there, here in zip(theirs, back, strict=True):
            np.testing.assert_array_equal(here, there)


def test_projections_are_transposed_and_cut_in_heads_without_a_permutation():
    # wq[d, n, h] is row n H + h and column d of q_proj: RoPE pairs feature h with h + H/2 in both.
    cfg = MODELS["llama"]
    D, H = cfg.embed_dim, cfg.head_width
    for letter, heads in (("q", 4), ("k", 2), ("v", 2)):
        theirs = counted((heads * H, D))
        (ours,) = entry_of("llama", f"layers.1.w{letter}").to_ours([theirs])
        for d, n, h in ((0, 0, 0), (5, 1, 2), (31, heads - 1, H - 1)):
            assert ours[d, n, h] == theirs[n * H + h, d]
    theirs = counted((D, 4 * H))
    (ours,) = entry_of("llama", "layers.0.wo").to_ours([theirs])
    assert ours[3, 5, 7] == theirs[7, 3 * H + 5]


def test_the_joined_projection_of_gpt2_is_cut_into_queries_keys_and_values():
    entry = entry_of("gpt2", "layers.0.wk")
    theirs = counted((32, 96))  # [in, out], as its Conv1D stores it
    q, k, v = entry.to_ours([theirs])
    assert entry.leaves == ("layers.0.wq", "layers.0.wk", "layers.0.wv")
    assert (q[3, 2, 5], k[3, 2, 5], v[3, 2, 5]) == tuple(theirs[3, [21, 32 + 21, 64 + 21]])


def test_experts_are_stacked_in_order_and_w3_is_what_the_gate_multiplies():
    gate, up, down = (
        entry_of("mixtral", f"layers.1.{leaf}") for leaf in ("w_gate", "w_up", "w_down")
    )
    names = [entry.names[2].removeprefix("model.layers.1.block_sparse_moe.experts.2.")
             for entry in (gate, up, down)]  # fmt: skip
    assert names == ["w1.weight", "w3.weight", "w2.weight"]
    theirs = [counted((24, 32)) + 1000 * e for e in range(3)]
    (ours,) = gate.to_ours(theirs)
    assert ours[2, 7, 11] == theirs[2][11, 7]


def test_the_norms_of_gemma_are_where_its_names_do_not_say():
    names = {leaf: entry_of("gemma2", f"layers.0.{leaf}").names[0].split(".")[-2] for leaf in (
        "attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm")}  # fmt: skip
    assert names == {
        "attn_norm": "input_layernorm",
        "attn_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }
    assert (
        entry_of("llama", "layers.0.mlp_norm").names[0].endswith("post_attention_layernorm.weight")
    )


def test_matrices_are_views_of_what_was_read():
    for name in ("gpt2", "llama"):
        for entry in table_of(name):
            theirs = [counted(shape) for shape in entry.shapes]
            assert all(np.shares_memory(theirs[0], ours) for ours in entry.to_ours(theirs))


def test_names_of_a_bare_model_have_no_prefix():
    bare = resolve("gpt2", ["h.0.ln_1.weight", "wte.weight", "lm_head.weight"])
    assert list(bare.values()) == [
        "transformer.h.0.ln_1.weight", "transformer.wte.weight", "lm_head.weight"
    ]  # fmt: skip
    full = resolve("llama", ["model.norm.weight", "layers.0.mlp.up_proj.weight"])
    assert list(full.values()) == ["model.norm.weight", "model.layers.0.mlp.up_proj.weight"]


def test_buffers_of_older_files_are_known_and_nothing_else_is():
    known = {
        "gpt2": ["transformer.h.0.attn.bias", "transformer.h.11.attn.masked_bias"],
        "llama": ["model.layers.3.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"],
    }
    for family, names in known.items():
        assert all(is_buffer(family, name) for name in names)
    for name in ("transformer.h.0.attn.c_attn.bias", "transformer.h.x.attn.bias", "lm_head.bias"):
        assert not is_buffer("gpt2", name)
