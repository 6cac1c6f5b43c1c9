"""The RayJob manifest: fields that KubeRay knows, a command that this repository understands, GPUs enough."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from mempipe.cli import _parser
from mempipe.loader import load_config
from mempipe.planning.placement import Demand, plan

ROOT = Path(__file__).parents[2]
SPEC_FIELDS = {  # of RayJobSpec in ray.io/v1
    "activeDeadlineSeconds",
    "backoffLimit",
    "clusterSelector",
    "entrypoint",
    "entrypointNumCpus",
    "entrypointNumGpus",
    "entrypointResources",
    "jobId",
    "managedBy",
    "metadata",
    "rayClusterSpec",
    "runtimeEnvYAML",
    "shutdownAfterJobFinishes",
    "submissionMode",
    "submitterConfig",
    "submitterPodTemplate",
    "suspend",
    "ttlSecondsAfterFinished",
}
CLUSTER_FIELDS = {
    "authOptions",
    "autoscalerOptions",
    "enableInTreeAutoscaling",
    "gcsFaultToleranceOptions",
    "headGroupSpec",
    "headServiceAnnotations",
    "managedBy",
    "rayVersion",
    "suspend",
    "workerGroupSpecs",
}
GROUP_FIELDS = {"groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts", "rayStartParams", "template"}


@pytest.fixture(scope="module")
def spec() -> dict[str, Any]:
    manifest = yaml.safe_load((ROOT / "jobs" / "rayjob.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    return manifest["spec"]


def pods(spec: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = spec["rayClusterSpec"]
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def test_every_field_is_one_that_kuberay_knows(spec):
    cluster = spec["rayClusterSpec"]
    assert spec.keys() <= SPEC_FIELDS and cluster.keys() <= CLUSTER_FIELDS
    assert cluster["headGroupSpec"].keys() <= {"rayStartParams", "template", "serviceType", "enableIngress"}
    assert all(group.keys() <= GROUP_FIELDS for group in cluster["workerGroupSpecs"])
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())


def test_the_cluster_runs_the_ray_that_is_pinned_here(spec):
    assert spec["rayClusterSpec"]["rayVersion"] == ray.__version__


def test_the_cluster_asks_for_a_token(spec):
    assert spec["rayClusterSpec"]["authOptions"] == {"mode": "token"}


def test_a_job_that_failed_is_submitted_again_and_goes_on(spec):
    words = shlex.split(spec["entrypoint"])
    assert words[:3] == ["python", "-m", "jobs.train"] and "--resume-if-exists" in words
    assert spec["backoffLimit"] >= 1
    arguments = _parser().parse_args(["train", *words[3:]])  # as the command itself reads them
    assert arguments.resume == "auto"


def test_the_command_is_a_config_of_this_repository_on_the_shared_volume(spec):
    config, *overrides = [word for word in shlex.split(spec["entrypoint"])[3:] if not word.startswith("--")]
    loaded = load_config(ROOT / config, overrides)
    (mount,) = {
        mount["mountPath"]
        for pod in pods(spec)
        for mount in pod["containers"][0]["volumeMounts"]
        if mount["name"] == "shared"
    }
    paths = (loaded.output, loaded.model.path, loaded.data.train, loaded.data.validation, loaded.retrieval.index)
    assert all(path.startswith(f"{mount}/") for path in paths)
    gpus = [
        int(group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
        for group in spec["rayClusterSpec"]["workerGroupSpecs"]
        for _ in range(group["replicas"])
    ]
    found = plan(loaded, Demand.of_training(loaded), gpus)
    assert found.kind == "separate" and found.unused_gpus == 0


def test_every_volume_that_is_mounted_is_there(spec):
    for pod in pods(spec):
        mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
