"""SIGTERM, SIGINT and SIGHUP: one request to end, and the time that it leaves."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mempipe.cli import main
from mempipe.stop import (
    Interrupted,
    StopRequest,
    children_ignore_sighup,
    keeps_sigterm_handler,
    signals_interrupt,
)


def test_a_signal_ends_the_block_and_tells_what_a_shell_reports():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted) as caught, StopRequest(30.0).listening():
        os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_work_that_is_held_back_ends_first(capsys):
    done = []
    with pytest.raises(Interrupted), StopRequest(30.0).listening() as stop:
        with stop.held_back():
            os.kill(os.getpid(), signal.SIGINT)
            done.append(stop.requested)
        done.append("never")
    assert done == [True]
    assert "SIGINT: the run saves its work and ends within 30 s (grace_s)" in capsys.readouterr().out


def test_a_second_signal_does_not_wait():
    done = []
    with pytest.raises(Interrupted), StopRequest(30.0).listening() as stop, stop.held_back():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        done.append("never")
    assert not done


def test_time_is_left_for_saving():
    stop = StopRequest(10.0)
    assert stop.leaves_time_for(1e9)
    with pytest.raises(Interrupted), stop.listening():
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.leaves_time_for(5.0) and not stop.leaves_time_for(7.0)


def test_what_a_signal_ended_is_an_interruption_whatever_was_raised():
    """Ray turns every exception of a handler into a KeyboardInterrupt of its own."""
    with pytest.raises(Interrupted) as caught, StopRequest(30.0).listening() as stop:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except Interrupted:
            raise KeyboardInterrupt from None
        assert stop.requested
    assert caught.value.exit_code == 143


def test_a_run_in_another_thread_leaves_the_signals_alone():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def run() -> None:
        with StopRequest(30.0).listening():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]


def _leave_as_ray_does() -> None:
    raise SystemExit(int(signal.SIGTERM))


def _interrupt_a_call_of_ray() -> None:
    try:
        signal.raise_signal(signal.SIGTERM)
    except KeyboardInterrupt:
        raise KeyboardInterrupt from None


@pytest.fixture
def default_handler() -> Iterator[None]:
    """A process that has its own handler of SIGTERM, such as a test's that started Ray, is one that has none."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


@pytest.mark.parametrize(
    "end", [lambda: signal.raise_signal(signal.SIGTERM), _leave_as_ray_does, _interrupt_a_call_of_ray]
)
def test_sigterm_ends_any_command_in_a_sentence(end, default_handler, monkeypatch, capsys):
    for function, words, hint in (
        ("data._data_world", ["data", "world"], ""),
        ("index._index_build", ["index", "build", "texts"], "; the same command resumes where this one stopped"),
        (
            "run.run_job",
            ["train", "run.yaml"],
            "; the same command with --resume-if-exists resumes where this one stopped",
        ),
    ):
        monkeypatch.setattr(f"mempipe.cli.{function}", lambda _: end())
        assert main(words) == 143
        assert capsys.readouterr().err == f"interrupted{hint}\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_other_exits_and_other_handlers_are_left_as_they_are():
    with pytest.raises(SystemExit) as caught, signals_interrupt():
        raise SystemExit(2)
    assert caught.value.code == 2
    with pytest.raises(Interrupted) as interrupted, StopRequest(30.0).listening(), signals_interrupt():
        signal.raise_signal(signal.SIGTERM)
    assert interrupted.value.exit_code == 143


def test_ctrl_c_is_not_taken_for_sigterm(default_handler):
    with pytest.raises(KeyboardInterrupt) as caught, signals_interrupt():
        raise KeyboardInterrupt
    assert not isinstance(caught.value, Interrupted)


def test_a_handler_is_there_again_after_ray_has_replaced_it():
    with StopRequest(30.0).listening():
        mine = signal.getsignal(signal.SIGTERM)
        with keeps_sigterm_handler():
            signal.signal(signal.SIGTERM, lambda number, frame: None)
        assert signal.getsignal(signal.SIGTERM) == mine


def test_the_default_of_python_stays_replaced(default_handler):
    with keeps_sigterm_handler():
        signal.signal(signal.SIGTERM, theirs := lambda number, frame: None)
    assert signal.getsignal(signal.SIGTERM) is theirs


def test_sighup_ends_the_block_and_any_command(monkeypatch, capsys):
    with handler_of_sighup(signal.SIG_DFL):
        with pytest.raises(Interrupted) as caught, StopRequest(30.0).listening():
            os.kill(os.getpid(), signal.SIGHUP)
        assert caught.value.exit_code == 129
        monkeypatch.setattr("mempipe.cli.run.run_job", lambda _: signal.raise_signal(signal.SIGHUP))
        assert main(["train", "run.yaml"]) == 129
        said = "interrupted; the same command with --resume-if-exists resumes where this one stopped\n"
        assert capsys.readouterr().err == said
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def test_a_run_that_nohup_started_ignores_sighup():
    with handler_of_sighup(signal.SIG_IGN):
        with StopRequest(30.0).listening() as stop, signals_interrupt():
            os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.requested
        with children_ignore_sighup():
            pass
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_processes_that_a_run_starts_outlive_the_terminal_and_the_run_keeps_its_handler():
    hang_up = ["sh", "-c", "kill -HUP $$; echo alive"]
    with handler_of_sighup(signal.SIG_DFL), StopRequest(30.0).listening():
        mine = signal.getsignal(signal.SIGHUP)
        with children_ignore_sighup():
            assert subprocess.run(hang_up, capture_output=True).stdout == b"alive\n"
        assert signal.getsignal(signal.SIGHUP) == mine
        assert subprocess.run(hang_up, capture_output=True).returncode == -signal.SIGHUP


@contextmanager
def handler_of_sighup(handler: signal.Handlers) -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


IN_A_TERMINAL = """
import sys, time
from pathlib import Path
from mempipe.progress import say
from mempipe.stop import Interrupted, StopRequest
try:
    with StopRequest(30.0).listening() as stop:
        with stop.held_back():
            print("ready", flush=True)
            while not stop.requested:
                time.sleep(0.01)
            say("the checkpoint is written")
            Path(sys.argv[1]).write_text("checkpoint")
except Interrupted as interrupted:
    print("interrupted", file=sys.stderr)
    sys.exit(interrupted.exit_code)
"""


def test_a_closed_terminal_does_not_keep_the_work_from_being_saved(tmp_path):
    saved = tmp_path / "saved"
    process, terminal = pty.fork()
    if not process:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may have been started with nohup
        os.execv(sys.executable, [sys.executable, "-c", IN_A_TERMINAL, str(saved)])
    said = b""
    while b"ready" not in said:
        said += os.read(terminal, 1024)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 129
    assert saved.read_text() == "checkpoint"
