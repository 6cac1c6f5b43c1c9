"""`mempipe.train`: the checks and the run of `mempipe train`, and Python objects where a config takes a name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from miniature import locked_elsewhere
from notebook_agent import agent as notebook_agent  # of examples/
from program_agent.program import solve
from stand_in_run import NUM_STEPS, Strike, stand_in_run

import mempipe
from mempipe.actors.cluster import connected
from mempipe.api.objects import with_names
from mempipe.api.settings import nested
from mempipe.checks.run import check_run
from mempipe.loader import load_config
from mempipe.types import Question, Trajectory
from mempipe.user_code import load_user_object
from pipelines import train

QUICKSTART = Path(__file__).parents[2] / "jobs" / "configs" / "quickstart.yaml"


def brief(trajectory: Any, question: Any) -> float:
    return 1.0 / len(trajectory.contexts)


class Calculator:
    """Has the parts of a tool."""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A training on stand-ins, and the YAML file that describes it."""
    job = stand_in_run(tmp_path, monkeypatch, Strike(place="nowhere", error=RuntimeError))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(job.settings()))
    return job  # its checks are stand-ins too


def test_a_training_returns_its_run(job, tmp_path):
    run = mempipe.train(tmp_path / "run.yaml", **{"evaluation.every_steps": 0}, tracking={"enabled": False})
    assert run.finished and run.folder == job.run_folder and run.metrics["step"].to_list() == list(range(NUM_STEPS + 1))
    assert run.config.evaluation.every_steps == 0 and run.config.evaluation.untrained
    assert run.evaluations["label"].to_list() == ["untrained", "before", "after"]
    assert len(run.checkpoints) == NUM_STEPS


def test_a_training_goes_on_only_when_it_is_told_to(job):
    short = mempipe.train(job.settings(), num_steps=2)
    assert short.state["num_steps"] == 2
    with pytest.raises(mempipe.ConfigError, match="holds a run already: continue it with --resume"):
        mempipe.train(job.settings())
    assert mempipe.train(job.settings(), resume=True).state["num_steps"] == NUM_STEPS


REFUSED = {
    "cannot read config nowhere.yaml": ("nowhere.yaml", {}),
    "budget.max_turn is not a setting; did you mean budget.max_turns?": (None, {"budget.max_turn": 3}),
    "num_steps is 'many'": (None, {"num_steps": "many"}),
    "resume is 'maybe'": (None, {"resume": "maybe"}),
    "reward.function is 3": (None, {"reward": {"function": 3}}),
    "describes an evaluation, not a training run": ("jobs/configs/evaluate_search_qa.yaml", {}),
}


@pytest.mark.parametrize(("message", "given"), REFUSED.items(), ids=list(REFUSED))
def test_a_training_that_cannot_work_is_refused_before_it_starts(job, monkeypatch, message, given):
    monkeypatch.setattr(train, "main", lambda *_, **__: pytest.fail("it started"))
    config, overrides = given
    config = Path(__file__).parents[2] / config if config and "/" in config else config
    with pytest.raises(mempipe.ConfigError) as error:
        mempipe.train(config or job.settings(), **overrides)
    assert message in str(error.value)


@pytest.mark.parametrize("error", [RuntimeError("the engine is gone"), KeyboardInterrupt()])
def test_what_ends_a_training_reaches_the_caller_as_it_is(job, error):
    job.strike.place, job.strike.error, job.strike.after = "learn", lambda: error, 2
    with pytest.raises(type(error)) as raised:
        mempipe.train(job.settings(), max_restarts=0)
    assert raised.value is error and not mempipe.Run(job.run_folder).finished


def test_the_checks_of_the_command_come_first(tmp_path):
    with pytest.raises(mempipe.ConfigError, match=r"data\.train is empty"):
        mempipe.train(QUICKSTART, output=tmp_path, world=None)
    with pytest.raises(mempipe.ConfigError, match="holds no run"):
        mempipe.train(QUICKSTART, output=tmp_path, resume=True)
    assert list(tmp_path.iterdir()) == []


