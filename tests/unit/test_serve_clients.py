"""Ordinary OpenAI clients against the agent service, unchanged: what they send is taken, refused by name, or listed."""

from __future__ import annotations

import asyncio
import json
import math
import typing
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from service_builders import CONFIGS, QUESTIONS, Service, build_service, config_with_instructions, running

from mempipe.answers.api import AnswerReply
from mempipe.answers.conversation import fitted
from mempipe.engines.config import SamplingConfig
from mempipe.loader import load_config
from mempipe.openai_api.chat_api import ChatMessage, ChatRequest
from mempipe.openai_api.chat_reading import history
from mempipe.rollout import make_renderer
from mempipe.serve.http.keys import new_key

TWO_HOPS = next(question for question in QUESTIONS if question.num_hops == 2)
GOLD = TWO_HOPS.golden_answers[0]
IGNORED = "x-mempipe-ignored"


@pytest.fixture(scope="module")
def shared(tokenizer, tmp_path_factory) -> Iterator[Service]:
    service = build_service(tokenizer, tmp_path_factory.mktemp("state"), record=lambda *played: PLAYED.append(played))
    with running(service):
        yield service


PLAYED: list[Any] = []


@pytest.fixture
def service(shared) -> Iterator[Service]:
    for kept in (shared.engine.prompts, shared.engine.samplings, shared.engine.limits, shared.engine.seeds, PLAYED):
        kept.clear()
    yield shared
    shared.engine.says.clear()
    shared.engine.logprob = 0.0


@pytest.fixture(scope="module")
def instructed(tokenizer, tmp_path_factory) -> Iterator[Service]:
    """A service whose prompt set has a place for instructions."""
    folder = tmp_path_factory.mktemp("instructed")
    service = build_service(tokenizer, folder, agents={"memsearcher": config_with_instructions(folder)})
    with running(service):
        yield service


def client_of(service: Service) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=20)


def user(text: str = TWO_HOPS.text) -> dict[str, Any]:
    return {"role": "user", "content": text}


def send(service: Service, *messages: dict[str, Any], **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "messages": list(messages) or [user()], **fields}
    return httpx.post(f"{service.url}/v1/chat/completions", json=body, timeout=20)


def content_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def box(answer: str) -> str:
    return f"I know</think>\\boxed{{ {answer}}}"


# Every field of the API.


def test_every_field_of_the_openai_client_is_a_field_here():
    assert set(typing.get_type_hints(CompletionCreateParamsBase)) <= set(ChatRequest.model_fields)


NOTHING = {
    "audio": None,
    "frequency_penalty": 0,
    "function_call": "auto",
    "functions": [],
    "logit_bias": {},
    "logprobs": False,
    "metadata": None,
    "modalities": ["text"],
    "moderation": None,
    "n": 1,
    "parallel_tool_calls": True,
    "prediction": {"type": "content", "content": "x"},
    "presence_penalty": 0.0,
    "prompt_cache_key": "a",
    "prompt_cache_retention": "24h",
    "reasoning_effort": "low",
    "response_format": {"type": "text"},
    "safety_identifier": "b",
    "seed": None,
    "service_tier": "auto",
    "stop": None,
    "store": False,
    "stream": None,
    "stream_options": None,
    "temperature": None,
    "tool_choice": "none",
    "tools": [],
    "top_logprobs": 0,
    "top_p": None,
    "user": "ann",
    "verbosity": "low",
    "web_search_options": None,
    "max_tokens": None,
    "max_completion_tokens": None,
    "mempipe": None,
}


def test_what_has_no_meaning_is_taken_and_listed(service):
    answer = send(service, **NOTHING)
    assert content_of(answer) == GOLD
    meaningful = {"logprobs", "metadata", "n", "seed", "stop", "stream", "stream_options", "temperature", "top_p"}
    meaningful |= {"max_tokens", "max_completion_tokens", "mempipe"}
    assert answer.headers[IGNORED] == ", ".join(sorted(NOTHING.keys() - meaningful))
    assert IGNORED not in send(service).headers


