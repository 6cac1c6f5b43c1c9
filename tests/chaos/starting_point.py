"""The warm-started tiny model, its questions and its index, from which every run of this suite starts; made once and
kept for the next time.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from miniature import QUICKSTART
from watched import Missed, Watched, at

from mempipe.storage.files import lock
from tools.processes import ROOT

NUM_STEPS = 10
GROUPS_PER_STEP = 4
NUM_VALIDATION = 8
WORLD = [
    "world.num_train_worlds=4",
    "world.num_train_questions=120",
    f"world.num_validation_questions={NUM_VALIDATION}",
    "warm_start.num_clean_trajectories=900",
    "warm_start.num_noisy_trajectories=100",
    "warm_start.tokens_per_step=1024",
]
"""Enough demonstrations for answers that are right now and then: without, no step would change the model."""
TRAINING = [
    f"algorithm.groups_per_step={GROUPS_PER_STEP}",
    "algorithm.group_size=3",
    "algorithm.updates_per_step=2",
    "checkpoint.every_steps=2",
    "evaluation.every_steps=5",
    "evaluation.untrained=false",
    "max_restarts=50",
]
MAKING = ["name=run", "learner.num_ranks=1", "algorithm.kl_coef=0", "tracking.enabled=false"]
SOURCES = (
    "jobs/configs/quickstart.yaml",
    "mempipe/data",
    "mempipe/agents",
    "mempipe/engines/tiny.py",
    "mempipe/retrieval",
)
"""What the starting point depends on: it is made again when one of these changes."""
PARTS = ("world", "index", "warm_start")
MAKING_S = 600.0


def starting_point() -> Path:
    """Returns the folder with `world`, `index` and `warm_start`; makes it when it is not there."""
    folder = _cache() / _key()
    if not folder.exists():  # else a second campaign beside the first, which holds the lock, could not begin
        lock(folder.with_name(f"{folder.name}.being-made"))
    if not folder.exists():
        with Watched(_cache() / f".{folder.name}.{os.getpid()}") as watched:
            watched.start(
                ["train", str(QUICKSTART), *WORLD, *TRAINING, *MAKING, "num_steps=1", f"output={watched.output}"]
            )
            with watched.held(at("restored"), seconds=MAKING_S):  # all that is wanted is there
                made = watched.output / "run"
                if not all((made / part).is_dir() for part in PARTS):
                    raise Missed(f"no starting point was made: {watched.last_words()}")
                partial = folder.with_name(f".{folder.name}.partial")
                shutil.rmtree(partial, ignore_errors=True)
                for part in PARTS:
                    shutil.copytree(made / part, partial / part)
                partial.rename(folder)
        shutil.rmtree(watched.output, ignore_errors=True)
    return folder


def whole_training_arguments(*, name: str, output: Path, overrides: Sequence[str] = ()) -> list[str]:
    """Returns the arguments of `mempipe` for a training that makes its world and its warm start itself."""
    settings = [*WORLD, *TRAINING, "evaluation.untrained=true", f"name={name}", f"output={output}"]
    return ["train", str(QUICKSTART), *settings, *overrides]


def train_arguments(start: Path, *, name: str, output: Path, overrides: Sequence[str] = ()) -> list[str]:
    """Returns the arguments of `mempipe` for a training from the starting point."""
    return [
        "train",
        str(QUICKSTART),
        "world=null",
        "warm_start=null",
        f"model.path={start / 'warm_start'}",
        f"retrieval.index={start / 'index'}",
        f"data.train={start / 'world' / 'train.parquet'}",
        f"data.validation={start / 'world' / 'validation.parquet'}",
        *TRAINING,
        f"num_steps={NUM_STEPS}",
        f"name={name}",
        f"output={output}",
        *overrides,
    ]


def _cache() -> Path:
    """Returns the folder of this user for what tests keep from one time to the next."""
    default = Path(tempfile.gettempdir()) / f"mempipe-chaos-{os.getuid()}"
    folder = Path(os.environ.get("MEMPIPE_CHAOS_CACHE", default))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _key() -> str:
    digest = hashlib.sha256(repr([*WORLD, *TRAINING]).encode())
    for source in SOURCES:
        path = ROOT / source
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
