"""The passages of an index by row: Arrow files of our own, or the jsonl file that an adopted index was built from.

Both are memory-mapped, so that opening 21 million passages takes seconds and a lookup microseconds.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mempipe.data.corpus import PASSAGE_COLUMNS, parse_passage, row_names
from mempipe.data.input_files import InputFile
from mempipe.settings import ConfigError
from mempipe.types import Passage

SCAN_BYTES = 2**24


class Passages(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Passage:
        """Raises IndexError when there is no such row."""
        ...


class ArrowPassages:
    """Passages in Arrow IPC files, one file after the other (columns: `mempipe.data.corpus.PASSAGE_COLUMNS`)."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Raises ConfigError for a file that is not one of ours."""
        self._columns = [batch.columns for file in files for batch in read_batches(file)]
        self._first_rows = np.cumsum([0, *(len(columns[0]) for columns in self._columns)])

    def __len__(self) -> int:
        return int(self._first_rows[-1])

    def __getitem__(self, row: int) -> Passage:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)} passages")
        # Not Table.take: it joins all chunks of a column first.
        chunk = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        place = row - int(self._first_rows[chunk])
        return Passage(
            **{
                name: column[place].as_py()
                for name, column in zip(PASSAGE_COLUMNS.names, self._columns[chunk], strict=True)
            }
        )


class JsonlPassages:
    """A plain jsonl file of passages and the place of every line in it (`line_offsets`)."""

    def __init__(self, file: Path, offsets: Path) -> None:
        """Raises ConfigError when the offsets are damaged or are not those of the file."""
        self._file = file
        (self._name,) = row_names([InputFile(str(file), 0)])  # as a build names rows without an id
        self._offsets = _read_offsets(offsets)
        with file.open("rb") as opened:
            self._bytes = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        if self._offsets[-1] > len(self._bytes):
            raise ConfigError(
                f"{file} has {len(self._bytes)} bytes, but by {offsets} its last line ends at byte "
                f"{self._offsets[-1]}; adopt the index again"
            )

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, row: int) -> Passage:
        """Raises ConfigError, naming the row, when the line is not a passage. Its text may be empty: the vector of the
        line is in the index, and one search that finds it must not fail all that share its batch.
        """
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)} passages")
        place = f"{self._file}, row {row + 1}"
        try:
            line = self._bytes[self._offsets[row] : self._offsets[row + 1]].decode("utf-8" if row else "utf-8-sig")
            return parse_passage(json.loads(line), own_id=f"{self._name}-{row + 1}", may_be_empty=True)
        except (ValueError, AttributeError) as error:
            raise ConfigError(f"{place}: not a passage: {error}") from error


def _read_offsets(file: Path) -> npt.NDArray[np.int64]:
    try:
        offsets = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError, SyntaxError) as error:  # NumPy evaluates the header as a literal
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{file} is missing or damaged: {reason}; adopt the index again") from error
    if not isinstance(offsets, np.ndarray) or offsets.dtype != np.int64 or offsets.ndim != 1 or len(offsets) < 2:
        raise ConfigError(f"{file} does not hold the places of lines; adopt the index again")
    return offsets


def read_batches(file: Path) -> list[pa.RecordBatch]:
    """Returns the memory-mapped record batches of an Arrow file of passages. Raises ConfigError for other files."""
    try:
        with pa.memory_map(str(file)) as source, pa.ipc.open_file(source) as reader:
            if not reader.schema.equals(PASSAGE_COLUMNS):
                raise ConfigError(
                    f"{file} has columns {reader.schema.names}, expected {PASSAGE_COLUMNS.names}; build the index again"
                )
            return [reader.get_batch(i) for i in range(reader.num_record_batches)]
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(
            f"{file} is not an Arrow file: {' '.join(str(error).split())[:200]}; build the index again"
        ) from error


def line_offsets(file: Path) -> npt.NDArray[np.int64]:
    """Returns where every line begins, and where the last one ends; int64 [num_lines + 1].

    It skips blank lines at the end of the file only: elsewhere rows of vectors and lines of text would no longer
    match.
    """
    starts = [np.zeros(1, dtype=np.int64)]
    position = 0
    with file.open("rb") as opened:
        while block := opened.read(SCAN_BYTES):
            starts.append(np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n")) + position + 1)
            position += len(block)
        offsets = np.concatenate(starts)
        offsets = offsets if offsets[-1] == position else np.append(offsets, position)
        num_lines = len(offsets) - 1
        while num_lines and not _line(opened, offsets, num_lines - 1).strip():
            num_lines -= 1
    return offsets[: num_lines + 1]


def _line(opened: BinaryIO, offsets: npt.NDArray[np.int64], row: int) -> bytes:
    opened.seek(offsets[row])
    return opened.read(offsets[row + 1] - offsets[row])
