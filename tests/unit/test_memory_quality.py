"""Memory metrics of hand-made trajectories whose values can be read off."""

import math
from dataclasses import replace

import pytest

from mempipe.evaluation.memory_quality import MemoryQuality, memory_quality, trajectory_quality, turn_qualities
from mempipe.evaluation.rollout_metrics import full_history_tokens, rollout_metrics
from mempipe.facts import contains_value, fact_states
from mempipe.types import Context, EndReason, Evidence, Group, Passage, Question, Search, Trajectory

QUESTION = Question(
    id="q",
    text="Where was the director of Film born?",
    golden_answers=["Oslo"],
    num_hops=2,
    evidence=[Evidence(passage_id="film", value="Ann Lee"), Evidence(passage_id="ann", value="Oslo")],
)
PASSAGES = {
    "film": Passage(id="film", title="Film", text="Film was directed by Ann Lee in the summer of 1990."),
    "ann": Passage(id="ann", title="Ann Lee", text="Ann Lee was born in Oslo."),
    "other": Passage(id="other", title="Other", text="Nothing of use."),
}


def turn(index: int, *found: str, before: str = "", after: str = "", **changes) -> Context:
    """A turn: 10 prompt tokens, 3 of action; with a search also 8 injected and 4 of memory message."""
    mask = [0] * 10 + [1] * 3 + ([0] * 8 + [1] * 4 if found else [])
    fields = {
        "index": index,
        "token_ids": list(range(len(mask))),
        "loss_mask": mask,
        "logprobs": [0.0] * len(mask),
        "policy_versions": [2 if sampled else -1 for sampled in mask],
        "num_prompt_tokens": 10,
        "num_question_tokens": 4,
        "num_memory_tokens": len(before.split()),
        "num_observation_tokens": 6 if found else 0,
        "searches": [Search(query="?", num_passages=2, passages=[PASSAGES[name] for name in found], snapshot="s")]
        if found
        else [],
        "memory_before": before,
        "memory_after": after,
        "num_new_memory_tokens": len(after.split()),
    }
    return Context(**(fields | changes))


def attempt(*contexts: Context, end: EndReason = EndReason.ANSWERED, **changes) -> Trajectory:
    fields = {"id": "t", "group_id": "g", "member": 0, "contexts": list(contexts), "end_reason": end}
    answer = "Oslo" if end is EndReason.ANSWERED else None
    return Trajectory(**(fields | {"answer": answer} | changes))


GOOD = attempt(
    turn(0, "film", "other", after="Film by Ann Lee"),
    turn(1, "ann", before="Film by Ann Lee", after="Ann Lee Oslo"),
    turn(2, before="Ann Lee Oslo"),
)


def group_of(*trajectories: Trajectory) -> Group:
    return Group(id="g", question=QUESTION, trajectories=list(trajectories))


def test_an_ideal_trajectory_finds_and_keeps_everything():
    rates = memory_quality([group_of(GOOD)], memory_budget=10)
    assert rates == {
        "found_rate": 1.0,
        "kept_rate": 1.0,
        "lost_rate": 0.0,
        "early_answer_rate": 0.0,
        "answer_in_memory": 0.5,
        "truncation_rate": 0.0,
        "memory_tokens": 3.5,
        "budget_use": 0.35,
        "copy_rate": 0.0,
        "compression": 7 / 12,
        "irrelevant_rate": 0.0,
    }


def test_a_search_counts_as_found_only_for_the_next_needed_fact():
    out_of_order = attempt(
        turn(0, "ann", after="Oslo"), turn(1, "other", before="Oslo", after="Oslo"), end=EndReason.MAX_TURNS
    )
    counts = trajectory_quality(out_of_order, QUESTION)
    assert (counts.searches_found, counts.searches_in_need) == (0, 2)
    assert (counts.facts_kept, counts.facts_retrieved) == (1, 1)


