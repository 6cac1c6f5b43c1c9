"""Classifies the errors after which a restart may succeed, because a part of the infrastructure was lost, and makes the
line that reports them.

Ray raises one kind for every way in which an actor, a worker, a node or an object can go; Ray Data wraps them once or
twice. `EngineDead` belongs to them, since an engine may end before its actor does. A fault of the work itself (a full
disk, a gradient that is not finite, an error in user-defined code) would occur again after a restart, and does not.
"""

from __future__ import annotations

import re

from ray import exceptions
from ray.exceptions import (
    ActorUnschedulableError,
    GetTimeoutError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    RpcError,
    TaskCancelledError,
    TaskUnschedulableError,
    UserCodeException,
    WorkerCrashedError,
)

from mempipe.engines.engine_faults import EngineDead

LONGEST_LINE = 300


class LaunchError(RuntimeError):
    """A role did not start or did not stay alive, or the cluster cannot be reached."""


class RoleLost(LaunchError):
    """Raised when an actor died or missed its deadline. Restarting the run may succeed."""


class ClusterLost(LaunchError):
    """The Ray cluster itself is gone; only a new process can continue."""

    was_said = False
    """Whether the person at the terminal was told already."""


class GroupFailed(RoleLost):
    """A group could not be finished after all its attempts."""


class LearnerFailed(RuntimeError):
    """A rank failed or did not finish a phase in time; the run resumes from its checkpoint with --resume."""


class LearnerLost(LearnerFailed):
    """Raised when a rank, or an engine that the ranks wait for, died or missed its deadline. Restarting the run may
    succeed."""


class EngineLost(LearnerLost):
    """Raised when an engine that the ranks wait for died. The ranks themselves are sound."""


FAULTS_OF_RAY = (RayError,)
"""All exceptions that Ray itself raises, for callers that do not import Ray."""
LOST_IN_RAY = (
    RayActorError,  # died and unavailable ones
    WorkerCrashedError,
    NodeDiedError,
    ObjectLostError,  # its owner's death as well
    OutOfMemoryError,
    LocalRayletDiedError,
    ActorUnschedulableError,
    TaskUnschedulableError,
    TaskCancelledError,
    GetTimeoutError,
    RpcError,
)
_NAMES = "|".join(
    name for name, kind in vars(exceptions).items() if isinstance(kind, type) and issubclass(kind, LOST_IN_RAY)
)
_RAISED = re.compile(
    rf"^(?:ray\.exceptions\.|mempipe\.engines\.engine_faults\.)?(?:{_NAMES}|{EngineDead.__name__})\b"
    "|^ValueError: Failed to look up actor",
    re.MULTILINE,
)
_CAUSE = re.compile(r"^(?:\w+\.)*(?!UserCodeException)[A-Z]\w*: .+", re.MULTILINE)
"""The line of a traceback that names the exception. What Ray Data adds below it is advice about its own retries."""

_REFUSED = re.compile(r"^mempipe\.settings\.ConfigError: (.+)", re.MULTILINE | re.DOTALL)
_CLASS = re.compile(r"^\s+class_name: (\w+)$", re.MULTILINE)


def is_lost(error: BaseException) -> bool:
    """Returns whether the run may continue after a restart of its roles."""
    if isinstance(error, ClusterLost):
        return False
    if isinstance(error, RoleLost | LearnerLost | EngineDead):
        return True
    if isinstance(error, RayTaskError):  # what a task raised, which may itself have waited for an actor
        cause = error.cause
        inner = isinstance(cause, BaseException) and is_lost(cause)
        return inner or bool(_RAISED.search(str(error)))  # Ray Data leaves only the text
    return isinstance(error, LOST_IN_RAY)


def refusal(error: BaseException) -> str:
    """Returns the sentence of the ConfigError with which an actor's constructor refused a setting; "" for an actor that
    ended otherwise. Ray leaves only the text of what a constructor raises."""
    if not isinstance(error, RayActorError) or "creation task" not in str(error):
        return ""
    raised = _REFUSED.search(str(error))
    return raised[1].strip() if raised else ""


def one_line(error: BaseException) -> str:
    """Returns an error's message on one line, without the addresses and ids that Ray adds."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, BaseException) and not isinstance(cause, UserCodeException):
            return one_line(cause)
        lines = [line.rstrip() for line in str(error).splitlines() if line.strip()]
        raised = [line for line in lines if _RAISED.match(line)][:1] or [line for line in lines if _CAUSE.match(line)]
        text = (raised or lines or [""])[-1].strip()
    elif isinstance(error, RayActorError):
        first, *rest = str(error).strip().splitlines() or [""]
        # A trace follows an error of its constructor; otherwise its class, its ids and its node do.
        text = rest[-1].strip() if rest and "creation task" in first else first
        if named := _CLASS.search(str(error)):
            text = f"{named[1]}: {text}"
    else:
        text = " ".join(str(error).split())
    text = text.removeprefix("ray.exceptions.") or type(error).__name__
    return text if len(text) <= LONGEST_LINE else f"{text[: LONGEST_LINE - 1]}…"
