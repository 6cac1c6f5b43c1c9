"""Of every test on a device: how long it took and how much device memory it needed, in one table at the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

PEAKS = pytest.StashKey[dict[str, float]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[PEAKS] = {}


@pytest.fixture(autouse=True)
def peak_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    if not torch.cuda.is_available():
        yield
        return
    torch.cuda.reset_peak_memory_stats()
    yield
    request.config.stash[PEAKS][request.node.nodeid] = torch.cuda.max_memory_allocated() / 2**30


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    calls = [
        report
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        if report.nodeid in config.stash[PEAKS]
    ]
    if not calls:
        return
    terminalreporter.section(f"on {torch.cuda.get_device_name()}")
    for report in calls:
        peak = config.stash[PEAKS][report.nodeid]
        terminalreporter.write_line(f"{report.outcome:7} {report.duration:7.1f} s {peak:7.2f} GiB  {report.nodeid}")
