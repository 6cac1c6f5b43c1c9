"""The report of a run: its numbers, and a page in which hostile text is text."""

import dataclasses
import html
import itertools
import json
import math
import re
import time
from collections import Counter
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import yaml
from trace_builders import group as two_turns
from trace_builders import text_of

from mempipe.config import RunConfig
from mempipe.data.config import WorldConfig
from mempipe.data.trajectories import write_trajectories
from mempipe.evaluation.statistics import wilson_interval
from mempipe.reports.charts import (
    Bar,
    BarGroup,
    Chart,
    Figure,
    Key,
    Series,
    bar_chart,
    line_chart,
    number,
    percent,
    share_bar,
    whole_percent,
    with_legend,
)
from mempipe.reports.examples import choose_examples, examples, shown_turns
from mempipe.reports.pages import render
from mempipe.reports.training import write_report
from mempipe.reports.training_data import ReportData, em_interval, read_report_data, summarise
from mempipe.reports.training_page import _memory_size_chart, _memory_sizes, render_page
from mempipe.settings import ConfigError
from mempipe.storage.json_files import write_object
from mempipe.text import changed_runs
from mempipe.tracking.config import TrackingConfig
from mempipe.tracking.losses import write_losses
from mempipe.tracking.tracker import Tracker
from mempipe.types import Context, EndReason, Evidence, Group, Passage, Question, Search, Trajectory

LABELS = ("before", "after")
HOSTILE = (
    """</style></script><script>alert(1)</script><img src=x onerror="alert(2)">"""
    """<svg/onload=alert(3)>'"&lt;]]><!-- \x00\x1b \u202e"""
)


def make_group(label: str, index: int, *, em: float, hops: int = 1, text: str = "", num_members: int = 1) -> Group:
    question = Question(
        id=f"q{index}",
        text=text or f"Question {index}?",
        golden_answers=[text or "Oslo"],
        num_hops=hops,
        evidence=[Evidence(passage_id="p", value="Oslo")],
    )
    search = Search(
        query="x",
        num_passages=1,
        passages=[Passage(id="p", title=text or "T", text=text or "Ann lives in Oslo.")],
        snapshot="s",
    )
    turns = [
        Context(
            index=0,
            token_ids=[0] * 30,
            loss_mask=[0] * 10 + [1] * 5 + [0] * 10 + [1] * 5,
            logprobs=[0.0] * 30,
            policy_versions=[-1] * 30,
            num_prompt_tokens=10,
            num_question_tokens=3,
            num_memory_tokens=0,
            num_observation_tokens=8,
            action=text or "search",
            searches=[search],
            memory_after=text or "Ann Oslo",
            num_new_memory_tokens=2,
        ),
        Context(
            index=1,
            token_ids=[0] * 14,
            loss_mask=[0] * 12 + [1] * 2,
            logprobs=[0.0] * 14,
            policy_versions=[-1] * 14,
            num_prompt_tokens=12,
            num_question_tokens=3,
            num_memory_tokens=2,
            action=text or "answer",
            memory_before=text or "Ann Oslo",
        ),
    ]
    group_id = f"{label}/q{index}"
    trajectories = [
        Trajectory(
            id=f"{group_id}/{member}",
            group_id=group_id,
            member=member,
            contexts=turns,
            end_reason=EndReason.ANSWERED,
            answer=text or "Oslo",
            reward=em,
            em=em,
            f1=em,
        )
        for member in range(num_members)
    ]
    return Group(id=group_id, question=question, trajectories=trajectories)


def make_groups(label: str, scores: list[float], **changes) -> list[Group]:
    return [make_group(label, index, em=em, hops=1 + index % 2, **changes) for index, em in enumerate(scores)]


def make_data(**changes) -> ReportData:
    rows = [
        {"step": step, "time": 0.0, "reward": step / 10, "em": step / 20, "seconds/learn": 2.0, "seconds/step": 3.0}
        for step in (1, 2)
    ]
    settings = RunConfig(name="tiny", seed=7).model_dump(mode="json")
    data = ReportData(
        settings=settings,
        metrics=rows,
        before=make_groups("before", [0, 0, 1, 0]),
        after=make_groups("after", [1, 1, 0, 1]),
        seconds={"prepare": 1.5, "train": 6.0},
        num_steps=2,
    )
    return dataclasses.replace(data, **changes)


