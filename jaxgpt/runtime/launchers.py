"""What started this process, as its environment tells: flags, TPU, Slurm, Kubernetes, Open MPI.

`detect` reads the variables it is given and nothing else. Under Slurm and Open MPI JAX's own
detection would give each process a single device, whatever the host has; leftovers of an earlier
job must not make a process wait for others that nobody started.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from jaxgpt.errors import ConfigError
from jaxgpt.runtime.roll_call import split_address

PORTS = range(61440, 65536)  # a job's port is chosen by its number: above what systems hand out
TPU_PORT = 8482
OFF = "--processes 1 runs this process alone, whatever the environment says"


class Flags(NamedTuple):
    """What the command line says: --coordinator, --process and --processes."""

    coordinator: str | None = None
    process: int | None = None
    processes: int | None = None


class Launch(NamedTuple):
    """How this process was started; `source` says which variables tell so.

    With `processes` 0 they and the coordinator are JAX's to find out (TPU metadata); with 1 there
    is nobody to wait for.
    """

    kind: str  # flags, variables, kubernetes, tpu, openmpi, slurm; alone; leftover: probably alone
    coordinator: str  # HOST:PORT
    process: int
    processes: int
    local_devices: tuple[int, ...] | None  # of this host's GPUs, those of this process; None: all
    source: str
    expected: int = 0  # GPUs that the launcher promises this process; 0: it says nothing


NO_FLAGS = Flags()


def detect(
    environ: Mapping[str, str], flags: Flags = NO_FLAGS, *, on_tpu: bool = False
) -> Launch | None:
    """Return how this process was started, from its environment alone; None: on its own.

    `on_tpu`: the machine has TPU chips. Raises ConfigError for flags or variables of which some are
    missing or impossible.
    """
    if flags.processes == 1:
        if flags.process:
            raise ConfigError(f"--process {flags.process}: of --processes 1 there is only 0")
        return _alone("--processes 1")
    if flags.process is not None or flags.processes is not None:
        names = {f"--{name}": value for name, value in flags._asdict().items()}
        _require(names, f"with {_given(names)}")
        return _checked("flags", *flags, None, "command line")
    found = (
        _variables(environ)
        or (on_tpu and _tpu(environ))
        or _open_mpi(environ, flags.coordinator)
        or _slurm(environ)
        or _kubernetes(environ)
        or None
    )
    if found is None or found.kind == "leftover":
        _refuse_unseen_tpu(environ)
    chosen = flags.coordinator or environ.get("JAX_COORDINATOR_ADDRESS")
    if not chosen:
        return found
    if found is None or (flags.coordinator and found.processes == 1):
        where = "--coordinator" if flags.coordinator else "JAX_COORDINATOR_ADDRESS"
        raise ConfigError(
            f"{where} {chosen}: nothing says which process this is, of how many; give --process "
            f"and --processes, or JAX_PROCESS_ID and JAX_NUM_PROCESSES; {OFF}"
        )
    split_address(chosen)
    return found._replace(coordinator=chosen)


def _variables(environ: Mapping[str, str]) -> Launch | None:
    """JAX's own names; in a Kubernetes Job with indices the process is its completion index."""
    if not {"JAX_NUM_PROCESSES", "JAX_PROCESS_ID"} & set(environ):
        return None
    index = environ.get("JAX_PROCESS_ID") or environ.get("JOB_COMPLETION_INDEX")
    values = {
        "JAX_COORDINATOR_ADDRESS": environ.get("JAX_COORDINATOR_ADDRESS"),
        "JAX_NUM_PROCESSES": environ.get("JAX_NUM_PROCESSES"),
        "JAX_PROCESS_ID": index,
    }
    if values["JAX_NUM_PROCESSES"] == "1":
        return _alone("JAX_NUM_PROCESSES = 1")
    _require(values, f"with {_given(values)}")
    by_index = "JAX_PROCESS_ID" not in environ
    kind = "kubernetes" if "KUBERNETES_SERVICE_HOST" in environ or by_index else "variables"
    source = "JOB_COMPLETION_INDEX" if by_index else "JAX_PROCESS_ID"
    process, processes = _number(values, "JAX_PROCESS_ID"), _number(values, "JAX_NUM_PROCESSES")
    return _checked(
        kind,
        values["JAX_COORDINATOR_ADDRESS"],
        process,
        processes,
        None,
        f"{source} of JAX_NUM_PROCESSES",
    )


