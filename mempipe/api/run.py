"""Trains a run, and reads what its folder holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import polars as pl

from mempipe.api.objects import Passed, named
from mempipe.api.results import causes_text
from mempipe.api.settings import nested
from mempipe.checks.findings import refuse
from mempipe.config import RunConfig
from mempipe.engines.checkpoint import checkpoints
from mempipe.environment import prepare_process
from mempipe.evaluation.causes import first_causes
from mempipe.evaluation.held_out import read_held_out
from mempipe.evaluation.rollout_metrics import num_turns
from mempipe.evaluation.suite import merged
from mempipe.facts import FactState, fact_states
from mempipe.installation import check_pipelines
from mempipe.loader import load_config, load_values, parse_section
from mempipe.reports.traced import Traced, read_traced
from mempipe.runs import Resume, check_place, read_state
from mempipe.settings import ConfigError
from mempipe.tracking.metrics_file import read_metrics


class Run:
    """The folder of a training run. `mempipe.load(run)` loads its agent.

    Everything is read from the folder when it is asked for, so a run that still trains can be looked at, too.
    """

    def __init__(self, folder: str | Path) -> None:
        """Raises ConfigError for a folder that holds no run, and for a damaged one."""
        self.folder = Path(folder)
        if not (self.folder / "state.json").exists():
            raise ConfigError(f"{self.folder} holds no run (no state.json); `mempipe.train` makes one")
        self.config: RunConfig = load_config(self.folder / "config.yaml")
        """All settings of the run."""
        read_state(self.folder)

    @property
    def state(self) -> dict[str, Any]:
        """Returns the seconds of each phase (`seconds`), the learner steps done (`num_steps`), and whether the run has
        ended (`finished`)."""
        return read_state(self.folder)

    @property
    def finished(self) -> bool:
        return bool(self.state["finished"])

    @property
    def metrics(self) -> pl.DataFrame:
        """Returns a row for each learner step with everything that was measured in it; step 0 is the measurement before
        the first one. The frame is empty while nothing was measured."""
        file = self.folder / "metrics.jsonl"
        rows = read_metrics(file) if file.exists() else []
        return pl.DataFrame(rows, infer_schema_length=None)

    @property
    def report(self) -> Path | None:
        """Returns the report, a page for a browser; None while it is not written."""
        return self._existing("report.html")

    @property
    def model(self) -> Path | None:
        """Returns the trained model, a Hugging Face folder; None while it is not written."""
        return self._existing("huggingface")

    @property
    def checkpoints(self) -> list[Path]:
        """Returns the folders of the checkpoints that are kept, the oldest first. `mempipe export` makes a model of
        one."""
        return checkpoints(self.folder / "checkpoints")

    @property
    def evaluations(self) -> pl.DataFrame:
        """Returns a row for each evaluation of the held-out questions, in the order of training: its label, the learner
        step, the number of questions, and the means of exact match, F1, turns and sampled tokens."""
        found = read_held_out(self.folder, growing=not self.config.has_memory)
        return pl.DataFrame([asdict(each) for each in found], schema=_EVALUATION)

    def trajectories(self, *, turns: bool = False) -> pl.DataFrame:
        """Returns a row for each recorded attempt at a held-out question: its phase ("before" or "after"), the
        question, the part of the corpus that it is about, the answer, scores, turns, tokens, and the memory that the
        attempt ended with.

        With `turns` it returns a row for each turn of these attempts, and one row for all turns of an agent that
        carries its whole history: the memory that the turn left and its tokens (null where it wrote none), the sampled
        tokens of its messages, and how many needed facts its memory holds, gained and lost. These counts and
        `first_cause`, why the attempt's answer is wrong (of a joined question why each of its answers is: "none;
        lost"), are null where the needed facts are not known; the counts too where the agent carries its whole history.
        docs/memory.md defines them.

        `mempipe trace` shows them turn by turn. Raises ConfigError while the run has recorded none.
        """
        traced = read_traced(self.folder)
        if turns:
            return pl.DataFrame([row for each in traced for row in _turns(each)], schema=_TURN)
        return pl.DataFrame([_attempt(each) for each in traced], schema=_ATTEMPT)

    def _existing(self, name: str) -> Path | None:
        path = self.folder / name
        return path if path.exists() else None

    def __repr__(self) -> str:
        state = self.state
        done = f"{state.get('num_steps', 0)} of {self.config.num_steps} steps"
        return f"<Run {str(self.folder)!r}: {done}, {'finished' if state['finished'] else 'not finished'}>"


def train(
    config: str | Path | Mapping[str, Any] | RunConfig, *, resume: Resume | bool = "never", **overrides: Any
) -> Run:
    """Trains an agent as `mempipe train` does, and returns its run when it has ended.

    `config` is a run's YAML file, or its settings as a mapping or a RunConfig. `overrides` replace settings, by section
    or with dots: `num_steps=30`, `algorithm={"group_size": 8}` or `**{"algorithm.group_size": 8}`; `mempipe config`
    prints them all. A reward (`reward=my_function`), a tool (`agent={"tools": [MyTool]}`), an agent
    (`agent=my_module`) or a program (`agent={"name": "program", "program": solve}`) may be the Python object itself.

    `resume` is "never" (a folder that holds a run is refused), "always" or True (resumes the existing run), or "auto"
    (resumes it, or begins a new one). The roles run as Ray actors: on the cluster of `ray_address`, or on this machine
    until the training ends. Ctrl-C saves the learner and raises KeyboardInterrupt.

    Raises ConfigError, which names the setting, before anything is started; what fails later raises a RuntimeError or
    an OSError, and the same call with `resume=True` resumes the run.
    """
    prepare_process()
    how: Resume = ("always" if resume else "never") if isinstance(resume, bool) else resume
    if how not in ("never", "auto", "always"):
        raise ConfigError(f"resume is {resume!r}; expected 'never', 'auto' or 'always'")
    given = nested(overrides)
    if callable(given.get("reward")):  # it takes the place of reward.function, not of the whole section
        given["reward"] = {"function": given["reward"]}
    values = merged(_values(config), given)
    passed = Passed(Path(str(values.get("output", "runs"))) / str(values.get("name", "run")))
    settings = named(values, passed)
    check_pipelines()
    from mempipe.checks.run import check_run

    with passed.in_memory():
        parsed = parse_section(settings, RunConfig)
        if isinstance(config, str | Path):
            check_place(config, parsed, resume=how)
        refuse(check_run(parsed, resume=how))
    passed.write()
    from pipelines.train import main

    return Run(main(parsed, resume=how).folder)


def _values(config: str | Path | Mapping[str, Any] | RunConfig) -> dict[str, Any]:
    if isinstance(config, RunConfig):
        return config.model_dump(mode="json", exclude_unset=True)
    if isinstance(config, Mapping):
        return nested(config)
    return load_values(config, kind="run")


_EVALUATION: dict[str, Any] = {
    "label": pl.String,
    "step": pl.Int64,
    "num_questions": pl.Int64,
    "em": pl.Float64,
    "f1": pl.Float64,
    "turns": pl.Float64,
    "sampled_tokens": pl.Float64,
}


def _attempt(each: Traced) -> dict[str, Any]:
    question, attempt = each.question, each.trajectory
    return {
        "phase": each.phase,
        "question_id": question.id,
        "question": question.text,
        "golden_answers": question.golden_answers,
        "partition": question.partition,
        "answer": attempt.answer,
        "em": attempt.em,
        "f1": attempt.f1,
        "reward": attempt.reward,
        "end_reason": str(attempt.end_reason),
        "turns": num_turns(attempt, growing=not each.text.has_memory),
        "tokens": sum(len(context.loss_mask) for context in attempt.contexts),
        "memory": attempt.last_memory,
    }


_ATTEMPT: dict[str, Any] = {
    "phase": pl.String,
    "question_id": pl.String,
    "question": pl.String,
    "golden_answers": pl.List(pl.String),
    "partition": pl.String,
    "answer": pl.String,
    "em": pl.Float64,
    "f1": pl.Float64,
    "reward": pl.Float64,
    "end_reason": pl.String,
    "turns": pl.Int64,
    "tokens": pl.Int64,
    "memory": pl.String,
}


def _turns(each: Traced) -> list[dict[str, Any]]:
    question, attempt = each.question, each.trajectory
    has_facts = bool(question.evidence) and each.text.has_memory
    shared = {
        "phase": each.phase,
        "question_id": question.id,
        "member": attempt.member,
        "hops": question.num_hops or None,
        "em": attempt.em,
        "first_cause": causes_text(first_causes(attempt, question, growing=not each.text.has_memory)),
    }
    rows = []
    for index, (context, states) in enumerate(zip(attempt.contexts, fact_states(attempt, question), strict=True)):
        wrote = each.text.wrote_memory(attempt, index)
        gained, known, lost = (states.count(state) for state in (FactState.GAINED, FactState.KNOWN, FactState.LOST))
        facts = {"facts_held": known + gained, "facts_gained": gained, "facts_lost": lost}
        rows.append(
            shared
            | {
                "turn": index + 1,
                "memory": context.memory_after if wrote else None,
                "memory_tokens": context.num_new_memory_tokens if wrote else None,
                "message_tokens": context.num_sampled_tokens,
            }
            | (facts if has_facts else dict.fromkeys(facts))
        )
    return rows


_TURN: dict[str, Any] = {
    "phase": pl.String,
    "question_id": pl.String,
    "member": pl.Int64,
    "turn": pl.Int64,
    "hops": pl.Int64,
    "memory": pl.String,
    "memory_tokens": pl.Int64,
    "message_tokens": pl.Int64,
    "facts_held": pl.Int64,
    "facts_gained": pl.Int64,
    "facts_lost": pl.Int64,
    "em": pl.Float64,
    "first_cause": pl.String,
}
