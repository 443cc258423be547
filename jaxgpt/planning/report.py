"""A plan as plain data: what `jaxgpt plan` prints, and its JSON object.

Bytes and seconds are numbers, formulas and assumptions are words. What a compiler said, where one
was asked, stands beside the analytic figures and never replaces them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxgpt.model import attention
from jaxgpt.model.gpt import flops_per_token
from jaxgpt.parallel.mesh import AXES
from jaxgpt.planning import audit, collectives, exchanged
from jaxgpt.planning.compile import Compiled
from jaxgpt.planning.fixes import Fix
from jaxgpt.planning.memory import PEAKS
from jaxgpt.planning.roofline import FAILURES_PER_DEVICE_DAY, bubble_share, run, saving
from jaxgpt.planning.search import Candidate
from jaxgpt.planning.transfers import links_of

ASSUMED = (
    "times are bounds: products at the published peak, links at theirs, everything that can "
    "overlap does; tensor, expert and stage exchanges and the update are on the critical path",
    "memory is arithmetic from shapes: padding, copies and the order that a compiler chooses are "
    "not in it",
    f"failures: {FAILURES_PER_DEVICE_DAY:.1e} per device and day (arXiv:2407.21783, section "
    "3.3.4); interval sqrt(2 x blocking x time between failures) (Young 1974)",
)


def report(
    plan: Candidate,
    fixes: list[Fix],
    compiled: Compiled | None = None,
    notes: list[str] | None = None,
) -> dict[str, Any]:
    """Return the plan as a JSON object; `exit_code` is 64 where it does not fit.

    `compiled` is what `compile.compile_step` returned: with it, its own peak decides too.
    """
    at, memory, bound = plan.layout, plan.memory, plan.bound
    cfg, target = at.cfg, at.target
    whole, save = run(at, bound.seconds), saving(at)
    fits = plan.fits if compiled is None else compiler_fits(plan, compiled)
    causal, full = (flops_per_token(cfg.model, causal) for causal in (True, False))
    return {
        "target": target.name,
        "machine": target.describe(),
        "devices": target.num_devices,
        "hosts": target.num_hosts,
        "mesh": {axis: at.sizes[axis] for axis in AXES},
        "mesh_slow": {axis: n for axis, n in at.slow.items() if n > 1},
        "rounds": cfg.mesh.rounds,
        "parameters": sum(weight.count for weight in at.weights),
        "train": {
            "global_batch": cfg.train.global_batch, "micro_batch": cfg.train.micro_rows,
            "accum_steps": at.accum, "tokens_per_device": at.tokens,
            "remat": cfg.model.remat, "remat_save": list(cfg.model.remat_save),
            "remat_offload": list(cfg.model.remat_offload),
        },
        "attention": attention.describe(cfg, target.chip.platform, at.sizes["context"]),
        "memory": {
            "parts": [part._asdict() for part in memory.parts],
            "peak": memory.peak,
            "moments": {moment: memory.of(*parts) for moment, parts in PEAKS.items()},
            "device_bytes": memory.device,
            "usable_bytes": int(target.usable),
            "host_bytes": int(memory.host * target.num_devices / target.num_hosts),
        },
        "fits": fits,
        "compiled": None if compiled is None else _compiled(plan, compiled),
        "fixes": [
            {"change": fix.change, "saved_bytes": fix.saved, "added_seconds": fix.seconds,
             "fits": fix.fits}
            for fix in fixes
        ],
        "collectives": [transfer._asdict() for transfer in bound.transfers],
        "time": {
            "flops_per_token": causal, "flops_per_token_full": full,
            "recompute_share": bound.recompute / bound.compute,
            "resources": bound.resources, "limit": bound.limit, "exposed": bound.exposed,
            "update": bound.update, "bubble_share": bubble_share(at),
            "step_seconds": bound.seconds, "mfu_ceiling": bound.mfu,
            "tokens_per_second": whole.tokens_per_step / bound.seconds,
            "tokens_per_second_per_device":
                whole.tokens_per_step / bound.seconds / target.num_devices,
            **whole._asdict(),
        },
        "checkpoint": save._asdict() | {"interval_steps": max(1, round(save.interval /
                                                                      bound.seconds))},
        "notes": [*(notes or []), *_in_sums(plan), *ASSUMED],
        "exit_code": 0 if fits else 64,
    }  # fmt: skip


def _in_sums(plan: Candidate) -> list[str]:
    """Return a note on gathers that libtpu makes of sums, if there are any."""
    links, weights = links_of(plan.layout), plan.layout.weights
    axes = next(filter(links.whole_torus, map(plan.layout.gathered_over, weights)), None)
    if axes is None:
        return []
    return [
        f"{' and '.join(axes)} over all of a 3-D torus: there libtpu gathers weights as sums, "
        "with twice the bytes, and nothing else goes on meanwhile; not where mesh.data or "
        "mesh.tensor takes one of its dimensions"
    ]


def compiler_fits(plan: Candidate, compiled: Compiled) -> bool:
    """Tell whether what the compiler made fits the device; it knows better than arithmetic."""
    return not compiled.misfit and compiled.peak_bytes <= plan.layout.target.usable


def _compiled(plan: Candidate, done: Compiled) -> dict[str, Any]:
    """Return the compiler's totals, its exchanges beside the expected ones, and all findings."""
    rows = exchanged.by_axis(plan.layout, plan.bound, done.collectives)
    least = exchanged.as_compiled(plan.layout, plan.bound, done.collectives)
    wholly = bool(done.peak_bytes)  # there is a program, whatever it needs
    return dataclasses.asdict(done) | {
        "unused_bytes": max(0, done.peak_bytes - done.live_bytes) if done.live_bytes else 0,
        "peak_bytes": done.needed_bytes if done.misfit else done.peak_bytes,
        "collectives": [row._asdict() for row in collectives.table(done.collectives)],
        "exchanges": [row._asdict() for row in rows] if wholly else [],
        "step_seconds": least.seconds if wholly else None,
        "mfu_ceiling": least.mfu if wholly else None,
        "exposed": least.exposed if wholly else None,
        "findings": [*audit.lines(done.findings), *(exchanged.findings(rows) if wholly else ())],
        "notes": list(done.notes),
    }


def candidates(found: list[Candidate]) -> list[dict[str, Any]]:
    """Return what a search found, a row each."""
    return [
        {
            "mesh": {axis: n for axis, n in c.layout.sizes.items() if n > 1},
            "mesh_slow": {axis: n for axis, n in c.layout.slow.items() if n > 1},
            "rounds": c.cfg.mesh.rounds,
            "micro_batch": c.cfg.train.micro_rows,
            "remat": c.cfg.model.remat,
            "remat_save": list(c.cfg.model.remat_save),
            "remat_offload": list(c.cfg.model.remat_offload),
            "step_seconds": c.bound.seconds,
            "mfu_ceiling": c.bound.mfu,
            "limit": c.bound.limit,
            "device_bytes": c.memory.device,
        }
        for c in found
    ]
