"""Measures a loaded agent on questions, with the rows and the statistics of `mempipe evaluate`."""

from __future__ import annotations

import asyncio
import datetime
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import polars as pl

from mempipe.agents.protocol import UnfitQuestion
from mempipe.api.agent import Agent, Source, load
from mempipe.api.results import row_values
from mempipe.config import RunConfig
from mempipe.data.config import Columns
from mempipe.data.qa import read_questions
from mempipe.engines.config import SamplingConfig
from mempipe.evaluation.clusters import question_clusters
from mempipe.evaluation.metrics import METRICS
from mempipe.evaluation.results import ResultRow, result_row
from mempipe.evaluation.statistics import Interval, paired_interval
from mempipe.evaluation.suite import Bootstrap, check_control
from mempipe.evaluation.table import score_interval
from mempipe.faults import ServiceFault
from mempipe.loader import parse_section
from mempipe.progress import Progress
from mempipe.reports.steps import ActionText
from mempipe.reports.trace import trajectory_lines
from mempipe.rollout import Control, RolloutFn, agent_code, make_rollout, prompt_hash, run_group
from mempipe.settings import ConfigError
from mempipe.studies.compare import compare_rows
from mempipe.types import Group, Question

Questions = str | Path | pl.DataFrame | Sequence[Question | Mapping[str, Any]]
"""A question file in any format that `mempipe data qa` reads, or its rows: `Question`s, mappings as in the file, or a
frame."""
_SET = "questions"
_SHOWN = ("em", "f1")
SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """An agent's answers to questions, with their scores.

    A score is between 0 and 1; that of a question is the mean over its attempts. A question that the agent could not
    take counts with 0 and has its reason in the column `failed`.
    """

    name: str
    """The agent's name."""
    config: RunConfig
    """All settings that the agent was asked with."""
    rows: list[ResultRow]
    """The result of every question, as `mempipe evaluate` keeps it."""
    groups: list[Group]
    """The attempts at every question, turn by turn, in the order of `rows`."""

    @property
    def table(self) -> pl.DataFrame:
        """Returns a row for each question: the answer of its first attempt, scores, turns, tokens and seconds.

        `cause` says where a wrong answer went wrong, for questions that name their needed facts (docs/memory.md).
        """
        return pl.DataFrame(
            [_shown(row, group) for row, group in zip(self.rows, self.groups, strict=True)], schema=_SCHEMA
        )

    @property
    def summary(self) -> pl.DataFrame:
        """Returns a row for each metric: its mean with the bounds of its 95 % bootstrap interval over the questions."""
        rows = []
        for metric in METRICS:
            interval = self.interval(metric)
            rows.append({"metric": metric, "mean": interval.value, "low": interval.low, "high": interval.high})
        return pl.DataFrame(rows)

    def interval(self, metric: str = "em") -> Interval:
        """Returns the mean of a metric with its 95 % interval over the questions. Raises ConfigError."""
        _check_metric(metric)
        clusters = question_clusters({_SET: self.rows})[_SET]
        scores = [(cluster, row.score(metric)) for cluster, row in zip(clusters, self.rows, strict=True)]
        interval = score_interval(scores, bootstrap=Bootstrap(), seed=SEED)
        assert interval is not None, "an evaluation has a question"
        return interval

    def failures(self, metric: str = "em") -> pl.DataFrame:
        """Returns the rows of `table` whose score is below 1. Raises ConfigError."""
        _check_metric(metric)
        return self.table.filter(pl.Series([row.score(metric) < 1 for row in self.rows], dtype=pl.Boolean))

    def compare(self, other: Evaluation) -> pl.DataFrame:
        """Compares this evaluation with another one on the questions that both have.

        Returns a row for each metric: the difference `other - self` with the bounds of its paired 95 % bootstrap
        interval, both means, the number of shared questions, and for exact match McNemar's test: questions gained,
        lost, and the p value. Raises ConfigError when no question is shared.
        """
        drawn = Bootstrap()
        interval = partial(paired_interval, seed=SEED, num_resamples=drawn.num_resamples, confidence=drawn.confidence)
        rows = []
        for metric in _SHOWN:
            compared = compare_rows({_SET: self.rows}, {_SET: other.rows}, metric=metric, interval=interval)
            if not compared:
                raise ConfigError(f"{self.name} and {other.name} share no question")
            (each,) = compared
            test = each.mcnemar if metric == "em" else None
            rows.append(
                {
                    "metric": metric,
                    "difference": each.difference.value,
                    "low": each.difference.low,
                    "high": each.difference.high,
                    "first": each.first,  # polars prints the first four columns and the last four
                    "second": each.second,
                    "num_shared": each.num_shared,
                    "gained": test.gained if test else None,
                    "lost": test.lost if test else None,
                    "p_value": test.p_value if test else None,
                }
            )
        return pl.DataFrame(rows)

    def transcript(self, question_id: str) -> str:
        """Returns the attempts at a question as text, turn by turn. Raises ConfigError for an unknown id."""
        for group in self.groups:
            if group.question.id == question_id:
                text = ActionText.of(self.config.agent_spec, self.config.budget)
                attempts = [trajectory_lines(group.question, each, text=text) for each in group.trajectories]
                return "\n".join(line for lines in attempts for line in lines) or group.failed
        raise ConfigError(f"question_id is {question_id!r}, which no question of the evaluation has")

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        em = self.interval()
        return (
            f"<Evaluation of {self.name!r}: em {em.value:.3f} ({em.low:.3f} to {em.high:.3f}), {len(self)} questions>"
        )

    def _repr_html_(self) -> str:
        return f"<p>{len(self)} questions</p>{self.summary._repr_html_()}"


