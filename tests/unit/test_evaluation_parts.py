"""The rows of an evaluation that is interrupted while it writes them."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest
from result_builders import answered

from mempipe.evaluation import results
from mempipe.evaluation.results import ResultFolder, read_results
from mempipe.stop import Interrupted, StopRequest
from pipelines import evaluate

NUM_QUESTIONS, PER_PART = 5, 2


def test_a_signal_while_a_part_is_written_writes_no_row_twice(tmp_path, monkeypatch):
    write_table, parts = results.write_table, []

    def struck(*arguments: Any, **options: Any) -> None:
        write_table(*arguments, **options)
        parts.append(arguments[0])
        if len(parts) == 2:
            signal.raise_signal(signal.SIGTERM)

    groups = answered([True] * NUM_QUESTIONS)
    monkeypatch.setattr(results, "write_table", struck)
    monkeypatch.setattr(evaluate, "BenchmarkRows", lambda benchmark, file, done: done)
    monkeypatch.setattr(
        evaluate, "stream_groups", lambda _, done: (group for group in groups if group.question.id not in done)
    )
    suite: Any = SimpleNamespace(sampling=None, num_samples=1, judge=None, recall=None, questions_per_part=PER_PART)
    planned: Any = SimpleNamespace(
        run=SimpleNamespace(name="r", endpoint=None, control=None),
        config=SimpleNamespace(has_memory=True),
        prompt_hash="p",
    )
    engines: Any = SimpleNamespace(driver_spec=lambda **_: None)

    def start() -> None:
        asked = SimpleNamespace(file="", num_questions=NUM_QUESTIONS, depths={})
        folder = ResultFolder(tmp_path, {"run": {}})
        job: Any = SimpleNamespace(results=folder, benchmark=SimpleNamespace(label="set"), asked=asked)
        with StopRequest(grace_s=1.0).listening() as stop:
            evaluate.evaluate_set(suite, planned, job, engines, stop)

    with pytest.raises(Interrupted):
        start()
    assert len(read_results(tmp_path)) == 2 * PER_PART
    start()
    assert sorted(row.question_id for row in read_results(tmp_path)) == sorted(g.question.id for g in groups)
