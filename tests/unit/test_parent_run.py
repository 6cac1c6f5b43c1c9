"""The MLflow run of a sweep or a chain, where MLflow is away for a while or for good."""

from __future__ import annotations

import socket
import sqlite3
import threading
from functools import partialmethod
from pathlib import Path

import pytest

from mempipe.settings import Section
from mempipe.tracking.config import TrackingConfig
from mempipe.tracking.tracker import Tracker
from mempipe.training import parent_run as module
from mempipe.training.parent_run import parent_run


class Settings(Section):
    """What the job was asked for."""

    num_trials: int = 2


def run(folder: Path, tracking: TrackingConfig) -> str:
    """A job that logs one number. Returns what its parts are told to stand below."""
    with parent_run(tracking, folder=folder, name="sweep", settings=Settings()) as (tracker, of_parts):
        tracker.log_metrics({"em": 0.5}, step=4)
        return of_parts.parent_run_id


@pytest.mark.slow
def test_an_mlflow_that_is_away_for_a_while_costs_nothing(tmp_path):
    Tracker(TrackingConfig(), folder=tmp_path / "other", run_name="other", run_config={}).finish()  # makes the store
    lock = sqlite3.connect(tmp_path / "mlflow.db", isolation_level=None, check_same_thread=False)
    lock.execute("BEGIN EXCLUSIVE")
    away = threading.Timer(2.0, lock.close)
    away.start()
    parent = run(tmp_path / "sweep", TrackingConfig())
    away.join()
    from mlflow import MlflowClient

    recorded = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}").get_run(parent)
    assert recorded.info.status == "FINISHED" and recorded.data.metrics == {"em": 0.5}


def test_without_an_answer_the_job_goes_on_and_its_parts_stand_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "RUN_ID_TIMEOUT_S", 0.1)
    monkeypatch.setattr(module.Tracker, "finish", partialmethod(Tracker.finish, timeout_s=0.1))
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        assert run(tmp_path / "sweep", TrackingConfig(uri=uri)) == ""
    assert "MLflow does not answer: the runs of the parts of sweep will not be nested" in capsys.readouterr().out
    assert '"em": 0.5' in (tmp_path / "sweep" / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_a_job_that_fails_is_recorded_as_failed(tmp_path):
    with (
        pytest.raises(RuntimeError, match="a trial failed"),
        parent_run(TrackingConfig(), folder=tmp_path / "s", name="s", settings=Settings()) as (_, of_parts),
    ):
        raise RuntimeError("a trial failed")
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert client.get_run(of_parts.parent_run_id).info.status == "FAILED"
