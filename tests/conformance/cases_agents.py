"""How published cases of parsing, prompts, searches and whole trajectories are put to MemSearcher, and where we mean to
differ.

Trajectories run through our own rollout with a tokenizer of one token per character and a prompt set that writes the
published layout, its double-escaped separator between passages included.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Sequence
from typing import Any

from conformance.common import Adapter, Case, Difference
from mempipe.agents.memsearcher import MemSearcher, MemSearcherBudget, MemSearcherPrompts, MemSearcherRenderer
from mempipe.agents.prompt_set import split_slots
from mempipe.agents.protocol import (
    last_boxed,
    parse_answer,
    parse_memory,
    tool_call_texts,
)
from mempipe.agents.tools import InvalidCall, SearchTool, Toolbox
from mempipe.types import Completion, Context, FinishReason, Passage, Question, SearchResult, Trajectory

BOXES = "MemSearcher:remove_boxed(last_boxed_only_string(s))"
FORMAT_CALL = "MemSearcher:format_tool_call"
SEARCH = "MemSearcher:batch_execute/wikipedia_search"
ROLLOUT = "MemSearcher:vLLMRolloutWithTool.generate_sequences (scripted engine, 1 char = 1 token, template shortened)"
LAST_ANSWER = "MemSearcher-eval:extract_last_assistant_response -> pred"

TOOL = SearchTool(name="wikipedia_search", num_passages=5, max_passages=10, max_query_chars=1000)
TOOLS = Toolbox(search=TOOL)
PUBLISHED = MemSearcherPrompts(
    system="",
    user="<question> {question} </question>\n\n<memory> {memory} </memory>",
    action_prefill="<think>",
    observation="<tool_response>{call}\n{passages}\n</tool_response>\n{MEMORY_INSTRUCTION}",
    passage="{title}\n{text}\\n\\n",
    passage_separator="",
    memory_prefill="",
    empty_memory="",
)


FINISHES = {"eos": "<|im_end|>", "eot": "<|endoftext|>", "ims": "<|im_start|>", "len": ""}
"""The token with which a scripted message ends."""


class CharTokenizer:
    """One token per character, and one per chat marker;
    a message ends with either of the stop tokens that Qwen2.5 has."""

    special_tokens = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    special_token_ids = frozenset({0x110000, 0x110001, 0x110002})  # just past the last character
    stop_token_ids = frozenset({0x110001, 0x110002})

    def encode_template(self, text: str) -> list[int]:
        ids = dict(zip(self.special_tokens, sorted(self.special_token_ids), strict=True))
        pieces = re.split(f"({'|'.join(map(re.escape, ids))})", text)
        return [i for piece in pieces for i in ([ids[piece]] if piece in ids else map(ord, piece))]

    def encode_text(self, text: str) -> list[int]:
        return list(map(ord, text))

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(i) if i < 0x110000 else self.special_tokens[i - 0x110000] for i in token_ids)

    def render_chat(self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool) -> str:
        text = "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages)
        return text + "<|im_start|>assistant\n" * add_generation_prompt


def play(
    script: Sequence[Sequence[str]],
    passages: Sequence[Passage],
    *,
    question: str = "q0",
    failure: str = "",
    prompts: MemSearcherPrompts = PUBLISHED,
    **budget: Any,
) -> tuple[Trajectory, list[Any]]:
    """A trajectory whose messages are the script's (finish, text) pairs, and the searches that it asked for."""
    tokenizer, steps, searches = CharTokenizer(), iter(script), []

    async def generate(token_ids: Sequence[int], *, max_tokens: int) -> Completion:
        finish, text = next(steps)
        ids = tokenizer.encode_template(text + FINISHES[finish])
        reason = FinishReason.LENGTH if finish == "len" else FinishReason.STOP
        return Completion(token_ids=ids, logprobs=[0.0] * len(ids), finish_reason=reason, policy_version=0)

    async def search(query: str, *, num_passages: int, partition: str) -> SearchResult:
        searches.append({"query": query, "top_n": num_passages})
        if failure:
            raise ConnectionError(failure)
        return SearchResult(passages=list(passages[:num_passages]), snapshot="")

    limits = {
        "memory_tokens": 1000,
        "action_tokens": 2000,
        "memory_message_tokens": 2000,
        "observation_tokens": 8000,
        "max_turns": 3,
    }
    renderer = MemSearcherRenderer(
        tokenizer,
        prompts=prompts,
        tools=TOOLS,
        budget=MemSearcherBudget(**{**limits, "context_tokens": 20000, **budget}),
    )
    agent = MemSearcher(renderer, generate=generate, search=search)
    asked = Question(id=question, text=question, golden_answers=[])
    return asyncio.run(agent.rollout(asked, trajectory_id="t", group_id="g", member=0)), searches


