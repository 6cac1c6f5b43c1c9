"""The stage that plays rows of groups, with a driver whose groups end when they are told to."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from mempipe.data.trajectories import table_to_groups
from mempipe.streams import groups as stream
from mempipe.streams.groups import QUESTION_ROW, GroupStage
from mempipe.types import Group, Question, to_row

IN_FLIGHT = 4


class Driver:
    """Plays a group until it is ended."""

    def __init__(self, _: Any) -> None:
        self.playing: dict[str, asyncio.Event] = {}

    async def play(self, group_id: str, question: Question) -> Group:
        self.playing[group_id] = asyncio.Event()
        await self.playing[group_id].wait()
        del self.playing[group_id]
        return Group(id=group_id, question=question, trajectories=[])

    async def end(self, *group_ids: str) -> None:
        for group_id in group_ids:
            self.playing[group_id].set()
        await settled()


async def settled() -> None:
    """Lets tasks run until all of them wait; counted in turns of the loop, since a busy machine has no other clock."""
    for _ in range(100):
        await asyncio.sleep(0)


@pytest.fixture
def stage(monkeypatch) -> GroupStage:
    monkeypatch.setattr(stream, "Driver", Driver)
    spec: Any = SimpleNamespace(
        admission="", config=SimpleNamespace(stream=SimpleNamespace(groups_in_flight=IN_FLIGHT))
    )
    return GroupStage(spec)


def row(position: int, *group_ids: str) -> pa.Table:
    groups = [
        {"group_id": name, "question": to_row(Question(id=name, text="?", golden_answers=["x"]))} for name in group_ids
    ]
    return pa.Table.from_pylist([{"position": position, "groups": groups}], schema=QUESTION_ROW)


async def played(stage: GroupStage, table: pa.Table) -> list[str]:
    return [group.id async for each in stage(table) for group in table_to_groups(each)]


async def test_the_next_row_takes_the_places_that_a_slow_group_leaves(stage):
    driver: Any = stage._driver
    rows = [row(0, "a", "b", "c", "d"), row(4, "e", "f", "g", "h")]
    tasks = [asyncio.create_task(played(stage, each)) for each in rows]
    await settled()
    assert sorted(driver.playing) == ["a", "b", "c", "d"]
    await driver.end("b", "d")
    assert sorted(driver.playing) == ["a", "c", "e", "f"]
    await driver.end("e")
    assert sorted(driver.playing) == ["a", "c", "f", "g"]
    await driver.end("c", "f", "g")
    await driver.end("a", "h")
    assert await asyncio.gather(*tasks) == [["a", "b", "c", "d"], ["e", "f", "g", "h"]]


async def test_a_row_leaves_in_blocks_of_several_groups_however_they_finish(stage):
    names = ["a", "b", "c", "d", "e", "f"]

    async def blocks() -> list[list[str]]:
        return [[group.id for group in table_to_groups(each)] async for each in stage(row(0, *names))]

    task = asyncio.create_task(blocks())
    await settled()
    driver: Any = stage._driver
    for name in ("d", "b", "c", "f", "a", "e"):
        await driver.end(name)
    assert await task == [["a", "b", "c", "d"], ["e", "f"]]
