"""The trajectory stream over a real Ray Data pipeline and a real retriever.
The engine is the world's script: faults can be chosen.
"""

import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from mempipe.actors.admission import Admission
from mempipe.actors.batched_calls import BatchedServer
from mempipe.actors.handles import Handle, start_actor
from mempipe.actors.lost import GroupFailed, RoleLost
from mempipe.actors.reference import ReferencePool, ReferenceStage
from mempipe.actors.retriever import RetrieverActor
from mempipe.config import RunConfig
from mempipe.data.qa import read_questions
from mempipe.data.scripted_agents import NO_NOISE, ScriptedMemSearcher
from mempipe.engines.config import SamplingConfig
from mempipe.engines.engine_faults import EngineFault
from mempipe.engines.reference import ReferenceModel
from mempipe.engines.tokenizer import load_tokenizer
from mempipe.rl.samples import to_samples
from mempipe.streams.groups import Collector, DriverSpec, GroupStage, stream_groups
from mempipe.types import Completion, EndReason, FinishReason, Group, Question
from tools.processes import command_line

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test module


GROUP_SIZE = 2
OPTIONS = {"num_cpus": 0, "max_concurrency": 1000}


class ScriptedGenerator:
    """Answers as the script would. `die_at` calls end the process, once; `slow_every` makes some calls stragglers."""

    def __init__(self, config: RunConfig, *, die_at: int = 0, marker: str = "", slow_every: int = 0):
        self._tokenizer = load_tokenizer(config.model.path)
        self._die_at, self._marker, self._slow_every = die_at, marker, slow_every
        self._max_turns = config.budget.max_turns
        self._num_calls = 0
        self._desk = BatchedServer(self.generate)
        self._fails = False
        self._policy_version = 0

    async def exchange(self, caller, requests):
        return await self._desk.exchange(caller, requests)

    async def become(self, *, policy_version: int = 0, fails: bool = False) -> None:
        """From now on it samples under that version, or fails to."""
        self._policy_version, self._fails = policy_version, fails

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
        script = ScriptedMemSearcher(question=question, max_turns=self._max_turns, noise=NO_NOISE, seed=self._num_calls)
        reply = [*self._tokenizer.encode_template(script.reply(prompt)), *stop_token_ids]
        version = self._policy_version
        return Completion(
            token_ids=reply, logprobs=[-0.1] * len(reply), finish_reason=FinishReason.STOP, policy_version=version
        )


@dataclass(frozen=True)
class Engine:
    """A scripted engine, and the file that it leaves when it dies by itself."""

    name: str
    actor: Handle
    marker: Path


@pytest.fixture(scope="module")
def steady(cluster, world, tmp_path_factory) -> Iterator[Engine]:
    """An engine that lives as long as the module, with stragglers."""
    actor = start_actor(ScriptedGenerator, {"name": "steady", **OPTIONS}, world, slow_every=7)
    yield Engine("steady", actor, tmp_path_factory.mktemp("steady") / "died")
    ray.kill(actor)


@pytest.fixture
def mortal(cluster, world, tmp_path) -> Iterator[Callable[..., Engine]]:
    """Starts an engine that dies, with stragglers."""
    actors = []

    def start(*, die_at: int, max_restarts: int) -> Engine:
        name, marker = f"mortal-{time.monotonic_ns()}", tmp_path / "died"
        options = {"name": name, "max_restarts": max_restarts, **OPTIONS}
        actors.append(start_actor(ScriptedGenerator, options, world, die_at=die_at, marker=str(marker), slow_every=3))
        return Engine(name, actors[-1], marker)

    yield start
    for actor in actors:
        ray.kill(actor)


@pytest.fixture(scope="module")
def spec(cluster, world) -> Iterator[Callable[..., DriverSpec]]:
    """Makes the specification of a driver. All of them search one retriever."""
    retriever = start_actor(RetrieverActor, {"name": "retriever", **OPTIONS}, world.retrieval)

    def make(engine: Engine, *, config: RunConfig = world, admission: str = "") -> DriverSpec:
        return DriverSpec(
            config=config,
            sampling=SamplingConfig(),
            group_size=GROUP_SIZE,
            namespace=cluster,
            generators=[engine.name],
            retrievers=["retriever"],
            admission=admission,
        )

    yield make
    ray.kill(retriever)


def rows(config: RunConfig, count: int):
    return [(f"0/{q.id}", q) for q in read_questions(config.data.train)[:count]]


def kill_newest(stage: type) -> None:
    """Kills the process of a stage of the stream; those of earlier streams may still be on their way out."""
    workers = [p for p in psutil.Process().children(recursive=True) if f"({stage.__name__})" in command_line(p)]
    max(workers, key=psutil.Process.create_time).kill()


def check_whole(groups: Sequence[Group], asked: Sequence[tuple[str, Question]]) -> None:
    """Every question came back once, as the scored group of a run in which nothing happens."""
    assert Counter(group.id for group in groups) == Counter(group_id for group_id, _ in asked)
    for group in groups:
        assert [t.member for t in group.trajectories] == [0, 1]
        assert {t.end_reason for t in group.trajectories} == {EndReason.ANSWERED}
        assert all(t.em == 1.0 and t.reward == 1.0 for t in group.trajectories), group.question
        assert len(group.trajectories[0].contexts) == group.question.num_hops + 1


def test_promises_7_and_8_an_engine_and_a_driver_that_die_lose_no_group_double_none_and_are_not_data(
    world, mortal, spec
):
    """The engine dies at its tenth call, the driver after the fifth group."""
    engine, questions = mortal(die_at=10, max_restarts=-1), rows(world, 30)
    groups: list[Group] = []
    for group in stream_groups(spec(engine), questions):
        groups.append(group)
        if len(groups) == 5:
            kill_newest(GroupStage)
    assert engine.marker.exists() and len(groups) > 5
    check_whole(groups, questions)


