"""The table of the kinds of job: the `JobKind` of a kind holds everything that the rest of the system must know of it.

A new kind is its file and one row of `BUILT_IN`. A user-defined kind needs no row: a config with `kind: MODULE` names
the module that holds a `JobKind` called `JOB`, and `mempipe run CONFIG` runs it (docs/extending.md). Sections, checks
and mains are named as MODULE:NAME and imported when they are needed, so that a command loads only its own kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mempipe.settings import ConfigError, Section
from mempipe.user_code import import_user_module, load_user_object

OWN = "kind"
"""The setting with which a config names a kind that has no row."""
SERVICE_APP = "mempipe.serve.retrieval:app"
AGENT_APP = "mempipe.serve.agent:app"
ENGINE_APP = "mempipe.serve.agent:generator"
"""Import paths of the applications in a Serve config: a retrieval service, an agent service, and its engines."""


@dataclass(frozen=True, kw_only=True)
class JobKind:
    """One kind of job."""

    described: str
    """With its article, as messages name it."""
    command: str
    """The command that takes a config of this kind."""
    section: str
    """MODULE:NAME of the `Section` with its settings."""
    check: str
    """MODULE:NAME of the function that returns the findings about a config before anything starts. If it has a
    parameter `devices` it receives the GPUs of a cluster that is elsewhere (None: those here), and if it has `resume`
    the option of the command."""
    main: str = ""
    """MODULE:NAME of the function that does the work; empty if `serve deploy` starts it. It may have a parameter
    `resume` as well."""
    load: str = ""
    """MODULE:NAME of the function (path, overrides) that returns a config; empty: a YAML file holds the section."""
    marks: frozenset[str] = frozenset()
    """Settings that no other kind has, by which a config of this kind is known."""
    example: Mapping[str, Any] = field(default_factory=dict)
    """Values of the settings that have no default, for `mempipe config`."""

    def settings(self) -> type[Section]:
        """Returns the section of this kind."""
        return named(self.section)

    def findings(self, config: Any, *, devices: Any = None, resume: str = "never") -> list[Any]:
        """Returns what `check` finds. Raises ConfigError when the settings themselves are wrong."""
        return _called(self.check, config, devices=devices, resume=resume)

    def run(self, config: Any, *, resume: str = "never") -> Any:
        """Runs `main`, and returns its result."""
        return _called(self.main, config, resume=resume)


_MEASURED = {
    "runs": [{"name": "trained", "config": "runs/quickstart"}],
    "benchmarks": [{"name": "world", "file": "runs/quickstart/world/validation.parquet"}],
}
BUILT_IN = {
    "run": JobKind(
        described="a training run",
        command="mempipe train",
        section="mempipe.config:RunConfig",
        check="mempipe.checks.run:check_run",
        main="pipelines.train:main",
        marks=frozenset({"agent", "algorithm", "budget", "learner", "num_steps", "world"}),
    ),
    "chain": JobKind(
        described="a chain of training stages",
        command="mempipe chain",
        section="mempipe.studies.chain:ChainConfig",
        check="mempipe.checks.chain:check_chain",
        main="pipelines.chain:main",
        marks=frozenset({"stages"}),
        example={
            "stages": {
                "memtrain": {"config": "jobs/configs/memtrain_qwen3-4b.yaml"},
                "memagent": {"config": "jobs/configs/memagent_qwen2.5-7b.yaml"},
            }
        },
    ),
    "evaluation": JobKind(
        described="an evaluation",
        command="mempipe evaluate",
        section="mempipe.evaluation.suite:EvaluationSuite",
        load="mempipe.studies.of_run:evaluation_of",
        check="mempipe.checks.evaluation:check_suite",
        main="pipelines.evaluate:main",
        marks=frozenset({"benchmarks", "runs"}),
        example=_MEASURED,
    ),
    "sweep": JobKind(
        described="a sweep over memory budgets",
        command="mempipe sweep",
        section="mempipe.studies.sweep:SweepConfig",
        load="mempipe.studies.of_run:sweep_of",
        check="mempipe.checks.sweep:check_sweep",
        main="pipelines.sweep:main",
        marks=frozenset({"budgets"}),
        example=_MEASURED | {"budgets": [4, 8, 16]},
    ),
    "index": JobKind(
        described="an index to be built",
        command="mempipe index build",
        section="mempipe.retrieval.config:IndexConfig",
        load="mempipe.loader:load_index_config",
        check="mempipe.checks.retrieval:check_build",
        main="pipelines.build_index:main",
        marks=frozenset({"corpus", "faiss"}),
        example={"corpus": ["data/wiki-18.jsonl.gz"], "output": "data/wiki18_e5"},
    ),
    "documents": JobKind(
        described="MemTrain's documents",
        command="mempipe data memtrain",
        section="mempipe.masking.documents:DocumentsConfig",
        check="mempipe.checks.retrieval:check_documents",
        main="pipelines.build_memtrain:main",
        marks=frozenset({"tokenizer"}),
        example={"index": "data/wiki18_e5", "tokenizer": "Qwen/Qwen3-4B-Instruct-2507"},
    ),
    "service": JobKind(
        described="a retrieval service",
        command="serve deploy",
        section="mempipe.retrieval.config:ServiceConfig",
        load="mempipe.loader:load_service_config",
        check="mempipe.checks.retrieval:check_service",
        marks=frozenset({"applications"}),
        example={"index": "data/wiki18_e5"},
    ),
    "agent-service": JobKind(  # told from a retrieval service by what it imports
        described="an agent service",
        command="serve deploy",
        section="mempipe.serve.config:AgentServiceConfig",
        load="mempipe.serve.deployed:load_deployment",
        check="mempipe.serve.deployed:check_deployment",
        example={"run": "runs/quickstart"},
    ),
}
"""Name of a kind, as `mempipe config NAME` takes it, and all about it. What no kind's marks tell is a run."""
_TOLD_BY_MARKS = ("service", "chain", "documents", "sweep", "evaluation", "index", "run")
"""The order in which marks are looked for: a sweep has the settings of an evaluation as well."""


