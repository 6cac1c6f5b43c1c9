"""A training whose roles are stand-ins in this process: the real command, loop, checkpoints, collector, admission and
record, and one exception where a role would have failed.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import yaml

from mempipe import cli
from mempipe.actors.admission import Admission
from mempipe.checks import run as run_checks
from mempipe.data.qa import write_questions
from mempipe.engines.checkpoint import MANIFEST, STATE, Position, TrainingState
from mempipe.engines.config import ModelConfig
from mempipe.storage.files import sha256, whole_folder
from mempipe.training import validation
from mempipe.types import Context, EndReason, Group, Question, Trajectory
from pipelines import train
from pipelines.warm_start import warm_start_folder

NUM_STEPS = 4
GROUPS_PER_STEP = 2
GROUP_SIZE = 2
UPDATES_PER_STEP = 2
TRAIN = "train.parquet"


@dataclass
class Strike:
    """An exception that is raised when a place has been passed `after` times; each strike hits once."""

    place: str
    error: Callable[[], BaseException]
    after: int = 0
    has_hit: bool = False

    def at(self, place: str) -> None:
        if self.has_hit or place != self.place:
            return
        if self.after:
            self.after -= 1
            return
        self.has_hit = True
        raise self.error()


@dataclass
class StandInRun:
    """Runs `mempipe train` on stand-ins. `strike` is what goes wrong."""

    folder: Path
    strike: Strike
    num_launches: int = 0
    trained_models: list[str] = field(default_factory=list)
    """The models that training began with, one of each start."""
    launched_models: list[str] = field(default_factory=list)
    """The models that engines were started with."""
    model: dict[str, Any] = field(default_factory=dict)
    """Further settings of the model."""
    warm_start: dict[str, Any] = field(default_factory=dict)
    """Settings of the warm start."""
    seen: list[str] = field(default_factory=list)
    loaded: list[tuple[str, bool]] = field(default_factory=list)
    """Checkpoints that the ranks took, and whether they were told that the files had been compared already."""

    def at(self, place: str) -> None:
        """A role is at work at `place`."""
        self.seen.append(place)
        self.strike.at(place)

    def settings(self) -> dict[str, Any]:
        return {
            "name": "run",
            "output": str(self.folder),
            "num_steps": NUM_STEPS,
            "model": {"path": str(self.folder / "model"), **self.model},
            "retrieval": {"url": "http://127.0.0.1:1"},
            "data": {"train": str(self.folder / TRAIN), "validation": str(self.folder / "validation.parquet")},
            "algorithm": {
                "groups_per_step": GROUPS_PER_STEP,
                "group_size": GROUP_SIZE,
                "updates_per_step": UPDATES_PER_STEP,
                "kl_coef": 0,
                "filter_zero_variance": False,
            },
            "checkpoint": {"every_steps": 1, "keep": NUM_STEPS},
            "evaluation": {"every_steps": 2, "untrained": True},
            "warm_start": self.warm_start,
            "tracking": {"enabled": False},
        }

    def command(self, *options: str) -> int | str | None:
        """Runs the command; returns its exit code, also of one that leaves by SystemExit."""
        file = self.folder / "run.yaml"
        if not file.exists():
            file.write_text(yaml.safe_dump(self.settings()))
        try:
            return cli.main(["train", str(file), *options])
        except SystemExit as end:
            return end.code

    @property
    def run_folder(self) -> Path:
        return self.folder / "run"

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.run_folder / "checkpoints").glob("step-*"))

    def recorded_steps(self) -> list[int]:
        """Returns the steps in the order of metrics.jsonl's rows."""
        lines = (self.run_folder / "metrics.jsonl").read_text().splitlines()
        return [row["step"] for row in map(json.loads, lines) if "reward" in row]

    def trained_groups(self) -> list[str]:
        state = json.loads((self.run_folder / "checkpoints" / self.checkpoints()[-1] / STATE).read_text())
        return [group for step in state["position"]["trained"] for group in step]


def stand_in_run(folder: Path, monkeypatch: pytest.MonkeyPatch, strike: Strike) -> StandInRun:
    """Puts stand-ins where `pipelines.train` starts roles, and questions where it reads them."""
    run = StandInRun(folder=folder, strike=strike)
    write_questions(folder / TRAIN, [_question(f"t{i}") for i in range(NUM_STEPS * GROUPS_PER_STEP)])
    write_questions(folder / "validation.parquet", [_question(f"v{i}") for i in range(2)])

    @contextmanager
    def connected(*_: Any, **__: Any) -> Iterator[str]:
        run.at("connected")
        yield "stand-ins"

    @contextmanager
    def launched(config: Any, *_: Any, **__: Any) -> Iterator[Roles]:
        run.num_launches += 1
        run.launched_models.append(config.model.path)
        run.at("launch")
        yield Roles(run, config)

    def prepared(of: Any) -> Any:
        run.at("prepare")
        return of.config

    def demonstrated(*_: Any) -> str:
        run.at("demonstrations")
        return "demonstrations"

    def warm_started(of: Any, *_: Any) -> None:
        run.at("warm start")
        warm_start_folder(of).mkdir(exist_ok=True)

    def report(folder: Path) -> list[Path]:
        run.at("report")
        (folder / "report.json").write_text("{}")
        return [folder / "report.json"]

    def stream(spec: Any, rows: Iterable[tuple[str, Question]], **_: Any) -> Iterator[Group]:
        for number, (group_id, question) in enumerate(rows):
            version = 0
            if spec.admission is None:
                run.at(f"evaluate {group_id.split('/')[0].split('-')[0]}")
            else:
                run.at("collect")
                version = spec.admission.ticket.remote(group_id, number)
            yield _group(group_id, question, size=spec.group_size, version=version)

    monkeypatch.setattr(os, "fsync", lambda _: None)  # nobody cuts the power
    monkeypatch.setattr(run_checks, "check_run", lambda *_, **__: [])
    monkeypatch.setattr(ray, "get", lambda answer, **_: answer)
    monkeypatch.setattr(train, "connected", connected)
    monkeypatch.setattr(train, "launch", launched)
    monkeypatch.setattr(train, "prepare", prepared)
    monkeypatch.setattr(train, "check_inputs", lambda _: "")
    monkeypatch.setattr(train, "recorded_demonstrations", demonstrated)
    monkeypatch.setattr(train, "warm_start", warm_started)
    monkeypatch.setattr(train, "write_report", report)
    for module in (train, validation):
        monkeypatch.setattr(module, "stream_groups", stream)
    monkeypatch.setattr(train, "hash_inputs", lambda _: {})
    monkeypatch.setattr(train, "load_tokenizer", lambda _: None)
    monkeypatch.setattr(train, "first_prompt", lambda config, question, *, tokenizer: [1, 2])
    return run


