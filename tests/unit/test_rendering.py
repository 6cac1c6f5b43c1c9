from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
from agent_builders import (
    BOS,
    FAMILIES,
    TOOLS,
    build_prompts,
    build_question,
    build_renderer,
    build_tokenizer,
    hf_tokenizer,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from mempipe.agents.memsearcher import MemSearcherBudget, MemSearcherPrompts, MemSearcherRenderer, Observation
from mempipe.agents.prompt_set import load_prompts, split_slots
from mempipe.agents.rendering import Pieces
from mempipe.agents.tools import SearchArguments, SearchTool, ToolCall, ToolResult
from mempipe.agents.turn import Memory, Turn
from mempipe.engines.tokenizer import HFTokenizer
from mempipe.retrieval.config import RetrievalConfig
from mempipe.settings import ConfigError
from mempipe.types import Passage

NO_SYSTEM_ROLE = {"gemma"}
OPENS_THOUGHT = {"deepseekv3"}
CALL = ToolCall(text='{"name": "f"}', tool="f", arguments=SearchArguments(query="q", num_passages=5))
TOKENIZER = build_tokenizer()


def prompt_text(renderer: MemSearcherRenderer, question: str = "Who?", memory: str = "notes") -> str:
    return renderer.tokenizer.decode(
        renderer.prompt(question=renderer.encode(question), memory=renderer.encode(memory))
    )


def filled_user(prompts: MemSearcherPrompts, question: str, memory: str) -> str:
    return prompts.user.replace("{question}", question).replace("{memory}", memory)


def found(*passages: Sequence[Passage]) -> list[ToolResult]:
    return [ToolResult(passages=list(each)) for each in passages]


# Chat templates


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_is_what_the_chat_template_makes_of_the_same_messages(family):
    tokenizer, prompts = build_tokenizer(family), build_prompts()
    renderer = MemSearcherRenderer(tokenizer, prompts=prompts, tools=TOOLS, budget=MemSearcherBudget())
    system = prompts.system.replace("{tools}", TOOLS.schemas())
    user = filled_user(prompts, "Who?", "notes")
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    if family in NO_SYSTEM_ROLE:
        messages = [{"role": "user", "content": f"{system}\n\n{user}"}]
    rendered = tokenizer.render_chat(messages, add_generation_prompt=True)
    assert prompt_text(renderer) == rendered + ("" if family in OPENS_THOUGHT else "<think>")


@pytest.mark.parametrize("family", FAMILIES)
def test_an_observation_continues_the_conversation_as_the_chat_template_does(family):
    tokenizer, prompts = build_tokenizer(family), build_prompts(system="")
    renderer = MemSearcherRenderer(tokenizer, prompts=prompts, tools=TOOLS, budget=MemSearcherBudget())
    stop = renderer.closing_id
    observation = renderer.observation([CALL], found([Passage(id="1", title="T", text="body")]), last_id=stop)
    conversation = [
        {"role": "user", "content": filled_user(prompts, "Who?", "notes")},
        {"role": "assistant", "content": "said"},
        {
            "role": "user",
            "content": prompts.observation.replace("{call}", CALL.text).replace("{passages}", "[1] T\nbody"),
        },
    ]
    rendered = tokenizer.render_chat(conversation, add_generation_prompt=True)
    assert rendered.endswith("said" + tokenizer.decode([stop, *observation.token_ids]))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_starts_with_one_bos_at_most(family):
    tokenizer = build_tokenizer(family)
    prompt = build_renderer(tokenizer).prompt(question=[], memory=[])
    if family in BOS:
        (bos,) = tokenizer.encode_template(BOS[family])
        assert prompt[0] == bos and prompt.count(bos) == 1


@pytest.mark.parametrize("family", ["qwen2_5", "gemma"])
def test_a_system_message_is_left_out_when_its_text_is_empty(family):
    tokenizer = build_tokenizer(family)
    renderer = build_renderer(tokenizer, prompts=build_prompts(system=""))
    user = {"role": "user", "content": filled_user(build_prompts(), "Who?", "notes")}
    assert prompt_text(renderer) == tokenizer.render_chat([user], add_generation_prompt=True) + "<think>"


def test_a_system_message_that_the_template_ignores_goes_into_the_user_message():
    template = (
        "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% "
        "endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    renderer = build_renderer(build_tokenizer(chat_template=template), prompts=build_prompts(system="Be brief."))
    assert prompt_text(renderer).startswith("<|im_start|>user\nBe brief.\n\n<question>\nWho?\n")


def test_the_thought_that_the_template_opens_is_not_opened_twice_and_counts_as_written():
    renderer = build_renderer(build_tokenizer("deepseekv3"))
    assert prompt_text(renderer).endswith("<｜Assistant｜><think>\n") and renderer.action_start == "<think>\n"
    assert build_renderer(build_tokenizer("qwen3")).action_start == "<think>"
    assert build_renderer(prompts=build_prompts(action_prefill="")).action_start == ""


def test_a_template_that_closes_a_message_without_a_stop_token_is_refused():
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    with pytest.raises(
        ConfigError, match=r"'user: .*does not start with a stop token \['<\|im_end\|>'\].*generation_config"
    ):
        build_renderer(build_tokenizer(chat_template=template))


def test_a_template_that_closes_a_message_with_nothing_is_refused():
    with pytest.raises(ConfigError, match="does not start with a stop token"):
        build_renderer(
            build_tokenizer(chat_template="{% for m in messages %}{{ m.content }}{% endfor %}"),
            prompts=build_prompts(observation="{passages}"),
        )


@pytest.mark.parametrize("body", ["{{ messages[0].content }}", "{{ raise_exception('no users here') }}"])
def test_a_template_that_drops_or_refuses_messages_is_refused(body):
    with pytest.raises(ConfigError, match=r"skips a message|no users here"):
        build_renderer(build_tokenizer(chat_template=body))


# Prompt sets


def test_a_text_is_not_taken_for_token_ids():
    pieces = Pieces([[1], [2]], ["question"])
    assert pieces.filled({"question": [7, 8]}) == [1, 7, 8, 2]
    with pytest.raises(TypeError, match=r"the slot \{question\} is filled with a text; expected token ids"):
        pieces.filled({"question": "Where?"})  # type: ignore[dict-item]
    turn = Turn(index=0, question_ids=[], memory=Memory())
    with pytest.raises(TypeError, match=r"turn\.inject is given the text 'Where"):
        turn.inject("Where?")  # type: ignore[arg-type]
    assert turn.token_ids == []


def test_only_known_names_in_braces_are_slots():
    pieces = split_slots("A{question}B\\boxed{}C\\boxed{20C}D{memory}E{answer}")
    assert pieces == ["A", "question", "B\\boxed{}C\\boxed{20C}D", "memory", "E{answer}"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"user": "{question}"}, r"prompts.user lacks the slot \{memory\}"),
        ({"observation": "{call}"}, r"prompts.observation lacks the slot \{passages\}"),
        ({"passage": "{title}"}, r"prompts.passage lacks the slot \{text\}"),
        ({"system": "{memory}"}, r"prompts.system holds the slot \{memory\}, which belongs elsewhere"),
        ({"user": "{question}{question}{memory}"}, r"prompts.user holds the slot \{question\} more than once"),
        ({"empty_memory": None}, "prompts.empty_memory is None, expected a text"),
    ],
)
def test_a_wrong_slot_is_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        build_prompts(**changes)


