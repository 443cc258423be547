"""Bytes of a device, and of its host, by what they are for: arithmetic from shapes and shardings.

State, gradients and batch are there all the time. The rest comes and goes, and only the largest of
three moments counts: the loss of a micro-batch, the backward pass of its last block, the update.
What a compiler adds (padding, copies, its own scheduling) is not in here; `planning.compile` asks
it. Sizes in [brackets] are those of a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from jaxgpt.model import narrow
from jaxgpt.model.blocks import halves
from jaxgpt.model.exchange import slots_per_turn
from jaxgpt.planning.layout import Layout
from jaxgpt.planning.tensors import kept, score_bytes, tensors
from jaxgpt.training.loss import chunk_size, chunk_tokens
from jaxgpt.training.step import narrowed

Moment = Literal["always", "saved", "gradients", "loss", "block", "host"]
# What is there at the three moments of which the largest counts.
PEAKS: dict[str, tuple[Moment, ...]] = {
    "loss": ("always", "saved", "loss"),
    "block": ("always", "saved", "gradients", "block"),
    "update": ("always", "gradients"),
}
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


def estimate(layout: Layout) -> Memory:
    """Return what training with this layout needs, by cause."""
    return Memory(
        tuple(
            part
            for part in (*_state(layout), *_activations(layout), *_loss(layout), *_block(layout))
            if part.bytes
        )
    )


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
    if layout.piped:
        how = f"float32 sums over the turns of the pipeline: 4 x {held:,}"
        parts.append(Part("gradients", 4 * held, how, "gradients"))
        size = sum(layout.held(weight) for weight in layout.weights if weight.in_layers)
        how = f"for all turns: {layout.compute} x {size:,}"
        parts.append(Part("weights as multiplied", layout.compute * size, how, "saved"))
    else:
        if A > 1:
            how = f"float32 sums over {A} micro-batches: 4 x {held:,}"
            parts.append(Part("accumulated gradients", 4 * held, how, "always"))
        moment: Moment = "gradients" if A == 1 else "block"
        short = 0
        if narrowed(layout.cfg, layout.target.chip.platform):
            matrices = {f"layers/{name}" for name in narrow.names(layout.cfg.model)}
            short = sum(layout.held(one) for one in layout.weights if one.name in matrices)
        how = f"{t.param_dtype}: {layout.param} x {held - short:,}"
        if short:
            how += f" + {t.compute_dtype}, of layers: {layout.compute} x {short:,}"
        size = layout.param * (held - short) + layout.compute * short
        parts.append(Part("gradients", size, how, moment))
    fields = 5 if layout.cfg.data.document_mask else 3
    size = PREFETCHED * A * layout.rows * layout.length * 4 * fields
    how = f"{PREFETCHED} x {A} x {layout.rows} rows x {layout.length} tokens x {fields} x 4"
    return [*parts, Part("batches", size, how, "always")]


def _per(total: int, count: int) -> str:
    return f"{total / count:.3g} bytes x " if total else ""


def _activations(layout: Layout) -> list[Part]:
    device, host = kept(layout)
    stream = layout.compute * layout.tokens * layout.cfg.model.embed_dim
    blocks, where = layout.layers, f"{layout.layers} blocks"
    parts = []
    if layout.piped:
        turns = layout.ticks
        blocks, where = turns * layout.at_once, f"{turns} turns x {layout.at_once} blocks"
        if "block_in" in device:  # of a stage; those of its blocks come back one turn at a time
            if layout.cfg.model.remat == "full":
                del device["block_in"]
            how = f"{turns} turns x {stream:,} ({layout.tokens:,} tokens)"
            parts.append(Part("inputs of a stage", turns * stream, how, "saved"))
        how = f"3 x {layout.places} micro-batches that wait or are done x {stream:,}"
        parts.append(Part("belt", 3 * layout.places * stream, how, "saved"))
        if taps := len(layout.cfg.model.aux_layers):
            # A belt of results for each auxiliary loss, its gradient, and what is normalised of it.
            how = f"{taps} auxiliary losses x 3 x {layout.places} micro-batches x {stream:,}"
            parts.append(Part("belts of auxiliary losses", 3 * taps * layout.places * stream, how,
                              "saved"))  # fmt: skip
    for moment, names in (("saved", device), ("host", host)):
        for name, size in names.items():
            how = f"{where} x {size:,} ({layout.tokens:,} tokens)"
            parts.append(Part(f"saved {name}", blocks * size, how, moment))
    return parts


def _loss(layout: Layout) -> list[Part]:
    """Return what the loss of one micro-batch needs: the head, its gradient, a chunk of logits."""
    cfg, D = layout.cfg, layout.cfg.model.embed_dim
    vocab = layout.split(cfg.model.vocab_size, "tensor")
    # A pipeline's stages share the loss of all micro-batches, each that of some.
    all_tokens = layout.tokens * layout.places
    most = chunk_tokens(cfg.model.vocab_size, layout.target.chip.platform)
    tokens = chunk_size(all_tokens, most)
    # The product is widened where it is read: only XLA for GPU writes it down in float32.
    size, c, gpu = vocab * D, layout.compute, layout.target.chip.platform == "gpu"
    wide = gpu or cfg.train.logits_dtype != "compute"
    each = (4 if wide else c) + c
    logits = Part(
        "logits",
        each * tokens * vocab,
        f"a chunk of {tokens:,} tokens x {vocab:,} ids x {each} (gradient {c})",
        "loss",
    )
    # Then their gradient gives a chunk's part of the head's.
    product = Part(
        "gradient of logits",
        c * tokens * vocab + c * size,
        f"{c} x {tokens:,} tokens x {vocab:,} ids + a part of the head's: {c} x {size:,}",
        "loss",
    )
    return [
        Part("head", c * size, f"gathered: {c} x {vocab:,} ids x {D:,}", "loss"),
        Part("gradient of the head", 4 * size, f"float32: 4 x {vocab:,} ids x {D:,}", "loss"),
        max(logits, product, key=lambda part: part.bytes),
        Part("hidden states", 2 * c * all_tokens * D,
             f"and their gradient: 2 x {c} x {all_tokens:,} tokens x {D:,}", "loss"),
        Part("final norm", 4 * all_tokens * D if layout.piped else 0,
             f"float32, of all micro-batches: 4 x {all_tokens:,} tokens x {D:,}", "loss"),
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
    exchanged = m.num_experts and layout.sizes["expert"] > 1 and not m.capacity_factor
    left = {**found}
    if exchanged:  # the tokens come back, and their slots among the experts turn by turn
        left = {n: t for n, t in found.items() if n not in ("gate", "up", "hidden")}
        left["mlp_in"] = found["block_in"]
    saved = kept(layout)[0]
    recomputed = sum(tensor.bytes for name, tensor in left.items() if name not in saved)
    wide, chip = found["up"].bytes, layout.target.chip
    if not m.num_experts and halves(m, m.mlp_width, wide, layout.sizes["tensor"], chip.platform):
        recomputed -= sum(found[n].bytes for n in ("gate", "up", "hidden") if n in found) // 2
        wide //= 2
    if m.remat != "none" and recomputed > 0:
        how = f"all tensors of a block but the saved ones, {layout.tokens:,} tokens"
        parts.append(Part("recomputed", recomputed, how, "block"))
    if m.stacked and m.remat == "none" and not layout.piped:
        how = "what one block keeps, on its way to the stack of all layers"
        parts.append(Part("beside the stack", sum(saved.values()), how, "block"))
    stream = 2 * found["block_in"].bytes
    if exchanged:
        parts += _experts(layout)
        how = f"the residual stream's {stream:,}"
        parts.append(Part("gradients of activations", stream, how, "block"))
    else:
        # Of a gated MLP the gradients of gate and up take the place of that of hidden.
        mlp = 2 * wide
        attention = sum(found[name].bytes for name in ("q", "k", "v", "attn"))
        most, where = max((mlp, "MLP"), (attention, "attention"))
        how = f"the {where}'s {most:,} + the residual stream's {stream:,}"
        parts.append(Part("gradients of activations", most + stream, how, "block"))
        if m.num_experts and not m.capacity_factor:
            parts += _own_experts(layout)
    if layout.piped and layout.at_once > 1:
        how = f"{layout.at_once} x {stream // 2:,}"
        parts.append(Part("inputs of blocks", layout.at_once * stream // 2, how, "block"))
    if "cudnn" in layout.attention and layout.cfg.data.document_mask:
        how = f"{layout.rows} rows x 2 x {layout.length:,}^2"
        parts.append(Part("mask of documents", 2 * layout.rows * layout.length**2, how, "block"))
    if (scores := score_bytes(layout)) > 0:
        how = "rows x heads x queries x keys, float32 and as multiplied"
        parts.append(Part("attention scores", scores, how, "block"))
    return parts


def _own_experts(layout: Layout) -> list[Part]:
    """Return what the backward pass of `model.dispatch.dropless` needs besides tensors by name."""
    m, c, gpu = layout.cfg.model, layout.compute, layout.target.chip.platform == "gpu"
    slots = layout.tokens * m.experts_per_token
    matrix = max(_matrices(layout))
    return [
        Part("results of experts", 2 * c * slots * m.embed_dim,
             f"and their gradient: 2 x {c} x {slots:,} slots x {m.embed_dim:,}", "block"),
        Part("sum of a matrix's gradient", 4 * matrix if gpu else 0,
             f"by blocks, float32: 4 x {matrix:,}", "block"),
    ]  # fmt: skip


def _matrices(layout: Layout) -> list[int]:
    """Return the elements of each matrix of the experts of a block, all that a device has."""
    return [
        layout.used(weight) // layout.cfg.model.num_layers
        for weight in layout.weights
        if weight.in_layers and {"experts", "embed", "mlp"} <= {*weight.axes}
    ]


def _experts(layout: Layout) -> list[Part]:
    """Return what the backward pass of a turn of `model.exchange` needs.

    Of twins of Mixtral 8x7B and Qwen3 30B-A3B with two layers: on a TPU v5p gate, up and hidden
    rows of F and five of D, on an H100 as much, or five of F and three of D.
    """
    m, c, E = layout.cfg.model, layout.compute, layout.sizes["expert"]
    D = m.embed_dim
    F = layout.split(m.expert_width, "tensor")
    rows = E * slots_per_turn(layout.tokens, m.experts_per_token, m.num_experts, E)
    widths = [(5, 3), (3, 5)] if layout.target.chip.platform == "gpu" else [(5, 3)]
    d, f = max(widths, key=lambda pair: pair[0] * D + pair[1] * F)
    own = sum(_matrices(layout))
    return [
        Part("slots of experts", c * rows * (d * D + f * F),
             f"{c} x {rows:,} places x ({d} x {D:,} + {f} x {F:,})", "block"),
        Part("sums of the experts' turns", 8 * layout.tokens * D + 4 * own,
             f"float32: 2 x 4 x {layout.tokens:,} tokens x {D:,} + 4 x {own:,} weights", "block"),
    ]  # fmt: skip
