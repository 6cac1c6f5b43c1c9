"""Rankings, and how several of them become one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Scored = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]
"""A ranking: rows and their scores, best first."""


def reciprocal_rank_fusion(rankings: Sequence[Sequence[int]], *, constant: int = 60) -> list[tuple[int, float]]:
    """Returns rows and their scores, best first, ties by row. A score is the sum of 1 / (constant + rank) over the
    rankings that hold the row (Cormack et al. 2009).

    A ranking holds rows, best first, each once; ranks start at 1. The order of the rankings changes nothing, not even
    the last digit.
    """
    shares: dict[int, list[float]] = {}
    for ranking in rankings:
        for rank, row in enumerate(ranking, start=1):
            shares.setdefault(row, []).append(1 / (constant + rank))
    scores = {row: math.fsum(parts) for row, parts in shares.items()}  # fsum: in whatever order, the rounded exact sum
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))
