"""Answers a request with the agent of training and evaluation, bound to the engine and the retriever of the service.

It knows neither Ray nor HTTP. `Emit` hears each event when it happens.
"""

from __future__ import annotations

import asyncio
import copy
import difflib
import functools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from mempipe.agents.budget import MemoryBudget
from mempipe.agents.memagent import MemAgentRenderer
from mempipe.agents.protocol import SearchFn, Tokenizer, UnfitQuestion
from mempipe.agents.registry import BUILT_IN, AgentSpec
from mempipe.agents.rendering import Renderer
from mempipe.config import RunConfig
from mempipe.engines.config import SamplingConfig
from mempipe.evaluation.rollout_metrics import full_history_tokens
from mempipe.faults import InfrastructureFault
from mempipe.loader import parse_section
from mempipe.rl.rewards import normalize_answer, split_answers
from mempipe.serve.api import (
    AnswerReply,
    AnswerRequest,
    BudgetChanges,
    PassageReply,
    Sampling,
    SearchReply,
    ToolReply,
    TurnReply,
    Usage,
)
from mempipe.serve.errors import ApiError
from mempipe.settings import ConfigError
from mempipe.types import Completion, Context, EndReason, Group, Question, SearchResult, Trajectory
from mempipe.user_code import user_code

Emit = Callable[[str, dict[str, Any]], None]
"""Takes an event: its name and its data."""
Record = Callable[[Group, AgentSpec], None]
"""Takes the attempts at a question and the agent that made them (`mempipe.serve.traces`)."""
KEPT_RENDERERS = 32


def nowhere(group: Group, spec: AgentSpec) -> None:
    """Records nothing."""


class Engine(Protocol):
    """The weights that one question is answered with, from its first turn to its last."""

    @property
    def version(self) -> str: ...

    async def generate(self, token_ids: Sequence[int], *, max_tokens: int, sampling: SamplingConfig) -> Completion:
        """Samples one message after `token_ids`. Raises InfrastructureFault."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A checked request, ready to be played."""

    agent: str
    config: RunConfig
    renderer: Renderer[Any]
    question: Question
    num_objectives: int
    sampling: SamplingConfig
    num_samples: int


