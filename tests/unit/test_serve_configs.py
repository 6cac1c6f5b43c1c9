"""The example configs of the services name what exists, and say what their settings take."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.config import RequestRouterConfig
from ray.serve.schema import ServeDeploySchema

from mempipe.environment import SERVICE
from mempipe.loader import parse_section
from mempipe.serve.config import AgentServiceConfig
from mempipe.serve.http import front, strangers
from mempipe.serve.http.keys import VARIABLE
from mempipe.serve.routing import sheds

JOBS = Path(__file__).parents[2] / "jobs"


def serve_config(name: str) -> dict[str, Any]:
    values = yaml.safe_load((JOBS / name).read_text())
    return yaml.safe_load(values["spec"]["serveConfigV2"]) if "spec" in values else values


@pytest.mark.parametrize("name", ["configs/agent_service.yaml", "kubernetes/agent_service.yaml"])
def test_the_applications_are_there_and_take_their_settings(name):
    values = serve_config(name)
    engines, agent = ServeDeploySchema.model_validate(values).applications
    for application in (engines, agent):
        module, _, builder = application.import_path.partition(":")
        assert callable(getattr(importlib.import_module(module), builder))
        assert parse_section(dict(application.args), AgentServiceConfig).run
    assert (engines.route_prefix, agent.route_prefix) == (None, "/")
    (deployment,) = agent.deployments
    assert deployment.name == "agent" and deployment.user_config == {"generator": engines.name}


def test_nobody_else_is_served_unless_keys_are_asked_for():
    assert serve_config("configs/agent_service.yaml")["http_options"]["host"] == "127.0.0.1"
    manifest = yaml.safe_load((JOBS / "kubernetes/agent_service.yaml").read_text())
    (keys,) = {each["args"]["keys"] for each in serve_config("kubernetes/agent_service.yaml")["applications"]}
    for group in groups(manifest):
        (container,) = group["template"]["spec"]["containers"]
        environment = {variable["name"]: variable for variable in container["env"]}
        assert environment[front.VARIABLE]["value"] == front.PATH
        assert float(environment[front.CHECK_VARIABLE]["value"]) == front.CHECK_EVERY_S
        assert {name: environment[name]["value"] for name in SERVICE} == SERVICE
        assert VARIABLE not in environment  # no process reads a variable again when the secret changes
        assert environment[strangers.VARIABLE]["value"] == keys
        (mount,) = [mount for mount in container["volumeMounts"] if keys.startswith(mount["mountPath"])]
        assert set(mount) == {"name", "mountPath", "readOnly"}  # a file under `subPath` stays as it is
        volumes = {volume["name"]: volume for volume in group["template"]["spec"]["volumes"]}
        assert volumes[mount["name"]]["secret"]["secretName"] == "mempipe-keys"


def test_the_docs_start_a_cluster_with_the_variables_of_a_service():
    page = (JOBS.parent / "docs" / "serving.md").read_text()
    assert [name for name, value in SERVICE.items() if f"{name}={value}" not in page] == []


def test_the_manifest_has_the_shape_of_a_ray_service():
    """The fields of ray.io/v1 that KubeRay needs, and the volumes that every pod mounts."""
    manifest = yaml.safe_load((JOBS / "kubernetes/agent_service.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayService")
    assert set(manifest["spec"]) == {"serveConfigV2", "rayClusterConfig"}
    cluster = manifest["spec"]["rayClusterConfig"]
    assert set(cluster) == {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
    assert cluster["authOptions"] == {"mode": "token"}
    head, worker = groups(manifest)
    assert set(head) == {"rayStartParams", "template"}
    assert set(worker) == {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
    assert worker["minReplicas"] <= worker["replicas"] <= worker["maxReplicas"]
    state = serve_config("kubernetes/agent_service.yaml")["applications"][0]["args"]["state"]
    for group in (head, worker):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        mounts = container["volumeMounts"]
        assert [volume["name"] for volume in pod["volumes"]] == [mount["name"] for mount in mounts]
        assert state.startswith(mounts[0]["mountPath"])
        assert set(container["resources"]) == {"limits", "requests"}
    assert head["template"]["spec"]["containers"][0]["ports"][0] == {"containerPort": 8000, "name": "serve"}


def groups(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = manifest["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def test_every_cluster_that_the_docs_start_asks_for_a_token():
    """Whoever reaches the ports of a cluster without one can run code there."""
    pages = [JOBS.parent / "README.md", *sorted((JOBS.parent / "docs").glob("*.md"))]
    blocks = [block for page in pages for block in re.findall(r"```\w*\n(.*?)```", page.read_text(), re.DOTALL)]
    starting = [block for block in blocks if re.search(r"^ray start --head", block, re.MULTILINE)]
    assert len(starting) >= 2
    for block in starting:
        assert "ray get-auth-token --generate" in block.partition("ray start --head")[0], block


@pytest.mark.slow  # an interpreter with Serve
def test_a_proxy_that_has_no_mempipe_takes_the_router(tmp_path):
    """`mempipe submit` ships the code to the replicas; the proxies of a cluster have what its nodes have."""
    router = RequestRouterConfig(**sheds(4, max_wait_s=60.0)["request_router_config"])
    (tmp_path / "router").write_bytes(router._serialized_request_router_cls)
    code = (
        "import sys; sys.modules['mempipe'] = None\n"
        "from ray import cloudpickle\n"
        f"print(cloudpickle.loads(open({str(tmp_path / 'router')!r}, 'rb').read()).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "BoundedRouter\n", done.stderr