def rollout_rows(case: Case) -> list[dict[str, Any]]:
    """Rows as published: all first turns, then all second turns, and so on."""
    limits: dict[str, Any] = {}
    if "max_turns" in case["input"]:
        limits["max_turns"] = case["input"]["max_turns"]
    if "memory_length" in case["input"]:  # as published, a longer memory ends the trajectory
        limits |= {"memory_tokens": case["input"]["memory_length"], "on_overflow": "end"}
    rows = []
    for sample_index, (question, script) in enumerate(case["input"]["script"].items()):
        if "response_length" in case["input"]:  # one limit for action, observation and memory message together
            limits["observation_tokens"] = max(1, case["input"]["response_length"] - len(script[0][1]))
        trajectory, _ = play(script, [Passage(id="1", title='"T"', text="body")], question=question, **limits)
        rows += [(context.index, sample_index, context, len(trajectory.contexts)) for context in trajectory.contexts]
    return [
        {"sample_index": sample, "final": turn == num_turns - 1, **row_texts(context)}
        for turn, sample, context, num_turns in sorted(rows, key=lambda row: row[:2])
    ]


def row_texts(context: Context) -> dict[str, Any]:
    tokenizer = CharTokenizer()
    start = context.num_prompt_tokens
    tokens = zip(context.loss_mask[start:], context.token_ids[start:], strict=True)
    runs = [
        [mask, tokenizer.decode([i for _, i in run])] for mask, run in itertools.groupby(tokens, key=lambda row: row[0])
    ]
    return {"user_part": tokenizer.decode(context.token_ids[:start]), "loss_mask_segments": runs}


def without_cut_observation(case: Case) -> list[dict[str, Any]]:
    """The published rows, but with the observation that did not fit left out instead of cut in the middle."""
    return [
        {**row, "loss_mask_segments": [[m, text] for m, text in row["loss_mask_segments"] if m]}
        for row in case["expected"]
    ]


def search_call(case: Case) -> dict[str, Any]:
    """The observation of one call, and what was asked of the retriever."""
    call, failure = case["input"]["tool_call"].strip(), server_fault(case)
    documents = [] if failure else case["input"]["server_json"]
    passages = [
        Passage(id=d["id"], title=d["contents"].partition("\n")[0], text=d["contents"].partition("\n")[2])
        for d in documents
    ]
    script = [["eos", f"t</think><tool_call>{call}</tool_call>"], ["eos", "no memory"]]
    trajectory, searches = play(script, passages, failure=failure)
    if not searches:
        return {"end_reason": str(trajectory.end_reason)}
    texts = [text for mask, text in row_texts(trajectory.contexts[0])["loss_mask_segments"] if not mask]
    observation = texts[0].partition(call + "\n")[2].partition("\n</tool_response>")[0]
    return {"observation": observation, "post": {**POST, "json": searches[0]}}


def server_fault(case: Case) -> str:
    """What went wrong at the retriever; empty when it answered with documents."""
    server, reply = case["input"]["server"], case["input"]["server_json"]
    if server != "status 200":
        return server
    return (
        ""
        if isinstance(reply, list) and all(isinstance(d, dict) and "contents" in d for d in reply)
        else "the reply holds no documents"
    )


POST = {"url": "http://127.0.0.1:8000/search", "timeout": 10}  # the published client's; here the retriever has none


def call_is_valid(text: str) -> bool:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return False
    arguments = call.get("arguments") if isinstance(call, dict) else None
    if (
        not isinstance(arguments, dict)
        or call.get("name") != "wikipedia_search"
        or arguments.keys() - {"query", "top_n"}
    ):
        return False
    query, top_n = arguments.get("query"), arguments.get("top_n", 5)
    return (
        isinstance(query, str)
        and bool(query.strip())
        and not isinstance(top_n, bool)
        and isinstance(top_n, int)
        and 1 <= top_n <= 10
    )


def with_default_top_n(case: Case) -> dict[str, Any]:
    post = case["expected"]["post"]
    return {**case["expected"], "post": {**post, "json": {**post["json"], "top_n": 5}}}


def checked_call(case: Case) -> dict[str, Any]:
    search = TOOLS.parse(case["input"]["tool_call_str"]).arguments
    return {"query": search.query, "top_n": search.num_passages}


def refused_call(case: Case) -> dict[str, Any]:
    text = case["input"]["tool_call_str"]
    try:
        json.loads(text)
    except ValueError as error:
        return {"raises": InvalidCall.__name__, "message": f"the call is not JSON: {error}"}
    return {"raises": InvalidCall.__name__, "message": "the call names none of wikipedia_search"}


def boxed(case: Case) -> dict[str, str | None]:
    text = case["input"]["s"]
    content = last_boxed(text)
    if content is None:
        return {"boxed": None, "answer": None}
    bare = text.rpartition("\\boxed")[2].startswith(" ")
    return {"boxed": f"\\boxed {content}" if bare else f"\\boxed{{{content}}}", "answer": content}


