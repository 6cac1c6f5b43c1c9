"""Memories rated by people: the sheet, the page that fills it, and what the ratings say."""

from __future__ import annotations

import csv
import itertools
import math
import random
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from trace_builders import group, write_run

from mempipe.cli import main
from mempipe.data.trajectories import write_trajectories
from mempipe.evaluation.memory_quality import MemoryQuality
from mempipe.evaluation.ratings import RATINGS, RatedTurn, alpha_interval, automatic_rating, read_ratings
from mempipe.reports.ratings import rating_lines
from tools.browser import CHROMIUM, browsing

HOSTILE = """</script><script>document.title="taken"</script><img src=x onerror="document.title='taken'"> \u202e"""


@pytest.fixture
def run(tmp_path) -> Path:
    return write_run(tmp_path / "run")


def printed(capsys, *arguments: object) -> str:
    assert main(["trace", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def filled(source: Path, target: Path, ratings: Sequence[str], column: str = "facts_kept") -> Path:
    rows = rows_of(source)
    with target.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        for row, rating in zip(rows, ratings, strict=True):
            writer.writerow(row | {column: rating})
    return target


# The sheet


def test_a_sheet_has_a_row_per_memory_turn_and_hides_what_would_sway_a_rater(run, tmp_path, capsys):
    sheet = tmp_path / "s.csv"
    out = printed(capsys, run, "--sheet", 4, sheet)
    assert f"4 trajectories to be rated in {sheet}; then: mempipe trace {run} --ratings A.csv B.csv" in out
    rows = rows_of(sheet)
    assert len(rows) == 8, "two memory turns each; the turn that answers writes none"
    assert {row["turn"] for row in rows} == {"1", "2"} and {row["memory_before"] for row in rows} == {"", "Oslo fjord"}
    assert not {"phase", "reward", "evidence"} & rows[0].keys()
    assert not re.search("(before|after)/", sheet.read_text())
    assert all(re.fullmatch("t[0-9a-f]{12}", row["trajectory"]) for row in rows)
    first = next(row for row in rows if row["turn"] == "1")
    assert (first["golden_answers"], first["query"], first["text_read"]) == ("Ann", "who is a", "[a] a says so")
    assert (first["memory_before_tokens"], first["memory_after_tokens"], first["budget_tokens"]) == ("0", "2", "64")
    printed(capsys, run, "--sheet", 4, tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_text() == sheet.read_text()


def test_a_sheet_of_an_agent_that_reads_shows_the_chunk(tmp_path, capsys):
    each = group("after", 4, right=True)
    (trajectory,) = each.trajectories
    contexts = [replace(context, searches=[], chunk="He lives in Oslo.") for context in trajectory.contexts]
    read = replace(each, trajectories=[replace(trajectory, contexts=contexts)])
    write_trajectories(tmp_path / "t.parquet", [read])
    printed(capsys, tmp_path / "t.parquet", "--sheet", 1, tmp_path / "s.csv")
    assert [(row["text_read"], row["budget_tokens"]) for row in rows_of(tmp_path / "s.csv")] == [
        ("He lives in Oslo.", "")
    ] * 2


def test_a_spreadsheet_takes_no_text_for_a_formula(tmp_path, capsys):
    write_trajectories(tmp_path / "t.parquet", [group("before", 0, right=False, text="=cmd|' /C calc'!A0")])
    printed(capsys, tmp_path / "t.parquet", "--sheet", 1, tmp_path / "s.csv")
    assert rows_of(tmp_path / "s.csv")[0]["question"].startswith("'=")


@pytest.mark.parametrize(
    ("number", "file", "message"),
    [
        ("0", "x.csv", "--sheet is 0; expected a number of trajectories from 1"),
        ("²", "x.csv", "--sheet is ²; expected a number"),
        ("2", "x.xlsx", "x.xlsx; expected a name that ends in .html (for a browser) or .csv"),
    ],
)
def test_a_sheet_that_cannot_be_written_is_refused(run, capsys, number, file, message):
    assert main(["trace", str(run), "--sheet", number, file]) == 2
    assert message in capsys.readouterr().err


def test_a_filled_sheet_is_not_written_again(run, tmp_path, capsys):
    sheet = tmp_path / "s.csv"
    printed(capsys, run, "--sheet", 4, sheet)
    filled(sheet, sheet, ["yes"] * 8)
    before = sheet.read_bytes()
    assert main(["trace", str(run), "--sheet", "4", str(sheet)]) == 2
    assert "which exists and may hold ratings; name a new file" in capsys.readouterr().err
    assert sheet.read_bytes() == before


def test_an_agent_that_carries_its_history_has_no_memory_to_rate(run, tmp_path, capsys):
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text("agent: {name: react}\n")
    assert main(["trace", str(run), "--sheet", "2", str(tmp_path / "s.csv")]) == 2
    assert "no trajectory writes a memory" in capsys.readouterr().err
    (run / "config.yaml").write_text(config)
    printed(capsys, run, "--sheet", 2, tmp_path / "s.csv")


# The page


def test_the_page_is_one_file_that_runs_its_own_script_only(run, tmp_path, capsys):
    page = tmp_path / "s.html"
    assert f"6 trajectories to be rated in {page}" in printed(capsys, run, "--sheet", 6, page)
    text = page.read_text()
    assert "script-src 'sha256-" in text and not re.search(r"https?://|src=|@import|url\(", text)
    assert not re.search("(before|after)/q", text) and all(question[1:] in text for question in RATINGS.values())


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed, so nobody fills in the page")
def test_the_page_is_filled_in_by_keys_and_clicks_and_saves_the_sheet(run, tmp_path, capsys):
    printed(capsys, run, "--sheet", 6, tmp_path / "s.html")
    printed(capsys, run, "--sheet", 6, tmp_path / "s.csv")
    with browsing(tmp_path / "profile") as page:
        page.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path / "saved"))
        page.open((tmp_path / "s.html").as_uri())

        def text(name: str) -> str:
            return page.value(f"document.getElementById('{name}').textContent")

        def press(key: str) -> None:
            page.value(f"document.body.dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}', bubbles: true}}))")

        def click(selector: str) -> None:
            page.value(f"document.querySelector('{selector}').click()")

        assert text("count") == "turn 1 of 12, 0 rated" and text("before") == "empty"
        assert (text("query"), text("text")) == ("search: who is a", "[a] a says so")
        assert text("after-size") == "2 of at most 64 tokens"
        press("1")
        press("4")
        assert text("count") == "turn 1 of 12, 1 rated"
        press("ArrowRight")
        click('[data-rating="facts_kept"][data-answer="no"]')
        page.value("document.getElementById('comment').focus()")
        page.type('=lost, "Oslo"')
        page.value("document.querySelector('[name=person]').focus()")
        page.type("Ann Lee")
        deadline = time.monotonic() + 60
        while True:  # the browser keeps the ratings; what one page stored may reach the next one late
            page.open((tmp_path / "s.html").as_uri())
            if page.value("document.querySelector('[name=person]').value") == "Ann Lee":  # it was stored last
                break
            assert time.monotonic() < deadline, text("count")
        assert text("count") == "turn 2 of 12, 1 rated", "it opens on the first turn that is not rated"
        pressed = "[...document.querySelectorAll('[aria-pressed=true]')].map(each => each.dataset.answer)"
        assert page.value(pressed) == ["no"]
        press("2")
        assert page.value(pressed) == [], "the same answer again takes it back"
        press("2")
        click("#sheet button")
        saved, deadline = tmp_path / "saved" / "s-Ann-Lee.csv", time.monotonic() + 60
        while not saved.exists():
            assert time.monotonic() < deadline, list((tmp_path / "saved").glob("*"))
            time.sleep(0.05)
        assert not page.errors and all(url.startswith(("file:", "blob:")) for url in page.requested)
    rows = rows_of(saved)
    assert [(row["facts_kept"], row["noise_filtered"], row["comment"]) for row in rows[:3]] == [
        ("yes", "no", ""),
        ("no", "", '\'=lost, "Oslo"'),
        ("", "", ""),
    ]
    empty = dict.fromkeys([*RATINGS, "comment"], "")
    assert [row | empty for row in rows] == rows_of(tmp_path / "s.csv")
    assert "yes           50.00" in printed(capsys, "--ratings", saved)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed, so nobody fills in the page")
def test_the_next_person_at_a_browser_begins_with_an_empty_sheet(run, tmp_path, capsys):
    printed(capsys, run, "--sheet", 6, tmp_path / "s.html")
    with browsing(tmp_path / "profile") as page:
        page.open((tmp_path / "s.html").as_uri())

        def named(name: str, *, same: bool = False) -> str:
            page.value(f"window.confirm = () => {str(same).lower()}")
            field = "document.querySelector('[name=person]')"
            page.value(f"{field}.value = '{name}'; {field}.dispatchEvent(new Event('change'))")
            return page.value("document.getElementById('count').textContent")

        def rate(*numbers: int) -> None:
            page.value(f"{list(numbers)}.forEach(number => document.querySelectorAll('[data-rating]')[number].click())")

        assert named("An") == "turn 1 of 12, 0 rated"
        rate(0, 3)
        assert named("Ann", same=True) == "turn 1 of 12, 1 rated", "a name that was spelled wrongly"
        assert named("Ben") == "turn 1 of 12, 0 rated" and ",yes," not in page.value("csv()")
        assert named("Ann") == "turn 2 of 12, 1 rated" and ",yes,no," in page.value("csv()")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed, so nobody looks at the page")
def test_the_next_turn_begins_with_its_question_on_a_small_screen(run, tmp_path, capsys):
    printed(capsys, run, "--sheet", 6, tmp_path / "s.html")
    with browsing(tmp_path / "profile") as page:
        page.resize(390, 500)
        page.open((tmp_path / "s.html").as_uri())
        page.value("document.getElementById('next').scrollIntoView()")
        top = "document.getElementById('question').getBoundingClientRect().top"
        assert page.value(top) < 0, "the page is longer than the screen"
        page.value("document.getElementById('next').click()")
        assert 0 <= page.value(top) < 500
        assert page.value("document.documentElement.scrollWidth") == 390


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed, so nobody looks at the page")
def test_hostile_text_stays_text_in_the_page(tmp_path, capsys):
    write_trajectories(tmp_path / "t.parquet", [group("before", 0, right=False, text=HOSTILE)])
    printed(capsys, tmp_path / "t.parquet", "--sheet", 1, tmp_path / "s.html")
    with browsing(tmp_path / "profile") as page:
        page.open((tmp_path / "s.html").as_uri())
        assert page.value("document.getElementById('question').textContent") == HOSTILE
        assert page.value("document.title") == "Rate memories: t.parquet"
        assert page.value("document.querySelectorAll('img').length") == 0 and not page.errors


# Agreement


def test_agreement_is_that_of_krippendorffs_own_example():
    """Krippendorff (2011), "Computing Krippendorff's Alpha-Reliability", section A: ten units, alpha 0.095."""
    pairs = zip((0, 1, 0, 0, 0, 0, 0, 0, 1, 0), (1, 1, 1, 0, 0, 1, 0, 0, 0, 0), strict=True)
    equal, alpha = alpha_interval([(unit, [bool(a), bool(b)]) for unit, (a, b) in enumerate(pairs)])
    assert equal == pytest.approx(0.6) and alpha.value == pytest.approx(0.095, abs=5e-4)
    assert alpha.low < alpha.value < alpha.high


def test_agreement_of_several_people_is_that_of_the_definition():
    """Pairs of ratings counted one by one, as the definition says; some people skip some turns."""
    generator = random.Random(3)
    for _ in range(20):
        units = [[generator.random() < 0.6 for _ in range(generator.randint(0, 4))] for _ in range(30)]
        paired = [unit for unit in units if len(unit) > 1]
        values = [value for unit in paired for value in unit]
        observed = sum(
            sum(a != b for a, b in itertools.permutations(unit, 2)) / (len(unit) - 1) for unit in paired
        ) / len(values)
        expected = sum(a != b for a, b in itertools.permutations(values, 2)) / (len(values) * (len(values) - 1))
        equal, alpha = alpha_interval([(index % 7, unit) for index, unit in enumerate(units)])
        assert equal == pytest.approx(1 - observed) and alpha.value == pytest.approx(1 - observed / expected)


def test_ratings_that_are_all_the_same_have_no_agreement_by_chance():
    equal, alpha = alpha_interval([(unit, [True, True]) for unit in range(4)])
    assert equal == 1 and math.isnan(alpha.value)
    with pytest.raises(ValueError, match="no turn has two ratings"):
        alpha_interval([("a", [True]), ("b", [])])


def test_the_interval_of_alpha_covers_that_of_many_turns():
    """Two people who err independently in one rating of ten: alpha is 0.64 in the long run."""
    generator, covered = random.Random(5), 0
    for _ in range(60):
        truths = [generator.random() < 0.5 for _ in range(80)]
        rated = [(i, [truth != (generator.random() < 0.1) for _ in range(2)]) for i, truth in enumerate(truths)]
        _, alpha = alpha_interval(rated)
        covered += alpha.low <= 0.64 <= alpha.high
    assert covered >= 51


# What the ratings say


def test_two_people_are_compared_turn_by_turn(run, tmp_path, capsys):
    sheet = tmp_path / "s.csv"
    printed(capsys, run, "--sheet", 4, sheet)
    ann = filled(sheet, tmp_path / "ann.csv", ["yes", "yes", "no", "no", "yes", "no", "yes", "no"])
    ben = filled(sheet, tmp_path / "ben.csv", ["Yes", "no", "no", "no", "yes", "yes", "yes", ""])
    out = printed(capsys, "--ratings", ann, ben)
    assert "8 memory turns of 4 trajectories; percent with 95 % intervals over questions" in out
    assert re.search(r"yes +50\.00 \(\d", out) and "  ann         50.00 of 8 turns" in out
    assert "  ben         57.14 of 7 turns" in out
    # 4 of 14 ratings are in unequal pairs; of all pairs 2 * 8 * 6 / (14 * 13) are unequal
    assert "71.4 percent of pairs equal, Krippendorff's alpha 0.46 (" in out
    assert "7 turns with two ratings or more" in out
    assert re.search(r"turn 1 +75\.00 .* of 4 turns", out) and re.search(r"turn 2 +25\.00 .* of 4 turns", out)
    assert re.search(r"last - first +-50\.0 \(-\d+\.\d to -?\d+\.\d\) points, of the same 4 trajectories", out)
    assert out.rstrip().endswith(f"noise_filtered: {RATINGS['noise_filtered']}\n  not rated")


@pytest.mark.parametrize("separator", [";", "\t"])
def test_a_sheet_may_have_the_separator_of_a_spreadsheets_language(run, tmp_path, capsys, separator):
    printed(capsys, run, "--sheet", 2, tmp_path / "s.csv")
    rows = rows_of(tmp_path / "s.csv")
    ann = filled(tmp_path / "s.csv", tmp_path / "ann.csv", ["yes"] * len(rows))
    rows = rows_of(ann)
    (tmp_path / "saved").mkdir()
    with (tmp_path / "saved" / "ann.csv").open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, rows[0], delimiter=separator)
        writer.writeheader()
        writer.writerows(rows)
    assert read_ratings([tmp_path / "saved" / "ann.csv"]) == read_ratings([ann]) != []


