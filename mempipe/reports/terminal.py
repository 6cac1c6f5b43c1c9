"""Tables for a terminal, a pipe or a file. No cell is cut: names of runs often differ only at their end."""

from __future__ import annotations

import os
from collections.abc import Collection

from rich.table import Column, Table

from mempipe.progress import Console

WIDTH = 160
"""Characters of a line where no terminal has a width."""


def table(*headers: str, title: str = "", right: Collection[str] = ()) -> Table:
    """Returns a table without rows. The columns `right` are aligned there, and a cell that does not fit is folded."""
    columns = [Column(name, overflow="fold", justify="right" if name in right else "left") for name in headers]
    return Table(*columns, title=title or None, title_justify="left")


def console() -> Console:
    """Returns the console of the process, as wide as its terminal, COLUMNS or WIDTH. It prints names and paths as they
    are, brackets included."""
    found = Console(markup=False, emoji=False)
    has_width = found.is_terminal or "COLUMNS" in os.environ
    return found if has_width else Console(markup=False, emoji=False, width=WIDTH)
