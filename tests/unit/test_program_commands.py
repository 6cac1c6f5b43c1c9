"""The agent `program` with a command: a process for each attempt, which asks the policy at a port."""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray.data
import uvloop
from agent_builders import Library, ScriptedEngine, Step, assert_token_exact, build_question, build_tokenizer
from ray.exceptions import RayTaskError

from mempipe.agents.program.programs import ProgramStopped
from mempipe.checks.run import check_run
from mempipe.faults import InfrastructureFault
from mempipe.loader import load_config
from mempipe.rollout import make_agent
from mempipe.settings import ConfigError
from mempipe.streams.pools import stream_tables
from mempipe.types import Completion, EndReason, Trajectory
from mempipe.user_code import UserCodeError

TOKENIZER = build_tokenizer()
EXAMPLE = Path(__file__).parents[2] / "examples" / "program_agent" / "config.yaml"
ASKS = """
import json, os, sys, time, urllib.error, urllib.request

def post(path, body, key=os.environ["OPENAI_API_KEY"]):
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + path
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)

def ask(text):
    reply = post("/chat/completions", {"model": "policy", "messages": [{"role": "user", "content": text}]})
    return reply["choices"][0]["message"]["content"]
"""
"""A client without a library: it starts in a moment."""


@pytest.fixture
def command(tmp_path: Path) -> Callable[[str], list[str]]:
    def written(code: str) -> list[str]:
        (tmp_path / "program.py").write_text(ASKS + textwrap.dedent(code))
        return [sys.executable, "-S", str(tmp_path / "program.py")]

    return written


async def play(
    script: list[Step], command: list[str], *, library: Any = None, generate: Any = None, **settings: Any
) -> Trajectory:
    budget = {"question_tokens": 40, "action_tokens": 60, "context_tokens": 2048, "memory_tokens": "null"}
    overrides = [f"budget.{name}={value}" for name, value in budget.items()]
    overrides += [f"{name.replace('__', '.')}={value}" for name, value in settings.items()]
    config = load_config(EXAMPLE, [*overrides, "agent.name=program", f"agent.program={command}", "warm_start=null"])
    engine = ScriptedEngine(TOKENIZER, script)
    agent = make_agent(config, tokenizer=TOKENIZER, generate=generate or engine, search=library or Library())
    played = await agent.rollout(build_question(), trajectory_id="t", group_id="g", member=0)
    if generate is None:
        assert_token_exact(played.contexts, engine)
    return played


async def test_it_reads_the_question_and_prints_the_answer(command):
    program = command("""
        question = sys.stdin.read().strip()
        passages = post("/search", {"query": "France"})["passages"]
        print("log: found", len(passages))
        print(ask(question + " " + passages[0]))
        """)
    played = await play(["Paris"], program)
    assert (played.end_reason, played.answer) == (EndReason.ANSWERED, "Paris")
    (context,) = played.contexts
    assert [search.query for search in context.searches] == ["France"]
    shown = TOKENIZER.decode(context.token_ids)
    assert build_question().text in shown and "Paris is the capital" in shown


def test_the_loop_of_a_server_starts_a_process_in_which_no_python_runs_before_the_command(command):
    """uvloop forks, and the child may wait for ever for a lock that another thread held: so it was seen with torch."""
    forked = threading.Event()
    os.register_at_fork(after_in_child=lambda: time.sleep(600) if forked.is_set() else None)
    forked.set()
    try:
        played = uvloop.run(play(["Paris"], command("print(ask('Where?'))")))
    finally:
        forked.clear()
    assert played.answer == "Paris"


async def test_the_openai_client_finds_the_policy_by_itself(tmp_path):
    (tmp_path / "program.py").write_text(
        textwrap.dedent("""
        import sys
        from openai import OpenAI

        messages = [{"role": "user", "content": sys.stdin.read()}]
        client = OpenAI()
        assert [model.id for model in client.models.list()] == ["policy"]
        for _ in range(2):
            reply = client.chat.completions.create(model="policy", messages=messages)
            messages += [reply.choices[0].message, {"role": "user", "content": "Sure?"}]
        stream = client.chat.completions.create(model="policy", messages=messages, stream=True)
        print("".join(chunk.choices[0].delta.content or "" for chunk in stream))
        """)
    )
    played = await play(["Rome", "No", "Paris"], [sys.executable, str(tmp_path / "program.py")])
    assert played.answer == "Paris" and len(played.contexts) == 1