def test_empty_rows_that_a_spreadsheet_leaves_below_the_sheet_do_not_count(run, tmp_path, capsys):
    printed(capsys, run, "--sheet", 4, tmp_path / "s.csv")
    ann = filled(tmp_path / "s.csv", tmp_path / "ann.csv", ["yes"] * 8)
    rated, columns = read_ratings([ann]), len(rows_of(ann)[0])
    with ann.open("a") as file:
        file.write(("," * (columns - 1) + "\r\n") * 2)
    assert read_ratings([ann]) == rated and len(rated) == 8


def test_a_turn_that_read_a_long_text_can_be_rated_in_a_spreadsheet(run, tmp_path, capsys):
    printed(capsys, run, "--sheet", 4, tmp_path / "s.csv")
    long = filled(tmp_path / "s.csv", tmp_path / "long.csv", ["a word " * 20_000] * 8, "text_read")
    csv.field_size_limit(131_072)
    assert len(read_ratings([long])) == 8


def test_one_person_has_shares_and_no_agreement(run, tmp_path, capsys):
    sheet = tmp_path / "s.csv"
    printed(capsys, run, "--sheet", 4, sheet)
    out = printed(capsys, "--ratings", filled(sheet, tmp_path / "a.csv", ["yes"] * 8))
    assert "yes           100.00 (" in out and "agreement" not in out


