"""Evaluate agents on question sets: the papers' tables, readable from top to bottom.

    plan        files, sets, weights, prompts, indexes and endpoints, before anything starts
    for each run
        prepare     engines under its weights, and retrievers (or an endpoint); those of the run before stay if they fit
        for each set    questions -> the same drivers as in training -> one result row per question, in parts
    report      tables, plot, MLflow

The same command after an interruption resumes where it stopped: a question that has its row is not asked again.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mempipe.actors.cluster import connected
from mempipe.actors.launch import RolloutActors
from mempipe.actors.standing import StandingActors
from mempipe.beacons import reached
from mempipe.checks.findings import refuse
from mempipe.checks.models import check_model
from mempipe.checks.run import check_retrieval
from mempipe.config import RunConfig
from mempipe.data.qa import skipped_text, understood
from mempipe.data.ruler import read_depths
from mempipe.engines.config import EndpointConfig
from mempipe.engines.endpoint import Endpoint
from mempipe.engines.tokenizer import load_tokenizer
from mempipe.evaluation.benchmarks import BenchmarkRows, find_file, read_benchmark
from mempipe.evaluation.cells import Cell
from mempipe.evaluation.judge import judge_answers
from mempipe.evaluation.quality_by_turn import quality_and_by_turn
from mempipe.evaluation.recall import ask_recall, recall_probes, recall_rates
from mempipe.evaluation.results import ResultFolder, ResultRow, iter_groups, read_results, result_row
from mempipe.evaluation.suite import Benchmark, EvaluatedRun, EvaluationSuite, resolve_run, trained_on
from mempipe.evaluation.table import percent_text
from mempipe.progress import Progress, say, waiting
from mempipe.provenance import files_sha256, model_sha256
from mempipe.reports.evaluation import failure_reasons, write_evaluation_report
from mempipe.reports.examples import golden_text
from mempipe.reports.terminal import console, table
from mempipe.retrieval.manifest import index_sha256
from mempipe.rollout import prompt_hash
from mempipe.settings import ConfigError
from mempipe.stop import StopRequest
from mempipe.storage.files import lock
from mempipe.streams.groups import stream_groups
from mempipe.studies.suite_scores import SuiteScores, score_suite
from mempipe.tracking.tracker import Tracker, last_run_id
from mempipe.training.repair import Supervisor
from mempipe.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionSet:
    """A set whose file was read."""

    benchmark: Benchmark
    file: str
    file_sha256: str
    num_questions: int
    depths: dict[str, list[float]]
    """Depths of the needed documents in the context of each question (RULER-HQA), by its id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOnSet:
    """One run on one set, checked."""

    asked: QuestionSet
    results: ResultFolder

    @property
    def benchmark(self) -> Benchmark:
        return self.asked.benchmark


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """One run with its whole config and all its sets."""

    run: EvaluatedRun
    config: RunConfig
    prompt_hash: str
    jobs: list[RunOnSet]


class Evaluations:
    """Evaluations of one process, one after another. They share one connection to Ray, and the engines and retrievers
    of `StandingActors`, until one of them fails or the block ends."""

    def __init__(self, *, stays: bool = True) -> None:
        """Without `stays` everything ends with each evaluation."""
        self._stays = stays
        self._stack = ExitStack()
        self._standing: StandingActors | None = None

    def __enter__(self) -> Evaluations:
        return self

    def __exit__(self, *error: Any) -> None:
        self._standing = None
        self._stack.__exit__(*error)

    def ask(self, suite: EvaluationSuite) -> list[PlannedRun]:
        """Asks all questions that have no row yet, and returns the runs. Raises as `main` does."""
        say("reading question files, weights and prompts")
        planned = plan(suite)
        try:
            lock(suite.folder)  # two evaluations in it would both ask the missing questions
        except OSError as error:
            raise ConfigError(f"cannot write to the evaluation's folder {suite.folder}: {error.strerror}") from error
        if suite.judge or suite.recall:
            for each in planned:
                grade_again(suite, each)
        if unfinished := [each for each in planned if not all(job.results.finished for job in each.jobs)]:
            with StopRequest(max(each.config.grace_s for each in unfinished)).listening() as stop:
                try:
                    self._ask(suite, unfinished, stop)
                except BaseException:
                    self.__exit__(*sys.exc_info())  # raises the sentence about a lost cluster or role in its place
                    raise
                if not self._stays:
                    self.__exit__(None, None, None)
        return planned

    def _ask(self, suite: EvaluationSuite, unfinished: Sequence[PlannedRun], stop: StopRequest) -> None:
        if self._standing is None:
            say("connecting to Ray")
            logs = suite.folder / "ray_logs"
            namespace = self._stack.enter_context(connected(suite.ray_address, name=suite.name, logs=logs))
            self._standing = self._stack.enter_context(StandingActors(namespace))
        standing = self._standing
        standing.expect([each.config for each in unfinished if each.run.endpoint is None])
        for number, each in enumerate(unfinished, start=1):
            say(f"{each.run.name}: {number} of {len(unfinished)} runs")
            Supervisor(each.config.max_restarts).attempt(partial(evaluate_run, suite, each, standing, stop))


