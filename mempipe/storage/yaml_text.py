"""Reads YAML texts, with a sentence for every mistake."""

from __future__ import annotations

import re
from typing import Any

import yaml

_INT = "tag:yaml.org,2002:int"


def parse_yaml(text: str) -> Any:
    """Returns the content of a YAML text. Raises YAMLError for every text that is not YAML, for a key that is
    duplicated in its mapping, and for an alias that contains itself.
    """
    try:
        return yaml.load(text, _Loader)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        # PyYAML's own, for a date that is none, a tag whose value has another form, and lists in lists without end
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from error


class _Loader(yaml.SafeLoader):
    """Reads YAML and refuses a duplicate key (YAML itself silently takes the last one), and an alias that contains
    itself. libyaml would read a text in a seventh of the time, but its messages do not name the wrong character, and
    it takes tabs where PyYAML does not.

    A whole number is written as one, so that its text is known: 007, 12:30 and 1_000 are texts, which a setting that
    takes a number reads in base ten. A date is a text, because no setting takes a date.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._own_keys_differ: set[int] = set()

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        node = super().compose_node(parent, index)
        if node is not None and node.end_mark is None:  # an alias of a value that is still being read
            raise yaml.YAMLError(f"what begins in line {node.start_mark.line + 1} holds itself")
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Puts what `<<` names among the keys of a mapping; one that is merged into several is flattened again."""
        if id(node) not in self._own_keys_differ:
            self._own_keys_differ.add(id(node))
            _check_keys(node)
        super().flatten_mapping(node)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in forms if tag not in (_INT, "tag:yaml.org,2002:timestamp")]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_INT, re.compile(r"-?(?:0|[1-9][0-9]*)$"), list("-0123456789"))


def _check_keys(node: yaml.MappingNode) -> None:
    """Raises YAMLError for keys that are not words, and for a key that is duplicated in the mapping itself; the mapping
    named by `<<` may have it too.
    """
    seen: set[str] = set()
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise yaml.YAMLError(f"the key in line {line} is a list or a mapping; a key is a word")
        if key.value in seen:
            raise yaml.YAMLError(f"the key {key.value!r} is duplicated, the second time in line {line}")
        seen.add(key.value)
