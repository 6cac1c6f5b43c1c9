"""Settings of the record of a run."""

from __future__ import annotations

from pydantic import Field, PositiveInt, field_validator

from mempipe.settings import Section

WRITERS = ("mlflow", "tensorboard", "wandb")


class TrackingConfig(Section):
    """The writers of metrics. `metrics.jsonl` in the run's folder is written in any case."""

    enabled: bool = True
    """Use the writers; false: only the files in the run's folder."""
    writers: list[str] = ["mlflow"]
    """Places to which a training writes its metrics: mlflow, tensorboard (files in the run's folder), wandb (offline,
    unless WANDB_MODE says otherwise), or your `MetricsWriter` as MODULE:NAME. Sweeps, chains and evaluations are
    recorded in mlflow only."""
    uri: str = ""
    """MLflow server; empty: MLFLOW_TRACKING_URI, else the sqlite file `mlflow.db` in `output`, for all its runs."""
    experiment: str = "mempipe"
    """The MLflow experiment that runs belong to; in W&B the project, unless WANDB_PROJECT names one."""
    traces_per_step: int = Field(2, ge=0)
    """Trajectories logged as MLflow traces."""
    profile_steps: list[PositiveInt] = []
    """Steps, as `metrics.jsonl` counts them, whose optimiser updates rank 0 records with torch's profiler: one Chrome
    trace each in `profiles/` of the run's folder. A recorded update is slower."""
    parent_run_id: str = ""
    """The MLflow run that this one is a part of, as a trial is of a sweep and a stage of a chain, which set it; empty:
    none."""

    @field_validator("writers")
    @classmethod
    def _known(cls, writers: list[str]) -> list[str]:
        for name in writers:
            if name not in WRITERS and ":" not in name:
                raise ValueError(
                    f"tracking.writers names {name!r}; choose from {', '.join(WRITERS)}, or MODULE:NAME for your class"
                )
        if len(set(writers)) < len(writers):
            raise ValueError(f"tracking.writers is {writers}; name each writer once")
        return writers

    @property
    def further_writers(self) -> list[str]:
        """Returns the names of the writers that are used next to MLflow."""
        return [name for name in self.writers if self.enabled and name != "mlflow"]

    @property
    def uses_mlflow(self) -> bool:
        return self.enabled and "mlflow" in self.writers
