"""Trajectories for a supervised start: recorded ones, a teacher's, or a script's.

A script or a teacher plays the same rollout loop against the same index as the model will, so the model learns exactly
the prompts that the engine will receive, token for token.
"""

from __future__ import annotations

import asyncio
import unicodedata
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from anyio.from_thread import start_blocking_portal

from mempipe.agents.protocol import GenerateFn, UnfitQuestion
from mempipe.agents.registry import BUILT_IN
from mempipe.config import RunConfig
from mempipe.data.qa import read_questions
from mempipe.data.scripted_agents import NO_NOISE, Noise, ScriptedAgent, facts_that_fit
from mempipe.data.trajectories import read_made_of, read_trajectories, write_trajectories
from mempipe.engines.endpoint import Endpoint
from mempipe.engines.tokenizer import HFTokenizer, load_tokenizer
from mempipe.evaluation.recorded import Recorded, read_recorded
from mempipe.faults import ServiceFault, retry_pauses
from mempipe.masking.demonstrations import Demonstration
from mempipe.retrieval.config import RetrievalConfig
from mempipe.retrieval.remote import RemoteRetriever
from mempipe.retrieval.retriever import MAX_BATCH, BatchingRetriever, Retriever, Searcher
from mempipe.rollout import budget_variants, drawn_variant, find_nothing, make_renderer, run_group
from mempipe.settings import ConfigError
from mempipe.types import Completion, FinishReason, Group, Question, Trajectory
from mempipe.user_code import load_user_object
from pipelines.prepare import world_questions, worlds

TRAJECTORIES_AT_ONCE = 256  # they share the retriever's batches
COMPARED_ATTEMPTS = 8  # of a source, to tell another tokenizer

MakeGenerate = Callable[[Question, str], GenerateFn]
"""Makes the `generate` of one trajectory, from its question and the id of its group."""


@dataclass(frozen=True, kw_only=True)
class Demonstrations:
    """The trajectories that a warm start imitates: clean ones first, noisy ones last. Held-out ones are not trained
    on."""

    clean: list[Group]
    noisy: list[Group]
    held_out: list[Group]


class TaughtAttempts:
    """The attempts of a teacher that are finished, in files of one folder: a resumed start does not play them again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_parts = 0
        self.finished: dict[int, Group | None] = {}
        """By the question's number; None for one that does not fit."""
        for part in sorted(folder.glob("part-*.parquet")):
            self.finished |= {int(group.id.rpartition("/")[2]): group for group in read_trajectories(part)}
            self.finished |= dict.fromkeys((read_made_of(part) or {}).get("unfit", []))
            self._num_parts += 1

    def add(self, finished: Mapping[int, Group | None]) -> None:
        """Writes them to a further file, which appears atomically."""
        self.finished |= finished
        if finished:
            part = self._folder / f"part-{self._num_parts:05d}.parquet"
            unfit = [number for number, group in finished.items() if group is None]
            write_trajectories(part, filter(None, finished.values()), made_of={"unfit": unfit})
            self._num_parts += 1


