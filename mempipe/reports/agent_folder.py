"""Makes a whole agent of an exported model: in addition to the weights, its settings, its prompts and a model card.

mempipe.yaml    agent, budget, sampling and retrieval as in the run, without paths of the machine that trained it
prompts.yaml    the prompts, where they are not one of the built-in sets
README.md       the model card
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from mempipe.agents.prompt_set import BUILT_IN
from mempipe.agents.registry import BUILT_IN as BUILT_IN_AGENTS
from mempipe.config import RunConfig
from mempipe.evaluation.held_out import read_held_out
from mempipe.evaluation.statistics import wilson_interval
from mempipe.evaluation.suite import AGENT_FILE, PROMPTS_FILE
from mempipe.loader import load_config
from mempipe.reports.pages import render
from mempipe.runs import saved_inputs, saved_source
from mempipe.settings import ConfigError
from mempipe.storage.files import is_local_path

_SECTIONS = ("agent", "budget", "sampling", "retrieval")
_OF_THE_MACHINE = ("index", "url", "encoder_path", "num_replicas", "shard_actors", "num_gpus", "num_threads")


def agent_files(run: Path, *, step: int) -> dict[str, str]:
    """Returns the texts of these files by name, for the policy of the run in folder `run` after learner step `step`.

    Raises ConfigError for a damaged file of the run, and for prompts that are not there any more.
    """
    config = load_config(run / "config.yaml")
    values, files, prompts = agent_values(config), {}, config.agent.prompts
    if prompts and not (BUILT_IN / f"{prompts}.yaml").is_file():
        try:
            files[PROMPTS_FILE] = Path(prompts).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"agent.prompts is {prompts!r}, which cannot be read: {error.strerror}") from error
        values["agent"]["prompts"] = PROMPTS_FILE
    files[AGENT_FILE] = yaml.safe_dump(values, sort_keys=False)
    files["README.md"] = _card(config, run, step=step)
    return files


def agent_values(config: RunConfig) -> dict[str, Any]:
    """Returns the settings that the agent needs wherever it runs."""
    values = config.model_dump(mode="json")
    described: dict[str, Any] = {name: values[name] for name in _SECTIONS}
    for name in _OF_THE_MACHINE:
        described["retrieval"].pop(name)
    described["budget"].pop("memory_choices", None)  # of training
    described["model"] = {"dtype": config.model.dtype}
    described["evaluation"] = {"temperature": config.evaluation.temperature}
    return described


def _card(config: RunConfig, run: Path, *, step: int) -> str:
    source = config.model.source or config.model.path
    evaluations = []
    for each in read_held_out(run, growing=not config.has_memory):
        interval = wilson_interval(round(each.em * each.num_questions), each.num_questions)
        evaluations.append({"of": each, "low": interval.low, "high": interval.high, "is_this": each.step == step})
    return render(
        "model_card.md",
        name=config.name,
        step=step,
        version=version("mempipe"),
        agent=config.agent.name,
        is_built_in=config.agent.name in BUILT_IN_AGENTS,
        paper=config.agent_spec.paper,
        searches=config.agent_spec.searches,
        memory_tokens=getattr(config.budget, "memory_tokens", None),
        base="" if not source else Path(source).name if is_local_path(source) else source,
        is_on_hub=bool(source) and not is_local_path(source) and "/" in source,
        world=config.world is not None,
        evaluations=evaluations,
        sampled=config.evaluation.sampled,
        inputs={name: digest[:16] for name, digest in saved_inputs(run).items() if digest},
        source=saved_source(run),
        algorithm=config.algorithm,
        num_steps=config.num_steps,
    )
