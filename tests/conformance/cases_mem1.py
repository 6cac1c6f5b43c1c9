"""How published cases of MEM1's state, masks, parsing and reward are put to ours, and where we mean to differ.

Published, one row holds the whole trajectory under a mask; here every turn is a context. What a token may see, its
position and whether it is trained are read off the contexts of a trajectory that our agent plays with the case's
tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from conformance.cases_rl import words
from conformance.common import Adapter, Case, Difference, limited
from conformance.replay import (
    LIMITS,
    TAGGED,
    TOOL,
    PlainTokenizer,
    as_ids,
    as_text,
    first_answer,
    messages,
    play_mem1,
    response,
)
from mempipe.agents.mem1 import Mem1Budget, Mem1Renderer
from mempipe.agents.prompt_set import load_prompts
from mempipe.agents.tagged import TaggedPrompts, TaggedRenderer
from mempipe.engines.attention import ContextLayout, packed_attention
from mempipe.rl.config import RewardConfig
from mempipe.rl.rewards import score
from mempipe.types import FinishReason, Passage

REWARD = "MEM1:qa_multiple.compute_score_em"
SOLUTION = "MEM1:extract_solution"
ONE_TRAJECTORY = "MEM1:compose_final_output(one trajectory, one token per part)"
BATCH = "MEM1:compose_final_output(batch of two): padding"
SEEN_BY_THOUGHT = "MEM1:columns visible to t1"
SEEN_BY_OBSERVATION = "MEM1:columns visible to i0 (observation)"
FLOAT_MASK = "MEM1:scaled_dot_product_attention with the 0/1 FLOAT mask the actor and critic pass (q=k=0, v=1,10,100)"
NEXT_TURN = "MEM1:mask_using_kept_lengths + repack: context of the next turn"
CUT_BUFFER = "MEM1:same after the rolling buffer was cut on the left to max_prompt_length=6"
PARSE = "MEM1:_postprocess_responses -> (kept text, action, content)"
STATE = "MEM1:_extract_think_and_response"
STATE_LENGTH = "MEM1:_calculate_kept_lengths (1 char = 1 token)"
STEP = "MEM1:execute_predictions"
DOWN = "MEM1:batch_search when the retriever is down"
PASSAGES = "MEM1 / Search-R1:_passages2string"
QUERY, LAST = "<search>q</search>", "<answer>a</answer>"
CLOSING = re.compile("</(search|answer)>")


# Contexts instead of a mask


def parts_of(trajectory: dict[str, Any]) -> list[tuple[str, int, list[int]]]:
    """The parts in order, as (letter, round, tokens); the question is "q" of round 0."""
    rounds = range(trajectory["num_rounds"])
    rest = [(letter, i, trajectory[f"{letter}{i}"]) for i in rounds for letter in "tri" if f"{letter}{i}" in trajectory]
    return [("q", 0, trajectory["q"]), *rest]


def names_of(parts: Sequence[tuple[str, int, list[int]]]) -> list[str]:
    return [letter if letter == "q" else f"{letter}{i}" for letter, i, tokens in parts for _ in tokens]


def view(trajectory: dict[str, Any]) -> dict[str, Any]:
    """Every token of a trajectory with what it saw, where it stood and whether it is trained, in the shape of the
    published row.
    """
    parts, last = parts_of(trajectory), trajectory["num_rounds"] - 1
    texts: dict[int, str] = {}
    for i in range(last + 1):
        texts |= dict.fromkeys([*trajectory[f"t{i}"], *trajectory[f"r{i}"]], "")
        texts[trajectory[f"r{i}"][-1]] = LAST if i == last else QUERY
    found = iter([as_text(trajectory[f"i{i}"]) for i in range(last)])
    script = [[*trajectory[f"t{i}"], *trajectory[f"r{i}"]] for i in range(last + 1)]
    played = play_mem1(
        script,
        tokenizer=PlainTokenizer(texts),
        question=as_text(trajectory["q"]),
        search=lambda query: next(found),
        max_turns=last + 1,
    ).trajectory
    places: dict[int, int] = {}  # where each token of the row, by number, stands in the context in which it was new
    rows: dict[int, list[int]] = {}
    trained: dict[int, int] = {}
    starts = {name: names_of(parts).index(name) for name in names_of(parts)}
    for context in played.contexts:
        numbers = list(range(len(trajectory["q"])))
        if context.index:
            first = starts[f"t{context.index - 1}"]
            numbers += range(first, first + context.num_memory_tokens + context.num_observation_tokens)
        first = starts[f"t{context.index}"]
        numbers += range(first, first + len(script[context.index]))  # and the stop token, which the case does not have
        ids = as_ids(context.token_ids[: len(numbers)])
        assert ids == [flat(parts)[number] for number in numbers], "the context holds other tokens than the case"
        for place, number in enumerate(numbers):
            trained[number] = trained.get(number, 0) | context.loss_mask[place]
            if number not in places:
                places[number], rows[number] = place, numbers[: place + 1]
    order, size = names_of(parts), len(places)
    prompt = range(len(trajectory["q"]))
    return {
        "order": order,
        "input_ids": flat(parts),
        "position_ids": [places[number] for number in range(size)],
        "mask_rows": {f"{order[n]}{n}": [int(column in rows[n]) for column in range(size)] for n in range(size)},
        "info_mask": [int(number in prompt or trained[number]) for number in range(size)],
    }


def flat(parts: Sequence[tuple[str, int, list[int]]]) -> list[int]:
    return [i for _, _, tokens in parts for i in tokens]


def view_by_hand(trajectory: dict[str, Any]) -> dict[str, Any]:
    """A token sees the question, the turn before its own and what precedes it in its own; an observation opens the
    turn that reads it.
    """
    parts = parts_of(trajectory)
    order = names_of(parts)
    turn = [-1 if name == "q" else int(name[1:]) + (name[0] == "i") for name in order]
    sees = [
        [c for c in range(n + 1) if turn[c] in (-1, turn[n]) or (turn[c] == turn[n] - 1 and order[c][0] != "i")]
        for n in range(len(order))
    ]
    return {
        "order": order,
        "input_ids": flat(parts),
        "position_ids": [len(columns) - 1 for columns in sees],
        "mask_rows": {f"{order[n]}{n}": [int(c in sees[n]) for c in range(len(order))] for n in range(len(order))},
        "info_mask": [int(name[0] != "i") for name in order],
    }


def batch_view(views: Sequence[dict[str, Any]]) -> dict[str, Any]:
    columns = ("input_ids", "info_mask", "position_ids")
    return {
        **{name: [each[name] for each in views] for name in columns},
        "attention_mask": [[1] * len(each["input_ids"]) for each in views],
    }


def seen_by(seen: dict[str, Any], name: str) -> list[str]:
    """The names of the columns that the first token of the part sees."""
    row = seen["mask_rows"][f"{name}{seen['order'].index(name)}"]
    return [column for column, visible in zip(seen["order"], row, strict=True) if visible]


def causal_means(case: Case) -> dict[str, list[float]]:
    """What our attention gives for equal scores: the mean of the values that each of the three tokens sees."""
    value = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64).view(1, 1, 3, 1)
    zeros = torch.zeros_like(value)
    layout = ContextLayout([3], device=torch.device("cpu"))
    output, _ = packed_attention(torch.nn.Module(), zeros, zeros, value, None, layout=layout)
    return {"bool mask (intended)": output.flatten().tolist()}


def next_prompt(case: Case) -> list[list[int]]:
    """The prompt of the turn after the rolled history, whose last `kept_last` tokens are the last turn's message and
    observation.
    """
    (row,), question, kept = case["input"]["rolling_ids"], case["input"]["question"], case["input"]["kept_last"]
    history = [i for i in row if i]
    history = history[len(question) :] if history[: len(question)] == question else history
    turns = [turn for turn in (history[:-kept], history[-kept:]) if turn]
    texts = {i: "" for turn in turns for i in turn[:-1]} | {turn[:-1][-1]: QUERY for turn in turns}
    found = iter([as_text(turn[-1:]) for turn in turns])
    script = [*(turn[:-1] for turn in turns), LAST]
    replay = play_mem1(
        script, tokenizer=PlainTokenizer(texts), question=as_text(question), search=lambda query: next(found)
    )
    return [as_ids(replay.prompts[-1])]


def question_and_last_turn(case: Case) -> list[list[int]]:
    return [[*case["input"]["question"], *case["input"]["rolling_ids"][0][-case["input"]["kept_last"] :]]]


# Messages


def parse(case: Case, layout: TaggedRenderer | None = None) -> dict[str, Any]:
    layout = layout or mem1_layout()
    tokens = layout.tokenizer.encode_template(case["input"]["response"])
    message = layout.parse(tokens, finish=FinishReason.STOP)
    action = "search" if message.query is not None else "answer" if message.answer is not None else None
    return {"kept": message.text, "action": action, "content": message.query or message.answer or ""}


def mem1_layout() -> Mem1Renderer:
    prompts = TaggedPrompts(**TAGGED, observation="{passages}")
    return Mem1Renderer(PlainTokenizer(), prompts=prompts, search=TOOL, budget=limited(Mem1Budget, LIMITS))


def parse_by_hand(case: Case) -> dict[str, Any]:
    """Up to the first closing tag; its action is what it closes, if anything that can be searched."""
    text = case["input"]["response"].removesuffix("<|im_end|>")
    end = CLOSING.search(text)
    kept = text[: end.end()] if end else text
    _, opened, content = kept[: end.start()].partition(f"<{end[1]}>") if end else ("", "", "")
    content = content.strip()
    if not end or not opened or (end[1] == "search" and not content):
        return {"kept": kept, "action": None, "content": ""}
    return {"kept": kept, "action": end[1], "content": content}


def ends_otherwise(case: Case) -> bool:
    """Whether the message goes on with another action, or closes one that it has not opened,
    or searches for nothing."""
    text = case["input"]["response"]
    searches_nothing = re.search(r"<search>\s*</search>", text) is not None
    return len(CLOSING.findall(text)) > 1 or parse_by_hand(case)["action"] is None or searches_nothing


def carried(case: Case) -> str:
    """The text that the next turn is prompted with of a message."""
    contexts = play_mem1([case["input"]["response"], LAST]).trajectory.contexts
    return contexts[1].memory_before if len(contexts) > 1 else ""


def carried_by_hand(case: Case) -> str:
    by_hand = parse_by_hand(case)
    return by_hand["kept"] if by_hand["action"] == "search" else ""


def step(case: Case) -> dict[str, Any]:
    """What follows a message; an inactive row has written none."""
    given = case["input"]
    message = given["prediction"] if given["active"] else ""
    observation = f"\n\n<information>{given['hint']}\n\n{{passages}}</information>\n\n"
    replay = play_mem1([message, LAST], observation=observation, search=lambda query: f"R({query})")
    contexts = replay.trajectory.contexts
    observed = (
        "".join(map(chr, replay.prompts[1][len(replay.prompts[0]) + contexts[1].num_memory_tokens :]))
        if len(contexts) > 1
        else ""
    )
    return {
        "next_obs": observed,
        "done": int(len(contexts) == 1),
        "valid": int(len(contexts) > 1 or replay.trajectory.answer is not None),
        "is_search": len(replay.queries),
        "reward": replay.trajectory.reward,
    }


def search_that_fails(case: Case) -> Any:
    def down(query: str) -> str:
        raise ConnectionError("the retriever is down")

    return play_mem1([f"<search>{query}</search>" for query in case["input"]["queries"]], search=down)


def passages(case: Case) -> str:
    """Documents as the shipped prompt sets write them."""
    shipped = load_prompts("mem1", TaggedPrompts)
    prompts = TaggedPrompts(
        system="",
        user="{question}",
        observation="{passages}",
        passage=shipped.passage,
        passage_separator=shipped.passage_separator,
    )
    layout = Mem1Renderer(PlainTokenizer(), prompts=prompts, search=TOOL, budget=limited(Mem1Budget, LIMITS))
    texts = [document["document"]["contents"].partition("\n") for document in case["input"]["retrieval_result"]]
    found = [Passage(id="", title=title, text=text) for title, _, text in texts]
    return layout.tokenizer.decode(layout.observation(found, turns_left=1)[0])


# Rewards


def reward(case: Case) -> float:
    """The reward of a trajectory that writes the transcript's response."""
    targets = case["input"]["ground_truth"]["target"]
    written, found = messages(response(case["input"]["solution_str"]))
    texts = iter(found)
    played = play_mem1([*written, ""], search=lambda query: next(texts, "")).trajectory
    config = RewardConfig(answer="objectives_em", wrong_answer=0.0)
    return score(played.answer, [], end_reason=played.end_reason, config=config, objectives=targets).reward


