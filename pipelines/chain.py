"""A chain of trainings and the table of what it was worth: MemTrain, then a post-training stage, in one job.

    for each stage      pipelines.train, from the model that the stage before it left
    for each but the first, again, from the first one's model        (`compare`)
    evaluate            pipelines.evaluate: the last stage with and without the first one

The same command after an interruption goes on where it stopped: a finished stage is kept, an unfinished one resumes
from its newest checkpoint. In MLflow the chain is a run, of which stages and evaluation are children.
"""

from __future__ import annotations

from pathlib import Path

from mempipe.evaluation.chain import ChainConfig, chain_runs, chain_table
from mempipe.progress import say
from mempipe.tracking.config import TrackingConfig
from mempipe.tracking.tracker import Tracker, last_run_id, tracking_uri
from pipelines import evaluate, train

RUN_ID_TIMEOUT_S = 60.0
"""The longest wait for MLflow; a server that is away costs the children their parent, and nothing else."""


def main(chain: ChainConfig) -> list[Path]:
    """Runs the chain to its end and returns the files of the evaluation's report.

    Raises ConfigError for a stage that cannot work, before it starts; what else fails raises a RuntimeError or
    OSError, and the same call goes on from there.
    """
    tracker = Tracker(
        chain.tracking,
        folder=chain.folder,
        run_name=chain.name,
        run_config=chain.model_dump(mode="json"),
        resume_run_id=last_run_id(chain.folder),
    )
    status = "FAILED"
    try:
        tracking = _tracking_of_children(chain, tracker.run_id(RUN_ID_TIMEOUT_S))
        runs = chain_runs(chain, tracking)
        for number, run in enumerate(runs, start=1):
            say(f"{chain.name}: training {number} of {len(runs)}, {run.name}")
            train.main(run, resume="auto")
        paths = evaluate.main(chain_table(chain, runs, tracking))
        for path in paths:
            tracker.log_artifact(path.absolute())
        status = "FINISHED"
        return paths
    finally:
        tracker.finish(status)


def _tracking_of_children(chain: ChainConfig, run_id: str | None) -> TrackingConfig:
    """Returns the tracking of the stages: into the same MLflow, below the chain's own run."""
    uri = tracking_uri(chain.tracking, chain.folder)
    return chain.tracking.model_copy(update={"uri": uri, "parent_run_id": run_id or ""})
