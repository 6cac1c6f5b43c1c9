"""Packing: every loss token once, with a weight that only the whole optimiser step decides."""

from __future__ import annotations

import dataclasses
import operator
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mempipe.rl.packing import MOST_SHARED, MicroBatch, context_places, pack_step, split_updates
from mempipe.types import Column, TrainingSample

AGGREGATIONS = ("token", "context", "question", "trajectory")
# a step: groups of trajectories of contexts, each context the loss mask behind its first token
CONTEXT = st.lists(st.booleans(), min_size=1, max_size=12).filter(any)
STEPS = st.lists(st.lists(st.lists(CONTEXT, min_size=1, max_size=8), max_size=4), min_size=1, max_size=5)


def step_of(shape) -> list[list[TrainingSample]]:
    """Samples whose token ids are unique in the step, and whose log-probs, advantages and versions tell which token
    they are of.
    """
    groups, token = [], 0
    for g, trajectories in enumerate(shape):
        group = []
        for t, contexts in enumerate(trajectories):
            tokens = sum(sum(mask) for mask in contexts)
            for c, mask in enumerate(contexts):
                ids = list(range(token, token + len(mask) + 1))
                token = ids[-1] + 1
                group.append(
                    TrainingSample(
                        trajectory_id=f"g{g}/{t}",
                        group_id=f"g{g}",
                        context_index=c,
                        token_ids=ids,
                        loss_mask=[0, *map(int, mask)],
                        logprobs=[-0.25 * i for i in ids],
                        policy_versions=[7 * i for i in ids],
                        advantage=float(10 * g + t),
                        trajectory_tokens=tokens,
                        ref_logprobs=[-0.5 * i for i in ids],
                    )
                )
        groups.append(group)
    return groups


def flat(groups) -> list[TrainingSample]:
    return [sample for group in groups for sample in group]


def sample(length: int, name: str = "t", *, context: int = 0, loss: int = 1) -> TrainingSample:
    return TrainingSample(
        trajectory_id=name,
        group_id="q",
        context_index=context,
        token_ids=list(range(length)),
        loss_mask=[0] * (length - loss) + [1] * loss,
        logprobs=[-1.0] * length,
        policy_versions=[0] * length,
        advantage=1.0,
        trajectory_tokens=loss,
    )


def batches_of(ranks: list[list[MicroBatch]]) -> list[MicroBatch]:
    return [batch for rank in ranks for batch in rank]


def weight_by_token(ranks: list[list[MicroBatch]]) -> Counter[int]:
    """The weight that every loss token has in the step, fillers left out."""
    weights: Counter[int] = Counter()
    for batch in batches_of(ranks):
        if not batch.is_filler:
            for token, weight in zip(
                batch.token_ids[batch.loss_positions].tolist(), batch.weights.tolist(), strict=True
            ):
                assert token not in weights
                weights[token] = weight
    return weights


def test_contexts_lie_one_behind_the_other_with_their_own_positions():
    ((batch,),) = pack_step(
        [sample(3, "a", loss=2), sample(4, "b", context=5)], num_ranks=1, max_tokens=7, aggregation="token"
    )
    assert batch.token_ids.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert batch.sequence_lengths.tolist() == [4, 3] and batch.context_indices.tolist() == [5, 0]
    assert batch.loss_positions.tolist() == [3, 5, 6] and batch.loss_sequences.tolist() == [0, 1, 1]
    assert batch.weights.tolist() == pytest.approx([1 / 3] * 3)
    assert (batch.num_tokens, len(batch.loss_positions), batch.is_filler) == (7, 3, False)
    assert batch.ref_logprobs.tolist() == [0, 0, 0]


def test_weights_of_the_three_aggregations():
    samples = flat(step_of([[[[True, True], [True]], [[True]]]]))  # trajectories of 3 and 1 loss tokens, three contexts
    expected = {"token": [1 / 4] * 4, "context": [1 / 3] * 4, "trajectory": [1 / 6, 1 / 6, 1 / 6, 1 / 2]}
    for aggregation, weights in expected.items():
        found = weight_by_token(pack_step(samples, num_ranks=1, max_tokens=99, aggregation=aggregation))
        assert [found[token] for token in sorted(found)] == pytest.approx(weights)


