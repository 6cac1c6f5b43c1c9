"""The folder of a run: its files, the state of the run, and the seconds of each phase.

config.yaml            the whole config as it was resolved
state.json             phase seconds, steps done, MLflow run id, whether it finished
metrics.jsonl          one row of metrics per learner step
world/ index/ model/   made by the run itself when its config has a `world`
checkpoints/           model, optimiser, scheduler, RNG and data position
trajectories.parquet   held-out trajectories, before and after training
huggingface/           the trained model, for transformers and vLLM
exports/ best/         the model after every so many steps, and of the best validation, where `checkpoint` asks for them
report.html report.json
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ValidationError

from mempipe.config import RunConfig
from mempipe.files import LOCK_FILE, lock, write_text
from mempipe.settings import ConfigError

Resume = Literal["never", "auto", "always"]

FREE_SETTINGS = (
    "checkpoint",
    "data.num_epochs",
    "data.validation",
    "evaluation",
    "generation",
    "learner.max_tokens_per_micro_batch",
    "learner.num_ranks",
    "learner.num_threads",
    "learner.share_prefixes",
    "learner.timeout_s",
    "max_restarts",
    "model.gradient_checkpointing",
    "num_steps",
    "output",
    "placement",
    "ray_address",
    "reference",
    "retrieval.batch_wait_ms",
    "retrieval.encoder_path",
    "retrieval.num_gpus",
    "retrieval.num_replicas",
    "retrieval.num_threads",
    "retrieval.shard_actors",
    "retrieval.timeout_s",
    "stream",
    "tracking",
)
"""Settings and sections that may differ between a run and its continuation: they say where and how fast it runs, how
long, and what is measured on the way, but change nothing of what is learnt from a step."""


class Run:
    """One run's folder, held by one process at a time."""

    def __init__(self, config: RunConfig, *, resume: Resume = "never") -> None:
        self.config = config
        self.folder = config.folder
        self._state_file = self.folder / "state.json"
        self._is_new = saved_state(config, resume=resume) is None
        self._made_folder = not self.folder.exists()
        try:
            lock(self.folder)
            saved = saved_state(config, resume=resume)  # again: the process that held the lock has written meanwhile
            self.state: dict[str, Any] = saved or {"seconds": {}, "finished": False}
            write_text(self.folder / "config.yaml", yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
        except OSError as error:
            raise ConfigError(f"cannot write to the run's folder {self.folder}: {error.strerror}") from error
        self._save()

    @property
    def resumed(self) -> bool:
        return bool(self.state["seconds"])

    @property
    def seconds(self) -> dict[str, float]:
        return self.state["seconds"]

    def update(self, **values: Any) -> None:
        """Writes values into the state, atomically."""
        self.state |= values
        self._save()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the wall time of the block to the phase's seconds, also when it fails. A resumed phase adds up."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add_seconds(name, time.perf_counter() - started)

    def add_seconds(self, name: str, seconds: float) -> None:
        self.state["seconds"][name] = self.state["seconds"].get(name, 0.0) + seconds
        self._save()

    def withdraw(self) -> None:
        """Removes a new run whose config was refused, so that a better one can start there. A resumed run stays."""
        if self._is_new and self._made_folder:
            shutil.rmtree(self.folder)
        elif self._is_new:
            for name in ("state.json", "config.yaml", LOCK_FILE):
                (self.folder / name).unlink(missing_ok=True)

    def _save(self) -> None:
        write_text(self._state_file, json.dumps(self.state, indent=1))


def saved_state(config: RunConfig, *, resume: Resume) -> dict[str, Any] | None:
    """Returns the state of the run in the config's folder; None when the folder holds no run.

    Raises ConfigError when the run may not start there: the folder holds a run and `resume` is "never", it holds none
    and `resume` is "always", that run was started with other settings, or its files are damaged.
    """
    file = config.folder / "state.json"
    if not file.exists():
        if resume == "always":
            raise ConfigError(f"--resume: {config.folder} holds no run (no state.json)")
        return None
    if resume == "never":
        raise ConfigError(
            f"{config.folder} holds a run already: continue it with --resume, use another `name`, or delete the folder"
        )
    try:
        state = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(f"{file} is damaged ({error}); this run cannot be continued") from error
    _check_same(config)
    return state


def _check_same(config: RunConfig) -> None:
    file = config.folder / "config.yaml"
    try:
        saved = yaml.safe_load(file.read_text())
    except (yaml.YAMLError, UnicodeDecodeError, FileNotFoundError) as error:
        raise ConfigError(
            f"{file} is damaged ({' '.join(str(error).split())}); this run cannot be continued"
        ) from error
    refused = [
        f"{key} {now!r} (was {before!r})"
        for key, before, now in sorted(
            _differences(_completed(saved), config.model_dump(mode="json")), key=itemgetter(0)
        )
        if not any(f"{key}.".startswith(f"{free}.") for free in FREE_SETTINGS)
    ]
    if refused:
        raise ConfigError(
            f"{config.folder} was started with other settings, which change what is learnt: {', '.join(refused)}; "
            "continue with the old values, or give the run another `name`"
        )


def _completed(saved: Any) -> Any:
    """Returns the settings of a run with the defaults of those that this version knows and the run did not."""
    try:
        return RunConfig.model_validate(saved).model_dump(mode="json")
    except ValidationError:  # a setting that is gone, or damage: the comparison names it
        return saved


def unfinished(folder: Path) -> str:
    """Describes a run that has not ended yet; returns "" for a finished one and for a folder without a run."""
    try:
        state = json.loads((folder / "state.json").read_text())
    except (OSError, ValueError):
        return ""
    if not isinstance(state, dict) or state.get("finished"):
        return ""
    return f"an unfinished run ({state.get('num_steps', 0)} steps are done; `mempipe train ... --resume` goes on)"


def _differences(a: Any, b: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, value in a, value in b) where they differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in {*a, *b}:
            yield from _differences(a.get(key), b.get(key), f"{prefix}.{key}" if prefix else key)
    elif a != b:
        yield prefix, a, b
