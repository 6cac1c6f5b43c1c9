"""Groups and trajectories as Arrow tables and Parquet files, with schemas derived from the dataclasses of
`mempipe.types`.

`groups_to_table` and `table_to_groups` carry groups through a stream of tables: one row per group, as bytes.
`write_trajectories` and `read_trajectories` keep them in a file for people: one row per trajectory, the question
repeated. Records come back exactly as they went in; numbers of every token come out of a table as a `Column`. The one
exception is a lone surrogate in a text: UTF-8 cannot hold it, so it becomes "\ufffd" in a file.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pickle
import types as python_types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mempipe.settings import ConfigError
from mempipe.storage.parquet import parquet_writer, read_metadata, read_row_groups
from mempipe.types import Column, Context, Group, Question, Trajectory, from_row, to_row

_SCALARS = {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_()}
_GROUPS_PER_ROW_GROUP = 64
_ADVICE = "delete it to have it made again, or copy it again from where it came"
_MADE_OF = b"made_of"  # a key of the schema's metadata
_PACKED = pa.schema([("group", pa.large_binary())])
PER_TOKEN = ("token_ids", "logprobs", "policy_versions", "ref_logprobs")
"""Fields of a context that only training needs. `loss_mask` is not among them: it counts the sampled tokens."""
_COLUMNS = {
    "token_ids": np.int64,
    "loss_mask": np.int64,
    "logprobs": np.float64,
    "policy_versions": np.int64,
    "ref_logprobs": np.float64,
}
"""Fields of a context with a number for every token."""


@functools.cache
def arrow_schema(cls: type) -> pa.Schema:
    """Returns one column per field of the dataclass: int64, float64, string, bool, lists and structs of them.

    Enums become strings.
    """
    return pa.schema(list(_arrow_type(cls)))


def groups_to_table(groups: Iterable[Group]) -> pa.Table:
    """Returns one row per group, whose only column holds the group as bytes.

    They are pickled: both ends are processes of one run, which exchange all else in that way too. Writing and reading
    a group of one attempt takes 0.3 ms of CPU; with its fields as Arrow columns it took 3.0 ms.
    """
    pickled = [pickle.dumps(_with_columns(group), protocol=5) for group in groups]
    return pa.table([pa.array(pickled, pa.large_binary())], _PACKED)


def records_to_table(records: Sequence[Any]) -> pa.Table:
    """Returns one row per record. All records are of one dataclass, and there is at least one."""
    return _table([to_row(record) for record in records], arrow_schema(type(records[0])))


def table_to_groups(table: pa.Table) -> list[Group]:
    """Returns the groups of a table of `groups_to_table`. They hold nothing of the table's memory."""
    return [pickle.loads(row.as_buffer()) for row in table.column("group")]


@functools.cache
def trajectories_schema() -> pa.Schema:
    """Returns the columns of the file: `question_*`, `group_num_retries`, `group_seconds`, then the fields of
    `Trajectory` (`group_id` among them).
    """
    question = [column.with_name(f"question_{column.name}") for column in arrow_schema(Question)]
    group = [arrow_schema(Group).field(name).with_name(f"group_{name}") for name in _GROUP_FIELDS]
    return pa.schema([*question, *group, *arrow_schema(Trajectory)])


def write_trajectories(path: str | Path, groups: Iterable[Group], *, made_of: Mapping[str, Any] | None = None) -> int:
    """Writes one row per trajectory and returns their number. The file appears atomically; an existing one is
    replaced. `made_of` are plain values that `read_made_of` returns: which policy played which questions.

    Raises ValueError for a group that has no trajectories, or whose id was seen before or differs from its
    trajectories' `group_id`: it could not be read back.
    """
    num_rows = 0
    schema = trajectories_schema()
    if made_of is not None:
        schema = schema.with_metadata({_MADE_OF: json.dumps(made_of)})
    with parquet_writer(Path(path), schema, compression="zstd") as writer:
        remaining = _trajectory_rows(groups)
        while rows := [row for group_rows in islice(remaining, _GROUPS_PER_ROW_GROUP) for row in group_rows]:
            writer.write_table(_table(rows, trajectories_schema()))
            num_rows += len(rows)
    return num_rows


def read_trajectories(path: str | Path, *, tokens: bool = True) -> list[Group]:
    """Returns the groups of the file in the order in which they were written; without `tokens` their contexts have
    those of `PER_TOKEN` empty, which are most of a file. Raises ConfigError for a file that cannot be read, is damaged,
    or holds no trajectories.
    """
    groups: dict[str, Group] = {}
    try:
        for table in read_row_groups(Path(path), advice=_ADVICE, without=() if tokens else PER_TOKEN):
            for row in table.to_pylist():
                if not tokens:
                    add_no_tokens(row)
                if row["group_id"] not in groups:
                    groups[row["group_id"]] = _group(row)
                groups[row["group_id"]].trajectories.append(from_row(Trajectory, row))
        return list(groups.values())
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} holds no trajectories ({type(error).__name__} {error}); name a file that a run or an evaluation "
            f"wrote, or, if this is one, {_ADVICE}"
        ) from error


