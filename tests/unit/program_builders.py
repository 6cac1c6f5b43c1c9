"""Attempts of the agent `program` with a scripted policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from agent_builders import Library, ScriptedEngine, Step, build_question

from mempipe.agents.program.programs import FunctionProgram, Program
from mempipe.answers.conversation import starting_from
from mempipe.config import RunConfig
from mempipe.engines.tokenizer import HFTokenizer
from mempipe.loader import load_config
from mempipe.rollout import make_agent
from mempipe.types import Question, Trajectory

EXAMPLE = Path(__file__).parents[2] / "examples" / "program_agent" / "config.yaml"


def config_of(*overrides: str, **budget: object) -> RunConfig:
    """The example's config with other limits."""
    return load_config(EXAMPLE, [*(f"budget.{name}={value}" for name, value in budget.items()), *overrides])


async def attempt(
    script: Sequence[Step],
    program: Callable[..., Any] | Program | None,
    config: RunConfig,
    tokenizer: HFTokenizer,
    *,
    question: Question | None = None,
    memory: str = "",
) -> tuple[Trajectory, ScriptedEngine]:
    """Plays the script under a program; without one, that of the example. `memory` is that of a session."""
    engine = ScriptedEngine(tokenizer, script)
    agent = make_agent(config, tokenizer=tokenizer, generate=engine, search=Library())
    if program is not None:
        agent.renderer.program = FunctionProgram(program, timeout_s=60) if callable(program) else program
    if memory:
        agent.renderer = starting_from(agent.renderer, memory, agent="program")
    played = await agent.rollout(question or build_question(), trajectory_id="t", group_id="g", member=0)
    return played, engine
