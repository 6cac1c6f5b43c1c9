"""Memory quality turn by turn: known counts, rows of later turns, and intervals over questions."""

from __future__ import annotations

import gc
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from trace_builders import group, turn

from mempipe.evaluation.memory_quality import memory_quality
from mempipe.evaluation.quality_by_turn import first_of_row, quality_and_by_turn, quality_by_turn, row_label
from mempipe.evaluation.statistics import bootstrap_ratios, wilson_interval
from mempipe.types import Group


def test_facts_are_counted_in_the_turn_that_keeps_or_loses_them():
    groups = [group("after", number, right=True, lost=number == 0) for number in range(4)]
    first, second = quality_by_turn(groups)
    assert (first.turns, first.num_memories, second.turns, second.num_memories) == ("1", 4, "2", 4)
    assert first.num_cases["kept_rate"] == 4 and "lost_rate" not in first.rates, "no memory knew a fact before"
    assert second.rates["lost_rate"].value == 0.25 and second.num_cases["lost_rate"] == 4
    assert first.rates["answer_in_memory"].value == 0 and second.rates["answer_in_memory"].value == 1
    assert first.rates["irrelevant_rate"].value == 0.5 and second.rates["irrelevant_rate"].value == 0


def test_the_turns_together_are_the_rates_of_the_whole():
    groups = [group("after", number, right=True, lost=number % 3 == 0) for number in range(7)]
    rows, whole = quality_by_turn(groups), memory_quality(groups)
    for name in ("kept_rate", "lost_rate", "answer_in_memory", "irrelevant_rate"):
        parts = [
            (row.rates[name].value * row.num_cases[name], row.num_cases[name]) for row in rows if name in row.rates
        ]
        assert sum(above for above, _ in parts) / sum(below for _, below in parts) == pytest.approx(whole[name])


def test_one_pass_gives_the_rates_of_the_whole_and_by_turn_and_keeps_no_group():
    groups = [group("after", number, right=True, lost=number % 3 == 0) for number in range(7)]
    alive = []

    def read():
        for number in range(7):
            yield group("after", number, right=True, lost=number % 3 == 0)
            alive.append(sum(isinstance(each, Group) for each in gc.get_objects()) - len(groups))

    gc.collect()
    started = sum(isinstance(each, Group) for each in gc.get_objects()) - len(groups)
    whole, by_turn = quality_and_by_turn(read(), memory_budget=8)
    assert whole == memory_quality(groups, memory_budget=8) and by_turn == quality_by_turn(groups)
    assert max(alive) <= started + 1


def test_later_turns_share_rows_that_grow():
    rows = [row_label(first_of_row(number)) for number in (1, 2, 4, 5, 8, 9, 16, 17, 180)]
    assert rows == ["1", "2", "4", "5 to 8", "5 to 8", "9 to 16", "9 to 16", "17 to 32", "129 to 256"]
    (each,) = group("after", 1, right=True).trajectories
    contexts = [turn(index, "Oslo", "Oslo", passage="b") for index in range(180)]
    long = replace(group("after", 1, right=True), trajectories=[replace(each, contexts=contexts)])
    assert [row.turns for row in quality_by_turn([long])][3:] == [
        "4",
        "5 to 8",
        "9 to 16",
        "17 to 32",
        "33 to 64",
        "65 to 128",
        "129 to 256",
    ]


def test_attempts_at_one_question_are_one_unit():
    one = group("after", 1, right=True)
    several = replace(one, trajectories=one.trajectories * 5)
    (row, *_) = quality_by_turn([several])
    assert math.isinf(row.rates["kept_rate"].low), "one question says nothing of others"
    again = [group("after", 1, right=True), group("after", 2, right=True)]
    (row, *_) = quality_by_turn(again)
    assert row.rates["kept_rate"] == wilson_interval(2, 2)


def test_an_interval_of_a_share_covers_the_truth():
    """Questions with one to five cases each, whose own chance varies: the share of all cases is 0.6 in the long run."""
    generator, covered = random.Random(1), 0
    for _ in range(60):
        rows = []
        for _ in range(60):
            chance, cases = generator.choice((0.3, 0.9)), generator.randint(1, 5)
            rows.append((sum(generator.random() < chance for _ in range(cases)), cases))
        table = np.asarray(rows, dtype=float)
        (interval,) = bootstrap_ratios(table[:, :1], table[:, 1:], num_resamples=400)
        assert interval is not None and 0 <= interval.low <= interval.value <= interval.high <= 1
        covered += interval.low <= 0.6 <= interval.high
    assert covered >= 52


def test_a_share_without_a_case_is_absent_and_a_rare_one_is_drawn_where_it_occurs():
    above, below = np.zeros((50, 2)), np.zeros((50, 2))
    below[:2, 1], above[0, 1] = 1, 1
    none, rare = bootstrap_ratios(above, below)
    assert none is None and rare is not None and (rare.value, rare.low, rare.high) == (0.5, 0, 1)
