"""A sweep's plan: which trials there are, which are missing, what is refused, and the report of what is there."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml
from result_builders import answered

from mempipe.actors.trials import TrialCommands
from mempipe.agents.budget import MemoryBudget
from mempipe.checks.sweep import check_sweep
from mempipe.cli import main as command
from mempipe.evaluation.results import ResultFolder, result_row
from mempipe.evaluation.suite import resolve_run
from mempipe.loader import load_config, parse_section
from mempipe.provenance import model_sha256, read_record, write_record
from mempipe.settings import ConfigError
from mempipe.storage.files import write_text
from mempipe.studies.sweep import (
    SWEEP_FILE,
    SweepConfig,
    Trial,
    check_same,
    load_sweep,
    study_sweep,
    trials,
    write_configs,
)
from mempipe.tracking.config import TrackingConfig
from pipelines.sweep import TrialsFailed, begin, in_order, run_missing, trials_at_once
from pipelines.sweep import main as sweep_main

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "jobs/configs/quickstart.yaml")


def config(output: Path, **changes: Any) -> SweepConfig:
    values = {
        "name": "small",
        "output": str(output),
        "budgets": [4, 8],
        "runs": [
            {"name": "mem", "settings": {"model": {"path": "m"}}},
            {"name": "react", "settings": {"model": {"path": "m"}, "agent": {"name": "react"}}},
        ],
        "benchmarks": [{"name": "world", "file": "q.parquet"}],
        "tracking": {"enabled": False},
    }
    return parse_section(values | changes, SweepConfig)


def finish(trial: Trial, *, right: int, number: int = 40, **settings: Any) -> None:
    """Leaves the results that the trial's evaluation would leave."""
    groups = answered([i < right for i in range(number)], num_hops=[1 + i % 2 for i in range(number)])
    run = {"agent": {"name": "memsearcher"}, "budget": {"memory_tokens": trial.memory_tokens}}
    folder = ResultFolder(trial.results / "world", {"run": run, **settings})
    folder.open()
    folder.append(groups, [result_row(group, growing=False, prompt_hash="p") for group in groups])
    folder.finish()


def test_every_budget_has_a_trial_for_each_seed_and_an_agent_without_one_is_a_reference(tmp_path):
    planned = trials(config(tmp_path, seeds=[1, 2], sampling={"temperature": 1.0}))
    assert [trial.name for trial in planned] == [
        "mem-memory-4-seed-1",
        "mem-memory-4-seed-2",
        "mem-memory-8-seed-1",
        "mem-memory-8-seed-2",
        "react-seed-1",
        "react-seed-2",
    ]
    assert planned[2].suite.runs[0].settings["budget"] == {"memory_tokens": 8} and planned[2].suite.seed == 1
    assert planned[4].memory_tokens is None and "budget" not in planned[4].suite.runs[0].settings
    assert {trial.suite.folder.parent for trial in planned} == {tmp_path / "small" / "trials"}


def test_a_program_has_the_budgets_if_it_states_a_memory(tmp_path):
    program = {"model": {"path": "m"}, "agent": {"name": "program", "program": "program_agent.program:solve"}}
    runs = [
        {"name": "notes", "settings": {**program, "budget": {"memory_tokens": 64}}},
        {"name": "silent", "settings": program},
    ]
    planned = trials(config(tmp_path, runs=runs))
    assert [trial.name for trial in planned] == ["notes-memory-4-seed-1", "notes-memory-8-seed-1", "silent-seed-1"]


