"""Which weights of `Params` come from which tensors of a Hugging Face file, and how, both ways.

Names are those on disk: transformers 5 joins experts in memory and still writes one file entry for
each. Linear layers there are [out, in], here [in, out]; GPT-2's are [in, out] in both. The halves
of a head are rotated against each other in both, so RoPE needs no permutation. Pure NumPy: views
where a view will do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxgpt.config import ModelConfig
from jaxgpt.interop.facts import GEMMA

Shape = tuple[int, ...]
Convert = Callable[[Sequence[np.ndarray]], list[np.ndarray]]
PREFIX = {"gpt2": "transformer."}  # else "model."; files of a bare model have none
HEAD = "lm_head.weight"
# Values that older files hold beside the weights and that follow from the configuration.
BUFFERS = re.compile(r"(h|layers)\.\d+\.(attn\.(masked_)?bias|self_attn\.rotary_emb\.inv_freq)")


class Entry(NamedTuple):
    """Leaves of unrolled `Params` by path, and the tensors of a file that hold the same numbers."""

    leaves: tuple[str, ...]
    names: tuple[str, ...]
    shapes: tuple[Shape, ...]  # of the tensors
    to_ours: Convert  # arrays in the order of `names` to arrays in the order of `leaves`
    to_hf: Convert


def table(family: str, cfg: ModelConfig) -> tuple[Entry, ...]:
    """Return the entries of a model: each leaf and each tensor exactly once, layer by layer.

    A tied head has no entry.
    """
    prefix, V, D = prefix_of(family), cfg.vocab_size, cfg.embed_dim
    gpt2 = family == "gpt2"
    embed, norm = ("wte", "ln_f") if gpt2 else ("embed_tokens", "norm")
    entries = [_same("embed", f"{prefix}{embed}.weight", (V, D))]
    if gpt2:
        entries.append(_same("pos_embed", f"{prefix}wpe.weight", (cfg.seq_len, D)))
    for i in range(cfg.num_layers):
        ours, theirs = f"layers.{i}.", f"{prefix}{'h' if gpt2 else 'layers'}.{i}."
        entries += _gpt2(cfg, ours, theirs) if gpt2 else _rotary(family, cfg, ours, theirs)
    entries.append(_same("final_norm", f"{prefix}{norm}.weight", (D,)))
    if gpt2:
        entries.append(_same("final_norm_bias", f"{prefix}{norm}.bias", (D,)))
    if not cfg.tie_embeddings:
        entries.append(_same("lm_head", HEAD, (V, D)))
    return tuple(entries)


def prefix_of(family: str) -> str:
    """Return what the names of a family's tensors begin with, but for the head."""
    return PREFIX.get(family, "model.")


def resolve(family: str, names: Iterable[str]) -> dict[str, str]:
    """Return the full name of each name in a file; those of a bare model have no prefix."""
    prefix = prefix_of(family)
    return {
        name: name if name.startswith(prefix) or name == HEAD else prefix + name for name in names
    }


def is_buffer(family: str, full_name: str) -> bool:
    """Tell whether a tensor is no weight, but follows from the configuration."""
    name = full_name.removeprefix(prefix_of(family))
    return name == "rotary_emb.inv_freq" or BUFFERS.fullmatch(name) is not None


def _gpt2(cfg: ModelConfig, ours: str, theirs: str) -> Iterator[Entry]:
    D, N, H, F = cfg.embed_dim, cfg.num_heads, cfg.head_width, cfg.mlp_width
    qkv = tuple(ours + name for name in ("wq", "wk", "wv"))
    biases = tuple(ours + name for name in ("bq", "bk", "bv"))
    yield _joined(qkv, f"{theirs}attn.c_attn.weight", (D, N, H))
    yield _joined(biases, f"{theirs}attn.c_attn.bias", (N, H))
    yield _same(f"{ours}wo", f"{theirs}attn.c_proj.weight", (N * H, D), (N, H, D))
    yield _same(f"{ours}bo", f"{theirs}attn.c_proj.bias", (D,))
    yield _same(f"{ours}w_up", f"{theirs}mlp.c_fc.weight", (D, F))
    yield _same(f"{ours}b_up", f"{theirs}mlp.c_fc.bias", (F,))
    yield _same(f"{ours}w_down", f"{theirs}mlp.c_proj.weight", (F, D))
    yield _same(f"{ours}b_down", f"{theirs}mlp.c_proj.bias", (D,))
    for name, norm in (("attn_norm", "ln_1"), ("mlp_norm", "ln_2")):
        yield _same(f"{ours}{name}", f"{theirs}{norm}.weight", (D,))
        yield _same(f"{ours}{name}_bias", f"{theirs}{norm}.bias", (D,))


