"""How many short calls per second does one engine answer, in a process of its own and in the caller's, and how far is
that from raw vLLM? How fast does it read and write tokens? What does it cost to start?

    python -m benchmarks.engine_calls [--calls 1152] [--rounds 3] [--model FOLDER]

A random tiny Qwen2 (0.9 M parameters, fp32) on CPU, or a model of yours, answers four kinds of calls:

random      prompts of 40 to 80 ids with nothing in common, 9 tokens each
agent       the same numbers, from 192 trajectories at a time: their prompts share a template, then a question among 8,
            and every second call continues the one before, as a memory agent's do
prefill     prompts of 400 ids, 1 token each; a third of the calls
decode      prompts of 8 ids, 64 tokens each; a sixth of the calls

Raw vLLM (`LLM.generate`) gets all calls of a round at once; those of the agent cannot be, and are compared with its
random ones. Each engine is a process of its own. They take turns within each round, and the first round does not count.
CPU time is the steadier number on a machine that others use; that of a start counts everything from the first import
on, the memory is the proportional set size of all processes.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import psutil

from benchmarks.rows import Row, record, spread
from mempipe import environment
from mempipe.engines.config import GenerationConfig, ModelConfig, SamplingConfig
from mempipe.engines.generator import Generator
from tools.processes import cpu_seconds

Process = Literal["own", "shared"]
Prompts: TypeAlias = list[list[int]]
NUM_TRAJECTORIES = 192
GROUP_SIZE = 8
AGENT_CALLS = 6  # of a trajectory
VOCAB_SIZE = 1200
MAX_MODEL_LEN = 512


@dataclass(frozen=True)
class Kind:
    """Calls of one kind, and what is counted of each."""

    prompt_tokens: tuple[int, int]
    num_tokens: int
    share: float = 1.0
    unit: str = "calls/s"
    per_call: int = 1

    def prompts(self, number: int, *, seed: int) -> Prompts:
        """Returns the random prompts of a round."""
        rng = random.Random(seed)
        return [_ids(rng, rng.randint(*self.prompt_tokens)) for _ in range(max(1, round(number * self.share)))]


KINDS = {
    "random": Kind((40, 80), 9),
    "agent": Kind((40, 80), 9),
    "prefill": Kind((400, 400), 1, share=1 / 3, unit="prompt tokens/s", per_call=400),
    "decode": Kind((8, 8), 64, share=1 / 6, unit="tokens/s", per_call=64),
}


@dataclass(frozen=True)
class Measured:
    num_calls: int
    seconds: float
    cpu_seconds: float

    @property
    def rate(self) -> float:
        """Returns calls per second."""
        return self.num_calls / self.seconds


class Engine(Protocol):
    """One contestant, in the process that `Alone` gives it."""

    def measure(self, kind: str, number: int, seed: int) -> Measured: ...
    def close(self) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=NUM_TRAJECTORIES * AGENT_CALLS, help="of a round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count")
    parser.add_argument("--model", help="a Hugging Face folder; otherwise a random tiny model")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        if arguments.model is None:
            _save_model(folder)
        made = (arguments.model or folder, "auto" if arguments.model else "float32")
        engines = {"raw": stack.enter_context(closing(Alone(Raw, *made)))}
        for process in ("own", "shared"):
            engines[process] = stack.enter_context(closing(Alone(Ours, *made, process)))
        rounds = [
            {
                (name, kind): engine.measure(kind, arguments.calls, seed)
                for kind in KINDS
                for name, engine in engines.items()
                if (name, kind) != ("raw", "agent")
            }
            for seed in range(arguments.rounds + 1)
        ][1:]
        report(rounds, {name: engine.started for name, engine in engines.items()})


def report(rounds: Sequence[dict[tuple[str, str], Measured]], starts: dict[str, Started]) -> None:
    """Prints the medians over rounds, and records the rows."""
    print(f"{'':<24}{'a second':>20}{'CPU ms/call':>13}{'ratio to raw vLLM':>28}")
    for name, kind in rounds[0]:
        of_kind, other = KINDS[kind], "random" if kind == "agent" else kind
        own, raw = ([one[key].rate * of_kind.per_call for one in rounds] for key in ((name, kind), ("raw", other)))
        ratios = [one / another for one, another in zip(own, raw, strict=True)]
        cpu_ms = statistics.median(1000 * one[name, kind].cpu_seconds / one[name, kind].num_calls for one in rounds)
        rate = f"{statistics.median(own):,.0f} {of_kind.unit.removesuffix('/s')}"
        print(f"{f'{name}, {kind}':<24}{rate:>20}{cpu_ms:>13.2f}{spread(ratios):>28}")
        if name != "raw":
            row = Row(
                name=f"engine, {name} process, {kind}",
                unit=of_kind.unit,
                values=own,
                peer=f"raw vLLM, {other}",
                of_peer=raw,
            )
            record(row)
    print(f"\n{'':<24}{'start s':>9}{'CPU s':>11}{'memory GiB':>13}")
    for name, start in starts.items():
        print(f"{name:<24}{start.seconds:>9.1f}{start.cpu_seconds:>11.1f}{start.gib:>13.2f}")


class Raw:
    """vLLM without mempipe."""

    def __init__(self, model: str, dtype: Any) -> None:
        os.environ |= environment.engine(frontend_pid=os.getpid()) | environment.IN_PROCESS_ENGINE
        os.environ |= environment.cpu_engine(num_threads=1, kv_cache_gib=1)
        from vllm import LLM

        self._llm = LLM(
            model,
            dtype=dtype,
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=256,
        )
        self.measure("random", 1, 0)

    def measure(self, kind: str, number: int, seed: int) -> Measured:
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": prompt} for prompt in KINDS[kind].prompts(number, seed=seed)]
        params = SamplingParams(max_tokens=KINDS[kind].num_tokens, ignore_eos=True, logprobs=0, detokenize=False)
        started, cpu = time.perf_counter(), cpu_seconds()
        self._llm.generate(prompts, params, use_tqdm=False)
        return Measured(len(prompts), time.perf_counter() - started, cpu_seconds() - cpu)

    def close(self) -> None: ...


class Ours:
    """The engine of mempipe's generators."""

    def __init__(self, model: str, dtype: Any, process: Process) -> None:
        self._runner = asyncio.Runner()
        config = GenerationConfig(engine_process=process)
        self._generator = Generator(ModelConfig(path=model, dtype=dtype), config, max_model_len=MAX_MODEL_LEN)
        self._runner.run(self._generator.start())
        self.measure("random", 1, 0)

    def measure(self, kind: str, number: int, seed: int) -> Measured:
        if kind == "agent":
            calls = self._trajectories(number, random.Random(seed))
        else:
            prompts = KINDS[kind].prompts(number, seed=seed)
            calls = [self._call(prompt, KINDS[kind].num_tokens) for prompt in prompts]
            number = len(prompts)
        started, cpu = time.perf_counter(), cpu_seconds()
        self._runner.run(_all(calls))
        return Measured(number, time.perf_counter() - started, cpu_seconds() - cpu)

    def close(self) -> None:
        self._runner.run(self._generator.shutdown())
        self._runner.close()

    def _trajectories(self, number: int, rng: random.Random) -> list[Coroutine[Any, Any, object]]:
        """Returns as many trajectories as make `number` calls, which must be a multiple of AGENT_CALLS."""
        template, count = _ids(rng, 24), number // AGENT_CALLS
        questions = [_ids(rng, 14) for _ in range(-(-count // GROUP_SIZE))]
        return [self._trajectory(rng, template + questions[i // GROUP_SIZE]) for i in range(count)]

    async def _trajectory(self, rng: random.Random, start: list[int]) -> None:
        memory: list[int] = []
        num_tokens = KINDS["agent"].num_tokens
        for _ in range(AGENT_CALLS // 2):
            action = await self._call(start + memory, num_tokens)
            memory = await self._call(start + memory + action + _ids(rng, 24), num_tokens)

    async def _call(self, prompt: list[int], num_tokens: int) -> list[int]:
        done = await self._generator.generate(
            prompt, max_tokens=num_tokens, sampling=SamplingConfig(), stop_token_ids=[]
        )
        return done.token_ids


async def _all(calls: Sequence[Coroutine[Any, Any, object]]) -> None:
    await asyncio.gather(*calls)


@dataclass(frozen=True)
class Started:
    """Holds the cost of a start, and the memory of the started engine."""

    seconds: float
    cpu_seconds: float
    gib: float


class Alone:
    """An engine in a fresh process, which may have processes of its own."""

    def __init__(self, make: type[Raw | Ours], *arguments: str) -> None:
        self._pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        self.started: Started = self._pool.submit(_start, make, arguments).result()

    def measure(self, kind: str, number: int, seed: int) -> Measured:
        return self._pool.submit(_measure, kind, number, seed).result()

    def close(self) -> None:
        self._pool.submit(_close).result()
        self._pool.shutdown()


_engine: list[Engine] = []
"""The engine of this process."""


def _start(make: type[Raw | Ours], arguments: Sequence[Any]) -> Started:
    began = time.perf_counter()
    _engine.append(make(*arguments))
    return Started(time.perf_counter() - began, cpu_seconds(), _gib())


def _measure(kind: str, number: int, seed: int) -> Measured:
    return _engine[0].measure(kind, number, seed)


def _close() -> None:
    _engine.pop().close()


def _gib() -> float:
    """Returns the memory of this process and all its children; what several share counts once."""
    process = psutil.Process()
    return sum(one.memory_full_info().pss for one in [process, *process.children(recursive=True)]) / 2**30


def _ids(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(1, VOCAB_SIZE) for _ in range(length)]


def _save_model(folder: str) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=384,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    main()
