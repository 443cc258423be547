"""Real processes on one machine read the same samples, however many they are."""

from __future__ import annotations

import hashlib
import itertools
import json
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pipeline_child import BATCHES, DEVICES, POSITIONS, STEPS, T
from runs import process_environment
from stores import random_documents, write_store
from test_audit import by_hand

from jaxgpt.config import DataConfig
from jaxgpt.data.pipeline import sample_rows
from jaxgpt.data.stream import open_data


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("hosts") / "store"
    shards = [random_documents([7, 30, 1, 55, 12, 40], seed) for seed in range(3)]
    write_store(path, shards)
    return path


@pytest.fixture(scope="module")
def samples(store) -> list[str]:
    """The digest of the sample at each position, read alone."""
    data = open_data(DataConfig(store=str(store), document_mask=True), seq_len=T, seed=3)
    b = sample_rows(data, np.arange(max(POSITIONS) + STEPS * max(BATCHES)))
    leaves = (b.tokens, b.targets, b.segment_ids, b.positions, b.weights)
    return [
        hashlib.sha256(b"".join(leaf[row].tobytes() for leaf in leaves)).hexdigest()[:16]
        for row in range(len(b.tokens))
    ]


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


@pytest.fixture(scope="module", params=[1, 2, 4])
def held(request, store) -> list[dict]:
    """What each of some processes that read together has printed."""
    child, port = str(Path(__file__).with_name("pipeline_child.py")), free_port()
    running = [
        subprocess.Popen(
            [sys.executable, child, str(store), str(process), str(request.param), str(port)],
            env=process_environment(devices=8),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(request.param)
    ]
    outputs = [child.communicate(timeout=240) for child in running]
    assert [child.returncode for child in running] == [0] * request.param, outputs
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


def test_batches_are_the_same_on_any_number_of_hosts_and_devices(held, samples):
    for devices, batch, position in itertools.product(DEVICES, BATCHES, POSITIONS):
        parts = [each[f"{devices},{batch},{position}"] for each in held]
        together = {int(at): digest for part in parts for at, digest in part.items()}
        positions = range(position, position + STEPS * batch)
        assert together == {at: samples[at] for at in positions}
        assert sum(map(len, parts)) >= len(positions)


def test_the_recorded_digest_of_the_rows_is_the_same_on_any_number_of_hosts(held, store):
    data = open_data(DataConfig(store=str(store), document_mask=True), seq_len=T, seed=3)
    for devices, position in itertools.product(DEVICES, POSITIONS):
        positions = np.arange(position, position + STEPS * max(BATCHES))
        right = by_hand(sample_rows(data, positions))
        assert {each["digests"][f"{devices},{max(BATCHES)},{position}"] for each in held} == {right}