def test_equation_4_of_each_question_and_then_their_mean():
    # The first question has four contexts, the second one; over the update every context would count one fifth.
    samples = flat(step_of([[[[True, True], [True]], [[True], [True]]], [[[True, True]]]]))
    found = weight_by_token(pack_step(samples, num_ranks=2, max_tokens=99, aggregation="question"))
    assert [found[token] for token in sorted(found)] == pytest.approx([1 / 8] * 5 + [1 / 2] * 2)


def test_micro_batches_are_as_even_as_the_contexts_allow():
    ((first, second),) = pack_step(
        [sample(4, str(i)) for i in range(6)], num_ranks=1, max_tokens=20, aggregation="token"
    )
    assert (first.num_tokens, second.num_tokens) == (12, 12)


def test_contexts_next_in_length_share_a_micro_batch():
    samples = [sample(length, str(i)) for i, length in enumerate([2, 30, 3, 31, 2, 32])]
    ((long, short),) = pack_step(samples, num_ranks=1, max_tokens=99, aggregation="token")
    assert sorted([long.sequence_lengths.tolist(), short.sequence_lengths.tolist()]) == [[30, 3, 2, 2], [32, 31]]


def test_a_rank_without_work_gets_a_filler_that_weighs_nothing():
    (busy,), (idle,) = pack_step([sample(5)], num_ranks=2, max_tokens=8, aggregation="token")
    assert not busy.is_filler and idle.is_filler
    assert idle.num_tokens == 2 and idle.loss_positions.tolist() == [1] and idle.weights.tolist() == [0.0]
    assert idle.sequence_lengths.tolist() == [2] and idle.position_ids.tolist() == [0, 1]


def test_arrays_have_the_promised_types():
    (batch,), (filler,) = pack_step([sample(5)], num_ranks=2, max_tokens=8, aggregation="token")
    for each in (batch, filler):
        for field in dataclasses.fields(each):
            wanted = np.float32 if field.name in ("old_logprobs", "ref_logprobs", "advantages", "weights") else np.int64
            assert getattr(each, field.name).dtype == wanted, field.name


def test_a_context_that_does_not_fit_is_named_with_the_setting():
    with pytest.raises(
        ValueError, match=r"context 3 of trajectory q/0 \(question q\) has 9 tokens .*max_tokens_per_micro_batch 8"
    ):
        pack_step([sample(9, "q/0", context=3)], num_ranks=1, max_tokens=8, aggregation="token")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_mask": [0, 0, 0]}, "no sampled token"),
        ({"loss_mask": [1, 0, 0]}, "first token in the loss"),
        ({"logprobs": [0.0]}, "3 tokens but 1 entries in logprobs"),
        ({"ref_logprobs": [0.0, 0.0]}, "3 tokens but 2 entries in ref_logprobs"),
    ],
)
def test_malformed_samples_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        pack_step([dataclasses.replace(sample(3), **changes)], num_ranks=1, max_tokens=8, aggregation="token")


def test_an_empty_step_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="every group was filtered or had no context"):
        pack_step([], num_ranks=1, max_tokens=8, aggregation="token")


def test_no_context_is_trained_twice():
    with pytest.raises(ValueError, match="context 0 of trajectory t is 2 times in the step"):
        pack_step([sample(3), sample(4)], num_ranks=1, max_tokens=8, aggregation="token")


def test_a_trajectory_that_is_not_whole_cannot_be_averaged_over():
    half = dataclasses.replace(sample(3), trajectory_tokens=5)
    with pytest.raises(ValueError, match="trajectory t has 5 loss tokens, but 1 are in this"):
        pack_step([half], num_ranks=1, max_tokens=8, aggregation="trajectory")


def test_updates_take_whole_groups_as_evenly_as_possible():
    groups = step_of([[[[True]], [[True]]]] * 5 + [[]])
    updates = split_updates(groups, 3, seed="1:0")
    homes = [[s.group_id for s in update] for update in updates]
    assert [len(set(names)) for names in homes] == [2, 2, 1]
    assert sorted(name for names in homes for name in names) == sorted(f"g{i}" for i in range(5) for _ in range(2))
    assert all(names[::2] == names[1::2] for names in homes), "a group is in one update as a whole"


def test_groups_are_dealt_to_updates_by_the_seed_and_not_by_who_finished_first():
    groups = step_of([[[[True]]]] * 40)

    def dealt(order, seed):
        return [[s.group_id for s in update] for update in split_updates(order, 4, seed=seed)]

    assert dealt(groups, "1:0") == dealt(groups[::-1], "1:0")
    assert dealt(groups, "1:0") != dealt(groups, "1:1")
    quickest = {group[0].group_id for group in groups[:10]}
    assert all(0 < len(quickest & set(names)) < 10 for names in dealt(groups, "1:0"))


