"""Settings as Python gives them: keywords, nested or dotted, in place of a YAML file's lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mempipe.evaluation.suite import merged


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings by section: `{"algorithm.group_size": 8}` is `{"algorithm": {"group_size": 8}}`, and paths are
    text."""
    result: dict[str, Any] = {}
    for name, value in settings.items():
        # The dots of MODULE:NAME belong to the module; it may be an object instead
        *sections, leaf = name.split(".") if isinstance(name, str) and ":" not in name else [name]
        own: dict[str, Any] = {leaf: nested(value) if isinstance(value, Mapping) else _with_texts(value)}
        for section in reversed(sections):
            own = {section: own}
        result = merged(result, own)
    return result


def _with_texts(value: Any) -> Any:
    """Returns a value with its paths as text."""
    if isinstance(value, Mapping):  # of a list, whose keys may have dots
        return {name: _with_texts(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_with_texts(each) for each in value]
    return str(value) if isinstance(value, Path) else value
