"""A checkpoint becomes a model without the run that wrote it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml
from learner_setup import make_learner, pack, samples, save_model
from transformers import AutoModelForCausalLM

from mempipe.cli import main
from mempipe.config import RunConfig
from mempipe.engines.checkpoint import Position
from mempipe.engines.config import ModelConfig

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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "new", "--step", "3"], "--step is 3; .*run holds checkpoints of the steps 1, 2"),
        (["run", "run"], "run exists; choose another folder"),
        (["nowhere", "new"], "nowhere holds no run"),
    ],
)
def test_what_cannot_be_exported_is_said(tmp_path, capsys, arguments, said):
    run_with_checkpoints(tmp_path / "run", ModelConfig(path=str(save_model(tmp_path)), dtype="float32"))
    run, target, *rest = arguments
    assert main(["export", str(tmp_path / run), str(tmp_path / target), *rest]) == 2
    assert re.search(said, capsys.readouterr().err)
    assert not (tmp_path / "new").exists()
