"""Roles on a local cluster that declares GPUs which it does not have.
Stub roles record where they are and which GPUs they see."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray

from mempipe.actors import launch as launching
from mempipe.actors import reservation
from mempipe.actors.cluster import _start_node
from mempipe.actors.handles import start_actor
from mempipe.actors.launch import Roles, launch, learner_settings
from mempipe.actors.standing import StandingActors, launch_rollout_actors
from mempipe.config import RunConfig
from mempipe.engines.learner_settings import LearnerSettings
from mempipe.engines.tiny import build_model, build_tokenizer
from mempipe.engines.weights import WeightHandle
from mempipe.environment import EVERY_PROCESS
from mempipe.loader import load_config
from mempipe.planning.capacity import GIB
from mempipe.settings import ConfigError
from mempipe.streams.pools import StagePool, stream_tables

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test module

NUM_GPUS = 8
SHAPE = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
CONFIGS = Path(__file__).parents[2] / "jobs" / "configs"


class Stub:
    """A role that answers at once and says where it is."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._kwargs = kwargs
        self._events: list[Any] = []

    async def where(self) -> dict[str, Any]:
        """GPUs that this process may use, whether it lies in a placement group, and the engine's settings."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return {
            "gpus": None if visible is None else [gpu for gpu in visible.split(",") if gpu],
            "grouped": ray.util.get_current_placement_group() is not None,
            "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
            "events": self._events,
            **{key: self._kwargs[key] for key in ("transfer", "sleeps") if key in self._kwargs},
        }

    async def ready(self) -> int:
        return 0

    async def begin(self, weights: WeightHandle | None, seed: int) -> None:
        self._events.append(("begin", weights and weights.update_info["path"], seed))

    async def shutdown(self) -> None:
        pass

    async def address(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    async def listen(self) -> tuple[str, int]:
        return await self.address()

    async def node_without(self, folder: Path) -> str:
        return ""

    async def start(self, settings: LearnerSettings, *args: Any) -> None:
        self._events.append(("start", settings.objective, settings.model.path))

    async def open_transfer(self, engines: Any, tensor_parallel: int, address: Any, backend: str) -> None:
        self._events.append((len(engines), tensor_parallel, backend))

    async def sleep(self) -> None:
        self._events.append("sleep")

    async def begin_step(self, updates: Any, first: int) -> None:
        self._events.append("step")

    async def update(self, index: int) -> dict[str, float]:
        return {}

    async def release_memory(self) -> None:
        self._events.append("release")


@pytest.fixture(scope="module")
def gpu_cluster() -> Iterator[None]:
    """One node that declares eight GPUs."""
    os.environ.update(EVERY_PROCESS)
    options = {"num_gpus": NUM_GPUS, "num_cpus": 4, "object_store_memory": 256 * 2**20, "namespace": "placement"}
    options |= {"include_dashboard": False, "_node_ip_address": "127.0.0.1", "log_to_driver": False}
    _start_node(options, metrics=False)  # and again where the machine is so busy that Ray gives the first one up
    yield
    ray.shutdown()


@contextmanager
def stubs(gpus: int) -> Iterator[None]:
    """Stub roles, on the first `gpus` GPUs of the cluster, of 79 GiB each."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("LearnerActor", "GeneratorActor", "RetrieverActor"):
            patch.setattr(launching, name, Stub)
        (node,) = reservation.cluster_gpus()
        patch.setattr(launching, "cluster_gpus", lambda: {node: gpus})
        patch.setattr(launching, "smallest_gpu", lambda _: 79 * GIB)
        yield


def settings(name: str = "quickstart", *overrides: str) -> RunConfig:
    return load_config(CONFIGS / f"{name}.yaml", ["retrieval.index=x", *overrides])


def places(actors: list[Any]) -> list[dict[str, Any]]:
    return ray.get([actor.where.remote() for actor in actors])


def gpus_of(actors: list[Any]) -> list[list[str]]:
    return [place["gpus"] for place in places(actors)]


class WithGpu:
    """A stage of a stream that says which GPUs it sees."""

    def __call__(self, batch: pa.Table) -> pa.Table:
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return batch.append_column("gpus", pa.array([gpus] * len(batch)))


def streamed(options: Mapping[str, Any]) -> list[pa.Table]:
    """Five rows that went through a pool of one actor with these resources."""

    def read() -> Iterator[pa.Table]:
        yield from (pa.table({"number": [number], "rows": [["a", "b"]]}) for number in range(5))

    return list(stream_tables(read, [StagePool(stage=WithGpu, arguments=[], size=1, options=options)], rows="numbers"))


def reference_gpus(roles: Roles) -> list[list[str]]:
    """Where Ray Data starts the reference model."""
    assert roles.references is not None and roles.references.size == 1
    (gpus,) = {table["gpus"][0].as_py() for table in streamed(roles.references.options)}
    return [gpus.split(",")]


@contextmanager
def launched(gpus: int, config: RunConfig) -> Iterator[Roles]:
    with stubs(gpus), launch(config, "placement") as roles:
        roles.load_policy(config.model)
        yield roles


