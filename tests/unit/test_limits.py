"""The table of limits: ratios within rounds, kept rows, and what is called slower."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import limits
from benchmarks.limits import PARTS, compare, judge, main, table
from benchmarks.rows import RECORD, Row, read_rows, record

RATE = Row(name="loop", unit="tokens/s", values=[90, 80, 120], peer="vLLM", of_peer=[100, 100, 100])
ROUNDS = (1.0, 1.01, 1.02)
TIME = Row(name="start", unit="s", values=[4.0, 5.0], less_is_better=True, limit="imports", of_limit=[2.0, 2.0])


def test_a_ratio_is_of_one_round_and_above_one_is_better():
    assert RATE.value == 90 and RATE.ratios(RATE.of_peer) == [0.9, 0.8, 1.2]
    assert TIME.ratios(TIME.of_limit) == [0.5, 0.4] == TIME.scores
    alone = Row(name="a", unit="s", values=[2.0, 4.0], less_is_better=True)
    assert alone.scores == [0.5, 0.25] and alone.ratios(()) == []


@pytest.mark.parametrize("settings", [{"peer": "x", "of_peer": [1]}, {"of_limit": [1, 2, 3]}, {"limit": "x"}])
def test_every_round_has_its_peer_and_its_limit(settings):
    with pytest.raises(ValueError, match="3 rounds"):
        Row(name="a", unit="s", values=[1, 2, 3], **settings)


def test_rows_are_written_only_where_they_are_asked_for(tmp_path, monkeypatch):
    file = tmp_path / "rows.jsonl"
    record(RATE)
    assert read_rows(file) == []
    monkeypatch.setenv(RECORD, str(file))
    record(RATE, TIME)
    assert read_rows(file) == [RATE, TIME]


def test_the_table_shows_medians_and_ranges():
    far = Row(name="copy", unit="ms", values=[500, 520], less_is_better=True, limit="bytes", of_limit=[10.4, 6.5])
    assert table([RATE, TIME, far]).splitlines()[2:] == [
        "| loop | 90 tokens/s | vLLM: 100 | 0.90 (0.80 to 1.20) | – | – |",
        "| start | 4.5 s | – | – | imports: 2 | 0.45 (0.40 to 0.50) |",
        "| copy | 510 ms | – | – | bytes: 8.45 | 0.017 (0.013 to 0.021) |",
    ]


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ([1.0, 1.1, 1.2], [0.8, 0.9, 0.95], "slower"),
        ([1.0, 1.1, 1.2], [0.8, 0.9, 1.05], ""),  # the ranges meet
        ([1.00, 1.00, 1.01], [0.98, 0.98, 0.99], ""),  # apart, and too little to matter
        ([0.8, 0.9, 0.9], [1.0, 1.0, 1.1], "faster"),
        ([1.0, 1.1, 1.2], [0.8, 0.9], "too few rounds"),
        ([1.0], [0.5], "too few rounds"),  # one value has no spread
    ],
)
def test_slower_is_what_lost_more_than_chance_takes(before, after, verdict):
    assert judge(before, after)[0] == verdict


def test_more_rounds_tell_a_slowdown_of_a_fifth_better_and_chance_is_seldom_called_one():
    """Rounds that spread by 8 %: of three, a fifth less is called in 85 of 100 comparisons."""
    chance = random.Random(0)

    def share_called(num_rounds: int, speed: float) -> float:
        pairs = [
            [[factor * chance.lognormvariate(0, 0.08) for _ in range(num_rounds)] for factor in (1.0, speed)]
            for _ in range(300)
        ]
        return sum(judge(before, after)[0] == "slower" for before, after in pairs) / len(pairs)

    assert share_called(3, 0.8) > 0.75 and share_called(9, 0.8) > 0.95
    assert share_called(3, 1.0) < 0.08 and share_called(9, 1.0) < 0.03


def test_a_slower_commit_is_named_and_ends_with_1(tmp_path, monkeypatch, capsys):
    file, answers = tmp_path / "kept" / "limits.jsonl", iter(("aaaa", "bbbb", "cccc"))
    speeds = {"aaaa": 1.0, "bbbb": 0.5, "cccc": 1.0}
    monkeypatch.setattr(limits, "commit", lambda: now)
    monkeypatch.setattr(
        limits, "measured", lambda part, **_: [Row(name="loop", unit="/s", values=[speeds[now] * x for x in ROUNDS])]
    )
    for now in answers:
        assert main(["--only", "driver", "--file", str(file)]) == 0
        if now == "bbbb":
            assert compare(file, "aa") == 1
            assert "| loop | 1.01 (1.00 to 1.02) | 0.51 (0.50 to 0.51) | -50% | slower |" in capsys.readouterr().out
    assert compare(file, "aaaa") == 0 and compare(file, "bbbb") == 0
    assert "faster" in capsys.readouterr().out
    kept = [json.loads(line) for line in file.read_text().splitlines()]
    assert [each["commit"] for each in kept] == ["aaaa", "bbbb", "cccc"] and not kept[0]["fast"]


def kept(file: Path, *rows: tuple[str, Row]) -> Path:
    """Writes rows as they are kept, each with its commit."""
    of = {"machine": limits.machine(), "fast": False, "model": "", "load": 0.0}
    file.write_text("".join(json.dumps({**of, "commit": name, "row": asdict(row)}) + "\n" for name, row in rows))
    return file


def rates(*values: float, name: str = "loop") -> Row:
    return Row(name=name, unit="/s", values=values)


@pytest.mark.parametrize("old", ["HEAD", "{hash}", "{short}"])
def test_a_commit_may_have_any_name_that_git_knows(tmp_path, old):
    whole = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=limits.ROOT).stdout.strip()
    file = kept(tmp_path / "limits.jsonl", (whole[:10], rates(1, 1, 1)), ("next", rates(0.5, 0.5, 0.5)))
    assert compare(file, old.format(hash=whole, short=whole[:7])) == 1


def test_a_commit_with_changed_files_is_another_one(tmp_path):
    file = kept(tmp_path / "limits.jsonl", ("cafe", rates(1, 1, 1)), ("cafe+", rates(0.5, 0.5, 0.5)))
    assert compare(file, "cafe") == 1  # the newest rows are those of the changed files
    assert compare(file, "cafe+") == 0


def test_rounds_of_several_runs_of_a_commit_count_together(tmp_path):
    runs = [("cafe", rates(1.0, 1.1, 1.2)), ("cafe", rates(0.7, 0.8, 0.9)), ("next", rates(0.8, 0.8, 0.8))]
    assert compare(kept(tmp_path / "limits.jsonl", *runs), "cafe") == 0
    assert compare(kept(tmp_path / "limits.jsonl", runs[0], runs[2]), "cafe") == 1


def test_an_ambiguous_commit_is_refused_and_rows_that_are_missing_are_named(tmp_path, capsys):
    rows = [("cafe1", rates(1, 1, 1)), ("cafe1", rates(1, 1, 1, name="start")), ("cafe2", rates(1, 1, 1))]
    file = kept(tmp_path / "limits.jsonl", *rows)
    assert compare(file, "cafe") == 2 and "several commits" in capsys.readouterr().err
    assert compare(file, "cafe1") == 0 and "not measured at cafe2: start" in capsys.readouterr().err


def test_a_peer_that_is_slowed_as_well_hides_nothing(tmp_path):
    def searches(rate: float) -> Row:
        values, limit = [rate, rate, rate], [10.0, 10.0, 10.0]
        return Row(name="search", unit="/s", values=values, peer="one at a time", of_peer=values, peer_is_own=True,
                   limit="faiss", of_limit=limit)  # fmt: skip

    assert searches(5.0).yardstick == "faiss" and searches(5.0).scores == [0.5] * 3
    assert compare(kept(tmp_path / "limits.jsonl", ("cafe", searches(5.0)), ("next", searches(2.5))), "cafe") == 1


def test_rows_of_another_yardstick_are_not_compared(tmp_path, capsys):
    row = Row(name="loop", unit="/s", values=[1, 1, 1], peer="vLLM", of_peer=[1, 1, 1])
    assert compare(kept(tmp_path / "limits.jsonl", ("cafe", row), ("next", rates(9, 9, 9))), "cafe") == 2


def test_parts_get_the_model_and_the_run_that_they_take():
    learner, loop, service = PARTS["learner"], PARTS["agent loop"], PARTS["service"]
    assert learner.arguments(fast=True, model="m", run="r")[-2:] == ["--model", "m"]
    assert loop.arguments(fast=True, model="m", run="r")[-2:] == ["--run", "r"]
    assert service.arguments(fast=True, model="m", run="r")[0] == "r"
    assert [part.measures(model="m", run="r") for part in (learner, loop, service, PARTS["driver"])] == [
        "m",
        "r",
        "r",
        "",
    ]
    for part in PARTS.values():
        assert not {"m", "r"} & set(part.arguments(fast=False, model="", run=""))


def test_a_part_that_is_killed_is_said(tmp_path, monkeypatch, capsys):
    def measured(part, **_):
        raise subprocess.CalledProcessError(-9, [part.module], stderr="")

    monkeypatch.setattr(limits, "measured", measured)
    assert main(["--only", "driver", "--file", str(tmp_path / "limits.jsonl")]) == 1
    assert "failed: it ended with exit code -9" in capsys.readouterr().out


def test_rows_of_another_machine_are_not_compared(tmp_path, monkeypatch, capsys):
    file = tmp_path / "limits.jsonl"
    monkeypatch.setattr(limits, "measured", lambda part, **_: [RATE])
    for name in ("1 core", "2 cores"):
        monkeypatch.setattr(limits, "machine", lambda name=name: name)
        main(["--only", "driver", "--file", str(file)])
    assert compare(file, limits.commit()) == 2
    assert "on this machine (2 cores)" in capsys.readouterr().err


def test_a_part_that_fails_is_said_and_the_others_are_measured(tmp_path, monkeypatch, capsys):
    part = limits.Part(module="driver_step", thorough=("--no-such-option",))
    monkeypatch.setattr(limits, "PARTS", {"broken": part, "whole": part})
    real = limits.measured
    monkeypatch.setattr(
        limits, "measured", lambda part, **kept: [RATE] if next(turns) else real(limits.PARTS["broken"], **kept)
    )
    turns = iter((False, True))
    assert main(["--file", str(tmp_path / "limits.jsonl")]) == 1
    said = capsys.readouterr().out
    assert "failed: driver_step.py: error: unrecognized arguments: --no-such-option" in said and "| loop |" in said


def test_every_part_is_a_benchmark():
    for part in PARTS.values():
        assert importlib.util.find_spec(f"benchmarks.{part.module}") is not None


def test_a_part_that_needs_a_trained_run_is_left_out_without_one(tmp_path, monkeypatch, capsys):
    runs = []

    def measured(part, *, run, **_):
        runs.append((part.module, run))
        return [RATE]

    monkeypatch.setattr(limits, "measured", measured)
    file = ["--file", str(tmp_path / "limits.jsonl")]
    main(file)
    assert "serving" not in [module for module, _ in runs]
    main([*file, "--run", "runs/mine"])
    assert ("serving", "runs/mine") in runs
    with pytest.raises(SystemExit):
        main([*file, "--only", "service"])
    assert "'service' needs --run, the folder of a trained run" in capsys.readouterr().err
