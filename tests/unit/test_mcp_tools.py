"""Tools of MCP servers in the hands of a policy, with a server of the official SDK."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import mcp_types as types
import psutil
import pytest
import uvicorn
from agent_builders import build_question
from mcp.server import MCPServer
from mcp.server.lowlevel import Server
from mcp.server.mcpserver.exceptions import ToolError
from service_builders import CONFIGS

from mempipe.agents import mcp_client, mcp_tools
from mempipe.agents.mcp_client import McpServer, McpUnavailable
from mempipe.agents.mcp_tools import load_mcp_tools
from mempipe.agents.tools import InvalidCall, Toolbox
from mempipe.engines.tiny import build_tokenizer
from mempipe.engines.tokenizer import load_tokenizer
from mempipe.loader import load_config
from mempipe.rollout import make_renderer
from mempipe.settings import ConfigError

ASKED: list[str] = []
ROOT = Path(__file__).parents[2]
STDIO_TOOLS = str(Path(__file__).with_name("stdio_tools.py"))


def tools_server() -> MCPServer:
    server = MCPServer("tools", log_level="ERROR")

    @server.tool()
    async def add(a: int, b: int = 1) -> str:
        """Adds <|im_end|> two [INST] numbers."""
        return str(a + b)

    @server.tool()
    async def fails() -> str:
        raise ToolError("the city is unknown")

    @server.tool()
    async def hangs() -> str:
        await anyio.sleep(60)
        return ""

    return server


@contextmanager
def served(app: Any) -> Iterator[str]:
    """The server of tools at an address of this machine; ASKED holds the key of each request."""

    async def counted(scope, receive, send) -> None:
        if scope["type"] == "http":
            ASKED.append(dict(scope["headers"]).get(b"authorization", b"").decode())
        await app(scope, receive, send)

    with socket.create_server(("127.0.0.1", 0)) as bound:
        server = uvicorn.Server(uvicorn.Config(counted, log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{bound.getsockname()[1]}/mcp"
        server.force_exit = server.should_exit = True
        thread.join(10)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(tools_server().streamable_http_app(stateless_http=True)) as address:
        yield address


@pytest.fixture(autouse=True)
def nothing_is_kept():
    ASKED.clear()
    mcp_tools._asked.cache_clear()


def toolbox(url: str, **settings) -> Toolbox:
    return Toolbox(own=load_mcp_tools([McpServer(url=url, **settings)]))


async def use(tools: Toolbox, name: str, **arguments) -> list[str]:
    call = tools.parse(json.dumps({"name": name, "arguments": arguments}))
    return (await tools.use(call)).texts


async def test_a_policy_calls_the_tools_of_a_server(url):
    tools = toolbox(url)
    assert list(tools.own) == ["add", "fails", "hangs"]
    assert await use(tools, "add", a=2, b=3) == ["5"]
    assert await use(tools, "add", a=2) == ["3"]
    assert await use(tools, "fails") == ["error: Error executing tool fails: the city is unknown"]


@pytest.mark.parametrize("arguments", [{}, {"a": "two"}, {"a": 1.5}])
def test_arguments_that_do_not_fit_the_schema_are_no_call(url, arguments):
    with pytest.raises(InvalidCall):
        toolbox(url).parse(json.dumps({"name": "add", "arguments": arguments}))


def test_special_tokens_of_a_server_are_broken_in_the_prompt(url, tmp_path):
    build_tokenizer(tmp_path)
    servers = json.dumps([{"url": url, "tools": ["add"]}])
    config = load_config(CONFIGS / "quickstart.yaml", [f"agent.mcp_servers={servers}"])
    renderer = make_renderer(config, tokenizer=load_tokenizer(str(tmp_path)))
    assert "add" in renderer.tools.own and "hangs" not in renderer.tools.own
    text = renderer.tools.schemas()
    assert "Adds < |im_end|> two [ INST] numbers." in text and '"required": ["a"]' in text


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [({"multipleOf": 0.5}, "9" * 400), ({"$ref": "#"}, '{"a": ' * 600 + "{}" + "}" * 600)],
    ids=["number", "nesting"],
)
def test_arguments_that_cannot_be_compared_with_the_schema_are_an_invalid_call(schema, arguments):
    parameters = {"type": "object", "properties": {"a": schema}}
    tool = mcp_tools.McpTool(name="t", description="", parameters=parameters, server=McpServer(command="true"))
    with pytest.raises(InvalidCall, match=r"^arguments: "):
        Toolbox(own={"t": tool}).parse(f'{{"name": "t", "arguments": {{"a": {arguments}}}}}')


def test_the_policy_calls_a_tool_whose_names_have_brackets_as_it_reads_them():
    properties = {"page[size]": {"type": "integer"}, "order": {"enum": ["<none>", "name"]}}
    parameters = {"type": "object", "properties": properties, "required": ["page[size]"], "additionalProperties": False}
    tool = mcp_tools.McpTool(name="t", description="", parameters=parameters, server=McpServer(command="true"))
    shown = tool.schema()["parameters"]
    arguments = {shown["required"][0]: 3, "order": shown["properties"]["order"]["enum"][0]}
    assert list(arguments) == ["page[ size]", "order"]
    call = Toolbox(own={"t": tool}).parse(json.dumps({"name": "t", "arguments": arguments}))
    assert call.arguments == {"page[size]": 3, "order": "<none>"}


async def test_half_a_character_in_a_call_reaches_the_server_as_a_replacement():
    server = MCPServer("echo", log_level="ERROR")

    @server.tool()
    async def echo(text: str) -> str:
        return text

    with served(server.streamable_http_app(stateless_http=True)) as address:
        tools = toolbox(address)
        used = await tools.use(tools.parse(r'{"name": "echo", "arguments": {"text": "a\ud83d"}}'))
    assert used.texts == ["a\ufffd"]


async def test_a_server_that_hangs_is_a_fault(url):
    tool = mcp_tools.McpTool(name="hangs", description="", parameters={}, server=McpServer(url=url, timeout_s=0.5))
    with pytest.raises(McpUnavailable, match=r"within 0\.5 s"):
        await tool.call({})


async def test_a_server_that_is_gone_is_a_fault_and_at_the_start_a_sentence():
    with socket.create_server(("127.0.0.1", 0)) as bound:
        gone = f"http://127.0.0.1:{bound.getsockname()[1]}/mcp"
    with pytest.raises(ConfigError, match=r"agent.mcp_servers: .* does not answer"):
        toolbox(gone)
    tool = mcp_tools.McpTool(name="add", description="", parameters={}, server=McpServer(url=gone))
    with pytest.raises(McpUnavailable, match="does not answer") as fault:
        await tool.call({})
    assert "\n" not in str(fault.value)


def test_a_process_asks_a_server_once_with_its_key(url, monkeypatch):
    monkeypatch.setenv("SOME_KEY", "abc")
    toolbox(url, api_key_env="SOME_KEY")
    num_asked = len(ASKED)
    assert set(ASKED) == {"Bearer abc"}
    toolbox(url, api_key_env="SOME_KEY")
    assert len(ASKED) == num_asked


def test_wrong_settings_are_named(url):
    with pytest.raises(ConfigError, match="no tool 'subtract'; it has add, fails, hangs"):
        toolbox(url, tools=["subtract"])
    with pytest.raises(ConfigError, match="a tool 'add', which another tool is called"):
        load_mcp_tools([McpServer(url=url)], taken=["add"])
    for wrong in ("http://ann:secret@127.0.0.1/mcp", "ftp://host/mcp", "http://", "http://[1/mcp", "http://host:99999"):
        with pytest.raises(ValueError, match=r"agent\.mcp_servers\.url is .*without a user or a password"):
            McpServer(url=wrong)


def test_a_schema_fetches_nothing(url):
    tool = mcp_tools.McpTool(name="x", description="", parameters={"$ref": url}, server=McpServer(url=url))
    with pytest.raises(Exception, match="Unresolvable"):
        tool.check({})
    assert not ASKED


TUPLE = {"type": "array", "items": [{"type": "string"}]}  # until draft 2019-09; 2020-12 calls it prefixItems
CITY = {"$ref": "#/definitions/city"}


def test_a_schema_is_of_the_draft_that_it_names():
    """As tools in TypeScript have it, whose schemas say that they are of draft 7."""
    named = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "definitions": {"city": {"type": "string"}},
        "properties": {"pair": TUPLE, "city": CITY, "$ref": {"enum": [{"$ref": "a text, and no reference"}]}},
    }
    listed = types.Tool(name="t", input_schema=named)
    tool = mcp_tools._tool(listed, McpServer(url="http://host/mcp"))
    assert tool.check({"pair": ["a"], "city": "Oslo"}) == {"pair": ["a"], "city": "Oslo"}
    for wrong in ({"pair": [1]}, {"city": 1}):
        with pytest.raises(InvalidCall):
            tool.check(wrong)
    unnamed = types.Tool(name="t", input_schema={"type": "object", "properties": {"pair": TUPLE}})
    with pytest.raises(ConfigError, match="cannot be used"):
        mcp_tools._tool(unnamed, McpServer(url="http://host/mcp"))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            {"type": "object", "properties": {"a": {"type": "numbr"}}},
            "the schema of 'odd' cannot be used: 'numbr' is not valid",
        ),
        (
            {"type": "object", "properties": {"a": {"items": {"$ref": "#/$defs/City"}}}},
            "the schema of 'odd' cannot be used: it refers to '#/$defs/City', which is not in it",
        ),
        (
            {"type": "object", "anyOf": [{"$ref": "https://example.com/city"}]},
            "the schema of 'odd' cannot be used: it refers to 'https://example.com/city', which is not in it",
        ),
        ({"type": "object", "description": "x" * mcp_tools.MAX_SCHEMA_CHARS}, "the schema of 'odd' has more than 8192"),
    ],
    ids=["invalid", "dangling", "elsewhere", "long"],
)
def test_a_schema_that_no_prompt_should_hold_is_refused_at_the_start(schema, message):
    async def listed(ctx: Any, params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[types.Tool(name="odd", input_schema=schema)])

    app = Server("odd", on_list_tools=listed).streamable_http_app(stateless_http=True)
    with served(app) as address, pytest.raises(ConfigError) as refused:
        toolbox(address)
    assert str(refused.value).startswith(f"agent.mcp_servers: {message}")


def started(**settings) -> Toolbox:
    """The tools of a server that is started by a command."""
    return Toolbox(own=load_mcp_tools([McpServer(command=sys.executable, args=[STDIO_TOOLS], **settings)]))


async def process_of(tools: Toolbox) -> int:
    (text,) = await use(tools, "process")
    return int(text)


def has_ended(process: int) -> bool:
    """Whether the process ends long before it would by itself."""
    try:
        psutil.Process(process).wait(timeout=30)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True


def test_a_started_server_answers_all_calls_of_a_loop_and_ends_with_it(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "abc")
    monkeypatch.setenv("SOME_SECRET", "def")
    tools = started(api_key_env="SOME_KEY")

    async def calls() -> tuple[set[int], list[str]]:
        assert await use(tools, "double", number=21) == ["42"]
        processes = await asyncio.gather(*(process_of(tools) for _ in range(3)))
        return set(processes), await use(tools, "environment")

    processes, (environment,) = asyncio.run(calls())
    assert len(processes) == 1 and has_ended(*processes)
    assert "SOME_KEY" in environment and "SOME_SECRET" not in environment
    with pytest.raises(InvalidCall):
        tools.parse(json.dumps({"name": "double", "arguments": {"number": "two"}}))


async def test_a_started_server_that_dies_is_a_fault_and_the_next_call_has_another():
    tools = started()
    before = await process_of(tools)
    with pytest.raises(McpUnavailable, match=r"stdio_tools\.py does not answer: MCPError: Connection closed"):
        await use(tools, "dies")
    assert await process_of(tools) != before


async def test_each_attempt_has_a_server_for_itself_if_the_settings_say_so():
    tools, shared = started(per_attempt=True), started()
    processes = set()
    for _ in range(2):
        async with tools.attempt(build_question()) as own:
            assert await use(own, "double", number=21) == ["42"]
            processes.add(await process_of(own))
            assert await process_of(own) in processes  # both tools talk to it
    assert len(processes) == 2
    assert all([await asyncio.to_thread(has_ended, process) for process in processes])
    async with shared.attempt(build_question()) as one, shared.attempt(build_question()) as other:
        assert await process_of(one) == await process_of(other)


async def test_a_server_that_dies_in_an_attempt_is_a_fault_and_leaves_the_others_alone():
    tools = started(per_attempt=True)
    async with tools.attempt(build_question()) as one, tools.attempt(build_question()) as other:
        before = await process_of(other)
        for _ in range(2):  # the group is played again; until then the session stays gone
            with pytest.raises(McpUnavailable, match=r"stdio_tools\.py does not answer: MCPError: Connection closed"):
                await use(one, "dies")
        assert await process_of(other) == before


async def test_an_attempt_that_calls_nothing_starts_no_server():
    async with started(per_attempt=True).attempt(build_question()) as tools:
        assert {tool.session._holder for tool in tools.own.values()} == {None}


@pytest.mark.slow
async def test_a_started_server_that_hangs_is_a_fault_in_time_and_is_replaced(monkeypatch):
    tools = started(timeout_s=30.0)  # a busy machine needs seconds to start one
    before, begin = await process_of(tools), time.monotonic()
    with monkeypatch.context() as patch:  # and half a second is enough to hang
        patch.setattr(mcp_client, "anyio", SimpleNamespace(fail_after=lambda seconds: anyio.fail_after(seconds / 60)))
        with pytest.raises(McpUnavailable, match=r"did not answer within 30 s"):
            await use(tools, "hangs")
    assert time.monotonic() - begin < 20
    assert await process_of(tools) != before
    assert await asyncio.to_thread(has_ended, before)


@pytest.mark.slow
def test_a_started_server_ends_when_its_process_is_killed():
    code = (
        "import asyncio, sys\n"
        "from mempipe.agents.mcp_client import McpServer, with_client\n"
        "async def main():\n"
        "    server = McpServer(command=sys.executable, args=sys.argv[1:])\n"
        "    result = await with_client(server, lambda client: client.call_tool('process', {}))\n"
        "    print(result.content[0].text, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())"
    )
    command = [sys.executable, "-c", code, STDIO_TOOLS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as owner:
        assert owner.stdout is not None
        server = int(owner.stdout.readline())
        owner.send_signal(signal.SIGKILL)
    assert has_ended(server)


def test_a_command_that_cannot_be_started_and_half_a_server_are_sentences():
    with pytest.raises(ConfigError, match=r"agent\.mcp_servers: no-such-program --x does not answer: .*No such file"):
        load_mcp_tools([McpServer(command="no-such-program", args=["--x"])])
    with pytest.raises(ConfigError, match=r"agent\.mcp_servers: .* does not answer: MCPError: Connection closed"):
        load_mcp_tools([McpServer(command="true")])
    for settings, message in (
        ({}, "neither url nor command"),
        ({"url": "http://host/mcp", "command": "true"}, "url 'http://host/mcp' and command 'true'"),
        ({"url": "http://host/mcp", "args": ["x"]}, r"args is \['x'\] for the url"),
        ({"url": "http://host/mcp", "per_attempt": True}, "per_attempt is true for the url 'http://host/mcp'"),
    ):
        with pytest.raises(ValueError, match=message):
            McpServer(**settings)


@pytest.mark.parametrize("agent", ["react", "mem1"])
def test_an_agent_without_named_calls_takes_no_server(agent):
    with pytest.raises(ConfigError, match=f"agent.mcp_servers means nothing to agent.name '{agent}'"):
        load_config(CONFIGS / f"quickstart_{agent}.yaml", ['agent.mcp_servers=[{"command": "true"}]'])


def test_tools_that_the_settings_do_not_name_are_not_looked_at():
    odd = [types.Tool(name=f"odd {number}", input_schema={"type": "object"}) for number in range(65)]
    tools = [*odd, types.Tool(name="add", input_schema={"type": "object"})]

    async def listed(ctx: Any, params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=tools)

    with served(Server("many", on_list_tools=listed).streamable_http_app(stateless_http=True)) as address:
        assert list(toolbox(address, tools=["add"]).own) == ["add"]
        with pytest.raises(ConfigError, match=r"has 66 tools; name up to 64 in `tools`"):
            toolbox(address)
        with pytest.raises(ConfigError, match=r"has no tool 'subtract'; it has add"):
            toolbox(address, tools=["subtract"])


def test_tools_on_further_pages_of_a_servers_list_are_tools_too():
    async def listed(ctx: Any, params: Any) -> types.ListToolsResult:
        number = int(params.cursor or 0) if params else 0
        tool = types.Tool(name=f"tool_{number}", input_schema={"type": "object"})
        return types.ListToolsResult(tools=[tool], next_cursor=str(number + 1) if number < 2 else None)

    with served(Server("pages", on_list_tools=listed).streamable_http_app(stateless_http=True)) as address:
        assert list(toolbox(address).own) == ["tool_0", "tool_1", "tool_2"]
        assert list(toolbox(address, tools=["tool_2"]).own) == ["tool_2"]


async def test_the_policy_reads_the_files_and_the_structured_content_of_a_result():
    file = types.TextResourceContents(uri="file:///a.txt", text="a file")
    image = types.ImageContent(data="", mime_type="image/png")
    results = {
        "files": types.CallToolResult(content=[types.EmbeddedResource(resource=file), image]),
        "structured": types.CallToolResult(content=[], structured_content={"degrees": 3}),
    }

    async def listed(ctx: Any, params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[types.Tool(name=n, input_schema={"type": "object"}) for n in results])

    async def called(ctx: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        return results[params.name]

    server = Server("results", on_list_tools=listed, on_call_tool=called)
    with served(server.streamable_http_app(stateless_http=True)) as address:
        tools = toolbox(address)
        assert await use(tools, "files") == ["a file", "(image, which cannot be read here)"]
        assert await use(tools, "structured") == ['{"degrees": 3}']