def test_with_gpus_enough_every_role_has_its_own_and_nobody_else_sees_any(gpu_cluster):
    with launched(4, settings()) as roles:
        ranks, engines = gpus_of(roles.learners.ranks), gpus_of([*roles.generators.values()])
        taken = [gpu for gpus in (*ranks, *engines, *reference_gpus(roles)) for gpu in gpus]
        assert [len(gpus) for gpus in (*ranks, *engines)] == [1, 1, 1]
        assert len(set(taken)) == len(taken) == 4
        assert gpus_of([*roles.retrievers.values()]) == [[]]  # not None: it would see all of them
        assert all(place["allocator"] == "expandable_segments:True" for place in places(roles.learners.ranks))
        assert places(roles.learners.ranks)[0]["events"][1:] == [(1, 1, "nccl")]
        assert places([*roles.generators.values()])[0]["transfer"] == "nccl"


def test_on_three_gpus_the_reference_is_with_a_rank(gpu_cluster):
    with launched(3, settings()) as roles:
        assert reference_gpus(roles)[0] in gpus_of(roles.learners.ranks)
        assert gpus_of([*roles.generators.values()])[0] not in gpus_of(roles.learners.ranks)


@pytest.mark.parametrize("gpus", [1, 2])
def test_on_few_gpus_a_rank_and_an_engine_share_each_one(gpu_cluster, gpus):
    with launched(gpus, settings("quickstart", "model.path=Qwen/Qwen2.5-0.5B-Instruct")) as roles:
        ranks, engines = gpus_of(roles.learners.ranks), gpus_of([*roles.generators.values()])
        assert ranks == engines and len({gpu for (gpu,) in ranks}) == len(ranks) == gpus
        assert reference_gpus(roles)[0] in ranks
        assert roles.config.learner.num_ranks == roles.config.generation.num_replicas == gpus
        assert places(roles.learners.ranks)[0]["events"][1:] == [(gpus, 1, "ipc")]
        assert places(roles.learners.ranks)[0]["allocator"] == ""  # handles of such memory cannot be passed


def test_engines_sleep_while_a_learner_that_needs_their_memory_works(gpu_cluster):
    config = settings("memsearcher_qwen2.5-3b")
    with launched(1, config) as roles:
        (rank,), (engine,) = roles.learners.ranks, [*roles.generators.values()]
        assert places([engine])[0]["sleeps"]
        roles.learn([[[]]])
        assert places([engine])[0]["events"] == ["sleep"]
        assert places([rank])[0]["events"][2:] == ["step", "release"]
    with launched(8, config) as roles:
        roles.learn([[[]] * 4])
        assert all(place["events"] == [] and not place["sleeps"] for place in places([*roles.generators.values()]))


def test_an_engine_of_several_gpus_sees_them_all(gpu_cluster):
    config = settings("quickstart", "generation.tensor_parallel=4")
    with launched(8, config) as roles:
        ((*found,),) = gpus_of([*roles.generators.values()])
        assert len(set(found)) == 4 and not {*found} & {gpu for (gpu,) in gpus_of(roles.learners.ranks)}
        assert places(roles.learners.ranks)[0]["events"][1:] == [(1, 4, "nccl")]


def test_an_engine_of_several_shared_gpus_sees_those_of_as_many_ranks(gpu_cluster):
    """Ray counts 0.8 of a GPU for each rank, so that no two have the same one, and none for an engine."""
    config = settings(
        "memsearcher_qwen2.5-3b",
        "placement=colocated",
        "generation.tensor_parallel=2",
        "learner.num_ranks=6",
        "reference.num_replicas=2",
    )
    with launched(6, config) as roles:
        ranks, engines = gpus_of(roles.learners.ranks), gpus_of([*roles.generators.values()])
        assert [len(gpus) for gpus in engines] == [2, 2, 2] and len({gpu for (gpu,) in ranks}) == 6
        assert [{*gpus} for gpus in engines] == [{*ranks[i], *ranks[i + 1]} for i in (0, 2, 4)]
        assert all(place["grouped"] for place in places([*roles.generators.values()]))
        assert places(roles.learners.ranks)[0]["events"][1:] == [(3, 2, "ipc")]
        assert roles.references is not None and roles.references.size == 2
        (first,), (second,) = gpus_of([start_actor(Stub, roles.references.options) for _ in range(2)])
        assert first != second and {first, second} <= {gpu for (gpu,) in ranks}


def test_what_a_run_does_before_it_trains_is_done_by_the_same_roles(gpu_cluster):
    """The ranks are given two models one after the other, and then, once, their connection with the engines."""
    config = settings("memsearcher_qwen2.5-3b")
    with stubs(1), launch(config, "placement") as roles:
        (rank,), (engine,) = roles.learners.ranks, [*roles.generators.values()]
        supervised = replace(learner_settings(config), objective="sft")
        roles.start_learner(supervised)
        roles.put_engines_to_sleep()
        assert places([engine])[0]["events"] == ["sleep"]
        assert places([rank])[0]["events"] == [("start", "sft", config.model.path)]
        roles.load_policy(config.model.model_copy(update={"path": "supervised"}))
        assert places([rank])[0]["events"][1:] == [("start", "policy", "supervised"), (1, 1, "ipc")]
        assert roles.config.model.path == "supervised"  # what drivers and references load


