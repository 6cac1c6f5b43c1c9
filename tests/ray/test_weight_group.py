"""A group of ranks and engines that loses an engine: it is formed again, and the others stay.

Store, actors, engines' front-ends, senders and receivers are real ones, on a real cluster. CPUs have no nccl, so the
communicator is a stand-in, as `silent` as nccl when a member dies, or gloo, whose other members fail at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from mempipe.actors import weight_group
from mempipe.actors.cluster import connected
from mempipe.actors.generator import GeneratorActor
from mempipe.actors.handles import start_actor
from mempipe.actors.launch import RESTARTABLE, ask_all
from mempipe.actors.learner_group import LearnerActor, LearnerGroup
from mempipe.actors.weight_group import WeightGroup
from mempipe.actors.weight_store import WeightStore
from mempipe.engines.config import GenerationConfig, ModelConfig
from mempipe.engines.engine_faults import WeightTransferFailed

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test module

FATAL = -7.0
"""The engine whose number is the difference to this weight dies of it, in the middle of receiving."""
NOTICED_S = 15.0
STARTED_S = 300.0
"""A process that imports torch and vLLM, on a busy machine."""


def on_cpus(kind: str) -> None:
    """Gives vLLM's transfer in this process a communicator that needs no GPU, and leaves its streams out."""
    from datetime import timedelta

    import torch
    from torch.distributed import PrefixStore, ProcessGroupGloo
    from vllm.distributed.utils import StatelessProcessGroup
    from vllm.distributed.weight_transfer import nccl_common, nccl_engine

    class Communicator:
        """What vLLM's PyNcclCommunicator is to its transfer. `silent`: nobody notices that another one is gone."""

        def __init__(self, host: str, port: int, rank: int, world_size: int, device: int) -> None:
            self.group = StatelessProcessGroup.create(host, port, rank, world_size)
            self.gloo: Any = None
            if kind == "gloo":
                store, limit = PrefixStore("gloo", self.group.store), timedelta(seconds=60)
                self.gloo = ProcessGroupGloo(store, rank, world_size, limit)
            self.count = 0
            self.destroyed = False

        def broadcast(self, tensor: Any, src: int) -> None:
            self.count += 1
            if self.gloo is not None:
                self.gloo.broadcast(tensor, src).wait()
            elif self.group.rank == src:
                self.group.store.set(f"sent/{self.count}", tensor.numpy().tobytes())
                others = self.group.world_size - 1
                self.until(lambda: self.group.store.add(f"got/{self.count}", 0) == others)
            else:
                self.until(lambda: self.group.store.check([f"sent/{self.count}"]))
                if not self.destroyed:
                    sent = bytearray(self.group.store.get(f"sent/{self.count}"))
                    tensor.copy_(torch.frombuffer(sent, dtype=tensor.dtype).view(tensor.shape))
                    self.group.store.add(f"got/{self.count}", 1)

        def until(self, condition: Callable[[], bool]) -> None:
            while not self.destroyed and not condition():
                time.sleep(0.01)

        def destroy(self) -> None:
            self.destroyed = True

    def produce(iterator: Any, group: Any, src: int, post_iter_func: Any, **_: Any) -> None:
        for item in iterator:
            group.broadcast(post_iter_func(item), src)

    def consume(iterator: Any, group: Any, src: int, post_unpack_func: Any, **_: Any) -> None:
        for name, (shape, dtype) in iterator:
            group.broadcast(tensor := torch.empty(shape, dtype=dtype), src)
            post_unpack_func([(name, tensor)])

    patched: Any = (nccl_common, nccl_engine, torch.accelerator)
    patched[0].stateless_init_process_group = Communicator
    patched[1].packed_nccl_broadcast_producer, patched[1].packed_nccl_broadcast_consumer = produce, consume
    patched[2].current_device_index = patched[2].synchronize = lambda: 0


class Engine:
    """Does for a `Generator` what vLLM does for the transfer, with the engine's end of it."""

    death = ""

    def __init__(self, number: int) -> None:
        import torch

        from mempipe.engines.vllm_group import GroupTransfer

        class OnCpus(GroupTransfer):
            def start_weight_update(self) -> None:
                pass

            def finish_weight_update(self) -> None:
                pass

        weights = self.weights = dict[str, Any]()

        class Model(torch.nn.Module):
            def load_weights(self, loaded: Any) -> None:
                for name, tensor in loaded:
                    if tensor.flatten()[0].item() == FATAL + number:
                        os.kill(os.getpid(), signal.SIGKILL)
                    weights[name] = tensor.clone()

        alone = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
        settings: Any = SimpleNamespace(parallel_config=alone, model_config=None)
        config: Any = None
        self.transfer = OnCpus(config, settings, torch.device("cpu"), Model())
        self.died: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def collective_rpc(self, method: str, **arguments: Any) -> list[Any]:
        if method == "init_weight_transfer_engine":
            info = self.transfer.parse_init_info(arguments["init_info"])
            call = partial(self.transfer.init_transfer_engine, info)
        else:
            call = partial(getattr(self.transfer, method), *arguments.values())
        return [await asyncio.to_thread(call)]

    async def set_weight_version(self, version: str) -> None:
        pass

    async def reset_prefix_cache(self, *, running: bool) -> bool:
        return True


