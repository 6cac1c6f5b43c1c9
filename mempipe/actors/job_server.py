"""The job server of a Ray cluster: takes a job, follows its log, and returns its exit code.

Ray finds the token by itself (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token). It is never read here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mempipe.progress import say
from mempipe.settings import ConfigError

STATUS_EVERY_S = 0.5
MIB = 2**20
MAX_PACKED_MIB = 100
"""The largest packed folder that the dashboard takes."""
MAX_UNPACKED_MIB = 1024
"""A larger folder is refused before it is packed: packing takes minutes and does not make it ten times smaller."""
_CHATTY = (
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
    "ray._private.authentication",
    "ray._private.runtime_env.packaging",
    "ray._private.runtime_env.working_dir",
)


class JobServer:
    """A connection to the job server of one cluster."""

    def __init__(self, address: str, *, environment: Mapping[str, str]) -> None:
        """`address` is that of the dashboard, and `environment` holds what Ray's client reads: RAY_AUTH_MODE. Ray reads
        it once, so this process must not have used Ray before.

        Raises ConfigError when the token is missing or another one, when the server is not Ray's, and when the cluster
        has another version of Ray.
        """
        os.environ.update({**environment, "RAY_API_SERVER_ADDRESS": address})  # which overrules the client's argument
        import ray
        from ray.exceptions import AuthenticationError
        from ray.job_submission import JobSubmissionClient

        for name in _CHATTY:
            logging.getLogger(name).setLevel(logging.ERROR)
        self._address = address
        try:
            self._client: Any = JobSubmissionClient(address)
        except AuthenticationError as error:
            is_refused = str(error).startswith("Authentication failed")  # status 403
            what = "does not accept the token of this machine" if is_refused else "asks for a token, and there is none"
            raise ConfigError(
                f"the cluster at {address} {what}; put the cluster's token into ~/.ray/auth_token or into a file that "
                "RAY_AUTH_TOKEN_PATH names"
            ) from error
        except (OSError, RuntimeError, ValueError, LookupError) as error:
            raise ConfigError(
                f"{address} does not answer as the job server of a Ray cluster ({_short(error)})"
            ) from error
        theirs, ours = str(self._client._server_ray_version), ray.__version__  # private: no public method returns it
        if theirs.split(".")[:2] != ours.split(".")[:2]:
            raise ConfigError(
                f"the cluster at {address} runs Ray {theirs}, and mempipe is installed here with Ray {ours}; start the "
                f"cluster with Ray {ours}"
            )

    def submit(self, entrypoint: Sequence[str], runtime_env: Mapping[str, Any]) -> str:
        """Uploads the working directory and submits the job; returns its id. Raises ConfigError for a folder that is
        too large, and LaunchError when the server refuses the job."""
        from mempipe.actors.lost import LaunchError

        try:
            _check_size(Path(runtime_env["working_dir"]), runtime_env["excludes"])
            return self._client.submit_job(entrypoint=shlex.join(entrypoint), runtime_env=dict(runtime_env))
        except ConfigError:
            raise
        except (OSError, RuntimeError, ValueError) as error:
            if "status code 413" in str(error) or "exceeds the maximum size" in str(error):
                raise _too_large(f"{runtime_env['working_dir']} has more") from error
            raise LaunchError(f"the cluster at {self._address} did not take the job: {_short(error)}") from error

    def follow(self, job_id: str) -> int:
        """Prints the log of a job until the job ends; returns its exit code, 143 if it was stopped. Raises LaunchError
        when the connection is lost."""
        import aiohttp

        from mempipe.actors.lost import LaunchError

        try:
            details = asyncio.run(self._follow(job_id))
        except BrokenPipeError:  # of this process's own output
            raise
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            raise LaunchError(f"the connection to {self._address} was lost: {_short(error)}") from error
        return _exit_code(job_id, details)

    async def _follow(self, job_id: str) -> Any:
        async for text in self._client.tail_job_logs(job_id):
            print(text, end="", flush=True)
        details = self._client.get_job_info(job_id)
        while not details.status.is_terminal():
            await asyncio.sleep(STATUS_EVERY_S)
            details = self._client.get_job_info(job_id)
        return details


def _check_size(folder: Path, excludes: Sequence[str]) -> None:
    """Raises ConfigError, which names the largest part, for a folder that is too large for sure; reads no file."""
    from ray._private.ray_constants import get_runtime_env_default_excludes
    from ray._private.runtime_env import packaging  # private: no public function lists shipped files

    sizes: Counter[str] = Counter()

    def add(path: Path) -> None:
        if path.is_file():
            sizes[path.relative_to(folder).parts[0]] += path.stat().st_size

    excluded = packaging._get_excludes(folder, [*get_runtime_env_default_excludes(), *excludes])
    packaging._dir_travel(folder, [excluded], add, include_gitignore=True)
    if (total := sizes.total()) > MAX_UNPACKED_MIB * MIB:
        (largest, size), *_ = sizes.most_common(1)
        raise _too_large(f"{folder} has {total // MIB:,} MiB, {size // MIB:,} of them in {largest}, which is more")


def _too_large(what: str) -> ConfigError:
    return ConfigError(
        f"{what} than the {MAX_PACKED_MIB} MiB that Ray ships, packed; submit from a smaller folder, or name in a file "
        ".rayignore what the job does not need"
    )


def _exit_code(job_id: str, details: Any) -> int:
    """Prints how a job ended, and returns its exit code as a shell reports it. `details` are Ray's `JobDetails`."""
    status, code = details.status.value, details.driver_exit_code
    if status == "SUCCEEDED":
        say(f"{job_id} succeeded")
        return 0
    if status == "STOPPED":
        say(f"{job_id} was stopped")
        return 128 + signal.SIGTERM
    if code is None:  # its entrypoint never ran, or the supervisor died
        say(f"{job_id} failed: {_short(details.message or 'Ray gives no reason')}")
        return 1
    say(f"{job_id} failed with code {code}")
    return code if code > 0 else 128 - code  # below 0: the number of a signal


def _short(reason: object) -> str:
    text = " ".join(str(reason).split())
    return text if len(text) <= 300 else f"{text[:299]}…"
