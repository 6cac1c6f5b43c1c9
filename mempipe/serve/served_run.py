"""The agents, weights and index that a service's settings name, checked before anything starts."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mempipe.answers.api import CorpusReply
from mempipe.answers.corpus import describe_corpus
from mempipe.checks.findings import Finding, attempt, refuse
from mempipe.checks.machine import Devices, check_writable
from mempipe.checks.run import ask_network, place_roles
from mempipe.checks.service import check_agents
from mempipe.config import RunConfig
from mempipe.engines.config import SamplingConfig
from mempipe.evaluation.suite import EvaluatedRun, run_config
from mempipe.loader import parse_section, section_values
from mempipe.serve.config import AgentServiceConfig
from mempipe.serve.http.keys import load_keys
from mempipe.settings import ConfigError
from mempipe.tracking.tracker import tracking_uri


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    """A service as its settings name it. `agents` are by the name that requests call them by, its own one first."""

    config: AgentServiceConfig
    name: str
    agents: dict[str, RunConfig]
    sampling: SamplingConfig
    state: Path

    @property
    def main(self) -> RunConfig:
        """Returns the config of the service's own agent, which also describes engine and retriever."""
        return next(iter(self.agents.values()))

    @property
    def searches(self) -> bool:
        return any(config.agent_spec.searches for config in self.agents.values())

    @property
    def own_engine(self) -> bool:
        """Returns whether the service has engines; else an endpoint samples."""
        return self.config.endpoint is None


def named_by(config: AgentServiceConfig) -> ServedRun:
    """Returns what `config` names. Only the settings of its runs are read; raises ConfigError where they are wrong."""
    main = _run(config)
    if main.agent.name in config.agents:
        raise ConfigError(
            f"agents names {main.agent.name!r}, as the service's own agent is called; call the further agent otherwise"
        )
    return ServedRun(
        config=config,
        name=config.name or _name(config),
        agents={main.agent.name: main} | {name: _further(source, main) for name, source in config.agents.items()},
        sampling=config.sampling or SamplingConfig(temperature=main.evaluation.temperature),
        state=Path(config.state or _state(config)).absolute(),
    )


def resolve(config: AgentServiceConfig) -> ServedRun:
    """Returns what `config` names, checked: reads what the service will read. Raises ConfigError."""
    served = named_by(config)
    refuse(check_agents(served.agents, own_engine=served.own_engine))
    return served


def searched_by(served: ServedRun) -> CorpusReply:
    """Returns what the service searches, and questions that it can answer. Raises ConfigError."""
    return describe_corpus(served.main, searches=served.searches, partition=served.config.partition)


def check_agent_service(served: ServedRun, *, devices: Devices | None = None) -> list[Finding]:
    """Returns all findings about what a service needs: agents, weights, index, keys, its folder, GPUs and memory.

    `devices` as in `mempipe.checks.run.check_run`.
    """
    config = served.config
    findings = [
        *check_agents(served.agents, own_engine=served.own_engine),
        attempt(lambda: searched_by(served), "partition, and example questions of data.validation"),
        check_writable(served.state, setting="state"),
        attempt(lambda: load_keys(config.keys), f"keys: {config.keys or 'none but those of MEMPIPE_API_KEYS'}"),
    ]
    if served.own_engine:
        findings += place_roles(_at_the_least(config, served.main), devices, training=False)
    return findings if any(finding.fatal for finding in findings) else [*findings, *ask_network(served.main)]


def weights_version(path: str) -> str:
    """Returns a short name that tells weights from others: a hash of a local folder's files (names, sizes, times), or
    the model's own name.

    The bytes are not read, which would take as long as loading them.
    """
    folder = Path(path)
    if not folder.is_dir():
        return path
    states = [
        (file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(folder.glob("*.safetensors"))
    ]
    return hashlib.sha256(json.dumps(states).encode()).hexdigest()[:12]


def _at_the_least(config: AgentServiceConfig, main: RunConfig) -> RunConfig:
    """Returns the run with as many engines and retrievers as the service starts with."""
    generation = main.generation.model_copy(update={"num_replicas": config.generator_replicas.min})
    copies = {"num_replicas": config.retriever_replicas.min, "shard_actors": 0}
    return main.model_copy(update={"generation": generation, "retrieval": main.retrieval.model_copy(update=copies)})


def _run(config: AgentServiceConfig) -> RunConfig:
    """Returns the run of the service's own agent."""
    described = config.model_dump(include={"settings", "checkpoint", "endpoint"})
    source = parse_section({**described, "name": "serve", "config": config.run}, EvaluatedRun)
    run = run_config(source, name="serve", ordered=False)
    model = run.model.model_copy(update={"path": _absolute(run.model.path)})
    retrieval = run.retrieval.model_copy(update={"index": _absolute(run.retrieval.index)})
    folder = Path(config.run or config.checkpoint)  # without a server, traces go where those of the run are
    uri = tracking_uri(run.tracking, folder if folder.is_dir() else Path(_state(config)))
    tracking = run.tracking.model_copy(update={"uri": uri})
    # Where the run was trained does not matter: engines and retrievers run where Ray Serve does.
    changes: dict[str, Any] = {"model": model, "retrieval": retrieval, "tracking": tracking, "ray_address": ""}
    if section_values(config.settings, "retrieval").get("index"):  # the run's questions are about its own index
        changes["data"] = run.data.model_copy(update={"validation": ""})
    return run.model_copy(update=changes)


def _further(source: str, main: RunConfig) -> RunConfig:
    """Returns another agent under the weights and the index of the first."""
    run = run_config(EvaluatedRun(name="serve", config=source, checkpoint=main.model.path), name="serve", ordered=False)
    return run.model_copy(update={"model": main.model, "retrieval": main.retrieval, "generation": main.generation})


def _absolute(path: str) -> str:
    """Returns an absolute path, since replicas work in other folders."""
    return str(Path(path).absolute()) if path and Path(path).exists() else path


def _name(config: AgentServiceConfig) -> str:
    source = Path(config.run or config.checkpoint)
    return source.absolute().name if source.is_dir() else source.stem if config.run else str(source)


def _state(config: AgentServiceConfig) -> str:
    folder = Path(config.run or config.checkpoint)
    return str(folder / "service") if folder.is_dir() else "service"
