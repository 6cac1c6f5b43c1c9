"""A training run on 8 to 512 GPUs as discrete events: who idles, how stale tokens are, what the object store carries.

    python -m benchmarks.simulate_cluster [--preset memsearcher_qwen2.5-3b] [--gpu H100] [--steps 8] [key=value ...]

Nothing is measured here. The seconds of a token, a score, a learner step and a sync are those of
`mempipe/planning/costs.py`, and the admission of groups is the one that runs (`mempipe/actors/admission.py`); searches
take no time. Trajectories differ: the number of contexts is uniform and a message's length is Gamma distributed around
half of its limit. Ranks, engines and references grow with the number of GPUs, in shares that keep them equally busy.

Columns: seconds of a step, trained tokens a second and GPU, share of its time that engines and learner idle, versions
by which a token is older than the learner, and gigabytes a step through the object store. An engine idles while it has
no sequence at all.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from mempipe.actors.admission import Admission
from mempipe.config import RunConfig
from mempipe.engines.gpus import GPUS, Gpu
from mempipe.loader import load_config
from mempipe.planning.capacity import GIB, Shape, model_shape
from mempipe.planning.costs import DRIVER_S_PER_MILLION, Engine, Workload, engine_speed, step_costs, sync_seconds
from mempipe.planning.placement import Demand, Plan, plan

CONFIGS = Path(__file__).parents[1] / "jobs" / "configs"
SIZES = (8, 16, 32, 64, 128, 256, 512)
GROUP_BYTES_PER_TOKEN = 40  # five columns of 8 bytes; a group travels to the reference and from there to the driver
BATCH_BYTES_PER_TOKEN = 16  # ids and positions
WARM_UP_STEPS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="memsearcher_qwen2.5-3b")
    parser.add_argument("--gpu", choices=sorted(GPUS), default="H100")
    parser.add_argument("--steps", type=int, default=8, help=f"learner steps, of which {WARM_UP_STEPS} do not count")
    parser.add_argument("overrides", nargs="*", help="key=value of the preset")
    arguments = parser.parse_args()
    config, gpu = load_config(CONFIGS / f"{arguments.preset}.yaml", arguments.overrides), GPUS[arguments.gpu]
    shape = model_shape(config.model)
    assert shape is not None, f"the shape of {config.model.path} is not known here"
    print(f"{arguments.preset} on {arguments.gpu}: arithmetic, not measured")
    print("| GPUs | ranks, engines, references | s a step | tokens/s/GPU | engines idle | learner idle | staleness "
          "mean, most | store, GB a step |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    for num_gpus in SIZES:
        sized = balanced(config, shape, gpu, num_gpus)
        made = plan(sized, Demand.of_training(sized), [num_gpus], gpu_bytes=int(gpu.usable_gib * GIB))
        run = Simulation(sized, shape, made, gpu, num_steps=arguments.steps)
        run.go()
        print(run.row(num_gpus), flush=True)


def balanced(config: RunConfig, shape: Shape, gpu: Gpu, num_gpus: int) -> RunConfig:
    """Returns the config with the numbers of ranks, engines and references of the shortest step on so many GPUs."""

    def sized(ranks: int, references: int) -> RunConfig:
        return config.model_copy(
            update={
                "learner": config.learner.model_copy(update={"num_ranks": ranks}),
                "reference": config.reference.model_copy(update={"num_replicas": references}),
                "generation": config.generation.model_copy(update={"num_replicas": num_gpus - ranks - references}),
                "stream": config.stream.model_copy(update={"num_drivers": max(config.stream.num_drivers, num_gpus)}),
            }
        )

    def seconds(candidate: RunConfig) -> float:
        made = plan(candidate, Demand.of_training(candidate), [num_gpus], gpu_bytes=int(gpu.usable_gib * GIB))
        return step_costs(candidate, shape, made, gpu).total

    grain = max(1, num_gpus // 32)
    candidates = [
        sized(ranks, references)
        for ranks in range(grain, num_gpus - 1, grain)
        for references in range(1, min(num_gpus - ranks, 8 * grain), grain)
    ]
    return min(candidates, key=seconds)


def now(call: Coroutine[Any, Any, Any]) -> Any:
    """Returns the result of a coroutine that does not have to wait."""
    try:
        call.send(None)
    except StopIteration as result:
        return result.value
    raise AssertionError("it waits")


class Clock:
    """Events in the order of their time."""

    def __init__(self) -> None:
        self.time = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.time + seconds, self._count, event))

    def run(self, until: Callable[[], bool]) -> None:
        while self._events and not until():
            self.time, _, event = heapq.heappop(self._events)
            event()


@dataclass(slots=True)
class Message:
    """A completion: so many tokens after so long a prompt."""

    prompt: float
    tokens: float
    then: Callable[[int], None]
    """Called with the version that sampled it."""


class EngineReplica:
    """An engine whose sequences share its steps: all advance by a token in the same seconds."""

    def __init__(self, clock: Clock, speed: Engine, *, in_flight: bool) -> None:
        self.version, self.busy_seconds, self.most_waiting = 0, 0.0, 0
        self._clock, self._speed, self._in_flight = clock, speed, in_flight
        self._running: list[tuple[float, int, Message]] = []  # by the progress at which each is done
        self._waiting: deque[Message] = deque()
        self._progress, self._since, self._turn, self._count = 0.0, 0.0, 0, 0
        self._paused = False
        self._drained: Callable[[], None] | None = None

    @property
    def load(self) -> int:
        return len(self._running) + len(self._waiting)

    def add(self, message: Message) -> None:
        self._waiting.append(message)
        self._changed()

    def update(self, version: int, seconds: float, done: Callable[[], None]) -> None:
        """Takes new weights: at once with updates in flight, else when the completions under way have finished."""

        def take() -> None:
            self._clock.after(seconds, finish)

        def finish() -> None:
            self._advance()  # it stood still until now
            self.version, self._paused = version, False
            self._changed()
            done()

        self._advance()
        self._paused = True
        if self._in_flight or not self._running:
            take()
        else:
            self._drained = take
        self._changed()

    def _stands_still(self) -> bool:
        return self._paused and self._in_flight

    def _advance(self) -> None:
        """Brings the progress up to now."""
        passed, self._since = self._clock.time - self._since, self._clock.time
        if self._running and not self._stands_still():
            self._progress += passed / self._speed.step_seconds(len(self._running))
            self.busy_seconds += passed

    def _changed(self) -> None:
        self._advance()
        while self._waiting and not self._paused and len(self._running) < self._speed.most_sequences:
            message = self._waiting.popleft()
            # Reading the prompt delays the sequence by as many steps as fit into that time.
            delay = self._speed.prefill_seconds(message.prompt) / self._speed.step_seconds(len(self._running) + 1)
            self._count += 1
            heapq.heappush(self._running, (self._progress + delay + message.tokens, self._count, message))
        self.most_waiting = max(self.most_waiting, len(self._waiting))
        self._turn += 1
        if self._running and not self._stands_still():
            left = max(0.0, self._running[0][0] - self._progress)
            turn = self._turn
            self._clock.after(left * self._speed.step_seconds(len(self._running)), lambda: self._due(turn))

    def _due(self, turn: int) -> None:
        if turn != self._turn:  # something changed meanwhile
            return
        self._advance()
        end, _, message = heapq.heappop(self._running)
        self._progress = max(self._progress, end)
        message.then(self.version)
        self._changed()
        if not self._running and self._drained is not None:
            take, self._drained = self._drained, None
            take()


class Servers:
    """References: each scores one group at a time, in the order of their coming."""

    def __init__(self, clock: Clock, count: int) -> None:
        self._clock = clock
        self._free_at = [0.0] * count

    def score(self, seconds: float, then: Callable[[], None]) -> None:
        free_at = heapq.heappop(self._free_at)
        end = max(free_at, self._clock.time) + seconds
        heapq.heappush(self._free_at, end)
        self._clock.after(end - self._clock.time, then)


class Totals(NamedTuple):
    """Holds what had been done when a learner step was served."""

    seconds: float
    tokens: float
    learning: float
    sampling: float
    """Seconds of all engines in which they had a sequence."""


@dataclass(slots=True)
class PlayedGroup:
    """Counts a group's tokens, and keeps the version of every message."""

    left: int
    tokens: float = 0.0
    sampled: list[tuple[int, float]] = field(default_factory=list)


