"""MemTrain: what is recalled and how, and Eq. 1 to 4 worked out by hand."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from agent_builders import Library, build_question, build_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from mempipe.actors.launch import Roles
from mempipe.actors.reference import ReferenceStage
from mempipe.agents.memtrain import MemTrain, MemTrainRenderer, hide
from mempipe.agents.protocol import UnfitQuestion
from mempipe.config import RunConfig
from mempipe.data.trajectories import groups_to_table, table_to_groups
from mempipe.evaluation.rollout_metrics import rollout_metrics
from mempipe.faults import InfrastructureFault
from mempipe.loader import parse_config
from mempipe.reports.trace import trajectory_lines
from mempipe.rl.advantages import has_signal, with_advantages
from mempipe.rl.config import AlgorithmConfig, RewardConfig
from mempipe.rl.losses import policy_loss
from mempipe.rl.packing import Aggregation, pack_step
from mempipe.rl.samples import to_samples
from mempipe.rollout import make_renderer, run_group
from mempipe.settings import ConfigError
from mempipe.stop import StopRequest
from mempipe.streams.groups import StepGroups
from mempipe.types import Completion, FinishReason, Group, Question, TrainingSample, Trajectory, from_row, to_row
from pipelines import warm_start
from pipelines.train import train_step

TOKENIZER = build_tokenizer()
SENTENCES = ["Osvin was born in [MASK].", " Adela wrote Odyssey.", " Nobody wrote a thing."]
CHUNK_TOKENS = max(len(TOKENIZER.encode_text(text)) for text in SENTENCES)
QUESTION = "What does [MASK] stand for?"


def document(**changes: Any) -> Question:
    """Three sentences of one chunk each: chunks are as long as the longest, which the others are filled up to."""
    text = ""
    for sentence in SENTENCES:
        text += sentence + "." * (CHUNK_TOKENS - len(TOKENIZER.encode_text(sentence)))
    fields = {"context": text, "golden_answers": ["Velmora"], "recall_targets": [["Osvin"], ["Odyssey", "The Odyssey"]]}
    return build_question(QUESTION, **{**fields, **changes})


def build_renderer(**agent: Any) -> MemTrainRenderer:
    budget = {
        "question_tokens": 64,
        "memory_tokens": 64,
        "action_tokens": 64,
        "chunk_tokens": CHUNK_TOKENS,
        "context_tokens": 4096,
    }
    config = parse_config({"agent": {"name": "memtrain", "num_recalls": 2, **agent}, "budget": budget})
    renderer = make_renderer(config, tokenizer=TOKENIZER)
    assert isinstance(renderer, MemTrainRenderer)
    return renderer


class Policy:
    """Writes "memory 1", "memory 2", … after the chunks, then `answer`, and recalls in turn with `recalls`."""

    def __init__(self, *, answer: str, recalls: Sequence[str], hold: asyncio.Event | None = None) -> None:
        self.answer, self.recalls, self.hold = answer, iter(recalls), hold
        self.prompts: list[str] = []
        self.num_memories = 0

    async def __call__(self, token_ids: Sequence[int], *, max_tokens: int) -> Completion:
        prompt = TOKENIZER.decode(token_ids)
        self.prompts.append(prompt)
        if "[TARGET]" in prompt.partition("<section>")[2]:
            if self.hold is not None:
                await self.hold.wait()
            text = next(self.recalls)
        elif "<section>" in prompt:
            self.num_memories += 1
            text = f"memory {self.num_memories}"
        else:
            if self.hold is not None:
                self.hold.set()
            text = self.answer
        if text == "FAULT":
            raise InfrastructureFault("the engine died")
        sampled = [*TOKENIZER.encode_template(text), min(TOKENIZER.stop_token_ids)]
        logprobs = [-0.5] * len(sampled)
        return Completion(token_ids=sampled, logprobs=logprobs, finish_reason=FinishReason.STOP, policy_version=0)


async def play(policy: Policy, *, question: Question | None = None, name: str = "t", **agent: Any) -> Trajectory:
    player = MemTrain(build_renderer(**agent), generate=policy, search=Library())
    return await player.rollout(question or document(), trajectory_id=name, group_id="g", member=0)


async def test_recalls_are_contexts_beside_those_of_the_reading():
    policy = Policy(answer="\\boxed{Velmora}", recalls=["\\boxed{Osvin}", "no box"])
    played = await play(policy)
    assert [context.index for context in played.contexts] == [0, 1, 2, 3]
    assert [recall.context.index for recall in played.recalls] == [4, 5]
    assert (played.answer, played.contexts[-1].action) == ("Velmora", "\\boxed{Velmora}")
    assert [recall.answer for recall in played.recalls] == ["Osvin", None]
    for recall in played.recalls:
        assert 0 <= recall.chunk < recall.step - 1 < 3
        assert recall.context.memory_before == f"memory {recall.step}"
        assert sum(recall.context.loss_mask) == len(recall.context.token_ids) - recall.context.num_prompt_tokens > 0
    assert from_row(Trajectory, to_row(played)) == played


async def test_a_recall_shows_the_masked_chunk_and_the_memory_and_never_the_target():
    asked = set()
    for number in range(30):
        policy = Policy(answer="\\boxed{x}", recalls=["\\boxed{y}"] * 2)
        played = await play(policy, name=f"g/{number}")
        (prompt, again) = [prompt for prompt in policy.prompts if "[TARGET]" in prompt.partition("<section>")[2]]
        assert prompt == again
        recall = played.recalls[0]
        asked.add((recall.step, recall.chunk, recall.target[0]))
        section, _, rest = prompt.partition("<section>")[2].partition("</section>")
        assert section.strip() == recall.context.chunk.strip()
        assert "[TARGET]" in section and f"memory {recall.step}" in rest
        assert not any(form.casefold() in prompt.casefold() for form in recall.target)
        assert QUESTION not in prompt
    # Chunk 1 holds Osvin, chunk 2 Odyssey, chunk 3 nothing; every step, chunk and target that can be is drawn.
    assert asked == {(2, 0, "Osvin"), (3, 0, "Osvin"), (3, 1, "Odyssey")}


async def test_recalls_are_sampled_while_the_reading_goes_on():
    """They wait here until the document has been answered; a reading that waited for them would never end."""
    hold = asyncio.Event()
    policy = Policy(answer="\\boxed{x}", recalls=["\\boxed{Osvin}"] * 2, hold=hold)
    async with asyncio.timeout(30):
        played = await play(policy)
    assert len(played.recalls) == 2


async def test_the_memory_after_the_last_chunk_is_not_asked_where_a_setting_says_so():
    for number in range(10):
        policy = Policy(answer="\\boxed{x}", recalls=["\\boxed{y}"] * 2)
        played = await play(policy, name=f"g/{number}", recall_last_step=False)
        assert {recall.step for recall in played.recalls} == {2}


async def test_the_same_attempt_is_asked_for_the_same():
    plays = [await play(Policy(answer="\\boxed{x}", recalls=["\\boxed{y}"] * 2), name="g/7") for _ in range(2)]
    first, second = ([(r.step, r.chunk, r.target) for r in played.recalls] for played in plays)
    assert first == second and len(set(map(str, first))) == 1


@settings(max_examples=100)
@given(st.lists(st.sampled_from(["a", "word", "[MASK]", "([MASK],", "x" * 80, "été", "漢字" * 9]), max_size=40))
def test_a_document_is_cut_between_words_and_a_mask_stays_whole(parts):
    renderer, text = build_renderer(), " ".join(["Osvin", *parts])
    chunks = [TOKENIZER.decode(chunk.token_ids) for chunk in renderer.chunks(document(context=text))]
    assert "".join(chunks) == text
    assert sum(chunk.count("[MASK]") for chunk in chunks) == text.count("[MASK]")
    assert all(len(TOKENIZER.encode_text(chunk)) <= CHUNK_TOKENS for chunk in chunks)


def test_a_word_that_is_longer_than_a_chunk_is_cut_between_tokens():
    renderer = build_renderer(mask="_" * 4 * CHUNK_TOKENS)
    chunks = renderer.chunks(document(context="a " + "_" * 4 * CHUNK_TOKENS))
    assert len(chunks) > 2 and all(len(chunk.token_ids) <= CHUNK_TOKENS for chunk in chunks)


def test_a_mask_that_the_tokenizer_does_not_give_back_is_refused():
    with pytest.raises(ConfigError, match=r"mask is '<\|im_end\|>', which the tokenizer reads as 'word < \|im_end"):
        build_renderer(mask="<|im_end|>")


@pytest.mark.parametrize(
    "changes",
    [
        {"context": "Osvin."},  # one chunk: nothing was read before it
        {"golden_answers": ["osvin", "odyssey"]},  # only the answer itself could be asked for
    ],
)
async def test_without_an_earlier_chunk_to_ask_about_there_are_no_recalls(changes):
    policy = Policy(answer="\\boxed{x}", recalls=[])
    assert (await play(policy, question=document(**changes))).recalls == []


@pytest.mark.parametrize("shown", ["Target", "LaTeX", "BOXED"])
def test_what_the_words_of_a_recall_prompt_write_is_not_asked_for(shown):
    text = f"{shown} was here." + "." * CHUNK_TOKENS
    renderer = build_renderer(num_recall_prompts=2)
    asked = renderer.probes(document(context=text + " Osvin." * CHUNK_TOKENS, recall_targets=[[shown]]), seed="s")
    assert asked == []


async def test_without_recalls_it_is_memagent():
    policy = Policy(answer="\\boxed{x}", recalls=[])
    played = await play(policy, question=document(recall_targets=[]), num_recalls=0)
    assert (len(played.contexts), played.recalls) == (4, [])


def test_a_question_without_targets_is_refused_before_a_training_starts():
    with pytest.raises(UnfitQuestion, match=r"question q-1 has no recall_targets; agent.num_recalls 2"):
        build_renderer().check_trained(document(recall_targets=[]))
    build_renderer(num_recalls=0).check_trained(document(recall_targets=[]))


async def test_a_trained_agent_is_asked_about_a_text_of_anybody():
    build_renderer().check(document(recall_targets=[]))
    played = await play(Policy(answer="\\boxed{Velmora}", recalls=[]), question=document(recall_targets=[]))
    assert (played.answer, played.recalls) == ("Velmora", [])


async def test_a_fault_in_a_recall_is_a_fault_of_the_attempt():
    with pytest.raises(InfrastructureFault, match="the engine died"):
        await play(Policy(answer="\\boxed{x}", recalls=["FAULT", "FAULT"]))


NAMES = st.text(st.sampled_from("aZé'. -1İß"), min_size=1, max_size=8).filter(lambda name: name.strip() == name != "")


@given(
    forms=st.lists(NAMES, min_size=1, max_size=3), between=st.lists(st.sampled_from(["", " ", ", ", "x"]), max_size=5)
)
def test_a_masked_text_holds_no_form_as_a_word(forms, between):
    text = " ".join(gap + form + gap for gap in between for form in forms)
    masked = hide(text, forms)
    assert hide(masked, forms) == masked
    assert hide(f"a {forms[0]}", [forms[0]]) != f"a {forms[0]}"


@pytest.mark.parametrize(
    ("text", "forms", "masked"),
    [
        ("Paris, PARIS and paris", ["Paris"], "[TARGET], [TARGET] and [TARGET]"),
        ("The New York Times", ["York", "New York"], "The [TARGET] Times"),
        ("Parisian", ["Paris"], "Parisian"),
        ("C++ (1979)", ["C++"], "[TARGET] (1979)"),
        ("text", [""], "text"),
    ],
)
def test_every_form_is_masked_as_a_whole_word_in_any_case(text, forms, masked):
    assert hide(text, forms) == masked


# Eq. 1 to 4 by hand: two attempts, three chunks, two recall samples each.
#                    answer  recalls         R^I    R^E = 1[answer] + .5 * mean     A^E     A^I
#   attempt 0        right   right, wrong    1, 0   1 + .25 = 1.25                  .625    .5, -.5
#   attempt 1        wrong   wrong, wrong    0, 0   0                               -.625   0, 0
REWARDS = [1.25, 0.0]
ADVANTAGES = [0.625, -0.625]
OF_RECALLS = [[0.5, -0.5], [0.0, 0.0]]
ALGORITHM = AlgorithmConfig(advantage="dr_grpo", aggregation="context", group_size=2, kl_coef=1e-3)


async def group(*, algorithm: AlgorithmConfig = ALGORITHM, **reward: Any) -> Group:
    question = document(recall_targets=[["Osvin"]])
    wrong = "\\boxed{nobody}"
    policies = [
        Policy(answer="\\boxed{velmora}", recalls=["\\boxed{osvin}", wrong]),
        Policy(answer=wrong, recalls=[wrong, wrong]),
    ]

    async def rollout(question: Question, *, trajectory_id: str, group_id: str, member: int) -> Trajectory:
        player = MemTrain(build_renderer(), generate=policies[member], search=Library())
        return await player.rollout(question, trajectory_id=trajectory_id, group_id=group_id, member=member)

    return await run_group(
        question,
        rollout,
        group_id="g",
        group_size=2,
        reward=RewardConfig(**{"answer": "em", "wrong_answer": 0.0, **reward}),
        advantage=algorithm,
    )


async def test_equations_1_to_3_by_hand():
    played = (await group()).trajectories
    assert [t.reward for t in played] == pytest.approx(REWARDS, abs=1e-6)
    assert [t.advantage for t in played] == pytest.approx(ADVANTAGES, abs=1e-6)
    for trajectory, expected in zip(played, OF_RECALLS, strict=True):
        assert [recall.context.advantage for recall in trajectory.recalls] == pytest.approx(expected, abs=1e-6)
        assert all(context.advantage is None for context in trajectory.contexts)
    assert [[(m.name, m.value) for m in t.measures] for t in played] == [[("recall", 0.5)], [("recall", 0.0)]]


@pytest.mark.parametrize(("kl_coef", "num_trained"), [(0.0, 10), (1e-3, 12)])
async def test_recall_samples_that_are_all_alike_cost_the_learner_nothing_without_a_kl(kl_coef, num_trained):
    algorithm = {"group_size": 2, "aggregation": "context", "kl_coef": kl_coef}
    roles = Learning(parse_config({"algorithm": algorithm, "learner": {"num_ranks": 1}}))
    train_step(cast(Roles, roles), StepGroups(groups=[await group()], dropped=[], wait_seconds=0.0), step=0)
    ((ranks,),) = roles.taken
    batches = [batch for rank in ranks for batch in rank]
    assert sum(len(batch.sequence_lengths) for batch in batches) == num_trained
    assert np.concatenate([batch.weights for batch in batches]) == pytest.approx(1 / 12), "all are counted"


class Learning:
    """Notes what a learner is given."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.taken: list[Any] = []

    def learn(self, updates: Any, *, first: int, stop: StopRequest) -> list[dict[str, float]]:
        self.taken.append(updates)
        return [{} for _ in updates]

    def sync(self, policy_version: int) -> dict[str, float]:
        return {}


