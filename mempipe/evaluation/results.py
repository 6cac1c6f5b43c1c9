"""The results of one run on one set: a folder of parquet parts, one row per question, that an interrupted evaluation
resumes from.

A part appears atomically, and no question is in two. `settings.json` says how the results came about; other
settings are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from mempipe.config import RunConfig
from mempipe.data.trajectories import PER_TOKEN, add_no_tokens, records_to_table
from mempipe.engines.config import SamplingConfig
from mempipe.evaluation.causes import first_causes
from mempipe.evaluation.metrics import METRICS, definitions, score_objectives
from mempipe.evaluation.recall import RecallCounts
from mempipe.evaluation.rollout_metrics import context_tokens_by_turn, full_history_context_tokens
from mempipe.evaluation.suite import Benchmark
from mempipe.provenance import completed, differences, read_record, write_record
from mempipe.settings import ConfigError
from mempipe.storage.parquet import read_row_groups, write_table
from mempipe.types import EndReason, Group, from_row

SETTINGS = "settings.json"
REPORT = "report.json"
"""File of an evaluation that has ended."""
_FREE = (
    *(f"run.{name}" for name in RunConfig.FREE),
    "weights_sha256",  # by which earlier versions knew the weights: it changed with the files' times
)
"""Settings that may change when an evaluation is resumed."""
_KINDS = {"run": RunConfig, "sampling": SamplingConfig, "benchmark": Benchmark}
"""Those of the settings that are sections."""
_GROUP = "group"  # the column of the whole trajectories


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """One question of one run: a row of the parquet parts, whose columns are these fields.

    Scores are means over the attempts, and 0 without any; lists have one entry per attempt unless said otherwise.
    """

    question_id: str
    question: str
    golden_answers: list[str]
    num_hops: int
    evidence_depths: list[float]  # of ruler_hqa: positions of the needed documents, from 0 to 1
    failed: str  # why there is no attempt; "" where there is one
    seconds: float
    num_retries: int
    em: float
    f1: float
    acc: float
    precision: float
    recall: float
    sub_em_two_way: float
    math_match: float
    em_by_objective: list[float]  # one entry per objective
    answers: list[str | None]  # None where the attempt did not answer
    end_reasons: list[EndReason]
    context_tokens_by_turn: list[list[int]]
    sampled_tokens: list[int]
    total_tokens: list[int]  # of all contexts, read and sampled
    snapshots: list[str]  # of the indexes that answered its searches
    prompt_hash: str
    judge: float | None = None  # None: not judged, or no verdict could be read
    judge_unparsed: int = 0  # attempts without a verdict
    full_history_tokens_by_turn: list[list[int]] = field(default_factory=list)
    """As context_tokens_by_turn, with the whole history in the memory's place; empty for an agent that carries it."""
    first_causes: list[str] = field(default_factory=list)
    """The `Cause` of a wrong answer, for each objective of each attempt in turn; "" for others, and if the needed facts
    are not known."""
    recalls: list[RecallCounts] = field(default_factory=list)
    """The reader's answers from the last memory; empty if no reader was asked."""

    @property
    def ungraded(self) -> int:
        """Returns how often the judge gave no verdict and the reader could not be asked."""
        return self.judge_unparsed + sum(each.unasked for each in self.recalls)

    def score(self, metric: str) -> float:
        """Returns the score in one of `METRICS`."""
        return getattr(self, metric)

    def with_verdicts(self, verdicts: Sequence[bool | None]) -> ResultRow:
        """Returns the row with the judge's verdicts, one per attempt; None is one that could not be read."""
        known = [verdict for verdict in verdicts if verdict is not None]
        return replace(self, judge=fmean(known) if known else None, judge_unparsed=len(verdicts) - len(known))


_COLUMNS = [column.name for column in fields(ResultRow)]
assert METRICS.keys() <= set(_COLUMNS), "every metric has its column"


