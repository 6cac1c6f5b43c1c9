"""A chain under several seeds, and the one table over them. No training is started; numbers are worked out by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from chain_setup import CONFIGS, tiny
from result_builders import answered

from mempipe.checks.chain import check_rows
from mempipe.config import RunConfig
from mempipe.evaluation.results import ResultFolder, ResultRow, result_row
from mempipe.evaluation.statistics import t_interval
from mempipe.evaluation.suite import Bootstrap, EvaluationSuite
from mempipe.evaluation.table import published_claims
from mempipe.provenance import model_sha256
from mempipe.reports.over_seeds import write_seed_report
from mempipe.runs import Run
from mempipe.settings import ConfigError
from mempipe.studies.chain import (
    chain_runs,
    chain_table,
    compared_rows,
    of_each_seed,
    untrained_rows,
)
from mempipe.studies.over_seeds import over_seeds, read_seeds
from pipelines import chain as pipeline

BOOTSTRAP = Bootstrap(num_resamples=200)


def rights(number: int, *, of: int = 10) -> list[ResultRow]:
    """The first `number` of the questions are right."""
    groups = answered([i < number for i in range(of)])
    return [result_row(group, growing=False, prompt_hash="p") for group in groups]


EVALUATED = {
    1: {"with": {"a": rights(8), "b": rights(6)}, "alone": {"a": rights(5), "b": rights(5)}},
    2: {"with": {"a": rights(9), "b": rights(7)}, "alone": {"a": rights(5), "b": rights(7)}},
    3: {"with": {"a": rights(10), "b": rights(8)}, "alone": {"a": rights(8), "b": rights(6)}},
}


def table(evaluated=EVALUATED, **options: Any):
    return over_seeds(evaluated, **{"metric": "em", "compared": [("with", "alone")], "bootstrap": BOOTSTRAP} | options)


def test_every_row_has_its_mean_over_seeds_and_the_interval_over_trainings():
    made = table()
    assert (made.columns, list(made.rows), made.seeds) == (["a", "b", "average"], ["with", "alone"], [1, 2, 3])
    average = made.rows["with"]["average"]
    assert average.by_seed == pytest.approx([0.7, 0.8, 0.9]) and average.mean == pytest.approx(0.8)
    # deviation 0.1, t of two degrees of freedom 4.302653: 4.302653 * 0.1 / sqrt(3) = 0.248414
    assert (average.trainings.low, average.trainings.high) == pytest.approx((0.551586, 1.048414), abs=1e-6)
    assert average.questions.value == pytest.approx(0.8) and average.questions.low < 0.8 < average.questions.high
    assert made.rows["alone"]["b"].by_seed == pytest.approx([0.5, 0.7, 0.6])


def test_differences_are_taken_within_a_seed():
    gained = table().differences["with - alone"]
    assert gained["a"].by_seed == pytest.approx([0.3, 0.4, 0.2])
    assert gained["average"].by_seed == pytest.approx([0.2, 0.2, 0.2])
    # each side spreads by 0.1 over seeds, the difference not at all: it is the pairs that are compared
    assert (gained["average"].trainings.low, gained["average"].trainings.high) == pytest.approx((0.2, 0.2))
    assert gained["a"].trainings == t_interval(gained["a"].by_seed)
    assert gained["a"].questions.value == pytest.approx(0.3)


def test_one_seed_or_equal_weights_have_no_interval_over_trainings():
    alone = table({1: EVALUATED[1]})
    assert alone.rows["with"]["average"].trainings.low == -math.inf
    kept = table(untrained=["alone"])
    assert kept.rows["alone"]["a"].trainings is None and kept.rows["with"]["a"].trainings is not None


def test_the_questions_of_different_worlds_are_different_questions():
    """Equal ids, other texts: thirty questions, and no ten."""
    worlds = {}
    for seed in (1, 2, 3):
        groups = answered([i < 5 for i in range(10)])
        rows = [result_row(group, growing=False, prompt_hash="p") for group in groups]
        worlds[seed] = {"with": {"a": [replace(row, question=f"{row.question} {seed}") for row in rows]}}
    apart = over_seeds(worlds, metric="em", compared=[], bootstrap=BOOTSTRAP).rows["with"]["a"].questions
    same = {seed: {"with": {"a": rights(5)}} for seed in (1, 2, 3)}
    together = over_seeds(same, metric="em", compared=[], bootstrap=BOOTSTRAP).rows["with"]["a"].questions
    assert apart.high - apart.low < 0.75 * (together.high - together.low)


def saved(folder: Path, runs: dict[str, dict[str, Sequence[ResultRow]]], *, finish: bool = True) -> Path:
    for name, sets in runs.items():
        for label, rows in sets.items():
            groups = answered([row.em == 1 for row in rows])
            results = ResultFolder(folder / name / label, {"run": {"agent": {"name": "memagent"}, "budget": {}}})
            results.open()
            results.append(groups, list(rows))
            if finish:
                results.finish()
    return folder


def test_the_evaluations_of_the_seeds_are_read_and_put_together(tmp_path):
    folders = {seed: saved(tmp_path / f"{seed}", runs) for seed, runs in EVALUATED.items()}
    read = read_seeds(folders, ["with", "alone"])
    assert table(read).rows["with"]["average"].by_seed == pytest.approx([0.7, 0.8, 0.9])
    files = write_seed_report(tmp_path / "out", [table(read, kind="RULER")], name="c")
    text, page, numbers = (file.read_text() for file in files)
    assert "| with | 90.00 (65.2–114.8) | 70.00 (45.2–94.8) | 80.00 (55.2–104.8) |" in text
    assert "| with - alone | 30.00 (5.2–54.8) |" in text and "| with | 70.00 | 80.00 | 90.00 |" in text
    assert "## RULER: em, percent" in text and "seeds 1, 2, 3, " not in page
    assert "seeds 1, 2, 3" in page and "interval over trainings" in page
    assert json.loads(numbers)[0]["differences"]["with - alone"]["average"]["by_seed"] == pytest.approx([0.2] * 3)


def test_sets_of_two_families_share_no_average_and_stand_in_the_papers_order(tmp_path):
    sets = [{"name": "hqa", "num_docs": 200, "file": "a"}, {"name": "musique"}]
    sets.append({"name": "hqa", "num_docs": 50, "file": "a"})
    chain = tiny(tmp_path, seeds=[1, 2, 3], benchmarks=sets, data_dir=str(tmp_path))
    long, musique, short = (each.label for each in chain.benchmarks)
    parts = of_each_seed(chain)
    for seed, part in parts.items():
        names = [run.name for run in chain_table(part, chain_runs(part), part.tracking).runs]
        answers = {label: rights(5 + seed) for label in (long, musique, short)}
        saved(part.folder / "evaluation", dict.fromkeys(names, answers))
    *_, numbers = pipeline._over_seeds(chain, parts)
    found = dict.fromkeys(tuple(table["sets"]) for table in json.loads(numbers.read_text()))
    assert list(found) == [(musique,), (short, long)]


def test_a_seed_that_lacks_a_run_or_a_set_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere does not exist; run the evaluation first"):
        read_seeds({1: tmp_path / "nowhere"}, ["with"])
    folders = {1: saved(tmp_path / "1", EVALUATED[1]), 2: saved(tmp_path / "2", {"with": EVALUATED[2]["with"]})}
    with pytest.raises(ConfigError, match=r"2 has no results of alone; run the chain to its end first"):
        read_seeds(folders, ["with", "alone"])
    fewer = {1: folders[1], 2: saved(tmp_path / "3", {"with": {"a": rights(1)}})}
    with pytest.raises(ConfigError, match=r"with has the sets a, but under seed 1 a, b; evaluate both on the same"):
        read_seeds(fewer, ["with"])
    with pytest.raises(ConfigError, match="is unfinished"):
        read_seeds({1: saved(tmp_path / "4", EVALUATED[1], finish=False)}, ["with"])


def test_sets_and_rows_that_the_chain_does_not_list_any_more_do_not_count(tmp_path):
    """The first seed was evaluated on two sets, one of them not to its end; the chain asks one of them now."""
    folders = {1: saved(tmp_path / "1", EVALUATED[1]), 2: saved(tmp_path / "2", {"with": {"a": rights(9)}})}
    saved(tmp_path / "1", {"with": {"c": rights(3)}, "old row": {"a": rights(3)}}, finish=False)
    read = read_seeds(folders, ["with"], labels=["a"])
    assert {seed: [*runs["with"]] for seed, runs in read.items()} == {1: ["a"], 2: ["a"]}
    assert table(read | {3: read[2]}, compared=[]).rows["with"]["a"].by_seed == pytest.approx([0.8, 0.9, 0.9])


def test_a_chain_is_repeated_under_each_seed_in_a_folder_of_its_own(tmp_path):
    chain = tiny(tmp_path, seeds=[1, 7])
    parts = of_each_seed(chain)
    assert list(parts) == [1, 7]
    runs = chain_runs(parts[7])
    assert [run.folder for run in runs] == [
        tmp_path / "tiny-chain" / "seed-7" / name for name in ("memtrain", "memagent", "memagent-alone")
    ]
    assert {run.seed for run in runs} == {7} and {run.seed for run in chain_runs(parts[1])} == {1}
    assert runs[1].model.path == str(runs[0].folder / "huggingface"), "each seed has its own stages"
    assert of_each_seed(tiny(tmp_path))[None].folder == tmp_path / "tiny-chain"


def test_continued_trains_the_last_stage_alone_for_the_steps_of_both(tmp_path):
    chain = tiny(tmp_path, compare="continued")
    *others, with_first, alone, continued = chain_runs(chain)
    assert [run.name for run in (with_first, alone, continued)] == ["memagent", "memagent-alone", "memagent-continued"]
    assert continued.num_steps == others[0].num_steps + alone.num_steps
    assert continued.model.path == alone.model.path
    changed = {"name", "num_steps"}
    assert continued.model_dump(exclude=changed) == alone.model_dump(exclude=changed)
    suite = chain_table(chain, chain_runs(chain), chain.tracking)
    assert [run.name for run in suite.runs] == ["memagent", "memagent-alone", "memagent-continued"]
    assert compared_rows(chain) == [("memagent", "memagent-alone"), ("memagent", "memagent-continued")]


def test_continued_begins_where_the_last_stage_alone_began(tmp_path):
    values = yaml.safe_load((CONFIGS / "tiny_chain.yaml").read_text())["stages"]
    stages = {**values, "third": values["memagent"]}
    *_, alone, continued = chain_runs(tiny(tmp_path, stages=stages, compare="continued"))
    assert (alone.name, continued.name) == ("third-alone", "third-continued")
    assert continued.model.path == alone.model.path == str(tmp_path / "tiny-chain" / "memagent-alone" / "huggingface")


def test_further_rows_are_models_that_the_chain_has_anyway(tmp_path):
    whole = str(CONFIGS / "quickstart_full_text.yaml")
    rows = [{"name": "untrained", "config": whole}, {"name": "only-memtrain", "after": "memtrain"}]
    chain = tiny(tmp_path, rows=rows)
    runs = chain_runs(chain)
    suite = chain_table(chain, runs, chain.tracking)
    assert [run.name for run in suite.runs] == ["memagent", "memagent-alone", "untrained", "only-memtrain"]
    begin, first = suite.runs[2:]
    assert (begin.config, begin.checkpoint) == (whole, str(runs[0].folder / "warm_start"))
    assert (first.config, first.checkpoint) == (str(runs[1].folder), str(runs[0].folder))
    assert untrained_rows(chain) == set(), "the warm start is trained anew under every seed"
    check_rows(chain)


@pytest.mark.parametrize(
    ("model", "same"), [({}, set()), ({"path": "/models/base"}, {"base"}), ({"source": "org/base"}, {"base"})]
)
def test_a_model_that_every_seed_makes_anew_has_an_interval_over_trainings(model, same, tmp_path):
    stages = {
        "first": {"config": "jobs/configs/tiny_memtrain.yaml", "settings": {"model": model, "warm_start": None}},
        "last": {"config": "jobs/configs/quickstart_memagent.yaml", "settings": {"warm_start": None}},
    }
    if "source" in model:
        stages["first"]["settings"]["world"] = None
    chain = tiny(tmp_path, stages=stages, seeds=[1, 2], rows=[{"name": "base"}, {"name": "one", "after": "first"}])
    assert untrained_rows(chain) == same


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"seeds": [1, 1]}, r"seeds is \[1, 1\]; every seed occurs in it once"),
        ({"rows": [{"name": "x", "after": "pretraining"}]}, r"rows: x is after 'pretraining'; expected a stage \(mem"),
        ({"rows": [{"name": "memagent-alone"}]}, "rows: memagent-alone is the name of another row of the table"),
        ({"rows": [{"name": "x"}, {"name": "x"}]}, "rows: x is the name of another row of the table"),
        ({"compare": "continue"}, "compare is 'continue': should be True, False or 'continued'"),
        ({"rows": [{"name": "x", "settings": {"budget": {"chunks": 1}}}]}, "rows: x: budget.chunks is not a setting"),
        (
            {"rows": [{"name": "x", "settings": {"agent": {"chunk_first": True}}}]},
            "rows: x: agent.chunk_first is true, and memtrain has false; .* in the settings of the row",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(changes, sentence, tmp_path):
    with pytest.raises(ConfigError, match=sentence):
        check_rows(tiny(tmp_path, **changes))


def test_a_chain_with_seeds_writes_one_table_over_them(tmp_path, monkeypatch):
    begun: list[str] = []

    def train(run: RunConfig, *, resume: str) -> None:
        begun.append(f"{run.folder.parent.name}/{run.name}")
        done = Run(run, resume="auto")
        done.check_inputs({"model.path": model_sha256(run.model.path)})

    def evaluate(suite: EvaluationSuite) -> list[Path]:
        scores = {"memagent": 8 + int(suite.folder.parent.name[-1]), "memagent-alone": 5}
        saved(suite.folder, {name: {"held-out": rights(scores[name])} for name in scores})
        return [suite.folder / "report.html"]

    monkeypatch.setattr(pipeline.train, "main", train)
    monkeypatch.setattr(pipeline.evaluate, "main", evaluate)
    files = pipeline.main(tiny(tmp_path, seeds=[0, 1], tracking={"enabled": False}))
    names = ("memtrain", "memagent", "memagent-alone")
    assert begun == [f"seed-{seed}/{name}" for seed in (0, 1) for name in names]
    assert [file.name for file in files[:3]] == ["seeds.md", "seeds.html", "seeds.json"]
    em = json.loads((tmp_path / "tiny-chain" / "seeds.json").read_text())[0]
    assert em["differences"]["memagent - memagent-alone"]["held-out"]["by_seed"] == pytest.approx([0.3, 0.4])
    assert em["rows"]["memagent"]["held-out"]["trainings"]["value"] == pytest.approx(0.85)


def test_every_published_claim_names_its_source_and_family():
    assert any("MemAgent (arXiv 2507.02259)" in claim for claim in published_claims("ruler_hqa"))
    assert any("MEM1 (arXiv 2506.15841)" in claim for claim in published_claims("search-QA"))
    assert published_claims("other sets") == []
