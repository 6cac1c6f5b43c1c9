"""Of what a thing was made: hashes, differences, and records that are damaged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mempipe.config import RunConfig
from mempipe.loader import setting_names
from mempipe.masking.documents import DocumentsConfig
from mempipe.provenance import (
    changed_inputs,
    changed_settings,
    checksums_sha256,
    differences,
    files_sha256,
    model_sha256,
    questions_sha256,
    read_record,
    write_record,
)
from mempipe.retrieval.config import IndexConfig
from mempipe.settings import ConfigError
from mempipe.studies.sweep import SweepConfig
from mempipe.types import Question

QUESTION = Question(id="1", text="Where?", golden_answers=["Oslo"])


def test_differences_are_named_by_their_dotted_names():
    before = {"seed": 1, "optimizer": {"lr": 1e-6, "betas": [0.9]}, "stream": {"num_drivers": 1}, "gone": 3}
    now = {"seed": 1, "optimizer": {"lr": 1e-3, "betas": [0.9]}, "stream": {"num_drivers": 2}, "new": None}
    found = [("gone", 3, None), ("optimizer.lr", 1e-6, 1e-3)]
    assert list(differences(before, now, free=["stream"])) == found
    assert list(differences(before, now)) == [*found, ("stream.num_drivers", 1, 2)]
    assert list(differences({"stream_x": 1}, {"stream_x": 2}, free=["stream"])) == [("stream_x", 1, 2)]


def test_a_setting_that_an_older_version_did_not_have_is_no_difference():
    now = {"file": "a", "columns": {"question": "", "answer": ""}, "names": [], "limit": 0}
    assert list(differences({"file": "a", "limit": 0}, now)) == []
    assert list(differences({"file": "a"}, now)) == [("limit", None, 0)]
    named = now | {"columns": {"question": "q", "answer": ""}}
    assert list(differences({"file": "a", "limit": 0}, named)) == [("columns", None, named["columns"])]


@pytest.mark.parametrize("kind", [RunConfig, SweepConfig, DocumentsConfig, IndexConfig])
def test_every_free_setting_exists(kind):
    assert kind.FREE and set(kind.FREE) <= set(setting_names(kind))


def test_a_record_of_an_earlier_version_is_compared_by_the_settings_that_it_has():
    now = DocumentsConfig(index="i", tokenizer="t", output="here", num_related=30)
    saved = {"index": "i", "tokenizer": "t", "output": "there", "snapshot": "1"}
    assert changed_settings(saved, now, snapshot="2") == [("num_related", 29, 30), ("snapshot", "1", "2")]
    del saved["output"], now
    assert changed_settings(saved, DocumentsConfig(index="i", tokenizer="t"), snapshot="1") == []


def test_an_input_that_one_side_does_not_know_is_not_compared():
    assert changed_inputs({"a": "1", "b": "2", "c": ""}, {"a": "1", "b": "3", "c": "4", "d": "5"}) == ["b"]


@pytest.mark.parametrize("change", [{"text": "When?"}, {"golden_answers": ["Bergen"]}, {"context": "x"}, {"id": "2"}])
def test_questions_are_known_by_all_that_an_agent_or_a_score_reads(change):
    other = replace(QUESTION, id="0")
    assert questions_sha256([QUESTION, other]) == questions_sha256([other, QUESTION]), "in any order"
    assert questions_sha256([replace(QUESTION, **change), other]) != questions_sha256([QUESTION, other])


def test_a_file_is_known_by_its_bytes(tmp_path):
    file = tmp_path / "q.jsonl"
    file.write_text('{"id": 1}\n')
    before = files_sha256(str(file))
    assert files_sha256(str(file)) == before
    file.write_text('{"id": 2}\n')
    assert files_sha256(str(file)) != before


def test_a_model_is_known_by_its_weights_and_not_by_their_time(tmp_path):
    def model(name: str, weights: bytes, config: str = "{}") -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(weights)
        (folder / "config.json").write_text(config)
        return model_sha256(str(folder))

    large = bytes(range(256)) * 100_000  # more than is read of it in one place
    first = model("a", large)
    assert first and model("a copy", large) == first
    assert model("other weights", large[::-1]) != first and model("other config", large, '{"x": 1}') != first
    assert model_sha256("owner/name") == model_sha256("") == ""


def test_a_policy_is_known_by_the_checksums_of_its_weights():
    assert checksums_sha256({"a": 1, "b": -2}) == checksums_sha256({"b": -2, "a": 1}) != checksums_sha256({"a": 1})


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (None, "cannot be read: No such file or directory"),
        ("", "is damaged"),
        ("[]", "it holds a list, expected an object"),
        ("{", "is damaged"),
        ('{"losses": 3}', "losses is 3"),
        ("{}", "losses is missing"),
    ],
)
def test_a_damaged_record_is_one_sentence_that_ends_in_what_to_do(tmp_path: Path, content, part):
    file = tmp_path / "r.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError) as error:
        read_record(file, mends="delete it", losses=list)
    assert str(error.value).startswith(f"{file} ") and part in str(error.value)
    assert str(error.value).endswith("; delete it") and "\n" not in str(error.value)


def test_a_record_comes_back_as_it_was_written(tmp_path):
    file, values = tmp_path / "r.json", {"step": 3, "agent": {"name": "react"}, "seconds": [1.5, None]}
    write_record(file, values)
    assert read_record(file, mends="", step=int) == values
    file.write_text(json.dumps(values))
    assert read_record(file, mends="", step=int) == values, "an earlier version wrote no checksum"
