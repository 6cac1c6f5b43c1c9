"""Faults of the infrastructure, which are retried and never become data (promise 8)."""

from __future__ import annotations

import random
from collections.abc import Iterator

from mempipe.credentials import without_passwords

_JITTER = random.Random()  # a separate generator: retries must not change the draws of seeded ones


class InfrastructureFault(RuntimeError):
    """An engine, a retriever or a node failed, independently of the question and the policy. The message shows no
    password of an address.
    """

    shows_command = False
    """The message shows a command line of whoever runs mempipe, which is not for the callers of a service."""

    def __str__(self) -> str:
        return without_passwords(super().__str__())


class RoleUnavailable(InfrastructureFault):
    """No replica of an engine or a retriever answered within the deadline, restarts included."""


class ServiceFault(InfrastructureFault):
    """A service that is reached over HTTP refused a request, or its answer is not one."""


class ServiceTimeout(ServiceFault):
    """A service gave no answer within the deadline and the attempts of a call."""


def retry_pauses(*, longest_s: float = 8.0) -> Iterator[float]:
    """Yields the seconds to wait before each further attempt, without end: doubling, each drawn from its upper half.

    The draw keeps callers that failed together from retrying together.
    """
    pause = 0.25
    while True:
        yield pause * _JITTER.uniform(0.5, 1.0)
        pause = min(2 * pause, longest_s)
