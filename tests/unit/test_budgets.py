"""How much memory is enough: known effects are found, ties give no winner."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from mempipe.cli import main
from mempipe.evaluation.budgets import budget_curve, budget_curves
from mempipe.evaluation.results import ResultFolder, ResultRow, result_row
from mempipe.settings import ConfigError
from mempipe.types import EndReason, Group, Question, Trajectory


def answered(rights: list[bool]) -> list[Group]:
    return [
        Group(
            id=str(i),
            question=Question(id=str(i), text="Which?", golden_answers=["Nile"]),
            trajectories=[
                Trajectory(
                    id="t",
                    group_id=str(i),
                    member=0,
                    contexts=[],
                    end_reason=EndReason.ANSWERED,
                    answer="Nile" if right else "Rhine",
                )
            ],
        )
        for i, right in enumerate(rights)
    ]


def rows(rights: list[bool]) -> list[ResultRow]:
    return [result_row(group, growing=False, prompt_hash="p") for group in answered(rights)]


def evaluated(
    evaluation: Path, run: str, tokens: int, rights: list[bool], *, agent: str = "memsearcher", finished: bool = True
) -> None:
    settings = {"run": {"agent": {"name": agent}, "budget": {"memory_tokens": tokens}}, "num_samples": 1}
    folder = ResultFolder(evaluation / run / "nq", settings)
    folder.open()
    folder.append(answered(rights), rows(rights))
    if finished:
        folder.finish()


def share(of: float, number: int) -> list[bool]:
    return [i < of * number for i in range(number)]


def test_the_smallest_budget_is_where_the_curve_bends():
    scores = {4: 0.1, 8: 0.5, 16: 0.9, 32: 0.9}
    curve = budget_curve("a", {tokens: (f"m{tokens}", {"nq": rows(share(p, 200))}) for tokens, p in scores.items()})
    assert [point.memory_tokens for point in curve.points] == [4, 8, 16, 32]
    assert [point.is_worse for point in curve.points] == [True, True, False, False]
    assert curve.smallest_sufficient.memory_tokens == 16
    assert curve.points[1].against_largest is not None and curve.points[1].against_largest.difference.value == -0.4


def test_a_budget_below_one_that_is_worse_does_not_count():
    scores = {4: 0.9, 8: 0.5, 16: 0.9}
    curve = budget_curve("a", {tokens: (f"m{tokens}", {"nq": rows(share(p, 200))}) for tokens, p in scores.items()})
    assert curve.smallest_sufficient.memory_tokens == 16


def test_ties_give_a_false_winner_no_more_often_than_the_test_allows():
    generator, worse = random.Random(1), 0
    for _ in range(40):
        drawn = {n: [generator.random() < 0.6 for _ in range(100)] for n in (4, 8, 16, 32)}
        curve = budget_curve("a", {n: (f"m{n}", {"nq": rows(rights)}) for n, rights in drawn.items()})
        worse += any(point.is_worse for point in curve.points)
    assert worse <= 6  # 2.5 % are expected, since only one side counts as worse


def test_a_difference_of_the_stated_size_is_found_about_as_often_as_stated():
    generator, found, number = random.Random(2), 0, 200
    equal = [rows([generator.random() < p for _ in range(number)]) for p in (0.5, 0.5)]
    size = budget_curve("a", {8: ("s", {"nq": equal[0]}), 16: ("l", {"nq": equal[1]})}).points[0].detectable
    assert size is not None and 0.1 < size < 0.2
    for _ in range(40):
        drawn = [rows([generator.random() < p for _ in range(number)]) for p in (0.5 - size / 2, 0.5 + size / 2)]
        curve = budget_curve("a", {8: ("s", {"nq": drawn[0]}), 16: ("l", {"nq": drawn[1]})})
        found += curve.points[0].is_worse
    assert 0.65 <= found / 40 <= 0.95


def test_the_command_writes_and_prints_the_answer(tmp_path, capsys):
    for tokens, p in {8: 0.2, 16: 0.8, 32: 0.8}.items():
        evaluated(tmp_path, f"memory-{tokens}", tokens, share(p, 100))
    assert main(["budgets", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "**16 tokens** are enough" in out and out.strip() == (tmp_path / "budgets.md").read_text().strip()
    assert "| 8 | 20.0 (" in out
    assert "0 gained, 60 lost" in out and "| worse |" in out and "| largest |" in out


def test_what_is_no_curve_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        budget_curves(tmp_path / "none")
    evaluated(tmp_path / "one", "a", 8, share(0.5, 10))
    with pytest.raises(ConfigError, match="no agent that was evaluated under two values"):
        budget_curves(tmp_path / "one")
    evaluated(tmp_path / "one", "b", 8, share(0.5, 10))
    with pytest.raises(ConfigError, match=r"a and b are both memsearcher with budget.memory_tokens 8"):
        budget_curves(tmp_path / "one")
    evaluated(tmp_path / "cut", "a", 8, share(0.5, 10))
    evaluated(tmp_path / "cut", "b", 16, share(0.5, 10), finished=False)
    with pytest.raises(ConfigError, match="is unfinished; run the evaluation to its end"):
        budget_curves(tmp_path / "cut")
    with pytest.raises(ConfigError, match="--metric is 'exact'"):
        budget_curves(tmp_path / "cut", metric="exact")
