"""Seconds and memory of log-probs, entropies and their gradient: `token_scores` against automatic differentiation.

    python -m benchmarks.loss_kernel [--vocab 151936] [--rows 441] [--repeats 5] [--threads 1]

Both get the same float32 logits; `--rows` of them are a chunk of the learner (`engines.model.MAX_LOGITS`). Each runs in
a fresh process. Memory is the peak of the process beyond the logits themselves.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import time

import torch
from torch import Tensor
from torch.nn.functional import nll_loss

from mempipe.engines.token_scores import token_scores

MIB = 2**20


def plain(logits: Tensor, targets: Tensor) -> Tensor:
    all_logprobs = logits.log_softmax(-1)
    with torch.no_grad():
        torch.linalg.vecdot(all_logprobs.exp(), all_logprobs)
    return -nll_loss(all_logprobs, targets, reduction="none")


def fused(logits: Tensor, targets: Tensor) -> Tensor:
    return token_scores(logits, targets, entropy_gradient=False)[0]


def measure(kernel: str, rows: int, vocab: int, repeats: int, threads: int) -> tuple[float, float]:
    """Measures the seconds of a forward and a backward pass, the median, and MiB beyond the logits."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    logits, targets = torch.randn(rows, vocab).requires_grad_(), torch.randint(vocab, (rows,))
    weights, seconds = torch.randn(rows), []
    before = _peak_mib()
    for _ in range(repeats):
        logits.grad = None
        started = time.perf_counter()
        (weights @ globals()[kernel](logits, targets)).backward()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds), _peak_mib() - before


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rows", type=int, default=441)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    sizes = (arguments.rows, arguments.vocab, arguments.repeats, arguments.threads)
    print(f"logits of {arguments.rows} x {arguments.vocab:,}: {4 * arguments.rows * arguments.vocab / MIB:.0f} MiB")
    for kernel in ("plain", "fused"):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            seconds, peak = pool.apply(measure, (kernel, *sizes))
        print(f"{kernel:6} {seconds:.3f} s, {peak:,.0f} MiB")


if __name__ == "__main__":
    main()
