"""Trajectories of two facts as a run records them, for what shows them to people."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import yaml

from mempipe.agents.registry import agent_spec
from mempipe.config import RunConfig
from mempipe.data.trajectories import write_trajectories
from mempipe.reports.steps import ActionText
from mempipe.types import Context, EndReason, Evidence, Group, Passage, Question, Search, Trajectory


def turn(index: int, before: str, after: str, *, passage: str = "", thought: str = "look") -> Context:
    passages = [Passage(id=passage, title=passage, text=f"{passage} says so")] if passage else []
    return Context(
        index=index,
        token_ids=[1] * 9,
        loss_mask=[0] * 5 + [1] * 4,
        logprobs=[0.0] * 9,
        policy_versions=[0] * 9,
        num_prompt_tokens=5,
        num_question_tokens=2,
        num_memory_tokens=len(before.split()),
        action=f"{thought}</think><tool_call>call</tool_call>",
        searches=[Search(query=f"who is {passage}", num_passages=1, passages=passages, snapshot="s")]
        if passage
        else [],
        memory_before=before,
        memory_after=after,
        num_new_memory_tokens=len(after.split()),
    )


def group(phase: str, number: int, *, right: bool, lost: bool = False, text: str = "") -> Group:
    """A question whose two facts are found; the first is lost where `lost` says so."""
    question = Question(
        id=f"q{number}",
        text=text or f"Who is number {number}?",
        golden_answers=["Ann"],
        num_hops=1 + number % 2,
        evidence=[Evidence(passage_id="a", value="Oslo"), Evidence(passage_id="b", value="Ann")],
    )
    contexts = [
        turn(0, "", "Oslo fjord", passage="a"),
        turn(1, "Oslo fjord", "Ann" if lost else "Oslo Ann", passage="b"),
        turn(2, "Ann" if lost else "Oslo Ann", "", thought=text or "answer"),
    ]
    key = f"{phase}/q{number}" if phase else f"q{number}"
    trajectory = Trajectory(
        id=f"{key}/0",
        group_id=key,
        member=0,
        contexts=contexts,
        end_reason=EndReason.ANSWERED if right else EndReason.MAX_TURNS,
        answer="Ann" if right else None,
        reward=float(right),
        em=float(right),
    )
    return Group(id=key, question=question, trajectories=[trajectory])


def write_run(folder: Path) -> Path:
    """Writes a run in which the training repairs question 1; question 2 loses a fact after it."""
    before = [group("before", number, right=False) for number in range(3)]
    after = [group("after", number, right=number == 1, lost=number == 2) for number in range(3)]
    write_trajectories(folder / "trajectories.parquet", [*before, *after])
    config = RunConfig().model_dump(mode="json")
    config["budget"]["memory_tokens"] = 64
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def write_full_history_run(folder: Path) -> Path:
    """Writes a run of ReAct whose only attempt has three messages in one context."""
    answered = group("after", 1, right=True)
    (attempt,) = answered.trajectories
    contexts = attempt.contexts
    one = replace(
        contexts[0],
        **{
            column: [value for context in contexts for value in getattr(context, column)]
            for column in ("token_ids", "loss_mask", "logprobs", "policy_versions")
        },
    )
    groups = [replace(answered, trajectories=[replace(attempt, contexts=[one])])]
    write_trajectories(folder / "trajectories.parquet", groups)
    write_trajectories(folder / "evaluation" / "after.parquet", groups)
    (folder / "config.yaml").write_text(yaml.safe_dump({"agent": {"name": "react"}}))
    (folder / "state.json").write_text(json.dumps({"finished": True, "seconds": {}, "num_steps": 3}))
    return folder


def text_of(agent: str, **changes: object) -> ActionText:
    """How the text of an agent's actions is read; `changes` are to its spec."""
    spec = replace(agent_spec(agent), **changes)
    return ActionText.of(spec, spec.budget())
