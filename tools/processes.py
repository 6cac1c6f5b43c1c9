"""Commands that tests and benchmarks start: awaited for as long as they get on, ended with all of their children."""

from __future__ import annotations

import ipaddress
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TypeVar

import psutil

T = TypeVar("T")

ROOT = Path(__file__).parents[1]
MARK = "MEMPIPE_STARTED_BY"
QUIET_S = 300.0
"""A command has hung when nothing of what it writes has grown for so long; the longest silence of a healthy one is an
engine's start."""
GONE_WITHIN_S = 120.0
LOOK_EVERY_S = 1.0
NUM_TAIL_LINES = 40
UNUSED_PORTS = range(20000, 32768)
"""Between the ports that Ray gives to its workers and those that Linux gives to outgoing connections."""


class Marked:
    """Processes are told apart by an environment variable, which children inherit whoever their parent is later."""

    def __init__(self, extra: Mapping[str, str] | None = None) -> None:
        self._mark = uuid.uuid4().hex
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        self.environment = {
            **os.environ,
            MARK: self._mark,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            **(extra or {}),
        }
        for name in ("RAY_ADDRESS", "MLFLOW_TRACKING_URI"):  # mlflow sets its own for every child of this process
            self.environment.pop(name, None)

    def processes(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if self._is_marked(process)]

    def survivors(self, *, named: str = "") -> list[str]:
        """Returns the command lines that hold `named`, of processes that are still there after GONE_WITHIN_S.

        Returns as soon as there are none.
        """
        deadline = time.monotonic() + GONE_WITHIN_S
        while True:
            found = [line for line in map(command_line, self.processes()) if line and named in line]
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.2)

    def open_to_others(self) -> list[str]:
        """Returns the addresses, besides those of the loopback interface, at which they accept connections."""
        sockets = list[Any]()
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                sockets += process.net_connections()
        listening = [ipaddress.ip_address(each.laddr.ip) for each in sockets if each.status == psutil.CONN_LISTEN]
        assert listening, "a service accepts connections"
        return [str(each) for each in listening if not (getattr(each, "ipv4_mapped", None) or each).is_loopback]

    def end(self) -> None:
        """Ends them all."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            return False


def command_line(process: psutil.Process) -> str:
    """Returns the command of a process; "" of one that has ended meanwhile."""
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


class Running:
    """A command at work, without a terminal."""

    def __init__(self, command: Sequence[str], *, marked: Marked, cwd: Path, writes: Path | None = None) -> None:
        """`writes` is a folder in which the command leaves files, `cwd` unless given."""
        self._outputs = (tempfile.TemporaryFile(), tempfile.TemporaryFile())  # noqa: SIM115  # no pipe that can be full
        self._writes = writes or cwd
        self.process = subprocess.Popen(
            command,
            env=marked.environment,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=self._outputs[0],
            stderr=self._outputs[1],
            start_new_session=True,
        )

    @property
    def stdout(self) -> str:
        """Returns what the command has written so far."""
        return self._read(self._outputs[0])

    @property
    def stderr(self) -> str:
        return self._read(self._outputs[1])

    def wait_until(self, condition: Callable[[], T | None], *, every_s: float = 0.05) -> T:
        """Returns the first true value of `condition`, however long the command takes to get there.

        Fails with the end of its output when it ends before, or when nothing that it writes grows for QUIET_S.
        """
        while not (value := self._poll(condition, every_s=every_s)):
            assert self.process.poll() is None, f"it ended early with {self.process.poll()}\n{self._tail()}"
        return value

    def wait(self) -> subprocess.CompletedProcess[str]:
        """Returns how the command ended; waits as long as `wait_until` does."""
        self._poll(lambda: self.process.poll() is not None, every_s=0.05)
        return subprocess.CompletedProcess(self.process.args, self.process.returncode, self.stdout, self.stderr)

    def end(self) -> None:
        """Asks the process to end, and kills it when it does not."""
        self.process.terminate()
        try:
            self.process.wait(timeout=GONE_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Kills the process alone, as a machine that runs out of memory does; its children must notice."""
        self.process.kill()
        self.process.wait()

    def kill_tree(self) -> None:
        """Kills the process and its descendants, also those whose title has overwritten their environment and mark."""
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    child.kill()
        self.kill()

    def _poll(self, condition: Callable[[], T | None], *, every_s: float) -> T | None:
        """Returns the first true value of `condition`, or its last one once the process has ended."""
        signs, last_sign, last_look = self._signs(), time.monotonic(), time.monotonic()
        while True:
            has_ended = self.process.poll() is not None
            value = condition()
            if value or has_ended:
                return value
            if (now := time.monotonic()) - last_look > LOOK_EVERY_S:
                last_look, before, signs = now, signs, self._signs()
                last_sign = now if signs != before else last_sign
                assert now - last_sign < QUIET_S, f"it has written nothing for {QUIET_S:g} s\n{self._tail()}"
            time.sleep(every_s)

    def _signs(self) -> list[tuple[str, int, int]]:
        """Returns sizes and times of what the command writes, which change for as long as it gets on."""
        found = [("", output.fileno(), os.fstat(output.fileno()).st_size) for output in self._outputs]
        for folder, _, names in os.walk(self._writes):  # which passes over folders that have gone; Path.rglob fails
            for path in (os.path.join(folder, name) for name in names):
                with suppress(FileNotFoundError):  # a temporary file has gone already
                    status = os.stat(path)
                    found.append((path, status.st_size, status.st_mtime_ns))
        return found

    def _tail(self) -> str:
        return "\n".join((self.stdout + self.stderr).splitlines()[-NUM_TAIL_LINES:])

    @staticmethod
    def _read(output: IO[bytes]) -> str:
        # The command writes where the descriptor that it shares stands, so the position must stay where it is.
        return os.pread(output.fileno(), os.fstat(output.fileno()).st_size, 0).decode(errors="replace")


def foreground(command: Sequence[str], *, stdout: int | None = None) -> None:
    """Runs a command on this terminal to its end. Ctrl-C reaches both, and a SIGTERM for this process is passed on; it
    waits until the command has saved its work. `subprocess.run` would kill the command after a quarter of a second, or
    leave it to itself.

    Raises CalledProcessError where the command fails, and SystemExit with code 130 after a Ctrl-C, 143 after a SIGTERM.
    """
    told = []

    def pass_on(number: int, _: object) -> None:
        told.append(number)
        process.send_signal(number)

    with subprocess.Popen(command, stdout=stdout) as process:
        before = signal.signal(signal.SIGTERM, pass_on)
        try:
            process.wait()
        except KeyboardInterrupt:
            process.wait()
            raise SystemExit(130) from None
        finally:
            signal.signal(signal.SIGTERM, before)
    if told:
        raise SystemExit(143)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def cpu_seconds() -> float:
    """Returns the user and system time of this process and all its children."""
    process = psutil.Process()
    return sum(sum(one.cpu_times()[:2]) for one in [process, *process.children(recursive=True)])


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens on at the moment.

    Not those that the system gives on request: an outgoing connection could take such a port before its server starts.
    """
    found: list[int] = []
    for port in random.sample(UNUSED_PORTS, len(UNUSED_PORTS)):
        if len(found) == count:
            break
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
    return found


def run(
    command: Sequence[str], *, marked: Marked, cwd: Path, writes: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, bounded as `Running.wait_until` is; ends it and its children when that gives up."""
    try:
        return Running(command, marked=marked, cwd=cwd, writes=writes).wait()
    except BaseException:
        marked.end()
        raise