class Answering:
    """Answers questions with the agents of a run."""

    def __init__(
        self,
        name: str,
        agents: Mapping[str, RunConfig],
        *,
        tokenizer: Tokenizer,
        engine: Callable[[], Engine],
        search: SearchFn,
        sampling: SamplingConfig,
        max_turns: int,
        timeout_s: float,
        record: Record = nowhere,
    ) -> None:
        """`agents` are configs by the names that requests use, the service's own first. `engine` returns the weights
        that are served now; a request keeps those that it began with. `max_turns` is the most that a request
        may ask for; `record` takes what was played. Raises ConfigError when an agent's prompts and budget do not fit.
        """
        self.name = name
        self.agents = dict(agents)
        self.engine = engine
        self._tokenizer = tokenizer
        self._search = search
        self._sampling = sampling
        self._max_turns = max_turns
        self._timeout_s = timeout_s
        self._record = record
        self._kept = functools.lru_cache(maxsize=KEPT_RENDERERS)(self._render)
        for agent in self.agents:
            self._kept(agent, "{}")

    async def plan(self, request: AnswerRequest, *, text: str = "", memory: str | None = None) -> Plan:
        """Checks a request in a thread, since the encoding of a long text takes time.

        The agent reads `text` and starts from `memory`, or from its own beginning for None. Raises ApiError.
        """
        return await asyncio.to_thread(self._plan, request, text, memory)

    async def answer(self, plan: Plan, *, request_id: str, session: str | None, emit: Emit) -> tuple[AnswerReply, str]:
        """Plays the agent; returns the answer and the memory for the next question of a session.

        Raises ApiError: 503 when engine or retriever fail or take too long, 400 for what they refuse.
        """
        engine, started = self.engine(), time.perf_counter()
        emit("started", {"id": request_id, "model": self.name, "model_version": engine.version, "agent": plan.agent})
        try:
            async with asyncio.timeout(self._timeout_s):
                trajectories = await self._play_all(plan, engine, request_id, emit)
        except TimeoutError as error:
            raise ApiError(503, f"no answer within {self._timeout_s:g} s") from error
        except InfrastructureFault as fault:
            raise ApiError(503, f"the service cannot answer now: {fault}") from fault
        group = Group(id=request_id, question=plan.question, trajectories=trajectories)
        self._record(group, plan.config.agent_spec)
        chosen, confidence = _most_frequent(trajectories)
        reply = AnswerReply(
            id=request_id,
            created=int(time.time()),
            model=self.name,
            model_version=engine.version,
            agent=plan.agent,
            question=plan.question.text,
            answer=chosen.answer,
            answers=split_answers(chosen.answer or "", plan.num_objectives) if plan.num_objectives > 1 else [],
            end_reason=chosen.end_reason,
            confidence=confidence,
            turns=turn_replies(chosen, plan),
            usage=_usage(trajectories),
            seconds=time.perf_counter() - started,
            session=session,
        )
        return reply, _next_memory(plan.question, chosen)

    def _plan(self, request: AnswerRequest, text: str, memory: str | None) -> Plan:
        agent = request.agent or next(iter(self.agents))
        if request.model not in (None, self.name):
            message = f"model is {request.model!r}; this service has {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        if agent not in self.agents:
            raise ApiError(400, f"agent is {agent!r}; this service has {', '.join(self.agents)}", param="agent")
        sampling = self._changed_sampling(request.sampling)
        if request.num_samples > 1 and sampling.temperature == 0:
            raise ApiError(
                400,
                f"num_samples is {request.num_samples} at temperature 0, where all are the same; set a temperature",
                param="num_samples",
            )
        renderer = self._renderer(agent, request.budget)
        if memory is not None:
            renderer = _starting_from(renderer, memory, agent=agent)
        objectives = request.objectives or [request.question or ""]
        question = Question(
            id="of the request", text=joined(objectives), golden_answers=[], partition=request.partition, context=text
        )
        try:
            renderer.check(question)
            if isinstance(renderer, MemAgentRenderer):
                renderer.chunks(question)  # kept for the rollout, which must not hold up the others while it encodes
        except UnfitQuestion as error:
            raise ApiError(400, str(error), param="question") from error
        if text and not self.agents[agent].agent_spec.reads:
            raise ApiError(400, f"agent {agent!r} searches; it reads no text or document of a request", param="text")
        return Plan(
            agent=agent,
            config=self.agents[agent],
            renderer=renderer,
            question=question,
            num_objectives=len(objectives),
            sampling=sampling,
            num_samples=request.num_samples,
        )

    def _changed_sampling(self, changes: Sampling) -> SamplingConfig:
        return SamplingConfig.model_validate(self._sampling.model_dump() | changes.model_dump(exclude_none=True))

    def _renderer(self, agent: str, changes: BudgetChanges) -> Renderer[Any]:
        """Returns the agent's renderer within the changed budget. Raises ApiError 400."""
        if changes.max_turns is not None and changes.max_turns > self._max_turns:
            message = f"budget.max_turns is {changes.max_turns}, more than the {self._max_turns} that are allowed"
            raise ApiError(400, message, param="budget.max_turns")
        # A reading agent's renderer keeps the text that it cut last: each request needs its own.
        make = self._render if self.agents[agent].agent_spec.reads else self._kept
        try:
            return make(agent, changes.model_dump_json(exclude_none=True))
        except ConfigError as error:
            raise ApiError(400, str(error), param="budget") from error

    def _render(self, agent: str, changes: str) -> Renderer[Any]:
        """Makes the renderer of an agent within its budget and the JSON object `changes`. Raises ConfigError."""
        config = self.agents[agent]
        limits = BudgetChanges.model_validate_json(changes).model_dump(exclude_none=True)
        budget = config.budget
        if limits:
            kind = config.agent_spec.budget
            if unknown := limits.keys() - kind.model_fields.keys():
                raise ConfigError(f"budget.{min(unknown)} means nothing to agent {agent!r}")
            if isinstance(budget, MemoryBudget) and "memory_tokens" in limits:  # room for its tags stays as it is
                tags = budget.memory_message_limit - budget.memory_tokens
                limits["memory_message_tokens"] = limits["memory_tokens"] + tags
            budget = parse_section(budget.model_dump(exclude_unset=True) | limits, kind)
        return config.agent_spec.renderer(config.agent, budget, limits=config.retrieval, tokenizer=self._tokenizer)

    async def _play_all(self, plan: Plan, engine: Engine, request_id: str, emit: Emit) -> list[Trajectory]:
        try:
            async with asyncio.TaskGroup() as tasks:
                attempts = [
                    tasks.create_task(self._play(plan, engine, request_id, member, emit))
                    for member in range(plan.num_samples)
                ]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        return [attempt.result() for attempt in attempts]

    async def _play(self, plan: Plan, engine: Engine, request_id: str, member: int, emit: Emit) -> Trajectory:
        """Plays one attempt and emits its events."""
        spec, contexts = plan.config.agent_spec, list[Context]()

        async def generate(token_ids: Sequence[int], *, max_tokens: int) -> Completion:
            completion = await engine.generate(token_ids, max_tokens=max_tokens, sampling=plan.sampling)
            text = self._tokenizer.decode(completion.token_ids)
            emit("message", {"sample": member, "turn": len(contexts), "thought": spec.thought(text), "text": text})
            return completion

        async def search(query: str, *, num_passages: int, partition: str) -> SearchResult:
            emit("search", {"sample": member, "turn": len(contexts), "query": query})
            try:
                result = await self._search(query, num_passages=num_passages, partition=partition)
            except ValueError as error:
                raise ApiError(400, str(error), param="partition") from error
            found = [_passage(passage).model_dump() for passage in result.passages]
            emit("passages", {"sample": member, "turn": len(contexts), "query": query, "passages": found})
            return result

        def on_context(context: Context) -> None:
            contexts.append(context)
            so_far = Trajectory(contexts=contexts, end_reason=EndReason.NO_ACTION, answer=None, **names)
            emit("turn", {"sample": member, **turn_replies(so_far, plan)[-1].model_dump()})

        names: dict[str, Any] = {"id": f"{request_id}/{member}", "group_id": request_id, "member": member}
        agent = spec.agent(plan.renderer, generate=generate, search=search)
        of_user = plan.config.agent.name not in BUILT_IN
        with user_code(f"agent {plan.agent} failed", passing=(ApiError,)) if of_user else nullcontext():
            return await agent.rollout(
                plan.question, trajectory_id=names["id"], group_id=request_id, member=member, on_context=on_context
            )