async def test_equation_4_by_hand():
    """The loss is the sum of all token terms over the number of contexts: 2 * 4 of the reading and 2 * 2 of recalls."""
    samples = [sample for trajectory in (await group()).trajectories for sample in to_samples(trajectory)]
    assert len(samples) == 2 * 4 + 2 * 2
    # The policy moved by +0.1 on every token; the reference is at the sampler. Ratio e^.1 is inside of 0.8 to 1.2.
    ratio, kl = math.exp(0.1), math.exp(-0.1) + 0.1 - 1
    expected = 0.0
    for sample in samples:
        expected += sum(sample.loss_mask) * (-sample.advantage * ratio + 1e-3 * kl)
    expected /= 12

    assert packed_loss(samples, "context") == pytest.approx(expected, abs=1e-6)
    # Eq. 4 is an expectation over documents: another document, of which 8 contexts are left, has its own denominator.
    other = [replace(sample, group_id="h", trajectory_id=f"h{sample.trajectory_id}") for sample in samples]
    other = [sample for sample in other if abs(sample.advantage) == pytest.approx(0.625)]
    of_other = sum(sum(sample.loss_mask) * (-sample.advantage * ratio + 1e-3 * kl) for sample in other)
    assert len(other) == 8
    both = [*samples, *other]
    assert packed_loss(both, "question") == pytest.approx((expected + of_other / 8) / 2, abs=1e-6)
    assert packed_loss(both, "context") == pytest.approx((12 * expected + of_other) / 20, abs=1e-6)
    advantages = sorted({round(sample.advantage, 6) for sample in samples})
    assert advantages == [-0.625, -0.5, 0.0, 0.5, 0.625]


