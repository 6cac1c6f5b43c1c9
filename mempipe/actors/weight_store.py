"""The store from which an engine that starts again takes its weights, and learns whether it may load them yet."""

from __future__ import annotations

import ray

from mempipe.beacons import reached


class WeightStore:
    """Holds a reference to the newest weights, so that an engine that starts late or again catches up on its own."""

    def __init__(self) -> None:
        self._newest: tuple[list[ray.ObjectRef], int] | None = None
        self._are_held = False

    def put(self, weights: list[ray.ObjectRef], policy_version: int) -> None:
        """Stores `weights`, a list of one reference; the list keeps Ray from fetching the weights themselves. An empty
        one says that only the ranks hold them, who send them by nccl."""
        reached("store.put", version=policy_version)
        self._newest = (weights, policy_version)

    def newest(self) -> tuple[list[ray.ObjectRef], int] | None:
        return self._newest

    def hold_engines(self, held: bool) -> None:
        """Keeps engines from being loaded (`held`), because the learner needs their GPU memory, or allows it again."""
        self._are_held = held

    def are_held(self) -> bool:
        return self._are_held
