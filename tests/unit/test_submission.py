"""`mempipe submit` without a cluster: what is checked here, the command that it amounts to, and what it says."""

from __future__ import annotations

import os
import pickle
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import counted_job
import pytest
import ray
import yaml
from ray.dashboard.modules.job import cli as ray_job
from served_replies import served

from mempipe.actors.job_server import _check_size, _exit_code
from mempipe.actors.lost import LaunchError
from mempipe.checks.findings import fatal
from mempipe.cli import _parsed, main
from mempipe.cli.submit import TAKE_RESUME
from mempipe.environment import PROXIES
from mempipe.settings import ConfigError
from mempipe.submission import DASHBOARD, EXCLUDES, Cluster, checked_job, find_cluster

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "jobs" / "configs"
HERE = Cluster(address=DASHBOARD, environment={"RAY_AUTH_MODE": "token"})


@pytest.fixture(autouse=True)
def no_other_cluster(monkeypatch):
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The folder that is shipped: the cheap kind of job and its config."""
    folder = tmp_path / "shipped"
    folder.mkdir()
    shutil.copy(counted_job.__file__, folder)
    (folder / "count.yaml").write_text("kind: counted_job\nup_to: 3\n")
    monkeypatch.chdir(folder)
    return folder


MODE, VERSION = "/api/authentication_mode", "/api/version"


@pytest.mark.parametrize(
    ("config", "command"),
    [
        ("quickstart.yaml", "train"),
        ("chain_smollm2.yaml", "chain"),
        ("tiny_sweep.yaml", "sweep"),
        ("evaluate_search_qa.yaml", "evaluate"),
        ("index_wiki18_e5.yaml", "index build"),
        ("memtrain_wiki18.yaml", "data memtrain"),
    ],
)
def test_every_kind_of_job_becomes_its_own_command(config, command, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("mempipe.kinds.JobKind.findings", lambda *_, **__: [])
    words = ["output=/shared/x"]
    if config == "tiny_sweep.yaml":  # its own names are in runs/, which is not shipped
        words += ["runs=[{name: a, config: /shared/a}]", "benchmarks=[{name: b, file: /shared/b}]"]
    job = checked_job(f"jobs/configs/{config}", words)
    assert job.command == tuple(command.split())
    assert job.entrypoint == ("python", "-m", "mempipe.cli", *job.command, f"jobs/configs/{config}", *words)
    assert hasattr(_parsed(job.entrypoint[3:]), "resume") == (command in TAKE_RESUME)


def test_the_flag_of_a_resumed_job_is_handed_on(folder):
    words = checked_job("count.yaml", ["up_to=2"], resume="auto").entrypoint
    assert words == ("python", "-m", "mempipe.cli", "run", "count.yaml", "up_to=2", "--resume-if-exists")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["up_to=0"], "up_to is 0; it is at least 1"),
        (["up_to=x"], "up_to is 'x'"),
        (["data=missing.txt"], "data is 'missing.txt', which does not exist"),
        (["data=runs/a.txt"], "data is 'runs/a.txt', and runs is not shipped; give an absolute path"),
        (["data=corpora/a.txt"], "data is 'corpora/a.txt', and corpora is not shipped; give an absolute path"),
    ],
)
def test_a_fault_of_the_config_is_said_before_a_cluster_is_asked(folder, words, said, capsys):
    for name in ("runs", "corpora"):
        (folder / name).mkdir()
        (folder / name / "a.txt").touch()
    (folder / ".rayignore").write_text("# large\n/corpora/\n")
    assert main(["submit", "count.yaml", *words, "--address", "http://127.0.0.1:1"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {said}")


def test_a_path_that_this_machine_lacks_is_left_to_the_job(folder):
    job = checked_job("count.yaml", ["data=/no/such/place/a.txt"])
    assert job.unchecked == ("data is '/no/such/place/a.txt', which does not exist",)


def test_words_do_not_decide_what_is_left_to_the_job(folder, monkeypatch):
    """A message may name a path that is not there and be about a fault of the settings."""
    fault = fatal("up_to is too large for /no/such/place/a.txt, which is not on this machine")
    monkeypatch.setattr("mempipe.kinds.JobKind.findings", lambda *_, **__: [fault])
    with pytest.raises(ConfigError, match="up_to is too large"):
        checked_job("count.yaml", ["up_to=2"])
    model = fatal("model.path is 'me/model'", absent="hf://me/model")
    monkeypatch.setattr("mempipe.kinds.JobKind.findings", lambda *_, **__: [model])
    assert checked_job("count.yaml", ["up_to=2"]).unchecked == ("model.path is 'me/model'",)


def test_an_error_keeps_what_is_absent_on_its_way_through_ray():
    error = pickle.loads(pickle.dumps(ConfigError("no file", absent="/no/file")))
    assert (str(error), error.absent) == ("no file", "/no/file")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], f"output is 'runs', which a job resolves in its copy of this folder.* e.g. output={ROOT}/runs"),
        (["output=/shared", "ray_address=head:6379"], "ray_address is 'head:6379'; leave it empty"),
    ],
)
def test_settings_that_mean_something_else_on_a_cluster_are_refused(words, said, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("mempipe.kinds.JobKind.findings", lambda *_, **__: [])
    with pytest.raises(ConfigError, match=said):
        checked_job("jobs/configs/quickstart.yaml", words)


def test_the_checks_of_a_training_leave_devices_and_absent_paths_to_the_cluster(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = ["output=/no/such/runs", "data.train=/no/such/t.jsonl", "data.validation=/no/such/v.jsonl"]
    words += ["retrieval.index=/no/such/index", "model.path=/no/such/model"]
    job = checked_job("jobs/configs/memsearcher_qwen2.5-3b.yaml", words)
    assert {text.partition(":")[0].partition(" ")[0] for text in job.unchecked} >= {
        "model.path",
        "data.train",
        "data.validation",
        "retrieval.index",
    }
    assert "RAY_ADDRESS" not in os.environ
    with pytest.raises(ConfigError, match=r"^budget.action_tokens is 1"):
        checked_job("jobs/configs/memsearcher_qwen2.5-3b.yaml", [*words, "budget.action_tokens=1"])


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("jobs/configs/retrieval_service.yaml", "describes a retrieval service; `serve deploy` takes it"),
        ("jobs", "jobs is a folder; a job is submitted from a YAML file"),
        ("jobs/none.yaml", "cannot read config jobs/none.yaml"),
    ],
)
def test_what_is_not_the_config_of_a_job_is_refused(path, said, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError, match=said):
        checked_job(path)


def test_resume_is_refused_where_the_command_has_none(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("mempipe.kinds.JobKind.findings", lambda *_, **__: [])
    assert main(["submit", "jobs/configs/chain_smollm2.yaml", "output=/shared", "--resume"]) == 2
    assert "`mempipe chain` has no --resume; after an interruption the same submission" in capsys.readouterr().err


def submitted_by(line: str, monkeypatch) -> dict[str, Any]:
    """Returns what Ray's own command submits for a printed line."""
    words = shlex.split(line.replace("\\\n", " "))  # as a shell joins lines
    submit = words.index("submit")
    assert words[:submit] == ["RAY_AUTH_MODE=token", "ray", "job"]
    submitted: dict[str, Any] = {}

    class Client:
        def submit_job(self, **kwargs: Any) -> str:
            submitted.update(kwargs)
            return "id"

        def get_version(self) -> str:
            return "4"

    def client(address: str, *_: object, **__: object) -> Client:
        submitted["address"] = address
        return Client()

    monkeypatch.setattr(ray_job, "_get_sdk_client", client)
    ray_job.submit.main(["--no-wait", *words[submit + 1 :]], standalone_mode=False)
    return submitted


