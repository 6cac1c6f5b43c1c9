"""A checkpoint becomes a model without the run that wrote it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from learner_setup import make_learner, pack, samples, save_model
from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM

from mempipe.cli import main
from mempipe.config import RunConfig, WarmStartConfig
from mempipe.engines.checkpoint import Position
from mempipe.engines.config import ModelConfig
from mempipe.loader import parse_config
from mempipe.provenance import read_record
from mempipe.runs import Run
from mempipe.settings import ConfigError
from mempipe.types import Question
from pipelines.export import Exports, choose_checkpoint

LORA = {"lora_rank": 4, "lora_alpha": 8.0, "lora_targets": ["q_proj", "down_proj"]}


def run_with_checkpoints(folder: Path, model: ModelConfig) -> list[dict[str, torch.Tensor]]:
    """A run's folder with checkpoints of learner steps 1 and 2, of two updates each; returns what was trained."""
    folder.mkdir()
    config = RunConfig(model=model)
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    settings = {name: getattr(model, name) for name in LORA} if model.lora_rank else {}
    learner = make_learner(Path(model.path), lr=1e-2, **settings)
    weights = []
    for step in (1, 2):
        learner.step([pack(samples(step))[0]] * 2)
        learner.save(folder / "checkpoints", Position(step=step), keep=2)
        weights.append(learner.full_state_dict())
    return weights


@pytest.mark.parametrize("lora", [{}, LORA])
def test_every_checkpoint_of_a_run_can_be_exported(tmp_path, lora):
    model = ModelConfig(path=str(save_model(tmp_path)), dtype="float32", **lora)
    trained = run_with_checkpoints(tmp_path / "run", model)
    for arguments, expected in (["--step", "1"], trained[0]), ([], trained[1]):
        target = tmp_path / f"export{len(arguments)}"
        assert main(["export", str(tmp_path / "run"), str(target), *arguments]) == 0
        found = AutoModelForCausalLM.from_pretrained(target).state_dict()
        assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_a_checkpoint_between_two_updates_is_not_exported(tmp_path, capsys):
    model = ModelConfig(path=str(save_model(tmp_path)), dtype="float32")
    run_with_checkpoints(tmp_path / "run", model)
    whole = tmp_path / "run" / "checkpoints"
    make_learner(Path(model.path)).save(whole, Position(step=2, num_updates=1), keep=3)
    (between,) = whole.glob("step-00000000")
    between.rename(whole / "step-00000005")
    assert [choose_checkpoint(whole.parent, step).name for step in (1, 2, None)] == [
        "step-00000002",
        "step-00000004",
        "step-00000004",
    ]
    assert "step-00000005 was saved between two updates of a step" in capsys.readouterr().err
    for step in (1, 2):
        shutil.rmtree(whole / f"step-0000000{2 * step}")
    for step, said in ((None, "no step is named"), (2, "--step is 2")):
        with pytest.raises(ConfigError, match=rf"{said}.*2 \(step-00000005\) and a part of the next one"):
            choose_checkpoint(whole.parent, step)


def test_peft_loads_an_exported_adapter_and_merges_it_to_the_same_bytes(tmp_path):
    """The start of B is zero, so both matrices were trained; .75 is a scaling for which the order of the product
    matters."""
    lora = {**LORA, "lora_alpha": 3.0}
    model = ModelConfig(path=str(save_model(tmp_path)), dtype="float32", **lora)
    run_with_checkpoints(tmp_path / "run", model)
    run, whole, adapter = (str(tmp_path / name) for name in ("run", "whole", "adapter"))
    assert main(["export", run, whole]) == main(["export", run, adapter, "--adapter"]) == 0
    base = AutoModelForCausalLM.from_pretrained(model.path)
    merged = PeftModel.from_pretrained(base, adapter).merge_and_unload().state_dict()
    ours = AutoModelForCausalLM.from_pretrained(whole).state_dict()
    assert merged.keys() == ours.keys()
    assert all(torch.equal(merged[name], weight) for name, weight in ours.items())
    start = AutoModelForCausalLM.from_pretrained(model.path).state_dict()
    changed = {name.split(".")[-2] for name, weight in ours.items() if not torch.equal(start[name], weight)}
    assert changed == set(LORA["lora_targets"])
    assert PeftConfig.from_pretrained(adapter).base_model_name_or_path == model.path


def test_an_adapter_whose_supervised_start_is_gone_is_not_put_on_another_model(tmp_path, capsys):
    """The folder looks like one of a step that is over."""
    start = save_model(tmp_path / "run-to-be")
    model = ModelConfig(path=str(start), dtype="float32", **LORA)
    trained = run_with_checkpoints(tmp_path / "run", model)
    base = ModelConfig(path=str(save_model(tmp_path)), dtype="float32", **LORA)
    config = RunConfig(model=base, warm_start=WarmStartConfig())
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    shutil.copytree(start, tmp_path / "run" / "warm_start")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "whole")]) == 0
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in trained[1].items())
    shutil.rmtree(tmp_path / "run" / "warm_start")
    for number, options in enumerate(([], ["--adapter"])):
        assert main(["export", str(tmp_path / "run"), str(tmp_path / f"new{number}"), *options]) == 2
        assert "run/warm_start is gone, the model that the run's adapter was trained on" in capsys.readouterr().err
        assert not (tmp_path / f"new{number}").exists()