def reward_by_hand(case: Case) -> int:
    """Right answers by position, in the first answer that the policy wrote."""
    targets = case["input"]["ground_truth"]["target"]
    answer = first_answer(response(case["input"]["solution_str"]))
    answers = [] if answer is None else answer.split(";")
    golds = [[gold] if isinstance(gold, str) else gold for gold in targets]
    return sum(
        any(words(text) == words(gold) for gold in options) for text, options in zip(answers, golds, strict=False)
    )


def num_answers(case: Case) -> int:
    """Answers in the response, whoever wrote them."""
    return response(case["input"]["solution_str"]).count("</answer>")


def solution(case: Case) -> str | None:
    return parse({"input": {"response": case["input"]["solution_str"]}})["content"] or None


ADAPTERS: dict[str, Adapter] = {
    REWARD: reward,
    SOLUTION: solution,
    ONE_TRAJECTORY: lambda case: view(case["input"]["trajectory"]),
    SEEN_BY_THOUGHT: lambda case: seen_by(view(case["input"]["trajectory"]), "t1"),
    SEEN_BY_OBSERVATION: lambda case: seen_by(view(case["input"]["trajectory"]), "i0"),
    BATCH: lambda case: batch_view([view(each) for each in case["input"]["trajectories"]]),
    FLOAT_MASK: causal_means,
    NEXT_TURN: next_prompt,
    CUT_BUFFER: next_prompt,
    PARSE: parse,
    STATE: lambda case: {"carried": carried(case)},
    STATE_LENGTH: lambda case: len(carried(case)),
    STEP: step,
    DOWN: search_that_fails,
    PASSAGES: passages,
}

