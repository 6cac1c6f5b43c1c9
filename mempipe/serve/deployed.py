"""Checks a Serve config of the agent service before it is deployed, for `mempipe doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

from mempipe.checks.findings import Finding, fatal, note, ok
from mempipe.checks.machine import Devices, check_port
from mempipe.environment import LOOPBACK
from mempipe.evaluation.suite import merged
from mempipe.kinds import AGENT_APP, ENGINE_APP
from mempipe.loader import load_values, parse_overrides, parse_section
from mempipe.serve.config import ENGINES, AgentServiceConfig
from mempipe.serve.http.keys import load_keys
from mempipe.serve.served_run import check_agent_service, named_by
from mempipe.settings import ConfigError


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A Ray Serve config of the agent service."""

    path: str
    deployed: ServeDeploySchema
    changes: dict[str, Any]
    """Overrides of the `args` of its applications."""


def load_deployment(path: str, overrides: Sequence[str] = ()) -> Deployment:
    """Returns the agent service that a Serve config deploys, with `key=value` overrides of the `args` of its
    applications. Raises ConfigError."""
    return Deployment(path=path, deployed=_read(path), changes=parse_overrides(overrides))


def check_deployment(deployment: Deployment, *, devices: Devices | None = None) -> list[Finding]:
    """Returns all findings about an agent service on a cluster; `devices` as in `mempipe.checks.run.check_run`.

    Raises ConfigError when the settings themselves are wrong.
    """
    path, deployed, changes = deployment.path, deployment.deployed, deployment.changes
    agents = [each for each in deployed.applications if each.import_path == AGENT_APP]
    engines = {each.name: _settings(each, changes) for each in deployed.applications if each.import_path == ENGINE_APP}
    if len(agents) != 1:
        raise ConfigError(f"{path} has {len(agents)} applications with import_path {AGENT_APP}; expected one")
    service = _settings(agents[0], changes)
    findings = check_agent_service(named_by(service), devices=devices)
    for other in engines.values():  # most often those of the agents
        if other != service:
            found = check_agent_service(named_by(other), devices=devices)
            findings += [each for each in found if each not in findings]
    findings.append(_check_engines(agents[0], list(engines), service))
    findings += _check_prefix(agents[0])
    if any(finding.fatal for finding in findings):
        return findings
    return findings + _check_address(deployed.http_options, service, is_here=devices is None)


def _read(path: str) -> ServeDeploySchema:
    try:
        return ServeDeploySchema.model_validate(load_values(path, kind="agent-service"))
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _settings(application: ServeApplicationSchema, changes: dict[str, Any]) -> AgentServiceConfig:
    try:
        return parse_section(merged(dict(application.args), changes), AgentServiceConfig)
    except ConfigError as error:
        raise ConfigError(f"{application.name}: {error}") from error


def _check_engines(agent: ServeApplicationSchema, there: list[str], service: AgentServiceConfig) -> Finding:
    """Checks that the agents' engines are deployed with them, and that none are if an endpoint samples."""
    if service.endpoint is not None:
        text = f"endpoint: {service.endpoint.url} samples"
        return fatal(f"{text}; take the applications {there} out, whose engines nobody asks") if there else ok(text)
    configured = [each.user_config for each in agent.deployments if each.name == "agent"]
    named = [each["generator"] for each in configured if isinstance(each, dict) and "generator" in each]
    asked = named[0] if named else ENGINES
    if asked in there:
        return ok(f"generator: the agents ask the engines of the application {asked!r}")
    text = f"user_config.generator of the deployment 'agent' is {asked!r}"
    return fatal(f"{text}; the applications with import_path {ENGINE_APP} are {there}")


def _check_prefix(agent: ServeApplicationSchema) -> list[Finding]:
    """Checks that Serve's proxy finds the API at its paths."""
    if agent.route_prefix == "/":
        return []
    text = f"route_prefix of the application {agent.name!r} is {agent.route_prefix!r}; expected '/'"
    reason = "Serve's proxy finds requests that need a key, and the limits of each, by their paths"
    return [fatal(f"{text}, since {reason}; http_options.root_path may name a prefix")]


def _check_address(http: HTTPOptionsSchema, service: AgentServiceConfig, *, is_here: bool) -> list[Finding]:
    findings = []
    if http.host not in LOOPBACK and not load_keys(service.keys):
        text = f"http_options.host is {http.host!r}, which other machines reach, but there are no API keys here; the"
        findings.append(
            note(f"{text} service answers callers on its own machine alone without `keys` or MEMPIPE_API_KEYS")
        )
    if is_here:
        taken = check_port(http.host, http.port).fatal
        text = f"http_options: port {http.port} of {http.host}"
        findings.append(note(f"{text} is taken, perhaps by this service") if taken else ok(f"{text} is free"))
    return findings
