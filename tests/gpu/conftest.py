"""What needs a GPU, smallest first, each test by itself, and a table of what each took at the end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from shapes import GPU, start_afresh

from mempipe.planning.capacity import GIB

ORDER = [f"test_{name}_gpu" for name in ("learner", "shapes", "index", "engine", "phases", "job", "kills")]
MEASURED = pytest.StashKey[dict[str, dict[str, float]]]()
FASTEST = "tokens/s"
"""Of tests with several choices of settings, the one with the most of these is named."""
COLUMNS = {"GiB": 8, "MFU": 9, "tokens/s": 12, "canary mean": 13, "canary max": 12}
"""What a test may measure, and how wide its column is."""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[MEASURED] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: ORDER.index(item.path.stem) if item.path.stem in ORDER else -1)


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> dict[str, float]:
    """Numbers for the test's row of the table, by the names of COLUMNS."""
    return request.config.stash[MEASURED].setdefault(request.node.nodeid, {})


@pytest.fixture(autouse=True)
def device_to_itself(measured: dict[str, float]) -> Iterator[None]:
    """Gives a test the memory that the one before it held, and notes what it needed at most."""
    start_afresh()
    yield
    if GPU:
        measured.setdefault("GiB", torch.cuda.max_memory_reserved() / GIB)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = [
        report
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        if config.stash[MEASURED].get(report.nodeid) and report.when == "call"
    ]
    if not rows:
        return
    terminalreporter.section(f"on {torch.cuda.get_device_name()}" if GPU else "on CPUs")
    terminalreporter.write_line(f"{'':7} {'seconds':>8}{''.join(f'{name:>{wide}}' for name, wide in COLUMNS.items())}")
    for report in rows:
        found = config.stash[MEASURED][report.nodeid]
        cells = "".join(f"{found[name]:>{wide}.4g}" if name in found else " " * wide for name, wide in COLUMNS.items())
        terminalreporter.write_line(
            f"{report.outcome:7} {report.duration:8.1f}{cells}  {report.nodeid.removeprefix('tests/gpu/')}"
        )
    for test, choices in _choices({report.nodeid: config.stash[MEASURED][report.nodeid] for report in rows}).items():
        best = max(choices, key=lambda choice: choices[choice])
        terminalreporter.write_line(f"{test}: the fastest is {best} ({choices[best]:,.0f} {FASTEST})")


def _choices(found: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Returns the speed of each choice, of the tests that played several."""
    by_test: dict[str, dict[str, float]] = defaultdict(dict)
    for node, numbers in found.items():
        test, _, choice = node.rpartition("::")[2].removesuffix("]").partition("[")
        model, _, setting = choice.rpartition("B-")  # of tests that are played with several models
        if "=" in setting and FASTEST in numbers:
            by_test[f"{test}[{model}B]" if model else test][setting] = numbers[FASTEST]
    return {test: choices for test, choices in by_test.items() if len(choices) > 1}
