"""Engines and retrievers that stay from one agent of an evaluation to the next.

What an actor was started with decides: retrievers with the same settings stay; engines that were started alike load the
next agent's weights; all others end, and start again in the same seats. What an agent gets does not depend on the
agents before it: an engine begins each time with an empty prefix cache, the seed of its start, and weights whose
checksums were compared with those of the files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mempipe.actors.launch import ClusterGpus, RolloutActors, Started, reserve
from mempipe.actors.lost import LaunchError, one_line
from mempipe.config import RunConfig
from mempipe.engines.architectures import QUANTIZATION_FILES, quantization, rotation_limit
from mempipe.engines.weights import WeightHandle, model_handle
from mempipe.planning.placement import Demand
from mempipe.progress import say
from mempipe.settings import ConfigError
from mempipe.storage.files import sha256


@dataclass(frozen=True, kw_only=True)
class Makeup:
    """Settings that actors are started with, without those that an engine can change while it runs: its weights, its
    seed, and a context that is at most as long."""

    engines: dict[str, Any] | None
    """None: an endpoint completes."""
    retrievers: dict[str, Any]

    @classmethod
    def of(cls, config: RunConfig, *, generators: bool = True) -> Makeup:
        folder, stop_texts = Path(config.model.path), config.agent_spec.stop_texts
        engines = {
            "model": config.model.model_copy(update={"path": "", "source": ""}),
            "shape": _hash(folder / "config.json") or config.model.path,
            "quantization": [_hash(folder / name) for name in QUANTIZATION_FILES],
            "rotates_long": _rotates_long(folder, config.budget.context_tokens),
            "generation": config.generation,
            "stop_texts": stop_texts,
            "tokenizer": stop_texts and (_hash(folder / "tokenizer.json") or config.model.path),
            "reproducible": config.ordered,
        }
        retrievers = {"retrieval": config.retrieval, "reproducible": config.ordered}
        return cls(engines=engines if generators else None, retrievers=retrievers)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The weights that engines serve."""

    path: str
    handle: WeightHandle | None
    """None: a name on the hub, files of another format, or quantized weights, which an engine stores in its own form.
    A new engine loads them, one that runs cannot."""

    @classmethod
    def of(cls, config: RunConfig) -> Weights:
        path = config.model.path
        return cls(path=path, handle=None if _is_quantized(Path(path)) else model_handle(path))


class StandingActors:
    """The engines and retrievers of one agent after the other. They end with the block, and after an error in
    `serving`, so that the next agent's actors are new."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._expected: Sequence[RunConfig] = ()
        self._gpus: ClusterGpus | None = None
        self._started: Started | None = None
        self._makeup: Makeup | None = None
        self._context_tokens = 0
        self._weights: Weights | None = None

    def __enter__(self) -> StandingActors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all actors."""
        started, self._started, self._makeup = self._started, None, None
        if started is not None:
            started.close()

    def expect(self, configs: Sequence[RunConfig]) -> None:
        """Names the configs of agents that will need engines: those that can share one get one for the longest of their
        contexts."""
        self._expected = configs

    @contextmanager
    def serving(self, config: RunConfig, *, generators: bool = True) -> Iterator[RolloutActors]:
        """Yields engines with the weights of `model.path` and retrievers, ready; without `generators` an endpoint
        completes. Raises as `mempipe.actors.launch.launch` does."""
        try:
            yield self._ready(config, generators=generators)
        except BaseException:  # what state the actors are in is not known
            self.close()
            raise

    def _ready(self, config: RunConfig, *, generators: bool) -> RolloutActors:
        demand = Demand.of_rollouts(config)
        demand = demand if generators else replace(demand, engines=0)
        makeup = Makeup.of(config, generators=generators)
        if self._started is not None and self._gpus is not None:
            try:
                if self._gpus.plan(config, demand) == self._started.plan:
                    return self._changed(self._started, config, makeup)
            except (LaunchError, ConfigError) as error:
                say(f"engines and retrievers start again: {one_line(error)}")
            self.close()
        self._gpus = ClusterGpus.found()
        self._started = Started(config, self._namespace, reserve(self._gpus.plan(config, demand)))
        return self._changed(self._started, config, makeup)

    def _changed(self, started: Started, config: RunConfig, makeup: Makeup) -> RolloutActors:
        """Starts the actors that are not there, or not as the config has them; returns all of them, ready for it."""
        started.config = started.plan.applied(config)
        weights = Weights.of(config)
        new_engines = not self._can_serve(config, makeup, weights)
        if new_engines:
            started.stop("generator")
            self._context_tokens = max([config.budget.context_tokens, *self._contexts_beside(makeup)])
            started.start_engines(context_tokens=self._context_tokens)
        if self._makeup is None or self._makeup.retrievers != makeup.retrievers:
            started.stop("retrieval")
            started.start_retrievers()
        actors = started.rollout_actors()
        actors.wait()
        if actors.generators:
            loaded = None if new_engines or weights == self._weights else weights.handle
            actors.begin(loaded)
        self._makeup, self._weights = makeup, weights
        return actors

    def _can_serve(self, config: RunConfig, makeup: Makeup, weights: Weights) -> bool:
        return (
            self._makeup is not None
            and self._makeup.engines == makeup.engines
            and self._context_tokens >= config.budget.context_tokens
            and (weights.handle is not None or weights == self._weights)
        )

    def _contexts_beside(self, makeup: Makeup) -> list[int]:
        return [each.budget.context_tokens for each in self._expected if Makeup.of(each).engines == makeup.engines]


@contextmanager
def launch_rollout_actors(config: RunConfig, namespace: str) -> Iterator[RolloutActors]:
    """Starts engines with the weights of `model.path`, and retrievers, for one agent; they end with the block. Raises
    as `StandingActors.serving` does."""
    with StandingActors(namespace) as standing, standing.serving(config) as actors:
        yield actors


def _rotates_long(folder: Path, context_tokens: int) -> bool:
    """Returns whether an engine for contexts of that length is another network, for all its contexts, than one for
    short ones (`rotation_limit`)."""
    file = folder / "config.json"
    limit = rotation_limit(json.loads(file.read_text())) if file.is_file() else None
    return limit is not None and context_tokens > limit


def _is_quantized(folder: Path) -> bool:
    file = folder / "config.json"
    return bool(quantization(str(folder), json.loads(file.read_text()) if file.is_file() else {}))


def _hash(file: Path) -> str:
    return sha256(file) if file.is_file() else ""
