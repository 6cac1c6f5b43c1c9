"""What a group's shared prompts save in vLLM's prefix cache, by the size of its blocks and the order of the requests.

    python -m benchmarks.prefix_cache --run FOLDER [--groups 12] [--group-size 8]

The first prompts of `--groups` questions of a finished run, `--group-size` requests each, one sampled token: what is
left is the prompts' own cost. "together" sends the siblings of a group one after the other, as the driver does;
"spread" sends one of every group, then the second ones, and so on. A cache holds whole blocks, so the tail of every
prompt is computed for each sibling. The share of prompt tokens that the cache held is vLLM's own count. Engines run one
after the other, each in a process of its own, and the first round does not count.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.rollout_throughput import of_run
from mempipe import environment
from mempipe.data.qa import read_questions
from mempipe.engines.config import ModelConfig
from mempipe.engines.tokenizer import load_tokenizer
from mempipe.rollout import make_renderer

CACHES = {"no cache": None, "blocks of 128": 128, "blocks of 32": 32}
"""128 is vLLM's own choice on a CPU, 32 the smallest that its kernels take and mempipe's choice."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder of a finished run")
    parser.add_argument("--groups", type=int, default=12)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count, each with other questions")
    arguments = parser.parse_args()
    config = of_run(arguments.run, {})
    renderer = make_renderer(config, tokenizer=load_tokenizer(config.model.path))
    questions = read_questions(config.data.validation)[: arguments.groups * (arguments.rounds + 1)]
    prompts = [
        renderer.prompt(question=renderer.question(question), memory=renderer.empty_memory) for question in questions
    ]
    rounds = [prompts[start : start + arguments.groups] for start in range(0, len(prompts), arguments.groups)]
    print(f"{arguments.groups} groups of {arguments.group_size}, prompts of {statistics.mean(map(len, prompts)):.0f}")
    print(f"{'':<16}{'order':<12}{'cached':>8}{'seconds':>9}")
    context = multiprocessing.get_context("spawn")
    for name, block_size in CACHES.items():
        with context.Pool(1) as pool:
            rows = pool.apply(
                _measure, (config.model, rounds, arguments.group_size, config.budget.context_tokens, block_size)
            )
        for order, cached, seconds in rows:
            print(f"{name:<16}{order:<12}{cached:>8.1%}{seconds:>9.2f}", flush=True)


def _measure(
    model: ModelConfig,
    rounds: Sequence[Sequence[list[int]]],
    group_size: int,
    max_model_len: int,
    block_size: int | None,
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
        **({} if block_size is None else {"block_size": block_size}),
    )
    params = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)
    rows = []
    for order in ("together", "spread"):
        cached, seconds = [], []
        for prompts in rounds:
            together = [prompt for prompt in prompts for _ in range(group_size)]
            requests = together if order == "together" else list(prompts) * group_size
            llm.reset_prefix_cache()
            started = time.perf_counter()
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in requests], params, use_tqdm=False)
            seconds.append(time.perf_counter() - started)
            cached.append(sum(output.num_cached_tokens or 0 for output in outputs) / sum(map(len, requests)))
        rows.append((order, statistics.mean(cached[1:]), statistics.median(seconds[1:])))
    return rows


if __name__ == "__main__":
    main()