def test_more_updates_than_groups_are_refused_with_the_setting():
    with pytest.raises(ValueError, match=r"algorithm.updates_per_step is 3, but the step holds 2 groups"):
        split_updates(step_of([[[[True]]], [[[True]]], []]), 3, seed="")


@given(
    shape=STEPS,
    num_ranks=st.integers(1, 4),
    max_tokens=st.integers(13, 60),
    aggregation=st.sampled_from(AGGREGATIONS),
    seed=st.randoms(),
)
def test_promise_4_every_loss_token_is_packed_once_with_its_share(shape, num_ranks, max_tokens, aggregation, seed):
    samples = flat(step_of(shape))
    if not samples:
        return
    seed.shuffle(samples)
    ranks = pack_step(samples, num_ranks=num_ranks, max_tokens=max_tokens, aggregation=aggregation)
    assert len(ranks) == num_ranks and len({len(rank) for rank in ranks}) == 1

    loss_tokens = {i for s in samples for i, bit in zip(s.token_ids, s.loss_mask, strict=True) if bit}
    found = weight_by_token(ranks)
    assert found.keys() == loss_tokens
    tokens, contexts = Counter[str](), Counter(sample.group_id for sample in samples)
    for each in samples:
        tokens[each.group_id] += sum(each.loss_mask)
    of_questions = sum(tokens[question] / contexts[question] for question in contexts) / len(contexts)
    total = {"context": len(loss_tokens) / len(samples), "question": of_questions}.get(aggregation, 1.0)
    assert sum(found.values()) == pytest.approx(total, rel=1e-6)

    contexts = Counter(tuple(s.token_ids) for s in samples)
    for batch in batches_of(ranks):
        assert batch.num_tokens <= max_tokens and batch.num_tokens == batch.sequence_lengths.sum()
        if batch.is_filler:
            continue
        starts = np.cumsum(batch.sequence_lengths) - batch.sequence_lengths
        contexts -= Counter(
            tuple(batch.token_ids[a : a + n].tolist()) for a, n in zip(starts, batch.sequence_lengths, strict=True)
        )
        assert np.array_equal(
            batch.position_ids, np.arange(batch.num_tokens) - np.repeat(starts, batch.sequence_lengths)
        )
        assert (batch.loss_positions > starts[batch.loss_sequences]).all()
        tokens = batch.token_ids[batch.loss_positions]
        assert np.array_equal(batch.old_logprobs, (-0.25 * tokens).astype(np.float32))
        assert np.array_equal(batch.ref_logprobs, (-0.5 * tokens).astype(np.float32))
        assert np.array_equal(batch.policy_versions, 7 * tokens)
    assert not contexts  # every context once, none split


@settings(max_examples=80)
@given(shape=STEPS, seed=st.randoms(), aggregation=st.sampled_from(AGGREGATIONS))
def test_promise_4_packing_order_and_ranks_do_not_change_the_sum(shape, seed, aggregation):
    """sum(weights * f(token)) for an arbitrary f is the gradient of an arbitrary loss."""
    samples = flat(step_of(shape))
    if not samples:
        return
    value = np.random.default_rng(0).normal(size=1 + max(s.token_ids[-1] for s in samples))

    def total(order, *, num_ranks, max_tokens):
        ranks = pack_step(order, num_ranks=num_ranks, max_tokens=max_tokens, aggregation=aggregation)
        return sum(
            float(b.weights.astype(np.float64) @ (value[b.token_ids[b.loss_positions]] + b.advantages))
            for b in batches_of(ranks)
        )

    one_by_one = total(samples, num_ranks=1, max_tokens=13)
    shuffled = seed.sample(samples, len(samples))
    for num_ranks in (1, 2, 3, 4):
        for max_tokens in (13, 29, 10_000):
            assert total(shuffled, num_ranks=num_ranks, max_tokens=max_tokens) == pytest.approx(
                one_by_one, rel=1e-9, abs=1e-9
            )