def packed_loss(samples: Sequence[TrainingSample], aggregation: Aggregation) -> float:
    """Returns the loss of a step whose policy moved by +0.1 on every token."""
    (batches,) = pack_step(samples, num_ranks=1, max_tokens=100_000, aggregation=aggregation)
    total = 0.0
    for batch in batches:
        old = torch.from_numpy(batch.old_logprobs).double()
        loss, _ = policy_loss(
            old + 0.1,
            old_logprobs=old,
            ref_logprobs=old,
            advantages=torch.from_numpy(batch.advantages).double(),
            weights=torch.from_numpy(batch.weights).double(),
            loss_sequences=torch.from_numpy(batch.loss_sequences),
            context_indices=torch.from_numpy(batch.context_indices),
            config=ALGORITHM,
        )
        total += loss.item()
    return total


async def test_decoupled_rewards_leave_the_recall_out_and_train_it_on_its_own():
    played = (await group(recall_weight=0.0)).trajectories
    assert [t.reward for t in played] == [1.0, 0.0]
    assert [recall.context.advantage for recall in played[0].recalls] == pytest.approx(OF_RECALLS[0])


async def test_recalls_of_all_attempts_may_be_compared_with_each_other():
    played = (await group(algorithm=ALGORITHM.model_copy(update={"recall_group": "question"}))).trajectories
    advantages = [recall.context.advantage for t in played for recall in t.recalls]
    assert advantages == pytest.approx([0.75, -0.25, -0.25, -0.25])


