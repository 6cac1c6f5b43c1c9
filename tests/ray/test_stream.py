"""The trajectory stream over a real Ray Data pipeline and a real retriever.
The engine is the world's script: faults can be chosen.
"""

import asyncio
import os
import sys
import time
from collections import Counter
from contextlib import closing

import psutil
import pytest
import ray

from mempipe.actors.admission import Admission
from mempipe.actors.batched_calls import BatchedServer
from mempipe.actors.handles import start_actor
from mempipe.actors.lost import GroupFailed, RoleLost
from mempipe.actors.reference import ReferencePool
from mempipe.actors.retriever import RetrieverActor
from mempipe.config import RunConfig
from mempipe.data.qa import read_questions
from mempipe.data.scripted_agents import NO_NOISE, Noise, ScriptedMemSearcher
from mempipe.engines.config import SamplingConfig
from mempipe.engines.engine_faults import EngineFault
from mempipe.engines.reference import ReferenceModel
from mempipe.engines.tokenizer import load_tokenizer
from mempipe.rl.samples import to_samples
from mempipe.streams.groups import Collector, DriverSpec, stream_groups
from mempipe.types import Completion, EndReason, FinishReason, Group
from tools.processes import command_line

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test module


class ScriptedGenerator:
    """Answers as the script would, or `fails`. `die_at` calls end the process; `slow_every` makes some calls
    stragglers."""

    def __init__(
        self,
        config: RunConfig,
        *,
        noise: Noise = NO_NOISE,
        fails: bool = False,
        die_at: int = 0,
        slow_every: int = 0,
        marker: str = "",
    ):
        self._fails = fails
        self._tokenizer = load_tokenizer(config.model.path)
        self._noise, self._die_at, self._slow_every, self._marker = noise, die_at, slow_every, marker
        self._max_turns = config.budget.max_turns
        self._num_calls = 0
        self._desk = BatchedServer(self.generate)
        self.policy_version = 0

    async def exchange(self, caller, requests):
        return await self._desk.exchange(caller, requests)

    async def set_version(self, version: int) -> None:
        self.policy_version = version

    async def pid(self) -> int:
        return os.getpid()

    async def generate(self, work, token_ids, max_tokens, sampling, stop_token_ids, seed) -> Completion:
        self._num_calls += 1
        if self._fails:
            raise EngineFault("the engine failed to sample")
        if self._num_calls == self._die_at and not os.path.exists(self._marker):
            open(self._marker, "w").close()
            os._exit(1)
        if self._slow_every and self._num_calls % self._slow_every == 0:
            await asyncio.sleep(0.5)
        prompt = self._tokenizer.decode(token_ids)
        question = prompt.split("user\n", 1)[1].split("\n<memory>", 1)[0].strip()
        script = ScriptedMemSearcher(
            question=question, max_turns=self._max_turns, noise=self._noise, seed=self._num_calls
        )
        reply = [*self._tokenizer.encode_template(script.reply(prompt)), *stop_token_ids]
        version = self.policy_version
        return Completion(
            token_ids=reply, logprobs=[-0.1] * len(reply), finish_reason=FinishReason.STOP, policy_version=version
        )


@pytest.fixture
def engines(cluster, world):
    """Starts named engines and a retriever; returns their specification."""
    actors = []

    def start(
        *, admission: str = "", group_size: int = 2, config: RunConfig = world, max_restarts: int = -1, **faults
    ) -> DriverSpec:
        name = f"engine-{time.monotonic_ns()}"
        options = {"num_cpus": 0, "max_concurrency": 1000}
        actors.append(
            start_actor(ScriptedGenerator, {"name": name, "max_restarts": max_restarts, **options}, config, **faults)
        )
        actors.append(start_actor(RetrieverActor, {"name": f"retriever-{name}", **options}, config.retrieval))
        return DriverSpec(
            config=config,
            sampling=SamplingConfig(),
            group_size=group_size,
            namespace=cluster,
            generators=[name],
            retrievers=[f"retriever-{name}"],
            admission=admission,
        )

    start.actors = actors
    yield start
    for actor in actors:
        ray.kill(actor)


def rows(config: RunConfig, count: int):
    return [(f"0/{q.id}", q) for q in read_questions(config.data.train)[:count]]


def test_every_question_comes_back_once_as_a_whole_scored_group(world, engines):
    questions = rows(world, 12)
    groups = list(stream_groups(engines(), questions))
    assert sorted(g.id for g in groups) == sorted(i for i, _ in questions)
    for group in groups:
        assert [t.member for t in group.trajectories] == [0, 1]
        assert {t.end_reason for t in group.trajectories} == {EndReason.ANSWERED}
        assert all(t.em == 1.0 and t.reward == 1.0 for t in group.trajectories), group.question
        assert len(group.trajectories[0].contexts) == group.question.num_hops + 1


def test_promise_8_an_engine_that_dies_is_not_data(world, engines, tmp_path):
    """The engine's process ends in the middle; its calls are repeated, and no trajectory shows a trace of it."""
    spec = engines(die_at=10, marker=str(tmp_path / "died"))
    groups = list(stream_groups(spec, rows(world, 8)))
    assert (tmp_path / "died").exists()
    assert len(groups) == 8
    assert all(t.em == 1.0 for g in groups for t in g.trajectories)


def test_promise_8_a_group_that_cannot_be_finished_ends_the_run_and_is_named(world, engines):
    config = world.model_copy(
        update={
            "generation": world.generation.model_copy(update={"timeout_s": 1.0}),
            "stream": world.stream.model_copy(update={"num_attempts": 2}),
        }
    )
    spec = engines(config=config, fails=True)
    with pytest.raises(GroupFailed, match=r"group 0/\S+ failed 2 times \(stream.num_attempts\)"):
        list(stream_groups(spec, rows(world, 2)))


