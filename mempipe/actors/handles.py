"""Types Ray actor handles as `Any`: a type checker sees the plain methods of the actor class and rejects `.remote`."""

from __future__ import annotations

from typing import Any, TypeAlias

import ray

from mempipe.actors.lost import RoleLost

Handle: TypeAlias = Any
"""A Ray actor handle."""


def start_actor(cls: type, options: dict[str, Any], *args: Any, **kwargs: Any) -> Handle:
    """Starts an actor of `cls` with Ray's `options`."""
    remote: Any = ray.remote(cls)
    return remote.options(**options).remote(*args, **kwargs)


def find_actor(name: str, namespace: str | None = None) -> Handle:
    """Returns the handle of a named actor, in this job's namespace unless told otherwise. Raises RoleLost when it is
    gone for good."""
    try:
        return ray.get_actor(name, namespace)
    except ValueError as error:
        raise RoleLost(f"{name} is gone") from error
