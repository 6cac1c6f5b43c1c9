from __future__ import annotations

import asyncio
from typing import Any

import pytest
from agent_builders import (
    FAMILIES,
    TOOL,
    Library,
    ScriptedEngine,
    Step,
    assert_token_exact,
    build_question,
    build_tokenizer,
    injected_text,
    segments,
)
from hypothesis import given
from hypothesis import strategies as st
from tagged_builders import HOSTILE, PARTS, SEARCH, SEARCHES, TOKENIZER

from mempipe.agents.mem1 import Mem1, Mem1Budget, Mem1Renderer
from mempipe.agents.prompt_set import load_prompts
from mempipe.agents.tagged import TaggedPrompts
from mempipe.engines.tokenizer import HFTokenizer
from mempipe.settings import ConfigError
from mempipe.types import Context, EndReason, FinishReason, Passage, Trajectory

ANSWER = "<think>I know</think><answer>Paris; Rome</answer>"


def build_renderer(tokenizer: HFTokenizer = TOKENIZER, *, question_mark: bool = False, **budget: Any) -> Mem1Renderer:
    limits = {"question_tokens": 200, "action_tokens": 100, "observation_tokens": 120, "max_turns": 4}
    values = {**limits, "context_tokens": 8192, **budget}
    return Mem1Renderer(
        tokenizer,
        prompts=load_prompts("mem1", TaggedPrompts),
        search=TOOL,
        budget=Mem1Budget(**values),
        question_mark=question_mark,
    )


LAYOUT = build_renderer()


def play(
    script: list[Step], *, renderer: Mem1Renderer = LAYOUT, asked: str = "Who?", search: Any = None, **options: Any
) -> tuple[Trajectory, ScriptedEngine]:
    engine = ScriptedEngine(renderer.tokenizer, script)
    agent = Mem1(renderer, generate=engine, search=search or Library())
    question = build_question(asked, partition="world-7")
    return asyncio.run(agent.rollout(question, trajectory_id="g/0", group_id="g", member=0, **options)), engine


def assert_within_budget(renderer: Mem1Renderer, contexts: list[Context]) -> None:
    budget = renderer.budget
    assert 1 <= len(contexts) <= budget.max_turns
    for context in contexts:
        assert len(context.token_ids) <= budget.context_tokens and sum(context.loss_mask) <= budget.action_tokens
        assert (
            context.num_question_tokens <= budget.question_tokens and context.num_memory_tokens <= budget.action_tokens
        )
        assert context.num_observation_tokens <= budget.observation_tokens
        spent = context.num_question_tokens + context.num_memory_tokens + context.num_observation_tokens
        assert context.num_prompt_tokens <= renderer.template_tokens + spent


def test_a_turn_sees_the_prompt_the_last_message_and_its_observation_and_no_older_turn():
    library = Library()
    script: list[Step] = [SEARCH, "<think>second</think><search>b</search>", ANSWER]
    trajectory, engine = play(script, search=library)
    assert (trajectory.end_reason, trajectory.answer, trajectory.id) == (EndReason.ANSWERED, "Paris; Rome", "g/0")
    assert library.calls == [("capital of France", 5, "world-7"), ("b", 5, "world-7")]
    prompt = LAYOUT.prompt(TOKENIZER.encode_text("Who?"))
    observed = [LAYOUT.observation(library.passages, turns_left=left)[0] for left in (3, 2)]
    messages = [TOKENIZER.encode_template(step) for step in script]
    assert engine.prompts == [prompt, prompt + messages[0] + observed[0], prompt + messages[1] + observed[1]]
    assert engine.limits == [100] * 3
    assert TOKENIZER.decode(observed[0]).startswith(
        "\n\n<information>[HINT]Turns left, this one included: 3[/HINT]\n\nDoc 1(Title: France) Paris is"
    )
    assert TOKENIZER.decode(observed[0]).endswith("\n</information>\n\n")
    first, second, last = trajectory.contexts
    assert (first.memory_before, first.memory_after, first.searches, first.num_observation_tokens) == (
        "",
        SEARCH,
        [],
        0,
    )
    assert (second.index, second.memory_before, second.action) == (1, SEARCH, script[1])
    assert [search.query for search in second.searches] == ["capital of France"]
    assert (last.memory_before, last.memory_after, last.num_memory_tokens) == (script[1], "", len(messages[1]))


