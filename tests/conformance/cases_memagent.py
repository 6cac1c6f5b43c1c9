"""How published cases of MemAgent's prompts, loop and reward are put to ours, and where we mean to differ."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from conformance.cases_agents import braces_of_last_box, tags_pair
from conformance.common import Adapter, Case, Difference
from conformance.replay import as_ids, as_text, play_memagent
from mempipe.agents.memagent import MemAgentPrompts
from mempipe.agents.prompt_set import load_prompts, split_slots
from mempipe.loader import load_config
from mempipe.rl.config import RewardConfig
from mempipe.rl.rewards import score

REWARD = "MemAgent:hotpotqa.compute_score"
SYNC_PROMPT = "MemAgent:TokenTemplate(final prompt): braces after boxed"
ASYNC_PROMPT = "MemAgent:str.format(final prompt): braces after boxed"
UNPAD = "MemAgent:unpad(remove_eos=True)"
EQUAL_LENGTHS = "MemAgent:memory[active]=unpad(...) when all rows have equal length"
ONE_CHUNK = "MemAgent:MemoryAgent loop, context exactly one chunk"
SHIPPED_CONFIG = "MemAgent:MemoryConfig(**shipped yaml)"
TRUNCATION = "MemAgent:postprocess_data(truncation=center) kept indices"
NO_BRACES = (
    "one prompt for training and evaluation, which names the box without its braces: echoed with them it would be "
    "an empty answer"
)
PRESET = Path(__file__).parents[2] / "jobs" / "configs" / "memagent_qwen2.5-7b.yaml"
EOS = 2
"""Of the cases that name none."""


def reward(case: Case) -> float:
    """The reward of a trajectory whose last reply is the case's text."""
    reply, golds = case["input"]["solution_str"], case["input"]["ground_truth"]
    played = play_memagent(
        ["m", reply], read="{question}{memory}{chunk}", answer="{question}{memory}", context="c"
    ).trajectory
    config = RewardConfig(answer="math", wrong_answer=0.0)
    return score(played.answer, golds, end_reason=played.end_reason, config=config).reward


def reward_by_hand(case: Case) -> float:
    """Of the last box of the whole reply, and of every gold as one answer."""
    golds = case["input"]["ground_truth"]
    content = braces_of_last_box(case["input"]["solution_str"])
    golds = [golds] if isinstance(golds, str) else golds
    return float(content is not None and any(plain(content) == plain(gold) for gold in golds))


def reward_without_thoughts(case: Case) -> float:
    text = case["input"]["solution_str"]
    spoken = re.sub("<think>.*?</think>", "", text, flags=re.DOTALL)
    return reward_by_hand({"input": {**case["input"], "solution_str": spoken}}) if tags_pair(text, "think") else 0.0


def plain(text: str) -> str:
    return text.lower().replace(" ", "").replace("\n", "")


def final_prompt(case: Case) -> dict[str, Any]:
    text = load_prompts("memagent", MemAgentPrompts).answer
    (box,) = re.findall(r"\\boxed[{}]*", text)
    return {"boxed_literal": box, "keywords": split_slots(text)[1::2]}


def reply_of(row: list[int], case: Case) -> list[int]:
    """What was sampled before the end: all up to the stop token, or to the padding."""
    eos, pad = case["input"].get("eos", EOS), case["input"].get("pad")
    if eos in row:
        return row[: row.index(eos)]
    return row[: max((place for place, i in enumerate(row, start=1) if i != pad), default=0)]


def without_marks(row: list[int], case: Case) -> list[int]:
    return [i for i in row if i not in (case["input"]["eos"], case["input"]["pad"])]


def kept_memories(case: Case) -> list[list[int]]:
    """What the next prompt holds of each reply."""
    memories = []
    for row in case["input"]["tensor"]:
        script: list[str | list[int]] = [reply_of(row, case), "\\boxed{}"]
        last = play_memagent(
            script, read="{question}{memory}{chunk}", answer="{memory}{question}", context="c"
        ).prompts[-1]
        memories.append(as_ids(last[:-1]))  # without the question
    return memories


