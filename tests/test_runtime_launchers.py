"""What started a process, from its environment alone: flags, TPU, Slurm, Kubernetes, Open MPI."""

from __future__ import annotations

import pytest

from jaxgpt.errors import ConfigError
from jaxgpt.runtime.launchers import Flags, Launch, detect

SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "node[001-002]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
GKE = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "t-0.svc,t-1.svc"}


def refused(environ: dict[str, str], flags: Flags = Flags(), **options) -> str:  # noqa: B008
    with pytest.raises(ConfigError) as error:
        detect(environ, flags, **options)
    text = str(error.value)
    assert "\n" not in text
    return text


def test_a_plain_environment_is_one_process():
    assert detect({"PATH": "/bin", "HOME": "/root"}) is None


# Flags.


def test_flags_win_over_everything_a_launcher_says():
    launch = detect({**SLURM, **MPI, **GKE}, Flags("h:1", 0, 3), on_tpu=True)
    assert launch[:5] == ("flags", "h:1", 0, 3, None)


def test_one_process_switches_detection_off():
    for environ in (SLURM, MPI, {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "n"}):
        assert detect(environ, Flags(processes=1)).processes == 1
    assert detect(GKE, Flags(processes=1), on_tpu=True).processes == 1
    assert "--process 2" in refused({}, Flags(process=2, processes=1))


@pytest.mark.parametrize(
    ("flags", "missing"),
    [
        (Flags("h:1", 0, None), "--processes is missing, with --coordinator h:1 and --process 0"),
        (Flags("h:1", None, 2), "--process is missing"),
        (Flags(None, 0, 2), "--coordinator is missing, with --process 0 and --processes 2"),
        (Flags(None, None, 2), "--coordinator and --process are missing"),
        (Flags("h:1"), "--coordinator h:1: nothing says which process this is"),
    ],
)
def test_flags_that_are_missing_are_named(flags, missing):
    assert missing in refused({}, flags)


def test_a_process_number_beyond_the_number_of_processes_is_refused():
    assert "process 2 of 2 (command line): the numbers are 0 to 1" in refused(
        {}, Flags("h:1", 2, 2)
    )


@pytest.mark.parametrize("address", ["node0", "node0:", ":1", "node0:0", "node0:65536", "::1:80"])
def test_an_address_that_is_none_is_refused(address):
    assert f"coordinator {address}" in refused({}, Flags(address, 0, 2))


def test_an_address_of_ip_version_6_is_one_in_brackets():
    assert detect({}, Flags("[::1]:80", 0, 2)).coordinator == "[::1]:80"


# Slurm.


def test_slurm_gives_number_count_and_the_first_host_with_a_port_of_the_job():
    launch = detect(SLURM)
    assert launch[:4] == ("slurm", "node001:61441", 1, 2)  # 4097 = 1 mod 4096
    assert launch.source == "SLURM_PROCID of SLURM_NTASKS, job 4097"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node001", "node001"),
        ("node001,host2", "node001"),
        ("node[001-0015],host2", "node001"),
        ("node[001,007-015],host2", "node001"),
        ("node[7]", "node7"),
        ("rack[1-2]n[3-4]-ib,x", "rack1n3-ib"),
    ],
)
def test_the_first_of_slurms_hosts(nodes, first):
    assert detect(SLURM | {"SLURM_STEP_NODELIST": nodes}).coordinator == f"{first}:61441"


def test_all_gpus_of_a_node_belong_to_its_only_task():
    launch = detect(SLURM | {"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"})
    assert launch.local_devices is None  # JAX's own detection would give it one of the 8
    assert launch.expected == 8


