"""`mempipe submit`: a config that was checked on this machine, as a Ray job for a cluster, or as a service of it.

The folder in which the command is started is the working directory that Ray ships. Nothing here imports Ray: the job
server of the cluster is `mempipe.actors.job_server`, its services are `mempipe.actors.deployments`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx
import yaml

from mempipe.checks.findings import Finding, refuse, refused
from mempipe.credentials import without_passwords
from mempipe.kinds import BUILT_IN, JobKind, kind_of
from mempipe.loader import load_job, read_values
from mempipe.runs import Resume, check_place
from mempipe.settings import ConfigError, Section

DASHBOARD = "http://127.0.0.1:8265"
"""The dashboard that `ray start --head` opens on this machine."""
EXAMPLE = "e.g. http://HEAD:8265"
ASK_TIMEOUT_S = 10.0
NEVER_SHIPPED = (".git", ".venv", "venv", "__pycache__")
"""Folders that are not shipped from any place; Ray skips them by default."""
RESULTS = ("runs", "evaluations", "sweeps", "mlruns", "mlflow.db")
"""Files and folders at the top of the shipped folder that are not shipped: what earlier jobs wrote there."""
EXCLUDES = [".git", ".venv", *(f"/{name}" for name in RESULTS)]
"""The same for Ray, which reads .gitignore and .rayignore as well."""
_SERVER, _ADDRESS = "RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"
_WRITE_AND_RUN = 'printf %s "$1" > "$0" && shift && exec "$@"'
"""Writes the text $1 to the file $0 and runs the command that follows."""
_RESUME_FLAG = {"never": (), "always": ("--resume",), "auto": ("--resume-if-exists",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job that a cluster runs in its copy of a folder."""

    folder: Path
    """The folder that is shipped."""
    command: tuple[str, ...]
    """The command of mempipe that takes the config, without `mempipe`: train, or index build."""
    entrypoint: tuple[str, ...]
    """The words that the cluster runs."""
    unchecked: tuple[str, ...]
    """Findings about paths that only the cluster may have."""

    @property
    def runtime_env(self) -> dict[str, Any]:
        return {"working_dir": str(self.folder), "excludes": EXCLUDES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A Ray cluster, and how it is reached."""

    address: str
    """The address of its dashboard."""
    environment: Mapping[str, str]
    """Variables that `ray job` needs for it. They name the way of authentication and hold no token."""

    def ray_job(self, verb: str, *words: str) -> str:
        """Returns the `ray job` command for this cluster, as a shell takes it."""
        return self._command("ray job", verb, *words)

    def serve(self, verb: str, *words: str) -> str:
        """Returns the `serve` command for this cluster, as a shell takes it."""
        return self._command("serve", verb, *words)

    def _command(self, program: str, verb: str, *words: str) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        line = [*variables, program, verb, shlex.join(["--address", self.address, *words])]
        return without_passwords(" ".join(line))

    def submission(self, job: Job) -> str:
        """Returns the `ray job submit` command that submits the job, as a shell takes it, on several lines."""
        excludes = json.dumps({"excludes": EXCLUDES})
        lines = [
            self.ray_job("submit"),
            shlex.join(["--working-dir", str(job.folder)]),
            shlex.join(["--runtime-env-json", excludes]),
            without_passwords(shlex.join(["--", *job.entrypoint])),
        ]
        return " \\\n    ".join(lines)


def find_cluster(address: str = "") -> Cluster:
    """Returns the cluster whose dashboard has this address; empty: that of RAY_API_SERVER_ADDRESS or RAY_ADDRESS, or of
    this machine. The dashboard answers the question for its way of authentication to everybody.

    Raises ConfigError when no dashboard answers.
    """
    named = {name: os.environ[name] for name in (_SERVER, _ADDRESS) if os.environ.get(name)}
    found = address or named.get(_SERVER) or next(filter(_is_http, named.values()), DASHBOARD)
    found = (found if "://" in found else f"http://{found}").rstrip("/")
    if not _is_http(found):
        raise ConfigError(f"{found} is not the address of a Ray dashboard, {EXAMPLE}")
    environment = {"RAY_AUTH_MODE": _authentication(found)}
    if any(value.rstrip("/") != found for value in named.values()):  # both variables overrule --address in `ray job`
        environment[_SERVER] = found
    return Cluster(address=found, environment=environment)


def _is_http(address: str) -> bool:
    return address.startswith(("http://", "https://"))


def _authentication(address: str) -> str:
    """Returns the RAY_AUTH_MODE that a client of the cluster needs: token or disabled."""
    try:
        answer = httpx.get(f"{address}/api/authentication_mode", timeout=ASK_TIMEOUT_S)
    except (httpx.RequestError, httpx.InvalidURL) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"no Ray dashboard answers at {address} ({reason}); is the cluster up, and is --address that of its "
            f"dashboard, {EXAMPLE}?{_proxy_hint(address)}"
        ) from error
    if answer.status_code == httpx.codes.NOT_FOUND:  # a Ray that is older than tokens; its version is refused later
        return "disabled"
    try:
        mode = answer.raise_for_status().json()["authentication_mode"]
    except (httpx.HTTPStatusError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{address} answers with status {answer.status_code}, but not as a Ray dashboard; is --address that of the "
            f"cluster's dashboard, {EXAMPLE}?{_proxy_hint(address)}"
        ) from error
    return "disabled" if mode == "disabled" else "token"


def _proxy_hint(address: str) -> str:
    """Returns how to ask the address without an HTTP proxy, "" where it is asked without one."""
    try:
        url = urlsplit(address)
    except ValueError:  # no address at all, which the message says
        return ""
    host, proxies = url.hostname or "", getproxies()
    if not (proxies.get(url.scheme) or proxies.get("all")) or proxy_bypass(host):
        return ""
    return f" A proxy is asked for it ({url.scheme}_proxy or all_proxy is set); with NO_PROXY={host} none is."


def checked_job(path: str, overrides: Sequence[str] = (), *, resume: Resume = "never") -> Job:
    """Returns the job that does what a config of any kind describes, with the present folder as its working directory.

    Makes the checks of the config's own command. Paths that this machine lacks are left to the job, which makes the
    same checks again. Raises ConfigError for everything else that is wrong, and for results that would be written into
    the cluster's copy of the folder.
    """
    if Path(path).is_dir():
        raise ConfigError(
            f"{path} is a folder; a job is submitted from a YAML file (`mempipe config evaluation` and `mempipe config "
            "sweep` print one for a trained run)"
        )
    kind, config = load_job(path, overrides)
    if not kind.main:
        raise ConfigError(f"{path} describes {kind.described}; `{kind.command}` takes it")
    check_place(path, config, resume=resume)
    folder = Path.cwd()
    _check_places(config, folder)
    unchecked = _check(kind, config, resume)
    command = ["run"] if kind not in BUILT_IN.values() else kind.command.split()[1:]
    return Job(
        folder=folder,
        command=tuple(command),
        entrypoint=_entrypoint(command, Path(path), folder, [*overrides, *_RESUME_FLAG[resume]]),
        unchecked=unchecked,
    )


def is_service(path: str) -> bool:
    """Returns whether a file is a Ray Serve config of mempipe's services. Raises ConfigError as `load_job` does."""
    if Path(path).is_dir():
        return False
    kind = kind_of(read_values(path))
    return kind is not None and not kind.main


def checked_service(path: str) -> tuple[str, ...]:
    """Makes the checks of the service that a Ray Serve config deploys; returns the findings about paths that only the
    cluster may have. Raises ConfigError for everything else that is wrong."""
    return _check(*load_job(path), "never")


def _check_places(config: Section, folder: Path) -> None:
    """Raises ConfigError for settings that mean something else in the cluster's copy of the folder."""
    if getattr(config, "ray_address", ""):
        raise ConfigError(
            f"ray_address is {config.ray_address!r}; leave it empty, since the job uses the cluster that it is "
            "submitted to"
        )
    output = getattr(config, "output", "")
    if isinstance(output, str) and output and "://" not in output and not Path(output).is_absolute():
        raise ConfigError(
            f"output is {output!r}, which a job resolves in its copy of this folder, and Ray removes that; give an "
            f"absolute path that all nodes see, e.g. output={folder / output}"
        )
    not_shipped = _not_shipped(folder)
    for name, value in _texts(config.model_dump(mode="json")):
        first, *rest = Path(value).parts or [""]
        if rest and first in not_shipped and Path(value).exists():
            raise ConfigError(
                f"{name} is {value!r}, and {first} is not shipped; give an absolute path that all nodes see, e.g. "
                f"{folder / value}"
            )


def _not_shipped(folder: Path) -> set[str]:
    """Returns names at the top of the folder that are not shipped; of the ignore files those without a pattern."""
    files = [folder / name for name in (".gitignore", ".rayignore")]
    lines = [line for file in files if file.is_file() for line in file.read_text(errors="replace").splitlines()]
    return {*NEVER_SHIPPED, *RESULTS, *(line.strip().strip("/") for line in lines)}


def _texts(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Yields the dotted name and the text of every setting that is a text."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _texts(each, f"{name}.{key}".removeprefix("."))
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each, name)


def _check(kind: JobKind, config: Section, resume: Resume) -> tuple[str, ...]:
    """Makes the checks of a kind, and leaves devices to the cluster. Returns the findings about paths that only the
    cluster may have. Raises ConfigError for everything else that is wrong."""
    with _as_in_a_job():
        try:
            findings = [finding for finding in kind.findings(config, resume=resume) if finding.fatal]
        except ConfigError as error:
            findings = [refused(error)]
    refuse(finding for finding in findings if not _is_elsewhere(finding))
    return tuple(without_passwords(finding.text) for finding in findings if _is_elsewhere(finding))


@contextmanager
def _as_in_a_job() -> Iterator[None]:
    """Sets RAY_ADDRESS, as Ray does for a job: roles are then not placed on the devices of this machine."""
    before = os.environ.get(_ADDRESS)
    os.environ[_ADDRESS] = "auto"
    try:
        yield
    finally:
        del os.environ[_ADDRESS]
        if before is not None:
            os.environ[_ADDRESS] = before


def _is_elsewhere(finding: Finding) -> bool:
    """Returns whether the finding is about something that this machine lacks and the cluster may have. A relative path
    is in the folder that is shipped, or nowhere."""
    return Path(finding.absent).is_absolute() or "://" in finding.absent


def _entrypoint(command: Sequence[str], path: Path, folder: Path, words: Sequence[str]) -> tuple[str, ...]:
    """Returns the words that run the command in the copy of the folder. A config outside the shipped folder is passed
    in them as text."""
    python = ["python", "-m", "mempipe.cli", *command]
    inside = path.resolve()
    if inside.is_file() and inside.is_relative_to(folder.resolve()):
        inside = inside.relative_to(folder.resolve())
        if inside.parts[0] not in _not_shipped(folder) and not set(inside.parts) & {*NEVER_SHIPPED}:
            return (*python, str(inside), *words)
    text = yaml.safe_dump(read_values(path), default_flow_style=True, sort_keys=False, width=float("inf"))
    name = f"{path.stem}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.yaml"
    return ("sh", "-c", _WRITE_AND_RUN, name, text.rstrip("\n"), *python, name, *words)
