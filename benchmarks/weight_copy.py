"""Milliseconds from a learner's tensors to tensors that an engine can load, beside one copy of the same bytes.

    python -m benchmarks.weight_copy [--rounds 7] [--model FOLDER]

Counted are packing, the file in shared memory with its checksum, and reading it with the checksum compared. Not
counted are the sharded learner's gathering and the engine's own copy into its layers.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

from benchmarks.machine import copy_seconds
from benchmarks.rows import Row, record
from mempipe.engines.weights import pack_weights, publish, read_weights
from mempipe.storage.scratch import memory_folder

SMALL = Qwen2Config(
    vocab_size=32_000, hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2,
    intermediate_size=1536, tie_word_embeddings=True,
)  # fmt: skip
"""42 million weights: large enough that bytes count, and not calls."""
MILLISECONDS = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", help="a Hugging Face folder, for its shapes; without it 42 M weights")
    arguments = parser.parse_args()
    config = AutoConfig.from_pretrained(arguments.model) if arguments.model else SMALL
    tensors = AutoModelForCausalLM.from_config(config, dtype=torch.float32).state_dict()
    num_bytes = len(pack_weights(tensors))
    values, copies = [], []
    with memory_folder(2 * num_bytes) as folder:
        for version in range(arguments.rounds + 1):
            started = time.perf_counter()
            info = publish(tensors, folder, version).update_info
            read_weights(info["path"], checksum=info["checksum"])
            if version:  # the first round warms up
                values.append(MILLISECONDS * (time.perf_counter() - started))
                copies.append(MILLISECONDS * copy_seconds(num_bytes))
    row = Row(
        name="weights to an engine",
        unit="ms",
        values=values,
        less_is_better=True,
        limit="a copy in memory",
        of_limit=copies,
    )
    record(row)
    print(f"{num_bytes / 2**20:,.0f} MiB: {row.value:.0f} ms; a copy takes {sorted(copies)[len(copies) // 2]:.0f} ms")


if __name__ == "__main__":
    main()