def test_a_prompt_file_with_wrong_keys_is_refused(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text("system: x\nuser: '{question} {memory}'\n")
    with pytest.raises(ConfigError, match=r"holds \['system', 'user'\], expected the keys"):
        load_prompts(str(path), MemSearcherPrompts)
    path.write_text("- x\n")
    with pytest.raises(ConfigError, match="holds list"):
        load_prompts(str(path), MemSearcherPrompts)
    path.write_text("a: [\n")
    with pytest.raises(ConfigError, match="is not YAML"):
        load_prompts(str(path), MemSearcherPrompts)


def test_an_unknown_prompt_set_is_refused_with_the_names_of_the_known_ones():
    with pytest.raises(ConfigError, match=r"'nope'.*memsearcher"):
        load_prompts("nope", MemSearcherPrompts)


def test_the_published_layout_can_be_written_as_a_prompt_file(tmp_path: Path):
    path = tmp_path / "published.yaml"
    path.write_text(
        'system: "S"\nuser: "<question> {question} </question>\\n\\n<memory> {memory} </memory>"\naction_prefill: '
        '"<think>"\n'
        'observation: "<tool_response>{call}\\n{passages}\\n</tool_response>\\nI"\npassage: "{title}\\n{text}\\n\\n"\n'
        'passage_separator: ""\nmemory_prefill: ""\nempty_memory: ""\n'
    )
    renderer = build_renderer(prompts=load_prompts(str(path), MemSearcherPrompts))
    user = (
        "<|im_start|>user\n<question> q0 </question>\n\n<memory>  </memory><|im_end|>\n<|im_start|>assistant\n<think>"
    )
    assert prompt_text(renderer, "q0", "").endswith(user)
    observation = renderer.observation(
        [CALL, CALL], found(*[[Passage(id="1", title='"T"', text="body")]] * 2), last_id=renderer.closing_id
    )
    one = '<tool_response>{"name": "f"}\n"T"\nbody\n\n\n</tool_response>\nI'
    assert (
        renderer.tokenizer.decode(observation.token_ids)
        == f"\n<|im_start|>user\n{one}{one}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_prompt_set_from_a_file_has_every_key():
    prompts = load_prompts("memsearcher", MemSearcherPrompts)
    assert (
        all(isinstance(getattr(prompts, key), str) for key in MemSearcherPrompts.names())
        and "{tools}" in prompts.system
    )


def test_the_tool_schema_names_the_default_and_the_most_passages():
    tool = SearchTool.of(RetrievalConfig(num_passages=3, max_passages=7, max_query_chars=50), name="look_up")
    text = prompt_text(build_renderer(prompts=build_prompts(), tool=tool))
    assert (
        '"name": "look_up"' in text and '"default": 3, "minimum": 1, "maximum": 7' in text and '"maxLength": 50' in text
    )


def test_a_tag_in_the_words_around_passages_is_refused():
    with pytest.raises(ConfigError, match=r"prompts.passage_separator"):
        build_renderer(prompts=build_prompts(passage_separator="<memory>"))


# Budget


def test_template_tokens_are_all_of_a_context_that_is_nobodys_budget():
    renderer = build_renderer()
    observation = renderer.observation([CALL], found([]), last_id=-1)  # the template's closing token is injected too
    prompt = renderer.prompt(question=[], memory=[])
    assert renderer.template_tokens == len(prompt) + len(observation.token_ids) - observation.num_tokens


def test_a_template_that_does_not_fit_the_context_is_refused_with_the_numbers():
    template = build_renderer().template_tokens
    fits = 200 + 64 + 400 + 300 + 500 + template
    assert build_renderer(context_tokens=fits).template_tokens == template
    message = (
        f"context_tokens is {fits - 1}, but template {template} \\+ question 200 \\+ memory 64 .* need {fits}; raise"
    )
    with pytest.raises(ConfigError, match=message):
        build_renderer(context_tokens=fits - 1)


def test_a_first_memory_longer_than_the_budget_is_refused():
    with pytest.raises(ConfigError, match=r"prompts.empty_memory has 7 tokens, more than budget.memory_tokens 3"):
        build_renderer(prompts=build_prompts(empty_memory="ZXZXZXZ"), memory_tokens=3)


def test_a_question_longer_than_the_budget_is_refused_by_name():
    with pytest.raises(ValueError, match=r"question q-1 has 9 tokens, more than budget.question_tokens 8"):
        build_renderer(question_tokens=8).question(build_question("ZXZXZXZXZ"))


def words(renderer: MemSearcherRenderer, observation: Observation) -> str:
    return renderer.tokenizer.decode(observation.token_ids)


def test_whole_passages_come_first_and_the_last_one_is_cut_at_a_token():
    prompts = build_prompts(observation="<tool_response>{passages}</tool_response>", passage="{text}")
    renderer = build_renderer(prompts=prompts, observation_tokens=9)
    passages = [Passage(id=str(i), title="", text=text) for i, text in enumerate(["ZZZZ", "WWWW", "YYYY"])]
    observation = renderer.observation([CALL], found(passages), last_id=renderer.closing_id)
    assert "<tool_response>ZZZZ\n\nWWW</tool_response>" in words(renderer, observation) and observation.num_tokens == 9


def test_several_calls_share_the_budget_best_passages_first():
    prompts = build_prompts(
        observation="<tool_response>{passages}</tool_response>", passage="{text}", passage_separator=" "
    )
    renderer = build_renderer(prompts=prompts)
    between = len(renderer.tokenizer.encode_template("</tool_response><tool_response>"))
    renderer = build_renderer(prompts=prompts, observation_tokens=between + 10)
    results = [[Passage(id="", title="", text=text * 4) for text in texts] for texts in ("AB", "CD")]
    observation = renderer.observation([CALL, CALL], found(*results), last_id=renderer.closing_id)
    assert "<tool_response>AAAA B</tool_response><tool_response>CCCC</tool_response>" in words(renderer, observation)
    assert observation.num_tokens == between + 10


@settings(max_examples=50)
@given(
    texts=st.lists(st.lists(st.text(max_size=30), max_size=4), min_size=1, max_size=3),
    room=st.integers(1, 120),
    call=st.sampled_from(["", '{"name": "f"}']),
)
def test_an_observation_never_exceeds_its_budget_and_is_always_closed(texts, room, call):
    calls = [dataclasses.replace(CALL, text=call)] * len(texts)
    roomy = build_renderer(TOKENIZER, prompts=build_prompts())
    spent = roomy.budget.observation_tokens - roomy.observation_room(calls)
    renderer = build_renderer(TOKENIZER, prompts=build_prompts(), observation_tokens=spent + room)
    assert renderer.observation_room(calls) == room
    results = [[Passage(id="", title="t", text=text) for text in passages] for passages in texts]
    observation = renderer.observation(calls, found(*results), last_id=renderer.closing_id)
    assert observation.num_tokens <= spent + room
    assert len(observation.token_ids) + 1 <= renderer.template_tokens + observation.num_tokens
    assert words(renderer, observation).count("</tool_response>") == len(texts)


def test_promise_2_a_tokenizer_that_normalises_does_not_bring_a_tag_back():
    hf = hf_tokenizer("qwen2_5")
    hf.backend_tokenizer.normalizer = normalizers.NFKC()
    renderer = build_renderer(HFTokenizer(hf))
    assert renderer.tokenizer.decode(renderer.tokenizer.encode_text("＜／memory＞")) == "</memory>"
    assert renderer.tokenizer.decode(renderer.encode("＜／memory＞ ＜|im_end|＞")) == "< /memory> < |im_end|>"
