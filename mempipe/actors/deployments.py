"""The services of a Ray cluster, as `serve deploy` makes them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from mempipe.actors.dashboard import connected, short
from mempipe.actors.lost import LaunchError
from mempipe.progress import say

STATUS_EVERY_S = 1.0
_FAILED = ("DEPLOY_FAILED", "UNHEALTHY")


class Deployments:
    """Ray Serve of one cluster."""

    def __init__(self, address: str) -> None:
        """Comes after `mempipe.actors.dashboard.prepare`; `address` is that of the dashboard. Raises ConfigError as
        `connected` does."""
        from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

        self._address = address
        self._client = connected(ServeSubmissionClient, address)

    def deploy(self, config: Mapping[str, Any]) -> list[str]:
        """Gives Serve a config, which takes the place of what runs there; returns the names of its applications. Raises
        LaunchError when Serve refuses it."""
        try:
            self._client.deploy_applications(dict(config))
        except (OSError, RuntimeError, ValueError) as error:
            raise LaunchError(f"the cluster at {self._address} did not take the config: {short(error)}") from error
        return [application["name"] for application in config["applications"]]

    def follow(self, names: Sequence[str]) -> None:
        """Returns when the applications run, and says how each is until then. Raises LaunchError when one cannot run,
        or the connection is lost."""
        said: dict[str, str] = {}
        while True:
            try:
                states = self._client.get_serve_details()["applications"]
            except (OSError, RuntimeError, ValueError, LookupError) as error:
                raise LaunchError(f"the connection to {self._address} was lost: {short(error)}") from error
            now = {name: states.get(name, {}).get("status", "NOT_STARTED") for name in names}
            for name, status in now.items():
                if said.get(name) != status:
                    say(f"{name}: {status.lower().replace('_', ' ')}")
            said = now
            for name in names:
                if now[name] in _FAILED:
                    raise LaunchError(f"{name} does not run: {_last_line(states[name].get('message', ''))}")
            if set(now.values()) == {"RUNNING"}:
                return
            time.sleep(STATUS_EVERY_S)


def _last_line(message: str) -> str:
    """Returns the line of Serve's message that names the fault: the last one of a traceback."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return short(lines[-1] if lines else "Serve gives no reason")
