"""The tables of MemAgent, MEM1 and Search-R1 against hand-worked cases: what agrees,
and every deliberate difference."""

from __future__ import annotations

from typing import Any

import pytest

from conformance import cases_mem1, cases_memagent, cases_searchr1
from conformance.run_cases import run_cases

TABLES = (cases_memagent, cases_mem1, cases_searchr1)
M1_PROMPT = "... <answer> answer1; answer2; ... </answer> ... <answer> ... </answer>. Q1?; Q2?\n"
SR_PROMPT = "E.g. <answer> Beijing </answer>. Q: q?\n"
CHAT = f"<|im_start|>user\n{SR_PROMPT}<|im_end|>\n<|im_start|>assistant\n"
FOUND = "<think>t</think><search>q</search><information>Doc Paris</information><think>u</think><answer>{}</answer>"
TWO_TURNS = {"q": [1, 2], "t0": [10], "r0": [11], "i0": [12], "t1": [20], "r1": [21], "num_rounds": 2}
THREE_TURNS = {
    "q": [1],
    "t0": [10],
    "r0": [11],
    "i0": [12],
    "t1": [20],
    "r1": [21],
    "i1": [22],
    "t2": [30],
    "r2": [31],
    "num_rounds": 3,
}


def case(name: str, given: dict[str, Any], expected: Any = None) -> dict[str, Any]:
    system, _, function = name.partition(":")
    return {"id": "own", "system": system, "function": function, "input": given, "expected": expected}


def boxed(text: str, golds: Any) -> dict[str, Any]:
    return {"solution_str": text, "ground_truth": golds}


def objectives(text: str, *targets: Any) -> dict[str, Any]:
    return {"solution_str": M1_PROMPT + text, "ground_truth": {"target": list(targets)}}


def transcript(text: str, *golds: str) -> dict[str, Any]:
    return {"solution_str": text, "ground_truth": {"target": list(golds)}}


def message(prediction: str, **options: Any) -> dict[str, Any]:
    return {"prediction": prediction, "active": True, **options}


