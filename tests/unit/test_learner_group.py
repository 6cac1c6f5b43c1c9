"""Deadlines of the learner (of an update, not of a step with many), and where its ranks meet."""

from __future__ import annotations

import os
import pickle
import socket
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, GetTimeoutError, RayTaskError

from mempipe.actors import learner_group
from mempipe.actors.learner_group import LearnerActor, LearnerGroup
from mempipe.actors.lost import EngineLost, LearnerFailed, LearnerLost
from mempipe.engines import learner
from mempipe.engines.engine_faults import EngineDead
from mempipe.engines.proof import SamplingMismatch
from mempipe.settings import ConfigError
from mempipe.stop import StopRequest


@dataclass(frozen=True)
class Call:
    """What a remote call would take and return."""

    seconds: float
    value: Any


class Rank:
    """Stands for a rank actor whose updates take the same time each."""

    def __init__(self, seconds_per_update: float) -> None:
        self._seconds = seconds_per_update

    def __getattr__(self, name: str) -> Any:
        return _Method(name, self._seconds)


@dataclass(frozen=True)
class _Method:
    name: str
    seconds: float

    def remote(self, *arguments: Any) -> Call:
        argument, *_ = arguments
        if self.name == "begin_step":
            return Call(0.0, None)
        assert self.name == "update"
        return Call(self.seconds, {"update": float(argument)})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for a call takes no time here, and fails when it would take longer than the deadline."""

    def get(calls: Sequence[Call], *, timeout: float) -> list[Any]:
        if max(call.seconds for call in calls) > timeout:
            raise GetTimeoutError("too late")
        return [call.value for call in calls]

    monkeypatch.setattr(learner_group.ray, "get", get)


def test_a_step_may_take_longer_than_the_deadline_of_its_updates(clock):
    group = LearnerGroup([Rank(20.0), Rank(25.0)], timeout_s=30.0)
    assert group.step([[[], []]] * 16) == [{"update": float(index)} for index in range(16)]


class LittleTime(StopRequest):
    """Leaves time for so many more updates."""

    def __init__(self, updates: int) -> None:
        super().__init__(30.0)
        self._updates = updates

    def leaves_time_for(self, seconds: float) -> bool:
        self._updates -= 1
        return self._updates > 0


def test_a_step_ends_between_two_updates_when_the_time_does_not_suffice(clock):
    group = LearnerGroup([Rank(20.0)], timeout_s=30.0)
    reports = group.step([[[]]] * 8, first=2, stop=LittleTime(3))
    assert [report["update"] for report in reports] == [2.0, 3.0, 4.0]


def test_an_update_that_is_late_is_named(clock):
    group = LearnerGroup([Rank(20.0), Rank(35.0)], timeout_s=30.0)
    with pytest.raises(LearnerLost, match="optimiser update 1 of 4: not all ranks finished within 30 s"):
        group.step([[[], []]] * 4)


@pytest.mark.parametrize(("chosen", "expected"), [(None, "lo"), ("eth7", "eth7")])
def test_ranks_talk_over_the_interface_of_the_nodes_address_unless_told_otherwise(monkeypatch, chosen, expected):
    monkeypatch.setattr(learner_group.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(learner, "Learner", lambda *args, **kwargs: None)
    monkeypatch.setattr(os, "environ", {} if chosen is None else {"GLOO_SOCKET_IFNAME": chosen})
    settings: Any = None
    LearnerActor().start(settings, 0, 1, ("127.0.0.1", 1))
    assert os.environ["GLOO_SOCKET_IFNAME"] == expected


def test_the_folder_of_a_run_that_a_node_does_not_see_is_refused_by_its_address(monkeypatch, tmp_path):
    """The path is there on the node of the first rank only."""
    monkeypatch.setattr(learner_group.ray.util, "get_node_ip_address", lambda: "10.0.0.7")
    monkeypatch.setattr(learner_group.ray, "get", lambda answers, **_: answers)

    class Placed:
        def __init__(self, root: Path) -> None:
            self._root = root

        @property
        def node_without(self) -> Any:
            return SimpleNamespace(remote=lambda folder: LearnerActor().node_without(self._root / folder.name))

    (tmp_path / "node0" / "run").mkdir(parents=True)
    LearnerGroup([Placed(tmp_path / "node0")], timeout_s=30.0).check_folder(Path("/runs/run"))
    with pytest.raises(ConfigError, match=r"/runs/run is not there on 10\.0\.0\.7, .* set `output`"):
        LearnerGroup([Placed(tmp_path / f"node{i}") for i in range(2)], timeout_s=30.0).check_folder(Path("/runs/run"))


def test_nobody_can_take_the_port_at_which_the_ranks_will_meet(monkeypatch):
    monkeypatch.setattr(learner_group.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    ranks = [LearnerActor(), LearnerActor()]
    address = ranks[0].listen()
    with pytest.raises(OSError, match="in use"), socket.socket() as stranger:
        stranger.bind(address)

    def meet(settings: Any, *, rank: int, listener: socket.socket | None, **_: Any) -> learner.dist.Store:
        return learner.meeting_store(rank, 2, address=address, listener=listener, timeout=timedelta(seconds=20))

    monkeypatch.setattr(learner, "Learner", meet)
    monkeypatch.setattr(os, "environ", {"GLOO_SOCKET_IFNAME": "lo"})
    settings: Any = None
    with ThreadPoolExecutor() as pool:
        for started in [pool.submit(actor.start, settings, rank, 2, address) for rank, actor in enumerate(ranks)]:
            started.result()
    stores: list[Any] = [actor._learner for actor in ranks]
    stores[0].set("said", "by rank 0")
    assert stores[1].get("said") == b"by rank 0"


class BrokenRank:
    """Stands for a rank whose every call ends with an error, but for the one that tells whether it lives."""

    def __init__(self, error: Exception, death: Exception | None) -> None:
        self._error, self._death = error, death

    def __getattr__(self, name: str) -> Any:
        return BrokenMethod(self._death if name == "address" else self._error)


@dataclass(frozen=True)
class BrokenMethod:
    raised: Exception | None

    def remote(self, *arguments: Any) -> Exception | None:
        return self.raised


def test_engines_that_computed_otherwise_are_told_by_name(monkeypatch):
    mismatch = pickle.loads(pickle.dumps(SamplingMismatch(0.3, 70, 0.05)))  # as it comes from a rank
    assert mismatch.mean == 0.3 and "70 tokens" in str(mismatch)

    def get(*_: Any, **__: Any) -> Any:
        raise RayTaskError("update", "", mismatch)

    monkeypatch.setattr(learner_group.ray, "get", get)
    monkeypatch.setattr(LearnerGroup, "_death", lambda _: None)
    with pytest.raises(SamplingMismatch, match=r"mismatch_tolerance allows 0\.05"):
        LearnerGroup([BrokenRank(None, None)], timeout_s=30.0).finish_save()


BROKEN = RayTaskError("update", "", RuntimeError("Connection closed by peer"))


WITHOUT_ENGINE = RayTaskError("open_transfer", "", ActorDiedError())
WITH_A_DEAD_ONE = RayTaskError("send_weights", "", EngineDead("its process ended")).as_instanceof_cause()


@pytest.mark.parametrize(
    ("error", "death", "kind"),
    [
        (BROKEN, ActorDiedError(), LearnerLost),
        (BROKEN, None, LearnerFailed),
        (WITHOUT_ENGINE, None, EngineLost),
        (WITH_A_DEAD_ONE, None, EngineLost),
    ],
    ids=[
        "a rank died",
        "all ranks live",
        "an engine died for which the ranks wait",
        "an engine died and its actor did not",
    ],
)
def test_an_error_of_a_rank_is_a_lost_role_when_a_rank_or_an_engine_has_died(monkeypatch, error, death, kind):
    def get(answers: Any, **_: Any) -> Any:
        for answer in answers if isinstance(answers, list) else [answers]:
            if answer is not None:
                raise answer
        return answers

    monkeypatch.setattr(learner_group.ray, "get", get)
    monkeypatch.setattr(learner_group.ray, "wait", lambda answers, **_: (answers, []))
    group = LearnerGroup([BrokenRank(error, None), BrokenRank(error, death)], timeout_s=30.0)
    with pytest.raises(LearnerFailed, match="checkpoint: ") as caught:
        group.finish_save()
    assert type(caught.value) is kind


def test_the_next_learner_of_a_rank_finds_the_memory_of_the_one_before_free(monkeypatch):
    living: weakref.WeakSet[Any] = weakref.WeakSet()

    class Learner:
        def __init__(self, settings: str, **_: Any) -> None:
            assert not living, "two models at a time"
            self.settings, self.cycle = settings, self  # as FSDP's modules refer to each other
            living.add(self)

    monkeypatch.setattr(learner_group.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(learner, "Learner", Learner)
    rank = LearnerActor()
    for settings in ("supervised", "by reward"):
        made: Any = settings
        rank.start(made, 0, 1, ("127.0.0.1", 1))
        assert [each.settings for each in living] == [settings]