@pytest.mark.parametrize("inside", [True, False])
def test_the_printed_command_submits_what_mempipe_submits(folder, tmp_path, inside, monkeypatch):
    path = Path("count.yaml")
    if not inside:
        path = tmp_path / "my count.yaml"
        path.write_text("kind: counted_job\nup_to: 3 # 'quoted'\n")
    job = checked_job(str(path), ["data=/no/such/$HOME `x` 'é'"])
    submitted = submitted_by(HERE.submission(job), monkeypatch)
    assert submitted["address"] == DASHBOARD
    assert submitted["entrypoint"] == shlex.join(job.entrypoint)
    assert submitted["runtime_env"] == job.runtime_env == {"working_dir": str(folder), "excludes": EXCLUDES}


@pytest.mark.parametrize("name", ["quickstart", "jobs/configs/quickstart.yaml"])
def test_a_config_that_comes_with_mempipe_travels_as_text(folder, tmp_path, name):
    *_, text = checked_job(name, [f"output={tmp_path}"]).entrypoint[:5]
    assert yaml.safe_load(text) == yaml.safe_load((ROOT / "jobs" / "configs" / "quickstart.yaml").read_text())


@pytest.mark.slow  # an interpreter each
@pytest.mark.parametrize("place", ["../elsewhere/my count.yaml", "runs/count.yaml", ".venv/count.yaml", "mine/a.yaml"])
def test_a_config_that_is_not_shipped_travels_as_text(folder, tmp_path, place):
    path = folder / place
    (folder / ".gitignore").write_text("mine\n")
    path.parent.mkdir(exist_ok=True)
    values = {"kind": "counted_job", "up_to": 3, "data": 'it\'s $HOME\n"é"', "seconds": 1e-06}
    path.write_text(yaml.safe_dump(values))
    job = checked_job(str(path), ["data=''", "code=5"])
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(counted_job.__file__, copy)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(
        shlex.join(job.entrypoint), shell=True, cwd=copy, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 5 and "count 0 1 2" in done.stdout, done.stderr
    (written,) = copy.glob("*.yaml")
    assert yaml.safe_load(written.read_text()) == values


@pytest.mark.parametrize(
    ("reply", "mode"),
    [
        ((200, {"authentication_mode": "token"}), "token"),
        ((200, {"authentication_mode": "disabled"}), "disabled"),
        ((404, "not known to an old Ray"), "disabled"),
    ],
)
def test_a_dashboard_says_how_its_cluster_authenticates(reply, mode):
    with served({MODE: reply}) as url:
        cluster = find_cluster(f"{url}/")
    assert cluster == Cluster(address=url, environment={"RAY_AUTH_MODE": mode})
    assert cluster.ray_job("stop", "id") == f"RAY_AUTH_MODE={mode} ray job stop --address {url} id"


def test_the_address_is_that_of_the_option_then_of_the_environment(monkeypatch):
    with served({MODE: (200, {"authentication_mode": "disabled"})}) as url:
        monkeypatch.setenv("RAY_ADDRESS", url)
        assert find_cluster() == Cluster(address=url, environment={"RAY_AUTH_MODE": "disabled"})
        monkeypatch.setenv("RAY_ADDRESS", "http://elsewhere:8265")
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", url)
        assert find_cluster().address == url
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # of the control store, which is not a dashboard
        monkeypatch.delenv("RAY_API_SERVER_ADDRESS")
        cluster = find_cluster(url.removeprefix("http://"))
    assert cluster.address == url
    # `ray job --address` alone would use RAY_ADDRESS
    assert cluster.environment == {"RAY_AUTH_MODE": "disabled", "RAY_API_SERVER_ADDRESS": url}


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ((200, "<html>"), "answers with status 200, but not as a Ray dashboard"),
        ((200, ["token"]), "answers with status 200, but not as a Ray dashboard"),
        ((503, "no"), "answers with status 503, but not as a Ray dashboard"),
    ],
)
def test_another_server_is_not_taken_for_a_cluster(reply, said):
    with served({MODE: reply}) as url, pytest.raises(ConfigError, match=f"^{url} {said}"):
        find_cluster(url)


