"""Scripts of the synthetic world play an agent's own loop, with a search that finds the passage of a named entity."""

from __future__ import annotations

import functools
import tempfile

from mempipe.config import RunConfig
from mempipe.data.scripted_agents import ScriptedAgent
from mempipe.data.world import World
from mempipe.engines.tiny import build_tokenizer
from mempipe.engines.tokenizer import HFTokenizer, load_tokenizer
from mempipe.rollout import make_renderer
from mempipe.types import Completion, FinishReason, Question, SearchResult, Trajectory

WORLD = World(5)
QUESTIONS = WORLD.questions(60, seed=2)


@functools.cache
def tiny_tokenizer() -> HFTokenizer:
    """The tokenizer of the world's tiny model."""
    with tempfile.TemporaryDirectory() as folder:
        build_tokenizer(folder)
        return load_tokenizer(folder)


async def search(query: str, *, num_passages: int, partition: str) -> SearchResult:
    named = [passage for passage in WORLD.passages if passage.title in query.split()]
    return SearchResult(passages=[*named, WORLD.passages[0]], snapshot="")


async def rollout(
    config: RunConfig,
    question: Question,
    tokenizer: HFTokenizer,
    script: ScriptedAgent,
    messages: list[str] | None = None,
) -> Trajectory:
    """The script's attempt; its messages are added to `messages`."""
    renderer = make_renderer(config, tokenizer=tokenizer)

    async def generate(token_ids, *, max_tokens):
        message = script.reply(tokenizer.decode(token_ids))
        reply = [*tokenizer.encode_template(message), renderer.closing_id]
        assert len(reply) <= max_tokens, message
        if messages is not None:
            messages.append(message)
        return Completion(
            token_ids=reply, logprobs=[0.0] * len(reply), finish_reason=FinishReason.STOP, policy_version=0
        )

    bound = config.agent_spec.agent(renderer, generate=generate, search=search)
    return await bound.rollout(question, trajectory_id="t", group_id="g", member=0)


def searches(trajectory: Trajectory) -> list[str]:
    return [search.query for context in trajectory.contexts for search in context.searches]