def test_searches_after_everything_is_known_do_not_count():
    counts = trajectory_quality(attempt(turn(0, "film", before="Ann Lee, Oslo", after="Ann Lee, Oslo")), QUESTION)
    assert counts.searches_in_need == 0 and counts.facts_retrieved == 0


def test_a_fact_that_is_not_written_down_is_not_kept():
    counts = trajectory_quality(attempt(turn(0, "film", after="nothing"), end=EndReason.MAX_TURNS), QUESTION)
    assert (counts.facts_kept, counts.facts_retrieved) == (0, 1)


def test_a_chunk_that_holds_a_value_is_where_the_fact_is_found():
    film, ann = (PASSAGES[name].text for name in ("film", "ann"))
    reading = attempt(
        turn(0, chunk=film, after="directed by Ann Lee in the summer"),
        turn(1, chunk=ann, before="directed by Ann Lee in the summer", after="Ann Lee"),
        turn(2, before="Ann Lee"),
    )
    counts = trajectory_quality(reading, QUESTION)
    assert (counts.facts_kept, counts.facts_retrieved, counts.facts_lost, counts.facts_held) == (1, 2, 0, 1)
    assert counts.searches_in_need == 0, "it reads in order: it can find nothing sooner or later"
    assert (counts.copied_words, counts.memory_words) == (6, 8), "articles do not count"
    assert fact_states(reading, QUESTION) == [["gained", "missing"], ["known", "found"], ["known", "missing"]]


def test_a_missing_memory_message_loses_the_known_facts():
    counts = trajectory_quality(
        attempt(turn(0, "other", before="Ann Lee", after=""), end=EndReason.BAD_MEMORY), QUESTION
    )
    assert (counts.facts_lost, counts.facts_held) == (1, 1)
    assert counts.memory_turns == 1


def test_a_fact_that_is_found_again_and_not_kept_is_lost():
    again = attempt(turn(0, "film", before="Ann Lee", after="nothing"), end=EndReason.MAX_TURNS)
    counts = trajectory_quality(again, QUESTION)
    assert (counts.facts_lost, counts.facts_held, counts.facts_retrieved) == (1, 1, 0)
    assert fact_states(again, QUESTION) == [["lost", "missing"]]


def test_the_answering_turn_writes_no_memory_and_loses_nothing():
    counts = trajectory_quality(attempt(turn(0, before="Ann Lee Oslo")), QUESTION)
    assert counts == MemoryQuality(answers=1)


def test_a_reading_turn_without_search_that_forgets_everything_is_counted():
    reading = attempt(turn(0, before="Ann Lee", after=""), turn(1), end=EndReason.MAX_TURNS)
    assert trajectory_quality(reading, QUESTION).facts_lost == 1


@pytest.mark.parametrize(
    ("trajectory", "early"),
    [
        (attempt(turn(0)), 1),
        (attempt(turn(0, "film", after="Ann Lee"), turn(1, before="Ann Lee")), 1),
        (GOOD, 0),
        (
            attempt(
                turn(0, "ann", after="Oslo"), turn(1, "other", before="Oslo", after="lost"), turn(2, before="lost")
            ),
            0,
        ),
    ],
)
def test_an_answer_is_early_when_no_memory_ever_knew_the_last_fact(trajectory, early):
    counts = trajectory_quality(trajectory, QUESTION)
    assert (counts.early_answers, counts.answers) == (early, 1)


def test_an_answer_from_passages_that_its_own_turn_read_is_not_early_and_left_no_memory_to_judge():
    """MEM1 reads, notes and answers in one message."""
    mem1 = attempt(turn(0, after="q"), turn(1, "film", before="q", after="Ann Lee"), turn(2, "ann", before="Ann Lee"))
    counts = trajectory_quality(mem1, QUESTION)
    assert (counts.answers, counts.early_answers) == (1, 0)
    assert (counts.searches_found, counts.searches_in_need) == (2, 2)
    assert (counts.facts_kept, counts.facts_retrieved) == (1, 1)
    assert (counts.facts_lost, counts.facts_held, counts.memory_turns) == (0, 0, 2)


