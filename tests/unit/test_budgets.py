"""How much memory is enough: known effects are found, ties give no winner."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from result_builders import answered

from mempipe.cli import main
from mempipe.evaluation.results import ResultFolder, ResultRow, result_row
from mempipe.evaluation.statistics import ClusteredMean, Interval, clustered_mean, difference_interval
from mempipe.reports.budget_figures import causes_by_budget, figures_by_hops, score_by_part
from mempipe.reports.budgets import budget_lines, verdict, verdicts, write_budget_report
from mempipe.reports.closing import closing_study
from mempipe.settings import ConfigError
from mempipe.studies.budgets import ALPHA, BudgetStudy, Verdict, recommended, study_evaluation, study_runs
from mempipe.studies.compare import paired_differences, shared_pairs
from mempipe.studies.measured import MeasuredRun, ModelSize, Sets, measured_runs, pooled


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    """The bootstrap of the scores is no matter of these tests."""
    monkeypatch.setattr("mempipe.studies.measured.NUM_RESAMPLES", 100)


_RIGHT, _WRONG = (result_row(group, growing=False, prompt_hash="p") for group in answered([True, False]))


def rows(rights: list[bool]) -> list[ResultRow]:
    """Rows of as many questions, each right or wrong."""
    return [
        replace(_RIGHT if right else _WRONG, question_id=str(i), question=f"Which {i}?")
        for i, right in enumerate(rights)
    ]


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


def share(of: float, number: int) -> list[bool]:
    return [i < of * number for i in range(number)]


def study(budgets: Mapping[int | None, Sets], **options: float) -> BudgetStudy:
    """The study of an agent "a"; None is an agent "b" without a budget."""
    runs = [
        MeasuredRun(name=str(tokens), agent="b" if tokens is None else "a", memory_tokens=tokens, sets=sets)
        for tokens, sets in budgets.items()
    ]
    return study_runs(runs, **options)


def told(result: BudgetStudy) -> dict[str, list[str]]:
    """The verdict on each smaller budget, by part."""
    curves = {part.label: curve for part in result.parts for curve in part.curves}
    return {label: [curve.verdict(point) for point in curve.points[:-1]] for label, curve in curves.items()}


def only(result: BudgetStudy) -> str:
    """The verdict of a study with one part and one agent."""
    (curve,) = result.whole.curves
    return verdict(result, result.whole, curve)


def test_where_nothing_is_right_no_budget_is_called_enough():
    wrong = rows([False] * 20)
    assert only(study({4: {"nq": wrong}, 8: {"nq": wrong}})) == (
        "a: every score is 0 under every budget, which says nothing of the memory that is enough."
    )


def test_one_question_tells_nothing(tmp_path):
    result = study({tokens: {"nq": rows([right])} for tokens, right in {4: False, 8: True}.items()})
    assert told(result) == {"nq": [Verdict.UNKNOWN]}
    assert only(result) == "a: whether 4 tokens are enough cannot be told with one question."
    for tokens, right in {4: False, 8: True}.items():
        evaluated(tmp_path, f"memory-{tokens}", tokens, [right])
    assert main(["budgets", str(tmp_path)]) == 0
    text = (tmp_path / "budgets.md").read_text() + (tmp_path / "budgets.svg").read_text()
    assert "-100.0 (one question: no interval)" in text and "| – | – | cannot be told |" in text
    assert "inf " not in text and "nan" not in text


def test_a_multi_hop_loss_is_not_hidden_by_the_mean_over_sets(capsys):
    """NQ falls with the budget and MuSiQue rises; their mean says nothing of either."""
    scores = {512: (0.60, 0.20), 1024: (0.52, 0.30), 2048: (0.45, 0.38)}
    hops = [2 + i % 2 for i in range(2000)]
    sets = {
        tokens: {
            "nq": rows(share(nq, 2000)),
            "musique": [
                replace(row, question=f"m{row.question}", num_hops=count)
                for row, count in zip(rows(share(musique, 2000)), hops, strict=True)
            ],
        }
        for tokens, (nq, musique) in scores.items()
    }
    result = study(sets)
    assert told(result) == {
        "all sets": ["cannot be told", "enough"],
        "nq": ["enough", "enough"],
        "musique": ["not enough", "not enough"],
        "musique, 2 hops": ["not enough", "not enough"],
        "musique, 3 hops": ["not enough", "not enough"],
    }
    closing_study(result, paths=[Path("sweep/budgets.html")])
    printed = capsys.readouterr().out
    assert all(f"{100 * point.measured.score.value:.2f} (" in printed for point in result.whole.curves[0].points)
    assert all(text in printed for text in verdicts(result)) and printed.endswith("Report: sweep/budgets.html\n")
    said = verdicts(result)
    assert said[0] == "a, nq: 512 tokens are enough: they lose less than 2 points against 2048 tokens."
    assert said[1] == (
        "a, musique: 1024 tokens are not enough: they lose more than 2 points against 2048 tokens, so a larger budget "
        "than that may be better still."
    )
    assert said[-1].startswith("a, all sets: 1024 tokens are enough") and len(said) == 5  # beside the sets, and last
    assert [key.label for key in score_by_part(result).keys] == ["a, nq", "a, musique", "a, all sets"]
    headings = [line for line in budget_lines(result) if line.startswith("## ")]
    assert headings == ["## a, nq", "## a, musique", "## a, musique, 2 hops", "## a, musique, 3 hops", "## a, all sets"]


def test_enough_not_enough_and_not_to_be_told():
    scores = {4: 0.1, 8: 0.87, 16: 0.9, 32: 0.9}
    result = study({tokens: {"nq": rows(share(p, 400))} for tokens, p in scores.items()})
    assert told(result) == {"nq": ["not enough", "cannot be told", "enough"]}
    (curve,) = result.whole.curves
    assert curve.smallest_enough is curve.points[2]
    test = curve.points[1].test
    assert test is not None and test.difference.value == pytest.approx(-0.03)
    assert only(result) == (
        "a: 16 tokens are enough: they lose less than 2 points against 32 tokens; whether 8 tokens are enough cannot "
        f"be told with 400 questions; {test.questions_needed:,} would do if they lose nothing; 4 tokens are not "
        "enough: they lose more than 2 points against 32 tokens."
    )


def test_a_budget_below_one_that_is_not_enough_is_never_called_enough():
    scores = {4: 0.9, 8: 0.5, 16: 0.9}
    result = study({tokens: {"nq": rows(share(p, 400))} for tokens, p in scores.items()})
    assert told(result) == {"nq": ["cannot be told", "not enough"]}
    assert result.whole.curves[0].smallest_enough is None


def test_equal_answers_to_few_questions_prove_nothing():
    """Twenty questions without any difference: one question in seven may be lost, and the report says how many would
    do."""
    result = study({tokens: {"nq": rows(share(0.5, 20))} for tokens in (4, 8)})
    (curve,) = result.whole.curves
    test = curve.points[0].test
    assert (
        test is not None and test.verdict is Verdict.UNKNOWN and test.difference.low == pytest.approx(-0.1611, abs=1e-4)
    )
    assert test.power == 0  # whatever twenty other questions without a difference are, they say the same
    assert test.questions_needed == 385  # .02 * .98 * (1.96 + .8416)^2 / .02^2
    assert "cannot be told with 20 questions; 385 would do if they lose nothing" in only(result)


def test_the_margin_is_the_users():
    sets = {tokens: {"nq": rows(share(p, 400))} for tokens, p in {4: 0.87, 8: 0.9}.items()}
    assert told(study(sets)) == {"nq": ["cannot be told"]} and told(study(sets, margin=6.0)) == {"nq": ["enough"]}
    assert "they lose less than 6 points" in only(study(sets, margin=6.0))
    for margin in (0.0, -1.0, 100.0, float("nan")):
        with pytest.raises(ConfigError, match="expected more than 0 and less than 100 percent points"):
            study(sets, margin=margin)


def test_where_the_questions_would_do_for_no_loss_the_number_is_for_the_loss_that_was_seen():
    """2,000 questions, 1.5 points lost: enough for no loss, and not for one so close to the margin."""
    sets = {tokens: {"nq": rows(share(p, 2000))} for tokens, p in {4: 0.785, 8: 0.8}.items()}
    test = study(sets).whole.curves[0].points[0].test
    assert test is not None and test.verdict is Verdict.UNKNOWN and test.assumed == pytest.approx(-0.015)
    assert test.questions_needed is not None and test.questions_needed > 2000
    assert "would do if the loss of 1.5 points that was seen is the true one" in only(study(sets))
    sets[4] = {"nq": rows(share(0.778, 2000))}
    assert "cannot be told with 2,000 questions, since the loss seen is 2.2 points and the margin 2 points" in only(
        study(sets)
    )


def drawn(generator: np.random.Generator, number: int, loss: float, noise: float, attempts: int) -> ClusteredMean:
    """The mean difference of `number` questions that is truly -loss: whole answers lost, and as many changes either way
    as `noise` says."""
    lost = generator.random((number, attempts)) < loss + noise / 2
    gained = generator.random((number, attempts)) < noise / 2
    differences = gained.mean(axis=1) - lost.mean(axis=1)
    value, weights = float(differences.mean()), np.full(number, 1 / number)
    return ClusteredMean(value=value, spread=(differences - value) / number, weights=weights, is_bounded=True)


@pytest.mark.parametrize(
    ("number", "noise", "attempts"),
    [(30, 0.0, 1), (100, 0.0, 1), (190, 0.0, 1), (300, 0.02, 1), (400, 0.2, 1), (200, 0.1, 3)],
)
@pytest.mark.parametrize("compared", [1, 4])
def test_a_true_loss_of_the_margin_is_called_enough_in_five_studies_of_a_hundred_at_most(
    number, noise, attempts, compared
):
    """`compared` budgets and sets, all of which lose 2 points: a study is wrong when any of them is called enough."""
    generator, margin, studies, wrong = np.random.default_rng(number), 0.02, 200, 0
    for _ in range(studies):
        means = [drawn(generator, number, margin, noise, attempts) for _ in range(compared)]
        lows = [difference_interval(mean, confidence=1 - ALPHA / compared).low for mean in means]
        wrong += max(lows) > -margin
    assert wrong / studies <= 0.05


class DrawnStudies:
    """Studies of two sets (nq with one hop, musique with two and three), whose answers are drawn. The largest budget
    answers 60 % of the questions; the others truly lose `losses` of them by set, and change as many answers either way
    as `noise` says. Trainings differ by `deviation`.
    """

    MARGIN = 0.1

    def __init__(self, losses: Mapping[str, float], *, noise: float, deviation: float = 0.0, seed: int = 1) -> None:
        self.losses, self.noise, self.deviation = losses, noise, deviation
        self.generator = np.random.default_rng(seed)
        self.banks = {name: self._rows(name, number, hops) for name, number, hops in SETS}

    def _rows(self, name: str, number: int, hops: list[int]) -> list[tuple[ResultRow, ResultRow]]:
        """A wrong and a right row of each question."""
        rows = []
        for i in range(number):
            own = {"question_id": f"{name}{i}", "question": f"Which {name} {i}?", "num_hops": hops[i % len(hops)]}
            rows.append((replace(_WRONG, **own), replace(_RIGHT, **own)))
        return rows

    def play(self, *, attempts: int = 1, trainings: int = 0) -> BudgetStudy:
        easy = {name: self.generator.random(len(bank)) < 0.6 for name, bank in self.banks.items()}
        runs = []
        for repeat in range(trainings or attempts):
            for tokens in (4, 8, 16):
                extra = float(self.generator.normal(0, self.deviation)) if tokens < 16 else 0.0
                sets = {name: self._answers(name, right, tokens, extra) for name, right in easy.items()}
                seed = repeat if trainings else None
                runs.append(
                    MeasuredRun(name=f"{tokens}-{repeat}", agent="a", memory_tokens=tokens, sets=sets, training=seed)
                )
        return study_runs(runs, margin=100 * self.MARGIN)

    def _answers(self, name: str, right: np.ndarray, tokens: int, extra: float) -> list[ResultRow]:
        if tokens < 16:
            drawn = self.generator.random(len(right))
            lost = (self.losses[name] + extra + self.noise / 2) / 0.6
            right = np.where(right, drawn >= lost, drawn < self.noise / 2 / 0.4)
        return [rows[int(is_right)] for rows, is_right in zip(self.banks[name], right, strict=True)]

    def called_enough(self, result: BudgetStudy) -> bool:
        """Whether any budget is called enough for a part whose every set loses the margin."""
        lossy = [name for name, loss in self.losses.items() if loss >= self.MARGIN]
        parts = [label for label in told(result) if len(lossy) == 2 or label.partition(",")[0] in lossy]
        return any(Verdict.ENOUGH in told(result)[label] for label in parts)


SETS = (("nq", 60, [1]), ("musique", 120, [2, 3]))
BOTH = {"nq": 0.1, "musique": 0.1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("losses", "drawn", "played", "studies"),
    [
        ({"nq": 0.0, "musique": 0.1}, {"noise": 0.1}, {}, 100),  # the mean over both sets loses less than the margin
        pytest.param(BOTH, {"noise": 0.0}, {}, 100, marks=pytest.mark.jobs),  # up to 12 s each
        pytest.param(BOTH, {"noise": 0.1}, {}, 200, marks=pytest.mark.jobs),
        pytest.param(BOTH, {"noise": 0.1}, {"attempts": 3}, 60, marks=pytest.mark.jobs),
        pytest.param(BOTH, {"noise": 0.02, "deviation": 0.15}, {"trainings": 3}, 60, marks=pytest.mark.jobs),
    ],
)
def test_a_whole_study_calls_a_loss_of_the_margin_enough_in_five_of_a_hundred_at_most(losses, drawn, played, studies):
    """Of two budgets, five parts and their verdicts none may be wrong in more than 5 % of the studies."""
    simulated = DrawnStudies(losses, **drawn)
    wrong = sum(simulated.called_enough(simulated.play(**played)) for _ in range(studies))
    assert wrong / studies <= 0.05


def test_a_whole_study_calls_budgets_enough_that_lose_nothing():
    """The simulation above would count none either if its questions were too few for any verdict."""
    simulated = DrawnStudies({"nq": 0.0, "musique": 0.0}, noise=0.1)
    results = [told(simulated.play()) for _ in range(10)]
    assert list(results[0]) == ["all sets", "nq", "musique", "musique, 2 hops", "musique, 3 hops"]
    assert sum(Verdict.ENOUGH in result["all sets"] for result in results) >= 8


def test_the_intervals_of_all_parts_and_budgets_hold_together():
    def asked(right: float) -> Sets:
        return {"nq": [replace(row, num_hops=1 + i % 2) for i, row in enumerate(rows(share(right, 40)))]}

    def interval(first: Sets, second: Sets, number: int) -> Interval:
        gains = paired_differences({"nq": shared_pairs(first["nq"], second["nq"])}, metric="em")
        return difference_interval(clustered_mean([*gains.values()]), confidence=1 - ALPHA / number)

    result = study({4: asked(0.4), 8: asked(0.6), 16: asked(0.7), None: asked(0.8)})
    assert [part.label for part in result.parts] == ["nq", "nq, 1 hop", "nq, 2 hops"]
    for part in result.parts:
        (curve,), (reference,) = part.curves, part.references
        *smaller, largest = curve.points
        for point in smaller:
            assert point.test.difference == interval(largest.measured.sets, point.measured.sets, 3 * 2)
        chosen = recommended(curve).measured.sets
        assert reference.differences["a"].difference == interval(reference.measured.sets, chosen, 3 * 3)


@pytest.mark.parametrize(("number", "changed"), [(100, 0), (100, 4), (200, 0), (400, 8), (1000, 20)])
def test_the_power_is_the_share_of_studies_that_call_a_budget_enough_which_loses_nothing(number, changed):
    generator, confidence = np.random.default_rng(3), 1 - ALPHA
    before = rows(share(0.5, number))
    after = [replace(row, em=row.em) for row in before]
    for i in range(0, changed, 2):  # as many questions gained as lost
        after[i] = replace(after[i], em=1 - after[i].em)
        after[-1 - i] = replace(after[-1 - i], em=1 - after[-1 - i].em)
    test = study({4: {"nq": after}, 8: {"nq": before}}).whole.curves[0].points[0].test
    called = 0
    for _ in range(500):
        mean = drawn(generator, number, 0.0, changed / number, 1)
        called += difference_interval(mean, confidence=confidence).low > -0.02
    assert test is not None and test.power is not None and test.power <= called / 500 + 0.08
    assert not changed or test.power >= called / 500 - 0.12  # without a change seen, others may have some


def trained(budgets: Mapping[int, Sequence[float]], *, number: int = 2000) -> BudgetStudy:
    """A study whose budgets were trained once for each score."""
    runs = [
        MeasuredRun(
            name=f"{tokens}-{seed}", agent="a", memory_tokens=tokens, training=seed, sets={"nq": rows(share(p, number))}
        )
        for tokens, scores in budgets.items()
        for seed, p in enumerate(scores)
    ]
    return study_runs(runs)


def test_trainings_that_differ_say_more_than_their_questions():
    """Over 2,000 questions these three trainings lose nothing; other trainings may."""
    result = trained({4: [0.60, 0.66, 0.63], 8: [0.65, 0.60, 0.64]})
    test = result.whole.curves[0].points[0].test
    assert test is not None and test.difference.low > -0.02 and test.over_trainings is not None
    assert test.by_training == pytest.approx([-0.05, 0.06, -0.01])
    half = 4.302653 * 0.0556776 / 3**0.5
    assert (test.over_trainings.low, test.over_trainings.high) == pytest.approx((-half, half), abs=1e-5)
    assert test.verdict is Verdict.UNKNOWN
    assert f"cannot be told with 3 trainings; {test.trainings_needed} would do if they lose nothing" in only(result)
    text = "\n".join(budget_lines(result))
    assert "by training | over trainings" in text and "60.0, 66.0, 63.0 | 63.0 (55.5 to 70.5)" in text


def test_an_interval_over_two_trainings_ends_where_shares_end():
    text = "\n".join(budget_lines(trained({4: [0.72, 0.95], 8: [0.95, 0.97]})))
    assert "72.0, 95.0 | 83.5 (0.0 to 100.0)" in text and "95.0, 97.0 | 96.0 (83.3 to 100.0)" in text
    assert "-12.5 (-100.0 to 100.0)" in text


def test_trainings_that_agree_are_enough_and_one_training_is_said_to_be_one():
    same = trained({4: [0.60, 0.66, 0.63], 8: [0.601, 0.66, 0.63]})
    assert told(same) == {"nq": ["enough"]}
    once = trained({4: [0.6], 8: [0.6]})
    assert told(once) == {"nq": ["enough"]} and once.whole.curves[0].points[0].test.over_trainings is None
    assert only(once).endswith("; each budget was trained once, and another training of it may answer otherwise.")


def test_the_command_writes_and_prints_the_answer(tmp_path, capsys):
    for tokens, p in {8: 0.2, 16: 0.8, 32: 0.8}.items():
        evaluated(tmp_path, f"memory-{tokens}", tokens, share(p, 400))
    evaluated(tmp_path, "history", None, share(0.5, 400), agent="react")
    assert main(["budgets", str(tmp_path)]) == 0
    out, written = capsys.readouterr().out, (tmp_path / "budgets.md").read_text()
    page = (tmp_path / "budgets.html").read_text()
    said = "memsearcher: 16 tokens are enough: they lose less than 2 points against 32 tokens; 8 tokens are not enough"
    assert said in out and said in written and said in page
    assert "| 8 | 20.0 (" in out and "| history | – | 50.0 (" in out
    assert "0 gained, 240 lost" in out and "| not enough |" in out and "| largest |" in out
    assert "the evaluation has not ended, and may have more budgets than those in the table" in out
    (tmp_path / "report.json").write_text("{}")
    assert main(["budgets", str(tmp_path)]) == 0 and "has not ended" not in capsys.readouterr().out
    assert page.count("<figure>") == 2 and (tmp_path / "budgets.svg").stat().st_size > 500
    numbers = json.loads((tmp_path / "budgets.json").read_text())
    assert (numbers["metric"], numbers["margin"]) == ("em", 0.02)
    found = [
        (each["part"], each["memory_tokens"], each["score"]["value"], each["verdict"]) for each in numbers["budgets"]
    ]
    assert found == [("nq", 8, 0.2, "not enough"), ("nq", 16, 0.8, "enough"), ("nq", 32, 0.8, None)]
    assert numbers["budgets"][0]["difference"]["value"] == pytest.approx(-0.6)
    assert main(["budgets", str(tmp_path), "--margin", "0.01"]) == 0
    assert "memsearcher: whether 16 tokens are enough cannot be told with 400 questions" in capsys.readouterr().out
    assert main(["budgets", str(tmp_path), "--margin", "0"]) == 2
    assert "margin is 0; expected more than 0 and less than 100 percent points" in capsys.readouterr().err


def test_an_agent_without_a_budget_is_compared_with_the_budget_that_is_recommended():
    """The smallest that is enough, chosen among three by the same questions: the interval is that of three."""
    sets = {tokens: {"nq": rows(share(p, 400))} for tokens, p in {4: 0.1, 8: 0.7, 16: 0.7, None: 0.5}.items()}
    result = study(sets)
    (reference,) = result.whole.references
    difference = reference.differences["a"].difference
    alone = difference_interval(clustered_mean([list(enumerate([1.0] * 80 + [0.0] * 320))]), confidence=1 - ALPHA / 3)
    assert difference.value == pytest.approx(0.2) and difference.low == pytest.approx(alone.low)
    assert "a: 8 memory tokens, the agent is significantly better than b" in verdicts(result)[-1]
    sets[8] = {"nq": rows(share(0.4, 400))}
    assert "a: 16 memory tokens, the agent is significantly better than b" in verdicts(study(sets))[-1]


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
    result = study_runs(runs)
    assert [point.measured.largest_context for point in result.whole.curves[0].points] == [50, 2000]
    text = "\n".join(budget_lines(result))
    assert "| 50 | 38.4 kB |" in text and "| 2,000 | 1.54 MB |" in text  # 50 * 768, 2000 * 768
    assert "| react | 1.00 M |" in text and "| 500 | 768 kB |" in text  # 500 * 1536
    sentence = verdicts(result)[-1]
    assert "cannot be told from react, which has no memory budget and 2.0 times the parameters" in sentence


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

    result = study({4: {"nq": asked(900)}, 8: {"nq": asked(400)}})
    assert [part.label for part in result.parts] == ["nq", "nq, 1 hop", "nq, 2 hops"]
    by_budget, by_tokens = figures_by_hops(result, result.whole.curves[0])
    assert by_budget.title == "a: em by memory budget and hops" and by_tokens.title == "a: em by tokens and hops"
    assert [key.label for key in by_tokens.keys] == ["1 hop", "2 hops"]
    assert {"400", "900"} <= {shape.text for shape in by_tokens.chart.shapes}


@pytest.mark.parametrize("with_reference", [False, True])
def test_a_set_that_was_asked_under_one_budget_only_has_no_curve(tmp_path, with_reference):
    both = {"nq": rows([True] * 8), "hp": rows([False] * 8)}
    result = study({4: both, 8: {"nq": rows([True] * 8)}} | ({None: both} if with_reference else {}))
    write_budget_report(tmp_path, result, name="own")
    page = (tmp_path / "budgets.html").read_text()
    assert "em by memory budget, nq" in page and "em by memory budget, hp" not in page


def test_the_budgets_of_a_curve_are_scored_on_the_same_sets():
    both = {"nq": rows([True] * 8), "hp": rows([False] * 8)}
    result = study({4: {"nq": rows([True] * 8)}, 8: both})
    (curve,) = result.whole.curves
    assert [point.measured.score.value for point in curve.points] == [1.0, 1.0] and curve.skipped == ["hp"]
    assert "Skipped, since not asked under every budget: hp. Scores have" in "\n".join(budget_lines(result))
    with pytest.raises(ConfigError, match="a: no set was asked under all of its budgets, 4, 8"):
        study({4: {"nq": both["nq"]}, 8: {"hp": both["hp"]}})


def test_first_causes_are_drawn_by_budget_and_hops(tmp_path):
    def asked(causes: list[str]) -> list[ResultRow]:
        each = zip(rows([not cause for cause in causes]), causes, strict=True)
        return [replace(row, num_hops=1 + i % 2, first_causes=[cause]) for i, (row, cause) in enumerate(each)]

    sets = {4: asked(["lost", "not_kept", "", "lost"]), 8: asked(["", "", "", "lost"])}
    result = study({tokens: {"nq": own} for tokens, own in sets.items()})
    (curve,) = result.whole.curves
    every, one_hop, _ = causes_by_budget(curve)
    assert [figure.title for figure in (every, one_hop)] == [
        "a: first causes of wrong answers",
        "a: first causes at 1 hop",
    ]
    assert [key.label for key in every.keys] == ["not kept", "lost"] and [key.label for key in one_hop.keys] == ["lost"]
    assert {"0 %", "50 %"} <= {shape.text for shape in every.chart.shapes}  # the highest: 2 of 4 attempts with 4 tokens
    paths = write_budget_report(tmp_path, result, name="own")
    plots = {path.name: ElementTree.parse(path).getroot() for path in paths if path.suffix == ".svg"}
    assert set(plots) == {"budgets.svg", "causes.svg"}
    texts = ["".join(element.itertext()) for element in plots["causes.svg"].iter() if element.tag.endswith("text")]
    assert {"not kept", "lost"} <= set(texts)  # the legend of a plot that stands alone
    assert "![a: first causes of wrong answers](causes.svg)" in (tmp_path / "budgets.md").read_text()


def test_seeds_of_one_model_are_attempts_put_together_question_by_question():
    one, two = rows(share(0.5, 100)), rows(share(0.7, 100))
    runs = [
        MeasuredRun(name="r", agent="a", memory_tokens=tokens, sets={"nq": own})
        for tokens, own in ((8, one), (8, two), (16, two), (16, two))
    ]
    small = study_runs(runs).whole.curves[0].points[0]
    assert small.measured.by_seed == [0.5, 0.7] and small.measured.score.value == pytest.approx(0.6)
    assert small.measured.over_trainings is None
    assert len(small.measured.sets["nq"]) == 100 and {len(row.answers) for row in small.measured.sets["nq"]} == {2}
    assert small.test is not None and small.test.num_questions == 100 and small.test.by_training == []
    assert small.test.difference.value == pytest.approx(-0.1)


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
