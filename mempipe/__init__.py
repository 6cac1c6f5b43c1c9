"""Train, measure and serve LLM agents with a bounded memory.

    import mempipe

    run = mempipe.train("jobs/configs/quickstart.yaml", num_steps=30)
    with mempipe.load(run) as agent:
        reply = agent.ask("Look up Adela's spouse's hometown's country?")
        mempipe.evaluate(agent, "questions.jsonl").table
        mempipe.sweep(agent, "questions.jsonl", memory_tokens=[16, 64]).table

`train` runs a training and returns its `Run`. `load` starts an `Agent` from a run, a model or an endpoint; `ask`
returns a `Reply`. `evaluate` and `sweep` measure an agent on questions (`Evaluation`, `Sweep`). `results` reads what
the commands `mempipe evaluate` and `mempipe sweep` have written. Each of them raises `ConfigError` for a setting or a
file that cannot work, with the sentence that the command line prints.

Importing this package loads nothing else: each name is imported when it is first used. docs/python.md shows them all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mempipe.moved import find_moved_modules

if TYPE_CHECKING:
    from mempipe.api.agent import Agent, load
    from mempipe.api.evaluation import Evaluation, evaluate
    from mempipe.api.reply import Reply
    from mempipe.api.results import results
    from mempipe.api.run import Run, train
    from mempipe.api.sweep import Sweep, sweep
    from mempipe.settings import ConfigError

    __version__: str

__all__ = [
    "Agent",
    "ConfigError",
    "Evaluation",
    "Reply",
    "Run",
    "Sweep",
    "__version__",
    "evaluate",
    "load",
    "results",
    "sweep",
    "train",
]

_MODULES = {
    "Agent": "mempipe.api.agent",
    "load": "mempipe.api.agent",
    "Evaluation": "mempipe.api.evaluation",
    "evaluate": "mempipe.api.evaluation",
    "Reply": "mempipe.api.reply",
    "results": "mempipe.api.results",
    "Run": "mempipe.api.run",
    "train": "mempipe.api.run",
    "Sweep": "mempipe.api.sweep",
    "sweep": "mempipe.api.sweep",
    "ConfigError": "mempipe.settings",
}
"""The module of each public name."""

find_moved_modules()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("mempipe")
    elif name in _MODULES:
        from importlib import import_module

        value = getattr(import_module(_MODULES[name]), name)
    else:
        raise AttributeError(f"module 'mempipe' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
