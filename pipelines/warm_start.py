"""Supervised start of the tiny model on scripted trajectories: first without mistakes, which teaches the skill, then
with many.

The script drives the same rollout loop and the same index as the model will, so what is learned is token for token what
the engine will be prompted with. Its mistakes (`mempipe.data.scripted_agents.Noise`) are what reinforcement learning
has to undo.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from mempipe.actors.launch import launch_learners, learner_settings
from mempipe.config import RunConfig
from mempipe.data.scripted_agents import NO_NOISE, Noise, ScriptedAgent
from mempipe.data.world import make_questions
from mempipe.engines.config import OptimizerConfig
from mempipe.engines.tokenizer import load_tokenizer
from mempipe.progress import Progress
from mempipe.retrieval.retriever import BatchingRetriever, Retriever
from mempipe.rl.packing import MicroBatch, pack_step
from mempipe.rl.samples import to_samples
from mempipe.rollout import make_renderer
from mempipe.runs import Run
from mempipe.settings import ConfigError
from mempipe.types import Completion, FinishReason, Question, TrainingSample, Trajectory
from mempipe.user_code import load_user_object
from pipelines.prepare import worlds

UPDATES_PER_CALL = 10
TRAJECTORIES_AT_ONCE = 256  # share the retriever's batches
MIN_ROW = 1024  # tokens that a micro-batch may always hold


def warm_start(run: Run, config: RunConfig) -> RunConfig:
    """The config with the warm-started model in `model.path`; a model that is there already is kept."""
    folder = run.folder / "warm_start"
    if not folder.exists():
        assert config.warm_start is not None, "a warm start needs its section in the config"
        updates = list(_updates(imitation_samples(config), config.warm_start.tokens_per_step))
        settings = replace(
            learner_settings(config),
            objective="sft",
            optimizer=_optimizer(config.warm_start.lr),
            num_updates=len(updates),
        )
        with launch_learners(config, settings) as learners, Progress("warm start", total=len(updates)) as progress:
            for start in range(0, len(updates), UPDATES_PER_CALL):
                batches = updates[start : start + UPDATES_PER_CALL]
                reports = learners.step([_packed(batch, config, num_ranks=len(learners.ranks)) for batch in batches])
                progress.advance(len(reports), loss=sum(report["loss"] for report in reports) / len(reports))
            learners.export(folder, source=config.model.path)
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})


def imitation_samples(config: RunConfig) -> list[TrainingSample]:
    """The contexts of the scripted trajectories, shuffled among the faultless ones and among the noisy ones, in that
    order.
    """
    assert config.world is not None and config.warm_start is not None, (
        "the script answers questions of the synthetic world"
    )
    train_worlds, _ = worlds(config)
    wanted = config.warm_start
    samples = []
    for i, (count, noise) in enumerate(
        ((wanted.num_clean_trajectories, NO_NOISE), (wanted.num_noisy_trajectories, Noise()))
    ):
        questions = make_questions(train_worlds, count, seed=config.seed + 1 + i, hops=config.world.hops)
        trajectories = asyncio.run(scripted_trajectories(questions, config, noise=noise, name=f"script-{i}"))
        part = [sample for trajectory in trajectories for sample in to_samples(replace(trajectory, advantage=1.0))]
        random.Random(config.seed).shuffle(part)
        samples += part
    return samples


async def scripted_trajectories(
    questions: Sequence[Question], config: RunConfig, *, noise: Noise, name: str, num_noted: int = 0
) -> list[Trajectory]:
    """The script's attempt at every question, through the agent's own rollout loop and the run's own index.

    Of the facts in a memory it keeps the newest `num_noted`; 0: all.
    """
    tokenizer = load_tokenizer(config.model.path)
    renderer = make_renderer(config, tokenizer=tokenizer)
    retriever = BatchingRetriever(Retriever(config.retrieval.index), config.retrieval)
    new_script = partial(scripted_agent(config), max_turns=config.budget.turn_limit, noise=noise, num_noted=num_noted)

    async def attempt(i: int, question: Question) -> Trajectory:
        script = new_script(question=question.text, seed=f"{config.seed}:{name}:{i}")

        async def generate(token_ids: Sequence[int], *, max_tokens: int) -> Completion:
            reply = [*tokenizer.encode_template(script.reply(tokenizer.decode(token_ids))), renderer.closing_id]
            return Completion(
                token_ids=reply, logprobs=[0.0] * len(reply), finish_reason=FinishReason.STOP, policy_version=0
            )

        agent = config.agent_spec.agent(renderer, generate=generate, search=retriever.search)
        return await agent.rollout(question, trajectory_id=f"{name}/{i}", group_id=f"{name}/{i}", member=0)

    trajectories: list[Trajectory] = []
    for start in range(0, len(questions), TRAJECTORIES_AT_ONCE):
        batch = questions[start : start + TRAJECTORIES_AT_ONCE]
        trajectories += await asyncio.gather(*(attempt(start + i, question) for i, question in enumerate(batch)))
    return trajectories


def scripted_agent(config: RunConfig) -> type[ScriptedAgent]:
    """The script that plays the config's agent in the synthetic world. Raises ConfigError for an agent without one."""
    if not config.agent_spec.script:
        raise ConfigError(
            f"warm_start: agent.name {config.agent.name!r} has no script that plays it (AgentSpec.script)"
        )
    return load_user_object(config.agent_spec.script, setting="AgentSpec.script")


def _optimizer(lr: float) -> OptimizerConfig:
    return OptimizerConfig(lr=lr, schedule="cosine", warmup_steps=20, min_lr_ratio=0.05, betas=(0.9, 0.98))


def _updates(samples: Sequence[TrainingSample], tokens_per_step: int) -> Iterator[list[TrainingSample]]:
    """The samples in order, cut where an update has its tokens."""
    batch: list[TrainingSample] = []
    num_tokens = 0
    for sample in samples:
        batch.append(sample)
        num_tokens += len(sample.token_ids)
        if num_tokens >= tokens_per_step:
            yield batch
            batch, num_tokens = [], 0
    if batch:
        yield batch


def _packed(samples: Sequence[TrainingSample], config: RunConfig, *, num_ranks: int) -> list[list[MicroBatch]]:
    assert config.warm_start is not None
    max_tokens = max(config.warm_start.tokens_per_step, MIN_ROW)
    return pack_step(samples, num_ranks=num_ranks, max_tokens=max_tokens, aggregation="token")
