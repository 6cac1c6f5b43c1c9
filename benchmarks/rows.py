"""What a benchmark measured, for `benchmarks.limits` to gather: a value beside a peer's and beside the limit."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

RECORD = "MEMPIPE_BENCHMARK_ROWS"
"""Environment variable that names the file to which rows are added; without it nothing is written."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One thing that was measured in several rounds of one run. All lists have one number for each round."""

    name: str
    unit: str
    values: Sequence[float]
    less_is_better: bool = False
    peer: str = ""
    """Who does the same work beside mempipe; "" without one."""
    of_peer: Sequence[float] = field(default_factory=list)
    peer_is_own: bool = False
    """The peer runs mempipe's code as well, so a slower commit may slow both."""
    limit: str = ""
    """What the machine can do at all; "" where that was not measured."""
    of_limit: Sequence[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        for who, others in ((self.peer, self.of_peer), (self.limit, self.of_limit)):
            if len(others) != (len(self.values) if who else 0):
                raise ValueError(f"{self.name}: {len(self.values)} rounds, but {len(others)} of {who or 'nobody'}")

    @property
    def value(self) -> float:
        """Returns the median over the rounds."""
        return statistics.median(self.values)

    def ratios(self, others: Sequence[float]) -> list[float]:
        """Returns for each round how many times as good mempipe is as the other; empty without another."""
        pairs = zip(self.values, others, strict=True) if others else ()
        return [other / own if self.less_is_better else own / other for own, other in pairs]

    @property
    def yardstick(self) -> str:
        """Returns what `scores` are ratios to: the peer unless it is mempipe's own, else the limit, else nothing."""
        return (not self.peer_is_own and self.peer) or self.limit

    @property
    def scores(self) -> list[float]:
        """Returns what tells two commits apart, more is better: ratios to the yardstick, or the values without one. A
        ratio within one round is hardly changed by other work on the machine."""
        if self.yardstick:
            return self.ratios(self.of_limit if self.yardstick == self.limit else self.of_peer)
        return [1 / value if self.less_is_better else value for value in self.values]


def spread(values: Sequence[float]) -> str:
    """Returns the median and the range of ratios, with two digits that count, of those below 1 as well."""
    middle, least, most = (
        f"{value:.2f}" if abs(value) >= 0.1 or not value else f"{value:#.2g}"
        for value in (statistics.median(values), min(values), max(values))
    )
    return f"{middle} ({least} to {most})"


def record(*rows: Row) -> None:
    """Adds the rows to the file that `MEMPIPE_BENCHMARK_ROWS` names."""
    if file := os.environ.get(RECORD):
        with Path(file).open("a") as opened:
            opened.writelines(json.dumps(asdict(row)) + "\n" for row in rows)


def read_rows(file: Path) -> list[Row]:
    """Returns the rows of a file that `record` wrote; none when it wrote none."""
    return [Row(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []
