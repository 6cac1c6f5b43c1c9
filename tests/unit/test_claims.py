"""The table of claims, its runner with a scripted command in place of trainings, and the page that it writes into."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from result_builders import answered

from benchmarks import claims
from benchmarks.claim_table import CLAIMS, GRID, LENGTHS, ROWS, SETS, TRAININGS, Difference, trainings_of
from benchmarks.claims import Finding, markers, question_file, verdict_of, with_claim
from mempipe.agents.memagent import MemAgentBudget
from mempipe.config import RunConfig
from mempipe.data.qa import read_questions, write_questions
from mempipe.data.scripted_agents import FACT_TOKENS
from mempipe.data.world import parse_question, stated_facts
from mempipe.engines.tiny import build_tokenizer
from mempipe.engines.tokenizer import load_tokenizer
from mempipe.evaluation.results import ResultFolder, result_row
from mempipe.evaluation.statistics import Interval
from mempipe.loader import load_config
from mempipe.rollout import make_renderer
from mempipe.studies.over_seeds import SeedCell
from mempipe.types import Evidence, Question

PAGES = claims.pages_of(claims.PAGE)
PAGE = "\n".join(PAGES.values())


def config_of(name: str) -> RunConfig:
    training = TRAININGS[name]
    begins = [f"model.path={training.begins}"] if training.begins else []
    return load_config(claims.CONFIGS / f"{training.config}.yaml", [*training.settings, *begins])


@pytest.mark.parametrize("name", TRAININGS)
def test_every_training_has_a_config_that_works_and_begins_with_a_model_that_is_made(name):
    training, config = TRAININGS[name], config_of(name)
    if config.warm_start is not None and config.warm_start.scripted:
        assert config.script(), "a script plays the demonstrations"
    if training.begins:
        before, place = training.begins.split("/")
        assert place == "huggingface" or config_of(before).warm_start is not None
        assert config_of(before).seed == config.seed


def test_every_name_in_the_table_is_known():
    for row in ROWS.values():
        assert set(row.trainings) <= TRAININGS.keys()
        assert row.model.partition("/")[2] in ("huggingface", "warm_start")
    for claim in CLAIMS.values():
        assert set(claim.rows) <= ROWS.keys() and set(claim.sets) <= SETS.keys()
        assert bool(claim.rows) == bool(claim.decides) != bool(claim.command)
        for each in (*claim.decides, *claim.also):
            assert {each.row, each.other} <= set(claim.rows) and set(each.sets) <= set(claim.sets)
    assert set(TRAININGS) == {name for claim in CLAIMS.values() for name in trainings_of(claim)}, "none is idle"
    assert {row for claim in CLAIMS.values() for row in claim.rows} == set(ROWS)


def test_a_training_comes_after_the_one_that_it_begins_with():
    for claim in CLAIMS.values():
        order = trainings_of(claim)
        assert len(set(order)) == len(order)
        for name in order:
            if begins := TRAININGS[name].begins:
                assert order.index(begins.split("/")[0]) < order.index(name)
    assert trainings_of(CLAIMS[6]) == ["reader", "pretext", "full", "alone"]
    assert len([name for name in trainings_of(CLAIMS[3]) if name.startswith("react-double")]) == len(GRID) == 4


def test_variants_of_memtrain_differ_in_their_rewards_alone_and_have_one_start():
    first, *others = (config_of(name) for name in ("pretext", "pretext-decoupled", "pretext-end-to-end"))
    parts = {"agent": {"num_recalls"}, "reward": {"recall_weight"}}
    assert all(each.model_dump(exclude=parts) == first.model_dump(exclude=parts) for each in others)
    assert first.model.path == "reader/warm_start"
    readers = [config_of(name) for name in ("full", "decoupled", "end-to-end", "alone", "continued")]
    same = {"model": {"path"}, "num_steps": True}
    assert all(each.model_dump(exclude=same) == readers[0].model_dump(exclude=same) for each in readers)
    assert [each.num_steps for each in readers] == [30, 30, 30, 30, 60]
    assert first.num_steps + readers[0].num_steps == readers[-1].num_steps


def held_at_once(question: Question) -> int:
    """Returns the most facts that a reader holds who keeps those that the question may still need: of a relation that
    it names, and of the right entity where that is known by then."""
    entity, relations = parse_question(question.text)
    known, held, most = {relations[0]: entity}, [], 0
    for line in question.context.splitlines():
        held += [fact for fact in stated_facts(line) if fact[1] in relations]
        for relation, then in pairwise(relations):
            values = [value for name, own, value in held if own == relation and name == known.get(relation)]
            if values:
                known[then] = values[0]
        held = [fact for fact in held if known.get(fact[1], fact[0]) == fact[0]]
        most = max(most, len(held))
    return most


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_a_memory_of_the_claims_must_choose_and_a_choice_fits_at_every_length(seed, tmp_path):
    """Documents of the trained length never fit whole, and what a reader must keep fits those that are longer."""
    for name in ("reader", "pretext", "full", "alone", "continued"):
        config = config_of(name)
        assert isinstance(config.budget, MemAgentBudget) and config.world is not None
        assert (config.budget.memory_tokens, config.world.document_passages) == (32, LENGTHS[0])
        assert config.world.evidence_order == "random"
    room = (32 - 1) // FACT_TOKENS  # "known" and the facts
    assert room == 7
    for order in ("reverse", "reading"):
        for length, share in zip(LENGTHS, (1.0, 1.0, 0.98), strict=True):
            questions = [*read_questions(question_file(tmp_path, f"{order}-{length}", seed, 384))]
            facts = [sum(len(stated_facts(line)) for line in each.context.splitlines()) for each in questions]
            assert min(facts) >= 2 * length > room, "whatever the document is, it does not fit whole"
            held = [held_at_once(each) for each in questions]
            assert min(held) >= 2, "both facts are needed at last"
            assert sum(each <= room for each in held) / len(held) >= share
            if length < LENGTHS[-1]:
                assert max(held) <= {4: 3, 8: 6}[length], "as the page says"


def test_questions_of_nine_hops_fit_the_budgets_of_both_agents(tmp_path):
    build_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    for name in ("far", "react-double-low"):
        config = config_of(name)
        renderer = make_renderer(config, tokenizer=tokenizer)
        for question in read_questions(question_file(tmp_path, "hops-9", 1, 64)):
            assert question.num_hops == 9 < (config.budget.turn_limit or 0)
            renderer.check(question)


SHARES = {"full": 8, "alone": 5, "reader-start": 2, "memtrain-alone": 2}
"""Right answers of ten."""


class Scripted:
    """Plays the commands: a training leaves its report, an evaluation its rows; what is there is not made again."""

    def __init__(self, rights: dict[str, int], *, fails_at: str = "") -> None:
        self.rights, self.fails_at = rights, fails_at
        self.calls: list[Sequence[str]] = []
        self.made: list[str] = []

    def __call__(self, words: Sequence[str]) -> None:
        self.calls.append(words)
        assert words[:2] == ["-m", "mempipe.cli"]
        (self._train if words[2] == "train" else self._evaluate)(words)

    def _train(self, words: Sequence[str]) -> None:
        settings = dict(word.split("=", 1) for word in words[4:] if "=" in word)
        folder = Path(settings["output"]) / settings["name"]
        assert "--resume-if-exists" in words and Path(words[3]).is_file()
        if model := settings.get("model.path"):
            assert Path(model).parent.is_dir(), "the training that it begins with was made before"
        if settings["name"] == self.fails_at:
            raise subprocess.CalledProcessError(3, ["python", *words])
        if not (folder / "report.json").exists():
            self.made.append(f"{settings['seed']}:{settings['name']}")
            folder.mkdir(parents=True)
            (folder / "report.json").write_text(json.dumps({"seconds_total": 360.0}))

    def _evaluate(self, words: Sequence[str]) -> None:
        suite = yaml.safe_load(Path(words[3]).read_text())
        seed = int(suite["output"].rpartition("-")[2])
        for run in suite["runs"]:
            assert (Path(run["config"]) / "report.json").exists()
            for benchmark in suite["benchmarks"]:
                assert Path(benchmark["file"]).is_file()
                path = Path(suite["output"]) / suite["name"] / run["name"] / benchmark["name"]
                results = ResultFolder(path, {"run": {"name": run["name"]}})
                if results.finished:
                    continue
                right = self.rights[run["name"]] + (seed == 2)
                groups = answered([number < right for number in range(10)])
                results.open()
                results.append(groups, [result_row(each, growing=False, prompt_hash="p") for each in groups])
                results.finish()
                self.made.append(f"{seed}:{run['name']}/{benchmark['name']}")


@pytest.fixture
def page(tmp_path) -> Path:
    file = tmp_path / "docs" / "claims.md"
    file.parent.mkdir()
    file.write_text(PAGE)
    return file


def command(tmp_path: Path, page: Path | None, *words: str) -> list[str]:
    to = [] if page is None else ["--page", str(page)]
    return [*words, "--output", str(tmp_path / "runs"), "--seeds", "1", "2", "3", "--questions", "8", *to]


def section(page: Path, number: int) -> str:
    start, end = markers(number)
    return page.read_text().partition(start)[2].partition(end)[0]


def without_section(text: str, number: int) -> list[str]:
    """Returns the page's lines without the measured part of a claim and without its line in the list."""
    start, end = markers(number)
    before, after = text.partition(start)[0], text.partition(end)[2]
    return [line for line in (before + after).splitlines() if not line.startswith(f"| {number} |")]