def test_the_automatic_rates_are_compared_with_what_most_people_say(run, tmp_path, capsys):
    """Memories keep all facts but in the second turn of after/q2; all first turns note a fjord that nobody needs."""
    sheet = tmp_path / "s.csv"
    printed(capsys, run, "--sheet", 6, sheet)
    rows = rows_of(sheet)
    kept = ["no" if row["memory_after"] == "Ann" else "yes" for row in rows]
    assert sorted(kept) == ["no", *["yes"] * 11]
    ann = filled(sheet, tmp_path / "ann.csv", kept)
    out = printed(capsys, run, "--ratings", ann)
    assert (
        "automatic     with most people 100.0 percent of pairs equal, Krippendorff's alpha 1.00 (1.00 to 1.00)" in out
    )
    assert "yes in 91.67 of them" in out
    noise = ["no" if row["turn"] == "1" else "yes" for row in rows]
    out = printed(capsys, run, "--ratings", filled(ann, tmp_path / "both.csv", noise, "noise_filtered"))
    assert "irrelevant words: 50.00 percent where most say no, 0.00 where most say yes" in out
    ties = filled(ann, tmp_path / "ben.csv", ["no"] * 12)
    out = printed(capsys, run, "--ratings", ann, ties)
    assert "11 turns without a needed fact in the data, or with as many yes as no" in out
    other = write_run(tmp_path / "other")
    write_trajectories(other / "trajectories.parquet", [group("during", 7, right=True)])
    assert main(["trace", str(other), "--ratings", str(ann)]) == 2
    assert (
        "the run has none of the rated turns; give the folder that the sheet was written from"
        in capsys.readouterr().err
    )