def test_the_official_client_sees_the_header_in_a_stream_too(service):
    asked = {"model": "tiny", "messages": [user()], "user": "ann", "stream": True}
    with client_of(service).chat.completions.with_streaming_response.create(**asked) as answer:
        assert answer.headers[IGNORED] == "user"
        assert GOLD in answer.read().decode()


REFUSED: dict[str, Any] = {
    "audio": {"voice": "alloy", "format": "mp3"},
    "frequency_penalty": 0.5,
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "logit_bias": {"5": 1},
    "modalities": ["text", "audio"],
    "moderation": {"model": "omni"},
    "presence_penalty": -1,
    "response_format": {"type": "json_object"},
    "tool_choice": "required",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "top_logprobs": 3,
    "web_search_options": {},
    "n": 99,
    "max_tokens": 0,
    "stop": 5,
    "seed": "x",
    "nonsense": 1,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_had_is_refused_by_name(service, name):
    with pytest.raises(openai.BadRequestError) as refused:
        client_of(service).chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], extra_body={name: REFUSED[name]}
        )
    assert name in refused.value.message and refused.value.param == name
    assert refused.value.type == "invalid_request_error"


def test_of_tools_and_a_choice_among_them_the_tools_are_refused(service):
    fields = {name: REFUSED[name] for name in ("tool_choice", "tools")}
    assert send(service, **fields).json()["error"]["param"] == "tools"


def test_a_refusal_of_many_tools_is_short_and_names_the_first(service):
    """Open WebUI sends its own tools with every question of its page, and shows the refusal to its users."""
    properties = {name: {"default": 0, "description": f"Number of {name} to subtract"} for name in ("days", "weeks")}
    function = {"name": "calculate_timestamp", "description": "Get the current Unix timestamp. " * 20}
    function["parameters"] = {"properties": properties, "type": "object"}
    message = send(service, tools=[{"type": "function", "function": function}] * 9).json()["error"]["message"]
    assert "'name': 'calculate_timestamp'" in message and message.endswith("cannot do; leave it out or send []")
    assert len(message) < 250


def test_a_token_limit_bounds_every_message_of_the_policy(service):
    assert content_of(send(service, max_tokens=30)) == GOLD
    assert set(service.engine.limits) == {30}
    answer = send(service, max_tokens=30, max_completion_tokens=3).json()
    assert service.engine.limits[-1] == 3
    assert (answer["choices"][0]["finish_reason"], answer["choices"][0]["message"]["content"]) == ("length", "")
    content_of(send(service, max_tokens=10_000_000))
    assert max(service.engine.limits) < 1000  # the agent's own limits hold


@pytest.mark.parametrize("fields", [{"n": 1.0}, {"max_tokens": 30.0}, {"max_completion_tokens": 30.0}, {"seed": 3.0}])
def test_a_whole_number_may_be_written_as_a_float(service, fields):
    """Sliders of chat clients and JSON of some languages do that; the schema's type `integer` allows it."""
    assert content_of(send(service, **fields)) == GOLD
    body = {"question": TWO_HOPS.text, "num_samples": 1.0, "sampling": {"top_k": 5.0, "max_tokens": 30.0}}
    assert httpx.post(f"{service.url}/v1/answer", json=body, timeout=20).json()["answer"] == GOLD
    assert service.engine.samplings[-1] == SamplingConfig(temperature=0.0, top_k=5)
    (name,) = fields
    for wrong in (1.5, "1", True, 1e300):
        refused = send(service, **{name: wrong})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "answer"])
def test_the_smallest_nucleus_is_the_likeliest_token(service, path):
    asked: dict[str, Any] = {"temperature": 1.0, "top_p": 0}
    body: dict[str, Any] = {"model": "tiny", "messages": [user()], **asked}
    if path != "chat/completions":
        field = {"completions": "prompt", "responses": "input", "answer": "question"}[path]
        body = {field: TWO_HOPS.text} | ({"sampling": asked} if path == "answer" else {"model": "tiny", **asked})
    answer = httpx.post(f"{service.url}/v1/{path}", json=body, timeout=20)
    assert answer.status_code == 200 and set(service.engine.samplings) == {SamplingConfig(temperature=0.0)}
    assert "n is 2 at top_p 0" in send(service, n=2, top_p=0).json()["error"]["message"]


