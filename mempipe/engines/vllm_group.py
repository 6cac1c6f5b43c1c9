"""The engine's end of vLLM's `nccl` transfer, in a group that may lose a member and be formed again.

When a member dies, NCCL keeps the others waiting in a broadcast. The sender learns of the death from Ray, because it
also waits for the engines' answers. It says so in the group's store and aborts its own communicator; every other member
finds the word in the store and aborts its own. A group that was aborted is not used again: `connect` forms another one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferInitInfo,
    NCCLWeightTransferUpdateInfo,
)

from mempipe.engines.weights import MEMBER_LOST

LOOK_EVERY_S = 1.0


class GroupTransfer(NCCLWeightTransferEngine):
    """Receives weights as vLLM's own class does, for as long as no member is lost."""

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        self.shutdown()  # the group before this one
        super().init_transfer_engine(init_info)

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Raises RuntimeError when the group lost a member meanwhile: the weights are not whole then."""
        try:
            with _until_lost(self.model_update_group):
                super().receive_weights(update_info)
        except BaseException:
            self.finish_weight_update()  # vLLM would count the half that came as part of the next update
            raise


@contextmanager
def _until_lost(group: Any) -> Iterator[None]:
    """Aborts `group`, vLLM's communicator, and so ends the block, as soon as its store says that a member is lost."""
    ended, lost = threading.Event(), threading.Event()

    def watch() -> None:
        while group is not None and not ended.wait(LOOK_EVERY_S):
            try:
                told = group.group.store.check([MEMBER_LOST])
            except RuntimeError:  # torch's for a connection that broke: the sender is gone, and the store with it
                told = True
            if told:
                lost.set()
                group.destroy()
                return

    watching = threading.Thread(target=watch, name="mempipe-group-watch", daemon=True)
    watching.start()
    try:
        yield
    finally:
        ended.set()
        watching.join()
    if lost.is_set():
        raise RuntimeError("the group of ranks and engines lost a member")