def braces_of_last_box(text: str) -> str | None:
    """What the last box holds between its braces; None when it has none or they do not close."""
    _, box, rest = text.rpartition("\\boxed")
    depths = itertools.accumulate((char == "{") - (char == "}") for char in rest)
    end = next((place for place, depth in enumerate(depths) if depth == 0), None)
    return rest[1:end] if box and rest.startswith("{") and end else None


def box_is_unreadable(case: Case) -> bool:
    return braces_of_last_box(case["input"]["s"]) is None and not case["input"]["s"].rpartition("\\boxed")[
        2
    ].startswith(" ")


def last_answer(case: Case) -> dict[str, str]:
    """The answer of the last message, if it is an action; a memory message does not answer."""
    message = last_message(case)
    answer = None if follows_tool_response(case) else parse_answer(message)
    return {"cleaned": without_thought(message), "pred": answer or ""}


def last_message(case: Case) -> str:
    messages = re.findall(r"<\|im_start\|>assistant\n(.*?)<\|im_end\|>", case["input"]["text"], flags=re.DOTALL)
    return messages[-1] if messages else ""


def follows_tool_response(case: Case) -> bool:
    return "<|im_start|>user\n<tool_response>" in case["input"]["text"]


def tags_pair(text: str, tag: str) -> bool:
    """Whether every closing tag has an opening one before it, and every opening one is closed."""
    depths = [0, *itertools.accumulate(1 if found[1] == "" else -1 for found in re.finditer(f"<(/?){tag}>", text))]
    return min(depths) == 0 == depths[-1]


def without_thought(message: str) -> str:
    return re.sub("<think>.*?</think>", "", message, flags=re.DOTALL).strip()


def filled_slots(case: Case) -> dict[str, Any]:
    pieces = split_slots(case["input"]["template"])
    filled = [piece[0].upper() if place % 2 else piece for place, piece in enumerate(pieces)]
    return {"keywords": pieces[1::2], "formatted": "".join(filled)}


ADAPTERS: dict[str, Adapter] = {
    "MemSearcher:extract_tool_calls": lambda case: tool_call_texts(case["input"]["output_str"]),
    "MemSearcher:extract_memory": lambda case: parse_memory(case["input"]["output_str"]),
    "MemSearcher:TokenTemplate.keywords": filled_slots,
    BOXES: boxed,
    FORMAT_CALL: checked_call,
    SEARCH: search_call,
    ROLLOUT: rollout_rows,
    LAST_ANSWER: last_answer,
}

DIFFERENCES = [
    Difference(
        function=BOXES,
        applies=box_is_unreadable,
        ours=lambda case: {"boxed": None, "answer": None},
        reason="a box that cannot be read is no answer; it raises nothing",
    ),
    Difference(
        function=BOXES,
        applies=lambda case: "\\boxed " in case["input"]["s"] and braces_of_last_box(case["input"]["s"]) is not None,
        ours=lambda case: {
            "boxed": f"\\boxed{{{braces_of_last_box(case['input']['s'])}}}",
            "answer": braces_of_last_box(case["input"]["s"]),
        },
        reason="the last box counts, also when an earlier one has no braces",
    ),
    Difference(
        function=FORMAT_CALL,
        applies=lambda case: not call_is_valid(case["input"]["tool_call_str"]),
        ours=refused_call,
        reason="a call is checked against the one tool's schema; it is never written out as source text",
    ),
    Difference(
        function=SEARCH,
        applies=lambda case: not call_is_valid(case["input"]["tool_call"]),
        ours=lambda case: {"end_reason": "invalid_call"},
        reason="a call with a wrong name or wrong arguments ends the trajectory and reaches no retriever",
    ),
    Difference(
        function=SEARCH,
        applies=lambda case: bool(server_fault(case)),
        ours=lambda case: {"raises": "ConnectionError", "message": server_fault(case)},
        reason="a fault of the retriever is raised and tried again; it is never an observation",
    ),
    Difference(
        function=SEARCH,
        applies=lambda case: "top_n" not in json.loads(case["input"]["tool_call"])["arguments"],
        ours=with_default_top_n,
        reason="without top_n the number that the schema promises is asked for, not the server's own",
    ),
    Difference(
        function=ROLLOUT,
        applies=lambda case: "response_length" in case["input"],
        ours=without_cut_observation,
        reason=(
            "a call whose observation does not fit ends the trajectory before the search; nothing is cut in the "
            "middle of a message"
        ),
    ),
    Difference(
        function=LAST_ANSWER,
        applies=follows_tool_response,
        ours=lambda case: {"cleaned": without_thought(last_message(case)), "pred": ""},
        reason="a memory message is no answer",
    ),
    Difference(
        function=LAST_ANSWER,
        applies=lambda case: not tags_pair(last_message(case), "think"),
        ours=lambda case: {"cleaned": without_thought(last_message(case)), "pred": ""},
        reason="an answer after an open thought is none, in evaluation as in training",
    ),
]
