"""The nccl group of ranks and engines, which is formed again when Ray has started an engine again.

Only the ranks hold the weights that the engines serve. A new engine samples nothing until the group was formed again
and has received them; the other engines and the ranks stay. A thread looks for new engines, and does this at once
unless the ranks are training: then the next sync does. A group that cannot be formed again ends its engines, so that
all roles start again from the newest checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

import ray
from ray.exceptions import RayError

from mempipe.actors.handles import Handle
from mempipe.actors.learner_group import LearnerGroup
from mempipe.actors.lost import EngineLost, one_line
from mempipe.progress import say

LOOK_EVERY_S = 2.0
ANSWER_S = 5.0
FORM_TIMEOUT_S = 300.0
"""As long as vLLM waits for the members of a group."""
MOST_LOSSES = 3
"""Engines that one sync may lose."""


class Ask(Protocol):
    """Describes a call of all engines that waits for those that start again (`mempipe.actors.launch.ask_all`)."""

    def __call__(self, submit: Callable[[Handle], Any], *, phase: str) -> Mapping[str, Any]: ...


class WeightGroup:
    """Sends the weights of the ranks to the engines by nccl. `close` it."""

    def __init__(
        self, learners: LearnerGroup, engines: Mapping[str, Handle], store: Handle, *, tensor_parallel: int, ask: Ask
    ) -> None:
        """Forms the group."""
        self._learners = learners
        self._engines = list(engines.values())
        self._store = store
        self._tensor_parallel = tensor_parallel
        self._ask = ask
        self._turn = threading.Lock()
        self._version: int | None = None
        """The version that the ranks hold and the engines serve; None while the ranks train."""
        self._is_whole = True
        self._ended = threading.Event()
        self._form(timeout_s=None)
        threading.Thread(target=self._watch, name="mempipe-weight-group", daemon=True).start()

    def hold(self) -> None:
        """Says that the ranks train from here on: their weights are nobody's until `send`."""
        with self._turn:
            self._version = None

    def send(self, version: int) -> None:
        """Brings the weights of the ranks to every engine as `version`. An engine that dies meanwhile is waited for,
        until Ray has started it again. Raises LearnerLost when too many die, and as `LearnerGroup.send_weights` and
        `Ask` do."""
        with self._turn:
            ray.get(self._store.put.remote([], version))
            self._send(version)
            self._version = version

    def close(self) -> None:
        """Ends the watch; returns at once."""
        self._ended.set()

    def _send(self, version: int) -> None:
        for left in reversed(range(MOST_LOSSES)):
            try:
                connected = self._ask(lambda engine: engine.is_connected.remote(), phase="looking for new engines")
                if not (self._is_whole and all(connected.values())):
                    say("an engine was started again: the engines and the ranks form another nccl group")
                    self._form(timeout_s=FORM_TIMEOUT_S)
                self._learners.send_weights(version, self._engines)
                return
            except EngineLost as error:
                self._is_whole = False
                if not left:
                    raise
                say(f"{error}; it is waited for")

    def _form(self, *, timeout_s: float | None) -> None:
        self._learners.open_transfer(
            self._engines, tensor_parallel=self._tensor_parallel, backend="nccl", timeout_s=timeout_s
        )
        self._is_whole = True

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_EVERY_S):
            try:
                if self._version is None or not self._is_any_new():
                    continue
                with self._turn:
                    if self._version is not None and self._is_any_new():  # no sync has connected it meanwhile
                        self._send(self._version)
            except Exception as error:  # of any kind: nothing else would end the wait for a new engine
                if not self._ended.is_set():  # else Ray has ended under this thread
                    self._give_up(error)
                return

    def _is_any_new(self) -> bool:
        """Returns whether an engine is up that is in no group. One that is dead or being loaded is not up yet."""
        answers = [engine.is_connected.remote() for engine in self._engines]
        done, _ = ray.wait(answers, num_returns=len(answers), timeout=ANSWER_S)
        connected = []
        for answer in done:
            with suppress(RayError):
                connected.append(ray.get(answer))
        return not all(connected)

    def _give_up(self, error: Exception) -> None:
        say(f"the engines end, because their nccl group could not be formed again: {one_line(error)}")
        for engine in self._engines:
            with suppress(RayError):
                ray.kill(engine)
