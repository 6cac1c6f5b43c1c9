"""What a training step costs the process that drives it: from finished groups to micro-batches at the ranks.

    python -m benchmarks.driver_step [--groups 256] [--group-size 5] [--contexts 3] [--tokens 3900] [--ranks 8]
        [--rounds 1] [--profile]

The step is synthetic and has the size of the published runs: 256 x 5 trajectories of three contexts of 3,900 tokens,
15 million tokens, scored by the reference, with ten passages for every search. Everything runs in one process on one
core. Nothing is generated, searched or trained, and Ray's part is a copy of every buffer, which is what its object
store makes of them.

`groups` to `hand over` come one after the other before the ranks can start; the metrics of the rollouts are worked out
while the ranks learn.
"""

from __future__ import annotations

import argparse
import cProfile
import pickle
import pstats
import resource
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pyarrow as pa

from benchmarks.machine import copy_seconds
from benchmarks.rows import Row, record
from mempipe.data.trajectories import groups_to_table, table_to_groups
from mempipe.evaluation.rollout_metrics import rollout_metrics
from mempipe.rl.advantages import check_group
from mempipe.rl.packing import MicroBatch, pack_step, split_updates
from mempipe.rl.samples import to_samples
from mempipe.types import Context, EndReason, Group, Passage, Question, Search, TrainingSample, Trajectory

T = TypeVar("T")
VOCAB = 151_936
NUM_PASSAGES, PASSAGE_WORDS = 10, 100
ACTION, MEMORY = 200, 250  # sampled tokens of a context


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=256)
    parser.add_argument("--group-size", type=int, default=5)
    parser.add_argument("--contexts", type=int, default=3, help="of a trajectory")
    parser.add_argument("--tokens", type=int, default=3900, help="of a context")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--profile", action="store_true", help="print where the seconds go, function by function")
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    tables = [groups_to_table([make_group(rng, i, arguments)]) for i in range(arguments.groups)]
    before = resident_gib()
    profile = cProfile.Profile()
    if arguments.profile:
        profile.enable()
    steps = [Step(num_ranks=arguments.ranks, group_size=arguments.group_size) for _ in range(arguments.rounds)]
    for step in steps:
        step.run(tables)
    if arguments.profile:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(20)
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    for step in steps:
        step.report(peak_gib=peak_gib, before_gib=before)
    row = Row(
        name="driver, a million tokens",
        unit="s",
        values=[step.seconds_per_million for step in steps],
        less_is_better=True,
        limit="a copy in memory",
        of_limit=[copy_seconds(round(step.num_bytes / step.num_tokens * 1e6)) for step in steps],
    )
    record(row)


