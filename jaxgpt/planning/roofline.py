"""How fast a step can be at most: work over rate for each resource, and what cannot overlap.

The bound is what no program with this layout can beat, not a forecast: matrix products run at the
published peak, links at theirs, and whatever may overlap does so perfectly. On the critical path,
and added up, are the exchanges that the next product waits for (tensor, experts, stages), and the
update of the weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from jaxgpt.model.gpt import flops_per_token
from jaxgpt.planning.layout import Layout
from jaxgpt.planning.memory import state_bytes
from jaxgpt.planning.tensors import tensors
from jaxgpt.planning.transfers import Transfer, transfers
from jaxgpt.validation import num_steps

# 419 unexpected interruptions in 54 days on 16,384 H100 (Llama 3, arXiv:2407.21783, section 3.3.4).
FAILURES_PER_DEVICE_DAY = 419 / 54 / 16_384
SQUARE = {"dot_product", "reference"}  # ways of attention that compute what lies above the diagonal
# A tensor of a block is written and read forward, read backward, and its gradient written once and
# read twice (for its weights and its inputs): at least, if all else is fused.
PASSES, PASSES_AGAIN = 6, 2


@dataclass(frozen=True)
class Bound:
    """The least time of a step, in seconds, and what it is made of."""

    flops: float  # causal model FLOPs of a step, all devices
    compute: float  # model FLOPs at the peak
    recompute: float
    bubble: float  # devices wait for the pipeline to fill and drain
    memory: float  # traffic of forward and backward passes
    update: float  # traffic of the optimiser
    transfers: tuple[Transfer, ...]
    peak: float  # FLOP/s of all devices

    @property
    def links(self) -> dict[str, float]:
        """Return the seconds of each link for what may overlap."""
        total: dict[str, float] = {}
        for t in self.transfers:
            if t.overlaps:
                total[t.link] = total.get(t.link, 0.0) + t.seconds
        return total

    @property
    def exposed(self) -> float:
        """Return the seconds of exchanges that nothing can hide."""
        return sum(t.seconds for t in self.transfers if not t.overlaps)

    @property
    def resources(self) -> dict[str, float]:
        """Return the seconds of everything that can go on at the same time."""
        busy = self.compute + self.recompute + self.bubble
        return {"matrix units": busy, "memory": self.memory, **self.links}

    @property
    def limit(self) -> str:
        """Return the resource that takes longest."""
        return max(self.resources, key=self.resources.__getitem__)

    @property
    def seconds(self) -> float:
        return max(self.resources.values()) + self.exposed + self.update

    @property
    def mfu(self) -> float:
        """Return the highest possible utilisation, causal count."""
        return self.flops / (self.seconds * self.peak)


def bound(layout: Layout) -> Bound:
    """Return the least time of one update."""
    cfg, chip, devices = layout.cfg, layout.target.chip, layout.target.num_devices
    model, tokens = cfg.model, cfg.train.global_batch * cfg.model.seq_len
    skips = not layout.attention & SQUARE
    flops = tokens * flops_per_token(model, causal=True)
    done = flops if skips else tokens * flops_per_token(model, causal=False)
    again = tokens * recomputed(layout, skips)
    rate = chip.flops * devices
    busy = (done + again) / rate
    turns = layout.accum * (cfg.mesh.rounds if layout.sizes["stage"] > 1 else 1)
    return Bound(
        flops=flops,
        compute=done / rate,
        recompute=again / rate,
        bubble=busy * (layout.sizes["stage"] - 1) / turns,
        memory=_traffic(layout) / chip.bandwidth,
        update=update_bytes(layout) / chip.bandwidth,
        transfers=tuple(transfers(layout)),
        peak=rate,
    )


def least_seconds(layout: Layout) -> float:
    """Return the seconds of the matrix products of a step alone, on all devices."""
    cfg = layout.cfg
    tokens, causal = cfg.train.global_batch * cfg.model.seq_len, not layout.attention & SQUARE
    work = flops_per_token(cfg.model, causal) + recomputed(layout, causal)
    return tokens * work / (layout.target.chip.flops * layout.target.num_devices)


def bubble_share(layout: Layout) -> float:
    """Return the share of a step in which a stage waits: (S - 1) / (A R + S - 1)."""
    return (layout.sizes["stage"] - 1) / layout.ticks


def recomputed(layout: Layout, causal: bool) -> float:
    """Return the floating-point operations per token that are done twice.

    Of a recomputed block those products whose results were not saved; and what flash attention
    always repeats in its backward pass, the product of queries and keys.
    """
    m = layout.cfg.model
    D, N, K, H = m.embed_dim, m.num_heads, m.kv_heads, m.head_width
    F = m.expert_width * m.experts_per_token if m.num_experts else m.mlp_width
    F += m.shared_dim
    keys = 0.0
    for layer in range(m.num_layers):
        seen = min(m.window(layer) or m.seq_len, m.seq_len)
        keys += seen - seen**2 / (2 * m.seq_len) if causal else seen
    flash = 2 * N * H * keys if causal else 0.0
    if m.remat == "none":
        return flash
    post = m.norm_placement != "pre"  # then a norm needs what a sub-layer gave
    again = {
        "q": 2 * D * N * H, "k": 2 * D * K * H, "v": 2 * D * K * H, "attn_out": 2 * N * H * D,
        "gate": 2 * D * F if m.gated else 0, "up": 2 * D * F, "mlp_out": 2 * F * D if post else 0,
    }  # fmt: skip
    saved = {*m.remat_save, *m.remat_offload}
    if layout.piped and layout.at_once > 1:
        # A stage is computed again for the inputs of its blocks, all but its last one.
        forward = sum(again.values()) + (0 if post else 2 * F * D)
        twice = m.num_layers * forward + 4 * N * H * keys
        flash += twice * (layout.at_once - 1) / layout.at_once
    total = m.num_layers * sum(work for name, work in again.items() if name not in saved)
    return total + flash + (0 if "attn" in saved else 4 * N * H * keys)


def _traffic(layout: Layout) -> float:
    """Return the bytes that forward and backward passes move through a device's memory."""
    m, c = layout.cfg.model, layout.compute
    again = m.remat != "none"
    weights = sum(map(layout.used, layout.weights))
    held = sum(map(layout.held, layout.weights))
    # Read forward, backward and again; cast once from what is held; gradients written and added.
    per_micro = weights * c * (3 if again else 2) + held * (layout.param + 4)
    per_micro += 8 * held if layout.accum > 1 else 0
    passes = PASSES + (PASSES_AGAIN if again else 0)
    blocks = sum(tensor.bytes for tensor in tensors(layout).values())
    per_micro += passes * blocks * layout.layers
    vocab = layout.split(m.vocab_size, "tensor")
    per_micro += 6 * c * layout.tokens * vocab  # logits: written, read twice; so is their gradient
    return per_micro * layout.accum