@pytest.mark.parametrize("proxy", ["http_proxy", "all_proxy"])
def test_a_cluster_that_a_proxy_keeps_from_us_is_told_with_the_way_around_it(monkeypatch, proxy):
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    said = "no Ray dashboard answers at http://head.invalid:8265 .*"
    with pytest.raises(ConfigError, match=said) as without:
        find_cluster("http://head.invalid:8265")
    assert "proxy" not in str(without.value)
    with served({f"http://head.invalid:8265{MODE}": (502, "<html>")}) as url:  # the proxy
        monkeypatch.setenv(proxy, url)
        monkeypatch.setenv("no_proxy", "127.0.0.1,other.invalid")
        with pytest.raises(ConfigError, match=r"status 502.*with NO_PROXY=head\.invalid none is"):
            find_cluster("http://head.invalid:8265")
        monkeypatch.setenv("no_proxy", ".invalid")
        with pytest.raises(ConfigError, match=said) as direct:
            find_cluster("http://head.invalid:8265")
    assert "proxy" not in str(direct.value)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("http://127.0.0.1:1", "no Ray dashboard answers at http://127.0.0.1:1 .*refused.*is the cluster up"),
        ("ray://127.0.0.1:10001", "ray://127.0.0.1:10001 is not the address of a Ray dashboard, e.g."),
        ("http://a:b:c", "no Ray dashboard answers at http://a:b:c "),
    ],
)
def test_an_address_without_a_cluster_is_said_in_a_sentence(address, said):
    with pytest.raises(ConfigError, match=said):
        find_cluster(address)


def test_a_password_in_an_address_is_not_printed():
    cluster = Cluster(address="http://ann:secret@head:8265", environment={})
    assert cluster.ray_job("stop", "id") == "ray job stop --address http://***@head:8265 id"


