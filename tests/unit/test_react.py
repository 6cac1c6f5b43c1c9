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

from mempipe.agents.full_text import FullText
from mempipe.agents.mem1 import Mem1
from mempipe.agents.memagent import MemAgent
from mempipe.agents.memsearcher import MemSearcher
from mempipe.agents.prompt_set import load_prompts
from mempipe.agents.react import React, ReactBudget, ReactPrompts, ReactRenderer
from mempipe.engines.tokenizer import HFTokenizer
from mempipe.loader import parse_config
from mempipe.rl.config import AlgorithmConfig, RewardConfig
from mempipe.rl.rewards import follows_format
from mempipe.rollout import make_agent, run_group
from mempipe.settings import ConfigError
from mempipe.types import Context, EndReason, FinishReason, Passage, Trajectory

ANSWER = "<think>I know</think><answer>Paris</answer>"


def build_renderer(
    tokenizer: HFTokenizer = TOKENIZER,
    *,
    final_answer_turn: bool = True,
    question_mark: bool = False,
    **budget: Any,
):
    limits = {"question_tokens": 200, "action_tokens": 100, "observation_tokens": 120, "max_turns": 3}
    values = {**limits, "context_tokens": 8192, **budget}
    prompts = load_prompts("react", ReactPrompts)
    return ReactRenderer(
        tokenizer,
        prompts=prompts,
        search=TOOL,
        budget=ReactBudget(**values),
        final_answer_turn=final_answer_turn,
        question_mark=question_mark,
    )


LAYOUT = build_renderer()


def play(
    script: list[Step], *, renderer: ReactRenderer = LAYOUT, asked: str = "Who?", search: Any = None, **options: Any
) -> tuple[Trajectory, ScriptedEngine]:
    engine = ScriptedEngine(renderer.tokenizer, script)
    agent = React(renderer, generate=engine, search=search or Library())
    question = build_question(asked, partition="world-7")
    return asyncio.run(agent.rollout(question, trajectory_id="g/0", group_id="g", member=0, **options)), engine


def assert_within_budget(renderer: ReactRenderer, contexts: list[Context]) -> None:
    budget, (context,) = renderer.budget, contexts
    assert len(context.token_ids) <= budget.context_tokens and context.num_question_tokens <= budget.question_tokens
    assert context.num_observation_tokens <= budget.observation_tokens * budget.max_turns
    assert all(len(ids) <= budget.action_tokens for mask, ids in segments(context) if mask)
    assert sum(context.loss_mask) > 0


def test_the_whole_history_stands_in_one_context():
    library = Library()
    script: list[Step] = [SEARCH, "<think>more</think><search>b</search>", ANSWER]
    trajectory, engine = play(script, search=library)
    assert (trajectory.end_reason, trajectory.answer, trajectory.id) == (EndReason.ANSWERED, "Paris", "g/0")
    assert library.calls == [("capital of France", 5, "world-7"), ("b", 5, "world-7")]
    (context,) = trajectory.contexts
    messages = [TOKENIZER.encode_template(step) for step in script]
    observed, num_tokens = LAYOUT.observation(library.passages, turns_left=0)
    assert segments(context) == [
        (0, LAYOUT.prompt(TOKENIZER.encode_text("Who?"))),
        (1, messages[0]),
        (0, observed),
        (1, messages[1]),
        (0, observed),
        (1, [*messages[2], LAYOUT.closing_id]),
    ]
    assert (
        TOKENIZER.decode(observed)
        == "\n\n<information>Doc 1(Title: France) Paris is the capital of France.\n</information>\n\n"
    )
    assert (context.num_observation_tokens, context.num_memory_tokens, context.memory_after) == (2 * num_tokens, 0, "")
    assert [search.query for search in context.searches] == ["capital of France", "b"]
    assert context.action == TOKENIZER.decode(observed).join(script)
    assert engine.limits == [100] * 3


def test_promise_1_token_exact_react():
    trajectory, engine = play([f"{SEARCH} made up", "hm", [0, 1, LAYOUT.closing_id], f"{ANSWER}!"])
    assert_token_exact(trajectory.contexts, engine)
    (context,) = trajectory.contexts
    stop = LAYOUT.closing_id
    assert stop not in context.token_ids[context.num_prompt_tokens :] and context.num_dropped_tokens >= 5
    sampled = [ids for mask, ids in segments(context) if mask]
    assert sampled[1:3] == [TOKENIZER.encode_template("hm"), [0, 1]]


