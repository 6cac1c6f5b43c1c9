"""The folder of a run: its files, the state of the run, and the seconds of each phase.

config.yaml            the whole config as it was resolved
config.given.yaml      the config.yaml that was there before the run began, for example one of yours with comments
state.json             phase seconds, steps done, MLflow run id, whether it finished
metrics.jsonl          one row of metrics per learner step; rows of steps that are made again: metrics.replaced.jsonl
tensorboard/           event files, with tracking.writers tensorboard
wandb/ wandb_run.json  the run in W&B's format and its id, with tracking.writers wandb
profiles/              Chrome traces of the steps in tracking.profile_steps
lost_records.json      what of the record was lost, in sentences
ray_logs/              the ends of the logs of Ray, where the run has failed
world/ index/ model/   made by the run itself when its config has a `world`
checkpoints/           model, optimiser, scheduler, RNG and data position
inputs.json            hashes of the questions, prompts, index and model that the run was begun with
evaluation/            trajectories of every validation; each file names the policy and the questions that it is of
trajectories.parquet   held-out trajectories, before and after training
huggingface/           the trained model, for transformers and vLLM
exports/ best/         exported models, by step and of the best validation (settings `checkpoint`)
replaced/              results of steps that a resumed run repeats, moved there and never removed
report.html report.json

Nothing of it is ever removed by a fault: a new run whose settings are refused takes back what it wrote itself
(state.json and config.yaml) while nothing else is there.
"""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ValidationError

from mempipe.config import RunConfig
from mempipe.engines.checkpoint import checkpoints, latest
from mempipe.masking.cloze import MANIFEST
from mempipe.provenance import MADE_OF, changed_inputs, changed_settings, completed, read_record, write_record
from mempipe.settings import ConfigError
from mempipe.storage.files import LOCK_FILE, lock, write_text
from mempipe.storage.json_files import read_object
from mempipe.storage.yaml_text import parse_yaml
from mempipe.tracking.metrics_file import METRICS_FILE, read_metrics

Resume = Literal["never", "auto", "always"]

QUESTIONS_FOLDER = "cloze"
"""Folder of the questions that a run creates from data.corpus."""
_STATE, _CONFIG, _GIVEN, _INPUTS = "state.json", "config.yaml", "config.given.yaml", "inputs.json"
_PROMPTS = "the agent's prompt (agent.prompts, the schemas of its tools or the model's chat template)"
_WORK = (
    "checkpoints",
    "kept_groups",
    "warm_start",
    "warm_start_checkpoints",
    "demonstrations",
    "evaluation",
    "exports",
    "best",
    "huggingface",
    METRICS_FILE,
    "trajectories.parquet",
)
"""Files that only a run writes into its folder; `kept` adds those that a run with the same settings would create."""


