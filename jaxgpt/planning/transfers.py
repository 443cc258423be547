"""What devices exchange in one step by a layout: bytes, over which links, and the least time.

Weights are gathered and gradients scattered over the axes that split them, replicas add up theirs,
and blocks exchange activations. Nothing here has seen a compiler; `planning.exchanged` compares.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from jaxgpt.chips import Chip
from jaxgpt.model.exchange import SLACK
from jaxgpt.planning.hardware import Rings, axis_rings
from jaxgpt.planning.layout import Layout, Weight
from jaxgpt.planning.tensors import kept, tensors


class Transfer(NamedTuple):
    """One kind of exchange: what a device sends in a step, over which links, in which time."""

    what: str
    axis: str  # mesh axis, or "host"
    link: str  # the resource: "links of fsdp", "NVLink", "network", "host link"
    bytes: float
    seconds: float
    overlaps: bool  # can go on while a device computes; else it is in the open


class Links(NamedTuple):
    """What each mesh axis has to send over, within a slice and between slices."""

    chip: Chip
    fast: dict[str, int]  # devices of an axis in one slice
    slow: dict[str, int]  # slices that an axis reaches into
    rings: dict[str, Rings]
    torus: int  # devices of a slice that is a torus of three rings; else 0

    def rate(self, axis: str) -> float:
        """Return the bytes per second of a device along an axis, within a slice."""
        return self.chip.link * max(1, sum(links for _, links in self.rings[axis]))

    def name(self, axis: str) -> str:
        return "NVLink" if self.chip.platform == "gpu" else f"links of {axis}"

    def whole_torus(self, axes: Iterable[str]) -> bool:
        """Tell whether axes together take a whole 3-D torus.

        Over that libtpu (0.0.50) does not gather: it adds up whole buffers, of which each device
        has filled a part, while nothing else is computed.
        """
        return 0 < self.torus == math.prod(self.fast[axis] for axis in axes)


def links_of(layout: Layout) -> Links:
    """Return what the axes of a layout have to send over."""
    target = layout.target
    fast = {axis: n // layout.slow[axis] for axis, n in layout.sizes.items()}
    torus = target.devices_per_slice if target.chip.torus == 3 and all(target.wraps) else 0
    return Links(target.chip, fast, layout.slow, axis_rings(target, fast), torus)


def transfers(layout: Layout) -> Iterator[Transfer]:
    """Yield what a device sends in one step."""
    links, c = links_of(layout), layout.compute
    for weight in layout.weights:
        axes, whole = layout.gathered_over(weight), layout.used(weight)
        times, passes = _times(layout, weight)
        if weight.name == "embed":
            yield from _looked_up(layout, links, axes)
        if axes and (weight.name != "embed" or layout.cfg.model.tie_embeddings):
            gradients = whole * _gradient_bytes(weight, c) * times
            yield from gather(links, axes, whole * c * times * passes, gradients)
        for axis in layout.reduced_over(weight):
            # Replicas sum the gradients of their micro-batches and meet once.
            once = axis == "data" and (layout.accum > 1 or layout.piped)
            size = layout.held(weight) * (4 if once else _gradient_bytes(weight, c))
            yield from over(links, "gradients", axis, 2 * size * (1 if once else times))
    yield from _by_block(layout, links)
    host = sum(kept(layout)[1].values()) * layout.accum * layout.layers * 2
    if host:
        yield Transfer("offloaded", "host", "host link", host, host / links.chip.host_link, True)


def gather(links: Links, axes: Sequence[str], whole: float, gradients: float) -> Iterator[Transfer]:
    """Yield gathers of `whole` bytes of weights over axes together, and scatters of gradients.

    The last axis is the innermost.
    """
    in_sums = links.whole_torus(axes)
    for axis in reversed(axes):
        # Of a 70B twin on 4x4x4 chips gathers sent twice the bytes, scatters no more than others.
        for what, size, times in (("weights", whole, 2), ("gradients", gradients, 1)):
            for part in over(links, what, axis, size, overlaps=not in_sums):
                slower = times if in_sums and part.link != "network" else 1
                yield part._replace(bytes=part.bytes * slower, seconds=part.seconds * slower)
        parts = links.fast[axis] * links.slow[axis]
        whole, gradients = whole / parts, gradients / parts


def over(
    links: Links, what: str, axis: str, whole: float, *, overlaps: bool = True
) -> Iterator[Transfer]:
    """Yield a gather or scatter (for both: twice the bytes) of `whole` bytes over one axis."""
    f, s = links.fast[axis], links.slow[axis]
    if f > 1:
        sent = whole * (f - 1) / f
        yield Transfer(what, axis, links.name(axis), sent, sent / links.rate(axis), overlaps)
    if s > 1:
        sent = whole / f * (s - 1) / s
        yield Transfer(what, axis, "network", sent, sent / links.chip.network, overlaps)


def all_to_all(
    links: Links, what: str, axis: str, whole: float, *, overlaps: bool = False
) -> Iterator[Transfer]:
    """Yield an exchange of parts of `whole` bytes with all devices of an axis."""
    f, s = links.fast[axis], links.slow[axis]
    if f > 1:
        sent = whole / s * (f - 1) / f
        if links.chip.platform == "gpu":
            seconds = sent / links.chip.link
        else:
            # Around a ring of n a message crosses n / 4 links on average; rings work at once.
            crossed = max(n / 4 / count for n, count in links.rings[axis])
            seconds = max(sent / links.rate(axis), whole / s * crossed / links.chip.link)
        yield Transfer(what, axis, links.name(axis), sent, seconds, overlaps)
    if s > 1:
        sent = whole * (s - 1) / s
        yield Transfer(what, axis, "network", sent, sent / links.chip.network, overlaps)


def neighbour(links: Links, what: str, axis: str, sent: float, *, overlaps: bool) -> Transfer:
    """Return what is passed to one neighbour: over one link, or the network where it is slower."""
    chip = links.chip
    if links.slow[axis] > 1:
        return Transfer(what, axis, "network", sent, sent / chip.network, overlaps)
    return Transfer(what, axis, links.name(axis), sent, sent / chip.link, overlaps)


def _looked_up(layout: Layout, links: Links, axes: Sequence[str]) -> Iterator[Transfer]:
    """Yield what devices send that look up each other's tokens, and of the gradients back."""
    times = layout.places if layout.piped else layout.accum
    whole = 2.0 * times * layout.tokens * layout.cfg.model.embed_dim * layout.compute
    for axis in reversed(axes):
        yield from all_to_all(links, "looked-up embeddings", axis, whole, overlaps=True)
        whole /= layout.sizes[axis]