def demonstrations(config: RunConfig, *, taught: TaughtAttempts | None = None) -> Demonstrations:
    """Returns the trajectories that the warm start of this config imitates; the same seed gives the same ones of a
    script. A teacher's attempts go to `taught`.

    Raises ConfigError when there are none, and when the synthetic world has too few questions.
    """
    wanted = config.warm_start
    assert wanted is not None, "demonstrations are for a config with a warm_start"
    clean = list(islice(_clean(config, taught), wanted.num_clean_trajectories + wanted.num_held_out))
    held_out, clean = clean[: wanted.num_held_out], clean[wanted.num_held_out :]
    noisy = []
    if wanted.scripted and wanted.num_noisy_trajectories:
        noise = Noise(**wanted.noise.model_dump())
        questions = _questions(config, wanted.num_noisy_trajectories, seed=config.seed + 2)
        taken = {group.question.id for group in [*clean, *held_out]} if config.world is None else set[str]()
        fresh = (question for question in questions if question.id not in taken)
        noisy = list(
            islice(played(config, fresh, scripted_generate(config, noise), name="noisy"), wanted.num_noisy_trajectories)
        )
    if not clean and not noisy:
        raise ConfigError(
            "warm_start: no trajectory is left to imitate; "
            f"of recorded and taught ones those count whose {wanted.metric} is at least {wanted.min_score:g}"
            + f", and all {len(held_out)} of them are held out (num_held_out {wanted.num_held_out})"
            * bool(held_out)
        )
    scripted = [group.trajectories[0] for group in [*clean, *held_out]] if wanted.scripted else []
    if wanted.scripted and wanted.num_clean_trajectories and not any(t.em or t.reward > 0 for t in scripted):
        raise ConfigError(
            f"warm_start: the script of agent.name {config.agent.name!r} earned nothing with any question although it "
            f"made no mistake, and the model would imitate that; its messages do not fit agent.prompts "
            f"{config.agent.prompts or config.agent.name!r}, or the limits of budget are too low for them"
        )
    return Demonstrations(clean=clean, noisy=noisy, held_out=held_out)


def _clean(config: RunConfig, taught: TaughtAttempts | None) -> Iterator[Group]:
    """Returns good trajectories, one per group, from wherever the config says."""
    wanted = config.warm_start
    assert wanted is not None, "demonstrations are for a config with a warm_start"
    if wanted.trajectories:
        return _good(_recorded(config, wanted.trajectories), wanted.metric, wanted.min_score)
    if wanted.teacher is not None:
        endpoint = _teacher(config)
        questions = read_questions(config.data.train, columns=config.data.columns)
        groups = played(config, questions, lambda *_: endpoint, name="teacher", kept=taught)
        return _good(groups, wanted.metric, wanted.min_score)
    count = wanted.num_clean_trajectories + wanted.num_held_out
    questions = _questions(config, count, seed=config.seed + 1)
    groups = played(config, questions, scripted_generate(config, NO_NOISE), name="clean")
    return groups if config.world is not None else _good(groups, "em", 1.0)


def _recorded(config: RunConfig, sources: Sequence[str]) -> Iterator[Group]:
    """Yields all groups that files and folders hold, with one right recall of each trajectory. Trajectories are named
    after their place too, because every evaluation of the same questions has the same ids.

    Raises ConfigError for a place without trajectories, for one that is named twice, and for trajectories of another
    agent or tokenizer, whose prompts and ids the model would never meet.
    """
    seen: set[Path] = set()
    tokenizer = load_tokenizer(config.model.path)
    for source in sources:
        for recorded in read_recorded(Path(source)):
            if (place := recorded.place.resolve()) in seen:
                raise ConfigError(f"warm_start.trajectories names {recorded.place} twice; each is imitated once")
            seen.add(place)
            _check_agent(config, recorded)
            if not _is_read_by(tokenizer, recorded.groups):
                raise ConfigError(
                    f"warm_start.trajectories names {recorded.place}, whose token ids are of another tokenizer than "
                    f"that of model.path {config.model.path!r}; imitate attempts of a model with the same tokenizer"
                )
            for group in recorded.groups:
                named = [replace(_with_one_recall(t), id=f"{recorded.place}:{t.id}") for t in group.trajectories]
                yield replace(group, trajectories=named)


def _check_agent(config: RunConfig, recorded: Recorded) -> None:
    """Raises ConfigError for attempts of another agent. Two names of a user's agents may be those of one that moved."""
    played, ours = (recorded.settings.get("agent") or {}).get("name"), config.agent.name
    if played not in (None, ours) and (played in BUILT_IN or ours in BUILT_IN):
        raise ConfigError(
            f"warm_start.trajectories names {recorded.place}, where agent.name is {played!r}; agent.name is {ours!r} "
            "here, whose prompts differ"
        )


