"""Calls through a pool, with scripted replicas:
infrastructure faults are sat out (promise 8), everything else passes through.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayActorError

from mempipe.actors.lost import RoleLost
from mempipe.actors.pools import Pool, RetrieverPool, RoleUnavailable
from mempipe.faults import retry_pauses
from mempipe.retrieval.config import RetrievalConfig
from mempipe.retrieval.retriever import RetrievalError, RetrievalTimeout


class ScriptedLine:
    """Answers a request with what the script says next:
    an exception is raised, anything else returned; "hang" never answers.
    """

    def __init__(self, script: Sequence[Any]) -> None:
        self._script = list(script)
        self.num_asked = 0

    async def ask(self, *arguments: Any) -> Any:
        self.num_asked += 1
        answer = self._script.pop(0)
        if answer == "hang":
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        return answer


def pool_of(*scripts: Sequence[Any], timeout_s: float = 60.0) -> tuple[Pool, list[ScriptedLine]]:
    pool = Pool([None] * len(scripts), role="retriever", timeout_s=timeout_s)
    lines = [ScriptedLine(script) for script in scripts]
    pool._lines = lines  # type: ignore[assignment]
    return pool, lines


@pytest.fixture
def pauses(monkeypatch) -> Iterator[list[float]]:
    """The pauses that would have been made, by the pool alone: threads of other tests sleep too."""
    made: list[float] = []

    async def sleep(seconds: float) -> None:
        made.append(seconds)

    monkeypatch.setattr("mempipe.actors.pools.asyncio", SimpleNamespace(sleep=sleep, timeout=asyncio.timeout))
    yield made


FAULTS = [RayActorError(), RetrievalError("the disk is gone"), RetrievalTimeout("60 s")]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
async def test_promise_8_a_call_is_repeated_after_an_infrastructure_fault(pauses, fault):
    pool, (line,) = pool_of([fault, fault, fault, "passages"])
    assert await pool.call("query") == "passages"
    assert (line.num_asked, pool.num_retries, len(pauses)) == (4, 3, 3)
    for pause, longest in zip(pauses, (0.25, 0.5, 1.0), strict=True):
        assert longest / 2 <= pause <= longest


async def test_a_replica_that_failed_rests_while_there_is_another(pauses):
    pool, (first, second) = pool_of([RetrievalError("x")], ["a", "b", "c"])
    assert [await pool.call("query") for _ in range(3)] == ["a", "b", "c"]
    assert (first.num_asked, second.num_asked) == (1, 3)


@pytest.mark.parametrize(
    "error", [ValueError("no such partition"), RuntimeError("a bug")], ids=lambda e: type(e).__name__
)
async def test_other_errors_pass_through_at_once(pauses, error):
    pool, (line,) = pool_of([error, "never"])
    with pytest.raises(type(error), match=str(error)):
        await pool.call("query")
    assert (line.num_asked, pauses) == (1, [])


async def test_what_does_not_recover_is_told_by_its_role_and_no_pause_outlasts_the_deadline(pauses):
    pool, (line,) = pool_of([RetrievalError("the disk is gone")] * 100, timeout_s=3)
    with pytest.raises(RoleUnavailable, match=r"retriever failed and did not recover within 3 s: the disk is gone"):
        await pool.call("query")
    assert 1 < line.num_asked < 100 and max(pauses) <= 3


async def test_a_replica_that_died_for_good_gets_no_call_while_another_one_is_there(pauses):
    pool, (first, second) = pool_of([ActorDiedError()], [RetrievalError("x"), "a", "b"])
    assert [await pool.call("query") for _ in range(2)] == ["a", "b"], "also when that one has failed since"
    assert (first.num_asked, second.num_asked) == (1, 3)


async def test_when_every_replica_died_for_good_a_role_is_lost_at_once(pauses):
    pool, (first, second) = pool_of([ActorDiedError()], [ActorDiedError()])
    with pytest.raises(RoleLost, match="every retriever died: The actor died unexpectedly"):
        await pool.call("query")
    assert (first.num_asked, second.num_asked, len(pauses)) == (1, 1, 1), "no deadline is waited for"


async def test_no_answer_is_told_at_the_deadline():
    pool, _ = pool_of(["hang"], timeout_s=0.05)
    with pytest.raises(RoleUnavailable, match=r"no retriever answered within 0\.05 s"):
        await pool.call("query")
    assert pool._under_way == [0]


async def test_an_agent_that_searches_where_there_is_no_retriever_is_told_which_settings_it_needs():
    with pytest.raises(LookupError, match=r"set retrieval\.index or retrieval\.url, and .* searches=True"):
        await RetrieverPool([], config=RetrievalConfig()).search("x", num_passages=1, partition="")


def test_pauses_double_up_to_eight_seconds_and_differ_between_callers():
    first, second = (list(itertools.islice(retry_pauses(), 10)) for _ in range(2))
    for pause, longest in zip(first, [0.25, 0.5, 1, 2, 4, 8, 8, 8, 8, 8], strict=True):
        assert longest / 2 <= pause <= longest
    assert first != second
