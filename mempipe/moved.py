"""Modules that have another name than before, or are gone: an import of an old name works and warns with the new one,
and an import of a module that is gone says where its contents are."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType

_MOVES = {
    ("mempipe", "mempipe.storage"): "checksums files json_files scratch",
    ("mempipe.data", "mempipe.storage"): "parquet",
    ("mempipe", "mempipe.planning"): "capacity costs placement",
    ("mempipe.evaluation", "mempipe.studies"): "budgets chain compare sweep",
    ("mempipe.serve", "mempipe.answers"): "answering api attempt_events conversation replies",
    ("mempipe.serve.answers", "mempipe.answers"): "answering api attempt_events conversation corpus replies same_index",
    ("mempipe.serve", "mempipe.serve.http"): "errors front gate keys",
    ("mempipe.serve", "mempipe.serve.requests"): "answer_jobs calls event_stream journal",
    ("mempipe.serve", "mempipe.serve.state"): "store",
    ("mempipe.serve.requests", "mempipe.serve.state"): "reserve store",
    ("mempipe.serve.answers", "mempipe.serve.state"): "reserve store",
    ("mempipe.serve.answers", "mempipe.serve.requests"): "answer_jobs calls event_stream idempotency journal",
    ("mempipe.serve", "mempipe.serve.replicas"): "agent_replica generator_replica prometheus retriever_replica traces",
    ("mempipe.serve", "mempipe.openai_api"): "chat_api",
    ("mempipe.serve.openai", "mempipe.openai_api"): "chat_api chat_reading chat_writing completions_api fields "
    "responses_api responses_reading responses_writing",
}
"""Modules that kept their name, by the packages that they are moved from and to."""
MOVED = {f"{old}.{name}": f"{new}.{name}" for (old, new), names in _MOVES.items() for name in names.split()}
MOVED |= {
    "mempipe.actors.documents": "mempipe.streams.documents",
    "mempipe.actors.finding": "mempipe.streams.candidates",
    "mempipe.actors.indexing": "mempipe.streams.segments",
    "mempipe.serve.answers": "mempipe.serve.requests",
    "mempipe.serve.openai": "mempipe.openai_api",
    "mempipe.stream": "mempipe.streams.groups",
}
GONE = {
    "mempipe.actors.tracker": "the tracker works in the run's own process (mempipe.tracking.tracker)",
    "mempipe.reports.rating": "its ratings are in mempipe.evaluation.ratings, its sheets in "
    "mempipe.reports.rating_sheet, its lines in mempipe.reports.ratings",
    "pipelines.parent_run": "it is a part of chains and sweeps (mempipe.training.parent_run), not a command",
    "pipelines.repair": "it is a part of the training job (mempipe.training.repair), not a command",
    "pipelines.training_rows": "it is a part of the training job (mempipe.training.training_rows), not a command",
}
"""Modules that an import does not find, and where their contents are: parts of a job, which no user calls, and one with
other functions now."""


class _Alias(Loader):
    """Loads the module under its new name."""

    def __init__(self, new: str) -> None:
        self.new = new

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        self.module = importlib.import_module(self.new)
        self.spec = self.module.__spec__
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # which the import system replaced with that of the old name


class MovedModules(MetaPathFinder):
    """Finds a module under its old name. Raises ModuleNotFoundError, which says why, for one that is gone."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in GONE:
            raise ModuleNotFoundError(f"No module named {fullname!r}: {GONE[fullname]}", name=fullname)
        if fullname not in MOVED:
            return None
        new = MOVED[fullname]
        warnings.warn(f"{fullname} is now {new}", DeprecationWarning, stacklevel=2)
        return importlib.machinery.ModuleSpec(fullname, _Alias(new))


def find_moved_modules() -> None:
    """Lets `import` find modules under their old names."""
    if not any(isinstance(each, MovedModules) for each in sys.meta_path):
        sys.meta_path.insert(0, MovedModules())