def test_promise_4_the_dense_mean_over_tokens_contexts_and_trajectories_is_what_weights_add_up_to():
    rng = np.random.default_rng(1)
    shape = [
        [[[bool(b) for b in rng.integers(0, 2, 5)] + [True] for _ in range(rng.integers(1, 9))] for _ in range(4)]
        for _ in range(3)
    ]
    samples = flat(step_of(shape))
    value = rng.normal(size=1 + max(s.token_ids[-1] for s in samples))
    loss_tokens = [[i for i, bit in zip(s.token_ids, s.loss_mask, strict=True) if bit] for s in samples]
    by_trajectory: dict[str, list[int]] = {}
    for one, tokens in zip(samples, loss_tokens, strict=True):
        by_trajectory.setdefault(one.trajectory_id, []).extend(tokens)
    dense = {
        "token": np.mean(np.concatenate([value[tokens] for tokens in loss_tokens])),
        "context": np.mean([value[tokens].sum() for tokens in loss_tokens]),
        "trajectory": np.mean([value[tokens].mean() for tokens in by_trajectory.values()]),
    }
    for aggregation, expected in dense.items():
        ranks = pack_step(samples, num_ranks=2, max_tokens=17, aggregation=aggregation)
        packed = sum(float(b.weights @ value[b.token_ids[b.loss_positions]]) for b in batches_of(ranks))
        assert packed == pytest.approx(expected, rel=1e-6)


@settings(max_examples=60)
@given(shape=STEPS, updates=st.integers(1, 5))
def test_promise_4_splitting_a_step_keeps_groups_whole_and_loses_none(shape, updates):
    groups = step_of(shape)
    full = [group for group in groups if group]
    if len(full) < updates:
        with pytest.raises(ValueError, match="updates_per_step"):
            split_updates(groups, updates, seed="")
        return
    parts = split_updates(groups, updates, seed="")
    by_id = operator.attrgetter("trajectory_id", "context_index")
    assert sorted(flat(parts), key=by_id) == sorted(flat(groups), key=by_id)
    homes = [{s.group_id for s in part} for part in parts]
    assert sum(map(len, homes)) == len(full)
    sizes = list(map(len, homes))
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=100)
@given(
    shape=STEPS,
    num_ranks=st.integers(1, 4),
    max_tokens=st.integers(13, 60),
    aggregation=st.sampled_from(AGGREGATIONS),
    share_prefixes=st.booleans(),
    seed=st.randoms(),
)
def test_contexts_without_an_advantage_are_left_out_and_still_counted(
    shape, num_ranks, max_tokens, aggregation, share_prefixes, seed
):
    samples = [dataclasses.replace(s, advantage=seed.choice([0.0, -0.0, 0.5, -2.0])) for s in flat(step_of(shape))]
    if not samples:
        return
    everything, trained = (
        pack_step(
            samples,
            num_ranks=num_ranks,
            max_tokens=max_tokens,
            aggregation=aggregation,
            share_prefixes=share_prefixes,
            skip_zero_advantages=skips,
        )
        for skips in (False, True)
    )
    teaching = {token for s in samples if s.advantage for token in s.token_ids}
    expected = {token: weight for token, weight in weight_by_token(everything).items() if token in teaching}
    assert weight_by_token(trained) == expected
    assert len(trained) == num_ranks and len({len(rank) for rank in trained}) == 1
    assert trained[0] and any(not batch.is_filler for batch in batches_of(trained)) == bool(expected)


def test_a_step_without_any_advantage_is_a_filler_for_every_rank():
    samples = [dataclasses.replace(sample(5, name), advantage=0.0) for name in "abc"]
    ranks = pack_step(samples, num_ranks=2, max_tokens=8, aggregation="token", skip_zero_advantages=True)
    assert [[(batch.is_filler, batch.num_tokens) for batch in rank] for rank in ranks] == [[(True, 2)]] * 2


def test_packing_is_deterministic_and_ignores_the_order_of_arrival():
    samples = flat(step_of([[[[True] * (1 + (i * j) % 7)] * 3 for i in range(4)] for j in range(6)]))
    first = pack_step(samples, num_ranks=3, max_tokens=16, aggregation="token")
    again = pack_step(random.Random(0).sample(samples, len(samples)), num_ranks=3, max_tokens=16, aggregation="token")
    for a, b in zip(batches_of(first), batches_of(again), strict=True):
        assert all(np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))


def test_ranks_carry_similar_loads_at_the_same_time():
    rng = random.Random(3)
    samples = [sample(rng.randint(100, 1000), str(i)) for i in range(400)]
    ranks = pack_step(samples, num_ranks=4, max_tokens=4096, aggregation="token")
    loads = [[batch.num_tokens for batch in rank] for rank in ranks]
    assert max(map(sum, loads)) <= 1.02 * min(map(sum, loads))
    assert sum(map(sum, loads)) >= 0.9 * sum(max(row) * 4 for row in zip(*loads, strict=True))


