"""The agents: what the policy reads and writes. `make_agent` binds the configured one to a tokenizer, an engine and a retriever."""

from __future__ import annotations

from typing import Any

from mempipe.agents.mem1 import Mem1, Mem1Layout
from mempipe.agents.memagent import MemAgent, MemAgentLayout
from mempipe.agents.memsearcher import MemSearcher, MemSearcherLayout
from mempipe.agents.protocol import GenerateFn, SearchFn, Tokenizer
from mempipe.agents.react import React, ReactLayout
from mempipe.agents.rendering import Layout
from mempipe.agents.tagged import STOP_TEXTS
from mempipe.agents.turn import Agent
from mempipe.config import AgentName, RunConfig


def make_layout(config: RunConfig, *, tokenizer: Tokenizer) -> Layout:
    """The configured agent's prompts in the model's chat template. Raises ConfigError when they and the budget do not fit the context."""
    match config.agent.name:
        case "memsearcher":
            return MemSearcherLayout.from_config(config, tokenizer=tokenizer)
        case "memagent":
            return MemAgentLayout.from_config(config, tokenizer=tokenizer)
        case "mem1":
            return Mem1Layout.from_config(config, tokenizer=tokenizer)
        case "react":
            return ReactLayout.from_config(config, tokenizer=tokenizer)


def make_agent(config: RunConfig, *, tokenizer: Tokenizer, generate: GenerateFn, search: SearchFn) -> Agent[Any]:
    """The agent that `config` names."""
    return bind_agent(make_layout(config, tokenizer=tokenizer), generate=generate, search=search)


def stop_texts(agent: AgentName) -> tuple[str, ...]:
    """Texts that end a message of the agent, beside the model's stop tokens: what an engine samples behind them would be dropped."""
    return STOP_TEXTS if agent in ("mem1", "react") else ()


def bind_agent(layout: Layout, *, generate: GenerateFn, search: SearchFn) -> Agent[Any]:
    """The agent of a layout that is there already: many agents can share one."""
    match layout:
        case MemSearcherLayout() as layout:
            return MemSearcher(layout, generate=generate, search=search)
        case MemAgentLayout() as layout:
            return MemAgent(layout, generate=generate, search=search)
        case Mem1Layout() as layout:
            return Mem1(layout, generate=generate, search=search)
        case ReactLayout() as layout:
            return React(layout, generate=generate, search=search)
        case _:
            raise AssertionError(f"no agent has a {type(layout).__name__}")