@pytest.mark.slow
def test_the_runner_trains_evaluates_and_writes_what_a_claim_says(tmp_path, page, capsys):
    script = Scripted(SHARES)
    claims.main(command(tmp_path, page, "--claim", "6"), run=script)
    # .8, .9, .8 against .5, .6, .5: the difference is .3 under each seed, and its interval has no width.
    assert "**Shown**: seeds 1, 2, 3, 8 questions," in section(page, 6)
    assert "1.2 hours of training." in section(page, 6), "four of six minutes under each of three seeds"
    line = r"\| \*\*full - alone\*\* \| reverse-4, reverse-8, reverse-16 \| 0\.300 \(0\.300 to 0\.300\) \| 0\.300 "
    assert re.search(line + r"\(\S+ to \S+\) \| 0\.300, 0\.300, 0\.300 \|", section(page, 6))
    assert f"| 6 | {CLAIMS[6].title} | shown |" in page.read_text()
    assert (page.parent / "images" / "claim_6.svg").read_text().count("<svg") == 1
    assert without_section(page.read_text(), 6) == without_section(PAGE, 6), "the rest is as it was"
    assert "full" in (tmp_path / "runs" / "claim-6" / "seeds.md").read_text()
    assert "**Shown**" in capsys.readouterr().out
    trained = [call for call in script.calls if call[2] == "train" and "seed=2" in call]
    assert [next(word for word in call if word.startswith("name=")) for call in trained] == [
        "name=reader",
        "name=pretext",
        "name=full",
        "name=alone",
    ]
    assert f"model.path={tmp_path / 'runs' / 'seed-2' / 'pretext' / 'huggingface'}" in trained[2]