def test_a_budget_of_another_version_is_refused_with_a_sentence():
    settings = make_data().settings
    settings["budget"]["forgotten_tokens"] = 3
    with pytest.raises(ConfigError, match="forgotten_tokens"):
        assert make_data(settings=settings).memory_budget


def drawn(chart: Chart) -> str:
    return render("chart.svg", chart=chart).partition("</style>")[2]


class Page(HTMLParser):
    """Elements, attributes and text of a page, as a browser would take them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def handle_comment(self, data):
        raise AssertionError(f"comment {data!r}")


def test_numbers_of_the_report():
    numbers = summarise(make_data())
    assert (numbers["em_start"], numbers["em_end"], numbers["num_questions"]) == (0.25, 0.75, 4)
    assert numbers["em_end_low"] == wilson_interval(3, 4).low and numbers["em_end_high"] == wilson_interval(3, 4).high
    assert numbers["em_difference"] == 0.5
    assert (numbers["questions_gained"], numbers["questions_lost"], numbers["mcnemar_p"]) == (3, 1, 2 * (1 + 4) / 2**4)
    assert (numbers["em_1_hops_end"], numbers["em_2_hops_end"], numbers["num_questions_1_hops"]) == (0.5, 1.0, 2)
    assert (numbers["kept_rate_end"], numbers["found_rate_start"], numbers["early_answer_rate_end"]) == (1.0, 1.0, 0.0)
    assert (numbers["context_tokens_per_turn"], numbers["full_history_tokens_per_turn"]) == (11.0, (10 + 23) / 2)
    assert (numbers["seconds_prepare"], numbers["seconds_train"], numbers["seconds_total"]) == (1.5, 6.0, 7.5)
    assert numbers["seconds_train_learn"] == 4.0 and "seconds_train_step" not in numbers
    assert (numbers["num_steps"], numbers["seed"], numbers["name"]) == (2, 7, "tiny")
    assert all(value is None or isinstance(value, int | float | str) for value in numbers.values())


def test_a_run_that_ended_early_does_not_show_what_was_before_training_as_its_result():
    data = make_data(after=[])
    page = render_page(data, summarise(data))
    assert "Exact match before training" in page and '<span class="arrow">' not in page
    whole = make_data()
    assert "before training" not in render_page(whole, summarise(whole))


def test_questions_of_many_hops_are_drawn():
    sides = {label: [make_group(label, n, em=1.0, hops=(2, 24)[n % 2]) for n in range(4)] for label in LABELS}
    data = make_data(**sides)
    page = render_page(data, summarise(data))
    assert ">2 hops<" in page and ">24 hops<" in page


def test_facts_kept_are_counted_and_drawn_by_turn():
    sides = {label: [two_turns(label, n, right=True, lost=label == "before") for n in range(4)] for label in LABELS}
    data = make_data(**sides)
    numbers = summarise(data)
    assert (numbers["lost_rate_turn_2_start"], numbers["lost_rate_turn_2_end"]) == (1.0, 0.0)
    assert (numbers["kept_rate_turn_1_end"], numbers["kept_rate_turn_1_end_cases"]) == (1.0, 4)
    assert numbers["kept_rate_turn_1_end_low"] == wilson_interval(4, 4).low
    page = render_page(data, numbers)
    assert "Facts kept by turn" in page and "of 4 → 4" in page and "turn 2" in page
    assert "Answer in memory by turn" in page and "Irrelevant words by turn" in page
    assert "Facts lost by turn" not in page, "the first memory has nothing to lose"
    assert "Facts kept by turn" not in render_page(make_data(), summarise(make_data())), "one turn is no curve"


def test_exact_match_of_several_objectives_is_not_rounded(tmp_path):
    halves = make_data(before=make_groups("before", [0.5] * 3), after=make_groups("after", [0.5, 1.0, 0.75]))
    write_report(tmp_path, halves)
    numbers = json.loads((tmp_path / "report.json").read_text())
    assert (numbers["em_start"], numbers["em_end"], numbers["em_difference"]) == (0.5, 0.75, 0.25)
    assert numbers["em_start_low"] == numbers["em_start_high"] == 0.5
    assert "mcnemar_p" not in numbers, "a question that is half right is neither gained nor lost"


def test_other_questions_before_than_after_are_not_compared(tmp_path):
    easy = [
        dataclasses.replace(group, question=dataclasses.replace(group.question, id=f"easy{group.question.id}"))
        for group in make_groups("after", [1, 1, 1, 1])
    ]
    page, _ = write_report(tmp_path, make_data(after=easy))
    numbers = json.loads((tmp_path / "report.json").read_text())
    assert numbers["em_end"] == 1.0 and not {"em_start", "em_difference"} & numbers.keys()
    said = "Before training other questions were asked than after (4 only before, 4 only after)"
    assert numbers["note"].startswith(said) and said in page.read_text()


def test_questions_that_were_asked_both_times_alone_are_compared(tmp_path):
    numbers = summarise(make_data(before=make_groups("before", [0, 0, 1, 0, 0, 0])))
    assert (numbers["em_start"], numbers["em_end"], numbers["num_questions"]) == (0.25, 0.75, 4)
    assert str(numbers["note"]).endswith("the numbers are of the 4 that were asked both times.")
    assert "note" not in summarise(make_data())


def test_a_comparison_under_other_settings_says_which(tmp_path):
    (tmp_path / "config.yaml").write_text("name: tiny")
    for label, temperature in (("before", 0.0), ("after", 0.7)):
        record = {"step": len(label), "weights": label, "temperature": temperature}
        write_trajectories(tmp_path / "evaluation" / f"{label}.parquet", make_groups(label, [1.0]), made_of=record)
    note = summarise(read_report_data(tmp_path))["note"]
    assert note == "Before and after training the questions were asked with another temperature."


def test_questions_asked_several_times_get_a_bootstrap_interval():
    groups = make_groups("after", [1.0, 0.5, 0.0, 0.5], num_members=2)
    interval = em_interval(groups)
    assert interval.value == 0.5 and 0.0 <= interval.low < 0.5 < interval.high <= 1.0
    assert "mcnemar_p" not in summarise(make_data(after=groups))


def test_only_the_same_questions_are_compared():
    data = make_data(after=[make_group("after", 2, em=0.0), make_group("after", 99, em=1.0)])
    numbers = summarise(data)
    assert numbers["em_difference"] == -1.0 and numbers["questions_lost"] == 1
    assert "em_difference" not in summarise(make_data(after=[make_group("after", 99, em=1.0)]))


def test_a_report_is_made_from_what_a_run_saved(tmp_path):
    data = make_data(folder=str(tmp_path))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(dict(data.settings)))
    (tmp_path / "state.json").write_text(json.dumps({"seconds": dict(data.seconds), "num_steps": 2, "finished": False}))
    tracker = Tracker(TrackingConfig(enabled=False), folder=tmp_path, run_name="tiny", run_config={})
    for row in data.metrics:
        tracker.log_metrics(
            {name: value for name, value in row.items() if name not in ("step", "time")}, step=row["step"]
        )
    tracker.finish()
    write_trajectories(tmp_path / "evaluation" / "before.parquet", data.before)
    write_trajectories(tmp_path / "evaluation" / "after.parquet", data.after)

    read = read_report_data(tmp_path)
    assert (read.settings, read.seconds) == (data.settings, data.seconds)
    for groups, saved in ((read.before, data.before), (read.after, data.after)):
        assert [(group.id, group.question) for group in groups] == [(group.id, group.question) for group in saved]
        contexts = [context for group in groups for attempt in group.trajectories for context in attempt.contexts]
        assert contexts and all(not context.token_ids and context.num_tokens for context in contexts)
    paths = write_report(tmp_path)
    assert [path.name for path in paths] == ["report.html", "report.json"]
    assert json.loads(paths[1].read_text()) == summarise(data)
    assert "Passages:" not in paths[0].read_text()
    (tmp_path / "cloze").mkdir()
    write_object(tmp_path / "cloze" / "cloze.json", {"source": "leads of articles, licence <CC BY-SA 4.0>"})
    page = write_report(tmp_path)[0].read_text()
    assert "Passages: leads of articles, licence &lt;CC BY-SA 4.0&gt;." in page
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]


def test_a_report_raises_the_alarm_of_its_training(tmp_path):
    metrics = [{"step": step, "unanswered_reward": 0.1 * step, "f1": 0.2 + 0.01 * (step % 2)} for step in range(1, 13)]
    page, table = write_report(tmp_path, dataclasses.replace(make_data(), metrics=metrics))
    assert "Form is rewarded without an answer" in Page(page.read_text()).text
    assert json.loads(table.read_text())["alarms"].startswith("Form is rewarded without an answer")
    quiet = write_report(tmp_path, dataclasses.replace(make_data(), metrics=metrics[:7]))
    assert "Alarm" not in Page(quiet[0].read_text()).text and "alarms" not in json.loads(quiet[1].read_text())


def test_a_report_says_what_is_not_on_record(tmp_path):
    data = make_data()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(dict(data.settings)))
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "em": 0.5}\n{"step": 2, "em\xff\n')
    write_losses(tmp_path, ["MLflow at <b>host</b> lacks 3 values"])
    page = Page(write_report(tmp_path)[0].read_text())
    assert "Not on record" in page.text and "MLflow at <b>host</b> lacks 3 values" in page.text
    assert f"line 2 of {tmp_path / 'metrics.jsonl'} is not a row of metrics" in page.text
    assert "Not on record" not in Page(write_report(tmp_path, data)[0].read_text()).text


@pytest.mark.parametrize(
    "missing",
    [
        {"before": []},
        {"after": []},
        {"before": [], "after": []},
        {"metrics": []},
        {"seconds": {}},
        {"settings": {}},
        {"settings": {}, "before": [], "after": [], "metrics": [], "seconds": {}, "num_steps": 0},
    ],
)
def test_a_report_leaves_out_what_it_cannot_know(tmp_path, missing):
    page, table = write_report(tmp_path, make_data(**missing))
    numbers = json.loads(table.read_text())
    assert ("em_start" in numbers) == bool(missing.get("before", True)) and ("em_end" in numbers) == bool(
        missing.get("after", True)
    )
    parsed = Page(page.read_text())
    assert not parsed.open and "How to continue" in parsed.text


def test_report_json_is_strict_json(tmp_path):
    rows = [{"step": 1, "em": math.nan, "reward": math.nan, "seconds/learn": math.nan, "kl_ref": math.inf}]
    _, table = write_report(tmp_path, make_data(metrics=rows, seconds={"train": math.nan}))

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads(table.read_text(), parse_constant=refuse)["seconds_train"] is None


def test_hostile_text_stays_text(tmp_path):
    settings = RunConfig(world=WorldConfig()).model_dump(mode="json") | {"name": HOSTILE, HOSTILE: HOSTILE}
    hostile = {
        "before": make_groups("before", [0, 0], text=HOSTILE),
        "after": make_groups("after", [1, 0], text=HOSTILE),
    }
    page, _ = write_report(
        tmp_path / "hostile", make_data(settings=settings, seconds={HOSTILE: 1.0}, folder=HOSTILE, **hostile)
    )
    plain, _ = write_report(tmp_path / "plain", make_data())
    parsed = Page(page.read_text(encoding="utf-8"))
    assert parsed.tags <= Page(plain.read_text(encoding="utf-8")).tags | {"title"}
    assert not parsed.tags & {"script", "img", "iframe", "object", "link", "a"}
    assert not [name for name in parsed.attributes if name.startswith("on")] and not parsed.attributes & {
        "src",
        "href",
        "style",
    }
    seen = HOSTILE.replace("\x00", "\ufffd").replace("\x1b", "\ufffd")
    assert parsed.text.count(seen) > 20


def test_the_page_needs_nothing_from_outside(tmp_path):
    page, _ = write_report(tmp_path, make_data())
    text = page.read_text()
    assert "default-src 'none'" in html.unescape(text)
    assert not re.search(r"url\(|@import|https?://|src=|href=", text)


def test_passwords_in_settings_are_not_shown(tmp_path):
    settings = RunConfig(tracking=TrackingConfig(uri="https://me:secret@host/x")).model_dump(mode="json")
    page, table = write_report(tmp_path, make_data(settings=settings))
    assert "secret" not in page.read_text() + table.read_text() and "https://***@host/x" in page.read_text()


def test_lone_surrogates_do_not_stop_a_report(tmp_path):
    both = {label: make_groups(label, [1, 1], text="a\ud800b") for label in ("before", "after")}
    page, _ = write_report(tmp_path, make_data(**both))
    assert "a\ufffdb" in page.read_text(encoding="utf-8")


def test_examples_show_repairs_with_different_hops_and_one_failure():
    scores = [(0, 1, 3), (0, 1, 3), (0, 1, 2), (0, 0, 1), (1, 1, 3)]
    before = [make_group("before", i, em=first, hops=hops) for i, (first, _, hops) in enumerate(scores)]
    after = [make_group("after", i, em=last, hops=hops) for i, (_, last, hops) in enumerate(scores)]
    assert [pair[1].question.id for pair in choose_examples(before, after)] == ["q0", "q2", "q3"]
    assert [pair[1].question.id for pair in choose_examples(before[4:], after[4:])] == ["q4"]
    assert choose_examples(before, []) == []


def test_examples_are_of_the_part_of_the_corpus_that_a_service_searches():
    def make(label: str, em: float) -> list[Group]:
        groups = [make_group(label, index, em=em, hops=3 - index % 3) for index in range(9)]
        parts = ["b", "a", "a", "b", "a", "a", "b", "a", "a"]
        return [
            dataclasses.replace(group, question=dataclasses.replace(group.question, partition=part))
            for group, part in zip(groups, parts, strict=True)
        ]

    chosen = choose_examples(make("before", 0.0), make("after", 1.0))
    assert [(after.question.id, after.question.partition) for _, after in chosen] == [
        ("q1", "a"),
        ("q2", "a"),
        ("q4", "a"),
    ]
    assert "searched in a" in examples(make("before", 0.0), make("after", 1.0))[0].facts


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("", "", []),
        ("a b", "a b", [("kept", "a b")]),
        ("", "a b", [("added", "a b")]),
        ("a b", "", [("dropped", "a b")]),
        ("a b c", "a x c", [("kept", "a"), ("dropped", "b"), ("added", "x"), ("kept", "c")]),
        ("导演是李安", "导演是李安。生于\n台湾", [("kept", "导演是李安"), ("added", "。生于 台湾")]),
        ("서울은 수도", "서울은 큰 수도", [("kept", "서울은"), ("added", "큰"), ("kept", "수도")]),
    ],
)
def test_runs_of_words_are_kept_added_or_dropped(before, after, expected):
    assert [*changed_runs(before, after)] == expected


@pytest.mark.parametrize(
    ("before", "after"),
    [("a b " * 3000, "b c a " * 2000), ("the " * 6000, "the " * 6000), ("x y z " * 2000, "y x " * 99)],
)
def test_memories_that_repeat_themselves_are_compared_in_time(before, after):
    started = time.process_time()
    runs = [*changed_runs(before, after)]
    assert time.process_time() - started < 5
    assert " ".join(text for kind, text in runs if kind != "dropped") == after.strip()
    assert " ".join(text for kind, text in runs if kind != "added") == before.strip()


def test_the_page_marks_the_words_of_a_memory(tmp_path):
    groups = {"before": make_groups("before", [0]), "after": make_groups("after", [1])}
    for group in groups["after"]:
        first, last = group.trajectories[0].contexts
        group.trajectories[0].contexts[1] = dataclasses.replace(
            last, memory_after="Oslo river", searches=first.searches
        )
    page, _ = write_report(tmp_path, make_data(**groups))
    assert "<ins>Ann Oslo</ins>" in page.read_text()
    assert "<del>Ann</del> Oslo <ins>river</ins>" in " ".join(page.read_text().split())
    assert '<b class="needed">● </b><b>T</b>' in page.read_text()


def test_what_a_long_memory_keeps_is_not_shown_as_dropped():
    group = make_group("after", 0, em=1.0)
    (trajectory,) = group.trajectories
    first, last = trajectory.contexts
    known = " ".join(f"fact {number};" for number in range(300))
    contexts = [
        first,
        dataclasses.replace(last, memory_before=known, memory_after=f"one more; {known}", searches=first.searches),
    ]
    shown = shown_turns(dataclasses.replace(trajectory, contexts=contexts), group.question)
    (added, more), (kept, rest) = shown[1].memory
    assert (added, more, kept) == ("added", "one more;", "kept") and known.startswith(rest.removesuffix("…"))
    assert rest.endswith("…") and len(more + rest) == 1500


def test_arabic_in_one_text_moves_nothing_of_the_next(tmp_path):
    text = "من هو زوج أديلا (1984)"
    groups = {side: [make_group(side, 0, em=em, hops=2, text=text)] for side, em in (("before", 0.0), ("after", 1.0))}
    page, _ = write_report(tmp_path, make_data(**groups))
    assert f"<bdi>right answer: {text}</bdi> · <bdi>2 hops</bdi>" in " ".join(page.read_text().split())


def page_of(tmp_path, **changes) -> str:
    page, _ = write_report(tmp_path, make_data(**changes))
    return html.unescape(" ".join(page.read_text().split()))


def test_a_figure_that_says_nothing_new_is_left_out(tmp_path):
    rows = [{"step": step, "time": 0.0, "reward": step / 10, "em": step / 10} for step in (1, 2)]
    same = page_of(tmp_path, metrics=rows)
    assert "exact match, which is the reward, training" in same and "</i>reward, training</li>" not in same
    assert '<div class="label">F1</div>' not in same
    after = make_groups("after", [1, 1, 0, 1])
    after[0] = dataclasses.replace(
        after[0], trajectories=[dataclasses.replace(t, em=0.0, f1=0.5) for t in after[0].trajectories]
    )
    other = page_of(tmp_path, after=after)
    assert (
        "</i>exact match, training</li>" in other
        and "</i>reward, training</li>" in other
        and '<div class="label">F1</div>' in other
    )


def test_rates_of_memory_say_what_they_are_shares_of(tmp_path):
    numbers = summarise(make_data())
    assert (numbers["facts_retrieved_end"], numbers["facts_held_end"], numbers["answers_end"]) == (4, 0, 4)
    text = page_of(tmp_path)
    assert "of 4 → 4" in text and "an agent that keeps nothing loses nothing" in text and "of the answers" in text


def test_a_held_out_curve_of_two_points_says_how_to_get_more(tmp_path):
    hint = "evaluation.every_steps asks them in between"
    assert hint in page_of(tmp_path)
    rows = [{"step": 1, "time": 0.0, "em": 0.1, "validation/em": 0.5}]
    assert hint not in page_of(tmp_path, metrics=rows)


def test_what_a_step_logs_about_its_learning_is_drawn(tmp_path):
    names = ("learner/clip_high", "learner/clip_low", "learner/lr", "zero_variance_groups", "reward_std")
    text = page_of(tmp_path, metrics=[{"step": step, "time": 0.0} | dict.fromkeys(names, 0.5) for step in (1, 2)])
    for title in ("Learning rate", "Tokens whose ratio is clipped", "Groups without variance", "Spread of rewards"):
        assert title in text, title


def test_the_page_of_a_full_history_names_no_memory(tmp_path):
    settings = make_data().settings
    react = page_of(tmp_path, settings={**settings, "agent": {"name": "react"}, "budget": {}})
    other = page_of(tmp_path)
    for text in ("In memories: ", "Memory quality", "A bounded context", "memory-head"):
        assert text in other and text not in react.partition("<main>")[2], text
    assert "marks passages and chunks that hold" in react and "<h2>The context</h2>" in react


def test_settings_are_folded_away(tmp_path):
    assert re.search(r"<details><summary><h2>Settings</h2></summary> <dl", page_of(tmp_path))


def test_examples_show_thought_and_query_and_a_repeated_turn_once():
    group = make_group("after", 0, em=1.0)
    action = 'need it</think><tool_call>{"query": "x"}</tool_call>'
    search = dataclasses.replace(group.trajectories[0].contexts[0], action=action, memory_before="Ann Oslo")
    turns = [dataclasses.replace(search, index=index) for index in range(4)]
    turns.append(dataclasses.replace(turns[0], index=4, action="other"))
    trajectory = dataclasses.replace(group.trajectories[0], contexts=turns)
    shown = shown_turns(trajectory, group.question, text=text_of("memsearcher"))
    assert [(turn.number, turn.last) for turn in shown] == [(1, 4), (5, 5)]
    assert (shown[0].thought, shown[0].queries, shown[0].action) == ("need it", ["x"], "")


def test_labels_of_narrow_bars_are_shortened_before_they_collide():
    def labels(num_groups: int) -> list[str]:
        bars = [Bar(value=0.997, style="x"), Bar(value=0.995, style="x")]
        chart = bar_chart([BarGroup(label="a", bars=bars)] * num_groups, title="t", y_max=1.0)
        return [shape.text for shape in chart.shapes if shape.style == "value"]

    assert labels(2) == ["99.7 %", "99.5 %"] * 2
    assert labels(6) == ["100 %", "100 %"] * 6
    assert labels(10) == ["100", "100"] * 10
    assert labels(20) == ["", ""] * 20


@pytest.mark.parametrize("num_bars", [1, 6, 12, 30])
def test_bars_are_seen_however_narrow_they_are(num_bars):
    groups = [BarGroup(label="a", bars=[Bar(value=0.5, style="x")] * num_bars)] * 8
    chart = bar_chart(groups, title="t", y_max=1.0)
    assert chart.narrow is not None
    for drawn_chart in (chart, chart.narrow):
        places = [shape.place for shape in drawn_chart.shapes if shape.tag == "rect"]
        assert min(place["width"] for place in places) > 0.5
        ends = [place["x"] + place["width"] for place in places]
        assert all(end < after["x"] for end, after in zip(ends, places[1:], strict=False)), "beside each other"


def test_small_shares_and_single_points_have_their_numbers_at_the_axes():
    small = line_chart([Series(label="", style="a", points=[(1, 0.0001), (3, 0.0003)])], title="t", x_label="step")
    shares = line_chart(
        [Series(label="", style="a", points=[(1, 0.0001), (3, 0.0003)])], title="t", x_label="step", y_format=percent
    )
    assert len({shape.text for shape in shares.shapes if "end" in shape.style}) == len(
        [shape for shape in small.shapes if "end" in shape.style]
    )
    alone = line_chart([Series(label="", style="a", points=[(211.7, 0.5)], markers=True)], title="t", x_label="tokens")
    assert "212" in {shape.text for shape in alone.shapes}


def test_budgets_that_double_are_as_far_apart_and_named_at_the_axis():
    budgets = [16, 32, 64, 128, 256, 512, 1024]
    series = [Series(label="", style="a", points=[(float(each), 0.5) for each in budgets], markers=True)]
    wide = line_chart(series, title="t", x_label="tokens", doubles=True)
    assert wide.narrow is not None
    for chart in (wide, wide.narrow):
        places = [shape.place["cx"] for shape in chart.shapes if shape.tag == "circle"]
        assert len({round(after - before, 3) for before, after in itertools.pairwise(places)}) == 1
        assert [shape.text for shape in chart.shapes if shape.style == "tick"] == [f"{n:,}" for n in budgets] + [
            "tokens"
        ]
    near = [Series(label="", style="a", points=[(100.0, 0.5), (101.0, 0.5), (800.0, 0.5)])]
    chart = line_chart(near, title="t", x_label="tokens", doubles=True)
    assert [shape.text for shape in chart.shapes if shape.style == "tick"] == ["100", "800", "tokens"]


@pytest.mark.parametrize("name", ["a long name of a run " * 8, "a" * 150])
def test_a_legend_stays_in_its_plot_however_long_a_name_is(name):
    chart = line_chart([Series(label="", style="a", points=[(1, 0.5), (2, 0.5)])], title="t", x_label="turn")
    keys = [
        Key(style="a", label="short"),
        Key(style="a", label=name, value="5 attempts"),
        Key(style="a", label="other"),
    ]
    drawn_chart = with_legend(Figure(title="t", chart=chart, keys=keys))
    texts = [shape for shape in drawn_chart.shapes if shape.style == "start"]
    assert "".join(shape.text for shape in texts).replace(" ", "").startswith(f"short{name}".replace(" ", ""))
    assert all(shape.place["x"] + 6.8 * len(shape.text) <= chart.width for shape in texts)
    rows = [shape.place["y"] for shape in texts]
    assert len({(shape.place["x"], shape.place["y"]) for shape in texts}) == len(texts)
    assert max(rows) < drawn_chart.height and rows == sorted(rows)


def test_memory_tokens_are_drawn_at_their_turn_and_the_budget_at_a_single_one():
    group = make_group("after", 0, em=1.0)
    (trajectory,) = group.trajectories
    first, last = trajectory.contexts
    lost = dataclasses.replace(first, index=1, searches=[], memory_after="", num_new_memory_tokens=0)
    again = dataclasses.replace(first, index=2, num_new_memory_tokens=9)
    turns = dataclasses.replace(trajectory, contexts=[first, lost, again, last])
    assert _memory_sizes([dataclasses.replace(group, trajectories=[turns])]) == [[2.0, 0.0, 9.0]]
    chart = _memory_size_chart(make_data())
    assert chart is not None and 'class="line budget"' in drawn(chart.chart)
    assert [key.label for key in chart.keys][1:3] == ["after, mean", "after, largest"]
    early = _memory_size_chart(dataclasses.replace(make_data(), after=[]))
    assert early is not None and [key.label for key in early.keys][:2] == ["before, mean", "before, largest"]


def test_a_word_is_not_split_for_a_letter_or_two():
    def drawn_labels(label: str, num_groups: int) -> list[str]:
        groups = [BarGroup(label=label, bars=[Bar(value=0.5, style="x")])] * num_groups
        shapes = bar_chart(groups, title="t", y_max=1.0).shapes
        return [shape.text for shape in shapes if shape.style == "label"]

    assert drawn_labels("contradicted", 6) == ["contradicted"] * 6
    assert drawn_labels("contradicted by", 6) == ["contradicted", "by"] * 6
    assert len(drawn_labels("a" * 40, 6)) > 6, "a longer one is split, and stays in its room"


def test_names_of_sets_do_not_touch_each_other_on_a_phone():
    names = ["HotpotQA", "2WikiMultihopQA", "MuSiQue", "Bamboogle", "TriviaQA", "PopQA", "NaturalQuestions"]
    chart = bar_chart([BarGroup(label=name, bars=[Bar(value=0.5, style="x")]) for name in names], title="t", y_max=1.0)
    assert chart.narrow is not None
    for drawn_chart in (chart, chart.narrow):
        rows: dict[float, list[tuple[float, float]]] = {}
        for shape in drawn_chart.shapes:
            if shape.style == "label":
                half = 6.8 * len(shape.text) / 2
                rows.setdefault(shape.place["y"], []).append((shape.place["x"] - half, shape.place["x"] + half))
        for row in rows.values():
            assert all(end < start for (_, end), (start, _) in itertools.pairwise(row))


def test_a_gap_in_the_numbers_is_a_gap_in_the_line():
    points = [(0, 1.0), (1, 2.0), (2, math.nan), (3, 4.0), (4, 5.0), (5, math.inf), (6, 1.0)]
    chart = line_chart([Series(label="x", style="after", points=points)], title="t", x_label="step")
    tags = Counter(shape.tag for shape in chart.shapes)
    assert (tags["polyline"], tags["circle"]) == (2, 1) and "nan" not in drawn(chart)


@pytest.mark.parametrize("value", [0.0, 1e-9, -3.0, 7.0, 1e12])
def test_a_constant_line_can_be_drawn(value):
    chart = line_chart([Series(label="x", style="after", points=[(5, value)])], title="t", x_label="step")
    assert "<circle" in drawn(chart) and "nan" not in drawn(chart) and "inf" not in drawn(chart)


def test_bars_are_as_high_as_their_values():
    chart = bar_chart(
        [BarGroup(label="a", bars=[Bar(value=0.5, style="x"), Bar(value=1.0, style="x", low=0.9, high=1.0)])],
        title="t",
        y_max=1.0,
    )
    half, full = (shape.place["height"] for shape in chart.shapes if shape.tag == "rect")
    assert math.isclose(2 * half, full) and sum(shape.style == "interval" for shape in chart.shapes) == 1


def test_shares_fill_the_bar():
    chart = share_bar([("a", 3.0), ("b", 1.0)], title="t")
    assert [shape.place["width"] for shape in chart.shapes] == [0.75 * chart.width, 0.25 * chart.width]
    assert [shape.place["x"] for shape in chart.shapes] == [0, 0.75 * chart.width]


def test_a_chart_alone_is_an_svg_with_its_colours():
    svg = render("chart.svg", chart=share_bar([(HOSTILE, 1.0)], title=HOSTILE))
    root = ElementTree.fromstring(svg)
    assert root.tag.endswith("svg") and "--after" in svg
    assert {child.tag.rpartition("}")[2] for child in root.iter()} == {"svg", "style", "rect", "title"}


def test_numbers_are_short():
    assert [percent(v) for v in (0.625, 1.0, 0.0)] == ["62.5 %", "100 %", "0 %"]
    assert [whole_percent(v) for v in (0.625, 0.001, 0.0)] == ["62 %", "<1 %", "0 %"]
    assert [number(v) for v in (0, 3.14159, 12345.6, 0.00012, 2.0)] == ["0", "3.14", "12,346", "1.2e-04", "2"]