def test_the_rank_that_did_least_so_far_takes_the_largest_micro_batch():
    samples = [sample(length, str(length)) for length in (10, 9, 7, 6)]  # each fills a micro-batch
    ranks = pack_step(samples, num_ranks=2, max_tokens=10, aggregation="token")
    assert [[batch.num_tokens for batch in rank] for rank in ranks] == [[10, 6], [9, 7]]


def test_columns_are_packed_as_lists_are():
    samples = [sample for group in step_of([[[[True, False], [True]], [[True] * 5]], [[[True]]]]) for sample in group]
    names = ("token_ids", "loss_mask", "logprobs", "policy_versions", "ref_logprobs")
    columns = [
        dataclasses.replace(sample, **{name: Column(np.array(getattr(sample, name))) for name in names})
        for sample in samples
    ]
    expected, found = (pack_step(s, num_ranks=2, max_tokens=6, aggregation="trajectory") for s in (samples, columns))
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            for field in dataclasses.fields(MicroBatch):
                np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name), strict=True)


ALIKE = st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=12), min_size=1, max_size=12)


def alike(token_ids: list[list[int]]) -> list[TrainingSample]:
    return [
        dataclasses.replace(sample(len(ids), f"t{i}", loss=len(ids) // 2), token_ids=ids, advantage=float(i))
        for i, ids in enumerate(token_ids)
    ]


@given(token_ids=ALIKE, num_ranks=st.integers(1, 3), max_tokens=st.integers(12, 40))
def test_contexts_that_share_tokens_are_each_there_as_a_whole(token_ids, num_ranks, max_tokens):
    samples = alike(token_ids)
    plain, shared = (
        batches_of(
            pack_step(
                samples, num_ranks=num_ranks, max_tokens=max_tokens, aggregation="token", share_prefixes=share_prefixes
            )
        )
        for share_prefixes in (False, True)
    )
    found, weights = [], Counter[tuple[float, int, int]]()
    for batch in shared:
        assert batch.num_tokens <= max_tokens
        places = context_places(batch.sequence_lengths.tolist(), batch.shared_lengths.tolist())
        contexts = np.split(places, np.cumsum(batch.sequence_lengths)[:-1])
        for here in contexts:
            assert batch.position_ids[here].tolist() == list(range(len(here)))
        for i, (at, source) in enumerate(zip(batch.loss_positions, batch.source_positions, strict=True)):
            here = contexts[batch.loss_sequences[i]].tolist()
            assert here.index(at) == here.index(source) + 1
        if not batch.is_filler:
            found += [batch.token_ids[here].tolist() for here in contexts]
            positions = batch.position_ids[batch.loss_positions]
            weights.update(zip(batch.advantages, positions.tolist(), batch.weights.tolist(), strict=True))
    assert sorted(found) == sorted(token_ids)
    expected = Counter[tuple[float, int, int]]()
    for batch in plain:
        if not batch.is_filler:
            positions = batch.position_ids[batch.loss_positions]
            expected.update(zip(batch.advantages, positions.tolist(), batch.weights.tolist(), strict=True))
    assert weights == expected
    assert sum(b.num_tokens for b in shared if not b.is_filler) <= sum(b.num_tokens for b in plain if not b.is_filler)


def test_siblings_that_read_the_same_chunk_are_trained_on_it_once():
    chunk = list(range(1000))
    siblings = alike([[*chunk, 2000 + i, *range(3000, 3099)] for i in range(8)])
    ((batch,),) = pack_step(siblings, num_ranks=1, max_tokens=4096, aggregation="token", share_prefixes=True)
    assert batch.num_tokens == 1000 + 8 * 100 and batch.shared_lengths.tolist() == [0] + [1000] * 7


def test_a_row_has_room_for_the_attention_of_whole_contexts():
    siblings = alike([[*range(90), 100 + i] for i in range(100)])
    (batches,) = pack_step(siblings, num_ranks=1, max_tokens=100, aggregation="token", share_prefixes=True)
    assert all(batch.sequence_lengths.sum() <= MOST_SHARED * 100 for batch in batches)
    assert sum(len(batch.sequence_lengths) for batch in batches) == 100
