"""The packages of an installation: `mempipe`, and next to it `pipelines`, whose modules are the jobs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from mempipe.settings import ConfigError

PIPELINES = Path(__file__).resolve().parents[1] / "pipelines"


def check_pipelines() -> None:
    """Raises ConfigError where another package hides `pipelines`. Python searches the folder of a script first, or with
    `python -m` the working folder."""
    found = importlib.util.find_spec("pipelines")
    if found is None:
        raise ConfigError(f"{PIPELINES} is missing; install mempipe again")
    places = [Path(place).resolve() for place in (found.submodule_search_locations or [found.origin]) if place]
    if PIPELINES not in places:
        raise ConfigError(
            f"{places[0]} hides the package `pipelines` of mempipe; rename it, or start with `python -P` or the "
            "command `mempipe`, which do not search this folder"
        )
