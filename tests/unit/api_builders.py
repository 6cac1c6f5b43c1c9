"""A finished run of the synthetic world in a folder, and an engine that plays its agent's script."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from mempipe.agents.protocol import Tokenizer
from mempipe.api import roles
from mempipe.api.agent import load
from mempipe.api.evaluation import evaluate
from mempipe.data.qa import read_questions
from mempipe.data.scripted_agents import NO_NOISE, ScriptedMemSearcher
from mempipe.data.trajectories import write_trajectories
from mempipe.engines.config import SamplingConfig
from mempipe.loader import load_config
from mempipe.runs import Run
from mempipe.types import Completion, FinishReason
from pipelines.prepare import prepare

QUICKSTART = Path(__file__).parents[2] / "jobs" / "configs" / "quickstart.yaml"
SMALL = [
    "world.num_train_worlds=1",
    "world.num_train_questions=8",
    "world.num_validation_questions=12",
    "warm_start=null",
    "num_steps=3",
]
STEPS = [{"step": step, "reward": 0.1 * step, "em": 0.2 * step, "seconds/step": 1.5} for step in (1, 2, 3)]


@dataclass
class ScriptedEngine:
    """Plays the script of MemSearcher on the questions of a run, without a mistake."""

    tokenizer: Tokenizer
    texts: list[str]
    version: str = "scripted"
    says: list[str] = field(default_factory=list)
    """Messages in place of the script's."""
    samplings: list[SamplingConfig] = field(default_factory=list)
    fault: Exception | None = None

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int, sampling: SamplingConfig, seed: int | None = None
    ) -> Completion:
        if self.fault is not None:
            raise self.fault
        self.samplings.append(sampling)
        prompt = self.tokenizer.decode(token_ids)
        question = next((text for text in self.texts if text in prompt), "")
        script = ScriptedMemSearcher(question=question, noise=NO_NOISE)
        text = self.says.pop(0) if self.says else script.reply(prompt)
        whole = [*self.tokenizer.encode_template(text), min(self.tokenizer.stop_token_ids)]
        sampled = whole[:max_tokens]
        return Completion(
            token_ids=sampled,
            logprobs=[0.0] * len(sampled),
            finish_reason=FinishReason.STOP if sampled == whole else FinishReason.LENGTH,
            policy_version=0,
        )

    async def gives_logprobs(self) -> bool:
        return True


@dataclass
class Engines:
    """The engines that were started, and how many of them have ended."""

    started: list[ScriptedEngine] = field(default_factory=list)
    num_ended: int = 0


def scripted_engines(monkeypatch: pytest.MonkeyPatch, texts: Sequence[str]) -> Engines:
    """Lets `mempipe.load` start scripted engines; everything else of it is the real thing."""
    engines = Engines()

    @asynccontextmanager
    async def engine(*made_of: Any) -> AsyncIterator[ScriptedEngine]:
        tokenizer = made_of[-1]
        engines.started.append(ScriptedEngine(tokenizer, list(texts)))
        try:
            yield engines.started[-1]
        finally:
            engines.num_ended += 1

    monkeypatch.setattr(roles, "_engine", engine)
    monkeypatch.setattr(roles, "_endpoint", engine)
    return engines


def questions_in(run: Path) -> list[Any]:
    return read_questions(run / "world" / "validation.parquet")


def build_run(output: Path) -> Path:
    """Makes the folder of a finished run `quickstart`: its world, index and model are real, and its attempts are the
    script's: before training it answers without a search."""
    config = load_config(QUICKSTART, [*SMALL, f"output={output}"])
    run = Run(config)
    prepare(run)
    shutil.copytree(run.folder / "model", run.folder / "huggingface")
    run.update(finished=True, num_steps=3)
    (run.folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in STEPS))
    (run.folder / "report.html").write_text("<p>report</p>")
    questions = questions_in(run.folder)
    with pytest.MonkeyPatch.context() as monkeypatch:
        engines = scripted_engines(monkeypatch, [question.text for question in questions])
        with load(run.folder) as agent:
            after = evaluate(agent, questions).groups
            engines.started[0].says = ["answer</think>\\boxed{ nobody}"] * len(questions)
            before = evaluate(agent, questions).groups
    named = {
        label: [_renamed(group, f"{label}/{group.id}") for group in groups]
        for label, groups in {"before": before, "after": after}.items()
    }
    for step, (label, groups) in zip((0, 3), named.items(), strict=True):
        write_trajectories(run.folder / "evaluation" / f"{label}.parquet", groups, made_of={"step": step})
    write_trajectories(run.folder / "trajectories.parquet", [*named["before"], *named["after"]])
    return run.folder


def _renamed(group: Any, group_id: str) -> Any:
    attempts = [replace(each, group_id=group_id, id=f"{group_id}/{each.member}") for each in group.trajectories]
    return replace(group, id=group_id, trajectories=attempts)
