"""Checks whether an agent service can start: its agents under one engine, and the callers that can reach it.

This imports transformers, so it comes after the checks that need nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping

from mempipe.agents.protocol import Tokenizer
from mempipe.checks.findings import Finding, attempt, fatal
from mempipe.checks.machine import check_local_service
from mempipe.checks.models import check_model
from mempipe.checks.run import check_retrieval
from mempipe.config import RunConfig
from mempipe.engines.tokenizer import load_tokenizer
from mempipe.environment import LOOPBACK
from mempipe.rollout import make_renderer
from mempipe.settings import ConfigError


def check_agents(agents: Mapping[str, RunConfig], *, own_engine: bool) -> list[Finding]:
    """Returns all findings about agents that share the weights and the index of the first.

    `own_engine` is False where an endpoint samples, so that only the tokenizer is read here.
    """
    main = next(iter(agents.values()))
    findings: list[Finding] = []
    if searching := [agent for agent in agents.values() if agent.agent_spec.searches]:
        findings += check_retrieval(searching[0])
    if own_engine:
        findings += check_model(main.model.path, setting="model.path", context_tokens=main.budget.context_tokens)
    if any(finding.fatal for finding in findings):
        return findings
    try:
        tokenizer = load_tokenizer(main.model.path)
    except ConfigError as error:
        return [*findings, fatal(str(error))]
    return findings + [
        attempt(lambda name=name, agent=agent: _check_agent(name, agent, main, tokenizer), f"agents: {name}")
        for name, agent in agents.items()
    ]


def _check_agent(name: str, agent: RunConfig, main: RunConfig, tokenizer: Tokenizer) -> None:
    """Raises ConfigError when the engine of `main` cannot play the agent, and when its template does not fit."""
    if agent.agent_spec.stop_texts != main.agent_spec.stop_texts:
        raise ConfigError(
            f"agents: {name} and {main.agent.name} end their messages with different texts, which one engine "
            "cannot do; serve them apart"
        )
    if agent.budget.context_tokens > main.budget.context_tokens:
        raise ConfigError(
            f"agents: {name} has budget.context_tokens {agent.budget.context_tokens}, more than the "
            f"{main.budget.context_tokens} of {main.agent.name}, which the engine is made for"
        )
    make_renderer(agent, tokenizer=tokenizer)


def check_address(*, host: str, port: int, has_keys: bool) -> list[Finding]:
    """Returns all findings about the address at which an agent service opens on this machine."""
    findings = check_local_service(host, port, deployed_by="jobs/configs/agent_service.yaml")
    if not has_keys and host not in LOOPBACK:
        text = f"--host {host} is reached from other machines, but there are no API keys; "
        findings.append(fatal(f"{text}`mempipe key NAME` makes one, keys=FILE reads it"))
    return findings
