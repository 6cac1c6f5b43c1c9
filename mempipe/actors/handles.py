"""Ray's handles for the type checker, which takes an actor's methods for plain ones and so knows no `.remote`."""

from __future__ import annotations

from typing import Any, TypeAlias

import ray

Handle: TypeAlias = Any
"""A Ray actor handle."""


def start_actor(cls: type, options: dict[str, Any], *args: Any, **kwargs: Any) -> Handle:
    """An actor of `cls` with Ray's `options`."""
    remote: Any = ray.remote(cls)
    return remote.options(**options).remote(*args, **kwargs)
