"""An agent that is any program: an async function that asks a model through the OpenAI client.

The program is written as for any other model, and knows nothing of training. Its client is connected to the policy by
a gateway in the same process (gateway.py), which keeps the tokens of every request and reply: they are the contexts of
the trajectory. So the program may forget, summarise, ask in parallel or call helpers: whatever contexts it makes are
trained, each with the advantage of the trajectory.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

from openai import AsyncOpenAI
from pydantic import field_validator

from mempipe.agents.config import AgentConfig
from mempipe.agents.protocol import Tokenizer
from mempipe.agents.registry import AgentSpec
from mempipe.agents.tools import SearchLimits, SearchTool
from mempipe.agents.turn import Agent, Turn
from mempipe.types import EndReason, Question
from mempipe.user_code import UserCodeError, load_user_object, user_code
from program_agent.gateway import MESSAGE_BREAK, Gateway, client_of, is_of_limit
from program_agent.rendering import ProgramBudget, ProgramRenderer


class ProgramConfig(AgentConfig):
    """The `agent` section of this agent."""

    program: str = "program_agent.program:solve"
    """The program, MODULE:NAME."""

    @field_validator("program")
    @classmethod
    def _is_async(cls, name: str) -> str:
        program = load_user_object(name, setting="agent.program")
        if not inspect.iscoroutinefunction(program):
            raise ValueError(f"agent.program is {name!r}, which is not an async function")
        return name


def renderer(
    config: ProgramConfig, budget: ProgramBudget, *, limits: SearchLimits, tokenizer: Tokenizer
) -> ProgramRenderer:
    """Returns the renderer that these settings describe."""
    program = load_user_object(config.program, setting="agent.program")
    return ProgramRenderer(tokenizer, program=program, search=SearchTool.of(limits), budget=budget)


class ProgramAgent(Agent[ProgramRenderer]):
    """The agent."""

    async def _run(self, question: Question, finish: Callable[[Turn], None]) -> tuple[EndReason, str | None]:
        gateway = Gateway(
            self.renderer,
            question_ids=self.renderer.question(question),
            sample=self._sample,
            run_searches=functools.partial(self._run_searches, partition=question.partition),
        )
        answer, failure = None, None
        async with client_of(gateway) as client:
            try:
                answer = await self._answer(question, client, gateway)
            except UserCodeError as error:
                failure = error
        if gateway.fault is not None:  # the program saw only a reply with status 503
            raise gateway.fault
        if failure is not None and not (gateway.turns and is_of_limit(failure)):
            raise failure
        if not gateway.turns:
            raise UserCodeError(f"agent.program asked nothing of the model for question {question.id}")
        for index, turn in enumerate(gateway.turns):
            turn.index = index
            finish(turn)
        if answer is not None:
            return EndReason.ANSWERED, answer
        return gateway.over or EndReason.NO_ACTION, None

    async def _answer(self, question: Question, client: AsyncOpenAI, gateway: Gateway) -> str | None:
        with user_code(f"agent.program failed for question {question.id}"):
            answer = await self.renderer.program(question.text, client, gateway.search)
            if answer is not None and not isinstance(answer, str):
                raise TypeError(f"it returned {answer!r}; expected a text or None")
        return answer


AGENT = AgentSpec(
    config=ProgramConfig,
    budget=ProgramBudget,
    renderer=renderer,
    agent=ProgramAgent,
    searches=True,
    writes_memory=False,  # what the program remembers is its own business
    messages=lambda action: action.split(MESSAGE_BREAK),
    script="program_agent.script:ScriptedProgram",
)
