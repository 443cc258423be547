"""The JobSet and the container file: their structure, and that what they name exists."""

from __future__ import annotations

import math
import re
import subprocess
import tomllib
from typing import Any

import pytest
import yaml
from recorders import ROOT

from jaxgpt.runtime import launchers

JOBSET = ROOT / "launch/gke_jobset.yaml"
CONTAINERFILE = ROOT / "launch/Containerfile"
NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
FAIL, RESTART = "FailJobSet", "RestartJobSetAndIgnoreMaxRestarts"


def documented(command: str) -> str:
    """Return a command that the file's opening comment shows."""
    lines = (line.removeprefix("#   ") for line in JOBSET.read_text().splitlines())
    return next(line for line in lines if line.startswith(command))


def jobset(kind: str) -> dict[str, Any]:
    """Return the JobSet for TPUs, or what the documented command makes of it for GPUs."""
    text = JOBSET.read_text()
    if kind == "gpu":
        command = ["bash", "-c", documented("sed -E")]
        text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return yaml.safe_load(text)


def pod_of(tree: dict[str, Any]) -> dict[str, Any]:
    (group,) = tree["spec"]["replicatedJobs"]
    return group["template"]["spec"]["template"]["spec"]


def shape(value: Any, pattern: Any, where: str = "") -> None:
    """Assert that a value has the types of a pattern: all keys but those with `?`, no others."""
    if isinstance(pattern, dict):
        assert isinstance(value, dict), where
        if set(pattern) == {str}:
            assert all(isinstance(v, pattern[str]) for v in value.values()), where
            return
        required = {key for key in pattern if not key.endswith("?")}
        allowed = {key.rstrip("?") for key in pattern}
        assert required <= set(value) <= allowed, f"{where}: {sorted(set(value) ^ allowed)}"
        for key in value:
            shape(value[key], pattern.get(key, pattern.get(f"{key}?")), f"{where}.{key}")
    elif isinstance(pattern, list):
        assert isinstance(value, list) and value, where
        for item in value:
            shape(item, pattern[0], f"{where}[]")
    else:
        assert type(value) is pattern, f"{where}: {value!r}"


CONTAINER = {
    "name": str,
    "image": str,
    "args": [str],
    "env": [{"name": str, "value": str}],
    "resources": {"limits": {str: int}},
    "volumeMounts": [{"name": str, "mountPath": str}],
    "securityContext?": {"privileged": bool},
}
VOLUME = {
    "name": str,
    "persistentVolumeClaim?": {"claimName": str},
    "emptyDir?": {"medium": str},
}
POD = {
    "restartPolicy": str,
    "terminationGracePeriodSeconds": int,
    "hostNetwork": bool,
    "dnsPolicy": str,
    "nodeSelector": {str: str},
    "containers": [CONTAINER],
    "volumes": [VOLUME],
}
POD_RULE = {
    "action": str,
    "onExitCodes?": {"containerName": str, "operator": str, "values": [int]},
    "onPodConditions?": [{"type": str, "status": str}],
}
JOB = {
    "parallelism": int,
    "completions": int,
    "completionMode": str,
    "backoffLimit": int,
    "podFailurePolicy": {"rules": [POD_RULE]},
    "template": {"spec": POD},
}
RULE = {
    "name": str,
    "action": str,
    "onJobFailureReasons": [str],
    "onJobFailureMessagePatterns?": [str],
}
JOBSET_SHAPE = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str, "annotations": {str: str}},
    "spec": {
        "failurePolicy": {"maxRestarts": int, "restartStrategy": str, "rules": [RULE]},
        "replicatedJobs": [{"name": str, "replicas": int, "template": {"spec": JOB}}],
    },
}


