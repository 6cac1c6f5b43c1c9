"""Modules that have another name than before: an import of the old name still works, and warns with the new one."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType

_ANSWERS = ("answering", "api", "attempt_events", "conversation", "corpus", "replies", "same_index")
_REQUESTS = ("answer_jobs", "calls", "event_stream", "idempotency", "journal", "reserve", "store")
ROOMS = {
    "storage": ("files", "json_files", "checksums", "scratch", "data.parquet"),
    "planning": ("placement", "capacity", "costs"),
    "studies": ("evaluation.budgets", "evaluation.compare", "evaluation.chain", "evaluation.sweep"),
    "serve.http": ("serve.errors", "serve.gate", "serve.front", "serve.keys"),
    "answers": ("serve.api", "serve.answering", *(f"serve.answers.{name}" for name in _ANSWERS)),
    "serve.requests": ("serve.store", *(f"serve.answers.{name}" for name in _REQUESTS)),
    "serve.openai": ("serve.chat_api",),
}
MOVED = {f"mempipe.{old}": f"mempipe.{room}.{old.split('.')[-1]}" for room, names in ROOMS.items() for old in names}
MOVED |= {"mempipe.stream": "mempipe.streams.groups", "mempipe.serve.answers": "mempipe.serve.requests"}


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
    """Finds a module under its old name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in MOVED:
            return None
        new = MOVED[fullname]
        warnings.warn(f"{fullname} is now {new}", DeprecationWarning, stacklevel=2)
        return importlib.machinery.ModuleSpec(fullname, _Alias(new))


def find_moved_modules() -> None:
    """Lets `import` find modules under their old names."""
    if not any(isinstance(each, MovedModules) for each in sys.meta_path):
        sys.meta_path.insert(0, MovedModules())
