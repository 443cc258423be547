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
from jaxgpt.planning import audit, collectives, facts, gpu_targets, hlo
from jaxgpt.validation import num_steps

SIZE = r"([\d.]+)([KMGT]?)"
# What libtpu says of a program that is too large for a device's memory, in two of its versions.
OVER_FULL = (
    re.compile(rf"\({SIZE}\) exceeds available HBM \({SIZE}\)"),
    re.compile(rf"Used {SIZE} of {SIZE} hbm"),
)
INSTALL = "pip install 'jaxgpt[%s]'"
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
        return _compile(configuration(request), request["target"], request.get("text"))
    except _Outcome as outcome:
        return {"outcome": outcome.kind, "line": str(outcome)}
    except JaxgptError as error:
        return {"outcome": "refused", "line": str(error)}


def configuration(request: dict[str, Any]) -> Config:
    """Return the configuration of a request, with its number of layers."""
    cfg, layers = config.from_dict(request["config"]), request.get("layers")
    return config.with_values(cfg, "planning", model={"num_layers": layers}) if layers else cfg


def devices(target: dict[str, Any]) -> list[Any]:
    """Return the devices of a target, which can be compiled for but hold nothing.

    `platform` tpu: `topology` such as v5p:2x2x4, and `slices`; gpu: `chip` of `gpu_targets`,
    `hosts` and `num_devices`; cpu: those that this process simulates.
    """
    import jax
    from jax.experimental import topologies

    if target["platform"] == "cpu":
        return jax.devices("cpu")[: target["num_devices"]]
    if target["platform"] == "tpu":
        what, extra, platform = "libtpu", "tpu", "tpu"
        name, options = tpu_topology(target["topology"], target.get("slices", 1))
    else:
        what, extra, platform = "the CUDA plugin of JAX", "cuda", "cuda"
        hosts = target.get("hosts", 1)
        name = f"1x{hosts}x{target['num_devices'] // hosts}"
        if target["chip"] not in gpu_targets.GPUS:
            known = ", ".join(gpu_targets.GPUS)
            raise _Outcome("target", f"{target['chip']}: no such GPU here; known are {known}")
        text = gpu_targets.description(target["chip"])
        options = {"topology": name, "target_config": text}
    if not _installed(platform):
        raise _Outcome("missing", f"compiling for {platform} needs {what}: {INSTALL % extra}")
    try:
        found = topologies.get_topology_desc(topology_name=name, platform=platform, **options)
    except ImportError as error:
        raise _Outcome("missing", f"{one_line(error)}: {INSTALL % extra}") from error
    except Exception as error:  # JaxRuntimeError, NotImplementedError, ValueError
        raise _Outcome("target", f"{target['platform']} {name}: {one_line(error)}") from error
    return list(found.devices)


def torus_of(target: dict[str, Any], num_devices: int) -> int:
    """Return the devices of a slice that has rings along three dimensions, 0 for any other."""
    sides = [int(side) for side in target.get("topology", "").partition(":")[2].split("x") if side]
    ringed = len(sides) == 3 and all(side % 4 == 0 for side in sides)
    return num_devices // target.get("slices", 1) if ringed else 0


def tpu_topology(topology: str, slices: int) -> tuple[str, dict[str, Any]]:
    """Return libtpu's name and options of so many slices of a topology such as v5p:2x2x4."""
    options: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    chip, _, shape = topology.partition(":")
    # Hosts have 4 chips, but a slice of 1 has a host of 1, and one of 8 v5e or v6e a host of 8.
    if set(shape.split("x")) == {"1"}:
        options["chips_per_host_bounds"] = [1, 1, 1]
    elif shape == "2x4":
        options["chips_per_host_bounds"] = [2, 4, 1]
    if chip == "v4":
        options["chip_config_name"] = "megacore"  # both cores of a chip are one device
    return topology, options


def refusal(message: str) -> dict[str, Any]:
    """Return the answer that a compiler's error is: does_not_fit or failed."""
    if sizes := over_full(message):
        line = misfit(*sizes)
        needed, available = sizes
        kind = "does_not_fit"
        return {"outcome": kind, "line": line, "needed_bytes": needed, "available_bytes": available}
    return {"outcome": "failed", "line": f"the compiler refused: {one_line(message)}"}


def over_full(message: str) -> tuple[int, int] | None:
    """Return (needed, available) bytes of a compiler's message about a device's memory, or None."""
    found = next(filter(None, (pattern.search(message) for pattern in OVER_FULL)), None)
    if found is None:
        return None
    needed, needed_unit, available, available_unit = found.groups()
    return _bytes(needed, needed_unit), _bytes(available, available_unit)


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * 1024 ** ("", "K", "M", "G", "T").index(unit))


