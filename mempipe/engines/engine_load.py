"""Work of the engines between two syncs, and the duration of the last sync."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class EngineLoad:
    """Counts of one engine."""

    steps: int = 0
    """Steps of the engine; each samples one token of every running completion, or more where guesses were right."""
    running: int = 0
    """Completions that continued after a step, added up over the steps."""
    most_waiting: int = 0
    """Completions that had no room in the engine at the same time."""
    most_cache_use: float = 0.0
    """Share of the KV cache's blocks that were in use at the same time."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens from the prefix cache."""
    guessed_tokens: int = 0
    """Tokens that were guessed ahead (`generation.ngram_tokens`)."""
    right_tokens: int = 0
    """Guessed tokens that were sampled."""
    drain_seconds: float = 0.0
    """Seconds that the last weight update waited for running completions."""
    load_seconds: float = 0.0
    """Seconds from the end of the drain until the new weights were served."""

    def count_step(self, *, running: int, waiting: int, cache_use: float) -> None:
        self.steps += 1
        self.running += running
        self.most_waiting = max(self.most_waiting, waiting)
        self.most_cache_use = max(self.most_cache_use, cache_use)

    def count_guesses(self, *, guessed: int, right: int) -> None:
        self.guessed_tokens += guessed
        self.right_tokens += right

    def count_prompt(self, num_tokens: int, num_cached: int) -> None:
        self.prompt_tokens += num_tokens
        self.cached_tokens += num_cached


def load_metrics(loads: Sequence[EngineLoad]) -> dict[str, float]:
    """Returns the metrics of all engines: the largest value of any, means over all their steps and prompt tokens."""
    metrics = {
        "engine/waiting_max": float(max(load.most_waiting for load in loads)),
        "engine/kv_cache_use_max": max(load.most_cache_use for load in loads),
        "sync/drain_seconds": max(load.drain_seconds for load in loads),
        "sync/load_seconds": max(load.load_seconds for load in loads),
    }
    if steps := sum(load.steps for load in loads):
        metrics["engine/running_mean"] = sum(load.running for load in loads) / steps
    if prompt_tokens := sum(load.prompt_tokens for load in loads):
        metrics["engine/prefix_hit_rate"] = sum(load.cached_tokens for load in loads) / prompt_tokens
    if guessed := sum(load.guessed_tokens for load in loads):
        metrics["engine/guessed_right"] = sum(load.right_tokens for load in loads) / guessed
    return metrics