@pytest.mark.slow
def test_claims_share_what_they_need_and_an_interrupted_one_resumes(tmp_path, page):
    script = Scripted(SHARES, fails_at="full")
    with pytest.raises(SystemExit, match=r"claim 6: `python -m mempipe.cli train .*` ended with exit code 3"):
        claims.main(command(tmp_path, page, "--claim", "6"), run=script)
    assert page.read_text() == PAGE and script.made == ["1:reader", "1:pretext"]
    script.fails_at = ""
    claims.main(command(tmp_path, page, "--claim", "6"), run=script)
    assert len(set(script.made)) == len(script.made) == 3 * (4 + 2 * 6), "nothing was made twice"
    made = len(script.made)
    claims.main(command(tmp_path, page, "--claim", "9", "5"), run=script)
    assert {name.split(":")[1].split("/")[0] for name in script.made[made:]} == {"reader-start", "memtrain-alone"}
    # memtrain-alone and reader-start answer the same: an interval without width at 0 is not above it.
    assert "**Not shown**" in section(page, 5)


def test_the_questions_of_a_file_that_a_training_left_are_counted(tmp_path):
    rows = [result_row(each, growing=False, prompt_hash="p") for each in answered([True] * 5)]
    assert claims.num_asked({1: {"smollm2": {"gaps": rows}}, 2: {"smollm2": {"gaps": rows[:4]}}}, 384) == "4 to 5"
    assert claims.num_asked({1: {"smollm2": {"gaps": rows}}}, 384) == "5"
    assert claims.num_asked({1: {"full": {"world": rows}}}, 384) == "384"


@pytest.mark.parametrize(("number", "asked"), [("gaps-1", 5), ("gaps-4", 3)])
def test_questions_of_a_file_are_asked_so_many_at_once(tmp_path, number, asked):
    single = [
        Question(
            id=f"q{i}",
            text=f"In {i} it was ____.",
            golden_answers=[f"a{i}"],
            evidence=[Evidence(passage_id="p", value=f"a{i}")],
        )
        for i in range(14)
    ]
    (tmp_path / SETS[number].file).parent.mkdir(parents=True)
    write_questions(tmp_path / SETS[number].file, single)
    first, again = (read_questions(question_file(tmp_path, number, seed, num_questions=5)) for seed in (1, 1))
    assert first == again and len(first) == asked
    assert {len(question.objectives) for question in first} == {SETS[number].objectives}
    assert read_questions(question_file(tmp_path, number, 2, num_questions=5)) != first  # drawn by the seed


@pytest.mark.slow
def test_a_difference_below_zero_contradicts_a_claim(tmp_path, page):
    claims.main(command(tmp_path, page, "--claim", "6"), run=Scripted({"full": 4, "alone": 6}))
    assert "**Contradicted**" in section(page, 6)
    assert f"| 6 | {CLAIMS[6].title} | contradicted |" in page.read_text()