def add_no_tokens(row: dict[str, Any]) -> None:
    """Puts empty lists into the row of a trajectory that was read without the fields of `PER_TOKEN`."""
    for context in [*row["contexts"], *(recall["context"] for recall in row.get("recalls") or [])]:
        context.update({name: [] for name in PER_TOKEN})


def read_made_of(path: str | Path) -> dict[str, Any] | None:
    """Returns the record `made_of` that `write_trajectories` stored in the file; None for a file without one.

    Raises ConfigError for a file that cannot be read.
    """
    metadata = read_metadata(Path(path), advice=_ADVICE)
    try:
        return json.loads(metadata[_MADE_OF]) if _MADE_OF in metadata else None
    except ValueError as error:
        raise ConfigError(f"{path} does not say what it was made of ({error}); {_ADVICE}") from error


_GROUP_FIELDS = [f.name for f in dataclasses.fields(Group) if f.name not in ("id", "question", "trajectories")]


def _trajectory_rows(groups: Iterable[Group]) -> Iterator[list[dict[str, Any]]]:
    seen: set[str] = set()
    for group in groups:
        if not group.trajectories:
            raise ValueError(f"group {group.id} has no trajectories")
        if group.id in seen:
            raise ValueError(f"group {group.id} occurs twice; ids must be unique in one file")
        wrong = [t.id for t in group.trajectories if t.group_id != group.id]
        if wrong:
            raise ValueError(f"trajectory {wrong[0]} is in group {group.id}, but its group_id names another group")
        seen.add(group.id)
        shared = {f"question_{name}": value for name, value in to_row(group.question).items()}
        shared |= {f"group_{name}": getattr(group, name) for name in _GROUP_FIELDS}
        yield [shared | to_row(trajectory) for trajectory in group.trajectories]


def _group(row: dict[str, Any]) -> Group:
    """Returns the group that the row's trajectory belongs to, still without trajectories."""
    return Group(
        id=row["group_id"],
        question=from_row(Question, _part(row, "question_", [f.name for f in dataclasses.fields(Question)])),
        trajectories=[],
        **_part(row, "group_", _GROUP_FIELDS),
    )


def _part(row: Mapping[str, Any], prefix: str, names: Sequence[str]) -> dict[str, Any]:
    """Returns the columns of one record by field. A file of an older version lacks fields that have a default."""
    return {name: row[prefix + name] for name in names if prefix + name in row}


def _with_columns(group: Group) -> Group:
    """Returns the group with the numbers of every token as columns, which are written and read at once."""
    trajectories = [
        dataclasses.replace(
            trajectory,
            contexts=[_in_columns(context) for context in trajectory.contexts],
            recalls=[dataclasses.replace(each, context=_in_columns(each.context)) for each in trajectory.recalls],
        )
        for trajectory in group.trajectories
    ]
    return dataclasses.replace(group, trajectories=trajectories)


def _in_columns(context: Context) -> Context:
    columns: dict[str, Any] = {
        name: Column(np.array(getattr(context, name), dtype)) for name, dtype in _COLUMNS.items()
    }
    return dataclasses.replace(context, **columns)


def _arrow_type(hint: Any) -> pa.DataType:
    if typing.get_origin(hint) in (list, Sequence):
        (item,) = typing.get_args(hint)
        return pa.list_(_arrow_type(item))
    if typing.get_origin(hint) is python_types.UnionType:  # only `X | None`
        return _arrow_type(next(a for a in typing.get_args(hint) if a is not type(None)))
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return pa.struct([pa.field(f.name, _arrow_type(hints[f.name])) for f in dataclasses.fields(hint)])
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return pa.string()
    if hint not in _SCALARS:
        raise TypeError(f"no Arrow type for {hint!r}; records hold numbers, strings, lists and other records")
    return _SCALARS[hint]


def _table(rows: list[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    try:
        return pa.Table.from_pylist(rows, schema=schema)
    except UnicodeEncodeError:  # rare, so the rows are walked only now
        return pa.Table.from_pylist([_encodable(row) for row in rows], schema=schema)


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return "".join("\ufffd" if "\ud800" <= character <= "\udfff" else character for character in value)
    if isinstance(value, Mapping):
        return {name: _encodable(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_encodable(item) for item in value]
    return value
