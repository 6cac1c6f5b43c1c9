"""The agents: what the policy reads and writes. `make_agent` binds the configured one to a tokenizer, an engine and a retriever."""

from __future__ import annotations

from mempipe.agents.memsearcher import MemSearcher
from mempipe.agents.prompt_set import load_prompts
from mempipe.agents.protocol import GenerateFn, SearchFn, Tokenizer, Tool
from mempipe.agents.rendering import Layout
from mempipe.config import RunConfig


def make_layout(config: RunConfig, *, tokenizer: Tokenizer) -> Layout:
    """The agent's prompts in the model's chat template. Raises ConfigError when they and the budget do not fit the context."""
    tool = Tool.from_config(config.agent, config.retrieval)
    return Layout(tokenizer, prompts=load_prompts(config.agent.prompts), tool=tool, budget=config.budget)


def make_agent(config: RunConfig, *, tokenizer: Tokenizer, generate: GenerateFn, search: SearchFn) -> MemSearcher:
    """The agent that `config` names."""
    return MemSearcher(make_layout(config, tokenizer=tokenizer), generate=generate, search=search)
