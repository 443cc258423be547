"""The process that compiles the train step for devices that are not there.

`python -m jaxgpt.planning.child` reads one JSON request from stdin and writes one JSON answer to
stdout. It is a process of its own because compilers read the environment when they are loaded,
can take more memory than there is, and abort on what they do not like. What is compiled is what
`make_train_step` runs: same function, same options, same leaves of a batch.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from jaxgpt import config
from jaxgpt.config import Config
from jaxgpt.errors import ConfigError, JaxgptError, one_line
from jaxgpt.planning import audit, collectives, gpu_targets, hlo
from jaxgpt.validation import num_steps

SIZE = r"([\d.]+)([KMGT]?)i?B?\b"
OVER_FULL = re.compile(
    rf"[Uu]sed {SIZE} of {SIZE} (?P<space>hbm|vmem|smem)|"
    rf"allocating {SIZE}.*?(?:limit|capacity|available)[^\d]*{SIZE}"
)
STEPS_UNKNOWN = 100_000  # length of the schedule where the configuration leaves it to the data


def main() -> int:
    """Answer the request on stdin; the exit status is 0 whenever there is an answer."""
    with _answers() as out:
        request = json.load(sys.stdin)
        answer = respond(request)
        json.dump(answer, out)
    return 0


def respond(request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a request: `outcome`, with `line` for all but "compiled".

    Outcomes: compiled, does_not_fit, missing (a package), target (no such devices), refused (the
    configuration), failed (the compiler). Request: `config` (as `to_dict` gives it), `target`
    (see `devices`), `layers` (or null), `text` (a path, or null).
    """
    try:
        cfg = config.from_dict(request["config"])
        if request.get("layers"):
            cfg = config.with_values(cfg, "planning", model={"num_layers": request["layers"]})
        return _compile(cfg, request["target"], request.get("text"))
    except _Outcome as outcome:
        return {"outcome": outcome.kind, "line": str(outcome)}
    except JaxgptError as error:
        return {"outcome": "refused", "line": str(error)}


def devices(target: dict[str, Any]) -> list[Any]:
    """Return the devices of a target, which can be compiled for but hold nothing.

    `platform` tpu: `topology` such as v5p:2x2x4, `slices`, and `options` for what else libtpu asks
    (chips_per_host_bounds); gpu: `chip` of `gpu_targets`, `hosts` and `num_devices`; cpu: those
    that this process simulates.
    """
    import jax
    from jax.experimental import topologies

    if target["platform"] == "cpu":
        return jax.devices("cpu")[: target["num_devices"]]
    if target["platform"] == "tpu":
        what, extra, name = "libtpu", "tpu", target["topology"]
        options = {"num_slices": target.get("slices", 1), **target.get("options", {})}
        platform = "tpu"
    else:
        what, extra, platform = "the CUDA plugin of JAX", "cuda", "cuda"
        hosts = target.get("hosts", 1)
        name = f"1x{hosts}x{target['num_devices'] // hosts}"
        if target["chip"] not in gpu_targets.GPUS:
            known = ", ".join(gpu_targets.GPUS)
            raise _Outcome("target", f"{target['chip']}: no such GPU here; known are {known}")
        text = gpu_targets.description(gpu_targets.GPUS[target["chip"]])
        options = {"topology": name, "target_config": text}
    if not _installed(platform):
        raise _Outcome("missing", f"compiling for {platform} needs {what}: install jaxgpt[{extra}]")
    try:
        found = topologies.get_topology_desc(topology_name=name, platform=platform, **options)
    except ImportError as error:
        raise _Outcome("missing", f"{one_line(error)}: install jaxgpt[{extra}]") from error
    except Exception as error:  # JaxRuntimeError, NotImplementedError, ValueError
        raise _Outcome("target", f"{target['platform']} {name}: {one_line(error)}") from error
    return list(found.devices)


def over_full(message: str) -> tuple[int, int] | None:
    """Return (needed, available) bytes of a compiler's message about memory, or None."""
    found = OVER_FULL.search(message)
    if not found:
        return None
    numbers = [g for g in found.groups() if g is not None and g not in ("hbm", "vmem", "smem")]
    needed, available = (
        int(float(number) * 1024 ** " KMGT".index(unit or " "))
        for number, unit in zip(numbers[::2], numbers[1::2], strict=True)
    )
    return needed, available


class _Outcome(Exception):
    """Something that ends the request with an answer."""

    def __init__(self, kind: str, line: str):
        super().__init__(line)
        self.kind = kind


