"""Start of a run on many hosts: everyone is waited for, then JAX's distributed runtime starts.

`launchers` says what the environment tells of the processes; on TPU machines outside Kubernetes
it is Google's metadata server that knows, and JAX's detection asks it.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

import jax

from jaxgpt.errors import ConfigError, HangError, one_line
from jaxgpt.runtime import leaving, store
from jaxgpt.runtime.launchers import OFF, TPU_PORT, Launch
from jaxgpt.runtime.roll_call import roll_call, split_address

# Seconds for all hosts to be there: containers and nodes of one job start minutes apart. The
# variable JAXGPT_START_TIMEOUT sets another limit.
START_TIMEOUT = 300.0
# Seconds for JAX to connect once all are there, which takes less than one with few processes, and
# more for each 100. JAX itself would abort, with a page of stacks.
CONNECT_TIMEOUT, CONNECT_MORE = 40, 10
# Seconds without a sign of life after which JAX ends a process with SIGABRT. It is the last resort:
# lost hosts are found, and named, much earlier by our own watch over the others.
HEARTBEAT_TIMEOUT = 100
# Seconds that a process that ends waits for the others to end; ours leave after 10 in any case.
SHUTDOWN_TIMEOUT = 10


def on_tpu() -> bool:
    """Tell whether this machine has TPU chips that JAX is to use."""
    from jax._src import cloud_tpu_init

    platforms = jax.config.jax_platforms or "tpu"
    return cloud_tpu_init.running_in_cloud_tpu_vm and "tpu" in platforms.split(",")


def start(
    launch: Launch | None,
    *,
    timeout: float | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Launch | None, tuple[str, ...]]:
    """Start the distributed runtime; return the launch and the host names of all processes.

    To be called once, before JAX is asked for devices. With one process nothing is started. The
    launch comes back with what was left to find out; None: this process is not one of several.
    `timeout` in seconds, by default START_TIMEOUT or what JAXGPT_START_TIMEOUT says. Raises what
    `roll_call` raises, and ConfigError where JAX does not see the GPUs that the launcher promised.
    """
    if launch is not None and launch.processes == 0:
        launch = _ask_metadata(launch)
    if launch is None or launch.processes == 1:
        return launch, (socket.gethostname(),)
    name = f"{socket.gethostname()}, process {launch.process}"
    if launch.process:
        leaving.sign(name)
    seconds = _start_timeout() if timeout is None else timeout
    names = roll_call(launch.coordinator, launch.process, launch.processes, seconds, say)
    store.know(names)
    _pass_by_proxies(launch.coordinator)
    _keep_stdout()
    # It would take SIGTERM from whoever asks for a durable end (`signals.Stop`, `SharedStop`).
    jax.config.update("jax_enable_preemption_service", False)
    patience = CONNECT_TIMEOUT + CONNECT_MORE * (launch.processes // 100)
    late = threading.Timer(patience, _give_up, args=(launch, names, patience))
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(
            launch.coordinator,
            launch.processes,
            launch.process,
            launch.local_devices,
            cluster_detection_method="deactivate",
            initialization_timeout=2 * patience,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT,
            shutdown_timeout_seconds=SHUTDOWN_TIMEOUT,
        )
    except RuntimeError as error:
        raise HangError(f"{name}: JAX's distributed runtime: {one_line(error)}") from None
    finally:
        late.cancel()
    if launch.expected and (seen := jax.local_device_count()) != launch.expected:
        raise ConfigError(
            f"{name}: {launch.expected} GPUs belong to it ({launch.source}), but JAX sees {seen} "
            f"devices ({jax.local_devices()[0].device_kind}); install jaxgpt[cuda], or set "
            "JAX_PLATFORMS=cpu to compute without them"
        )
    return launch, names


def _give_up(launch: Launch, names: tuple[str, ...], patience: int) -> NoReturn:
    """End a process that waits in JAX for others, all of which were there a moment ago."""
    text = (
        f"all {launch.processes} processes came, but not all have connected to JAX's runtime at "
        f"{launch.coordinator} after {patience} s: one of them, on {', '.join(names[:8])}"
        f"{' ...' if len(names) > 8 else ''}, has ended or is frozen; exit {HangError.exit_code}"
    )
    leaving.say(leaving.error_line(f"{text}\n"), seconds=5.0)
    os._exit(HangError.exit_code)


def _start_timeout() -> float:
    word = os.environ.get("JAXGPT_START_TIMEOUT") or str(START_TIMEOUT)
    try:
        seconds = float(word)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise ConfigError(f"JAXGPT_START_TIMEOUT = {word}: must be seconds above 0")
    return seconds


def _ask_metadata(launch: Launch) -> Launch | None:
    """Return a TPU launch with what the metadata of the machine say; None: not one of a pod."""
    from jax._src.clusters import cloud_tpu_cluster

    known = (cloud_tpu_cluster.GkeTpuCluster, cloud_tpu_cluster.GceTpuCluster)
    port = os.environ.get("JAX_COORDINATOR_PORT") or str(TPU_PORT)
    try:
        cluster = next((kind for kind in known if kind.is_env_present()), None)
        if cluster is None:
            return None
        processes, process = cluster.get_process_count(), cluster.get_process_id()
        address = launch.coordinator or cluster.get_coordinator_address(int(START_TIMEOUT), port)
    except Exception as error:  # of requests, sockets and int(): whatever the metadata server does
        raise ConfigError(f"TPU metadata: {one_line(error)}; {OFF}") from None
    return launch._replace(coordinator=address, process=process, processes=processes)


def _pass_by_proxies(coordinator: str) -> None:
    """Let the traffic of the coordinator go straight to it, where proxies are set for the web."""
    host = split_address(coordinator)[0]
    others = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy", "")
    os.environ["no_grpc_proxy"] = ",".join(filter(None, [others, host]))
    jax.config.update("jax_check_proxy_envs", False)  # it would only warn


def _keep_stdout() -> None:
    """Keep standard output to ourselves: Gloo, which connects CPUs, greets there from C++."""
    if sys.stdout is not sys.__stdout__ or sys.stdout.fileno() != 1:
        return
    sys.stdout.flush()
    ours, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    sys.stdout = os.fdopen(ours, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
