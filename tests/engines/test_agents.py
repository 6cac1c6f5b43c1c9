"""Every built-in agent, and one of a user's own, on one real engine and index: its contexts are what the learner
scores, trains on and serves.

Whole runs of the agents are in tests/jobs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
import pytest_asyncio
from miniature import FEW_PROCESSES, MINIATURE, QUICKSTART

from mempipe.actors.launch import learner_settings
from mempipe.config import RunConfig
from mempipe.data.qa import read_questions
from mempipe.engines.config import SamplingConfig
from mempipe.engines.generator import Generator
from mempipe.engines.learner import Learner
from mempipe.engines.proof import check_held
from mempipe.engines.tokenizer import load_tokenizer
from mempipe.engines.weights import pack_weights
from mempipe.loader import load_config
from mempipe.retrieval.retriever import BatchingRetriever, Retriever
from mempipe.rl.packing import pack_step
from mempipe.rl.samples import to_samples
from mempipe.rollout import make_rollout, run_group
from mempipe.runs import Run
from mempipe.types import Completion, Group, SearchResult
from pipelines.prepare import prepare
from tools.processes import ROOT

GROUP_SIZE = 3
NUM_QUESTIONS = 2
TOLERANCE = 1e-3  # of log-probs
ALWAYS_TRAINED = [*FEW_PROCESSES, "algorithm.entropy_coef=0.001"]
"""Every context is trained on, whatever it earned: the model has learned nothing, so that all earn alike."""
CONTEXTS = {
    "quickstart": range(1, 7),
    "quickstart_react": [1],
    "quickstart_mem1": range(1, 7),
    "quickstart_memagent": [5],
    "tiny_memtrain": [5],
    "quickstart_full_text": [1],
    "notebook": range(1, 5),
    "compaction": range(1, 7),
    "program": range(1, 8),
}
"""By config, how many contexts an attempt may have."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(world: RunConfig) -> AsyncIterator[Generator]:
    engine = Generator(world.model, world.generation, max_model_len=world.budget.context_tokens, seed=1)
    await engine.start()
    yield engine
    await engine.shutdown()


def config_of(name: str, world: RunConfig, output: Path) -> RunConfig:
    """The config on the world's model, with its own questions and index."""
    settings = [*ALWAYS_TRAINED, f"model.path={world.model.path}", f"output={output}"]
    if name == "notebook":
        return own_agent(settings, output)
    settings += MINIATURE
    if name in ("compaction", "program"):
        folder = ROOT / "examples" / f"{name}_agent"
        if name == "compaction":
            settings += [f"agent.prompts={folder / 'tiny_prompts.yaml'}"]
        return prepare(Run(load_config(folder / "config.yaml", settings)))
    return prepare(Run(load_config(QUICKSTART.with_name(f"{name}.yaml"), settings)))


def own_agent(settings: Sequence[str], output: Path) -> RunConfig:
    """The example of an agent, a reward and a tool of a user's own, with prompts that the model has room for."""
    folder = ROOT / "examples" / "notebook_agent"
    (output / "prompts.yaml").write_text('system: ""\nuser: "{question}<notebook>{memory}</notebook>"\n')
    short = ["budget.question_tokens=160", "budget.action_tokens=24", "budget.context_tokens=512"]
    files = [f"data.train={folder / 'train.jsonl'}", f"agent.prompts={output / 'prompts.yaml'}"]
    return load_config(folder / "config.yaml", [*settings, *short, *files, "model.dtype=float32"])


async def played(config: RunConfig, engine: Generator) -> list[Group]:
    tokenizer = load_tokenizer(config.model.path)
    index = BatchingRetriever(Retriever(config.retrieval.index), config.retrieval) if config.retrieval.index else None

    async def generate(token_ids: Sequence[int], *, max_tokens: int, seed: int | None = None) -> Completion:
        stops = sorted(tokenizer.stop_token_ids)
        return await engine.generate(
            token_ids, max_tokens=max_tokens, sampling=SamplingConfig(), stop_token_ids=stops, seed=seed
        )

    async def search(query: str, *, num_passages: int, partition: str) -> SearchResult:
        assert index is not None, f"{config.agent.name} has no index"
        return await index.search(query, num_passages=num_passages, partition=partition)

    rollout = make_rollout(config, tokenizer=tokenizer, generate=generate, search=search, training=True)
    of_run = {"group_size": GROUP_SIZE, "reward": config.reward, "advantage": config.algorithm}
    questions = read_questions(config.data.train)[:NUM_QUESTIONS]
    groups = (run_group(question, rollout, group_id=f"0/{question.id}", **of_run) for question in questions)
    return await asyncio.gather(*groups)


@pytest.mark.parametrize("name", CONTEXTS)
async def test_promise_1_an_agents_contexts_are_scored_trained_on_and_served(name, engine, world, tmp_path):
    config = config_of(name, world, tmp_path)
    with closing(Learner(learner_settings(config))) as learner:
        await sync(learner, engine)
        trajectories = [trajectory for group in await played(config, engine) for trajectory in group.trajectories]
        assert len(trajectories) == NUM_QUESTIONS * GROUP_SIZE
        assert {len(trajectory.contexts) for trajectory in trajectories} <= {*CONTEXTS[name]}
        if name == "notebook":
            for trajectory in trajectories:
                assert {measure.name for measure in trajectory.measures} == {"right", "calls"}
                written = sum(len(context.action) for context in trajectory.contexts)
                assert trajectory.reward == pytest.approx(-written / 10_000), "only this reward has a price for words"
        contexts = [context for trajectory in trajectories for context in trajectory.contexts]
        for context, scores in zip(contexts, learner.score([context.token_ids for context in contexts]), strict=True):
            sampled = [i for i, bit in enumerate(context.loss_mask) if bit]
            assert sampled and sampled[0] == context.num_prompt_tokens
            recorded = [context.logprobs[i] for i in sampled]
            assert recorded == pytest.approx([scores[i - 1] for i in sampled], abs=TOLERANCE)
        samples = [sample for trajectory in trajectories for sample in to_samples(trajectory)]
        settings = {"max_tokens": config.learner.max_tokens_per_micro_batch, "num_ranks": 1}
        (batches,) = pack_step(samples, aggregation=config.algorithm.aggregation, **settings)
        (metrics,) = learner.step([batches])
        assert metrics["ratio"] == pytest.approx(1.0, abs=TOLERANCE) and metrics["grad_norm"] > 0
        await sync(learner, engine)


async def sync(learner: Learner, engine: Generator) -> None:
    version = engine.policy_version + 1
    await engine.load_weights(pack_weights(learner.served_state_dict()), version)
    check_held(await engine.held_weights(), learner.checksums(), engine="generator-0", version=version)