class Run:
    """One run's folder, held by one process at a time."""

    def __init__(self, config: RunConfig, *, resume: Resume = "never") -> None:
        self.config = config
        self.folder = config.folder
        saved_state(config, resume=resume)  # before the folder is made
        self._made_folder = not self.folder.exists()
        try:
            lock(self.folder)
            saved = saved_state(config, resume=resume)  # again: the process that held the lock may have written
            self._is_new = saved is None
            self.rebuilt = saved is not None and not (self.folder / _STATE).exists()
            """Whether state.json was gone, and was made again from what else the folder holds."""
            self._config_before = _text(self.folder / _CONFIG)
            self._most_steps_unsaved = _most_steps_unsaved(config)
            self.state: dict[str, Any] = saved or {"seconds": {}, "finished": False}
            if self._is_new:  # that of an older start names what the run has made; `resolved` replaces it
                if self._config_before is not None and self._config_before != _dumped(config):
                    write_text(self.folder / _GIVEN, self._config_before)
                self.resolved(config)
            self._save()
        except OSError as error:
            raise ConfigError(f"cannot write to the run's folder {self.folder}: {error.strerror}") from error

    def resolved(self, config: RunConfig) -> None:
        """Writes config.yaml again, with the paths of model, index and questions if the run has made them."""
        write_text(self.folder / _CONFIG, _dumped(config))

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

    @contextmanager
    def preparation(self) -> Iterator[None]:
        """Encloses the phase in which inputs are read and made. A new run whose settings are refused (ConfigError) is
        withdrawn, so that corrected settings can start in the folder. If the run has made anything, the folder stays,
        and --resume continues it."""
        try:
            with self.phase("prepare"):
                yield
        except ConfigError:
            if self._is_new and not self.kept():
                self._withdraw()
            raise

    def kept(self) -> str:
        """Lists the work that the folder holds, for a person; "" for none."""
        return kept(self.config)

    @property
    def inputs(self) -> dict[str, str]:
        """Returns the hashes of what the run was begun with, by setting; empty before they are known."""
        return saved_inputs(self.folder)

    def check_inputs(self, now: Mapping[str, str]) -> None:
        """Stores the hashes of the run's inputs. Raises ConfigError, naming the inputs, when the run was begun with
        others."""
        before = self.inputs
        if changed := changed_inputs(before, now):
            named = [_PROMPTS if name == "agent.prompts" else name for name in changed]
            raise ConfigError(
                f"{self.folder} was begun with other inputs: the content of {', '.join(named)} has changed since, "
                "and with it the learned result; put the old files back, or give the run another `name`"
            )
        write_record(self.folder / _INPUTS, {**now, **{name: value for name, value in before.items() if value}})

    def set_aside(self, paths: Iterable[Path]) -> str:
        """Moves files and folders of the run to the same relative paths in a new folder in `replaced/`. Returns a line
        about the move for a person; "" where there is nothing to move."""
        paths = [path for path in paths if path.exists()]
        if not paths:
            return ""
        attempts = self.folder / "replaced"
        number = 1 + max((int(each.name) for each in attempts.glob("*") if each.name.isdigit()), default=0)
        for path in paths:
            target = attempts / str(number) / path.relative_to(self.folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(path, target)  # not a rename: what users link to another disk is there
        names = ", ".join(str(path.relative_to(self.folder)) for path in paths)
        return f"{names} {'is' if len(paths) == 1 else 'are'} now in {attempts / str(number)}"

    def restart_at(self, step: int, *, num_updates: int = 0) -> str:
        """Resumes from the checkpoint of `step`, or of `num_updates` after it: sets aside the results of newer
        policies, which do not exist any more. Returns a line that says so, and which steps are trained again; "" where
        there is nothing to say.

        Raises ConfigError when the run would begin at zero although its checkpoints had been written.
        """
        done = self.state.get("num_steps", 0)
        if not step and done > 2 * self._most_steps_unsaved:  # a checkpoint is begun when the one before is written
            raise ConfigError(
                f"{self.folder} has done {done} steps, but its checkpoints are gone, and training would begin at zero; "
                "put them back and continue with --resume, or give the run another `name`"
            )
        best = self.state.get("best")
        newer = [path for path in self._made() if (step_made_of(path) or 0) > step]
        restored = step * self.config.algorithm.updates_per_step + num_updates
        # Of two checkpoints the newer one may be the one that cannot be used; it must not count among those that are
        # kept.
        newer += [path for path in checkpoints(self.folder / "checkpoints") if _updates_in_name(path) > restored]
        if best is not None and best["step"] > step:
            newer, best = [*newer, self.folder / "best"], None
        moved = self.set_aside(dict.fromkeys(newer))
        self.update(num_steps=step, best=best)
        again = f"step {done} is" if done == step + 1 else f"steps {step + 1} to {done} are"
        lines = [f"{again} trained again"] * (done > step)
        lines += [f"results of later steps of the earlier start: {moved}"] * bool(moved)
        return "; ".join(lines)

    def _made(self) -> list[Path]:
        """Lists the files, besides checkpoints, that a run writes of its policy during training and at its end."""
        return [
            path
            for pattern in ("evaluation/*.parquet", "exports/*", "best", "huggingface")
            for path in sorted(self.folder.glob(pattern))
        ]

    def _withdraw(self) -> None:
        (self.folder / _STATE).unlink(missing_ok=True)
        if self._config_before is None:
            (self.folder / _CONFIG).unlink(missing_ok=True)
        else:
            write_text(self.folder / _CONFIG, self._config_before)
            (self.folder / _GIVEN).unlink(missing_ok=True)
        (self.folder / LOCK_FILE).unlink(missing_ok=True)
        if self._made_folder:
            with suppress(OSError):  # somebody has put a file there
                self.folder.rmdir()

    def _save(self) -> None:
        write_record(self.folder / _STATE, self.state)


def step_made_of(path: Path) -> int | None:
    """Returns the learner step whose policy a kept evaluation or model is of, by the record in it or else by its name;
    None where neither says it."""
    if path.is_dir():
        file = path / MADE_OF
        record = read_record(file, mends=f"move {path} away", step=int) if file.exists() else {}
    else:
        from mempipe.data.trajectories import read_made_of  # pyarrow, for which the checks of a command do not wait

        record = read_made_of(path) or {}
    named = path.stem.removeprefix("step-")
    return record.get("step", int(named) if named.isdigit() else None)


def kept(config: RunConfig) -> str:
    """Names the work of a run that the config's folder holds, for a person; "" for none."""
    folder = config.folder
    made = [*_WORK]
    if config.world is not None:
        made += ["world", "index", *([] if config.model.path else ["model"])]
    if config.cloze is not None:
        made += ["cloze", "questions", "index"]
    if config.model.source:
        made.append("model")
    found = [name for name in dict.fromkeys(made) if _holds_something(folder / name)]
    newest = latest(folder / "checkpoints")
    of = f" (the newest of step {_step_in_name(newest, config)})" if newest is not None else ""
    return ", ".join(name + of * (name == "checkpoints") for name in found)


def saved_state(config: RunConfig, *, resume: Resume) -> dict[str, Any] | None:
    """Returns the state of the run in the config's folder; None when the folder holds no run.

    With `resume` "always" the state of a run that lost its state.json is made again from its checkpoints and metrics.
    Raises ConfigError when the run may not start there: the folder holds a run and `resume` is "never", it holds none
    and `resume` is "always", that run was started with other settings, or its files are damaged.
    """
    folder = config.folder
    if not (folder / _STATE).exists():
        return _rebuilt_state(config, resume)
    if resume == "never":
        raise ConfigError(
            f"{folder} holds a run already: continue it with --resume, use another `name`, or delete the folder"
        )
    state = read_state(folder)
    _check_same(config)
    return state


def check_place(path: str | Path, config: object, *, resume: Resume) -> None:
    """Raises ConfigError if a run is to be continued by the config.yaml of a run's folder, but its output and name mean
    another folder: the run was copied, renamed or moved, or the command was started in another folder."""
    file = Path(path)
    own, state = file.parent, file.parent / _STATE
    if resume == "never" or not isinstance(config, RunConfig) or file.name != _CONFIG or not state.exists():
        return
    saved, is_renamed = saved_settings(own), own.resolve().name != config.name
    if saved.get("name") != config.name or (saved.get("output") != config.output and not is_renamed):
        return  # an override says which folder is meant
    if config.folder.resolve() == own.resolve():
        return
    advice = (
        "to continue a copy under another name, write that name, and the paths in its folder, into its config.yaml"
        if is_renamed
        else f"to continue the run that is there, add output={own.parent}"
    )
    raise ConfigError(
        f"{file} belongs to the run in {own}, but its output {config.output!r} and name {config.name!r} mean "
        f"{config.folder}; {advice}"
    )


def read_state(folder: Path) -> dict[str, Any]:
    """Returns the state of the run in `folder`. Raises ConfigError, which says how the run continues, for a damaged
    one."""
    mends = f"delete it: `{_resuming(folder)}` makes it again from the newest checkpoint"
    state = read_record(folder / _STATE, mends=mends, seconds=dict, finished=bool)
    best = state.get("best")
    wrong = [name for name, value in state["seconds"].items() if not isinstance(value, int | float)]
    if not isinstance(state.get("num_steps", 0), int) or (state["finished"] and "num_steps" not in state):
        wrong.append("num_steps")
    if best is not None and not (isinstance(best, dict) and {"step", "metric", "value"} <= best.keys()):
        wrong.append("best")
    if wrong:
        raise ConfigError(f"{folder / _STATE} is damaged ({wrong[0]} differs from the written content); {mends}")
    return state


def _resuming(folder: Path) -> str:
    return f"mempipe train {shlex.quote(str(folder / _CONFIG))} --resume"


def _rebuilt_state(config: RunConfig, resume: Resume) -> dict[str, Any] | None:
    folder, work = config.folder, kept(config)
    if not work:
        if resume == "always":
            raise ConfigError(f"--resume: {folder} holds no run (no {_STATE})")
        return None
    if not (folder / _CONFIG).exists():
        raise ConfigError(
            f"{folder} holds {work}, but neither {_STATE} nor {_CONFIG}, so that nothing says with which settings that "
            f"was made; copy the YAML file that the run was started with to {folder / _CONFIG} and continue it with "
            "--resume, use another `name`, or delete the folder"
        )
    if resume != "always":
        raise ConfigError(
            f"{folder} holds {work} of a run that has lost its {_STATE}: `{_resuming(folder)}` "
            "continues it; or use another `name`, or delete the folder"
        )
    _check_same(config)
    newest, best = latest(folder / "checkpoints"), folder / "best" / MADE_OF
    state: dict[str, Any] = {
        "seconds": {},
        "finished": False,
        "num_steps": max(_step_in_name(newest, config) if newest else 0, _last_step(folder / METRICS_FILE)),
    }
    if best.exists():
        fields = {"step": int, "metric": str, "value": float}
        state["best"] = read_record(best, mends=f"move {best.parent} away to choose the best model again", **fields)
    return state


def _check_same(config: RunConfig) -> None:
    refused = [
        f"{key} {now!r} (was {before!r})"
        for key, before, now in changed_settings(saved_settings(config.folder), config)
    ]
    if refused:
        raise ConfigError(
            f"{config.folder} was started with other settings, which change the learned result: {', '.join(refused)}; "
            "continue with the old values, or give the run another `name`"
        )


def saved_inputs(folder: Path) -> dict[str, str]:
    """Returns the hashes of what the run in `folder` was begun with, by setting; empty where they are not known.
    Raises ConfigError for a damaged file."""
    file = folder / _INPUTS
    return read_record(file, mends="delete it to continue with the inputs as they are now") if file.exists() else {}


def saved_source(folder: Path) -> str:
    """Returns a description of the passages behind the questions of the run in `folder`, with their licence where it is
    known; "" for a run that was given its questions. Raises ConfigError for a damaged file."""
    file = folder / QUESTIONS_FOLDER / MANIFEST
    if not file.exists():
        return ""
    return str(read_object(file, advice="remove its folder, and --resume makes it again").get("source", ""))


def saved_settings(folder: Path) -> dict[str, Any]:
    """Returns the settings that the run in `folder` was started with, with the defaults of those that this version
    knows and the run did not. Raises ConfigError for a damaged config.yaml."""
    file = folder / _CONFIG
    try:
        saved = parse_yaml(file.read_text())
        if not isinstance(saved, dict):
            raise ValueError(f"it holds {type(saved).__name__}, not a mapping")
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read ({error.strerror}); bring its folder back, or copy the YAML file that the run was "
            "started with to it, and --resume continues"
        ) from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(
            f"{file} is damaged ({' '.join(str(error).split())}); copy the YAML file that the run was started with "
            "to it, with its overrides written into it, and --resume continues"
        ) from error
    return completed(saved, RunConfig)


