"""What engines had to do between two syncs, and how long they took for the last one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class EngineLoad:
    """Counts of one engine."""

    most_under_way: int = 0
    """Completions at the same time, those that wait for room in the engine included."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt tokens those that the prefix cache held."""
    drain_seconds: float = 0.0
    """For which new weights waited until the completions under way had finished."""
    load_seconds: float = 0.0
    """From then on until the weights were served."""

    def count_prompt(self, num_tokens: int, num_cached: int) -> None:
        self.prompt_tokens += num_tokens
        self.cached_tokens += num_cached


def load_metrics(loads: Sequence[EngineLoad]) -> dict[str, float]:
    """Returns what is logged of all engines: the largest value of any, and the share of all prompt tokens."""
    prompt_tokens = sum(load.prompt_tokens for load in loads)
    metrics = {
        "engine/under_way_max": float(max(load.most_under_way for load in loads)),
        "sync/drain_seconds": max(load.drain_seconds for load in loads),
        "sync/load_seconds": max(load.load_seconds for load in loads),
    }
    if prompt_tokens:
        metrics["engine/prefix_hit_rate"] = sum(load.cached_tokens for load in loads) / prompt_tokens
    return metrics
