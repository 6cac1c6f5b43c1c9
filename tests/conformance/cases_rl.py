"""How published cases of rewards, advantages, losses and batches are put to our functions, and where we mean to differ."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from conformance.common import Adapter, Case, Difference
from mempipe.config import AlgorithmConfig, RewardConfig
from mempipe.evaluation.metrics import cover_em, either_way_em, em, f1
from mempipe.rl.advantages import group_advantages
from mempipe.rl.losses import kl_to_reference, mean_metrics, policy_loss
from mempipe.rl.packing import Aggregation, MicroBatch, pack_step, split_updates
from mempipe.rl.rewards import FormatFault, answer_f1, format_fault, memsearcher_reward, normalize_answer, recall_reward
from mempipe.rl.samples import to_samples
from mempipe.types import Context, EndReason, TrainingSample, Trajectory

SCORE = "MemSearcher:compute_score_with_format"
POLICY_LOSS = "MemSearcher:compute_policy_loss(token-mean, clip .2/.2, c=3)"
AGG_LOSS = "MemSearcher:agg_loss"
PADDING = "MemSearcher:graceful_padding"
ORDER = "MemSearcher:reverse_indices"
METRICS = "MemSearcher-eval(flashrag):em / acc(sub-EM) / f1"
SPLIT = "MemAgent:td_split section sizes (torch.tensor_split)"
MICRO_WEIGHT = "MemAgent:micro-batch weight (token-mean)"
AGGREGATIONS: dict[str, Aggregation] = {"token-mean": "token", "seq-mean-token-sum": "context", "seq-mean-token-mean": "trajectory"}


# Rewards


def reward_with_reason(case: Case) -> list[Any]:
    """Reward and published wording of the reason. The messages are what an engine would have sampled: text that a tool returned
    is data, whatever chat markers it holds."""
    text, golds, stop = (case["input"][key] for key in ("solution_str", "ground_truth", "eos_token"))
    messages, stopped = assistant_messages(text), text.endswith(stop)
    scores = memsearcher_reward(messages, golds, stopped=stopped, config=RewardConfig())
    fault = format_fault(messages, stopped=stopped)
    if fault is not None:
        return [scores.reward, published_reason(fault, messages)]
    if scores.f1 > 0:
        return [scores.reward, f"correct answer, get f1 score: {scores.f1}"]
    return [scores.reward, f"wrong answer but good format: {published_box(messages[-1].strip())}"]


def assistant_messages(transcript: str) -> list[str]:
    transcript = re.sub(r"(<\|im_start\|>user\n)<tool_response>.*?</tool_response>", r"\1", transcript, flags=re.DOTALL)
    return re.findall(r"<\|im_start\|>assistant\n(.*?)<\|im_end\|>", transcript, flags=re.DOTALL)


def published_reason(fault: FormatFault, messages: Sequence[str]) -> str:
    match fault:
        case FormatFault.NOT_STOPPED:
            return "not end with eos token"
        case FormatFault.NO_MESSAGE:
            return "bad format: no assistant response found"
        case FormatFault.NO_THOUGHT:
            return "bad format: missing <think> tag"
        case FormatFault.THOUGHT_UNPAIRED | FormatFault.CALL_UNPAIRED:
            tag = "think" if fault is FormatFault.THOUGHT_UNPAIRED else "tool_call"
            counts = next(c for m in messages if (c := (m.count(f"<{tag}>"), m.count(f"</{tag}>"))) and c[0] != c[1])
            return f"bad format: <{tag}> and </{tag}> are not paired: {tag}={counts[0]}, {tag}_end={counts[1]}"
        case FormatFault.CALL_FIELDS:
            return "bad format: tool_call is missing name or arguments field"
        case FormatFault.CALL_JSON:
            calls = [call.strip() for call in re.findall("<tool_call>(.*?)</tool_call>", messages[0], flags=re.DOTALL)]
            broken = next(c for c in calls if format_fault([f"<think></think><tool_call>{c}</tool_call>"], stopped=True) is fault)
            return f"bad format: tool_call is not a valid json: {broken}"
        case FormatFault.NO_BOX:
            return "bad format: the last response is missing \\boxed"
        case FormatFault.BOX_UNREADABLE:
            return f"bad format: {fault}"


def published_box(message: str) -> str:
    """The wrong answer as the published sentence quotes it."""
    content = message.rpartition("\\boxed")[2]
    if content.startswith(" "):
        return content[1:].partition("$")[0]
    depth = np.cumsum([(char == "{") - (char == "}") for char in content])
    return content[1 : int(np.argmax(depth == 0))]


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
    return {"em": em(answer, golds), "acc": cover_em(answer, golds), "f1": f1(answer, golds)}


def memagent_metrics(case: Case) -> dict[str, Any]:
    answer, golds = case["input"]["pred"], [case["input"]["gold"]]
    return {"sub_em": bool(either_way_em(answer, golds)), "em": bool(em(answer, golds)), "f1": f1(answer, golds)}


# Groups


def grouped_advantages(case: Case, *, key: str, normalize_std: bool) -> list[float]:
    rows: dict[Any, list[int]] = defaultdict(list)
    for row, group in enumerate(case["input"][key]):
        rows[group].append(row)
    advantages = [0.0] * len(case["input"]["scores"])
    for members in rows.values():
        rewards = [case["input"]["scores"][row] for row in members]
        for row, advantage in zip(members, group_advantages(rewards, normalize_std=normalize_std), strict=True):
            advantages[row] = advantage
    return advantages


def spread(case: Case) -> list[list[float]]:
    """Trajectories with their advantage become samples and packed tokens; each packed loss token is put back in its row."""
    scalars, owners, mask = (case["input"][key] for key in ("advantage_scalar", "sample_index", "response_mask"))
    masks = mask if isinstance(mask[0], list) else [mask] * len(owners)
    spread_rows = [[0.0] * len(row) for row in masks]
    width = max(map(len, masks))
    for index, advantage in enumerate(scalars):
        rows = [row for row, owner in enumerate(owners) if owner == index and any(masks[row])]
        contexts = [context(number, [row * width + i for i in range(len(masks[row]))], masks[row]) for number, row in enumerate(rows)]
        for batch in packed(to_samples(trajectory(str(index), contexts, advantage=advantage))):
            for token, value in zip(batch.token_ids[batch.loss_positions].tolist(), batch.advantages.tolist(), strict=True):
                spread_rows[token // width][token % width] = value
    return spread_rows


def rows_per_prompt(case: Case) -> dict[str, float]:
    """`G1` rollouts of `T_each` contexts and `G2` one-context recall samples for each."""
    num_rollouts, num_recalls, turns = (case["input"][key] for key in ("G1", "G2", "T_each"))
    lengths = turns if isinstance(turns, list) else [turns] * num_rollouts
    lengths = lengths + [1] * (num_rollouts * num_recalls)
    trajectories = [trajectory(str(i), [context(n, [1, 2], [1, 1]) for n in range(length)]) for i, length in enumerate(lengths)]
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
    ranks = pack_step(samples_of(mask), num_ranks=2, max_tokens=len(mask[0]) + 1, aggregation=AGGREGATIONS[case["input"]["mode"]])
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
    batches = [batch for rank in pack_step(samples, num_ranks=ranks, max_tokens=2, aggregation="context") for batch in rank]
    index = [-1 if batch.is_filler else int(batch.token_ids[1]) for batch in batches]
    return {"padding_index": index, "no_padding_mask": [int(i >= 0) for i in index]}


def round_robin(case: Case) -> dict[str, list[int]]:
    rows, ranks = case["input"]["bsz"], case["input"]["group_nums"]
    index = [row if row < rows else -1 for rank in range(ranks) for row in range(rank, -(-rows // ranks) * ranks, ranks)]
    return {"padding_index": index, "no_padding_mask": [int(i >= 0) for i in index]}


def restored_order(case: Case) -> list[int]:
    """Contexts that arrive in any order lie in the batch in the order of their trajectory; tokens tell where they came from."""
    contexts = [context(number, [arrived, arrived], [0, 1]) for arrived, number in enumerate(case["input"]["tensor"])]
    (batch,) = packed(to_samples(trajectory("t", contexts)))
    return batch.token_ids[batch.loss_positions].tolist()


def positions(case: Case) -> list[list[int]]:
    """Positions of the real tokens after packing all rows together, written back where the attention mask is 1."""
    masks = np.array(case["input"]["attention_mask"], dtype=int)
    contexts = {row: context(0, [row + 1] * int(mask.sum()), [1] * int(mask.sum())) for row, mask in enumerate(masks) if mask.any()}
    (batch,) = packed([sample for row, each in contexts.items() for sample in to_samples(trajectory(str(row), [each]))])
    restored = np.zeros_like(masks)
    for row in contexts:
        start = int(np.argmax(batch.token_ids == row + 1)) - 1  # the context's injected token
        restored[row, masks[row] == 1] = batch.position_ids[start : start + masks[row].sum()]
    return restored.tolist()


def section_sizes(case: Case) -> list[int]:
    groups = [[sample] for sample in samples_of([[1]] * case["input"]["rows"])]
    return [len(update) for update in split_updates(groups, case["input"]["sections"])]


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
    return Trajectory(id=name, group_id="q", member=0, contexts=contexts, end_reason=reason, answer="", advantage=advantage)


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
                    num_contexts=1,
                    trajectory_tokens=int(sum(mask)),
                )
            )
        start += length
    return samples


def packed(samples: Sequence[TrainingSample], *, max_tokens: int = 100_000, aggregation: Aggregation = "token") -> list[MicroBatch]:
    (batches,) = pack_step(samples, num_ranks=1, max_tokens=max_tokens, aggregation=aggregation)
    return batches


# What differs on purpose


def marker_in_tool_response(case: Case) -> bool:
    return any("<|im_" in block for block in re.findall("<tool_response>(.*?)</tool_response>", case["input"]["solution_str"], re.DOTALL))


def harmless_tool_response(case: Case) -> list[Any]:
    text = re.sub("<tool_response>.*?</tool_response>", "<tool_response>ok</tool_response>", case["input"]["solution_str"], flags=re.DOTALL)
    return reward_with_reason({**case, "input": {**case["input"], "solution_str": text}})


def bare_box_first(case: Case) -> bool:
    """A brace-less box that another kind of box follows, in the last message."""
    last = (assistant_messages(case["input"]["solution_str"]) or [""])[-1].strip()
    return re.search(r"\\boxed .*\\boxed(?! )", last, re.DOTALL) is not None


def only_the_last_box(case: Case) -> list[Any]:
    head, box, tail = case["input"]["solution_str"].rpartition("\\boxed")
    text = head.replace(box, "") + box + tail
    return reward_with_reason({**case, "input": {**case["input"], "solution_str": text}})


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


def empty_gold_answers(case: Case) -> dict[str, float]:
    """acc counts a gold that normalises to nothing only for an answer that does too."""
    answer, golds = case["input"]["pred"], case["input"]["golden_answers"]
    real = [gold for gold in golds if normalize_answer(gold)]
    covered = any(normalize_answer(gold) in normalize_answer(answer) for gold in real) or not normalize_answer(answer)
    return {**case["expected"], "acc": float(covered)}


def refusal(message: str) -> dict[str, str]:
    return {"raises": "ValueError", "message": message}


ADAPTERS: dict[str, Adapter] = {
    "MemSearcher:normalize_answer": lambda case: normalize_answer(case["input"]["s"]),
    "MemSearcher:get_f1_score": f1_score,
    SCORE: reward_with_reason,
    METRICS: flashrag_metrics,
    "MemAgent-eval:sub_exact_match_score / em / f1": memagent_metrics,
    "MemSearcher:compute_1D_grpo_advantage(use_adv=True)": lambda case: grouped_advantages(case, key="uid", normalize_std=True),
    "MemAgent:compute_1D_grpo_advantage(use_adv=False)": lambda case: grouped_advantages(case, key="uid", normalize_std=False),
    "Search-R1:compute_grpo_outcome_advantage": lambda case: grouped_advantages(case, key="index", normalize_std=True),
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
        applies=lambda case: case["expected"][1].startswith("find box error"),
        ours=lambda case: [0, f"bad format: {FormatFault.BOX_UNREADABLE}"],
        reason="an answer that cannot be read is a named format fault, not the text of a Python exception; the reward is the same",
    ),
    Difference(
        function=SCORE,
        applies=marker_in_tool_response,
        ours=harmless_tool_response,
        reason="messages are what the engine sampled; chat markers in a passage make none, and the score is that of a harmless passage",
    ),
    Difference(
        function=SCORE,
        applies=bare_box_first,
        ours=only_the_last_box,
        reason="the last box is the answer in whatever form; published, a brace-less box swallows every later one",
    ),
    Difference(
        function=POLICY_LOSS,
        applies=dual_clip_acts,
        ours=true_dual_clip_fraction,
        reason="the dual-clip metric counts the tokens that it clips; code that compares values after the clip always reports 0",
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
        reason="no row is trained twice: ranks take rows in turn and the last round is filled up with micro-batches of weight 0",
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
        applies=lambda case: not all(map(normalize_answer, case["input"]["golden_answers"])),
        ours=empty_gold_answers,
        reason='a gold that normalises to nothing ("the") is not covered by every prediction',
    ),
    Difference(
        function=SPLIT,
        applies=lambda case: case["input"]["rows"] < case["input"]["sections"],
        ours=lambda case: refusal(
            f"algorithm.updates_per_step is {case['input']['sections']}, but the step holds {case['input']['rows']} groups with samples; "
            "it must be at least 1 and at most the number of groups"
        ),
        reason="an update without groups is refused, with the setting that asks for it",
    ),
    Difference(
        function=MICRO_WEIGHT,
        applies=lambda case: True,
        ours=lambda case: {"MemAgent (token weighted)": case["expected"]["MemAgent (token weighted)"]},
        reason="tokens weigh the same however they are packed; MemSearcher's weighting by rows makes the gradient depend on the packing",
    ),
]


def duplicate_message(numbers: Sequence[int]) -> str:
    twice = max(numbers, key=numbers.count)
    return f"context {twice} of trajectory t is {numbers.count(twice)} times in the step; every context is trained once"