def unfinished(folder: Path) -> str:
    """Describes a run that has not ended yet; returns "" for a finished one and for a folder without a run."""
    try:
        state = read_record(folder / _STATE, mends="")
    except ConfigError:
        return ""
    if state.get("finished"):
        return ""
    return f"an unfinished run ({state.get('num_steps', 0)} steps are done; `mempipe train ... --resume` continues)"


def _holds_something(path: Path) -> bool:
    return path.is_file() or (path.is_dir() and any(path.iterdir()))


def _updates_in_name(checkpoint: Path) -> int:
    """Returns the optimiser updates of a checkpoint; a step has `algorithm.updates_per_step` updates."""
    return int(checkpoint.name.removeprefix("step-"))


def _step_in_name(checkpoint: Path, config: RunConfig) -> int:
    return _updates_in_name(checkpoint) // config.algorithm.updates_per_step


def _last_step(metrics: Path) -> int:
    """Returns the last step that a run has written into its metrics; 0 for none."""
    rows = read_metrics(metrics) if metrics.exists() else []
    return int(rows[-1]["step"]) if rows else 0


def _most_steps_unsaved(config: RunConfig) -> int:
    """Returns how many steps apart the checkpoints of the run are, under its settings of now or of before."""
    try:
        before = RunConfig.model_validate(saved_settings(config.folder)).checkpoint.every_steps
    except (ConfigError, ValidationError):  # a new run
        before = 0
    return max(before, config.checkpoint.every_steps)


def _dumped(config: RunConfig) -> str:
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _text(file: Path) -> str | None:
    return file.read_text() if file.exists() else None
