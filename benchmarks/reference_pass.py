"""Tokens per second of the reference's log-probs, beside a bare forward pass of the same model on padded rows and
beside the machine's own matrix products.

    python -m benchmarks.reference_pass [--contexts 650] [--rounds 5] [--threads 1] [--model FOLDER]

The contexts are those of `benchmarks.learner_throughput`, in float32. The bare pass is transformers' with its fastest
attention, eight contexts in a batch, sorted by length; it makes logits at every position, and no log-probs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.learner_throughput import make_contexts, needed_operations, padded, save_model
from benchmarks.machine import product_rate
from benchmarks.rows import Row, record
from mempipe.engines.config import ModelConfig
from mempipe.engines.model import PolicyModel
from mempipe.engines.reference import ReferenceModel

ROW_TOKENS = 2048
BATCH = 8
OF_UPDATE = 3
"""An update takes three times the operations of its forward pass."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, default=650)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", help="a Hugging Face folder; without it a random tiny model")
    arguments = parser.parse_args()
    samples = make_contexts(arguments.contexts, scale=1, seed=0)
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.model is None:
            save_model(Path(folder))
        path = arguments.model or folder
        reference = ReferenceModel(
            ModelConfig(path=path, dtype="float32"),
            temperature=1.0,
            max_tokens=ROW_TOKENS,
            num_threads=arguments.threads,
        )
        bare = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()
    by_length = sorted((sample.token_ids for sample in samples), key=len)
    batches = [by_length[i : i + BATCH] for i in range(0, len(by_length), BATCH)]

    @torch.no_grad()
    def bare_pass() -> None:
        for rows in batches:
            mask = padded([[1] * len(row) for row in rows])
            bare(input_ids=padded([list(row) for row in rows]), attention_mask=mask, use_cache=False)

    config = bare.config
    rate = product_rate(ROW_TOKENS, config.hidden_size, config.intermediate_size)
    limit = num_tokens * rate * OF_UPDATE / needed_operations(PolicyModel(bare), samples)
    seconds: dict[str, list[float]] = {"mempipe": [], "bare": []}
    for number in range(arguments.rounds + 1):
        for name, work in (("mempipe", lambda: reference.logprobs(samples)), ("bare", bare_pass)):
            started = time.perf_counter()
            work()
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - started)
    rates = {name: [num_tokens / one for one in times] for name, times in seconds.items()}
    row = Row(
        name="reference pass",
        unit="tokens/s",
        values=rates["mempipe"],
        peer="a bare forward pass",
        of_peer=rates["bare"],
        limit="matrix products",
        of_limit=[limit] * arguments.rounds,
    )
    record(row)
    print(f"{num_tokens} tokens, {arguments.threads} thread(s): {row.value:,.0f} tokens/s")
    for name, others in ((row.peer, row.of_peer), (row.limit, row.of_limit)):
        print(f"/ {name}: {statistics.median(row.ratios(others)):.2f}")


if __name__ == "__main__":
    main()
