"""The first cause of a wrong answer, on trajectories made by hand: two facts, Oslo (passage a) and then Ann (b)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mempipe.evaluation.causes import Cause, first_causes
from mempipe.types import Context, EndReason, Evidence, Passage, Question, Search, Trajectory

QUESTION = Question(
    id="q",
    text="?",
    golden_answers=["Ann"],
    evidence=[Evidence(passage_id="a", value="Oslo"), Evidence(passage_id="b", value="Ann")],
)
A, B, NOTHING = ["a"], ["b"], []


def played(
    *turns: tuple[list[str] | None, str], end: EndReason = EndReason.ANSWERED, em: float = 0.0, queries: str = ""
) -> Trajectory:
    """Turns are (ids of the passages that a search returned or None without one, memory that the turn leaves)."""
    contexts, before = [], ""
    for index, (found, after) in enumerate(turns):
        passages = [Passage(id=key, title=key, text=key) for key in found or []]
        query = queries[index] if queries else str(index)
        contexts.append(
            Context(
                index=index,
                token_ids=[1, 2],
                loss_mask=[0, 1],
                logprobs=[0.0, 0.0],
                policy_versions=[-1, 0],
                num_prompt_tokens=1,
                num_question_tokens=1,
                num_memory_tokens=0,
                searches=[Search(query=query, num_passages=1, passages=passages, snapshot="s")]
                if found is not None
                else [],
                memory_before=before,
                memory_after=after,
            )
        )
        before = after
    return Trajectory(id="t", group_id="g", member=0, contexts=contexts, end_reason=end, answer="x", em=em)


@pytest.mark.parametrize(
    ("trajectory", "cause"),
    [
        (played((A, "Oslo"), (B, "Oslo Ann"), (None, "")), Cause.NOT_USED),
        (played((A, "Oslo"), (B, "Ann"), (None, "")), Cause.LOST),
        (played((A, "Oslo"), (B, "Oslo"), (None, "")), Cause.NOT_KEPT),
        (played((A, "nothing"), (B, "Ann"), (None, "")), Cause.NOT_KEPT),
        (played((A, "Oslo"), (None, "")), Cause.STOPPED_EARLY),
        (played((A, "Oslo"), (NOTHING, "Oslo"), (NOTHING, "Oslo"), end=EndReason.MAX_TURNS), Cause.NEVER_FOUND),
        (played((A, "Oslo"), (NOTHING, "Oslo"), end=EndReason.MAX_TURNS, queries="xx"), Cause.SAME_SEARCH),
        (played((A, "Oslo"), (B, "Oslo Ann"), (NOTHING, ""), end=EndReason.MAX_TURNS), Cause.LOST),
        (played((A, "Oslo"), (B, "Oslo Ann"), end=EndReason.INVALID_CALL), Cause.BROKEN_PROTOCOL),
        (played((A, "Oslo"), (B, ""), end=EndReason.BAD_MEMORY), Cause.BROKEN_PROTOCOL),
        (played((A, "Oslo"), (NOTHING, "x"), (B, "Ann"), end=EndReason.LENGTH), Cause.LOST),
        (played((A, "Oslo"), (B, "Oslo Ann"), (None, ""), em=1.0), None),
    ],
)
def test_the_first_cause_of_a_wrong_answer(trajectory, cause):
    assert first_causes(trajectory, QUESTION, growing=False) == [cause]


def test_a_passage_that_the_answering_turn_reads_is_known():
    """MEM1 answers from what it reads and writes no memory afterwards."""
    assert first_causes(played((A, "Oslo"), (B, "")), QUESTION, growing=False) == [Cause.NOT_USED]


@pytest.mark.parametrize(
    ("memories", "cause"),
    [
        (["Ann Lee born in Bergen"], Cause.CONTRADICTED),
        (["Ann Lee born in Oslo", "Ann Lee born in Bergen"], Cause.CONTRADICTED),
        (["Ann Lee born in Bergen", "Ann Lee directs"], Cause.NOT_KEPT),
        (["She is from Bergen"], Cause.NOT_KEPT),  # names nobody: it cannot be told to be about the fact
    ],
)
def test_a_memory_that_states_another_value_contradicts_its_passage(memories, cause):
    passage = Passage(id="a", title="Ann Lee", text="Ann Lee was born in Oslo.")
    turns = [*((A, memory) for memory in memories), (None, "")]
    trajectory = played(*turns)
    read = [replace(search, passages=[passage]) for search in trajectory.contexts[0].searches]
    first, *others = trajectory.contexts
    trajectory = replace(trajectory, contexts=[replace(first, searches=read), *others])
    assert first_causes(trajectory, QUESTION, growing=False) == [cause]


def test_a_history_that_grows_keeps_whatever_was_found():
    assert first_causes(played(([*A, *B], "")), QUESTION, growing=True) == [Cause.NOT_USED]
    assert first_causes(played((A, "")), QUESTION, growing=True) == [Cause.STOPPED_EARLY]
    assert first_causes(played((A, ""), end=EndReason.CONTEXT_LIMIT), QUESTION, growing=True) == [Cause.NEVER_FOUND]


def test_without_known_facts_there_is_no_cause():
    plain = Question(id="q", text="?", golden_answers=["Ann"])
    assert first_causes(played((A, "Oslo"), (None, "")), plain, growing=False) == [None]


@pytest.mark.parametrize(
    ("memories", "cause"),
    [
        (["nothing", "Ann"], Cause.NOT_KEPT),
        (["Oslo", "Ann"], Cause.LOST),
        (["Oslo", "Oslo Ann"], Cause.NOT_USED),
        (["Oslo", "Oslo"], Cause.NOT_KEPT),
    ],
)
def test_an_agent_that_reads_finds_what_stands_in_its_chunks(memories, cause):
    trajectory = played(*((None, memory) for memory in memories), (None, ""))
    chunks = ["He lives in Oslo.", "Ann lives there too.", ""]
    contexts = [replace(context, chunk=chunk) for context, chunk in zip(trajectory.contexts, chunks, strict=True)]
    assert first_causes(replace(trajectory, contexts=contexts), QUESTION, growing=False) == [cause]
