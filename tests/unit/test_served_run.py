"""What a service serves, as its settings and a run's folder say; and what is refused before anything starts."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from mempipe.cli import main
from mempipe.engines.config import SamplingConfig
from mempipe.engines.tiny import build_model, build_tokenizer
from mempipe.loader import load_config, parse_section
from mempipe.retrieval.build import build_index
from mempipe.serve import agent, local
from mempipe.serve.agent import NAME, serve_agent
from mempipe.serve.config import AgentServiceConfig
from mempipe.serve.replicas.generator_replica import GeneratorReplica, WrongWeights
from mempipe.serve.served_run import ServedRun, resolve, weights_version
from mempipe.settings import ConfigError
from mempipe.stop import Interrupted
from mempipe.types import Passage

CONFIGS = Path(__file__).parents[2] / "jobs" / "configs"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A finished run of the embedded default."""
    folder = tmp_path_factory.mktemp("runs") / "quick"
    weights = folder / "huggingface"
    weights.mkdir(parents=True)
    build_tokenizer(weights)
    build_model(weights, seed=1)
    build_index([Passage(id="1", title="Lima", text="Lima is the capital of Peru.")], folder / "index")
    config = load_config(CONFIGS / "quickstart.yaml", ["name=quick", f"output={folder.parent}"])
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    (folder / "state.json").write_text("{}")
    return folder


def served(**settings) -> ServedRun:
    return resolve(parse_section(settings, AgentServiceConfig))


def test_the_folder_of_a_run_knows_all(run):
    found = served(run=str(run))
    assert (found.name, list(found.agents), found.sampling) == ("quick", ["memsearcher"], SamplingConfig(temperature=0))
    main_config = found.main
    assert main_config.model.path == str(run / "huggingface") and main_config.retrieval.index == str(run / "index")
    assert (main_config.budget.context_tokens, main_config.agent.prompts) == (512, "tiny")
    assert found.state == run / "service"


def test_a_further_agent_does_not_take_the_place_of_the_services_own(run):
    other = str(CONFIGS / "quickstart.yaml")
    assert list(served(run=str(run), agents={"other": other}).agents) == ["memsearcher", "other"]
    with pytest.raises(ConfigError, match="agents names 'memsearcher', as the service's own agent is called"):
        served(run=str(run), agents={"memsearcher": other})


def test_the_weights_of_a_run_with_adapters_are_served_whole(run):
    assert served(run=str(run), settings={"model": {"lora_rank": 16}}).main.model.lora_rank == 0


def test_settings_replace_those_of_the_run(run, monkeypatch):
    monkeypatch.chdir(run.parent)
    settings = {"budget": {"max_turns": 3}, "evaluation": {"temperature": 0.5}, "retrieval": {"index": "quick/index"}}
    found = served(run="quick", settings=settings, name="mine", state="kept")
    assert (found.main.budget.turn_limit, found.sampling.temperature, found.name) == (3, 0.5, "mine")
    assert found.main.retrieval.index == str(run / "index") and found.state == run.parent / "kept"


def test_further_agents_share_weights_and_index(run, tmp_path):
    (tmp_path / "short.yaml").write_text(
        "agent: {prompts: tiny}\nbudget: {question_tokens: 32, memory_tokens: 16, action_tokens: 32, "
        "observation_tokens: 96, context_tokens: 512}\n"
    )
    found = served(run=str(run), agents={"short": str(tmp_path / "short.yaml")})
    short = found.agents["short"]
    assert short.budget.memory_limit == 16 and found.main.budget.memory_limit == 64
    assert (short.model, short.retrieval) == (found.main.model, found.main.retrieval)
    with pytest.raises(ConfigError, match="end their messages with different texts"):
        served(run=str(run), agents={"react": str(CONFIGS / "quickstart_react.yaml")})


def test_an_agent_that_searches_needs_an_index_though_the_main_one_reads(run, tmp_path):
    reader = load_config(CONFIGS / "quickstart_memagent.yaml", [f"output={tmp_path}"])
    (tmp_path / "reader.yaml").write_text(yaml.safe_dump(reader.model_dump(mode="json")))
    checkpoint, searcher = str(run / "huggingface"), str(CONFIGS / "quickstart.yaml")
    with pytest.raises(ConfigError, match=r"retrieval\.index is empty; agent\.name 'memsearcher' needs it"):
        served(run=str(tmp_path / "reader.yaml"), checkpoint=checkpoint, agents={"memsearcher": searcher})


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "no model is named"),
        ({"run": "nowhere"}, "cannot read config nowhere"),
        ({"settings": {"retrieval": {"index": "none"}}}, "none"),
        ({"settings": {"budget": {"context_tokens": 2000}}}, "budget.context_tokens is 2000"),
        ({"settings": {"budget": {"observation_tokens": 480}}}, "budget.context_tokens is 512"),
        ({"max_turn": 5}, "max_turn is not a setting; did you mean max_turns"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"agent_replicas": {"min": 2}}, "agent_replicas: max is 1, less than min 2"),
    ],
)
def test_what_cannot_work_is_refused(run, settings, reason):
    with pytest.raises(ConfigError, match=reason):
        served(**({"run": str(run)} if settings else {}) | settings)


