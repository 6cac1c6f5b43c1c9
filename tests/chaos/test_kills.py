"""Every actor and process of a training is killed once in every phase in which it lives, and the driver at every
beacon. `make chaos` runs it: real engines, ranks and stores, a tiny model.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import commands
import pytest
from aftermath import check_equal_weights
from journal import Journal
from watched import Watched, at

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
            watched, Journal("undisturbed: ", out=sys.stderr), start, num_steps=NUM_STEPS, overrides=SAME_RESULT
        )
        campaign.begin()
        campaign.finish()
        return campaign.folder


def test_every_actor_may_die_in_every_phase(train, undisturbed, journal):
    run = train(NUM_STEPS, [*SAME_RESULT, "generation.num_replicas=2"])
    plan = [
        (["engine", "retriever"], at("launch")),
        (["engine", "weight store"], at("evaluate", label="before", groups=0)),
        (["here"], at("driver.play")),
        (["admission"], at("collect", step=1)),
        (["here"], at("reference.score")),
        (["here"], at("engine.generate")),
        (["here"], at("retriever.search")),
        (["here"], at("admission.choose")),
        (["stream's own actors"], at("collect", step=2)),
        (["rank"], at("learn", step=2)),
        (["retriever", "weight store", "engine"], at("launch")),
        (["here"], at("rank.update", rank=1, update=1)),
        (["retriever", "worker", "reference"], at("learn", step=3)),
        (["engine", "admission"], at("learn.update", update=1)),
        (["here"], at("store.put")),
        (["engine"], at("sync", version=5)),
        (["here"], at("engine.load_weights")),
        (["engine", "weight store"], at("sync.check", version=6)),
        (["rank"], at("sync", version=7)),
        (["here"], at("admission.consume")),
        (["here"], at("checkpoint.partial", rank=1)),
        (["engine", "worker"], at("checkpoint")),
        (["here"], at("checkpoint.whole")),
        (["engine", "retriever", "weight store"], at("evaluate", label="step-00000010", groups=0)),
        (["rank"], at("evaluate", label="after", groups=0)),
        (["engine", "retriever"], at("export")),
        (["here"], at("rank.export", rank=0)),
    ]
    run.strikes(plan)
    run.finish()
    with journal.fault("weights", "beside an undisturbed run"):
        check_equal_weights(run.folder, undisturbed)


def test_an_engine_in_its_own_process_may_die_before_its_actor(train):
    """Until the actor ends too, within a second, it answers with `EngineDead`. A place is two versions after the one
    before, so that no actor is held there whose engine was killed before."""
    run = train(8, [*SMALL, "generation.engine_process=own"])
    places = [
        at("engine.generate", version=1),
        at("engine.load_weights", version=3),
        at("sync", version=5),
        at("sync.check", version=7),
    ]
    run.strikes([(["engine's own process"], place) for place in places])
    run.finish()


def test_every_actor_may_die_before_training(watched, journal, tmp_path_factory):
    """Engines, retrievers and ranks are started once, and wait where others work: an idle one may die as well."""
    with Watched(tmp_path_factory.mktemp("whole")) as other:
        beside = Journal("undisturbed: ", out=sys.stderr)
        whole = commands.training(other, beside, None, num_steps=1, overrides=SAME_RESULT)
        whole.begin()
        whole.finish()
        run = commands.training(watched, journal, None, num_steps=1, overrides=SAME_RESULT)
        run.begin()
        plan = [
            (["rank"], at("launch")),
            (["engine"], at("demonstrations")),
            (["rank", "engine"], at("evaluate", label="untrained", groups=0)),
            (["engine", "retriever", "weight store"], at("warm_start", updates=0)),
            (["here"], at("rank.update", rank=1)),
            (["engine"], at("warm_start.export")),
            (["here"], at("rank.export", rank=0)),
            (["engine", "retriever"], at("restored", step=0)),
        ]
        run.strikes(plan)
        run.finish()
        with journal.fault("weights", "beside an undisturbed run", number=0):
            check_equal_weights(run.folder, whole.folder)


def test_the_driver_may_die_anywhere(train):
    run = train(NUM_STEPS, SMALL)
    places = [
        at("prepare"),
        at("connected"),
        at("launch"),
        at("restored"),
        at("evaluate", label="before", groups=0),
        at("collect", step=2),
        at("learn", step=3),
        at("learn.update", update=1),
        at("sync", version=5),
        at("sync.check", version=6),
        at("learnt", step=6),
        at("checkpoint"),
        at("evaluate", label="step-00000010", groups=0),
        at("evaluate", label="after", groups=0),
        at("export"),
        at("report"),
    ]
    run.strikes([(["driver"], place) for place in places])
    run.finish()


def test_a_run_that_is_told_to_end_saves_and_ends_in_time(train):
    run = train(NUM_STEPS, [*SMALL, "checkpoint.every_steps=100"])
    plan = [
        (signal.SIGTERM, at("learn.update", update=1)),
        (signal.SIGINT, at("sync", version=6)),
        (signal.SIGTERM, at("evaluate", label="step-00000010", groups=0)),
    ]
    for number, place in plan:
        run.strike(["driver"], place, number=number)
    run.finish()


def test_a_lost_cluster_is_one_sentence_and_the_run_goes_on(train):
    run = train(NUM_STEPS, SMALL)
    run.lose_cluster("raylet", at("collect", step=2))
    run.lose_cluster("GCS", at("learn", step=4))
    run.finish()