def test_a_training_beside_the_users_own_ray_is_refused_before_it_makes_anything(job, monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    with pytest.raises(
        mempipe.ConfigError, match=r"connected to Ray already \(ray\.init\).*call ray\.shutdown\(\) first"
    ):
        mempipe.train(job.settings())
    assert not job.run_folder.exists()
    with pytest.raises(mempipe.ConfigError, match="connected to Ray already"), connected("", name="x"):
        pass


def test_an_object_for_a_folder_that_cannot_be_written_is_one_sentence():
    with pytest.raises(mempipe.ConfigError, match=r"^output: /proc/runs/r cannot be written: .*; choose another$"):
        with_names({"reward": {"function": lambda trajectory, question: 0.0}}, folder=Path("/proc/runs/r"))


def test_objects_of_a_module_are_named_by_it():
    settings = {"reward": brief, "agent": {"name": notebook_agent, "tools": [Calculator, "json:loads"]}}
    named = with_names(settings)
    assert named["reward"] == {"function": f"{__name__}:brief"}
    assert named["agent"] == {"name": "notebook_agent.agent", "tools": [f"{__name__}:Calculator", "json:loads"]}
    assert with_names({"agent": {"name": "program", "program": solve}})["agent"] == {
        "name": "program",
        "program": "program_agent.program:solve",
    }
    commanded = {"name": "program", "program": ["python", "my_program.py"]}
    assert with_names({"agent": commanded})["agent"] == commanded
    assert with_names({"agent": notebook_agent.AGENT})["agent"] == {"name": "notebook_agent.agent"}
    assert settings["reward"] is brief  # what was given stays as it is


def test_a_function_that_its_module_holds_under_no_name_is_passed_on(monkeypatch):
    nameless = lambda trajectory, question: 0.5  # noqa: E731
    nameless.__qualname__ = nameless.__name__
    monkeypatch.setitem(globals(), "nameless", nameless)
    name = with_names({"reward": nameless})["reward"]["function"]
    assert load_user_object(name, setting="reward.function") is nameless


def test_paths_among_settings_are_texts():
    given = {"warm_start.trajectories": [Path("runs/a")], "output": Path("runs"), "agent": {"tools": (Calculator,)}}
    assert nested(given) == {
        "warm_start": {"trajectories": ["runs/a"]},
        "output": "runs",
        "agent": {"tools": [Calculator]},
    }
    assert nested({"agent.mcp_servers": [{"env": {"A.B": "c"}}]})["agent"]["mcp_servers"] == [{"env": {"A.B": "c"}}]


def in_a_worker(name: str) -> str:
    """Calls a reward in a process that this one starts."""
    code = f"from mempipe.user_code import load_user_object as load; print(load({name!r}, setting='s')(None, None))"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_an_object_without_a_module_is_one_that_other_processes_import(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    weight = 0.5
    half = lambda trajectory, question: weight  # noqa: E731  # as in a notebook: no module, and a value around it
    named = with_names({"reward": {"function": half}}, folder=tmp_path / "my-run")
    name = named["reward"]["function"]
    assert name.startswith("passed_to_my_run_")
    assert load_user_object(name, setting="reward.function")(None, None) == 0.5
    assert in_a_worker(name) == "0.5\n"


def test_another_object_takes_the_place_of_the_one_before(tmp_path, monkeypatch):
    """Within a second too, where Python keeps compiled code."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for value in (1.0, 2.0):
        named = with_names({"reward": {"function": lambda *_, value=value: value}}, folder=tmp_path / "again")
        assert load_user_object(named["reward"]["function"], setting="s")() == value


def reward_of(value: float, folder: Path | None) -> str:
    return with_names({"reward": lambda *_: value}, folder=folder)["reward"]["function"]


@pytest.mark.parametrize("earlier", [None, "passed_to_run"])
def test_runs_of_one_process_keep_their_own_objects(tmp_path, monkeypatch, earlier):
    """`earlier` is the module's name in runs of an earlier version, which they keep when they are resumed."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    folders, names = [tmp_path / part / "run" for part in "ab"], []
    for value, folder in enumerate(folders):
        if earlier:
            (folder / "python").mkdir(parents=True)
            (folder / f"python/{earlier}.py").touch()
        names.append(reward_of(value, folder))
        assert load_user_object(names[-1], setting="s")(None, None) == value
        assert in_a_worker(names[-1]) == f"{value}\n"
        assert not earlier or names[-1].startswith(f"{earlier}:")
    assert [load_user_object(name, setting="s")() for name in names] == ([1, 1] if earlier else [0, 1])
    moved = folders[0].rename(tmp_path / "moved")
    assert reward_of(2, moved) == names[0] and in_a_worker(names[0]) == "2\n"


def test_the_objects_of_a_run_that_is_at_work_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "run"
    (folder / "python").mkdir(parents=True)
    (kept := folder / "python" / "passed_to_run.pickle").write_bytes(b"of the run at work")
    (folder / "python" / "passed_to_run.py").touch()
    with locked_elsewhere(folder), pytest.raises(mempipe.ConfigError, match="another process is at work in"):
        reward_of(1, folder)
    assert kept.read_bytes() == b"of the run at work"


def test_agents_of_one_process_keep_their_own_objects():
    names = [reward_of(value, None) for value in (1, 2)]
    assert [load_user_object(name, setting="s")() for name in names] == [1, 2]


def asks_briefly(trajectory: Trajectory, question: Question) -> list[float | None]:
    return [1.0 for _ in trajectory.contexts]


def test_rewards_of_turns_and_writers_are_objects_too():
    mine = f"{__name__}:asks_briefly"
    assert with_names({"reward": {"per_turn": asks_briefly}})["reward"] == {"per_turn": {mine: 1.0}}
    overrides = nested({"reward": {"per_turn": {"kept_fact": 0.5, asks_briefly: 0.1, "pkg.rewards:brief": 0.2}}})
    assert with_names(overrides)["reward"] == {"per_turn": {"kept_fact": 0.5, mine: 0.1, "pkg.rewards:brief": 0.2}}
    with pytest.raises(mempipe.ConfigError, match=r"reward\.per_turn is 3; expected MODULE:NAME"):
        with_names({"reward": {"per_turn": 3}})
    named = with_names(nested({"tracking.writers": ["mlflow", Calculator]}))
    assert named["tracking"] == {"writers": ["mlflow", f"{__name__}:Calculator"]}


def test_an_object_that_has_no_place_is_refused():
    with pytest.raises(mempipe.ConfigError, match=r"agent\.tools is namespace\(\); expected MODULE:NAME"):
        with_names({"agent": {"tools": [SimpleNamespace()]}})
    spec = notebook_agent.AGENT
    lonely = type(spec)(**{**vars(spec)})
    with pytest.raises(mempipe.ConfigError, match="no module holds as AGENT"):
        with_names({"agent": lonely})


def test_a_reward_of_this_process_trains(job, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(brief, "__module__", "__main__")
    run = mempipe.train(job.settings(), reward=brief)
    module, _, name = run.config.reward.function.partition(":")
    assert module.startswith("passed_to_run_") and name == "brief"
    assert load_config(run.folder / "config.yaml").reward.function == run.config.reward.function
    assert isinstance(sys.modules[module], ModuleType)
    assert mempipe.train(job.settings(), reward=brief, resume=True).config.reward == run.config.reward


def test_a_function_as_reward_leaves_the_other_settings_of_the_reward(job):
    settings = job.settings() | {"reward": {"memory_token_cost": 0.25, "function": "json:loads"}}
    reward = mempipe.train(settings, reward=brief).config.reward
    assert (reward.function, reward.memory_token_cost) == (f"{__name__}:brief", 0.25)


def test_another_process_is_told_where_the_objects_of_a_run_are(tmp_path):
    name = "passed_to_elsewhere_0:brief"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"reward": {"function": name}}))
    with pytest.raises(mempipe.ConfigError) as error:
        load_config(tmp_path / "config.yaml")
    assert str(error.value) == (
        "reward.function is in 'passed_to_elsewhere_0', which a notebook or script passed to a run; it is in "
        "`python` in the run's folder: set PYTHONPATH to that folder to have it imported"
    )


def test_a_refused_training_leaves_the_objects_of_the_run_in_its_folder(job, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    rewards = [lambda trajectory, question, value=value: value for value in (0.25, -5.0)]
    for reward in rewards:
        monkeypatch.setattr(reward, "__module__", "__main__", raising=False)
        reward.__name__ = reward.__qualname__ = "mine"
    name = mempipe.train(job.settings(), num_steps=1, reward=rewards[0]).config.reward.function
    monkeypatch.setattr("mempipe.checks.run.check_run", check_run)
    with pytest.raises(mempipe.ConfigError, match="holds a run already"):
        mempipe.train(job.settings(), reward=rewards[1])
    assert in_a_worker(name) == "0.25\n"
    assert load_user_object(name, setting="reward.function")(None, None) == 0.25


@pytest.mark.parametrize("wrong", [{"num_steps": 0}, {"output": None}, {"name": "a/b"}], ids=str)
def test_wrong_settings_are_refused_before_a_file_is_written(tmp_path, monkeypatch, wrong):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(mempipe.ConfigError, match=next(iter(wrong))):
        mempipe.train({"world": {}}, **wrong, reward=lambda trajectory, question: 0.0)
    assert not list(tmp_path.iterdir())
