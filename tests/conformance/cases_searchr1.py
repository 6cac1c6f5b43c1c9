"""How published cases of Search-R1's loop, masks and rewards are put to our ReAct agent,
and where we mean to differ."""

from __future__ import annotations

import re
from typing import Any

from conformance.cases_mem1 import ends_otherwise, parse, parse_by_hand
from conformance.cases_rl import covers, has_empty_gold, words
from conformance.common import Adapter, Case, Difference, limited
from conformance.replay import (
    ASSISTANT,
    LIMITS,
    TAGGED,
    TOOL,
    PlainTokenizer,
    as_ids,
    as_text,
    first_answer,
    messages,
    play_react,
    response,
)
from mempipe.agents.react import ReactBudget, ReactPrompts, ReactRenderer
from mempipe.evaluation.metrics import acc
from mempipe.rl.config import RewardConfig
from mempipe.rl.rewards import follows_format, score
from mempipe.types import Trajectory

EXACT = "Search-R1:qa_em.compute_score_em"
COVER = "Search-R1:subem_check"
FORM = "Search-R1:is_valid_sequence"
EXACT_AND_FORM = "Search-R1:qa_em_format.compute_score_em(0.2/0.1/0.1)"
PARSE = "Search-R1:_postprocess_responses -> (kept, action, content)"
STEP = "Search-R1:execute_predictions"
MASK = "Search-R1:_info_masked_concatenate_with_padding"
PADDED_MASK = "Search-R1:_info_masked_concatenate_with_padding, pad id inside the observation"
OBSERVATION = "Search-R1:_process_next_obs(max_obs_length=20, 1 char = 1 token)"
INFORMATION = "\n\n<information>{passages}</information>\n\n"
MAX_OBSERVATION = 20
QUERY, LAST = "<search>q</search>", "<answer>a</answer>"


# Rewards


def play_response(case: Case) -> Trajectory:
    """A trajectory that writes the transcript's response, and then nothing."""
    written, found = messages(response(case["input"]["solution_str"]))
    texts = iter(found)
    script = [*written, *[""] * 10]
    return play_react(
        script, observation="<information>{passages}</information>", search=lambda query: next(texts, "")
    ).trajectory


def earned(case: Case, **settings: Any) -> float:
    played, golds = play_response(case), case["input"]["ground_truth"]["target"]
    config = RewardConfig(answer="em", wrong_answer=0.0, **settings)
    message = played.contexts[-1].action
    return score(played.answer, golds, end_reason=played.end_reason, config=config, message=message).reward


def exact_and_form(case: Case) -> float:
    return earned(case, format="search_r1", structure_score=0.2, attempt_score=0.1, retrieval_score=0.1)


def is_right(case: Case) -> bool | None:
    """By hand: whether the first answer that the policy wrote is a gold; None when it wrote none."""
    answer, golds = first_answer(response(case["input"]["solution_str"])), case["input"]["ground_truth"]["target"]
    golds = [golds] if isinstance(golds, str) else golds
    return None if answer is None else any(words(answer) == words(gold) for gold in golds)


def exact_and_form_by_hand(case: Case) -> float:
    """The published scores of the first answer, and of the response without a stop token."""
    right, text = is_right(case), response(case["input"]["solution_str"]).removesuffix("<|im_end|>")
    if right is None:
        return 0.0
    in_form = bool(
        re.fullmatch(TURN.replace("X", "search") + "*" + r"\s*<think>[^<]*</think>\s*<answer>[^<]*</answer>\s*", text)
    )
    if right or not in_form:
        return (1.0 if in_form else 0.8) if right else 0.1
    golds, found = case["input"]["ground_truth"]["target"], " ".join(messages(text)[1])
    hit = any(
        " ".join(words(gold)) in " ".join(words(found)) for gold in ([golds] if isinstance(golds, str) else golds)
    )
    return 0.2 + 0.1 * hit


TURN = r"(?:\s*<think>[^<]*</think>\s*<X>[^<]*</X>\s*<information>[^<]*</information>)"


