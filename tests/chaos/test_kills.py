"""Every actor and process of a training is killed once in every phase in which it lives, and the driver at every
beacon. `make chaos` runs it: real engines, ranks and stores, a tiny model.
"""

from __future__ import annotations

import signal
from pathlib import Path

import commands
import pytest
from aftermath import check_equal_weights
from journal import Journal
from watched import Watched

pytestmark = [pytest.mark.chaos, pytest.mark.ray]

NUM_STEPS = 14
SAME_RESULT = ["ordered=true", "algorithm.max_off_policy_steps=0"]
"""With these a run that was killed ends with the weights of one that was not."""
SMALL = ["learner.num_ranks=1", "algorithm.kl_coef=0"]
"""One rank and no reference: starts that many kills of the driver can afford."""


@pytest.fixture(scope="module")
def undisturbed(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that met no fault."""
    with Watched(tmp_path_factory.mktemp("undisturbed")) as watched:
        campaign = commands.training(
            watched, Journal("undisturbed: "), start, num_steps=NUM_STEPS, overrides=SAME_RESULT
        )
        campaign.begin()
        campaign.finish()
        return campaign.folder


def test_every_actor_may_die_in_every_phase(train, undisturbed, journal):
    run = train(NUM_STEPS, [*SAME_RESULT, "generation.num_replicas=2"])
    run.strike(["engine", "retriever"], "launch")
    run.strike(["engine", "weight store"], "evaluate", label="before", groups=0)
    run.strike(["here"], "driver.play")
    run.strike(["admission"], "collect", step=1)
    run.strike(["here"], "reference.score")
    run.strike(["here"], "engine.generate")
    run.strike(["here"], "retriever.search")
    run.strike(["here"], "admission.choose")
    run.strike(["stream's own actors"], "collect", step=2)
    run.strike(["rank"], "learn", step=2)
    run.strike(["retriever", "weight store", "engine"], "launch")
    run.strike(["here"], "rank.update", rank=1, update=1)
    run.strike(["retriever", "worker", "reference"], "learn", step=3)
    run.strike(["engine", "admission"], "learn.update", update=1)
    run.strike(["here"], "store.put")
    run.strike(["engine"], "sync", version=5)
    run.strike(["here"], "engine.load_weights")
    run.strike(["engine", "weight store"], "sync.check", version=6)
    run.strike(["rank"], "sync", version=7)
    run.strike(["here"], "admission.consume")
    run.strike(["here"], "checkpoint.partial", rank=1)
    run.strike(["engine", "worker"], "checkpoint")
    run.strike(["here"], "checkpoint.whole")
    run.strike(["engine", "retriever", "weight store"], "evaluate", label="step-00000010", groups=0)
    run.strike(["rank"], "evaluate", label="after", groups=0)
    run.strike(["engine", "retriever"], "export")
    run.strike(["here"], "rank.export", rank=0)
    run.finish()
    with journal.fault("weights", "beside an undisturbed run"):
        check_equal_weights(run.folder, undisturbed)


def test_the_driver_may_die_anywhere(train):
    run = train(NUM_STEPS, SMALL)
    for at in ("prepare", "connected", "launch", "restored"):
        run.strike(["driver"], at)
    run.strike(["driver"], "evaluate", label="before", groups=0)
    run.strike(["driver"], "collect", step=2)
    run.strike(["driver"], "learn", step=3)
    run.strike(["driver"], "learn.update", update=1)
    run.strike(["driver"], "sync", version=5)
    run.strike(["driver"], "sync.check", version=6)
    run.strike(["driver"], "learnt", step=6)
    run.strike(["driver"], "checkpoint")
    run.strike(["driver"], "evaluate", label="step-00000010", groups=0)
    run.strike(["driver"], "evaluate", label="after", groups=0)
    run.strike(["driver"], "export")
    run.strike(["driver"], "report")
    run.finish()


def test_a_run_that_is_told_to_end_saves_and_ends_in_time(train):
    run = train(NUM_STEPS, [*SMALL, "checkpoint.every_steps=100"])
    run.strike(["driver"], "collect", number=signal.SIGTERM, step=2)
    run.strike(["driver"], "learn.update", number=signal.SIGTERM, update=1)
    run.strike(["driver"], "sync", number=signal.SIGINT, version=6)
    run.strike(["driver"], "evaluate", number=signal.SIGTERM, label="step-00000010", groups=0)
    run.strike(["driver"], "export", number=signal.SIGINT)
    run.finish()


def test_a_lost_cluster_is_one_sentence_and_the_run_goes_on(train):
    run = train(NUM_STEPS, SMALL)
    run.lose_cluster("raylet", "collect", step=2)
    run.lose_cluster("GCS", "learn", step=4)
    run.lose_cluster("raylet", "sync", version=7)
    run.lose_cluster("GCS", "evaluate", label="after", groups=0)
    run.finish()