def test_only_answers_can_be_early():
    assert trajectory_quality(attempt(turn(0), end=EndReason.NO_ACTION), QUESTION).answers == 0


def test_copied_runs_of_five_words_are_counted_once():
    memory = "Film was directed by Ann Lee in short"  # the first 7 of 8 words are verbatim; "the" is no word
    counts = trajectory_quality(attempt(turn(0, "film", after=memory)), QUESTION)
    assert (counts.copied_words, counts.memory_words) == (7, 8)


def test_words_that_nothing_needed_holds_are_irrelevant():
    # "nothing" and "cold" stand in no needed passage that was read; "born" is of the question, "Oslo" a needed value.
    memories = attempt(turn(0, "film", "other", after="Film Lee nothing cold"), turn(1, before="x", after="born Oslo"))
    counts = trajectory_quality(memories, QUESTION)
    assert (counts.irrelevant_words, counts.judged_words) == (2, 6)


def test_the_words_of_an_empty_memory_are_not_irrelevant():
    """An attempt begins with the prompt's "known nothing"; "fjord" is not from there."""
    contexts = [
        turn(0, "other", before="known nothing", after="known nothing"),
        turn(1, "film", before="known nothing", after="known Film Ann Lee; fjord"),
        turn(2, before="known Film Ann Lee; fjord"),
    ]
    first, second, _ = turn_qualities(attempt(*contexts), QUESTION)
    assert (first.irrelevant_words, first.judged_words) == (0, 2)
    assert (second.irrelevant_words, second.judged_words) == (1, 5)


def test_a_needed_passage_is_relevant_once_it_was_read():
    read = attempt(turn(0, "film", after="summer"), turn(1, "ann", before="x", after="summer"))
    assert trajectory_quality(read, QUESTION).irrelevant_words == 0
    later = attempt(turn(0, "other", after="summer"), turn(1, "film", before="x", after="summer"), turn(2))
    assert trajectory_quality(later, QUESTION).irrelevant_words == 1


@pytest.mark.parametrize(
    ("memory", "statements", "contradictions"),
    [
        ("Ann Lee was born in Oslo", 1, 0),
        ("Ann Lee was born in Bergen", 1, 1),
        ("Film by Ann Lee; Ann Lee born Bergen; he likes Oslo", 1, 1),
        ("Ann Lee. She was born in Bergen", 0, 0),
        ("Film was directed by Bob", 0, 0),
        ("", 0, 0),
    ],
)
def test_a_statement_with_another_value_contradicts(memory, statements, contradictions):
    counts = trajectory_quality(attempt(turn(0, "ann", before="x", after=memory), turn(1)), QUESTION)
    assert (counts.statements, counts.contradictions) == (statements, contradictions)


def test_a_contradiction_needs_a_passage_that_was_read():
    counts = trajectory_quality(attempt(turn(0, "other", after="Ann Lee was born in Bergen"), turn(1)), QUESTION)
    assert counts.statements == 0


def test_truncated_memories_are_counted():
    cut = attempt(turn(0, "film", after="x", memory_truncated=True), turn(1, "film", before="x", after="y"))
    assert memory_quality([group_of(cut)])["truncation_rate"] == 0.5


def test_rates_are_ratios_of_sums():
    forgetful = attempt(turn(0, "film", "ann", after="none"), end=EndReason.MAX_TURNS)
    assert memory_quality([group_of(GOOD), group_of(forgetful)])["kept_rate"] == 2 / 4
    assert memory_quality([group_of(GOOD, forgetful)])["kept_rate"] == 2 / 4


def test_rates_without_a_case_are_absent():
    unknown = Group(id="g", question=Question(id="q", text="?", golden_answers=["x"]), trajectories=[GOOD])
    without_evidence = {"answer_in_memory", "truncation_rate", "memory_tokens", "copy_rate", "compression"}
    assert set(memory_quality([unknown])) == without_evidence
    joined = Question(id="q", text="?", golden_answers=["x; y"], objectives=[["x"], ["y"]])
    assert set(memory_quality([replace(unknown, question=joined)])) == without_evidence
    assert memory_quality([]) == {} and rollout_metrics([]) == {}