def test_an_exported_adapter_finds_its_base_from_every_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = ModelConfig(path=save_model(tmp_path).name, dtype="float32", **LORA)
    run_with_checkpoints(tmp_path / "run", model)
    assert main(["export", "run", "adapter", "--adapter"]) == 0
    assert PeftConfig.from_pretrained("adapter").base_model_name_or_path == str(tmp_path / model.path)


def test_an_adapter_that_is_not_there_is_refused(tmp_path, capsys):
    run_with_checkpoints(tmp_path / "run", ModelConfig(path=str(save_model(tmp_path)), dtype="float32"))
    for arguments, said in ([], r"model\.lora_rank is 0"), (["--best"], "keeps its best model merged"):
        assert main(["export", str(tmp_path / "run"), str(tmp_path / "new"), "--adapter", *arguments]) == 2
        assert re.search(said, capsys.readouterr().err)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "new", "--step", "3"], "--step is 3; .*holds those after the learner steps 1 .*, 2 "),
        (["run", "run"], "run exists; choose another folder"),
        (["run", "link"], "link exists; choose another folder"),
        (["run", "run/config.yaml/new"], "DIR is .*, but .*/run/config.yaml is not a directory"),
        (["nowhere", "new"], "nowhere holds no run"),
    ],
)
def test_what_cannot_be_exported_is_said(tmp_path, capsys, arguments, said):
    run_with_checkpoints(tmp_path / "run", ModelConfig(path=str(save_model(tmp_path)), dtype="float32"))
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    run, target, *rest = arguments
    assert main(["export", str(tmp_path / run), str(tmp_path / target), *rest]) == 2
    assert re.search(said, capsys.readouterr().err)
    assert not (tmp_path / "new").exists()


class Learners:
    """Writes the number of the step that it is at in the place of a model."""

    def __init__(self) -> None:
        self.step = 0

    def export(self, folder: Path, *, source: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(f"{self.step} {source}")


def running(tmp_path: Path, **checkpoint: Any) -> Run:
    values = {"output": str(tmp_path), "name": "run", "checkpoint": checkpoint, "evaluation": {"every_steps": 1}}
    return Run(parse_config(values))


def answers(*scores: float, questions: str = "q") -> Any:
    return [
        SimpleNamespace(
            question=Question(id=f"{questions}{i}", text="?", golden_answers=["a"]),
            trajectories=[SimpleNamespace(em=score, f1=1 - score)],
        )
        for i, score in enumerate(scores)
    ]


def best_of(run: Run) -> tuple[int, str, float]:
    return run.state["best"]["step"], run.state["best"]["metric"], run.state["best"]["value"]


def models(run: Run) -> dict[str, str]:
    return {
        file.parent.relative_to(run.folder).as_posix(): file.read_text() for file in run.folder.rglob("config.json")
    }


def test_a_run_exports_a_model_every_so_many_steps(tmp_path):
    run, learners = running(tmp_path, export_every_steps=2), Learners()
    exports = Exports(run, learners, source="base")
    for learners.step in range(1, 6):
        exports.trained(learners.step)
        exports.validated(answers(1.0), step=learners.step)
    assert models(run) == {"exports/step-00000002": "2 base", "exports/step-00000004": "4 base"}


def test_the_best_model_on_validation_is_kept_and_can_be_exported(tmp_path, capsys):
    run, learners = running(tmp_path, best_on="em"), Learners()
    for step, scores in enumerate([(0.5, 0.0), (1.0, 0.0), (0.5, 0.5), (0.0, 0.0)], start=1):
        learners.step = step
        Exports(run, learners, source="base").validated(answers(*scores), step=step)  # again, as after a restart
    assert models(run) == {"best": "2 base"} and best_of(run) == (2, "em", 0.5)
    record = read_record(run.folder / "best" / "made_of.json", mends="")
    assert record == {**run.state["best"], "weights": ""}, "the model says itself what it is"
    assert main(["export", str(run.folder), str(tmp_path / "new"), "--best"]) == 0
    assert (tmp_path / "new" / "config.json").read_text() == "2 base"
    assert main(["export", str(run.folder), str(tmp_path / "new"), "--best"]) == 2
    assert "new exists" in capsys.readouterr().err


def test_another_measure_starts_from_scratch(tmp_path):
    run = running(tmp_path, best_on="em")
    run.update(best={"step": 1, "metric": "f1", "value": 1.0})
    Exports(run, Learners(), source="base").validated(answers(0.5), step=2)
    assert best_of(run) == (2, "em", 0.5)


def test_scores_on_other_questions_are_not_compared(tmp_path):
    run = running(tmp_path, best_on="em")
    Exports(run, Learners(), source="base").validated(answers(1.0, questions="easy"), step=1)
    Exports(run, Learners(), source="base").validated(answers(0.5, questions="hard"), step=2)
    assert best_of(run) == (2, "em", 0.5)


def test_a_model_that_was_exported_already_is_not_exported_again(tmp_path):
    run, learners = running(tmp_path, export_every_steps=2), Learners()
    for learners.step in (2, 3):
        Exports(run, learners, source="base").trained(2)
    assert models(run) == {"exports/step-00000002": "2 base"}


def test_a_run_without_a_best_model_says_so(tmp_path, capsys):
    run = running(tmp_path)
    assert main(["export", str(run.folder), str(tmp_path / "new"), "--best"]) == 2
    assert "holds no best model" in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_the_best_of_no_validation_is_refused():
    with pytest.raises(ConfigError, match=r"checkpoint\.best_on is 'em', but evaluation\.every_steps is 0"):
        parse_config({"checkpoint": {"best_on": "em"}})
