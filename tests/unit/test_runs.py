"""A run's folder: what may be changed when it continues, what is refused, and that nothing in it is ever lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import yaml
from result_builders import answered

from mempipe.config import RunConfig
from mempipe.data.trajectories import write_trajectories
from mempipe.doctor import examine
from mempipe.engines.checkpoint import latest
from mempipe.loader import load_config, parse_config
from mempipe.runs import Resume, Run, check_place, saved_state
from mempipe.settings import ConfigError


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """Where a run with default settings began."""
    Run(config(tmp_path))
    return tmp_path


def config(output: Path, **values: object) -> RunConfig:
    return parse_config({"output": str(output), **values})


@pytest.mark.parametrize(
    "values",
    [
        {"generation": {"num_replicas": 5, "gpu_memory_utilization": 0.5, "canary_tolerance": 0.2, "timeout_s": 9}},
        {"learner": {"num_ranks": 4, "timeout_s": 9, "max_tokens_per_micro_batch": 40000}},
        {"placement": "colocated", "max_restarts": 9, "reference": {"num_replicas": 2}},
        {"model": {"gradient_checkpointing": True}},
        {"data": {"num_epochs": 7}},
        {"retrieval": {"num_replicas": 3, "timeout_s": 9}},
        {"num_steps": 7, "checkpoint": {"every_steps": 1}, "stream": {"num_drivers": 3}},
    ],
    ids=str,
)
def test_a_run_goes_on_with_other_settings_of_its_machinery(begun, values):
    assert saved_state(config(begun, **values), resume="always") is not None


def test_what_changes_the_learning_is_refused_with_both_values(begun):
    changed = config(begun, optimizer={"lr": 0.5}, learner={"old_logprobs": "recompute", "num_ranks": 2})
    with pytest.raises(ConfigError) as error:
        saved_state(changed, resume="always")
    text = str(error.value)
    assert "learner.old_logprobs 'recompute' (was 'sampler'), optimizer.lr 0.5 (was 1e-06);" in text
    assert "num_ranks 2" not in text


def test_a_run_goes_on_with_the_reference_where_it_was(begun):
    """Groups that wait for their step have its log-probs or not."""
    with pytest.raises(ConfigError, match=r"reference\.on_ranks True \(was False\);"):
        saved_state(config(begun, reference={"on_ranks": True}), resume="always")


def test_a_run_of_a_version_without_a_setting_goes_on_with_its_default(begun):
    file = config(begun).folder / "config.yaml"
    saved = yaml.safe_load(file.read_text())
    del saved["algorithm"]["dual_clip"]
    file.write_text(yaml.safe_dump(saved))
    assert saved_state(config(begun), resume="always") is not None
    with pytest.raises(ConfigError, match=r"algorithm\.dual_clip 5\.0 \(was 3\.0\);"):
        saved_state(config(begun, algorithm={"dual_clip": 5.0}), resume="always")


@pytest.mark.filterwarnings("error::mempipe.settings.OldName")  # what a run recorded is not the user's to mend
def test_a_run_of_a_version_with_another_name_of_a_setting_goes_on(begun):
    file = config(begun).folder / "config.yaml"
    saved = yaml.safe_load(file.read_text())
    saved["compat"] = saved["agent"].pop("compat") | {"num_passages": 2}
    file.write_text(yaml.safe_dump(saved))
    assert saved_state(config(begun, agent={"compat": {"num_passages": 2}}), resume="always") is not None
    with pytest.raises(ConfigError, match=r"agent\.compat\.num_passages None \(was 2\);"):
        saved_state(config(begun), resume="always")


def checkpoint(run: Run, step: int) -> Path:
    folder = run.folder / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "tensors").write_text("hours of work")
    return folder


def refused(run: Run) -> None:
    with pytest.raises(ConfigError, match="a setting"), run.preparation():
        raise ConfigError("a setting cannot work")


def test_a_new_run_whose_settings_are_refused_leaves_nothing(tmp_path):
    refused(Run(config(tmp_path)))
    assert list(tmp_path.iterdir()) == []


def test_a_refused_run_leaves_what_was_in_the_folder_as_it_was(tmp_path):
    folder = config(tmp_path).folder
    folder.mkdir()
    (folder / "log.txt").write_text("nohup")
    (folder / "config.yaml").write_text("num_steps: 7  # mine")
    refused(Run(config(tmp_path)))
    assert {file.name: file.read_text() for file in folder.iterdir()} == {
        "log.txt": "nohup",
        "config.yaml": "num_steps: 7  # mine",
    }


@pytest.mark.parametrize("made", ["checkpoints/step-00000200/t", "warm_start/config.json", "evaluation/before.parquet"])
@pytest.mark.parametrize("folder_was_there", [True, False])
def test_promise_11_a_run_that_made_something_is_never_withdrawn(tmp_path, made, folder_was_there):
    if folder_was_there:
        config(tmp_path).folder.mkdir()
    run = Run(config(tmp_path))
    file = run.folder / made
    file.parent.mkdir(parents=True)
    file.write_text("hours of work")
    refused(run)
    assert file.read_text() == "hours of work"
    assert saved_state(config(tmp_path), resume="always") is not None


@pytest.mark.parametrize("made", ["world/train.parquet", "index/manifest.json"])
def test_what_a_run_made_for_itself_is_kept_too(tmp_path, made):
    run = Run(config(tmp_path, world={}))
    file = run.folder / made
    file.parent.mkdir(parents=True)
    file.write_text("x")
    refused(run)
    assert file.exists() and (run.folder / "state.json").exists()


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_nothing_starts_at_zero_beside_checkpoints(begun, resume):
    run = Run(config(begun), resume="always")
    checkpoint(run, 200)
    (run.folder / "state.json").unlink()
    with pytest.raises(ConfigError) as error:
        Run(config(begun), resume=resume)
    assert "holds checkpoints (the newest of step 200) of a run that has lost its state.json" in str(error.value)
    assert f"`mempipe train {run.folder / 'config.yaml'} --resume` continues it" in str(error.value)
    assert not (run.folder / "state.json").exists()


def test_resume_makes_a_lost_state_anew_from_checkpoint_and_best_model(begun):
    run = Run(config(begun), resume="always")
    checkpoint(run, 200)
    best = {"step": 150, "metric": "em", "value": 0.5, "questions": "q", "weights": "w"}
    (run.folder / "best").mkdir()
    (run.folder / "best" / "made_of.json").write_text(json.dumps(best))
    (run.folder / "state.json").unlink()
    again = Run(config(begun), resume="always")
    assert again.rebuilt and again.state == {"seconds": {}, "finished": False, "num_steps": 200, "best": best}
    assert not Run(config(begun), resume="always").rebuilt


def test_a_run_that_lost_state_and_checkpoints_does_not_begin_at_zero(begun):
    run = Run(config(begun), resume="always")
    (run.folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "reward": 0.5}}\n' for step in range(1, 301)))
    (run.folder / "state.json").unlink()
    again = Run(config(begun), resume="always")
    with pytest.raises(ConfigError, match="has done 300 steps, but its checkpoints are gone"):
        again.restart_at(0)


def test_checkpoints_without_settings_are_refused_and_the_file_is_named(begun):
    run = Run(config(begun), resume="always")
    checkpoint(run, 200)
    for name in ("state.json", "config.yaml"):
        (run.folder / name).unlink()
    for resume in ("never", "auto", "always"):
        with pytest.raises(ConfigError, match=r"neither state\.json nor config\.yaml.* copy the YAML file .*--resume"):
            Run(config(begun), resume=resume)


def test_a_lost_state_is_not_made_anew_for_other_settings(begun):
    run = Run(config(begun), resume="always")
    checkpoint(run, 200)
    (run.folder / "state.json").unlink()
    with pytest.raises(ConfigError, match=r"seed 7 \(was 1\)"):
        Run(config(begun, seed=7), resume="always")


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("", "is damaged"),
        ("[]", "it holds a list, expected an object"),
        ('{"seco', "is damaged"),
        ('{"finished": false}', "seconds is missing"),
        ('{"seconds": {}}', "finished is missing"),
        ('{"seconds": [], "finished": false}', "seconds is []"),
        ('{"seconds": {"train": "x"}, "finished": false}', "train differs from the written content"),
        ('{"seconds": {}, "finished": true}', "num_steps differs from the written content"),
        ('{"seconds": {}, "finished": false, "num_steps": "3"}', "num_steps differs from the written content"),
        ('{"seconds": {}, "finished": false, "best": {"step": 1}}', "best differs from the written content"),
        ("\udcff", "is damaged"),
    ],
)
def test_a_damaged_state_is_a_sentence_that_says_how_the_run_goes_on(begun, content, part):
    file = config(begun).folder / "state.json"
    file.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError) as error:
        saved_state(config(begun), resume="auto")
    text = str(error.value)
    assert part in text and str(file) in text and "\n" not in text
    assert text.endswith("config.yaml --resume` makes it again from the newest checkpoint")


@pytest.mark.parametrize("content", ["", "[]", "a: [", "12", "a: b: c", "\udcff", "1: 2\nb: 3"])
def test_damaged_settings_are_a_sentence(begun, content):
    file = config(begun).folder / "config.yaml"
    file.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError) as error:
        saved_state(config(begun), resume="auto")
    assert str(config(begun).folder) in str(error.value) and "\n" not in str(error.value)


def test_a_run_that_was_begun_with_other_inputs_is_refused_by_their_names(begun):
    run = Run(config(begun), resume="always")
    run.check_inputs({"data.train": "a", "retrieval.index": "i", "model.path": ""})
    run.check_inputs({"data.train": "a", "retrieval.index": "", "model.path": "m"})  # "" is not known
    assert run.inputs == {"data.train": "a", "retrieval.index": "i", "model.path": "m"}
    with pytest.raises(ConfigError, match=r"the content of data\.train, model\.path has changed since"):
        run.check_inputs({"data.train": "b", "retrieval.index": "i", "model.path": "n"})
    assert run.inputs["data.train"] == "a"


def test_a_changed_prompt_is_refused_with_all_that_makes_it(begun):
    run = Run(config(begun), resume="always")
    run.check_inputs({"agent.prompts": "a"})
    with pytest.raises(ConfigError, match=r"content of the agent's prompt \(agent\.prompts, the schemas of its tools"):
        run.check_inputs({"agent.prompts": "b"})


def test_what_is_newer_than_the_restored_checkpoint_is_set_aside_and_named(begun):
    run = Run(config(begun), resume="always")
    of = {"evaluation/before.parquet": 0, "evaluation/step-00000005.parquet": 5, "evaluation/step-00000010.parquet": 10}
    for name, step in of.items():
        write_trajectories(run.folder / name, answered([True]), made_of={"step": step})
    write_trajectories(run.folder / "evaluation" / "step-00000015.parquet", answered([True]))  # of an earlier version
    for name in ("exports/step-00000005", "exports/step-00000010", "best"):
        (run.folder / name).mkdir(parents=True)
    run.update(num_steps=16, best={"step": 10, "metric": "em", "value": 1.0})
    said = run.restart_at(5)
    assert kept_files(run.folder) == {
        "evaluation/before.parquet",
        "evaluation/step-00000005.parquet",
        "replaced/1/evaluation/step-00000010.parquet",
        "replaced/1/evaluation/step-00000015.parquet",
    }
    assert (run.folder / "exports" / "step-00000005").is_dir() and not (run.folder / "best").exists()
    assert (run.folder / "replaced" / "1" / "best").is_dir()
    assert run.state["best"] is None and run.state["num_steps"] == 5
    assert said.startswith("steps 6 to 16 are trained again; ") and "evaluation/step-00000010.parquet" in said
    assert run.restart_at(5) == "", "nothing is newer any more"
    checkpoint(run, 5)
    unusable = checkpoint(run, 7)
    assert "checkpoints/step-00000007 is now in" in run.restart_at(5) and not unusable.exists()
    assert latest(run.folder / "checkpoints") is not None
    write_trajectories(run.folder / "evaluation" / "step-00000010.parquet", answered([True]), made_of={"step": 10})
    assert str(run.folder / "replaced" / "3") in run.restart_at(5)


def test_results_on_another_disk_are_set_aside_too(begun, tmp_path, monkeypatch):
    """What a user has linked to a larger disk cannot be renamed to the run's own."""
    run = Run(config(begun), resume="always")
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "step-00000010").mkdir(parents=True)
    (elsewhere / "step-00000010" / "config.json").write_text("{}")
    (run.folder / "exports").symlink_to(elsewhere)
    run.update(num_steps=10)

    def rename(source: object, target: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        assert "exports/step-00000010 is now in" in run.restart_at(5)
    assert not (elsewhere / "step-00000010").exists()
    assert (run.folder / "replaced" / "1" / "exports" / "step-00000010" / "config.json").read_text() == "{}"


def test_the_checkpoint_that_a_run_goes_on_from_stays_where_steps_have_several_updates(tmp_path):
    """A checkpoint's folder is named by updates, an evaluation's file by steps."""
    run = Run(config(tmp_path, algorithm={"groups_per_step": 4, "updates_per_step": 4}))
    whole, within, newer = (checkpoint(run, updates) for updates in (8, 10, 12))
    run.update(num_steps=3)
    assert "checkpoints/step-00000012 is now in" in run.restart_at(2, num_updates=2)
    assert whole.exists() and within.exists() and not newer.exists()


def test_a_state_in_which_a_digit_was_flipped_is_damaged(begun):
    Run(config(begun), resume="always").update(num_steps=3)
    file = config(begun).folder / "state.json"
    file.write_text(file.read_text().replace('"num_steps": 3', '"num_steps": 7'))
    with pytest.raises(ConfigError, match=r"its values do not fit its checksum.*--resume` makes it again"):
        saved_state(config(begun), resume="always")


def test_a_run_whose_checkpoints_are_gone_does_not_begin_at_zero(begun):
    run = Run(config(begun, checkpoint={"every_steps": 10}), resume="always")
    for done in (3, 20):  # the first checkpoint may not have been written yet
        run.update(num_steps=done)
        assert run.restart_at(0) == f"steps 1 to {done} are trained again"
    run.update(num_steps=3)
    assert run.restart_at(2) == "step 3 is trained again"
    run.update(num_steps=21)
    with pytest.raises(ConfigError, match="has done 21 steps, but its checkpoints are gone"):
        run.restart_at(0)


def test_the_config_of_a_copied_run_does_not_continue_the_original(begun, tmp_path_factory):
    original, elsewhere = begun / "run", tmp_path_factory.mktemp("elsewhere")
    file = shutil.copytree(original, begun / "copy") / "config.yaml"
    check_place(original / "config.yaml", load_config(original / "config.yaml"), resume="always")
    resumes: tuple[Resume, ...] = ("always", "auto")
    for resume in resumes:
        with pytest.raises(ConfigError) as error:
            check_place(file, load_config(file), resume=resume)
        assert f"{file} belongs to the run in {begun / 'copy'}" in str(error.value)
        assert f"name 'run' mean {original}; " in str(error.value)
    with pytest.raises(ConfigError, match=r"copy/config\.yaml belongs to the run in"):
        examine(str(begun / "copy"))
    check_place(file, load_config(file), resume="never")  # another run with the settings of this one
    check_place(file, load_config(file, ["name=other"]), resume="auto")
    moved = shutil.copytree(original, elsewhere / "run") / "config.yaml"
    other_spelling = load_config(file, [f"output={begun.absolute()}/."])
    with pytest.raises(ConfigError, match=r"under another name, write that name"):  # the original has this name
        check_place(file, other_spelling, resume="always")
    with pytest.raises(ConfigError, match=rf"add output={moved.parent.parent}$"):
        check_place(moved, load_config(moved), resume="always")
    continued = load_config(moved, [f"output={elsewhere}"])
    check_place(moved, continued, resume="always")
    assert saved_state(continued, resume="always") is not None


@pytest.mark.parametrize(
    ("section", "made"),
    [
        ({"world": {"num_layers": 2}}, ("model", "index", "world/train.parquet", "world/validation.parquet")),
        ({"cloze": {"with_title": True}}, ("", "index", "questions/train.parquet", "questions/test.parquet")),
        ({"model": {"source": "some.gguf"}}, ("model", "", "", "")),
    ],
    ids=str,
)
def test_a_moved_run_continues_with_what_it_made(tmp_path, section, made):
    before, now = tmp_path / "before" / "run", tmp_path / "now" / "run"
    began = config(before.parent, **section)
    model, index, train, validation = (f"{before}/{name}" if name else "" for name in made)
    Run(began).resolved(
        began.model_copy(
            update={
                "model": began.model.model_copy(update={"path": model}),
                "retrieval": began.retrieval.model_copy(update={"index": index}),
                "data": began.data.model_copy(update={"train": train, "validation": validation}),
            }
        )
    )
    shutil.move(before, now)
    moved = load_config(now / "config.yaml", [f"output={now.parent}"])
    assert saved_state(moved, resume="always") is not None
    assert [moved.model.path, moved.retrieval.index, moved.data.train, moved.data.validation] == ["", "", "", ""]


def test_the_model_of_another_run_stays_that_of_the_config(tmp_path):
    model = str(tmp_path / "other" / "run" / "model")
    assert config(tmp_path, world={"num_layers": 2}, model={"path": model}).model.path == model


def test_promise_11_a_config_in_the_folder_of_a_new_run_is_kept_with_its_comments(tmp_path):
    file, given = tmp_path / "run" / "config.yaml", tmp_path / "run" / "config.given.yaml"
    file.parent.mkdir()
    file.write_text(f"# why this output\noutput: {tmp_path}\n")
    with pytest.raises(ConfigError), Run(load_config(file)).preparation():
        raise ConfigError("refused")
    assert file.read_text().startswith("# why") and not given.exists()
    Run(load_config(file))
    assert given.read_text() == f"# why this output\noutput: {tmp_path}\n"
    assert load_config(file).folder == file.parent


def kept_files(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*.parquet")}
