"""An index build, an evaluation, a sweep and a chain lose their processes and go on."""

from __future__ import annotations

import signal

import commands
import pytest

pytestmark = [pytest.mark.chaos, pytest.mark.ray]


def test_an_index_build_goes_on(watched, journal):
    build = commands.index_build(watched, journal)
    build.begin()
    build.strike(["driver"], "index.read", segment=3)
    build.strike(["here"], "index.encode", segment=8)
    build.strike(["driver"], "index.encode", segment=12)
    build.strike(["driver"], "index.read", number=signal.SIGTERM, segment=15)
    build.strike(["driver"], "index.assembled")
    build.strike(["driver"], "index.move")
    build.finish()


def test_an_evaluation_goes_on(watched, journal, start):
    evaluation = commands.evaluation(watched, journal, start)
    evaluation.begin()
    evaluation.strike(["engine"], "evaluation.group", groups=2)
    evaluation.strike(["retriever", "worker"], "evaluation.group", groups=9)
    evaluation.strike(["driver"], "evaluation.part")
    evaluation.strike(["driver"], "evaluation.group", number=signal.SIGINT, groups=5)
    evaluation.finish()


def test_a_sweep_goes_on(watched, journal, start):
    sweep = commands.sweep(watched, journal, start)
    sweep.begin()
    sweep.strike(["engine"], "evaluation.group", groups=2)
    sweep.strike(["driver"], "evaluation.group", groups=4)
    sweep.finish()


def test_a_chain_goes_on(watched, journal, start):
    chain = commands.chain(watched, journal, start)
    chain.begin()
    chain.strike(["driver"], "learnt", step=0)
    chain.strike(["driver"], "evaluation.group", groups=2)
    chain.finish()
