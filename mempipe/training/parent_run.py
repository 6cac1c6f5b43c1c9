"""The MLflow run of a job that consists of other jobs: their runs are nested under it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mempipe.progress import say
from mempipe.settings import Section
from mempipe.tracking.config import TrackingConfig
from mempipe.tracking.tracker import Tracker, last_run_id, tracking_uri

RUN_ID_TIMEOUT_S = 60.0
"""The longest wait for MLflow; without an answer the parts have no parent run, and the job continues."""


@contextmanager
def parent_run(
    tracking: TrackingConfig, *, folder: Path, name: str, settings: Section
) -> Iterator[tuple[Tracker, TrackingConfig]]:
    """Yields the job's tracker, and the tracking of its parts: into the same MLflow, below the job's run.

    The run resumes where the folder has one. It is FINISHED after the block, and FAILED when the block raises.
    """
    tracker = Tracker(
        tracking,
        folder=folder,
        run_name=name,
        run_config=settings.model_dump(mode="json"),
        resume_run_id=last_run_id(folder),
    )
    finished = False
    try:
        run_id = tracker.run_id(RUN_ID_TIMEOUT_S)
        if tracking.uses_mlflow and run_id is None:
            say(f"MLflow does not answer: the runs of the parts of {name} will not be nested")
        uri = tracking_uri(tracking, folder)
        yield tracker, tracking.model_copy(update={"uri": uri, "parent_run_id": run_id or ""})
        finished = True
    finally:
        tracker.finish("FINISHED" if finished else "FAILED")