_SERIES: ContextVar[Evaluations | None] = ContextVar("series", default=None)
"""The evaluations that `main` is one of: what runs a command cannot hand them to it."""


@contextmanager
def in_series() -> Iterator[None]:
    """Makes the evaluations of the block, of this process, `Evaluations`."""
    with Evaluations() as series:
        token = _SERIES.set(series)
        try:
            yield
        finally:
            _SERIES.reset(token)


def main(suite: EvaluationSuite) -> list[Path]:
    """Runs the evaluation to its end and returns the report's files. Raises ConfigError before anything starts; what
    else fails raises a RuntimeError or OSError, and the same call resumes from there."""
    series = _SERIES.get() or Evaluations(stays=False)
    return report(suite, series.ask(suite))


def plan(suite: EvaluationSuite) -> list[PlannedRun]:
    """Reads question files, weights and prompts, and returns the planned runs. Raises ConfigError."""
    if suite.attempts_are_the_same:
        say(
            f"num_samples is {suite.num_samples} and sampling.temperature is 0: the attempts at a question are the "
            "same; with sampling.temperature=1 they differ"
        )
    files = [find_file(benchmark, data_dir=suite.data_dir) for benchmark in suite.benchmarks]
    sets = [_read_set(benchmark, file) for benchmark, file in zip(suite.benchmarks, files, strict=True)]
    for reader in filter(None, (suite.judge, suite.recall)):
        asyncio.run(_check_endpoint(Endpoint(reader)))
    return [_plan_run(suite, run, sets) for run in suite.runs]


def _read_set(benchmark: Benchmark, file: str) -> QuestionSet:
    """Reads the file of a set, and prints how its first question was understood and which rows are skipped."""
    left_out = Counter[str]()
    num_questions = sum(1 for _ in read_benchmark(benchmark, file, left_out=left_out))
    if not num_questions:
        raise ConfigError(
            f"benchmarks: {benchmark.label}: {file} holds fewer questions than the {benchmark.objectives} that "
            "are joined"
        )
    first = understood(file, columns=benchmark.columns)
    say(f"{benchmark.label}: {num_questions:,} questions{skipped_text(left_out)}; the first: {first}")
    return QuestionSet(
        benchmark=benchmark,
        file=file,
        file_sha256=files_sha256(file),
        num_questions=num_questions,
        depths=read_depths(file) if benchmark.num_docs else {},
    )


def _plan_run(suite: EvaluationSuite, run: EvaluatedRun, sets: Sequence[QuestionSet]) -> PlannedRun:
    """Checks the run, and opens its result folders under the settings and inputs that its results depend on."""
    config = resolve_run(suite, run)
    try:
        prompts = _check_run(run, config)
    except ConfigError as error:
        raise ConfigError(f"runs: {run.name}: {error}") from error
    settings = {
        "run": config.model_dump(mode="json"),
        "control": run.control,
        "weights": f"{run.endpoint.model} at {run.endpoint.url}" if run.endpoint is not None else config.model.path,
        "model_sha256": model_sha256(config.model.path) if run.endpoint is None else "",
        "prompt_hash": prompts,
        "index_sha256": index_sha256(config.retrieval.index),
        "sampling": suite.sampling.model_dump(mode="json"),
        "num_samples": suite.num_samples,
        "judge": suite.judge.model if suite.judge is not None else None,
        "recall": suite.recall.model if suite.recall is not None else None,
    }
    jobs = []
    for asked in sets:
        of_set = {"benchmark": asked.benchmark.model_dump(mode="json"), "file_sha256": asked.file_sha256}
        folder = suite.folder / run.name / asked.benchmark.label
        jobs.append(RunOnSet(asked=asked, results=ResultFolder(folder, json.loads(json.dumps(settings | of_set)))))
    return PlannedRun(run=run, config=config, prompt_hash=prompts, jobs=jobs)


