"""Questions per second of an evaluation: our stream against raw vLLM, and against the published harnesses' pool of
blocking threads.

    python -m benchmarks.evaluation_throughput [--questions 1000] [--rounds 3] [--run FOLDER] [--without-server]

The quickstart's world with a briefly warm-started model, or any finished run with its own questions, index and trained
weights; real engine and retriever.
"stream" is what `mempipe evaluate` does: Ray Data, drivers with many questions under way. "raw vLLM" samples as many
tokens after the same prompts, all of which are queued at once: it parses, searches and waits for nothing
(`benchmarks.rollout_throughput`). "threads" is a pool of 30
threads, each with one question that blocks on every call of the same engine actor. "threads, HTTP" is what
MemSearcher's and MEM1's evaluations do: the same pool, against a vLLM server of the same model, settings and threads.
All ask the same questions, greedily; they alternate, the first round does not count, and a ratio is the median over
rounds. Each idles while the others are measured.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import ray

from benchmarks.rollout_throughput import QUICKSTART, SETTINGS, of_run, raw_engine, recorded_calls, warm_started
from benchmarks.rows import Row, record, spread
from mempipe import environment
from mempipe.actors.cluster import connected
from mempipe.actors.handles import Handle
from mempipe.actors.launch import RolloutActors
from mempipe.actors.pools import GeneratorPool, RetrieverPool
from mempipe.actors.standing import launch_rollout_actors
from mempipe.agents.protocol import GenerateFn
from mempipe.config import RunConfig
from mempipe.data.qa import read_questions
from mempipe.engines.config import EndpointConfig
from mempipe.engines.endpoint import Endpoint
from mempipe.engines.tokenizer import load_tokenizer
from mempipe.loader import load_config
from mempipe.rollout import make_agent
from mempipe.runs import Run
from mempipe.streams.groups import stream_groups
from mempipe.types import Group, Question, Trajectory
from pipelines.prepare import prepare
from tools.vllm_server import vllm_server

NUM_THREADS = 30
NUM_IN_FLIGHT = 192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count")
    parser.add_argument("--run", help="folder of a finished run")
    parser.add_argument("--without-server", action="store_true", help="without the threads that ask a vLLM server")
    arguments = parser.parse_args()
    environment.prepare_process()
    with tempfile.TemporaryDirectory() as folder:
        run = None
        if arguments.run is not None:
            config = of_run(Path(arguments.run), {"stream": {"groups_in_flight": NUM_IN_FLIGHT}})
        else:
            sizes = [
                f"world.num_validation_questions={arguments.questions}",
                f"stream.groups_in_flight={NUM_IN_FLIGHT}",
            ]
            run = Run(load_config(QUICKSTART, [*SETTINGS, *sizes, f"output={folder}"]))
            config = prepare(run)
        with connected(config.ray_address, name=config.name) as namespace:
            config = config if run is None else warm_started(run, config, namespace)
            config = config.model_copy(update={"sampling": config.sampling.model_copy(update={"temperature": 0.0})})
            questions = read_questions(config.data.validation)[: arguments.questions]
            with ExitStack() as stack:
                engines = stack.enter_context(launch_rollout_actors(config, namespace))
                raw = stack.enter_context(raw_engine(config))
                url = "" if arguments.without_server else stack.enter_context(server_of(config))
                rounds = [measured(engines, raw, url, questions, number) for number in range(arguments.rounds + 1)][1:]
    print(f"{os.cpu_count()} cores, {len(questions)} questions, medians of {len(rounds)} rounds")
    for name in rounds[0]:
        print(f"{name:<16}{statistics.median(rates[name] for rates in rounds):8.1f} questions/s")
    unit, stream = "questions/s", [rates["stream"] for rates in rounds]
    for name, peer, of_peer, is_own in (
        ("evaluation", "raw vLLM, all queued", "raw vLLM", False),
        ("evaluation, same engine", f"{NUM_THREADS} threads", "threads", True),
    ):
        others = [rates[of_peer] for rates in rounds]
        record(Row(name=name, unit=unit, values=stream, peer=peer, of_peer=others, peer_is_own=is_own))
    for name in [name for name in rounds[0] if name != "stream"]:
        ratios = [rates["stream"] / rates[name] for rates in rounds]
        print(f"stream / {name}: {spread(ratios)}")


def server_of(config: RunConfig) -> AbstractContextManager[str]:
    return vllm_server(config.model, config.generation, context_tokens=config.budget.context_tokens)


def measured(
    engines: RolloutActors, raw: Handle, url: str, questions: Sequence[Question], number: int
) -> dict[str, float]:
    """Measures the questions per second of every contestant, in one round; without a `url` not over HTTP."""
    config, tokenizer = engines.config, load_tokenizer(engines.config.model.path)
    replicas, stops = list(engines.generators.values()), sorted(tokenizer.stop_token_ids)
    rate, groups = streamed(engines, questions, number)
    _, seconds = ray.get(raw.replay.remote(recorded_calls(groups), temperature=0.0))
    rates = {"stream": rate, "raw vLLM": len(questions) / seconds}

    def to_actor() -> GenerateFn:
        pool = GeneratorPool(replicas, config=config.generation, sampling=config.sampling, stop_token_ids=stops)
        return pool.generate

    rates["threads"] = threaded(engines, questions, to_actor)
    if url:
        endpoint = EndpointConfig(url=url, model="m")
        rates["threads, HTTP"] = threaded(
            engines, questions, lambda: Endpoint(endpoint, sampling=config.sampling, tokenizer=tokenizer).generate
        )
    return rates


def streamed(engines: RolloutActors, questions: Sequence[Question], number: int) -> tuple[float, list[Group]]:
    """Returns the rate, and what was answered. The clock starts when the first finished question was asked, so that the
    start of the stream's processes does not count."""
    spec = engines.driver_spec(sampling=engines.config.sampling, group_size=1)
    started, groups = 0.0, list[Group]()
    for group in stream_groups(spec, [(f"{number}/{question.id}", question) for question in questions]):
        started = started or time.perf_counter() - group.seconds
        groups.append(group)
    assert len(groups) == len(questions)
    return len(groups) / (time.perf_counter() - started), groups


def threaded(engines: RolloutActors, questions: Sequence[Question], make_generate: Callable[[], GenerateFn]) -> float:
    """Answers questions in threads, one after the other, each thread with a separate agent and connections."""
    config, own = engines.config, threading.local()
    tokenizer = load_tokenizer(config.model.path)

    def answer(question: Question) -> Trajectory:
        if not hasattr(own, "runner"):
            own.runner = asyncio.Runner()
            search = RetrieverPool(list(engines.retrievers.values()), config=config.retrieval).search
            own.agent = make_agent(config, tokenizer=tokenizer, generate=make_generate(), search=search)
        return own.runner.run(own.agent.rollout(question, trajectory_id=question.id, group_id=question.id, member=0))

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        started = time.perf_counter()
        trajectories = list(threads.map(answer, questions))
    assert len(trajectories) == len(questions)
    return len(trajectories) / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
