"""The question sets of the published tables, and where their files lie."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from mempipe.data.input_files import is_remote
from mempipe.data.objectives import join_objectives
from mempipe.data.qa import iter_questions
from mempipe.evaluation.suite import Benchmark
from mempipe.settings import ConfigError
from mempipe.types import Question

SEARCH_QA = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
"""In the order of the published tables."""
WEB_QUESTIONS = ("webquestions", "complexwebquestions")
"""Sets that no paper of these agents trains on or reports."""
IN_DISTRIBUTION = ("nq", "hotpotqa")
"""The training sets of MemSearcher, MEM1 and Search-R1; the other five are out of distribution."""
RULER = "ruler_hqa"
_FLASHRAG_FILES = ("test.jsonl", "dev.jsonl")
_PUBLISHED_FILES = ("test.json", "dev.json")
"""WebQuestions and ComplexWebQuestions are published as JSON."""


def find_file(benchmark: Benchmark, *, data_dir: str) -> str:
    """Finds the question file of a set.

    Raises ConfigError for a set of unknown name without a file, and for a file that does not exist.
    """
    if benchmark.file:
        candidates = [benchmark.file]
    elif benchmark.name not in (*SEARCH_QA, *WEB_QUESTIONS, RULER):
        known = ", ".join((*SEARCH_QA, *WEB_QUESTIONS, RULER))
        raise ConfigError(f"benchmarks: {benchmark.name} is not the name of a known set ({known}); give it a file")
    elif not data_dir:
        raise ConfigError(f"benchmarks: {benchmark.name} has no file and data_dir is empty; set one of them")
    elif benchmark.name == RULER:
        if not benchmark.num_docs:
            raise ConfigError(f"benchmarks: {RULER} needs num_docs, e.g. 200, or a file")
        names = (
            f"test_{benchmark.num_docs}.parquet",
            f"test_{benchmark.num_docs}.json",
            f"eval_{benchmark.num_docs}.json",
        )
        candidates = [str(Path(data_dir) / RULER / name) for name in names]
    else:
        names = _FLASHRAG_FILES + _PUBLISHED_FILES * (benchmark.name in WEB_QUESTIONS)
        candidates = [str(Path(data_dir) / benchmark.name / name) for name in names]
    for path in candidates:
        if is_remote(path) or Path(path).exists():
            return path
    *others, last = candidates
    tried = f"{', '.join(others)} and {last} do" if others else f"{last} does"
    raise ConfigError(
        f"benchmarks: {benchmark.label}: {tried} not exist",
        absent=candidates[0],
    )


def read_benchmark(benchmark: Benchmark, file: str, *, left_out: Counter[str] | None = None) -> Iterator[Question]:
    """Yields the set's questions as they are asked. Counts skipped rows by reason in `left_out`. Raises ConfigError as
    `read_questions` does."""
    questions = iter_questions(file, columns=benchmark.columns, left_out=left_out)
    if benchmark.objectives > 1:
        questions = join_objectives(
            questions, objectives=benchmark.objectives, seed=benchmark.pair_seed, file=file, left_out=left_out
        )
    try:
        yield from islice(questions, benchmark.num_questions or None)
    except ConfigError as error:
        if "data.columns" not in str(error):
            raise
        raise ConfigError(f"{error} (in an evaluation's config it is `columns` of the benchmark)") from error


@dataclass(frozen=True, slots=True)
class BenchmarkRows:
    """Yields (group id, question) to `stream_groups`: the questions not yet done, read by the process that asks."""

    benchmark: Benchmark
    file: str
    done: Collection[str]

    def __iter__(self) -> Iterator[tuple[str, Question]]:
        return (
            (question.id, question)
            for question in read_benchmark(self.benchmark, self.file)
            if question.id not in self.done
        )
