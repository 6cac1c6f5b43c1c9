"""A whole history is shown message by message, each with the passages that it asked for, and without a memory."""

from __future__ import annotations

import dataclasses

import pytest
from trace_builders import group, text_of, turn

from mempipe.reports.examples import shown_turns
from mempipe.reports.steps import ActionText, Step, steps
from mempipe.reports.trace import trace_lines
from mempipe.reports.traced import Traced
from mempipe.reports.transcript import write_transcript
from mempipe.reports.viewer import viewer_data
from mempipe.types import Context, EndReason, Passage, Search, Trajectory

REACT = text_of("react")


def search(query: str, *ids: str) -> Search:
    passages = [Passage(id=id, title=id, text=f"{id} says so") for id in ids]
    return Search(query=query, num_passages=len(ids), passages=passages, snapshot="s")


def asked(query: str, *, thought: str = "look") -> str:
    return f"<think>{thought}</think><search>{query}</search>"


def read(*ids: str) -> str:
    return f"<information>{' '.join(ids)} says so</information>"


def history(action: str, *searches: Search) -> Context:
    return dataclasses.replace(turn(0, "", ""), action=action, searches=list(searches))


def attempt(action: str, *searches: Search, answer: str | None = "Ann") -> Trajectory:
    made = group("after", 1, right=answer is not None).trajectories[0]
    end = EndReason.MAX_TURNS if answer is None else EndReason.ANSWERED
    return dataclasses.replace(made, contexts=[history(action, *searches)], answer=answer, end_reason=end)


QUESTION = group("after", 1, right=True).question
ANSWER = "<think>known Ann</think><answer>Ann</answer>"
TWICE = attempt(
    asked("one") + read("a") + asked("two") + read("b", "c") + ANSWER, search("one", "a"), search("two", "b", "c")
)


@pytest.mark.parametrize(
    ("action", "searches", "found"),
    [
        (ANSWER, [], [(ANSWER, [])]),
        (asked("x") + read("a") + ANSWER, ["x"], [(asked("x"), ["x"]), (ANSWER, [])]),
        # the same query again, which the thought repeats as well
        (
            asked("x", thought="I look for x") + read("a") + asked("x") + read("a") + ANSWER,
            ["x", "x"],
            [(asked("x", thought="I look for x"), ["x"]), (asked("x"), ["x"]), (ANSWER, [])],
        ),
        # a message without an action is followed by a text that is no observation
        (
            "no tag. Try again. " + asked("x") + read("a") + "cut",
            ["x"],
            [("no tag. Try again. " + asked("x"), ["x"]), ("cut", [])],
        ),
        # the context ends with the observation
        (asked("x") + read("a"), ["x"], [(asked("x"), ["x"])]),
        ("", [], [("", [])]),
        # a query that the text does not have, as where it was cut for the search
        (asked("very long") + read("a") + ANSWER, ["very"], [(asked("very long"), ["very"]), (ANSWER, [])]),
        (asked("a\u2019s") + read("a") + ANSWER, ["a's"], [(asked("a\u2019s"), []), (ANSWER, ["a's"])]),
    ],
)
def test_a_search_belongs_to_the_message_that_asked_for_it(action, searches, found):
    made = [search(query, "a") for query in searches]
    taken = steps(history(action, *made), REACT)
    assert [(step.message, [each.query for each in step.searches]) for step in taken] == found


def test_a_context_of_another_agent_is_one_step():
    context = turn(0, "", "Oslo", passage="a")
    for text in (ActionText(), text_of("memsearcher"), text_of("mem1")):
        assert steps(context, text) == [Step(context.action, context.searches)]


def test_a_page_shows_every_message_as_a_turn():
    shown = shown_turns(TWICE, QUESTION, text=REACT)
    assert [(each.number, each.last, each.queries) for each in shown] == [(1, 1, ["one"]), (2, 2, ["two"]), (3, 3, [])]
    assert [[passage.title for passage in each.passages] for each in shown] == [["a"], ["b", "c"], []]
    assert [passage.needed for each in shown for passage in each.passages] == [True, True, False]
    assert [each.thought for each in shown] == ["look", "look", "known Ann"]
    assert not any(each.wrote for each in shown), "it has no memory that could be empty"
    assert [each.sizes for each in shown] == ["5 prompt tokens, 4 sampled in all turns", "", ""]


