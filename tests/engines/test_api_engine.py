"""`mempipe.load` with a real engine, as a script uses it: it is loaded, ended, loaded again, and left to the end of the
process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from mempipe.loader import load_config
from mempipe.runs import Run
from pipelines.prepare import prepare

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "jobs" / "configs" / "quickstart.yaml"
SMALL = ["world.num_train_worlds=1", "world.num_train_questions=8", "world.num_validation_questions=8"]
SCRIPT = """
import asyncio
import mempipe

asked = {"sampling": {"temperature": 1.0, "seed": 7}, "partition": "held-out-0"}
question = "Look up Adela's spouse's hometown?"
with mempipe.load("runs/quickstart") as agent:
    first = agent.ask(question, **asked)
agent = mempipe.load(mempipe.Run("runs/quickstart"), budget={"max_turns": 2})
again = agent.ask(question, budget={"max_turns": 6}, **asked)
several = agent.ask_many([question] * 3, **asked)
later = asyncio.run(agent.ask_async(question, **asked))
evaluation = mempipe.evaluate(agent, "runs/quickstart/world/validation.parquet")
print("actions", [turn.action for turn in first.turns] == [turn.action for turn in again.turns])
print("together", len({reply.turns[0].action for reply in [*several, later]}))
print("rows", evaluation.table.height, evaluation.table["failed"].null_count())
print("engine", again.completion_tokens > 0, len(later.turns) <= 2)
"""


def test_a_script_loads_asks_and_ends(tmp_path):
    run = Run(load_config(QUICKSTART, [*SMALL, "warm_start=null", f"output={tmp_path / 'runs'}"]))
    prepare(run)
    shutil.copytree(run.folder / "model", run.folder / "huggingface")
    run.update(finished=True, num_steps=1)
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=600,
        check=False,
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.split()[0] in ("actions", "together", "rows", "engine")]
    assert lines == ["actions True", "together 1", "rows 8 8", "engine True True"]
