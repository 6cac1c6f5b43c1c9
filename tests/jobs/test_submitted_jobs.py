"""An index, a training, an evaluation and sweeps as a user submits them to a cluster that asks for a token."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from miniature import FEW_PROCESSES, MINIATURE, QUICKSTART, SHORT_WARM_START

import mempipe
from mempipe.config import RunConfig
from mempipe.loader import parse_overrides
from mempipe.retrieval.manifest import check_index
from tools.processes import ROOT, Marked, run
from tools.ray_head import AUTHENTICATION, BIN, Head, ray_head

pytestmark = pytest.mark.jobs
NUM_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class User:
    """A user with the token of the cluster in the home folder and nothing in the environment."""

    head: Head
    home: Path
    output: Path

    def submit(self, config: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
        """Submits from the root of the repository, so that the job runs what is shipped."""
        marked = Marked({**self.head.marked.environment, "HOME": str(self.home), "PYTHONPATH": str(ROOT)})
        for name in AUTHENTICATION:
            marked.environment.pop(name, None)
        command = [str(BIN / "python"), "-m", "mempipe.cli", "submit", str(config), f"--address={self.head.dashboard}"]
        try:
            done = run([*command, *overrides], marked=marked, cwd=ROOT, writes=self.output)
        finally:
            marked.end()
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def written(self, name: str, values: object) -> Path:
        """Writes a config outside the folder that is shipped."""
        (self.output / name).write_text(yaml.safe_dump(values))
        return self.output / name


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    home, output = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("shared")
    run([str(BIN / "ray"), "get-auth-token", "--generate"], marked=Marked({"HOME": str(home)}), cwd=output)
    with ray_head({"HOME": str(home)}) as head:
        yield User(head=head, home=home, output=output)


def test_an_index_is_built(user):
    text = user.output / "notes.txt"
    text.write_text("Lima is the capital of Peru. " * 40)
    config = user.written("index.yaml", {"corpus": [str(text)], "output": "index", "encoder": None, "lexical": True})
    user.submit(config, f"output={user.output / 'index'}")
    check_index(str(user.output / "index"), mode="lexical")


def table_of(world: RunConfig) -> dict[str, Any]:
    """An evaluation of the world's untrained model on four questions."""
    settings = world.model_dump(mode="json", include={"model", "agent", "budget", "retrieval", "generation"})
    questions = {"name": "world", "file": world.data.validation, "num_questions": 4}
    tracking = {"enabled": False}
    return {"runs": [{"name": "noise", "settings": settings}], "benchmarks": [questions], "tracking": tracking}


def test_an_evaluation_leaves_its_report(user, world):
    user.submit(user.written("suite.yaml", {"name": "table", **table_of(world)}), f"output={user.output}")
    assert (user.output / "table" / "report.html").exists()


def test_a_sweep_runs_its_trials_in_processes_of_their_own(user, world):
    sweep = user.written("sweep.yaml", {"name": "two", "budgets": [4, 64], "seeds": [1], **table_of(world)})
    done = user.submit(sweep, f"output={user.output}")
    assert "finished (2 of 2)" in done.stdout
    assert (user.output / "two" / "budgets.html").exists()


def test_a_sweep_trains_under_each_budget_before_it_measures(user):
    few = parse_overrides([*MINIATURE, *SHORT_WARM_START, *FEW_PROCESSES, "num_steps=1", "tracking.enabled=false"])
    values = {
        "name": "trained",
        "train": True,
        "budgets": [8, 16],
        "seeds": [1],
        "runs": [{"name": "mem", "config": str(QUICKSTART), "settings": few}],
        "benchmarks": [{"name": "world", "file": "{run}/world/validation.parquet", "num_questions": 4}],
        "tracking": {"enabled": False},
    }
    done = user.submit(user.written("trained.yaml", values), f"output={user.output}")
    assert "finished (2 of 2)" in done.stdout
    trained = {mempipe.Run(folder).config.budget.memory_tokens for folder in (user.output / "trained/runs").iterdir()}
    assert trained == {8, 16}
    rows = json.loads((user.output / "trained/budgets.json").read_text())["budgets"]
    assert {row["memory_tokens"] for row in rows} == {8, 16}


def test_a_training_leaves_its_model(user):
    few = [*MINIATURE, *SHORT_WARM_START, *FEW_PROCESSES, f"num_steps={NUM_STEPS}", "tracking.enabled=false"]
    done = user.submit(QUICKSTART, f"output={user.output}", "name=run", *few)
    assert f"train: {NUM_STEPS}/{NUM_STEPS}" in done.stdout
    report = json.loads((user.output / "run" / "report.json").read_text())
    assert report["num_steps"] == NUM_STEPS
    assert (user.output / "run" / "huggingface" / "model.safetensors").exists()
