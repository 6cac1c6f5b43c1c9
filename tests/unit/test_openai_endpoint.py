"""Completions over HTTP, from a server that does everything wrong."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import pytest
from faulty_server import Answer, drips, faulty, hangs, resets, says

from mempipe.actors.driver import Driver, DriverSpec, GroupFailed
from mempipe.engines.config import EndpointConfig, SamplingConfig
from mempipe.engines.endpoint import Endpoint
from mempipe.evaluation.closed_book import answers_right
from mempipe.faults import ServiceFault
from mempipe.loader import parse_config
from mempipe.settings import ConfigError
from mempipe.types import FinishReason, Question

GREEDY = SamplingConfig(temperature=0.0)
SOON_S = 20.0
"""Long before what would be waited for otherwise, and longer than a busy machine needs."""


class Letters:
    """One token per character; 0 ends a message."""

    stop_token_ids = frozenset({0})
    special_token_ids = frozenset({0})
    special_tokens = ("<end>",)

    def encode_template(self, text: str) -> list[int]:
        return list(map(ord, text))

    def encode_text(self, text: str) -> list[int]:
        return list(map(ord, text))

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def render_chat(self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool) -> str:
        return "".join(message["content"] for message in messages)


def choice(**fields: object) -> dict:
    return {
        "choices": [
            {"text": "ab", "finish_reason": "stop", "token_ids": [97, 98, 0], "prompt_token_ids": [1, 2], **fields}
        ]
    }


def endpoint(url: str, *, timeout_s: float = 10.0, key: str = "", stop_texts: Sequence[str] = ()) -> Endpoint:
    config = EndpointConfig(url=url, model="m", timeout_s=timeout_s, api_key_env=key)
    return Endpoint(config, sampling=GREEDY, tokenizer=Letters(), stop_texts=stop_texts)


async def generated(
    answers: Sequence[Answer], *, timeout_s: float = 10.0, max_tokens: int = 5, stop_texts: Sequence[str] = ()
):
    async with faulty(answers) as (url, asked):
        client = endpoint(url, timeout_s=timeout_s, stop_texts=stop_texts)
        try:
            return await client.generate([1, 2], max_tokens=max_tokens), asked
        finally:
            await client.close()


async def test_a_seed_is_sent_where_there_is_one():
    async with faulty([says(choice()), says(choice())]) as (url, asked):
        client = endpoint(url, timeout_s=10.0)
        try:
            await client.generate([1, 2], max_tokens=5, seed=7)
            await client.generate([1, 2], max_tokens=5)
        finally:
            await client.close()
    assert [request.get("seed") for request in asked] == [7, None]


async def test_one_token_says_whether_a_server_gives_log_probs():
    without = choice(token_ids=[97], prompt_token_ids=[63])
    given = choice(token_ids=[97], prompt_token_ids=[63], logprobs={"token_logprobs": [-0.5]})
    async with faulty([says(without), says(given)]) as (url, asked):
        client = endpoint(url)
        try:
            assert [await client.gives_logprobs() for _ in range(3)] == [False, True, True]
        finally:
            await client.close()
    assert [request["max_tokens"] for request in asked] == [1, 1]


async def test_ids_go_in_and_come_back_with_their_log_probs():
    completion, asked = await generated([says(choice(logprobs={"token_logprobs": [-0.5, -1, None]}))])
    assert (completion.token_ids, completion.finish_reason) == ([97, 98, 0], FinishReason.STOP)
    assert completion.logprobs[:2] == [-0.5, -1.0] and math.isnan(completion.logprobs[2])
    sent = {
        "prompt": [1, 2],
        "max_tokens": 5,
        "temperature": 0.0,
        "stop_token_ids": [0],
        "return_token_ids": True,
        "model": "m",
    }
    assert asked[0].items() >= sent.items() and "Authorization" not in asked[0]["head"]


async def test_a_server_without_ids_gives_its_text_as_text():
    completion, _ = await generated([says({"choices": [{"text": "<en", "finish_reason": "stop"}]})])
    assert completion.token_ids == [*map(ord, "<en"), 0] and all(map(math.isnan, completion.logprobs))
    cut, _ = await generated([says({"choices": [{"text": "ab", "finish_reason": "length"}]})])
    assert (cut.token_ids, cut.finish_reason) == ([97, 98], FinishReason.LENGTH)
    longer, _ = await generated([says({"choices": [{"text": "abcdef", "finish_reason": "stop"}]})])
    assert (longer.token_ids, longer.finish_reason) == ([*map(ord, "abcde")], FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("text", "finish", "whole"),
    [
        ("<s>q</s>", "stop", "<s>q</s>"),  # vLLM
        ("<s>q", "stop", "<s>q</s>"),  # most others
        ("<s>q</s> and <a>b", "stop", "<s>q</s> and <a>b</a>"),
        ("no tag", "stop", "no tag\0"),  # the model's own stop token
        ("<s>q", "length", "<s>q"),
    ],
)
async def test_a_stop_text_ends_the_completion_whether_the_server_keeps_it_or_not(text, finish, whole):
    answer = says({"choices": [{"text": text, "finish_reason": finish}]})
    completion, asked = await generated([answer], max_tokens=50, stop_texts=["</s>", "</a>"])
    assert (asked[0]["stop"], asked[0]["include_stop_str_in_output"]) == (["</s>", "</a>"], True)
    assert completion.token_ids == [*map(ord, whole)]


@pytest.mark.parametrize(
    "fault",
    [says({}, status=503), says({}, status=429), resets, says(choice(), length=10**6)],
    ids=["503", "429", "reset", "lying length"],
)
async def test_what_may_pass_is_asked_again(fault):
    completion, asked = await generated([fault, fault, says(choice())])
    assert completion.token_ids == [97, 98, 0] and len(asked) == 3


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (says({"error": "too long"}, status=400), "status 400.*too long"),
        (says({}, status=302), "status 302"),
        (says(b"{not json"), "not JSON"),
        (says(b"[" * 100_000), "not JSON: .*nested"),
        (says(b"[]"), "answered with list"),
        (says(choice(finish_reason="tool_calls")), "finish_reason is 'tool_calls'"),
        (says(choice(token_ids=list(range(6)))), "sampled 6 tokens, 5 were allowed"),
        (says(choice(token_ids=[97], finish_reason="length")), "stopped after 1 of 5 tokens"),
        (says(choice(token_ids=["a"])), "token_ids is"),
        (says(choice(token_ids=[-1])), "token_ids is"),
        (says(choice(token_ids=[True])), "token_ids is"),
        (says(choice(prompt_token_ids=[1])), "another prompt"),
        (says({"choices": []}), "expected 1 choices"),
        (says({"choices": [{"finish_reason": "stop"}]}), "text is None"),
    ],
)
async def test_what_is_no_completion_is_a_fault_at_once(answer, message):
    started = time.monotonic()
    with pytest.raises(ServiceFault, match=message):
        await generated([answer], timeout_s=60)
    assert time.monotonic() - started < SOON_S


@pytest.mark.parametrize("answer", [hangs, drips], ids=["hangs", "drips"])
async def test_a_stall_is_a_fault_by_the_deadline(answer):
    started = time.monotonic()
    with pytest.raises(ServiceFault, match=r"no answer within endpoint\.timeout_s 1\.5 s"):
        await generated([answer], timeout_s=1.5)
    assert time.monotonic() - started < SOON_S


async def test_the_key_is_sent_and_never_shown(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "sk-secret")
    async with faulty([says({"error": "Incorrect API key provided: sk-secret"}, status=401)]) as (url, asked):
        client = endpoint(url, key="SOME_KEY")
        with pytest.raises(ServiceFault) as caught:
            await client.generate([1, 2], max_tokens=5)
        await client.close()
    assert "authorization: bearer sk-secret" in asked[0]["head"].lower()
    assert "***" in str(caught.value) and "sk-secret" not in str(caught.value)


def test_a_key_that_is_not_set_is_named(monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"endpoint.api_key_env is 'NO_SUCH_KEY'"):
        endpoint("http://127.0.0.1:1/v1", key="NO_SUCH_KEY")


async def test_a_model_that_is_not_served_is_refused():
    async with faulty([says({"data": [{"id": "a"}, {"id": "b"}]})]) as (url, _):
        client = endpoint(url)
        with pytest.raises(ConfigError, match=r"endpoint.model is 'm'; .* serves a, b"):
            await client.check()
        await client.close()
    client = endpoint("http://127.0.0.1:9/v1", timeout_s=0.5)
    with pytest.raises(ConfigError, match="which does not answer"):
        await client.check()
    await client.close()


@pytest.mark.parametrize("record_failures", [True, False])
@pytest.mark.slow
async def test_a_question_whose_endpoint_fails_is_a_group_that_says_so_where_failures_are_recorded(
    tmp_path, record_failures
):

    from mempipe.engines.tiny import build_tokenizer

    build_tokenizer(tmp_path)
    budget = {
        "question_tokens": 64,
        "memory_tokens": 8,
        "action_tokens": 8,
        "memory_message_tokens": 8,
        "observation_tokens": 64,
    }
    values = {
        "model": {"path": str(tmp_path)},
        "agent": {"prompts": "tiny"},
        "budget": budget,
        "stream": {"num_attempts": 2},
    }
    async with faulty([says({"error": "no"}, status=400)]) as (url, asked):
        driver = Driver(
            DriverSpec(
                config=parse_config(values),
                sampling=GREEDY,
                group_size=1,
                namespace="",
                generators=[],
                retrievers=[],
                endpoint=EndpointConfig(url=url, model="m"),
                record_failures=record_failures,
            )
        )
        question = Question(id="q", text="who ?", golden_answers=["x"])
        if not record_failures:
            with pytest.raises(GroupFailed, match="status 400"):
                await driver.play("g", question)
        else:
            group = await driver.play("g", question)
            assert (group.trajectories, group.num_retries) == ([], 2) and "status 400" in group.failed
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("reply", "is_right"),
    [
        ("It is \\boxed{Paris}.", True),
        ("The answer is Paris, I think", True),
        ("\\boxed{Rome}", False),
        ("Parisian streets", False),
        ("", False),
    ],
)
def test_a_question_is_known_when_its_box_or_its_words_are_a_gold(reply, is_right):
    assert answers_right(reply, ["Paris", "the"]) is is_right


@pytest.mark.parametrize(
    ("reply", "is_right"),
    [
        ("I have no idea. \\boxed{unknown}", False),
        ("No idea. \\boxed{unknown}", False),
        ("There is no doubt: \\boxed{No}", True),
        ("No, they are not.", True),
        ("There is no doubt.", False),
    ],
)
def test_no_is_an_answer_in_the_box_or_as_the_first_word(reply, is_right):
    assert answers_right(reply, ["no"]) is is_right