def test_a_control_is_a_reference_whatever_its_budget(tmp_path):
    model = {"model": {"path": "m"}}
    control = {"name": "blind", "control": "no_memory", "settings": model}
    sweep = config(tmp_path, runs=[{"name": "mem", "settings": model}, control])
    planned = trials(sweep)
    assert [trial.name for trial in planned] == ["mem-memory-4-seed-1", "mem-memory-8-seed-1", "blind-seed-1"]
    for trial in planned:
        finish(trial, right=30 if trial.memory_tokens else 5)
        write_configs(tmp_path / "small", trial)
    settings = planned[2].results / "world" / "settings.json"
    record = read_record(settings, mends="")
    record["settings"] |= {"control": "no_memory"}
    record["settings"]["run"]["budget"]["memory_tokens"] = 64
    write_record(settings, record)
    write_text(tmp_path / "small" / SWEEP_FILE, yaml.safe_dump(sweep.model_dump(mode="json")))
    study = study_sweep(tmp_path / "small")
    assert [curve.agent for curve in study.whole.curves] == ["mem"]
    assert [each.agent for each in study.whole.references] == ["blind"]


def test_what_a_control_takes_away_must_be_there(tmp_path):
    for control, agent, message in (
        ("no_memory", "react", "writes no memory"),
        ("no_search", "memagent", "not search"),
    ):
        run = {"name": "a", "control": control, "settings": {"model": {"path": "m"}, "agent": {"name": agent}}}
        with pytest.raises(ConfigError, match=f"runs: a: control is {control}, but agent.name '{agent}' .*{message}"):
            trials(config(tmp_path, runs=[run]))


def test_a_trained_trial_trains_under_its_budget_and_measures_that_run(tmp_path):
    runs = [{"name": "mem", "config": QUICKSTART, "settings": {"num_steps": 2}}]
    files = [{"name": "world", "file": "{run}/world/validation.parquet"}]
    sweep = config(tmp_path, runs=runs, benchmarks=files, train=True, seeds=[7, 8])
    trial = trials(sweep, tracking=TrackingConfig(uri="sqlite:///x.db", parent_run_id="p"))[3]
    assert trial.training is not None
    assert (trial.training.budget.memory_limit, trial.training.seed, trial.training.num_steps) == (8, 8, 2)
    folder = tmp_path / "small" / "runs" / "mem-memory-8-seed-8"
    assert trial.training.folder == folder and trial.suite.runs[0].config == str(folder)
    assert trial.suite.benchmarks[0].file == f"{folder}/world/validation.parquet"
    assert trial.training.tracking == trial.suite.tracking and trial.suite.tracking.parent_run_id == "p"
    (name, file), (then, _) = write_configs(sweep.folder, trial)
    assert (name, then) == ("train", "evaluate") and load_config(file) == trial.training


def test_a_policy_for_several_budgets_is_trained_once_and_measured_under_each(tmp_path):
    budget = {"memory_tokens": 16, "memory_choices": [4, 8, 16]}
    runs = [{"name": "mem", "config": QUICKSTART, "settings": {"budget": budget}}]
    files = [{"name": "world", "file": "{run}/world/validation.parquet"}]
    sampling = {"temperature": 1.0}
    planned = trials(config(tmp_path, runs=runs, benchmarks=files, train=True, seeds=[1, 2], sampling=sampling))
    assert [trial.name for trial in planned] == [f"mem-memory-{n}-seed-{seed}" for n in (4, 8) for seed in (1, 2)]
    assert {trial.training.name for trial in planned} == {"mem-mixed-seed-1", "mem-mixed-seed-2"}
    assert planned[0].training == planned[2].training and planned[0].training.budget.memory_limit == 16
    assert [trial.suite.runs[0].settings for trial in planned[::2]] == [
        {"budget": {"memory_tokens": tokens}} for tokens in (4, 8)
    ]
    assert planned[2].suite.benchmarks[0].file == f"{planned[0].training.folder}/world/validation.parquet"
    assert in_order(planned) == [planned[:2], planned[2:]]  # no two trials train the same at once
    assert in_order(planned[2:]) == [planned[2:]]


