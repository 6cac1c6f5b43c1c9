"""The tracker of a training run: it takes its words from the run's settings and model, and speaks in the terminal."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mempipe.engines.tiny import build_tokenizer
from mempipe.loader import parse_config
from mempipe.tracking.tracker import last_run_id
from mempipe.training.tracker_front import TrackerFront
from tests.unit.test_restarts import group

pytestmark = pytest.mark.slow  # MLflow and its store


@pytest.fixture
def tracker(tmp_path, monkeypatch) -> TrackerFront:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    model = tmp_path / "model"
    build_tokenizer(model)
    return TrackerFront(parse_config({"name": "run", "output": str(tmp_path), "model": {"path": str(model)}}))


def test_a_run_is_recorded_without_a_cluster(tracker, tmp_path):
    tracker.log_metrics({"em": 0.5}, step=1)
    tracker.log_trajectories([group("q")], step=1)
    tracker.log_artifact(tmp_path / "model" / "tokenizer.json")
    tracker.flush()
    summary = tracker.finish("FINISHED")
    assert summary.losses == () and summary.num_refused == 0
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    run = client.get_run(str(last_run_id(tmp_path / "run")))
    assert run.info.status == "FINISHED" and run.data.metrics == {"em": 0.5} and run.data.params["name"] == "run"
    (trace,) = client.search_traces(locations=[run.info.experiment_id])
    assert isinstance(trace.data.spans[-1].inputs["prompt"], str)
    assert "tokenizer.json" in {file.path for file in client.list_artifacts(run.info.run_id)}


def test_what_cannot_be_recorded_ends_no_run_and_is_said_in_its_terminal(tracker, tmp_path: Path, capsys):
    shutil.rmtree(tmp_path / "run")
    tracker.log_metrics({"em": 0.5}, step=1)
    assert tracker.flush() is False
    assert tracker.finish("FAILED", 0.1).losses
    assert not (tmp_path / "run").exists(), "it may be a mount that comes back"
    said = capsys.readouterr().out
    assert f"{tmp_path / 'run' / 'metrics.jsonl'} cannot be written: No such file or directory" in said
    assert "Traceback" not in said