@pytest.mark.parametrize(("match", "right"), [("em", 1.0), ("exact", 0.0)])
async def test_how_a_recall_is_compared_is_a_setting(match, right):
    played = (await group(recall_match=match)).trajectories
    assert [recall.score for recall in played[0].recalls] == [right, 0.0]


async def test_a_question_gives_a_context_per_chunk_answer_and_recall_and_the_reference_scores_each(monkeypatch):
    """Sum of T_i + G1 * G2 contexts; the reference's log-probs stand beside the tokens that they are of."""

    class TokenIds:
        """Says of every token its id, so that a row shows whose it is."""

        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def logprobs(self, samples: Sequence[TrainingSample]) -> list[list[float]]:
            return [list(map(float, sample.token_ids)) for sample in samples]

    monkeypatch.setattr("mempipe.engines.reference.ReferenceModel", TokenIds)
    scored = ReferenceStage(parse_config({})).scored(await group())
    samples = [sample for trajectory in scored.trajectories for sample in to_samples(trajectory)]
    assert len(samples) == 2 * (len(SENTENCES) + 1) + 2 * 2
    assert all(sample.ref_logprobs == sample.token_ids for sample in samples)
    assert [sample.advantage for sample in samples] == [0.625] * 4 + [0.5, -0.5] + [-0.625] * 4 + [0.0, 0.0]
    assert rollout_metrics([scored])["sampled_tokens"] == sum(sum(sample.loss_mask) for sample in samples)
    assert table_to_groups(groups_to_table([scored])) == [scored]
    lines = trajectory_lines(scored.question, scored.trajectories[0])
    assert [line.rpartition(" for ")[2] for line in lines if line.startswith("  recall")] == [
        "'Osvin' of chunk 1: 'osvin', right",
        "'Osvin' of chunk 1: 'nobody', wrong",
    ]


