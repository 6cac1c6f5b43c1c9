"""Plays the trajectories of training and evaluation (serving plays the same agents: `mempipe.answers.answering`).

A driver looks up the engines and retrievers by name, binds the configured agent to them, and plays any number of
trajectories at the same time. It holds no state that matters: when it dies, its unfinished groups are played again by
another one.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from typing import Any

from mempipe.actors.handles import find_actor
from mempipe.actors.lost import GroupFailed, RoleLost
from mempipe.actors.pools import GeneratorPool, RetrieverPool
from mempipe.agents.protocol import UnfitQuestion
from mempipe.config import RunConfig
from mempipe.engines.config import EndpointConfig, SamplingConfig
from mempipe.engines.endpoint import Endpoint
from mempipe.engines.tokenizer import load_tokenizer
from mempipe.faults import InfrastructureFault
from mempipe.rollout import (
    Control,
    GoldLogprobsFn,
    agent_code,
    make_gold_logprobs,
    make_rollout,
    run_group,
)
from mempipe.types import Group, Question, Trajectory


@dataclass(frozen=True, kw_only=True)
class DriverSpec:
    """The settings of a driver as small plain values, since Ray may restart it on another node at any time."""

    config: RunConfig
    sampling: SamplingConfig
    group_size: int
    namespace: str
    generators: list[str]
    retrievers: list[str]
    admission: str = ""  # name of the `Admission` actor of a training; empty: the groups are not trained on
    endpoint: EndpointConfig | None = None  # completes instead of the generators
    control: Control | None = None
    record_failures: bool = False  # a question that does not fit, or an endpoint that fails, gives a group that says so


class Driver:
    """Plays groups against the engines. It is used from one event loop."""

    def __init__(self, spec: DriverSpec) -> None:
        config = spec.config
        self._spec = spec
        actors = {name: find_actor(name, spec.namespace) for name in [*spec.generators, *spec.retrievers]}
        tokenizer = load_tokenizer(config.model.path)
        generators: GeneratorPool | Endpoint
        if spec.endpoint is not None:
            stop_texts = config.agent_spec.stop_texts
            generators = Endpoint(spec.endpoint, sampling=spec.sampling, tokenizer=tokenizer, stop_texts=stop_texts)
        else:
            replicas, stop_token_ids = [actors[name] for name in spec.generators], sorted(tokenizer.stop_token_ids)
            generators = GeneratorPool(
                replicas, config=config.generation, sampling=spec.sampling, stop_token_ids=stop_token_ids
            )
        self._retrievers = RetrieverPool([actors[name] for name in spec.retrievers], config=config.retrieval)
        self._play = make_rollout(
            config,
            tokenizer=tokenizer,
            generate=generators.generate,
            search=self._retrievers.search,
            control=spec.control,
            training=bool(spec.admission),
        )
        self._gold_logprobs: GoldLogprobsFn | None = None
        if spec.admission and config.reward.information_weight:
            assert isinstance(generators, GeneratorPool), "an endpoint is not trained"
            self._gold_logprobs = make_gold_logprobs(config, tokenizer=tokenizer, score=generators.score)

    async def _rollout(self, question: Question, **ids: Any) -> Trajectory:
        """Plays one attempt. Errors in a user-defined agent name the user's file."""
        with agent_code(self._spec.config, f"it failed at question {question.id}", passing=(UnfitQuestion, RoleLost)):
            return await self._play(question, **ids)

    async def play(self, group_id: str, question: Question) -> Group:
        """Returns the group's trajectories, scored. Plays the whole group again after a fault of the infrastructure.

        Raises GroupFailed when `stream.num_attempts` are used up, UnfitQuestion for a question that the agent cannot
        take, and UserCodeError for an error in user-defined code.
        """
        attempts = self._spec.config.stream.num_attempts
        faults: list[Exception] = []
        while len(faults) < attempts:
            try:
                group = await run_group(
                    question,
                    self._rollout,
                    group_id=group_id,
                    group_size=self._spec.group_size,
                    reward=self._spec.config.reward,
                    advantage=self._spec.config.algorithm,
                    gold_logprobs=self._gold_logprobs,
                )
                return replace(group, num_retries=len(faults))
            except InfrastructureFault as fault:
                faults.append(fault)
                logging.getLogger(__name__).warning(
                    "group %s, attempt %d of %d: %s", group_id, len(faults), attempts, fault
                )
                await asyncio.sleep(len(faults))  # seconds; not tuned
            except UnfitQuestion as error:
                if not self._spec.record_failures:
                    raise
                return Group(id=group_id, question=question, trajectories=[], failed=str(error))
        if self._spec.record_failures and self._spec.endpoint is not None:
            return Group(id=group_id, question=question, trajectories=[], num_retries=attempts, failed=str(faults[-1]))
        raise GroupFailed(f"group {group_id} failed {attempts} times (stream.num_attempts); last: {faults[-1]}")
