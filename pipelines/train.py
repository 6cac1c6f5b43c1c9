"""Train an agent with multi-context GRPO (arXiv 2511.02805): the whole main job, readable from top to bottom.

    prepare     world, index and tiny model (only if the config has a `world`)
    launch      engines, retrievers, reference, learner ranks, once for all phases below
    warm start  (only if the config has one)                               checkpoint 0
    evaluate    held-out questions, before
    train       [ collect groups -> reference -> learn -> sync ] x steps   a checkpoint every so often
    evaluate    held-out questions, after
    report      plots, Hugging Face export

Each phase leaves its result in the run's folder; a resumed run skips what it finds there and resumes from the newest
checkpoint.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path

from mempipe.actors.cluster import check_unconnected, connected
from mempipe.actors.launch import Roles, launch
from mempipe.beacons import reached
from mempipe.checks.inputs import check_inputs, hash_inputs
from mempipe.checks.run import few_questions
from mempipe.config import RunConfig
from mempipe.data.qa import QuestionTable, iter_questions, skipped_text, understood
from mempipe.data.trajectories import write_trajectories
from mempipe.engines.checkpoint import Position, latest, read_state
from mempipe.engines.config import ModelConfig
from mempipe.engines.proof import SamplingMismatch, canary_sequences
from mempipe.engines.tokenizer import load_tokenizer
from mempipe.evaluation.rollout_metrics import rollout_metrics
from mempipe.progress import Progress, say, waiting, watched
from mempipe.provenance import MADE_OF, model_sha256, read_record, write_record
from mempipe.reports.alarms import MISMATCH, mismatch_alarm
from mempipe.reports.closing import closing_table
from mempipe.reports.training import write_report
from mempipe.rl.kl_reward import with_kl_in_reward
from mempipe.rl.metrics import step_metrics
from mempipe.rl.packing import pack_step, split_updates
from mempipe.rl.samples import to_samples
from mempipe.rollout import first_prompt
from mempipe.runs import Resume, Run
from mempipe.settings import ConfigError
from mempipe.stop import StopRequest
from mempipe.streams.groups import Collector, StepGroups, stream_groups
from mempipe.tracking.losses import read_losses
from mempipe.training.repair import Checkpoints, KeptGroups, Supervisor, newest_usable
from mempipe.training.tracker_front import TrackerFront
from mempipe.training.training_rows import TrainingRows
from mempipe.training.validation import Validation, held_out_questions
from mempipe.types import Group, Question
from pipelines.export import Exports
from pipelines.prepare import prepare
from pipelines.warm_start import check_still_there, recorded_demonstrations, warm_start, warm_start_folder

NUM_CANARIES = 4
"""Sequences that learner and engines score after each sync: prompts of the first questions. Not tuned."""


def main(config: RunConfig, *, resume: Resume = "never") -> Run:
    """Runs the job to its end.
    Raises ConfigError before anything expensive starts; what else fails raises a RuntimeError or OSError.
    """
    check_unconnected()
    run = Run(config, resume=resume)
    if run.rebuilt:
        say(f"{run.folder}: state.json was gone and is made again; the run continues with its {run.kept()}")
    with StopRequest(config.grace_s).listening() as stop:
        try:
            return _run(run, config, stop)
        except ConfigError as error:
            if kept := run.kept():
                raise ConfigError(
                    f"{error}\n{run.folder} keeps {kept}: continue it with --resume when this is mended, or begin "
                    "another run under another `name`"
                ) from error
            raise


def _run(run: Run, config: RunConfig, stop: StopRequest) -> Run:
    supervisor = Supervisor(config.max_restarts)
    is_done = run.state["finished"] and config.num_steps <= run.state["num_steps"]  # else a finished run trains further
    if run.state["finished"] and not is_done and latest(run.folder / "checkpoints") is None:
        raise ConfigError(
            f"num_steps is {config.num_steps}, but {run.folder} has ended after {run.state['num_steps']} steps and "
            "holds no checkpoint to resume from; begin another run with its huggingface folder as model.path"
        )
    losses: Sequence[str] = read_losses(run.folder)
    if not is_done:
        with run.preparation():
            reached("prepare")
            say(f"the phases: {', then '.join(phases(config))}")
            with waiting("reading the inputs" if config.world is None else "making the world, its index and its model"):
                config = supervisor.attempt(partial(prepare, run))
            check_inputs(config)
            run.check_inputs(hash_inputs(config))
            run.update(finished=False)  # not before: a run that is refused stays as it was
            run.resolved(config)
            check_still_there(run, config)
            if verified := latest(run.folder / "checkpoints"):
                read_state(verified)  # raises CheckpointError for a damaged one
        say("connecting to Ray")
        with connected(
            config.ray_address, name=config.name, model=config.model, logs=run.folder / "ray_logs"
        ) as namespace:
            reached("connected")
            tracker = TrackerFront(config)
            try:
                unused = [verified]  # another attempt compares the files again: what happened to them is not known
                supervisor.attempt(
                    lambda: _phases(run, config, namespace, tracker, stop, verified=unused.pop() if unused else None)
                )
                run.update(finished=True)
            finally:
                status = "FINISHED" if run.state["finished"] else "KILLED" if stop.requested else "FAILED"
                losses = tracker.finish(status).losses
    try:
        read_record(run.folder / "report.json", mends="it is written again")
    except ConfigError as error:
        say(str(error))
        write_report(run.folder)
    closing_table(run, losses=losses)
    return run


def _phases(
    run: Run,
    config: RunConfig,
    namespace: str,
    tracker: TrackerFront,
    stop: StopRequest,
    *,
    verified: Path | None = None,
) -> None:
    """Runs all phases that need actors. Each skips what it finds done, so that another attempt continues. `verified` is
    the checkpoint whose files were compared with its manifest already."""
    left_out = Counter[str]()
    questions = QuestionTable(iter_questions(config.data.train, columns=config.data.columns, left_out=left_out))
    first = understood(config.data.train, columns=config.data.columns)
    say(f"{len(questions):,} training questions{skipped_text(left_out)}; the first: {first}")
    if few := few_questions(config, len(questions)):
        if len(questions) * config.data.num_epochs < config.algorithm.groups_per_step:
            raise ConfigError(few)  # not one step would be trained
        say(few)
    run.update(trained_on=questions.sources())
    validation = Validation(run, held_out_questions(config), tracker)
    with _ready_to_train(run, config, validation, namespace, stop) as roles:
        _train(run, roles, questions, validation, tracker, stop, verified=verified)
    with run.phase("report"):
        reached("report")
        tracker.flush()  # the report lists the missing records
        for path in write_report(run.folder):
            tracker.log_artifact(path)


def phases(config: RunConfig) -> list[str]:
    """Returns the phases of a run in order, each with its size, for a person."""
    algorithm, evaluated = config.algorithm, config.data.validation or config.world or config.cloze
    named = config.evaluation.num_questions or (config.world.num_validation_questions if config.world else 0)
    asking = f"{named or 'the'} held-out questions" if evaluated else ""
    wanted, imitating = config.warm_start, ""
    if wanted is not None and wanted.scripted:
        imitating = f"imitate {wanted.num_clean_trajectories + wanted.num_noisy_trajectories:,} demonstrations"
    elif wanted is not None:
        imitating = "imitate recorded attempts"
    attempts = algorithm.groups_per_step * algorithm.group_size
    steps = f"{config.num_steps:,} {'step' if config.num_steps == 1 else 'steps'}"
    training = f"{steps} of {attempts:,} attempts at {algorithm.groups_per_step:,} questions"
    return [part for part in (imitating, asking, training, asking and f"{asking} again", "a report") if part]


@contextmanager
def _ready_to_train(
    run: Run, config: RunConfig, validation: Validation, namespace: str, stop: StopRequest
) -> Iterator[Roles]:
    """Starts the roles, does the untrained evaluation and the warm start if they are not done yet, and yields the
    roles. They are started once. Exception: if engines serve an adapter, all roles start again after the warm start,
    because an engine cannot put its adapter on another base model.
    """
    is_asked = _is_asked_untrained(config, validation)
    wanted = None if warm_start_folder(run).exists() else config.warm_start
    if wanted is not None and wanted.teacher is not None:
        with run.phase("warm_start"):
            recorded_demonstrations(run, config)  # before the start: a teacher may take hours, and GPUs would idle
    if is_asked or wanted is not None:
        with _launched(run, config, namespace) as roles:
            shown = None
            if wanted is not None:
                with run.phase("warm_start"):
                    shown = recorded_demonstrations(run, config)  # while the roles load
            if is_asked:
                with run.phase("launch"), waiting("waiting for engines and retrievers"):
                    roles.wait()
                roles.weights_sha256 = model_sha256(config.model.path)
                validation.evaluate(roles, label="untrained", step=0)
            if shown is not None:
                with run.phase("warm_start"):
                    warm_start(run, roles, shown, stop)
            if not config.model.serves_adapter:
                yield roles
                return
    with _launched(run, config.model_copy(update={"model": _first_model(run, config)}), namespace) as roles:
        yield roles


@contextmanager
def _launched(run: Run, config: RunConfig, namespace: str) -> Iterator[Roles]:
    """Starts all roles without waiting, and counts the time as the phase "launch"."""
    say("starting engines, retrievers and learner")
    started = time.perf_counter()
    with launch(config, namespace) as roles:
        run.add_seconds("launch", time.perf_counter() - started)
        yield roles


def _is_asked_untrained(config: RunConfig, validation: Validation) -> bool:
    """Returns whether the untrained evaluation is wanted and has no result yet."""
    if config.warm_start is None or not config.evaluation.untrained:
        return False
    return validation.is_missing("untrained", config, step=0, weights=model_sha256(config.model.path))


def _first_model(run: Run, config: RunConfig) -> ModelConfig:
    """Returns the model that training starts from."""
    if config.warm_start is None:
        return config.model
    return config.model.model_copy(update={"path": str(warm_start_folder(run))})


def _train(
    run: Run,
    roles: Roles,
    questions: QuestionTable,
    validation: Validation,
    tracker: TrackerFront,
    stop: StopRequest,
    *,
    verified: Path | None = None,
) -> None:
    """Trains from the newest checkpoint on, evaluates before and after, and exports the model."""
    with run.phase("launch"), waiting("loading the model into all roles"):
        roles.load_policy(_first_model(run, roles.config))
    say(f"all roles are up ({roles.plan})")
    roles.canary = _canary(roles.config, [questions[i] for i in range(min(NUM_CANARIES, len(questions)))])
    newest = newest_usable(run)
    position = Position() if newest is None else roles.learners.load(newest, verified=newest == verified)
    if taken_back := run.restart_at(position.step, num_updates=position.num_updates):
        say(taken_back)
    tracker.restart_at(position.step)
    roles.sync(position.step)
    reached("restored", step=position.step)
    if position.step or position.num_updates:
        before = validation.before()
    else:
        before = validation.evaluate(roles, label="before", step=0)
    learn(run, roles, questions, validation, position, tracker, stop)
    after = validation.evaluate(roles, label="after", step=run.state["num_steps"])
    _exports(run, roles).validated(after, step=run.state["num_steps"])
    write_trajectories(run.folder / "trajectories.parquet", [*before, *after])
    with run.phase("export"):
        reached("export")
        roles.learners.export(run.folder / "huggingface", source=roles.config.model.path)
        made_of = {"step": run.state["num_steps"], "weights": roles.weights_sha256}
        write_record(run.folder / "huggingface" / MADE_OF, made_of)


def _canary(config: RunConfig, questions: Sequence[Question]) -> list[list[int]]:
    """Returns the sequences that every sync scores: the prompts with which attempts at these questions begin."""
    tokenizer = load_tokenizer(config.model.path)
    prompts = [first_prompt(config, q, tokenizer=tokenizer) or tokenizer.encode_text(q.text) for q in questions]
    return canary_sequences(prompts, max_tokens=config.budget.context_tokens - 1)


def _exports(run: Run, roles: Roles) -> Exports:
    return Exports(run, roles.learners, source=roles.config.model.path, weights=lambda: roles.weights_sha256)


def learn(
    run: Run,
    roles: Roles,
    questions: QuestionTable,
    validation: Validation,
    position: Position,
    tracker: TrackerFront,
    stop: StopRequest | None = None,
) -> None:
    """Runs the training loop. Each step takes exactly `groups_per_step` groups; a checkpoint holds the groups of every
    step.

    It resumes from `position`, which a checkpoint holds.
    """
    config = roles.config
    stop = stop or StopRequest(config.grace_s)
    settings = config.model_dump(mode="json")
    do_what_is_due = partial(_do_what_is_due, roles=roles, validation=validation, exports=_exports(run, roles))
    if position.step and not position.num_updates:  # the run may have ended before this was done
        do_what_is_due(position.step)
    kept = KeptGroups.of(run).read(position)
    started = {group.id: group.started_at for group in kept}
    admission_name, admission = roles.new_admission(
        policy_version=position.step,
        adopted={key: position.step if version is None else version for key, version in started.items()},
    )
    groups = _remaining_groups(roles, questions, position, kept, admission=admission_name)
    collector = Collector(watched(groups, waited_for=roles.waited_for), admission, config.algorithm, adopted=kept)
    checkpoints = Checkpoints(run, roles, tracker, position=position, stop=stop, waiting=lambda: collector.waiting)
    with (
        _counted(run),
        closing(groups),
        checkpoints.kept(),
        Progress("train", total=config.num_steps, done=position.step) as progress,
    ):
        for step in range(position.step, config.num_steps):
            started = time.perf_counter()
            reached("collect", step=step)
            goes_on = step == position.step and bool(position.under_way)
            batch = collector.take(position.under_way) if goes_on else collector.next_step(policy_version=step)
            if batch is None:
                progress.note(
                    f"the questions are used up after step {step}: data.num_epochs is {config.data.num_epochs}"
                )
                break
            checkpoints.begin(batch)
            first = position.num_updates if goes_on else 0
            with _mismatch_on_record(run, tracker, step=step + 1):
                metrics = train_step(roles, batch, step=step, first=first, stop=stop)
            reached("learnt", step=step)
            collector.consumed(batch, policy_version=step + 1)
            metrics |= step_seconds(metrics, batch, total=time.perf_counter() - started)
            with stop.held_back():  # a step on record is not trained again
                checkpoints.log(metrics)
                if alarm := mismatch_alarm([metrics | {"step": step + 1}], settings):
                    progress.note(alarm)
                tracker.log_trajectories(batch.groups[: config.tracking.traces_per_step], step=step + 1)
                run.update(num_steps=step + 1)
                checkpoints.finish()
            do_what_is_due(step + 1)
            shown = [*(["reward"] if metrics["reward"] != metrics["em"] else []), "em", "tokens_per_second"]
            progress.advance(1, **{name: metrics[name] for name in shown})


@contextmanager
def _counted(run: Run) -> Iterator[None]:
    """Adds the seconds of the block to those of training, also when it fails; validation and exports count for
    themselves."""
    started, others = time.perf_counter(), sum(run.seconds.values())
    try:
        yield
    finally:
        others = sum(run.seconds.values()) - others
        run.add_seconds("train", time.perf_counter() - started - others)


def _do_what_is_due(step: int, *, roles: Roles, validation: Validation, exports: Exports) -> None:
    """Exports and evaluates the model after a step, if that is due."""
    exports.trained(step)
    every = roles.config.evaluation.every_steps
    if every and step % every == 0 and step < roles.config.num_steps:
        exports.validated(validation.evaluate(roles, label=f"step-{step:08d}", step=step), step=step)


@contextmanager
def _mismatch_on_record(run: Run, tracker: TrackerFront, *, step: int) -> Iterator[None]:
    """Logs a SamplingMismatch and writes the report with its alarm, since the run ends with it."""
    try:
        yield
    except SamplingMismatch as error:
        tracker.log_metrics({MISMATCH: error.mean}, step=step)
        write_report(run.folder)
        raise


def _remaining_groups(
    roles: Roles, questions: QuestionTable, position: Position, kept: Sequence[Group], *, admission: str
) -> Generator[Group, None, None]:
    """Streams the groups of the remaining steps, except those that were trained, dropped or `kept`."""
    config = roles.config
    spec = roles.driver_spec(sampling=config.sampling, group_size=config.algorithm.group_size, admission=admission)
    consumed = {*chain.from_iterable(position.trained), *position.dropped, *(group.id for group in kept)}
    num_groups = (config.num_steps - position.step) * config.algorithm.groups_per_step - len(kept)
    rows = TrainingRows(questions, config, skip=consumed, num_groups=num_groups)
    return stream_groups(spec, rows, references=roles.references)


def train_step(
    roles: Roles, batch: StepGroups, *, step: int, first: int = 0, stop: StopRequest | None = None
) -> dict[str, float]:
    """Makes one learner step, brings the new weights to every engine, and returns the metrics of both.

    The metrics of the learner are means over the tokens that it trained. An interrupted step resumes with its update
    number `first`. When `stop` was requested, the step is trained until the time is up, then raises Interrupted.
    """
    stop = stop or StopRequest(roles.config.grace_s)
    config = roles.config
    samples = [
        [sample for trajectory in group.trajectories for sample in to_samples(trajectory)] for group in batch.groups
    ]
    if config.algorithm.kl_reward_coef:
        rewards = {group.id: {t.id: t.reward for t in group.trajectories} for group in batch.groups}
        samples = [
            with_kl_in_reward(
                group,
                rewards[group[0].group_id],
                coef=config.algorithm.kl_reward_coef,
                normalize_std=config.algorithm.advantage == "grpo",
            )
            for group in samples
            if group
        ]
    with ThreadPoolExecutor(1) as beside, Timer() as learning:
        updates = [
            pack_step(
                update,
                num_ranks=config.learner.num_ranks,
                max_tokens=config.learner.max_tokens_per_micro_batch,
                aggregation=config.algorithm.aggregation,
                share_prefixes=config.learner.share_prefixes,
                skip_zero_advantages=config.algorithm.skips_zero_advantages,
            )
            for update in split_updates(samples, config.algorithm.updates_per_step, seed=f"{config.seed}:{step}")
        ]
        described = beside.submit(  # while the ranks work
            rollout_metrics, batch.groups, policy_version=step, growing=not config.has_memory
        )
        reached("learn", step=step)
        with stop.held_back():
            reports = roles.learn(updates, first=first, stop=stop)
    with Timer() as syncing:
        synced = roles.sync(step + 1)
    learner = {f"learner/{name}": value for name, value in step_metrics(reports).items()}
    seconds = {
        "seconds/learn": learning.seconds - learner.get("learner/reference_seconds", 0.0),
        "seconds/sync": syncing.seconds,
    }
    return described.result() | learner | synced | seconds | {"num_dropped_groups": len(batch.dropped)}


def step_seconds(metrics: dict[str, float], batch: StepGroups, *, total: float) -> dict[str, float]:
    """Splits the step's wall time by phase. The wait for groups is split by the seconds that their trajectories spent
    in each role. A reference on the learner's ranks scores after that wait."""
    generating = sum(context.generate_seconds for g in batch.groups for t in g.trajectories for context in t.contexts)
    searching = sum(context.search_seconds for g in batch.groups for t in g.trajectories for context in t.contexts)
    scoring = sum(group.reference_seconds * len(group.trajectories) for group in batch.groups)
    alive = scoring + sum(group.seconds * len(group.trajectories) for group in batch.groups)
    seconds = {
        "seconds/generate": batch.wait_seconds * generating / alive,
        "seconds/retrieve": batch.wait_seconds * searching / alive,
        "seconds/reference": batch.wait_seconds * scoring / alive + metrics.get("learner/reference_seconds", 0.0),
        "seconds/wait": batch.wait_seconds * max(0.0, 1 - (generating + searching + scoring) / alive),
    }
    known = sum(seconds.values()) + sum(value for name, value in metrics.items() if name.startswith("seconds/"))
    sampled = metrics["sampled_tokens"]
    return seconds | {"seconds/other": total - known, "seconds/step": total, "tokens_per_second": sampled / total}


class Timer:
    """`with Timer() as timer: ...`, then `timer.seconds`."""

    def __enter__(self) -> Timer:
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._started
