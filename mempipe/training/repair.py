"""Keeps a run alive: checkpoints while it runs and when it fails, and a restart after a role is lost.

A run that fails or is interrupted saves the learner and the finished groups, unless the learner itself failed in the
middle of a step. It restarts by itself when a role was lost (an engine, a rank, a node; `config.max_restarts` times an
hour), since a restart can succeed then. It ends after a failure that would occur again: a full disk, stale weights,
engines that compute other log-probs, a gradient that is not finite, an error in user-defined code.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from mempipe.actors.launch import Roles
from mempipe.actors.lost import (
    FAULTS_OF_RAY,
    ClusterLost,
    LaunchError,
    LearnerFailed,
    LearnerLost,
    is_lost,
    one_line,
)
from mempipe.beacons import reached
from mempipe.data.trajectories import read_trajectories, write_trajectories
from mempipe.engines.checkpoint import Position, checkpoints, position_of
from mempipe.engines.proof import CanaryFailed, SamplingMismatch, StaleWeights
from mempipe.evaluation.rollout_metrics import rollout_metrics
from mempipe.progress import say
from mempipe.runs import Run
from mempipe.settings import ConfigError
from mempipe.stop import StopRequest
from mempipe.streams.groups import StepGroups
from mempipe.training.tracker_front import TrackerFront
from mempipe.types import Group

T = TypeVar("T")
HOUR_S = 3600.0
LONGEST_PAUSE_S = 60.0
OF_ENGINES = (SamplingMismatch, StaleWeights, CanaryFailed)
"""Errors that say that engines do not sample as the learner believes: no group of theirs is trained on."""


class Supervisor:
    """Repeats an attempt when a role was lost. Every attempt resumes from the run's folder."""

    def __init__(self, max_restarts: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`max_restarts` are those within an hour: a run of weeks may lose more in all."""
        self._max_restarts = max_restarts
        self._clock = clock
        self._restarts: deque[float] = deque()
        self._has_started = False

    def attempt(self, work: Callable[[], T]) -> T:
        """Returns what `work` returns.

        A ConfigError of the first attempt passes through. After a restart the settings are known to be right, so the
        supervisor waits for the mount or node that they name. Raises LaunchError with one line when the restarts are
        used up.
        """
        pause = 0.0
        while True:
            try:
                return work()
            except (ConfigError, RuntimeError, *FAULTS_OF_RAY) as error:
                came_later = isinstance(error, ConfigError) and self._has_started
                if not came_later and not is_lost(error):
                    if isinstance(error, FAULTS_OF_RAY):
                        raise LaunchError(one_line(error)) from error
                    raise
                pause = min(2 * pause or 5.0, LONGEST_PAUSE_S) if came_later else 0.0
                self._restart(error)
            if pause:
                time.sleep(pause)

    def _restart(self, error: BaseException) -> None:
        """Counts one restart. Raises LaunchError when there were too many."""
        now = self._clock()
        while self._restarts and now - self._restarts[0] > HOUR_S:
            self._restarts.popleft()
        if len(self._restarts) == self._max_restarts:
            raise LaunchError(
                f"{one_line(error)}; max_restarts is {self._max_restarts} an hour. What was saved is kept, and the "
                "same command with --resume continues"
            ) from error
        self._restarts.append(now)
        self._has_started = True
        say(f"restart {len(self._restarts)} of max_restarts {self._max_restarts} an hour: {one_line(error)}")


class KeptGroups:
    """Finished groups of a run that ended before a step took them; the run that resumes from there trains on them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def of(cls, run: Run) -> KeptGroups:
        return cls(run.folder / "kept_groups")

    def write(self, position: Position, groups: Sequence[Group]) -> None:
        """Keeps these groups, and no others, for the run that continues at `position`."""
        if groups:
            write_trajectories(self._file(position), groups)
        else:
            self._file(position).unlink(missing_ok=True)

    def read(self, position: Position) -> list[Group]:
        """Returns the groups that were kept at `position`; a file that cannot be read is reported, and its groups are
        played again."""
        file = self._file(position)
        if not file.exists():
            return []
        try:
            return read_trajectories(file)
        except ConfigError as error:
            say(f"{file} cannot be read ({one_line(error)}); its groups are played again")
            return []

    def clear(self, positions: Iterable[Position]) -> None:
        """Removes all groups but those of `positions`, from which a run may still continue."""
        needed = {self._file(position) for position in positions}
        for file in self._folder.glob("step-*.parquet"):
            if file not in needed:
                file.unlink(missing_ok=True)

    def _file(self, position: Position) -> Path:
        return self._folder / f"step-{position.step:08d}-{position.num_updates}.parquet"


def newest_usable(run: Run) -> Path | None:
    """Returns the newest checkpoint that the run can resume from; None when there is none.

    One that was saved between two updates of a step needs the groups of that step. It is of no use to a run that ends
    before that step: what the run exports and evaluates is the policy after a whole step.
    """
    for path in reversed(checkpoints(run.folder / "checkpoints")):
        position = position_of(path)
        if position.num_updates and position.step >= run.config.num_steps:
            say(
                f"{path} was saved within step {position.step + 1}, and num_steps is {run.config.num_steps}; the "
                "checkpoint before it is taken"
            )
            continue
        if not {*position.under_way} - {group.id for group in KeptGroups.of(run).read(position)}:
            return path
        say(
            f"{path} was saved within step {position.step + 1}, whose groups are gone; "
            "the checkpoint before it is taken"
        )
    return None


class Checkpoints:
    """The checkpoints of one training loop."""

    def __init__(
        self,
        run: Run,
        roles: Roles,
        tracker: TrackerFront,
        *,
        position: Position,
        stop: StopRequest | None = None,
        waiting: Callable[[], list[Group]] = list,
    ) -> None:
        """`position` is what the newest checkpoint holds, or the beginning; `waiting` returns the finished groups that
        no step took."""
        self.position = position
        self._saved: Position | None = position
        self._under_way: Position | None = None
        self._batch: StepGroups | None = None
        self._is_logged = False
        self._folder = run.folder / "checkpoints"
        self._kept = KeptGroups.of(run)
        self._config = roles.config
        self._learners = roles.learners
        self._tracker = tracker
        self._stop = stop or StopRequest(roles.config.grace_s)
        self._waiting = waiting

    @contextmanager
    def kept(self) -> Iterator[Checkpoints]:
        """Saves the last position when the block ends, and also when it fails while the learner is sound."""
        try:
            yield self
            self.save()
            self._learners.finish_save()
        except BaseException as error:  # Interrupted as well
            if not isinstance(error, ClusterLost):
                self._rescue(error)
            raise

    def begin(self, batch: StepGroups) -> None:
        """Records the position that `finish` will commit; called before the learner trains on `batch`."""
        here, self._batch = self.position, batch
        self._under_way = replace(
            here,
            step=here.step + 1,
            trained=[*here.trained, [group.id for group in batch.groups]],
            dropped=[*here.dropped, *(group.id for group in batch.dropped)],
            num_updates=0,
            under_way=[],
        )
        self._is_logged = False

    def log(self, metrics: Mapping[str, float]) -> None:
        """Logs the metrics of the step that was trained."""
        self._is_logged = True  # first: an interruption of this call must not log the step twice
        self._tracker.log_metrics(metrics, step=self.position.step + 1)

    def finish(self) -> None:
        """Saves the step, which was trained and logged, when a checkpoint is due, or when the last one could not be
        written: a disk that was full for a while may cost a checkpoint, never the run."""
        assert self._under_way is not None, "finish without begin"
        self.position, self._under_way = self._under_way, None
        if self.position.step % self._config.checkpoint.every_steps == 0:
            self.save()
        elif self._learners.save_failed():
            self._finish_save_in_flight()
            self.save()

    def save(self) -> None:
        """Starts to write the position with the learner's state, if that is not done yet; training may continue."""
        if self._saved == self.position:
            return
        self._tracker.flush()  # a step that a resumed run will not repeat must be on record
        started = time.perf_counter()
        reached("checkpoint", step=self.position.step)
        keep = self._config.checkpoint.keep
        if self.position.num_updates:  # the last whole step stays: for exports, and should the groups be lost
            keep += 1 + self._num_within_steps()
        self._learners.start_save(self._folder, self.position, keep=keep)
        self._saved = self.position
        # The new checkpoint may yet fail to be written, so those before it keep what they need.
        self._kept.clear([self.position, *map(position_of, checkpoints(self._folder))])
        self._tracker.log_metrics({"seconds/checkpoint": time.perf_counter() - started}, step=self.position.step)

    def _num_within_steps(self) -> int:
        """Counts the checkpoints between two updates of a step, by their names."""
        updates = [int(path.name.removeprefix("step-")) for path in checkpoints(self._folder)]
        return sum(bool(done % self._config.algorithm.updates_per_step) for done in updates)

    def _rescue(self, error: BaseException) -> None:
        """Saves the last whole step, or the update after which the run was asked to end, and keeps the finished groups.
        A second error here must not hide `error`, which is raised afterwards."""
        asked = self._stop.requested or isinstance(error, KeyboardInterrupt | SystemExit)  # the learner is sound
        if asked and self._under_way is not None:
            say("ending after the update in flight; interrupt again to end without it")
        doing = "saved"
        try:
            done = self._learners.updates_done(finish=asked)
            steps, rest = divmod(done, self._config.algorithm.updates_per_step)
            learnt = self._under_way if not rest else None
            if rest and asked and self._batch is not None:
                self.position = self._between_updates(rest, self._batch)
            elif rest and (steps, rest) != (self.position.step, self.position.num_updates):
                say(f"the learner stopped during step {steps + 1}; nothing new was saved: resume the last checkpoint")
            elif learnt is not None and steps == learnt.step:
                self.position = learnt
            is_sound = (steps, rest) == (self.position.step, self.position.num_updates)
            self._finish_save_in_flight()
            unsaved = is_sound and self._saved != self.position
            if rest and unsaved:  # a checkpoint within a step is of no use without the groups of the step
                self._keep_groups(error)
            if unsaved:
                self.save()
                self._learners.finish_save()
                what = f"step {steps}" + (f" and {rest} updates of the next one" if rest else "")
                say(f"saved {what} before the run ended: {'it was told to' if asked else one_line(error)}")
            doing = "put on record"
            if self.position is learnt and not self._is_logged:
                self._log_batch()
            doing = "kept with its groups"
            if is_sound:
                self._keep_groups(error)
        except Exception as second:  # of any kind: `error` must reach the user
            say(f"step {self.position.step} could not be {doing}: {one_line(second)}")

    def _finish_save_in_flight(self) -> None:
        """Waits for the checkpoint that was begun before. If it cannot be written, the next one still may: the disk was
        full at that moment."""
        try:
            self._learners.finish_save()
        except LearnerLost:
            raise
        except LearnerFailed as failure:
            say(one_line(failure))
            self._saved = None

    def _between_updates(self, done: int, batch: StepGroups) -> Position:
        """Returns the position after `done` updates of the step that trains on `batch`."""
        return replace(
            self.position,
            num_updates=done,
            under_way=[group.id for group in batch.groups],
            dropped=[*self.position.dropped, *(group.id for group in batch.dropped)],
        )

    def _keep_groups(self, error: BaseException) -> None:
        """Keeps the finished groups, without those with which the next run would end by the same error."""
        unfinished = self._batch.groups if self._batch is not None and self._under_way is not None else []
        waiting = self._waiting()
        needed = {*self.position.under_way}
        if isinstance(error, OF_ENGINES) and not needed:
            unfinished, waiting = [], []
        elif isinstance(error, LearnerFailed) and not isinstance(error, LearnerLost) and not needed:
            unfinished = []
        trained = {*self.position.trained[-1]} if self.position.trained else set()
        groups = [group for group in [*unfinished, *waiting] if group.id not in trained]
        if needed <= {group.id for group in groups}:  # else those of the last start are still there
            self._kept.write(self.position, groups)

    def _log_batch(self) -> None:
        """Logs rollout metrics and trajectories of the interrupted step, which a resumed run does not repeat. Its
        learner metrics are lost."""
        assert self._batch is not None, "a step is in flight without its groups"
        metrics = rollout_metrics(
            self._batch.groups, policy_version=self.position.step - 1, growing=not self._config.has_memory
        )
        self._tracker.log_metrics(metrics, step=self.position.step)