def rounds(case: Case) -> dict[str, Any]:
    """All trajectories side by side, turn by turn, and their last turns in a round of their own, as published."""
    contexts, size = case["input"]["contexts"], case["input"]["chunk_size"]
    replies: list[list[str]] = [[] for _ in contexts]
    turns = [-(-len(context) // size) for context in contexts]
    for number, texts in enumerate(case["input"]["replies"]):
        active = [i for i, count in enumerate(turns) if number < count] or list(range(len(contexts)))
        for i, text in zip(active, texts, strict=True):
            replies[i].append(text)
    words = {
        "read": "P{question}|M{memory}|C{chunk}|",
        "answer": "F{question}|M{memory}|",
        "empty_memory": "No previous memory",
    }
    played = [
        play_memagent(replies[i], question=f"q{i}", context=context, chunk_tokens=size, **words)
        for i, context in enumerate(contexts)
    ]
    by_round: list[list[tuple[int, str]]] = [[] for _ in range(max(turns) + 1)]
    for i, replay in enumerate(played):
        texts = ["".join(map(chr, prompt)) for prompt in replay.prompts]
        for number, text in enumerate(texts[:-1]):
            by_round[number].append((i, text))
        by_round[-1].append((i, texts[-1]))
    order = [i for each in by_round for i, _ in each]
    return {
        "rounds": [[text for _, text in each] for each in by_round],
        "final_mask": [int(number == len(by_round) - 1) for number, each in enumerate(by_round) for _ in each],
        "sample_index": order,
    }


def rounds_by_hand(case: Case) -> dict[str, Any]:
    """Of one text that is exactly one chunk."""
    (context,), (first, _) = case["input"]["contexts"], case["input"]["replies"]
    read, answer = f"Pq0|MNo previous memory|C{context}|", f"Fq0|M{first[0]}|"
    return {"rounds": [[read], [answer]], "final_mask": [0, 1], "sample_index": [0, 0]}


def num_contexts(case: Case) -> int:
    tokens, size = case["input"]["context_tokens"], case["input"]["chunk_size"]
    script = ["m"] * -(-tokens // size) + ["\\boxed{}"]
    words = {"read": "{question}{memory}{chunk}", "answer": "{question}{memory}"}
    return len(play_memagent(script, context="c" * tokens, chunk_tokens=size, **words).trajectory.contexts)


def indices_read(case: Case) -> list[int]:
    """Which tokens of a text the agent reads, with a chunk as long as the published limit."""
    length, size = case["input"]["length"], case["input"]["max_length"]
    script = ["m"] * -(-length // size) + ["\\boxed{}"]
    read = play_memagent(
        script,
        read="{chunk}{question}{memory}",
        answer="{question}{memory}",
        context=as_text(range(length)),
        chunk_tokens=size,
    )
    chunks = zip(read.prompts, read.trajectory.contexts, strict=True)
    return [i for prompt, context in chunks for i in as_ids(prompt[: context.num_observation_tokens])]


ADAPTERS: dict[str, Adapter] = {
    REWARD: reward,
    SYNC_PROMPT: final_prompt,
    ASYNC_PROMPT: lambda case: {"boxed_literal": final_prompt(case)["boxed_literal"]},
    UNPAD: kept_memories,
    EQUAL_LENGTHS: kept_memories,
    "MemAgent:MemoryAgent.action/update loop (stub tokenizer)": rounds,
    ONE_CHUNK: rounds,
    "MemAgent:MemoryAgent loop, two contexts of exactly one chunk": rounds,
    "MemAgent:conversations per trajectory = ceil(n/5000)+1": num_contexts,
    SHIPPED_CONFIG: lambda case: {"starts": load_config(PRESET).agent.name},
    TRUNCATION: indices_read,
}

DIFFERENCES = [
    Difference(
        function=REWARD,
        applies=lambda case: "<think>" in case["input"]["solution_str"] or "</think>" in case["input"]["solution_str"],
        ours=reward_without_thoughts,
        reason="a box in a thought is no answer, nor is one where a thought stays open, in evaluation as in training",
    ),
    Difference(
        function=REWARD,
        applies=lambda case: (
            "\\boxed" in case["input"]["solution_str"] and "\\boxed" not in case["input"]["solution_str"][-300:]
        ),
        ours=reward_by_hand,
        reason="the whole reply is read: a box is not lost because much follows it",
    ),
    Difference(
        function=REWARD,
        applies=lambda case: isinstance(case["input"]["ground_truth"], str) or not case["input"]["ground_truth"],
        ours=reward_by_hand,
        reason=(
            "a gold given as a string is one answer, not its letters; without a gold nothing is right, and "
            "nothing raises"
        ),
    ),
    Difference(
        function=SYNC_PROMPT,
        applies=lambda case: True,
        ours=lambda case: {"boxed_literal": "\\boxed", "keywords": ["question", "memory"]},
        reason=f"{NO_BRACES}; the slots have our names",
    ),
    Difference(
        function=ASYNC_PROMPT,
        applies=lambda case: True,
        ours=lambda case: {"boxed_literal": "\\boxed"},
        reason=NO_BRACES,
    ),
    Difference(
        function=UNPAD,
        applies=lambda case: any(reply_of(row, case) != without_marks(row, case) for row in case["input"]["tensor"]),
        ours=lambda case: [reply_of(row, case) for row in case["input"]["tensor"]],
        reason=(
            "all that was sampled before the stop token is kept, also where it is the id that others pad with, "
            "and nothing else"
        ),
    ),
    Difference(
        function=EQUAL_LENGTHS,
        applies=lambda case: True,
        ours=lambda case: [[i for i in row if i != EOS] for row in case["input"]["tensor"]],
        reason="memories are lists of ids, whatever their lengths",
    ),
    Difference(
        function=ONE_CHUNK,
        applies=lambda case: len(case["input"]["contexts"]) == 1,
        ours=rounds_by_hand,
        reason="a trajectory needs no other beside it",
    ),
    Difference(
        function=SHIPPED_CONFIG,
        applies=lambda case: True,
        ours=lambda case: {"starts": "memagent"},
        reason="the shipped config is a valid one",
    ),
    Difference(
        function=TRUNCATION,
        applies=lambda case: case["input"]["length"] > case["input"]["max_length"],
        ours=lambda case: list(range(case["input"]["length"])),
        reason="a long text is read in further chunks; nothing in its middle is lost",
    ),
]
