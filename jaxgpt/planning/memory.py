"""Bytes of a device, and of its host, by what they are for: arithmetic from shapes and shardings.

State, gradients and batch are there all the time. The rest comes and goes, and only the largest of
three moments counts: the loss of a micro-batch, the backward pass of its last block, the update.
What a compiler adds (padding, copies, its own scheduling) is not in here; `planning.compile` asks
it. Sizes in [brackets] are those of a device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jaxgpt.planning.layout import Layout
from jaxgpt.training.loss import chunk_tokens

Moment = Literal["always", "saved", "gradients", "loss", "block", "host"]
# What is there at the three moments of which the largest counts.
PEAKS: dict[str, tuple[Moment, ...]] = {
    "loss": ("always", "saved", "loss"),
    "block": ("always", "saved", "gradients", "block"),
    "update": ("always", "gradients"),
}
FLASH = {"auto", "splash", "cudnn"}  # never hold a matrix of scores
PREFETCHED = 2  # batches on the device: the step's, and the next one


class Part(NamedTuple):
    """One cause. `how` is its formula in words, with the numbers of a device put in."""

    cause: str
    bytes: int
    how: str
    moment: Moment


@dataclass(frozen=True)
class Memory:
    """What a device and its host need."""

    parts: tuple[Part, ...]

    def of(self, *moments: Moment) -> int:
        """Return the bytes of all parts of these moments."""
        return sum(part.bytes for part in self.parts if part.moment in moments)

    @property
    def peak(self) -> str:
        """Return the moment that needs most: loss, block or update."""
        return max(PEAKS, key=lambda moment: self.of(*PEAKS[moment]))

    @property
    def device(self) -> int:
        """Return the most bytes that a device holds at once."""
        return self.of(*PEAKS[self.peak])

    @property
    def host(self) -> int:
        """Return the bytes of the host's memory for one device."""
        return self.of("host")


class Tensor(NamedTuple):
    """One activation of a block: elements of a micro-batch on a device, and bytes of each."""

    elements: int
    itemsize: int

    @property
    def bytes(self) -> int:
        return self.elements * self.itemsize


def estimate(layout: Layout) -> Memory:
    """Return what training with this layout needs, by cause."""
    return Memory(
        tuple(
            part
            for part in (*_state(layout), *_activations(layout), *_loss(layout), *_block(layout))
            if part.bytes
        )
    )


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
        if m.stacked:  # a scan stores what JAX saves: float32 in and out of norms and activations
            device["float32 copies"] = 2 * (
                6 * found["block_in"].elements + (5 if m.gated else 4) * found["up"].elements
            )
        if scores := _scores(layout):
            device["scores"] = scores
        return device, {}
    names = {"block_in", *m.remat_save}
    names |= {"lse"} if "attn" in names | {*m.remat_offload} else set()
    offloaded = {name: found[name].bytes for name in m.remat_offload if name in found}
    device = {n: found[n].bytes for n in sorted(names) if n in found and n not in offloaded}
    return device, offloaded


def state_bytes(layout: Layout) -> dict[str, int]:
    """Return the bytes of the training state on a device, by cause."""
    total = dict(layout.replicated)
    for weight in layout.weights:
        for cause, size in weight.state.items():
            total[cause] = total.get(cause, 0) + size * layout.held(weight)
    return total


def _state(layout: Layout) -> list[Part]:
    held = sum(map(layout.held, layout.weights))
    per = {}
    for weight in layout.weights:
        for cause, size in weight.state.items():
            per[cause] = per.get(cause, 0) + size * weight.count
    whole = sum(weight.count for weight in layout.weights)
    parts = [
        Part(
            cause,
            size,
            f"{_per(per.get(cause, 0), whole)}{held:,} weights [of {whole:,}]",
            "always",
        )
        for cause, size in state_bytes(layout).items()
        if cause != "counters"
    ]
    t, A = layout.cfg.train, layout.accum
    if A > 1:
        how = f"float32 sums over {A} micro-batches: 4 x {held:,}"
        parts.append(Part("accumulated gradients", 4 * held, how, "always"))
    moment: Moment = "gradients" if A == 1 else "block"
    how = f"{t.param_dtype}: {layout.param} x {held:,}"
    parts.append(Part("gradients", layout.param * held, how, moment))
    fields = 5 if layout.cfg.data.document_mask else 3
    size = PREFETCHED * A * layout.rows * layout.length * 4 * fields
    how = f"{PREFETCHED} x {A} x {layout.rows} rows x {layout.length} tokens x {fields} x 4"
    return [*parts, Part("batches", size, how, "always")]


