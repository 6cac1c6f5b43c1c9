"""What the commands of an evaluation and a sweep have written is read as one frame."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from result_builders import answered

import mempipe
from mempipe.evaluation.results import ResultFolder, result_row
from mempipe.settings import ConfigError


def write(folder: Path, rights: list[bool], *, memory_tokens: int | None, control: str | None = None) -> None:
    """Writes the results of one run on one set."""
    budget = {} if memory_tokens is None else {"memory_tokens": memory_tokens}
    results = ResultFolder(folder, {"run": {"agent": {"name": "memsearcher"}, "budget": budget}, "control": control})
    groups = answered(rights, num_hops=[2] * len(rights))
    results.append(groups, [result_row(each, growing=False, prompt_hash="p") for each in groups])
    results.finish()


def test_a_sweep_has_a_row_for_each_question_of_each_trial(tmp_path):
    write(tmp_path / "trials" / "small" / "a" / "nq", [True, False], memory_tokens=16)
    write(tmp_path / "trials" / "large" / "a" / "nq", [True, True], memory_tokens=64)
    rows = mempipe.results(tmp_path)
    assert rows["trial"].to_list() == ["large", "large", "small", "small"]
    assert rows.filter(trial="small")["em"].to_list() == [1.0, 0.0]
    assert rows.filter(trial="small")["answer"].to_list() == ["Nile", "Rhine"]
    assert set(rows["memory_tokens"]) == {16, 64} and set(rows["num_hops"]) == {2}


def test_a_control_is_under_no_budget(tmp_path):
    write(tmp_path / "trials" / "large" / "a" / "nq", [True, True], memory_tokens=64)
    write(tmp_path / "trials" / "blank" / "a" / "nq", [False, False], memory_tokens=64, control="no_memory")
    by_budget = mempipe.results(tmp_path).group_by("memory_tokens").agg(pl.mean("em"))
    assert dict(by_budget.rows()) == {64: 1.0, None: 0.0}


def test_an_evaluation_its_run_and_its_set_are_read_alike(tmp_path):
    write(tmp_path / "x" / "react" / "nq", [True], memory_tokens=None)
    write(tmp_path / "x" / "react" / "hotpotqa", [False], memory_tokens=None)
    whole = mempipe.results(tmp_path / "x")
    assert whole["set"].to_list() == ["hotpotqa", "nq"] and whole["memory_tokens"].null_count() == 2
    assert set(whole["run"]) == {"react"} and whole["trial"].null_count() == 2
    assert mempipe.results(tmp_path / "x" / "react").equals(whole)
    assert mempipe.results(tmp_path / "x" / "react" / "nq").equals(whole.filter(set="nq"))


def test_several_evaluations_are_not_put_together(tmp_path):
    for name, right in (("monday", True), ("tuesday", False)):
        write(tmp_path / name / "trained" / "nq", [right], memory_tokens=64)
    with pytest.raises(ConfigError, match=r"several evaluations \(monday, tuesday\), whose runs may have"):
        mempipe.results(tmp_path)
    assert mempipe.results(tmp_path / "monday")["em"].to_list() == [1.0]


def test_a_folder_without_results_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no results; give the folder of an evaluation or a sweep"):
        mempipe.results(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        mempipe.results(tmp_path / "nowhere")