TWO = (["Paris"], ["Rome", "Roma"])
AGREED = [
    (cases_memagent.REWARD, boxed("so \\boxed{New York}", ["x", "newyork"]), 1.0),
    (cases_memagent.REWARD, boxed("\\boxed{The Beatles}", ["Beatles"]), 0.0),
    (cases_memagent.REWARD, boxed("\\boxed{x}" + " " * 280, ["x"]), 1.0),
    (
        cases_memagent.UNPAD,
        {"tensor": [[5, 6, 2, 0], [7, 2, 0, 0], [8, 9, 8, 9]], "pad": 0, "eos": 2},
        [[5, 6], [7], [8, 9, 8, 9]],
    ),
    ("MemAgent:conversations per trajectory = ceil(n/5000)+1", {"context_tokens": 5001, "chunk_size": 5000}, 3),
    (cases_memagent.TRUNCATION, {"length": 3, "max_length": 3}, [0, 1, 2]),
    (cases_mem1.REWARD, objectives("<think>t</think><answer>paris;Roma.</answer>", *TWO), 2),
    (
        cases_mem1.REWARD,
        objectives("<search>q</search><information>d</information><answer>Rome; Rome</answer>", *TWO),
        1,
    ),
    (cases_mem1.SOLUTION, {"solution_str": ""}, None),
    (
        cases_mem1.PARSE,
        {"response": "<answer> x </answer> junk"},
        {"kept": "<answer> x </answer>", "action": "answer", "content": "x"},
    ),
    (cases_mem1.STATE_LENGTH, {"response": "<think>a</think><search>q</search>"}, 34),
    (
        cases_mem1.STEP,
        message("<search>a</search>", hint="H"),
        {
            "next_obs": "\n\n<information>H\n\nR(a)</information>\n\n",
            "done": 0,
            "valid": 1,
            "is_search": 1,
            "reward": 0,
        },
    ),
    (cases_mem1.STEP, message("", hint="H"), {"next_obs": "", "done": 1, "valid": 0, "is_search": 0, "reward": 0}),
    (cases_mem1.PASSAGES, {"retrieval_result": [{"document": {"contents": '"T"\na\nb'}}]}, 'Doc 1(Title: "T") a\nb\n'),
    (cases_searchr1.EXACT, transcript(SR_PROMPT + "<answer>The PARIS!</answer>", "paris"), 1.0),
    (cases_searchr1.COVER, {"prediction": "in Paris", "golden_answers": ["Paris"]}, 1),
    (cases_searchr1.FORM, {"text": CHAT + FOUND.format("x")}, True),
    (cases_searchr1.FORM, {"text": FOUND.format("x")}, False),
    (cases_searchr1.EXACT_AND_FORM, transcript(CHAT + FOUND.format("Paris"), "Paris"), 1.0),
    (cases_searchr1.EXACT_AND_FORM, transcript(CHAT + FOUND.format("Rome"), "Paris"), 0.3),
    (cases_searchr1.EXACT_AND_FORM, transcript(CHAT + "x<answer>Paris</answer>", "Paris"), 0.8),
    (
        cases_searchr1.STEP,
        message("<search>a</search>", do_search=True),
        {"next_obs": "\n\n<information>R(a)</information>\n\n", "done": 0, "valid": 1, "is_search": 1},
    ),
]
MEMORIES = {"tensor": [[5, 0, 6, 2], [7, 2, 0, 0]], "pad": 0, "eos": 2}
ONE_CHUNK = {"contexts": ["ab"], "chunk_size": 2, "replies": [["m"], ["a"]]}
MASKED = {"prev": [5], "response": [7, 0], "info": [8, 0, 9, 0], "pad": 0}
SHOWN = {"tokens": [5, 7, 8, 0, 9], "with_info_mask": [5, 7, 0, 0, 0], "info_mask": [1, 1, 0, 0, 0]}
DELIBERATE = [
    (cases_memagent.REWARD, boxed("\\boxed{x}" + " " * 300, ["x"]), 1.0),
    (cases_memagent.REWARD, boxed("\\boxed{P}", "Paris"), 0.0),
    (cases_memagent.REWARD, boxed("<think>\\boxed{x}</think>", ["x"]), 0.0),
    (cases_memagent.SYNC_PROMPT, {}, {"boxed_literal": "\\boxed", "keywords": ["question", "memory"]}),
    (cases_memagent.ASYNC_PROMPT, {}, {"boxed_literal": "\\boxed"}),
    (cases_memagent.UNPAD, MEMORIES, [[5, 0, 6], [7]]),
    (cases_memagent.EQUAL_LENGTHS, {"tensor": [[5, 6, 2], [7, 8, 2]]}, [[5, 6], [7, 8]]),
    (
        cases_memagent.ONE_CHUNK,
        ONE_CHUNK,
        {"rounds": [["Pq0|MNo previous memory|Cab|"], ["Fq0|Mm|"]], "final_mask": [0, 1], "sample_index": [0, 0]},
    ),
    (cases_memagent.SHIPPED_CONFIG, {}, {"starts": "memagent"}),
    (cases_memagent.TRUNCATION, {"length": 5, "max_length": 3}, [0, 1, 2, 3, 4]),
    (cases_mem1.REWARD, objectives("<answer>Paris; Rome</answer><answer>x</answer>", *TWO), 2),
    (cases_mem1.REWARD, {**objectives("", *TWO), "solution_str": "<answer>Paris; Rome</answer>"}, 2),
    (cases_mem1.REWARD, objectives("<answer>P; Rome</answer>", "Paris", "Rome"), 1),
    (cases_mem1.REWARD, objectives("<information><answer>Paris; Rome</answer></information>", *TWO), 0),
    (cases_mem1.SOLUTION, {"solution_str": "<answer>a</answer><answer>b</answer>"}, "a"),
    (
        cases_mem1.ONE_TRAJECTORY,
        {"trajectory": THREE_TURNS},
        {
            "order": ["q", "t0", "r0", "i0", "t1", "r1", "i1", "t2", "r2"],
            "input_ids": [1, 10, 11, 12, 20, 21, 22, 30, 31],
            "position_ids": [0, 1, 2, 3, 4, 5, 3, 4, 5],
            "mask_rows": {
                "q0": [1, 0, 0, 0, 0, 0, 0, 0, 0],
                "t01": [1, 1, 0, 0, 0, 0, 0, 0, 0],
                "r02": [1, 1, 1, 0, 0, 0, 0, 0, 0],
                "i03": [1, 1, 1, 1, 0, 0, 0, 0, 0],
                "t14": [1, 1, 1, 1, 1, 0, 0, 0, 0],
                "r15": [1, 1, 1, 1, 1, 1, 0, 0, 0],
                "i16": [1, 0, 0, 0, 1, 1, 1, 0, 0],
                "t27": [1, 0, 0, 0, 1, 1, 1, 1, 0],
                "r28": [1, 0, 0, 0, 1, 1, 1, 1, 1],
            },
            "info_mask": [1, 1, 1, 0, 1, 1, 0, 1, 1],
        },
    ),
    (cases_mem1.SEEN_BY_THOUGHT, {"trajectory": TWO_TURNS}, ["q", "q", "t0", "r0", "i0", "t1"]),
    (cases_mem1.SEEN_BY_OBSERVATION, {"trajectory": TWO_TURNS}, ["q", "q", "t0", "r0", "i0"]),
    (
        cases_mem1.BATCH,
        {"trajectories": [{"q": [1], "t0": [10], "r0": [11], "num_rounds": 1}]},
        {
            "input_ids": [[1, 10, 11]],
            "info_mask": [[1, 1, 1]],
            "position_ids": [[0, 1, 2]],
            "attention_mask": [[1, 1, 1]],
        },
    ),
    (cases_mem1.FLOAT_MASK, {"mask": "tril ones(3,3)"}, {"bool mask (intended)": [1.0, 5.5, 37.0]}),
    (cases_mem1.NEXT_TURN, {"rolling_ids": [[0, 1, 10, 11, 20, 21]], "question": [1], "kept_last": 2}, [[1, 20, 21]]),
    (cases_mem1.CUT_BUFFER, {"rolling_ids": [[10, 11, 20, 21]], "question": [1], "kept_last": 2}, [[1, 20, 21]]),
    (
        cases_mem1.PARSE,
        {"response": "<search>q</search><answer>x</answer>"},
        {"kept": "<search>q</search>", "action": "search", "content": "q"},
    ),
    (
        cases_mem1.STATE,
        {"response": "<think>a</think><search>q</search>x"},
        {"carried": "<think>a</think><search>q</search>"},
    ),
    (cases_mem1.STATE_LENGTH, {"response": "pre<search>q</search>"}, 21),
    (cases_mem1.STEP, message("text", hint="H"), {"next_obs": "", "done": 1, "valid": 0, "is_search": 0, "reward": 0}),
    (cases_mem1.DOWN, {"queries": ["q"]}, {"raises": "ConnectionError", "message": "the retriever is down"}),
    (cases_searchr1.EXACT, transcript(SR_PROMPT + "<answer>Paris</answer><answer>Rome</answer>", "Paris"), 1.0),
    (cases_searchr1.COVER, {"prediction": "in Paris", "golden_answers": ["the"]}, 0),
    (cases_searchr1.FORM, {"text": CHAT + FOUND.format("x") + "<|im_end|>"}, True),
    (cases_searchr1.EXACT_AND_FORM, transcript(CHAT + FOUND.format("Paris") + "<|im_end|>", "Paris"), 1.0),
    (cases_searchr1.EXACT_AND_FORM, transcript(SR_PROMPT + FOUND.format("Paris"), "Paris"), 1.0),
    (
        cases_searchr1.PARSE,
        {"response": "<search></search>"},
        {"kept": "<search></search>", "action": None, "content": ""},
    ),
    (
        cases_searchr1.STEP,
        message("<search>a</search>", do_search=False),
        {"next_obs": "", "done": 1, "valid": 1, "is_search": 0},
    ),
    (
        cases_searchr1.STEP,
        message("text", do_search=True),
        {"next_obs": "{RETRY_MESSAGE}", "done": 0, "valid": 0, "is_search": 0},
    ),
    (cases_searchr1.MASK, MASKED, SHOWN),
    (cases_searchr1.PADDED_MASK, MASKED, SHOWN),
    (
        cases_searchr1.OBSERVATION,
        {"next_obs": ["\n\n<information>" + "x" * 30 + "</information>\n\n", ""]},
        ["\n\n<information>" + "x" * 20 + "</information>\n\n", ""],
    ),
]


@pytest.mark.parametrize(("name", "given", "expected"), AGREED)
def test_a_hand_worked_case_holds(name, given, expected):
    report = run_cases([case(name, given, expected)])
    assert report.passed == 1, report.lines


@pytest.mark.parametrize(("name", "given", "ours"), DELIBERATE)
def test_a_deliberate_difference_is_what_we_do_and_what_its_table_promises(name, given, ours):
    assert run_cases([case(name, given, ours)]).passed == 1
    promised = promise(case(name, given, ours))
    assert promised is not None and run_cases([case(name, given, promised.ours(case(name, given, ours)))]).passed == 1


def promise(given: dict[str, Any]) -> Any:
    name = f"{given['system']}:{given['function']}"
    return next((d for table in TABLES for d in table.DIFFERENCES if d.function == name and d.applies(given)), None)


def test_every_deliberate_difference_is_reached():
    reached = {(promise(case(*row)).function, promise(case(*row)).reason) for row in DELIBERATE}
    assert reached == {(d.function, d.reason) for table in TABLES for d in table.DIFFERENCES}


def test_the_tables_name_functions_that_they_adapt():
    for table in TABLES:
        assert {d.function for d in table.DIFFERENCES} <= table.ADAPTERS.keys()
