"""The hosts of a run: started as the command line and the launcher say, or only shown."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.sharding import Mesh

from jaxgpt import __version__
from jaxgpt.checkpoint import load
from jaxgpt.commands.terminal import say, show, table
from jaxgpt.config import Config, MeshConfig
from jaxgpt.data.store import MANIFEST, read_manifest
from jaxgpt.durable import storage_errors
from jaxgpt.errors import DataError
from jaxgpt.model import params as parameters
from jaxgpt.parallel import mesh as meshes
from jaxgpt.parallel import sharding
from jaxgpt.parallel.agreement import check_agreement, facts_of_devices, facts_of_start
from jaxgpt.runtime import hosts, launchers
from jaxgpt.runtime.devices import start_jax
from jaxgpt.runtime.launchers import Launch
from jaxgpt.runtime.leaving import error_line
from jaxgpt.runtime.peers import Peers
from jaxgpt.runtime.watchdog import Watchdog


def start(args: argparse.Namespace) -> tuple[Launch | None, tuple[str, ...]]:
    """Start the processes of a run; return how they were found, and their host names in order."""
    flags = launchers.Flags(args.coordinator, args.process, args.processes)
    launch = launchers.detect(os.environ, flags, on_tpu=hosts.on_tpu())
    if launch is not None and launch.kind == "leftover":
        say(f"{launch.source}; {launchers.OFF}")
    return hosts.start(launch, say=lambda line: print(error_line(line), file=sys.stderr))


@contextlib.contextmanager
def watched(names: Sequence[str], args: argparse.Namespace) -> Iterator[None]:
    """Let the processes of an evaluation watch each other; with one process nothing happens.

    Raises DisagreementError where they were started differently; paths may differ between hosts.
    """
    if len(names) == 1:
        yield
        return

    def facts() -> dict[str, Any]:
        return facts_of_start(Config()) | facts_of_evaluation(args)

    with Watchdog() as dog, Peers(dog) as peers, peers.telling(), dog.phase("eval"):
        check_agreement("start", facts, hosts.START_TIMEOUT)
        yield


def facts_of_evaluation(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the processes of an evaluation must have been asked for alike, and the step."""
    path = Path(args.run)
    if args.step is not None:
        path = load.run_folder(path) / "ckpt" / str(args.step)
    record = load.find_step(path)[1]
    weights = json.dumps([leaf.fingerprint for leaf in record.leaves])
    return {
        "step": record.step,
        "weights": hashlib.sha256(weights.encode()).hexdigest(),
        "--weights": args.weights,
        "--dtype": args.dtype,
        "--batch": args.batch,
        "--max-rows": args.max_rows,
        "number of --data": len(args.data),
    }


def spread(cfg: Config) -> Any:
    """Return where parameters lie that are split over all devices, as are the rows."""
    mesh = meshes.make_mesh(MeshConfig(data=1, fsdp=-1))
    return sharding.tree_shardings(mesh, parameters.specs(cfg.model))


def dry_run(args: argparse.Namespace, cfg: Config) -> dict[str, Any]:
    """Start the hosts, show them and how the work would be divided; nothing is read but manifests.

    Raises what training would for hosts that are not alike, devices, mesh and batch.
    """
    launch, names = start(args)
    for line in start_jax(cfg).lines:
        say(line)

    def facts() -> dict[str, Any]:
        return facts_of_start(cfg) | facts_of_devices()

    check_agreement("dry run", facts, hosts.START_TIMEOUT)
    mesh = meshes.make_mesh(cfg.mesh)
    meshes.check_run(mesh, cfg)
    sharding.rows_of_process(mesh, cfg.train.micro_rows)
    held = rows_held(mesh, cfg.train.micro_rows)
    table_of_hosts = [
        {
            "process": process,
            "host": host,
            "devices": len(local := [d for d in jax.devices() if d.process_index == process]),
            "kind": local[0].device_kind if local else "none",
            "rows": held.get(process, 0),
        }
        for process, host in enumerate(names)
    ]
    report = {
        "processes": len(names),
        "launch": launch.kind if launch else "alone",
        "source": launch.source if launch else "no launcher in the environment",
        "coordinator": launch.coordinator if launch and len(names) > 1 else "",
        "versions": {
            "jaxgpt": __version__,
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "python": platform.python_version(),
        },
        "devices": jax.device_count(),
        "mesh": dict(mesh.shape),
        "global_batch": cfg.train.global_batch,
        "micro_batch": cfg.train.micro_rows,
        "rows_per_device": cfg.train.micro_rows // meshes.batch_shards(mesh),
        "hosts": table_of_hosts,
        "stores": describe_stores(cfg),
    }
    show(args, as_text(report))
    return report


def rows_held(mesh: Mesh, micro_rows: int) -> dict[int, int]:
    """Return by process how many of the rows of a micro-batch its devices hold."""
    each = micro_rows // meshes.batch_shards(mesh)
    return {process: each * len(held) for process, held in sharding.row_shards(mesh).items()}


def describe_stores(cfg: Config) -> dict[str, str]:
    """Return the digest of each store of the run, from its manifest; DataError if it has none."""
    names = list(cfg.data.store) if isinstance(cfg.data.store, dict) else [cfg.data.store]
    digests = {}
    for name in filter(None, names):
        folders = [folder for folder in (Path(name), Path(name, "train")) if is_store(folder)]
        if not folders:
            raise DataError(
                f"{name}: not a token store: it has no {MANIFEST}; run `jaxgpt prepare`"
            )
        digests[name] = read_manifest(folders[0])["digest"]
    return digests


def is_store(folder: Path) -> bool:
    """Tell whether a folder holds the manifest of a store."""
    with storage_errors(folder):
        return (folder / MANIFEST).is_file()


def as_text(report: dict[str, Any]) -> str:
    """Return the report of a dry run for people."""
    axes = meshes.in_words(report["mesh"])
    accum = report["global_batch"] // report["micro_batch"]
    lines = [
        f"{report['processes']} process(es), {report['devices']} device(s); found by "
        f"{report['launch']}: {report['source']}",
        f"coordinator: {report['coordinator'] or 'none'}",
        ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
        f"mesh: {axes}",
        f"batch: {report['global_batch']} rows per update = {accum} x {report['micro_batch']}; "
        f"{report['rows_per_device']} rows at once per device",
        *(f"store: {name} ({digest[:12]})" for name, digest in report["stores"].items()),
        table(
            ("process", "host", "devices", "kind", "rows at once"),
            [tuple(row.values()) for row in report["hosts"]],
            left=(1, 3),
        ),
    ]
    return "\n".join(lines)
