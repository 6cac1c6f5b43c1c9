"""The results of one run on one set: a folder of parquet parts, one row per question, that an interrupted evaluation
goes on from.

A part appears whole or not at all, and no question is in two. `settings.json` says how the results came about; other
settings are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mempipe.data.trajectories import group_to_table
from mempipe.evaluation.metrics import METRICS, definitions, score_objectives
from mempipe.evaluation.rollout_metrics import context_tokens_by_turn
from mempipe.files import whole_file, write_text
from mempipe.settings import ConfigError
from mempipe.types import EndReason, Group

_FREE = ("output", "ray_address", "tracking", "stream", "checkpoint", "evaluation")
"""What may differ between an evaluation and its continuation."""
_COLUMNS = pa.schema(
    [
        ("question_id", pa.string()),
        ("question", pa.string()),
        ("golden_answers", pa.list_(pa.string())),
        ("num_hops", pa.int64()),
        ("evidence_depths", pa.list_(pa.float64())),  # of ruler_hqa: where the needed documents stand, from 0 to 1
        ("failed", pa.string()),  # why there is no attempt; "" where there is one
        ("seconds", pa.float64()),
        ("num_retries", pa.int64()),
        *((name, pa.float64()) for name in METRICS),  # means over attempts
        ("em_by_objective", pa.list_(pa.float64())),
        ("judge", pa.float64()),  # null: nobody judged, or no verdict could be read
        ("judge_unparsed", pa.int64()),
        ("answers", pa.list_(pa.string())),  # of every attempt; null where it did not answer
        ("end_reasons", pa.list_(pa.string())),
        ("context_tokens_by_turn", pa.list_(pa.list_(pa.int64()))),
        ("sampled_tokens", pa.list_(pa.int64())),
        ("total_tokens", pa.list_(pa.int64())),  # of all contexts, read and sampled
        ("snapshots", pa.list_(pa.string())),  # of the indexes that answered its searches
        ("prompt_hash", pa.string()),
    ]
)


def result_row(group: Group, *, growing: bool, prompt_hash: str, depths: Sequence[float] = ()) -> dict[str, Any]:
    """The columns of one question but for the judge's. Without attempts every metric is 0 and `failed` says why.

    `growing` is whether the agent carries its whole history in one context, so that every message it samples is a turn.
    """
    question, attempts = group.question, group.trajectories
    answers = [attempt.answer if attempt.end_reason is EndReason.ANSWERED else None for attempt in attempts]
    objectives = [score_objectives(answer, question) for answer in answers or [None]]
    return {
        "question_id": question.id,
        "question": question.text,
        "golden_answers": question.golden_answers,
        "num_hops": question.num_hops,
        "evidence_depths": list(depths),
        "failed": group.failed,
        "seconds": group.seconds,
        "num_retries": group.num_retries,
        **{name: fmean(row[name] for rows in objectives for row in rows) for name in METRICS},
        "em_by_objective": [fmean(rows[i]["em"] for rows in objectives) for i in range(len(objectives[0]))],
        "judge": None,
        "judge_unparsed": 0,
        "answers": answers,
        "end_reasons": [str(attempt.end_reason) for attempt in attempts],
        "context_tokens_by_turn": [context_tokens_by_turn(attempt, growing=growing) for attempt in attempts],
        "sampled_tokens": [sum(sum(context.loss_mask) for context in attempt.contexts) for attempt in attempts],
        "total_tokens": [sum(len(context.token_ids) for context in attempt.contexts) for attempt in attempts],
        "snapshots": sorted(
            {search.snapshot for attempt in attempts for context in attempt.contexts for search in context.searches}
        ),
        "prompt_hash": prompt_hash,
    }


class ResultFolder:
    """The parts of one run on one set."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Opens or makes the folder. Raises ConfigError when it holds the results of other settings."""
        self.path = path
        self._file = path / "settings.json"
        state = self._read()
        if state and (differing := sorted(_differences(state["settings"], settings))):
            raise ConfigError(
                f"{path} holds results of other settings ({', '.join(differing[:5])}); give the run, the set or "
                "the evaluation another "
                "name, or delete that folder"
            )
        self._state: dict[str, Any] = state or {"settings": dict(settings), "finished": False}
        self._is_new = state is None

    @property
    def finished(self) -> bool:
        """Whether every question has its row."""
        return self._state["finished"]

    @property
    def settings(self) -> dict[str, Any]:
        return self._state["settings"]

    def open(self) -> None:
        """Makes the folder, as the first thing that leaves a trace."""
        self.path.mkdir(parents=True, exist_ok=True)
        if self._is_new:
            self._save()

    def finish(self) -> None:
        self._state["finished"] = True
        self._save()

    def done(self) -> set[str]:
        """The ids of the questions that have their row."""
        return {row["question_id"] for row in read_results(self.path, columns=["question_id"])}

    def append(self, groups: Sequence[Group], rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes one part: the rows, and with each its whole group (without the text that it read).
        An empty one is not written.
        """
        if not rows:
            return
        table = pa.Table.from_pylist(list(rows), schema=_COLUMNS)
        groups = [replace(group, question=replace(group.question, context="")) for group in groups]
        whole = pa.concat_tables([group_to_table(group) for group in groups]).to_struct_array()
        table = table.append_column("group", whole).replace_schema_metadata({"metrics": json.dumps(definitions())})
        number = 1 + max((int(part.stem.removeprefix("part-")) for part in _parts(self.path)), default=-1)
        path = self.path / f"part-{number:05d}.parquet"
        with whole_file(path) as partial:
            pq.write_table(table, partial, compression="zstd")

    def _read(self) -> dict[str, Any] | None:
        if not self._file.exists():
            if _parts(self.path):
                raise ConfigError(f"{self.path} holds parts of results, but no settings.json that says what they are")
            return None
        try:
            return json.loads(self._file.read_text())
        except ValueError as error:
            raise ConfigError(f"{self._file} is damaged ({error}); delete {self.path} to evaluate this anew") from error

    def _save(self) -> None:
        write_text(self._file, json.dumps(self._state, indent=1))


def read_results(folder: Path, *, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The rows of all parts, in the order in which they were written; by default without the whole groups.

    Raises ConfigError for a part that cannot be read and for a question that has two rows.
    """
    rows: list[dict[str, Any]] = []
    for part in _parts(folder):
        try:
            rows += pq.read_table(part, columns=list(columns or _COLUMNS.names)).to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise ConfigError(
                f"{part} cannot be read: {' '.join(str(error).split())}; delete it to have its questions asked again"
            ) from error
    seen: set[str] = set()
    for row in rows if columns is None or "question_id" in columns else ():
        if row["question_id"] in seen:
            raise ConfigError(f"{folder} has two rows for question {row['question_id']!r}; delete the newer part")
        seen.add(row["question_id"])
    return rows


def _parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*.parquet"))


def _differences(before: Any, now: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, Mapping):
        for key in before.keys() | now.keys():
            if prefix != "run" or key not in _FREE:
                yield from _differences(before.get(key), now.get(key), f"{prefix}.{key}" if prefix else key)
    elif before != now:
        yield prefix