def test_trials_that_come_one_part_after_another_are_counted_through(tmp_path, monkeypatch):
    sweep = config(tmp_path)
    planned, counted = trials(sweep), []
    monkeypatch.setattr("pipelines.sweep.connected", lambda *_, **__: nullcontext())
    monkeypatch.setattr("pipelines.sweep.cluster_gpus", dict)
    monkeypatch.setattr("pipelines.sweep.in_order", lambda missing: [missing[:1], missing[1:]])

    def run_trials(part: list[Any], *, num_over: int, num_in_all: int, **_: Any) -> dict[str, str]:
        counted.append((len(part), num_over, num_in_all))
        return {}

    monkeypatch.setattr("pipelines.sweep.run_trials", run_trials)
    with pytest.raises(TrialsFailed):  # none of them left anything
        run_missing(sweep, planned)
    assert counted == [(1, 0, len(planned)), (len(planned) - 1, 1, len(planned))]


def test_what_a_trial_has_trained_is_what_its_evaluation_measures(tmp_path):
    """The weights, the index and the budget of its own run, once the training has left them there."""
    runs = [{"name": "mem", "config": QUICKSTART, "settings": {"num_steps": 2}}]
    files = [{"name": "world", "file": "{run}/world/validation.parquet"}]
    trial = trials(config(tmp_path, runs=runs, benchmarks=files, train=True))[0]
    assert trial.training is not None
    folder = trial.training.folder
    with pytest.raises(ConfigError, match="runs: mem: cannot read config"):  # nothing is there yet
        resolve_run(trial.suite, trial.suite.runs[0])
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(trial.training.model_dump(mode="json")))
    (folder / "state.json").write_text('{"finished": false, "num_steps": 1}')
    with pytest.raises(ConfigError, match="an unfinished run"):
        resolve_run(trial.suite, trial.suite.runs[0])
    (folder / "state.json").write_text('{"finished": true}')
    (folder / "huggingface").mkdir()
    measured = resolve_run(trial.suite, trial.suite.runs[0])
    assert measured.model.path == str(folder / "huggingface") and measured.retrieval.index == str(folder / "index")
    assert (measured.budget.memory_limit, measured.world) == (4, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budgets": [4, 8, 4]}, "budgets: 4 occurs twice"),
        ({"seeds": [1, 1], "sampling": {"temperature": 1.0}}, "seeds: 1 occurs twice"),
        ({"budgets": [0]}, "budgets.0 is 0"),
        ({"seeds": [1, 2]}, "all of them would answer alike"),
        ({"train": True}, "mem: with train every run has a config"),
        ({"runs": [{"name": "a"}, {"name": "a"}]}, "the name a occurs twice"),
    ],
)
def test_what_cannot_work_is_refused_by_name(changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, **changes)


def test_a_budget_that_the_agent_does_not_allow_is_refused_before_anything_starts(tmp_path, capsys):
    runs = [{"name": "mem", "settings": {"model": {"path": "m"}, "budget": {"memory_message_tokens": 6}}}]
    with pytest.raises(ConfigError, match=r"memory_message_tokens is 6, less than budget.memory_tokens 8"):
        trials(config(tmp_path, runs=runs))
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump(config(tmp_path, runs=runs).model_dump(mode="json")))
    assert command(["sweep", str(file)]) == 2 and "budget.memory_tokens 8" in capsys.readouterr().err
    assert not (tmp_path / "small").exists()


def limits(trial: Trial) -> tuple[int, int | None, int]:
    run = resolve_run(trial.suite, trial.suite.runs[0]) if trial.training is None else trial.training
    budget = run.budget
    assert isinstance(budget, MemoryBudget)
    return budget.memory_tokens, budget.memory_message_tokens, budget.context_tokens


@pytest.mark.parametrize("train", [True, False])
def test_message_and_context_follow_a_budget_that_is_larger_than_that_of_the_config(tmp_path, train):
    settings = {} if train else {"model": {"path": "m"}}
    runs = [{"name": "mem", "config": QUICKSTART, "settings": settings}]  # 64, 68 and 512 tokens
    planned = trials(config(tmp_path, runs=runs, budgets=[8, 64, 128, 300], train=train))
    assert [*map(limits, planned)] == [(8, 68, 512), (64, 68, 512), (128, 132, 640), (300, 304, 984)]


