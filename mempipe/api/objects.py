"""Python objects where a config takes a name: a user-defined reward, tool or agent.

Workers import such an object by its module's name, as they do for `mempipe train`. An object of a notebook or of the
script that runs has no module that they could import: cloudpickle writes it to a file in the folder of the run, next to
a module that reads it.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import itertools
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from mempipe.agents.registry import AgentSpec
from mempipe.settings import ConfigError
from mempipe.storage.files import lock, whole_file, write_text
from mempipe.user_code import PASSED

_MODULE = '''\
"""Made by mempipe.train: what a notebook or a script passed as Python objects. Delete it with the run."""

from pathlib import Path

import cloudpickle

globals().update(cloudpickle.loads(Path(__file__).with_suffix(".pickle").read_bytes()))
'''
"""The text never changes: Python takes compiled code for that of a newer text of the same size and second, so the
objects are in a separate file."""
_loads = itertools.count(1)


def with_names(settings: Mapping[str, Any], *, folder: Path | None = None) -> dict[str, Any]:
    """Returns settings with the name of each Python object in its place: `agent` and `agent.name` (an AgentSpec or its
    module), `agent.tools` (classes), `agent.program` (a function), `reward`, `reward.function` and `reward.per_turn`
    (functions; the last may be a mapping from functions to weights), `tracking.writers` (classes).

    An object that no module holds goes into a module in `folder`; None: into one of this process alone. Raises
    ConfigError for an object that has no place there.
    """
    passed = Passed(folder)
    result = named(settings, passed)
    passed.write()
    return result


def named(settings: Mapping[str, Any], passed: Passed) -> dict[str, Any]:
    """Returns what `with_names` returns, before `passed` has written the module of the objects."""
    result = dict(settings)
    given, reward, tracking = result.get("agent"), result.get("reward"), result.get("tracking")
    if isinstance(given, Mapping | ModuleType | AgentSpec):
        agent: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"name": given}
        if isinstance(agent.get("name"), ModuleType | AgentSpec):
            agent["name"] = _agent_module(agent["name"])
        if isinstance(agent.get("tools"), list | tuple):
            agent["tools"] = [passed.name(tool, setting="agent.tools") for tool in agent["tools"]]
        if callable(agent.get("program")):
            agent["program"] = passed.name(agent["program"], setting="agent.program")
        result["agent"] = agent
    if callable(reward):
        reward = {"function": reward}
    if isinstance(reward, Mapping) and reward.get("function"):
        reward = {**reward, "function": passed.name(reward["function"], setting="reward.function")}
    if isinstance(reward, Mapping) and (paid := reward.get("per_turn")):
        weights = paid if isinstance(paid, Mapping) else {paid: 1.0}
        named = {passed.name(each, setting="reward.per_turn"): weight for each, weight in weights.items()}
        reward = {**reward, "per_turn": named}
    if isinstance(reward, Mapping):
        result["reward"] = reward
    if isinstance(tracking, Mapping) and isinstance(tracking.get("writers"), list | tuple):
        writers = [passed.name(each, setting="tracking.writers") for each in tracking["writers"]]
        result["tracking"] = {**tracking, "writers": writers}
    return result


class Passed:
    """The objects of one call that no module holds."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._module = _module_in(folder) if folder is not None else f"{PASSED}load_{next(_loads)}"
        self._objects: dict[str, Any] = {}

    @contextmanager
    def in_memory(self) -> Iterator[None]:
        """Lets this process import the objects in the block, before anything is written: a refused start must not
        replace those of the run that the folder holds."""
        if not self._objects:
            yield
            return
        before = sys.modules.get(self._module)
        self._remember()
        try:
            yield
        finally:
            sys.modules.pop(self._module, None)
            if before is not None:
                sys.modules[self._module] = before

    def _remember(self) -> None:
        module = ModuleType(self._module)
        vars(module).update(self._objects)
        sys.modules[self._module] = module

    def name(self, value: object, *, setting: str) -> str:
        """Returns MODULE:NAME of an object; a name itself is returned as it is."""
        if isinstance(value, str):
            return value
        if not (inspect.isfunction(value) or inspect.isclass(value)):
            raise ConfigError(f"{setting} is {value!r}; expected MODULE:NAME, or a function or class itself")
        held = getattr(sys.modules.get(value.__module__), value.__name__, None)
        if value.__module__ != "__main__" and held is value:
            return f"{value.__module__}:{value.__name__}"
        name = value.__name__ if value.__name__.isidentifier() else f"object_{len(self._objects)}"
        if self._objects.setdefault(name, value) is not value:
            raise ConfigError(f"{setting}: two objects are called {name!r}; give one of them another name")
        return f"{self._module}:{name}"

    def write(self) -> None:
        """Makes the module that `name` has promised, where there is one."""
        if not self._objects:
            return
        sys.modules.pop(self._module, None)
        if self._folder is None:
            self._remember()
            return
        import cloudpickle

        try:
            data = cloudpickle.dumps(self._objects)
        except Exception as error:  # whatever the object's own state raises
            names = ", ".join(self._objects)
            raise ConfigError(
                f"{names} cannot be sent to other processes ({error}); put it into a separate module"
            ) from error
        folder = self._folder / "python"
        try:
            lock(self._folder)  # those of a run that is at work stay
            with whole_file(folder / f"{self._module}.pickle") as partial:
                partial.write_bytes(data)
            write_text(folder / f"{self._module}.py", _MODULE)
        except OSError as error:
            raise ConfigError(f"output: {self._folder} cannot be written: {error.strerror}; choose another") from error
        _importable(folder.absolute())


def _module_in(folder: Path) -> str:
    """Returns the name of a run's module. No other folder has it, so that a process may train several runs.

    A run that has a module keeps its name, also when its folder was moved: a resumed run has the settings that it was
    started with.
    """
    for module in sorted((folder / "python").glob(f"{PASSED}*.py")):
        return module.stem
    place = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]
    return PASSED + re.sub(r"\W", "_", folder.name) + f"_{place}"


def _importable(folder: Path) -> None:
    """Lets this process and the workers that it starts import from a folder, and from it first: a copy of a run has
    the module's name too.
    """
    place, before = str(folder), os.environ.get("PYTHONPATH", "")
    paths = before.split(os.pathsep) if before else []
    sys.path[:] = [place, *(path for path in sys.path if path != place)]
    os.environ["PYTHONPATH"] = os.pathsep.join([place, *(path for path in paths if path != place)])
    importlib.invalidate_caches()


def _agent_module(agent: ModuleType | AgentSpec) -> str:
    """Returns the name of the module whose AGENT this is."""
    if isinstance(agent, ModuleType):
        return agent.__name__
    for name in dict.fromkeys((agent.agent.__module__, agent.config.__module__)):
        if getattr(sys.modules.get(name), "AGENT", None) is agent and name != "__main__":
            return name
    raise ConfigError(
        "agent is an AgentSpec that no module holds as AGENT; write AGENT = AgentSpec(...) into the agent's own module "
        "and pass the module"
    )
