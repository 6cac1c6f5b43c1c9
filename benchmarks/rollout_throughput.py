"""What the agent loop costs on top of the engine, and what it gains over a loop in lock-step.

    python -m benchmarks.rollout_throughput [--groups 16] [--steps 6] [--rounds 3] [--skewed 384] [--run FOLDER]

The quickstart's world with a briefly warm-started model, or any finished run with its own questions, index and trained
weights; the real retriever, one engine.

1. Cost. A round is `--steps` steps of `--groups` groups of 8 trajectories through the real chain (Ray Data stream,
   Driver, RetrieverActor, GeneratorActor), until the collector has all of them, scored. The groups of the next step
   are always under way as well (max_off_policy_steps 1), as in training. The three steps before do not count: two were
   finished while the engine emptied after the last round, and one fills it again. Every prompt and the number of tokens
   sampled after it are on record. Raw vLLM (`LLM.generate` in a process of its own, log-probs on) then samples as many
   tokens after the same prompts: all requests queued at once, the first calls of all trajectories first, stop ids
   ignored. It waits for no search, no parsing and no earlier call, and its batch is always full. Questions are new in
   every round.
2. Gain. The published rollout lets all trajectories of a batch take every turn together, so each call waits for the
   slowest. "agent, in lock-step" does so with the questions of 1, step by step. "Skewed" are scripted trajectories of 1
   to 6 turns, each with two calls of 4 to 64 tokens (uniform) and a real search between them: free, a new one starts
   when one ends; in lock-step they go batch after batch. Engine and number of trajectories in flight are the same.
   `--skewed 0` leaves them out.

Contestants alternate within each round, the first round does not count, and ratios are medians over rounds. On a busy
machine the seconds of several processes suffer more than those of one: look at the CPU seconds, which are those of all
processes together.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import ray

from benchmarks.rows import Row, record, spread
from mempipe import environment
from mempipe.actors.admission import Admission
from mempipe.actors.cluster import connected
from mempipe.actors.generator import GeneratorActor
from mempipe.actors.handles import Handle, start_actor
from mempipe.actors.launch import MAX_CALLS, WEIGHT_STORE, launch
from mempipe.actors.pools import GeneratorPool, RetrieverPool
from mempipe.actors.retriever import RetrieverActor
from mempipe.actors.weight_store import WeightStore
from mempipe.agents.protocol import GenerateFn, SearchFn
from mempipe.config import RunConfig
from mempipe.data.qa import read_questions
from mempipe.engines.config import ModelConfig
from mempipe.engines.tokenizer import load_tokenizer
from mempipe.evaluation.suite import EvaluatedRun, run_config
from mempipe.loader import load_config
from mempipe.rollout import make_agent
from mempipe.runs import Run
from mempipe.stop import StopRequest
from mempipe.streams.groups import Collector, DriverSpec, StepGroups, stream_groups
from mempipe.types import Completion, Group, Question
from pipelines.prepare import prepare
from pipelines.warm_start import recorded_demonstrations, warm_start, warm_start_folder
from tools.processes import cpu_seconds

QUICKSTART = Path(__file__).parents[1] / "jobs" / "configs" / "quickstart.yaml"
SETTINGS = [
    "warm_start.num_clean_trajectories=600",
    "warm_start.num_noisy_trajectories=0",
    "algorithm.max_off_policy_steps=1",  # STEPS_AHEAD - 1
]
NUM_IN_FLIGHT = 128  # skewed trajectories at a time: as many as a step of the quickstart has
STEPS_AHEAD = 2  # whose groups may start while a step is collected: max_off_policy_steps + 1
FILLING_STEPS = STEPS_AHEAD + 1
MAX_TURNS, CALL_TOKENS = 6, (4, 64)
PROMPT_TOKENS, OBSERVATION_TOKENS = (30, 60), (20, 40)  # about what the agent's contexts have

Call: TypeAlias = tuple[list[int], int]
"""Prompt ids, and how many tokens were sampled after them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=16, help="groups of a step")
    parser.add_argument("--steps", type=int, default=6, help="steps of a round that count")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count")
    parser.add_argument("--skewed", type=int, default=384, help="scripted trajectories of a round")
    parser.add_argument("--run", help="folder of a finished run")
    arguments = parser.parse_args()
    environment.prepare_process()
    with tempfile.TemporaryDirectory() as folder:
        num_steps = (FILLING_STEPS + arguments.steps) * (arguments.rounds + 1) + STEPS_AHEAD
        num_questions = arguments.groups * num_steps
        settings = {"algorithm": {"groups_per_step": arguments.groups, "max_off_policy_steps": STEPS_AHEAD - 1}}
        run = None
        if arguments.run is not None:
            config = of_run(Path(arguments.run), settings)
        else:
            sizes = [f"algorithm.groups_per_step={arguments.groups}", f"world.num_train_questions={num_questions}"]
            run = Run(load_config(QUICKSTART, [*SETTINGS, *sizes, f"output={folder}"]))
            config = prepare(run)
        with connected(config.ray_address, name=config.name) as namespace:
            config = config if run is None else warm_started(run, config, namespace)
            with started(
                config,
                namespace,
                num_questions=num_questions,
                num_steps=arguments.steps,
                num_skewed=arguments.skewed,
            ) as contest:
                rounds = counted_rounds(contest, arguments.rounds)
    report(rounds)