def evaluate_run(suite: EvaluationSuite, planned: PlannedRun, standing: StandingActors, stop: StopRequest) -> None:
    """Evaluates all unfinished sets of a run. The actors of the run before stay where they fit."""
    with ExitStack() as stack:
        with waiting(f"{planned.run.name}: preparing engines and retrievers"):
            roles = standing.serving(planned.config, generators=planned.run.endpoint is None)
            engines = stack.enter_context(roles)
        for job in planned.jobs:
            if not job.results.finished:
                evaluate_set(suite, planned, job, engines, stop)


def evaluate_set(
    suite: EvaluationSuite, planned: PlannedRun, job: RunOnSet, engines: RolloutActors, stop: StopRequest
) -> None:
    """Asks the questions that have no row yet. Writes rows in parts as they come, also when it is interrupted."""
    job.results.open()
    done = job.results.done()
    spec = engines.driver_spec(
        sampling=suite.sampling,
        group_size=suite.num_samples,
        endpoint=planned.run.endpoint,
        control=planned.run.control,
        record_failures=True,
    )
    title = f"{planned.run.name}, {job.benchmark.label}"
    waiting: list[Group] = []

    def write() -> None:
        rows = [
            result_row(
                group,
                growing=not planned.config.has_memory,
                prompt_hash=planned.prompt_hash,
                depths=job.asked.depths.get(group.question.id, ()),
            )
            for group in waiting
        ]
        rows = graded(suite, planned, waiting, rows)
        reached("evaluation.part", title=title)
        with stop.held_back():  # a signal in between would have the part written twice
            job.results.append(waiting, rows)
            waiting.clear()

    groups = stream_groups(spec, BenchmarkRows(job.benchmark, job.asked.file, frozenset(done)))
    with closing(groups), Progress(title, total=job.asked.num_questions, done=len(done)) as progress:
        asked, em, failed = 0, 0.0, 0
        try:
            for group in groups:
                reached("evaluation.group", title=title, groups=len(done) + asked)
                waiting.append(group)
                asked += 1
                em += sum(trajectory.em for trajectory in group.trajectories) / suite.num_samples
                failed += bool(group.failed)
                progress.advance(1, em=em / asked, failed=failed)
                if len(waiting) == suite.questions_per_part:
                    write()
        finally:
            write()
    job.results.finish()


def report(suite: EvaluationSuite, planned: Sequence[PlannedRun]) -> list[Path]:
    """Writes the report of all existing results: on disk, in MLflow and on the terminal."""
    cells = [cell_of(suite, each, job) for each in planned for job in each.jobs]
    scores = score_suite(cells, bootstrap=suite.bootstrap, seed=suite.seed)
    paths = write_evaluation_report(
        suite.folder,
        suite,
        scores,
        configs={each.run.name: each.config for each in planned},
        settings={
            f"{each.run.name}/{job.benchmark.label}": job.results.settings for each in planned for job in each.jobs
        },
    )
    tracker = Tracker(
        suite.tracking,
        folder=suite.folder,
        run_name=suite.name,
        run_config=suite.model_dump(mode="json"),
        resume_run_id=last_run_id(suite.folder),
    )
    tracker.log_metrics(scores.flat_metrics(), step=0)
    for path in paths:
        tracker.log_artifact(path.absolute())
    tracker.finish()
    _print(scores, paths)
    return paths


def cell_of(suite: EvaluationSuite, planned: PlannedRun, job: RunOnSet) -> Cell:
    """Returns the results of a run on a set, with the quality of its memories, if its agent writes any."""
    rows = read_results(job.results.path)
    rates, by_turn = quality_and_by_turn(
        iter_groups(job.results.path, tokens=False) if planned.config.has_memory else (),
        memory_budget=planned.config.budget.memory_limit,
        seed=suite.seed,
        **suite.bootstrap.model_dump(),
    )
    return Cell(
        run=planned.run.name,
        benchmark=job.benchmark,
        rows=rows,
        memory=rates | recall_rates([counts for row in rows for counts in row.recalls]),
        memory_by_turn=by_turn,
        trained_on=trained_on(planned.run),
    )


