"""A program that answers questions by searching. Nothing in it knows mempipe: `client` is an OpenAI client, and
`search` returns texts.

It keeps notes, asks for a search with question and notes alone, shows the passages, and asks for new notes. Each
request says which part of it is the notes, so that mempipe measures them.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

from openai import AsyncOpenAI

MAX_SEARCHES = 6


async def solve(
    question: str, client: AsyncOpenAI, search: Callable[[str], Awaitable[list[str]]], memory: str = ""
) -> str | None:
    """Returns the answer, None for none. `memory` is what a conversation has left."""
    notes = memory or "known nothing"
    for _ in range(MAX_SEARCHES):
        messages: list[Any] = [{"role": "user", "content": f"{question}\nnotes: {notes}"}]
        action = await ask(client, messages, notes)
        if answer := re.search("<answer>(.*)</answer>", action):
            return answer[1].strip()
        query = re.search("<search>(.+)</search>", action)
        if query is None:
            return None
        passages = "\n".join(await search(query[1]))
        messages += [{"role": "assistant", "content": action}, {"role": "user", "content": passages}]
        notes = await ask(client, messages, notes)
    return None


async def ask(client: AsyncOpenAI, messages: list[Any], notes: str) -> str:
    """Returns the reply of the model."""
    reply = await client.chat.completions.create(model="policy", messages=messages, metadata={"memory": notes})
    return reply.choices[0].message.content or ""
