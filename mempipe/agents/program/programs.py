"""The two kinds of programs: an async function in this process, and a command that is started for each attempt."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import inspect
import os
import re
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import IO, Any, Protocol, TypeVar
from weakref import WeakValueDictionary

from openai import AsyncOpenAI

from mempipe.agents.program.endpoint import client_of, is_of_limit, listening
from mempipe.agents.program.gateway import Gateway
from mempipe.faults import InfrastructureFault
from mempipe.text import replace_surrogates
from mempipe.types import Question
from mempipe.user_code import UserCodeError, user_code

T = TypeVar("T")
_KEPT_BYTES = 64 * 1024
"""The end of a command's output that is read."""
_SHOWN_CHARS = 2000
"""The end of a command's errors that is shown."""
_END_S = 10.0
"""Seconds in which a program that is given up has to end; one that does not is left behind."""
_PASSING = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
"""Errors at the start of a process that another attempt may not meet: the machine has too many."""
_PLACES: WeakValueDictionary[tuple[asyncio.AbstractEventLoop, tuple[str, ...], int], asyncio.Semaphore] = (
    WeakValueDictionary()
)
"""Places for the processes of a command, by event loop, command and limit. Each budget has another renderer, and all
share the places, which are kept while an attempt runs or waits."""


class ProgramStopped(InfrastructureFault):
    """A program that did not start or end in time, or that a signal has ended."""

    shows_command = True


class Program(Protocol):
    """A program that answers questions."""

    async def answer(self, question: Question, gateway: Gateway) -> str | None:
        """Returns the program's answer, None for none.

        Raises AttemptOver when the program has failed by a limit of the attempt, ProgramStopped when it was stopped,
        and UserCodeError for every other failure.
        """
        ...


@dataclass(frozen=True, slots=True)
class FunctionProgram:
    """async (question, client, search) -> the answer, None for none: `client` is an AsyncOpenAI, and `search(query)`
    returns texts, best first. If it has the parameters `memory`, `memory_tokens` and `user`, it gets the memory that it
    starts from, the limit of its memories, and who asks.
    """

    function: Callable[..., Awaitable[object]]
    timeout_s: float

    async def answer(self, question: Question, gateway: Gateway) -> str | None:
        async with client_of(gateway) as client:
            try:
                return await _in_time(self._called(question, client, gateway), self.timeout_s, question, gateway)
            except UserCodeError as error:
                if gateway.over is not None and is_of_limit(error):
                    raise gateway.over from error
                raise

    async def _called(self, question: Question, client: AsyncOpenAI, gateway: Gateway) -> str | None:
        with user_code(f"agent.program failed for question {question.id}"):
            known = {
                "memory": gateway.first_memory,
                "memory_tokens": gateway.renderer.budget.memory_tokens,
                "user": gateway.user,
            }
            asked = inspect.signature(self.function).parameters
            more = {name: value for name, value in known.items() if name in asked}
            answer = await self.function(replace_surrogates(question.text), client, gateway.search, **more)
            if answer is not None and not isinstance(answer, str):
                raise TypeError(f"it returned {answer!r}; expected a text or None")
        return None if answer is None else replace_surrogates(answer)


@dataclass(frozen=True, slots=True)
class CommandProgram:
    """A command that reads the question from its standard input and writes the answer as the last line of its output.

    It finds the policy by the variables OPENAI_BASE_URL and OPENAI_API_KEY.
    """

    command: list[str]
    timeout_s: float
    max_processes: int

    async def answer(self, question: Question, gateway: Gateway) -> str | None:
        asked_by = (asyncio.get_running_loop(), tuple(self.command), self.max_processes)
        places = _PLACES.setdefault(asked_by, asyncio.Semaphore(self.max_processes))
        with TemporaryFile() as asked, TemporaryFile() as output, TemporaryFile() as errors:
            asked.write(f"{replace_surrogates(question.text)}\n".encode())
            asked.seek(0)
            async with places, listening(gateway) as (base_url, key):
                process = self._started(asked, output, errors, _environment(base_url, key))
                gateway.on_fault = lambda: _kill(process)
                try:
                    code = await _in_time(_end_of_process(process), self.timeout_s, question, gateway)
                finally:
                    _kill(process)
            return self._answer(question, gateway, code, _end_of(output), _end_of(errors))

    def _started(
        self, asked: IO[bytes], output: IO[bytes], errors: IO[bytes], env: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        try:
            # Not asyncio's: uvloop forks, and runs Python in the child before the command. There the locks of this
            # process's other threads stay locked for ever, and this process waits for the child.
            return subprocess.Popen(
                self.command, stdin=asked, stdout=output, stderr=errors, env=env, start_new_session=True
            )
        except OSError as error:  # of a script without #! for example
            kind = ProgramStopped if error.errno in _PASSING else UserCodeError
            raise kind(f"agent.program {shlex.join(self.command)[:200]} cannot be started: {error}") from error

    def _answer(self, question: Question, gateway: Gateway, code: int, output: str, errors: str) -> str | None:
        if code and gateway.over is not None:
            raise gateway.over
        told = f"{shlex.join(self.command)[:200]} for question {question.id}"
        if code < 0:
            raise ProgramStopped(f"agent.program {told} was ended by {signal.Signals(-code).name}")
        if code:
            shown = _indented(errors.strip()[-_SHOWN_CHARS:])
            raise UserCodeError(f"agent.program {told} ended with code {code}: {shown}")
        return re.split(r"[\r\n]", output.strip())[-1].strip() or None  # str.splitlines ends a line at U+2028 too


async def _in_time(work: Coroutine[Any, Any, T], timeout_s: float, question: Question, gateway: Gateway) -> T:
    """Waits for the program. Raises ProgramStopped when it takes longer than `timeout_s` itself: the policy may be
    silent for longer, while weights are changed for example.
    """
    started, task = time.monotonic(), asyncio.ensure_future(work)
    try:
        while not task.done():
            left_s = timeout_s - (time.monotonic() - started - gateway.waited_s)
            if left_s <= 0:
                raise ProgramStopped(
                    f"agent.program took longer than agent.timeout_s {timeout_s:g} for question {question.id}"
                )
            await asyncio.wait({task}, timeout=left_s)
        return task.result()
    finally:
        task.cancel()
        await asyncio.wait({task}, timeout=_END_S)  # a function may catch even that


def _environment(base_url: str, key: str) -> dict[str, str]:
    """Returns this process's variables, with those by which a client finds the policy and goes there directly."""
    variables = {**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": key}
    for name in ("NO_PROXY", "no_proxy"):
        variables[name] = ",".join(filter(None, [variables.get(name), "127.0.0.1"]))
    return variables


def _indented(text: str) -> str:
    """Returns the lines of a text, all but the first indented: a stream takes such lines for those of one message."""
    return "\n  ".join(line for line in text.splitlines() if line.strip())


def _end_of(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _KEPT_BYTES))
    return file.read().decode(errors="replace")


async def _end_of_process(process: subprocess.Popen[bytes]) -> int:
    """Returns the exit code of a process when it has ended. A thread of its own waits for it, which ends with it."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def wait() -> None:
        code = process.wait()
        with contextlib.suppress(RuntimeError):  # the loop has ended before the process
            loop.call_soon_threadsafe(lambda: ended.done() or ended.set_result(code))

    threading.Thread(target=wait, name="program", daemon=True).start()
    return await ended


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
