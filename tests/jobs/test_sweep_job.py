"""The real `mempipe sweep` with two trials: one of them killed, then the whole sweep, then --resume with a third budget
and two trials at once.

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

from mempipe.config import RunConfig
from mempipe.data.qa import read_questions, write_questions
from mempipe.evaluation.results import read_results
from mempipe.tracking.tracker import last_run_id
from tools.processes import Marked, Running

FIRST, SECOND, THIRD = (f"noise-memory-{tokens}-seed-1" for tokens in (4, 8, 16))
NUM_QUESTIONS = 12


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


def process_of(marked: Marked, trial: str) -> psutil.Process | None:
    for process in marked.processes():
        with suppress(psutil.NoSuchProcess):
            line = process.cmdline()
            if "mempipe.cli" in line and f"{trial}-evaluate.yaml" in line[-1]:
                return process
    return None


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


@pytest.fixture(scope="module")
def swept(world: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swept]:
    output = tmp_path_factory.mktemp("sweep")
    write_questions(output / "questions.parquet", read_questions(world.data.train)[:NUM_QUESTIONS])
    settings = world.model_dump(mode="json", include={"agent", "budget", "retrieval"})
    marked, folder = Marked(), output / "two"
    with answering(held_after=6) as (url, go):
        sweep = {
            "name": "two",
            "output": str(output),
            "budgets": [4, 8],
            "runs": [
                {
                    "name": "noise",
                    "settings": {**settings, "stream": {"groups_in_flight": 2}},
                    "endpoint": {"url": url, "model": "m", "tokenizer": world.model.path},
                }
            ],
            "benchmarks": [{"name": "world", "file": str(output / "questions.parquet")}],
            "questions_per_part": 2,
        }
        (output / "sweep.yaml").write_text(yaml.safe_dump(sweep))
        command = [sys.executable, "-m", "mempipe.cli", "sweep", str(output / "sweep.yaml")]
        try:
            driver = Running(command, marked=marked, cwd=output)
            driver.wait_until(lambda: parts(folder, FIRST), every_s=0.02)
            trial = process_of(marked, FIRST)
            assert trial is not None
            trial.kill()
            go.set()
            driver.wait_until(lambda: process_of(marked, SECOND), every_s=0.2)
            at_kill = driver.stdout
            driver.kill()
            survivors, first = marked.survivors(), parts(folder, FIRST)
            go.clear()  # no trial can end before both are there
            more = ["budgets=[4,8,16]", "trials_at_once=2", "--resume"]
            resumed = Running([*command, *more], marked=marked, cwd=output)
            resumed.wait_until(lambda: process_of(marked, SECOND) and process_of(marked, THIRD), every_s=0.2)
            go.set()
            again = resumed.wait()
            assert again.returncode == 0, again.stdout + again.stderr
            yield Swept(folder, at_kill, survivors, first, again.stdout + again.stderr)
        finally:
            marked.end()


def test_a_killed_trial_starts_again_and_goes_on(swept):
    assert f"{FIRST}: died and will start again" in swept.output_at_kill
    assert f"{FIRST}: finished (1 of 2)" in swept.output_at_kill


def test_a_killed_sweep_leaves_no_process_and_does_only_what_is_missing_two_trials_at_once(swept):
    assert swept.survivors_of_kill == []
    assert "3 trials, 2 of them to do" in swept.output and "finished (2 of 2)" in swept.output
    assert all(f"{trial}: finished" in swept.output for trial in (SECOND, THIRD)) and FIRST not in swept.output
    assert parts(swept.folder, FIRST) == swept.first_parts_at_kill


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