def test_the_command_says_what_is_wrong_before_it_starts_anything(run, capsys, monkeypatch):
    monkeypatch.delenv("MEMPIPE_API_KEYS", raising=False)
    assert main(["serve", str(run), "max_turns=0"]) == 2
    assert "max_turns is 0" in capsys.readouterr().err
    assert main(["serve", str(run), "--host", "0.0.0.0", "--port", "0"]) == 2
    assert "there are no API keys" in capsys.readouterr().err
    assert main(["serve", str(run), "--index", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert main(["serve", str(run)]) == 2
    assert "agent_service.yaml" in capsys.readouterr().err


def deployment(folder: Path, run: Path, **changes: Any) -> str:
    """Writes a Serve config of the service; `changes` are of its `args`."""
    values = yaml.safe_load((CONFIGS / "agent_service.yaml").read_text())
    values["http_options"]["port"] = 0
    for application in values["applications"]:
        application["args"] = {"run": str(run), "state": str(folder)} | changes
    (folder / "service.yaml").write_text(yaml.safe_dump(values))
    return str(folder / "service.yaml")


WRONG = [
    ("run=/nowhere", "cannot read config /nowhere"),
    ("checkpoint=/nowhere", "model.path is '/nowhere', which does not exist"),
    ("settings.retrieval.index=/nowhere", "/nowhere"),
    ("settings.budget.context_tokens=2000", "budget.context_tokens is 2000"),
    ("settings.generation.cpu_kv_cache_gib=1000000", "all roles on CPUs: at least"),
    ("keys=/nowhere", "keys is '/nowhere', which cannot be read"),
    ("state=/dev/null/here", "/dev/null is not a directory"),
    ("agents.other=/nowhere", "cannot read config /nowhere"),
    ("max_turn=3", "max_turn is not a setting; did you mean max_turns"),
]


@pytest.mark.parametrize(("override", "reason"), WRONG, ids=[override for override, _ in WRONG])
def test_doctor_calls_fatal_what_the_command_refuses(run, tmp_path, capsys, override, reason):
    assert main(["doctor", deployment(tmp_path, run), override]) == 2
    doctor = capsys.readouterr()
    assert reason in doctor.err + doctor.out
    of_command = [] if override.startswith("state=") else [f"state={tmp_path}"]
    assert main(["serve", str(run), *of_command, override]) == 2
    assert reason in capsys.readouterr().err


def test_doctor_lets_a_service_pass_that_can_start(run, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("MEMPIPE_API_KEYS", raising=False)
    path = deployment(tmp_path, run)
    assert main(["doctor", path]) == 0
    found = capsys.readouterr().out
    for text in ("model.path: ", "retrieval.index: ", "state: ", "keys: ", "all roles on CPUs", "is free"):
        assert text in found, text
    assert main(["doctor", path, "--devices", "1"]) == 0  # of a cluster elsewhere
    assert "is free" not in capsys.readouterr().out


def test_doctor_finds_engines_that_are_missing_or_not_asked(run, tmp_path, capsys):
    path = Path(deployment(tmp_path, run))
    text = path.read_text()
    path.write_text(text.replace("generator: generator", "generator: newer"))
    assert main(["doctor", str(path)]) == 2
    assert "user_config.generator of the deployment 'agent' is 'newer'" in capsys.readouterr().out
    path.write_text(text)
    endpoint = ["endpoint.url=http://127.0.0.1:1/v1", "endpoint.model=other", f"endpoint.tokenizer={run}/huggingface"]
    assert main(["doctor", str(path), *endpoint]) == 2
    assert "take the applications ['generator'] out" in capsys.readouterr().out
    path.write_text(text.replace("route_prefix: /", "route_prefix: /agent"))
    assert main(["doctor", str(path)]) == 2
    assert "route_prefix of the application 'agent' is '/agent'; expected '/'" in capsys.readouterr().out
    path.write_text(text.replace("127.0.0.1", "0.0.0.0"))
    assert main(["doctor", str(path)]) == 0
    assert "there are no API keys here" in capsys.readouterr().out


async def test_an_engine_starts_on_no_other_weights_than_it_was_deployed_for(run):
    replica: Any = SimpleNamespace()
    with pytest.raises(WrongWeights, match="not other; deploy them as another model"):
        await GeneratorReplica.__init__(replica, served(run=str(run)).main, "other")


def test_other_weights_have_another_version(run, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(run / "huggingface", folder)
    before = weights_version(str(folder))
    assert before == weights_version(str(folder)) and len(before) == 12
    (file,) = folder.glob("*.safetensors")
    os.utime(file, ns=(1, 1))
    assert weights_version(str(folder)) != before
    assert weights_version("owner/model") == "owner/model"


def test_engines_whose_agents_did_not_start_end_with_the_next_deployment(monkeypatch):
    deployed: list[str] = []
    tried: list[str] = []
    fails: list[str] = []
    weights = ["v1"]

    def deploy(_: object, *, name: str, route_prefix: str | None) -> None:
        tried.append(name)
        if name in fails:
            raise RuntimeError(f"deploying {name} failed")
        deployed[:] = [*(each for each in deployed if each != name), name]

    def status() -> Any:
        agent = SimpleNamespace(replica_states={"RUNNING": 1})
        return SimpleNamespace(applications={NAME: SimpleNamespace(deployments={NAME: agent})})

    monkeypatch.setattr(agent, "serve", SimpleNamespace(run=deploy, delete=deployed.remove, status=status))
    for name in ("_engines", "_agents", "_snapshot"):
        monkeypatch.setattr(agent, name, lambda *_: "")
    monkeypatch.setattr(agent, "weights_version", lambda _: weights[0])
    config = SimpleNamespace(endpoint=None, timeout_s=1.0)
    served: Any = SimpleNamespace(config=config, main=SimpleNamespace(model=SimpleNamespace(path="")), own_engine=True)
    service = agent.LocalService(served)
    service.deploy(served)
    for version, expected in (("v2", ["generator-v1"]), ("v3", ["generator-v3"])):
        weights[0], fails[:] = version, [NAME] * (version == "v2")
        if fails:
            with pytest.raises(RuntimeError):
                service.deploy(served)
            weights[0], fails[:] = "v1", []
            tried.clear()
        service.deploy(served)
        assert tried.pop() == NAME  # whatever ran before: Serve has the new ones as its aim
        assert [name for name in deployed if name != NAME] == expected


def test_edited_prompts_are_served_when_the_service_looks_at_its_files_again(run, tmp_path, monkeypatch):
    tried: list[str] = []
    status = SimpleNamespace(deployments={NAME: SimpleNamespace(replica_states={"RUNNING": 1})})
    stub = SimpleNamespace(
        run=lambda *_, name, route_prefix: tried.append(name),
        status=lambda: SimpleNamespace(applications={NAME: status}),
    )
    monkeypatch.setattr(agent, "serve", stub)
    for name in ("_engines", "_agents"):
        monkeypatch.setattr(agent, name, lambda *_: "")
    prompts = tmp_path / "prompts.yaml"
    text = (CONFIGS.parents[1] / "mempipe" / "agents" / "prompts" / "tiny.yaml").read_text()
    prompts.write_text(text)
    service = agent.LocalService(served(run=str(run), settings={"agent": {"prompts": str(prompts)}}))
    service.deploy(service.served)
    tried.clear()
    service.reload()
    assert tried == []
    prompts.write_text(f"{text}instructions: '{{question}} heed {{instructions}}'\n")
    service.reload()
    assert tried == [NAME]


def test_a_service_goes_on_if_files_are_away_when_it_looks_at_them_again(monkeypatch, capsys):
    reloads = iter([FileNotFoundError(2, "No such file or directory", "model.safetensors"), "v2"])

    def reload() -> str:
        found = next(reloads)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGHUP if found != "v2" else signal.SIGTERM)).start()
        if isinstance(found, OSError):
            raise found
        return found

    @contextmanager
    def served_agent(*_: object, **__: object) -> Iterator[tuple[str, Any]]:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGHUP)).start()
        yield "http://x", SimpleNamespace(served=None, reload=reload)

    for name, value in (("served_agent", served_agent), ("welcome_lines", lambda *_: []), ("logs_of_serve", str)):
        monkeypatch.setattr(agent, name, value)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        serve_agent({"run": "x"}, host="127.0.0.1", port=8000)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    said = capsys.readouterr().out
    assert "the weights stay as they are: [Errno 2] No such file or directory: 'model.safetensors'" in said
    assert "serving weights v2" in said