def _compile(cfg: Config, target: dict[str, Any], text_path: str | None) -> dict[str, Any]:
    import jax

    from jaxgpt.model import params as parameters
    from jaxgpt.parallel import mesh as meshes
    from jaxgpt.training import optimizer, step
    from jaxgpt.training import state as states

    if not cfg.model.vocab_size:
        raise ConfigError("model.vocab_size = 0: without a store it must be given")
    there = devices(target)
    mesh = meshes.make_mesh(cfg.mesh, there)
    abstract = parameters.abstract(parameters.specs(cfg.model), cfg.train.param_dtype)
    tx = optimizer.build(cfg, num_steps(cfg) or STEPS_UNKNOWN, abstract)
    placed = states.state_shardings(mesh, cfg, tx)
    state = states.abstract_state(cfg, tx, placed)
    train_step = step.make_train_step(cfg, tx, mesh, placed)
    started = time.monotonic()
    lowered = train_step.lower(state, batch_like(cfg))
    between = time.monotonic()
    print(audit.BEGIN, file=sys.stderr, flush=True)
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        sizes = over_full(str(error))
        if sizes is None:
            raise _Outcome("failed", f"the compiler refused: {one_line(error)}") from error
        return {
            "outcome": "does_not_fit",
            "line": "does not fit: needs {} of {} bytes per device".format(*sizes),
            "needed_bytes": sizes[0],
            "available_bytes": sizes[1],
            **_about(mesh, there),
        }
    ended = time.monotonic()
    text = compiled.as_text()
    if text_path:
        Path(text_path).write_text(text)
    program = hlo.parse(text)
    facts = audit.facts(cfg, dict(mesh.shape), target["platform"], leaves_of(state))
    found = collectives.collectives(program, mesh.shape)
    return {
        "outcome": "compiled",
        **_about(mesh, there),
        "lowering_seconds": between - started,
        "seconds": ended - between,
        **memory(compiled.memory_analysis()),
        "state_bytes": facts.state_bytes,
        "collectives": [one._asdict() for one in found],
        "kernels": audit.kernels(program),
        "findings": [one._asdict() for one in audit.findings(program, found, facts)],
        "notes": [f"{name}: length unknown, counted once" for name in program.unknown_loops],
    }


def batch_like(cfg: Config) -> Any:
    """Return the batch [A, B, T] of a configuration as shapes, with the leaves it really has."""
    import jax
    import jax.numpy as jnp

    from jaxgpt.data.packing import Batch

    shape = (cfg.train.accum_steps, cfg.train.micro_rows, cfg.model.seq_len)
    ids, weights = (jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.float32))
    documents = ids if cfg.data.document_mask else None
    return Batch(ids, ids, weights, documents, documents)


def memory(analysis: Any) -> dict[str, int]:
    """Return the bytes per device of a `memory_analysis()`, and their peak.

    At the peak there are arguments, results and temporaries, where a result that reuses an
    argument counts once.
    """
    size = {
        name: getattr(analysis, f"{field}_size_in_bytes")
        for name, field in (
            ("argument_bytes", "argument"),
            ("output_bytes", "output"),
            ("alias_bytes", "alias"),
            ("temp_bytes", "temp"),
            ("code_bytes", "generated_code"),
        )
    }
    host = ("argument", "output", "temp")
    size["host_bytes"] = sum(getattr(analysis, f"host_{name}_size_in_bytes") for name in host)
    size["peak_bytes"] = (
        size["argument_bytes"] + size["output_bytes"] - size["alias_bytes"] + size["temp_bytes"]
    )
    return size


def leaves_of(state: Any) -> list[tuple[str, str, tuple[int, ...], tuple[int, ...]]]:
    """Return (path, dtype, shape, shape on one device) of each leaf of an abstract state."""
    import jax

    return [
        (
            jax.tree_util.keystr(path, simple=True, separator="/"),
            str(leaf.dtype),
            leaf.shape,
            leaf.sharding.shard_shape(leaf.shape),
        )
        for path, leaf in jax.tree.leaves_with_path(state)
    ]


def _about(mesh: Any, there: list[Any]) -> dict[str, Any]:
    return {
        "platform": there[0].platform,
        "device_kind": there[0].device_kind,
        "num_devices": len(there),
        "mesh": dict(mesh.shape),
    }


def _installed(platform: str) -> bool:
    from importlib.util import find_spec

    if platform == "tpu":
        return find_spec("libtpu") is not None
    return any(find_spec(f"jax_cuda{n}_plugin") is not None for n in (13, 12))


@contextlib.contextmanager
def _answers() -> Iterator[TextIO]:
    """Give what was stdout for the answer alone; what libraries print goes to stderr."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        yield out


if __name__ == "__main__":
    sys.exit(main())
