"""The base of every section of a config. Each package defines its sections in its own `config.py`;
`mempipe.config.RunConfig` combines them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from mempipe.credentials import without_passwords


class ConfigError(ValueError):
    """A setting that cannot work. The message names the setting, its value and what would be right; commands exit with
    code 2. It shows no password of an address. `absent` is the path of a file or a folder, or the address
    (hf://OWNER/NAME) of a model, that this machine lacks; another machine may have it.
    """

    def __init__(self, *words: object, absent: str = "") -> None:
        super().__init__(*words)
        self.absent = absent

    def __str__(self) -> str:
        return without_passwords(super().__str__())


class OldName(FutureWarning):
    """A setting has its name of an earlier version; the message says its name today."""


class Section(BaseModel):
    """Settings that belong together. Unknown keys are refused; the text under a field is its documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    MOVED: ClassVar[dict[str, str]] = {}
    """Names of earlier versions, and the dotted name of each today; `renamed` reads them."""
    FREE: ClassVar[tuple[str, ...]] = ()
    """Dotted names of settings and sections that may change when a job is continued
    (`mempipe.provenance.changed_settings`)."""

    @model_validator(mode="before")
    @classmethod
    def _empty_sections_have_their_defaults(cls, values: object) -> object:
        """Reads a section of a file under which nothing is written, which is null there, as one that is missing."""
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None or not cls._is_section(name)}

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_are_no_booleans(cls, value: object, info: ValidationInfo) -> Any:
        """Refuses true where a number belongs, which Python would take for 1."""
        kinds = _kinds(cls.model_fields[info.field_name or ""].annotation)
        if kinds & {int, float} and not kinds & {bool, Any} and _holds_boolean(value):
            raise PydanticCustomError("number", "Input should be a number, not true or false")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _a_whole_number_may_be_a_text(cls, value: object, info: ValidationInfo) -> Any:
        """Reads `name: 20261127` and `args: [--port, 8080]`, which hold numbers in YAML, as their texts where texts and
        no numbers belong.
        """
        kind = cls.model_fields[info.field_name or ""].annotation
        return value if _kinds(kind) & {int, float, Any} else _as_texts(value, kind)

    @classmethod
    def _is_section(cls, name: str) -> bool:
        """Returns whether a setting is a section that is always there."""
        field = cls.model_fields.get(name)
        kinds = _kinds(field.annotation) if field is not None else set()
        return type(None) not in kinds and any(isinstance(kind, type) and issubclass(kind, Section) for kind in kinds)


def renamed(values: Mapping[str, Any], kind: type[Section]) -> tuple[dict[str, Any], list[str]]:
    """Returns the settings of a section of this kind under their names of today, and one sentence for each old name.

    Raises ConfigError if a setting has two values, one under each name.
    """
    values, said = dict(values), []
    for old, new in kind.MOVED.items():
        if old not in values:
            continue
        value = values.pop(old)
        said.append(f"{old} is now called {new}; it is read under both names")
        *parents, leaf = new.split(".")
        for parent in reversed(parents):
            leaf, value = parent, {leaf: value}
        values[leaf] = _both(value, values.get(leaf), old=old, new=new, place=leaf)
    return values, said


def _both(earlier: Any, present: Any, *, old: str, new: str, place: str) -> Any:
    """Returns a value that was given under an old name together with that under the new one, where there is one."""
    if isinstance(earlier, dict) and present is not None:
        if not isinstance(present, dict):  # which is refused as a section
            return present
        return {
            name: _both(earlier.get(name), present.get(name), old=old, new=new, place=f"{place}.{name}")
            for name in {**earlier, **present}
        }
    if earlier is not None and present is not None and earlier != present:
        before = place.replace(new, old, 1)
        raise ConfigError(
            f"{before} is {earlier!r} and {place} is {present!r}; both are the setting {place}, so remove {before}"
        )
    return earlier if present is None else present


def check_url(setting: str, url: str, *, example: str) -> None:
    """Raises ValueError, which names the setting, unless `url` is an HTTP address without a user or a password."""
    try:
        address = urlsplit(url)
        is_right = address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
        is_right = is_right and not (address.username or address.password)
    except ValueError:  # of a port that is not a number, and of half an IPv6 address
        is_right = False
    if not is_right:
        raise ValueError(f"{setting} is {url!r}; an address is of the form {example}, without a user or a password")


def _kinds(annotation: Any) -> set[Any]:
    """Returns the types that an annotation is made of."""
    parts = get_args(annotation)
    return set().union(*map(_kinds, parts)) if parts else {annotation}


def _as_texts(value: Any, annotation: Any) -> Any:
    """Returns the value with every whole number as its text where the annotation wants a text."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Annotated, Union, UnionType):
        return functools.reduce(_as_texts, parts, value)
    if origin is list and isinstance(value, list):
        return [_as_texts(each, parts[0]) for each in value]
    if origin is dict and isinstance(value, dict):
        return {key: _as_texts(each, parts[1]) for key, each in value.items()}
    return str(value) if annotation is str and type(value) is int else value


def _holds_boolean(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_boolean, value.values()))
    return any(map(_holds_boolean, value)) if isinstance(value, list | tuple) else isinstance(value, bool)


def _folder_name(name: str) -> str:
    if not name or name[0] in ".-~" or not name.isprintable() or set(name) & set("/\\") or len(name.encode()) > 200:
        raise ValueError(
            f"name is {name!r}; it becomes a folder inside `output`, so it has no slash or backslash, starts with "
            "neither '.' nor '-' nor '~', and has 1 to 200 bytes"
        )
    return name


Seed = Annotated[int, Field(ge=0, lt=2**32 - 2**16)]
"""A seed of a run: numpy's seeds, which engines set, have 32 bits, and every engine adds its number."""
FolderName = Annotated[str, AfterValidator(_folder_name)]
"""The name of a folder inside another one, which no name can leave."""
