"""The code of docs/python.md and the first notebook run from top to bottom, on a run of the synthetic world and a
scripted engine."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from api_builders import QUICKSTART, build_run, questions_in, scripted_engines
from test_notebooks import LOADS, run_notebook

import mempipe
from mempipe.config import RunConfig
from pipelines import train

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "python.md"


@pytest.fixture
def workplace(tmp_path, monkeypatch) -> Path:
    """A folder with a trained `runs/quickstart` and the config that it was made from."""
    folder = build_run(tmp_path / "runs")
    (tmp_path / "jobs" / "configs").mkdir(parents=True)
    shutil.copy(QUICKSTART, tmp_path / "jobs" / "configs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    scripted_engines(monkeypatch, [question.text for question in questions_in(folder)])
    return tmp_path


@pytest.mark.slow
def test_the_code_of_the_page_does_what_the_page_says(workplace, monkeypatch, capsys):
    trained: list[RunConfig] = []

    def stand_in(config: RunConfig, *, resume: str) -> SimpleNamespace:
        trained.append(config)
        return SimpleNamespace(folder=shutil.copytree("runs/quickstart", config.folder, dirs_exist_ok=True))

    monkeypatch.setattr(train, "main", stand_in)
    code = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, block in enumerate(code, start=1):
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), names)
    assert names["reply"].answer.strip() == names["example"]["golden_answers"][0]
    assert names["trained"].interval().value == 1.0 and names["without_memory"].interval().value < 1.0
    assert names["swept"].table["memory_tokens"].to_list() == [4, 16, 64]
    short, brief = trained
    assert (short.name, short.num_steps) == ("short", 30)
    assert re.fullmatch(r"passed_to_brief_\w+:brief", brief.reward.function)
    assert isinstance(names["run"], mempipe.Run) and (workplace / "runs/brief/python").is_dir()
    assert "turn 1: " in capsys.readouterr().out
    with pytest.raises(mempipe.ConfigError, match="is closed"):
        names["agent"].ask("?")


def test_the_first_notebook_answers_and_shows_what_the_memory_is_worth(workplace, monkeypatch):
    (workplace / "notebooks").mkdir()
    monkeypatch.chdir(workplace / "notebooks")
    names, shown = run_notebook(ROOT / "notebooks" / f"{LOADS}.ipynb")
    assert names["reply"].answer.strip() == names["example"]["golden_answers"][0]
    assert "<details" in names["reply"]._repr_html_() and names["reply"] in shown
    difference = names["comparison"].row(0, named=True)
    assert difference["second"] == 1.0 > difference["first"] and difference["low"] > 0
    assert "closed" in repr(names["agent"])
