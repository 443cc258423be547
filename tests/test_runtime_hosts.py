"""Start of the distributed runtime, with JAX's part replaced; the whole: test_hosts_commands."""

from __future__ import annotations

import os
import socket
import time

import jax
import pytest
from jax._src.clusters import cloud_tpu_cluster

from jaxgpt.errors import ConfigError, HangError
from jaxgpt.runtime import hosts, leaving
from jaxgpt.runtime.launchers import Launch

HERE = socket.gethostname()
TWO = Launch("slurm", "node0:61441", 0, 2, None, "SLURM_PROCID of SLURM_NTASKS, job 4097")


@pytest.fixture
def started(monkeypatch) -> list[tuple]:
    """What JAX is asked to start, where the roll call always succeeds."""
    calls: list[tuple] = []
    monkeypatch.setattr(hosts, "roll_call", lambda *a: tuple(f"host{i}" for i in range(a[2])))
    monkeypatch.setattr(jax.distributed, "initialize", lambda *a, **k: calls.append((a, k)))
    monkeypatch.setattr(leaving, "_signature", "")
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setenv("no_grpc_proxy", "")
    return calls


@pytest.mark.parametrize("launch", [None, Launch("alone", "", 0, 1, None, "--processes 1")])
def test_one_process_starts_nothing(started, launch):
    assert hosts.start(launch) == (launch, (HERE,))
    assert started == []


def test_jax_is_told_all_and_left_nothing_to_detect(started):
    launch, names = hosts.start(TWO._replace(local_devices=(2, 3), process=1))
    assert names == ("host0", "host1") and launch.process == 1
    ((words, options),) = started
    assert words == ("node0:61441", 2, 1, (2, 3))
    assert options["cluster_detection_method"] == "deactivate"
    assert all(0 < options[name] <= 100 for name in options if name != "cluster_detection_method")


def test_a_failure_of_jax_is_a_line(started, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("DEADLINE_EXCEEDED:\nsomething")

    monkeypatch.setattr(jax.distributed, "initialize", fail)
    with pytest.raises(HangError, match=f"^{HERE}, process 0: .*DEADLINE_EXCEEDED: something$"):
        hosts.start(TWO)


def test_who_is_left_waiting_in_jax_for_one_that_came_ends_with_the_hosts(started, monkeypatch):
    said, codes = [], []
    monkeypatch.setattr(leaving, "say", lambda text, seconds: said.append(text))
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(hosts, "CONNECT_TIMEOUT", 0.05)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: time.sleep(0.5))
    hosts.start(TWO)
    assert codes == [HangError.exit_code]
    assert "at node0:61441 after 0.05 s: one of them, on host0, host1, has ended or" in said[0]


def test_other_devices_than_the_launcher_promised_are_refused_with_both_numbers(started):
    with pytest.raises(ConfigError) as error:
        hosts.start(TWO._replace(expected=4, process=1))
    seen = jax.local_device_count()
    assert f"{HERE}, process 1: 4 GPUs belong to it" in str(error.value)
    assert f"JAX sees {seen} devices (cpu)" in str(error.value)


def test_lines_of_other_processes_than_the_first_are_signed(started):
    hosts.start(TWO)
    assert leaving.is_first() and leaving.error_line("x") == "jaxgpt: x"
    assert leaving.signed("a\nb\n") == "a\nb\n"
    hosts.start(TWO._replace(process=1))
    assert not leaving.is_first()
    assert leaving.error_line("x") == f"jaxgpt: [{HERE}, process 1] x"
    name = f"[{HERE}, process 1]"
    assert leaving.signed("a\nb\n") == f"{name} a\n{name} b\n"


def test_the_coordinator_is_reached_past_proxies(started, monkeypatch):
    monkeypatch.setenv("no_proxy", "intranet")
    hosts.start(TWO)
    assert os.environ["no_grpc_proxy"] == "intranet,node0"


@pytest.mark.parametrize("word", ["soon", "0", "-1", "nan", "1e9"])
def test_a_time_limit_that_is_none_is_refused(started, monkeypatch, word):
    monkeypatch.setenv("JAXGPT_START_TIMEOUT", word)
    with pytest.raises(ConfigError, match=f"JAXGPT_START_TIMEOUT = {word}"):
        hosts.start(TWO)


def metadata(monkeypatch, **attributes: str) -> None:
    """Let the metadata server of a TPU machine know these."""
    known = {key.replace("_", "-"): value for key, value in attributes.items()}
    monkeypatch.setattr(
        cloud_tpu_cluster, "get_metadata", lambda key: (known.get(key, ""), 200 if known else 404)
    )
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    for name in ("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES", "TPU_PROCESS_ADDRESSES_PATH"):
        monkeypatch.delenv(name, raising=False)


def test_a_tpu_pod_is_what_its_metadata_say(started, monkeypatch):
    endpoints = "unknown:unknown:127.0.0.1,unknown:unknown:127.0.0.2"
    metadata(monkeypatch, agent_worker_number="1", worker_network_endpoints=endpoints)
    launch, names = hosts.start(Launch("tpu", "", 0, 0, None, "TPU metadata"))
    assert launch[:4] == ("tpu", "127.0.0.1:8482", 1, 2)
    assert len(names) == 2 and started[0][0][:3] == ("127.0.0.1:8482", 2, 1)


def test_a_tpu_machine_without_metadata_of_a_pod_is_one_process(started, monkeypatch):
    metadata(monkeypatch)
    assert hosts.start(Launch("tpu", "", 0, 0, None, "TPU metadata")) == (None, (HERE,))


def test_a_metadata_server_that_does_not_answer_is_a_line_with_the_way_out(started, monkeypatch):
    metadata(monkeypatch)

    def fail(key):
        raise OSError("no route\nto host")

    monkeypatch.setattr(cloud_tpu_cluster, "get_metadata", fail)
    with pytest.raises(ConfigError, match="^TPU metadata: no route to host; --processes 1 runs"):
        hosts.start(Launch("tpu", "", 0, 0, None, "TPU metadata"))
