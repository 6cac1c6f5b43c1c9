"""Questions that are asked together: every fact knows the objective that needs it, and so does all that is measured."""

from __future__ import annotations

import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mempipe.api.results import causes_text
from mempipe.cli import main
from mempipe.data.objectives import join_objectives
from mempipe.data.qa import read_questions, write_questions
from mempipe.data.trajectories import read_trajectories, write_trajectories
from mempipe.data.world import World
from mempipe.evaluation.causes import Cause, first_causes
from mempipe.evaluation.memory_quality import memory_quality, trajectory_quality
from mempipe.evaluation.quality_by_turn import quality_by_turn
from mempipe.evaluation.recall import recall_probes
from mempipe.evaluation.results import result_row
from mempipe.facts import places_by_objective
from mempipe.masking.cloze import GAP
from mempipe.masking.demonstrations import ClozeDemonstration
from mempipe.provenance import questions_sha256
from mempipe.reports.rating_sheet import _row
from mempipe.reports.trace import trajectory_lines
from mempipe.reports.traced import Traced
from mempipe.reports.viewer import viewer_data
from mempipe.rl.turn_rewards import answer_in_memory, kept_fact
from mempipe.settings import ConfigError
from mempipe.types import Context, EndReason, Evidence, Group, Passage, Question, Search, Trajectory

BORN = Question(
    id="born",
    text="Where was the director of Film born?",
    golden_answers=["Oslo", "Christiania"],
    evidence=[Evidence(passage_id="film", value="Ann Lee"), Evidence(passage_id="ann", value="Oslo")],
)
CAPITAL = Question(
    id="capital",
    text="Which city is the capital of Latvia?",
    golden_answers=["Riga"],
    evidence=[Evidence(passage_id="latvia", value="Riga")],
)
(PAIR,) = join_objectives([BORN, CAPITAL], objectives=2)
PASSAGES = {
    "film": Passage(id="film", title="Film", text="Film was directed by Ann Lee."),
    "ann": Passage(id="ann", title="Ann Lee", text="Ann Lee was born in Oslo."),
    "latvia": Passage(id="latvia", title="Latvia", text="Latvia has the capital Riga."),
    "other": Passage(id="other", title="Other", text="Nothing of use."),
}


def attempt(*turns: tuple[str, str], answer: str | None = "Bergen; Riga", em: float = 0.5) -> Trajectory:
    """Turns are (name of the passage that a search returned or "", memory that the turn leaves)."""
    contexts, before = [], ""
    for index, (found, after) in enumerate(turns):
        contexts.append(
            Context(
                index=index,
                token_ids=[1, 2],
                loss_mask=[0, 1],
                logprobs=[0.0, 0.0],
                policy_versions=[0, 0],
                num_prompt_tokens=1,
                num_question_tokens=1,
                num_memory_tokens=0,
                searches=[Search(query=found, num_passages=1, passages=[PASSAGES[found]], snapshot="s")]
                if found
                else [],
                memory_before=before,
                memory_after=after,
                num_new_memory_tokens=len(after.split()),
            )
        )
        before = after
    end = EndReason.MAX_TURNS if answer is None else EndReason.ANSWERED
    return Trajectory(id="g/0", group_id="g", member=0, contexts=contexts, end_reason=end, answer=answer, em=em)


# The first question loses Ann Lee in the third turn and is answered with a guess; the second is answered rightly.
HALF = attempt(("film", "Film by Ann Lee"), ("latvia", "Ann Lee; Riga"), ("other", "Riga cold"), ("", ""))


def group_of(trajectory: Trajectory, question: Question = PAIR) -> Group:
    return Group(id="g", question=question, trajectories=[trajectory])


def test_every_fact_of_a_joined_question_has_its_objective():
    assert PAIR.evidence == [
        Evidence(passage_id="film", value="Ann Lee", objective=0),
        Evidence(passage_id="ann", value="Oslo", objective=0),
        Evidence(passage_id="latvia", value="Riga", objective=1),
    ]
    assert places_by_objective(PAIR) == [[0, 1], [2]] and places_by_objective(BORN) == [[0, 1]]
    parts = World(1).questions(2, seed=1, hops=[2, 3])
    (pair,) = join_objectives(parts, objectives=2)
    values = [[pair.evidence[place].value for place in places] for places in places_by_objective(pair)]
    assert values == [[fact.value for fact in part.evidence] for part in parts]