def joined(objectives: Sequence[str]) -> str:
    """Joins objectives to one question, as evaluations do (`mempipe.evaluation.benchmarks`)."""
    if len(objectives) == 1:
        return objectives[0]
    return "; ".join(text if text.endswith("?") else f"{text}?" for text in objectives)


def noted(memory: str, question: str, answer: str | None) -> str:
    """Returns the memory with one more exchange of a conversation on a line of its own."""
    line = f"{' '.join(question.split())} {' '.join((answer or 'no answer').split())}"
    return f"{memory}\n{line}" if memory else line


def turn_replies(trajectory: Trajectory, plan: Plan) -> list[TurnReply]:
    """Returns the contexts of a trajectory as the service shows them."""
    spec, limit = plan.config.agent_spec, plan.renderer.budget.memory_limit
    return [
        _turn(context, spec.thought(context.action), history, limit)
        for context, history in zip(trajectory.contexts, full_history_tokens(trajectory), strict=True)
    ]


def _turn(context: Context, thought: str, history: int, limit: int | None) -> TurnReply:
    added, dropped = changes(context.memory_before, context.memory_after)
    wrote = context.num_new_memory_tokens > 0
    return TurnReply(
        index=context.index,
        thought=thought,
        action=context.action,
        searches=[SearchReply(query=s.query, passages=list(map(_passage, s.passages))) for s in context.searches],
        tools=[ToolReply(tool=use.tool, arguments=use.arguments, texts=use.texts) for use in context.tool_uses],
        memory_before=context.memory_before,
        memory_after=context.memory_after,
        memory_added=added,
        memory_dropped=dropped if wrote else [],
        memory_tokens=context.num_memory_tokens,
        memory_limit=limit,
        prompt_tokens=context.num_prompt_tokens,
        full_history_tokens=history,
        sampled_tokens=context.num_sampled_tokens + context.num_dropped_tokens,
        context_tokens=len(context.token_ids),
        generate_seconds=context.generate_seconds,
        search_seconds=context.search_seconds,
    )


