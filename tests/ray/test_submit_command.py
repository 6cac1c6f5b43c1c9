"""`mempipe submit` to the head of a Ray cluster, with tokens and without, each from a home folder that was empty."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import counted_job
import httpx
import pytest
import yaml

from mempipe.retrieval.build import build_index
from mempipe.types import Passage
from tools.processes import ROOT, Marked, Running, free_ports, run
from tools.ray_head import AUTHENTICATION, BIN, Head, ray_head

TOKEN_FILE = Path(".ray", "auth_token")
of_one_state = pytest.mark.parametrize("place", ["token"], indirect=True)
"""Marks what does not depend on how a cluster authenticates."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A cluster, and a user of it."""

    state: str
    head: Head
    home: Path
    folder: Path
    """The user's files: a config and its kind of job."""

    def client(self, *, home: Path | None = None) -> Marked:
        """Returns the environment of the user, who has exported the wrong RAY_AUTH_MODE and another address."""
        wrong = {"token": "disabled", "disabled": "token"}[self.state]
        variables = {"HOME": str(home or self.home), "RAY_AUTH_MODE": wrong, "RAY_API_SERVER_ADDRESS": "http://no:1"}
        marked = Marked({**self.head.marked.environment, **variables, "PYTHONPATH": str(ROOT)})
        for name in AUTHENTICATION - {"RAY_AUTH_MODE"}:
            marked.environment.pop(name, None)
        return marked

    def submit(self, *words: str, home: Path | None = None) -> subprocess.CompletedProcess[str]:
        marked = self.client(home=home)
        try:
            return run(self.command(*words), marked=marked, cwd=self.folder)
        finally:
            marked.end()

    def command(self, *words: str) -> list[str]:
        return [str(BIN / "python"), "-m", "mempipe.cli", "submit", *words, f"--address={self.head.dashboard}"]

    def secret(self) -> str:
        return (self.home / TOKEN_FILE).read_text().strip() if self.state == "token" else "no token"


