"""The documents: links, files, commands and settings that they name exist, pages are short, and examples work."""

from __future__ import annotations

import re
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from mempipe.cli import _parsed
from mempipe.loader import load_config, load_job
from mempipe.types import EndReason, Question, Trajectory

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PLACES = (ROOT, ROOT / "mempipe", ROOT / "docs", ROOT / "examples" / "notebook_agent")
FILE = re.compile(r"`((?:[\w.-]+/)*[\w.-]+\.(?:py|yaml|md))`")
NOT_FILES = {
    "NAME.py",
    "NAME.yaml",
    "test_NAME.py",
    "my_reward.py",
    "config.yaml",
    "mempipe.yaml",
    "sweep.yaml",
    "budgets.md",
    "report.md",
}
MAX_LINES, MAX_WIDTH = 250, 100
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(page: Path, *kinds: str) -> list[str]:
    """Returns the code blocks of a page in the given languages; "" is a block without one."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [text for kind, text in found if kind in kinds]


def commands(page: Path) -> list[str]:
    """Returns the commands of a page's code blocks and code spans, without comments and optional parts."""
    text = page.read_text()
    spans = re.findall(
        r"`((?:mempipe|make|python -m|python tests/)[ \w][^`]*)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    )
    lines = [line for block in blocks(page, "", "bash") for line in block.replace("\\\n", " ").splitlines()]
    found = [" ".join(re.sub(r"\s#\s.*|\s\[[^\]]*\]| ….*", "", f" {each}").split()) for each in [*spans, *lines]]
    return [each for each in found if re.match(r"(mempipe|make|python|ray job submit|serve|export|source|cd) ", each)]


def heading_ids(page: Path) -> set[str]:
    """Returns the anchors of a page's headings as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_every_file_that_a_page_names_is_there(page):
    named = {name for name in FILE.findall(page.read_text()) if Path(name).name not in NOT_FILES}
    assert not [name for name in named if not any((place / name).exists() for place in PLACES)]


@every_page
def test_every_link_and_picture_of_a_page_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), target
        assert not anchor or anchor in heading_ids(linked), target


def test_every_page_is_reached_from_the_index():
    linked = set(re.findall(r"\]\((\w+\.md)", (ROOT / "docs" / "index.md").read_text()))
    assert {page.name for page in PAGES} - {"README.md", "index.md"} <= linked


@every_page
def test_a_page_is_short_and_its_lines_are_wrapped(page):
    lines = page.read_text().splitlines()
    limit = 200 if page.name == "README.md" else MAX_LINES
    assert len(lines) <= limit
    fenced = False
    for number, line in enumerate(lines, start=1):
        fenced ^= line.startswith("```")
        wide = len(line) > MAX_WIDTH and not fenced and not line.startswith(("|", "!["))
        assert not wide or " " not in line.strip(), f"line {number} has {len(line)} characters"


@every_page
def test_every_code_block_is_valid_shell(page):
    for block in blocks(page, "bash"):
        done = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True, check=False)
        assert not done.returncode, done.stderr


@every_page
def test_every_command_of_a_page_is_understood(page, tmp_path, monkeypatch):
    for block in blocks(page, "python"):
        if named := re.match(r"# (\w+\.py)\n", block):  # a file that the page asks its reader to write
            (tmp_path / named.group(1)).write_text(block)
            monkeypatch.syspath_prepend(tmp_path)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for command in commands(page):
        words = shlex.split(command.split(" > ")[0].split(" >> ")[0])
        for before, word in pairwise(words):
            if before == "-m" and word.split(".")[0] in ("jobs", "benchmarks", "mempipe", "pipelines"):
                place = ROOT / word.replace(".", "/")
                assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), command
        assert words[0] != "make" or words[1] in targets, command
        for word in words:
            if re.fullmatch(r"(jobs|examples|tests|notebooks|mempipe|pipelines)/[\w./*-]+", word):
                assert list(ROOT.glob(word)), f"{word} in {command}"
        if words[0] == "mempipe" and not words[1].startswith(("-", "KIND")):
            check_mempipe(words[1:], command)


def check_mempipe(words: list[str], command: str) -> None:
    """Parses a command as `mempipe` does, and its overrides as the config of its job does."""
    if len(words) == 1 or all(
        word in ("index", "build", "data", "qa", "ruler", "cloze", "memtrain", "model", "import") for word in words
    ):
        return  # a command named without its arguments
    try:
        arguments = _parsed([word for word in words if word != "--help"])
    except SystemExit:
        pytest.fail(f"mempipe refuses: {command}")
    config = ROOT / str(getattr(arguments, "config", ""))
    if words[0] == "train" and config.is_file():
        load_config(config, arguments.overrides)
    if words[0] == "submit" and config.is_file():
        load_job(config, arguments.overrides)


def test_a_command_that_is_wrong_is_found():
    for words in (["trace", "runs/x", "--htm", "f", "--sheets"], ["nothing", "x"], ["index", "search"]):
        with pytest.raises(pytest.fail.Exception):
            check_mempipe(words, "")
    with pytest.raises(ValueError, match="no_such"):
        check_mempipe(["train", "jobs/configs/quickstart.yaml", "algorithm.no_such=1"], "")
    with pytest.raises(ValueError, match="no_such"):
        check_mempipe(["submit", "jobs/configs/index_wiki18_e5.yaml", "no_such=1"], "")


def test_the_reward_of_the_readme_does_what_it_says():
    (code,) = (block for block in blocks(ROOT / "README.md", "python") if "def brief" in block)
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    question = Question(id="q", text="Who?", golden_answers=["Ann"])

    def reward(answer: str | None) -> float:
        ended = EndReason.ANSWERED if answer else EndReason.MAX_TURNS
        trajectory = Trajectory(id="g/0", group_id="g", member=0, contexts=[], end_reason=ended, answer=answer)
        return names["brief"](trajectory, question)

    assert (reward(" Ann"), reward("Bob"), reward("it is Ann"), reward(None)) == (0.99, -0.01, -0.03, 0.0)


def _figures(text: str) -> set[float]:
    """Returns the figures with a point or a comma, without sign. The decimals of a share are those of a percentage."""
    found = re.findall(r"(?<![\w.,])\d*\.\d+|(?<![\w.,])\d{1,3}(?:,\d{3})+", re.sub(r"`[^`]*`", "", text))
    return {float(figure.replace(",", "")) for figure in found}


def _unexplained(row: str) -> set[float]:
    """Returns the figures after the question of a row of docs/questions.md that neither results.md nor a page that the
    row links has."""
    pages = {"results.md", *re.findall(r"\]\((\w+\.md)", row)}
    known = {figure for page in pages for figure in _figures((ROOT / "docs" / page).read_text())}
    return {
        figure
        for figure in _figures(row.partition(" | ")[2])
        if not known & {figure, round(figure / 100, 5), round(figure * 100, 3)}
    }


def test_every_figure_of_the_readers_questions_is_in_the_page_that_its_row_names():
    rows = [line for line in (ROOT / "docs/questions.md").read_text().splitlines() if line.startswith("| ")]
    assert {row.partition(" | ")[0]: missing for row in rows if (missing := _unexplained(row))} == {}
    assert _unexplained("| a | measured | 98.7654 % ([sweep.md](sweep.md)) |") == {98.7654}