def _tpu(environ: Mapping[str, str]) -> Launch:
    """TPU chips: on GKE the environment tells all, on other machines of Google the metadata."""
    addresses = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES")
    if not addresses or "TPU_PROCESS_ADDRESSES_PATH" in environ:
        return Launch("tpu", "", 0, 0, None, "TPU metadata")
    workers = addresses.split(",")
    first = environ.get("MEGASCALE_COORDINATOR_ADDRESS") or workers[0]
    slices = _number(environ, "MEGASCALE_NUM_SLICES", 1)
    process = _number(environ, "TPU_WORKER_ID") + len(workers) * _number(
        environ, "MEGASCALE_SLICE_ID", 0
    )
    source = "TPU_WORKER_ID of TPU_WORKER_HOSTNAMES"
    if len(workers) * slices == 1:
        return _alone(source)
    if slices > 1:
        source += f", slice {environ.get('MEGASCALE_SLICE_ID', 0)} of {slices}"
    port = _number(environ, "JAX_COORDINATOR_PORT", TPU_PORT)
    host = first.split(":")[0]
    return _checked("tpu", f"{host}:{port}", process, len(workers) * slices, None, source)


def _refuse_unseen_tpu(environ: Mapping[str, str]) -> None:
    """Raise ConfigError where other hosts of a slice are named, but JAX sees no TPU on this one."""
    others = environ.get("TPU_WORKER_HOSTNAMES", "").count(",")
    if others and environ.get("JAX_PLATFORMS", "") in ("", "tpu"):
        raise ConfigError(
            f"TPU_WORKER_HOSTNAMES names {others + 1} hosts, but JAX sees no TPU on this one: each "
            f"would run alone; install jaxgpt[tpu], or give the host its chips; {OFF}"
        )


def _open_mpi(environ: Mapping[str, str], coordinator: str | None) -> Launch | None:
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
    if names[1] not in environ:
        return None
    rank, size, local = (_number(environ, name) for name in names)
    source = "OMPI_COMM_WORLD_RANK of OMPI_COMM_WORLD_SIZE"
    if size == 1:
        return _alone(source)
    here = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", size)
    address = coordinator or environ.get("JAX_COORDINATOR_ADDRESS")
    if not address:
        # mpirun starts rank 0 on its own host, whose address version 4 gives as ".;tcp://IP,IP:".
        uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
        found = re.search(r"tcp://([^,:]+)|tcp6://\[([^,\]]+)", uri)
        if found:
            host = found[1] or f"[{found[2]}]"
        elif here == size:
            host = "localhost"
        else:
            raise ConfigError(
                "Open MPI does not say on which host rank 0 runs: give --coordinator HOST:PORT or "
                f"JAX_COORDINATOR_ADDRESS; {OFF}"
            )
        job = uri.partition(";")[0] or environ.get("PMIX_NAMESPACE", "")
        address = f"{host}:{_port(environ, zlib.crc32(job.encode()))}"
    devices, expected = _share(environ, local, here)
    return _checked("openmpi", address, rank, size, devices, source, expected)


def _slurm(environ: Mapping[str, str]) -> Launch | None:
    job = environ.get("SLURM_JOB_ID")
    if job is None:
        return None
    names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
    if "SLURM_STEP_NODELIST" not in environ:  # a batch script, a shell, or what it left behind
        nodes, tasks = (
            _number(environ, name, 1) for name in ("SLURM_JOB_NUM_NODES", "SLURM_NTASKS")
        )
        if max(nodes, tasks) == 1 and "SLURM_NTASKS" in environ:
            return None
        return _alone(
            f"SLURM_JOB_ID = {job} is set, but not SLURM_STEP_NODELIST: srun did not start this "
            "process, so it runs alone; to use all tasks of the job start it by srun",
            "leftover",
        )
    values = {name: environ.get(name) for name in names}
    _require(values, f"with SLURM_JOB_ID = {job} and SLURM_STEP_NODELIST")
    process, processes, local = (_number(environ, name) for name in names)
    source = f"SLURM_PROCID of SLURM_NTASKS, job {job}"
    if processes == 1:
        return _alone(source)
    port = _port(environ, _number(environ, "SLURM_JOB_ID"))
    address = f"{_first_host(environ['SLURM_STEP_NODELIST'])}:{port}"
    here = _tasks_here(environ, processes)
    devices, expected = _share(environ, local, here)
    return _checked("slurm", address, process, processes, devices, source, expected)


