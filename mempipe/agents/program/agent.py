"""An agent that is any program which asks a model through the OpenAI API.

The program is written as for any other model, and knows nothing of training. Its client is connected to the policy by
a gateway, which keeps the tokens of every request and reply as contexts. So the program may forget, summarise, ask in
parallel or call helpers: whatever contexts it makes are trained, each with the advantage of the trajectory, as in
multi-context GRPO (arXiv 2511.02805).
"""

from __future__ import annotations

import functools
import inspect
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from pydantic import Field, field_validator

from mempipe.agents.config import AgentConfig
from mempipe.agents.program.gateway import MESSAGE_BREAK, AttemptOver, Gateway
from mempipe.agents.program.programs import CommandProgram, FunctionProgram, Program
from mempipe.agents.program.rendering import ProgramBudget, ProgramRenderer
from mempipe.agents.program.tool_calls import HERMES
from mempipe.agents.protocol import Tokenizer
from mempipe.agents.registry import AgentSpec
from mempipe.agents.tools import SearchLimits, SearchTool
from mempipe.agents.turn import Agent, Turn
from mempipe.settings import ConfigError
from mempipe.types import EndReason, Question
from mempipe.user_code import UserCodeError, load_user_object

_SCRIPTS = {".py", ".js", ".mjs", ".ts", ".sh"}
"""Endings of files that an interpreter runs."""


class ProgramConfig(AgentConfig):
    """The `agent` section of this agent."""

    program: str | list[str] = ""
    """MODULE:NAME of an async function of question, client and search, which returns the answer; or a command as a list
    of words, which reads the question and prints the answer."""
    tool_parser: str = HERMES
    """The form of the policy's calls of tools: hermes (Qwen2.5, Qwen3), or another one of vLLM's tool parsers, such as
    llama3_json."""
    timeout_s: float = Field(600.0, gt=0)
    """Seconds that the program may take in one attempt, those apart in which it waits for the policy or a search."""
    max_processes: int = Field(16, ge=1)
    """Commands that run at the same time for one driver; further attempts wait."""

    @field_validator("program")
    @classmethod
    def _can_be_called(cls, program: str | list[str]) -> str | list[str]:
        if program and isinstance(program, str) and not inspect.iscoroutinefunction(_function(program)):
            raise ValueError(f"agent.program is {program!r}, which is not an async function")
        return program

    def check(self) -> None:
        if not self.program:
            raise ConfigError(
                "agent.program is empty; expected MODULE:NAME of an async function, or a command as a list of words, "
                "e.g. [python, my_program.py]"
            )
        if isinstance(self.program, str):
            return
        command, *words = self.program
        if shutil.which(command) is None:
            raise ConfigError(
                f"agent.program is {self.program!r}: the command {command!r} is neither in PATH nor in {os.getcwd()}"
            )
        script = next((word for word in words if not word.startswith("-")), "")
        is_name = len(script.split()) == 1  # not what a shell reads: [bash, -lc, "python agent.py"]
        if is_name and Path(script).suffix in _SCRIPTS and not Path(script).is_file():
            raise ConfigError(f"agent.program is {self.program!r}: there is no file {script!r} in {os.getcwd()}")


def renderer(
    config: ProgramConfig, budget: ProgramBudget, *, limits: SearchLimits, tokenizer: Tokenizer
) -> ProgramRenderer:
    """Returns the renderer that these settings describe. Raises ConfigError when they name no program, or a command
    that does not exist.
    """
    config.check()
    program: Program
    if isinstance(config.program, str):
        program = FunctionProgram(_function(config.program), timeout_s=config.timeout_s)
    else:
        program = CommandProgram(config.program, timeout_s=config.timeout_s, max_processes=config.max_processes)
    return ProgramRenderer(
        tokenizer, program=program, search=SearchTool.of(limits), budget=budget, tool_parser=config.tool_parser
    )


class ProgramAgent(Agent[ProgramRenderer]):
    """The agent."""

    async def _run(self, question: Question, finish: Callable[[Turn], None]) -> tuple[EndReason, str | None]:
        gateway = Gateway(
            self.renderer,
            question_ids=self.renderer.question(question),
            sample=self._sample,
            run_searches=functools.partial(self._run_searches, partition=question.partition),
            user=question.user,
        )
        try:
            answer = await self.renderer.program.answer(question, gateway)
        except Exception as error:
            if gateway.fault is not None:  # the program saw only a reply with status 503
                raise gateway.fault from error
            if not isinstance(error, AttemptOver):
                raise
            if not gateway.turns:
                raise UserCodeError(f"agent.program failed for question {question.id}: {error}") from error
            answer = None
        finally:
            await gateway.close()
        if gateway.fault is not None:
            raise gateway.fault
        if not gateway.turns:
            raise UserCodeError(f"agent.program asked nothing of the model for question {question.id}")
        gateway.memories.end(gateway.turns, answered=answer is not None)
        for index, turn in enumerate(gateway.turns):
            turn.index = index
            finish(turn)
        if answer is not None:
            return EndReason.ANSWERED, answer
        return gateway.over.reason if gateway.over else EndReason.NO_ACTION, None


def _function(path: str) -> Callable[..., Awaitable[object]]:
    return load_user_object(path, setting="agent.program")


AGENT = AgentSpec(
    config=ProgramConfig,
    budget=ProgramBudget,
    renderer=renderer,
    agent=ProgramAgent,
    searches=True,
    messages=lambda action: action.split(MESSAGE_BREAK),
)
