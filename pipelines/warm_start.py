"""Supervised start: the model imitates trajectories (`pipelines.demonstrations`) before reinforcement learning, through
the same learner, packed, with LoRA or without; it resumes where it was interrupted.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Literal

from mempipe.actors.launch import Roles, learner_settings
from mempipe.actors.learner_group import LearnerGroup
from mempipe.beacons import reached
from mempipe.config import RunConfig, WarmStartConfig
from mempipe.data.trajectories import read_trajectories, write_trajectories
from mempipe.engines.checkpoint import Position, latest
from mempipe.engines.config import OptimizerConfig
from mempipe.progress import Progress, say, waiting
from mempipe.provenance import read_record, write_record
from mempipe.rl.packing import MicroBatch, pack_step
from mempipe.rl.samples import to_samples
from mempipe.runs import Run
from mempipe.settings import ConfigError
from mempipe.stop import StopRequest
from mempipe.types import Group, TrainingSample
from pipelines.demonstrations import Demonstrations, TaughtAttempts, demonstrations

CALL_S = 10.0
"""Seconds that a call of the learners should take: progress is shown after each."""
MIN_ROW = 1024  # tokens that a micro-batch may always hold
PARTS = ("clean", "noisy", "held_out")


def warm_start(run: Run, roles: Roles, shown: Demonstrations, stop: StopRequest) -> None:
    """Trains the model of the config on the demonstrations `shown`, and writes it to `warm_start_folder`.

    When `stop` was requested, the learner is saved and Interrupted is raised.
    """
    config, wanted = roles.config, roles.config.warm_start
    assert wanted is not None, "a warm start needs its section in the config"
    samples = _samples(shown, order=wanted.order, seed=config.seed)
    _check_lengths(samples, config)
    updates = list(_updates(samples, wanted.tokens_per_step))
    if faulty := _said_of_faults(shown, updates, wanted):
        say(faulty)
    settings = replace(
        learner_settings(config), objective="sft", optimizer=_optimizer(wanted), num_updates=len(updates)
    )
    with waiting("loading the model into the learner"):
        roles.start_learner(settings)
    roles.put_engines_to_sleep()
    _train(run, roles.learners, config, updates, held_out=_samples_of(shown.held_out), stop=stop)
    reached("warm_start.export")
    roles.learners.export(warm_start_folder(run), source=config.model.path)
    shutil.rmtree(_checkpoints(run), ignore_errors=True)


def warm_start_folder(run: Run) -> Path:
    """Returns the folder of the model that the warm start makes."""
    return run.folder / "warm_start"


def check_still_there(run: Run, config: RunConfig) -> None:
    """Raises ConfigError when the model that the warm start has made is gone and the checkpoints need it: an adapter
    belongs to it, and it is the reference. Another warm start would make another model."""
    folder = warm_start_folder(run)
    needed = config.model.lora_rank or config.algorithm.uses_reference
    if config.warm_start is not None and needed and not folder.exists() and latest(run.folder / "checkpoints"):
        raise ConfigError(
            f"{folder} is gone, the model from which the checkpoints of the run were trained; put it back, or give the "
            "run another `name`"
        )


def recorded_demonstrations(run: Run, config: RunConfig) -> Demonstrations:
    """Returns the demonstrations. They are kept as files (`mempipe trace` shows them), so that a resumed warm start
    uses the same ones, and a teacher's finished attempts as well while others are missing."""
    reached("demonstrations")
    folder = run.folder / "demonstrations"
    if not (folder / "held_out.parquet").exists():  # written last
        with waiting("writing the demonstrations of the warm start"):
            made = demonstrations(config, taught=TaughtAttempts(folder / "taught"))
        for part in PARTS:
            write_trajectories(folder / f"{part}.parquet", getattr(made, part))
        shutil.rmtree(folder / "taught", ignore_errors=True)
    return Demonstrations(**{part: read_trajectories(folder / f"{part}.parquet") for part in PARTS})


def _said_of_faults(shown: Demonstrations, updates: Sequence[Sequence[TrainingSample]], wanted: WarmStartConfig) -> str:
    """Says from which update on the demonstrations are faulty, where the loss rises; "" where none are or all are
    mixed."""
    if not (wanted.scripted and shown.noisy and wanted.order == "noisy_last"):
        return ""
    num_clean = len(_samples_of(shown.clean))
    ends = accumulate(len(update) for update in updates)
    first = next((number for number, end in enumerate(ends, start=1) if end > num_clean), len(updates))
    return (
        f"the last {len(shown.noisy):,} demonstrations are faulty on purpose (warm_start.noise): from update {first} "
        f"of {len(updates)} on the loss rises, and reinforcement learning has to undo what they teach"
    )


