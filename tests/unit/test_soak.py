"""What the soak of the service calls growth, and what it calls a fault."""

from __future__ import annotations

import httpx
import pytest

from benchmarks.soak import LONGEST_LOG, Soak, held_out, log_sizes, quarters, report
from mempipe.settings import ConfigError

SECONDS = 400.0


def a_soak(**growth: float) -> Soak:
    """Returns a soak of SECONDS, whose measures grow by a factor from the first sample to the last one."""
    soak = Soak(httpx.AsyncClient(), [], until=SECONDS)
    for i in range(101):
        values = {"memory, MiB": 500.0, "threads": 80.0, "log files, MiB": 4.0, LONGEST_LOG: 0.5}
        soak.samples.append(
            (4.0 * i, {name: value * (1 + (growth.get(name, 1.0) - 1) * i / 100) for name, value in values.items()})
        )
        soak.latencies.append((4.0 * i, 0.2))
    soak.outcomes.update({("answer", "right"): 100, ("hang-up", "503"): 3})
    return soak


def faults(soak: Soak) -> list[str]:
    return [line for line in report(soak, began=0.0) if line.startswith("fault")]


def test_the_second_quarter_is_compared_with_the_last_one():
    seen = [(float(second), float(second)) for second in range(8)]
    assert quarters(seen, began=0.0, until=8.0) == ([2.0, 3.0], [6.0, 7.0])


def test_flat_measures_right_answers_and_refusals_are_no_fault():
    soak = a_soak()
    assert faults(soak) == []
    assert "| memory, MiB | 500.0 | 500.0 | 1.000 |" in list(report(soak, began=0.0))


def test_growth_is_a_fault_except_for_the_logs_of_all_replicas_together():
    assert faults(a_soak(**{"memory, MiB": 1.3})) == ["fault: memory, MiB grew by more than 10%"]
    assert faults(a_soak(**{"memory, MiB": 1.1})) == []
    assert faults(a_soak(threads=1.2)) == []  # 8 more are noise
    assert faults(a_soak(**{"log files, MiB": 5.0})) == []


def test_a_log_that_is_not_rotated_is_a_fault():
    assert faults(a_soak(**{LONGEST_LOG: 1.2})) == [
        "fault: a log held 0.60 MiB; rotation at 0.25 MiB allows 0.55 MiB",
    ]


def test_a_log_is_measured_with_its_renamed_part(tmp_path):
    (tmp_path / "serve").mkdir()
    for name in (
        "serve/proxy_127.0.0.1.log",
        "serve/proxy_127.0.0.1.log.1",
        "raylet.out",
        "raylet.out.1",
        "raylet.err",
    ):
        (tmp_path / name).write_text("12345")
    assert sorted(log_sizes(tmp_path.rglob("*")).values()) == [5, 10, 10]


@pytest.mark.parametrize("outcome", ["wrong", "hung"])
def test_a_wrong_answer_and_a_request_without_an_end_are_faults(outcome):
    soak = a_soak()
    soak.outcomes["answer", outcome] += 2
    assert faults(soak) == [f"fault: answer: 2 {outcome}"]


def test_a_run_without_an_evaluation_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"after.parquet does not exist"):
        held_out(tmp_path)
