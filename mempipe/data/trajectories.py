"""Groups and trajectories as Arrow tables and Parquet files, with schemas derived from the dataclasses of
`mempipe.types`.

`group_to_table` and `table_to_groups` carry groups through a stream of tables: one row per group. `write_trajectories`
and `read_trajectories` keep them in a file for people: one row per trajectory, the question repeated. Records come back
exactly as they went in. The one exception is a lone surrogate in a text: UTF-8 cannot hold it, so it becomes "\ufffd".
"""

from __future__ import annotations

import dataclasses
import functools
import types as python_types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mempipe.files import whole_file
from mempipe.types import Group, Question, Trajectory, from_row, to_row

_SCALARS = {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_()}
_GROUPS_PER_ROW_GROUP = 64


@functools.cache
def arrow_schema(cls: type) -> pa.Schema:
    """One column per field of the dataclass:
    int64, float64, string, bool, lists and structs of them. Enums are strings.
    """
    return pa.schema(list(_arrow_type(cls)))


def group_to_table(group: Group) -> pa.Table:
    """One row. The schema is the same for every group, also where lists are empty or values are None."""
    return records_to_table([group])


def records_to_table(records: Sequence[Any]) -> pa.Table:
    """Returns one row per record. All records are of one dataclass, and there is at least one."""
    return _table([to_row(record) for record in records], arrow_schema(type(records[0])))


def table_to_groups(table: pa.Table) -> list[Group]:
    """The groups of a table made of `group_to_table` rows."""
    return [from_row(Group, row) for row in table.to_pylist()]


@functools.cache
def trajectories_schema() -> pa.Schema:
    """Columns of the file: `question_*`, `group_num_retries`, `group_seconds`, then the fields of `Trajectory`
    (`group_id` among them).
    """
    question = [column.with_name(f"question_{column.name}") for column in arrow_schema(Question)]
    group = [arrow_schema(Group).field(name).with_name(f"group_{name}") for name in _GROUP_FIELDS]
    return pa.schema([*question, *group, *arrow_schema(Trajectory)])


def write_trajectories(path: str | Path, groups: Iterable[Group]) -> int:
    """Writes one row per trajectory and returns their number. The file appears whole or not at all; an existing one is
    replaced.

    Raises ValueError for a group that has no trajectories, or whose id was seen before or differs from its
    trajectories' `group_id`: it could not be read back.
    """
    num_rows = 0
    with (
        whole_file(Path(path)) as partial,
        pq.ParquetWriter(partial, trajectories_schema(), compression="zstd") as writer,
    ):
        remaining = _trajectory_rows(groups)
        while rows := [row for group_rows in islice(remaining, _GROUPS_PER_ROW_GROUP) for row in group_rows]:
            writer.write_table(_table(rows, trajectories_schema()))
            num_rows += len(rows)
    return num_rows


def read_trajectories(path: str | Path) -> list[Group]:
    """The groups of the file, in the order in which they were written."""
    rows_of: dict[str, list[dict[str, Any]]] = {}
    for row in pq.read_table(path).to_pylist():
        rows_of.setdefault(row["group_id"], []).append(row)
    return [_group(rows) for rows in rows_of.values()]


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


def _group(rows: list[dict[str, Any]]) -> Group:
    first = rows[0]
    question = {f.name: first[f"question_{f.name}"] for f in dataclasses.fields(Question)}
    return Group(
        id=first["group_id"],
        question=from_row(Question, question),
        trajectories=[from_row(Trajectory, row) for row in rows],
        **{
            name: first[f"group_{name}"] for name in _GROUP_FIELDS if f"group_{name}" in first
        },  # older files have fewer
    )


def _arrow_type(hint: Any) -> pa.DataType:
    if typing.get_origin(hint) is list:
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
