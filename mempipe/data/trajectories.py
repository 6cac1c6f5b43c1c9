"""Groups and trajectories as Arrow tables and Parquet files, with schemas derived from the dataclasses of
`mempipe.types`.

`group_to_table` and `table_to_groups` carry groups through a stream of tables: one row per group, as bytes.
`write_trajectories` and `read_trajectories` keep them in a file for people: one row per trajectory, the question
repeated. Records come back exactly as they went in; numbers of every token come out of a table as a `Column`. The one
exception is a lone surrogate in a text: UTF-8 cannot hold it, so it becomes "\ufffd".
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types as python_types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from mempipe.settings import ConfigError
from mempipe.storage.parquet import parquet_writer, read_metadata, read_row_groups
from mempipe.types import Column, Group, Question, Trajectory, from_row, to_row

T = TypeVar("T")
_SCALARS = {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_()}
_GROUPS_PER_ROW_GROUP = 64
_ADVICE = "delete it to have it made again, or copy it again from where it came"
_MADE_OF = b"made_of"  # a key of the schema's metadata
_PACKED = pa.schema([("group", pa.large_binary())])
PER_TOKEN = ("token_ids", "logprobs", "policy_versions", "ref_logprobs")
"""Fields of a context that only training needs. `loss_mask` is not among them: it counts the sampled tokens."""


@functools.cache
def arrow_schema(cls: type) -> pa.Schema:
    """Returns one column per field of the dataclass: int64, float64, string, bool, lists and structs of them.

    Enums become strings.
    """
    return pa.schema(list(_arrow_type(cls)))


def group_to_table(group: Group) -> pa.Table:
    """Returns one row, whose only column holds the group as an Arrow IPC stream.

    Ray pickles every buffer of a table by itself. A group has 180 of them, and pickling those took more CPU time than
    playing a short group; one column of bytes is copied whole.
    """
    table = records_to_table([group])
    packed = pa.BufferOutputStream()
    with pa.ipc.new_stream(packed, table.schema) as stream:
        stream.write_table(table)
    return pa.table([pa.array([packed.getvalue().to_pybytes()], pa.large_binary())], _PACKED)


def records_to_table(records: Sequence[Any]) -> pa.Table:
    """Returns one row per record. All records are of one dataclass, and there is at least one."""
    return _table([to_row(record) for record in records], arrow_schema(type(records[0])))


def table_to_groups(table: pa.Table) -> list[Group]:
    """Returns the groups of a table of `group_to_table` rows. They hold nothing of the table's memory."""
    streams = (pa.ipc.open_stream(row.as_buffer()) for row in table.column("group"))
    return [group for stream in streams for batch in stream for group in _records(Group, batch.to_struct_array())]


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


def _records(cls: type[T], array: pa.StructArray) -> list[T]:
    """Returns a record for every element. A step has tens of millions of numbers, so no row becomes a dict first."""
    hints = _hints(cls)
    names = [field.name for field in array.type]
    columns = [_values(hints[name], column) for name, column in zip(names, array.flatten(), strict=True)]
    return [cls(**dict(zip(names, values, strict=True))) for values in zip(*columns, strict=True)]


def _values(hint: Any, array: pa.Array) -> list[Any]:
    """Returns the element of every row, as the field of type `hint` holds it."""
    origin = typing.get_origin(hint)
    if origin is Sequence:
        numbers = array.flatten().to_numpy(zero_copy_only=False)
        # A copy: a view would keep the whole block in the object store.
        return [Column(numbers[start:end].copy()) for start, end in _bounds(array)]
    if origin is list and dataclasses.is_dataclass(item := typing.get_args(hint)[0]):
        records = _records(typing.cast(type, item), array.flatten())
        return [records[start:end] for start, end in _bounds(array)]
    if dataclasses.is_dataclass(hint):
        return _records(typing.cast(type, hint), array)
    values = array.to_pylist()
    return [hint(value) for value in values] if isinstance(hint, type) and issubclass(hint, StrEnum) else values


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _bounds(array: pa.ListArray) -> Iterator[tuple[int, int]]:
    """Yields where each list starts and ends in `array.flatten()`."""
    ends = np.cumsum(array.value_lengths().to_numpy(zero_copy_only=False)).tolist()
    return zip([0, *ends], ends, strict=False)


def _arrow_type(hint: Any) -> pa.DataType:
    if typing.get_origin(hint) in (list, Sequence):
        (item,) = typing.get_args(hint)
        return pa.list_(_arrow_type(item))
    if typing.get_origin(hint) is python_types.UnionType:  # only `X | None`
        return _arrow_type(next(a for a in typing.get_args(hint) if a is not type(None)))
    if dataclasses.is_dataclass(hint):
        return pa.struct([pa.field(f.name, _arrow_type(_hints(hint)[f.name])) for f in dataclasses.fields(hint)])
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
