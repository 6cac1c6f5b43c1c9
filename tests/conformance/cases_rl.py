"""How published cases of rewards, advantages, losses and batches are put to our functions,
and where we mean to differ."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import string
from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from conformance.cases_agents import FINISHES, PUBLISHED, braces_of_last_box, call_is_valid, play, tags_pair
from conformance.common import Adapter, Case, Difference
from mempipe.evaluation.metrics import acc, em, f1, sub_em_two_way
from mempipe.rl.advantages import group_advantages
from mempipe.rl.config import AlgorithmConfig, RewardConfig
from mempipe.rl.losses import kl_to_reference, policy_loss
from mempipe.rl.metrics import mean_metrics
from mempipe.rl.packing import Aggregation, MicroBatch, pack_step, split_updates
from mempipe.rl.rewards import answer_f1, normalize_answer, recall_reward, score
from mempipe.rl.samples import to_samples
from mempipe.types import Context, EndReason, Passage, TrainingSample, Trajectory

SCORE = "MemSearcher:compute_score_with_format"
POLICY_LOSS = "MemSearcher:compute_policy_loss(token-mean, clip .2/.2, c=3)"
AGG_LOSS = "MemSearcher:agg_loss"
PADDING = "MemSearcher:graceful_padding"
ORDER = "MemSearcher:reverse_indices"
METRICS = "MemSearcher-eval(flashrag):em / acc(sub-EM) / f1"
SPLIT = "MemAgent:td_split section sizes (torch.tensor_split)"
MICRO_WEIGHT = "MemAgent:micro-batch weight (token-mean)"
NORMALIZED = {
    "MemSearcher:compute_1D_grpo_advantage(use_adv=True)": "uid",
    "Search-R1:compute_grpo_outcome_advantage": "index",
}
"""Published advantages over the standard deviation, and where their cases keep the group of a row."""
CENTRED = {"MemAgent:compute_1D_grpo_advantage(use_adv=False)": "uid"}
"""Published advantages over the mean alone, likewise."""
AGGREGATIONS: dict[str, Aggregation] = {
    "token-mean": "token",
    "seq-mean-token-sum": "context",
    "seq-mean-token-mean": "trajectory",
}
ENDS = {
    "not end with eos token": {EndReason.LENGTH},
    "bad format: no assistant response found": {EndReason.NO_ACTION},
    "bad format: <think> and </think> are not paired": {EndReason.NO_ACTION},
    "bad format: <tool_call> and </tool_call> are not paired": {EndReason.NO_ACTION},
    "bad format: tool_call is missing name or arguments field": {EndReason.INVALID_CALL},
    "bad format: tool_call is not a valid json": {EndReason.INVALID_CALL},
    "bad format: the last response is missing \\boxed": {
        EndReason.NO_ACTION,
        EndReason.BAD_MEMORY,
        EndReason.MAX_TURNS,
    },
    "find box error": {EndReason.NO_ACTION},
}
"""Which of our end reasons mean a published one, by its start. A reward for any other reason is a different result."""
HEADER = "<|im_start|>assistant\n"
OBSERVATION = re.compile(
    r"<\|im_end\|>\n<\|im_start\|>user\n(?:<tool_response>.*?</tool_response>|(?!<\|im_end\|>).)*"
    r"<\|im_end\|>\n<\|im_start\|>assistant\n",
    re.DOTALL,
)


# Rewards


def reward_with_reason(case: Case) -> list[Any]:
    """Reward and reason of the conversation, played again by our own agent as the last turn of a trajectory and scored
    like any other.

    The reason is in the published words where they mean our end reason, and the name of our end reason elsewhere.
    """
    messages, finish = sampled_messages(case)
    prefill = PUBLISHED.action_prefill if messages[0].startswith(PUBLISHED.action_prefill) else ""
    script = [["eos", message] for message in messages[:-1]] + [[finish, messages[-1]]]
    script[0][1] = script[0][1].removeprefix(prefill)
    script.append(["eos", ""])  # a model that has nothing left to say stops at once
    room = len(case["input"]["solution_str"]) + 1
    limits = {name: room for name in ("memory_tokens", "action_tokens", "memory_message_tokens", "observation_tokens")}
    prompts = dataclasses.replace(PUBLISHED, action_prefill=prefill)
    trajectory, _ = play(
        script, returned_passages(case), prompts=prompts, max_turns=1, context_tokens=4 * room + 1000, **limits
    )
    scores = score(
        trajectory.answer, case["input"]["ground_truth"], end_reason=trajectory.end_reason, config=RewardConfig()
    )
    if trajectory.end_reason is EndReason.ANSWERED:
        return [scores.reward, answer_reason(scores.f1, str(trajectory.answer))]
    published = next((start for start in ENDS if str(case["expected"][1]).startswith(start)), None)
    meant = published is not None and trajectory.end_reason in ENDS[published]
    return [scores.reward, case["expected"][1] if meant else str(trajectory.end_reason)]


def answer_reason(f1: float, answer: str) -> str:
    return f"correct answer, get f1 score: {f1}" if f1 > 0 else f"wrong answer but good format: {answer}"


def sampled_messages(case: Case) -> tuple[list[str], str]:
    """What an engine sampled in a transcript: all but the prompt and the observations;
    and what ended the last message."""
    text = case["input"]["solution_str"]
    finish = next((name for name in ("eos", "eot") if text.endswith(FINISHES[name])), "len")
    return OBSERVATION.split(text.removesuffix(FINISHES[finish]).partition(HEADER)[2]), finish


def returned_passages(case: Case) -> list[Passage]:
    """What the tool returned in a transcript."""
    observations = "".join(OBSERVATION.findall(case["input"]["solution_str"].partition(HEADER)[2]))
    blocks = re.findall("<tool_response>(.*?)</tool_response>", observations, flags=re.DOTALL)
    return [Passage(id=str(number), title="", text=block) for number, block in enumerate(blocks)]


def f1_score(case: Case) -> float:
    golds = case["input"]["ground_truths"]
    return answer_f1(case["input"]["prediction"], [golds] if isinstance(golds, str) else golds)


def recall_rewards(case: Case) -> dict[str, Any]:
    answers, recalls, weight = (case["input"][key] for key in ("e2e_correct", "imr_correct", "lambda"))
    rewards = [recall_reward(answer, recall, weight=weight) for answer, recall in zip(answers, recalls, strict=True)]
    return {
        "R_E": rewards,
        "A_E": group_advantages(rewards, normalize_std=False),
        "A_I_per_prompt_group": [group_advantages(recall, normalize_std=False) for recall in recalls],
    }


# Evaluation


def flashrag_metrics(case: Case) -> dict[str, float]:
    answer, golds = case["input"]["pred"], case["input"]["golden_answers"]
    return {"em": em(answer, golds), "acc": acc(answer, golds), "f1": f1(answer, golds)}


def memagent_metrics(case: Case) -> dict[str, Any]:
    answer, golds = case["input"]["pred"], [case["input"]["gold"]]
    return {"sub_em": bool(sub_em_two_way(answer, golds)), "em": bool(em(answer, golds)), "f1": f1(answer, golds)}


# Groups


def grouped_advantages(case: Case, *, key: str, normalize_std: bool) -> list[float]:
    advantages = [0.0] * len(case["input"]["scores"])
    for members in members_of_groups(case, key):
        rewards = [case["input"]["scores"][row] for row in members]
        for row, advantage in zip(members, group_advantages(rewards, normalize_std=normalize_std), strict=True):
            advantages[row] = advantage
    return advantages


def members_of_groups(case: Case, key: str) -> list[list[int]]:
    """The rows of each group."""
    rows: dict[Any, list[int]] = defaultdict(list)
    for row, group in enumerate(case["input"][key]):
        rows[group].append(row)
    return list(rows.values())


def spread(case: Case) -> list[list[float]]:
    """Trajectories with their advantage become samples and packed tokens; each packed loss token is put back in its
    row.
    """
    scalars, owners, mask = (case["input"][key] for key in ("advantage_scalar", "sample_index", "response_mask"))
    masks = mask if isinstance(mask[0], list) else [mask] * len(owners)
    spread_rows = [[0.0] * len(row) for row in masks]
    width = max(map(len, masks))
    for index, advantage in enumerate(scalars):
        rows = [row for row, owner in enumerate(owners) if owner == index and any(masks[row])]
        contexts = [
            context(number, [row * width + i for i in range(len(masks[row]))], masks[row])
            for number, row in enumerate(rows)
        ]
        for batch in packed(to_samples(trajectory(str(index), contexts, advantage=advantage))):
            for token, value in zip(
                batch.token_ids[batch.loss_positions].tolist(), batch.advantages.tolist(), strict=True
            ):
                spread_rows[token // width][token % width] = value
    return spread_rows


def rows_per_prompt(case: Case) -> dict[str, float]:
    """`G1` rollouts of `T_each` contexts and `G2` one-context recall samples for each."""
    num_rollouts, num_recalls, turns = (case["input"][key] for key in ("G1", "G2", "T_each"))
    lengths = turns if isinstance(turns, list) else [turns] * num_rollouts
    lengths = lengths + [1] * (num_rollouts * num_recalls)
    trajectories = [
        trajectory(str(i), [context(n, [1, 2], [1, 1]) for n in range(length)]) for i, length in enumerate(lengths)
    ]
    samples = [sample for each in trajectories for sample in to_samples(each)]
    (batch,) = packed(samples, aggregation="context")
    return {"rows": len(batch.sequence_lengths), "loss_normaliser": round(1 / float(batch.weights[0]), 3)}


# Losses


def clipped_loss(case: Case) -> dict[str, float]:
    data = case["input"]
    samples = samples_of(data["mask"], logprobs=data["old_log_prob"], advantages=data["advantage_per_row"])
    (batch,) = packed(samples)
    names = ("old_logprobs", "ref_logprobs", "advantages", "weights", "loss_sequences", "context_indices")
    tensors = {name: torch.from_numpy(getattr(batch, name)) for name in names}
    current = torch.tensor(data["log_prob"], dtype=torch.float64).flatten()[batch.token_ids[batch.loss_positions]]
    config = AlgorithmConfig(clip_low=0.2, clip_high=0.2, dual_clip=3.0, kl_coef=0)
    loss, sums = policy_loss(current, **tensors, config=config)
    means = mean_metrics(sums)
    return {
        "pg_loss": loss.item(),
        "clipfrac": means["clip_low"] + means["clip_high"],
        "ppo_kl": means["old_kl"],
        "clipfrac_lower": means["dual_clip"],
    }


def aggregated(case: Case) -> float:
    """The sum over all micro-batches of two ranks, each too small for more than one row, of weight times value."""
    matrix, mask = np.array(case["input"]["loss_mat"], dtype=float), case["input"]["loss_mask"]
    ranks = pack_step(
        samples_of(mask), num_ranks=2, max_tokens=len(mask[0]) + 1, aggregation=AGGREGATIONS[case["input"]["mode"]]
    )
    return sum(float(b.weights @ matrix.flatten()[b.token_ids[b.loss_positions]]) for rank in ranks for b in rank)


def low_variance_kl(case: Case) -> float:
    logprob, ref = (torch.tensor([case["input"][key]], dtype=torch.float64) for key in ("logprob", "ref_logprob"))
    return kl_to_reference(logprob, ref).item()


def micro_batch_weight(case: Case) -> dict[str, float]:
    """Each micro-batch's mean loss on all its tokens, in the mean over the step."""
    data = case["input"]
    masks, values = [], []
    for tokens, rows, mean in zip(data["micro_token_counts"], data["micro_rows"], data["micro_means"], strict=True):
        for row in range(rows):
            masks.append([1] * (tokens // rows + (row < tokens % rows)))
            values += [mean] * len(masks[-1])
    batches = packed(samples_of(masks), max_tokens=max(map(len, masks)) + 1)
    total = sum(float(b.weights @ np.array(values)[b.token_ids[b.loss_positions]]) for b in batches)
    return {"MemAgent (token weighted)": total}


# Batches


def slots(case: Case) -> dict[str, list[int]]:
    """Which row every rank works on in every round, rank after rank; -1 and mask 0 for a filler."""
    rows, ranks = case["input"]["bsz"], case["input"]["group_nums"]
    samples = samples_of([[1]] * rows)
    batches = [
        batch for rank in pack_step(samples, num_ranks=ranks, max_tokens=2, aggregation="context") for batch in rank
    ]
    index = [-1 if batch.is_filler else int(batch.token_ids[1]) for batch in batches]
    return {"padding_index": index, "no_padding_mask": [int(i >= 0) for i in index]}


def round_robin(case: Case) -> dict[str, list[int]]:
    rows, ranks = case["input"]["bsz"], case["input"]["group_nums"]
    index = [
        row if row < rows else -1 for rank in range(ranks) for row in range(rank, -(-rows // ranks) * ranks, ranks)
    ]
    return {"padding_index": index, "no_padding_mask": [int(i >= 0) for i in index]}


def restored_order(case: Case) -> list[int]:
    """Contexts that arrive in any order lie in the batch in the order of their trajectory; tokens tell where they
    came from.
    """
    contexts = [context(number, [arrived, arrived], [0, 1]) for arrived, number in enumerate(case["input"]["tensor"])]
    (batch,) = packed(to_samples(trajectory("t", contexts)))
    return batch.token_ids[batch.loss_positions].tolist()


def positions(case: Case) -> list[list[int]]:
    """Positions of the real tokens after packing all rows together, written back where the attention mask is 1."""
    masks = np.array(case["input"]["attention_mask"], dtype=int)
    contexts = {
        row: context(0, [row + 1] * int(mask.sum()), [1] * int(mask.sum()))
        for row, mask in enumerate(masks)
        if mask.any()
    }
    (batch,) = packed([sample for row, each in contexts.items() for sample in to_samples(trajectory(str(row), [each]))])
    restored = np.zeros_like(masks)
    for row in contexts:
        start = int(np.argmax(batch.token_ids == row + 1)) - 1  # the context's injected token
        restored[row, masks[row] == 1] = batch.position_ids[start : start + masks[row].sum()]
    return restored.tolist()


def section_sizes(case: Case) -> list[int]:
    groups = [[sample] for sample in samples_of([[1]] * case["input"]["rows"])]
    return [len(update) for update in split_updates(groups, case["input"]["sections"], seed="")]


# Builders


def context(index: int, token_ids: Sequence[int], loss_mask: Sequence[int]) -> Context:
    """A context of one injected token and the given ones."""
    return Context(
        index=index,
        token_ids=[0, *token_ids],
        loss_mask=[0, *map(int, loss_mask)],
        logprobs=[0.0] * (len(token_ids) + 1),
        policy_versions=[-1] * (len(token_ids) + 1),
        num_prompt_tokens=1,
        num_question_tokens=0,
        num_memory_tokens=0,
    )


def trajectory(name: str, contexts: list[Context], *, advantage: float = 0.0) -> Trajectory:
    reason = EndReason.ANSWERED
    return Trajectory(
        id=name, group_id="q", member=0, contexts=contexts, end_reason=reason, answer="", advantage=advantage
    )


def samples_of(
    masks: Sequence[Sequence[float]],
    *,
    logprobs: Sequence[Sequence[float]] | None = None,
    advantages: Sequence[float] | None = None,
) -> list[TrainingSample]:
    """One one-context trajectory per row that has a loss token; token ids count through the flattened matrix."""
    samples, start = [], 0
    for row, mask in enumerate(masks):
        length = len(mask)
        if any(mask):
            samples.append(
                TrainingSample(
                    trajectory_id=f"{row:04}",
                    group_id="q",
                    context_index=0,
                    token_ids=[0, *range(start, start + length)],
                    loss_mask=[0, *map(int, mask)],
                    logprobs=[0.0, *(logprobs[row] if logprobs else [0.0] * length)],
                    policy_versions=[-1] * (length + 1),
                    advantage=advantages[row] if advantages else 0.0,
                    trajectory_tokens=int(sum(mask)),
                )
            )
        start += length
    return samples


def packed(
    samples: Sequence[TrainingSample], *, max_tokens: int = 100_000, aggregation: Aggregation = "token"
) -> list[MicroBatch]:
    (batches,) = pack_step(samples, num_ranks=1, max_tokens=max_tokens, aggregation=aggregation)
    return batches


# What differs on purpose


def writes_role_mark(case: Case) -> bool:
    """In a first message that stopped."""
    messages, finish = sampled_messages(case)
    return "<|im_" in messages[0] and (len(messages) > 1 or finish != "len")


def calls(case: Case) -> list[str]:
    """The calls of the first message, if it stopped and its tags pair."""
    messages, finish = sampled_messages(case)
    stopped = len(messages) > 1 or finish != "len"
    return (
        re.findall("<tool_call>(.*?)</tool_call>", messages[0], re.DOTALL)
        if stopped and tags_pair(messages[0], "tool_call")
        else []
    )


def end_of_last_turn(case: Case) -> list[Any]:
    """Nothing is earned after a search; what ends the trajectory is seen from the memory message."""
    messages, finish = sampled_messages(case)
    memory = messages[1] if len(messages) > 1 else ""
    if len(messages) == 2 and finish == "len":
        return [0, "length"]
    kept = re.search(r"<memory>\s*[^\s<]", memory) and tags_pair(memory, "memory") and "<|im_" not in memory
    return [0, "max_turns" if kept else "bad_memory"]


def is_other_stop(case: Case) -> bool:
    return sampled_messages(case)[1] != "len" and not case["input"]["solution_str"].endswith(case["input"]["eos_token"])


def box_is_in_thought(case: Case) -> bool:
    before, box, _ = sampled_messages(case)[0][0].rpartition("\\box")
    return bool(box) and before.count("<think>") > before.count("</think>")


def bare_box_first(case: Case) -> bool:
    """A brace-less box that another kind of box follows."""
    return re.search(r"\\boxed .*\\boxed(?! )", sampled_messages(case)[0][0], re.DOTALL) is not None


def read_by_hand(case: Case) -> list[Any]:
    """Reward and reason of a message without calls: the last box outside thoughts, and the best F1 of its words."""
    (message, *_), _ = sampled_messages(case)
    spoken = "".join(re.split("</?think>", message)[::2]).strip()
    bare = spoken.rpartition("\\boxed")[2]
    answer = bare[1:].split("$")[0] if bare.startswith(" ") else braces_of_last_box(spoken)
    if answer is None or not (tags_pair(message, "think") and tags_pair(message, "tool_call")):
        return [0, "no_action"]
    best = max((f1_by_hand(words(answer), words(gold)) for gold in case["input"]["ground_truth"]), default=0.0)
    return [best or 0.1, answer_reason(best, answer)]


def words(text: str) -> list[str]:
    letters = "".join(char for char in text.lower() if char not in string.punctuation)
    return [word for word in letters.split() if word not in ("a", "an", "the")]


def f1_by_hand(given: list[str], gold: list[str]) -> float:
    if given != gold and any(whole in (["yes"], ["no"], ["noanswer"]) for whole in (given, gold)):
        return 0.0
    shared = sum(min(given.count(word), gold.count(word)) for word in set(given))
    return (
        2 * (shared / len(given)) * (shared / len(gold)) / (shared / len(given) + shared / len(gold)) if shared else 0.0
    )


def is_nearly_equal(case: Case, key: str) -> bool:
    """Whether some group's rewards differ by less than an eighth of the largest.

    Published code subtracts the mean in float32. That loses as many digits as the rewards have in common, and six
    digits of the advantage no longer hold.
    """
    groups = [[case["input"]["scores"][row] for row in members] for members in members_of_groups(case, key)]
    return any(len(group) > 1 and max(group) - min(group) < max(map(abs, group)) / 8 for group in groups)


def exact_advantages(case: Case, key: str, *, normalize_std: bool) -> list[float]:
    """R - mean, or (R - mean) / (std + 1e-6), in fractions up to the square root; a group of one has mean 0 and
    deviation 1.
    """
    scores = list(map(Fraction, case["input"]["scores"]))
    advantages = [0.0] * len(scores)
    for members in members_of_groups(case, key):
        count, mean, std = len(members), Fraction(0), 1.0
        if count > 1:
            mean = sum(scores[row] for row in members) / Fraction(count)
            std = math.sqrt(sum((scores[row] - mean) ** 2 for row in members) / (count - 1))
        for row in members:
            advantages[row] = float(scores[row] - mean) / (std + 1e-6 if normalize_std else 1.0)
    return advantages


def true_dual_clip_fraction(case: Case) -> dict[str, float]:
    data = case["input"]
    real = np.array(data["mask"]) > 0
    ratio = np.exp(np.array(data["log_prob"]) - np.array(data["old_log_prob"]))
    clipped = (ratio > 3) & (np.array(data["advantage_per_row"])[:, None] < 0)
    return {**case["expected"], "clipfrac_lower": float(clipped[real].mean())}


def dual_clip_acts(case: Case) -> bool:
    return "clipfrac_lower" in case["expected"] and true_dual_clip_fraction(case)["clipfrac_lower"] > 0


def without_empty_rows(case: Case) -> float:
    kept = [i for i, mask in enumerate(case["input"]["loss_mask"]) if any(mask)]
    rows = {key: [case["input"][key][i] for i in kept] for key in ("loss_mat", "loss_mask")}
    return aggregated({**case, "input": {**case["input"], **rows}})


def has_empty_gold(golds: str | Sequence[str]) -> bool:
    """Whether a gold normalises to nothing."""
    return not all(map(words, [golds] if isinstance(golds, str) else golds))


def covers(answer: str, golds: str | Sequence[str]) -> bool:
    """By hand: whether a gold stands in the answer; one that normalises to nothing only in an answer that does too."""
    written = " ".join(words(answer))
    stated = [" ".join(words(gold)) for gold in ([golds] if isinstance(golds, str) else golds)]
    return any(gold in written if gold else not written for gold in stated)


def empty_gold_answers(case: Case) -> dict[str, float]:
    return {**case["expected"], "acc": float(covers(case["input"]["pred"], case["input"]["golden_answers"]))}


def refusal(message: str) -> dict[str, str]:
    return {"raises": "ValueError", "message": message}


ADAPTERS: dict[str, Adapter] = {
    "MemSearcher:normalize_answer": lambda case: normalize_answer(case["input"]["s"]),
    "MemSearcher:get_f1_score": f1_score,
    SCORE: reward_with_reason,
    METRICS: flashrag_metrics,
    "MemAgent-eval:sub_exact_match_score / em / f1": memagent_metrics,
    **{name: functools.partial(grouped_advantages, key=key, normalize_std=True) for name, key in NORMALIZED.items()},
    **{name: functools.partial(grouped_advantages, key=key, normalize_std=False) for name, key in CENTRED.items()},
    "MemSearcher:spread over conversations": spread,
    POLICY_LOSS: clipped_loss,
    AGG_LOSS: aggregated,
    "MemSearcher:kl_penalty(low_var_kl)": low_variance_kl,
    PADDING: slots,
    ORDER: restored_order,
    "MemSearcher:get_position_ids": positions,
    SPLIT: section_sizes,
    MICRO_WEIGHT: micro_batch_weight,
    "MemTrain:R_E = 1[y] + (lambda/G2) sum R_I ; A = R - mean (formula, by hand)": recall_rewards,
    "MemTrain:number of training rows per prompt = sum_i T_i + G1*G2": rows_per_prompt,
}

DIFFERENCES: list[Difference] = [
    Difference(
        function=SCORE,
        applies=writes_role_mark,
        ours=lambda case: [0, "no_action"],
        reason=(
            "what a model writes behind a role mark of its own is no message; published, the last one of a "
            "transcript is scored"
        ),
    ),
    Difference(
        function=SCORE,
        applies=lambda case: not all(map(call_is_valid, calls(case))),
        ours=lambda case: [0, "invalid_call"],
        reason=(
            "a call is checked against the one tool's schema, and a wrong one ends the trajectory whatever else "
            "the message holds"
        ),
    ),
    Difference(
        function=SCORE,
        applies=lambda case: bool(calls(case)),
        ours=end_of_last_turn,
        reason="a call beside an answer wins, and a memory message is no answer: evaluation would not take one from it",
    ),
    Difference(
        function=SCORE,
        applies=lambda case: not all(tags_pair(sampled_messages(case)[0][0], tag) for tag in ("think", "tool_call")),
        ours=lambda case: [0, "no_action"],
        reason=(
            "tags pair when each opening one is closed behind it; published, it is enough that they are equally many"
        ),
    ),
    Difference(
        function=SCORE,
        applies=lambda case: len(sampled_messages(case)[0]) > 1,
        ours=read_by_hand,
        reason="an action without a call ends the trajectory, so nothing that follows it in a transcript was sampled",
    ),
    Difference(
        function=SCORE,
        applies=is_other_stop,
        ours=read_by_hand,
        reason=(
            "every stop token of the model ends a message, for the engine as for the reward; published, only "
            "one of them is paid"
        ),
    ),
    Difference(
        function=SCORE,
        applies=lambda case: "<think>" not in sampled_messages(case)[0][0],
        ours=read_by_hand,
        reason=(
            "a thought is asked for by the prompt set, not by the reward: evaluation, as published too, takes "
            "an answer without one"
        ),
    ),
    Difference(
        function=SCORE,
        applies=box_is_in_thought,
        ours=read_by_hand,
        reason="a box in a thought is no answer: evaluation deletes thoughts, and training pays what evaluation counts",
    ),
    Difference(
        function=SCORE,
        applies=bare_box_first,
        ours=read_by_hand,
        reason="the last box is the answer in whatever form; published, a brace-less box swallows every later one",
    ),
    Difference(
        function=POLICY_LOSS,
        applies=dual_clip_acts,
        ours=true_dual_clip_fraction,
        reason=(
            "the dual-clip metric counts the tokens that it clips; code that compares values after the clip "
            "always reports 0"
        ),
    ),
    Difference(
        function=AGG_LOSS,
        applies=lambda case: not all(map(any, case["input"]["loss_mask"])),
        ours=without_empty_rows,
        reason="a row without loss tokens is no conversation and is not in the denominator",
    ),
    Difference(
        function=PADDING,
        applies=lambda case: case["input"]["bsz"] > 0,
        ours=round_robin,
        reason=(
            "no row is trained twice: ranks take rows in turn and the last round is filled up with "
            "micro-batches of weight 0"
        ),
    ),
    Difference(
        function=PADDING,
        applies=lambda case: case["input"]["bsz"] == 0,
        ours=lambda case: refusal(
            "an optimiser step needs at least one training sample, got none: every group was filtered or had no context"
        ),
        reason="an empty step is refused",
    ),
    Difference(
        function=ORDER,
        applies=lambda case: len(set(case["input"]["tensor"])) < len(case["input"]["tensor"]),
        ours=lambda case: refusal(duplicate_message(case["input"]["tensor"])),
        reason="a context that is in a step twice is refused with its name",
    ),
    Difference(
        function=METRICS,
        applies=lambda case: has_empty_gold(case["input"]["golden_answers"]),
        ours=empty_gold_answers,
        reason='a gold that normalises to nothing ("the") is not covered by every prediction',
    ),
    Difference(
        function=SPLIT,
        applies=lambda case: case["input"]["rows"] < case["input"]["sections"],
        ours=lambda case: refusal(
            f"algorithm.updates_per_step is {case['input']['sections']}, but the step holds "
            f"{case['input']['rows']} groups with samples; "
            "it must be at least 1 and at most the number of groups"
        ),
        reason="an update without groups is refused, with the setting that asks for it",
    ),
    Difference(
        function=MICRO_WEIGHT,
        applies=lambda case: True,
        ours=lambda case: {"MemAgent (token weighted)": case["expected"]["MemAgent (token weighted)"]},
        reason=(
            "tokens weigh the same however they are packed; MemSearcher's weighting by rows makes the gradient "
            "depend on the packing"
        ),
    ),
    *[
        Difference(
            function=name,
            applies=functools.partial(is_nearly_equal, key=key),
            ours=functools.partial(exact_advantages, key=key, normalize_std=name in NORMALIZED),
            reason=(
                "group statistics are exact up to one rounding of float64: rewards that differ in the seventh digit "
                "differ, equal ones give exact zeros; published, float32 rounds both"
            ),
        )
        for name, key in {**NORMALIZED, **CENTRED}.items()
    ],
]


def duplicate_message(numbers: Sequence[int]) -> str:
    twice = max(numbers, key=numbers.count)
    return f"context {twice} of trajectory t is {numbers.count(twice)} times in the step; every context is trained once"
