"""How a training run survives: checkpoints while it goes on and when it fails, and another start after a role is lost.

A run that fails saves what was learnt since its last checkpoint, unless the learner itself stopped in the middle of a
step. It goes on by itself when a role was lost (an engine, a rank, a node; `config.max_restarts` times), since another
start can do better then, and ends when it failed for a reason that would come again: a full disk, stale weights, a
gradient that is not finite, an error in code of the user's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from mempipe.actors.launch import LOST, Roles
from mempipe.beacons import reached
from mempipe.engines.checkpoint import Position
from mempipe.evaluation.rollout_metrics import rollout_metrics
from mempipe.progress import say
from mempipe.runs import Run
from mempipe.stream import StepGroups
from pipelines.tracker import TrackerFront


def with_restarts(run: Run, attempt: Callable[[], None]) -> None:
    """Makes the attempt again, up to `max_restarts` times, when a role was lost; every attempt resumes the run."""
    for restarts in range(run.config.max_restarts + 1):
        try:
            return attempt()
        except LOST as error:
            if restarts == run.config.max_restarts:
                raise
            reason = " ".join(str(error).split())
            print(f"restart {restarts + 1} of max_restarts {run.config.max_restarts}: {reason}", flush=True)


class Checkpoints:
    """The checkpoints of one training loop."""

    def __init__(self, run: Run, roles: Roles, tracker: TrackerFront, *, position: Position) -> None:
        """`position` is what the newest checkpoint holds, or the beginning."""
        self.position = position
        self._saved = position.step
        self._under_way: Position | None = None
        self._batch: StepGroups | None = None
        self._folder = run.folder / "checkpoints"
        self._config = roles.config
        self._learners = roles.learners
        self._tracker = tracker

    @contextmanager
    def kept(self) -> Iterator[Checkpoints]:
        """Saves the last position when the block ends, and also when it fails while the learner is sound."""
        try:
            yield self
        except BaseException as error:  # SystemExit of a SIGTERM and KeyboardInterrupt as well
            self._rescue(error)
            raise
        self.save()
        self._learners.finish_save()

    def begin(self, batch: StepGroups) -> None:
        """The learner is about to train on `batch`."""
        here, self._batch = self.position, batch
        self._under_way = replace(
            here,
            step=here.step + 1,
            trained=[*here.trained, [group.id for group in batch.groups]],
            dropped=[*here.dropped, *(group.id for group in batch.dropped)],
        )

    def finish(self) -> None:
        """The step was trained and logged. Saves it when a checkpoint is due."""
        assert self._under_way is not None, "finish without begin"
        self.position, self._under_way = self._under_way, None
        if self.position.step % self._config.checkpoint.every_steps == 0:
            self.save()

    def save(self) -> None:
        """Starts to write the position with the learner's state, if that is not done yet; training may go on."""
        if self._saved == self.position.step:
            return
        self._tracker.flush()  # a step that a resumed run will not repeat must be on record
        started = time.perf_counter()
        reached("checkpoint", step=self.position.step)
        self._learners.start_save(self._folder, self.position, keep=self._config.checkpoint.keep)
        self._saved = self.position.step
        self._tracker.log_metrics({"seconds/checkpoint": time.perf_counter() - started}, step=self.position.step)

    def _rescue(self, error: BaseException) -> None:
        """Saves the last whole step. What goes wrong here must not hide `error`, which goes on."""
        asked = isinstance(error, KeyboardInterrupt | SystemExit)  # the learner is sound, and perhaps at work
        if asked and self._under_way is not None:
            say("ending after the update under way; interrupt again to end without it")
        doing = "saved"
        try:
            done = self._learners.updates_done(finish=asked)
            steps, rest = divmod(done, self._config.algorithm.updates_per_step)
            learnt = self._under_way if not rest else None
            if rest:
                print(f"the learner stopped in the middle of step {steps + 1}; the last checkpoint stands", flush=True)
            elif learnt is not None and steps == learnt.step:
                self.position = learnt
            unsaved = not rest and steps == self.position.step != self._saved
            if unsaved:
                self.save()
            self._learners.finish_save()  # one that was under way as well
            if unsaved:
                reason = "it was told to" if asked else " ".join(str(error).split())
                print(f"saved step {steps} before the run ended: {reason}", flush=True)
            doing = "put on record"
            if self.position is learnt:
                self._log_batch()
        except Exception as second:
            print(f"step {self.position.step} could not be {doing}: {' '.join(str(second).split())}", flush=True)

    def _log_batch(self) -> None:
        """Puts on record what the step was trained on, since no resumed run repeats it; the learner's part is lost."""
        assert self._batch is not None, "a step is under way without its groups"
        metrics = rollout_metrics(
            self._batch.groups, policy_version=self.position.step - 1, growing=self._config.agent_spec.grows
        )
        self._tracker.log_metrics(metrics, step=self.position.step)
