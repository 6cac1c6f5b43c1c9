"""Two evaluated runs against each other: only what both were asked, the same way, counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from mempipe.cli import main
from mempipe.evaluation.results import ResultFolder, result_row
from mempipe.settings import ConfigError
from mempipe.studies.compare import OVERALL, compare_runs, warnings
from mempipe.types import EndReason, Group, Question, Trajectory

SETTINGS = {"sampling": {"temperature": 0.0}, "judge": None}


def results(
    folder: Path,
    rights: dict[str, bool],
    *,
    texts: dict[str, str] | None = None,
    aliases: dict[str, list[str]] | None = None,
    num_samples: int = 1,
    finished: bool = True,
) -> Path:
    """A set: question id to whether it was answered rightly."""
    groups = []
    for key, is_right in rights.items():
        golds = ["Nile", *(aliases or {}).get(key, [])]
        question = Question(id=key, text=(texts or {}).get(key, f"{key}?"), golden_answers=golds)
        attempts = [
            Trajectory(
                id="t",
                group_id=key,
                member=i,
                contexts=[],
                end_reason=EndReason.ANSWERED,
                answer="Nile" if is_right else "Rhine",
            )
            for i in range(num_samples)
        ]
        groups.append(Group(id=key, question=question, trajectories=attempts))
    found = ResultFolder(folder, {**SETTINGS, "num_samples": num_samples})
    found.open()
    found.append(groups, [result_row(group, growing=False, prompt_hash="p") for group in groups])
    if finished:
        found.finish()
    return folder.parent


def test_means_difference_and_mcnemar_are_over_the_shared_questions(tmp_path):
    a = results(tmp_path / "a" / "nq", {"1": True, "2": False, "3": False, "4": False, "only-a": True})
    b = results(tmp_path / "b" / "nq", {"4": False, "3": True, "2": True, "1": False, "x": True, "y": True})
    (nq,) = compare_runs(a, b)
    assert (nq.num_shared, nq.num_only_first, nq.num_only_second, nq.num_changed) == (4, 1, 2, 0)
    assert (nq.first, nq.second, nq.difference.value) == (0.25, 0.5, 0.25)
    assert (nq.mcnemar.gained, nq.mcnemar.lost, nq.mcnemar.p_value) == (2, 1, 1.0)
    assert warnings(a, b, [nq]) == [f"nq: questions skipped: 1 only in {a}, 2 only in {b}"]


def test_a_run_that_was_interrupted_is_said_to_be_unfinished(tmp_path):
    a = results(tmp_path / "a" / "nq", {"1": True, "2": False})
    b = results(tmp_path / "b" / "nq", {"1": True, "2": True}, finished=False)
    assert warnings(a, b, compare_runs(a, b)) == [
        f"nq: {b} is unfinished; run its evaluation to its end for the other questions"
    ]


def test_a_question_that_was_asked_otherwise_is_left_out_and_counted(tmp_path):
    a = results(tmp_path / "a" / "nq", {"1": True, "2": True, "3": True})
    b = results(tmp_path / "b" / "nq", {"1": True, "2": True, "3": True}, texts={"2": "another?"}, aliases={"3": ["x"]})
    (nq,) = compare_runs(a, b)
    assert (nq.num_shared, nq.num_changed) == (1, 2)
    assert warnings(a, b, [nq]) == ["nq: questions skipped: 2 asked differently"]


def test_all_sets_weigh_the_same_whatever_their_size(tmp_path):
    for run, (small, large) in {"a": (False, False), "b": (True, False)}.items():
        results(tmp_path / run / "bamboogle", {"1": small}, texts={"1": "Whose?"})
        results(tmp_path / run / "nq", {str(i): large for i in range(9)})
    *_, overall = compare_runs(tmp_path / "a", tmp_path / "b")
    assert (overall.label, overall.num_shared, overall.difference.value) == (OVERALL, 10, 0.5)
    assert (overall.mcnemar.gained, overall.mcnemar.lost) == (1, 0)


def test_a_question_at_several_lengths_is_one_question(tmp_path):
    """Three lengths of the same ten questions: the interval of all sets is that of one, and McNemar's test of 30 pairs
    that are 10 is not made."""
    for length in (50, 100, 200):
        texts = {f"test_{length}-{i}": f"Who is {i}?" for i in range(10)}
        for run, right in {"a": 3, "b": 7}.items():
            rights = {f"test_{length}-{i}": i < right for i in range(10)}
            results(tmp_path / run / f"ruler_hqa_{length}", rights, texts=texts)
    *sets, overall = compare_runs(tmp_path / "a", tmp_path / "b")
    assert overall.difference.low == pytest.approx(sets[0].difference.low, abs=0.11)
    assert overall.difference.high == pytest.approx(sets[0].difference.high, abs=0.11)
    assert overall.mcnemar is None and overall.verdict == "–" and sets[0].mcnemar.gained == 4


def test_rows_are_joined_by_id_whatever_their_order(tmp_path):
    rights = {str(i): i % 3 == 0 for i in range(30)}
    a = results(tmp_path / "a" / "nq", rights)
    b = results(tmp_path / "b" / "nq", dict(reversed(rights.items())))
    (nq,) = compare_runs(a, b)
    assert nq.difference.value == 0.0 and (nq.mcnemar.gained, nq.mcnemar.lost) == (0, 0)
    (in_order,) = compare_runs(a, results(tmp_path / "c" / "nq", rights))
    assert nq == in_order


def test_mcnemar_has_no_meaning_for_several_attempts(tmp_path):
    a = results(tmp_path / "a" / "nq", {"1": True}, num_samples=2)
    b = results(tmp_path / "b" / "nq", {"1": False}, num_samples=2)
    assert compare_runs(a, b)[0].mcnemar is None


def test_the_interval_is_paired(tmp_path):
    a = results(tmp_path / "a" / "nq", {str(i): i % 2 == 0 for i in range(40)})
    b = results(tmp_path / "b" / "nq", {str(i): i % 2 == 0 or i == 1 for i in range(40)})
    difference = compare_runs(a, b)[0].difference
    assert (difference.low, difference.value) == (0.0, 0.025) and difference.high < 0.1  # unpaired: .25


@pytest.mark.parametrize("gained", [False, True])
def test_few_questions_that_all_differ_alike_are_no_certainty(tmp_path, gained):
    a = results(tmp_path / "a" / "nq", {str(i): not gained for i in range(3)})
    b = results(tmp_path / "b" / "nq", {str(i): True for i in range(3)})
    difference = compare_runs(a, b)[0].difference
    assert difference.value == float(gained)
    assert difference.high - difference.low > 0.3 and difference.low >= -1 and difference.high <= 1


def test_sets_that_one_side_lacks_and_other_settings_are_said(tmp_path):
    a = results(tmp_path / "a" / "nq", {"1": True})
    results(tmp_path / "a" / "popqa", {"1": True})
    b = results(tmp_path / "b" / "nq", {"1": True}, num_samples=4)
    lines = warnings(a, b, compare_runs(a, b))
    assert lines == [f"only {a} has popqa", f"nq: num_samples is 1 in {a} and 4 in {b}"]


def test_an_evaluation_of_a_single_run_stands_for_it_and_of_several_does_not(tmp_path):
    results(tmp_path / "one" / "run" / "nq", {"1": True})
    results(tmp_path / "two" / "x" / "nq", {"1": True})
    results(tmp_path / "two" / "y" / "nq", {"1": True})
    assert compare_runs(tmp_path / "one", tmp_path / "two" / "x")[0].num_shared == 1
    for folder, message in (
        (tmp_path / "two", r"the results of x, y; name one of them"),
        (tmp_path / "none", "does not exist"),
        (next((tmp_path / "one" / "run" / "nq").glob("*.parquet")), "is a file; give the folder of an evaluated run"),
        (tmp_path / "one" / "run" / "nq", "holds no results"),
    ):
        with pytest.raises(ConfigError, match=message):
            compare_runs(folder, tmp_path / "one")


def test_a_set_in_which_no_question_is_shared_is_said(tmp_path):
    a = results(tmp_path / "a" / "nq", {"1": True})
    b = results(tmp_path / "b" / "nq", {"2": True})
    for folder in (a, b):
        results(folder / "popqa", {"1": True})
    comparisons = compare_runs(a, b)
    assert [each.label for each in comparisons] == ["popqa"]
    assert warnings(a, b, comparisons) == ["nq: no question is shared; the set is skipped"]


def test_runs_without_a_shared_question_or_a_known_metric_are_refused(tmp_path):
    a = results(tmp_path / "a" / "nq", {"1": True})
    b = results(tmp_path / "b" / "popqa", {"1": True})
    with pytest.raises(ConfigError, match="share no question; their sets are nq and popqa"):
        compare_runs(a, b)
    with pytest.raises(ConfigError, match="--metric is 'exact'; the metrics are em, f1"):
        compare_runs(a, a, metric="exact")


def test_the_command_prints_the_table_and_what_was_left_out(tmp_path, capsys):
    a = results(tmp_path / "a" / "nq", {"1": False, "2": False})
    b = results(tmp_path / "b" / "nq", {"1": True})
    assert main(["compare", str(a), str(b)]) == 0
    out = capsys.readouterr().out
    assert "100.00" in out and "1 gained, 0" in out and "note" in out and "1 only in" in out
    with pytest.raises(SystemExit, match="2"):
        main(["compare", str(a)])
    assert "the following arguments are required: B" in capsys.readouterr().err
