"""Plays published transcripts again with our own agents:
scripted messages, scripted passages, and tokens that a case can name.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conformance.cases_agents import CharTokenizer
from conformance.common import limited
from mempipe.agents.mem1 import Mem1, Mem1Budget, Mem1Renderer
from mempipe.agents.memagent import MemAgent, MemAgentBudget, MemAgentPrompts, MemAgentRenderer
from mempipe.agents.react import React, ReactBudget, ReactPrompts, ReactRenderer
from mempipe.agents.tagged import TaggedPrompts
from mempipe.agents.tools import SearchTool
from mempipe.agents.turn import Agent
from mempipe.types import Completion, FinishReason, Passage, Question, SearchResult, Trajectory

FIRST_ID = 0xF0000
"""Token n of a case is the character behind this one by n, so that text can be written of it."""
TOOL = SearchTool(name="", num_passages=3, max_passages=10, max_query_chars=10_000)
LIMITS: dict[str, Any] = {
    "question_tokens": 1000,
    "memory_tokens": 1000,
    "memory_message_tokens": 2000,
    "action_tokens": 5000,
    "observation_tokens": 5000,
    "max_turns": 6,
    "context_tokens": 100_000,
}
TAGGED = {"system": "", "user": "{question}", "passage": "{text}", "passage_separator": ""}
Search = Callable[[str], str]


class PlainTokenizer(CharTokenizer):
    """One token per character and no chat markup around messages.
    `texts` gives tokens of a case a text of their own."""

    def __init__(self, texts: Mapping[int, str] | None = None) -> None:
        self._texts = {FIRST_ID + i: text for i, text in (texts or {}).items()}

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self._texts[i] if i in self._texts else CharTokenizer.decode(self, [i]) for i in token_ids)

    def render_chat(self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool) -> str:
        return "".join(message["content"] + "<|im_end|>" * (message["role"] == "assistant") for message in messages)


@dataclass(kw_only=True)
class Replay:
    """A trajectory, and what the agent asked for on its way."""

    trajectory: Trajectory
    prompts: list[list[int]]
    queries: list[str]


def as_text(ids: Sequence[int]) -> str:
    """A text whose tokens are a case's."""
    return "".join(chr(FIRST_ID + i) for i in ids)


def as_ids(token_ids: Sequence[int]) -> list[int]:
    """A case's tokens, from ours."""
    return [i - FIRST_ID for i in token_ids]


def play_mem1(script: Sequence[str | list[int]], *, observation: str = "{passages}", **options: Any) -> Replay:
    prompts = TaggedPrompts(**TAGGED, observation=observation)
    return _play(
        lambda tokenizer, limits: Mem1Renderer(
            tokenizer, prompts=prompts, search=TOOL, budget=limited(Mem1Budget, limits)
        ),
        Mem1,
        script,
        **options,
    )


def play_react(
    script: Sequence[str | list[int]],
    *,
    observation: str = "{passages}",
    retry: str = "",
    final_answer_turn: bool = True,
    **options: Any,
) -> Replay:
    prompts = ReactPrompts(**TAGGED, observation=observation, retry=retry)

    def renderer(tokenizer: CharTokenizer, limits: dict[str, Any]) -> ReactRenderer:
        budget = limited(ReactBudget, limits)
        return ReactRenderer(
            tokenizer, prompts=prompts, search=TOOL, budget=budget, final_answer_turn=final_answer_turn
        )

    return _play(renderer, React, script, **options)


def play_memagent(
    script: Sequence[str | list[int]], *, read: str, answer: str, empty_memory: str = "", **options: Any
) -> Replay:
    prompts = MemAgentPrompts(system="", read=read, read_chunk_first=read, answer=answer, empty_memory=empty_memory)
    return _play(
        lambda tokenizer, limits: MemAgentRenderer(tokenizer, prompts=prompts, budget=limited(MemAgentBudget, limits)),
        MemAgent,
        script,
        **options,
    )


def _play(
    build: Callable[[CharTokenizer, dict[str, Any]], Any],
    kind: type[Agent[Any]],
    script: Sequence[str | list[int]],
    *,
    tokenizer: CharTokenizer | None = None,
    search: Search = lambda query: query,
    question: str = "q",
    context: str = "",
    **limits: Any,
) -> Replay:
    """Messages are texts, or tokens of the case; a text that does not stop itself is stopped.
    `search` gives the text that is found.
    """
    tokenizer, steps = tokenizer or PlainTokenizer(), iter(script)
    prompts: list[list[int]] = []
    queries: list[str] = []

    async def generate(token_ids: Sequence[int], *, max_tokens: int) -> Completion:
        prompts.append(list(token_ids))
        step = next(steps)
        ids = tokenizer.encode_template(step) if isinstance(step, str) else [FIRST_ID + i for i in step]
        if not ids or ids[-1] not in tokenizer.stop_token_ids:
            ids = [*ids, *tokenizer.encode_template("<|im_end|>")]
        return Completion(token_ids=ids, logprobs=[0.0] * len(ids), finish_reason=FinishReason.STOP, policy_version=0)

    async def find(query: str, *, num_passages: int, partition: str) -> SearchResult:
        queries.append(query)
        return SearchResult(passages=[Passage(id="1", title="", text=search(query))], snapshot="")

    agent = kind(build(tokenizer, {**LIMITS, **limits}), generate=generate, search=find)
    asked = Question(id="q", text=question, golden_answers=[], context=context)
    trajectory = asyncio.run(agent.rollout(asked, trajectory_id="t", group_id="g", member=0))
    return Replay(trajectory=trajectory, prompts=prompts, queries=queries)


# Transcripts

ASSISTANT = "<|im_start|>assistant\n"
INFORMATION = re.compile("<information>(.*?)</information>", re.DOTALL)


def response(transcript: str) -> str:
    """What follows the prompt, which ends in an assistant's header or else in a question; all of it when there is no
    prompt.
    """
    for end in (ASSISTANT, "?\n"):
        if end in transcript:
            return transcript.partition(end)[2]
    return transcript


def messages(text: str) -> tuple[list[str], list[str]]:
    """The messages of a response, and what was found between them."""
    pieces = INFORMATION.split(text)
    return pieces[::2], pieces[1::2]


def first_answer(text: str) -> str | None:
    """By hand: what stands between the first pair of answer tags that the policy wrote, unless it searches in that
    message.
    """
    for message in messages(text)[0]:
        before, found, rest = message.partition("<answer>")
        inner, closed, _ = rest.partition("</answer>")
        if found and closed and "</search>" not in before + inner:
            return inner.strip()
    return None
