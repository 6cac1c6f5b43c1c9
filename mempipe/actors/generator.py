"""The vLLM engines as Ray actors."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from mempipe.actors.batched_calls import Answer, BatchedServer, Request
from mempipe.actors.handles import find_actor
from mempipe.beacons import reached
from mempipe.engines.config import GenerationConfig, ModelConfig, SamplingConfig
from mempipe.engines.engine_faults import WeightTransferFailed
from mempipe.engines.engine_load import EngineLoad
from mempipe.engines.generator import EngineDead, Generator
from mempipe.engines.proof import Proof, check_held
from mempipe.engines.weights import WeightHandle, read_checksums
from mempipe.planning.placement import Transfer
from mempipe.types import Completion

Work = Literal["generate", "score"]
WATCH_EVERY_S = 1.0


class GeneratorActor:
    """One vLLM engine. When the engine dies the actor exits with an error, so that Ray starts both again."""

    def __init__(
        self,
        *,
        model: ModelConfig,
        config: GenerationConfig,
        context_tokens: int,
        seed: int,
        number: int = 0,
        store: str,
        transfer: Transfer,
        stop_texts: Sequence[str] = (),
        sleeps: bool = False,
        reproducible: bool = False,
    ) -> None:
        """`seed` is that of all engines, which differ by their `number`.

        `store` is the name of the run's WeightStore: a handle among the arguments could be lost before a restart."""
        self._engine = Generator(
            model,
            config,
            max_model_len=context_tokens,
            seed=seed + number,
            transfer=transfer,
            stop_texts=stop_texts,
            can_sleep=sleeps,
            reproducible=reproducible,
        )
        self._model = model
        self._number = number
        self._store = find_actor(store)
        self._desk = BatchedServer(self._answer)
        self._sleeps = sleeps
        self._started = asyncio.Lock()
        self._ready = False
        self._served = asyncio.Event()  # not set while the weights of the run have yet to come from the ranks
        self._ending = False
        self._watch: asyncio.Task[None] | None = None

    async def ready(self) -> int:
        """Loads the engine and, after a restart, the newest weights. Returns the policy version."""
        async with self._started:
            if not self._ready:
                await self._load()
        return self._engine.policy_version

    async def _load(self) -> None:
        reached("engine.start")
        await self._engine.start()
        if self._watch is None:  # from here on, since the engine may die while it takes the weights
            self._watch = asyncio.create_task(self._exit_with_the_engine())
        newest = await self._store.newest.remote()
        if newest is None:
            self._served.set()
        elif references := newest[0]:
            await self._engine.load_weights(await references[0], policy_version=newest[1])
            self._served.set()
        self._ready = True

    async def begin(self, weights: WeightHandle | None, seed: int) -> None:
        """Answers as an engine that was just started with `seed`, from `weights` (None: those that it serves). Raises
        StaleWeights when it holds others afterwards."""
        await self._awake()
        if weights is not None:
            await self.load_weights(weights, weights.version)
            sent = await asyncio.to_thread(read_checksums, weights, dtype=self._model.dtype)
            held, sender = await self._engine.held_weights(), weights.update_info["path"]
            check_held(held, sent, engine="the engine", version=weights.version, sender=sender)
        await self._engine.begin(seed + self._number)

    async def exchange(self, caller: str, requests: Sequence[Request]) -> list[Answer]:
        """Answers the requests of `mempipe.actors.pools.GeneratorPool` with completions and scores."""
        return await self._desk.exchange(caller, requests)

    async def _exit_with_the_engine(self) -> None:
        """Ends this process soon after the engine died. Ray restarts only actors that ended with an error: it takes
        `ray.actor.exit_actor` as intended.
        """
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            try:
                self._engine.check_alive()
            except EngineDead as error:
                if self._ending:
                    return
                print(f"generator: {error}", file=sys.stderr, flush=True)
                os._exit(1)

    def _check_served(self) -> None:
        """Raises WeightTransferFailed on an engine that was started again and has no weights of the run yet. Others may
        have, so that a caller does not wait here."""
        if not self._served.is_set():
            raise WeightTransferFailed("the engine was started again and waits for the weights of the ranks")

    async def _awake(self) -> None:
        """Loads the engine on the first call after Ray restarted the actor; at launch `ready` has done so. An engine
        that shares its GPU with the learner is not loaded while that works: there is no memory for it."""
        while not self._ready:
            async with self._started:
                if not self._ready and not (self._sleeps and await self._store.are_held.remote()):
                    await self._load()
            if not self._ready:
                await asyncio.sleep(WATCH_EVERY_S)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Returns the log-probs of `token_ids[1:]` given what precedes them, under the served weights."""
        await self._awake()
        self._check_served()
        return await self._engine.score(token_ids)

    async def prove(self, canary: Sequence[Sequence[int]]) -> Proof:
        """Returns the data of the weight check: version and checksums of the loaded weights, and the log-probs of the
        canary sequences, computed whole and from the prefix cache."""
        await self._awake()
        await self._served.wait()
        held = await self._engine.held_weights()
        # From the cache first: after whole sequences were scored, the cache would hold their ends too.
        from_cache = [await self._engine.score_from_cache(token_ids) for token_ids in canary]
        scores = [await self._engine.score(token_ids) for token_ids in canary]
        return Proof(held=held, scores=scores, scores_from_cache=from_cache)

    async def take_load(self) -> EngineLoad:
        """Returns how busy the engine was since the last call, and how long its last weights took."""
        return self._engine.take_load()

    async def under_way(self) -> int:
        """Counts completions that are running or waiting."""
        return self._desk.num_under_way

    async def shutdown(self) -> None:
        """Ends the engine's processes; the actor itself is killed afterwards."""
        self._ending = True
        await self._engine.shutdown()

    async def sleep(self) -> None:
        """Frees the GPU's memory until `wake`; completions wait until then. An engine that is not loaded has none."""
        async with self._started:  # an engine that is being loaded sleeps afterwards
            if self._ready:
                await self._engine.sleep()

    async def wake(self) -> None:
        """Resumes sampling, from the weights that were loaded during the sleep."""
        await self._awake()
        await self._engine.wake()

    async def connect(self, init_info: dict[str, Any]) -> None:
        """Joins the rendezvous of a transfer between GPUs."""
        await self._awake()
        await self._engine.connect(init_info)

    async def is_connected(self) -> bool:
        """Returns whether the engine has joined a rendezvous since it was started. Raises EngineDead."""
        await self._awake()
        self._engine.check_alive()
        return self._engine.is_connected

    async def load_weights(self, weights: np.ndarray | WeightHandle, policy_version: int) -> None:
        """Loads version `policy_version` of the weights between two completions. An engine that sleeps and is not
        loaded takes them from the store when it wakes."""
        if self._sleeps and not self._ready:
            return
        await self._awake()
        reached("engine.load_weights", version=policy_version)
        await self._engine.load_weights(weights, policy_version=policy_version)
        self._served.set()

    async def _answer(self, work: Work, token_ids: Sequence[int], *arguments: Any) -> Completion | list[float]:
        return await (self.score(token_ids) if work == "score" else self._generate(token_ids, *arguments))

    async def _generate(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        sampling: SamplingConfig,
        stop_token_ids: Sequence[int],
        seed: int | None,
    ) -> Completion:
        await self._awake()
        self._check_served()
        reached("engine.generate", version=self._engine.policy_version)
        return await self._engine.generate(
            token_ids, max_tokens=max_tokens, sampling=sampling, stop_token_ids=stop_token_ids, seed=seed
        )
