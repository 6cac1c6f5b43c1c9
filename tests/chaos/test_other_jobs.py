"""An index build, an evaluation, a sweep and a chain lose their processes and go on."""

from __future__ import annotations

import signal

import commands
import pytest
from watched import at

pytestmark = [pytest.mark.chaos, pytest.mark.ray]


def test_an_index_build_goes_on(watched, journal):
    build = commands.index_build(watched, journal)
    build.begin()
    build.strike(["driver"], at("index.read", segment=3), then=at("index.encode", segment=8))
    build.strike(["here"], at("index.encode", segment=8), then=at("index.encode", segment=12))
    build.strike(["driver"], at("index.encode", segment=12), then=at("index.encode", segment=16))
    build.strike(["driver"], at("index.encode", segment=16), number=signal.SIGTERM, then=at("index.assembled"))
    build.strikes([(["driver"], at("index.assembled")), (["driver"], at("index.move"))])
    build.finish()


def test_an_evaluation_goes_on(watched, journal, start):
    evaluation = commands.evaluation(watched, journal, start)
    evaluation.begin()
    evaluation.strike(["engine"], at("evaluation.group", groups=2), then=at("evaluation.group", groups=9))
    evaluation.strike(["retriever", "worker"], at("evaluation.group", groups=9), then=at("evaluation.part"))
    evaluation.strike(["driver"], at("evaluation.part"), then=at("evaluation.group", groups=20))
    evaluation.strike(["driver"], at("evaluation.group", groups=20), number=signal.SIGINT)
    evaluation.finish()


def test_a_sweep_goes_on(watched, journal, start):
    sweep = commands.sweep(watched, journal, start)
    sweep.begin()
    sweep.strikes([(["engine"], at("evaluation.group", groups=2)), (["driver"], at("evaluation.group", groups=4))])
    sweep.finish()


def test_a_chain_goes_on(watched, journal, start):
    chain = commands.chain(watched, journal, start)
    chain.begin()
    chain.strikes([(["driver"], at("learnt", step=0)), (["driver"], at("evaluation.group", groups=2))])
    chain.finish()
