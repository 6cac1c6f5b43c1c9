"""Settings of the record of a run."""

from __future__ import annotations

from pydantic import Field

from mempipe.settings import Section


class TrackingConfig(Section):
    """MLflow. `metrics.jsonl` in the run's folder is written in any case."""

    enabled: bool = True
    """Write to MLflow."""
    uri: str = ""
    """MLflow server; empty: MLFLOW_TRACKING_URI, else the sqlite file `mlflow.db` in `output`, for all its runs."""
    experiment: str = "mempipe"
    """The MLflow experiment that runs belong to."""
    traces_per_step: int = Field(2, ge=0)
    """Trajectories logged as MLflow traces."""
    parent_run_id: str = ""
    """The MLflow run that this one is a part of, as a trial is of a sweep and a stage of a chain, which set it; empty:
    none."""
