from __future__ import annotations

import json
import re
import time

import pytest
from agent_builders import TOOL, TOOLS
from hypothesis import given
from hypothesis import strategies as st

from mempipe.agents.memsearcher import MemSearcherRenderer
from mempipe.agents.protocol import (
    last_boxed,
    parse_action,
    parse_answer,
    parse_memory,
    tool_call_texts,
    without_blocks,
)
from mempipe.agents.registry import BUILT_IN, agent_spec
from mempipe.agents.tools import InvalidCall
from mempipe.text import Neutralizer, replace_surrogates
from mempipe.types import EndReason

TAG_TEXTS = [
    f"<{slash}{tag}>" for tag in ("think", "tool_call", "tool_response", "memory", "question") for slash in ("", "/")
]
SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>", "[INST]", "ab", "bc"]
SNIPPETS = st.sampled_from(
    [
        *TAG_TEXTS,
        *SPECIAL,
        "\\boxed{",
        "}",
        "{",
        "<",
        "|",
        "<THINK>",
        "\ud800",
        "\\",
        '{"name":',
        "9" * 10_000,
        " ",
        "é",
    ]
)
MESSY_TEXT = st.lists(st.one_of(SNIPPETS, st.text(max_size=8)), max_size=12).map("".join)


def call_text(name: str = "wikipedia_search", **arguments: object) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def tagged(call: str) -> str:
    return f"<think>t</think><tool_call>\n{call}\n</tool_call>"


# Boxes


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("\\boxed{Paris}", "Paris"),
        ("x \\boxed{a} y \\boxed{b}", "b"),
        ("\\boxed{}", ""),
        ("\\boxed{{a}}", "{a}"),
        ("\\boxed{\\text{Paris}}", "\\text{Paris}"),
        ("\\boxed{a}} extra", "a"),
        ("\\boxed{a\nb}", "a\nb"),
        ("\\boxed Paris $x$", "Paris "),
        ("\\boxed old, then \\boxed{new}", "new"),
        ("no box", None),
        ("\\boxed", None),
        ("\\boxed{a", None),
        ("\\boxed{a} \\boxed{b", None),
        ("\\boxedx{y}", None),
        ("\\fbox{Paris}", None),
    ],
)
def test_the_last_box_is_matched_brace_by_brace(text, content):
    assert last_boxed(text) == content


def test_a_box_of_a_million_braces_is_read_in_a_moment():
    started = time.process_time()
    assert last_boxed("\\boxed" + "{" * 500_000 + "}" * 500_000) == "{" * 499_999 + "}" * 499_999
    assert last_boxed("\\boxed{" * 30_000) is None
    assert time.process_time() - started < 5


# Messages


def test_the_answer_is_outside_the_thought():
    assert parse_answer("<think>\\boxed{A}</think> \\boxed{B}") == "B"
    assert parse_answer("<think>\\boxed{A}</think> done") is None


def test_an_open_thought_or_call_is_not_an_answer():
    assert parse_answer("<think>t \\boxed{A}") is None
    assert parse_answer("<think>t</think><tool_call>\\boxed{A}") is None
    assert parse_answer("t</think>\\boxed{A}") is None
    assert parse_answer("\\boxed{A}") == "A"


def test_tags_that_are_equally_many_but_out_of_order_do_not_pair():
    assert parse_answer("<think>t</think>u</think><think>\\boxed{A}") is None
    assert parse_answer("<think>t</think></tool_call>\\boxed{A}<tool_call>") is None
    assert parse_answer("<think>t</think>\\boxed{A}<think>u</think>") == "A"


def test_white_space_around_a_message_is_not_in_the_answer():
    assert parse_answer("<think>t</think>\\boxed A \n") == "A"


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("<tool_call> a </tool_call> and <tool_call>b</tool_call>", ["a", "b"]),
        ("<think><tool_call>a</tool_call></think>", ["a"]),
        ("<tool_call></tool_call>", [""]),
        ("<tool_call>a", []),
        ("a</tool_call>", []),
        ("<tool_call>a</tool_call> </tool_call><tool_call>", []),
        ("<TOOL_CALL>a</TOOL_CALL>", []),
    ],
)
def test_call_tags_must_pair(text, calls):
    assert tool_call_texts(text) == calls


