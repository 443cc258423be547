"""The activations of a block on a device: which there are, and which wait for its backward pass."""

from __future__ import annotations

from typing import NamedTuple

from jaxgpt.model.block_attention import MAX_BLOCKS, TALL_BLOCK
from jaxgpt.model.kernels import LANES
from jaxgpt.model.pairs import SCORES
from jaxgpt.planning.layout import Layout


class Tensor(NamedTuple):
    """One activation of a block: elements of a micro-batch on a device, and bytes of each."""

    elements: int
    itemsize: int
    padding: int = 0  # elements

    @property
    def bytes(self) -> int:
        return (self.elements + self.padding) * self.itemsize


def tensors(layout: Layout) -> dict[str, Tensor]:
    """Return the activations of one block that its backward pass reads, by name.

    Those that `model.remat_save` knows have its names; `attn_in` and `mlp_in` are what the matrices
    are multiplied with, `mid` the residual stream between the sub-layers, `hidden` what w_down is
    multiplied with, and `lse` a float32 number per head and token. With experts, gate, up and
    hidden are those of all the tokens that a device's experts get (evenly spread).
    """
    m, t, c = layout.cfg.model, layout.tokens, layout.compute
    D, H = m.embed_dim, m.head_width
    heads, kv = layout.split(m.num_heads, "tensor"), layout.split(m.kv_heads, "tensor")
    wide = layout.split(m.expert_width if m.num_experts else m.mlp_width, "tensor")
    wide *= m.experts_per_token if m.num_experts else 1
    wide += layout.split(m.shared_dim, "tensor")
    sizes = {
        "block_in": D, "attn_in": D, "q": heads * H, "k": kv * H, "v": kv * H, "attn": heads * H,
        "attn_out": D, "mid": D, "mlp_in": D * (m.experts_per_token if m.num_experts else 1),
        "gate": wide if m.gated else 0, "up": wide, "hidden": wide, "mlp_out": D,
    }  # fmt: skip
    found = {name: Tensor(t * size, c) for name, size in sizes.items() if size}
    if "splash" in layout.attention:  # the last axis of what the kernel reads is whole lanes
        for name in ("q", "k", "v"):
            padding = found[name].elements // H * (-H % LANES)
            found[name] = found[name]._replace(padding=padding)
    return found | {"lse": Tensor(t * heads, 4)}


def kept(layout: Layout) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes per block that wait for its backward pass: on the device, on the host.

    Without recomputation: all that products and activations need. What a sub-layer gives to the
    residual sum is needed only where a norm follows. With `attn`, its `lse` is kept too.
    """
    m, found = layout.cfg.model, tensors(layout)
    if m.remat == "none":
        unneeded = set() if m.norm_placement != "pre" else {"attn_out", "mlp_out"}
        device = {n: tensor.bytes for n, tensor in found.items() if n not in unneeded}
        if m.stacked and "splash" in layout.attention:  # transposed; elsewhere it is `attn` itself
            device["the kernel's attn"] = found["q"].bytes
        if scores := score_bytes(layout):
            device["scores"] = scores
        return device, {}
    names = {"block_in", *m.remat_save}
    names |= {"lse"} if "attn" in names | {*m.remat_offload} else set()
    offloaded = {name: found[name].bytes for name in m.remat_offload if name in found}
    device = {n: found[n].bytes for n in sorted(names) if n in found and n not in offloaded}
    return device, offloaded


def score_bytes(layout: Layout) -> int:
    """Return the bytes of the scores of one block, where attention holds them."""
    T = layout.length
    tall = max(TALL_BLOCK, T // MAX_BLOCKS)
    held = {
        "dot_product": T * T,
        "reference": T * T,
        # Row blocks stop at the diagonal, and accelerators hold those of one.
        "blocks": T * T // 2 if layout.target.chip.platform == "cpu" else min(tall, T) * T,
        "ring": 2 * min(SCORES, (T // 2) ** 2),  # of two pairs of half chunks
    }
    most = max(held.get(way, 0) for way in layout.attention)
    heads = layout.split(layout.cfg.model.num_heads, "tensor")
    # In float32, and what the values are multiplied with in the compute dtype: perhaps the same.
    return layout.rows * heads * most * sum({4, layout.compute})