def _train(
    run: Run,
    learners: LearnerGroup,
    config: RunConfig,
    updates: Sequence[Sequence[TrainingSample]],
    *,
    held_out: Sequence[TrainingSample],
    stop: StopRequest,
) -> None:
    """Trains from the newest checkpoint on. Losses go to warm_start.json: one per update, and the held-out ones."""
    wanted, file = config.warm_start, run.folder / "warm_start.json"
    assert wanted is not None, "a warm start needs its section in the config"
    position = learners.restore(_checkpoints(run)) or Position()
    losses: list[float] = []
    judged: list[dict[str, float]] = []
    if position.step:
        mends = f"delete {_checkpoints(run)} to begin the warm start again"
        kept = read_record(file, mends=mends, losses=list, held_out=list)
        losses = kept["losses"][: position.step]
        judged = [each for each in kept["held_out"] if each["updates"] <= position.step]
        if len(losses) < position.step:
            raise ConfigError(f"{file} is damaged (it lacks losses of the {position.step} updates done); {mends}")
    at_once = 1
    with Progress("warm start", total=len(updates), done=len(losses)) as progress:
        while len(losses) < len(updates):
            done, started = len(losses), time.monotonic()
            reached("warm_start", updates=done)
            end = min(done + at_once, (done // wanted.checkpoint_every + 1) * wanted.checkpoint_every)
            packed = [_packed(batch, config, num_ranks=len(learners.ranks)) for batch in updates[done:end]]
            with stop.held_back():
                reports = learners.step(packed, stop=stop)
                at_once = max(1, int(len(reports) * CALL_S / (time.monotonic() - started)))
                losses += [report["loss"] for report in reports]
                numbers = {"loss": sum(losses[done:]) / len(reports)}
                is_due = len(losses) % wanted.checkpoint_every == 0 or len(losses) == len(updates)
                if is_due and held_out and not stop.requested:
                    loss = _loss(learners, held_out, temperature=config.sampling.temperature)
                    judged.append({"updates": len(losses), "loss": loss})
                    numbers["held_out_loss"] = judged[-1]["loss"]
                if is_due or stop.requested:
                    write_record(file, {"losses": losses, "held_out": judged})
                    learners.save(_checkpoints(run), Position(step=len(losses)), keep=1)
            progress.advance(len(reports), **numbers)


def _loss(learners: LearnerGroup, samples: Sequence[TrainingSample], *, temperature: float) -> float:
    """Returns the mean -logprob of the loss tokens, at the temperature at which the learner trains."""
    rows = learners.score([sample.token_ids for sample in samples], temperature=temperature)
    kept = [
        -value
        for row, sample in zip(rows, samples, strict=True)
        for value, mask in zip(row, sample.loss_mask[1:], strict=True)
        if mask
    ]
    return sum(kept) / len(kept)


def _checkpoints(run: Run) -> Path:
    return run.folder / "warm_start_checkpoints"


def _samples(shown: Demonstrations, *, order: Literal["noisy_last", "mixed"], seed: int) -> list[TrainingSample]:
    """Returns the contexts, shuffled: the clean ones before the noisy ones, or all among each other."""
    samples = []
    parts = [shown.clean, shown.noisy] if order == "noisy_last" else [[*shown.clean, *shown.noisy]]
    for groups in parts:
        part = _samples_of(groups)
        random.Random(seed).shuffle(part)
        samples += part
    return samples


def _samples_of(groups: Sequence[Group]) -> list[TrainingSample]:
    """Returns every context once, and all of them alike: a recall's own advantage is that of learning by reward."""
    return [
        replace(sample, advantage=1.0)
        for group in groups
        for trajectory in group.trajectories
        for sample in to_samples(trajectory)
    ]


def _optimizer(wanted: WarmStartConfig) -> OptimizerConfig:
    return OptimizerConfig(
        lr=wanted.lr, schedule="cosine", warmup_steps=wanted.warmup_steps, min_lr_ratio=0.05, betas=(0.9, 0.98)
    )


def _updates(samples: Sequence[TrainingSample], tokens_per_step: int) -> Iterator[list[TrainingSample]]:
    """Yields the samples in order, cut where an update has its tokens."""
    batch: list[TrainingSample] = []
    num_tokens = 0
    for sample in samples:
        batch.append(sample)
        num_tokens += len(sample.token_ids)
        if num_tokens >= tokens_per_step:
            yield batch
            batch, num_tokens = [], 0
    if batch:
        yield batch


def _check_lengths(samples: Sequence[TrainingSample], config: RunConfig) -> None:
    """Raises ConfigError for contexts that no micro-batch holds, as those recorded under a larger budget may be."""
    most = max(config.learner.max_tokens_per_micro_batch, MIN_ROW)
    longest = max(samples, key=lambda sample: len(sample.token_ids))
    if len(longest.token_ids) > most:
        raise ConfigError(
            f"warm_start: a context of trajectory {longest.trajectory_id} has {len(longest.token_ids)} tokens and does "
            f"not fit learner.max_tokens_per_micro_batch {config.learner.max_tokens_per_micro_batch}; raise it to at "
            f"least {len(longest.token_ids)}, or leave the trajectory out"
        )


def _packed(samples: Sequence[TrainingSample], config: RunConfig, *, num_ranks: int) -> list[list[MicroBatch]]:
    assert config.warm_start is not None, "a warm start needs its section in the config"
    most, longest = config.learner.max_tokens_per_micro_batch, max(len(sample.token_ids) for sample in samples)
    max_tokens = max(min(max(config.warm_start.tokens_per_step, longest), most), MIN_ROW)
    share = config.learner.share_prefixes
    return pack_step(samples, num_ranks=num_ranks, max_tokens=max_tokens, aggregation="token", share_prefixes=share)