class Roles:
    """Engines and ranks, all of them in this process."""

    plan = "stand-ins"
    references = None
    generators: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, run: StandInRun, config: Any) -> None:
        self._run = run
        self.config = config
        self.canary: list[list[int]] = []
        self.learners = Learners(run)
        self.weights_sha256 = ""

    def wait(self) -> None:
        self._run.at("wait")

    def load_policy(self, model: ModelConfig) -> None:
        self._run.at("load policy")
        self.config = self.config.model_copy(update={"model": model})
        self._run.trained_models.append(model.path)

    def driver_spec(self, *, group_size: int, admission: Any = None, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(group_size=group_size, admission=admission)

    def new_admission(self, **state: Any) -> tuple[Any, Any]:
        algorithm = self.config.algorithm
        actor = Admission(
            groups_per_step=algorithm.groups_per_step, max_off_policy_steps=algorithm.max_off_policy_steps, **state
        )
        handle = SimpleNamespace(
            ticket=_Method(actor.ticket),
            choose=_Method(actor.choose, before=lambda: self._run.at("choose")),
            consume=_Method(actor.consume, before=lambda: self._run.at("consume")),
        )
        return handle, handle

    def learn(self, updates: Sequence[Any], *, first: int = 0, **_: Any) -> list[dict[str, float]]:
        reports = []
        for _ in updates[first:]:
            self._run.at("learn")
            self.learners.num_updates += 1
            reports.append({"loss": 0.0})
        return reports

    def sync(self, policy_version: int) -> dict[str, float]:
        self._run.at("sync")
        self.weights_sha256 = str(self.learners.num_updates)
        return {}

    def waited_for(self) -> str:
        return "nothing"


class Learners:
    """Ranks that only count their updates, and write them as checkpoints in the real form."""

    def __init__(self, run: StandInRun) -> None:
        self._run = run
        self.num_updates = 0

    def restore(self, folder: Path) -> Position | None:
        found = sorted(folder.glob("step-*"))
        return self.load(found[-1]) if found else None

    def load(self, path: Path, *, verified: bool = False) -> Position:
        self._run.at("restore")
        self._run.loaded.append((path.name, verified))
        state = json.loads((path / STATE).read_text())
        self.num_updates = state["num_updates_done"]
        return Position(**state["position"])

    def updates_done(self, *, finish: bool = False) -> int:
        return self.num_updates

    def start_save(self, folder: Path, position: Position, *, keep: int) -> None:
        self._run.at("checkpoint")
        state = TrainingState(num_updates_done=self.num_updates, ranks="1 cpu", position=position)
        with whole_folder(folder / f"step-{self.num_updates:08d}") as partial:
            (partial / STATE).write_text(json.dumps(asdict(state)))
            entry = {"bytes": (partial / STATE).stat().st_size, "sha256": sha256(partial / STATE)}
            (partial / MANIFEST).write_text(json.dumps({"files": {STATE: entry}}))

    def save_failed(self) -> bool:
        return False

    def finish_save(self) -> None:
        pass

    def export(self, folder: Path, *, source: str) -> None:
        self._run.at("export")
        folder.mkdir(parents=True, exist_ok=True)


class _Method:
    """An actor's method whose call is over at once: `ray.get` of its reference is the reference."""

    def __init__(self, function: Callable[..., Any], *, before: Callable[[], None] = lambda: None) -> None:
        self._function, self._before = function, before

    def remote(self, *arguments: Any, **named: Any) -> Any:
        self._before()
        return asyncio.run(self._function(*arguments, **named))


def _question(name: str) -> Question:
    return Question(id=name, text="Who?", golden_answers=["x"])


def _group(group_id: str, question: Question, *, size: int, version: int) -> Group:
    attempts = [
        Trajectory(
            id=f"{group_id}/{member}",
            group_id=group_id,
            member=member,
            contexts=[_context(version)],
            end_reason=EndReason.ANSWERED,
            answer="x",
            reward=float(member % 2),
            advantage=float(member % 2) - 0.5,
        )
        for member in range(size)
    ]
    return Group(id=group_id, question=question, trajectories=attempts, seconds=0.1)


def _context(version: int) -> Context:
    return Context(
        index=0,
        token_ids=[1, 2],
        loss_mask=[0, 1],
        logprobs=[0.0, -1.0],
        policy_versions=[-1, version],
        num_prompt_tokens=1,
        num_question_tokens=1,
        num_memory_tokens=0,
        action="x",
        generate_seconds=0.1,
    )