DIFFERENCES = [
    Difference(
        function=REWARD,
        applies=lambda case: num_answers(case) != 1,
        ours=reward_by_hand,
        reason=(
            "the answer is the first that the policy writes: it ends the trajectory, and tags in what was found "
            "are none of it"
        ),
    ),
    Difference(
        function=REWARD,
        applies=lambda case: case["input"]["solution_str"] == response(case["input"]["solution_str"]),
        ours=reward_by_hand,
        reason="answers are not counted over the prompt: one pair of tags is an answer, and nothing raises",
    ),
    Difference(
        function=REWARD,
        applies=lambda case: any(isinstance(gold, str) for gold in case["input"]["ground_truth"]["target"]),
        ours=reward_by_hand,
        reason="a gold given as a string is one answer, not its letters",
    ),
    Difference(
        function=REWARD,
        applies=lambda case: first_answer(response(case["input"]["solution_str"])) is None,
        ours=reward_by_hand,
        reason="text that was found is no answer",
    ),
    Difference(
        function=SOLUTION,
        applies=lambda case: (
            "</answer>" in case["input"]["solution_str"] or "</search>" in case["input"]["solution_str"]
        ),
        ours=lambda case: parse_by_hand({"input": {"response": case["input"]["solution_str"]}})["content"] or None,
        reason="the answer is that of a message, not the last of two in a transcript with its prompt",
    ),
    Difference(
        function=ONE_TRAJECTORY,
        applies=lambda case: True,
        ours=lambda case: view_by_hand(case["input"]["trajectory"]),
        reason=(
            "a turn is trained on what its sampler saw, the last message's thought included, at the positions "
            "that it had"
        ),
    ),
    Difference(
        function=SEEN_BY_THOUGHT,
        applies=lambda case: True,
        ours=lambda case: seen_by(view_by_hand(case["input"]["trajectory"]), "t1"),
        reason="the last message's thought is the memory: the sampler saw it, so the learner does",
    ),
    Difference(
        function=SEEN_BY_OBSERVATION,
        applies=lambda case: True,
        ours=lambda case: seen_by(view_by_hand(case["input"]["trajectory"]), "i0"),
        reason="an observation is read in its context, causally like any other token",
    ),
    Difference(
        function=BATCH,
        applies=lambda case: True,
        ours=lambda case: batch_view([view_by_hand(each) for each in case["input"]["trajectories"]]),
        reason="rows are packed without padding",
    ),
    Difference(
        function=FLOAT_MASK,
        applies=lambda case: True,
        ours=lambda case: {"bool mask (intended)": case["expected"]["bool mask (intended)"]},
        reason="attention takes the boundaries of contexts and no mask that could be added to the scores",
    ),
    Difference(
        function=NEXT_TURN,
        applies=lambda case: True,
        ours=question_and_last_turn,
        reason="prompts are not padded",
    ),
    Difference(
        function=CUT_BUFFER,
        applies=lambda case: True,
        ours=question_and_last_turn,
        reason="the prompt is built anew for every turn, so that the question is always there",
    ),
    Difference(
        function=PARSE,
        applies=ends_otherwise,
        ours=parse_by_hand,
        reason=(
            "a message ends with its first action: nothing that was made up behind it is kept; a search needs a query"
        ),
    ),
    Difference(
        function=STATE,
        applies=lambda case: True,
        ours=lambda case: {"carried": carried_by_hand(case)},
        reason="a message is carried whole, as the ids that were sampled; nothing is split off it",
    ),
    Difference(
        function=STATE_LENGTH,
        applies=lambda case: True,
        ours=lambda case: len(carried_by_hand(case)),
        reason=(
            "all of a message that searches is carried, what stands before its thought too, and nothing of any other"
        ),
    ),
    Difference(
        function=STEP,
        applies=lambda case: ends_otherwise({"input": {"response": case["input"]["prediction"]}}),
        ours=lambda case: {"next_obs": "", "done": 1, "valid": 0, "is_search": 0, "reward": 0},
        reason="a message without an action that can be done ends the trajectory",
    ),
    Difference(
        function=DOWN,
        applies=lambda case: True,
        ours=lambda case: {"raises": "ConnectionError", "message": "the retriever is down"},
        reason="a fault of the retriever is raised as what it is and tried again",
    ),
]