@pytest.mark.parametrize(
    ("text", "value", "expected"),
    [
        ("OSLO;", "Oslo", True),
        ("Osloer", "Oslo", False),
        ("the Beatles; X", "Beatles", True),
        ("Lee Ann", "Ann Lee", False),
        ("U.S. film", "U.S.", True),
        ("Jean-Luc, 1930", "Jean-Luc", True),
        ("Straße", "STRASSE", True),
        ("a b", "a", True),
        ("x", "", False),
        ("x", "  ", False),
        ("c++ ok", "++", True),
        ("", "Oslo", False),
        ("首都是北京。", "北京", True),
        ("首都是北方的京城", "北京", False),
        ("서울은 수도이다", "서울", True),
        ("ハリー・ポッターと", "ハリーポッター", True),
        ("生于1936年", "1936", True),
        ("राजधानी राम है", "रोम", False),
        ("राजधानी रोम है", "रोम", True),
        ("the co\u00adoperation", "cooperation", True),
        ("İstanbul", "stanbul", False),
    ],
)
def test_values_match_whole_words(text, value, expected):
    assert contains_value(text, value) is expected


def test_full_history_grows_by_actions_and_passages():
    assert full_history_tokens(GOOD) == [10, 10 + 3 + 6, 10 + 2 * (3 + 6)]
    assert full_history_tokens(attempt(turn(0, before="one two"))) == [8]
    assert full_history_tokens(attempt()) == []


def test_rollout_metrics_of_two_trajectories():
    right = attempt(*GOOD.contexts, reward=1.0, em=1.0, f1=1.0, advantage=1.0)
    wrong = attempt(turn(0), end=EndReason.NO_ACTION, advantage=-1.0)
    metrics = rollout_metrics([group_of(right, wrong), group_of(wrong, wrong)], policy_version=3)
    assert metrics["reward"] == metrics["em"] == metrics["f1"] == metrics["format_rate"] == 0.25
    assert metrics["end_reason/no_action"] == 0.75 and metrics["end_reason/max_turns"] == 0.0
    assert sum(value for key, value in metrics.items() if key.startswith("end_reason/")) == 1.0
    assert metrics["turns"] == 6 / 4 and metrics["searches"] == 2 / 4
    assert metrics["advantage_mean"] == -0.5 and math.isclose(metrics["advantage_std"], math.sqrt(0.75))
    assert metrics["zero_variance_groups"] == 0.5
    assert metrics["sampled_tokens"] == 7 + 7 + 3 + 3 * 3
    assert metrics["context_tokens_per_turn"] == 10.0
    assert metrics["full_history_tokens_per_turn"] == (10 + 19 + 28 + 3 * 10) / 6
    assert (metrics["staleness_mean"], metrics["staleness_max"]) == (1.0, 1.0)
    assert metrics["early_answer_rate"] == 0.0 and metrics["kept_rate"] == 1.0


def test_in_a_growing_context_every_message_is_a_turn_and_there_is_no_memory_to_measure():
    whole = turn(0, "film")
    metrics = rollout_metrics([group_of(attempt(whole))], growing=True)
    assert metrics["turns"] == 2.0
    assert metrics["context_tokens_per_turn"] == (10 + 10 + 3 + 8) / 2
    assert not {"kept_rate", "found_rate", "early_answer_rate", "full_history_tokens_per_turn"} & metrics.keys()


def test_staleness_is_weighed_by_tokens():
    mixed = turn(0, policy_versions=[-1] * 10 + [5, 4, 2])
    metrics = rollout_metrics([group_of(attempt(mixed))], policy_version=5)
    assert (metrics["staleness_mean"], metrics["staleness_max"]) == (4 / 3, 3.0)
    assert "staleness_mean" not in rollout_metrics([group_of(attempt(mixed))])