def test_the_shipped_sweep_over_hotpotqa_and_musique_states_its_budgets_alone():
    sweep = load_sweep(ROOT / "jobs/configs/sweep_hotpot_musique.yaml")
    runs = [run.model_copy(update={"config": str(ROOT / run.config)}) for run in sweep.runs]
    planned = trials(sweep.model_copy(update={"runs": runs}))
    assert [*map(limits, planned)] == [(512, None, 8192), (1024, None, 8192), (2048, None, 10240)]
    runs = [run.model_copy(update={"settings": {}}) for run in runs]
    planned = trials(sweep.model_copy(update={"runs": runs}))
    assert [*map(limits, planned)] == [(512, 1088, 8192), (1024, 1088, 8192), (2048, 2112, 10240)]


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"context_tokens": 600}, "mem-memory-300-seed-1: budget.context_tokens is 600, but question 32 .* need 764"),
        ({"memory_message_tokens": 100}, "memory_message_tokens is 100, less than budget.memory_tokens 300"),
    ],
)
def test_a_limit_that_the_sweep_states_does_not_follow(tmp_path, budget, message):
    runs = [{"name": "mem", "config": QUICKSTART, "settings": {"budget": budget}}]
    with pytest.raises(ConfigError, match=message):
        trials(config(tmp_path, runs=runs, budgets=[8, 300], train=True))


def test_a_policy_for_several_budgets_is_measured_under_a_larger_one_with_the_limits_of_that_one(tmp_path):
    mixed = {"memory_tokens": 64, "memory_choices": [8, 64]}
    runs = [{"name": "mem", "config": QUICKSTART, "settings": {"budget": mixed}}]
    small, large = trials(config(tmp_path, runs=runs, budgets=[8, 300], train=True))
    assert small.suite.runs[0].settings == {"budget": {"memory_tokens": 8}}
    assert large.suite.runs[0].settings["budget"] == {
        "memory_tokens": 300,
        "memory_message_tokens": 304,
        "context_tokens": 984,
    }
    runs[0]["settings"]["budget"] = mixed | {"memory_message_tokens": 68}
    with pytest.raises(ConfigError, match=r"runs: mem-memory-300-seed-1: .*_message_tokens is 68, less than .* 300"):
        trials(config(tmp_path, runs=runs, budgets=[8, 300], train=True))


@pytest.mark.parametrize("ends", [True, False])
def test_trials_of_one_training_do_not_all_train_it(tmp_path, monkeypatch, ends):
    """They would do so side by side, in one folder."""
    ran: list[list[list[str]]] = []
    runs = [{"name": "mem", "config": QUICKSTART, "settings": {"budget": {"memory_choices": [8, 16, 64]}}}]
    sweep = config(tmp_path, runs=runs, budgets=[8, 16, 64], train=True)
    planned = trials(sweep)
    training = planned[0].training
    assert training is not None

    def run_trials(part: list[TrialCommands], **_: Any) -> dict[str, str]:
        ran.append([[command[0] for command in each.commands] for each in part])
        training.folder.mkdir(parents=True, exist_ok=True)
        write_record(training.folder / "state.json", {"seconds": {}, "finished": ends, "num_steps": 1})
        return {}

    monkeypatch.setattr("pipelines.sweep.connected", lambda *_, **__: nullcontext())
    monkeypatch.setattr("pipelines.sweep.cluster_gpus", dict)
    monkeypatch.setattr("pipelines.sweep.run_trials", run_trials)
    with pytest.raises(TrialsFailed, match="it left questions" if ends else "its training did not end"):
        run_missing(sweep, planned)
    assert ran == ([[["train", "evaluate"]], [["evaluate"], ["evaluate"]]] if ends else [[["train", "evaluate"]]])


def test_a_sweep_of_references_alone_is_refused(tmp_path):
    runs = [{"name": "mem1", "config": str(ROOT / "jobs/configs/quickstart_mem1.yaml")}]
    with pytest.raises(
        ConfigError, match=r"budgets is \[4, 8\], but none of the runs \(mem1\) has budget.memory_tokens"
    ):
        trials(config(tmp_path, runs=runs, train=True))