def with_token(headers: Any) -> tuple[int, Any]:
    return (401, "Unauthorized") if "authorization" not in headers else (403, "Forbidden")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replies", "token", "said"),
    [
        (
            {MODE: (200, {"authentication_mode": "token"}), VERSION: (0, with_token)},
            "",
            "asks for a token, and there is none; put the cluster's token into",
        ),
        (
            {MODE: (200, {"authentication_mode": "token"}), VERSION: (0, with_token)},
            "0123456789abcdef" * 2,
            "does not accept the token of this machine; put",
        ),
        (
            {VERSION: (200, {"version": "4", "ray_version": "2.9.3"})},
            "",
            f"runs Ray 2.9.3, and mempipe is installed here with Ray {ray.__version__}",
        ),
        ({}, "", "does not answer as the dashboard of a Ray cluster (Version check returned 404"),
    ],
)
def test_what_keeps_a_cluster_from_taking_a_job_is_said_in_a_sentence(folder, tmp_path, replies, token, said):
    """In a process of its own, since Ray reads its variables once; with a home that nothing was in before."""
    environment = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)} | (
        {"RAY_AUTH_TOKEN": token} if token else {}
    )
    with served(replies) as url:
        command = [sys.executable, "-m", "mempipe.cli", "submit", "count.yaml", "--address", url]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ") and said in line
    assert not token or token not in done.stdout + done.stderr


def test_a_folder_that_is_too_large_is_refused_before_it_is_read(folder):
    for name in ("runs", "corpus", ".venv"):
        (folder / name).mkdir()
        with (folder / name / "large").open("wb") as file:
            file.truncate(3 * 2**30)  # without a byte on the disk
    with pytest.raises(
        ConfigError, match=f"^{folder} has 3,072 MiB, 3,072 of them in corpus, which is more than the 100"
    ):
        _check_size(folder, EXCLUDES)
    (folder / ".rayignore").write_text("/corpus\n")
    _check_size(folder, EXCLUDES)


def test_the_repository_ships_neither_data_nor_results():
    ignored = {*(ROOT / ".rayignore").read_text().split(), *(ROOT / ".gitignore").read_text().split()}
    assert {"/data", "/models", "runs/", "evaluations/", "sweeps/"} <= ignored
    _check_size(ROOT, EXCLUDES)


@pytest.mark.parametrize(
    ("status", "code", "exit_code", "said"),
    [
        ("SUCCEEDED", 0, 0, "id succeeded"),
        ("FAILED", 2, 2, "id failed with code 2"),
        ("FAILED", -9, 137, "id failed with code -9"),
        ("FAILED", None, 1, "id failed: no place for it"),
        ("STOPPED", None, 143, "id was stopped"),
    ],
)
def test_a_submission_ends_with_the_code_of_its_job(status, code, exit_code, said, capsys):
    details = SimpleNamespace(status=SimpleNamespace(value=status), driver_exit_code=code, message="no place\nfor it")
    assert _exit_code("id", details) == exit_code
    assert capsys.readouterr().out.strip().endswith(said)


@pytest.mark.parametrize(("ends_by", "exit_code"), [(KeyboardInterrupt, 130), (LaunchError, 1), (None, 4)])
@pytest.mark.parametrize("words", [[], ["--no-wait"], ["--dry-run"]])
def test_a_job_is_followed_unless_asked_otherwise(folder, monkeypatch, capsys, ends_by, exit_code, words):
    calls: list[str] = []

    class Server:
        def __init__(self, address: str, *, environment: object) -> None: ...

        def submit(self, entrypoint: object, runtime_env: object) -> str:
            calls.append("submit")
            return "job-1"

        def follow(self, job_id: str) -> int:
            calls.append("follow")
            if ends_by:
                raise ends_by("no more log")
            return 4

    monkeypatch.setattr("mempipe.actors.job_server.JobServer", Server)
    with served({MODE: (200, {"authentication_mode": "token"})}) as url:
        code = main(["submit", "count.yaml", "--address", url, *words])
    said = capsys.readouterr()
    assert said.out.startswith(f"RAY_AUTH_MODE=token ray job submit --address {url} \\\n")
    later = f"follow it with: RAY_AUTH_MODE=token ray job logs --address {url} --follow job-1\n"
    later += f"stop it with: RAY_AUTH_MODE=token ray job stop --address {url} job-1\n"
    if words:
        assert code == 0 and calls == ["submit"] * (words == ["--no-wait"])
        assert (later in said.out) == (words == ["--no-wait"])
    else:
        assert code == exit_code and calls == ["submit", "follow"]
        assert (f"job-1 was not stopped\n{later}" in said.err) == bool(ends_by)