def test_the_answer_ends_before_a_stop_text(service):
    for stop, expected in (("or", "Lima"), (["zzz", " or", "Lim"], ""), ("", "Lima or Oslo"), (["Oslo"], "Lima or ")):
        service.engine.says[:] = [box("Lima or Oslo")]
        answer = send(service, user("where?"), stop=stop)
        assert content_of(answer).rstrip() == expected.rstrip()
        assert answer.json()["choices"][0]["finish_reason"] == "stop"


def test_an_answer_has_no_blanks_around_it_whoever_asks(service):
    service.engine.says[:] = [box("Lima")] * 3
    assert httpx.post(f"{service.url}/v1/answer", json={"question": "where?"}, timeout=20).json()["answer"] == "Lima"
    assert content_of(send(service, user("where?"))) == "Lima"


def test_the_same_seed_gives_every_call_the_same_seed_again(service):
    for seed in (7, 7, 8, None):
        content_of(send(service, seed=seed))
    seeds = service.engine.seeds
    a_question = len(seeds) // 4
    first, second, third, none = (seeds[i : i + a_question] for i in range(0, len(seeds), a_question))
    assert first == second and len(set(first)) == a_question == 5
    assert set(first).isdisjoint(third) and set(none) == {None}


def test_n_gives_a_choice_for_each_attempt_the_most_frequent_first(service):
    service.engine.says[:] = [box("Oslo"), box("Lima"), box("Lima")]
    reply = client_of(service).chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "where?"}], n=3
    )
    said = [choice.message.content for choice in reply.choices]
    assert (said[0], sorted(map(str, said))) == ("Lima", ["Lima", "Lima", "Oslo"])
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert service.engine.samplings == [SamplingConfig(temperature=1.0)] * 3  # greedy ones would all be the same
    assert reply.model_extra["mempipe"]["confidence"] == pytest.approx(2 / 3)
    refused = send(service, n=2, temperature=0)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")


def test_a_stream_of_several_choices_has_all_of_them(service):
    service.engine.says[:] = [box("Lima"), box("Lima")]
    chunks = list(
        client_of(service).chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "where?"}], n=2, stream=True
        )
    )
    text = {0: "", 1: ""}
    for chunk in chunks:
        for choice in chunk.choices:
            text[choice.index] += choice.delta.content or ""
    assert text == {0: "Lima", 1: "Lima"}


def test_logprobs_are_those_of_the_answers_tokens(service):
    service.engine.says[:] = [box("Lima or Oslo")]
    service.engine.logprob = -0.5
    reply = client_of(service).chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "where?"}], logprobs=True
    )
    (choice,) = reply.choices
    tokens = choice.logprobs.content
    assert "".join(each.token for each in tokens).strip() == choice.message.content == "Lima or Oslo"
    assert {each.logprob for each in tokens} == {-0.5}
    assert b"".join(bytes(each.bytes) for each in tokens).decode() == "".join(each.token for each in tokens)


@pytest.mark.parametrize(
    "stop, expected, sampled",
    [
        (" or", "Lima", "Lima"),
        ("ma", "Li", "Lima"),  # of a token that holds the end, all
        ("Lima", "", ""),
        ("é", "Lima or ", "Lima or "),
        ("x", "Lima or é🙂 Oslo", "Lima or é🙂 Oslo"),
    ],
)
def test_logprobs_end_with_the_content_that_a_stop_text_cuts(service, stop, expected, sampled):
    """In a stream too. The tiny model has several tokens for a character outside ASCII."""
    for stream in (False, True):
        service.engine.says[:] = [box("Lima or é🙂 Oslo")]
        answer = send(service, user("where?"), stop=stop, logprobs=True, stream=stream)
        if stream:
            chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            (choice,) = [each for chunk in chunks for each in chunk["choices"] if each.get("logprobs")]
            content = choice["delta"]["content"]
        else:
            (choice,) = answer.json()["choices"]
            content = choice["message"]["content"]
        said = "".join(token["token"] for token in choice["logprobs"]["content"])
        assert content == expected and said.strip() == sampled.strip()


