"""Finds the questions that a model answers without a text: a set that measures reading leaves them out (MemAgent, arXiv
2507.02259).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from mempipe.agents.protocol import last_boxed
from mempipe.data.ruler import SourceQuestion
from mempipe.engines.config import EndpointConfig
from mempipe.engines.endpoint import Endpoint
from mempipe.rl.rewards import WHOLE_ANSWERS, exact_match, normalize_answer

NUM_SAMPLES = 2
MAX_TOKENS = 512
TOP_P = 0.7
_PROMPT = (
    "Answer this question from what you know. Put the answer, as short as it can be, into \\boxed{{}}.\n\n{question}"
)


def closed_book_filter(
    url: str, models: Sequence[str], *, api_key_env: str = ""
) -> Callable[[list[SourceQuestion]], list[bool]]:
    """Returns a function that says of each question whether one of two samples of one of the models answers it. Raises
    ConfigError when the server lacks a model, and ServiceFault while it is asked.
    """
    configs = [EndpointConfig(url=url, model=model, api_key_env=api_key_env) for model in models]

    async def ask(questions: list[SourceQuestion]) -> list[bool]:
        endpoints = [Endpoint(config) for config in configs]
        try:
            for endpoint in endpoints:
                await endpoint.check()
            return list(await asyncio.gather(*(_is_known(question, endpoints) for question in questions)))
        finally:
            for endpoint in endpoints:
                await endpoint.close()

    return lambda questions: asyncio.run(ask(questions))


def answers_right(text: str, answers: Sequence[str]) -> bool:
    """Returns whether the box of a reply is a golden answer, or the reply says one. "yes" and "no" are common words,
    so a reply says them by its box, or without a box as its first word.
    """
    boxed = last_boxed(text)
    if boxed is not None and exact_match(boxed, answers) == 1:
        return True
    said = normalize_answer(text)
    golds = [gold for gold in map(normalize_answer, answers) if gold]
    if boxed is None and said.split(" ")[0] in WHOLE_ANSWERS.intersection(golds):
        return True
    return any(f" {gold} " in f" {said} " for gold in golds if gold not in WHOLE_ANSWERS)


async def _is_known(question: SourceQuestion, endpoints: Sequence[Endpoint]) -> bool:
    for endpoint in endpoints:
        prompt = _PROMPT.format(question=question.text)
        replies = await endpoint.chat(
            prompt, max_tokens=MAX_TOKENS, temperature=1.0, top_p=TOP_P, num_samples=NUM_SAMPLES
        )
        if any(answers_right(reply, question.answers) for reply in replies):
            return True
    return False
