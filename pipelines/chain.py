"""A chain of trainings and the table of what it was worth: MemTrain, then a post-training stage, in one job.

    for each stage      pipelines.train, from the model that the stage before it left
    for each but the first, again, from the first one's model        (`compare`)
    evaluate            pipelines.evaluate: the last stage with and without the first one

The same command after an interruption resumes where it stopped: a finished stage is kept, an unfinished one resumes
from its newest checkpoint, and one whose beginning was trained again since is refused. In MLflow the chain is a run;
its stages and the evaluation are its children.
"""

from __future__ import annotations

from pathlib import Path

from mempipe.beacons import reached
from mempipe.progress import say
from mempipe.studies.chain import ChainConfig, chain_runs, chain_table, check_stages
from mempipe.training.parent_run import parent_run
from pipelines import evaluate, train


def main(chain: ChainConfig) -> list[Path]:
    """Runs the chain to its end and returns the files of the evaluation's report.

    Raises ConfigError for a stage that cannot work, before it starts; what else fails raises a RuntimeError or
    OSError, and the same call resumes from there.
    """
    check_stages(chain, chain_runs(chain))
    with parent_run(chain.tracking, folder=chain.folder, name=chain.name, settings=chain) as (tracker, tracking):
        runs = chain_runs(chain, tracking)
        for number, run in enumerate(runs, start=1):
            reached("chain", stage=run.name)
            check_stages(chain, [run])  # the stage before it may have been trained on just now
            say(f"{chain.name}: training {number} of {len(runs)}, {run.name}")
            train.main(run, resume="auto")
        paths = evaluate.main(chain_table(chain, runs, tracking))
        for path in paths:
            tracker.log_artifact(path.absolute())
        return paths
