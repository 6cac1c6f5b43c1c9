"""Questions per second of an evaluation: our stream against the published harnesses' pool of blocking threads, on the same engine.

    python -m benchmarks.evaluation_throughput [--questions 1000] [--rounds 3] [--run FOLDER]

The quickstart's world with a briefly warm-started model (or those of a finished run), real engine and retriever. "stream" is what
`mempipe evaluate` does: Ray Data, drivers with many questions under way. "threads" is what MemSearcher's and MEM1's evaluations do: a
pool of 30 threads, each with one question that blocks on every call. Both ask the same questions, greedily; they alternate, the
first round does not count, and the ratio is the median over rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ray

from benchmarks.rollout_throughput import QUICKSTART, SETTINGS, of_run
from mempipe.actors.launch import Engines, connected, launch_engines
from mempipe.actors.pools import GeneratorPool, RetrieverPool
from mempipe.agents import make_agent
from mempipe.cli import ENVIRONMENT
from mempipe.config import load_config
from mempipe.data.qa import read_questions
from mempipe.engines.tokenizer import load_tokenizer
from mempipe.runs import Run
from mempipe.stream import stream_groups
from mempipe.types import Question, Trajectory
from pipelines.prepare import prepare
from pipelines.warm_start import warm_start

NUM_THREADS = 30
NUM_IN_FLIGHT = 192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count")
    parser.add_argument("--run", help="folder of a finished run of the quickstart")
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory() as folder:
        sizes = [f"world.num_validation_questions={arguments.questions}", f"stream.groups_in_flight={NUM_IN_FLIGHT}"]
        config = load_config(QUICKSTART, [*SETTINGS, *sizes, f"output={folder}"])
        run = Run(config)
        if arguments.run is None:
            config = prepare(run)
        with connected(config.ray_address, name=config.name) as namespace:
            config = warm_start(run, config) if arguments.run is None else of_run(config, Path(arguments.run), weights="huggingface")
            config = config.model_copy(update={"sampling": config.sampling.model_copy(update={"temperature": 0.0})})
            questions = read_questions(config.data.validation)[: arguments.questions]
            with launch_engines(config, namespace) as engines:
                numbers = range(arguments.rounds + 1)
                rounds = [(streamed(engines, questions, number), threaded(engines, questions)) for number in numbers][1:]
    print(f"{os.cpu_count()} cores, {len(questions)} questions, medians of {len(rounds)} rounds")
    for name, column in (("stream", 0), (f"{NUM_THREADS} threads", 1)):
        print(f"{name:<12}{statistics.median(one[column] for one in rounds):8.1f} questions/s")
    ratios = [stream / threads for stream, threads in rounds]
    print(f"stream / threads: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}, aim 3)")


def streamed(engines: Engines, questions: Sequence[Question], number: int) -> float:
    """Timed from when the first question to be answered was asked, so that the start of the stream's processes does not count."""
    spec = engines.driver_spec(sampling=engines.config.sampling, group_size=1)
    started, count = 0.0, 0
    for group in stream_groups(spec, [(f"{number}/{question.id}", question) for question in questions]):
        started = started or time.perf_counter() - group.seconds
        count += 1
    assert count == len(questions)
    return count / (time.perf_counter() - started)


def threaded(engines: Engines, questions: Sequence[Question]) -> float:
    config = engines.config
    tokenizer = load_tokenizer(config.model.path)

    def answer(question: Question) -> Trajectory:
        """One question from beginning to end; the thread waits for every call."""
        generators = GeneratorPool(
            list(engines.generators.values()),
            config=config.generation,
            sampling=config.sampling,
            stop_token_ids=sorted(tokenizer.stop_token_ids),
        )
        search = RetrieverPool(list(engines.retrievers.values()), config=config.retrieval).search
        agent = make_agent(config, tokenizer=tokenizer, generate=generators.generate, search=search)
        return asyncio.run(agent.rollout(question, trajectory_id=question.id, group_id=question.id, member=0))

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        first = threads.submit(answer, questions[0])
        first.result()
        started = time.perf_counter()
        trajectories = list(threads.map(answer, questions[1:]))
    assert len(trajectories) == len(questions) - 1 and ray.is_initialized()
    return len(trajectories) / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