class Simulation:
    """A run of some steps."""

    def __init__(self, config: RunConfig, shape: Shape, made: Plan, gpu: Gpu, *, num_steps: int) -> None:
        self._config, self._work, self._num_steps = config, Workload.of(config), num_steps
        self._random = random.Random(0)
        self._clock = Clock()
        speed = engine_speed(config, shape, made, gpu, context_tokens=self._work.context_tokens)
        in_flight = config.generation.updates_in_flight
        self._engines = [EngineReplica(self._clock, speed, in_flight=in_flight) for _ in range(made.num_engines)]
        self._costs = step_costs(config, shape, made, gpu)
        self._references = len(made.seats("reference"))
        self._scoring = Servers(self._clock, self._references) if self._references else None
        self._sync = sync_seconds(config, shape, made, gpu)
        algorithm = config.algorithm
        self._admission = Admission(
            groups_per_step=algorithm.groups_per_step, max_off_policy_steps=algorithm.max_off_policy_steps
        )
        self._window = algorithm.groups_per_step * (algorithm.max_off_policy_steps + 1)
        self._started = self._consumed = self._version = 0
        self._groups: dict[str, PlayedGroup] = {}
        self._finished: list[str] = []
        self._learning = False
        self._learn_seconds = 0.0
        self._steps: list[Totals] = []
        self.staleness: list[float] = []
        self.most_stale = 0

    def go(self) -> None:
        self._start_groups()
        self._clock.run(until=lambda: len(self._steps) >= self._num_steps)

    def row(self, num_gpus: int) -> str:
        """Returns a line of the table: the seconds of the steps after the first ones."""
        before, last = self._steps[WARM_UP_STEPS - 1], self._steps[-1]
        count = len(self._steps) - WARM_UP_STEPS
        seconds, tokens, learning, sampling = (b - a for a, b in zip(before, last, strict=True))
        learner_idle, engines_idle = 1 - learning / seconds, 1 - sampling / seconds / len(self._engines)
        stale = fmean(self.staleness[WARM_UP_STEPS:])
        moved = tokens / count * (2 * GROUP_BYTES_PER_TOKEN + BATCH_BYTES_PER_TOKEN) / 1e9
        ranks = self._config.learner.num_ranks
        return (
            f"| {num_gpus} | {ranks}, {len(self._engines)}, {self._references} | {seconds / count:.0f} | "
            f"{tokens / seconds / num_gpus:.0f} | {engines_idle:.0%} | {learner_idle:.0%} | {stale:.2f}, "
            f"{self.most_stale} | {moved:.1f} |"
        )

    def _start_groups(self) -> None:
        while self._started < self._consumed + self._window:
            key = str(self._started)
            now(self._admission.ticket(key, self._started))
            self._started += 1
            size = self._config.algorithm.group_size
            self._groups[key] = PlayedGroup(left=size)
            for _ in range(size):
                messages = self._messages()
                self._play(key, messages, next(messages))

    def _messages(self) -> Iterator[tuple[float, float]]:
        """Returns (prompt tokens, sampled tokens) of every message of a trajectory."""
        work = self._work
        count = self._random.randint(1, max(1, round(2 * work.contexts - 1)))
        per_context = max(1, round(work.sampled_tokens / work.message_tokens))
        for _ in range(count * per_context):
            length = self._random.gammavariate(2.0, work.sampled_tokens / per_context / 2)
            yield (
                (work.context_tokens - work.sampled_tokens) / per_context,
                min(length, 2 * work.message_tokens),
            )

    def _play(self, key: str, messages: Iterator[tuple[float, float]], message: tuple[float, float]) -> None:
        prompt, tokens = message
        group = self._groups[key]

        def sampled(version: int) -> None:
            group.tokens += prompt + tokens
            group.sampled.append((version, tokens))
            following = next(messages, None)
            if following is not None:
                self._play(key, messages, following)
                return
            group.left -= 1
            if not group.left:
                self._score(key)

        engine = min(self._engines, key=lambda engine: engine.load)
        engine.add(Message(prompt=prompt, tokens=tokens, then=sampled))

    def _score(self, key: str) -> None:
        def scored() -> None:
            self._finished.append(key)
            self._learn()

        if self._scoring is None:
            scored()
            return
        seconds = self._costs.reference * self._references * self._groups[key].tokens / self._costs.tokens
        self._scoring.score(seconds, scored)

    def _learn(self) -> None:
        """Starts a step when the admission says that it may."""
        if self._learning or (chosen := now(self._admission.choose(self._finished))) is None:
            return
        self._learning = True
        self._finished = [key for key in self._finished if key not in set(chosen)]
        groups = [self._groups.pop(key) for key in chosen]
        tokens = sum(group.tokens for group in groups)
        seconds = self._costs.learn * tokens / self._costs.tokens
        self._learn_seconds += seconds
        ages = [(self._version - version, count) for group in groups for version, count in group.sampled]
        self.staleness.append(sum(age * count for age, count in ages) / sum(count for _, count in ages))
        if len(self._steps) >= WARM_UP_STEPS:
            self.most_stale = max(self.most_stale, *(age for age, _ in ages))
        driver = DRIVER_S_PER_MILLION * tokens / 1e6
        self._clock.after(driver + seconds, lambda: self._send(chosen, tokens))

    def _send(self, chosen: list[str], tokens: float) -> None:
        self._version += 1
        waiting = len(self._engines)

        def loaded() -> None:
            nonlocal waiting
            waiting -= 1
            if waiting:
                return
            now(self._admission.consume(chosen, policy_version=self._version))
            self._consumed += len(chosen)
            self._learning = False
            tokens_before = self._steps[-1].tokens if self._steps else 0.0
            sampling = sum(engine.busy_seconds for engine in self._engines)
            self._steps.append(Totals(self._clock.time, tokens_before + tokens, self._learn_seconds, sampling))
            self._start_groups()
            self._learn()

        for engine in self._engines:
            engine.update(self._version, self._sync, loaded)


if __name__ == "__main__":
    main()