def _is_read_by(tokenizer: HFTokenizer, groups: Sequence[Group]) -> bool:
    """Returns whether the ids of the first attempts, decoded, hold one of the texts that the attempts were made of."""
    attempts = [(group.question.text, each) for group in groups for each in group.trajectories if each.contexts]
    for question, attempt in attempts[:COMPARED_ATTEMPTS]:
        context = attempt.contexts[0]
        text = unicodedata.normalize("NFC", tokenizer.decode(context.token_ids))
        texts = [each.strip() for each in (question, context.action, context.chunk, context.memory_before)]
        if any(unicodedata.normalize("NFC", each) in text for each in texts if each) or not any(texts):
            return True
    return not attempts


def _good(groups: Iterable[Group], metric: str, min_score: float) -> Iterator[Group]:
    """Yields every trajectory that scored enough, as a separate group."""
    for group in groups:
        for trajectory in group.trajectories:
            if getattr(trajectory, metric) >= min_score:
                own = replace(trajectory, group_id=trajectory.id)
                yield Group(id=trajectory.id, question=group.question, trajectories=[own])


def _questions(config: RunConfig, count: int, *, seed: int) -> Iterable[Question]:
    """Returns the questions for a script: `count` questions of the synthetic world, or all training questions that its
    script can play."""
    if config.world is not None:
        (train_worlds, _), wanted = worlds(config), config.world
        asked = {"hops": wanted.hops, "relations": wanted.seen, "objectives": wanted.objectives}
        return world_questions(train_worlds, count, setting="warm_start", seed=seed, **asked)
    return list(filter(_text_script(config).can_play, read_questions(config.data.train, columns=config.data.columns)))


def scripted_generate(config: RunConfig, noise: Noise, *, num_noted: int = 0) -> MakeGenerate:
    """Returns the function that plays the config's agent by a script. Of the facts in a memory it keeps `num_noted`; 0:
    those that fit the budget. With budget.memory_choices it is the limit that the attempt draws, as in training.

    Raises ConfigError for an agent without a script.
    """
    made = [_scripted(variant, noise, num_noted=num_noted) for variant in budget_variants(config)]
    return lambda question, group_id: drawn_variant(made, config, group_id)(question, group_id)


def _scripted(config: RunConfig, noise: Noise, *, num_noted: int) -> MakeGenerate:
    tokenizer = load_tokenizer(config.model.path)
    closing = make_renderer(config, tokenizer=tokenizer).closing_id
    limit = config.budget.memory_limit
    new_script = _script(config, noise, num_noted or (0 if limit is None else facts_that_fit(limit)))

    def make(question: Question, trajectory_id: str) -> GenerateFn:
        script = new_script(question, f"{config.seed}:{trajectory_id}")

        async def generate(token_ids: Sequence[int], *, max_tokens: int) -> Completion:
            prompt = tokenizer.decode(token_ids)
            text = script.reply(prompt)
            if prompt.rstrip().endswith("<think>") and "</think>" not in text:  # opened by the chat template
                text = f"</think>{text}"
            reply = [*tokenizer.encode_template(text), closing]
            finish = FinishReason.STOP if len(reply) <= max_tokens else FinishReason.LENGTH
            reply = reply[:max_tokens]
            return Completion(token_ids=reply, logprobs=[0.0] * len(reply), finish_reason=finish, policy_version=0)

        return generate

    return make


def _script(
    config: RunConfig, noise: Noise, num_noted: int
) -> Callable[[Question, str], ScriptedAgent | Demonstration]:
    turns = config.budget.turn_limit
    if config.world is None:
        script = partial(_text_script(config), agent=config.agent.model_dump(), noise=noise, max_turns=turns)
        return lambda question, seed: script(question=question, seed=seed)
    new = partial(
        load_user_object(config.script(), setting="AgentSpec.script"),
        max_turns=turns,
        noise=noise,
        num_noted=num_noted,
        unseen=config.world.seen.without,
    )
    return lambda question, seed: new(question=question.text, seed=seed)


def _text_script(config: RunConfig) -> type[Demonstration]:
    return load_user_object(config.script(), setting="AgentSpec.text_script")