def _kubernetes(environ: Mapping[str, str]) -> Launch | None:
    index = environ.get("JOB_COMPLETION_INDEX")
    if index is None:
        return None
    return _alone(
        f"JOB_COMPLETION_INDEX = {index} is set, but not JAX_NUM_PROCESSES and "
        "JAX_COORDINATOR_ADDRESS: the indices are taken for runs of their own",
        "leftover",
    )


def _share(environ: Mapping[str, str], local: int, here: int) -> tuple[tuple[int, ...] | None, int]:
    """Return the local ids of the GPUs of one of `here` processes on a host, and their number.

    All belong to a process that is alone on its host, or that was given its own; else each gets an
    equal part of them.
    """
    if "JAX_LOCAL_DEVICE_IDS" in environ or environ.get("JAX_PLATFORMS") == "cpu":
        return None, 0
    given = [word for word in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
    on_host = _number(environ, "SLURM_GPUS_ON_NODE", 0)
    count = len(given) or on_host
    if here == 1 or (given and len(given) < on_host) or count == 0:
        return None, count
    if count % here:
        raise ConfigError(
            f"{count} GPUs do not divide over {here} processes on this host; start 1 or "
            f"{math.gcd(count, here) if math.gcd(count, here) > 1 else count} per host, or set "
            "JAX_LOCAL_DEVICE_IDS for each"
        )
    share = count // here
    return tuple(range(local * share, (local + 1) * share)), share


def _tasks_here(environ: Mapping[str, str], processes: int) -> int:
    """Return the Slurm tasks on this host: of "2(x3),1" the entry of SLURM_NODEID."""
    counts: list[int] = []
    listed = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", listed):
        counts += [int(tasks)] * int(times or 1)
    node = _number(environ, "SLURM_NODEID", 0)
    if node < len(counts):
        return counts[node]
    return math.ceil(processes / _number(environ, "SLURM_STEP_NUM_NODES", 1))


def _first_host(nodes: str) -> str:
    """Return the first of a Slurm list of hosts: node001 of node[001-004,007],other."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0] if first else nodes)


def _port(environ: Mapping[str, str], job: int) -> int:
    return _number(environ, "JAX_COORDINATOR_PORT", PORTS[job % len(PORTS)])


def _alone(source: str, kind: str = "alone") -> Launch:
    return Launch(kind, "", 0, 1, None, source)


def _checked(
    kind: str,
    coordinator: str,
    process: int,
    processes: int,
    devices: tuple[int, ...] | None,
    source: str,
    expected: int = 0,
) -> Launch:
    split_address(coordinator)
    if not 0 <= process < processes:
        raise ConfigError(
            f"process {process} of {processes} ({source}): the numbers are 0 to {processes - 1}"
        )
    return Launch(kind, coordinator, process, processes, devices, source, expected)


def _given(values: Mapping[str, object]) -> str:
    return " and ".join(f"{name} {value}" for name, value in values.items() if value is not None)


def _require(values: Mapping[str, object], context: str) -> None:
    missing = [name for name, value in values.items() if value is None or value == ""]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ConfigError(f"{' and '.join(missing)} {verb} missing, {context}; {OFF}")


def _number(values: Mapping[str, str | None], name: str, default: int | None = None) -> int:
    word = values.get(name)
    if word in (None, "") and default is not None:
        return default
    if word is None:
        raise ConfigError(f"{name} is missing; {OFF}")
    if not word.isdecimal():
        raise ConfigError(f"{name} = {word!r}: must be a whole number; {OFF}")
    return int(word)
