"""The table of agents: everything that the rest of the system must know about an agent is in its `AgentSpec`.

A new agent is its file, its prompts and one row of `BUILT_IN`. An agent of your own needs no row: `agent.name` is then
the name of its module, which holds an `AgentSpec` called `AGENT`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mempipe.agents.budget import Budget
from mempipe.agents.config import AgentConfig
from mempipe.agents.prompt_set import PromptSet
from mempipe.agents.rendering import Renderer
from mempipe.agents.turn import Agent
from mempipe.settings import ConfigError
from mempipe.user_code import import_user_module

BUILT_IN = {
    "memsearcher": "mempipe.agents.memsearcher",
    "memagent": "mempipe.agents.memagent",
    "memtrain": "mempipe.agents.memtrain",
    "mem1": "mempipe.agents.mem1",
    "react": "mempipe.agents.react",
    "full_text": "mempipe.agents.full_text",
    "program": "mempipe.agents.program.agent",
}
"""Name of an agent: the module that holds its `AGENT`."""


def whole_text(action: str) -> list[str]:
    """Returns the text of a turn's action as its only message."""
    return [action]


@dataclass(frozen=True, kw_only=True)
class AgentSpec:
    """One agent."""

    config: type[AgentConfig]
    budget: type[Budget]
    renderer: Callable[..., Renderer[Any]]
    """Makes the renderer: (config, budget, *, limits, tokenizer)."""
    agent: type[Agent[Any]]
    prompts: type[PromptSet] | None = None
    """Class of the texts in `agent.prompts` (empty: the built-in set of the agent's name; an agent of your own has a
    file of its own then), read before anything starts. None: only the renderer reads it."""
    paper: str = ""
    """Paper in which the agent was published."""
    searches: bool = False
    """Needs an index or a retrieval service."""
    reads: bool = False
    """Needs questions with a text (`Question.context`)."""
    grows: bool = False
    """Carries its whole history in one context, so that every message it samples is a turn. It writes no memory."""
    writes_memory: bool = True
    """False for an agent with several contexts that hands no `Turn.new_memory` on: every message is a turn too, and
    transcripts and metrics have nothing of a memory."""
    stop_texts: tuple[str, ...] = ()
    """Texts that end a message, in addition to the model's stop tokens. Tokens after them would be dropped."""
    thought: Callable[[str], str] = str.strip
    """The thought in the text of a message, for transcripts."""
    messages: Callable[[str], list[str]] = whole_text
    """The messages in the text of a context's action, without the observations between them, for transcripts. There is
    one, unless the agent searches several times in a context."""
    reward: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `reward` as published; those that a config names win."""
    reward_formats: tuple[str, ...] = ("none",)
    """Values of `reward.format` that read this agent's messages."""
    script: str = ""
    """MODULE:NAME of the scripted agent that plays it in the synthetic world, which a warm start imitates."""
    script_needs_order: bool = False
    """The script notes a fact only when it knows that the question needs it: documents need world.evidence_order
    reading."""
    text_script: str = ""
    """MODULE:NAME of the `mempipe.masking.demonstrations.Demonstration` that plays it on questions made of text."""

    def has_memory(self, budget: Budget) -> bool:
        """Returns whether its contexts hand on a memory that transcripts show and metrics measure."""
        return self.writes_memory and not self.grows and budget.has_memory


@functools.cache
def agent_spec(name: str) -> AgentSpec:
    """Returns the agent of that name. Raises ConfigError when there is none, or when its module cannot be imported."""
    if not isinstance(name, str) or (name not in BUILT_IN and "." not in name):
        known = ", ".join(map(repr, BUILT_IN))
        raise ConfigError(
            f"agent.name is {name!r}; it is {known}, or the module of your own agent, e.g. my_package.my_agent"
        )
    spec = getattr(import_user_module(BUILT_IN.get(name, name), setting="agent.name"), "AGENT", None)
    if not isinstance(spec, AgentSpec):
        raise ConfigError(f"agent.name is {name!r}, a module without AGENT = AgentSpec(...); see docs/extending.md")
    return spec