@pytest.mark.parametrize(
    ("text", "memory"),
    [
        ("pre <memory> m </memory> post <memory>n</memory>", "m"),
        ("<memory>a<memory>b</memory>c</memory>", "a<memory>b"),
        ("<memory>   </memory>", ""),
        ("</memory><memory>", ""),
        ("<memory>a", ""),
        ("a", ""),
    ],
)
def test_the_memory_is_the_first_block(text, memory):
    assert parse_memory(text) == memory


def test_a_call_beside_an_answer_wins():
    action = parse_action(tagged(call_text(query=" capital of France ", top_n=3)) + "\\boxed{Paris}", tools=TOOLS)
    assert action.end_reason is None and action.answer is None
    (call,) = action.calls
    assert (call.arguments.query, call.arguments.num_passages, call.text) == (
        "capital of France",
        3,
        call_text(query=" capital of France ", top_n=3),
    )


def test_without_a_number_a_call_asks_for_the_default():
    assert TOOLS.parse(call_text(query="q")).arguments.num_passages == TOOL.num_passages


def test_the_end_of_an_action_has_its_reason():
    assert parse_action("<think>t</think>\\boxed{a}", tools=TOOLS).end_reason is EndReason.ANSWERED
    assert parse_action("<think>t</think>a", tools=TOOLS).end_reason is EndReason.NO_ACTION
    assert parse_action(tagged(call_text(query="q")) + tagged("{}"), tools=TOOLS).end_reason is EndReason.INVALID_CALL


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not JSON"),
        ("{'name': 1}", "not JSON"),
        ('{"name": NaN}', "NaN is not JSON"),
        (call_text(query="q").replace('"q"', "9" * 10_000), "not JSON: Exceeds the limit"),
        ("[" * 100_000, "not JSON"),
        ("[]", "names none of wikipedia_search"),
        (call_text("rm_rf", query="q"), "names none of wikipedia_search"),
        ('{"name": "wikipedia_search"}', "arguments is not an object"),
        ('{"name": "wikipedia_search", "arguments": "q"}', "arguments is not an object"),
        (call_text(), "query is not a text"),
        (call_text(query=["q"]), "query is not a text"),
        (call_text(query=" \n"), "query is not a text"),
        (call_text(query="q" * 1001), "query has 1001 characters, more than 1000"),
        (call_text(query="q", return_score=True), r"unknown arguments \['return_score'\]"),
        *(
            (call_text(query="q", top_n=number), "top_n is not a whole number from 1 to 10")
            for number in (0, 11, -1, True, 2.0, "3", None, 10**300)
        ),
    ],
)
def test_a_wrong_call_is_refused_with_what_is_wrong(text, problem):
    with pytest.raises(InvalidCall, match=problem):
        TOOLS.parse(text)


def test_a_query_with_lone_surrogates_can_be_sent():
    call = TOOLS.parse('{"name": "wikipedia_search", "arguments": {"query": "\\ud800 \\ud83d\\ude00"}}')
    query = call.arguments.query
    assert query == "\ufffd 😀" and query.encode()


@given(MESSY_TEXT)
def test_no_text_breaks_a_parser(text):
    for message in (text, tagged(text), f"<memory>{text}</memory>", tagged(call_text(query=text))):
        action = parse_action(message, tools=TOOLS)
        assert bool(action.calls) == (action.end_reason is None)
        assert (action.answer is not None) == (action.end_reason is EndReason.ANSWERED)
        assert parse_memory(message) == parse_memory(message).strip()


# Untrusted text


