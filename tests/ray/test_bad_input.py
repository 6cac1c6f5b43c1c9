"""What cannot work is refused in one sentence, without a trace, and nothing half-written stays behind."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import ray
import yaml
from miniature import locked_elsewhere

from mempipe.actors.lost import LaunchError
from mempipe.cli import EXIT_CONFIG, EXIT_RUN, main
from mempipe.config import RunConfig
from mempipe.storage.checksums import CHECKSUMS
from mempipe.storage.files import LOCK_FILE


@pytest.fixture
def train(world: RunConfig, tmp_path: Path) -> Callable[..., int]:
    """The command on a config of real files, as a user with data of their own has; every file is a copy that may be
    damaged.
    """
    inputs = tmp_path / "inputs"
    shutil.copytree(world.model.path, inputs / "model")
    shutil.copytree(world.retrieval.index, inputs / "index")
    shutil.copy(world.data.train, inputs / "train.parquet")
    settings = world.model_dump(mode="json") | {
        "world": None,
        "warm_start": None,
        "output": str(tmp_path / "runs"),
        "name": "bad",
    }
    settings["model"]["path"] = str(inputs / "model")
    settings["retrieval"]["index"] = str(inputs / "index")
    settings["data"] |= {"train": str(inputs / "train.parquet"), "validation": ""}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    return lambda *arguments: main(["train", str(tmp_path / "config.yaml"), *arguments])


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., None]:
    """Checks that a command ended with `code` and one sentence that holds all of `parts`, before any cluster was
    started.
    """

    def check(code: int, *parts: str, expected: int = EXIT_CONFIG) -> None:
        lines = capsys.readouterr().err.splitlines()
        assert code == expected
        assert lines and lines[0].startswith("error: ")
        assert not [part for part in parts if part not in lines[0]], lines[0]
        assert len(lines) == (1 if expected == EXIT_CONFIG else 2), lines
        assert not ray.is_initialized()
        if expected == EXIT_CONFIG:
            assert not (tmp_path / "runs" / "bad").exists()

    return check


@pytest.mark.parametrize(
    "override, parts",
    [
        ("algorithm.grop_size=4", ["algorithm.grop_size", "is not a setting"]),
        ("algorithm.group_size=many", ["algorithm.group_size", "'many'", "integer"]),
        ("algorithm.group_size=0", ["algorithm.group_size", "0", "greater than or equal to 2"]),
        ("algorithm.loss=ppo", ["algorithm.loss", "'ppo'", "'grpo'"]),
        ("num_steps", ["num_steps", "key=value"]),
        ("num_steps.more=1", ["num_steps is a value, not a section"]),
        ("algorithm=[", ["algorithm=[", "not YAML"]),
        ("budget.memory_tokens=1000", ["budget.memory_message_tokens is 68", "budget.memory_tokens 1000"]),
        ("budget.observation_tokens=1000", ["budget.context_tokens", "512", "observation 1000"]),
        ("algorithm.updates_per_step=3", ["groups_per_step 4", "updates_per_step 3"]),
        ("sampling.temperature=0", ["temperature 0", "temperature > 0"]),
        ("retrieval.num_passages=9", ["retrieval.num_passages is 9", "retrieval.max_passages 2"]),
    ],
)
def test_a_setting_that_cannot_be_is_named_with_its_value(train, refused, override, parts):
    refused(train(override), *parts)


def test_a_config_that_is_not_there_or_no_config(capsys, tmp_path):
    assert main(["train", str(tmp_path / "none.yaml")]) == EXIT_CONFIG
    (tmp_path / "list.yaml").write_text("- 1\n")
    assert main(["train", str(tmp_path / "list.yaml")]) == EXIT_CONFIG
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    assert main(["train", str(tmp_path / "broken.yaml")]) == EXIT_CONFIG
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert main(["train", str(tmp_path / "binary.yaml")]) == EXIT_CONFIG
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4 and all(line.startswith("error: ") and str(tmp_path) in line for line in lines)


def test_a_budget_that_the_template_does_not_fit(train, refused):
    refused(train("budget.context_tokens=294"), "budget.context_tokens is 294", "template")


def test_questions_longer_than_their_budget(train, refused):
    refused(train("budget.question_tokens=3"), "questions do not fit", "budget.question_tokens 3", "train-")


def test_texts_of_more_chunks_than_allowed(train, refused):
    budget = "question_tokens: 32, memory_tokens: 64, action_tokens: 32, chunk_tokens: 16, context_tokens: 512"
    settings = ["agent={name: memagent, prompts: tiny_memagent}", f"budget={{{budget}, max_chunks: 1}}"]
    refused(train(*settings), "questions do not fit", "more than budget.max_chunks 1", "train-")


@pytest.mark.parametrize("setting", ["model.path", "data.train", "retrieval.index"])
def test_files_that_are_not_there(train, refused, setting):
    refused(train(f"{setting}=/nowhere"), "/nowhere")


@pytest.mark.parametrize("setting", ["model.path", "data.train", "retrieval.index"])
def test_files_that_are_not_named(train, refused, setting):
    refused(train(f"{setting}=''"), f"{setting} is empty")


@pytest.mark.parametrize("name", ["passages/00000000.arrow", "vectors/00000.faiss", "manifest.json"])
@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_an_index_that_is_damaged(train, refused, tmp_path, name, damage):
    file = tmp_path / "inputs" / "index" / name
    content = file.read_bytes()
    file.unlink() if damage == "missing" else file.write_bytes(content[: len(content) // 2])
    refused(train(), str(tmp_path / "inputs" / "index"), name)


@pytest.mark.parametrize(
    "name, content, part",
    [
        ("q.jsonl", '{"id": "1", "question": "Who?", "golden_answers": ["A"]}\n{"id": "2", "quest', "2"),
        ("q.jsonl", '{"id": "1", "question": "Who?", "golden_answers": []}\n', "golden_answers"),
        ("q.jsonl", '{"id": "1", "query": "Who?"}\n', "no known format"),
        ("q.jsonl", "", "no question"),
        ("q.parquet", "PAR1 and then nothing", "q.parquet"),
        ("q.csv", "id,question\n", "q.csv"),
    ],
)
def test_a_question_file_that_is_garbled(train, refused, tmp_path, name, content, part):
    (tmp_path / name).write_text(content)
    refused(train(f"data.train={tmp_path / name}"), str(tmp_path / name), part)


def test_a_tokenizer_without_a_chat_template(train, refused, tmp_path):
    model = tmp_path / "inputs" / "model"
    (model / "chat_template.jinja").unlink()
    refused(train(), str(model), "lacks chat_template.jinja")
    (model / CHECKSUMS).unlink()  # a model of other people's has none
    refused(train(), str(model), "no chat template")


def test_an_output_folder_that_cannot_be_written(train, refused, tmp_path):
    (tmp_path / "file").write_text("")
    refused(train(f"output={tmp_path / 'file'}"), str(tmp_path / "file"), "is not a directory")


def test_a_run_that_is_there_already(train, refused, capsys, tmp_path, world):
    folder = begun_run(train, capsys, tmp_path)
    before = contents(folder)
    assert train() == EXIT_CONFIG
    assert train("--resume", "optimizer.lr=0.5", "seed=7") == EXIT_CONFIG
    (folder / "state.json").write_text('{"seco')
    assert train("--resume") == EXIT_CONFIG
    already, other, damaged = capsys.readouterr().err.splitlines()
    assert str(folder) in already and "--resume" in already
    assert "change the learned result: optimizer.lr 0.5 (was 0.0005), seed 7 (was 1);" in other
    assert "state.json is damaged" in damaged
    assert contents(folder) | {"state.json": b""} == before | {"state.json": b""}


def test_a_run_that_another_process_is_at_work_in(train, capsys, tmp_path):
    folder = begun_run(train, capsys, tmp_path)
    before = contents(folder)
    (folder / LOCK_FILE).unlink()  # this process, which has begun the run, would hold it until its end
    with locked_elsewhere(folder):
        assert train("--resume") == EXIT_CONFIG
    assert f"error: another process is at work in {folder}" in capsys.readouterr().err
    assert contents(folder) == before


def test_nothing_to_resume(train, refused):
    refused(train("--resume"), "holds no run")


def test_a_checkpoint_that_was_truncated_is_named_before_anything_starts(train, refused, capsys, tmp_path):
    folder = begun_run(train, capsys, tmp_path)
    checkpoint = folder / "checkpoints" / "step-00000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "__0_0.distcp").write_bytes(b"1234")
    (checkpoint / "manifest.json").write_text(json.dumps({"files": {"__0_0.distcp": {"bytes": 8, "sha256": ""}}}))
    refused(train("--resume"), str(checkpoint), "is damaged", "has 4 bytes, 8 were written", expected=EXIT_RUN)
    assert (checkpoint / "manifest.json").exists()


def test_a_cluster_that_cannot_be_reached(train, refused):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    refused(train(f"ray_address={address}"), address, "no cluster can be reached")


def begun_run(train: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Path:
    """A run whose cluster did not start after its inputs were found good."""
    with mock.patch("pipelines.train.connected", side_effect=LaunchError("no cluster")):
        assert train() == EXIT_RUN
    capsys.readouterr()
    folder = tmp_path / "runs" / "bad"
    assert (folder / "state.json").exists()
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