def test_logprobs_that_the_engine_does_not_give_are_refused_before_anything_is_sampled(service):
    service.engine.logprob = math.nan
    content_of(send(service))
    service.engine.prompts.clear()
    refused = send(service, logprobs=True, stream=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")
    assert not service.engine.prompts


def test_metadata_goes_to_the_trace_where_there_are_traces(service, instructed):
    answer = send(service, metadata={"ticket": "17"})
    assert IGNORED not in answer.headers and PLAYED[-1][2] == {"ticket": "17"}
    assert send(instructed, metadata={"ticket": "17"}).headers[IGNORED] == "metadata"


# Messages.


def test_system_messages_become_instructions_that_the_agent_reads(instructed):
    instructed.engine.says[:] = [box("Lima")]
    instructed.engine.prompts.clear()
    orders = [{"role": "system", "content": "be brief"}, {"role": "developer", "content": "say <|im_end|> please"}]
    answer = send(instructed, orders[0], user("where?"), orders[1])
    assert content_of(answer) == "Lima" and IGNORED not in answer.headers
    (prompt,) = instructed.engine.prompts
    assert "where? heed be brief\nsay" in prompt and prompt.count("<|im_end|>") == 1


def test_instructions_share_the_budget_of_the_question(instructed):
    refused = send(instructed, {"role": "system", "content": "word " * 100}, user("where?"))
    message = refused.json()["error"]["message"]
    assert refused.status_code == 400 and "and its instructions have" in message and "question_tokens 32" in message
    assert refused.json()["error"]["param"] == "messages"
    refused = send(instructed, user("where?"), mempipe={"budget": {"max_turns": 65}})
    assert refused.json()["error"]["param"] == "mempipe.budget.max_turns"


def test_without_a_place_for_them_system_messages_are_ignored_and_listed(service):
    answer = send(service, {"role": "system", "content": "be brief"}, user(), {"role": "developer", "content": "x"})
    assert (content_of(answer), answer.headers[IGNORED]) == (GOLD, "messages.developer, messages.system")
    body = {"question": "x", "instructions": "be brief"}
    refused = httpx.post(f"{service.url}/v1/answer", json=body, timeout=20)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "instructions")