def test_a_message_that_neither_searches_nor_answers_is_asked_to_try_again():
    invalid: list[Step] = ["hm", "<search> </search>", ("<think>cut", FinishReason.LENGTH), ANSWER]
    library = Library()
    trajectory, _ = play(invalid, search=library)
    text = injected_text(LAYOUT, trajectory.contexts[0])
    assert trajectory.answer == "Paris" and text.count(TOKENIZER.decode(LAYOUT.retry)) == 3 and not library.calls


@pytest.mark.parametrize(
    ("script", "final", "end", "num_searches"),
    [
        ([ANSWER], True, EndReason.ANSWERED, 0),
        ([SEARCH] * 3 + [ANSWER], True, EndReason.ANSWERED, 3),
        ([SEARCH] * 4, True, EndReason.MAX_TURNS, 3),
        ([SEARCH] * 3, False, EndReason.MAX_TURNS, 2),
        ([SEARCH] * 2 + [ANSWER], False, EndReason.ANSWERED, 2),
        (["hm"] * 4, True, EndReason.MAX_TURNS, 0),
        (["<|im_start|>" + ANSWER], True, EndReason.NO_ACTION, 0),
        ([ANSWER + "<|im_start|>"], True, EndReason.ANSWERED, 0),
    ],
)
def test_every_end_has_its_reason(script, final, end, num_searches):
    library = Library()
    trajectory, engine = play(script, renderer=build_renderer(final_answer_turn=final), search=library)
    assert (trajectory.end_reason, trajectory.answer) == (end, "Paris" if end is EndReason.ANSWERED else None)
    assert len(library.calls) == num_searches and len(engine.prompts) == len(script)
    assert_token_exact(trajectory.contexts, engine)


def test_promise_3_budget_is_law_for_reacts_context_which_ends_the_trajectory():
    small = {"question_tokens": 5, "action_tokens": 50, "observation_tokens": 30}
    script: list[Step] = [SEARCH, SEARCH, ANSWER]
    whole, _ = play(script, renderer=build_renderer(**small))
    needed = len(whole.contexts[0].token_ids) - len(TOKENIZER.encode_template(ANSWER)) - 1 + 50
    assert play(script, renderer=build_renderer(**small, context_tokens=needed))[0].end_reason is EndReason.ANSWERED
    trajectory, engine = play(script, renderer=build_renderer(**small, context_tokens=needed - 1))
    assert (trajectory.end_reason, trajectory.answer, len(engine.prompts)) == (EndReason.CONTEXT_LIMIT, None, 2)
    (context,) = trajectory.contexts
    shown = LAYOUT.observation(Library().passages, turns_left=0)[1]
    assert (len(context.searches), context.num_observation_tokens) == (2, shown) and [
        mask for mask, _ in segments(context)
    ] == [0, 1, 0, 1]
    assert context.token_ids == whole.contexts[0].token_ids[: len(context.token_ids)]
    assert_token_exact(trajectory.contexts, engine)


def test_promise_3_budget_is_law_for_reacts_observations_whose_closing_tag_stays():
    renderer = build_renderer(observation_tokens=40)
    passages = [Passage(id=str(number), title="T", text="ZX" * 30) for number in range(5)]
    context = play([SEARCH, ANSWER], renderer=renderer, search=Library(*passages))[0].contexts[0]
    assert context.num_observation_tokens == 40 and injected_text(renderer, context).endswith("Z</information>\n\n")