def _times(layout: Layout, weight: Weight) -> tuple[float, int]:
    """Return how often a step uses a weight, and how often each time it is gathered.

    A pipeline takes those of its blocks in each turn, also in one with nothing to do: forward,
    backward, and once more where several blocks of a stage are computed again from its input.
    """
    if not weight.in_layers:
        return (1 if layout.piped else layout.accum), 1
    if not layout.piped:
        return layout.accum, 2
    again = layout.cfg.model.remat == "full" and layout.at_once > 1
    return layout.ticks / layout.cfg.mesh.rounds, 3 if again else 2


def _gradient_bytes(weight: Weight, compute: int) -> int:
    """Return the bytes of an element where gradients are exchanged: sums by hand are float32."""
    return compute if weight.in_layers else 4


def _by_block(layout: Layout, links: Links) -> Iterator[Transfer]:
    """Yield what blocks exchange of activations."""
    m, A, c, t = layout.cfg.model, layout.accum, layout.compute, layout.tokens
    saved, again = {*m.remat_save, *m.remat_offload}, m.remat != "none"
    stream, blocks = t * m.embed_dim * c, A * layout.layers
    if layout.sizes["tensor"] > 1:
        # Two sums forward, two backward, and attention's again if it is recomputed.
        count = 4 + (1 if again and "attn_out" not in saved else 0)
        for what, sums in (("sums of activations", blocks * count), ("embedding and loss", 2 * A)):
            yield from over(links, what, "tensor", 2 * sums * stream, overlaps=False)
    if (C := layout.sizes["context"]) > 1:
        pair = c * sum(tensors(layout)[name].elements for name in ("k", "v"))
        # Keys and values around the ring, forward; they and their gradients, backward.
        count = 3 + (1 if again and "attn" not in saved else 0)
        sent = blocks * count * pair * (C - 1)
        yield neighbour(links, "keys and values", "context", sent, overlaps=True)
    if layout.sizes["expert"] > 1:
        # There and back, and the gradients; the backward pass brings the tokens once more. Places
        # that stay empty are sent too.
        limited = m.capacity_factor > 0
        count = 4 + (1 if again or not limited else 0)
        slots = m.experts_per_token * (m.capacity_factor or SLACK)
        yield from all_to_all(links, "tokens to experts", "expert", blocks * count * slots * stream)
    if layout.sizes["stage"] > 1:
        sent = 2 * layout.ticks * stream
        yield neighbour(links, "activations", "stage", sent, overlaps=False)
