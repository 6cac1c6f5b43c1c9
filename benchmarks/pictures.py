"""Plots of the benchmarks, as files that change only where a figure changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def pyplot() -> Any:
    """Imports matplotlib's pyplot for pictures in files."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "mempipe"  # otherwise every drawing has other ids
    import matplotlib.pyplot as plt

    return plt


def save(figure: Any, file: str | Path) -> None:
    """Writes a picture without the time at which it was drawn."""
    figure.savefig(file, metadata={"Date": None})