def _per(total: int, count: int) -> str:
    return f"{total / count:.3g} bytes x " if total else ""


def _activations(layout: Layout) -> list[Part]:
    device, host = kept(layout)
    if layout.sizes["stage"] > 1:
        turns = layout.ticks
        blocks = turns * (layout.layers // layout.cfg.mesh.rounds)
        where = f"{turns} turns of the pipeline x {layout.layers // layout.cfg.mesh.rounds} blocks"
    else:
        blocks, where = layout.layers, f"{layout.layers} blocks"
    parts = []
    for moment, names in (("saved", device), ("host", host)):
        for name, size in names.items():
            how = f"{where} x {size:,} ({layout.tokens:,} tokens)"
            parts.append(Part(f"saved {name}", blocks * size, how, moment))
    return parts


def _loss(layout: Layout) -> list[Part]:
    """Return what the loss of one micro-batch needs: the head, its gradient, a chunk of logits."""
    cfg, D = layout.cfg, layout.cfg.model.embed_dim
    vocab = layout.split(cfg.model.vocab_size, "tensor")
    most = max(1, chunk_tokens(cfg.model.vocab_size, layout.target.chip.platform) // layout.rows)
    positions = -(-layout.length // -(-layout.length // most))
    tokens = positions * layout.rows
    # The product is rounded and widened where it is written: on a TPU v5e the compiler kept 6 bytes
    # per logit at once in bfloat16, not 8.
    size, c = vocab * D, layout.compute
    each = 4 + c
    return [
        Part("head", c * size, f"gathered: {c} x {vocab:,} ids x {D:,}", "loss"),
        Part("gradient of the head", 4 * size, f"float32: 4 x {vocab:,} ids x {D:,}", "loss"),
        Part("logits", each * tokens * vocab,
             f"a chunk of {tokens:,} tokens x {vocab:,} ids x {each} (float32 4, gradient {c})",
             "loss"),
        Part("hidden states", 2 * c * layout.tokens * D,
             f"and their gradient: 2 x {c} x {layout.tokens:,} tokens x {D:,}", "loss"),
    ]  # fmt: skip


def _block(layout: Layout) -> list[Part]:
    """Return what the backward pass of one block needs besides what was saved."""
    m, c, found = layout.cfg.model, layout.compute, tensors(layout)
    layers = m.num_layers
    weights = [weight for weight in layout.weights if weight.in_layers]
    one = sum(layout.used(weight) // layers for weight in weights) * layout.sizes["stage"]
    split = any(layout.gathered_over(weight) for weight in weights)
    copies = 2 if split else 1
    parts = [
        Part("gathered weights" if split else "weights as multiplied", copies * c * one,
             f"{'this block and the next: 2 x ' if split else ''}{c} x {one:,}", "block"),
    ]  # fmt: skip
    if split:
        parts.append(Part("their gradients", c * one, f"before they are summed: {c} x {one:,}",
                          "block"))  # fmt: skip
    recomputed = sum(tensor.bytes for tensor in found.values()) - sum(kept(layout)[0].values())
    if m.remat != "none" and recomputed > 0:
        how = f"all tensors of a block but the saved ones, {layout.tokens:,} tokens"
        parts.append(Part("recomputed", recomputed, how, "block"))
    mlp = sum(found[name].bytes for name in ("gate", "up", "hidden") if name in found)
    attention = sum(found[name].bytes for name in ("q", "k", "v", "attn"))
    most, where = max((mlp, "MLP"), (attention, "attention"))
    stream = 2 * found["block_in"].bytes
    how = f"the {where}'s {most:,} + the residual stream's {stream:,}"
    parts.append(Part("gradients of activations", most + stream, how, "block"))
    if (scores := _scores(layout)) > 0:
        how = "rows x heads x queries x keys, float32 and as multiplied"
        parts.append(Part("attention scores", scores, how, "block"))
    return parts


def _scores(layout: Layout) -> int:
    """Return the bytes of the scores of one block, where attention holds them."""
    cfg, platform = layout.cfg, layout.target.chip.platform
    if platform in ("tpu", "gpu") and cfg.train.attention in FLASH:
        return 0
    T = layout.length
    heads = layout.split(cfg.model.num_heads, "tensor")
    # Row blocks on a CPU stop at the diagonal.
    below = 2 if platform == "cpu" and cfg.train.attention in ("auto", "blocks") else 1
    return math.prod((layout.rows, heads, T, T, 4 + layout.compute)) // below
