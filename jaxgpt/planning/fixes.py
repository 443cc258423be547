"""What would make a configuration fit that needs more memory than a device has.

Changes are tried one at a time, and together where none is enough: by the analytic model, as
`search` does, with what each costs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxgpt.config import Config, with_values
from jaxgpt.errors import ConfigError
from jaxgpt.planning.hardware import GPU_FRACTION, gpu_fraction
from jaxgpt.planning.layout import Layout, StateSizes
from jaxgpt.planning.search import LADDER, Candidate, divisors, evaluate
from jaxgpt.validation import problems_of

# Where no change is enough alone: so many kinds are begun with, and so many made together.
FIRST, TOGETHER = 4, 4
FRACTION = 0.92  # of a GPU's memory, which leaves room for its context and libraries


class Fix(NamedTuple):
    """A change that needs less memory; `cfg` is None where it is no matter of configuration."""

    change: str
    cfg: Config | None
    saved: int  # bytes of a device
    seconds: float  # added to the least time of a step
    fits: bool

    @property
    def kind(self) -> str:
        """Return what is changed, without to what."""
        return " and ".join(sorted(re.findall(r"(?:^|; and )([a-zA-Z]+)", self.change)))


def fixes(start: Candidate, limit: int = 3) -> list[Fix]:
    """Return the cheapest changes that need less memory: those that then fit first, by time.

    Where none is enough alone, several at once that are.
    """
    found = _single_fixes(start)
    if not any(fix.fits for fix in found):
        found += _joint_fixes(start, found)
    found.sort(key=lambda f: (not f.fits, f.seconds if f.fits else -f.saved))
    best = {fix.kind: fix for fix in reversed(found)}  # one of each kind
    return [fix for fix in found if best[fix.kind] is fix][:limit]


def _joint_fixes(start: Candidate, single: list[Fix]) -> list[Fix]:
    """Return changes made together that fit: one of those that save most, then the next best."""
    best = {fix.kind: fix for fix in sorted(single, key=lambda fix: fix.saved) if fix.cfg}
    found = []
    for chain in sorted(best.values(), key=lambda fix: -fix.saved)[:FIRST]:
        while not chain.fits and len(chain.kind.split(" and ")) < TOGETHER:
            more = _single_fixes(evaluate(chain.cfg, start.layout.target))
            more = [fix for fix in more if fix.cfg and fix.kind not in chain.kind.split(" and ")]
            if not more:
                break
            fix = min(more, key=lambda f: (not f.fits, f.seconds if f.fits else -f.saved))
            change = f"{chain.change}; and {fix.change}"
            saved, seconds = chain.saved + fix.saved, chain.seconds + fix.seconds
            chain = Fix(change, fix.cfg, saved, seconds, fix.fits)
        if chain.fits:
            found.append(chain)
    return found


def _single_fixes(start: Candidate) -> list[Fix]:
    target, found = start.layout.target, []
    for change, tried in _changes(start):
        try:
            if problems_of(tried):
                continue
            known = None if change.startswith("optim") else _sizes_of(start.layout)
            other = evaluate(tried, target, known)
        except ConfigError:
            continue
        saved = start.memory.device - other.memory.device
        if saved > 0:
            seconds = other.bound.seconds - start.bound.seconds
            found.append(Fix(change, tried, saved, seconds, other.fits))
    if target.chip.platform == "gpu" and gpu_fraction() < FRACTION:
        room = target.chip.usable * FRACTION
        change = f"{GPU_FRACTION}={FRACTION} in the environment (JAX takes {gpu_fraction():.0%})"
        gained = int(room - target.usable)
        found.append(Fix(change, None, gained, 0.0, start.memory.device <= room))
    return found


def _sizes_of(at: Layout) -> StateSizes:
    return StateSizes(at.weights, at.replicated)


def _changes(start: Candidate) -> Iterator[tuple[str, Config]]:
    """Yield single changes of a configuration that may need less memory."""
    cfg, sizes = start.cfg, start.layout.sizes
    for rung in LADDER:
        if any(getattr(cfg.model, key) != value for key, value in rung.items()):
            words = ", ".join(f"model.{key} = {_toml(value)}" for key, value in rung.items()
                              if getattr(cfg.model, key) != value)  # fmt: skip
            yield words, with_values(cfg, "plan", model=rung)
    smaller = [
        micro
        for micro in divisors(cfg.train.global_batch)
        if micro < cfg.train.micro_rows and micro % start.layout.batch_shards == 0
    ]
    for micro in sorted(smaller, reverse=True):
        change = f"train.micro_batch = {micro} (now {cfg.train.micro_rows})"
        yield change, with_values(cfg, "plan", train={"micro_batch": micro})
    for giver, taker in (("data", "fsdp"), ("data", "tensor"), ("fsdp", "tensor"),
                         ("fsdp", "context"), ("data", "context")):  # fmt: skip
        for factor in (2, 4, 8):
            if sizes[giver] % factor:
                break
            mesh = {**vars(cfg.mesh), **sizes, giver: sizes[giver] // factor,
                    taker: sizes[taker] * factor, "slow": {}}  # fmt: skip
            change = f"mesh.{giver} = {mesh[giver]}, mesh.{taker} = {mesh[taker]}"
            yield change, with_values(cfg, "plan", mesh=mesh)
    if cfg.optim.moment_dtype == "float32":
        yield (
            'optim.moment_dtype = "bfloat16"',
            with_values(cfg, "plan", optim={"moment_dtype": "bfloat16"}),
        )


def _toml(value: Any) -> str:
    return str(list(value)).replace("'", '"') if isinstance(value, tuple) else f'"{value}"'
