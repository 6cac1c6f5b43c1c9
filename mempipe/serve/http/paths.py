"""The path of a request within the service."""

from __future__ import annotations

from starlette.types import Scope


def path_of(scope: Scope) -> str:
    """Returns the path without the prefix under which Serve or a proxy has put the service (`route_prefix`,
    `http_options.root_path`): routes are found without it, so every limit must be too.
    """
    path, prefix = scope["path"], scope.get("root_path", "")
    return path[len(prefix) :] if prefix and path.startswith(f"{prefix}/") else path