def update_bytes(layout: Layout) -> float:
    """Return the bytes of one update: all of the state read and written, and gradients read.

    AdamW in float32: 2 x 12 + 4 = 28 bytes per weight.
    """
    held = sum(map(layout.held, layout.weights))
    gradient = 4 if layout.accum > 1 else layout.param
    return 2 * sum(state_bytes(layout).values()) + gradient * held


class Run(NamedTuple):
    """What a whole run takes at the bound; None where its length is not known."""

    tokens_per_step: int
    tokens_per_day: float
    steps: int | None
    days: float | None
    device_hours: float | None


def run(layout: Layout, seconds: float) -> Run:
    """Return the length of a run whose steps take so long, saving and evaluation not counted."""
    cfg = layout.cfg
    tokens = cfg.train.global_batch * cfg.model.seq_len
    steps = num_steps(cfg) or None
    days = steps * seconds / 86_400 if steps else None
    hours = days * 24 * layout.target.num_devices if days else None
    return Run(tokens, tokens * 86_400 / seconds, steps, days, hours)


class Saving(NamedTuple):
    """What a checkpoint costs, and how often to save."""

    bytes: float
    blocking: float  # seconds in which training waits: device to host
    failures_per_day: float
    interval: float  # seconds between checkpoints


def saving(layout: Layout) -> Saving:
    """Return checkpoint size, blocking time and the best interval: sqrt(2 C M) (Young 1974).

    C is the time that a save blocks, the host's share of the state over its devices' links; M the
    mean time between failures, at `FAILURES_PER_DEVICE_DAY`.
    """
    total = sum(w.count * sum(w.state.values()) for w in layout.weights)
    total += sum(layout.replicated.values())
    share = total / layout.target.num_devices
    blocking = share / layout.target.chip.host_link
    rate = FAILURES_PER_DEVICE_DAY * layout.target.num_devices
    return Saving(total, blocking, rate, math.sqrt(2 * blocking * 86_400 / rate))
