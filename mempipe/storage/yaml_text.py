"""Reads YAML texts, with a sentence for every mistake."""

from __future__ import annotations

from typing import Any

import yaml


class _Checked:
    """Refuses a duplicate key (YAML itself silently takes the last one), and an alias that contains itself. It is mixed
    into a loader of PyYAML.
    """

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()  # pyrefly: ignore[missing-attribute]
        _check(node, inside=(), checked=set())
        return node


class _Loader(_Checked, yaml.SafeLoader):
    """Gives the better error messages."""


_FastLoader: Any = type("_FastLoader", (_Checked, getattr(yaml, "CSafeLoader", yaml.SafeLoader)), {})
"""Reads a text in a seventh of the time where PyYAML was built with libyaml, as its wheels are."""


def _check(node: yaml.Node | None, *, inside: tuple[int, ...], checked: set[int]) -> None:
    """Raises YAMLError for a node that contains itself, for keys that are not words, and for a key that is duplicated
    in one mapping; a mapping that is named by `<<` may have it too. `inside` are the ids of the nodes around it,
    `checked` those of all that are right.
    """
    if not isinstance(node, yaml.CollectionNode) or id(node) in checked:
        return
    if id(node) in inside:
        raise yaml.YAMLError(f"what begins in line {node.start_mark.line + 1} holds itself")
    children = node.value
    if isinstance(node, yaml.MappingNode):
        _check_keys(node)
        children = [value for _, value in node.value]
    for child in children:
        _check(child, inside=(*inside, id(node)), checked=checked)
    checked.add(id(node))


def _check_keys(node: yaml.MappingNode) -> None:
    seen: set[str] = set()
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise yaml.YAMLError(f"the key in line {line} is a list or a mapping; a key is a word")
        if key.value in seen:
            raise yaml.YAMLError(f"the key {key.value!r} is duplicated, the second time in line {line}")
        seen.add(key.value)


def parse_yaml(text: str) -> Any:
    """Returns the content of a YAML text. Raises YAMLError for every text that is not YAML."""
    for loader in (_FastLoader, _Loader):
        try:
            return yaml.load(text, loader)
        except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            # Besides YAMLError they are PyYAML's own: for a date that is none, a tag whose value has another form, and
            # lists in lists without end.
            fault = error
    raise fault if isinstance(fault, yaml.YAMLError) else yaml.YAMLError(f"{type(fault).__name__}: {fault}") from fault
