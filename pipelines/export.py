"""Models of a run: those that it exports during training, and those made from its checkpoints afterwards."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from mempipe.checks.findings import refuse
from mempipe.checks.machine import check_writable
from mempipe.config import RunConfig
from mempipe.engines.checkpoint import Position, checkpoints, position_of, step_of
from mempipe.engines.config import ModelConfig
from mempipe.loader import load_config
from mempipe.provenance import MADE_OF, questions_sha256, read_record, write_record
from mempipe.reports.agent_folder import agent_files
from mempipe.runs import Run
from mempipe.settings import ConfigError
from mempipe.storage.files import recover_folder, whole_folder, write_text
from mempipe.types import Group


class Exporter(Protocol):
    """Writes the present policy as a Hugging Face folder, as `LearnerGroup` does."""

    def export(self, folder: Path, *, source: str) -> None: ...


class Exports:
    """The models that a training run exports during training (`checkpoint.export_every_steps`, `best_on`)."""

    def __init__(self, run: Run, learners: Exporter, *, source: str, weights: Callable[[], str] = str) -> None:
        """`source` is the model whose configuration and tokenizer the exported ones have; `weights` returns the hash of
        the present policy's."""
        self._run, self._learners, self._source, self._weights = run, learners, source, weights
        self._config = run.config.checkpoint

    def trained(self, step: int) -> None:
        """Exports the policy after learner step `step` when one is due and not there."""
        every, folder = self._config.export_every_steps, self._run.folder / "exports" / f"step-{step:08d}"
        if every and step % every == 0 and not folder.exists():
            self._export(folder, {"step": step})

    def validated(self, groups: Sequence[Group], *, step: int) -> None:
        """Exports the policy after learner step `step` when it answered better than every one before; `groups` are its
        answers."""
        metric = self._config.best_on
        if not metric or not groups:
            return
        now = {
            "step": step,
            "metric": metric,
            "value": fmean(getattr(trajectory, metric) for group in groups for trajectory in group.trajectories),
            "questions": questions_sha256(group.question for group in groups),
        }
        best = self._run.state.get("best")
        if best is None or not _comparable(best, now) or now["value"] > best["value"]:
            self._export(self._run.folder / "best", now)
            self._run.update(best=now)

    def _export(self, folder: Path, made_of: dict[str, Any]) -> None:
        with self._run.phase("export"):
            self._learners.export(folder, source=self._source)
            write_record(folder / MADE_OF, {**made_of, "weights": self._weights()})


def _comparable(best: dict[str, Any], now: dict[str, Any]) -> bool:
    """Returns whether two validations scored the same questions by the same metric; an earlier version noted no
    questions."""
    return all(best.get(name, now[name]) == now[name] for name in ("metric", "questions"))


def export_best(run: Path, target: Path) -> Path:
    """Copies the model that was best on validation while the run in folder `run` continued to the new folder `target`.

    Raises ConfigError.
    """
    _check_folders(run, target)
    best = run / "best"
    recover_folder(best)
    if not best.is_dir():
        raise ConfigError(f"--best: {run} holds no best model; a run keeps one when checkpoint.best_on names a metric")
    step = read_record(best / MADE_OF, mends="export a checkpoint instead (--step)", step=int)["step"]
    files = agent_files(run, step=step)
    with whole_folder(target) as partial:
        shutil.copytree(best, partial, dirs_exist_ok=True)
        for name, text in files.items():
            write_text(partial / name, text)
    return target


def export_run(run: Path, target: Path, *, step: int | None = None) -> Path:
    """Writes the policy of the run in folder `run` after learner step `step` (None: the last whole one that has a
    checkpoint) to the new folder `target`, for transformers and vLLM, with the files of a whole agent
    (`mempipe.reports.agent_folder`).

    Raises ConfigError, before anything is loaded, and CheckpointError.
    """
    _check_folders(run, target)
    config, checkpoint = load_config(run / "config.yaml"), choose_checkpoint(run, step)
    from mempipe.engines.export import export_checkpoint  # torch, for what can still be right

    files = agent_files(run, step=step_of(checkpoint))
    return export_checkpoint(checkpoint, _trained_model(run, config), target, files=files)


def export_adapter(run: Path, target: Path, *, step: int | None = None) -> Path:
    """Writes the LoRA adapter that the run in folder `run` trained, after learner step `step` (None: the last
    whole one that has a checkpoint), to the new folder `target`, for PEFT and vLLM.

    Raises ConfigError, before anything is loaded, and CheckpointError.
    """
    _check_folders(run, target)
    config, checkpoint = load_config(run / "config.yaml"), choose_checkpoint(run, step)
    if not config.model.lora_rank:
        raise ConfigError(f"--adapter: {run} trained the whole model (model.lora_rank is 0), and has no adapter")
    from mempipe.engines import export  # torch, for what can still be right

    return export.export_adapter(checkpoint, _trained_model(run, config), target)


def choose_checkpoint(run: Path, step: int | None) -> Path:
    """Returns the checkpoint of the run in `run` after learner step `step`; None: after the last whole one.

    A run that had to end may have saved its policy between two updates of a step. That policy is of no step, is
    evaluated nowhere and is never exported. Raises ConfigError.
    """
    positions = {path: position_of(path) for path in checkpoints(run / "checkpoints")}
    if not positions:
        raise ConfigError(f"{run} holds no checkpoint")
    found = {position.step: path for path, position in positions.items() if not position.num_updates}
    wanted = max(found, default=-1) if step is None else step
    if wanted in found:
        if step is None and (newest := list(positions)[-1]) != found[wanted]:
            said = f"{newest.name} was saved between two updates of a step; exported is the policy after step {wanted}"
            print(said, file=sys.stderr)  # stdout holds the exported folder
        return found[wanted]
    asked = "no step is named (--step)" if step is None else f"--step is {step}"
    known = ", ".join(_described(path, position) for path, position in positions.items())
    raise ConfigError(f"{asked}; {run / 'checkpoints'} holds those after the learner steps {known}")


def _described(path: Path, position: Position) -> str:
    within = " and a part of the next one, which --resume trains to its end" if position.num_updates else ""
    return f"{position.step} ({path.name}){within}"


def _check_folders(run: Path, target: Path) -> None:
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{run} holds no run (no config.yaml)")
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} exists; choose another folder or remove it")
    refuse([check_writable(target, setting="DIR")])  # a model takes minutes to load


def _trained_model(run: Path, config: RunConfig) -> ModelConfig:
    """Returns the model that the learner started from: the supervised start or the model that the run made, else that
    of the config. Raises ConfigError when an adapter's base is gone: on another one it is another policy."""
    made = [run / name for name in ("warm_start", "model") if (run / name / "config.json").is_file()]
    if config.warm_start is not None and config.model.lora_rank and made[:1] != [run / "warm_start"]:
        raise ConfigError(f"{run / 'warm_start'} is gone, the model that the run's adapter was trained on; put it back")
    return config.model.model_copy(update={"path": str(made[0])}) if made else config.model