def test_the_rates_of_a_joined_question_are_those_of_its_chains():
    assert memory_quality([group_of(HALF)], memory_budget=10) == {
        "found_rate": 2 / 3,  # Ann Lee of the first chain, then Riga of the second; then nothing
        "kept_rate": 2 / 2,
        "lost_rate": 1 / 3,  # Ann Lee, of Ann Lee, and of Ann Lee and Riga
        "early_answer_rate": 1 / 2,  # no memory knew Oslo, one knew Riga
        "answer_in_memory": 2 / 6,
        "truncation_rate": 0.0,
        "memory_tokens": 9 / 3,
        "budget_use": 0.3,
        "copy_rate": 0.0,
        "irrelevant_rate": 1 / 9,  # cold
    }
    first, second, third = quality_by_turn([group_of(HALF)])
    assert [each.rates["answer_in_memory"].value for each in (first, second, third)] == [0.0, 0.5, 0.5]
    assert [each.num_cases["answer_in_memory"] for each in (first, second, third)] == [2, 2, 2]


def test_an_answer_that_is_missing_is_not_early():
    counts = trajectory_quality(replace(HALF, answer="; Riga"), PAIR)
    assert (counts.early_answers, counts.answers) == (0, 1)
    counts = trajectory_quality(replace(HALF, answer="Bergen"), PAIR)
    assert (counts.early_answers, counts.answers) == (1, 1)


def test_an_objective_without_evidence_is_judged_by_what_is_known_of_it():
    """A search or a word may be for the objective whose facts are not known."""
    (half_known,) = join_objectives([replace(BORN, evidence=[]), CAPITAL], objectives=2)
    rates = memory_quality([group_of(HALF, half_known)])
    assert not {"found_rate", "irrelevant_rate"} & rates.keys()
    assert (rates["kept_rate"], rates["lost_rate"], rates["early_answer_rate"]) == (1.0, 0.0, 0.0)
    assert rates["answer_in_memory"] == 2 / 6
    assert first_causes(HALF, half_known, growing=False) == [None, None]


@pytest.mark.parametrize(
    ("trajectory", "causes"),
    [
        (HALF, [Cause.LOST, None]),
        (replace(HALF, answer="Oslo; Paris"), [None, Cause.NOT_USED]),
        (replace(HALF, answer="Riga"), [Cause.LOST, Cause.NOT_USED]),
        (attempt(("film", "Ann Lee"), ("", ""), answer="a; b", em=0.0), [Cause.STOPPED_EARLY, Cause.STOPPED_EARLY]),
        (attempt(("latvia", "x"), ("other", "x"), answer=None), [Cause.NEVER_FOUND, Cause.NOT_KEPT]),
        (replace(HALF, answer="Christiania; Riga", em=1.0), [None, None]),
    ],
)
def test_every_wrong_answer_has_its_own_first_cause(trajectory, causes):
    assert first_causes(trajectory, PAIR, growing=False) == causes
    row = result_row(group_of(trajectory), growing=False, prompt_hash="")
    assert row.first_causes == [cause or "" for cause in causes]


def test_the_causes_of_an_attempt_are_one_text_in_a_frame():
    assert causes_text(["lost", ""]) == "lost; none" and causes_text([None]) is None and causes_text([]) is None


def test_the_facts_of_both_chains_have_their_blanks():
    memory, probes = recall_probes(HALF, PAIR)
    assert memory == "Riga cold" and [probe.value for probe in probes] == ["Ann Lee", "Riga"]


def test_turns_are_paid_for_every_objective():
    assert kept_fact(HALF, PAIR) == [1.0, 1.0, -1.0, None]
    assert answer_in_memory(HALF, PAIR) == [0.0, 0.5, 0.5, None]


def test_pages_show_every_objective():
    traced = Traced(phase="", question=PAIR, trajectory=HALF, memory_budget=8)
    (shown,) = viewer_data([traced])["trajectories"]
    assert shown["golden"] == "Oslo or Christiania; Riga" and shown["verdict"] == "1 of 2 right"
    assert shown["factsOf"] == [[0, 1], [2]] and shown["turns"][1]["facts"] == ["known", "missing", "gained"]
    assert _row(traced, 0)["golden_answers"] == "Oslo | Christiania; Riga"
    lines = trajectory_lines(PAIR, HALF)
    assert "  golden    Oslo | Christiania; Riga" in lines and lines[-1].endswith("em 0.5")


