"""The two kinds of programs: an async function in this process, and a command that is started for each attempt."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from tempfile import TemporaryFile
from typing import IO, Protocol
from weakref import WeakKeyDictionary

from mempipe.agents.program.endpoint import client_of, is_of_limit, listening
from mempipe.agents.program.gateway import Gateway
from mempipe.faults import InfrastructureFault
from mempipe.text import replace_surrogates
from mempipe.types import Question
from mempipe.user_code import UserCodeError, user_code

_KEPT_BYTES = 64 * 1024
"""The end of a command's output that is read."""
_SHOWN_CHARS = 2000
"""The end of a command's errors that is shown."""


class ProgramStopped(InfrastructureFault):
    """A program that did not end in time, or that a signal has ended."""


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
    returns texts, best first.
    """

    function: Callable[..., Awaitable[object]]
    timeout_s: float

    async def answer(self, question: Question, gateway: Gateway) -> str | None:
        async with client_of(gateway) as client:
            try:
                async with asyncio.timeout(self.timeout_s):
                    with user_code(f"agent.program failed for question {question.id}"):
                        answer = await self.function(replace_surrogates(question.text), client, gateway.search)
                        if answer is not None and not isinstance(answer, str):
                            raise TypeError(f"it returned {answer!r}; expected a text or None")
                return answer
            except TimeoutError:  # of the deadline: user_code lets no other one pass
                raise _out_of_time(question, self.timeout_s) from None
            except UserCodeError as error:
                if gateway.over is not None and is_of_limit(error):
                    raise gateway.over from error
                raise


@dataclass(frozen=True, slots=True)
class CommandProgram:
    """A command that reads the question from its standard input and writes the answer as the last line of its output.

    It finds the policy by the variables OPENAI_BASE_URL and OPENAI_API_KEY.
    """

    command: list[str]
    timeout_s: float
    max_processes: int
    _places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = field(default_factory=WeakKeyDictionary)

    async def answer(self, question: Question, gateway: Gateway) -> str | None:
        places = self._places.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.max_processes))
        with TemporaryFile() as asked, TemporaryFile() as output, TemporaryFile() as errors:
            asked.write(f"{replace_surrogates(question.text)}\n".encode())
            asked.seek(0)
            async with places, listening(gateway) as (base_url, key):
                process = await asyncio.create_subprocess_exec(
                    *self.command,
                    stdin=asked,
                    stdout=output,
                    stderr=errors,
                    env=_environment(base_url, key),
                    start_new_session=True,
                )
                gateway.on_fault = lambda: _kill(process)
                try:
                    async with asyncio.timeout(self.timeout_s):
                        code = await process.wait()
                except TimeoutError:
                    raise _out_of_time(question, self.timeout_s) from None
                finally:
                    _kill(process)
            return self._answer(question, gateway, code, _end_of(output), _end_of(errors))

    def _answer(self, question: Question, gateway: Gateway, code: int, output: str, errors: str) -> str | None:
        if code and gateway.over is not None:
            raise gateway.over
        told = f"{shlex.join(self.command)[:200]} for question {question.id}"
        if code < 0:
            raise ProgramStopped(f"agent.program {told} was ended by {signal.Signals(-code).name}")
        if code:
            raise UserCodeError(f"agent.program {told} ended with code {code}: {errors.strip()[-_SHOWN_CHARS:]}")
        lines = output.strip().splitlines()
        return lines[-1].strip() if lines else None


def _out_of_time(question: Question, timeout_s: float) -> ProgramStopped:
    return ProgramStopped(f"agent.program did not end within agent.timeout_s {timeout_s:g} for question {question.id}")


def _environment(base_url: str, key: str) -> dict[str, str]:
    """Returns this process's variables, with those by which a client finds the policy and goes there directly."""
    variables = {**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": key}
    for name in ("NO_PROXY", "no_proxy"):
        variables[name] = ",".join(filter(None, [variables.get(name), "127.0.0.1"]))
    return variables


def _end_of(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _KEPT_BYTES))
    return file.read().decode(errors="replace")


def _kill(process: Process) -> None:
    """Ends the process and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
