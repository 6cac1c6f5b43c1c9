"""Answers a request with the agent of training and evaluation, bound to the engine and the retriever of the service.

It knows neither Ray nor HTTP.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from mempipe.agents.budget import MemoryBudget
from mempipe.agents.protocol import QuestionTooLong, SearchFn, Tokenizer, UnfitQuestion
from mempipe.agents.registry import BUILT_IN, AgentSpec
from mempipe.agents.rendering import Renderer
from mempipe.answers.api import AnswerReply, AnswerRequest, AttemptReply, BudgetChanges, Sampling, TurnReply
from mempipe.answers.attempt_events import AttemptEvents, Emit
from mempipe.answers.conversation import next_memory, starting_from
from mempipe.answers.errors import TOO_LONG, ApiError
from mempipe.answers.replies import answer_logprobs, most_frequent, turn_replies, usage_of
from mempipe.answers.same_index import IndexChanged, SameIndex
from mempipe.config import RunConfig
from mempipe.data.objectives import joined_texts
from mempipe.engines.config import SamplingConfig
from mempipe.faults import InfrastructureFault, retry_pauses
from mempipe.loader import parse_section
from mempipe.request_seeds import RequestSeeds
from mempipe.rl.rewards import split_answers
from mempipe.settings import ConfigError
from mempipe.types import Completion, Context, Group, Question, SearchResult, Trajectory
from mempipe.user_code import UserCodeError, user_code

Record = Callable[[Group, AgentSpec, Mapping[str, str]], None]
"""Takes the attempts at a question, their agent and the request's metadata (`mempipe.serve.replicas.traces`)."""
logger = logging.getLogger(__name__)
NO_LOGPROBS = "logprobs is true, and the engine of this service gives none; leave it out"
KEPT_RENDERERS = 32
SHORT_CHARS = 1_000
"""A request with fewer characters is checked without a thread: the check takes a tenth of a millisecond, and a thread
gets its turn late while the event loop works for many clients."""
MAX_RESTARTS = 6
"""How often the attempts of a request may start again because the index changed. Several replicas are not replaced at
the same moment, so a request pauses before it starts again, some 10 seconds in all."""


def nowhere(group: Group, spec: AgentSpec, metadata: Mapping[str, str]) -> None:
    """Records nothing."""