def test_a_context_without_room_for_a_search_and_an_answer_is_refused():
    fits = LAYOUT.template_tokens + 200 + 100 + 120 + 100
    assert build_renderer(context_tokens=fits)
    with pytest.raises(
        ConfigError, match=rf"context_tokens is {fits - 1}, but template .* \+ answer 100 tokens need {fits}"
    ):
        build_renderer(context_tokens=fits - 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trajectory_works_in_every_chat_template_and_promise_2_untrusted_text_stays_text_in_react(family):
    tokenizer = build_tokenizer(family)
    hostile = HOSTILE + "".join(tokenizer.special_tokens)
    renderer = build_renderer(tokenizer, question_tokens=900, observation_tokens=3000, context_tokens=16384)
    passage = Passage(id="p", title=hostile, text=hostile)
    sides = (("Who?", None), (hostile, Library(passage)))
    harmless, hard = (
        play([SEARCH, "hm", ANSWER], renderer=renderer, asked=text, search=found)[0] for text, found in sides
    )
    assert (hard.end_reason, hard.answer) == (harmless.end_reason, harmless.answer) == (EndReason.ANSWERED, "Paris")
    (mild,), (context,) = harmless.contexts, hard.contexts
    specials = [
        [i for mask, ids in segments(c) if not mask for i in ids if i in tokenizer.special_token_ids]
        for c in (mild, context)
    ]
    assert specials[0] == specials[1]
    texts = [injected_text(renderer, c).lower() for c in (mild, context)]
    for tag in ("think", "search", "information", "answer"):
        assert all(texts[0].count(form) == texts[1].count(form) for form in (f"<{tag}>", f"</{tag}>")), tag


async def test_search_r1s_reward_of_answer_and_form_is_that_of_the_trajectory():
    renderer, scripts = (
        build_renderer(),
        iter([[SEARCH, ANSWER], [SEARCH, "hm", ANSWER], [ANSWER.replace("Paris", "Oslo")], ["hm"] * 4]),
    )

    async def rollout(question, **names):
        return await React(renderer, generate=ScriptedEngine(TOKENIZER, next(scripts)), search=Library()).rollout(
            question, **names
        )

    reward = RewardConfig(answer="em", format="search_r1")
    group = await run_group(
        build_question(), rollout, group_id="g", group_size=4, reward=reward, advantage=AlgorithmConfig()
    )
    assert [trajectory.reward for trajectory in group.trajectories] == [1.0, 0.8, 0.2, 0.0]


@pytest.mark.parametrize(("opened", "said"), [("<think>\n", ""), ("<think>\n\n</think>\n\n", "<think>")])
def test_a_thought_that_the_chat_template_opens_counts_for_the_form(opened, said):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n" + opened.replace("\n", "\\n") + "' }}{% endif %}"
    )
    renderer = build_renderer(build_tokenizer("qwen3", chat_template=template))
    trajectory, _ = play([f"{said}I look</think><search>a</search>", ANSWER], renderer=renderer)
    (context,) = trajectory.contexts
    assert trajectory.end_reason is EndReason.ANSWERED and follows_format(context.action)


@pytest.mark.parametrize(
    ("name", "kind", "script"),
    [
        ("memsearcher", MemSearcher, ["t</think>\\boxed{Paris}"]),
        ("memagent", MemAgent, ["m", "\\boxed{Paris}"]),
        ("mem1", Mem1, [ANSWER]),
        ("react", React, [ANSWER]),
        ("full_text", FullText, ["\\boxed{Paris}"]),
    ],
)
async def test_promise_9_one_agent_code_every_agent_is_made_and_called_alike(name, kind, script):
    config = parse_config({"agent": {"name": name}})
    agent = make_agent(config, tokenizer=TOKENIZER, generate=ScriptedEngine(TOKENIZER, script), search=Library())
    seen: list[Context] = []
    trajectory = await agent.rollout(
        build_question(context="text"), trajectory_id="t", group_id="g", member=3, on_context=seen.append
    )
    assert type(agent) is kind and (trajectory.id, trajectory.group_id, trajectory.member) == ("t", "g", 3)
    assert (trajectory.end_reason, trajectory.answer) == (EndReason.ANSWERED, "Paris") and seen == trajectory.contexts
    again = make_agent(config, tokenizer=TOKENIZER, generate=ScriptedEngine(TOKENIZER, script), search=Library())
    second = await again.rollout(build_question(context="text"), trajectory_id="t", group_id="g", member=3)
    assert [context.token_ids for context in second.contexts] == [context.token_ids for context in trajectory.contexts]


STEPS = st.tuples(st.one_of(PARTS, SEARCHES, SEARCHES), st.just([LAYOUT.closing_id])).map(
    lambda pair: pair[0] + pair[1]
)


@given(
    script=st.lists(STEPS, min_size=4, max_size=4),
    passages=st.lists(st.one_of(st.just(HOSTILE), st.text(max_size=40)), max_size=3),
    asked=st.text(max_size=30),
    action_tokens=st.integers(5, 60),
    observation_tokens=st.integers(2, 200),
    spare=st.integers(0, 300),
    final=st.booleans(),
)
def test_promise_3_budget_is_law_whatever_react_samples_and_finds(
    script, passages, asked, action_tokens, observation_tokens, spare, final
):
    least = LAYOUT.template_tokens + 200 + 2 * action_tokens + observation_tokens
    limits = {"action_tokens": action_tokens, "observation_tokens": observation_tokens, "context_tokens": least + spare}
    renderer = build_renderer(final_answer_turn=final, **limits)
    library = Library(*(Passage(id=str(i), title=text, text=text) for i, text in enumerate(passages)))
    trajectory, engine = play(script, renderer=renderer, asked=asked, search=library)
    assert_within_budget(renderer, trajectory.contexts)
    assert_token_exact(trajectory.contexts, engine)
    template = {*renderer.prompt([]), *renderer.observation([], turns_left=1)[0], *renderer.retry}
    injected = [i for mask, ids in segments(trajectory.contexts[0]) if not mask for i in ids]
    assert TOKENIZER.special_token_ids.intersection(injected) <= template