def answers_otherwise(case: Case) -> bool:
    """Whether the published answer, the last of at least two in prompt and response, is not the policy's first."""
    text = response(case["input"]["solution_str"])
    return text.count("</answer>") != 1 or first_answer(text) is None or text == case["input"]["solution_str"]


def assistant_text(case: Case) -> str:
    return case["input"]["text"].partition(ASSISTANT)[2].removesuffix("<|im_end|>")


# The loop


def react_layout() -> ReactRenderer:
    prompts = ReactPrompts(**TAGGED, observation="{passages}", retry="")
    return ReactRenderer(PlainTokenizer(), prompts=prompts, search=TOOL, budget=limited(ReactBudget, LIMITS))


def step(case: Case) -> dict[str, Any]:
    """What follows a message; an inactive row has answered. Without a search the message is the last one."""
    given = case["input"]
    message = given["prediction"] if given["active"] else LAST
    replay = play_react(
        [message, LAST],
        observation=INFORMATION,
        retry="{RETRY_MESSAGE}",
        search=lambda query: f"R({query})",
        max_turns=2 if given["do_search"] else 1,
        final_answer_turn=False,
    )
    done = len(replay.prompts) == 1
    kept = len(parse_by_hand({"input": {"response": message}})["kept"])
    observed = "" if done else "".join(map(chr, replay.prompts[1][len(replay.prompts[0]) + kept :]))
    acts = parse({"input": {"response": message}}, react_layout())["action"] is not None
    return {
        "next_obs": observed,
        "done": int(done),
        "valid": int(given["active"] and acts),
        "is_search": len(replay.queries),
    }


def acts_by_hand(case: Case) -> bool:
    return parse_by_hand({"input": {"response": case["input"]["prediction"]}})["action"] is not None


def masks(case: Case) -> dict[str, list[int]]:
    """The tokens of prompt, message and observation, and which of them are the observation's."""
    given = {key: unpadded(case["input"][key], case["input"]["pad"]) for key in ("prev", "response", "info")}
    texts = {i: "" for i in given["response"]} | {given["response"][-1]: QUERY}
    replay = play_react(
        [given["response"], LAST],
        tokenizer=PlainTokenizer(texts),
        question=as_text(given["prev"]),
        search=lambda query: as_text(given["info"]),
    )
    (context,) = replay.trajectory.contexts
    end = len(replay.prompts[1])
    tokens, sampled = as_ids(context.token_ids[:end]), context.loss_mask[:end]
    shown = [int(place < context.num_prompt_tokens or mask == 1) for place, mask in enumerate(sampled)]
    row = {
        "tokens": tokens,
        "with_info_mask": [i * mask for i, mask in zip(tokens, shown, strict=True)],
        "info_mask": shown,
    }
    return {key: row[key] for key in case["expected"]}


def masks_by_hand(case: Case) -> dict[str, list[int]]:
    given = [unpadded(case["input"][key], case["input"]["pad"]) for key in ("prev", "response", "info")]
    before, info = [*given[0], *given[1]], given[2]
    row = {
        "tokens": before + info,
        "with_info_mask": before + [0] * len(info),
        "info_mask": [1] * len(before) + [0] * len(info),
    }
    return {key: row[key] for key in case["expected"]}


def unpadded(row: list[int], pad: int) -> list[int]:
    """Without the padding at its end."""
    return row[: max((place for place, i in enumerate(row, start=1) if i != pad), default=0)]


def cut_observations(case: Case) -> list[str]:
    """The observations with at most as many tokens of passages as the published limit, tags not counted."""
    results = []
    for text in case["input"]["next_obs"]:
        _, found = messages(text)
        if not found:
            assert not text, "only an observation can be cut"
            results.append("".join(play_react([LAST]).queries))
            continue
        replay = play_react(
            [QUERY, LAST],
            observation=INFORMATION,
            search=lambda query, found=found: found[0],
            observation_tokens=MAX_OBSERVATION,
        )
        results.append("".join(map(chr, replay.prompts[1][len(replay.prompts[0]) + len(QUERY) :])))
    return results