def result_row(group: Group, *, growing: bool, prompt_hash: str, depths: Sequence[float] = ()) -> ResultRow:
    """Returns the row of a question, without a judge's verdict. Without attempts every score is 0 and `failed` says
    why.

    `growing` is whether the agent writes no memory, so that every message that it samples is a turn.
    """
    question, attempts = group.question, group.trajectories
    answers = [attempt.answer if attempt.end_reason is EndReason.ANSWERED else None for attempt in attempts]
    objectives = [score_objectives(answer, question) for answer in answers or [None]]
    means: dict[str, Any] = {name: fmean(each[name] for attempt in objectives for each in attempt) for name in METRICS}
    return ResultRow(
        question_id=question.id,
        question=question.text,
        golden_answers=question.golden_answers,
        num_hops=question.num_hops,
        evidence_depths=list(depths),
        failed=group.failed,
        seconds=group.seconds,
        num_retries=group.num_retries,
        **means,
        em_by_objective=[fmean(attempt[i]["em"] for attempt in objectives) for i in range(len(objectives[0]))],
        answers=answers,
        end_reasons=[attempt.end_reason for attempt in attempts],
        context_tokens_by_turn=[context_tokens_by_turn(attempt, growing=growing) for attempt in attempts],
        sampled_tokens=[sum(context.num_sampled_tokens for context in attempt.contexts) for attempt in attempts],
        total_tokens=[sum(context.num_tokens for context in attempt.contexts) for attempt in attempts],
        snapshots=sorted(
            {search.snapshot for attempt in attempts for context in attempt.contexts for search in context.searches}
        ),
        prompt_hash=prompt_hash,
        first_causes=[
            cause or "" for attempt in attempts for cause in first_causes(attempt, question, growing=growing)
        ],
        full_history_tokens_by_turn=[] if growing else [full_history_context_tokens(attempt) for attempt in attempts],
    )


class ResultFolder:
    """Reads and writes the parts of one run on one set."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Opens or makes the folder. Raises ConfigError when it holds the results of other settings."""
        self.path = path
        state = self._read()
        if state and (differing := _differing(state["settings"], settings)):
            raise ConfigError(
                f"{path} holds results of other settings ({', '.join(differing[:5])}); give the run, the set or "
                "the evaluation another name, or delete that folder"
            )
        self._state: dict[str, Any] = state or {"settings": dict(settings), "finished": False}
        self._is_new = state is None

    @property
    def finished(self) -> bool:
        """Returns whether every question has its row."""
        return self._state["finished"]

    @property
    def settings(self) -> dict[str, Any]:
        return self._state["settings"]

    def open(self) -> None:
        """Makes the folder. Nothing is written before."""
        self.path.mkdir(parents=True, exist_ok=True)
        if self._is_new:
            self._save()

    def finish(self) -> None:
        self._state |= {"finished": True, "num_parts": len(_parts(self.path))}
        self._save()

    def done(self) -> set[str]:
        """Returns the ids of the questions that have their row."""
        return {row["question_id"] for row in _read_parts(self.path, ["question_id"])}

    def append(self, groups: Sequence[Group], rows: Sequence[ResultRow]) -> None:
        """Writes one part: the rows, and with each its whole group (without the text that it read). Writes nothing
        where there is no row.
        """
        if rows:
            number = 1 + max((int(part.stem.removeprefix("part-")) for part in _parts(self.path)), default=-1)
            self._write(self.path / f"part-{number:05d}.parquet", groups, rows)

    def grade_again(self, grade: Callable[[Sequence[Group], Sequence[ResultRow]], Sequence[ResultRow]]) -> None:
        """Replaces the ungraded rows of every part by what `grade` returns for them."""
        for part in _parts(self.path):
            rows = read_results(part)
            if ungraded := [number for number, row in enumerate(rows) if row.ungraded]:
                groups = read_groups(part)
                graded = grade([groups[number] for number in ungraded], [rows[number] for number in ungraded])
                for number, row in zip(ungraded, graded, strict=True):
                    rows[number] = row
                self._write(part, groups, rows)

    def _write(self, path: Path, groups: Sequence[Group], rows: Sequence[ResultRow]) -> None:
        groups = [replace(group, question=replace(group.question, context="")) for group in groups]
        whole = records_to_table(groups).to_struct_array()
        table = (
            records_to_table(rows)
            .append_column(_GROUP, whole)
            .replace_schema_metadata({"metrics": json.dumps(definitions())})
        )
        write_table(path, table, compression="zstd")

    def _read(self) -> dict[str, Any] | None:
        if (self.path / SETTINGS).exists():
            return read_result_state(self.path)
        if _parts(self.path):
            raise ConfigError(
                f"{self.path} holds parts of results, but no {SETTINGS} that says what they are; delete that folder to "
                "evaluate this again"
            )
        return None

    def _save(self) -> None:
        write_record(self.path / SETTINGS, self._state)