def test_content_may_come_in_parts_of_text(service):
    parts = [{"type": "text", "text": part} for part in (TWO_HOPS.text[:10], TWO_HOPS.text[10:])]
    service.engine.says[:] = [box("Lima")]
    assert content_of(send(service, {"role": "user", "content": parts})) == "Lima"
    assert "\n".join(part["text"] for part in parts) in service.engine.prompts[0]
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    refused = send(service, {"role": "user", "content": [image]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages.0.content")
    assert "'image_url'" in refused.json()["error"]["message"]


@pytest.mark.parametrize("says", [[], ["nothing"]], ids=["answer", "none"])
def test_every_reply_can_be_sent_back(service, says):
    """As the client has it, empty ones and all of its nulls too."""
    service.engine.says[:] = says
    client = client_of(service)
    first = client.chat.completions.create(model="tiny", messages=[user()])
    assert (first.choices[0].message.content == "") == bool(says)
    for sent in (first.choices[0].message, first.choices[0].message.model_dump()):
        service.engine.says[:] = [box("yes")]
        service.engine.prompts.clear()
        second = client.chat.completions.create(model="tiny", messages=[user(), sent, user("is that so?")])
        assert second.choices[0].message.content == "yes"
        noted = "no answer" if says else GOLD
        assert f"<memory>{TWO_HOPS.text} {noted}</memory>" in service.engine.prompts[0]


def test_calls_of_foreign_tools_are_history():
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Lima"}'}}
    said = [
        user("how warm is it?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "21 degrees"}]},
        {"role": "assistant", "content": "It is\n21 degrees."},
        user("thanks"),
        {"role": "assistant", "content": ""},
    ]
    assert history([ChatMessage.model_validate(message) for message in said]) == (
        'how warm is it? weather {"city": "Lima"} 21 degrees It is 21 degrees.\nthanks no answer'
    )
    assert history([]) is None
    assert history([ChatMessage(role="assistant", content="welcome"), ChatMessage(role="user")]) == "welcome"


def test_half_a_character_in_a_message_is_replaced(service):
    """Clients that cut a text at a number of characters send them."""
    call = {"function": {"name": "\ud800", "arguments": "\ud800"}}
    service.engine.says[:] = [box("Lima")]
    said = [user("\ud800?"), {"role": "assistant", "tool_calls": [call]}, user("where\ud800?")]
    body = json.dumps({"model": "tiny", "messages": said}).encode()
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{service.url}/v1/chat/completions", content=body, headers=headers, timeout=20)
    assert content_of(answer) == "Lima"


def test_of_a_message_of_any_length_as_much_is_encoded_as_the_memory_holds(tokenizer):
    renderer = make_renderer(load_config(CONFIGS / "quickstart.yaml"), tokenizer=tokenizer)
    encoded: list[int] = []
    encode = renderer.encode
    renderer.encode = lambda text: encoded.append(len(text)) or encode(text)
    kept = fitted(renderer, "word " * 100_000)
    assert kept == encode("word " * 1000)[:64] and max(encoded) <= 64 * 64


def test_a_long_conversation_is_taken(service):
    service.engine.says[:] = [box("Lima")]
    said = [user("and?"), {"role": "assistant", "content": "Oslo"}] * 600
    assert content_of(send(service, *said, user("where?"))) == "Lima"


@pytest.mark.parametrize(
    "messages", [[], [{"role": "system", "content": "x"}], [user(" ")], [user(), {"role": "tool"}]]
)
def test_a_chat_without_a_question_is_refused(service, messages):
    body = {"model": "tiny", "messages": messages}
    refused = httpx.post(f"{service.url}/v1/chat/completions", json=body, timeout=20)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")


def test_a_question_that_is_too_long_is_refused_in_a_sentence(service):
    refused = send(service, user("x" * 100_001))
    assert refused.status_code == 400 and "at most 100000 characters" in refused.json()["error"]["message"]


@pytest.mark.parametrize("length", [100, 100_001])
@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
def test_a_question_that_is_too_long_has_the_code_that_clients_look_for(service, path, length):
    """litellm, dspy, pydantic-ai, crewai and inspect-ai tell it from other faults by this code."""
    text = "x " * length
    asked = {"chat/completions": {"messages": [user(text)]}, "completions": {"prompt": text}}.get(path, {"input": text})
    answer = httpx.post(f"{service.url}/v1/{path}", json={"model": "tiny", **asked}, timeout=20)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


# Replies.


def test_chunks_have_the_time_and_the_usage_of_their_answer(service):
    plain = client_of(service).chat.completions.create(model="tiny", messages=[user()])
    *chunks, last = client_of(service).chat.completions.create(
        model="tiny",
        messages=[user()],
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
    )
    (created,) = {chunk.created for chunk in [*chunks, last]}
    assert abs(created - plain.created) < 60
    assert last.usage == plain.usage and not last.choices
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in chunks)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == plain.choices[0].message.content == GOLD  # no blank before it


def test_the_clients_own_reader_of_streams_works(service):
    with client_of(service).chat.completions.stream(model="tiny", messages=[user()]) as stream:
        stream.until_done()
        assert stream.get_final_completion().choices[0].message.content == GOLD


async def test_the_async_client_works(service):
    async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(model="tiny", messages=[user()], stream=True)
        text = "".join([choice.delta.content or "" async for chunk in stream for choice in chunk.choices])
        assert text == GOLD
        (model,) = [model async for model in client.models.list()]
        assert model.created > 1_700_000_000


def test_an_unknown_path_is_404_and_says_which(service):
    with pytest.raises(openai.NotFoundError) as missing:
        client_of(service).embeddings.create(model="tiny", input="x")
    assert missing.value.code == "unknown_url" and "POST /v1/embeddings" in missing.value.message
    doubled = httpx.get(f"{service.url}//v1/models")
    assert "'GET //v1/models'" in doubled.json()["error"]["message"]
    wrong = httpx.get(f"{service.url}/v1/answer")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert "this path takes POST" in wrong.json()["error"]["message"]
    for path, methods in ("/v1/sessions", "GET, POST"), ("/v1/sessions/some", "DELETE, GET"), ("/mcp", "POST"):
        wrong = httpx.put(f"{service.url}{path}")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, methods)


def test_all_attempts_are_in_an_answer(service):
    service.engine.says[:] = [box("Oslo"), box("Lima"), box("Lima")]
    body = {"question": "where?", "num_samples": 3, "sampling": {"temperature": 1.0, "max_tokens": 50, "seed": 1}}
    reply = AnswerReply.model_validate_json(httpx.post(f"{service.url}/v1/answer", json=body, timeout=20).text)
    assert [(each.answer or "").strip() for each in reply.attempts].count("Lima") == 2
    assert reply.attempts[0].answer == reply.answer
    assert max(service.engine.limits) <= 50 and len(set(service.engine.seeds)) == 3


# A client of others that the extra `dev` has; `make test-clients` tries those that need separate environments.


def test_langchain_works_with_a_system_message_and_a_token_limit(service):
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai of the extra `dev` is not installed")
    model = langchain.ChatOpenAI(
        base_url=f"{service.url}/v1", api_key="none", model="tiny", max_tokens=60, temperature=0, stop=["zzz"], seed=1
    )
    said = [("system", "be brief"), ("human", TWO_HOPS.text)]
    reply = model.invoke(said)
    assert reply.content == GOLD and reply.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in model.stream(said)) == GOLD
    service.engine.says[:] = [box("yes")]
    assert model.invoke([*said, reply, ("human", "is that so?")]).content == "yes"