def cut_by_hand(case: Case) -> list[str]:
    return [
        re.sub("(<information>)(.*)(</information>)", lambda m: m[1] + m[2][:MAX_OBSERVATION] + m[3], text)
        for text in case["input"]["next_obs"]
    ]


ADAPTERS: dict[str, Adapter] = {
    EXACT: lambda case: earned(case),
    COVER: lambda case: int(acc(case["input"]["prediction"], case["input"]["golden_answers"])),
    FORM: lambda case: follows_format(assistant_text(case)),
    EXACT_AND_FORM: exact_and_form,
    PARSE: lambda case: parse(case, react_layout()),
    STEP: step,
    MASK: masks,
    PADDED_MASK: masks,
    OBSERVATION: cut_observations,
}

DIFFERENCES = [
    Difference(
        function=EXACT,
        applies=answers_otherwise,
        ours=lambda case: float(is_right(case) or False),
        reason=(
            "the answer is the first that the policy writes: it ends the trajectory; prompt and found text hold none"
        ),
    ),
    Difference(
        function=COVER,
        applies=lambda case: has_empty_gold(case["input"]["golden_answers"]),
        ours=lambda case: int(covers(case["input"]["prediction"], case["input"]["golden_answers"])),
        reason='a gold that normalises to nothing ("the") is not covered by every prediction',
    ),
    Difference(
        function=FORM,
        applies=lambda case: case["input"]["text"].endswith("<|im_end|>"),
        ours=lambda case: bool(
            re.fullmatch(
                TURN.replace("X", "search") + r"*\s*<think>[^<]*</think>\s*<answer>[^<]*</answer>\s*",
                assistant_text(case),
            )
        ),
        reason="the stop token ends a message and is no part of it",
    ),
    Difference(
        function=EXACT_AND_FORM,
        applies=lambda case: answers_otherwise(case) or case["input"]["solution_str"].endswith("<|im_end|>"),
        ours=exact_and_form_by_hand,
        reason="the answer is the first that the policy writes, and the stop token is no part of the message",
    ),
    Difference(
        function=EXACT_AND_FORM,
        applies=lambda case: ASSISTANT not in case["input"]["solution_str"],
        ours=exact_and_form_by_hand,
        reason="the form is that of what the policy wrote, whatever template its prompt has",
    ),
    Difference(
        function=PARSE,
        applies=ends_otherwise,
        ours=parse_by_hand,
        reason="a message ends with its first action; a search needs a query",
    ),
    Difference(
        function=STEP,
        applies=lambda case: (
            not case["input"]["do_search"]
            and parse_by_hand({"input": {"response": case["input"]["prediction"]}})["action"] != "answer"
        ),
        ours=lambda case: {"next_obs": "", "done": 1, "valid": int(acts_by_hand(case)), "is_search": 0},
        reason="nothing follows the last message: it searches nothing and reads no empty observation",
    ),
    Difference(
        function=STEP,
        applies=lambda case: ends_otherwise({"input": {"response": case["input"]["prediction"]}}),
        ours=lambda case: {"next_obs": "{RETRY_MESSAGE}", "done": 0, "valid": 0, "is_search": 0},
        reason="the request to try again is the prompt set's, in its words",
    ),
    Difference(
        function=MASK,
        applies=lambda case: True,
        ours=masks_by_hand,
        reason="tokens are not padded",
    ),
    Difference(
        function=PADDED_MASK,
        applies=lambda case: True,
        ours=masks_by_hand,
        reason="no token of an observation is taken for padding",
    ),
    Difference(
        function=OBSERVATION,
        applies=lambda case: any("<information>" in text for text in case["input"]["next_obs"]),
        ours=cut_by_hand,
        reason="the limit cuts passages, not the tags around them: the closing one always stays",
    ),
]