async def test_a_warm_start_imitates_recalls_like_any_other_context():
    assert {sample.advantage for sample in warm_start._samples_of([await group()])} == {1.0}


async def test_the_filter_looks_at_the_answer_and_not_at_the_recall():
    whole = await group()
    assert has_signal(whole)
    same = [t for t in whole.trajectories if t.em == 0] * 2
    assert not has_signal(Group(id="g", question=whole.question, trajectories=same))


async def test_the_filter_may_look_at_the_whole_reward():
    right, wrong = (await group()).trajectories

    def kept(*trajectories: Trajectory) -> bool:
        rescored = with_advantages([replace(t, contexts=[], em=0.0) for t in trajectories], ALGORITHM)
        return has_signal(Group(id="g", question=document(), trajectories=rescored), by="reward")

    assert kept(right, wrong), "whole rewards differ"
    assert kept(right, right), "recalls of one attempt differ"
    assert not kept(wrong, wrong)
    assert kept(wrong, replace(wrong, reward=0.25))
    unequal = replace(right, reward=wrong.reward)
    answers = Group(id="g", question=document(), trajectories=with_advantages([unequal, unequal], ALGORITHM))
    assert not has_signal(answers), "and answers alone are all wrong or all right"


async def test_an_attempt_may_be_asked_for_several_things():
    places = set()
    for number in range(20):
        policy = Policy(answer="\\boxed{x}", recalls=["\\boxed{y}"] * 4)
        played = await play(policy, name=f"g/{number}", num_recalls=4, num_recall_prompts=2)
        asked = Counter((recall.step, recall.chunk, recall.target[0]) for recall in played.recalls)
        assert sorted(asked.values()) == [2, 2]
        assert all(recall.context.memory_before == f"memory {recall.step}" for recall in played.recalls)
        assert [recall.context.index for recall in played.recalls] == [4, 5, 6, 7]
        places |= asked.keys()
    assert places == {(2, 0, "Osvin"), (3, 0, "Osvin"), (3, 1, "Odyssey")}


async def test_a_document_with_fewer_recalls_has_as_many_as_there_are():
    policy = Policy(answer="\\boxed{x}", recalls=["\\boxed{y}"] * 8)
    targets = [["Osvin"], ["Osvin"], ["Odyssey"]]
    played = await play(policy, question=document(recall_targets=targets), num_recalls=8, num_recall_prompts=8)
    asked = Counter((recall.step, recall.chunk) for recall in played.recalls)
    assert sorted(asked.values()) == [2, 3, 3]


def test_one_recall_asks_for_the_same_as_before_there_were_several():
    (one,) = build_renderer(num_recall_prompts=1).probes(document(), seed="g/3")
    assert build_renderer(num_recall_prompts=2).probes(document(), seed="g/3")[0] == one


def test_samples_that_cannot_be_divided_are_refused():
    with pytest.raises(ConfigError, match=r"num_recalls 8 is not a multiple of num_recall_prompts 3"):
        build_renderer(num_recalls=8, num_recall_prompts=3)
