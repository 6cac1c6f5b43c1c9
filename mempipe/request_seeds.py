"""Seeds of the requests of one attempt, so that an attempt that is played again samples the same tokens."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from mempipe.agents.protocol import GenerateFn
from mempipe.types import Completion


class SeededGenerateFn(Protocol):
    """A `GenerateFn` that takes the seed of a completion."""

    async def __call__(self, token_ids: Sequence[int], *, max_tokens: int, seed: int | None = None) -> Completion: ...


class RequestSeeds:
    """Gives every request of an attempt its seed: a hash of the run's seed, the group, the member and the call.

    A call is identified by its prompt, and by the number of earlier calls of the attempt with the same prompt. The
    call's position alone would not identify it: an agent may have several requests in flight, in an order that depends
    on timing.
    """

    def __init__(self, seed: int, *, group_id: str, member: int) -> None:
        self._attempt = (seed, group_id, member)
        self._num_asked: Counter[str] = Counter()

    def next(self, token_ids: Sequence[int]) -> int:
        """Returns the seed, from 0 to 2**63 - 1, of the next request with this prompt."""
        prompt = hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16).hexdigest()
        call = json.dumps([*self._attempt, prompt, self._num_asked[prompt]])
        self._num_asked[prompt] += 1
        return int.from_bytes(hashlib.blake2b(call.encode(), digest_size=8).digest()) >> 1

    def given_to(self, generate: SeededGenerateFn) -> GenerateFn:
        """Returns `generate` with the seeds of this attempt."""

        async def seeded(token_ids: Sequence[int], *, max_tokens: int) -> Completion:
            return await generate(token_ids, max_tokens=max_tokens, seed=self.next(token_ids))

        return seeded