def _check_run(run: EvaluatedRun, config: RunConfig) -> str:
    """Reads the files that the run's roles will read; returns the hash of its prompts. The engine downloads a model
    that is only named."""
    refuse(check_retrieval(config))
    if run.endpoint is not None:
        asyncio.run(_check_endpoint(Endpoint(run.endpoint), context_tokens=config.budget.context_tokens))
    else:
        room = config.budget.context_tokens
        refuse(check_model(config.model.path, setting="model.path", context_tokens=room))
    return prompt_hash(config, tokenizer=load_tokenizer(config.model.path))


async def _check_endpoint(endpoint: Endpoint, *, context_tokens: int = 0) -> None:
    try:
        await endpoint.check(context_tokens=context_tokens)
    finally:
        await endpoint.close()


def graded(
    suite: EvaluationSuite, planned: PlannedRun, groups: Sequence[Group], rows: Sequence[ResultRow]
) -> Sequence[ResultRow]:
    """Returns the rows with what the suite's judge says of the answers, and its reader of the memories."""
    if suite.judge is not None:
        rows = asyncio.run(judged(suite.judge, groups, rows))
    if suite.recall is not None and planned.config.has_memory:
        rows = asyncio.run(with_recalls(Endpoint(suite.recall), groups, rows))
    return rows


def grade_again(suite: EvaluationSuite, planned: PlannedRun) -> None:
    """Asks judge and reader about the attempts on record that they said nothing of, as when they were out of reach."""

    def grade(groups: Sequence[Group], rows: Sequence[ResultRow]) -> Sequence[ResultRow]:
        number = sum(row.ungraded for row in rows)
        say(f"{planned.run.name}: {number:,} answers of judge or reader are missing; asking again")
        return graded(suite, planned, groups, rows)

    for job in planned.jobs:
        job.results.grade_again(grade)


async def judged(judge: EndpointConfig, groups: Sequence[Group], rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Returns the rows with the judge's verdicts. For a joined question the reference has all golden answers of each
    objective; those of its row are the first ones."""
    endpoint = Endpoint(judge)

    async def asked(group: Group, row: ResultRow) -> ResultRow:
        golds = [golden_text(group.question)] if group.question.objectives else row.golden_answers
        return row.with_verdicts(await judge_answers(row.question, golds, row.answers, endpoint.chat))

    try:
        return list(await asyncio.gather(*map(asked, groups, rows)))
    finally:
        await endpoint.close()


async def with_recalls(reader: Endpoint, groups: Sequence[Group], rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Returns the rows with the facts that the reader recalls from the last memory of every attempt."""

    async def asked(group: Group, row: ResultRow) -> ResultRow:
        probes = [recall_probes(trajectory, group.question) for trajectory in group.trajectories]
        return replace(row, recalls=await asyncio.gather(*(ask_recall(*each, reader.chat) for each in probes)))

    try:
        return list(await asyncio.gather(*map(asked, groups, rows)))
    finally:
        await reader.close()


def _print(scores: SuiteScores, paths: Sequence[Path]) -> None:
    out = console()
    for scored in (*scores.tables, *scores.distribution):
        shown = table("", *scored.columns, title=scored.heading)
        for row in scored.rows:
            if not row.published:
                shown.add_row(row.name, *(percent_text(value) for value in row.values))
        out.print(shown)
        for note in scored.notes:
            out.print(note, soft_wrap=True)
    if failed := sum(cell.num_failed for cell in scores.cells):
        counted = "1 question failed and counts" if failed == 1 else f"{failed:,} questions failed and count"
        out.print(f"{counted} with 0:", style="bold")
        for reason in failure_reasons(row for cell in scores.cells for row in cell.rows):
            out.print(f"  {reason}", soft_wrap=True, highlight=False)
    published = ", with published numbers" * any(row.published for scored in scores.tables for row in scored.rows)
    out.print(f"Report{published}: {next(path for path in paths if path.suffix == '.html')}", soft_wrap=True)
