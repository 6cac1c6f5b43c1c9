"""Settings of rewards, group statistics and the loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from mempipe.rl.turn_rewards import BUILT_IN as TURN_REWARDS
from mempipe.settings import Section
from mempipe.user_code import load_user_object


class AlgorithmConfig(Section):
    """Group statistics and loss (mempipe.rl)."""

    loss: Literal["grpo", "gspo", "cispo"] = "grpo"
    """Per-token objective: clipped ratio (GRPO/PPO), sequence-level ratio (GSPO), clipped importance weight on
    log-prob (CISPO).
    """
    advantage: Literal["grpo", "dr_grpo", "rejection"] = "grpo"
    """grpo: (R - mean) / std. dr_grpo: R - mean. rejection: 1 for an attempt or a recall that is right (exact match),
    else 0, whatever the reward is: the policy imitates its own right attempts (rejection sampling)."""
    aggregation: Literal["token", "context", "question", "trajectory"] = "token"
    """Unit of the mean of the loss: all loss tokens of the step, contexts (MemTrain Eq. 4 over the update), contexts of
    a question and then questions (Eq. 4 for each prompt), or trajectories."""
    group_size: int = Field(5, ge=2)
    """Attempts at one question. An advantage says how much better one attempt is than the others, so one alone has
    none."""
    groups_per_step: int = Field(256, ge=1)
    """Questions per learner step."""
    updates_per_step: int = Field(1, ge=1)
    """Optimiser updates per collected batch; the groups are split evenly among them."""
    clip_low: float = Field(0.2, ge=0)
    """The ratio counts no further down than 1 - clip_low."""
    clip_high: float = Field(0.2, ge=0)
    """The ratio counts no further up than 1 + clip_high."""
    dual_clip: float | None = Field(3.0, gt=1)
    """Upper bound of the ratio for negative advantages, where the clip has no upper side; null: off."""
    recall_group: Literal["rollout", "question"] = "rollout"
    """memtrain: whose recall samples are compared with each other: those of one attempt, which have the same prompt
    if agent.num_recall_prompts is 1, or those of all attempts at a question. The paper does not say."""
    kl_coef: float = Field(0.001, ge=0)
    """Weight of the low-variance KL to the reference model, in the loss. Where this and entropy_coef are 0, the learner
    passes over contexts whose advantage is 0."""
    kl_reward_coef: float = Field(0.0, ge=0)
    """Weight of the KL to the reference model in the reward (MEM1: 0.001): a trajectory's reward is lowered by that
    much times the sum of logprob - ref_logprob over its tokens, before advantages are computed."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus in the loss (0.001 in the published runs of MemSearcher, MEM1 and Search-R1)."""
    filter_zero_variance: bool = False
    """Drop groups whose trajectories all have the same reward, and sample others in their place (DAPO)."""
    filter_by: Literal["answer", "reward"] = "answer"
    """memtrain: what filter_zero_variance looks at: answer drops a document whose answers are all right or all wrong;
    reward keeps it where whole rewards differ, or the recall samples that are compared with each other."""
    max_off_policy_steps: int = Field(0, ge=0)
    """The most versions by which the sampler may lag the learner; 0 is strictly on-policy."""
    correction: Literal["none", "token", "sequence", "token_mask", "sequence_mask"] = "token"
    """Correction of tokens to which learner and sampler give different probabilities, at any lag. token, sequence:
    the importance weight of a token, or the product of those of its context, is cut at max_importance_ratio. Masks omit
    tokens, or contexts, whose weight is not between min_importance_ratio and max_importance_ratio. With
    learner.old_logprobs: sampler the clipped ratio is the importance weight itself, and only masks add to it."""
    max_importance_ratio: float = Field(2.0, gt=1)
    """The largest importance weight of the learner's policy over the sampler's."""
    min_importance_ratio: float = Field(0.5, ge=0, lt=1)
    """Masks: the smallest one."""

    @model_validator(mode="after")
    def _rejection_compares_nothing(self) -> AlgorithmConfig:
        if self.advantage == "rejection":
            if self.filter_zero_variance:
                raise ValueError(
                    "algorithm.filter_zero_variance drops groups whose attempts are all right, but algorithm.advantage "
                    "rejection learns from them; set it to false"
                )
            if self.kl_reward_coef:
                raise ValueError(
                    f"algorithm.kl_reward_coef is {self.kl_reward_coef}, but algorithm.advantage rejection does not "
                    "read the reward; use algorithm.kl_coef"
                )
        return self

    @property
    def uses_reference(self) -> bool:
        """Returns whether log-probs of the reference model are needed."""
        return self.kl_coef > 0 or self.kl_reward_coef > 0

    @property
    def skips_zero_advantages(self) -> bool:
        """Returns whether a context whose advantage is 0 adds nothing to the loss: every term is the advantage times
        something."""
        return self.kl_coef == 0 and self.entropy_coef == 0


