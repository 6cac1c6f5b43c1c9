"""The runs that a budget study puts side by side: read from their folders, and put together where one is repeated.

Costs are tokens, seconds, and the KV cache of an attempt's largest context: 2 * layers * KV heads * head dimension *
bytes of a number, for each token that the context holds.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from mempipe.engines.config import ModelConfig
from mempipe.evaluation.clusters import question_clusters
from mempipe.evaluation.metrics import METRICS
from mempipe.evaluation.results import SETTINGS, ResultRow, read_result_state, read_results
from mempipe.evaluation.statistics import Interval, Scores, mean_interval, t_interval
from mempipe.planning.capacity import model_shape, weight_width
from mempipe.settings import ConfigError

NUM_RESAMPLES = 2000
_PER_ATTEMPT = (
    "answers",
    "end_reasons",
    "context_tokens_by_turn",
    "sampled_tokens",
    "total_tokens",
    "full_history_tokens_by_turn",
    "first_causes",
    "recalls",
)

Sets = Mapping[str, Sequence[ResultRow]]
"""The rows of a run, by set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Says how large a policy is, and the cache of its contexts."""

    num_parameters: int
    cache_bytes_per_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """A run of an evaluation or of a sweep. `memory_tokens` is None where the agent has no such budget, `model` where
    the model's shape is not known. `training` is the seed of the training that the run measures; None where all runs of
    the agent measure the same weights."""

    name: str
    agent: str
    memory_tokens: int | None
    sets: Sets
    model: ModelSize | None = None
    training: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Holds what an agent reached under one budget, over all its seeds."""

    sets: Sets
    score: Interval
    """The unweighted mean over sets, with its own 95 % interval over questions."""
    by_seed: list[float]
    """The same mean of every run."""
    over_trainings: Interval | None
    """The 95 % t-interval of `by_seed` if each run measures another training."""
    tokens_per_question: float
    """Tokens read and written in all contexts of an attempt."""
    seconds_per_question: float
    """From the first call to the last, while other questions were at work too."""
    largest_context: float
    """Tokens of an attempt's largest context, as a mean over attempts."""


def measured_runs(
    folder: Path, *, names: Collection[str] | None = None, labels: Collection[str] | None = None
) -> Iterator[MeasuredRun]:
    """Reads the runs of an evaluation, named by their folders, or those of these `names` on the sets with these
    `labels` alone. Raises ConfigError for one that is unfinished, and for a folder that is not there."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} does not exist; run the evaluation first")
    for run in sorted(each for each in folder.iterdir() if each.is_dir() and (names is None or each.name in names)):
        sets = sorted(file.parent for file in run.glob(f"*/{SETTINGS}") if labels is None or file.parent.name in labels)
        states = {each: read_result_state(each) for each in sets}
        for path, state in states.items():
            if not state["finished"]:
                raise ConfigError(f"{path} is unfinished; run the evaluation to its end first")
        if states:
            settings = next(iter(states.values()))["settings"]
            config, is_control = settings["run"], settings.get("control") is not None
            yield MeasuredRun(
                name=run.name,
                agent=config["agent"]["name"],
                memory_tokens=None if is_control else config["budget"].get("memory_tokens"),
                sets={each.name: read_results(each) for each in sets},
                model=_model_size(config.get("model", {})),
            )


def pooled(repeats: Sequence[Sets]) -> Sets:
    """Returns the rows of several runs as those of one: attempts at the same question are in one row.

    The same question has the same id, text and golden answers. Synthetic worlds of two seeds share ids only.
    """
    if len(repeats) == 1:
        return repeats[0]
    sets: dict[str, list[ResultRow]] = {}
    for label in dict.fromkeys(chain.from_iterable(repeats)):
        asked: dict[str, list[ResultRow]] = defaultdict(list)
        for rows in repeats:
            for row in rows.get(label, ()):
                asked[_identity(row)].append(row)
        sets[label] = [_merged(identity, rows) for identity, rows in asked.items()]
    return sets


def mean_score(sets: Sets, metric: str) -> float:
    """Returns the unweighted mean over sets of their mean scores."""
    return fmean(fmean(row.score(metric) for row in rows) for rows in sets.values())


def clustered(sets: Sets, *, metric: str) -> list[Scores]:
    """Returns the cluster and the score of every question, by set."""
    clusters = question_clusters(sets)
    return [
        [(cluster, row.score(metric)) for cluster, row in zip(clusters[label], rows, strict=True)]
        for label, rows in sets.items()
    ]


def tokens_per_attempt(rows: Sequence[ResultRow]) -> float:
    """Returns the tokens of all contexts of an attempt, as a mean over the questions that were attempted."""
    return fmean([fmean(row.total_tokens) for row in rows if row.answers] or [0.0])


def measured(runs: Sequence[MeasuredRun], *, metric: str, seed: int) -> Measured:
    """Returns what the runs, which repeat one agent under one budget, reached together."""
    sets = pooled([run.sets for run in runs])
    rows = [row for rows in sets.values() for row in rows if row.answers]
    by_seed = [mean_score(run.sets, metric) for run in runs]
    trained_apart = len({run.training for run in runs} - {None}) == len(runs) > 1
    return Measured(
        sets=sets,
        score=mean_interval(clustered(sets, metric=metric), seed=seed, num_resamples=NUM_RESAMPLES),
        by_seed=by_seed,
        over_trainings=t_interval(by_seed) if trained_apart else None,
        tokens_per_question=tokens_per_attempt(rows),
        seconds_per_question=fmean([row.seconds for row in rows] or [0.0]),
        largest_context=fmean([max(turns, default=0) for row in rows for turns in row.context_tokens_by_turn] or [0.0]),
    )


def _model_size(settings: Mapping[str, Any]) -> ModelSize | None:
    """Returns the size of the model that a run was measured with; None where its folder is not there any more."""
    model = ModelConfig.model_validate(settings)
    shape = model_shape(model) if model.path else None
    if shape is None:
        return None
    cache_bytes = shape.kv_bytes_per_token(weight_width(model))
    return ModelSize(num_parameters=shape.num_parameters, cache_bytes_per_token=cache_bytes)


def _identity(row: ResultRow) -> str:
    asked = json.dumps([row.question, row.golden_answers])
    return f"{row.question_id}/{hashlib.sha256(asked.encode()).hexdigest()[:12]}"


def _merged(identity: str, rows: Sequence[ResultRow]) -> ResultRow:
    """Returns one row with the attempts of all; its scores are means over the rows."""
    together: dict[str, Any] = {name: [*chain.from_iterable(getattr(r, name) for r in rows)] for name in _PER_ATTEMPT}
    means: dict[str, Any] = {name: fmean(row.score(name) for row in rows) for name in METRICS}
    objectives = [fmean(ems) for ems in zip(*(row.em_by_objective for row in rows), strict=True)]
    return replace(
        rows[0],
        question_id=identity,
        failed="; ".join(dict.fromkeys(row.failed for row in rows if row.failed)),
        seconds=fmean(row.seconds for row in rows),
        num_retries=sum(row.num_retries for row in rows),
        em_by_objective=objectives,
        snapshots=sorted({*chain.from_iterable(row.snapshots for row in rows)}),
        **means,
        **together,
    )
