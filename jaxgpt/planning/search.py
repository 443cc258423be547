"""Which mesh, recomputation and micro-batch are fastest by the analytic model.

Every mesh that a machine and a model allow is tried with each way of recomputation and the largest
micro-batch that fits; candidates are ranked by the least time of a step, then by what they send.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt import config
from jaxgpt.config import Config, with_values
from jaxgpt.errors import ConfigError
from jaxgpt.parallel.mesh import BATCH_AXES, CROSS_SLICES
from jaxgpt.planning.hardware import Target
from jaxgpt.planning.layout import Layout, StateSizes, layout, state_sizes
from jaxgpt.planning.memory import Memory, estimate, state_bytes
from jaxgpt.planning.roofline import Bound, bound, least_seconds
from jaxgpt.toml_values import dump, read_toml
from jaxgpt.validation import problems_of

# From the fastest to the smallest: nothing recomputed, then less and less kept.
LADDER: tuple[dict[str, Any], ...] = (
    {"remat": "none", "remat_save": (), "remat_offload": ()},
    {"remat": "full", "remat_save": ("q", "k", "v", "attn", "attn_out", "gate", "up"),
     "remat_offload": ()},
    {"remat": "full", "remat_save": ("q", "k", "v", "attn", "gate"), "remat_offload": ()},
    {"remat": "full", "remat_save": ("q", "k", "v", "attn"), "remat_offload": ()},
    {"remat": "full", "remat_save": ("attn",), "remat_offload": ()},
    {"remat": "full", "remat_save": (), "remat_offload": ()},
    {"remat": "full", "remat_save": (), "remat_offload": ("block_in",)},
)  # fmt: skip
# Beyond, exchanges cost more than they save.
MOST = {"tensor": 16, "context": 16, "stage": 16, "rounds": 8}
ROOM = 0.95  # of the memory: a compiler's own copies and padding are not counted here
LEAST_PART = 2048  # tokens of a row on a device


class Candidate(NamedTuple):
    """A configuration on a machine, with what it needs."""

    layout: Layout
    memory: Memory
    bound: Bound

    @property
    def cfg(self) -> Config:
        return self.layout.cfg

    @property
    def fits(self) -> bool:
        return fits(self.layout, self.memory)


def fits(at: Layout, memory: Memory, share: float = 1.0) -> bool:
    """Tell whether the analytic bytes fit a share of the device, and what is offloaded its host."""
    host = memory.host * at.target.num_devices / at.target.num_hosts
    return memory.device <= share * at.target.usable and host <= 0.9 * at.target.chip.host_memory


def evaluate(cfg: Config, target: Target, known: StateSizes | None = None) -> Candidate:
    """Return memory and time of `cfg` on `target`; raises ConfigError where it cannot run."""
    at = layout(cfg, target, known)
    return Candidate(at, estimate(at), bound(at))


def search(cfg: Config, target: Target, limit: int = 10) -> list[Candidate]:
    """Return the best candidates that fit, the fastest first; model, batch and run as in `cfg`.

    What the command line says of mesh, recomputation and micro-batch (see `given`) stays so.
    """
    known, found, kept = state_sizes(cfg), [], given(cfg)
    over = [at for mesh in meshes(cfg, target) for at in _layouts(cfg, target, known, mesh)]
    over = [at for at in over if _agrees("mesh", vars(at.cfg.mesh), kept)]
    for rung in LADDER:
        if not _agrees("model", rung, kept):
            continue
        model = dataclasses.replace(cfg.model, **rung)
        here = [dataclasses.replace(a, cfg=dataclasses.replace(a.cfg, model=model)) for a in over]
        # Products alone take this long: no mesh or micro-batch can make up for it.
        here = [at for at in here if least_seconds(at) <= _to_beat(found, limit)]
        for least, at in sorted(((_least(at), at) for at in here), key=lambda pair: pair[0]):
            if least > _to_beat(found, limit):
                break
            if (best := _best_micro(at, kept.get("train.micro_batch"))) is not None:
                bisect.insort(found, best, key=_rank)
    return [c for c in found if not problems_of(c.cfg)][:limit]


def given(cfg: Config) -> dict[str, Any]:
    """Return the values by name that words of the command line have set; no -1, which is open."""
    named = {
        name: getattr(getattr(cfg, section), key)
        for name, origin in cfg.origins.items()
        if origin.startswith(config.OVERRIDE)
        for section, key in [name.split(".")]
    }
    return {name: value for name, value in named.items() if value != -1}


def _agrees(section: str, values: Mapping[str, Any], kept: Mapping[str, Any]) -> bool:
    return all(kept.get(f"{section}.{key}", value) == value for key, value in values.items())


def _layouts(
    cfg: Config, target: Target, known: StateSizes, mesh: dict[str, int]
) -> Iterator[Layout]:
    """Yield the layouts on a mesh with the smallest micro-batch, but those that are refused."""
    micro = math.prod(mesh[axis] for axis in BATCH_AXES)
    for rounds, slow in itertools.product(_rounds(cfg, mesh), slow_parts(mesh, target.num_slices)):
        sizes = {**vars(cfg.mesh), **mesh, "rounds": rounds, "slow": slow}
        tried = with_values(cfg, "search", mesh=sizes, train={"micro_batch": micro})
        try:
            at = layout(tried, target, known)
        except ConfigError:
            continue
        if sum(state_bytes(at).values()) <= ROOM * target.usable:
            yield at


def _rounds(cfg: Config, mesh: dict[str, int]) -> list[int]:
    if mesh["stage"] == 1:
        return [1]
    return [r for r in divisors(cfg.model.num_layers // mesh["stage"]) if r <= MOST["rounds"]]


def slow_parts(mesh: dict[str, int], num_slices: int) -> list[dict[str, int]]:
    """Return the ways to lay slices over axes, each `mesh.slow`; {} is the one of the default.

    One axis takes as many as it can, then the next: in each order of data, stage and fsdp.
    """
    ways: list[dict[str, int]] = []
    for order in itertools.permutations(CROSS_SLICES):
        left, way = num_slices, {}
        for axis in order:
            if (parts := math.gcd(mesh[axis], left)) > 1:
                way[axis], left = parts, left // parts
        if left == 1 and way not in ways:
            ways.append(way)
    whole = next(({a: num_slices} for a in CROSS_SLICES if mesh[a] % num_slices == 0), None)
    return [{} if way == whole else way for way in ways]


def _rank(candidate: Candidate) -> tuple[float, float, int]:
    sent = sum(transfer.seconds for transfer in candidate.bound.transfers)
    return candidate.bound.seconds, sent, candidate.memory.device


def _to_beat(found: list[Candidate], limit: int) -> float:
    return found[limit - 1].bound.seconds if len(found) >= limit else math.inf


def _least(at: Layout) -> float:
    """Return seconds of a step that no micro-batch can be below: with all rows in one.

    That exchanges weights least often. Without what more of them make less: a pipeline's waiting,
    and what its stages hand on while it fills.
    """
    train = dataclasses.replace(at.cfg.train, micro_batch=at.cfg.train.global_batch)
    found = bound(dataclasses.replace(at, cfg=dataclasses.replace(at.cfg, train=train)))
    others = tuple(t for t in found.transfers if t.axis != "stage")
    return dataclasses.replace(found, bubble=0.0, transfers=others).seconds


def _best_micro(at: Layout, only: int | None = None) -> Candidate | None:
    """Return the candidate with the best micro-batch that fits, or None; `only`: the given one.

    The largest exchanges weights least often; a pipeline waits less with more of them.
    """
    best, train = None, at.cfg.train
    for micro in divisors(train.global_batch):
        if micro % at.batch_shards or only not in (None, micro):
            continue
        if at.cfg.mesh.rounds > 1 and train.global_batch // micro < at.sizes["stage"]:
            break  # rounds need a micro-batch for each stage
        cfg = dataclasses.replace(at.cfg, train=dataclasses.replace(train, micro_batch=micro))
        tried = dataclasses.replace(at, cfg=cfg)
        memory = estimate(tried)
        if not fits(tried, memory, ROOM):
            break  # larger ones need more
        candidate = Candidate(tried, memory, bound(tried))
        if best is None or _rank(candidate) < _rank(best):
            best = candidate
    return best


def meshes(cfg: Config, target: Target) -> Iterator[dict[str, int]]:
    """Yield the devices per axis of every mesh worth trying."""
    m, n = cfg.model, target.num_devices
    domain = target.devices_per_slice
    tensor = [
        t
        for t in divisors(math.gcd(m.kv_heads, n))
        if t <= min(MOST["tensor"], domain) and m.mlp_width % t == 0 and m.expert_width % t == 0
    ]
    context = [
        c
        for c in divisors(n)
        if c <= MOST["context"] and (c == 1 or m.seq_len % (2 * c) == 0)
        and (c == 1 or m.seq_len // c >= LEAST_PART)
    ]  # fmt: skip
    expert = divisors(math.gcd(m.num_experts, n)) if m.num_experts else [1]
    stage = [s for s in divisors(math.gcd(m.num_layers, n)) if s <= MOST["stage"]]
    for t, c, e, s in itertools.product(tensor, context, expert, stage if m.stacked else [1]):
        rest = n // (t * c * e * s)
        if rest * t * c * e * s != n or cfg.train.global_batch % (rest * e):
            continue
        for fsdp in divisors(rest):
            yield {
                "data": rest // fsdp, "fsdp": fsdp, "tensor": t, "context": c, "expert": e,
                "stage": s,
            }  # fmt: skip


def divisors(number: int) -> list[int]:
    """Return the numbers that divide one, from 1 on."""
    return [d for d in range(1, number + 1) if number % d == 0]


def write_preset(path: Path, chosen: Config, preset: str | None, comment: str) -> None:
    """Write `chosen` as a preset with `base =` the given one (or its base), and the differences.

    Raises ConfigError where the file cannot be written.
    """
    base: Path | None = None
    if preset is not None:
        own = read_toml(Path(preset))[0].get("base")
        base = Path(preset).parent / own if isinstance(own, str) else Path(preset)
    before = config.to_dict(config.load(base) if base else Config())
    after = config.to_dict(chosen)
    changed = {
        section: {key: value for key, value in values.items() if before[section][key] != value}
        for section, values in after.items()
    }
    lines = [f"# {line}" for line in comment.splitlines()]
    if base is not None:
        where = os.path.relpath(base.resolve(), path.resolve().parent)
        lines += ["", f"base = {json.dumps(where)}"]
    text = "\n".join([*lines, "", dump({s: v for s, v in changed.items() if v}, {})])
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
