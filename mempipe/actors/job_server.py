"""The job server of a Ray cluster: takes a job, follows its log, and returns its exit code."""

from __future__ import annotations

import asyncio
import shlex
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mempipe.actors.dashboard import connected, prepare, short
from mempipe.progress import say
from mempipe.settings import ConfigError

STATUS_EVERY_S = 0.5
MIB = 2**20
MAX_PACKED_MIB = 100
"""The largest packed folder that the dashboard takes."""
MAX_UNPACKED_MIB = 1024
"""A larger folder is refused before it is packed: packing takes minutes and does not make it ten times smaller."""


class JobServer:
    """A connection to the job server of one cluster."""

    def __init__(self, address: str, *, environment: Mapping[str, str]) -> None:
        """`address` is that of the dashboard; `environment` as for `mempipe.actors.dashboard.prepare`. Raises
        ConfigError as `connected` does."""
        prepare(address, environment)
        from ray.job_submission import JobSubmissionClient

        self._address = address
        self._client = connected(JobSubmissionClient, address)

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
            raise LaunchError(f"the cluster at {self._address} did not take the job: {short(error)}") from error

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
            raise LaunchError(f"the connection to {self._address} was lost: {short(error)}") from error
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
        say(f"{job_id} failed: {short(details.message or 'Ray gives no reason')}")
        return 1
    say(f"{job_id} failed with code {code}")
    return code if code > 0 else 128 - code  # below 0: the number of a signal
