"""What the start of a training costs: seconds of each phase, and CPU-seconds of each kind of process, until the first
step collects its groups.

    python -m benchmarks.start [CONFIG] [key=value ...] [--rounds 1]

The command is the real `mempipe train` (of the quickstart unless CONFIG is given) in a temporary folder. It is ended
when it has reached the first step. A phase begins where the run passes a beacon (`mempipe.beacons`). CPU-seconds are
those of all processes of the run: they say more than seconds where other work shares the cores. All processes are read
every half second, so up to half a second of a process that ends is not counted.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.rows import Row, record
from mempipe.beacons import RECORD, VARIABLE
from tools.processes import ROOT, Marked, Running, command_line

READ_EVERY_S = 0.5
PHASES = {
    "": "start of the command",
    "prepare": "world, index, model",
    "connected": "roles start, demonstrations",
    "warm_start": "warm start",
    "warm_start.export": "export, weights into the roles",
    "restored": "evaluation before training",
    "collect": "first step",
}
"""The beacon of the run's own process at which each phase begins, and the name of the phase."""
END = PHASES["collect"]
OWN, RAY, OTHERS = "the run's own process", "Ray's own processes", "others"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default=str(ROOT / "jobs" / "configs" / "quickstart.yaml"))
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    used, imports = [], []
    for number in range(1, arguments.rounds + 1):
        seconds, usage = watch(str(Path(arguments.config).resolve()), arguments.overrides)
        print(f"\nround {number}, load {psutil.getloadavg()[0]:.0f}\n\n| phase | s | CPU-s |\n|---|---|---|")
        for phase, value in seconds.items():
            print(f"| {phase} | {value:.0f} | {usage.by_phase[phase]:.1f} |")
        print(f"| all | {sum(seconds.values()):.0f} | {usage.total:.1f} |")
        print("\n| process | started | CPU-s |\n|---|---|---|")
        for name, value in sorted(usage.by_role.items(), key=lambda item: -item[1]):
            if usage.num_processes[name]:
                print(f"| {name} | {usage.num_processes[name]} | {value:.1f} |")
        used.append(usage.total)
        imports.append(import_cpu_seconds())
    limit = "import vllm, torch, ray once"
    record(Row(name="start", unit="CPU-s", values=used, less_is_better=True, limit=limit, of_limit=imports))


def import_cpu_seconds() -> float:
    """Returns the CPU-seconds of one process that does nothing but import what a run cannot do without."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", "import vllm, torch, ray"], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def watch(config: str, overrides: list[str]) -> tuple[dict[str, float], Usage]:
    """Starts a training; returns the seconds of each phase until its first step, and what the processes have used."""
    seconds, usage = dict[str, float](), Usage()
    phase, since = PHASES[""], time.time()
    with tempfile.TemporaryDirectory() as folder:
        record, marked = Path(folder) / RECORD, Marked({VARIABLE: folder})
        command = [sys.executable, "-m", "mempipe.cli", "train", config, *overrides, f"output={folder}/runs"]
        try:
            running = Running(command, marked=marked, cwd=Path(folder))
            while phase != END:
                assert running.process.poll() is None, f"it ended early\n{running.stdout}{running.stderr}"
                time.sleep(READ_EVERY_S)
                for process in marked.processes():
                    with suppress(psutil.NoSuchProcess):
                        used = sum(process.cpu_times()[:2])
                        usage.count((process.pid, process.create_time()), role(command_line(process)), used, phase)
                for line in record.read_text().splitlines() if record.exists() else []:
                    passed = json.loads(line)
                    begun = PHASES.get(passed["name"], phase)
                    if passed["pid"] == running.process.pid and begun not in {phase, *seconds}:
                        seconds[phase] = passed["time"] - since
                        phase, since = begun, passed["time"]
        finally:
            marked.end()
    return seconds, usage


class Usage:
    """CPU-seconds of processes, by their role and by the phase in which they were used."""

    def __init__(self) -> None:
        self.by_phase = defaultdict[str, float](float)
        self.by_role = defaultdict[str, float](float)
        self.num_processes = Counter[str]()
        self._known: dict[tuple[int, float], tuple[str, float]] = {}

    @property
    def total(self) -> float:
        return sum(self.by_phase.values())

    def count(self, process: tuple[int, float], role: str, used: float, phase: str) -> None:
        """Takes note that the process (its id and when it was created) has used so many CPU-seconds so far.

        A worker of Ray is given its role after it has started, and then all that it used is of that role. A process
        that is just ending has no role ("") any more, and keeps the one that it had.
        """
        before, counted = self._known.get(process, ("", 0.0))
        role = role or before or OTHERS
        if role != before:
            self.num_processes[role] += 1
            self.by_role[role] += counted
            if before:
                self.num_processes[before] -= 1
                self.by_role[before] -= counted
        self.by_role[role] += used - counted
        self.by_phase[phase] += used - counted
        self._known[process] = (role, used)


def role(command: str) -> str:
    """Returns the role of a process by its command line; "" of one that has none, since it is ending."""
    if "mempipe.cli" in command:
        return OWN
    if re.search("raylet|gcs_server|dashboard|runtime_env|log_monitor", command):
        return RAY
    if named := re.match(r"ray::(?:MapWorker\(MapBatches\()?(\w+)", command):
        return named[1]
    return OTHERS if command else ""


if __name__ == "__main__":
    main()
