"""A kind of job that costs nothing: it looks around, counts, and exits with the code that it is given."""

from __future__ import annotations

import os
import sys
import time

from mempipe.checks.findings import Finding, fatal, ok
from mempipe.kinds import JobKind
from mempipe.settings import Section


class Counting(Section):
    up_to: int
    data: str = ""
    code: int = 0
    seconds: float = 0.0


def check(config: Counting) -> list[Finding]:
    if config.up_to < 1:
        return [fatal(f"up_to is {config.up_to}; it is at least 1")]
    there = not config.data or os.path.exists(config.data)
    return [ok("data") if there else fatal(f"data is {config.data!r}, which does not exist", absent=config.data)]


def count(config: Counting) -> None:
    print("files", *sorted(os.listdir()), flush=True)
    print("count", *range(config.up_to), flush=True)
    time.sleep(config.seconds)
    sys.exit(config.code)


JOB = JobKind(
    described="a count",
    command="mempipe run",
    section="counted_job:Counting",
    check="counted_job:check",
    main="counted_job:count",
)