def _rotary(family: str, cfg: ModelConfig, ours: str, theirs: str) -> Iterator[Entry]:
    D, N, K, H, F = cfg.embed_dim, cfg.num_heads, cfg.kv_heads, cfg.head_width, cfg.mlp_width
    for letter, heads in (("q", N), ("k", K), ("v", K)):
        name = f"{theirs}self_attn.{letter}_proj."
        yield _linear(f"{ours}w{letter}", f"{name}weight", (D, heads * H), (D, heads, H))
        if cfg.attn_bias:
            yield _same(f"{ours}b{letter}", f"{name}bias", (heads * H,), (heads, H))
    yield _linear(f"{ours}wo", f"{theirs}self_attn.o_proj.weight", (N * H, D), (N, H, D))
    if cfg.out_bias:
        yield _same(f"{ours}bo", f"{theirs}self_attn.o_proj.bias", (D,))
    if cfg.qk_norm:
        yield _same(f"{ours}q_norm", f"{theirs}self_attn.q_norm.weight", (H,))
        yield _same(f"{ours}k_norm", f"{theirs}self_attn.k_norm.weight", (H,))
    if family in GEMMA:  # its post_attention_layernorm really stands after the attention
        norms = {
            "attn_norm": "input_layernorm",
            "attn_post_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        }
    else:
        norms = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    for name, norm in norms.items():
        yield _same(f"{ours}{name}", f"{theirs}{norm}.weight", (D,))
    if cfg.num_experts:
        yield from _experts(family, cfg, ours, theirs)
        return
    for part, shape in (("gate", (D, F)), ("up", (D, F)), ("down", (F, D))):
        yield _linear(f"{ours}w_{part}", f"{theirs}mlp.{part}_proj.weight", shape)
        if cfg.mlp_bias:
            yield _same(f"{ours}b_{part}", f"{theirs}mlp.{part}_proj.bias", shape[1:])


def _experts(family: str, cfg: ModelConfig, ours: str, theirs: str) -> Iterator[Entry]:
    D, E, F = cfg.embed_dim, cfg.num_experts, cfg.expert_width
    mixtral = family == "mixtral"
    block = theirs + ("block_sparse_moe" if mixtral else "mlp")
    parts = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    yield _linear(f"{ours}router", f"{block}.gate.weight", (D, E))
    for ours_part, part, shape in zip(
        ("w_gate", "w_up", "w_down"), parts, ((D, F), (D, F), (F, D)), strict=True
    ):
        names = tuple(f"{block}.experts.{e}.{part}.weight" for e in range(E))
        yield Entry(
            (ours + ours_part,),
            names,
            (shape[::-1],) * E,
            lambda arrays: [np.stack([a.T for a in arrays])],
            lambda arrays: [a.T for a in arrays[0]],
        )


def _same(leaf: str, name: str, shape: Shape, ours: Shape | None = None) -> Entry:
    """Return the entry of a tensor that is the same here, or has its first axis split in heads."""
    ours = ours or shape
    return Entry(
        (leaf,),
        (name,),
        (shape,),
        lambda arrays: [arrays[0].reshape(ours)],
        lambda arrays: [arrays[0].reshape(shape)],
    )


def _linear(leaf: str, name: str, shape: Shape, ours: Shape | None = None) -> Entry:
    """Return the entry of a matrix that is [in, out] = `shape` here, perhaps split in heads."""
    ours = ours or shape
    return Entry(
        (leaf,),
        (name,),
        (shape[::-1],),
        lambda arrays: [arrays[0].T.reshape(ours)],
        lambda arrays: [arrays[0].reshape(shape).T],
    )


def _joined(leaves: tuple[str, ...], name: str, ours: Shape) -> Entry:
    """Return the entry of queries, keys and values side by side; `ours` is the shape of each."""
    *lead, N, H = ours
    return Entry(
        leaves,
        (name,),
        ((*lead, 3 * N * H),),
        lambda arrays: [part.reshape(ours) for part in np.split(arrays[0], 3, axis=-1)],
        lambda arrays: [np.concatenate([a.reshape(*lead, N * H) for a in arrays], axis=-1)],
    )