def evaluate(
    source: Agent | Source,
    questions: Questions,
    *,
    num_questions: int = 0,
    num_samples: int = 1,
    temperature: float = 0.0,
    control: Control | None = None,
    columns: Mapping[str, str] | None = None,
) -> Evaluation:
    """Asks an agent questions whose answers are known, and returns what it reached.

    `source` is an agent, or what `load` takes; then the agent is loaded and closed here. `questions` is a file in any
    format that `mempipe data qa` reads, or rows of such a file. `num_questions` takes the first N, 0 takes all.
    `num_samples` is the number of attempts at each question; with a `temperature` of 0 the likeliest token is taken.
    `control` is "no_memory" (every memory is emptied) or "no_search" (nothing is found): what the agent still answers
    the model knows anyway. `columns` names the fields of the rows where their names do not say what they hold, for
    example `{"question": "ask", "answer": "gold"}`.

    The attempts are played as in training, many at the same time. Nothing is written; `mempipe evaluate` keeps its
    results and resumes after an interruption. Raises ConfigError for questions or options that cannot work, and
    InfrastructureFault when engine or retriever fail.
    """
    check_sampling(num_samples, temperature)
    asked = questions_of(questions, num_questions=num_questions, columns=columns)
    with nullcontext(source) if isinstance(source, Agent) else load(source) as agent:
        return played(agent, agent.config, asked, num_samples=num_samples, temperature=temperature, control=control)


def played(
    agent: Agent,
    config: RunConfig,
    questions: Sequence[Question],
    *,
    num_samples: int,
    temperature: float,
    control: Control | None = None,
    title: str = "",
) -> Evaluation:
    """Returns the evaluation of an agent under `config`, which may differ from its own in the budget."""
    check_control(control, config)
    questions = [replace(question, partition=question.partition or agent.partition) for question in questions]
    roles = agent.roles
    rollout = make_rollout(
        config,
        tokenizer=roles.tokenizer,
        generate=partial(roles.engine.generate, sampling=SamplingConfig(temperature=temperature)),
        search=roles.search,
        control=control,
    )
    groups = agent.run(_groups(config, rollout, questions, num_samples=num_samples, title=title or agent.name))
    prompts = prompt_hash(config, tokenizer=roles.tokenizer)
    growing = not config.has_memory
    rows = [result_row(group, growing=growing, prompt_hash=prompts) for group in groups]
    return Evaluation(name=agent.name, config=config, rows=rows, groups=groups)


async def _groups(
    config: RunConfig, rollout: RolloutFn, questions: Sequence[Question], *, num_samples: int, title: str
) -> list[Group]:
    """Plays all questions, `stream.groups_in_flight` at the same time, and returns their groups in order."""
    limit = asyncio.Semaphore(config.stream.groups_in_flight)
    with Progress(title, total=len(questions)) as progress:
        right: list[float] = []

        async def play(question: Question) -> Group:
            async with limit:
                group = await _group(config, rollout, question, num_samples=num_samples)
            right.extend(trajectory.em for trajectory in group.trajectories)
            progress.advance(1, em=sum(right) / max(len(right), 1))
            return group

        async with asyncio.TaskGroup() as tasks:
            playing = [tasks.create_task(play(question)) for question in questions]
    return [each.result() for each in playing]


