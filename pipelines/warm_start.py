"""Supervised start of the tiny model: drills until copying has formed, then scripted trajectories with mistakes on purpose.

The script drives the same rollout loop as the model will, so what is learned is token for token what the engine will be prompted
with. Its mistakes (`mempipe.data.world.Noise`) are what reinforcement learning has to undo.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from mempipe.actors.launch import launch_learners, learner_settings
from mempipe.actors.learner_group import LearnerGroup
from mempipe.agents import make_agent
from mempipe.agents.protocol import Tokenizer
from mempipe.config import OptimizerConfig, RunConfig, WarmStartConfig
from mempipe.data.qa import read_questions
from mempipe.data.world import Drill, ScriptedPolicy, drills, make_questions
from mempipe.engines.retrieval import BatchingRetriever, Retriever
from mempipe.engines.tokenizer import load_tokenizer
from mempipe.progress import Progress
from mempipe.rl.packing import MicroBatch, pack_step
from mempipe.rl.samples import to_samples
from mempipe.runs import Run
from mempipe.types import Completion, FinishReason, Question, TrainingSample, Trajectory
from pipelines.prepare import worlds

UPDATES_PER_CALL = 20
TRAJECTORIES_AT_ONCE = 256  # share the retriever's batches
MIN_ROW = 1024  # tokens that a micro-batch may always hold
GATE_WINDOW = 40  # updates whose mean loss is compared with the gate


def warm_start(run: Run, config: RunConfig) -> RunConfig:
    """The config with the warm-started model in `model.path`."""
    folder = run.folder / "warm_start"
    if not folder.exists():
        settings = config.warm_start
        assert settings is not None, "a warm start needs its section in the config"
        optimizer = OptimizerConfig(lr=settings.lr, schedule="cosine", warmup_steps=40, betas=(0.9, 0.98), min_lr_ratio=0.05)
        tokenizer = load_tokenizer(config.model.path)
        with launch_learners(config, learner_settings(config) | {"optimizer": optimizer, "objective": "sft"}) as learners:
            drill(learners, tokenizer, config, settings)
            imitate(learners, tokenizer, config, settings)
            learners.export(folder, source=config.model.path)
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})


def drill(learners: LearnerGroup, tokenizer: Tokenizer, config: RunConfig, settings: WarmStartConfig) -> None:
    """Exercises without mistakes until their loss passes the gate: from then on the model can copy what it reads."""
    train_worlds, _ = worlds(config)
    samples = (
        drill_sample(d, tokenizer, i) for i, d in enumerate(islice(drills(train_worlds, seed=config.seed), settings.max_drill_samples))
    )
    recent: deque[float] = deque(maxlen=GATE_WINDOW)
    mean = float("inf")
    with Progress("drill", total=settings.max_drill_samples) as progress:
        for call in _calls(samples, config, settings.tokens_per_step):
            reports = learners.step(call.updates)
            recent.extend(report["loss"] for report in reports)
            mean = sum(recent) / len(recent)
            progress.advance(call.num_samples, loss=mean, gate=settings.drill_loss_gate)
            if len(recent) == GATE_WINDOW and mean < settings.drill_loss_gate:
                return
    progress.note(f"the drill's loss {mean:.2f} did not reach warm_start.drill_loss_gate {settings.drill_loss_gate:g}; going on without")


def imitate(learners: LearnerGroup, tokenizer: Tokenizer, config: RunConfig, settings: WarmStartConfig) -> None:
    """One pass over the scripted trajectories."""
    train_worlds, _ = worlds(config)
    hops = sorted({question.num_hops for question in read_questions(config.data.train)})
    questions = make_questions(train_worlds, settings.num_trajectories, seed=config.seed + 1, hops=hops)
    trajectories = asyncio.run(scripted_trajectories(questions, tokenizer, config))
    samples = [sample for trajectory in trajectories for sample in to_samples(replace(trajectory, advantage=1.0))]
    random.Random(config.seed).shuffle(samples)
    with Progress("imitate", total=len(samples)) as progress:
        for call in _calls(samples, config, settings.tokens_per_step):
            reports = learners.step(call.updates)
            progress.advance(call.num_samples, loss=sum(report["loss"] for report in reports) / len(reports))


async def scripted_trajectories(questions: Sequence[Question], tokenizer: Tokenizer, config: RunConfig) -> list[Trajectory]:
    """The script's attempt at every question, through the agent's own rollout loop and the run's own index."""
    retriever = BatchingRetriever(Retriever(config.retrieval.index), config.retrieval)
    (stop_id,) = sorted(tokenizer.stop_token_ids)

    async def attempt(i: int, question: Question) -> Trajectory:
        policy = ScriptedPolicy(question=question.text, max_turns=config.budget.max_turns, seed=f"{config.seed}:{i}")

        async def generate(token_ids: Sequence[int], *, max_tokens: int) -> Completion:
            reply = [*tokenizer.encode_template(policy.reply(tokenizer.decode(token_ids))), stop_id]
            return Completion(token_ids=reply, logprobs=[0.0] * len(reply), finish_reason=FinishReason.STOP, policy_version=0)

        agent = make_agent(config, tokenizer=tokenizer, generate=generate, search=retriever.search)
        return await agent.rollout(question, trajectory_id=f"script/{i}", group_id=f"script/{i}", member=0)

    trajectories = []
    for start in range(0, len(questions), TRAJECTORIES_AT_ONCE):
        batch = questions[start : start + TRAJECTORIES_AT_ONCE]
        trajectories += await asyncio.gather(*(attempt(start + i, question) for i, question in enumerate(batch)))
    return trajectories


def drill_sample(exercise: Drill, tokenizer: Tokenizer, index: int) -> TrainingSample:
    """One exercise as a chat of one user message and the assistant's reply, which is in the loss, stop token included."""
    chat = tokenizer.render_chat([{"role": "user", "content": exercise.user}], add_generation_prompt=True)
    prompt = tokenizer.encode_template(chat + exercise.opening)
    reply = [*tokenizer.encode_template(exercise.reply), *sorted(tokenizer.stop_token_ids)]
    num_tokens = len(prompt) + len(reply)
    return TrainingSample(
        trajectory_id=f"drill/{index}",
        group_id=f"drill/{index}",
        context_index=0,
        token_ids=[*prompt, *reply],
        loss_mask=[0] * len(prompt) + [1] * len(reply),
        logprobs=[0.0] * num_tokens,
        policy_versions=[0] * num_tokens,
        advantage=1.0,
        num_contexts=1,
        trajectory_tokens=len(reply),
    )


@dataclass(frozen=True)
class _Call:
    """A few optimiser updates that go to the learner together."""

    updates: list[list[list[MicroBatch]]]
    num_samples: int


def _calls(samples: Iterable[TrainingSample], config: RunConfig, tokens_per_step: int) -> Iterator[_Call]:
    """The samples in order, cut into updates of about `tokens_per_step` tokens, several updates a call."""
    remaining = iter(samples)
    while True:
        batches = [batch for _ in range(UPDATES_PER_CALL) if (batch := _take(remaining, tokens_per_step))]
        if not batches:
            return
        updates = [
            pack_step(b, num_ranks=config.learner.num_ranks, max_tokens=max(tokens_per_step, MIN_ROW), aggregation="token") for b in batches
        ]
        yield _Call(updates, sum(map(len, batches)))


def _take(samples: Iterator[TrainingSample], num_tokens: int) -> list[TrainingSample]:
    taken: list[TrainingSample] = []
    while num_tokens > 0 and (sample := next(samples, None)) is not None:
        taken.append(sample)
        num_tokens -= len(sample.token_ids)
    return taken
