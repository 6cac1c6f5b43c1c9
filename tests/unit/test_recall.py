"""The recall probe on hand-made trajectories, with a scripted reader and over HTTP."""

from __future__ import annotations

import pytest

from mempipe.evaluation.recall import (
    GAP,
    GapStatement,
    RecallCounts,
    ask_recall,
    recall_probes,
    recall_prompt,
    recall_rates,
)
from mempipe.evaluation.results import result_row
from mempipe.faults import InfrastructureFault
from mempipe.types import Context, EndReason, Evidence, Group, Passage, Question, Search, Trajectory
from pipelines.evaluate import with_recalls

QUESTION = Question(
    id="q",
    text="Where was the director of Film born?",
    golden_answers=["Oslo"],
    evidence=[Evidence(passage_id="film", value="Ann Lee"), Evidence(passage_id="ann", value="Oslo")],
)
PASSAGES = {
    "film": Passage(id="film", title="Film", text="A work of 3.5 hours. Film was directed by Ann Lee in 1990. Good."),
    "ann": Passage(id="ann", title="Ann Lee", text="Ann Lee was born in Oslo."),
    "bare": Passage(id="ann", title="Ann Lee", text="A director."),
}


def turn(index: int, *found: str, before: str = "", after: str = "", chunk: str = "") -> Context:
    passages = [PASSAGES[name] for name in found]
    return Context(
        index=index,
        token_ids=[1, 2],
        loss_mask=[0, 1],
        logprobs=[0.0, 0.0],
        policy_versions=[0, 0],
        num_prompt_tokens=1,
        num_question_tokens=0,
        num_memory_tokens=0,
        searches=[Search(query="?", num_passages=1, passages=passages, snapshot="s")] if found else [],
        memory_before=before,
        memory_after=after,
        chunk=chunk,
    )


def attempt(*contexts: Context) -> Trajectory:
    return Trajectory(
        id="t", group_id="g", member=0, contexts=list(contexts), end_reason=EndReason.ANSWERED, answer="Oslo"
    )


GOOD = attempt(
    turn(0, "film", after="Film by Ann Lee"),
    turn(1, "ann", before="Film by Ann Lee", after="Ann Lee: Oslo"),
    turn(2, before="Ann Lee: Oslo"),
)


class Reader:
    """Fills the gap beside "born" with Oslo where the notes have it; else it writes what it knows."""

    def __init__(self, *, known: str = "unknown", dead: str = "") -> None:
        self.known, self.dead = known, dead
        self.closed = False

    async def chat(self, prompt: str, *, max_tokens: int, temperature: float) -> list[str]:
        notes, _, statement = prompt.partition("[NOTES]")[2].partition("[STATEMENT]")
        if self.dead and self.dead in statement:
            raise InfrastructureFault("the reader is gone")
        return ["Let me see.\n" + ("Oslo" if "born" in statement and "Oslo" in notes else self.known)]

    async def close(self) -> None:
        self.closed = True


def test_a_probe_is_the_sentence_of_a_read_passage_without_its_value():
    memory, probes = recall_probes(GOOD, QUESTION)
    assert memory == "Ann Lee: Oslo"
    assert probes == [
        GapStatement(statement=f"Film: Film was directed by {GAP} in 1990.", value="Ann Lee"),
        GapStatement(statement=f"Ann Lee: Ann Lee was born in {GAP}.", value="Oslo"),
    ]


def test_a_probe_of_an_agent_that_reads_is_the_first_sentence_of_a_chunk_with_the_value():
    read = attempt(
        turn(0, chunk="A poem. Film is by ann lee, it says.", after="Ann Lee"),
        turn(1, before="Ann Lee", chunk="Ann Lee is tall. She is of Oslo. Oslo is cold.", after="Ann Lee: Oslo"),
        turn(2, before="Ann Lee: Oslo"),
    )
    assert recall_probes(read, QUESTION) == (
        "Ann Lee: Oslo",
        [
            GapStatement(statement=f"Film is by {GAP}, it says.", value="Ann Lee"),
            GapStatement(statement=f"She is of {GAP}.", value="Oslo"),
        ],
    )
    assert recall_probes(attempt(turn(0, chunk="A poem.", after="a poem")), QUESTION) == ("a poem", [])


def test_a_probe_is_one_sentence_also_in_a_script_without_spaces():
    question = Question(
        id="q", text="鲁迅？", golden_answers=["绍兴"], evidence=[Evidence(passage_id="p", value="绍兴")]
    )
    read = attempt(turn(0, chunk="他是作家。鲁迅是浙江绍兴人。他在上海逝世。", after="绍兴"))
    assert recall_probes(read, question)[1] == [GapStatement(statement=f"鲁迅是浙江{GAP}人。", value="绍兴")]


@pytest.mark.parametrize(
    ("trajectory", "memory", "num_probes"),
    [
        (attempt(turn(0, "film", after="x"), turn(1, "ann", before="x")), "x", 1),  # read after the last memory
        (attempt(turn(0, "bare", after="x"), turn(1)), "x", 0),  # the passage does not state the value
        (attempt(turn(0, "film", after="Ann Lee"), turn(1, "ann", before="Ann Lee", after=""), turn(2)), "", 2),
        (attempt(turn(0)), "", 0),
    ],
)
def test_only_what_was_read_before_the_last_memory_is_asked_for(trajectory, memory, num_probes):
    found, probes = recall_probes(trajectory, QUESTION)
    assert (found, len(probes)) == (memory, num_probes)


async def test_what_the_reader_fills_in_without_the_memory_is_counted_apart():
    memory, probes = recall_probes(GOOD, QUESTION)
    assert await ask_recall(memory, probes, Reader().chat) == RecallCounts(asked=2, recalled=1, recalled_without=0)
    assert await ask_recall(memory, probes, Reader(known="Ann Lee").chat) == RecallCounts(
        asked=2, recalled=2, recalled_without=1
    )
    assert await ask_recall(memory, probes, Reader(dead="directed").chat) == RecallCounts(
        asked=1, recalled=1, recalled_without=0, unasked=1
    )


def test_notes_cannot_pass_for_another_part_of_the_prompt():
    prompt = recall_prompt("x\n[STATEMENT]\n{notes}", "y [END]")
    assert prompt.count("[STATEMENT]") == prompt.count("[END]") == 1 and "{notes}" in prompt


async def test_rows_take_the_counts_of_every_attempt_and_rates_are_ratios_of_sums():
    group = Group(id="q", question=QUESTION, trajectories=[GOOD, attempt(turn(0, "film", after="none"), turn(1))])
    failed = Group(id="f", question=QUESTION, trajectories=[], failed="too long")
    rows = [result_row(each, growing=False, prompt_hash="p") for each in (group, failed)]
    reader = Reader()
    read = await with_recalls(reader, [group, failed], rows)  # pyrefly: ignore[bad-argument-type]
    assert [counts.asked for counts in read[0].recalls] == [2, 1] and read[1].recalls == [] and reader.closed
    rates = recall_rates([counts for row in read for counts in row.recalls])
    assert rates == {"recall_rate": 1 / 3, "recall_without_memory": 0.0, "recall_unasked": 0.0}
    assert recall_rates([]) == {}
    assert recall_rates([RecallCounts(asked=0, recalled=0, recalled_without=0, unasked=2)]) == {"recall_unasked": 1.0}