async def _group(config: RunConfig, rollout: RolloutFn, question: Question, *, num_samples: int) -> Group:
    """Plays one question. One that does not fit, or that a server failed at, becomes a group that says so."""
    try:
        with agent_code(config, f"it failed at question {question.id}", passing=(UnfitQuestion,)):
            return await run_group(
                question,
                rollout,
                group_id=question.id,
                group_size=num_samples,
                reward=config.reward,
                advantage=config.algorithm,
            )
    except (UnfitQuestion, ServiceFault) as error:
        return Group(id=question.id, question=question, trajectories=[], failed=str(error))


def _check_metric(metric: str) -> None:
    if metric not in METRICS:
        raise ConfigError(f"metric is {metric!r}; the metrics are {', '.join(METRICS)}")


def check_sampling(num_samples: int, temperature: float) -> None:
    """Raises ConfigError for attempts that cannot be made, or that would all be the same."""
    if not isinstance(num_samples, Integral) or num_samples < 1:
        raise ConfigError(f"num_samples is {num_samples!r}; expected a whole number from 1")
    if not isinstance(temperature, Real) or not 0 <= temperature <= 2:
        raise ConfigError(f"temperature is {temperature!r}; expected a number from 0 to 2")
    if num_samples > 1 and temperature == 0:
        raise ConfigError(f"num_samples is {num_samples} at temperature 0, where all are the same; set a temperature")


def questions_of(
    questions: Questions, *, num_questions: int, columns: Mapping[str, str] | None = None
) -> list[Question]:
    """Returns the first questions of a file or of rows; `num_questions` 0 takes all. Raises ConfigError where there is
    none."""
    if not isinstance(num_questions, Integral) or num_questions < 0:
        raise ConfigError(f"num_questions is {num_questions!r}; expected a whole number from 1, or 0 for all")
    fields = parse_section(dict(columns or {}), Columns)
    if isinstance(questions, str | Path):
        read = read_questions(questions, columns=fields)
    else:
        read = _of_rows(_listed(questions), fields)
    return read[: num_questions or None]


def _listed(questions: Any) -> list[Any]:
    """Returns the rows that were given. Raises ConfigError for what holds none."""
    if isinstance(questions, pl.DataFrame):
        return questions.to_dicts()
    if type(questions).__module__.split(".")[0] == "pandas":  # the rows of its frame would be the names of its columns
        return questions.astype(object).where(questions.notna(), None).to_dict("records")
    if isinstance(questions, Mapping):
        return [questions]
    if not isinstance(questions, Iterable):
        raise ConfigError(f"questions is {questions!r}; expected a file, a frame, or a list of mappings or of Question")
    return list(questions)


def _plain(value: Any) -> Any:
    """Returns a value of numpy, a Series or a date as JSON holds it. Raises TypeError."""
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    for name in ("tolist", "to_list"):
        if callable(plain := getattr(value, name, None)):
            return plain()
    raise TypeError(f"{value!r} is of type {type(value).__name__}")


def _of_rows(rows: list[Question | Mapping[str, Any]], columns: Columns) -> list[Question]:
    if not rows:
        raise ConfigError("questions is an empty list; give at least one question")
    if all(isinstance(row, Question) for row in rows):
        return [row for row in rows if isinstance(row, Question)]
    if not all(isinstance(row, Mapping) for row in rows):
        kinds = ", ".join(sorted({type(row).__name__ for row in rows}))
        raise ConfigError(
            f"questions is a list of {kinds}; expected a file, a list of mappings such as "
            "{'question': ..., 'answer': ...}, or a list of Question"
        )
    with tempfile.TemporaryDirectory() as folder:  # so that rows are read as a file of them is
        file = Path(folder) / "questions.jsonl"
        try:
            lines = [json.dumps(dict(row), default=_plain) for row in rows]  # type: ignore[arg-type]
            file.write_text("".join(f"{line}\n" for line in lines))
        except TypeError as error:
            raise ConfigError(f"questions holds a value that JSON cannot hold: {error}") from error
        try:
            return read_questions(file, columns=columns)
        except ConfigError as error:
            raise ConfigError(str(error).replace(str(file), "questions")) from error


_SCHEMA: dict[str, Any] = {
    "id": pl.String,
    "question": pl.String,
    "golden_answers": pl.List(pl.String),
    "answer": pl.String,
    "em": pl.Float64,
    "f1": pl.Float64,
    "end_reason": pl.String,
    "cause": pl.String,
    "turns": pl.Int64,
    "tokens": pl.Int64,
    "seconds": pl.Float64,
    "memory": pl.String,
    "failed": pl.String,
}


def _shown(row: ResultRow, group: Group) -> dict[str, Any]:
    first = group.trajectories[0] if group.trajectories else None
    return {
        "id": row.question_id,
        **row_values(row),
        "memory": first.last_memory if first is not None and first.contexts else None,
    }