class _Outcome(Exception):
    """Something that ends the request with an answer."""

    def __init__(self, kind: str, line: str):
        super().__init__(line)
        self.kind = kind


def _compile(cfg: Config, target: dict[str, Any], text_path: str | None) -> dict[str, Any]:
    import jax

    from jaxgpt.model import attention
    from jaxgpt.model import params as parameters
    from jaxgpt.parallel import mesh as meshes
    from jaxgpt.parallel.xla_options import compile_with
    from jaxgpt.training import loss, optimizer, step
    from jaxgpt.training import state as states

    if not cfg.model.vocab_size:
        raise ConfigError("model.vocab_size = 0: without a store it must be given")
    there = devices(target)
    # NVLink ends at a host; devices that are not there name their host but no slice.
    apart = "process_index" if target["platform"] == "gpu" else "slice_index"
    mesh = meshes.make_mesh(cfg.mesh, there, apart=apart)
    abstract = parameters.abstract(parameters.specs(cfg.model), cfg.train.param_dtype)
    tx = optimizer.build(cfg, num_steps(cfg) or STEPS_UNKNOWN, abstract)
    state = states.abstract_state(cfg, tx, mesh)
    placed = states.shardings(state)
    train_step = step.make_train_step(cfg, tx, mesh, placed)
    started = time.monotonic()
    lowered = train_step.lower(state, batch_like(cfg))
    between = time.monotonic()
    print(audit.BEGIN, file=sys.stderr, flush=True)
    try:
        compiled = compile_with(lowered, cfg.train.xla_options)
    except jax.errors.JaxRuntimeError as error:
        answer = refusal(str(error))
        return answer | (_about(mesh, there) if answer["outcome"] == "does_not_fit" else {})
    ended = time.monotonic()
    sizes, available = memory(compiled.memory_analysis()), target.get("available_bytes", 0)
    over = {}
    if available and sizes["peak_bytes"] > available:
        over = {
            "misfit": misfit(sizes["peak_bytes"], available),
            "needed_bytes": sizes["peak_bytes"],
        }
    text = compiled.as_text()
    if text_path:
        Path(text_path).write_text(text)
    program = hlo.parse(text)
    platform = meshes.platform(mesh)
    tasks = attention.tasks(cfg, platform, mesh.shape["context"])
    known = facts.facts(
        cfg,
        dict(mesh.shape),
        leaves_of(state),
        chunk_tokens=loss.chunk_tokens(cfg.model.vocab_size, platform),
        attention={attention.choose(task, attention.asked(cfg)) for task in tasks},
        platform=platform,
        torus=torus_of(target, len(there)),
    )
    found = collectives.collectives(program, mesh.shape)
    return {
        "outcome": "compiled",
        **_about(mesh, there),
        "lowering_seconds": between - started,
        "seconds": ended - between,
        **sizes,
        "available_bytes": available,
        **over,
        "state_bytes": known.state_bytes,
        "collectives": [one._asdict() for one in found],
        "kernels": audit.kernels(program),
        "findings": [one._asdict() for one in audit.findings(program, found, known)],
        "notes": [f"{name}: length unknown, counted once" for name in program.unknown_loops],
    }


def misfit(needed: float, available: float) -> str:
    """Return the line on a program that needs more bytes per device than there are."""
    return f"does not fit: needs {needed / 1e9:.2f} of {available / 1e9:.2f} GB per device"


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
    argument counts once. Fewer bytes are in use at once: temporaries lie with gaps between them.
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
    # libtpu 0.0.50 says more than it reserves, and refuses a program for: of Llama-2 7B over four
    # v5p, 4 rows each, 16.5 GiB in place of the 10.3 that 0.0.52 says.
    always = getattr(analysis, "indefinite_allocations", 0)  # arguments, results, constants
    heap = getattr(analysis, "total_allocation_bytes", 0) - always
    if 0 < heap < size["temp_bytes"]:
        size["temp_bytes"] = heap
    size["host_bytes"] = sum(getattr(analysis, f"host_{name}_size_in_bytes") for name in host)
    size["peak_bytes"] = (
        size["argument_bytes"] + size["output_bytes"] - size["alias_bytes"] + size["temp_bytes"]
    )
    size["live_bytes"] = max(0, getattr(analysis, "peak_memory_in_bytes", 0))
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
    real = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(real), "w") as out:
            yield out
    finally:
        os.dup2(real, 1)
        os.close(real)


if __name__ == "__main__":
    sys.exit(main())
