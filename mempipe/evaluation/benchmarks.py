"""The question sets of the published tables: where their files lie, and several questions asked as one."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from mempipe.data.qa import iter_questions, write_questions
from mempipe.evaluation.suite import Benchmark
from mempipe.settings import ConfigError
from mempipe.types import Question

SEARCH_QA = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
"""In the order of the published tables."""
IN_DISTRIBUTION = ("nq", "hotpotqa")
"""The training sets of MemSearcher, MEM1 and Search-R1; the other five are out of distribution."""
RULER = "ruler_hqa"
_MAX_OBJECTIVES = 16
_FLASHRAG_FILES = ("test.jsonl", "dev.jsonl")


def find_file(benchmark: Benchmark, *, data_dir: str) -> str:
    """Finds the question file of a set.

    Raises ConfigError for a set of unknown name without a file, and for a file that does not exist.
    """
    if benchmark.file:
        candidates = [benchmark.file]
    elif benchmark.name not in (*SEARCH_QA, RULER):
        known = ", ".join((*SEARCH_QA, RULER))
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
        candidates = [str(Path(data_dir) / benchmark.name / name) for name in _FLASHRAG_FILES]
    for path in candidates:
        if "://" in path or Path(path).exists():
            return path
    raise ConfigError(
        f"benchmarks: {benchmark.label}: {' and '.join(candidates)} do{'es' * (len(candidates) == 1)} not exist",
        absent=candidates[0],
    )


def read_benchmark(benchmark: Benchmark, file: str) -> Iterator[Question]:
    """Yields the set's questions as they are asked. Raises ConfigError as `read_questions` does."""
    questions = iter_questions(file, columns=benchmark.columns)
    if benchmark.objectives > 1:
        questions = join_objectives(questions, objectives=benchmark.objectives, seed=benchmark.pair_seed)
    return islice(questions, benchmark.num_questions or None)


def join_objectives(questions: Iterable[Question], *, objectives: int, seed: int | None = None) -> Iterator[Question]:
    """Yields every `objectives` neighbours as one question, their texts (each ending in "?") joined by "; ". A
    remainder is skipped.

    As published (MEM1) neighbours are those of the file; `seed` shuffles the questions first.
    """
    if seed is not None:
        listed = list(questions)
        random.Random(f"{seed}:objectives").shuffle(listed)
        questions = listed
    remaining = iter(questions)
    while len(group := list(islice(remaining, objectives))) == objectives:
        yield replace(
            group[0],
            id="+".join(question.id for question in group),
            text=joined_texts(question.text for question in group),
            golden_answers=["; ".join(question.golden_answers[0] for question in group)],
            objectives=[question.golden_answers for question in group],
            num_hops=0,
            evidence=[],
        )


def write_joined(source: str, output: str, *, objectives: int, seed: int | None = None) -> int:
    """Writes the questions of a file, joined by `join_objectives`, and returns how many there are.

    Raises ConfigError, before anything is written, for fewer than two objectives, for an output that is not a new
    .parquet file, for questions that have several objectives already, and for too few questions.
    """
    if not 2 <= objectives <= _MAX_OBJECTIVES:
        raise ConfigError(f"--n is {objectives}; expected 2 to {_MAX_OBJECTIVES} questions to join into one")
    if not output.endswith(".parquet") or Path(output).exists():
        problem = "exists" if Path(output).exists() else "is not a .parquet file"
        raise ConfigError(f"{output} {problem}; name a new .parquet file")
    questions = list(iter_questions(source))
    if joined := next((question.id for question in questions if len(question.objectives) > 1), ""):
        raise ConfigError(f"{source}: question {joined} has several objectives already; give a file of single ones")
    if len(questions) < objectives:
        raise ConfigError(f"{source} has {len(questions)} questions; {objectives} are needed to join them into one")
    together = list(join_objectives(questions, objectives=objectives, seed=seed))
    write_questions(output, together)
    return len(together)


def joined_texts(questions: Iterable[str]) -> str:
    """Returns several questions as one, each ending in "?"."""
    return "; ".join(text if text.endswith("?") else f"{text}?" for text in questions)


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