async def test_attempts_at_the_same_time_keep_their_requests_apart(command):
    """Their processes have a limit together, also under other budgets."""
    program = command("print(ask(sys.stdin.read()))")
    settings = ["agent.name=program", f"agent.program={program}", "warm_start=null", "agent.max_processes=2"]
    configs = [load_config(EXAMPLE, [*settings, f"budget.max_turns={turns}"]) for turns in range(5, 10)]
    running, most, two = 0, 0, asyncio.Event()

    async def generate(token_ids: list[int], *, max_tokens: int) -> Completion:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        if most == 2:
            two.set()
        await asyncio.wait_for(two.wait(), 30)
        await asyncio.sleep(0.1)
        running -= 1
        return await ScriptedEngine(TOKENIZER, ["Paris"])(token_ids, max_tokens=max_tokens)

    agents = [make_agent(config, tokenizer=TOKENIZER, generate=generate, search=Library()) for config in configs]
    questions = [build_question(id=f"q-{place}", text=f"Question {place}?") for place in range(5)]
    played = await asyncio.gather(
        *(
            agent.rollout(question, trajectory_id="t", group_id="g", member=0)
            for agent, question in zip(agents, questions, strict=True)
        )
    )
    assert most == 2
    for question, trajectory in zip(questions, played, strict=True):
        (context,) = trajectory.contexts
        assert question.text in TOKENIZER.decode(context.token_ids)


async def test_without_the_key_of_the_attempt_nothing_is_answered(command):
    program = command("""
        try:
            post("/chat/completions", {"model": "x", "messages": []}, key="sk-guess")
        except urllib.error.HTTPError as error:
            print(ask("a"), error.code)
        """)
    assert (await play(["Paris"], program)).answer == "Paris 401"


