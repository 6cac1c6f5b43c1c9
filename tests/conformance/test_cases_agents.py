"""The table of MemSearcher's text side against hand-worked cases: every deliberate difference is reached,
and checked."""

from __future__ import annotations

import json
from typing import Any

import pytest

from conformance.cases_agents import (
    ADAPTERS,
    BOXES,
    DIFFERENCES,
    FORMAT_CALL,
    LAST_ANSWER,
    POST,
    ROLLOUT,
    SEARCH,
    CharTokenizer,
)
from conformance.run_cases import run_cases

QUERY = json.dumps({"name": "wikipedia_search", "arguments": {"query": "q"}})
THREE = json.dumps({"name": "wikipedia_search", "arguments": {"query": "q", "top_n": 3}})
OBSERVED = {"observation": '"A"\na\\n\\n', "post": {**POST, "json": {"query": "q", "top_n": 3}}}
CALLED = f"t</think><tool_call>{THREE}</tool_call>"
PROMPT = (
    "<|im_start|>user\n<question> {} </question>\n\n<memory> {} </memory><|im_end|>\n<|im_start|>assistant\n<think>"
)
ANSWER = [[1, "t</think>\\boxed{x}<|im_end|>"]]


def case(name: str, given: dict[str, Any], expected: Any = None) -> dict[str, Any]:
    system, _, function = name.partition(":")
    return {"id": "own", "system": system, "function": function, "input": given, "expected": expected}


def search(call: str, *, server: str = "status 200", reply: Any = None) -> dict[str, Any]:
    documents = [{"id": "1", "contents": '"A"\na'}] if reply is None else reply
    return {"tool_call": call, "server": server, "server_json": documents}


def last_message(text: str, *, after: str = "<|im_start|>user\nq<|im_end|>\n") -> dict[str, str]:
    return {"text": f"{after}<|im_start|>assistant\n{text}<|im_end|>"}


@pytest.mark.parametrize(
    "given",
    [
        case("MemSearcher:extract_tool_calls", {"output_str": "<tool_call> a </tool_call>"}, ["a"]),
        case("MemSearcher:extract_memory", {"output_str": "<memory> m </memory>"}, "m"),
        case(
            "MemSearcher:TokenTemplate.keywords",
            {"template": "{memory}{}{20}"},
            {"keywords": ["memory"], "formatted": "M{}{20}"},
        ),
        case(BOXES, {"s": "\\boxed{a{b}} c"}, {"boxed": "\\boxed{a{b}}", "answer": "a{b}"}),
        case(SEARCH, search(THREE), OBSERVED),
        case(LAST_ANSWER, last_message("<think>t</think>\\boxed{a}"), {"cleaned": "\\boxed{a}", "pred": "a"}),
        case(LAST_ANSWER, last_message("<think>t</think>\\boxed a\n"), {"cleaned": "\\boxed a", "pred": "a"}),
        case(
            ROLLOUT,
            {
                "script": {
                    "q7": [
                        ["eos", f"t</think><tool_call>{THREE}</tool_call>"],
                        ["eos", "<memory>m</memory>"],
                        ["eos", "t</think>\\boxed{x}"],
                    ]
                }
            },
            [
                {
                    "sample_index": 0,
                    "final": False,
                    "user_part": PROMPT.format("q7", ""),
                    "loss_mask_segments": [
                        [1, f"{CALLED}<|im_end|>"],
                        [
                            0,
                            f'\n<|im_start|>user\n<tool_response>{THREE}\n"T"\nbody\\n\\n\n</tool_response>\n'
                            "{MEMORY_INSTRUCTION}<|im_end|>\n<|im_start|>assistant\n",
                        ],
                        [1, "<memory>m</memory><|im_end|>"],
                    ],
                },
                {"sample_index": 0, "final": True, "user_part": PROMPT.format("q7", "m"), "loss_mask_segments": ANSWER},
            ],
        ),
    ],
    ids=lambda given: given["function"],
)
def test_a_hand_worked_case_holds(given):
    report = run_cases([given])
    assert report.passed == 1, report.lines


DELIBERATE = [
    (BOXES, {"s": "\\boxed{a"}, {"boxed": None, "answer": None}),
    (BOXES, {"s": "\\boxed a \\boxed{b}"}, {"boxed": "\\boxed{b}", "answer": "b"}),
    (
        FORMAT_CALL,
        {"tool_call_str": "{}"},
        {"raises": "InvalidCall", "message": "the call names none of wikipedia_search"},
    ),
    (SEARCH, search("{}"), {"end_reason": "invalid_call"}),
    (SEARCH, search(THREE, server="Timeout"), {"raises": "ConnectionError", "message": "Timeout"}),
    (SEARCH, search(THREE, reply=[[], []]), {"raises": "ConnectionError", "message": "the reply holds no documents"}),
    (SEARCH, search(QUERY), {**OBSERVED, "post": {**OBSERVED["post"], "json": {"query": "q", "top_n": 5}}}),
    (
        LAST_ANSWER,
        last_message("\\boxed{a}", after="<|im_start|>user\n<tool_response>"),
        {"cleaned": "\\boxed{a}", "pred": ""},
    ),
    (LAST_ANSWER, last_message("<think>\\boxed{a}"), {"cleaned": "<think>\\boxed{a}", "pred": ""}),
    (LAST_ANSWER, last_message("</think>\\boxed{a}<think>"), {"cleaned": "</think>\\boxed{a}<think>", "pred": ""}),
    (
        ROLLOUT,
        {"script": {"q0": [["eos", f"t</think><tool_call>{QUERY}</tool_call>"]]}, "response_length": 100},
        [
            {
                "sample_index": 0,
                "final": True,
                "user_part": PROMPT.format("q0", ""),
                "loss_mask_segments": [[1, f"t</think><tool_call>{QUERY}</tool_call><|im_end|>"]],
            }
        ],
    ),
]


@pytest.mark.parametrize(("name", "given", "ours"), DELIBERATE)
def test_a_deliberate_difference_is_what_we_do(name, given, ours):
    assert run_cases([case(name, given, ours)]).passed == 1


def test_every_deliberate_difference_is_reached():
    cases = [(name, case(name, given)) for name, given, _ in DELIBERATE]
    reached = [next(d for d in DIFFERENCES if d.function == name and d.applies(c)) for name, c in cases]
    assert {d.reason for d in reached} == {d.reason for d in DIFFERENCES}


def test_the_table_names_functions_that_it_adapts():
    assert {d.function for d in DIFFERENCES} <= ADAPTERS.keys()


def test_one_character_is_one_token():
    tokenizer = CharTokenizer()
    text = "a<|im_start|>😀<|im_end|>"
    assert len(tokenizer.encode_template(text)) == 4 and tokenizer.decode(tokenizer.encode_template(text)) == text
    assert len(tokenizer.encode_text(text)) == 2 + len("<|im_start|><|im_end|>")
