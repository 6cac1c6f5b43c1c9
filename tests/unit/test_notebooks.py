"""The notebooks run from saved runs, and show what is in them."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import polars as pl
import pytest
import yaml

from mempipe.data.trajectories import write_trajectories
from mempipe.data.world import make_questions, make_worlds
from mempipe.evaluation.results import ResultFolder, result_row
from mempipe.storage.files import write_text
from mempipe.studies.sweep import SWEEP_FILE, SweepConfig, trials, write_configs
from mempipe.types import Context, EndReason, Group, Question, Recall, Search, Trajectory

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
LOADS = "00_first_look"
"""Loads an agent: test_python_examples.py."""
matplotlib.use("Agg")


def played(group_id: str, question: Question, world: Any, *, forgets: bool) -> Group:
    """Reads the needed passages one after another and notes each value, or only the last one where it forgets."""
    passages = {passage.id: passage for passage in world.passages}
    contexts, memory = [], ""
    for index, fact in enumerate([*question.evidence, None]):
        found = [Search(query="?", num_passages=1, passages=[passages[fact.passage_id]], snapshot="s")] if fact else []
        after = "" if fact is None else fact.value if forgets else f"{memory} {fact.value}".strip()
        contexts.append(
            Context(
                index=index,
                token_ids=list(range(30)),
                loss_mask=[0] * 20 + [1] * 10,
                logprobs=[0.0] * 30,
                policy_versions=[1] * 30,
                num_prompt_tokens=20,
                num_question_tokens=8,
                num_memory_tokens=len(memory.split()),
                num_observation_tokens=12 if fact else 0,
                action="answer",
                searches=found,
                memory_before=memory,
                memory_after=after,
                num_new_memory_tokens=len(after.split()),
            )
        )
        memory = after
    right = not forgets
    trajectory = Trajectory(
        id=f"{group_id}/0",
        group_id=group_id,
        member=0,
        contexts=contexts,
        end_reason=EndReason.ANSWERED,
        answer=question.golden_answers[0] if right else "nobody",
        reward=float(right),
        em=float(right),
        f1=float(right),
    )
    return Group(id=group_id, question=question, trajectories=[trajectory])


def recalling(group: Group, *, right: bool) -> Group:
    """The attempt with two recall samples: its memory after two chunks is asked for a name of the first one."""
    (trajectory,) = group.trajectories
    memory = trajectory.contexts[1].memory_before
    context = replace(trajectory.contexts[1], memory_before=memory, memory_after="", searches=[])
    recalls = [
        Recall(context=context, step=2, chunk=0, target=["Oslo"], answer=answer, score=float(answer == "Oslo"))
        for answer in ("Oslo" if right else "Lima", None)
    ]
    return replace(group, trajectories=[replace(trajectory, recalls=recalls)])


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A run whose training repaired every question of three hops, one that learned to recall, and a sweep that needs 8
    tokens."""
    root = tmp_path_factory.mktemp("saved")
    (world,), _ = make_worlds(1, num_held_out=1, seed=1)
    questions = make_questions([world], 30, seed=1)
    before = [played(f"before/{question.id}", question, world, forgets=True) for question in questions]
    after = [played(f"after/{each.id}", each, world, forgets=each.num_hops < 3) for each in questions]
    write_trajectories(root / "runs" / "quickstart" / "trajectories.parquet", [*before, *after])
    memtrain = root / "runs" / "tiny-memtrain"
    recalled = [recalling(group, right=right) for groups, right in ((before, False), (after, True)) for group in groups]
    write_trajectories(memtrain / "trajectories.parquet", recalled)
    steps = [{"step": step, "reward": 0.1, "em": 0.1 * step, "measure/recall": 0.2 * step} for step in (1, 2, 3)]
    write_text(memtrain / "metrics.jsonl", "".join(f"{json.dumps(row)}\n" for row in steps))
    sweep = SweepConfig(
        name="tiny-sweep",
        output=str(root / "sweeps"),
        budgets=[4, 8, 16],
        margin=25.0,  # there are thirty questions
        runs=[{"name": "mem", "settings": {"model": {"path": "m"}}}],
        benchmarks=[{"name": "world", "file": "q.parquet"}],
    )
    write_text(sweep.folder / SWEEP_FILE, yaml.safe_dump(sweep.model_dump(mode="json")))
    for trial in trials(sweep):
        write_configs(sweep.folder, trial)
        settings = {"run": {"agent": {"name": "memsearcher"}, "budget": {"memory_tokens": trial.memory_tokens}}}
        folder = ResultFolder(trial.results / "world", settings)
        folder.open()
        groups = [played(each.id, each, world, forgets=trial.memory_tokens == 4) for each in questions]
        folder.append(groups, [result_row(group, growing=False, prompt_hash="p") for group in groups])
        folder.finish()
    (root / "notebooks").mkdir()
    return root


def run_notebook(path: Path) -> tuple[dict[str, Any], list[Any]]:
    """Runs the code cells in one namespace; returns it, and what each cell shows: the value of its last line."""
    namespace: dict[str, Any] = {}
    shown = []
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, path.name, "exec"), namespace)
        if last is not None:
            shown.append(eval(compile(ast.Expression(last.value), path.name, "eval"), namespace))
    return namespace, shown


@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path.stem != LOADS], ids=lambda path: path.stem)
def test_a_notebook_runs_from_saved_runs(path, saved, monkeypatch, capsys):
    monkeypatch.chdir(saved / "notebooks")
    namespace, shown = run_notebook(path)
    tables = [value for value in shown if isinstance(value, pl.DataFrame)]
    assert shown and all(table.height for table in tables)
    match path.stem:
        case "01_one_trajectory":
            assert namespace["facts"].row(0)[0] == "gained" and namespace["contexts"].height == 4
        case "02_token_growth":
            last = namespace["by_turn"].row(-1, named=True)
            assert last["full history"] > last["memory"] == 30.0
        case "03_memory_budget":
            assert namespace["study"].whole.curves[0].smallest_enough.memory_tokens == 8
            assert tables[-1].width == 5  # agent, budget, one to three hops
        case "04_memory_quality":
            assert namespace["rates"]["lost_rate"].to_list() == [1.0, 0.25]
            assert {cause.value for cause in namespace["causes"]["before"]} == {"lost", "not_used"}
        case "05_memtrain":
            assert namespace["steps"]["recall"].to_list() == pytest.approx([0.2, 0.4, 0.6])
            assert tables[1]["recall"].to_list() == [0.0, 0.5] and tables[1]["samples"].to_list() == [60, 60]
            assert "recalled:  Oslo, (nothing)" in capsys.readouterr().out
        case "06_before_and_after":
            assert tables[0].height == 2
        case name:
            pytest.fail(f"{name} has no expectation")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_kept_outputs_are_of_one_run_from_top_to_bottom(path):
    text = path.read_text()
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] in ([None] * len(cells), list(range(1, len(cells) + 1)))
    assert all(output["output_type"] != "error" for cell in cells for output in cell["outputs"])
    assert len(text) < 100_000