async def test_no_proxy_is_asked_for_the_policy(command, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert (await play(["Paris"], command("print(ask('a'))"))).answer == "Paris"


@pytest.mark.parametrize("code", ["ask('a')", "ask('a'); print()"])
async def test_without_output_there_is_no_answer(command, code):
    played = await play(["Paris"], command(code))
    assert (played.end_reason, played.answer) == (EndReason.NO_ACTION, None)


async def test_a_separator_of_unicode_ends_no_line_of_the_answer(command):
    program = command(r"""
        ask("x")
        sys.stdout.reconfigure(encoding="utf-8")
        print("log\rmore log\nParis\u2028(France)\x85\x0cEurope ")
        """)
    assert (await play(["x"], program)).answer == "Paris\u2028(France)\x85\x0cEurope"


async def test_it_ends_with_the_limit_that_it_met(command):
    played = await play(["Paris"], command("ask('a'); ask('b')"), budget__max_turns=1)
    assert (played.end_reason, played.answer) == (EndReason.MAX_TURNS, None)


@pytest.mark.parametrize(
    ("code", "timeout_s", "error", "words"),
    [
        ("ask('a'); {}['answer']", 60, UserCodeError, "for question q-1 ended with code 1: .*KeyError: 'answer'"),
        ("print('Paris')", 60, UserCodeError, "asked nothing of the model for question q-1"),
        ("ask('a'); os.kill(os.getpid(), 9)", 60, ProgramStopped, "for question q-1 was ended by SIGKILL"),
        ("ask('a'); time.sleep(600)", 2, ProgramStopped, r"took longer than agent.timeout_s 2 for question q-1"),
    ],
)
async def test_a_program_that_fails(command, code, timeout_s, error, words):
    with pytest.raises(error, match=f"(?s){words}"):
        await play(["Paris"], command(code), agent__timeout_s=timeout_s)


async def test_a_fault_of_the_engine_ends_the_program_at_once(command):
    async def fails(*_: Any, **__: Any) -> Completion:
        raise InfrastructureFault("the engine is down")

    program = command("""
        try:
            ask("a")
        except urllib.error.HTTPError:
            time.sleep(600)
        """)
    with pytest.raises(InfrastructureFault, match="the engine is down"):
        await play([], program, generate=fails)


async def test_nothing_that_it_started_outlives_it(command, tmp_path):
    program = command(f"""
        import subprocess
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
        open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
        print(ask("a"))
        """)
    assert (await play(["Paris"], program)).answer == "Paris"
    assert await ended(int((tmp_path / "pid").read_text()))


async def test_an_attempt_that_is_cancelled_ends_its_program(command, tmp_path):
    asked = asyncio.Event()

    async def waits(*_: Any, **__: Any) -> Completion:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    program = command(f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); ask('a')")
    attempt = asyncio.create_task(play([], program, generate=waits))
    await asked.wait()
    attempt.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attempt
    assert await ended(int((tmp_path / "pid").read_text()))


async def test_a_request_that_it_gives_up_is_no_context(command):
    engine = ScriptedEngine(TOKENIZER, ["Paris"])

    async def generate(token_ids: list[int], *, max_tokens: int) -> Completion:
        if "slow" in TOKENIZER.decode(token_ids):
            await asyncio.Event().wait()
        return await engine(token_ids, max_tokens=max_tokens)

    program = command("""
        import socket
        socket.setdefaulttimeout(0.3)
        try:
            ask("slow")
        except TimeoutError:
            socket.setdefaulttimeout(None)
            print(ask("quick"))
        """)
    played = await play([], program, generate=generate)
    assert played.answer == "Paris" and len(played.contexts) == 1


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("[]", "agent.program is empty"),
        ("[no-such-command, x]", "the command 'no-such-command' is neither in PATH nor in"),
        ("[python, -S, no_such_program.py]", "there is no file 'no_such_program.py' in"),
    ],
)
def test_a_command_that_is_none_is_refused_before_anything_starts(program, words):
    config = load_config(EXAMPLE, ["agent.name=program", f"agent.program={program}", "warm_start=null"])
    assert [words in finding.text for finding in check_run(config) if finding.fatal] == [True]
    with pytest.raises(ConfigError, match=words):
        make_agent(config, tokenizer=TOKENIZER, generate=ScriptedEngine(TOKENIZER, []), search=Library())


async def ended(pid: int) -> bool:
    """Returns whether the process is gone, or only waits for its parent to notice."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
            os.kill(pid, 0)
        except (FileNotFoundError, ProcessLookupError):
            return True
        await asyncio.sleep(0.05)
    return False


async def test_the_end_of_a_commands_errors_comes_through_the_stream_of_groups(command, monkeypatch):
    with pytest.raises(UserCodeError) as failed:
        await play(["Paris"], command("ask('a'); {}['answer']"))
    trace = f"Traceback (most recent call last):\n{type(failed.value).__module__}.UserCodeError: {failed.value}\n"

    class Failed:
        def iter_batches(self, **_: Any) -> Any:
            raise RayTaskError("play", trace, ValueError("lost"))

    monkeypatch.setattr(ray.data, "read_datasource", lambda *_, **__: Failed())
    with pytest.raises(UserCodeError) as told:
        list(stream_tables(lambda: [], [], rows="trajectories", raises=(UserCodeError,)))
    assert str(told.value) == str(failed.value) and str(told.value).endswith("\n  KeyError: 'answer'")


async def test_a_command_that_cannot_be_started_is_an_error_that_names_it(tmp_path):
    script = tmp_path / "agent"
    script.write_text("echo Paris\n")
    script.chmod(0o755)
    with pytest.raises(UserCodeError, match=r"agent\.program \S+ cannot be started: \[Errno 8\] Exec format error"):
        await play([], [str(script)])


@pytest.mark.parametrize("words", [["sh", "-lc", "python agent.py"], ["sh", "-c", "cd tools && python agent.py"]])
def test_what_a_shell_reads_is_no_file(words):
    load_config(EXAMPLE, ["agent.name=program", f"agent.program={words}", "warm_start=null"]).agent.check()