def test_a_run_with_several_memories_is_told_of_the_sweep(capsys):
    assert command(["train", QUICKSTART, "budget.memory_tokens=[8,16]"]) == 2
    error = capsys.readouterr().err
    assert "budget.memory_tokens is [8, 16]; a run has one. `mempipe sweep` tries several" in error


def test_a_finding_of_some_trials_names_them(tmp_path):
    runs = [{"name": name, "config": QUICKSTART} for name in ("a", "b")]
    gone = {"name": "own", "file": "{run}/world/validation.parquet"}
    runs[1]["settings"] = {"data": {"train": "/gone"}, "world": None}
    sweep = config(tmp_path, runs=runs, benchmarks=[gone], train=True)
    texts = [finding.text for finding in check_sweep(sweep) if "/gone" in finding.text]
    assert len(texts) == 1 and texts[0].startswith("b-memory-4-seed-1, b-memory-8-seed-1: ")


def test_a_set_that_is_not_there_is_refused_before_the_first_training(tmp_path):
    runs = [{"name": "mem", "config": QUICKSTART}]
    missing = tmp_path / "no.parquet"
    sets = [{"name": "own", "file": "{run}/world/validation.parquet"}, {"name": "other", "file": str(missing)}]
    sweep = config(tmp_path, runs=runs, benchmarks=sets, train=True)
    fatal = [finding.text for finding in check_sweep(sweep) if finding.fatal]
    assert fatal == [f"benchmarks: other: {missing} does not exist"]  # of all trials, so it is said once


def test_a_trial_is_finished_when_every_question_of_every_set_has_its_row(tmp_path):
    first, *others = trials(config(tmp_path))
    assert not first.finished
    finish(first, right=10)
    assert first.finished and not any(trial.finished for trial in others)


def test_a_sweep_starts_once_and_goes_on_with_the_same_trials_only(tmp_path):
    sweep = config(tmp_path)
    with pytest.raises(ConfigError, match="holds no sweep"):
        begin(sweep, trials(sweep), resume="always")
    begin(sweep, trials(sweep), resume="never")
    for trial in trials(sweep):
        write_configs(sweep.folder, trial)
    with pytest.raises(ConfigError, match="holds a sweep already: continue it with --resume"):
        begin(sweep, trials(sweep), resume="never")
    longer = config(tmp_path, budgets=[4, 8, 16], ray_address="127.0.0.1:1")  # more trials are the same sweep
    begin(longer, trials(longer), resume="always")
    with pytest.raises(
        ConfigError, match=r"mem-memory-4-seed-1 was started with other settings: num_samples 3 \(was 1\); give"
    ):
        check_same(sweep.folder, trials(config(tmp_path, num_samples=3)))


def test_a_trial_of_a_version_without_a_setting_has_its_default(tmp_path):
    sweep = config(tmp_path)
    begin(sweep, trials(sweep), resume="never")
    for trial in trials(sweep):
        for _, file in write_configs(sweep.folder, trial):
            values = yaml.safe_load(file.read_text())
            assert values.pop("questions_per_part")
            file.write_text(yaml.safe_dump(values))
    check_same(sweep.folder, trials(sweep))


def test_trials_side_by_side_are_as_many_as_the_gpus_hold(tmp_path):
    generation = {"num_replicas": 1, "tensor_parallel": 2}
    sweep = config(tmp_path, runs=[{"name": "m", "settings": {"model": {"path": "m"}, "generation": generation}}])
    assert [trials_at_once(trials(sweep), gpus) for gpus in ({}, {"a": 2}, {"a": 4}, {"a": 4, "b": 4})] == [1, 1, 2, 4]


def test_a_sweep_that_lost_its_settings_is_not_begun_beside_its_trials(tmp_path):
    sweep = config(tmp_path)
    begin(sweep, trials(sweep), resume="never")
    for trial in trials(sweep):
        write_configs(sweep.folder, trial)
    (sweep.folder / SWEEP_FILE).unlink()
    for resume in ("never", "auto"):
        with pytest.raises(ConfigError, match=r"holds the configs of a sweep that has lost its sweep\.yaml: --resume"):
            begin(sweep, trials(sweep), resume=resume)
    begin(sweep, trials(sweep), resume="always")
    assert (sweep.folder / SWEEP_FILE).exists()


