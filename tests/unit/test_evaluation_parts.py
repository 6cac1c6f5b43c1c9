"""The rows of an evaluation that is interrupted while it writes them."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest
from result_builders import answered

from mempipe.evaluation import results
from mempipe.evaluation.results import ResultFolder, find_groups, read_groups, read_results, result_row
from mempipe.faults import InfrastructureFault
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


def test_the_next_evaluation_asks_the_judge_for_the_verdicts_that_are_missing(tmp_path, monkeypatch, capsys):
    """The judge was out of reach for some questions. Their answers are kept, and nobody samples them again."""
    groups, asked = answered([True, False, True]), []

    class Judge:
        def __init__(self, config: object) -> None: ...

        async def chat(self, prompt: str, **_: object) -> list[str]:
            number = prompt.split("Which ")[1][0]
            asked.append(number)
            if asked.count(number) == 1 and number != "0":
                raise InfrastructureFault("the judge is gone")
            return ["yes" if "\nNile\n" in prompt else "no"]

        async def close(self) -> None: ...

    monkeypatch.setattr(evaluate, "Endpoint", Judge)
    suite: Any = SimpleNamespace(judge=object(), recall=None)
    folder = ResultFolder(tmp_path, {"run": {}})
    planned: Any = SimpleNamespace(
        run=SimpleNamespace(name="r"),
        config=SimpleNamespace(has_memory=True),
        jobs=[SimpleNamespace(results=folder, benchmark=SimpleNamespace(label="set"))],
    )
    folder.open()
    rows = [result_row(each, growing=False, prompt_hash="p") for each in groups]
    for part in (slice(2), slice(2, 3)):
        folder.append(groups[part], evaluate.graded(suite, planned, groups[part], rows[part]))
    assert [row.judge for row in read_results(tmp_path)] == [1.0, None, None]
    for _ in range(2):
        evaluate.grade_again(suite, planned)
        assert [row.judge for row in read_results(tmp_path)] == [1.0, 0.0, 1.0]
    assert read_groups(tmp_path) == groups
    assert asked == ["0", "1", "2", "1", "2"]
    assert capsys.readouterr().out.count("r: 1 answers of judge or reader are missing; asking again") == 2


def test_some_questions_are_found_without_their_tokens_in_the_parts_that_hold_them(tmp_path, monkeypatch):
    groups = answered([True, False, True])
    folder = ResultFolder(tmp_path, {"run": {}})
    folder.open()
    for each in groups:
        folder.append([each], [result_row(each, growing=False, prompt_hash="p")])
    read, iter_groups = [], results.iter_groups
    monkeypatch.setattr(
        results, "iter_groups", lambda part, **kwargs: read.append(part.name) or iter_groups(part, **kwargs)
    )
    ids = [each.question.id for each in groups]
    found = find_groups(tmp_path, [ids[2], "unknown"])
    assert found.keys() == {ids[2]} and read == ["part-00002.parquet"]
    (attempt,), (whole,) = found[ids[2]].trajectories, groups[2].trajectories
    assert attempt.answer == whole.answer and not any(context.token_ids for context in attempt.contexts)
