"""What siblings that read the same chunk cost the learner, with `learner.share_prefixes` and without.

    python -m benchmarks.shared_prefixes [--siblings 8 16] [--chunk 512] [--repeats 3] [--threads 2]

Contexts as MemTrain's with `agent.chunk_first`: the chunk, which all siblings have, then a memory and a new memory of
their own, the last one in the loss. Timed is an optimiser update of `Learner.step` with a random Qwen2 in float32; each
way runs in a process of its own, whose peak memory is read at the end. Loss and gradient norm are printed to show that
the work is the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from mempipe.engines.config import LearnerConfig, ModelConfig, OptimizerConfig
from mempipe.engines.gauges import peak_memory_gib
from mempipe.engines.learner import Learner
from mempipe.engines.learner_settings import LearnerSettings
from mempipe.rl.config import AlgorithmConfig
from mempipe.rl.packing import pack_step
from mempipe.types import TrainingSample

VOCAB = 4096
OWN_TOKENS, LOSS_TOKENS = 128, 96
"""Tokens of question, memory and template after the chunk, and of the new memory."""
NUM_CHUNKS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--siblings", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--chunk", type=int, default=512, help="tokens that siblings share")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measured(**json.loads(arguments.measure))))
        return
    print("| siblings | shared | tokens | s an update | peak memory, GiB | loss | gradient norm |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        for num_siblings in arguments.siblings:
            ways = [in_a_process(folder, num_siblings, share, arguments) for share in (False, True)]
            for way in ways:
                print(
                    "| {siblings} | {share} | {tokens} | {seconds:.1f} | {gib:.2f} | {loss:.6f} | {norm:.5f} |".format(
                        **way
                    )
                )
            plain, shared = ways
            ratios = ", ".join(f"{name} {plain[name] / shared[name]:.2f}" for name in ("tokens", "seconds", "gib"))
            print(f"{num_siblings} siblings, without / with: {ratios}", flush=True)


def save_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def in_a_process(folder: str, num_siblings: int, share: bool, arguments: argparse.Namespace) -> dict[str, Any]:
    settings = {
        "folder": folder,
        "num_siblings": num_siblings,
        "share": share,
        "chunk": arguments.chunk,
        "repeats": arguments.repeats,
        "threads": arguments.threads,
    }
    command = [sys.executable, "-m", "benchmarks.shared_prefixes", "--measure", json.dumps(settings)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def measured(folder: str, num_siblings: int, share: bool, chunk: int, repeats: int, threads: int) -> dict[str, Any]:
    """Measures one variant: the tokens of an update, the median of its seconds after one that is not timed, and its
    memory."""
    learner = Learner(
        LearnerSettings(
            model=ModelConfig(path=folder, dtype="float32"),
            optimizer=OptimizerConfig(),
            learner=LearnerConfig(num_threads=threads),
            algorithm=AlgorithmConfig(kl_coef=0.0),
            temperature=1.0,
            num_updates=100,
        )
    )
    (batches,) = pack_step(
        contexts(num_siblings, chunk), num_ranks=1, max_tokens=8192, aggregation="context", share_prefixes=share
    )
    seconds, reports = [], []
    for _ in range(1 + repeats):
        started = time.perf_counter()
        reports += learner.step([batches])
        seconds.append(time.perf_counter() - started)
    return {
        "siblings": num_siblings,
        "share": share,
        "tokens": sum(batch.num_tokens for batch in batches),
        "seconds": statistics.median(seconds[1:]),
        "gib": peak_memory_gib(torch.device("cpu")),
        "loss": reports[0]["loss"],
        "norm": reports[0]["grad_norm"],
    }


def contexts(num_siblings: int, chunk: int) -> list[TrainingSample]:
    rng = np.random.default_rng(0)
    chunks = rng.integers(0, VOCAB, (NUM_CHUNKS, chunk)).tolist()
    mask = [0] * (chunk + OWN_TOKENS) + [1] * LOSS_TOKENS
    return [
        TrainingSample(
            trajectory_id=f"t{sibling}",
            group_id="g",
            context_index=index,
            token_ids=[*chunks[index], *rng.integers(0, VOCAB, OWN_TOKENS + LOSS_TOKENS).tolist()],
            loss_mask=mask,
            logprobs=np.where(mask, -8.3, 0.0).tolist(),
            policy_versions=[0] * len(mask),
            advantage=float(sibling % 2) - 0.5,
            trajectory_tokens=NUM_CHUNKS * LOSS_TOKENS,
        )
        for sibling in range(num_siblings)
        for index in range(NUM_CHUNKS)
    ]


if __name__ == "__main__":
    main()
