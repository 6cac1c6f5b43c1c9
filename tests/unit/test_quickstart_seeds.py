"""The README's table of seeds is written by the benchmark that measures it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.quickstart_seeds import MARKS, main, table_lines, write_table

ROOT = Path(__file__).parents[2]
MEASURED = {
    "em_start": 0.09375,
    "em_start_low": 0.0685,
    "em_start_high": 0.1271,
    "em_end": 0.9765625,
    "em_end_low": 0.9561,
    "em_end_high": 0.9876,
    "em_1_hops_end": 0.992,
    "em_2_hops_end": 0.969,
    "em_3_hops_end": 0.968,
    "kept_rate_start": 0.052,
    "kept_rate_end": 0.991,
    "context_tokens_per_turn": 25.8,
    "full_history_tokens_per_turn": 66.4,
}
ROW = "| 2 | 0.094 (0.069 to 0.127) | **0.977** (0.956 to 0.988) | 0.99 / 0.97 / 0.97 | 0.05 → 0.99 | 26 (66) |"


def test_a_row_has_the_measured_values_with_their_intervals():
    assert table_lines({2: MEASURED})[2:] == [ROW]


def test_several_seeds_have_their_mean_with_the_interval_over_trainings():
    lines = table_lines({1: MEASURED, 2: MEASURED | {"em_start": 0.1, "em_end": 0.95}, 3: MEASURED | {"em_start": 0.2}})
    # (0.09375, 0.1, 0.2): the deviation is 0.05963, times 4.3027 / sqrt(3)
    assert (
        lines[-1]
        == "| mean | 0.131 (0.000 to 0.279 over trainings) | **0.968** (0.930 to 1.000 over trainings) | | | |"
    )
    assert len(lines) == 6


def test_only_the_table_of_the_readme_changes(tmp_path):
    page = tmp_path / "README.md"
    page.write_text((ROOT / "README.md").read_text())
    write_table(page, {2: MEASURED})
    before, after = (ROOT / "README.md").read_text(), page.read_text()
    assert [text.split(MARKS[0])[0] for text in (before, after)] == [before.split(MARKS[0])[0]] * 2
    assert after.split(MARKS[1])[1] == before.split(MARKS[1])[1]
    assert after.split(MARKS[0])[1].split(MARKS[1])[0].splitlines()[:2] == table_lines({})
    assert ROW in after.splitlines()


def test_trainings_on_other_hops_have_their_row(tmp_path, monkeypatch, capsys):
    hops = {"em_1_hops_end": 0.9, "em_4_hops_end": 0.8}
    found = {name: value for name, value in MEASURED.items() if "hops" not in name and "kept" not in name} | hops
    (tmp_path / "seed-1").mkdir()
    (tmp_path / "seed-1" / "report.json").write_text(
        json.dumps(found | {"num_questions": 64, "num_steps": 30, "seconds_total": 600.0})
    )
    monkeypatch.setattr("benchmarks.quickstart_seeds.foreground", lambda command: None)
    assert main(["--seeds", "1", "--output", str(tmp_path), "world.hops=[1,4]"]) == 0
    shown = capsys.readouterr().out
    assert "4 hops after" in shown and "2 hops after" not in shown and "1 of 1 seeds" in shown


def test_a_page_without_the_marks_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A page\n")
    with pytest.raises(ValueError, match="holds 0 tables between"):
        write_table(page, {2: MEASURED})


@pytest.mark.slow
def test_a_training_that_fails_ends_it_with_a_sentence(tmp_path, capfd):
    """Also where settings follow the seeds."""
    with pytest.raises(SystemExit, match="seed 3: the training ended with exit code 2; the reason is above"):
        main(["--output", str(tmp_path), "--seeds", "3", "algorithm.group_size=none"])
    assert "error: algorithm.group_size" in capfd.readouterr().err