class _FirstPrompt(Exception):
    """The agent would sample now."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(num_tokens)
        self.num_tokens = num_tokens


class Engine(Protocol):
    """The weights that one question is answered with, from its first turn to its last."""

    @property
    def version(self) -> str: ...

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int, sampling: SamplingConfig, seed: int | None = None
    ) -> Completion:
        """Samples one message after `token_ids`. Raises InfrastructureFault."""
        ...

    async def gives_logprobs(self) -> bool:
        """Returns whether its tokens have log-probs. Raises InfrastructureFault."""
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
    max_message_tokens: int | None
    seed: int | None
    num_samples: int
    logprobs: bool
    metadata: Mapping[str, str]

    def turn_replies(self, contexts: Iterable[Context]) -> Iterator[TurnReply]:
        """Yields the turns of one attempt as the service shows them (`mempipe.answers.replies`)."""
        limit, spec = self.renderer.budget.memory_limit, self.config.agent_spec
        return turn_replies(contexts, thought=spec.thought, messages=spec.messages, memory_limit=limit)


class CachedPrompts:
    """Counts the tokens of the prompts that the engine's prefix cache held, each token once: what a message adds to
    the context that it continues, and not that context again. An attempt may have several contexts side by side.
    """

    def __init__(self) -> None:
        self.num_tokens = 0

    def reader(self) -> Callable[[Sequence[int], Completion], int]:
        """Returns the function that counts the calls of one attempt, in their order, and returns which context each
        belongs to: 0 for the one that began first.
        """
        contexts: list[tuple[int, int, int]] = []  # not their tokens: a long document has many

        def count(prompt: Sequence[int], completion: Completion) -> int:
            prompt = tuple(prompt)
            continued = [place for place, context in enumerate(contexts) if _begins_with(prompt, context)]
            place = max(continued, key=lambda place: contexts[place], default=len(contexts))
            known = contexts[place][0] if continued else 0
            self.num_tokens += max(completion.num_cached_tokens - known, 0)
            contexts[place : place + 1] = [_summary(prompt + tuple(completion.token_ids))]
            return place

        return count


def _is_soon_checked(request: AnswerRequest, text: str, memory: str | None) -> bool:
    """Returns whether the check of a request holds up no others."""
    texts = (request.question, request.instructions, *(request.objectives or ()), text, memory)
    return not request.budget.model_fields_set and sum(len(each) for each in texts if each) < SHORT_CHARS


def _summary(context: tuple[int, ...]) -> tuple[int, int, int]:
    """Returns the length, the last token and the hash of a context."""
    return len(context), context[-1], hash(context)


def _begins_with(prompt: tuple[int, ...], context: tuple[int, int, int]) -> bool:
    length, last, _ = context
    return length <= len(prompt) and prompt[length - 1] == last and _summary(prompt[:length]) == context


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
        partition: str = "",
        record: Record = nowhere,
        shows_user_errors: bool = False,
    ) -> None:
        """`agents` are configs by the names that requests use, the service's own first. `engine` returns the weights
        that are served now; a request keeps those that it began with. `max_turns` is the most that a request may ask
        for, `partition` is searched for a request that names none, and `record` receives the finished group.
        `shows_user_errors`: tell the caller which error ended user-defined code, with its file and line. Raises
        ConfigError when an agent's prompts and budget do not fit.
        """
        self.name = name
        self.created = int(time.time())
        self.keeps_metadata = record is not nowhere
        self.is_greedy = sampling.temperature == 0
        self.agents = dict(agents)
        self.engine = engine
        self._tokenizer = tokenizer
        self._search = search
        self._sampling = sampling
        self._max_turns = max_turns
        self._timeout_s = timeout_s
        self._partition = partition
        self._record = record
        self._shows_user_errors = shows_user_errors
        self._kept = functools.lru_cache(maxsize=KEPT_RENDERERS)(self._render)
        for agent in self.agents:
            self._kept(agent, "{}")

    @property
    def searches(self) -> bool:
        """Returns whether one of the agents searches and so needs a corpus."""
        return any(config.agent_spec.searches for config in self.agents.values())

    @property
    def budgets(self) -> dict[str, dict[str, int]]:
        """Returns the limits of each agent, in tokens and turns, that a request may change."""
        names = BudgetChanges.model_fields.keys()
        limits = {agent: config.budget.model_dump(include=set(names)) for agent, config in self.agents.items()}
        return {agent: {name: of[name] for name in names if name in of} for agent, of in limits.items()}

    async def search(self, query: str, *, num_passages: int, partition: str | None = None) -> SearchResult:
        """Returns passages of a part of the corpus, None for the service's own, best first. Raises ApiError: 503 for a
        fault, 400 for a refused request."""
        searched = self._partition_of(partition)
        try:
            return await self._search(query, num_passages=num_passages, partition=searched)
        except ValueError as error:
            raise ApiError(400, str(error), param="partition") from error
        except InfrastructureFault as fault:
            raise ApiError(503, f"the service cannot answer now: {fault}") from fault

    def takes_instructions(self, agent: str | None) -> bool:
        """Returns whether an agent, None for the service's own, has a place for instructions of whoever asks."""
        name = agent or next(iter(self.agents))
        return name in self.agents and self._kept(name, "{}").takes_instructions

    def knows_user(self, agent: str | None) -> bool:
        """Returns whether code that is not mempipe's learns who asks: an agent, None for the service's own, a program
        or its tools.
        """
        config = self.agents.get(agent or next(iter(self.agents)))
        if config is None:
            return False
        return config.agent.name not in BUILT_IN.keys() - {"program"} or bool(getattr(config.agent, "tools", ()))

    async def plan(self, request: AnswerRequest, *, text: str = "", memory: str | None = None, owner: str = "") -> Plan:
        """Checks a request: in a thread if it has a long text to encode or a budget to fit the prompts into.

        The agent reads `text` and starts from `memory`, or from its own beginning for None. `owner` is the name of the
        caller's key: the question is from OWNER/USER, or from OWNER where the request names no user. Raises ApiError:
        400 also for log-probs that the engine does not give, 503 when it does not say so.
        """
        user = "/".join(filter(None, (owner, request.user)))
        if _is_soon_checked(request, text, memory):
            plan = self._plan(request, text, memory, user)
        else:
            plan = await asyncio.to_thread(self._plan, request, text, memory, user)
        if plan.logprobs:
            try:
                if not await self.engine().gives_logprobs():
                    raise ApiError(400, NO_LOGPROBS, param="logprobs")
            except InfrastructureFault as fault:
                raise ApiError(503, f"the service cannot answer now: {fault}") from fault
        return plan

    async def num_prompt_tokens(self, plan: Plan) -> int:
        """Returns how many tokens the policy would read before its first message. Raises ApiError 400 for an agent that
        is not mempipe's, whose prompts are known only when it runs.
        """
        spec = plan.config.agent_spec
        if plan.config.agent.name not in BUILT_IN.keys() - {"program"}:
            raise ApiError(400, f"the prompts of agent {plan.agent!r} are known only when it runs", param="input")

        async def generate(token_ids: Sequence[int], *, max_tokens: int) -> Completion:
            raise _FirstPrompt(len(token_ids))

        agent = spec.agent(plan.renderer, generate=generate, search=self._search)
        try:
            await agent.rollout(plan.question, trajectory_id="", group_id="", member=0)
        except _FirstPrompt as prompt:
            return prompt.num_tokens
        raise AssertionError("every agent samples")

    async def answer(self, plan: Plan, *, request_id: str, session: str | None, emit: Emit | None) -> AnswerReply:
        """Plays the agent and returns the answer.

        `emit` hears each event when it happens; None if the caller wants no events. If the index changes meanwhile, all
        attempts start again in the new one. Raises ApiError: 503 when engine or retriever fail or take too long, 400
        for what they refuse. Raises UserCodeError, or ApiError 500 where callers may read it.
        """
        engine, started = self.engine(), time.perf_counter()
        if emit is not None:
            version = engine.version
            emit("started", {"id": request_id, "model": self.name, "model_version": version, "agent": plan.agent})
        try:
            async with asyncio.timeout(self._timeout_s):
                trajectories, cached, index = await self._play_in_one_index(plan, engine, request_id, emit)
        except TimeoutError as error:
            raise ApiError(503, f"no answer within {self._timeout_s:g} s") from error
        except InfrastructureFault as fault:
            reason = str(fault)
            if fault.shows_command and not self._shows_user_errors:
                logger.error("a program was stopped: %s", fault)
                reason = "its program was stopped"
            raise ApiError(503, f"the service cannot answer now: {reason}") from fault
        except UserCodeError as error:
            if not self._shows_user_errors:
                raise
            logger.error("user-defined code failed", exc_info=error)
            raise ApiError(500, str(error)) from error
        group = Group(id=request_id, question=plan.question, trajectories=trajectories)
        self._record(group, plan.config.agent_spec, plan.metadata)
        chosen, confidence = most_frequent(trajectories)
        others = [trajectory for trajectory in trajectories if trajectory is not chosen]
        turns = list(plan.turn_replies(chosen.contexts))
        return AnswerReply(
            id=request_id,
            created=int(time.time()),
            model=self.name,
            model_version=engine.version,
            index=index,
            agent=plan.agent,
            question=plan.question.text,
            answer=_shown(chosen.answer),
            answers=_by_objective(chosen.answer, plan.num_objectives) if plan.num_objectives > 1 else [],
            end_reason=chosen.end_reason,
            confidence=confidence,
            attempts=[self._attempt(plan, trajectory) for trajectory in (chosen, *others)],
            turns=turns,
            usage=usage_of(trajectories, cached_tokens=cached.num_tokens, decode=self._tokenizer.decode),
            full_history_tokens=sum(turn.full_history_tokens for turn in turns),
            seconds=time.perf_counter() - started,
            session=session,
            memory=next_memory(plan.question, chosen),
        )

    def _attempt(self, plan: Plan, trajectory: Trajectory) -> AttemptReply:
        """Says how an attempt ended. Raises ApiError 400 for log-probs that the engine gives for some messages only."""
        logprobs = answer_logprobs(trajectory, self._tokenizer.decode) if plan.logprobs else None
        if logprobs is not None and any(math.isnan(each.logprob) for each in logprobs):
            raise ApiError(400, NO_LOGPROBS, param="logprobs")
        return AttemptReply(answer=_shown(trajectory.answer), end_reason=trajectory.end_reason, logprobs=logprobs)

    def _plan(self, request: AnswerRequest, text: str, memory: str | None, user: str) -> Plan:
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
            renderer = starting_from(renderer, memory, agent=agent)
        if request.instructions is not None:
            if not renderer.takes_instructions:
                message = f"the prompt set of agent {agent!r} has no place for instructions; leave them out"
                raise ApiError(400, message, param="instructions")
            renderer = renderer.instructed(request.instructions)
        objectives = request.objectives or []
        asked = request.question or (objectives[0] if len(objectives) == 1 else joined_texts(objectives))
        partition, reads = self._partition_of(request.partition), self.agents[agent].agent_spec.reads
        question = Question(
            id="of the request", text=asked, golden_answers=[], partition=partition, context=text, user=user
        )
        try:
            renderer.check(question)
            renderer.prepare(question)  # the rollout must not hold up the others while it encodes
        except UnfitQuestion as error:
            code = TOO_LONG if isinstance(error, QuestionTooLong) else None
            if reads and not text:
                name = "text" if request.document is None else "document"
                raise ApiError(400, f"{name} is empty; {agent} reads one", param=name) from error
            raise ApiError(400, str(error), param="question", code=code) from error
        if text and not reads:
            raise ApiError(400, f"agent {agent!r} searches; it reads no text or document of a request", param="text")
        return Plan(
            agent=agent,
            config=self.agents[agent],
            renderer=renderer,
            question=question,
            num_objectives=max(len(objectives), 1),
            sampling=sampling,
            max_message_tokens=request.sampling.max_tokens,
            seed=request.sampling.seed,
            num_samples=request.num_samples,
            logprobs=request.logprobs,
            metadata=request.metadata,
        )

    def _partition_of(self, asked: str | None) -> str:
        return self._partition if asked is None else asked

    def _changed_sampling(self, changes: Sampling) -> SamplingConfig:
        changed = changes.model_dump(exclude_none=True, include=set(SamplingConfig.model_fields))
        if changes.top_p == 0:  # the fewest tokens that together have a probability above 0: one
            changed |= {"temperature": 0.0, "top_p": 1.0}
        return SamplingConfig.model_validate(self._sampling.model_dump() | changed)

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

    async def _play_in_one_index(
        self, plan: Plan, engine: Engine, request_id: str, emit: Emit | None
    ) -> tuple[list[Trajectory], CachedPrompts, str | None]:
        """Returns the attempts, their cached prompts and the snapshot of their index. Raises IndexChanged when the
        index changes more than MAX_RESTARTS times."""
        pauses = retry_pauses(longest_s=4.0)
        for restarts in itertools.count():
            index, cached = SameIndex(self._search), CachedPrompts()
            try:
                return (
                    await self._play_all(plan, engine, request_id, emit, cached, index.search),
                    cached,
                    index.snapshot,
                )
            except IndexChanged as change:
                if restarts == MAX_RESTARTS:
                    raise
                if emit is not None:
                    emit("restarted", {"reason": str(change)})
                await asyncio.sleep(next(pauses))
        raise AssertionError("the loop ends by an answer or an error")

    async def _play_all(
        self,
        plan: Plan,
        engine: Engine,
        request_id: str,
        emit: Emit | None,
        cached: CachedPrompts,
        search: SearchFn,
    ) -> list[Trajectory]:
        try:
            async with asyncio.TaskGroup() as tasks:
                attempts = [
                    tasks.create_task(self._play(plan, engine, request_id, member, emit, cached.reader(), search))
                    for member in range(plan.num_samples)
                ]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        return [attempt.result() for attempt in attempts]

    async def _play(
        self,
        plan: Plan,
        engine: Engine,
        request_id: str,
        member: int,
        emit: Emit | None,
        count: Callable[[Sequence[int], Completion], int],
        find: SearchFn,
    ) -> Trajectory:
        """Plays one attempt, counts its calls, and tells what happens where somebody listens."""
        spec, told = plan.config.agent_spec, None
        if emit is not None:
            told = AttemptEvents(
                emit,
                sample=member,
                decode=self._tokenizer.decode,
                thought=spec.thought,
                turn_replies=plan.turn_replies,
            )

        # Not with the request's id, so that another request with this seed samples the same.
        seeds = RequestSeeds(plan.seed, group_id="", member=member) if plan.seed is not None else None

        async def generate(token_ids: Sequence[int], *, max_tokens: int) -> Completion:
            limit = min(max_tokens, plan.max_message_tokens or max_tokens)
            seed = seeds.next(token_ids) if seeds is not None else None
            completion = await engine.generate(token_ids, max_tokens=limit, sampling=plan.sampling, seed=seed)
            context = count(token_ids, completion)
            if told is not None:
                told.message(completion, context=context)
            return completion

        async def search(query: str, *, num_passages: int, partition: str) -> SearchResult:
            turn = told.search(query) if told is not None else 0
            try:
                result = await find(query, num_passages=num_passages, partition=partition)
            except ValueError as error:
                raise ApiError(400, str(error), param="partition") from error
            if told is not None:
                told.passages(query, result, turn=turn)
            return result

        agent = spec.agent(plan.renderer, generate=generate, search=search)
        of_user = plan.config.agent.name not in BUILT_IN
        with user_code(f"agent {plan.agent} failed", passing=(ApiError,)) if of_user else nullcontext():
            return await agent.rollout(
                plan.question,
                trajectory_id=f"{request_id}/{member}",
                group_id=request_id,
                member=member,
                on_context=told.turn if told is not None else None,
            )


def _shown(answer: str | None) -> str | None:
    """Returns the answer as a client sees it: without the blanks that the policy sampled around it."""
    return None if answer is None else answer.strip()


def _by_objective(answer: str | None, count: int) -> list[str]:
    """Returns the answers to `count` objectives in order; "" for each that is missing."""
    return [text or "" for text in split_answers(answer or "", count)]
