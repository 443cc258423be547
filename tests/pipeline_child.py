"""One of several processes that read a store together; prints a digest of each row it holds.

    pipeline_child.py STORE PROCESS PROCESSES PORT

Prints one JSON object: {"DEVICES,BATCH,POSITION": {global position: digest of the sample}}, and
under "digests" what training records of the rows of the largest batch, by the same keys.
"""

from __future__ import annotations

import hashlib
import json
import sys

import jax
import numpy as np

from jaxgpt.config import DataConfig, MeshConfig
from jaxgpt.data.pipeline import batches
from jaxgpt.data.stream import open_data
from jaxgpt.parallel import mesh as meshes
from jaxgpt.parallel import sharding
from jaxgpt.training.audit import rows_digest

DIGEST = jax.jit(rows_digest)
DEVICES, BATCHES, POSITIONS, STEPS, T = (1, 2, 8), (4, 8, 16), (0, 5, 52), 3, 16


def main(store: str, process: int, processes: int, port: int) -> None:
    if processes > 1:
        jax.distributed.initialize(f"localhost:{port}", processes, process)
    data = open_data(DataConfig(store=store, document_mask=True), seq_len=T, seed=3)
    found, digests = {}, {}
    for count in DEVICES:
        chosen = [d for p in range(processes) for d in jax.devices() if d.process_index == p]
        per_process = len(chosen) // processes
        devices = [d for i, d in enumerate(chosen) if i % per_process < count]
        for batch in BATCHES:
            shards = min(batch // 2, len(devices))  # every batch is cut into two micro-batches
            fsdp = 2 if shards % 2 == 0 else 1
            size = MeshConfig(data=shards // fsdp, fsdp=fsdp, tensor=len(devices) // shards)
            mesh = meshes.make_mesh(size, devices)
            for position in POSITIONS:
                key = f"{count},{batch},{position}"
                found[key] = rows_of(data, mesh, batch, position)
                if batch == max(BATCHES):
                    digests[key] = digest_of(data, mesh, batch, position)
    print(json.dumps(found | {"digests": digests}))


def digest_of(data, mesh, batch: int, position: int) -> int:
    rows, total = sharding.rows_of_process(mesh, batch // 2), 0
    with batches(
        data, position=position, global_batch=batch, accum_steps=2, rows=rows, num_batches=STEPS
    ) as source:
        for local in source:
            total += int(DIGEST(sharding.to_global(mesh, local)))
    return total % 2**32


def rows_of(data, mesh, batch: int, position: int) -> dict[int, str]:
    rows = sharding.rows_of_process(mesh, batch // 2)
    held: dict[int, str] = {}
    with batches(
        data, position=position, global_batch=batch, accum_steps=2, rows=rows, num_batches=STEPS
    ) as source:
        for step, local in enumerate(source):
            spread = sharding.to_global(mesh, local)
            leaves = [spread.tokens, spread.targets, spread.segment_ids, spread.positions]
            for shard in spread.weights.addressable_shards:
                parts = [here(leaf, shard.device) for leaf in (*leaves, spread.weights)]
                first = shard.index[1].start or 0
                for micro in range(2):
                    for row in range(parts[0].shape[1]):
                        sample = b"".join(np.ascontiguousarray(p[micro, row]) for p in parts)
                        at = position + step * batch + micro * (batch // 2) + first + row
                        digest = hashlib.sha256(sample).hexdigest()[:16]
                        assert held.setdefault(at, digest) == digest  # replicas agree
    return held


def here(leaf, device) -> np.ndarray:
    """Return what a device holds of a global array."""
    return next(np.asarray(s.data) for s in leaf.addressable_shards if s.device == device)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
