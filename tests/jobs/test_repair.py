"""Jobs that are submitted to a Ray cluster: a training of one step, one that cannot work, and, for `make test-jobs`, a
run that is told to stop, goes on as a submitted job and loses its learner there. It trains MEM1.

`make test` stops a run and kills its learner in test_main_job.py.
"""

from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from miniature import FEW_PROCESSES, MINIATURE, QUICKSTART, SHORT_WARM_START, train_command
from trained import GRAMMAR, NUM_QUESTIONS, check_trained

from mempipe.engines.checkpoint import latest, read_state
from mempipe.tracking.tracker import read_metrics
from tools.processes import ROOT, Marked, Running, command_line
from tools.ray_head import BIN, Head, ray_head

CONFIG = QUICKSTART.with_name("quickstart_mem1.yaml")
NUM_STEPS = 6
OVERRIDES = [
    *FEW_PROCESSES,
    *GRAMMAR,
    "name=run",
    f"num_steps={NUM_STEPS}",
    "checkpoint.every_steps=100",
    "tracking.enabled=false",
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Head]:
    """A head with a token of its own; a job must get along with what was uploaded."""
    with ray_head({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex}) as head:
        yield head


def submit(cluster: Head, module: str, *arguments: str, output: Path) -> Running:
    """`ray job submit` as the job's docstring has it; follows the log to the job's end."""
    command = [str(BIN / "ray"), "job", "submit", f"--address={cluster.dashboard}", "--working-dir=.", "--"]
    command += ["python", "-m", module, *arguments, f"output={output}"]
    return Running(command, marked=cluster.marked, cwd=ROOT, writes=output)


def job_driver(cluster: Head, module: str) -> psutil.Process | None:
    for process in cluster.marked.processes():
        with suppress(psutil.NoSuchProcess):
            if process.cmdline()[1:3] == ["-m", module]:
                return process
    return None


def of_the_job(log: str) -> str:
    """What the job itself has written, of all that `ray job submit` shows."""
    return log.partition("Tailing logs until the job exits")[2]


def test_a_submitted_training_runs_in_what_was_uploaded_and_succeeds(cluster, tmp_path):
    config = str(QUICKSTART.relative_to(ROOT))
    settings = [*MINIATURE, *FEW_PROCESSES, "name=run", "num_steps=1", "warm_start=null", "evaluation.untrained=false"]
    client = submit(cluster, "jobs.train", config, *settings, output=tmp_path)
    job = client.wait_until(lambda: job_driver(cluster, "jobs.train"), every_s=0.1)
    interpreter, uploaded = job.exe(), Path(job.cwd())
    assert interpreter == psutil.Process().exe()
    assert "_ray_pkg_" in str(uploaded)
    assert [name for name in (".venv", ".git", "runs") if (uploaded / name).exists()] == []  # those are not uploaded
    ended = client.wait()
    assert ended.returncode == 0 and "succeeded" in ended.stdout, ended.stdout + ended.stderr
    said = of_the_job(ended.stdout)
    assert f"Report: {tmp_path / 'run' / 'report.html'}" in said and "pid=" not in said and "WARNING" not in said
    newest = latest(tmp_path / "run" / "checkpoints")
    assert newest is not None and read_state(newest).position.step == 1
    (row,) = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "reward" in row]
    assert row["step"] == 1


def test_a_job_that_cannot_work_fails_with_its_sentence(cluster, tmp_path):
    config = str(CONFIG.relative_to(ROOT))
    ended = submit(cluster, "jobs.train", config, "algorithm.group_size=0", output=tmp_path).wait()
    log = ended.stdout + ended.stderr
    assert ended.returncode != 0
    assert "error: algorithm.group_size is 0" in log and "Traceback" not in log


@dataclass(frozen=True, kw_only=True)
class Repaired:
    """What a run left behind that was stopped after some steps, resumed as a job, and robbed of its learner."""

    folder: Path
    steps_at_stop: int
    checkpoint_at_stop: int
    stopped: subprocess.CompletedProcess[str]
    ended: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def repaired(cluster: Head, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repaired]:
    output = tmp_path_factory.mktemp("repair")
    folder, marked = output / "run", Marked()
    try:
        driver = Running(train_command(output, OVERRIDES, config=CONFIG), marked=marked, cwd=output)
        driver.wait_until(lambda: _steps(folder) >= 2, every_s=0.02)
        driver.process.terminate()
        stopped = driver.wait()
    finally:
        marked.end()
    newest, steps_at_stop = latest(folder / "checkpoints"), _steps(folder)
    checkpoint_at_stop = read_state(newest).position.step if newest else 0  # later ones take its place
    settings = [*MINIATURE, *SHORT_WARM_START, *OVERRIDES]
    client = submit(cluster, "jobs.train", str(CONFIG.relative_to(ROOT)), *settings, "--resume", output=output)
    client.wait_until(lambda: _steps(folder) > steps_at_stop, every_s=0.02)
    (rank,) = [process for process in cluster.marked.processes() if "LearnerActor" in command_line(process)]
    rank.kill()
    yield Repaired(
        folder=folder,
        steps_at_stop=steps_at_stop,
        checkpoint_at_stop=checkpoint_at_stop,
        stopped=stopped,
        ended=client.wait(),
    )


def _steps(folder: Path) -> int:
    file = folder / "state.json"
    return json.loads(file.read_text()).get("num_steps", 0) if file.exists() else 0


@pytest.mark.jobs
def test_a_run_that_is_told_to_stop_saves_what_it_has_learnt(repaired):
    assert repaired.stopped.returncode == 143
    assert repaired.checkpoint_at_stop >= repaired.steps_at_stop >= 2
    assert f"saved step {repaired.checkpoint_at_stop} before the run ended" in repaired.stopped.stdout
    assert "SIGTERM received" not in repaired.stopped.stdout + (repaired.stopped.stderr or "")


@pytest.mark.jobs
def test_a_submitted_job_goes_on_with_a_run_and_ends_it_with_its_report(repaired):
    log = repaired.ended.stdout
    assert repaired.ended.returncode == 0 and "succeeded" in log, log + repaired.ended.stderr
    report = json.loads((repaired.folder / "report.json").read_text())
    assert report["num_steps"] == NUM_STEPS and report["num_questions"] == NUM_QUESTIONS
    assert f"train: {NUM_STEPS}/{NUM_STEPS}" in of_the_job(log)  # plain lines of the run itself
    assert "pid=" not in of_the_job(log) and "WARNING" not in of_the_job(log)


@pytest.mark.jobs
def test_a_run_that_loses_its_learner_goes_on_by_itself(repaired):
    assert repaired.ended.stdout.count("restart 1 of max_restarts 3") == 1
    newest = latest(repaired.folder / "checkpoints")
    assert newest is not None and read_state(newest).position.step == NUM_STEPS


@pytest.mark.jobs
def test_every_step_is_on_record_and_no_group_was_trained_twice(repaired):
    rows = [row["step"] for row in read_metrics(repaired.folder / "metrics.jsonl") if "reward" in row]
    assert rows == [*range(1, NUM_STEPS + 1)]
    newest = latest(repaired.folder / "checkpoints")
    assert newest is not None
    groups = [group for step in read_state(newest).position.trained for group in step]
    assert len(groups) == len(set(groups)) == 4 * NUM_STEPS


@pytest.mark.jobs
def test_mem1_learns_its_grammar_from_the_script_and_is_trained_on_all_the_same(repaired):
    check_trained(repaired.folder, "mem1", num_steps=NUM_STEPS, stopped_in=repaired.checkpoint_at_stop)