def read_result_state(folder: Path) -> dict[str, Any]:
    """Returns how the results in `folder` came about (`settings`) and whether they are `finished`: none of their parts
    was removed since. Raises ConfigError for a damaged file."""
    mends = f"delete {folder} to evaluate this again"
    state = read_record(folder / SETTINGS, mends=mends, settings=dict, finished=bool)
    return state | {"finished": state["finished"] and len(_parts(folder)) >= state.get("num_parts", 0)}


def read_results(folder: Path) -> list[ResultRow]:
    """Reads the rows of all parts, in the order in which they were written.

    Raises ConfigError for a part that cannot be read and for a question that has two rows.
    """
    return [from_row(ResultRow, row) for row in _read_parts(folder, _COLUMNS)]


def read_groups(folder: Path, *, tokens: bool = True) -> list[Group]:
    """Returns the groups of `iter_groups`."""
    return [*iter_groups(folder, tokens=tokens)]


def iter_groups(folder: Path, *, tokens: bool = True) -> Iterator[Group]:
    """Yields the whole trajectories of all parts in a folder, or of one part; a group without any belongs to a question
    that failed. One part at a time is in memory. Without `tokens` as in `read_trajectories`.

    Raises ConfigError as `read_results` does.
    """
    for row in _read_parts(folder, ["question_id", _GROUP], without=() if tokens else PER_TOKEN):
        for trajectory in row[_GROUP]["trajectories"] if not tokens else ():
            add_no_tokens(trajectory)
        yield from_row(Group, row[_GROUP])


def find_groups(folder: Path, question_ids: Collection[str]) -> dict[str, Group]:
    """Returns the groups of some questions by their ids, without tokens; only the parts that hold them are read.

    Raises ConfigError as `read_results` does.
    """
    found = {}
    for part in _parts(folder):
        if not {row["question_id"] for row in _read_parts(part, ["question_id"])}.isdisjoint(question_ids):
            found |= {
                group.question.id: group
                for group in iter_groups(part, tokens=False)
                if group.question.id in question_ids
            }
    return found


def _read_parts(folder: Path, columns: Sequence[str], *, without: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yields the rows of all parts. An older version's part may lack a column that has a default."""
    seen: set[str] = set()
    advice = "delete it to have its questions asked again"
    for part in _parts(folder):
        for table in read_row_groups(part, columns=columns, advice=advice, without=without):
            for row in table.to_pylist():
                if row["question_id"] in seen:
                    raise ConfigError(
                        f"{folder} has two rows for question {row['question_id']!r}; delete the newer part"
                    )
                seen.add(row["question_id"])
                yield row


def _parts(folder: Path) -> list[Path]:
    return [folder] if folder.is_file() else sorted(folder.glob("part-*.parquet"))


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    unknown = {"model_sha256", "index_sha256"} - before.keys()  # of an earlier version
    before, now = (_completed(settings) for settings in (before, now))
    return [name for name, *_ in differences(before, now, free=(*_FREE, *unknown))]


def _completed(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: completed(value, _KINDS[name]) if name in _KINDS else value for name, value in settings.items()}
