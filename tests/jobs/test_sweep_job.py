"""The real `mempipe sweep`: killed at its first trial, then --resume with two more budgets and two trials at once.
`make test-jobs` kills a trial too, and the sweep when one trial is finished.

What answers is a server of the test's own, since what a trial does inside is the subject of other tests.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path

import psutil
import pytest
import yaml

from mempipe.beacons import RECORD, VARIABLE
from mempipe.config import RunConfig
from mempipe.data.qa import read_questions, write_questions
from mempipe.evaluation.results import read_results
from mempipe.tracking.tracker import last_run_id
from tools.processes import Marked, Running

FIRST, SECOND, THIRD = (f"noise-memory-{tokens}-seed-1" for tokens in (4, 8, 16))
NUM_QUESTIONS, PER_PART = 12, 2


@dataclass(frozen=True)
class Swept:
    folder: Path
    output_at_kill: str
    survivors_of_kill: list[str]
    first_parts_at_kill: dict[str, bytes]
    output: str


def parts(folder: Path, trial: str) -> dict[str, bytes]:
    rows = folder / "trials" / trial / "noise" / "world"
    return {path.name: path.read_bytes() for path in sorted(rows.glob("part-*.parquet"))}


@contextmanager
def answering(*, held_after: int) -> Iterator[tuple[str, threading.Event]]:
    """Serves a model that always answers. Its replies after the first `held_after` wait for the event."""
    asked, go = count(1), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply({"data": [{"id": "m"}]})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            if next(asked) > held_after:
                go.wait()
            with suppress(ConnectionError):  # of a trial that was killed
                self.reply({"choices": [{"text": "\\boxed{Lima}", "finish_reason": "stop"}]})

        def reply(self, body: object) -> None:
            content = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", go
    finally:
        go.set()
        server.shutdown()
        server.server_close()


class Sweep:
    """The command of a sweep of one run, and what it leaves."""

    def __init__(self, world: RunConfig, output: Path, url: str, *, budgets: list[int]) -> None:
        write_questions(output / "questions.parquet", read_questions(world.data.train)[:NUM_QUESTIONS])
        settings = world.model_dump(mode="json", include={"agent", "budget", "retrieval"})
        sweep = {
            "name": "two",
            "output": str(output),
            "budgets": budgets,
            "runs": [
                {
                    "name": "noise",
                    "settings": {**settings, "stream": {"groups_in_flight": 2}},
                    "endpoint": {"url": url, "model": "m", "tokenizer": world.model.path},
                }
            ],
            "benchmarks": [{"name": "world", "file": str(output / "questions.parquet")}],
            "questions_per_part": PER_PART,
        }
        (output / "sweep.yaml").write_text(yaml.safe_dump(sweep))
        self.folder, self.marked, self._output = output / "two", Marked({VARIABLE: str(output)}), output

    def run(self, *arguments: str) -> Running:
        command = [sys.executable, "-m", "mempipe.cli", "sweep", str(self._output / "sweep.yaml"), *arguments]
        return Running(command, marked=self.marked, cwd=self._output)

    def process_of(self, trial: str) -> psutil.Process | None:
        """Returns the process that writes the log of the trial."""
        log = self.folder / "logs" / f"{trial}.log"
        for process in self.marked.processes():
            with suppress(psutil.Error, OSError):
                of_a_trial = process.cmdline()[-1:] == ["mempipe.cli.series"]  # no command line once it has ended
                if of_a_trial and Path(f"/proc/{process.pid}/fd/1").samefile(log):
                    return process
        return None


def ended(running: Running) -> str:
    """Returns what the command said until it ended well."""
    done = running.wait()
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def swept(world: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swept]:
    """A sweep of one trial that was killed with it, then resumed with two more budgets and two trials at once."""
    with answering(held_after=6) as (url, go):
        sweep = Sweep(world, tmp_path_factory.mktemp("sweep"), url, budgets=[4])
        try:
            driver = sweep.run()
            driver.wait_until(lambda: parts(sweep.folder, FIRST), every_s=0.02)
            driver.kill()
            survivors, first = sweep.marked.survivors(), parts(sweep.folder, FIRST)
            resumed = sweep.run("budgets=[4,8,16]", "trials_at_once=2", "--resume")
            # No trial can end before two are there.
            resumed.wait_until(lambda: sweep.process_of(FIRST) and sweep.process_of(SECOND), every_s=0.2)
            go.set()
            yield Swept(sweep.folder, driver.stdout, survivors, first, ended(resumed))
        finally:
            sweep.marked.end()


def test_a_killed_sweep_leaves_no_process_and_goes_on_where_it_was_two_trials_at_once(swept):
    assert swept.survivors_of_kill == []
    assert "3 trials, 3 of them to do" in swept.output and "finished (3 of 3)" in swept.output
    assert all(f"{trial}: finished" in swept.output for trial in (FIRST, SECOND, THIRD))
    assert swept.first_parts_at_kill and len(swept.first_parts_at_kill) < NUM_QUESTIONS / PER_PART
    assert parts(swept.folder, FIRST).items() > swept.first_parts_at_kill.items()


def test_a_trial_searches_with_the_retriever_of_the_one_before_it_in_its_place(swept):
    """Two places had one each, and so had the trial that was killed."""
    record = (swept.folder.parent / RECORD).read_text().splitlines()
    assert [json.loads(line)["name"] for line in record].count("retriever.start") == 3
    for trial in (FIRST, SECOND, THIRD):
        log = (swept.folder / "logs" / f"{trial}.log").read_text()
        assert f"trials/{trial}/report.html" in "".join(log.split())


@pytest.mark.jobs
def test_a_killed_trial_starts_again_and_a_finished_one_is_left_alone(world, tmp_path):
    """A trial is killed, then the sweep while its second trial is at work."""
    with answering(held_after=6) as (url, go):
        sweep = Sweep(world, tmp_path, url, budgets=[4, 8])
        try:
            driver = sweep.run()
            driver.wait_until(lambda: parts(sweep.folder, FIRST), every_s=0.02)
            trial = sweep.process_of(FIRST)
            assert trial is not None
            trial.kill()
            go.set()
            driver.wait_until(lambda: sweep.process_of(SECOND), every_s=0.2)
            assert f"{FIRST}: died and will start again" in driver.stdout
            assert f"{FIRST}: finished (1 of 2)" in driver.stdout
            driver.kill()
            assert sweep.marked.survivors() == []
            first = parts(sweep.folder, FIRST)
            output = ended(sweep.run("budgets=[4,8,16]", "trials_at_once=2", "--resume"))
        finally:
            sweep.marked.end()
    assert "3 trials, 2 of them to do" in output and "finished (2 of 2)" in output
    assert all(f"{trial}: finished" in output for trial in (SECOND, THIRD)) and FIRST not in output
    assert parts(sweep.folder, FIRST) == first


def test_the_terminal_shows_the_sweep_and_nothing_else(swept):
    told, table, findings = (swept.output_at_kill + swept.output).partition("percent over all questions")
    for line in told.splitlines():
        assert re.match(r"\[\d\d:\d\d:\d\d\] ", line), line
    assert table and all(f"│ {budget} │" in " ".join(findings.split()) for budget in (4, 8, 16))
    assert findings.splitlines()[-1].startswith("Report: ")


def test_promise_7_every_question_of_every_trial_has_one_row(swept):
    for trial in (FIRST, SECOND, THIRD):
        ids = [row.question_id for row in read_results(swept.folder / "trials" / trial / "noise" / "world")]
        assert len(ids) == len(set(ids)) == NUM_QUESTIONS


def test_trials_stand_below_the_sweep_in_mlflow_and_the_report_is_there(swept):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{swept.folder.parent / 'mlflow.db'}")
    parent = client.get_run(str(last_run_id(swept.folder)))
    assert parent.info.status == "FINISHED" and "noise/em" in parent.data.metrics
    below = f"tags.mlflow.parentRunId = '{parent.info.run_id}'"
    children = client.search_runs([parent.info.experiment_id], below)
    assert {child.info.run_name for child in children} == {FIRST, SECOND, THIRD}
    artifacts = {file.path for file in client.list_artifacts(parent.info.run_id)}
    assert {"budgets.html", "budgets.md", "budgets.svg"} <= artifacts
