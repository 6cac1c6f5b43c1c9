"""Numbers of the agents and the engines for Prometheus, at the metrics port of every Ray node.

All are counters or histograms: Ray drops a gauge that was not set for some seconds, so one that answers set would be
gone whenever there are none.
"""

from __future__ import annotations

from typing import Any

from ray.serve import metrics

from mempipe.answers.api import AnswerReply
from mempipe.engines.engine_load import EngineLoad

SECONDS = [0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0]
"""Bounds of the latency histograms."""
SHARES = [0.1, 0.25, 0.5, 0.75, 0.9, 1.0]
"""Bounds of the histogram of the memory."""


class EngineMetrics:
    """Counts what an engine was given to read; the share that its prefix cache held is a quotient of the two."""

    def __init__(self) -> None:
        names: Any = ("cached",)
        self._tokens = metrics.Counter(
            "mempipe_prompt_tokens", "Tokens of prompts, by whether they were cached.", names
        )

    def count(self, load: EngineLoad) -> None:
        for cached, tokens in (("yes", load.cached_tokens), ("no", load.prompt_tokens - load.cached_tokens)):
            if tokens:
                self._tokens.inc(tokens, {"cached": cached})


class PrometheusMetrics:
    """Sends the counts of `mempipe.serve.requests.journal.Metrics` to Prometheus."""

    def __init__(self) -> None:
        def counter(name: str, description: str, *tags: Any) -> metrics.Counter:
            names: Any = tags  # Ray's annotation is of a tuple of one
            return metrics.Counter(f"mempipe_{name}", description, names)

        def histogram(name: str, description: str, bounds: list[float], *tags: Any) -> metrics.Histogram:
            names: Any = tags
            return metrics.Histogram(f"mempipe_{name}", description, boundaries=bounds, tag_keys=names)

        self._requests = counter("requests", "Requests by path and status.", "path", "status")
        self._seconds = histogram("request_seconds", "Seconds from request to answer.", SECONDS, "path")
        self._answers = counter("answers", "Answers by agent and how they ended.", "agent", "end_reason")
        self._turns = counter("turns", "Turns of the attempts that gave the answers.", "agent")
        self._tokens = counter("tokens", "Tokens, by whether they were read or sampled.", "agent", "kind")
        self._stages = histogram("stage_seconds", "Seconds of one turn in engine and retriever.", SECONDS, "stage")
        self._memory = histogram("memory_share", "Share of its budget that the memory of a turn has.", SHARES, "agent")

    def requested(self, path: str, status: int, seconds: float) -> None:
        self._requests.inc(1, {"path": path, "status": str(status)})
        self._seconds.observe(seconds, {"path": path})

    def answered(self, reply: AnswerReply) -> None:
        agent = {"agent": reply.agent}
        self._answers.inc(1, {**agent, "end_reason": reply.end_reason})
        for kind, count in (("read", reply.usage.prompt_tokens), ("sampled", reply.usage.completion_tokens)):
            if count:
                self._tokens.inc(count, {**agent, "kind": kind})
        for turn in reply.turns:
            self._turns.inc(1, agent)
            self._stages.observe(turn.generate_seconds, {"stage": "generate"})
            self._stages.observe(turn.search_seconds, {"stage": "search"})
            if turn.memory_limit:
                self._memory.observe(turn.memory_tokens / turn.memory_limit, agent)
