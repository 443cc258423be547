"""The verb `jaxgpt doctor`: does this machine, or a mesh, compute what it should?"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from typing import Any

from jaxgpt.commands.terminal import load_config, say, show, table
from jaxgpt.errors import ConfigError, NumericsError

TOKENIZER_IDS = 512  # of a model whose vocabulary is not known yet


def doctor(args: argparse.Namespace) -> dict[str, Any]:
    """Check the gradients of the configured model here or, with --mesh, on simulated devices."""
    cfg = load_config(args.config)
    if cfg.model.vocab_size == 0:
        model = dataclasses.replace(cfg.model, vocab_size=TOKENIZER_IDS)
        cfg = dataclasses.replace(cfg, model=model)
    return _meshes(args, cfg) if args.mesh else _machine(args, cfg)


def _machine(args: argparse.Namespace, cfg: Any) -> dict[str, Any]:
    from jaxgpt.runtime.devices import start_jax
    from jaxgpt.start import describe_dtypes, describe_probe
    from jaxgpt.training.probe import probe_gradients

    platform = start_jax(cfg)
    probe = probe_gradients(cfg)
    for line in (*platform.lines, describe_dtypes(cfg), describe_probe(probe)):
        show(args, line)
    return {
        "platform": platform.backend,
        "device_kind": platform.device_kind,
        "devices": platform.num_devices,
        "probe": dataclasses.asdict(probe),
    }


def _meshes(args: argparse.Namespace, cfg: Any) -> dict[str, Any]:
    import jax

    with contextlib.suppress(RuntimeError):  # called from Python, JAX may have started
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.devices)
    if (count := jax.device_count()) < args.devices:
        raise ConfigError(
            f"--devices {args.devices}: there are {count} {jax.default_backend()} devices; unset "
            "XLA_FLAGS and JAX_NUM_CPU_DEVICES"
        )
    from jaxgpt.training import parity

    layouts = parity.layouts(cfg, args.devices)
    say(
        f"{len(layouts)} meshes of {args.devices} simulated devices, {parity.STEPS} updates of a "
        "small twin of this model on each, beside one device; in float32 and with the attention of "
        "CPUs, so that number formats and kernels of GPUs and TPUs are not compared"
    )
    rows = []
    for row in parity.compare(cfg, layouts):
        rows.append(row)
        verdict = row.refused or ("agrees" if row.passed else f"DIFFERS in {row.leaf}")
        say(f"{_name(row.sizes)}: {verdict} ({row.seconds:.0f} s)")
    names = list(parity.BOUNDS)
    show(
        args,
        table(
            ["mesh", *names, "verdict"],
            [
                [
                    _name(row.sizes),
                    *(f"{row.errors[name]:.0e}" if row.errors else "" for name in names),
                    "refused" if row.refused else "agrees" if row.passed else "DIFFERS",
                ]
                for row in rows
            ]
            + [["bound", *(f"{parity.BOUNDS[name]:.0e}" for name in names), ""]],
            left=(0, len(names) + 1),
        ),
    )
    wrong = [row for row in rows if not row.refused and not row.passed]
    return {
        "devices": args.devices,
        "bounds": parity.BOUNDS,
        "meshes": [row._asdict() | {"passed": row.passed} for row in rows],
        "exit_code": NumericsError.exit_code if wrong else 0,
    }


def _name(sizes: dict[str, int]) -> str:
    return " ".join(f"{axis}={n}" for axis, n in sizes.items())
