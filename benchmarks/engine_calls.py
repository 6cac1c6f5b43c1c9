"""How many short calls per second does one engine answer, in a process of its own and in the caller's, and how far is
that from raw vLLM? What does it cost to start?

    python -m benchmarks.engine_calls

A random tiny Qwen2 (0.9 M parameters, fp32) on CPU answers 192 trajectories at a time, each with 6 calls of 9 tokens.
"random" prompts have 40 to 80 ids and nothing in common; "agent" prompts share a template, then a question among 8, and
every second call continues the one before, as a memory agent's do. Raw vLLM gets the same numbers of random prompts at
once. Each is measured in a process of its own. CPU time is the steadier number on a machine that others use; that of a
start counts everything from the first import on, the memory is the proportional set size of all processes.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Literal, TypeVar

import psutil

from benchmarks.rows import Row, record
from mempipe import environment
from mempipe.engines.config import GenerationConfig, ModelConfig, SamplingConfig
from mempipe.engines.generator import Generator
from tools.processes import cpu_seconds

T = TypeVar("T")
Process = Literal["own", "shared"]
NUM_TRAJECTORIES = 192
GROUP_SIZE = 8
NUM_CALLS = 6
NUM_TOKENS = 9
VOCAB_SIZE = 1200
MAX_MODEL_LEN = 512
NUM_ROUNDS = 4


@dataclass
class Measured:
    name: str
    seconds: float
    cpu_seconds: float

    def row(self, best: float) -> str:
        num_calls = NUM_TRAJECTORIES * NUM_CALLS
        rate = num_calls / self.seconds
        cpu_ms = 1000 * self.cpu_seconds / num_calls
        return f"{self.name:<24}{rate:>9.0f}{rate * NUM_TOKENS:>11.0f}{cpu_ms:>13.2f}{rate / best:>8.2f}"


@dataclass
class Started:
    name: str
    seconds: float
    cpu_seconds: float
    gib: float

    def row(self) -> str:
        return f"{self.name:<24}{self.seconds:>9.1f}{self.cpu_seconds:>11.1f}{self.gib:>13.2f}"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        _save_model(folder)
        raw, starts = _alone(_raw, folder), []
        rounds = [raw]
        for process in ("own", "shared"):
            started, calls = _alone(_generator, folder, process)
            starts.append(started)
            rounds += calls
    measured = [min(each, key=lambda one: one.seconds) for each in rounds]
    best = NUM_TRAJECTORIES * NUM_CALLS / measured[0].seconds
    for each in rounds[1:]:
        own, of_raw = ([NUM_TRAJECTORIES * NUM_CALLS / one.seconds for one in times] for times in (each, raw))
        name = f"engine, {each[0].name}"
        record(Row(name=name, unit="calls/s", values=own, peer="raw vLLM, random", of_peer=of_raw))
    print(f"{'':<24}{'calls/s':>9}{'tokens/s':>11}{'CPU ms/call':>13}{'ratio':>8}")
    for one in measured:
        print(one.row(best))
    print(f"\n{'':<24}{'start s':>9}{'CPU s':>11}{'memory GiB':>13}")
    for one in starts:
        print(one.row())


def _alone(measure: Callable[..., T], *arguments: str) -> T:
    """Measures in a fresh process, which may have processes of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, *arguments).result()


def _generator(folder: str, process: Process) -> tuple[Started, list[list[Measured]]]:
    return asyncio.run(_measured_calls(folder, process))


async def _measured_calls(folder: str, process: Process) -> tuple[Started, list[list[Measured]]]:
    """Returns the start, and the rounds of each kind of prompts."""
    config = GenerationConfig(engine_process=process)
    generator = Generator(ModelConfig(path=folder, dtype="float32"), config, max_model_len=MAX_MODEL_LEN)
    began = time.perf_counter()
    await generator.start()
    await _call(generator, _ids(random.Random(0), 40))
    started = Started(f"{process} process", time.perf_counter() - began, cpu_seconds(), _gib())
    kinds: list[list[Measured]] = []
    for kind, trajectory in (("random", _random_trajectory), ("agent", _agent_trajectory)):
        rounds = []
        for seed in range(NUM_ROUNDS):
            rng = random.Random(seed)
            template = _ids(rng, 24)
            questions = [_ids(rng, 14) for _ in range(NUM_TRAJECTORIES // GROUP_SIZE)]
            began, cpu = time.perf_counter(), cpu_seconds()
            await asyncio.gather(
                *(trajectory(generator, rng, template + questions[i // GROUP_SIZE]) for i in range(NUM_TRAJECTORIES))
            )
            rounds.append(Measured(f"{process} process, {kind}", time.perf_counter() - began, cpu_seconds() - cpu))
        kinds.append(rounds[1:])
    await generator.shutdown()
    return started, kinds


async def _random_trajectory(generator: Generator, rng: random.Random, start: list[int]) -> None:
    for _ in range(NUM_CALLS):
        await _call(generator, _ids(rng, rng.randrange(40, 80)))  # nothing of `start`


async def _agent_trajectory(generator: Generator, rng: random.Random, start: list[int]) -> None:
    memory: list[int] = []
    for _ in range(NUM_CALLS // 2):
        action = await _call(generator, start + memory)
        memory = await _call(generator, start + memory + action + _ids(rng, 24))


async def _call(generator: Generator, prompt: list[int]) -> list[int]:
    return (
        await generator.generate(prompt, max_tokens=NUM_TOKENS, sampling=SamplingConfig(), stop_token_ids=[])
    ).token_ids


def _raw(folder: str) -> list[Measured]:
    os.environ |= environment.engine(frontend_pid=os.getpid()) | environment.IN_PROCESS_ENGINE
    os.environ |= environment.cpu_engine(num_threads=1, kv_cache_gib=1)
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=256,
    )
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0, detokenize=False)
    rounds = []
    for seed in range(NUM_ROUNDS):
        rng = random.Random(seed)
        prompts = [{"prompt_token_ids": _ids(rng, rng.randrange(40, 80))} for _ in range(NUM_TRAJECTORIES * NUM_CALLS)]
        started, cpu = time.perf_counter(), cpu_seconds()
        llm.generate(prompts, params, use_tqdm=False)
        rounds.append(Measured("raw LLM.generate, random", time.perf_counter() - started, cpu_seconds() - cpu))
    return rounds[1:]


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
