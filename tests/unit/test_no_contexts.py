"""An attempt of a user-defined agent that answers before it asks the model: it has no context."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mempipe.agents.turn import Agent
from mempipe.answers.conversation import next_memory
from mempipe.answers.replies import answer_logprobs, usage_of
from mempipe.evaluation.memory_quality import trajectory_quality
from mempipe.evaluation.results import result_row
from mempipe.reports.traced import Traced
from mempipe.reports.transcript import write_transcript
from mempipe.types import EndReason, Evidence, Group, Question, Trajectory

QUESTION = Question(
    id="q", text="Where is it?", golden_answers=["Oslo"], evidence=[Evidence(passage_id="1", value="Oslo")]
)


@pytest.fixture
def attempt() -> Trajectory:
    end = EndReason.ANSWERED
    return Trajectory(id="after/q/0", group_id="after/q", member=0, contexts=[], end_reason=end, answer="Oslo")


class Answers(Agent):
    """Returns the reason of its end as a text, as written in Python without the enum."""

    def __init__(self, reason: str, answer: Any = "Oslo") -> None:
        self.reason, self.answer = reason, answer

    async def _run(self, question, finish):
        return self.reason, self.answer


async def test_the_reason_of_its_end_may_be_a_text_and_an_unknown_one_is_an_error():
    ids = {"trajectory_id": "t", "group_id": "g", "member": 0}
    played = await Answers("answered").rollout(QUESTION, **ids)
    assert played.end_reason is EndReason.ANSWERED
    row = result_row(Group(id="g", question=QUESTION, trajectories=[played]), growing=False, prompt_hash="p")
    assert (row.em, row.answers) == (1.0, ["Oslo"])
    with pytest.raises(ValueError, match="_run returned the reason 'done'; expected one of answered, no_action"):
        await Answers("done").rollout(QUESTION, **ids)


@pytest.mark.parametrize("answer", [42, ["Oslo"], b"Oslo", False])
async def test_an_answer_that_is_no_text_is_an_error_that_shows_it(answer):
    ids = {"trajectory_id": "t", "group_id": "g", "member": 0}
    with pytest.raises(TypeError, match=f"returned the answer {re.escape(repr(answer))}; expected a text"):
        await Answers("answered", answer).rollout(QUESTION, **ids)
    assert (await Answers("answered", "\ud800").rollout(QUESTION, **ids)).answer == "\ufffd"


@pytest.mark.parametrize("ended", ["Oslo", None, ("answered", "Oslo", 1), 3])
async def test_an_end_that_is_no_pair_is_an_error_that_shows_it(ended, monkeypatch):
    async def run(self, question, finish):
        return ended

    monkeypatch.setattr(Answers, "_run", run)
    with pytest.raises(TypeError, match=f"Answers._run returned {re.escape(repr(ended))}; expected a pair"):
        await Answers("answered").rollout(QUESTION, trajectory_id="t", group_id="g", member=0)


def decode(token_ids: object) -> str:
    return ""


def test_its_reply_has_no_tokens_and_a_session_keeps_its_answer(attempt):
    usage = usage_of([attempt], cached_tokens=0, decode=decode)
    assert (usage.total_tokens, usage.completion_tokens_details.reasoning_tokens) == (0, 0)
    assert answer_logprobs(attempt, decode) == []
    assert next_memory(QUESTION, attempt) == "Where is it? Oslo"


def test_its_answer_is_an_early_one(attempt):
    counts = trajectory_quality(attempt, QUESTION)
    assert (counts.answers, counts.early_answers, counts.memory_turns) == (1, 1, 0)


def test_its_picture_has_the_answer(attempt, tmp_path):
    write_transcript(
        tmp_path / "own.svg", [Traced(phase="after", question=QUESTION, trajectory=attempt, memory_budget=None)]
    )
    assert "Oslo (wrong)" in (tmp_path / "own.svg").read_text()


def test_its_group_began_at_no_version(attempt):
    """A run that was interrupted keeps such a group, and the run that goes on asks."""
    assert Group(id="after/q", question=QUESTION, trajectories=[attempt]).started_at is None
