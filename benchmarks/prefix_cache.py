"""What a group's shared prompts save in vLLM's prefix cache: by the size of its blocks and the order of the requests,
and for an agent that reads by what stands first in its prompt.

    python -m benchmarks.prefix_cache --run FOLDER [--groups 12] [--group-size 8]

The prompts of `--groups` questions of a finished run, one sampled token each: what is left is the prompts' own cost.

Of an agent that searches they are the first prompts, `--group-size` requests each. "together" sends the siblings of a
group one after the other, as the driver does; "spread" sends one of every group, then the second ones, and so on.

Of an agent that reads they are all reading contexts of the groups that the run sampled (or an evaluation with
`num_samples`: `--evaluation`), with the memories that it wrote, turn by turn: in one layout the memory, which is
every sibling's own, stands before the chunk, in the other after it (`agent.chunk_first`).

A cache holds whole blocks, so the tail of every prompt is computed for each sibling. The share of prompt tokens that
the cache held is vLLM's own count. Engines run one after the other, each in a process of its own, and the first round
does not count.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rollout_throughput import of_run
from mempipe import environment
from mempipe.agents.memagent import MemAgentRenderer
from mempipe.config import RunConfig
from mempipe.data.qa import read_questions
from mempipe.data.trajectories import read_trajectories
from mempipe.engines.config import ModelConfig
from mempipe.engines.tokenizer import load_tokenizer
from mempipe.evaluation.results import read_groups
from mempipe.rollout import first_prompt, make_renderer
from mempipe.types import Group, Question

CACHES = {"no cache": None, "blocks of 128": 128, "blocks of 32": 32}
"""128 is vLLM's own choice on a CPU, 32 the smallest that its kernels take and mempipe's choice."""


Rounds = list[list[list[int]]]
"""The prompts of every round, in the order in which they are sent."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder of a finished run")
    parser.add_argument("--groups", type=int, default=12)
    parser.add_argument("--group-size", type=int, default=8, help="siblings, for an agent that searches")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count, each with other questions")
    parser.add_argument("--evaluation", type=Path, help="folder of a benchmark's rows, instead of the run's groups")
    arguments = parser.parse_args()
    config = of_run(arguments.run, {})
    sent = reading_prompts(config, arguments) if config.agent_spec.reads else first_prompts(config, arguments)
    for order, rounds in sent.items():
        lengths = [len(prompt) for prompts in rounds for prompt in prompts]
        print(f"{order}: {len(lengths) / len(rounds):.0f} prompts a round, of {statistics.mean(lengths):.0f} tokens")
    print(f"{'':<16}{'order':<16}{'cached':>8}{'seconds':>9}")
    context = multiprocessing.get_context("spawn")
    for name, block_size in CACHES.items():
        with context.Pool(1) as pool:
            rows = pool.apply(_measure, (config.model, sent, config.budget.context_tokens, block_size))
        for order, cached, seconds in rows:
            print(f"{name:<16}{order:<16}{cached:>8.1%}{seconds:>9.2f}", flush=True)


def first_prompts(config: RunConfig, arguments: argparse.Namespace) -> dict[str, Rounds]:
    """Returns the first prompt of every question, as often as it has siblings, in two orders."""
    tokenizer = load_tokenizer(config.model.path)
    questions = read_questions(config.data.validation)[: arguments.groups * (arguments.rounds + 1)]
    prompts = [first_prompt(config, question, tokenizer=tokenizer) for question in questions]
    rounds = _parts(prompts, arguments.groups)
    siblings = range(arguments.group_size)
    return {
        "together": [[prompt for prompt in prompts for _ in siblings] for prompts in rounds],
        "spread": [[prompt for _ in siblings for prompt in prompts] for prompts in rounds],
    }


def reading_prompts(config: RunConfig, arguments: argparse.Namespace) -> dict[str, Rounds]:
    """Returns every reading context of the groups that the run sampled, in two layouts."""
    evaluated = arguments.evaluation
    groups = read_groups(evaluated) if evaluated else read_trajectories(arguments.run / "trajectories.parquet")
    groups = groups[: arguments.groups * (arguments.rounds + 1)]
    files = filter(None, (config.data.train, config.data.validation))
    asked = {question.id: question for file in files for question in read_questions(file)}  # groups lack their texts
    tokenizer = load_tokenizer(config.model.path)
    sent = {}
    for order, chunk_first in (("memory first", False), ("chunk first", True)):
        agent = config.agent.model_copy(update={"chunk_first": chunk_first})
        renderer = make_renderer(config.model_copy(update={"agent": agent}), tokenizer=tokenizer)
        assert isinstance(renderer, MemAgentRenderer), f"{config.agent.name} does not read chunks as MemAgent does"
        sent[order] = [_turn_by_turn(renderer, each, asked) for each in _parts(groups, arguments.groups)]
    return sent


def _parts(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _turn_by_turn(
    renderer: MemAgentRenderer, groups: Sequence[Group], asked: Mapping[str, Question]
) -> list[list[int]]:
    read = [
        (context.index, renderer.question(group.question), renderer.encode(context.memory_before), chunk)
        for group in groups
        for chunks in [renderer.chunks(asked[group.question.id])]
        for trajectory in group.trajectories
        for context, chunk in zip(trajectory.contexts, chunks, strict=False)  # the last context answers
    ]
    return [
        renderer.read_prompt(question=question, memory=memory, chunk=chunk.token_ids)
        for _, question, memory, chunk in sorted(read, key=lambda each: each[0])
    ]


def _measure(
    model: ModelConfig, sent: dict[str, Rounds], max_model_len: int, block_size: int | None
) -> list[tuple[str, float, float]]:
    """Returns order, share of prompt tokens from the cache, and median seconds of a round."""
    os.environ |= environment.engine(frontend_pid=os.getpid()) | environment.IN_PROCESS_ENGINE
    os.environ |= environment.cpu_engine(num_threads=os.cpu_count() or 1, kv_cache_gib=1)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model.path,
        dtype=model.dtype,
        max_model_len=max_model_len,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=block_size is not None,
        **({} if block_size is None else dict[str, Any](block_size=block_size)),
    )
    params = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)
    rows = []
    for order, rounds in sent.items():
        cached, seconds = [], []
        for requests in rounds:
            llm.reset_prefix_cache()
            started = time.perf_counter()
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in requests], params, use_tqdm=False)
            seconds.append(time.perf_counter() - started)
            cached.append(sum(output.num_cached_tokens or 0 for output in outputs) / sum(map(len, requests)))
        rows.append((order, statistics.mean(cached[1:]), statistics.median(seconds[1:])))
    return rows


if __name__ == "__main__":
    main()