def test_a_memory_that_still_says_known_nothing_holds_no_noise(tmp_path, capsys):
    """The empty memory of a prompt has words of its own, and a memory may go on with them."""
    each = group("after", 4, right=False)
    (trajectory,) = each.trajectories
    memories = ["known nothing", "known nothing", "known Oslo", "known Oslo fjord"]
    contexts = [
        replace(trajectory.contexts[0], index=index, memory_before=before, memory_after=after)
        for index, (before, after) in enumerate(itertools.pairwise(memories))
    ]
    write_trajectories(tmp_path / "t.parquet", [replace(each, trajectories=[replace(trajectory, contexts=contexts)])])
    printed(capsys, tmp_path / "t.parquet", "--sheet", 1, tmp_path / "s.csv")
    noise = filled(tmp_path / "s.csv", tmp_path / "ann.csv", ["yes", "yes", "no"], "noise_filtered")
    out = printed(capsys, tmp_path / "t.parquet", "--ratings", noise)
    assert "automatic     with most people 100.0 percent of pairs equal" in out and "yes in 66.67 of them" in out


def test_a_turn_without_a_case_has_no_automatic_verdict():
    assert automatic_rating(MemoryQuality(memory_turns=1)) == {}
    assert automatic_rating(MemoryQuality(facts_held=2, facts_lost=1)) == {"facts_kept": False}
    assert automatic_rating(MemoryQuality(facts_retrieved=1, facts_kept=1, judged_words=3)) == {
        "facts_kept": True,
        "noise_filtered": True,
    }
    assert automatic_rating(MemoryQuality(judged_words=3, irrelevant_words=1)) == {"noise_filtered": False}


