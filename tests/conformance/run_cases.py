"""Compares mempipe with published behaviour, case by case: `python tests/conformance/run_cases.py FILE [--verbose]`.

FILE is a JSON list of cases (id, system, function, input, expected). Every module `cases_*.py` beside this one says
which of our functions answers which published function (ADAPTERS) and where we mean to differ (DIFFERENCES). Exits with
1 when a case fails.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from conformance.common import Adapter, Case, Difference, same

HERE = Path(__file__).resolve().parent


@dataclass
class Report:
    passed: int = 0
    failed: int = 0
    deliberate: int = 0
    uncovered: Counter[str] = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)


def load_tables() -> tuple[dict[str, Adapter], list[Difference]]:
    adapters: dict[str, Adapter] = {}
    differences: list[Difference] = []
    for path in sorted(HERE.glob("cases_*.py")):
        module = importlib.import_module(f"conformance.{path.stem}")
        assert not adapters.keys() & module.ADAPTERS.keys(), f"{path.name} has an adapter that another table has too"
        adapters |= module.ADAPTERS
        differences += module.DIFFERENCES
    return adapters, differences


def run_cases(cases: Iterable[Case], *, verbose: bool = False) -> Report:
    """Every case through its adapter. Where a difference applies our answer must be the one that it promises."""
    adapters, differences = load_tables()
    report = Report()
    for case in cases:
        name = f"{case['system']}:{case['function']}"
        if name not in adapters:
            report.uncovered[name] += 1
            continue
        got = _call(adapters[name], case)
        difference = next((d for d in differences if d.function == name and d.applies(case)), None)
        if same(got, case["expected"]):
            report.passed += 1
            if verbose:
                report.lines.append(f"pass        {case['id']} {name}")
        elif difference is not None and same(got, _call(difference.ours, case)):
            report.deliberate += 1
            report.lines.append(f"deliberate  {_line(case, name, got, verbose)}; {difference.reason}")
        else:
            report.failed += 1
            promised = f"; promised {_call(difference.ours, case)!r}, since {difference.reason}" if difference else ""
            report.lines.append(f"FAILED      {_line(case, name, got, verbose)}{promised}")
    return report


def _call(function: Any, case: Case) -> Any:
    """The answer, or what was raised in the notation of the cases."""
    try:
        return function(case)
    except Exception as error:
        return {"raises": type(error).__name__, "message": str(error)}


def _line(case: Case, name: str, got: Any, verbose: bool) -> str:
    limit = None if verbose else 160
    return f"{case['id']} {name}: expected {repr(case['expected'])[:limit]}, got {repr(got)[:limit]}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare mempipe with published behaviour.")
    parser.add_argument("file", type=Path, help="JSON list of cases")
    parser.add_argument("--verbose", action="store_true", help="print passed cases too, and values in full")
    arguments = parser.parse_args()
    report = run_cases(json.loads(arguments.file.read_text()), verbose=arguments.verbose)
    print(*report.lines, sep="\n")
    if report.uncovered:
        print(f"not covered: {report.uncovered.total()} cases of {len(report.uncovered)} functions")
        print(*(f"  {count:3} {name}" for name, count in sorted(report.uncovered.items())), sep="\n")
    print(f"{report.passed} passed, {report.failed} failed, {report.deliberate} deliberate")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
