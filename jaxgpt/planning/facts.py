"""What is known of a train step before it is compiled, for `planning.audit` to compare with.

Leaves of the state with their shapes, whole and on one device, and the numbers of the configuration
that say how often something is exchanged and how much of it is held at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jaxgpt.config import Config
from jaxgpt.planning import hlo

# Name of an attention implementation -> what stands in the text for it.
KERNELS = {"splash": "splash", "cudnn": "__cudnn$fmha"}


class Leaf(NamedTuple):
    """A leaf of the state, whole and as one device holds it."""

    path: str  # such as params/layers/wq
    dtype: str
    shape: tuple[int, ...]
    local: tuple[int, ...]

    @property
    def local_bytes(self) -> int:
        return hlo.num_bytes(f"{_hlo_type(self.dtype)}[{','.join(map(str, self.local))}]")


class Facts(NamedTuple):
    """What the checks compare with. `mesh`: axis sizes. `chunk_tokens`: of the loss, per device."""

    mesh: Mapping[str, int]
    leaves: tuple[Leaf, ...]
    num_layers: int
    stacked: bool
    vocab_size: int
    half: bool  # compute dtype has 16 bits
    micro_batches: int
    chunk_tokens: int
    kernels: tuple[str, ...]  # what stands in the text for each attention kernel
    platform: str
    losses: int = 1  # per micro-batch: of the last layer, and of those of `model.aux_layers`
    torus: int = 0  # devices of a TPU slice that has rings along three dimensions; else 0

    @property
    def state_bytes(self) -> int:
        """Return the bytes of the state on each device."""
        return sum(leaf.local_bytes for leaf in self.leaves)

    @property
    def matrices(self) -> tuple[Leaf, ...]:
        """Return the parameters that are matrices, per layer, and multiplied in the compute dtype.

        Routers and learned positions are used in float32, and gathered so.
        """
        float32 = ("router", "pos_embed")
        return tuple(leaf for leaf in self.tables if leaf.path.rpartition("/")[2] not in float32)

    @property
    def tables(self) -> tuple[Leaf, ...]:
        """Return the parameters that are matrices, per layer, whatever they are multiplied in."""
        params = [leaf for leaf in self.leaves if leaf.path.startswith("params/")]
        return tuple(leaf for leaf in params if len(leaf.shape) - self.is_stacked(leaf) >= 2)

    def is_stacked(self, leaf: Leaf) -> bool:
        """Tell whether a parameter holds all layers."""
        return self.stacked and "/layers" in leaf.path

    @property
    def smallest_table(self) -> int:
        """Return the elements that a device holds of a layer's smallest table that is split."""
        split = [leaf for leaf in self.tables if leaf.local != leaf.shape]
        return min(map(self.layer_size, split), default=0)

    def layer_size(self, leaf: Leaf) -> int:
        """Return the elements that a device holds of a parameter, of one layer if of several."""
        return math.prod(leaf.local) // (leaf.local[0] if self.is_stacked(leaf) else 1)


def facts(
    cfg: Config,
    mesh: Mapping[str, int],
    leaves: Sequence[tuple[str, str, tuple[int, ...], tuple[int, ...]]],
    *,
    chunk_tokens: int,
    attention: Iterable[str],
    platform: str,
    torus: int = 0,
) -> Facts:
    """Return what is known of a step; `attention`: the ways in which its blocks compute it."""
    return Facts(
        mesh=mesh,
        leaves=tuple(Leaf(*leaf) for leaf in leaves),
        num_layers=cfg.model.num_layers,
        stacked=cfg.model.stacked,
        vocab_size=cfg.model.vocab_size,
        half=cfg.train.compute_dtype == "bfloat16",
        micro_batches=cfg.train.accum_steps,
        chunk_tokens=chunk_tokens,
        kernels=tuple(sorted(KERNELS[name] for name in attention if name in KERNELS)),
        platform=platform,
        losses=1 + len(cfg.model.aux_layers),
        torus=torus,
    )


def _hlo_type(dtype: str) -> str:
    """Return HLO's name of a NumPy dtype: float32 is f32, bfloat16 bf16, int32 s32."""
    for name, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "s")):
        if dtype.startswith(name):
            return short + dtype.removeprefix(name)
    return "pred"