def test_vectors_have_gpus_of_their_own(gpu_cluster):
    config = settings("quickstart", "retrieval.num_gpus=2")
    with stubs(8), launch_rollout_actors(config, "placement") as actors:
        (holder,) = gpus_of([*actors.retrievers.values()])
        assert len(holder) == 2 and not {*holder} & {*gpus_of([*actors.generators.values()])[0]}


def test_actors_stay_as_long_as_they_fit_the_next_agent(gpu_cluster, tmp_path):
    """On one GPU, so that an engine can only start in the seat of the one before."""
    first, second = (str(tmp_path / name) for name in ("first", "second"))
    for folder in map(Path, (first, second)):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(dict.fromkeys(SHAPE, 8)))
        (folder / "model.safetensors").write_text(folder.name)
    with stubs(1), StandingActors("placement") as standing:

        def serve(*overrides: str, fails: bool = False) -> tuple[list[Any], list[Any], Any]:
            config = settings("quickstart", "budget.context_tokens=512", f"model.path={first}", *overrides)
            with suppress(OSError), standing.serving(config) as actors:
                engines, retrievers = [*actors.generators.values()], [*actors.retrievers.values()]
                last = places(engines)[0]["events"][-1]
                if fails:
                    raise OSError
            return engines, retrievers, last

        engines, retrievers, begun = serve()
        assert begun == ("begin", None, 1)
        assert serve("seed=7") == (engines, retrievers, ("begin", None, 7))
        assert serve(f"model.path={second}") == (engines, retrievers, ("begin", second, 1))
        assert serve("budget.context_tokens=480") == (engines, retrievers, ("begin", first, 1))
        longer, same, begun = serve("budget.context_tokens=1024")
        assert longer != engines and same == retrievers and begun == ("begin", None, 1)
        unnamed, same, begun = serve("model.path=owner/model")  # whose files are not here
        assert unnamed != longer and same == retrievers and begun == ("begin", None, 1)
        engines, _, _ = serve(fails=True)
        others, new, _ = serve()
        assert others != engines and new != retrievers
        same, newest, _ = serve("retrieval.timeout_s=7")
        assert same == others and newest != new


def test_what_a_stream_computes_on_gpus_comes_row_by_row(gpu_cluster):
    """References score and encoders encode in pools of Ray Data, which lays down rules of its own for GPUs."""
    for options in ({"num_cpus": 0, "num_gpus": 0.25}, {"num_cpus": 1, "num_gpus": 1}):
        tables = streamed(options)
        assert [len(table) for table in tables] == [1] * 5
        assert sorted(table["number"][0].as_py() for table in tables) == list(range(5))
        assert all(table["gpus"][0].as_py() for table in tables)


def test_nothing_is_left_behind(gpu_cluster):
    with launched(4, settings()):
        pass
    deadline = time.monotonic() + 120
    while ray.available_resources().get("GPU", 0) < NUM_GPUS and time.monotonic() < deadline:
        time.sleep(0.2)
    assert ray.available_resources()["GPU"] == NUM_GPUS


def test_more_gpus_than_the_cluster_has_are_refused_with_the_setting(gpu_cluster):
    with (
        pytest.raises(ConfigError, match=r"need 4 GPUs .* but the cluster has 1; lower learner.num_ranks"),
        launched(1, settings("quickstart", "placement=separate")),
    ):
        pass


def test_an_actor_sees_the_gpus_it_was_given_and_one_without_gpus_none(gpu_cluster):
    actors = [start_actor(Stub, {"num_cpus": 0, "num_gpus": count}) for count in (0, 1, 1, 0)]
    first, *given, last = gpus_of(actors)
    for actor in actors:
        ray.kill(actor)
    assert first == last == [] and len(set(map(tuple, given))) == 2 and [len(gpus) for gpus in given] == [1, 1]


def test_gpus_that_torch_cannot_use_are_refused_with_the_reason(gpu_cluster):
    """These ones do not exist, so torch finds none."""
    with (
        pytest.raises(ConfigError, match=r"counts 8 GPUs for Ray, but torch \S+ is built without CUDA; install"),
        launch(settings(), "placement"),
    ):
        pass


@pytest.mark.jobs
def test_a_tensor_parallel_engine_starts_inside_a_placement_group(gpu_cluster, tmp_path, monkeypatch):
    """A real one, whose two workers happen to run on CPUs."""
    monkeypatch.setattr(launching, "smallest_gpu", lambda _: None)
    build_tokenizer(tmp_path)
    build_model(tmp_path, seed=1)
    config = settings("quickstart", "generation.tensor_parallel=2", f"model.path={tmp_path}").model_copy(
        update={"retrieval": RunConfig().retrieval}
    )
    with launch_rollout_actors(config, "placement") as actors:
        (engine,) = actors.generators.values()
        scores = ray.get(engine.score.remote([5, 6, 7]))
    assert len(scores) == 2 and all(score < 0 for score in scores)