def test_memories_that_become_worse_are_seen_within_the_same_trajectories():
    """Long trajectories are good to the end, short ones are bad: later turns look better, and no attempt changes."""
    turns = []
    for number in range(40):
        good = number % 2 == 0
        for turn in range(1, 7 if good else 2):
            rated = RatedTurn(trajectory=str(number), turn=turn, question=str(number))
            rated.ratings["facts_kept"]["ann"] = good
            turns.append(rated)
    text = "\n".join(rating_lines(turns))
    assert re.search(r"turn 1 +50\.00 .* of 40 turns", text) and re.search(r"turn 4 +100\.00 .* of 20 turns", text)
    assert re.search(r"turn 5 to 8 +100\.00 .* of 40 turns", text)
    assert re.search(r"last - first +0\.0 \(-\d+\.\d to \d+\.\d\) points, of the same 20 trajectories", text)


def test_the_interval_of_a_share_stays_between_0_and_100_for_unequal_questions():
    """One question of twelve has six turns, and all no is among them; the others have one turn or two."""
    turns = []
    for number in range(12):
        for turn in range(1, 7 if number == 0 else 2 + number % 2):
            rated = RatedTurn(trajectory=str(number), turn=turn, question=str(number))
            rated.ratings["facts_kept"]["ann"] = number != 0
            turns.append(rated)
    (line,) = [line for line in rating_lines(turns) if line.startswith("  yes")]
    low, high = map(float, re.findall(r"\((.*)–(.*)\)", line)[0])
    assert 0 <= low < 73.91 < high == 100, line  # 17 of 23 turns; a resample without the one question is all yes


