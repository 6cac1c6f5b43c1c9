"""What must hold after every fault, and at the end of a run that met any number of them."""

from __future__ import annotations

import json
import re
import sqlite3
import stat
from collections import Counter
from pathlib import Path

from safetensors import safe_open
from watched import Missed, Watched

from mempipe.engines.checkpoint import CheckpointError, latest, read_state
from mempipe.storage.files import sha256

LONGEST_LINE = 400
NOISE = re.compile(r"Traceback \(most recent call last\)|^\s+File \"|ray\.exceptions\.|\(pid=\d+", re.MULTILINE)
"""What a person should never have to read."""
HINT = "(MEMPIPE_DEBUG=1 shows where)"


def check_words(text: str) -> None:
    """Raises Missed when the output holds a traceback, or a line that nobody reads to its end."""
    if found := NOISE.search(text):
        around = text[max(found.start() - 200, 0) : found.end() + 600]
        raise Missed(f"the output holds a traceback or Ray's own text: {around}")
    if long := [line for line in text.splitlines() if len(line) > LONGEST_LINE]:
        raise Missed(f"the output holds a line of {len(long[0])} characters: {long[0][:300]}…")


def sentence(text: str) -> str:
    """Returns the one sentence with which a command says why it ended. Raises Missed unless it is exactly one."""
    said = [line for line in text.splitlines() if re.match(r"error: |interrupted", line)]
    if len(said) != 1:
        raise Missed(f"the command ended with {len(said)} sentences instead of one: {said or text[-3000:]}")
    return said[0]


def newest_step(folder: Path) -> int:
    """Returns the step of the newest checkpoint, 0 without one. Raises Missed when it is damaged."""
    newest = latest(folder / "checkpoints")
    if newest is None:
        return 0
    try:
        return read_state(newest).position.step
    except CheckpointError as error:
        raise Missed(f"the newest checkpoint is damaged: {error}") from error


def check_kept(folder: Path, *, at_least: int) -> int:
    """Returns the newest checkpoint's step. Raises Missed when the run or a checkpoint that was there is gone."""
    if not folder.is_dir():
        raise Missed(f"the run's folder {folder} is gone")
    newest = newest_step(folder)
    if newest < at_least:
        raise Missed(
            f"the newest checkpoint is of step {newest}, and one of step {at_least} was there before the fault"
        )
    return newest


def check_record(folder: Path, *, num_steps: int, groups_per_step: int) -> None:
    """Raises Missed unless each step stands once in the record and each group was trained on once."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = Counter(int(row["step"]) for row in rows if "reward" in row)
    _once(steps, num_steps, "metrics.jsonl")
    newest = latest(folder / "checkpoints")
    if newest is None:
        raise Missed("a finished run has no checkpoint")
    position = read_state(newest).position
    groups = [group for step in position.trained for group in step]
    if position.step != num_steps or len(set(groups)) != len(groups) or len(groups) != num_steps * groups_per_step:
        raise Missed(
            f"the newest checkpoint is of step {position.step} with {len(groups)} groups, {len(set(groups))} different "
            f"ones; {num_steps} steps of {groups_per_step} were to be trained"
        )


def check_mlflow(database: Path, *, num_steps: int) -> None:
    """Raises Missed unless MLflow shows each step's reward once."""
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as store:
        query = (
            "select step from metrics join runs using (run_uuid) where key = 'reward' and lifecycle_stage = 'active'"
        )
        _once(Counter(int(step) for (step,) in store.execute(query)), num_steps, "MLflow")


def _once(steps: Counter[int], num_steps: int, where: str) -> None:
    wanted = Counter(range(1, num_steps + 1))
    if steps != wanted:
        missing = sorted((wanted - steps).elements())
        twice = sorted(set((steps - wanted).elements()))
        raise Missed(f"{where}: steps {missing} are missing, and {twice} stand there more than once")


def check_nothing_left(watched: Watched) -> None:
    """Raises Missed when a process, a socket or a temporary file of the commands is still there."""
    if left := watched.marked.survivors():
        raise Missed(f"{len(left)} processes are left: {'; '.join(line[:100] for line in left)}")
    files = [path for path in watched.temporary.rglob("*") if not path.is_dir()]
    sockets = [path for path in files if stat.S_ISSOCK(path.lstat().st_mode)]
    if sockets:
        raise Missed(f"{len(sockets)} sockets are left: {_names(watched, sockets)}")
    if files:
        raise Missed(f"{len(files)} temporary files are left: {_names(watched, files)}")


def _names(watched: Watched, paths: list[Path]) -> str:
    return ", ".join(str(path.relative_to(watched.temporary)) for path in paths[:5])


def weights_hash(folder: Path) -> str:
    """Returns the hash of the model that the run exported."""
    return sha256(folder / "huggingface" / "model.safetensors")


def check_equal_weights(folder: Path, undisturbed: Path) -> None:
    """Raises Missed unless both runs exported the same weights, to the last bit."""
    if weights_hash(folder) == weights_hash(undisturbed):
        return
    different = []
    with (
        safe_open(folder / "huggingface" / "model.safetensors", "numpy") as own,
        safe_open(undisturbed / "huggingface" / "model.safetensors", "numpy") as other,
    ):
        for name in own.keys():  # noqa: SIM118  # no mapping
            if (own.get_tensor(name) != other.get_tensor(name)).any():
                different.append(name)
    raise Missed(f"{len(different)} tensors differ from those of the undisturbed run, {different[:3]} first")