class EngineActor(GeneratorActor):
    """A real one whose vLLM is `Engine`."""

    def __init__(self, kind: str, number: int) -> None:
        on_cpus(kind)
        super().__init__(
            model=ModelConfig(),
            config=GenerationConfig(),
            context_tokens=8,
            seed=0,
            number=number,
            store="weights",
            transfer="nccl",
        )
        generator: Any = self._engine

        async def start() -> None:
            generator._engine = Engine(number)

        async def score(token_ids: Any) -> list[float]:
            return [tensor.sum().item() for tensor in generator._live().weights.values()]

        generator.start, generator.score = start, score

    async def pid(self) -> int:
        return os.getpid()


class Rank(LearnerActor):
    """A real one whose learner is four weights."""

    def __init__(self, kind: str) -> None:
        on_cpus(kind)
        import torch

        model = torch.nn.ParameterDict({f"w{i}": torch.zeros(3) for i in range(4)})
        self._learner: Any = SimpleNamespace(policy=SimpleNamespace(lm=model), dtype=torch.float32, rank=0)

    def hold(self, value: float) -> None:
        for parameter in self._learner.policy.lm.values():
            parameter.data.fill_(value)

    def pid(self) -> int:
        return os.getpid()


class Placed:
    """A group on a cluster."""

    def __init__(self, kind: str) -> None:
        self.store = start_actor(WeightStore, {"name": "weights", "num_cpus": 0})
        options = RESTARTABLE | {"num_cpus": 0}
        self.engines = {f"generator-{i}": start_actor(EngineActor, options, kind, i) for i in range(2)}
        self.ranks = [start_actor(Rank, {"num_cpus": 0}, kind)]
        self.learners = LearnerGroup(self.ranks, timeout_s=STARTED_S)
        ray.get([engine.ready.remote() for engine in self.engines.values()])
        self.group = WeightGroup(
            self.learners,
            self.engines,
            self.store,
            tensor_parallel=1,
            ask=partial(ask_all, self.engines, timeout_s=STARTED_S),
        )

    def pids(self) -> list[int]:
        return ray.get([actor.pid.remote() for actor in [*self.engines.values(), *self.ranks]])

    def hold(self, value: float) -> None:
        """Makes the ranks train until their weights have this value."""
        self.group.hold()
        ray.get([rank.hold.remote(value) for rank in self.ranks])

    def served(self, number: int) -> float | None:
        """The value that an engine serves; None while it serves nothing."""
        try:
            sums = ray.get(self.engines[f"generator-{number}"].score.remote([1, 2]))
        except (ray.exceptions.RayActorError, WeightTransferFailed):
            return None
        assert len(set(sums)) == 1, sums
        return sums[0] / 3

    def kill(self, number: int) -> None:
        psutil.Process(self.pids()[number]).kill()

    def until_served(self, number: int) -> float | None:
        deadline = time.monotonic() + STARTED_S
        while (value := self.served(number)) is None and time.monotonic() < deadline:
            time.sleep(0.1)
        return value

    def close(self) -> None:
        self.group.close()
        for actor in [*self.engines.values(), *self.ranks, self.store]:
            ray.kill(actor)


@pytest.fixture(scope="module", params=["silent", pytest.param("gloo", marks=pytest.mark.jobs)])
def placed(request: pytest.FixtureRequest) -> Iterator[Placed]:
    with connected("", name="groups"):
        placed = Placed(request.param)
        placed.hold(1.0)
        placed.group.send(1)
        yield placed
        placed.close()


@pytest.mark.jobs
def test_an_engine_that_dies_while_it_samples_gets_the_weights_of_the_ranks_and_nobody_else_starts_again(placed):
    assert placed.served(0) == placed.served(1) == 1.0
    before = placed.pids()
    placed.kill(0)
    assert placed.until_served(0) == placed.served(1) == 1.0
    after = placed.pids()
    assert after[0] != before[0] and after[1:] == before[1:]
    assert ray.get([engine.ready.remote() for engine in placed.engines.values()]) == [1, 1]


def test_an_engine_that_dies_while_it_receives_is_replaced_within_the_sync(placed, monkeypatch):
    """With `silent`, the rank and the other engine would wait for it for ever."""
    before, noticed = placed.pids(), []

    def say(text: str) -> None:
        noticed.append(time.monotonic())
        if len(noticed) == 1:  # what is sent next is harmless
            assert "is waited for" in text
            placed.ranks[0].hold.remote(2.0)

    monkeypatch.setattr(weight_group, "say", say)
    placed.hold(FATAL + 1)
    started = time.monotonic()
    placed.group.send(2)
    assert noticed[0] - started < NOTICED_S
    assert placed.served(0) == placed.served(1) == 2.0
    after = placed.pids()
    assert after[1] != before[1] and [after[0], after[2]] == [before[0], before[2]]


@pytest.mark.jobs
def test_an_engine_that_dies_while_the_ranks_train_waits_for_the_next_sync(placed):
    placed.hold(3.0)
    before = placed.pids()
    placed.kill(0)
    time.sleep(2 * weight_group.LOOK_EVERY_S)
    with pytest.raises((WeightTransferFailed, ray.exceptions.RayActorError)):
        ray.get(placed.engines["generator-0"].score.remote([1, 2]))
    placed.group.send(3)
    assert placed.served(0) == placed.served(1) == 3.0
    assert placed.pids()[1:] == before[1:]