def test_the_reference_scores_every_finished_group_and_one_that_dies_costs_a_retry(world, steady, spec):
    questions = rows(world, 24)
    groups: list[Group] = []
    for group in stream_groups(spec(steady), questions, references=ReferencePool(size=1, options={"num_cpus": 0})):
        groups.append(group)
        if len(groups) == 1:
            kill_newest(ReferenceStage)
    check_whole(groups, questions)
    model = ReferenceModel(world.model, temperature=1.0, max_tokens=4096)
    for group in groups[-3:]:
        samples = [sample for trajectory in group.trajectories for sample in to_samples(trajectory)]
        for sample, expected in zip(samples, model.logprobs(samples), strict=True):
            assert sample.ref_logprobs == pytest.approx(expected, abs=1e-4)
            assert min(sample.ref_logprobs) < 0
    assert all(group.reference_seconds > 0 for group in groups)


def test_promise_8_a_group_that_cannot_be_finished_ends_the_run_and_is_named(world, steady, spec):
    config = world.model_copy(
        update={
            "generation": world.generation.model_copy(update={"timeout_s": 1.0}),
            "stream": world.stream.model_copy(update={"num_attempts": 2}),
        }
    )
    ray.get(steady.actor.become.remote(fails=True))
    with pytest.raises(GroupFailed, match=r"group 0/\S+ failed 2 times \(stream.num_attempts\)"):
        list(stream_groups(spec(steady, config=config), rows(world, 2)))
    ray.get(steady.actor.become.remote())


def test_promise_8_engines_that_are_dead_for_good_are_not_waited_for(world, mortal, spec):
    assert world.generation.timeout_s >= 600
    with pytest.raises(RoleLost, match="every generator died: "):
        list(stream_groups(spec(mortal(die_at=1, max_restarts=0)), rows(world, 2)))


@pytest.fixture
def admitted(world, steady, spec) -> Iterator[Callable[..., Collector]]:
    """Starts a stream of training; returns what cuts it into steps."""
    streams, actors = [], []

    def start(
        count: int, *, lag: int, groups_in_flight: int = 64, config: RunConfig = world, **settings: Any
    ) -> Collector:
        settings |= {"group_size": GROUP_SIZE, "max_off_policy_steps": lag}
        algorithm = world.algorithm.model_copy(update=settings)
        name = f"admission-{time.monotonic_ns()}"
        options = {"groups_per_step": algorithm.groups_per_step, "max_off_policy_steps": lag}
        actors.append(start_actor(Admission, {"name": name, **OPTIONS}, **options))
        stream = world.stream.model_copy(update={"groups_in_flight": groups_in_flight})
        config = config.model_copy(update={"stream": stream, "algorithm": algorithm})
        streams.append(stream_groups(spec(steady, config=config, admission=name), rows(world, count)))
        return Collector(streams[-1], actors[-1], algorithm)

    yield start
    for groups, actor in zip(streams, actors, strict=True):
        groups.close()
        ray.kill(actor)
    ray.get(steady.actor.become.remote())


def policy_versions(groups: Iterable[Group]) -> set[int]:
    return {v for g in groups for t in g.trajectories for c in t.contexts for v in c.policy_versions if v >= 0}


def test_promises_6_and_7_drivers_that_die_while_groups_wait_for_their_turn_change_no_step(world, steady, admitted):
    """Strictly on-policy. The groups that may start are played again though more than a driver plays at once are asked
    of it, and those that have to wait for them may be asked first."""
    size = 2
    collector = admitted(40, lag=0, groups_per_step=size, groups_in_flight=4)
    trained: list[str] = []
    for version in range(6):
        step = collector.next_step(version)
        assert step is not None and policy_versions(step.groups) == {version}
        trained += sorted(group.id for group in step.groups)
        if version % 2:
            kill_newest(GroupStage)
        ray.get(steady.actor.become.remote(policy_version=version + 1))
        collector.consumed(step, policy_version=version + 1)
    asked = [group_id for group_id, _ in rows(world, 6 * size)]
    assert trained == [key for i in range(0, len(asked), size) for key in sorted(asked[i : i + size])]


def test_promise_6_no_step_trains_a_group_older_than_allowed(world, steady, admitted):
    """The reward is one of the user's own, which the worker finds in the folder that the tests are started from."""
    size, lag = 3, 1
    reward = world.reward.model_copy(update={"function": "examples.notebook_agent.reward:right_and_brief"})
    collector = admitted(30, lag=lag, groups_per_step=size, config=world.model_copy(update={"reward": reward}))
    trained: list[str] = []
    for version in range(6):
        step = collector.next_step(version)
        assert step is not None and len(step.groups) == size
        assert version - min(policy_versions(step.groups)) <= lag
        trained += [group.id for group in step.groups]
        for trajectory in (trajectory for group in step.groups for trajectory in group.trajectories):
            written = sum(len(context.action) for context in trajectory.contexts)
            assert trajectory.reward == pytest.approx(-written / 10_000)
            assert {measure.name for measure in trajectory.measures} == {"right", "calls"}
        ray.get(steady.actor.become.remote(policy_version=version + 1))
        collector.consumed(step, policy_version=version + 1)
    assert len(trained) == len(set(trained)) == 6 * size


def test_groups_without_signal_are_replaced(admitted):
    """Every scripted answer is right, so no group has signal: all are dropped,
    and the stream runs dry without a step."""
    assert admitted(8, lag=0, groups_per_step=2, filter_zero_variance=True).next_step(0) is None
