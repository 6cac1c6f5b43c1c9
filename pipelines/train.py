"""Train an agent with multi-context GRPO (arXiv 2511.02805): the whole main job, readable from top to bottom.

    prepare     world, index and tiny model (only if the config has a `world`)
    launch      engines, retrievers, reference, learner ranks
    warm start  (only if the config has one)                               checkpoint 0
    evaluate    held-out questions, before
    train       [ collect groups -> reference -> learn -> sync ] x steps   a checkpoint every so often
    evaluate    held-out questions, after
    report      plots, Hugging Face export

Each phase leaves its result in the run's folder; a resumed run skips what it finds there and goes on from the newest checkpoint.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence

from mempipe.actors.launch import Roles, connected, launch
from mempipe.config import RunConfig, SamplingConfig
from mempipe.data.qa import read_questions
from mempipe.data.trajectories import read_trajectories, write_trajectories
from mempipe.evaluation.memory_quality import rollout_metrics
from mempipe.evaluation.report import write_report
from mempipe.progress import Progress, closing_table
from mempipe.rl.packing import pack_step, split_updates
from mempipe.rl.samples import to_samples
from mempipe.runs import Resume, Run
from mempipe.stream import Collector, StepGroups, stream_groups
from mempipe.types import Group, Question, TrainingSample
from pipelines.prepare import prepare
from pipelines.warm_start import warm_start


def main(config: RunConfig, *, resume: Resume = "never") -> Run:
    """Runs the job to its end and returns the run. Raises ConfigError before anything expensive starts, LaunchError and its kin after."""
    run = Run(config, resume=resume)
    if run.state["finished"]:
        closing_table(run)
        return run
    with run.phase("prepare"):
        config = prepare(run)
        train = read_questions(config.data.train)
        validation = read_questions(config.data.validation)[: config.evaluation.num_questions or None]
    with connected(config) as namespace:
        launching = time.perf_counter()
        with launch(config, namespace, run) as roles:
            run.add_seconds("launch", time.perf_counter() - launching)
            position = roles.learners.restore(run.folder / "checkpoints")
            if position is None:
                with run.phase("warm_start"):
                    warm_start(roles, run)
                position = roles.learners.save(run.folder / "checkpoints", {"step": 0, "consumed": []})
            roles.sync(policy_version=position["step"])
            before = evaluate_once(roles, run, validation, "before")
            learn(roles, run, train, position)
            after = evaluate_once(roles, run, validation, "after")
            with run.phase("export"):
                roles.learners.export(run.folder / "huggingface")
    with run.phase("report"):
        write_trajectories(run.folder / "trajectories.parquet", [*before, *after])
        write_report(run.folder)
    run.update(finished=True)
    closing_table(run)
    return run


def evaluate_once(roles: Roles, run: Run, questions: Sequence[Question], label: str) -> list[Group]:
    """One attempt per held-out question under the served weights; kept in the run's folder, so that a resumed run has it."""
    path = run.folder / "evaluation" / f"{label}.parquet"
    if path.exists():
        return read_trajectories(path)
    sampling = SamplingConfig(temperature=run.config.evaluation.temperature)
    spec = roles.driver_spec(sampling=sampling, group_size=1)
    with run.phase("evaluate"), Progress(f"evaluate {label}", total=len(questions)) as progress:
        groups = []
        for group in stream_groups(spec, [(f"{label}-{q.id}", q) for q in questions]):
            groups.append(group)
            progress.advance(em=sum(g.trajectories[0].em for g in groups) / len(groups))
    write_trajectories(path, groups)
    roles.tracker.log_metrics(rollout_metrics(groups, prefix=f"{label}/"), step=0 if label == "before" else run.config.num_steps)
    return groups


def learn(roles: Roles, run: Run, questions: Sequence[Question], position: dict) -> None:
    """The training loop: exactly `groups_per_step` groups a step, `num_steps` steps in all."""
    config = run.config
    consumed = set(position["consumed"])
    admission_name, admission = roles.new_admission(policy_version=position["step"])
    spec = roles.driver_spec(sampling=config.sampling, group_size=config.algorithm.group_size, admission=admission_name)
    groups = stream_groups(spec, question_rows(questions, config, consumed))
    collector = Collector(groups, admission, config.algorithm)
    with Progress("train", total=config.num_steps, done=position["step"]) as progress:
        for step in range(position["step"], config.num_steps):
            started = time.perf_counter()
            batch = collector.next_step(policy_version=step)
            if batch is None:
                progress.note(f"the questions are used up after step {step}; data.num_epochs {config.data.num_epochs} gives no more")
                break
            metrics, seconds = train_step(roles, config, batch, step=step)
            collector.consumed(batch, policy_version=step + 1)
            consumed.update(group.id for group in [*batch.groups, *batch.dropped])
            if (step + 1) % config.checkpoint.every_steps == 0 or step + 1 == config.num_steps:
                checkpointing = time.perf_counter()
                roles.learners.save(run.folder / "checkpoints", {"step": step + 1, "consumed": sorted(consumed)})
                seconds["checkpoint"] = time.perf_counter() - checkpointing
            seconds["step"] = time.perf_counter() - started
            seconds["other"] = seconds["step"] - sum(s for name, s in seconds.items() if name != "step")