def counted_rounds(contest: Contest, number: int) -> list[dict[str, Measured]]:
    """Returns the rounds that count, and prints each as it ends: one may take minutes."""
    rounds = []
    for i in range(number + 1):
        rounds.append(contest.round())
        rates = ", ".join(f"{name} {measured.rate:.0f} tokens/s" for name, measured in rounds[-1].items())
        print(f"{f'round {i} of {number}' if i else 'warm-up'}: {rates}", flush=True)
    return rounds[1:]


def warm_started(run: Run, config: RunConfig, namespace: str) -> RunConfig:
    """Returns the config with a model that was trained on the demonstrations of the run."""
    with launch(config, namespace) as roles:
        warm_start(run, roles, recorded_demonstrations(run, config), StopRequest(config.grace_s))
    model = config.model.model_copy(update={"path": str(warm_start_folder(run))})
    return config.model_copy(update={"model": model})


def of_run(run: Path, settings: dict[str, Any]) -> RunConfig:
    """Returns the config of a finished run with `settings` over it, and with its weights, index and questions."""
    config = run_config(EvaluatedRun(name=run.name, config=str(run), settings=settings))
    made = next((run / name for name in ("world", "cloze") if (run / name).exists()), None)
    if made is None:
        return config
    files = {split: str(made / f"{split}.parquet") for split in ("train", "validation")}
    return config.model_copy(update={"data": config.data.model_copy(update=files)})


