"""The agent as tools for other agents, with the client of the official SDK."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import httpx2
import pytest
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.client import ConnectMode
from mcp.client.streamable_http import streamable_http_client
from service_builders import QUESTIONS, WORLD, Service, build_service, running, search

import mempipe
from mempipe.agents.mcp_client import McpServer, McpUnavailable
from mempipe.answers.api import CorpusReply
from mempipe.faults import InfrastructureFault
from mempipe.serve.http.keys import new_key
from mempipe.serve.mcp.stdio import bridge, pass_on
from mempipe.types import SearchResult

ROOT = Path(__file__).parents[2]
TWO_HOPS = next(question for question in QUESTIONS if question.num_hops == 2)
GOLD = TWO_HOPS.golden_answers[0]
TOOLS = {"ask", "search", "upload_document", "read_document"}


@pytest.fixture(scope="module")
def shared(tokenizer, tmp_path_factory) -> Iterator[Service]:
    service = build_service(tokenizer, tmp_path_factory.mktemp("state"))
    with running(service):
        yield service


@pytest.fixture
def service(shared) -> Iterator[Service]:
    yield shared
    shared.engine.fault = None
    shared.engine.says.clear()


def text_of(result: Any) -> str:
    return result.content[0].text


@pytest.mark.slow
async def test_the_tools_are_those_that_the_service_has(service, tokenizer, tmp_path):
    async with Client(f"{service.url}/mcp") as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        told = client.server_info
    assert (told.name, told.version) == ("mempipe", mempipe.__version__)
    assert set(tools) == TOOLS
    assert all(tool.description and "\n" not in tool.description for tool in tools.values())
    assert tools["ask"].input_schema["required"] == ["question"]
    reader = build_service(tokenizer, tmp_path, agent="memagent")  # which has no corpus
    with running(reader):
        async with Client(f"{reader.url}/mcp") as client:
            assert {tool.name for tool in (await client.list_tools()).tools} == TOOLS - {"search"}


async def test_a_question_is_answered_and_its_turns_are_told(service):
    told: list[Any] = []

    async def progress(done: float, total: float | None, message: str | None) -> None:
        told.append((done, message))

    async with Client(f"{service.url}/mcp") as client:
        result = await client.call_tool("ask", {"question": TWO_HOPS.text}, progress_callback=progress)
    assert not result.is_error
    answer = result.structured_content
    assert (answer["answer"], answer["num_turns"], answer["end_reason"]) == (GOLD, 3, "answered")
    assert answer["memory"].endswith(f"{TWO_HOPS.text} {GOLD}")
    assert [done for done, _ in told] == [1, 2, 3] and "need" in told[0][1]


async def test_a_session_begins_with_its_first_question_and_goes_on(service):
    async with Client(f"{service.url}/mcp") as client:
        first = (await client.call_tool("ask", {"question": TWO_HOPS.text, "session": "new"})).structured_content
        again = {"question": TWO_HOPS.text, "session": first["session"]}
        second = (await client.call_tool("ask", again)).structured_content
        missing = await client.call_tool("ask", {"question": TWO_HOPS.text, "session": "none"})
    kept = httpx.get(f"{service.url}/v1/sessions/{first['session']}").json()
    assert (kept["num_questions"], kept["memory"]) == (2, second["memory"])
    assert second["memory"].count(f"{TWO_HOPS.text} {GOLD}") == 2 and second["session"] == first["session"]
    assert missing.is_error and text_of(missing) == "there is no session 'none', or it has expired"


async def test_a_session_that_nobody_learns_of_is_not_kept(service):
    before = httpx.get(f"{service.url}/v1/sessions").json()
    asked = {"question": TWO_HOPS.text, "session": "new"}
    async with Client(f"{service.url}/mcp") as client:
        assert (await client.call_tool("ask", {**asked, "document": "none"})).is_error
        service.engine.fault = InfrastructureFault("no generator answered")
        assert (await client.call_tool("ask", asked)).is_error
    assert httpx.get(f"{service.url}/v1/sessions").json() == before


async def test_search_and_ask_search_the_part_of_the_service_unless_told_otherwise(tokenizer, tmp_path):
    searched: list[str] = []
    own = QUESTIONS[0].partition

    async def index(query: str, *, num_passages: int, partition: str) -> SearchResult:
        searched.append(partition)
        return await search(query, num_passages=num_passages, partition=partition)

    service = build_service(tokenizer, tmp_path, searched=CorpusReply(partition=own), index=index)
    with running(service):
        async with Client(f"{service.url}/mcp") as client:
            for name, asked in (("search", {"query": "x"}), ("ask", {"question": TWO_HOPS.text})):
                searched.clear()
                assert not (await client.call_tool(name, asked)).is_error
                assert set(searched) == {own}
                searched.clear()
                assert not (await client.call_tool(name, {**asked, "partition": ""})).is_error
                assert set(searched) == {""}
                wrong = await client.call_tool(name, {**asked, "partition": "none"})
                assert wrong.is_error and text_of(wrong) == "partition 'none' is none of the index's 1"


async def test_the_corpus_is_searched(service):
    title = WORLD.passages[3].title
    async with Client(f"{service.url}/mcp") as client:
        result = await client.call_tool("search", {"query": f"who is {title}", "num_passages": 1})
        refusals = [
            await client.call_tool("search", {"query": "x", "partition": "none"}),
            await client.call_tool("search", {"query": " "}),
            await client.call_tool("search", {"query": "x", "num_passages": 51}),
        ]
    (passage,) = result.structured_content["passages"]
    assert passage["title"] == title
    assert all(refused.is_error for refused in refusals) and "partition 'none'" in text_of(refusals[0])


async def test_a_document_is_uploaded_and_read_in_pieces(service):
    async with Client(f"{service.url}/mcp") as client:
        begun = (await client.call_tool("upload_document", {"text": "Mär"})).structured_content
        document = begun["document"]
        more = await client.call_tool("upload_document", {"text": "chen", "document": document})
        pieces, start = [], 0
        while start is not None:
            asked = {"document": document, "start": start, "num_chars": 3}
            piece = (await client.call_tool("read_document", asked)).structured_content
            pieces.append(piece["text"])
            start = piece["next_start"]
        missing = await client.call_tool("read_document", {"document": "none"})
        nowhere = await client.call_tool("upload_document", {"text": "x", "document": "none"})
    assert (begun["num_bytes"], more.structured_content) == (4, {"document": document, "num_bytes": 8})
    assert pieces == ["Mär", "che", "n"] and piece["num_chars"] == 7
    for refused in (missing, nowhere):
        assert refused.is_error and text_of(refused) == "there is no document 'none', or it has expired"


async def test_an_agent_that_reads_is_given_an_uploaded_document(tokenizer, tmp_path):
    reader = build_service(tokenizer, tmp_path, agent="memagent")
    text = "\n".join(passage.text for passage in WORLD.passages)
    with running(reader):
        async with Client(f"{reader.url}/mcp") as client:
            document = (await client.call_tool("upload_document", {"text": text})).structured_content["document"]
            result = await client.call_tool("ask", {"question": TWO_HOPS.text, "document": document})
            without = await client.call_tool("ask", {"question": TWO_HOPS.text})
    assert not result.is_error and result.structured_content["num_turns"] > 1
    assert without.is_error


async def test_wrong_arguments_are_sentences_of_ours(service):
    async with Client(f"{service.url}/mcp") as client:
        for name, arguments, message in (
            ("search", {"query": "x", "num_passages": 51}, "num_passages is 51: Input should be less than or equal"),
            ("ask", {}, "question is missing"),
            ("ask", {"question": "x", "sesion": "new"}, "sesion is not an argument of ask, which takes question, s"),
            ("ask", {"question": TWO_HOPS.text, "document": "x"}, "there is no document 'x', or it has expired"),
            ("upload_document", {"text": ""}, "text is '': String should have at least 1 character"),
        ):
            result = await client.call_tool(name, arguments)
            assert result.is_error and text_of(result).startswith(message)
            assert "Error executing" not in text_of(result) and "\n" not in text_of(result)


async def test_a_fault_is_a_sentence(service):
    service.engine.fault = InfrastructureFault("no generator answered")
    async with Client(f"{service.url}/mcp") as client:
        result = await client.call_tool("ask", {"question": TWO_HOPS.text})
        empty = await client.call_tool("ask", {"question": " "})
    assert result.is_error and "no generator answered" in text_of(result) and "Traceback" not in text_of(result)
    assert empty.is_error and text_of(empty) == "question is blank"


async def test_a_key_is_wanted_and_its_documents_are_its_own(tokenizer, tmp_path):
    (key, record), (other, second) = new_key("ann"), new_key("bob")
    service = build_service(tokenizer, tmp_path, keys=[record, second])
    with running(service):
        assert httpx.post(f"{service.url}/mcp", json={}).status_code == 401
        headers = {"authorization": f"Bearer {key}"}
        document = httpx.post(f"{service.url}/v1/documents", headers=headers).json()["id"]
        httpx.post(f"{service.url}/v1/documents/{document}/pieces", content=b"x", headers=headers)
        names = {"host": "mempipe.example.com", "origin": "https://page.example.com"}  # a key works under any name
        for each, found in ((key, True), (other, False)):
            async with client_with(service, authorization=f"Bearer {each}", **names) as client:
                read = await client.call_tool("read_document", {"document": document})
                assert read.is_error is not found
                assert (await client.call_tool("ask", {"question": TWO_HOPS.text})).structured_content["answer"] == GOLD


@asynccontextmanager
async def client_with(service: Service, mode: ConnectMode = "auto", **headers: str) -> AsyncIterator[Client]:
    http = httpx2.AsyncClient(headers=headers)
    async with Client(streamable_http_client(f"{service.url}/mcp", http_client=http), mode=mode) as client:
        yield client


@contextmanager
def refused(message: str, **data: Any) -> Iterator[None]:
    """The block ends with an error that the client of the SDK shows for a refusal before the protocol."""
    with pytest.raises((MCPError, ExceptionGroup)) as caught:
        yield
    error: Any = caught.value
    while isinstance(error, ExceptionGroup):
        (error,) = error.exceptions
    assert isinstance(error, MCPError) and message in str(error) and error.error.data == data


async def test_a_refusal_before_the_protocol_is_a_sentence_too(tokenizer, tmp_path):
    key, record = new_key("ann")
    service = build_service(tokenizer, tmp_path, keys=[record], max_in_flight=4)
    with running(service):
        for mode in ("auto", "legacy"):
            with refused("the API key is missing or wrong", status=401, code="invalid_api_key"):
                await client_with(service, mode).__aenter__()
        async with client_with(service, authorization=f"Bearer {key}") as client:
            with refused("the body has more than 1048576 bytes", status=413):
                await client.call_tool("ask", {"question": "x" * 2**20})
            service.engine.go_on.clear()
            asking = [asyncio.create_task(with_patience(client, "ask", question=TWO_HOPS.text)) for _ in range(4)]
            while service.engine.under_way < 4:
                await asyncio.sleep(0.01)
            with refused("4 requests are in flight", status=503, retry_after_s=1):
                await client.call_tool("search", {"query": "x"})
            service.engine.go_on.set()
            assert [each.structured_content["answer"] for each in await asyncio.gather(*asking)] == [GOLD] * 4


async def with_patience(client: Client, tool: str, **arguments: Any) -> Any:
    """Calls the tool until it has a place: the one of an earlier call is free when its stream is closed."""
    while True:
        try:
            return await client.call_tool(tool, arguments)
        except MCPError as error:
            if "requests are in flight" not in str(error):
                raise
            await asyncio.sleep(0.01)


async def test_a_refusal_of_too_many_requests_is_a_sentence_too(tokenizer, tmp_path):
    key, record = new_key("ann")
    service = build_service(tokenizer, tmp_path, keys=[record], requests_per_minute=80)
    with running(service):
        async with client_with(service, authorization=f"Bearer {key}") as client:
            begun, num_answered = time.monotonic(), 0
            with refused("this key may make 80 requests a minute", status=429, retry_after_s=1):
                while True:
                    await client.call_tool("search", {"query": "x"})
                    num_answered += 1
    assert num_answered <= 80 / 10 + (time.monotonic() - begun) * 80 / 60


async def test_a_service_without_keys_is_called_under_its_own_name_alone(service):
    with refused("answers callers on its own machine only", status=403):
        await client_with(service, host="mempipe.example.com").__aenter__()


def test_the_path_takes_posts_of_its_own_origin_only(service):
    answer = httpx.get(f"{service.url}/mcp")
    assert answer.status_code == 405 and answer.headers["allow"] == "POST"
    assert answer.json()["id"] is None and answer.json()["error"]["data"] == {"status": 405}
    assert httpx.post(f"{service.url}/mcp", json={}, headers={"origin": "https://evil.com"}).status_code == 403


async def test_what_passes_calls_on_tells_the_turns_too(service):
    told: list[float] = []

    async def progress(done: float, total: float | None, message: str | None) -> None:
        told.append(done)

    async with Client(await bridge(McpServer(url=f"{service.url}/mcp"))) as client:
        result = await client.call_tool("ask", {"question": TWO_HOPS.text}, progress_callback=progress)
        unknown = await client.call_tool("none", {})
    assert result.structured_content["answer"] == GOLD and told == [1, 2, 3]
    assert unknown.is_error and "none" in text_of(unknown)


async def test_what_passes_calls_on_outlives_refusals_and_the_service(tokenizer, tmp_path):
    service = build_service(tokenizer, tmp_path)
    with running(service):
        client = Client(await bridge(McpServer(url=f"{service.url}/mcp")))
        await client.__aenter__()
        large = await client.call_tool("ask", {"question": "x" * 2**20})
        small = await client.call_tool("search", {"query": "x"})
    gone = await client.call_tool("search", {"query": "x"})
    await client.__aexit__(None, None, None)
    assert large.is_error and "/mcp refuses the call: 413" in text_of(large) and "the body has more" in text_of(large)
    assert not small.is_error
    assert gone.is_error and f"{service.url}/mcp does not answer: ConnectError" in text_of(gone)


def test_an_address_without_a_service_or_without_the_key_is_a_sentence(tokenizer, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as bound:
        gone = f"http://127.0.0.1:{bound.getsockname()[1]}"
    with pytest.raises(McpUnavailable, match=f"{gone}/mcp does not answer: ConnectError"):
        pass_on(gone, sys.stdout)
    service = build_service(tokenizer, tmp_path, keys=[new_key("ann")[1]])
    with running(service), pytest.raises(McpUnavailable, match="401 Unauthorized"):
        pass_on(service.url, sys.stdout)


@pytest.mark.slow
async def test_the_same_tools_over_standard_input_and_output(service):
    """`mempipe mcp URL`, which prints nothing but the protocol."""
    command = ["-m", "mempipe.cli", "mcp", service.url]
    parameters = StdioServerParameters(command=sys.executable, args=command, env={"PYTHONPATH": str(ROOT)})
    async with Client(parameters) as client:
        assert {tool.name for tool in (await client.list_tools()).tools} == TOOLS
        result = await client.call_tool("ask", {"question": TWO_HOPS.text})
        assert result.structured_content["answer"] == GOLD
        assert (await client.call_tool("search", {"query": " "})).is_error