class Step:
    """The driver's part of one step, with a clock on every phase."""

    def __init__(self, *, num_ranks: int, group_size: int) -> None:
        self._num_ranks, self._group_size = num_ranks, group_size
        self._seconds: dict[str, float] = {}
        self.num_tokens = self.num_bytes = 0
        """Of the micro-batches that are handed over."""

    def run(self, tables: list[pa.Table]) -> None:
        groups = self._timed("groups", lambda: self._groups(tables))
        samples = self._timed("samples", lambda: [[s for t in g.trajectories for s in to_samples(t)] for g in groups])
        ranks = self._timed("packing", lambda: self._packed(samples))
        handed_over = self._timed("hand over", lambda: [self._copied(batches) for batches in ranks])
        self._timed("metrics", lambda: rollout_metrics(groups, policy_version=1))
        self.num_tokens = sum(batch.num_tokens for batches in ranks for batch in batches)
        self.num_bytes = sum(len(buffer) for buffers in handed_over for buffer in buffers)

    @property
    def seconds_per_million(self) -> float:
        """Returns the seconds before the ranks can start, for each million tokens."""
        critical = sum(seconds for name, seconds in self._seconds.items() if name != "metrics")
        return critical / self.num_tokens * 1e6

    def report(self, *, peak_gib: float, before_gib: float) -> None:
        """Prints the seconds of every phase, and the memory that the step took on top of its tables."""
        for name, seconds in self._seconds.items():
            print(f"{name:<26}{seconds:>8.2f} s")
        per_million = self.seconds_per_million
        print(f"{'before the ranks start':<26}{per_million * self.num_tokens / 1e6:>8.2f} s")
        print(f"{'per million tokens':<26}{per_million:>8.3f} s of {self.num_tokens:,} tokens")
        print(f"{'memory':<26}{peak_gib:>8.2f} GiB, of them {before_gib:.2f} before the step")

    def _timed(self, name: str, work: Callable[[], T]) -> T:
        started = time.process_time()
        result = work()
        self._seconds[name] = time.process_time() - started
        return result

    def _groups(self, tables: list[pa.Table]) -> list[Group]:
        groups = [group for table in tables for group in table_to_groups(table)]
        for group in groups:
            check_group(group, group_size=self._group_size)
        return groups

    def _packed(self, samples: list[list[TrainingSample]]) -> list[list[MicroBatch]]:
        (update,) = split_updates(samples, 1, seed="0")
        return pack_step(update, num_ranks=self._num_ranks, max_tokens=16384, aggregation="token")

    @staticmethod
    def _copied(batches: list[MicroBatch]) -> list[bytes]:
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(batches, protocol=5, buffer_callback=buffers.append)
        return [head, *(bytes(buffer.raw()) for buffer in buffers)]


def make_group(rng: np.random.Generator, index: int, arguments: argparse.Namespace) -> Group:
    """Makes a finished group, scored by the reference."""
    name = f"0/q{index}"
    trajectories = [
        Trajectory(
            id=f"{name}/{member}",
            group_id=name,
            member=member,
            contexts=[make_context(rng, i, arguments.tokens) for i in range(arguments.contexts)],
            end_reason=EndReason.ANSWERED,
            answer="an answer",
            reward=float(rng.random()),
            advantage=float(rng.normal()),
        )
        for member in range(arguments.group_size)
    ]
    question = Question(id=f"q{index}", text="a question", golden_answers=["an answer"])
    return Group(id=name, question=question, trajectories=trajectories, seconds=1.0)


def make_context(rng: np.random.Generator, index: int, num_tokens: int) -> Context:
    """Makes a context: prompt, action, observation and memory; loss on action and memory."""
    prompt = num_tokens // 4
    observation = num_tokens - prompt - ACTION - MEMORY
    mask = np.repeat([0, 1, 0, 1], [prompt, ACTION, observation, MEMORY])
    logprobs = np.where(mask, rng.normal(-0.5, 0.3, num_tokens), 0.0)
    words = rng.integers(0, 5000, (NUM_PASSAGES, PASSAGE_WORDS))
    passages = [
        Passage(id=f"{row[0]}", title=f"title {row[0]}", text=" ".join(f"word{word}" for word in row), score=0.5)
        for row in words.tolist()
    ]
    return Context(
        index=index,
        token_ids=rng.integers(0, VOCAB, num_tokens).tolist(),
        loss_mask=mask.tolist(),
        logprobs=logprobs.tolist(),
        policy_versions=(mask - 1).tolist(),
        num_prompt_tokens=prompt,
        num_question_tokens=20,
        num_memory_tokens=MEMORY,
        num_observation_tokens=observation,
        action="a thought and a call " * 40,
        searches=[Search(query="a query", num_passages=NUM_PASSAGES, passages=passages, snapshot="s")],
        memory_before="what is known " * 60,
        memory_after=" ".join(passage.text[:120] for passage in passages),
        num_new_memory_tokens=MEMORY,
        ref_logprobs=(logprobs - 0.01).tolist(),
    )


def resident_gib() -> float:
    """Returns the memory that this process holds now, in GiB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**30


if __name__ == "__main__":
    main()