def changes(before: str, after: str) -> tuple[list[str], list[str]]:
    """Returns the runs of words that only `after` has, and those that only `before` has."""
    old, new = before.split(), after.split()
    added, dropped = [], []
    for kind, i, j, k, m in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind != "equal":
            added += [" ".join(new[k:m])] if m > k else []
            dropped += [" ".join(old[i:j])] if j > i else []
    return added, dropped


def _passage(passage: Any) -> PassageReply:
    return PassageReply(id=passage.id, title=passage.title, text=passage.text, score=passage.score)


def _most_frequent(trajectories: Sequence[Trajectory]) -> tuple[Trajectory, float | None]:
    """Returns the first attempt with the most frequent answer, and its share; attempts without answer have no vote."""
    votes = Counter(normalize_answer(t.answer) for t in trajectories if t.answer is not None)
    if not votes:
        return trajectories[0], None if len(trajectories) == 1 else 0.0
    winner, count = votes.most_common(1)[0]
    chosen = next(t for t in trajectories if t.answer is not None and normalize_answer(t.answer) == winner)
    return chosen, None if len(trajectories) == 1 else count / len(trajectories)


def _usage(trajectories: Sequence[Trajectory]) -> Usage:
    """Counts the tokens that were read and sampled over all contexts and attempts."""
    contexts = [context for trajectory in trajectories for context in trajectory.contexts]
    sampled = sum(context.num_sampled_tokens + context.num_dropped_tokens for context in contexts)
    read = sum(len(context.loss_mask) - context.num_sampled_tokens for context in contexts)
    return Usage(prompt_tokens=read, completion_tokens=sampled, total_tokens=read + sampled)


def _next_memory(question: Question, trajectory: Trajectory) -> str:
    """Returns what a session keeps: the agent's last memory, and the question with its answer."""
    last = trajectory.contexts[-1]
    answer = trajectory.answer if trajectory.end_reason is EndReason.ANSWERED else None
    return noted(last.memory_after or last.memory_before, question.text, answer)


def _starting_from(renderer: Renderer[Any], memory: str, *, agent: str) -> Renderer[Any]:
    """Returns the renderer with `memory` in place of the empty one. Raises ApiError 400 for an agent without memory."""
    if not hasattr(renderer, "empty_memory"):
        raise ApiError(400, f"agent {agent!r} carries no memory from one question to the next", param="agent")
    token_ids = fitted(renderer, memory)
    if not token_ids:
        return renderer
    changed: Any = copy.copy(renderer)
    changed.empty_memory = token_ids
    return changed


def fitted(renderer: Renderer[Any], memory: str) -> list[int]:
    """Returns the ids of a memory, or of the newest lines of one that is longer than its budget."""
    limit, kept, used = renderer.budget.memory_limit, list[str](), 0
    for line in reversed(memory.split("\n")):
        used += len(renderer.encode(line)) + 1
        if limit is not None and used > limit and kept:
            break
        kept.append(line)
    return renderer.encode("\n".join(reversed(kept)))[:limit]
