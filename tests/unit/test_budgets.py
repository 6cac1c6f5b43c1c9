"""How much memory is enough: known effects are found, ties give no winner."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from result_builders import answered

from mempipe.cli import main
from mempipe.evaluation.results import ResultFolder, ResultRow, result_row
from mempipe.reports.budgets import (
    budget_lines,
    causes_by_budget,
    figures_by_hops,
    reference_verdicts,
    verdict,
    write_budget_report,
)
from mempipe.settings import ConfigError
from mempipe.studies.budgets import (
    BudgetStudy,
    MeasuredRun,
    ModelSize,
    budget_curve,
    measured_runs,
    pooled,
    study_evaluation,
    study_runs,
)


def rows(rights: list[bool]) -> list[ResultRow]:
    return [result_row(group, growing=False, prompt_hash="p") for group in answered(rights)]


def evaluated(
    evaluation: Path,
    run: str,
    tokens: int | None,
    rights: list[bool],
    *,
    agent: str = "memsearcher",
    finished: bool = True,
) -> None:
    budget = {"memory_tokens": tokens} if tokens else {}
    settings = {"run": {"agent": {"name": agent}, "budget": budget}, "num_samples": 1}
    folder = ResultFolder(evaluation / run / "nq", settings)
    folder.open()
    folder.append(answered(rights), rows(rights))
    if finished:
        folder.finish()


def costing(turns: list[list[int]]) -> list[ResultRow]:
    """Rows of right answers whose contexts held so many tokens, turn by turn."""
    return [
        replace(row, question_id=str(i), context_tokens_by_turn=[own], total_tokens=[sum(own)])
        for i, (row, own) in enumerate(zip(rows([True] * len(turns)), turns, strict=True))
    ]


def test_where_nothing_is_right_no_budget_is_called_enough():
    wrong = rows([False] * 20)
    said = verdict(budget_curve("memsearcher", {4: [{"nq": wrong}], 8: [{"nq": wrong}]}))
    assert said == (
        "memsearcher: every score is 0 under every budget, which says nothing of the memory that is enough."
    )


def test_one_question_proves_no_budget_worse(tmp_path):
    curve = budget_curve("a", {tokens: [{"nq": rows([right])}] for tokens, right in {4: False, 8: True}.items()})
    assert not curve.points[0].is_worse
    for tokens, right in {4: False, 8: True}.items():
        evaluated(tmp_path, f"memory-{tokens}", tokens, [right])
    assert main(["budgets", str(tmp_path)]) == 0
    text = (tmp_path / "budgets.md").read_text() + (tmp_path / "budgets.svg").read_text()
    assert "-100.0 (one question: no interval)" in text and "| none | not significantly worse |" in text
    assert "inf " not in text and "nan" not in text


def share(of: float, number: int) -> list[bool]:
    return [i < of * number for i in range(number)]


def test_the_smallest_budget_is_where_the_curve_bends():
    scores = {4: 0.1, 8: 0.5, 16: 0.9, 32: 0.9}
    curve = budget_curve("a", {tokens: [{"nq": rows(share(p, 200))}] for tokens, p in scores.items()})
    assert [point.memory_tokens for point in curve.points] == [4, 8, 16, 32]
    assert [point.is_worse for point in curve.points] == [True, True, False, False]
    assert curve.smallest_sufficient.memory_tokens == 16
    assert curve.points[1].against_largest is not None and curve.points[1].against_largest.difference.value == -0.4


def test_a_budget_below_one_that_is_worse_does_not_count():
    scores = {4: 0.9, 8: 0.5, 16: 0.9}
    curve = budget_curve("a", {tokens: [{"nq": rows(share(p, 200))}] for tokens, p in scores.items()})
    assert curve.smallest_sufficient.memory_tokens == 16


@pytest.mark.slow
def test_ties_give_a_false_winner_no_more_often_than_the_test_allows():
    generator, worse = random.Random(1), 0
    for _ in range(40):
        drawn = {n: [generator.random() < 0.6 for _ in range(100)] for n in (4, 8, 16, 32)}
        curve = budget_curve("a", {n: [{"nq": rows(rights)}] for n, rights in drawn.items()})
        worse += any(point.is_worse for point in curve.points)
    assert worse <= 6  # 2.5 % are expected, since only one side counts as worse


@pytest.mark.slow
def test_a_difference_of_the_stated_size_is_found_about_as_often_as_stated():
    generator, found, number = random.Random(2), 0, 200
    equal = [rows([generator.random() < p for _ in range(number)]) for p in (0.5, 0.5)]
    size = budget_curve("a", {8: [{"nq": equal[0]}], 16: [{"nq": equal[1]}]}).points[0].detectable
    assert size is not None and 0.1 < size < 0.2
    for _ in range(40):
        drawn = [rows([generator.random() < p for _ in range(number)]) for p in (0.5 - size / 2, 0.5 + size / 2)]
        curve = budget_curve("a", {8: [{"nq": drawn[0]}], 16: [{"nq": drawn[1]}]})
        found += curve.points[0].is_worse
    assert 0.65 <= found / 40 <= 0.95


def test_the_command_writes_and_prints_the_answer(tmp_path, capsys):
    for tokens, p in {8: 0.2, 16: 0.8, 32: 0.8}.items():
        evaluated(tmp_path, f"memory-{tokens}", tokens, share(p, 100))
    evaluated(tmp_path, "history", None, share(0.5, 100), agent="react")
    assert main(["budgets", str(tmp_path)]) == 0
    out, written = capsys.readouterr().out, (tmp_path / "budgets.md").read_text()
    page = (tmp_path / "budgets.html").read_text()
    assert "memsearcher: 16 tokens are enough" in out and "16 tokens are enough" in written and "16 tokens are" in page
    assert "| 8 | 20.0 (" in out and "| history | – | 50.0 (" in out
    assert "0 gained, 60 lost" in out and "| worse |" in out and "| largest |" in out
    assert page.count("<figure>") == 2 and (tmp_path / "budgets.svg").stat().st_size > 500


def test_an_agent_without_a_budget_is_compared_with_the_smallest_sufficient_one():
    runs = [
        MeasuredRun(name=f"m{tokens}", agent="mem", memory_tokens=tokens, sets={"nq": rows(share(p, 100))})
        for tokens, p in {4: 0.1, 8: 0.7, 16: 0.7}.items()
    ]
    runs.append(MeasuredRun(name="r", agent="react", memory_tokens=None, sets={"nq": rows(share(0.5, 100))}))
    (reference,) = study_runs(runs).references
    difference = reference.differences["mem"].difference
    assert difference.value == pytest.approx(0.2) and difference.low > 0.1


def test_the_cache_of_a_budget_is_that_of_the_largest_context_of_an_attempt():
    """2 * 3 layers * 2 KV heads * 16 dimensions * 4 bytes = 768 bytes for each token."""
    size = ModelSize(num_parameters=500_000, cache_bytes_per_token=768)
    runs = [
        MeasuredRun(name=name, agent="mem", memory_tokens=tokens, sets={"nq": costing([[30, peak, 40]])}, model=size)
        for name, tokens, peak in (("m4", 4, 50), ("m8", 8, 2000))
    ]
    double = ModelSize(num_parameters=1_000_000, cache_bytes_per_token=1536)
    sets = {"nq": costing([[100, 300, 500]])}
    runs.append(MeasuredRun(name="r", agent="react", memory_tokens=None, sets=sets, model=double))
    study = study_runs(runs)
    assert [point.measured.largest_context for point in study.curves[0].points] == [50, 2000]
    text = "\n".join(budget_lines(study))
    assert "| 50 | 38.4 kB |" in text and "| 2,000 | 1.54 MB |" in text  # 50 * 768, 2000 * 768
    assert "| react | 1.00 M |" in text and "| 500 | 768 kB |" in text  # 500 * 1536
    (sentence,) = reference_verdicts(study)
    assert (
        "is not significantly different from react, which has no memory budget and 2.0 times the parameters" in sentence
    )


def test_the_size_of_a_model_is_read_from_its_folder(tmp_path):
    shape = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({**shape, "intermediate_size": 96, "vocab_size": 200}))
    run = {"agent": {"name": "memsearcher"}, "budget": {"memory_tokens": 8}}
    for name, path in {"a": str(tmp_path), "b": str(tmp_path / "moved")}.items():
        model = {"path": path, "dtype": "float32"}
        folder = ResultFolder(tmp_path / "runs" / name / "nq", {"run": {**run, "model": model}})
        folder.open()
        folder.finish()
    known, moved = measured_runs(tmp_path / "runs")
    assert known.model is not None and known.model.cache_bytes_per_token == 2 * 3 * 2 * 16 * 4
    assert moved.model is None


def test_hops_have_curves_of_their_own_against_the_budget_and_against_the_tokens():
    def asked(cost: int) -> list[ResultRow]:
        return [replace(row, num_hops=1 + i % 2, total_tokens=[cost]) for i, row in enumerate(rows([True] * 8))]

    curve = budget_curve("a", {4: [{"nq": asked(900)}], 8: [{"nq": asked(400)}]})
    by_budget, by_tokens = figures_by_hops(BudgetStudy(metric="em", curves=[curve], references=[]), curve)
    assert by_budget.title == "a: em by memory budget and hops" and by_tokens.title == "a: em by tokens and hops"
    assert [key.label for key in by_tokens.keys] == ["1 hop", "2 hops"]
    assert {"400", "900"} <= {shape.text for shape in by_tokens.chart.shapes}


def test_first_causes_are_drawn_by_budget_and_hops(tmp_path):
    def asked(causes: list[str]) -> list[ResultRow]:
        each = zip(rows([not cause for cause in causes]), causes, strict=True)
        return [replace(row, num_hops=1 + i % 2, first_causes=[cause]) for i, (row, cause) in enumerate(each)]

    sets = {4: asked(["lost", "not_kept", "", "lost"]), 8: asked(["", "", "", "lost"])}
    curve = budget_curve("a", {tokens: [{"nq": own}] for tokens, own in sets.items()})
    every, one_hop, _ = causes_by_budget(curve)
    assert [figure.title for figure in (every, one_hop)] == [
        "a: first causes of wrong answers",
        "a: first causes at 1 hop",
    ]
    assert [key.label for key in every.keys] == ["not kept", "lost"] and [key.label for key in one_hop.keys] == ["lost"]
    assert {"0 %", "50 %"} <= {shape.text for shape in every.chart.shapes}  # the highest: 2 of 4 attempts with 4 tokens
    paths = write_budget_report(tmp_path, BudgetStudy(metric="em", curves=[curve], references=[]), name="own")
    plots = {path.name: ElementTree.parse(path).getroot() for path in paths if path.suffix == ".svg"}
    assert set(plots) == {"budgets.svg", "causes.svg"}
    texts = ["".join(element.itertext()) for element in plots["causes.svg"].iter() if element.tag.endswith("text")]
    assert {"not kept", "lost"} <= set(texts)  # the legend of a plot that stands alone
    assert "![a: first causes of wrong answers](causes.svg)" in (tmp_path / "budgets.md").read_text()


def test_seeds_are_put_together_question_by_question():
    one, two = share(0.5, 100), share(0.7, 100)
    curve = budget_curve("a", {8: [{"nq": rows(one)}, {"nq": rows(two)}], 16: [{"nq": rows(two)}, {"nq": rows(two)}]})
    small = curve.points[0]
    assert small.measured.by_seed == [0.5, 0.7] and small.measured.score.value == pytest.approx(0.6)
    assert len(small.measured.sets["nq"]) == 100 and {len(row.answers) for row in small.measured.sets["nq"]} == {2}
    assert small.against_largest is not None and small.against_largest.num_shared == 100
    assert small.against_largest.difference.value == pytest.approx(-0.1) and small.is_worse


def test_questions_that_share_only_their_id_stay_apart():
    other = [replace(row, golden_answers=["Amazon"]) for row in rows([True, True])]
    assert len(pooled([{"nq": rows([True, False])}, {"nq": other}])["nq"]) == 4


def test_what_is_no_curve_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        study_evaluation(tmp_path / "none")
    evaluated(tmp_path / "one", "a", 8, share(0.5, 10))
    with pytest.raises(ConfigError, match="no agent that was evaluated under two values"):
        study_evaluation(tmp_path / "one")
    evaluated(tmp_path / "one", "b", 8, share(0.5, 10))
    with pytest.raises(ConfigError, match=r"a and b are both memsearcher with budget.memory_tokens 8"):
        study_evaluation(tmp_path / "one")
    evaluated(tmp_path / "cut", "a", 8, share(0.5, 10))
    evaluated(tmp_path / "cut", "b", 16, share(0.5, 10), finished=False)
    with pytest.raises(ConfigError, match="is unfinished; run the evaluation to its end"):
        study_evaluation(tmp_path / "cut")
    with pytest.raises(ConfigError, match="--metric is 'exact'"):
        study_runs([], metric="exact")
