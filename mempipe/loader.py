"""Reads settings from a YAML file and `key=value` words; every mistake in them raises ConfigError with one sentence."""

from __future__ import annotations

import difflib
import errno
import functools
import os
import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from mempipe.agents.registry import BUILT_IN, agent_spec
from mempipe.config import RunConfig
from mempipe.kinds import BUILT_IN as BUILT_IN_KINDS
from mempipe.kinds import OWN, SERVICE_APP, JobKind, kind_of, named
from mempipe.retrieval.config import IndexConfig, ServiceConfig
from mempipe.settings import ConfigError, OldName, Section, renamed
from mempipe.storage.yaml_text import parse_yaml

C = TypeVar("C", bound=Section)

SHIPPED = Path(__file__).parents[1] / "jobs" / "configs"
"""The configs that come with mempipe, in the repository and in an installed package."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Returns the run that a YAML file describes, with `key=value` overrides (values are YAML). Raises ConfigError."""
    return parse_section(load_values(path, overrides, kind="run"), RunConfig)


def load_job(path: str | Path, overrides: Sequence[str] = (), *, kind: str = "") -> tuple[JobKind, Any]:
    """Returns the kind of job that a YAML file describes, and its config with `key=value` overrides. `kind` is the name
    of the kind that is expected; empty: any, and a file without a mark of another kind is a run.

    Raises ConfigError.
    """
    found = BUILT_IN_KINDS[kind] if kind else kind_of(read_values(path, overrides)) or BUILT_IN_KINDS["run"]
    if found.load:
        return found, named(found.load)(path, overrides)
    return found, parse_section(load_values(path, overrides, kind=found), found.settings())


def load_index_config(path: str | Path, overrides: Sequence[str] = ()) -> IndexConfig:
    """Returns the index that a YAML file describes, with `key=value` overrides; of passages or texts an index that is
    searched by words. Raises ConfigError."""
    path = config_file(path)
    if path.suffix not in (".yaml", ".yml"):
        settings = parse_overrides(overrides)
        if "corpus" in settings:
            raise ConfigError(
                f"corpus is {settings['corpus']!r}, and the command already names {str(path)!r}; name one of them, or "
                "both as the list `corpus` of a YAML file"
            )
        values = {"corpus": [str(path)], "encoder": None, "lexical": True, **settings}
        if "output" not in values:
            parse_section(values | {"output": "index"}, IndexConfig)  # a name near to `output` is refused first
            raise ConfigError(
                "output is missing; name the folder of the index: "
                f"mempipe index build {shlex.quote(str(path))} output=FOLDER"
            )
        return parse_section(values, IndexConfig)
    return parse_section(load_values(path, overrides, kind="index"), IndexConfig)


def load_service_config(path: str | Path, overrides: Sequence[str] = ()) -> ServiceConfig:
    """Returns the retrieval service that a Ray Serve config deploys, with `key=value` overrides of its `args`.
    Raises ConfigError."""
    values = load_values(path, kind="service")
    applications = values["applications"]
    if not isinstance(applications, list) or not all(isinstance(each, dict) for each in applications):
        raise ConfigError(f"{path}: applications is {applications!r}; it is a list of applications")
    known = [each for each in applications if each.get("import_path") == SERVICE_APP]
    if len(known) != 1:
        raise ConfigError(f"{path} has {len(known)} applications with import_path {SERVICE_APP}; expected one")
    args = section_values(known[0], "args")
    for override in overrides:
        _apply(args, override)
    return parse_section(args, ServiceConfig)