@pytest.mark.parametrize(("local", "devices"), [("0", (0, 1, 2, 3)), ("1", (4, 5, 6, 7))])
def test_tasks_of_one_node_share_its_gpus_evenly(local, devices):
    tasks = {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_NTASKS": "4", "SLURM_LOCALID": local}
    launch = detect(SLURM | tasks | {"SLURM_GPUS_ON_NODE": "8"})
    assert launch.local_devices == devices
    assert launch.expected == 4


def test_a_task_that_slurm_gave_gpus_of_its_own_uses_those():
    tasks = {"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_NTASKS": "8", "SLURM_LOCALID": "3"}
    launch = detect(SLURM | tasks | {"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "3"})
    assert (launch.local_devices, launch.expected) == (None, 1)


def test_uneven_tasks_per_node_are_counted_for_this_node():
    tasks = {"SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_NTASKS": "3", "SLURM_PROCID": "2"}
    launch = detect(SLURM | tasks | {"SLURM_GPUS_ON_NODE": "4", "SLURM_NODEID": "1"})
    assert (launch.local_devices, launch.expected) == (None, 4)


def test_gpus_that_do_not_divide_over_the_tasks_are_refused():
    tasks = {"SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_NTASKS": "3", "SLURM_NODEID": "0"}
    text = refused(SLURM | tasks | {"SLURM_GPUS_ON_NODE": "8"})
    assert "8 GPUs do not divide over 3 processes" in text


@pytest.mark.parametrize("own", [{"JAX_PLATFORMS": "cpu"}, {"JAX_LOCAL_DEVICE_IDS": "2"}])
def test_devices_are_left_to_a_user_who_chose_them(own):
    tasks = {"SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_NTASKS": "3", "SLURM_NODEID": "0"}
    launch = detect(SLURM | tasks | {"SLURM_GPUS_ON_NODE": "8"} | own)
    assert (launch.local_devices, launch.expected) == (None, 0)


@pytest.mark.parametrize(
    "left",
    [
        {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2"},
        {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1"},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    ],
)
def test_what_an_earlier_slurm_job_left_is_one_process_and_is_said(left):
    launch = detect(left)
    assert (launch.kind, launch.processes) == ("leftover", 1)
    assert "SLURM_STEP_NODELIST" in launch.source and "srun" in launch.source


def test_a_slurm_step_without_a_task_count_names_what_is_missing_and_how_to_switch_it_off():
    text = refused({"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "node1", "SLURM_PROCID": "0"})
    assert text.startswith("SLURM_NTASKS and SLURM_LOCALID are missing")
    assert "--processes 1" in text


def test_a_slurm_job_of_one_task_is_one_process():
    assert detect(SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}).processes == 1
    assert detect({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"}) is None


# Kubernetes, and JAX's own variables.


def test_an_indexed_job_of_kubernetes_is_its_completion_index_of_what_the_manifest_says():
    environ = {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "JOB_COMPLETION_INDEX": "1",
        "JAX_COORDINATOR_ADDRESS": "jaxgpt-slice-0-0.jaxgpt:8476",
        "JAX_NUM_PROCESSES": "2",
    }
    assert detect(environ)[:4] == ("kubernetes", "jaxgpt-slice-0-0.jaxgpt:8476", 1, 2)


def test_an_index_alone_is_a_run_of_its_own_and_is_said():
    launch = detect({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3"})
    assert (launch.kind, launch.processes) == ("leftover", 1)
    assert "JAX_NUM_PROCESSES" in launch.source


def test_the_variables_of_jax_are_enough():
    environ = {"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}
    assert detect(environ)[:4] == ("variables", "h:1", 0, 2)


@pytest.mark.parametrize(
    "missing", ["JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"]
)
def test_a_variable_that_is_missing_is_named(missing):
    environ = {"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}
    del environ[missing]
    assert f"{missing} is missing" in refused(environ)


def test_an_address_without_numbers_is_refused():
    assert "JAX_PROCESS_ID" in refused({"JAX_COORDINATOR_ADDRESS": "h:1"})


def test_an_address_in_the_environment_replaces_that_of_slurm():
    assert detect(SLURM | {"JAX_COORDINATOR_ADDRESS": "ib0:9"}).coordinator == "ib0:9"
    assert detect(SLURM | {"JAX_COORDINATOR_PORT": "9"}).coordinator == "node001:9"
    assert detect(SLURM, Flags("flag:9")).coordinator == "flag:9"


def test_a_word_for_a_number_is_refused_by_name():
    assert "SLURM_PROCID = 'x': must be a whole number" in refused(SLURM | {"SLURM_PROCID": "x"})
    for job in ("abc", ""):
        assert f"SLURM_JOB_ID = {job!r}: must be" in refused(SLURM | {"SLURM_JOB_ID": job})
    without = {name: value for name, value in MPI.items() if name != "OMPI_COMM_WORLD_RANK"}
    assert refused(without).startswith("OMPI_COMM_WORLD_RANK is missing; ")


# TPU.


def test_tpu_hosts_of_one_slice_are_those_that_the_environment_lists():
    launch = detect(GKE, on_tpu=True)
    assert launch[:5] == ("tpu", "t-0.svc:8482", 1, 2, None)


def test_tpu_slices_are_numbered_one_after_another():
    slices = {
        "MEGASCALE_COORDINATOR_ADDRESS": "s-0.svc:8080",
        "MEGASCALE_NUM_SLICES": "3",
        "MEGASCALE_SLICE_ID": "2",
    }
    assert detect(GKE | slices, on_tpu=True)[:4] == ("tpu", "s-0.svc:8482", 5, 6)


def test_a_single_tpu_host_is_one_process():
    one = {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"}
    assert detect(one, on_tpu=True).processes == 1


def test_without_variables_a_tpu_machine_is_left_to_its_metadata():
    assert detect({}, on_tpu=True) == Launch("tpu", "", 0, 0, None, "TPU metadata")


def test_a_host_of_a_slice_on_which_no_tpu_is_seen_does_not_run_alone():
    for environ in (GKE, GKE | {"JOB_COMPLETION_INDEX": "1"}):
        said = refused(environ)
        assert "names 2 hosts, but JAX sees no TPU on this one" in said and "--processes 1" in said
    assert detect(GKE, Flags(processes=1)).processes == 1


def test_variables_of_tpus_mean_nothing_where_none_are_asked_for_or_another_launcher_is_there():
    assert detect(GKE | {"JAX_PLATFORMS": "cpu"}) is None
    assert detect(GKE | {"TPU_WORKER_HOSTNAMES": "t-0.svc"}) is None
    assert detect(SLURM | GKE).kind == "slurm"


# Open MPI.


def test_open_mpi_4_gives_the_address_of_mpirun():
    launch = detect(MPI)
    assert (launch.kind, launch.process, launch.processes) == ("openmpi", 3, 4)
    host, _, port = launch.coordinator.rpartition(":")
    assert host == "10.96.0.1" and 61440 <= int(port) < 65536


def test_all_ranks_of_a_job_find_the_same_address():
    ranks = [detect(MPI | {"OMPI_COMM_WORLD_RANK": str(rank)}).coordinator for rank in range(4)]
    assert len(set(ranks)) == 1


def test_open_mpi_5_on_one_host_meets_there_and_on_several_asks_for_the_address():
    five = {key: value for key, value in MPI.items() if key != "OMPI_MCA_orte_hnp_uri"}
    here = detect(five | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "prterun-h-12@1"})
    assert here.coordinator.startswith("localhost:")
    assert "--coordinator HOST:PORT" in refused(five)
    assert detect(five, Flags("h:1")).coordinator == "h:1"


def test_mpirun_inside_a_slurm_job_is_not_taken_for_srun():
    assert detect(SLURM | MPI).kind == "openmpi"


def test_ranks_of_a_host_share_its_gpus():
    launch = detect(MPI | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    assert (launch.local_devices, launch.expected) == ((2, 3), 2)