@pytest.mark.parametrize("kind", ["tpu", "gpu"])
def test_the_jobset_has_the_fields_of_its_kind_and_no_others(kind):
    tree = jobset(kind)
    shape(tree, JOBSET_SHAPE)
    assert (tree["apiVersion"], tree["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (group,) = tree["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # a failure policy of pods asks for it
    assert job["completionMode"] == "Indexed" and job["parallelism"] == job["completions"] > 1
    assert NAME.fullmatch(f"{tree['metadata']['name']}-{group['name']}-0-0-abcde")
    (container,) = pod["containers"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert all(len(volume) == 2 for volume in pod["volumes"])


def after(exit_code: int | None, condition: str | None = None) -> str:
    """Return what becomes of the JobSet when a pod ends so, as Kubernetes and JobSet decide it."""
    spec = jobset("tpu")["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    assert job["backoffLimit"] == 0
    for index, rule in enumerate(job["podFailurePolicy"]["rules"]):
        codes = rule.get("onExitCodes", {"values": []})
        conditions = [c["type"] for c in rule.get("onPodConditions", [])]
        if exit_code in codes["values"] or condition in conditions:
            assert rule["action"] == "FailJob" and codes.get("operator", "In") == "In"
            assert codes.get("containerName", "train") == container["name"]
            reason = "PodFailurePolicy"
            message = f"Pod x failed with exit code 1 matching FailJob rule at index {index}"
            break
    for rule in spec["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        matches = any(re.search(pattern, message) for pattern in patterns)
        if reason in rule["onJobFailureReasons"] and matches:
            return rule["action"]
    return "RestartJobSet"


@pytest.mark.parametrize("exit_code", [64, 65, 66, 78, 79, 130, 143])
def test_what_needs_a_person_ends_the_jobset(exit_code):
    assert after(exit_code) == FAIL


@pytest.mark.parametrize("exit_code", [1, 70, 74, 76, 134, 137, 139])
def test_what_may_be_tried_again_restarts_it_a_number_of_times(exit_code):
    assert after(exit_code) == "RestartJobSet"
    assert 1 <= jobset("tpu")["spec"]["failurePolicy"]["maxRestarts"] <= 100


def test_interruptions_are_not_counted():
    assert after(75) == RESTART
    for exit_code in (None, 75, 137, 143):  # 143: before there was anything to save
        assert after(exit_code, "DisruptionTarget") == RESTART


def test_a_slice_has_as_many_pods_as_hosts():
    job = jobset("tpu")["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    sizes = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    chips = pod["containers"][0]["resources"]["limits"]["google.com/tpu"]
    assert math.prod(map(int, sizes)) == chips * job["parallelism"]


def test_pods_with_gpus_find_each_other_at_the_first():
    tree = jobset("gpu")
    (group,) = tree["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    given = {entry["name"]: entry["value"] for entry in container["env"]}
    launch = launchers.detect(given | {"JOB_COMPLETION_INDEX": "1"})
    assert (launch.kind, launch.process, launch.processes) == ("kubernetes", 1, job["parallelism"])
    name = tree["metadata"]["name"]
    host, port = launch.coordinator.split(":")
    assert host == f"{name}-{group['name']}-0-0.{name}" and int(port) < 32768
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert "google" not in str(job["template"]["spec"]["nodeSelector"]).replace("cloud.google", "")


def test_the_documented_log_is_that_of_the_process_that_prints():
    # `kubectl logs job/NAME` takes any pod of the Job, and only process 0 prints a run. By labels
    # it would begin with the last 10 lines.
    tree = jobset("tpu")
    (group,) = tree["spec"]["replicatedJobs"]
    words = documented("kubectl logs").split()
    labels = dict(label.split("=") for label in words[words.index("-l") + 1].split(","))
    assert labels == {
        "batch.kubernetes.io/job-name": f"{tree['metadata']['name']}-{group['name']}-0",
        "batch.kubernetes.io/job-completion-index": "0",  # the first host of the first slice
    }
    assert words[words.index("--tail") + 1] == "-1"


def test_pods_with_tpus_are_told_of_each_other_by_gke():
    (container,) = pod_of(jobset("tpu"))["containers"]
    given = {entry["name"]: entry["value"] for entry in container["env"]}
    assert not [name for name in given if "COORDINATOR" in name or "PROCESS" in name]
    of_gke = {"TPU_WORKER_ID": "3", "TPU_WORKER_HOSTNAMES": "a,b,c,d"}
    launch = launchers.detect(given | of_gke | {"JOB_COMPLETION_INDEX": "3"}, on_tpu=True)
    assert (launch.kind, launch.process, launch.processes) == ("tpu", 3, 4)


def test_the_arguments_name_a_preset_that_exists():
    (container,) = pod_of(jobset("tpu"))["containers"]
    verb, preset, *settings = container["args"]
    assert verb == "train" and (ROOT / preset).exists() and container["image"] == "IMAGE"
    runs = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}["runs"]
    assert all(setting.split("=")[1].startswith(f"{runs}/") for setting in settings)


def instructions() -> list[tuple[str, str]]:
    lines = CONTAINERFILE.read_text().splitlines()
    return [tuple(line.split(" ", 1)) for line in lines if line and not line.startswith("#")]


def test_the_image_has_a_supported_python_and_the_tested_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (base,) = (words for name, words in instructions() if name == "FROM")
    assert re.fullmatch(r"docker\.io/library/python:3\.1[123]-slim", base)
    (extra,) = (words for name, words in instructions() if name == "ARG")
    assert extra.split("=")[1] in project["optional-dependencies"]
    assert "cuda" in project["optional-dependencies"]  # which its comment names
    (first, _) = (words for name, words in instructions() if name == "RUN")
    assert "-c launch/constraints.txt" in first and '".[${EXTRA}]"' in first


def test_what_the_image_copies_exists_and_dependencies_come_before_the_code():
    copied = [words.split()[:-1] for name, words in instructions() if name == "COPY"]
    assert all((ROOT / path).exists() for paths in copied for path in paths)
    names = [name for name, _ in instructions()]
    assert copied[-1] == ["."] and names.index("RUN") < len(names) - names[::-1].index("COPY") - 1


def test_the_command_of_the_image_gets_the_signals_itself():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    (entry,) = (words for name, words in instructions() if name == "ENTRYPOINT")
    assert yaml.safe_load(entry) == ["jaxgpt"] and "jaxgpt" in scripts
