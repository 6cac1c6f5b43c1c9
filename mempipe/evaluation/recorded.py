"""Trajectories wherever a run or an evaluation recorded them: a training run's folder or one of its Parquet files, an
evaluation, one run or set of it, or one part of its results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mempipe.data.trajectories import read_trajectories
from mempipe.evaluation.results import SETTINGS, read_groups, read_result_state
from mempipe.runs import saved_settings
from mempipe.settings import ConfigError
from mempipe.types import Group

_DEPTH = 3  # folders of an evaluation: EVALUATION/RUN/SET


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Holds the groups of one file, or of one run on one set of an evaluation.

    `place` is the file, or the folder of the set. `phase` is RUN/SET of an evaluation; it is empty for the file of a
    training run, where every group's id begins with its phase. `settings` are those of the run that played, and empty
    if its config is not next to the file.
    """

    place: Path
    phase: str
    settings: Mapping[str, Any]
    groups: list[Group]


def read_recorded(path: Path, *, tokens: bool = True) -> Iterator[Recorded]:
    """Yields the recorded groups at `path`, file by file and set by set; without `tokens` as in `read_trajectories`.

    Raises ConfigError for what cannot be read, and at the end for what holds no trajectories.
    """
    num_trajectories = 0
    for recorded in _found(path, tokens=tokens):
        num_trajectories += sum(len(group.trajectories) for group in recorded.groups)
        yield recorded
    if not num_trajectories and (trial := next(iter(sorted(path.glob("trials/*/"))), None)) is not None:
        raise ConfigError(f"{path} is a sweep; give the folder of one of its trials, e.g. {trial}")
    if not num_trajectories:
        raise ConfigError(f"{path} holds no trajectories: a run writes them when it evaluates, before its first step")


def _found(path: Path, *, tokens: bool) -> Iterator[Recorded]:
    if path.is_file():
        if path.suffix.lower() != ".parquet":
            raise ConfigError(f"{path} is not a .parquet file; give the folder of a run or an evaluation")
        yield _file(path, tokens=tokens)
        return
    if not path.is_dir():
        raise ConfigError(
            f"{path} does not exist; give the folder of a run or an evaluation, or a Parquet file", absent=str(path)
        )
    whole = path / "trajectories.parquet"
    if files := [whole] if whole.exists() else sorted(path.glob("evaluation/*.parquet")):
        yield from (_file(file, tokens=tokens) for file in files)
        return
    for folder in sorted(file.parent for depth in range(_DEPTH) for file in path.glob("*/" * depth + SETTINGS)):
        phase = "/".join(folder.relative_to(path.parent if folder == path else path).parts)
        yield _set(folder, phase=phase, tokens=tokens)


def _file(path: Path, *, tokens: bool) -> Recorded:
    if path.match("part-*.parquet") and (path.parent / SETTINGS).exists():
        return _set(path, phase=f"{path.parent.parent.name}/{path.parent.name}", tokens=tokens)
    return Recorded(place=path, phase="", settings=_config_beside(path), groups=read_trajectories(path, tokens=tokens))


def _set(place: Path, *, phase: str, tokens: bool) -> Recorded:
    """Reads the folder of a set, or one part of it."""
    state = read_result_state(place if place.is_dir() else place.parent)
    return Recorded(
        place=place, phase=phase, settings=state["settings"]["run"], groups=read_groups(place, tokens=tokens)
    )


def _config_beside(file: Path) -> Mapping[str, Any]:
    """Returns the settings of the run that wrote the file; none where its config is not there."""
    for folder in (file.parent, file.parent.parent):
        if (folder / "config.yaml").exists():
            return saved_settings(folder)
    return {}
