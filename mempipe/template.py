"""Writes a complete YAML file of any kind of config, with every setting's meaning; the file loads as it is."""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mempipe.agents.memtrain import MemTrain
from mempipe.agents.registry import BUILT_IN, AgentSpec
from mempipe.config import RunConfig
from mempipe.kinds import AGENT_APP, ENGINE_APP, SERVICE_APP
from mempipe.kinds import BUILT_IN as BUILT_IN_KINDS
from mempipe.loader import parse_config, section_of, setting_names
from mempipe.retrieval.config import RetrievalConfig
from mempipe.serve.config import ENGINES
from mempipe.settings import ConfigError, Section

WIDTH = 120
KINDS = (*BUILT_IN, *(kind for kind in BUILT_IN_KINDS if kind != "run"))
OFTEN_SET = (
    "name",
    "num_steps",
    "model.path",
    "agent.name",
    "agent.program",
    "budget.memory_tokens",
    "budget.chunk_tokens",
    "budget.max_turns",
    "budget.context_tokens",
    "retrieval.index",
    "reward.function",
    "algorithm.group_size",
    "algorithm.groups_per_step",
    "optimizer.lr",
    "learner.max_tokens_per_micro_batch",
    "data.train",
    "data.validation",
    "evaluation.every_steps",
)
"""The settings of `--short`; those that an agent lacks are omitted."""
Wanted = Callable[[str], bool]
"""Returns whether the setting of a dotted name is printed."""


def config_lines(kind: str, *, short: bool = False) -> list[str]:
    """Returns the lines of a YAML file: a run of the agent `kind`, or one of KINDS. `short` keeps of a run the settings
    that almost every run sets. Raises ConfigError."""
    if kind in BUILT_IN or "." in kind:
        run = parse_config({"agent": {"name": kind}})
        unused = unused_settings(run.agent_spec)
        if short:
            title = f"# A training run of {kind}: `mempipe train FILE`; `mempipe config {kind}` prints all settings"
            return [title, *_section_lines(RunConfig, run, lambda name: name in OFTEN_SET and name not in unused)]
        title = f"# A training run of {kind}: `mempipe train FILE`"
        return [title, *_section_lines(RunConfig, run, lambda name: name not in unused)]
    if short:
        raise ConfigError(f"--short is for a run of an agent, and {kind!r} is none; leave it out")
    if kind not in KINDS:
        raise ConfigError(f"{kind!r} is not a kind of config; choose from {', '.join(KINDS)}, or an agent's module")
    job = BUILT_IN_KINDS[kind]
    lines = list(_section_lines(job.settings(), job.settings().model_validate(job.example)))
    deployed = {"service": _deployed, "agent-service": _deployed_agent}
    title = f"# {job.described[0].upper()}{job.described[1:]}: `{job.command} FILE`"
    return [title, *(deployed[kind](lines) if kind in deployed else lines)]


def unused_settings(spec: AgentSpec) -> set[str]:
    """Returns the dotted names of the settings without effect on a run of the agent, and of those that mempipe itself
    sets."""
    unused = {"tracking.parent_run_id"}
    if not spec.searches:
        unused |= {f"retrieval.{name}" for name in setting_names(RetrievalConfig)}
    if not issubclass(spec.agent, MemTrain):
        unused |= {"reward.recall_weight", "reward.recall_match", "algorithm.recall_group", "algorithm.filter_by"}
    if spec.reward_formats == ("none",):
        unused |= {f"reward.{name}" for name in ("format", "structure_score", "retrieval_score", "attempt_score")}
    if not spec.has_memory(spec.budget()):
        unused |= {"reward.memory_token_cost", "reward.information_weight"}
    if spec.grows:
        unused.add("reward.per_turn")
    return unused


def _section_lines(
    section: type[BaseModel], values: BaseModel, wanted: Wanted = lambda name: True, prefix: str = ""
) -> Iterator[str]:
    """Yields every wanted setting below its documentation. Sections are indented. A section that is not set is
    commented out; a section without a wanted setting is omitted."""
    for name, field in section.model_fields.items():
        value = getattr(values, name)
        inner = type(value) if isinstance(value, Section) else section_of(field.annotation)
        if isinstance(value, Section):
            if lines := list(_section_lines(type(value), value, wanted, f"{prefix}{name}.")):
                yield from _comment(_meaning(field, inner))
                yield f"{name}:"
                yield from _indented(lines)
            continue
        if not wanted(prefix + name):
            continue
        yield from _comment(_meaning(field, inner))
        if isinstance(value, dict) and inner is not None:
            yield f"{name}:"
            for key, item in value.items():
                head = [*_comment(inspect.getdoc(inner) or ""), f"{key}:"]
                yield from _indented([*head, *_indented(_section_lines(inner, item))])
        elif isinstance(value, list) and value and inner is not None:
            yield f"{name}:"
            for item in value:
                rows = _indented(_section_lines(type(item), item), by=4)
                start = next(i for i, row in enumerate(rows) if not row.lstrip().startswith("#"))
                rows[start] = "  - " + rows[start][4:]
                yield from rows
        elif value is None and inner is not None:
            yield f"{name}: null"
            yield from (f"# {line}".rstrip() for line in _indented(_unset_lines(inner)))
        else:
            yield f"{name}: {_scalar(value)}"


def _unset_lines(section: type[Section]) -> Iterator[str]:
    """Yields the settings of a section that is not set, each with its default."""
    for name, field in section.model_fields.items():
        yield from _comment(field.description or "")
        yield f"{name}: " + ("(needed)" if field.is_required() else _scalar(field.get_default()))


def _deployed(lines: list[str]) -> list[str]:
    """Returns a Ray Serve config whose one application has these settings."""
    application = f"""  - name: retrieval
    route_prefix: /
    import_path: {SERVICE_APP}
    args:"""
    return [*_http("callers need no password."), *application.splitlines(), *_indented(lines, by=6)]


def _deployed_agent(lines: list[str]) -> list[str]:
    """Returns a Ray Serve config whose engines and agents have these settings."""
    engines = f"""  - name: {ENGINES}
    route_prefix: null
    import_path: {ENGINE_APP}
    args: &service"""
    agents = f"""  - name: agent
    route_prefix: /
    import_path: {AGENT_APP}
    args: *service"""
    head = _http("then `keys` below must name a file.")
    return [*head, *engines.splitlines(), *_indented(lines, by=6), *agents.splitlines()]


def _http(others: str) -> list[str]:
    """Returns the start of a Ray Serve config, up to its applications; `others` says what callers of other machines
    need."""
    return [
        "http_options:",
        f"  # 0.0.0.0 to be reached from other machines; {others}",
        "  host: 127.0.0.1",
        "  port: 8000",
        "proxy_location: EveryNode",
        "# Metrics count the requests.",
        "logging_config: {enable_access_log: false}",
        "applications:",
    ]


def _meaning(field: FieldInfo, inner: type[BaseModel] | None) -> str:
    return field.description or (inspect.getdoc(inner) or "" if inner is not None else "")


def _comment(text: str) -> Iterator[str]:
    yield from (f"# {line}" for line in textwrap.wrap(" ".join(text.split()), WIDTH - 12, break_on_hyphens=False))


def _indented(lines: Iterable[str], *, by: int = 2) -> list[str]:
    return [" " * by + line for line in lines]


def _scalar(value: Any) -> str:
    """Returns the value in YAML on one line."""
    plain = json.loads(json.dumps(value, default=lambda section: section.model_dump(mode="json")))
    return yaml.safe_dump(plain, default_flow_style=True, width=10**6, sort_keys=False).split("\n...")[0].strip()