def test_promise_8_engines_that_are_dead_for_good_are_not_waited_for(world, engines, tmp_path):
    spec = engines(die_at=1, marker=str(tmp_path / "died"), max_restarts=0)
    assert spec.config.generation.timeout_s >= 600
    with pytest.raises(RoleLost, match="every generator died: "):
        list(stream_groups(spec, rows(world, 2)))


def test_promise_7_a_driver_that_dies_loses_no_group_and_doubles_none(world, engines):
    spec = engines(slow_every=3)
    questions = rows(world, 30)
    seen: Counter[str] = Counter()
    killed = False
    for group in stream_groups(spec, questions):
        seen[group.id] += 1
        if len(seen) == 5 and not killed:
            killed = True
            drivers = [p for p in psutil.Process().children(recursive=True) if "MapWorker" in command_line(p)]
            max(
                drivers, key=psutil.Process.create_time
            ).kill()  # those of earlier streams may still be on their way out
    assert killed
    assert seen == Counter(i for i, _ in questions)


def test_promise_7_a_driver_that_dies_while_groups_wait_for_their_turn_stops_nothing(world, engines):
    """The groups that may start are played again though more than a driver plays at once are asked of it, and those
    that have to wait for them may be asked first."""
    name = f"admission-{time.monotonic_ns()}"
    size = 2
    admission = start_actor(
        Admission, {"name": name, "num_cpus": 0, "max_concurrency": 1000}, groups_per_step=size, max_off_policy_steps=0
    )
    algorithm = world.algorithm.model_copy(update={"groups_per_step": size, "group_size": 2, "max_off_policy_steps": 0})
    stream = world.stream.model_copy(update={"groups_in_flight": 4})
    config = world.model_copy(update={"stream": stream, "algorithm": algorithm})
    trained: list[str] = []
    with closing(stream_groups(engines(admission=name, config=config), rows(world, 40))) as groups:
        collector = Collector(groups, admission, algorithm)
        for version in range(6):
            step = collector.next_step(version)
            assert step is not None
            trained += sorted(group.id for group in step.groups)
            drivers = [p for p in psutil.Process().children(recursive=True) if "MapWorker" in command_line(p)]
            max(drivers, key=psutil.Process.create_time).kill()
            collector.consumed(step, policy_version=version + 1)
    asked = [group_id for group_id, _ in rows(world, 6 * size)]
    assert trained == [key for i in range(0, len(asked), size) for key in sorted(asked[i : i + size])]
    ray.kill(admission)


def test_the_reference_scores_every_finished_group_and_one_that_dies_costs_a_retry(world, engines):
    questions = rows(world, 24)
    seen: dict[str, Group] = {}
    killed = False
    for group in stream_groups(engines(), questions, references=ReferencePool(size=1, options={"num_cpus": 0})):
        assert group.id not in seen
        seen[group.id] = group
        if not killed:
            stages = [p for p in psutil.Process().children(recursive=True) if "ReferenceStage" in command_line(p)]
            max(stages, key=psutil.Process.create_time).kill()
            killed = True
    assert seen.keys() == {i for i, _ in questions}
    model = ReferenceModel(world.model, temperature=1.0, max_tokens=4096)
    for group in list(seen.values())[-3:]:
        samples = [sample for trajectory in group.trajectories for sample in to_samples(trajectory)]
        for sample, expected in zip(samples, model.logprobs(samples), strict=True):
            assert sample.ref_logprobs == pytest.approx(expected, abs=1e-4)
            assert min(sample.ref_logprobs) < 0
    assert all(group.reference_seconds > 0 for group in seen.values())


@pytest.mark.parametrize("lag", [0, 1])
def test_promise_6_no_step_trains_a_group_older_than_allowed(world, engines, lag):
    name = f"admission-{time.monotonic_ns()}"
    size = 3
    admission = start_actor(
        Admission,
        {"name": name, "num_cpus": 0, "max_concurrency": 1000},
        groups_per_step=size,
        max_off_policy_steps=lag,
    )
    algorithm = world.algorithm.model_copy(
        update={"groups_per_step": size, "group_size": 2, "max_off_policy_steps": lag}
    )
    groups = stream_groups(engines(admission=name, slow_every=7), rows(world, 30))
    engine = engines.actors[0]
    collector = Collector(groups, admission, algorithm)
    trained: list[str] = []
    with closing(groups):
        for version in range(6):
            step = collector.next_step(version)
            assert step is not None and len(step.groups) == size
            versions = [
                v for g in step.groups for t in g.trajectories for c in t.contexts for v in c.policy_versions if v >= 0
            ]
            assert version - min(versions) <= lag
            assert lag or set(versions) == {version}  # strictly on-policy
            trained += [group.id for group in step.groups]
            ray.get(engine.set_version.remote(version + 1))
            collector.consumed(step, policy_version=version + 1)
    assert len(trained) == len(set(trained)) == 6 * size
    ray.kill(admission)


def test_groups_without_signal_are_replaced(world, engines):
    """Every scripted answer is right, so no group has signal: all are dropped,
    and the stream runs dry without a step."""
    name = f"admission-{time.monotonic_ns()}"
    admission = start_actor(
        Admission, {"name": name, "num_cpus": 0, "max_concurrency": 1000}, groups_per_step=2, max_off_policy_steps=0
    )
    algorithm = world.algorithm.model_copy(update={"groups_per_step": 2, "group_size": 2, "filter_zero_variance": True})
    with closing(stream_groups(engines(admission=name), rows(world, 8))) as groups:
        assert Collector(groups, admission, algorithm).next_step(0) is None
    ray.kill(admission)