def kind_of(values: Mapping[str, Any]) -> JobKind | None:
    """Returns the kind of job that settings describe, by keys that no other kind has; None when there is no such key.
    Raises ConfigError when they name a kind that is not there."""
    if OWN in values:
        return _own_kind(values[OWN])
    if _is_agent_service(values.get("applications")):
        return BUILT_IN["agent-service"]
    return next((BUILT_IN[name] for name in _TOLD_BY_MARKS if values.keys() & BUILT_IN[name].marks), None)


def _own_kind(module: object) -> JobKind:
    """Returns the `JOB` of a module. Raises ConfigError."""
    if not isinstance(module, str) or not module:
        raise ConfigError(
            f"{OWN} is {module!r}; it is the module of a user-defined kind of job, e.g. my_package.my_job"
        )
    found = getattr(import_user_module(module, setting=OWN), "JOB", None)
    if not isinstance(found, JobKind):
        raise ConfigError(f"{OWN} is {module!r}, a module without JOB = JobKind(...); see docs/extending.md")
    return found


def _is_agent_service(applications: object) -> bool:
    listed = [each for each in applications if isinstance(each, dict)] if isinstance(applications, list) else []
    return any(each.get("import_path") in (AGENT_APP, ENGINE_APP) for each in listed)


def named(path: str) -> Any:
    """Returns the object that MODULE:NAME names."""
    return load_user_object(path, setting=OWN)


def _called(path: str, config: Any, **offered: Any) -> Any:
    """Calls the function that MODULE:NAME names with the config and those of the offered arguments that it takes."""
    import inspect

    function = named(path)
    taken = inspect.signature(function).parameters
    return function(config, **{name: value for name, value in offered.items() if name in taken})