def section_values(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns the settings of a section in values that are not checked yet; none for a section that is missing or null.
    Raises ConfigError for a value that is not a section.
    """
    section = values.get(name)
    if section is not None and not isinstance(section, dict):
        raise ConfigError(f"{name} is {_shown(section)}; it is a section of settings")
    return dict(section or {})


def load_values(
    path: str | Path, overrides: Sequence[str] = (), *, kind: JobKind | str | None = None
) -> dict[str, Any]:
    """Returns the settings that a YAML file names, with `key=value` overrides. They are not checked yet. `kind` is a
    name of `mempipe.kinds.BUILT_IN`, or a user-defined kind.

    Raises ConfigError, also when they describe another kind than `kind`.
    """
    values = read_values(path, overrides)
    found, wanted = kind_of(values), BUILT_IN_KINDS[kind] if isinstance(kind, str) else kind
    if wanted is not None and found is not None and found != wanted:
        what = str(path) if Path(path).exists() else f"{path} is not here, and the config of this name in mempipe"
        raise ConfigError(f"{what} describes {found.described}, not {wanted.described}; `{found.command}` takes it")
    values.pop(OWN, None)
    return values


def config_file(path: str | Path) -> Path:
    """Returns the file of a config. Where there is no file `path`, this is the config that comes with mempipe and has
    this name (`quickstart`) or this place in the repository (`jobs/configs/quickstart.yaml`), if there is one."""
    path = Path(path)
    shipped = SHIPPED / (path.name if path.suffix == ".yaml" else f"{path.name}.yaml")
    return shipped if _may_be_shipped(path) and not path.exists() and shipped.is_file() else path


def _may_be_shipped(path: Path) -> bool:
    return path.parent in (Path(), Path("jobs/configs"))


def read_values(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Returns all that a YAML file (`config_file`) holds, with `key=value` overrides. Raises ConfigError when it holds
    no settings."""
    try:
        text = _text(config_file(path))
    except (OSError, UnicodeDecodeError) as error:
        absent = str(path) if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"cannot read config {path}: {_unreadable(Path(path), error)}", absent=absent) from error
    try:
        values = parse_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds {type(values).__name__}, expected a mapping of settings")
    for override in overrides:
        _apply(values, override)
    return values


def _text(file: Path) -> str:
    if file.is_fifo():  # `mempipe doctor <(sed ... CONFIG)`
        return _piped(file, file.stat().st_ino)
    if file.is_char_device() and not file.samefile(os.devnull):
        raise OSError(errno.EINVAL, "it is a device, not a YAML file")
    return file.read_text()


@functools.cache
def _piped(file: Path, number: int) -> str:
    """Returns the text of a pipe, which can be read only once; `number` tells it from others at this path."""
    return file.read_text()


def _shipped_names() -> list[str]:
    return sorted(file.stem for file in SHIPPED.glob("*.yaml"))