@pytest.mark.parametrize("content", ["", "[]", '{"finished": tr', '{"finished": true}', '{"settings": {}}'])
def test_a_damaged_record_of_results_is_a_sentence(tmp_path, content):
    trial = trials(config(tmp_path))[0]
    finish(trial, right=10)
    file = trial.results / "world" / "settings.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=rf"^{file} is damaged.*; delete {file.parent} to evaluate this again$"):
        print(trial.finished)


def test_a_damaged_config_of_a_trial_is_a_sentence(tmp_path):
    sweep = config(tmp_path)
    ((_, file),) = write_configs(sweep.folder, trials(sweep)[0])
    file.write_text("name: [")
    with pytest.raises(ConfigError, match=rf"^{file} is not YAML: .*; delete it, and --resume writes it again$"):
        check_same(sweep.folder, trials(sweep))


def test_results_of_a_training_that_was_made_again_are_not_taken_for_its_own(tmp_path):
    runs = [{"name": "mem", "config": QUICKSTART, "settings": {"num_steps": 2}}]
    sweep = config(tmp_path, runs=runs, train=True, budgets=[8])
    (trial,) = trials(sweep)
    assert trial.training is not None
    export = trial.training.folder / "huggingface"
    export.mkdir(parents=True)
    (export / "model.safetensors").write_text("trained")
    finish(trial, right=10, model_sha256=model_sha256(str(export)))
    check_same(sweep.folder, [trial])
    (export / "model.safetensors").write_text("trained again")
    with pytest.raises(ConfigError, match=r"was measured with another model than .*delete .*, and --resume measures"):
        check_same(sweep.folder, [trial])