def test_sheets_that_cannot_be_read_or_compared_are_refused_by_name(run, tmp_path, capsys):
    sheet = tmp_path / "s.csv"
    printed(capsys, run, "--sheet", 4, sheet)
    wrong = filled(sheet, tmp_path / "wrong.csv", ["maybe"] * 8)
    other = tmp_path / "other.csv"
    other.write_text(re.sub("^t[0-9a-f]{4}", "tzzzz", sheet.read_text(), flags=re.M))
    twice = tmp_path / "twice.csv"
    twice.write_text(sheet.read_text() + sheet.read_text().splitlines()[1] + "\r\n")
    (tmp_path / "none.csv").write_text("a,b\n1,2\n")
    turn = filled(sheet, tmp_path / "turn.csv", ["first"] * 8, "turn")
    for second, message in (
        (wrong, "wrong.csv, row 1: facts_kept is 'maybe'; expected yes, no or nothing"),
        (tmp_path / "none.csv", "none.csv is not a rating sheet; it needs rows and the columns trajectory, turn"),
        (tmp_path / "missing.csv", "missing.csv cannot be read"),
        (other, "shares no turn with the other sheets"),
        (twice, "twice.csv, row 9: turn 1 of trajectory t"),
        (turn, "turn.csv, row 1: turn is 'first'; expected a number from 1"),
        (sheet, "--ratings names a file twice"),
    ):
        assert main(["trace", "--ratings", str(sheet), str(second)]) == 2
        assert message in capsys.readouterr().err


def test_people_are_named_by_their_files(run, tmp_path, capsys):
    sheet = tmp_path / "s.csv"
    printed(capsys, run, "--sheet", 1, sheet)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    paths = [filled(sheet, tmp_path / folder / "sheet.csv", ["yes", ""]) for folder in ("a", "b")]
    first, second = read_ratings(paths)
    assert first.ratings["facts_kept"] == dict.fromkeys(map(str, paths), True) and second.score("facts_kept") is None
    assert f"  {paths[0]} 100.00 of 1 turn" in printed(capsys, "--ratings", *paths), "a long name has its own column"