def _unreadable(path: Path, error: OSError | UnicodeDecodeError) -> str:
    """Returns why a config cannot be read, and what may be meant instead."""
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 text (byte {error.start} is {error.object[error.start]:#04x})"
    if isinstance(error, IsADirectoryError):
        inside = path / "config.yaml"
        return (
            f"it is a folder; its settings are in {inside}" if inside.is_file() else "it is a folder, not a YAML file"
        )
    advice = ""
    if "=" in str(path):
        advice = "; the config comes first, then the settings"
    elif _may_be_shipped(path) and (near := difflib.get_close_matches(path.stem, _shipped_names(), n=3)):
        advice = f"; configs with such a name come with mempipe: {', '.join(near)}"
    return f"{error.strerror}{advice}"


def parse_config(values: dict[str, Any]) -> RunConfig:
    """Returns the run that nested dicts describe. Raises ConfigError with one line per wrong setting."""
    return parse_section(values, RunConfig)


def parse_section(values: dict[str, Any], kind: type[C]) -> C:
    """Returns the section of type `kind` that nested dicts describe; a setting with its name of an earlier version is
    read, and warned of (`OldName`). Raises ConfigError, one line per wrong setting."""
    if not isinstance(values, dict):
        raise ConfigError(f"expected settings by name, got {_shown(values)}")
    values, said = renamed(values, kind)
    for sentence in said:
        warnings.warn(sentence, OldName, stacklevel=2)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_sentence(e, kind, values) for e in error.errors())) from error


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Returns the nested settings that `key=value` words describe. Raises ConfigError."""
    values: dict[str, Any] = {}
    for override in overrides:
        _apply(values, override)
    return values


def setting_names(kind: type[Section], prefix: str = "") -> Iterator[str]:
    """Yields the dotted names of all settings of a section and of the sections in it."""
    for name, field in kind.model_fields.items():
        inner = section_of(field.annotation)
        yield prefix + name
        if inner is not None:
            yield from setting_names(inner, f"{prefix}{name}.")


def section_of(annotation: object) -> type[Section] | None:
    """Returns the section that a field holds; None when it holds another kind of value."""
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def _apply(values: dict[str, Any], override: str) -> None:
    """Sets one setting. Missing and null sections on the way are created, and existing ones are copied, so that two
    sections that are one object by a YAML alias stay separate.
    """
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r} is not of the form key=value, e.g. algorithm.group_size=8")
    *parents, leaf = key.split(".")
    for parent in parents:
        child = values.get(parent)
        if child is not None and not isinstance(child, dict):
            raise ConfigError(f"override {override!r}: {parent} is a value, not a section")
        values[parent] = dict(child or {})
        values = values[parent]
    try:
        values[leaf] = parse_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not YAML") from error


def _sentence(error: Any, kind: type[Section], values: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return _unknown(where, kind, values)
    if error["type"] == "value_error":
        message = str(error["ctx"]["error"])  # most name their setting themselves
        return message if where.rpartition(".")[2] in message else f"{where}: {message}"
    if error["type"] == "missing":
        return f"{where} is missing"
    if error["type"] == "model_type":
        return f"{where} is {_shown(error['input'])}; it is a section of settings"
    if error["type"] == "invalid_key":
        return f"the key {where} is not a word; put it into quotes if it is meant as one"
    if error["type"] == "string_type" and isinstance(error["input"], float | bool | None):
        shown = _shown(error["input"])
        text = "" if error["input"] is None else shown
        return f'{where} is {shown}, but takes a text: "{text}" in a file, \'{where}="{text}"\' on a command line'
    return f"{where} is {_shown(error['input'])}: {error['msg'].replace('Input should be', 'should be')}"


def _shown(value: object) -> str:
    """Returns a value in YAML's notation (true, null)."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)


def _unknown(where: str, kind: type[Section], values: dict[str, Any]) -> str:
    """Returns, for an unknown key, the section that has it or the nearest setting."""
    if issubclass(kind, RunConfig):
        section, _, rest = where.partition(".")
        agent = values.get("agent")
        name = agent.get("name", "memsearcher") if isinstance(agent, dict) else "memsearcher"
        name = name if isinstance(name, str) else ""
        owners = [
            other for other in BUILT_IN if section in ("agent", "budget") and rest in _names_of_agent(other, section)
        ]
        if owners and name not in owners:
            return f"{where} means nothing to agent.name {name!r}; it is a setting of {', '.join(owners)}"
        known = [
            *setting_names(kind),
            *(f"{part}.{key}" for part in ("agent", "budget") for key in _names_of_agent(name, part)),
        ]
    else:
        known = list(setting_names(kind))
    if near := difflib.get_close_matches(where, known, n=1, cutoff=0.7) or _same_leaf(where, known):
        return f"{where} is not a setting; did you mean {near[0]}?"
    return f"{where} is not a setting; `mempipe config` prints them all"


def _same_leaf(where: str, known: Sequence[str]) -> list[str]:
    """Returns a setting of the same last name in another section, if there is one."""
    leaf = where.rpartition(".")[2]
    return [name for name in known if name.rpartition(".")[2] == leaf][:1]


@functools.cache
def _names_of_agent(name: str, section: str) -> frozenset[str]:
    try:
        spec = agent_spec(name)
    except ConfigError:
        return frozenset()
    return frozenset(setting_names(spec.config if section == "agent" else spec.budget))