class RewardConfig(Section):
    """Says what a trajectory earns."""

    answer: Literal["f1", "em", "math", "objectives_em"] = "f1"
    """Reward of a right answer: token F1, exact match, exact match of MATH-style stripped strings (MemAgent), or
    the number of objectives that match exactly (MEM1). All but the last are means over the objectives of a question."""
    wrong_answer: float = Field(0.1, ge=0, le=1)
    """Reward of a well-formed answer that scores 0 (MemSearcher: 0.1)."""
    monotone: bool = False
    """Pay a partly right answer at least wrong_answer. Off, as published: MemSearcher pays an F1 of 0.06 less than a
    wrong answer."""
    format: Literal["none", "search_r1"] = "none"
    """search_r1: exact match and the order of the tags are paid together, by the three scores below (agent react,
    reward.answer em)."""
    structure_score: float = Field(0.2, ge=0, le=1)
    """search_r1: the worth of the right order of tags. A right answer without it earns that much less, a wrong answer
    with it earns that much."""
    retrieval_score: float = Field(0.0, ge=0, le=1)
    """search_r1: added for a wrong answer in the right order of tags when a search found a gold."""
    attempt_score: float = Field(0.1, ge=0, le=1)
    """search_r1: earned by a wrong answer in the wrong order of tags."""
    recall_weight: float = Field(0.5, ge=0)
    """memtrain: what the recall samples of an attempt add to its reward, times their mean score (lambda of arXiv
    2606.03197, Eq. 2); 0 trains recall on its own."""
    recall_match: Literal["em", "exact"] = "em"
    """memtrain: a recall is right when the normalised answer is a form of the entity, or when the unchanged answer is.
    The paper does not say; em, as for the end-to-end answer."""
    overlong_tokens: int = Field(0, ge=0)
    """A trajectory that samples more than this in one context loses overlong_penalty (DAPO, arXiv 2503.14476);
    0: none does."""
    overlong_buffer: int = Field(512, ge=1)
    """The tokens before overlong_tokens over which the penalty grows from 0."""
    overlong_penalty: float = Field(1.0, gt=0)
    """Penalty at overlong_tokens and beyond."""
    memory_token_cost: float = Field(0.0, ge=0)
    """Cost of every token of an attempt's memories, as a mean over its memories; 0: none. Where
    all of a group's answers are right, the shortest memories win."""
    information_weight: float = Field(0.0, ge=0)
    """Adds this much times the information gain of an attempt's last memory: the log-probability that the policy gives
    to the (first) golden answer after question and memory, minus the same without the memory, in nats. For agents that
    write a memory, and while training only; 0: nothing is added or computed."""
    function: str = ""
    """Your own reward, MODULE:NAME, called with (trajectory, question); see docs/extending.md. It replaces
    `answer` and what follows; exact match and F1 are still measured."""

    per_turn: dict[str, float] = {}
    """Rewards of single turns, each with its weight: kept_fact (needed facts that the turn found and its memory took,
    less those it lost), answer_in_memory (the memory knows a golden answer), token_price (each sampled token costs 1),
    or your own MODULE:NAME. A name alone has weight 1. What a turn earns is compared with the same turn of the other
    attempts and changes the advantage of its context only; docs/turn_rewards.md."""

    @field_validator("per_turn", mode="before")
    @classmethod
    def _one_name(cls, value: Any) -> Any:
        return ({value: 1.0} if value else {}) if isinstance(value, str) else value

    @field_validator("per_turn")
    @classmethod
    def _turns_can_be_paid(cls, weights: dict[str, float]) -> dict[str, float]:
        for name, weight in weights.items():
            if weight == 0:
                raise ValueError(f"reward.per_turn: {name} has the weight 0; leave it out, or give it another weight")
            if ":" not in name and name not in TURN_REWARDS:
                known = ", ".join(TURN_REWARDS)
                raise ValueError(f"reward.per_turn is {name!r}; it is {known}, or MODULE:NAME of your own function")
            if ":" in name:
                _check_function(name, setting="reward.per_turn")
        return weights

    @field_validator("function")
    @classmethod
    def _is_there(cls, path: str) -> str:
        if path:
            _check_function(path, setting="reward.function")
        return path

    @model_validator(mode="after")
    def _buffer_fits(self) -> RewardConfig:
        if 0 < self.overlong_tokens < self.overlong_buffer:
            raise ValueError(
                f"reward.overlong_buffer is {self.overlong_buffer}, more than reward.overlong_tokens "
                f"{self.overlong_tokens}; the penalty would begin below 0 tokens"
            )
        return self

    @model_validator(mode="after")
    def _one_measure(self) -> RewardConfig:
        if self.format != "none" and self.answer != "em":
            raise ValueError(
                f"reward.format is {self.format!r}, which pays exact match, but reward.answer is {self.answer!r}; "
                "set it to em"
            )
        return self


def _check_function(path: str, *, setting: str) -> None:
    """Raises ValueError unless MODULE:NAME is a function of a trajectory and its question."""
    function = load_user_object(path, setting=setting)
    if not callable(function):
        raise ValueError(f"{setting} is {path!r}, which is not a function")
    if signature := _refusing(function):
        raise ValueError(f"{setting} is {path!r}, which takes {signature}; it must take a trajectory and its question")


def _refusing(function: Callable[..., Any]) -> str:
    """Returns the signature of a function that does not take two arguments; "" for one that does or does not say."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # of some functions written in C
        return ""
    try:
        signature.bind("trajectory", "question")
    except TypeError:
        return str(signature)
    return ""