def test_a_sweep_with_all_results_only_writes_its_report(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("pipelines.sweep.connected", None)  # nothing is started
    sweep = config(tmp_path, seeds=[1, 2], sampling={"temperature": 1.0})
    for trial in trials(sweep):
        write_configs(sweep.folder, trial)
        finish(trial, right={4: 10, 8: 30, None: 20}[trial.memory_tokens] + trial.suite.seed)
    paths = sweep_main(sweep, resume="always")
    text = (sweep.folder / "budgets.md").read_text()
    assert {path.name for path in paths} == {"budgets.md", "budgets.html", "budgets.json", "budgets.svg"}
    assert (
        "mem, world: 4 tokens are not enough: they lose more than 2 points" in text
        and "27.5, 30.0" in text
        and "| react | world | – | 53.8" in text
    )
    assert (sweep.folder / "budgets.html").read_text().count("<figure>") == 9  # 3 parts
    assert "mem, world: 4 tokens are not enough" in capsys.readouterr().out
    assert command(["budgets", str(sweep.folder), "--metric", "f1"]) == 0
    assert "| memory tokens | f1, percent | by seed |" in capsys.readouterr().out
    assert "f1, percent" in (sweep.folder / "budgets_f1.md").read_text()
    assert (sweep.folder / "budgets.md").read_text() == text
    shutil.rmtree(trials(sweep)[0].suite.folder)
    assert command(["budgets", str(sweep.folder)]) == 2
    assert "mem-memory-4-seed-1 were never started" in capsys.readouterr().err


def test_a_trial_whose_results_are_missing_is_not_left_out_in_silence(tmp_path):
    """Without the largest budget another one would be the largest, and without a set the means would be of others."""
    sweep = config(tmp_path, benchmarks=[{"name": "world", "file": "q.parquet"}, {"name": "far", "file": "r.parquet"}])
    write_text(sweep.folder / SWEEP_FILE, yaml.safe_dump(sweep.model_dump(mode="json")))
    for trial in trials(sweep):
        write_configs(sweep.folder, trial)
        finish(trial, right=10)
        shutil.copytree(trial.results / "world", trial.results / "far")
    largest = trials(sweep)[1]
    assert len(study_sweep(sweep.folder).whole.curves) == 1
    shutil.rmtree(largest.results / "far")
    with pytest.raises(ConfigError, match=r"mem-memory-8-seed-1 has no results of far; .* --resume continues"):
        study_sweep(sweep.folder)
    shutil.rmtree(largest.results)  # it began, and its engine did not start
    with pytest.raises(ConfigError, match="mem-memory-8-seed-1 has no results of world"):
        study_sweep(sweep.folder)


@pytest.mark.parametrize("changes", [{"budgets": [4, 8, 16]}, {"seeds": [1, 2], "sampling": {"temperature": 1.0}}])
def test_a_trial_that_was_listed_and_never_begun_is_not_left_out_in_silence(tmp_path, changes):
    """The sweep was told of it and ended before its first trial, for instance because the cluster was away."""
    sweep = config(tmp_path, sampling={"temperature": 1.0})
    for trial in trials(sweep):
        write_configs(sweep.folder, trial)
        finish(trial, right=10)
    longer = config(tmp_path, **({"sampling": {"temperature": 1.0}} | changes))
    begin(longer, trials(longer), resume="always")
    missing = (
        "mem-memory-16-seed-1" if "budgets" in changes else "mem-memory-4-seed-2, mem-memory-8-seed-2, react-seed-2"
    )
    with pytest.raises(ConfigError, match=f": {missing} were never started; `mempipe sweep` --resume continues"):
        study_sweep(sweep.folder)


def test_one_budget_has_no_curve_and_the_command_says_so(tmp_path, capsys):
    sweep = config(tmp_path, budgets=[8])
    for trial in trials(sweep):
        write_configs(sweep.folder, trial)
        finish(trial, right=30)
    assert sweep_main(sweep, resume="always") == []
    assert command(["budgets", str(sweep.folder)]) == 2
    assert "no agent that was measured under two memory budgets; add one" in capsys.readouterr().err


@pytest.mark.parametrize("measured", [False, True])
def test_a_budget_that_the_user_took_out_is_not_in_the_report(tmp_path, capsys, measured):
    first = config(tmp_path, budgets=[4, 8, 16])
    for trial in trials(first):
        write_configs(first.folder, trial)
        if measured or trial.memory_tokens != 16:
            finish(trial, right=40 if trial.memory_tokens == 16 else 36)
    sweep_main(config(tmp_path, budgets=[4, 8]), resume="always")
    assert "does not list them any more: mem-memory-16-seed-1\n" in capsys.readouterr().out
    assert command(["budgets", str(first.folder)]) == 0
    assert "does not list them any more: mem-memory-16-seed-1\n" in capsys.readouterr().out
    (curve,) = study_sweep(first.folder).whole.curves
    assert [point.memory_tokens for point in curve.points] == [4, 8]
    assert (first.folder / "configs" / "mem-memory-16-seed-1-evaluate.yaml").exists()


def test_a_trial_that_left_no_results_fails_the_sweep_by_name(tmp_path, monkeypatch):
    from contextlib import nullcontext

    sweep = config(tmp_path)
    planned = trials(sweep)
    for trial in planned[1:]:
        finish(trial, right=10)
    monkeypatch.setattr("pipelines.sweep.connected", lambda *_, **__: nullcontext())
    monkeypatch.setattr("pipelines.sweep.cluster_gpus", dict)
    started = []
    monkeypatch.setattr("pipelines.sweep.run_trials", lambda given, **_: started.extend(given) or {"x": "it died"})
    with pytest.raises(TrialsFailed, match=r"mem-memory-4-seed-1"):
        run_missing(sweep, planned)
    (only,) = started
    assert only.name == "mem-memory-4-seed-1" and only.commands[0][0] == "evaluate"


def test_the_shipped_sweep_has_the_budgets_that_the_document_reports():
    sweep = load_sweep(ROOT / "jobs/configs/tiny_sweep.yaml")
    assert sweep.budgets == [4, 6, 8, 12, 16, 32] and len(sweep.seeds) == 3
