"""Trajectories read by people: as text, in a browser, and as a picture."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from rich.cells import cell_len
from trace_builders import group, write_run

from mempipe.cli import main
from mempipe.config import RunConfig
from mempipe.data.trajectories import write_trajectories
from mempipe.evaluation.results import ResultFolder, result_row
from mempipe.facts import FactState, fact_states
from mempipe.reports import viewer
from mempipe.reports.traced import read_traced
from mempipe.types import Group

HOSTILE = """</script><script>document.title="taken"</script><img src=x onerror="document.title='taken'"> \u202e"""
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture
def run(tmp_path) -> Path:
    return write_run(tmp_path / "run")


@pytest.fixture
def evaluation(tmp_path) -> Path:
    folder = tmp_path / "evaluation"
    for name, budget in (("small", 8), ("large", 512)):
        config = RunConfig().model_dump(mode="json")
        config["budget"]["memory_tokens"] = budget
        results = ResultFolder(folder / name / "nq", {"run": config})
        results.open()
        groups = [group("", number, right=name == "large") for number in range(2)]
        results.append(groups, [result_row(each, growing=False, prompt_hash="p") for each in groups])
    return folder


def printed(capsys, *arguments: object) -> str:
    assert main(["trace", *map(str, arguments)]) == 0
    return capsys.readouterr().out


# Text


def test_a_question_before_and_after_is_what_the_first_look_shows(run, capsys):
    out = printed(capsys, run)
    assert re.findall(r"^(\S+)/q(\d)/0$", out, flags=re.MULTILINE) == [("before", "1"), ("after", "1")]
    assert "no answer, ended by max_turns, reward 0.000" in out and "answer 'Ann', ended by answered" in out
    assert "2 of 6 trajectories; --question TEXT, --phase PHASE and --limit N" in out


def test_phase_question_and_limit_choose_others(run, capsys):
    assert re.findall(r"^(\S+)/0$", printed(capsys, run, "--phase", "after"), flags=re.MULTILINE) == [
        "after/q0",
        "after/q1",
        "after/q2",
    ]
    assert re.findall(r"^(\S+)/0$", printed(capsys, run, "--question", "number 2"), flags=re.MULTILINE) == [
        "before/q2",
        "after/q2",
    ]
    assert "6 of 6" not in printed(capsys, run, "--limit", 6), "nothing is left to be named"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--limit", "0"], "--limit is 0; expected at least 1"),
        (["--phase", "during"], "--phase is 'during'; the phases are before, after"),
        (["--question", "absent"], "no trajectory matches --question 'absent'"),
    ],
)
def test_a_wish_that_nothing_fits_is_refused(run, capsys, arguments, message):
    assert main(["trace", str(run), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_what_holds_no_trajectories_is_refused(tmp_path, capsys):
    (tmp_path / "x.parquet").write_bytes(b"no")
    for target, message in ((tmp_path / "x.parquet", "x.parquet cannot be read"), (tmp_path, "holds no trajectories")):
        assert main(["trace", str(target)]) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("name: mine\n")
    assert main(["trace", str(tmp_path / "config.yaml")]) == 2
    assert "config.yaml is not a .parquet file; give the folder of a run" in capsys.readouterr().err
    assert main(["trace"]) == 2
    assert "needs the folder of a run or an evaluation" in capsys.readouterr().err


def test_an_unfinished_run_shows_what_it_has(run, capsys):
    (run / "trajectories.parquet").unlink()
    write_trajectories(run / "evaluation" / "before.parquet", [group("before", 7, right=False)])
    assert "before/q7/0" in printed(capsys, run)


def test_an_evaluation_a_run_of_it_and_a_set_of_that_can_be_read(evaluation):
    assert {(each.phase, each.memory_budget) for each in read_traced(evaluation)} == {
        ("small/nq", 8),
        ("large/nq", 512),
    }
    assert {each.phase for each in read_traced(evaluation / "small")} == {"nq"}
    assert [each.key for each in read_traced(evaluation / "small" / "nq")] == ["nq/q0/0", "nq/q1/0"]
    assert len({each.key for each in read_traced(evaluation)}) == 4


def reading(*, right: bool) -> Group:
    """An attempt of an agent that reads: the first fact stands in the first chunk."""
    each = group("after", 4, right=right)
    (trajectory,) = each.trajectories
    chunks = ["He lives in Oslo." + " So it goes." * 200, "Nothing of use.", ""]
    contexts = [
        replace(context, searches=[], chunk=chunk) for context, chunk in zip(trajectory.contexts, chunks, strict=True)
    ]
    return replace(each, trajectories=[replace(trajectory, contexts=contexts)])


def test_what_was_read_is_shown_and_kept_once_in_the_page(run, capsys):
    write_trajectories(run / "trajectories.parquet", [reading(right=True)])
    assert "    chunk    He lives in Oslo. So it goes." in printed(capsys, run)
    data = viewer.viewer_data([*read_traced(run), *read_traced(run)])
    assert [turn["chunk"] for turn in data["trajectories"][1]["turns"]] == [(0, True), (1, False), None]
    assert [len(passage["text"]) for passage in data["passages"]] == [2000, 15]


# Facts


def test_facts_are_found_gained_known_and_lost():
    each = group("after", 2, right=False, lost=True)
    found = [[str(state) for state in states] for states in fact_states(each.trajectories[0], each.question)]
    assert found == [["gained", "missing"], ["lost", "gained"], ["missing", "known"]]
    trajectory = each.trajectories[0]
    unnoted = replace(trajectory, contexts=[replace(trajectory.contexts[0], memory_after="nothing of note")])
    assert fact_states(unnoted, each.question) == [[FactState.FOUND, FactState.MISSING]]


# The page


def test_the_page_is_one_file_that_runs_its_own_script_only(run, tmp_path, capsys):
    page = tmp_path / "t.html"
    assert f"6 of 6 trajectories in {page}" in printed(capsys, run, "--html", page)
    text = page.read_text()
    assert "script-src 'sha256-" in text and "unsafe-inline'; script" in text
    assert not re.search(r"https?://|src=|@import|url\(", text)


def test_a_large_run_is_cut_and_the_page_says_so(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(viewer, "MAX_TRAJECTORIES", 4)
    assert "4 of 6" in printed(capsys, run, "--html", tmp_path / "t.html")
    assert "2 more are not in this file" in (tmp_path / "t.html").read_text()
    for key in ("before/q0/0", "after/q0/0", "before/q1/0", "after/q1/0"):
        assert f'"id": "{key}"' in (tmp_path / "t.html").read_text(), "a question is there in both phases"


def test_a_passage_is_stored_once(run):
    data = viewer.viewer_data(read_traced(run))
    assert [passage["title"] for passage in data["passages"]] == ["a", "b"] and len(data["trajectories"]) == 6


class Browser:
    """A page in a headless Chromium, driven as a person would: by keys, clicks and looks."""

    def __init__(self, connection) -> None:
        self._connection, self._ids = connection, count(1)

    def send(self, method: str, **parameters):
        number = next(self._ids)
        self._connection.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while (reply := json.loads(self._connection.recv(timeout=60))).get("id") != number:
            pass
        assert "error" not in reply, reply
        return reply["result"]

    def look(self, expression: str):
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    def set(self, name: str, value: str) -> None:
        field = f"document.getElementById('filters').elements.{name}"
        self.look(f"{field}.value = {value!r}; {field}.dispatchEvent(new Event('input', {{bubbles: true}}))")

    def texts(self, selector: str) -> list[str]:
        return self.look(f"[...document.querySelectorAll('{selector}')].map(each => each.textContent)")

    def open(self, page: Path) -> None:
        self.send("Page.navigate", url=page.as_uri())
        deadline = time.monotonic() + 60
        while self.look("document.readyState + location.pathname") != f"complete{page}":
            assert time.monotonic() < deadline, "the page does not load"
            time.sleep(0.05)

    @property
    def current(self) -> str:
        return self.look("decodeURIComponent(location.hash.slice(1))")

    @property
    def count(self) -> str:
        return self.look("document.getElementById('count').textContent")


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed, so nobody looks at the page")
    from websockets.sync.client import connect

    folder = tmp_path_factory.mktemp("profile")
    command = [CHROMIUM, "--headless=new", "--disable-gpu", "--remote-debugging-port=0", f"--user-data-dir={folder}"]
    if os.geteuid() == 0:
        command.append("--no-sandbox")
    process = subprocess.Popen([*command, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (port := folder / "DevToolsActivePort").exists() or not port.read_text():
            assert time.monotonic() < deadline and process.poll() is None, "Chromium does not start"
            time.sleep(0.1)
        url = f"http://127.0.0.1:{port.read_text().split()[0]}/json/list"
        while not (pages := [each for each in json.load(urllib.request.urlopen(url)) if each["type"] == "page"]):
            assert time.monotonic() < deadline, "Chromium opens no page"
            time.sleep(0.1)
        (target,) = pages
        with connect(target["webSocketDebuggerUrl"], max_size=None) as connection:
            yield Browser(connection)
    finally:
        process.terminate()
        process.wait(timeout=120)


@pytest.mark.slow
def test_the_page_in_a_browser_by_keys_and_filters(run, tmp_path, capsys, browser):
    printed(capsys, run, "--html", tmp_path / "t.html")
    browser.open(tmp_path / "t.html")
    assert (browser.count, browser.current) == ("6 of 6 trajectories", "after/q0/0"), "the trained attempt"
    browser.press("c")
    assert browser.current == "before/q0/0"
    browser.press("j")
    browser.press("ArrowDown")
    assert browser.current == "before/q2/0"
    browser.press("k")
    assert browser.current == "before/q1/0"
    browser.press("c")
    assert browser.current == "after/q1/0", "the same question in the other phase"
    assert browser.look("[...document.querySelectorAll('#detail ins')].map(e => e.textContent)") == [
        "Oslo fjord",
        "Ann",
    ]
    assert browser.look("[...document.querySelectorAll('#detail del')].map(e => e.textContent)") == ["fjord"]
    assert browser.look("document.querySelector('#detail .thought').textContent") == "look"
    assert "reward 1.000" in browser.look("document.querySelector('#detail .outcome').textContent")
    browser.press("/")
    assert browser.look("document.activeElement.name") == "text"
    browser.press("2")
    assert browser.count == "2 of 6 trajectories", "a key that is typed into the field is no command"
    browser.press("Escape")
    assert browser.look("document.activeElement.tagName") == "BODY"
    browser.set("text", "")
    browser.set("phase", "after")
    assert browser.count == "3 of 6 trajectories"
    browser.set("end", "answered")
    assert (browser.count, browser.current) == ("1 of 6 trajectories", "after/q1/0")
    browser.look("document.querySelector('#filters button').click()")
    browser.look("new Promise(done => setTimeout(done))")
    assert browser.count == "6 of 6 trajectories"
    browser.look("document.getElementById('filters').elements.lost.click()")
    assert (browser.count, browser.current) == ("1 of 6 trajectories", "after/q2/0")
    assert "Oslo: lost" in browser.look("document.getElementById('detail').textContent")
    browser.look("document.getElementById('filters').elements.lost.click()")
    browser.set("low", "0.5")
    assert browser.count == "1 of 6 trajectories"


def test_a_chunk_is_shown_in_a_browser_and_marked_where_it_is_needed(run, tmp_path, capsys, browser):
    write_trajectories(run / "trajectories.parquet", [reading(right=False)])
    printed(capsys, run, "--html", tmp_path / "t.html")
    browser.open(tmp_path / "t.html")
    first, second = browser.texts("#detail .passages li")
    assert first.startswith("●  He lives in Oslo.") and second == " Nothing of use."


def test_budgets_are_told_apart_in_a_browser(evaluation, tmp_path, capsys, browser):
    printed(capsys, evaluation, "--html", tmp_path / "t.html")
    browser.open(tmp_path / "t.html")
    browser.set("budget", "8")
    assert browser.count == "2 of 4 trajectories"
    assert "memory of at most 8 tokens" in browser.look("document.getElementById('detail').textContent")


def test_the_page_follows_light_and_dark_and_hostile_text_stays_text(tmp_path, capsys, browser):
    write_trajectories(tmp_path / "t.parquet", [group("before", 0, right=False, text=HOSTILE)])
    printed(capsys, tmp_path / "t.parquet", "--html", tmp_path / "t.html")
    assert "<img" not in (tmp_path / "t.html").read_text()
    browser.open(tmp_path / "t.html")
    assert browser.look("document.title") == "t.parquet: trajectories"
    assert browser.look("document.querySelector('#detail h2').textContent") == HOSTILE
    assert browser.look("document.querySelectorAll('img').length") == 0
    colours = []
    for scheme in ("light", "dark"):
        browser.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        colours.append(browser.look("getComputedStyle(document.body).backgroundColor"))
    assert colours == ["rgb(246, 247, 249)", "rgb(14, 19, 27)"]


# Picture


def test_a_picture_shows_the_attempt_before_and_after_with_every_text_escaped(run, tmp_path, capsys):
    picture = tmp_path / "attempt.svg"
    assert "2 of 6 trajectories in" in printed(capsys, run, "--svg", picture)
    text = picture.read_text()
    root = ElementTree.fromstring(text)
    words = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert words.index("before training") < words.index("after training")
    assert [word for word in words if "(wrong)" in word or "(right)" in word] == ["none (wrong)", "Ann (right)"]
    assert words.count("who is b") == 2 and words.count("Oslo Ann") == 2, "searches and memories of both attempts"
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for box in list(root.iter("{http://www.w3.org/2000/svg}rect"))[1:]:
        x, y, w, h = (float(box.attrib[name]) for name in ("x", "y", "width", "height"))
        assert x >= 0 and x + w <= width and y >= 0 and y + h <= height


def test_wide_characters_stay_in_their_column_of_a_picture(tmp_path, capsys):
    text = "谁是这部电影的导演的配偶的家乡的市长" * 6 + " and a few letters"
    groups = [group(phase, 1, right=True, text=text) for phase in ("before", "after")]
    write_trajectories(tmp_path / "trajectories.parquet", groups)
    printed(capsys, tmp_path, "--svg", tmp_path / "t.svg")
    root = ElementTree.fromstring((tmp_path / "t.svg").read_text())
    lines = [each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert max(map(cell_len, lines)) <= 100, "two columns of fifty letters"
    assert "".join(lines).count("谁是这部电影") >= 6 and not any("\x00" in line for line in lines)


def test_a_picture_takes_one_question_and_holds_hostile_text_as_text(tmp_path, capsys):
    hostile = [group(phase, 1, right=phase == "after", text=HOSTILE) for phase in ("before", "after")]
    write_trajectories(tmp_path / "run" / "trajectories.parquet", [*hostile, group("after", 2, right=True)])
    picture = tmp_path / "attempt.svg"
    printed(capsys, tmp_path / "run", "--svg", picture)
    elements = {each.tag.rpartition("}")[2] for each in ElementTree.fromstring(picture.read_text()).iter()}
    assert elements <= {"svg", "title", "style", "rect", "text"}
    assert main(["trace", str(tmp_path / "run"), "--limit", "3", "--svg", str(picture)]) == 2
    assert "at most 2 trajectories of one question, and 3 were chosen" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--svg", "a.png"], "--svg writes a.png; expected a name that ends in .svg"),
        (["--html", "a.pdf"], "--html writes a.pdf; expected a name that ends in .html"),
    ],
)
def test_a_file_of_another_kind_is_not_written(run, tmp_path, monkeypatch, capsys, words, sentence):
    monkeypatch.chdir(tmp_path)
    assert main(["trace", str(run), *words]) == 2
    assert sentence in capsys.readouterr().err and not Path(words[1]).exists()


def test_a_run_whose_budget_has_a_setting_of_another_version_is_refused_in_a_sentence(run, capsys):
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["budget"]["of_tomorrow"] = 5
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["trace", str(run)]) == 2
    error = capsys.readouterr().err
    assert "trajectories.parquet cannot be read (of_tomorrow is not a setting" in error
    assert error.rstrip().endswith("read it with the version of mempipe that wrote it")


def test_of_a_sweep_a_trial_is_asked_for(tmp_path, capsys):
    (tmp_path / "sweep" / "trials" / "a-memory-4-seed-1").mkdir(parents=True)
    assert main(["trace", str(tmp_path / "sweep")]) == 2
    assert "sweep is a sweep; give the folder of one of its trials, e.g. " in capsys.readouterr().err