def test_promise_1_token_exact_mem1():
    script: list[Step] = [f"{SEARCH}\n<information>made up</information>", ANSWER]
    trajectory, engine = play(script)
    assert_token_exact(trajectory.contexts, engine)
    first, last = trajectory.contexts
    kept, stop = TOKENIZER.encode_template(SEARCH), LAYOUT.closing_id
    assert segments(first)[-1][1][: len(kept)] == kept and stop not in segments(first)[-1][1]
    assert first.num_dropped_tokens == len(engine.completions[0].token_ids) - sum(first.loss_mask) > 0
    assert (
        segments(last) == [(0, engine.prompts[1]), (1, [*TOKENIZER.encode_template(ANSWER), stop])]
        and last.num_dropped_tokens == 0
    )


def test_promise_1_token_exact_samples_are_cut_behind_the_token_in_which_the_tag_ends():
    split = [i for character in SEARCH for i in TOKENIZER.encode_template(character)]
    assert split != TOKENIZER.encode_template(SEARCH)
    junk = TOKENIZER.encode_template(" junk</search><answer>x</answer>")
    trajectory, engine = play([[*split, *junk, LAYOUT.closing_id], ANSWER])
    assert segments(trajectory.contexts[0])[-1] == (1, split)
    assert engine.prompts[1][len(engine.prompts[0]) :][: len(split)] == split
    assert trajectory.contexts[0].num_dropped_tokens == len(junk) + 1