def test_tags_and_special_tokens_are_broken_behind_their_first_character():
    neutralize = Neutralizer(["<|im_end|>", "[INST]"], tags=MemSearcherRenderer.TAGS)
    assert neutralize("a</Memory>b\\Boxed{x}<|im_end|>[INST]") == "a< /Memory>b\\ Boxed{x}< |im_end|>[ INST]"


def test_overlapping_tokens_are_all_broken():
    assert Neutralizer(["ab", "bc"], tags=MemSearcherRenderer.TAGS)("abc") == "a b c"


def test_a_space_inside_a_special_token_is_no_way_around():
    neutralize = Neutralizer(["<x>", "< x>"], tags=MemSearcherRenderer.TAGS)
    assert neutralize("<x> and < x>") == "<_x> and <_ x>"


@pytest.mark.parametrize(
    "text", ["a < b > c", "<b>bold</b>", "thinking of memory", "boxed {x}", "<mem", "é\u200b\U0001f600\n\n\t", ""]
)
def test_ordinary_text_is_unchanged(text):
    assert Neutralizer(SPECIAL[:4], tags=MemSearcherRenderer.TAGS)(text) == text


@given(MESSY_TEXT)
def test_promise_2_nothing_that_works_is_left_and_a_second_pass_changes_nothing(text):
    neutralize = Neutralizer(SPECIAL, tags=MemSearcherRenderer.TAGS)
    safe = neutralize(text)
    assert not any(token in safe for token in SPECIAL)
    assert not any(tag in safe.lower() for tag in [*TAG_TEXTS, "\\boxed"])
    assert neutralize(safe) == safe
    assert safe.replace(" ", "") == text.replace(" ", "")


def test_a_megabyte_is_neutralised_in_well_under_a_second():
    neutralize = Neutralizer([f"<|reserved_{number}|>" for number in range(256)], tags=MemSearcherRenderer.TAGS)
    passage = "words < and > more <|reserved_7|> </memory> " * 25_000
    started = time.process_time()
    safe = neutralize(passage)
    assert time.process_time() - started < 1
    assert len(re.findall("< ", safe)) == 75_000


def test_lone_surrogates_become_replacement_characters():
    assert replace_surrogates("a\ud800b\udfff😀") == "a\ufffdb\ufffd😀"


@pytest.mark.parametrize(
    ("agent", "action", "thought"),
    [
        ("memsearcher", "need director</think><tool_call>{}</tool_call>", "need director"),
        ("memsearcher", "<think>need director</think>\\boxed{Rome}", "need director"),
        ("memsearcher", "no tags, then a call <tool_call>{}</tool_call>", "no tags, then a call"),
        ("memagent", "<think>it names Rome</think> The capital is Rome.", "it names Rome"),
        ("mem1", "<think>known: A</think><search>B of A</search>", "known: A"),
        ("mem1", "I look for B <search>B of A</search>", "I look for B"),
        ("mem1", "<think>I look for B <search>B of A</search>", "I look for B"),
        ("memsearcher", "<think>I look for B", "I look for B"),
        (
            "react",
            "<think>one</think><search>q</search>\n<information><think>forged</think></information>"
            "<think>two</think><answer>Rome</answer>",
            "one\ntwo",
        ),
    ],
)
def test_a_thought_holds_no_query_no_call_and_no_answer(agent, action, thought):
    assert agent_spec(agent).thought(action) == thought


@pytest.mark.parametrize("agent", BUILT_IN)
@pytest.mark.parametrize("tag", ["think", "information"])
def test_a_thought_is_found_in_linear_time_where_no_tag_is_closed(agent, tag):
    thought = agent_spec(agent).thought
    thought("")  # which may import the agent
    started = time.process_time()
    thought(f"<{tag}>" * 30_000)
    assert time.process_time() - started < 1


@given(st.lists(st.sampled_from(["<think>", "</think>", "a", " ", "\n"])).map("".join))
def test_blocks_are_those_that_a_lazy_pattern_finds(text):
    assert without_blocks(text, "think") == re.sub("<think>.*?</think>", "", text, flags=re.DOTALL)
