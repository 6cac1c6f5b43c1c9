"""mempipe against published behaviour: the shared cases where the checkout has them, and hand-worked ones always."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conformance.cases_rl import ADAPTERS, DIFFERENCES, SCORE
from conformance.common import same
from conformance.run_cases import load_tables, run_cases

OWN = Path(__file__).parent / "data" / "own_cases.json"
PEERS = Path(__file__).resolve().parents[3] / "shared" / "cases" / "peers.json"


@pytest.mark.skipif(not PEERS.exists(), reason="the shared cases are not beside this checkout")
def test_published_cases_hold_or_differ_on_purpose():
    report = run_cases(json.loads(PEERS.read_text()))
    assert not report.failed, "\n".join(line for line in report.lines if line.startswith("FAILED"))
    assert report.passed


def test_own_cases_hold():
    report = run_cases(json.loads(OWN.read_text()))
    assert not report.failed and not report.uncovered, "\n".join([*report.lines, *report.uncovered])


def test_own_cases_reach_every_deliberate_difference_of_rewards_and_losses():
    reached = []
    for case in json.loads(OWN.read_text()):
        name = f"{case['system']}:{case['function']}"
        reached += [d.reason for d in DIFFERENCES if d.function == name and d.applies(case)][:1]
    assert set(reached) == {difference.reason for difference in DIFFERENCES}


def test_a_deliberate_reward_is_the_one_that_was_worked_out_by_hand():
    cases = [case for case in json.loads(OWN.read_text()) if "ours" in case]
    assert {d.reason for d in DIFFERENCES if d.function == SCORE} == {
        next(d.reason for d in DIFFERENCES if d.function == SCORE and d.applies(case)) for case in cases
    }
    for case in cases:
        assert same(ADAPTERS[SCORE](case), case["ours"]) and not same(case["ours"], case["expected"]), case["id"]


def test_a_right_reward_for_a_wrong_reason_fails():
    cut_off, *_ = [case for case in json.loads(OWN.read_text()) if case["expected"] == [0, "not end with eos token"]]
    wrong = {**cut_off, "expected": [0, "bad format: tool_call is not a valid json: {"]}
    report = run_cases([wrong])
    assert report.failed == 1 and "got [0.0, 'length']" in report.lines[0]


def test_every_difference_names_a_function_with_an_adapter():
    adapters, differences = load_tables()
    assert ADAPTERS.keys() <= adapters.keys()
    assert not {difference.function for difference in differences} - adapters.keys()


def test_a_wrong_answer_fails_the_run():
    case = {
        "id": "x",
        "system": "MemSearcher",
        "function": "normalize_answer",
        "input": {"s": "The Nile"},
        "expected": "the nile",
    }
    report = run_cases([case])
    assert (report.passed, report.failed) == (0, 1) and "'the nile', got 'nile'" in report.lines[0]


def test_a_case_of_an_unknown_function_is_counted_and_not_passed():
    report = run_cases([{"id": "x", "system": "Nobody", "function": "f", "input": {}, "expected": None}])
    assert report.uncovered == {"Nobody:f": 1} and not report.passed


def test_numbers_agree_to_the_digits_that_were_written_down():
    assert same(1.5724867, 1.572487) and not same(1.572489, 1.572487)
    assert same(2 / 3, 0.6666666666666666) and not same(0.66666667, 0.6666666666666666)
    assert same([{"a": 1}, 0.0], [{"a": 1.0}, -0.0]) and not same([1], [1, 2]) and not same({"a": 1}, {"b": 1})