@dataclass(frozen=True)
class Measured:
    num_tokens: int  # sampled
    seconds: float
    cpu_seconds: float = 0.0  # of all processes, Ray's included

    @property
    def rate(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(kw_only=True)
class Contest:
    """The contestants over one engine and one retriever, and raw vLLM beside them."""

    config: RunConfig
    questions: dict[str, Question]  # by group id
    collector: Collector
    groups: Ahead
    raw: Handle
    generator: Handle
    retriever: Handle
    num_steps: int
    num_skewed: int
    version: int = 0
    counted: list[StepGroups] = field(default_factory=list)

    def round(self) -> dict[str, Measured]:
        """Measures every contestant once."""
        measured = {"agent": self._agent()}
        groups = [group for step in self.counted for group in step.groups]  # what the agent did, the others repeat
        others: dict[str, Callable[[], Measured]] = {
            "raw vLLM": lambda: Measured(*ray.get(self.raw.replay.remote(recorded_calls(groups)))),
            "agent, in lock-step": lambda: asyncio.run(self._agent_in_lock_step()),
        }
        if self.num_skewed:
            others |= {
                "skewed": lambda: asyncio.run(self._skewed(lock_step=False)),
                "skewed, in lock-step": lambda: asyncio.run(self._skewed(lock_step=True)),
            }
        return measured | {name: with_cpu_seconds(contestant) for name, contestant in others.items()}

    def _agent(self) -> Measured:
        for _ in range(FILLING_STEPS):
            self._next_step()
        measured = with_cpu_seconds(self._counted_steps)
        groups_ahead = STEPS_AHEAD * self.config.algorithm.groups_per_step
        self.groups.finish(groups_ahead - len(self.collector.waiting))
        return measured

    def _counted_steps(self) -> Measured:
        started = time.perf_counter()
        self.counted = [self._next_step() for _ in range(self.num_steps)]
        seconds = time.perf_counter() - started
        groups = [group for step in self.counted for group in step.groups]
        return Measured(sum(num_tokens for _, num_tokens in recorded_calls(groups)), seconds)

    def _next_step(self) -> StepGroups:
        step = self.collector.next_step(self.version)
        assert step is not None, "there are questions for every round"
        self.version += 1
        self.collector.consumed(step, policy_version=self.version)
        return step

    async def _agent_in_lock_step(self) -> Measured:
        generate, search = self._engine_and_retriever()
        started, num_tokens = time.perf_counter(), 0
        for step in self.counted:
            num_tokens += await self._step_in_lock_step([group.question for group in step.groups], generate, search)
        return Measured(num_tokens, time.perf_counter() - started)

    async def _step_in_lock_step(self, questions: Sequence[Question], generate: GenerateFn, search: SearchFn) -> int:
        """Returns the number of sampled tokens."""
        size = self.config.algorithm.group_size
        turns = LockStep(generate, num_trajectories=len(questions) * size)
        agent = make_agent(
            self.config, tokenizer=load_tokenizer(self.config.model.path), generate=turns.generate, search=search
        )
        trajectories = await asyncio.gather(
            *(
                turns.takes_part(
                    agent.rollout(
                        question, trajectory_id=f"{question.id}/{member}", group_id=question.id, member=member
                    )
                )
                for question in questions
                for member in range(size)
            )
        )
        return sum(context.num_sampled_tokens for trajectory in trajectories for context in trajectory.contexts)

    async def _skewed(self, *, lock_step: bool) -> Measured:
        generate, search = self._engine_and_retriever(stop=False)
        scripts = [
            Script(seed=f"{self.version}:{i}", questions=list(self.questions.values())) for i in range(self.num_skewed)
        ]
        started = time.perf_counter()
        if lock_step:
            for first in range(0, self.num_skewed, NUM_IN_FLIGHT):
                batch = scripts[first : first + NUM_IN_FLIGHT]
                turns = LockStep(generate, num_trajectories=len(batch))
                await asyncio.gather(*(turns.takes_part(script.rollout(turns.generate, search)) for script in batch))
        else:
            places = asyncio.Semaphore(NUM_IN_FLIGHT)

            async def in_its_place(script: Script) -> None:
                async with places:
                    await script.rollout(generate, search)

            await asyncio.gather(*map(in_its_place, scripts))
        return Measured(sum(script.num_tokens for script in scripts), time.perf_counter() - started)

    def _engine_and_retriever(self, *, stop: bool = True) -> tuple[GenerateFn, SearchFn]:
        """Calls engine and retriever through pools of this process."""
        stop_token_ids = sorted(load_tokenizer(self.config.model.path).stop_token_ids) if stop else []
        generators = GeneratorPool(
            [self.generator],
            config=self.config.generation,
            sampling=self.config.sampling,
            stop_token_ids=stop_token_ids,
        )
        return generators.generate, RetrieverPool([self.retriever], config=self.config.retrieval).search


class Ahead(Iterator[Group]):
    """The groups of a stream; those that are under way can be waited for before they are asked for."""

    def __init__(self, groups: Iterator[Group]) -> None:
        self._groups = groups
        self._finished: deque[Group] = deque()

    def __next__(self) -> Group:
        return self._finished.popleft() if self._finished else next(self._groups)

    def finish(self, count: int) -> None:
        """Waits until so many groups are finished that were not asked for yet."""
        while len(self._finished) < count:
            self._finished.append(next(self._groups))


class LockStep:
    """Trajectories that take every call together: a call starts when all that are not finished have asked for one."""

    def __init__(self, generate: GenerateFn, *, num_trajectories: int) -> None:
        self._generate = generate
        self._num_running = num_trajectories
        self._turn = _Turn()

    async def generate(self, token_ids: Sequence[int], *, max_tokens: int) -> Completion:
        turn, index = self._turn, len(self._turn.calls)
        turn.calls.append(partial(self._generate, token_ids, max_tokens=max_tokens))
        self._start_if_complete()
        await turn.complete.wait()
        return (await turn.completions)[index]

    async def takes_part(self, trajectory: Awaitable[Any]) -> Any:
        """Returns the trajectory's result, and does not wait for the trajectory from its end on."""
        try:
            return await trajectory
        finally:
            self._num_running -= 1
            self._start_if_complete()

    def _start_if_complete(self) -> None:
        turn = self._turn
        if turn.calls and len(turn.calls) == self._num_running:
            self._turn = _Turn()
            turn.completions = asyncio.gather(*(call() for call in turn.calls))
            turn.complete.set()


@dataclass
class _Turn:
    calls: list[Callable[[], Coroutine[Any, Any, Completion]]] = field(default_factory=list)
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    completions: Awaitable[list[Completion]] = field(init=False)


class Script:
    """A trajectory whose turns and lengths are drawn beforehand; its ids mean nothing."""

    def __init__(self, *, seed: str, questions: Sequence[Question]) -> None:
        rng = random.Random(seed)
        self._question = rng.choice(questions)
        self._turns = [
            (
                _ids(rng, rng.randint(*PROMPT_TOKENS)),
                rng.randint(*CALL_TOKENS),
                _ids(rng, rng.randint(*OBSERVATION_TOKENS)),
                rng.randint(*CALL_TOKENS),
            )
            for _ in range(rng.randint(1, MAX_TURNS))
        ]
        self.num_tokens = sum(action + memory for _, action, _, memory in self._turns)

    async def rollout(self, generate: GenerateFn, search: SearchFn) -> None:
        for prompt, num_action_tokens, observation, num_memory_tokens in self._turns:
            action = await generate(prompt, max_tokens=num_action_tokens)
            await search(self._question.text, num_passages=2, partition=self._question.partition)
            await generate([*prompt, *action.token_ids, *observation], max_tokens=num_memory_tokens)


class RawEngine:
    """Runs vLLM without mempipe. Settings that matter for speed are the engine's own defaults, or the quickstart's."""

    def __init__(self, model: ModelConfig, *, max_model_len: int, max_num_seqs: int, num_threads: int) -> None:
        os.environ |= environment.engine(frontend_pid=os.getpid()) | environment.IN_PROCESS_ENGINE
        os.environ |= environment.cpu_engine(num_threads=num_threads, kv_cache_gib=1)
        from vllm import LLM

        self._llm = LLM(
            model.path,
            dtype=model.dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            enforce_eager=True,
            skip_tokenizer_init=True,
        )

    def replay(self, calls: Sequence[Call], *, temperature: float = 1.0) -> tuple[int, float]:
        """Samples after all prompts; returns the number of tokens and the seconds."""
        from vllm import SamplingParams

        params = [
            SamplingParams(max_tokens=n, temperature=temperature, ignore_eos=True, logprobs=0, detokenize=False)
            for _, n in calls
        ]
        started = time.perf_counter()
        outputs = self._llm.generate([{"prompt_token_ids": prompt} for prompt, _ in calls], params, use_tqdm=False)
        seconds = time.perf_counter() - started
        num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        assert num_tokens == sum(n for _, n in calls), "stop ids are ignored, so every completion has its length"
        return num_tokens, seconds


@contextmanager
def raw_engine(config: RunConfig) -> Iterator[Handle]:
    """Starts a `RawEngine` with the model and the limits of the config, and ends it with the block."""
    raw = start_actor(
        RawEngine,
        {"num_cpus": 0},
        config.model,
        max_model_len=config.budget.context_tokens,
        max_num_seqs=config.generation.max_num_seqs,
        num_threads=config.generation.num_threads,
    )
    yield raw
    ray.kill(raw)


def with_cpu_seconds(contestant: Callable[[], Measured]) -> Measured:
    before = cpu_seconds()
    measured = contestant()
    return replace(measured, cpu_seconds=cpu_seconds() - before)


def recorded_calls(groups: Sequence[Group]) -> list[Call]:
    """Returns what the agents asked the engine for: the first calls of all trajectories, then their second ones,
    and so on."""
    numbered: list[tuple[int, Call]] = []
    for group in groups:
        for trajectory in group.trajectories:
            calls = [call for context in trajectory.contexts for call in _calls(context.token_ids, context.loss_mask)]
            numbered += enumerate(calls)
    return [call for _, call in sorted(numbered, key=lambda one: one[0])]


def _calls(token_ids: Sequence[int], loss_mask: Sequence[int]) -> Iterator[Call]:
    """Yields the calls of a context, one per run of sampled tokens."""
    edges = [
        i for i in range(len(loss_mask) + 1) if (i < len(loss_mask) and loss_mask[i]) != (i > 0 and loss_mask[i - 1])
    ]
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        yield list(token_ids[:start]), end - start


@contextmanager
def started(
    config: RunConfig, namespace: str, *, num_questions: int, num_steps: int, num_skewed: int
) -> Iterator[Contest]:
    """Starts all actors, and ends them with the block."""
    options = {"num_cpus": 0, "max_concurrency": MAX_CALLS}
    context_tokens, algorithm = config.budget.context_tokens, config.algorithm
    store = start_actor(WeightStore, {"name": WEIGHT_STORE, "num_cpus": 0})
    generator = start_actor(
        GeneratorActor,
        {"name": "generator-0", **options},
        model=config.model,
        config=config.generation,
        context_tokens=context_tokens,
        seed=config.seed,
        store=WEIGHT_STORE,
        transfer="mempipe_shm",
    )
    retriever = start_actor(RetrieverActor, {"name": "retriever-0", **options}, config.retrieval)
    admission = start_actor(
        Admission,
        {"name": "admission", **options},
        groups_per_step=algorithm.groups_per_step,
        max_off_policy_steps=STEPS_AHEAD - 1,
    )
    ray.get([generator.ready.remote(), retriever.ready.remote()])
    spec = DriverSpec(
        config=config,
        sampling=config.sampling,
        group_size=algorithm.group_size,
        namespace=namespace,
        generators=["generator-0"],
        retrievers=["retriever-0"],
        admission="admission",
    )
    questions = {f"0/{question.id}": question for question in read_questions(config.data.train)[:num_questions]}
    with closing(stream_groups(spec, questions.items())) as stream, raw_engine(config) as raw:
        groups = Ahead(stream)
        yield Contest(
            config=config,
            questions=questions,
            collector=Collector(groups, admission, algorithm),
            groups=groups,
            raw=raw,
            generator=generator,
            retriever=retriever,
            num_steps=num_steps,
            num_skewed=num_skewed,
        )
    ray.get(generator.shutdown.remote())
    for actor in (admission, retriever, generator, store):
        ray.kill(actor)


def report(rounds: Sequence[dict[str, Measured]]) -> None:
    print(f"{os.cpu_count()} cores, medians of {len(rounds)} rounds")
    print(f"{'':<24}{'tokens':>9}{'seconds':>9}{'tokens/s':>10}{'CPU s':>8}")
    for name in rounds[0]:
        columns = ("num_tokens", "seconds", "rate", "cpu_seconds")
        tokens, seconds, rate, cpu = (
            statistics.median(getattr(one[name], column) for one in rounds) for column in columns
        )
        print(f"{name:<24}{tokens:>9.0f}{seconds:>9.2f}{rate:>10.0f}{cpu:>8.2f}")
    agent, raw = ([one[name].rate for one in rounds] for name in ("agent", "raw vLLM"))
    record(Row(name="agent loop", unit="tokens/s", values=agent, peer="raw vLLM, all queued", of_peer=raw))
    for faster, slower, aim in (
        ("agent", "raw vLLM", 0.92),
        ("skewed", "skewed, in lock-step", 1.5),
        ("agent", "agent, in lock-step", None),
    ):
        if faster not in rounds[0]:
            continue
        ratios = [one[faster].rate / one[slower].rate for one in rounds]
        wanted = f", aim {aim}" if aim else ""
        print(f"{faster} / {slower}: {spread(ratios)}{wanted}")


def _ids(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(16, 1200) for _ in range(length)]


if __name__ == "__main__":
    main()
