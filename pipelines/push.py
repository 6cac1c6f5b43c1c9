"""Publishes a trained agent on the Hugging Face hub."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import validate_repo_id

from mempipe.evaluation.suite import AGENT_FILE
from mempipe.progress import say
from mempipe.settings import ConfigError
from pipelines.export import export_best, export_run


def push(
    source: Path, repository: str, *, step: int | None = None, best: bool = False, public: bool = False
) -> tuple[str, str]:
    """Uploads the agent of a run, or an exported agent, to `repository` (OWNER/NAME, also with hf:// before it).

    `step` and `best` choose the weights of a run as `mempipe export` does. A new repository is private unless `public`;
    one that exists keeps its visibility. Returns the repository's name and address. The hub's client finds the token by
    itself (HF_TOKEN or `hf auth login`).

    Raises ConfigError for a wrong source, name or token before anything is exported, and RuntimeError when the hub
    cannot be reached or refuses.
    """
    name = _checked(repository)
    is_run = (source / "config.yaml").is_file()
    if not is_run and not (source / AGENT_FILE).is_file():
        raise ConfigError(
            f"{source} is neither a run (no config.yaml) nor an exported agent (no {AGENT_FILE}; `mempipe export` "
            "writes one)"
        )
    if not is_run and (best or step is not None):
        raise ConfigError(f"--step and --best choose a checkpoint of a run; {source} is an exported agent")
    hub = HfApi()
    with _faults(hub.endpoint):
        hub.whoami()
    with tempfile.TemporaryDirectory(prefix="mempipe-push-") as scratch:
        folder, target = source, Path(scratch) / "agent"
        if is_run:
            folder = export_best(source, target) if best else export_run(source, target, step=step)
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        say(f"uploading {size / 2**20:,.1f} MiB to {name}")
        with _faults(hub.endpoint):
            address = hub.create_repo(name, private=not public, exist_ok=True)
            hub.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload a mempipe agent")
    return name, str(address)


def _checked(repository: str) -> str:
    name = repository.removeprefix("hf://")
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(f"{repository!r} is not a repository of the hub: {error}") from error
    if name.count("/") != 1:
        raise ConfigError(
            f"{repository!r} is not a repository of the hub; expected OWNER/NAME, e.g. ada/quickstart-agent"
        )
    return name


@contextmanager
def _faults(endpoint: str) -> Iterator[None]:
    """Turns the errors of the hub's client into sentences."""
    try:
        yield
    except LocalTokenNotFoundError as error:
        raise ConfigError(
            "no token of the Hugging Face hub was found; set HF_TOKEN to one that may write, or run `hf auth login`"
        ) from error
    except OfflineModeIsEnabled as error:
        raise ConfigError("HF_HUB_OFFLINE is set, and an upload needs the network; unset it") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise ConfigError(
                f"{endpoint} answered {status}: the token (HF_TOKEN or `hf auth login`) is not valid or may not write "
                "there"
            ) from error
        raise RuntimeError(f"{endpoint} answered {status}: {error.server_message or error}") from error
    except (HTTPError, OSError) as error:
        raise RuntimeError(f"{endpoint} cannot be reached ({error}); `mempipe export` needs no network") from error