def _teacher(config: RunConfig) -> GenerateFn:
    assert config.warm_start is not None and config.warm_start.teacher is not None, "a teacher is an endpoint"
    endpoint = Endpoint(
        config.warm_start.teacher,
        sampling=config.sampling,
        tokenizer=load_tokenizer(config.warm_start.teacher.tokenizer or config.model.path),
        stop_texts=config.agent_spec.stop_texts,
    )
    return endpoint.generate


def played(
    config: RunConfig,
    questions: Iterable[Question],
    generate: MakeGenerate,
    *,
    name: str,
    kept: TaughtAttempts | None = None,
) -> Iterator[Group]:
    """Plays one scored attempt at every question that fits the budget, in order, `TRAJECTORIES_AT_ONCE` at a time.
    Attempts in `kept` are not played again, and finished ones go there, also when another one fails.

    All of them run in one event loop, in a separate thread: a notebook's main thread has a running one, and the
    connections of a teacher belong to the loop that they were made in.
    """
    tokenizer = load_tokenizer(config.model.path)
    renderers = [make_renderer(variant, tokenizer=tokenizer) for variant in budget_variants(config)]
    search = find_nothing
    closing = ExitStack()
    if config.agent_spec.searches:
        together = 1 if config.ordered else MAX_BATCH
        retriever = _retriever(config.retrieval, closing)
        search = BatchingRetriever(retriever, config.retrieval, max_batch=together).search

    async def attempt(i: int, question: Question) -> Group | None:
        for pause in islice(retry_pauses(), config.stream.num_attempts - 1):
            try:
                return await play(i, question)
            except ServiceFault:
                await asyncio.sleep(pause)
        return await play(i, question)

    async def play(i: int, question: Question) -> Group | None:
        group_id = f"{name}/{i}"
        renderer = drawn_variant(renderers, config, group_id)
        agent = config.agent_spec.agent(renderer, generate=generate(question, group_id), search=search)
        try:
            group = await run_group(
                question,
                agent.rollout,
                group_id=group_id,
                group_size=1,
                reward=config.reward,
                advantage=config.algorithm,
            )
        except UnfitQuestion:
            return None
        return replace(group, trajectories=[_with_one_recall(each) for each in group.trajectories])

    numbered = iter(enumerate(questions))
    known = {} if kept is None else kept.finished
    with closing, start_blocking_portal(name="demonstrations") as portal:
        while batch := list(islice(numbered, TRAJECTORIES_AT_ONCE)):
            missing, finished = [(i, question) for i, question in batch if i not in known], dict[int, Group | None]()
            try:
                error = portal.call(_attempts, attempt, missing, finished)
            finally:  # a signal may end the wait
                if kept is not None:
                    kept.add(dict(finished))
            if error is not None:
                raise error
            made = known | finished
            yield from (group for i, _ in batch if (group := made[i]) is not None)


async def _attempts(
    attempt: Callable[[int, Question], Coroutine[Any, Any, Group | None]],
    batch: Sequence[tuple[int, Question]],
    finished: dict[int, Group | None],
) -> BaseException | None:
    """Plays the questions of a batch. An attempt that has finished goes to `finished` at once, by its number. Returns
    the first error, at which the others are cancelled.
    """

    async def play(i: int, question: Question) -> None:
        finished[i] = await attempt(i, question)

    tasks = [asyncio.create_task(play(i, question)) for i, question in batch]
    if tasks:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    ended = [task for task in tasks if task.done()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return next((error for task in ended if (error := task.exception()) is not None), None)


def _retriever(config: RetrievalConfig, closing: ExitStack) -> Searcher:
    """Opens what the run's retrievers search, as they do; a client of a service is closed with `closing`."""
    if config.url:
        client = RemoteRetriever(config.url, config)
        closing.callback(client.close)
        return client
    return Retriever(config.index, mode=config.mode, encoder_path=config.encoder_path)


def _with_one_recall(trajectory: Trajectory) -> Trajectory:
    """Returns the trajectory with one right recall sample, if there is any: all of them have the same prompt."""
    return replace(trajectory, recalls=[recall for recall in trajectory.recalls if recall.score][:1])
