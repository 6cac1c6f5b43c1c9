"""The table of the kinds of job, and a kind of the user's own."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from mempipe.cli import main
from mempipe.kinds import BUILT_IN, named
from mempipe.loader import load_job
from mempipe.settings import ConfigError, Section

OWN = """
from mempipe.checks.findings import fatal, ok
from mempipe.kinds import JobKind
from mempipe.settings import Section


class Counting(Section):
    up_to: int


def check(config):
    return [ok("up_to: fine") if config.up_to > 0 else fatal(f"up_to is {config.up_to}; it is at least 1")]


def count(config, *, resume):
    print(*range(config.up_to), resume)


JOB = JobKind(
    described="a count",
    command="mempipe run",
    section="counting:Counting",
    check="counting:check",
    main="counting:count",
)
"""


@pytest.fixture
def own(tmp_path, monkeypatch) -> str:
    """A config of a kind that is in a module of the user's own."""
    (tmp_path / "counting.py").write_text(OWN)
    (tmp_path / "count.yaml").write_text("kind: counting\nup_to: 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return str(tmp_path / "count.yaml")


@pytest.mark.parametrize("name", BUILT_IN)
def test_all_that_a_row_names_is_there_and_takes_what_it_is_given(name):
    kind = BUILT_IN[name]
    assert issubclass(kind.settings(), Section)
    assert kind.marks <= set(kind.settings().model_fields) or name == "service"
    assert _taken(kind.check) <= {"devices", "resume"} and (not kind.main or _taken(kind.main) <= {"resume"})
    kind.settings().model_validate(kind.example)


def _taken(path: str) -> set[str]:
    """The parameters after the config that have to be given by name, and that have no default."""
    _, *others = inspect.signature(named(path)).parameters.values()
    return {each.name for each in others if each.default is each.empty or each.name in ("devices", "resume")}


def test_what_a_check_and_a_main_take_is_given_to_them():
    asked = {name: _taken(kind.check) for name, kind in BUILT_IN.items()}
    assert {name for name, taken in asked.items() if "devices" in taken} == {
        "run",
        "chain",
        "evaluation",
        "sweep",
        "agent-service",
    }
    assert {name for name, kind in BUILT_IN.items() if kind.main and "resume" in _taken(kind.main)} == {"run", "sweep"}


@pytest.mark.parametrize(
    "file", sorted((Path(__file__).parents[2] / "jobs/configs").glob("*.yaml")), ids=lambda f: f.stem
)
def test_every_shipped_config_is_told_by_its_marks(file):
    kind, _ = load_job(file)
    assert load_job(file, kind=next(name for name in BUILT_IN if BUILT_IN[name] == kind))


def test_a_kind_of_ones_own_is_run_and_checked(own, capsys):
    assert main(["run", own, "up_to=2", "--resume"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "0 1 always"
    assert main(["doctor", own]) == 0
    assert "up_to: fine" in capsys.readouterr().out


def test_its_findings_are_said_before_anything_is_done(own, capsys):
    assert main(["run", own, "up_to=0"]) == 2
    said = capsys.readouterr()
    assert "up_to is 0; it is at least 1" in said.err and "always" not in said.out


def test_another_command_does_not_take_it(own):
    with pytest.raises(ConfigError, match="describes a count, not a training run; `mempipe run` takes it"):
        load_job(own, kind="run")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("nowhere", "kind is 'nowhere', which cannot be imported"),
        ("json", "kind is 'json', a module without JOB = JobKind"),
        ("7", "kind is 7; it is the module of a user-defined kind of job"),
    ],
)
def test_a_kind_that_is_not_there_is_refused(tmp_path, kind, message):
    (tmp_path / "c.yaml").write_text(f"kind: {kind}\n")
    with pytest.raises(ConfigError, match=message):
        load_job(tmp_path / "c.yaml")


def test_what_serve_deploys_is_not_run(capsys):
    assert main(["run", "jobs/configs/retrieval_service.yaml"]) == 2
    assert "describes a retrieval service; `serve deploy` takes it" in capsys.readouterr().err
