"""The dashboard of a Ray cluster, which takes jobs and services.

Ray finds the token by itself (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token). It is never read here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from mempipe.settings import ConfigError

_CHATTY = (
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
    "ray._private.authentication",
    "ray._private.runtime_env.packaging",
    "ray._private.runtime_env.working_dir",
)


def prepare(address: str, environment: Mapping[str, str]) -> None:
    """Sets what Ray's clients read before they are imported: `environment` holds RAY_AUTH_MODE. Ray reads it once, so
    this process must not have used Ray before."""
    os.environ.update({**environment, "RAY_API_SERVER_ADDRESS": address})  # which overrules the clients' argument


def connected(client: Callable[[str], Any], address: str) -> Any:
    """Returns one of Ray's clients of the dashboard at `address`, after `prepare`.

    Raises ConfigError when the token is missing or another one, when the server is not Ray's, and when the cluster has
    another version of Ray.
    """
    import ray
    from ray.exceptions import AuthenticationError

    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        made = client(address)
    except AuthenticationError as error:
        is_refused = str(error).startswith("Authentication failed")  # status 403
        what = "does not accept the token of this machine" if is_refused else "asks for a token, and there is none"
        raise ConfigError(
            f"the cluster at {address} {what}; put the cluster's token into ~/.ray/auth_token or into a file that "
            "RAY_AUTH_TOKEN_PATH names"
        ) from error
    except (OSError, RuntimeError, ValueError, LookupError) as error:
        raise ConfigError(f"{address} does not answer as the dashboard of a Ray cluster ({short(error)})") from error
    theirs, ours = str(made._server_ray_version), ray.__version__  # private: no public method returns it
    if theirs.split(".")[:2] != ours.split(".")[:2]:
        raise ConfigError(
            f"the cluster at {address} runs Ray {theirs}, and mempipe is installed here with Ray {ours}; start the "
            f"cluster with Ray {ours}"
        )
    return made


def short(reason: object) -> str:
    """Returns the reason on one line of at most 300 characters."""
    text = " ".join(str(reason).split())
    return text if len(text) <= 300 else f"{text[:299]}…"
