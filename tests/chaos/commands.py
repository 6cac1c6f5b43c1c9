"""The commands that are struck: a training, an index build, an evaluation, a sweep and a chain, each small, each with
what must be there when it has ended well.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import yaml
from aftermath import check_mlflow, check_record
from campaign import Campaign
from journal import Journal
from miniature import QUICKSTART
from starting_point import GROUPS_PER_STEP, NUM_VALIDATION, train_arguments, whole_training_arguments
from watched import Missed, Watched

from mempipe.data.trajectories import read_trajectories
from mempipe.evaluation.results import read_results
from mempipe.loader import load_config
from mempipe.retrieval.manifest import verify

NUM_PASSAGES = 6_000
SEGMENT = 300


def training(
    watched: Watched,
    journal: Journal,
    start: Path | None,
    *,
    num_steps: int,
    overrides: Sequence[str] = (),
    name: str = "run",
) -> Campaign:
    """A training from the starting point, or with None a whole one, which begins with its world and its warm start."""
    overrides = [f"num_steps={num_steps}", *overrides]
    if start is None:
        arguments = whole_training_arguments(name=name, output=watched.output, overrides=overrides)
    else:
        arguments = train_arguments(start, name=name, output=watched.output, overrides=overrides)
    folder = watched.output / name

    def check() -> None:
        check_record(folder, num_steps=num_steps, groups_per_step=GROUPS_PER_STEP)
        if "tracking.enabled=false" not in overrides:
            check_mlflow(watched.output / "mlflow.db", num_steps=num_steps)
        for label in ("before", "after"):
            groups = [group.question.id for group in read_trajectories(folder / "evaluation" / f"{label}.parquet")]
            if len(set(groups)) != len(groups) or len(groups) != NUM_VALIDATION:
                raise Missed(f"evaluation {label} has {len(groups)} groups of {len(set(groups))} questions")
        if not (folder / "huggingface" / "model.safetensors").exists() or not (folder / "report.html").exists():
            raise Missed("the run has no exported model or no report")

    return Campaign(
        watched=watched,
        journal=journal,
        arguments=arguments,
        going_on=[*arguments, "--resume-if-exists"],
        folder=folder,
        check=check,
    )


def index_build(watched: Watched, journal: Journal, *, name: str = "index") -> Campaign:
    """An index of a few thousand passages, dense and lexical."""
    corpus, file, folder = watched.output / "corpus.jsonl", watched.output / f"{name}.yaml", watched.output / name
    draw = random.Random(0)
    words = [f"word{i}" for i in range(500)]
    rows = ({"id": str(i), "contents": f'"T{i}"\n{" ".join(draw.choices(words, k=20))}'} for i in range(NUM_PASSAGES))
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "corpus": [str(corpus)],
        "output": str(folder),
        "encoder": {"kind": "hashing", "dimension": 64},
        "lexical": True,
        "segment_passages": SEGMENT,
        "faiss": {"shard_passages": 2_000},
    }
    file.write_text(yaml.safe_dump(settings))

    def check() -> None:
        verify(folder)
        manifest = json.loads((folder / "manifest.json").read_text())
        if manifest["passages"]["count"] != NUM_PASSAGES:
            raise Missed(f"the index holds {manifest['passages']['count']} of {NUM_PASSAGES} passages")

    arguments = ["index", "build", str(file)]
    return Campaign(
        watched=watched, journal=journal, arguments=arguments, going_on=arguments, folder=folder, check=check
    )


def evaluation(watched: Watched, journal: Journal, start: Path, *, name: str = "evaluation") -> Campaign:
    """The starting point's model on its training questions, in parts of four."""
    file, folder = watched.output / f"{name}.yaml", watched.output / name
    file.write_text(yaml.safe_dump(_suite(start, output=watched.output, name=name)))

    def check() -> None:
        asked = Counter(row.question_id for row in read_results(folder / "model" / "world"))
        if len(asked) != NUM_ASKED or max(asked.values(), default=0) != 1:
            raise Missed(
                f"{len(asked)} of {NUM_ASKED} questions have a row, one of them {max(asked.values(), default=0)} rows"
            )

    arguments = ["evaluate", str(file)]
    return Campaign(
        watched=watched, journal=journal, arguments=arguments, going_on=arguments, folder=folder, check=check
    )


NUM_ASKED = 40


def _suite(start: Path, *, output: Path, name: str) -> dict:
    arguments = train_arguments(start, name=name, output=output)
    config = load_config(QUICKSTART, arguments[2:])
    settings = config.model_dump(mode="json", include={"model", "agent", "budget", "retrieval", "generation"})
    return {
        "name": name,
        "output": str(output),
        "runs": [{"name": "model", "settings": {**settings, "stream": {"groups_in_flight": 4}}}],
        "benchmarks": [{"name": "world", "file": str(start / "world" / "train.parquet"), "num_questions": NUM_ASKED}],
        "questions_per_part": 4,
        "bootstrap": {"num_resamples": 100},
        "tracking": {"enabled": False},
    }


def sweep(watched: Watched, journal: Journal, start: Path, *, name: str = "sweep") -> Campaign:
    """The starting point's model under two budgets."""
    file, folder = watched.output / f"{name}.yaml", watched.output / name
    suite = _suite(start, output=watched.output, name=name)
    benchmarks = [{**suite["benchmarks"][0], "num_questions": 8}]
    keep = {key: suite[key] for key in ("name", "output", "runs", "tracking")}
    file.write_text(yaml.safe_dump({**keep, "benchmarks": benchmarks, "budgets": [16, 32], "seeds": [1]}))

    def check() -> None:
        if not list(folder.glob("*.html")):
            raise Missed(f"the sweep has no report: {sorted(path.name for path in folder.iterdir())}")

    arguments = ["sweep", str(file)]
    return Campaign(
        watched=watched,
        journal=journal,
        arguments=arguments,
        going_on=[*arguments, "--resume-if-exists"],
        folder=folder,
        check=check,
    )


def chain(watched: Watched, journal: Journal, start: Path, *, name: str = "chain") -> Campaign:
    """Two short trainings, the second from the first one's model, and the table of both."""
    file, folder = watched.output / f"{name}.yaml", watched.output / name
    run = watched.output / "stage.yaml"
    arguments = train_arguments(start, name="stage", output=watched.output)
    config = load_config(QUICKSTART, [*arguments[2:], "learner.num_ranks=1", "algorithm.kl_coef=0"])
    run.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude={"name", "output"})))
    stages = {
        stage: {"config": str(run), "settings": {"num_steps": 2, "evaluation": {"every_steps": 0}}}
        for stage in ("first", "second")
    }
    file.write_text(yaml.safe_dump({"name": name, "output": str(watched.output), "stages": stages, "compare": False}))

    def check() -> None:
        if not list((folder / "evaluation").glob("*.html")):
            raise Missed("the chain has no table")

    arguments = ["chain", str(file)]
    return Campaign(
        watched=watched, journal=journal, arguments=arguments, going_on=arguments, folder=folder, check=check
    )
