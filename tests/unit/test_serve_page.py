"""The page of the agent service in a real browser."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from service_builders import QUESTIONS, Service, build_service, running

from mempipe.answers.api import CorpusReply, ExampleReply
from mempipe.engines.tiny import build_tokenizer
from mempipe.engines.tokenizer import load_tokenizer
from tools.browser import CHROMIUM, Page, browsing

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")]
QUESTION = max(QUESTIONS, key=lambda question: question.num_hops)
GOLD = QUESTION.golden_answers[0]
NUM_TURNS = QUESTION.num_hops + 1
EXAMPLE = ExampleReply(question=QUESTION.text, golden_answers=QUESTION.golden_answers, partition=QUESTION.partition)
SEARCHED = CorpusReply(partition=QUESTION.partition, partitions=[QUESTION.partition, "other"], examples=[EXAMPLE])
FILES = list((Path(__file__).parents[2] / "mempipe/serve/page").iterdir())
DONE = "!document.getElementById('save').hidden"


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("page")
    build_tokenizer(folder)
    service = build_service(load_tokenizer(str(folder)), folder, searched=SEARCHED)
    with running(service):
        yield service


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Page]:
    with browsing(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture
def page(browser, service) -> Page:
    browser.resize(1000, 900)
    browser.colours("light")
    browser.open(f"{service.url}/")
    browser.until("document.getElementById('model').textContent.startsWith('tiny')")
    return browser


def text(page: Page, selector: str) -> str:
    return page.value(f"document.querySelector({json.dumps(selector)}).textContent")


def texts(page: Page, selector: str) -> list[str]:
    return page.value(f"[...document.querySelectorAll({json.dumps(selector)})].map((node) => node.textContent)")


def ask(page: Page, question: str = QUESTION.text) -> None:
    page.value("document.getElementById('question').focus()")
    page.value("document.getElementById('question').value = ''")
    page.type(question)
    page.press("Enter", text="\r")


def test_the_keyboard_alone_asks_and_everything_is_shown(page, service):
    page.press("Tab")
    assert page.value("document.activeElement.className") == "skip"
    page.press("Tab")
    assert page.value("document.activeElement.id") == "question"
    page.type(QUESTION.text)
    page.press("Enter", text="\r")
    page.until(DONE)
    assert text(page, "#text_answer") == GOLD
    assert len(texts(page, ".turn")) == NUM_TURNS
    assert texts(page, ".turn ins")[0].endswith(f"{QUESTION.evidence[0].value};")
    assert texts(page, ".turn del") == ["nothing"]
    assert len(texts(page, "#chart rect")) == NUM_TURNS == len(texts(page, "#chart circle"))
    heights = page.value("[...document.querySelectorAll('#chart rect')].map((bar) => +bar.getAttribute('height'))")
    dots = page.value("[...document.querySelectorAll('#chart circle')].map((dot) => +dot.getAttribute('cy'))")
    assert dots == sorted(dots, reverse=True) and max(heights) < 2 * min(heights)
    assert f"{NUM_TURNS} turns" in text(page, "#numbers") and "weights v1" in text(page, "#numbers")
    assert page.errors == []
    assert all(url.startswith((service.url, "data:", "about:")) for url in page.requested)


def test_an_example_is_asked_with_one_click_and_its_right_answer_is_told(page):
    page.until("!document.getElementById('examples').hidden")
    assert texts(page, "#example_list button") == [QUESTION.text]
    page.value("document.querySelector('#example_list button').click()")
    page.until(DONE)
    page.until("!document.getElementById('expected').hidden")
    assert (text(page, "#text_answer"), text(page, "#expected")) == (GOLD, f"right answer: {GOLD}")
    ask(page, QUESTION.text + " ")  # one that is typed is known too
    page.until(f"{DONE} && !document.getElementById('expected').hidden")
    ask(page, "who ?")
    page.until("document.getElementById('expected').hidden")


def test_another_part_of_the_corpus_can_be_named_where_there_are_parts(page):
    page.until("!document.getElementById('partition_label').hidden")
    assert page.value("document.getElementById('partition').placeholder") == QUESTION.partition
    assert page.value("[...document.getElementById('partitions').children].map((o) => o.value)") == SEARCHED.partitions
    page.value("document.getElementById('partition').value = 'other'")
    ask(page)
    page.until("document.getElementById('answer').classList.contains('failed')")
    assert "partition 'other'" in text(page, "#text_answer")
    assert page.value("document.getElementById('expected').hidden")
    page.value("document.getElementById('partition').value = ''")


def test_text_of_others_is_text(page, service):
    service.engine.says[:] = ["so</think>\\boxed{ <img src=x onerror=alert(1)>}"]
    ask(page, "who ?")
    page.until(DONE)
    assert "<img src=x" in text(page, "#text_answer")
    assert page.value("document.querySelectorAll('img').length") == 0


def test_a_refusal_is_told(page):
    ask(page, "who " * 100)
    page.until("document.getElementById('answer').classList.contains('failed')")
    assert "budget.question_tokens 32" in text(page, "#text_answer")
    assert page.value("document.getElementById('ask').disabled") is False


def test_stop_ends_the_work(page, service):
    service.engine.go_on.clear()
    ask(page)
    page.until("!document.getElementById('stop').hidden")
    deadline = time.monotonic() + 60
    while service.engine.under_way == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    page.value("document.getElementById('stop').click()")
    page.until("document.getElementById('text_answer').textContent === 'stopped'")
    while service.engine.under_way:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    service.engine.go_on.set()


def test_a_kept_memory_goes_into_the_next_question(page, service):
    page.value("document.getElementById('keep').click()")
    ask(page)
    page.until(DONE)
    service.engine.says[:] = ["so</think>\\boxed{ yes}"]
    already = len(service.engine.prompts)
    ask(page, "who ?")
    page.until(f"document.getElementById('text_answer').textContent === 'yes' && {DONE}")
    assert f" {GOLD}</memory>" in service.engine.prompts[already]


def test_after_the_refusal_of_an_expired_memory_the_next_question_begins_another(page, service):
    page.value("document.getElementById('keep').click()")
    ask(page)
    page.until(DONE)
    httpx.delete(f"{service.url}/v1/sessions/{page.value('session')}").raise_for_status()
    ask(page)
    page.until("document.getElementById('answer').classList.contains('failed')")
    assert "or it has expired" in text(page, "#text_answer")
    ask(page)
    page.until(DONE)
    assert text(page, "#text_answer") == GOLD


def test_a_trace_is_a_file_that_can_be_opened_again(page, tmp_path):
    page.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    ask(page)
    page.until(DONE)
    page.value("document.getElementById('save').click()")
    deadline = time.monotonic() + 60
    while not (files := list(tmp_path.glob("trace-*.json"))):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    trace = json.loads(files[0].read_text())
    assert trace["answer"].strip() == GOLD and len(trace["turns"]) == NUM_TURNS
    shown = texts(page, ".turn")
    page.value("location.reload()")
    page.until("document.readyState === 'complete' && document.querySelectorAll('.turn').length === 0")
    page.give_file("#open", files[0])
    page.until(DONE)
    assert (texts(page, ".turn"), text(page, "#text_answer")) == (shown, GOLD)
    (tmp_path / "no.json").write_text("{}")
    page.give_file("#open", tmp_path / "no.json")
    page.until("document.getElementById('text_answer').textContent.includes('no trace')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1000, 360])
def test_it_fits_the_screen_and_can_be_read(page, scheme, width, tmp_path):
    page.resize(width, 800)
    page.colours(scheme)
    ask(page)
    page.until(DONE)
    page.value("document.querySelectorAll('details').forEach((node) => (node.open = true))")
    assert page.value("document.documentElement.scrollWidth") <= width
    boxes = page.value("[...document.querySelectorAll('button:not([hidden])')].map((b) => b.clientHeight)")
    assert min(boxes) >= 42
    for selector in ("body", "#text_answer", ".quiet", "ins", "del", "#ask", ".name"):
        assert contrast(page, selector) >= 4.5, selector
    page.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000


def test_the_page_of_the_api_describes_every_route_and_field(page, service):
    schema = httpx.get(f"{service.url}/openapi.json").json()
    page.resize(360, 800)
    page.errors.clear()
    page.open(f"{service.url}/docs")
    page.until("document.querySelector('#objects article')")
    routes = {f"{method.upper()} {path}" for path, methods in schema["paths"].items() for method in methods}
    assert set(texts(page, "#routes h2")) == routes
    assert {*texts(page, "#objects h3")} == {*schema["components"]["schemas"]}
    fields = texts(page, "#AnswerRequest code")
    assert fields == [*schema["components"]["schemas"]["AnswerRequest"]["properties"]]
    assert "at least 1, at most 16; by default 1" in text(page, "#AnswerRequest")
    assert page.value("[...document.links].every((link) => !link.hash || document.querySelector(link.hash))")
    page.value("document.querySelectorAll('details').forEach((node) => (node.open = true))")
    assert page.value("document.documentElement.scrollWidth") <= 360
    assert page.errors == []
    assert all(url.startswith((service.url, "data:", "about:")) for url in page.requested)


def contrast(page: Page, selector: str) -> float:
    """Of a text against what is painted below it (WCAG 2)."""
    found = page.value(
        "((selector) => { let node = document.querySelector(selector); const ink = getComputedStyle(node).color;"
        " let paper; do { paper = getComputedStyle(node).backgroundColor; node = node.parentElement; }"
        f" while (paper === 'rgba(0, 0, 0, 0)' && node); return [ink, paper]; }})({json.dumps(selector)})"
    )

    def luminance(colour: str) -> float:
        channels = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    bright, dim = sorted(map(luminance, found), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def test_the_page_is_guarded(service):
    answer = httpx.get(f"{service.url}/")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    pages = answer.text + httpx.get(f"{service.url}/docs").text
    assert all(f"page/{path.name}" in pages for path in FILES if path.suffix != ".html")