def test_files_keep_the_objectives_and_those_of_older_versions_are_read(tmp_path):
    write_questions(tmp_path / "new.parquet", [PAIR, BORN])
    assert read_questions(tmp_path / "new.parquet") == [PAIR, BORN]
    table = pq.read_table(tmp_path / "new.parquet")
    facts = [
        [{k: v for k, v in fact.items() if k != "objective"} for fact in row] for row in table["evidence"].to_pylist()
    ]
    older = table.set_column(table.schema.get_field_index("evidence"), "evidence", pa.array(facts))
    pq.write_table(older, tmp_path / "old.parquet")
    assert read_questions(tmp_path / "old.parquet")[1] == BORN
    row = {"id": "1", "text": "Who?", "golden_answers": ["Ann"]}
    for fact in ({"passage_id": 7, "value": "Ann"}, {"passage_id": 7, "value": "Ann", "objective": None}):
        (tmp_path / "q.jsonl").write_text(json.dumps(row | {"evidence": [fact]}))
        assert read_questions(tmp_path / "q.jsonl")[0].evidence == [Evidence(passage_id="7", value="Ann")]
    write_trajectories(tmp_path / "t.parquet", [group_of(HALF)])
    (read,) = read_trajectories(tmp_path / "t.parquet")
    assert read.question == PAIR


@pytest.mark.parametrize(("objectives", "last"), [([["Ann"], ["Bo"]], 1), ([], 0)])
def test_a_fact_of_an_objective_that_is_not_asked_is_refused(tmp_path, objectives, last):
    row = {"id": "1", "text": "Who?", "golden_answers": ["Ann"], "objectives": objectives}
    row["evidence"] = [{"passage_id": "a", "value": "Ann", "objective": 2}]
    (tmp_path / "q.jsonl").write_text(json.dumps(row))
    with pytest.raises(ConfigError, match=rf"evidence\[0\].objective is 2; expected 0 to {last}"):
        read_questions(tmp_path / "q.jsonl")


def test_questions_are_known_by_the_hash_that_earlier_versions_gave_them():
    assert questions_sha256([BORN]) == "9546f71e79427c79"
    assert questions_sha256([replace(BORN, user="ann")]) != questions_sha256([BORN])
    assert questions_sha256([PAIR]) != questions_sha256(
        [replace(PAIR, evidence=[replace(fact, objective=0) for fact in PAIR.evidence])]
    )


def test_a_script_plays_gaps_that_it_can_tell_apart():
    gaps = [replace(BORN, text=f"{GAP} directs Film"), replace(CAPITAL, text=f"{GAP} is a city")]
    assert all(map(ClozeDemonstration.can_play, gaps))
    assert ClozeDemonstration.can_play(next(join_objectives(gaps, objectives=2)))
    for others in (
        [replace(BORN, text=f"Why?; {GAP} directs Film"), gaps[1]],  # three texts
        [gaps[0], CAPITAL],  # no gap
        [gaps[0], replace(gaps[1], evidence=[])],
    ):
        assert not ClozeDemonstration.can_play(next(join_objectives(others, objectives=2)))


def test_the_command_says_how_many_questions_were_too_few_for_one_more(tmp_path, capsys):
    rows = [{"question": f"question {number}?", "answer": str(number)} for number in range(3)]
    (tmp_path / "three.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["data", "objectives", str(tmp_path / "three.jsonl"), str(tmp_path / "pairs.parquet")]) == 0
    assert "1 questions of 2 objectives" in (out := capsys.readouterr().out) and "too few for one more: 1" in out
    assert len(read_questions(tmp_path / "pairs.parquet")) == 1


def test_a_joined_answer_has_one_part_for_each_objective():
    asked = [replace(BORN, golden_answers=["Oslo; Norway", "Oslo"]), CAPITAL]
    (joined,) = join_objectives(asked, objectives=2)
    assert joined.golden_answers == [f"Oslo; {CAPITAL.golden_answers[0]}"]
    assert joined.objectives[0] == ["Oslo; Norway", "Oslo"]
