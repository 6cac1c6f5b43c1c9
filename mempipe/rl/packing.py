"""Packs the training samples of one optimiser step into micro-batches for every learner rank.

The weight of a token is its share of the mean that the loss is, and counts the whole step: the gradient is the sum over
all micro-batches of all ranks of `weights * loss(token)`, however the contexts were ordered, packed and dealt out.

Contexts that begin alike can share a row's tokens: attempts of a group that read the same chunk, or were given the same
prompt. In the order of their tokens every context begins with as much of the one before it as of any other, so a number
for each context, how many tokens it takes from the one before it, describes the whole tree of prefixes.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from mempipe.settings import ConfigError
from mempipe.types import TrainingSample

Aggregation = Literal["token", "context", "question", "trajectory"]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
MOST_SHARED = 8
"""Upper bound of sum(sequence_lengths) / T in a micro-batch. Attention expands shared prefixes, so its memory grows
with the expanded length. 8 was not tuned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The input of one forward and backward pass of one rank: T tokens of S whole contexts in a row, N loss tokens.

    A context may take its first tokens from the one before it; a token that several contexts train is a loss token of
    each.

    A filler (`weights` all zero) keeps ranks in step when one of them has less to do; it adds nothing to loss or
    gradient.
    """

    token_ids: Ints  # [T]
    position_ids: Ints  # [T], counted from 0 in every context
    sequence_lengths: Ints  # [S], of whole contexts
    shared_lengths: Ints  # [S], first tokens that the context before has too, and that are there once; else 0
    loss_positions: Ints  # [N], the place in T of each loss token; never the first token of a context
    source_positions: Ints  # [N], the place in T of the token before it, whose state predicts it
    loss_sequences: Ints  # [N], which of the S contexts it is in
    old_logprobs: Floats  # [N], the sampler's
    ref_logprobs: Floats  # [N], zeros without a reference
    advantages: Floats  # [N]
    weights: Floats  # [N], share of the step's mean
    context_indices: Ints  # [S], position of the context in its trajectory
    policy_versions: Ints  # [N], version that sampled the token

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_filler(self) -> bool:
        return not self.weights.any()


def pack_step(
    samples: Sequence[TrainingSample],
    *,
    num_ranks: int,
    max_tokens: int,
    aggregation: Aggregation,
    share_prefixes: bool = False,
    skip_zero_advantages: bool = False,
) -> list[list[MicroBatch]]:
    """Returns the micro-batches of one optimiser step, one list per rank, all lists equally long and none empty.

    Contexts are never split. Contexts of similar length share a micro-batch, or, with `share_prefixes`, contexts that
    begin alike; micro-batches that ranks work on at the same time hold similar numbers of tokens. The result depends on
    the set of samples only, not on their order.

    With `skip_zero_advantages` no micro-batch holds contexts whose advantage is 0, which is exact where the loss is the
    advantage times something (`AlgorithmConfig.skips_zero_advantages`): the means that the weights are shares of count
    them all the same. When nothing is left every rank gets a filler, and the optimiser steps with a gradient of 0.

    Raises ValueError for an empty step or a malformed sample, and ConfigError for a context longer than `max_tokens`.
    """
    if num_ranks < 1:
        raise ValueError(f"learner.num_ranks must be >= 1, got {num_ranks}")
    if not samples:
        raise ValueError(
            "an optimiser step needs at least one training sample, got none: every group was filtered or had no context"
        )
    for sample in samples:
        _check(sample, max_tokens)
    (twice, count), *_ = Counter((sample.trajectory_id, sample.context_index) for sample in samples).most_common(1)
    if count > 1:
        raise ValueError(
            f"context {twice[1]} of trajectory {twice[0]} is {count} times in the step; every context is trained once"
        )
    scale = _token_weights(samples, aggregation)
    longest_first = sorted(samples, key=lambda s: (-len(s.token_ids), s.group_id, s.trajectory_id, s.context_index))
    trained = [sample for sample in longest_first if sample.advantage or not skip_zero_advantages]
    rows = _rows(_parts(trained, share_prefixes), num_ranks=num_ranks, max_tokens=max_tokens) if trained else []
    rows.sort(key=_tokens, reverse=True)
    filler = _filler(longest_first[-1])

    ranks: list[list[MicroBatch]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for start in range(0, max(len(rows), 1), num_ranks):
        side_by_side = rows[start : start + num_ranks]
        by_load = sorted(range(num_ranks), key=lambda rank: load[rank])
        for rank, row in zip(by_load, side_by_side, strict=False):
            ranks[rank].append(_micro_batch(row, scale))
            load[rank] += _tokens(row)
        for rank in by_load[len(side_by_side) :]:
            ranks[rank].append(filler)
    return ranks


def context_places(lengths: Sequence[int], shared_lengths: Sequence[int]) -> Ints:
    """Returns the place in the row of each token of each context, [sum of lengths]. The first `shared_lengths` tokens
    of a context have the places of the context before it; the others follow everything before them."""
    places: list[Ints] = []
    start = 0
    for length, shared in zip(lengths, shared_lengths, strict=True):
        own = np.arange(start, start + length - shared, dtype=np.int64)
        places.append(np.concatenate([places[-1][:shared], own]) if shared else own)
        start += length - shared
    return np.concatenate(places)


def split_updates(
    groups: Sequence[Sequence[TrainingSample]], updates_per_step: int, *, seed: str
) -> list[list[TrainingSample]]:
    """Returns the samples of each optimiser update: whole groups, as evenly as possible (the first updates take the
    rest).

    The groups are shuffled by `seed` whatever order they come in: they come as they finished, and the first update
    would be made of the quickest ones. Groups without samples are passed over. Raises ValueError when there are fewer
    groups than updates.
    """
    groups = sorted((group for group in groups if group), key=lambda group: group[0].group_id)
    random.Random(seed).shuffle(groups)
    if not 1 <= updates_per_step <= len(groups):
        raise ValueError(
            f"algorithm.updates_per_step is {updates_per_step}, but the step holds {len(groups)} groups with samples; "
            "it must be at least 1 and at most the number of groups"
        )
    share, rest = divmod(len(groups), updates_per_step)
    updates, start = [], 0
    for update in range(updates_per_step):
        end = start + share + (update < rest)
        updates.append([sample for group in groups[start:end] for sample in group])
        start = end
    return updates


def _check(sample: TrainingSample, max_tokens: int) -> None:
    name = f"context {sample.context_index} of trajectory {sample.trajectory_id} (question {sample.group_id})"
    length = len(sample.token_ids)
    if length > max_tokens:
        raise ConfigError(
            f"{name} has {length} tokens and does not fit learner.max_tokens_per_micro_batch {max_tokens}; raise "
            f"it to at least {length}"
        )
    for field in ("loss_mask", "logprobs", "policy_versions", "ref_logprobs"):
        found = len(getattr(sample, field))
        if found != length and not (field == "ref_logprobs" and found == 0):
            raise ValueError(f"{name} has {length} tokens but {found} entries in {field}")
    if not np.any(sample.loss_mask):
        raise ValueError(f"{name} has no sampled token; a context holds at least the stop token of one completion")
    if sample.loss_mask[0]:
        raise ValueError(f"{name} has its first token in the loss; nothing precedes it, so it has no probability")


def _token_weights(samples: Sequence[TrainingSample], aggregation: Aggregation) -> dict[str, float]:
    """Returns the weight of every loss token, by trajectory id."""
    tokens: Counter[str] = Counter()
    for sample in samples:
        tokens[sample.trajectory_id] += int(np.sum(sample.loss_mask))
    if aggregation == "token":
        return dict.fromkeys(tokens, 1 / tokens.total())
    if aggregation == "context":
        return dict.fromkeys(tokens, 1 / len(samples))
    if aggregation == "question":
        contexts = Counter(sample.group_id for sample in samples)
        return {s.trajectory_id: 1 / (len(contexts) * contexts[s.group_id]) for s in samples}
    if aggregation != "trajectory":
        raise ValueError(f"algorithm.aggregation is {aggregation!r}; it must be token, context, question or trajectory")
    for sample in samples:
        if sample.trajectory_tokens != tokens[sample.trajectory_id]:
            raise ValueError(
                f"trajectory {sample.trajectory_id} has {sample.trajectory_tokens} loss tokens, but "
                f"{tokens[sample.trajectory_id]} are in this optimiser step; a trajectory must be in one "
                "step as a whole"
            )
    return {trajectory: 1 / (len(tokens) * count) for trajectory, count in tokens.items()}


class _Part(NamedTuple):
    """A context in a row, and how many of its first tokens the context before it has too."""

    sample: TrainingSample
    shared: int

    @property
    def own(self) -> int:
        return len(self.sample.token_ids) - self.shared


def _tokens(row: Sequence[_Part]) -> int:
    return sum(part.own for part in row)


def _parts(longest_first: Sequence[TrainingSample], share_prefixes: bool) -> list[_Part]:
    """Returns the samples in the order in which they are put into rows."""
    if not share_prefixes:
        return [_Part(sample, 0) for sample in longest_first]
    tokens = [np.asarray(sample.token_ids, dtype=">u4") for sample in longest_first]  # bytes sort as the numbers do
    order = sorted(range(len(tokens)), key=lambda i: tokens[i].tobytes())
    before = [-1, *order]
    return [
        _Part(longest_first[i], 0 if j < 0 else _common_prefix(tokens[j], tokens[i]))
        for j, i in zip(before, order, strict=False)
    ]


def _common_prefix(one: npt.NDArray, other: npt.NDArray) -> int:
    length = min(len(one), len(other))
    different = one[:length] != other[:length]
    return int(different.argmax()) if different.any() else length


def _rows(parts: Sequence[_Part], *, num_ranks: int, max_tokens: int) -> list[list[_Part]]:
    """Cuts the contexts into runs of neighbours of at most `max_tokens` each. There are as many runs as the ranks need
    rounds for, and their largest is as small as possible.
    """
    num_rounds = -(-len(_runs(parts, max_tokens)) // num_ranks)
    low, high = max(len(part.sample.token_ids) for part in parts), max_tokens
    while low < high:
        middle = (low + high) // 2
        if len(_runs(parts, middle)) <= num_rounds * num_ranks:
            high = middle
        else:
            low = middle + 1
    return _runs(parts, low)


def _runs(parts: Sequence[_Part], capacity: int) -> list[list[_Part]]:
    """Puts neighbours together while they fit; every context alone does. The first of a run shares nothing."""
    runs: list[list[_Part]] = []
    room = room_whole = 0
    for part in parts:
        length = len(part.sample.token_ids)
        if part.own > room or length > room_whole:
            runs.append([])
            room, room_whole = capacity, MOST_SHARED * capacity
            part = _Part(part.sample, 0)
        runs[-1].append(part)
        room -= part.own
        room_whole -= length
    return runs


def _micro_batch(row: Sequence[_Part], scale: dict[str, float]) -> MicroBatch:
    contexts = [part.sample for part in row]
    lengths = np.array([len(sample.token_ids) for sample in contexts], dtype=np.int64)
    shared = np.array([part.shared for part in row], dtype=np.int64)
    # A tenth of the tokens is in the loss: what only those need is picked first and put together afterwards.
    sampled = [np.flatnonzero(np.asarray(sample.loss_mask)) for sample in contexts]
    starts = np.cumsum(lengths) - lengths
    positions = np.concatenate([start + where for start, where in zip(starts, sampled, strict=True)])
    places = context_places(lengths.tolist(), shared.tolist()) if shared.any() else None
    sequences = np.repeat(np.arange(len(contexts)), [len(where) for where in sampled])
    advantages = np.array([sample.advantage for sample in contexts], dtype=np.float32)
    weights = np.array([scale[sample.trajectory_id] for sample in contexts], dtype=np.float32)

    def picked(values: Sequence[npt.ArrayLike], dtype: type[np.generic]) -> npt.NDArray:
        rows = [np.asarray(own)[where] for own, where in zip(values, sampled, strict=True)]
        return np.concatenate(rows, dtype=dtype, casting="same_kind")

    return MicroBatch(
        token_ids=np.concatenate([np.asarray(part.sample.token_ids)[part.shared :] for part in row], dtype=np.int64),
        position_ids=np.concatenate([np.arange(*ends, dtype=np.int64) for ends in zip(shared, lengths, strict=True)]),
        sequence_lengths=lengths,
        shared_lengths=shared,
        loss_positions=positions if places is None else places[positions],
        source_positions=positions - 1 if places is None else places[positions - 1],
        loss_sequences=sequences,
        old_logprobs=picked([sample.logprobs for sample in contexts], np.float32),
        ref_logprobs=picked(
            [sample.ref_logprobs or np.zeros(len(sample.token_ids)) for sample in contexts], np.float32
        ),
        advantages=advantages[sequences],
        weights=weights[sequences],
        context_indices=np.array([sample.context_index for sample in contexts], dtype=np.int64),
        policy_versions=picked([sample.policy_versions for sample in contexts], np.int64),
    )


def _filler(sample: TrainingSample) -> MicroBatch:
    """Returns the smallest batch that a model runs through forward and backward: two tokens, the second in the loss
    with weight zero.
    """
    zero = np.zeros(1, dtype=np.float32)
    return MicroBatch(
        token_ids=np.array(sample.token_ids[:2], dtype=np.int64),
        position_ids=np.arange(2, dtype=np.int64),
        sequence_lengths=np.array([2], dtype=np.int64),
        shared_lengths=np.array([0], dtype=np.int64),
        loss_positions=np.array([1], dtype=np.int64),
        source_positions=np.array([0], dtype=np.int64),
        loss_sequences=np.array([0], dtype=np.int64),
        old_logprobs=zero,
        ref_logprobs=zero,
        advantages=zero,
        weights=zero,
        context_indices=np.array([sample.context_index], dtype=np.int64),
        policy_versions=np.array([max(sample.policy_versions)], dtype=np.int64),
    )