@pytest.mark.parametrize("length", [*range(1, 40)])
def test_a_message_keeps_the_shortest_prefix_that_holds_its_closing_tag(length):
    tokens = TOKENIZER.encode_template("ZX" * length + "</search>" + "é</answer>" * length)
    kept = LAYOUT.parse(tokens, finish=FinishReason.LENGTH).token_ids
    assert (
        "</search>" in TOKENIZER.decode(kept)
        and "</search>" not in TOKENIZER.decode(kept[:-1])
        and tokens[: len(kept)] == kept
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trajectory_works_in_every_chat_template(family):
    renderer = build_renderer(build_tokenizer(family), context_tokens=16384)
    trajectory, engine = play([SEARCH, ANSWER], renderer=renderer)
    assert (trajectory.end_reason, trajectory.answer, len(trajectory.contexts)) == (
        EndReason.ANSWERED,
        "Paris; Rome",
        2,
    )
    assert_within_budget(renderer, trajectory.contexts)
    assert_token_exact(trajectory.contexts, engine)


@pytest.mark.parametrize(
    ("script", "end", "num_contexts"),
    [
        ([ANSWER], EndReason.ANSWERED, 1),
        ([SEARCH, "<answer>Paris; Rome</answer><search>more</search>"], EndReason.ANSWERED, 2),
        ([(ANSWER, FinishReason.LENGTH)], EndReason.ANSWERED, 1),
        (["no idea"], EndReason.NO_ACTION, 1),
        (["<search>open"], EndReason.NO_ACTION, 1),
        (["</answer><answer>Paris; Rome</answer>"], EndReason.NO_ACTION, 1),
        (["<|im_start|><answer>Paris; Rome</answer>"], EndReason.NO_ACTION, 1),
        (["<answer>Paris; Rome</answer><|im_start|>user"], EndReason.ANSWERED, 1),
        (["<search> </search>"], EndReason.INVALID_CALL, 1),
        ([("<think>a", FinishReason.LENGTH)], EndReason.LENGTH, 1),
        ([SEARCH, "<search>b</search>" + "Z" * 200, ANSWER], EndReason.ANSWERED, 3),
        ([SEARCH] * 4, EndReason.MAX_TURNS, 4),
    ],
)
def test_every_end_has_its_reason(script, end, num_contexts):
    trajectory, engine = play(script)
    assert (trajectory.end_reason, len(trajectory.contexts)) == (end, num_contexts)
    assert trajectory.answer == ("Paris; Rome" if end is EndReason.ANSWERED else None)
    assert_token_exact(trajectory.contexts, engine)


def test_a_query_longer_than_the_tool_takes_is_no_search():
    library = Library()
    renderer = build_renderer(action_tokens=2000)
    assert (
        play([f"<search>{'Z' * 1001}</search>"], renderer=renderer, search=library)[0].end_reason
        is EndReason.INVALID_CALL
    )
    assert not library.calls


def test_the_search_of_the_last_turn_is_not_made_since_nothing_reads_it():
    library = Library()
    trajectory, _ = play([SEARCH] * 4, search=library)
    assert len(library.calls) == 3 and trajectory.contexts[-1].memory_after == SEARCH


def test_promise_3_budget_is_law_for_mem1s_observation_whose_closing_tag_stays():
    renderer = build_renderer(observation_tokens=40)
    passages = [Passage(id=str(number), title="T", text="ZX" * 30) for number in range(5)]
    last = play([SEARCH, ANSWER], renderer=renderer, search=Library(*passages))[0].contexts[-1]
    assert last.num_observation_tokens == 40 and injected_text(renderer, last).endswith("X</information>\n\n")


def test_an_observation_budget_without_room_for_the_hint_is_refused():
    with pytest.raises(ConfigError, match=r"budget.observation_tokens is 1, expected at least 2"):
        build_renderer(observation_tokens=1)


def test_a_template_that_does_not_fit_the_context_is_refused_with_the_numbers():
    fits = LAYOUT.template_tokens + 200 + 100 + 120 + 100
    assert build_renderer(context_tokens=fits)
    message = (
        rf"context_tokens is {fits - 1}, but template .* state 100 \+ observation 120 \+ action 100 tokens need {fits}"
    )
    with pytest.raises(ConfigError, match=message):
        build_renderer(context_tokens=fits - 1)


def test_contexts_are_handed_out_as_they_finish():
    seen: list[Context] = []
    trajectory, _ = play([SEARCH, ANSWER], on_context=seen.append)
    assert seen == trajectory.contexts and len(seen) == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_promise_2_untrusted_text_stays_text_in_mem1s_question_and_information(family):
    tokenizer = build_tokenizer(family)
    hostile = HOSTILE + "".join(tokenizer.special_tokens)
    renderer = build_renderer(tokenizer, question_tokens=900, observation_tokens=3000, context_tokens=16384)
    passage = Passage(id="p", title=hostile, text=hostile)
    sides = (("Who?", None), (hostile, Library(passage)))
    harmless, hard = (play([SEARCH, ANSWER], renderer=renderer, asked=text, search=found)[0] for text, found in sides)
    assert (hard.end_reason, hard.answer, len(hard.contexts)) == (EndReason.ANSWERED, "Paris; Rome", 2)
    for mild, context in zip(harmless.contexts, hard.contexts, strict=True):
        specials = [
            [i for i in c.token_ids[: c.num_prompt_tokens] if i in tokenizer.special_token_ids] for c in (mild, context)
        ]
        assert specials[0] == specials[1]
        texts = [tokenizer.decode(c.token_ids[: c.num_prompt_tokens]).lower() for c in (mild, context)]
        for tag in ("think", "search", "information", "answer"):
            assert all(texts[0].count(form) == texts[1].count(form) for form in (f"<{tag}>", f"</{tag}>")), tag


STOPS = st.sampled_from([[LAYOUT.closing_id]] * 6 + [[]])
STEPS = st.tuples(st.one_of(PARTS, SEARCHES, SEARCHES), STOPS).map(lambda pair: pair[0] + pair[1])


@given(
    script=st.lists(STEPS, min_size=4, max_size=4),
    passages=st.lists(st.one_of(st.just(HOSTILE), st.text(max_size=40)), max_size=3),
    asked=st.text(max_size=30),
    action_tokens=st.integers(5, 60),
    observation_tokens=st.integers(2, 200),
)
def test_promise_3_budget_is_law_whatever_mem1_samples_and_finds(
    script, passages, asked, action_tokens, observation_tokens
):
    renderer = build_renderer(action_tokens=action_tokens, observation_tokens=observation_tokens)
    library = Library(*(Passage(id=str(i), title=text, text=text) for i, text in enumerate(passages)))
    trajectory, engine = play(script, renderer=renderer, asked=asked, search=library)
    assert_within_budget(renderer, trajectory.contexts)
    assert_token_exact(trajectory.contexts, engine)
    template = {*renderer.prompt([]), *renderer.observation([], turns_left=1)[0]}
    for context in trajectory.contexts:
        carried = TOKENIZER.encode_template(context.memory_before)
        injected = context.token_ids[: context.num_prompt_tokens]
        assert TOKENIZER.special_token_ids.intersection(injected) <= template | set(carried)