def test_a_service_that_is_to_find_a_port_names_the_one_that_it_has_found(monkeypatch):
    started: list[int] = []
    monkeypatch.setattr(local, "SERVICE", {})
    monkeypatch.setattr(local, "connected", lambda *_, **__: nullcontext())
    note = SimpleNamespace(start=lambda http_options, **_: started.append(http_options["port"]))
    monkeypatch.setattr(local, "serve", note)
    with local.local_serve("x", host="127.0.0.1", port=0, finishes=False) as url:
        assert started[0] > 0 and url == f"http://127.0.0.1:{started[0]}"


def test_open_answers_are_finished_however_long_they_take_until_a_second_signal(monkeypatch):
    """Serve's client waits for a minute; an answer may take five."""
    waited: list[str] = []

    def delete(name: str) -> None:
        waited.append(name)
        if len(waited) < 3:
            raise TimeoutError(f"{name} was not deleted after 60s")

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(local, "SERVICE", {})
    monkeypatch.setattr(local, "connected", lambda *_, **__: nullcontext())
    monkeypatch.setattr(local, "serve", SimpleNamespace(start=lambda **_: None, delete=delete))
    try:
        stop = local.stop_at_signals(threading.Event())
        with local.local_serve("agent", host="127.0.0.1", port=8000):
            signal.raise_signal(signal.SIGTERM)
            assert stop.is_set()
        assert waited == 3 * ["agent"]
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGINT)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