def test_messages_that_repeat_the_one_before_are_shown_once():
    action = asked("one") + read("a") + 3 * (asked("two") + read("b"))
    repeated = attempt(action, search("one", "a"), *[search("two", "b")] * 3, answer=None)
    shown = shown_turns(repeated, QUESTION, text=REACT)
    assert [(each.number, each.last, each.queries) for each in shown] == [(1, 1, ["one"]), (2, 4, ["two"])]


def test_the_terminal_the_viewer_and_the_picture_show_them_too(tmp_path):
    traced = Traced(phase="after", question=QUESTION, trajectory=TWICE, memory_budget=None, text=REACT)
    assert trace_lines([traced], total=1)[3:-2] == [
        "  turn 1: 5 prompt tokens, 4 sampled in all turns",
        "    action   <think>look</think><search>one</search>",
        "    passage  [a] a says so",
        "  turn 2",
        "    action   <think>look</think><search>two</search>",
        "    passage  [b] b says so",
        "    passage  [c] c says so",
        "  turn 3",
        "    action   <think>known Ann</think><answer>Ann</answer>",
    ]
    (turn_of_viewer,) = viewer_data([traced])["trajectories"][0]["turns"]
    assert not turn_of_viewer["wrote"]
    assert [
        (step["thought"], [search["query"] for search in step["searches"]]) for step in turn_of_viewer["steps"]
    ] == [("look", ["one"]), ("look", ["two"]), ("known Ann", [])]
    write_transcript(tmp_path / "a.svg", [traced])
    drawn = (tmp_path / "a.svg").read_text()
    assert drawn.index(">one<") < drawn.index("a says so") < drawn.index(">two<") < drawn.index("b says so")
    assert ">turn 2<" in drawn and ">memory<" not in drawn


def test_turns_are_counted_through_where_several_contexts_have_several_messages():
    """As those of an agent that compacts its history (examples/compaction_agent)."""
    compacts = text_of("react", grows=False)
    first = dataclasses.replace(TWICE.contexts[0], memory_before="nothing", memory_after="one Ann")
    second = dataclasses.replace(history(asked("three") + read("d") + ANSWER, search("three", "d")), index=1)
    played = dataclasses.replace(TWICE, contexts=[first, second])
    shown = shown_turns(played, QUESTION, text=compacts)
    assert [(each.number, each.queries) for each in shown] == [
        (1, ["one"]), (2, ["two"]), (3, []), (4, ["three"]), (5, [])
    ]  # fmt: skip
    assert [each.sizes.rpartition(" in ")[2] for each in shown] == ["turns 1 to 3", "", "", "turns 4 to 5", ""]
    assert [each.wrote for each in shown] == [False, False, True, False, False]
    traced = Traced(phase="after", question=QUESTION, trajectory=played, memory_budget=None, text=compacts)
    lines = trace_lines([traced], total=1)
    assert [line.strip().partition(":")[0] for line in lines if line.startswith("  turn ")] == [
        f"turn {number}" for number in range(1, 6)
    ]
    assert sum(line.startswith(("    memory", "    wrote")) for line in lines) == 3
    # As those of a program (examples/program_agent), which hands on what it likes.
    without = text_of("react", grows=False, writes_memory=False)
    assert not any(turn.wrote for turn in shown_turns(played, QUESTION, text=without))
    assert [line for line in lines if not line.startswith(("    memory", "    wrote"))] == trace_lines(
        [dataclasses.replace(traced, text=without)], total=1
    )


def test_a_turn_that_answers_has_no_memory_on_the_page():
    answered, unanswered = (group("after", 1, right=right).trajectories[0] for right in (True, False))
    last = turn(2, "Oslo Ann", "", passage="b")  # MEM1 answers in the context that holds the passages
    for made, wrote in ((answered, [True, True, False]), (unanswered, [True, True, True])):
        trajectory = dataclasses.replace(made, contexts=[*made.contexts[:2], last])
        assert [each.wrote for each in shown_turns(trajectory, QUESTION)] == wrote


def test_a_history_of_one_message_has_no_other_turns():
    (shown,) = shown_turns(attempt(ANSWER), QUESTION, text=REACT)
    assert (shown.sizes, shown.wrote) == ("5 prompt tokens, 4 sampled", False)