@pytest.mark.slow
def test_with_other_settings_no_page_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(claims, "PAGE", tmp_path / "no_page.md")
    claims.main(command(tmp_path, None, "--claim", "6", "num_steps=2"), run=Scripted(SHARES))
    assert "8 questions, with num_steps=2," in capsys.readouterr().out
    assert not (tmp_path / "no_page.md").exists()
    with pytest.raises(SystemExit):
        claims.main(command(tmp_path, None, "7"), run=Scripted(SHARES))
    assert "unrecognized arguments: 7" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_told_before_anything_is_trained(tmp_path, page, capsys):
    page.write_text("another page")
    with pytest.raises(SystemExit):
        claims.main(command(tmp_path, page, "--claim", "6"), run=lambda words: pytest.fail(f"{words} was run"))
    assert f"--page: {page} has 0 blocks" in capsys.readouterr().err


def test_an_override_of_the_warm_start_is_for_trainings_that_have_one(tmp_path):
    given: dict[str, list[str]] = {}
    for name in ("reader", "full"):
        words = ["warm_start.lr=0.1", "num_steps=2"]
        claims.train(tmp_path, name, 1, words, lambda command, name=name: given.setdefault(name, list(command)))
    assert "warm_start.lr=0.1" in given["reader"] and "warm_start.lr=0.1" not in given["full"]
    assert "warm_start=null" in given["full"] and all("num_steps=2" in command for command in given.values())


def test_a_claim_that_another_script_measures_runs_it_and_a_list_runs_nothing(capsys):
    calls: list[Sequence[str]] = []
    claims.main(["--claim", "2"], run=calls.append)
    assert calls == [("-m", "benchmarks.context_growth")]
    claims.main(["--list"], run=calls.append)
    assert len(calls) == 1
    printed = capsys.readouterr().out
    assert all(claim.title in printed and claim.prediction in printed for claim in CLAIMS.values())
    assert "needs: reader, pretext, full, alone" in printed


@pytest.mark.parametrize(
    ("low", "high", "margin", "verdict"),
    [
        (0.01, 0.2, 0.0, "shown"),
        (0.0, 0.2, 0.0, "not shown"),
        (-0.1, -0.01, 0.0, "contradicted"),
        (-0.04, 0.1, 0.05, "shown"),
        (-0.06, 0.1, 0.05, "not shown"),
        (-0.2, -0.06, 0.05, "contradicted"),
        (float("-inf"), float("inf"), 0.0, "not shown"),
    ],
)
def test_a_verdict_is_where_the_interval_over_trainings_lies(low, high, margin, verdict):
    over = Interval(value=(low + high) / 2, low=low, high=high)
    finding = Finding(
        difference=Difference(row="a", other="b", margin=margin),
        cell=SeedCell(by_seed=[0.1, 0.1], questions=over, trainings=over),
    )
    assert finding.verdict == verdict == verdict_of([finding])


def test_all_deciding_differences_must_hold():
    def finding(low: float, high: float) -> Finding:
        over = Interval(value=0.0, low=low, high=high)
        cell = SeedCell(by_seed=[0.0], questions=over, trainings=over)
        return Finding(difference=Difference(row="a", other="b"), cell=cell)

    holds, open_, fails = finding(0.1, 0.2), finding(-0.1, 0.1), finding(-0.2, -0.1)
    assert [verdict_of(each) for each in ([holds], [holds, open_], [holds, open_, fails])] == [
        "shown",
        "not shown",
        "contradicted",
    ]


def test_the_page_has_every_claim_as_the_table_says_it():
    text = " ".join(PAGE.split())
    for number, claim in CLAIMS.items():
        assert re.search(
            rf"^\| {number} \| {re.escape(claim.title)} \| (shown|not shown|contradicted|not tried) \|$", PAGE, re.M
        )
        for said in (f"## {number}. {claim.title}", claim.paper, claim.outcome, claim.prediction):
            assert said in text, (number, said)
        if not claim.command:
            start, end = markers(number)
            assert PAGE.count(start) == PAGE.count(end) == 1


@pytest.mark.parametrize("pages", [{}, {Path("claims.md"): "nothing"}])
def test_pages_without_the_place_of_a_claim_are_refused(pages):
    with pytest.raises(ValueError, match="0 blocks <!-- measured: claim 6 --> and 0 lines of claim 6"):
        with_claim(pages, 6, "shown", ["x"])


def test_the_measured_part_and_the_verdict_may_be_on_two_pages():
    first, second = PAGES
    changed = with_claim(PAGES, 6, "shown", ["| of claim 6 |"])
    assert f"| 6 | {CLAIMS[6].title} | shown |" in changed[first] and "of claim 6 |" in changed[second]
    for file, text in changed.items():
        assert without_section(text, 6) == without_section(PAGES[file], 6), "the rest is as it was"
