"""Tables on a terminal and in a pipe: every character of a cell is printed."""

from __future__ import annotations

import pytest

from mempipe.loader import load_config
from mempipe.progress import Progress
from mempipe.reports.closing import closing_table
from mempipe.reports.terminal import WIDTH, console, table
from mempipe.runs import Run

NAMES = [f"memsearcher-trained-at-{budget}" for budget in (512, 1024, 2048)]
SETS = ["hotpotqa", "2wikimultihopqa", "musique", "bamboogle", "all sets"]


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    shown = table("", *SETS, title="em, percent", right=SETS)
    for name in NAMES:
        shown.add_row(name, *["41.25 (38.1–100.0)"] * len(SETS))
    console().print(shown)
    return capsys.readouterr().out.splitlines()


def test_a_pipe_has_a_line_for_each_row(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = printed(capsys)
    rows = [line for line in lines if line.startswith("│")]
    assert [row.split()[1] for row in rows] == NAMES
    assert all(row.count("41.25 (38.1–100.0) │") == len(SETS) for row in rows)
    assert max(map(len, lines)) <= WIDTH


def test_brackets_in_names_are_printed_and_are_no_markup(capsys):
    shown = table("", "nq[dev]", title="search[qa]: em")
    for name in ("base[v2]", "base[bold]", ":100:"):
        shown.add_row(name, "1.00")
    console().print(shown)
    console().print("A is evaluations[old]/a [/b]")
    with Progress("base[v2], nq", total=1) as progress:
        progress.advance()
    text = capsys.readouterr().out
    for name in ("nq[dev]", "search[qa]", "base[v2] ", "base[bold]", ":100:", "[old]/a [/b]", "base[v2], nq: 1/1"):
        assert name in text


def test_a_narrow_terminal_folds_what_does_not_fit(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    lines = printed(capsys)
    assert max(map(len, lines)) <= 70
    first = "".join(line.split("│")[1].strip() for line in lines if line.startswith("│"))
    assert first == "".join(NAMES) and "…" not in "".join(lines)


def test_the_last_lines_of_a_training_say_how_it_was_evaluated_and_no_password(capsys, tmp_path):
    own = ["evaluation.temperature=0.7", "tracking.uri=https://ann:secret@example.org", f"output={tmp_path}"]
    run = Run(load_config("quickstart", own))
    (run.folder / "report.json").write_text('{"em_start": 0.25, "em_end": 0.5, "f1_end": 0.75, "f1_start": null}')
    closing_table(run)
    text = capsys.readouterr().out
    assert "held-out questions, temperature 0.7" in " ".join(text.split()) and "0.250" in text
    (row,) = [line.split("│")[1:4] for line in text.splitlines() if "│ F1" in line]
    assert [cell.strip() for cell in row] == ["F1", "–", "0.750"]
    assert "example.org" in text and "secret" not in text
