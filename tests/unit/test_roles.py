"""In which order the roles of a training wait, load and sleep on a GPU that they share."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mempipe.actors import launch
from mempipe.actors.launch import Roles
from mempipe.settings import ConfigError


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the roles did, in order. Engines and ranks are not there: their calls are noted."""
    found: list[str] = []
    monkeypatch.setattr(Roles, "wait", lambda _: found.append("wait"))
    monkeypatch.setattr(Roles, "_all_engines", lambda *_, phase: found.append(phase))
    monkeypatch.setattr(launch.ray, "get", lambda answer: answer)
    return found


def roles(events: list[str], **plan: Any) -> Roles:
    learners: Any = SimpleNamespace(
        start=lambda _: events.append("start the learner"),
        step=lambda *_, **__: events.append("learn"),
        release_memory=lambda: events.append("release"),
    )
    parts: Any = dict.fromkeys(("config", "namespace", "generators", "retrievers", "references"))
    parts["config"] = SimpleNamespace(folder=Path("folder-that-is-not-there"))
    parts["store"] = SimpleNamespace(hold_engines=SimpleNamespace(remote=lambda held: events.append(f"hold {held}")))
    return Roles(**parts, plan=SimpleNamespace(**plan), learners=learners)  # pyrefly: ignore


@pytest.mark.parametrize(
    ("kind", "order"), [("colocated", ["wait", "start the learner"]), ("separate", ["start the learner"])]
)
def test_a_learner_waits_for_engines_that_measure_the_free_memory_of_its_gpu(kind, order, events):
    roles(events, kind=kind).start_learner(None)  # pyrefly: ignore
    assert events == order


def test_ranks_that_do_not_see_the_folder_of_the_run_train_nothing(events, tmp_path):
    def refuse(folder: Path) -> None:
        assert folder == tmp_path
        raise ConfigError("set `output`")

    training = roles(events, kind="separate")
    training.config = SimpleNamespace(folder=tmp_path)  # pyrefly: ignore
    training.learners.check_folder = refuse  # pyrefly: ignore
    with pytest.raises(ConfigError):
        training.start_learner(None)  # pyrefly: ignore
    assert events == []


def test_engines_sleep_before_the_ranks_learn_and_only_if_the_plan_says_so(events):
    roles(events, sleeps=True, bundles=[{"learner": 1}]).learn([])
    assert events == ["wait", "hold True", "putting engines to sleep", "learn", "release"]
    events.clear()
    roles(events, sleeps=False, bundles=[]).learn([])
    assert events == ["learn"]