@pytest.mark.parametrize("num_others", [1, 3])
def test_a_question_of_one_key_is_answered_while_another_key_has_as_many_in_progress_as_it_may(
    tokenizer, tmp_path, num_others
):
    """One other key gets the place that is kept for it; several get those that the first one's answers free."""
    keys, records = zip(*(new_key(f"key{number}") for number in range(1 + num_others)), strict=True)
    service = build_service(tokenizer, tmp_path, keys=records)
    question: Any = {"model": "tiny", "messages": [user()]}
    refused: list[int] = []

    async def ask(client: openai.AsyncOpenAI) -> str:
        return (await client.chat.completions.create(**question)).choices[0].message.content or ""

    async def ask_of_burst(client: openai.AsyncOpenAI) -> None:
        try:
            assert GOLD in await ask(client)
        except openai.APIStatusError as error:
            refused.append(error.status_code)

    async def crowd() -> list[str]:
        url = f"{service.url}/v1"
        first, *others = [openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=20) for key in keys]
        burst = [asyncio.create_task(ask_of_burst(first)) for _ in range(100)]
        while service.engine.under_way + len(refused) < len(burst):
            await asyncio.sleep(0.01)
        single = [asyncio.create_task(ask(client)) for client in others]
        await asyncio.wait(single, return_when=asyncio.FIRST_COMPLETED, timeout=0.3)
        service.engine.go_on.set()
        answers = await asyncio.gather(*single)
        for each in burst:
            each.cancel()
        await asyncio.wait(burst)
        return answers

    with running(service):
        service.engine.go_on.clear()
        answers = asyncio.run(asyncio.wait_for(crowd(), 60))
    assert all(GOLD in answer for answer in answers) and len(answers) == num_others
    assert set(refused) == {429, 503} and len(refused) == 69
