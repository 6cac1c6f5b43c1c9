"""The words that an agent puts around questions, memories and passages, and the slots in them."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml

from mempipe.agents.budget import MemoryBudget
from mempipe.settings import ConfigError
from mempipe.storage.yaml_text import parse_yaml
from mempipe.text import BOX

BUILT_IN = Path(__file__).parent / "prompts"
SLOTS = (
    "tools",
    "question",
    "instructions",
    "memory",
    "chunk",
    "call",
    "passages",
    "turns_left",
    "title",
    "text",
    "index",
)
MEMORY_TOKENS = "{memory_tokens}"
"""Stands in any text for the limit of the memory."""
ANSWER_OPEN = BOX + "{"
"""Default of the key `answer_open`, the text before the policy's answer; the information
gain of a memory puts the golden answer after it."""
REPEATABLE = "passage"
"""The key whose slots may occur in it more than once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """Parent of every agent's prompt set: one text per key. Raises ConfigError for a text with wrong slots."""

    REQUIRED: ClassVar[dict[str, set[str]]] = {}
    """Slots that the text of a key must hold, in addition to those of `OF_ALL`."""
    OPTIONAL: ClassVar[dict[str, set[str]]] = {}
    OF_ALL: ClassVar[dict[str, set[str]]] = {"instructions": {"question", "instructions"}}

    instructions: str = ""
    """The text that replaces the question if the caller gives instructions; "": they cannot be read."""

    def __post_init__(self) -> None:
        for key in self.names():
            text = getattr(self, key)
            if not isinstance(text, str):
                raise ConfigError(f"prompts.{key} is {text!r}, expected a text")
            if not text and key in self.optional_names():
                continue
            slots = split_slots(text)[1::2]
            required, optional = (self.OF_ALL | self.REQUIRED).get(key, set()), self.OPTIONAL.get(key, set())
            for slot in sorted(required - set(slots)):
                raise ConfigError(f"prompts.{key} lacks the slot {{{slot}}}")
            for slot in slots:
                if slot not in required | optional:
                    raise ConfigError(f"prompts.{key} holds the slot {{{slot}}}, which belongs elsewhere")
                if slots.count(slot) > 1 and key != REPEATABLE:
                    raise ConfigError(f"prompts.{key} holds the slot {{{slot}}} more than once")

    @classmethod
    def names(cls) -> list[str]:
        return [field.name for field in dataclasses.fields(cls)]

    @classmethod
    def optional_names(cls) -> set[str]:
        """Returns the keys that a file may omit."""
        return {field.name for field in dataclasses.fields(cls) if field.default is not dataclasses.MISSING}


P = TypeVar("P", bound=PromptSet)


def load_prompts(name: str, kind: type[P], *, memory: MemoryBudget | None = None) -> P:
    """Reads the built-in prompt set of that name, or the YAML file at that path, for the agent of `kind`. A file
    that names a built-in set as its `base` has the texts of that set, except those that it states itself. With
    `memory`, its limit replaces {memory_tokens} in the texts.

    Raises ConfigError, also when the limit changes from group to group and no text states it.
    """
    built_in = BUILT_IN / f"{name}.yaml"
    path = built_in if built_in.is_file() else Path(name)
    values = _texts(path, name)
    names = set(kind.names())
    if not isinstance(values, dict) or not names - kind.optional_names() <= set(values) <= names:
        found = sorted(map(str, values)) if isinstance(values, dict) else type(values).__name__
        raise ConfigError(f"agent.prompts: {path} holds {found}, expected the keys {kind.names()}, or a base and some")
    if memory is not None:
        if memory.memory_choices and not any(MEMORY_TOKENS in str(text) for text in values.values()):
            raise ConfigError(
                f"budget.memory_choices is {memory.memory_choices}, but no text of agent.prompts {name!r} says which "
                f"of them holds; memsearcher_limit and memagent_limit do, or write {MEMORY_TOKENS} into your own set"
            )
        limit = str(memory.memory_tokens)
        values = {key: t.replace(MEMORY_TOKENS, limit) if isinstance(t, str) else t for key, t in values.items()}
    return kind(**values)


def _texts(path: Path, name: str) -> Any:
    """Returns what the file of a prompt set holds, over the texts of its base, which may have a base itself."""
    built_in = sorted(file.stem for file in BUILT_IN.glob("*.yaml"))
    try:
        values = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"agent.prompts is {name!r}: neither a built-in prompt set ({', '.join(built_in)}) nor a file that can be "
            "read",
            absent="" if path.exists() else name,
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"agent.prompts: {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict) or "base" not in values:
        return values
    base = values.pop("base")
    if base not in built_in:
        raise ConfigError(
            f"agent.prompts: {path} has base {base!r}, which is not a built-in prompt set ({', '.join(built_in)})"
        )
    return _texts(BUILT_IN / f"{base}.yaml", base) | values


def split_slots(text: str) -> list[str]:
    """Splits the text into literal, slot name, literal, …, literal. Only `{name}` with the name of a slot is one; all
    other braces are text.
    """
    return re.split(f"{{({'|'.join(SLOTS)})}}", text)