@pytest.fixture(scope="module", params=[pytest.param("disabled", marks=pytest.mark.jobs), "token"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    home, folder = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("user")
    shutil.copy(counted_job.__file__, folder)
    (folder / "count.yaml").write_text("kind: counted_job\nup_to: 3\n")
    for name in (".git", ".venv", "runs"):
        (folder / name).mkdir()
        (folder / name / "large").touch()
    environment = {"HOME": str(home)}
    if request.param == "token":  # `ray start` then asks for it by itself
        generate = [str(BIN / "ray"), "get-auth-token", "--generate"]
        run(generate, marked=Marked(environment), cwd=folder)
    with ray_head(environment, installed=True) as head:
        yield Place(state=request.param, head=head, home=home, folder=folder)


def test_a_job_is_submitted_however_the_cluster_authenticates(place):
    done = place.submit("count.yaml", "up_to=4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "count 0 1 2 3" in done.stdout and "succeeded" in done.stdout.splitlines()[-1]
    assert "files count.yaml counted_job.py" in done.stdout.replace("__pycache__ ", "")  # nothing else is shipped
    line, _, _ = done.stdout.partition("\n[")
    assert line.startswith(f"RAY_AUTH_MODE={place.state} RAY_API_SERVER_ADDRESS={place.head.dashboard} ray job submit")
    assert place.secret() not in done.stdout + done.stderr


@of_one_state
def test_a_submission_ends_with_the_code_of_a_job_whose_config_is_elsewhere(place, tmp_path):
    (tmp_path / "my own.yaml").write_text("kind: counted_job\nup_to: 2\ncode: 7\n")
    done = place.submit(str(tmp_path / "my own.yaml"))
    assert done.returncode == 7, done.stdout + done.stderr
    assert "count 0 1\n" in done.stdout and "failed with code 7" in done.stdout.splitlines()[-1]
    assert "Traceback" not in done.stdout + done.stderr


def test_the_command_that_is_printed_does_the_same(place, tmp_path):
    dry = place.submit("count.yaml", "--dry-run")
    assert dry.returncode == 0 and "count 0" not in dry.stdout, dry.stdout + dry.stderr
    assert (place.home / TOKEN_FILE).exists() == (place.state == "token")
    marked = place.client()
    try:
        done = run(["sh", "-c", dry.stdout], marked=marked, cwd=tmp_path)
    finally:
        marked.end()
    assert done.returncode == 0 and "count 0 1 2" in done.stdout, done.stdout + done.stderr


@of_one_state
def test_a_user_without_the_token_is_told_so(place, tmp_path):
    """Without tokens every user of these tests has none."""
    done = place.submit("count.yaml", "--dry-run", home=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: the cluster at {place.head.dashboard} asks for a token, and there is")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / TOKEN_FILE).exists()


@of_one_state
def test_ctrl_c_ends_the_following_and_says_how_to_stop_the_job(place):
    marked = place.client()
    try:
        client = Running(place.command("count.yaml", "seconds=600"), marked=marked, cwd=place.folder)
        client.wait_until(lambda: "count 0 1 2" in client.stdout, every_s=0.1)
        client.process.send_signal(signal.SIGINT)
        ended = client.wait()
        assert ended.returncode == 130, ended.stdout + ended.stderr
        said = dict(line.split(": ", 1) for line in ended.stderr.splitlines() if ": " in line)
        assert "was not stopped" in ended.stderr and said["follow it with"].partition(" --")[0].endswith("ray job logs")
        stopped = run(["sh", "-c", said["stop it with"]], marked=marked, cwd=place.folder)
        assert stopped.returncode == 0 and "was stopped" in stopped.stdout + stopped.stderr
    finally:
        marked.end()


def test_a_service_is_deployed_however_the_cluster_authenticates(place, tmp_path):
    build_index([Passage(id="1", title="Lima", text="Lima is the capital of Peru.")], tmp_path / "index", lexical=True)
    (port,) = free_ports(1)
    file = tmp_path / "service.yaml"
    file.write_text(yaml.safe_dump(service_of(tmp_path / "index", port=port)))
    done = place.submit(str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    line, *_ = done.stdout.splitlines()
    state, address = f"RAY_AUTH_MODE={place.state}", place.head.dashboard
    assert line == f"{state} RAY_API_SERVER_ADDRESS={address} serve deploy --address {address} {file}"
    assert done.stdout.splitlines()[-1].endswith("retrieval: running")
    found = httpx.post(f"http://127.0.0.1:{port}/search", json={"query": "the capital of Peru"}, timeout=60)
    assert found.status_code == 200 and "Lima" in found.text
    marked = place.client()
    try:
        status = line.removesuffix(str(file)).replace("serve deploy", "serve status")
        again = run(["sh", "-c", status], marked=marked, cwd=tmp_path)
    finally:
        marked.end()
    assert "RUNNING" in again.stdout, again.stdout + again.stderr


@of_one_state
@pytest.mark.jobs
def test_a_service_that_cannot_run_on_the_cluster_is_said_in_a_sentence(place, tmp_path):
    file = tmp_path / "service.yaml"
    file.write_text(yaml.safe_dump(service_of(tmp_path / "nowhere", port=free_ports(1)[0])))
    done = place.submit(str(file))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the service will check on the cluster: " in done.stdout and str(tmp_path / "nowhere") in done.stdout
    assert "retrieval does not run: " in done.stderr and "Traceback" not in done.stdout + done.stderr
    assert "serve status --address" in done.stderr


def test_a_wrong_service_is_refused_before_anything_is_sent(place, tmp_path):
    file = tmp_path / "service.yaml"
    config = service_of(tmp_path / "nowhere", port=8000)
    config["applications"][0]["args"]["num_passages"] = 0
    file.write_text(yaml.safe_dump(config))
    done = place.submit(str(file))
    assert (done.returncode, done.stdout) == (2, "") and "num_passages" in done.stderr
    done = place.submit(str(file), "num_passages=1")
    assert done.returncode == 2 and "deploys" in done.stderr and "change the file" in done.stderr


def service_of(index: Path, *, port: int) -> dict[str, Any]:
    """The shipped config of a retrieval service with another index and port."""
    config = yaml.safe_load((ROOT / "jobs" / "configs" / "retrieval_service.yaml").read_text())
    config["http_options"]["port"] = port
    config["applications"][0]["args"] = {"index": str(index), "num_replicas": 1}
    return config
