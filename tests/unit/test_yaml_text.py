"""YAML texts are read as PyYAML reads them, and each mistake is named with its place."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mempipe.storage.yaml_text import parse_yaml

ROOT = Path(__file__).parents[2]
FILES = sorted([*ROOT.glob("jobs/**/*.yaml"), *ROOT.glob("mempipe/**/*.yaml")])


def test_every_file_of_the_project_is_read_as_by_pyyaml():
    assert len(FILES) > 40
    for file in FILES:
        for text in file.read_text().split("\n---\n"):
            assert parse_yaml(text) == yaml.safe_load(text), file


def test_a_mistake_is_said_with_the_character_and_the_place():
    with pytest.raises(yaml.YAMLError, match=r"found character '@' that cannot start any token\s.*line 2, column 4"):
        parse_yaml("a: 1\nb: @x")
    with pytest.raises(yaml.YAMLError, match=r"found character '\\t' that cannot start any token\s.*line 1, column 4"):
        parse_yaml("lr:\t\t0.1")


def test_an_anchor_may_be_named_often_and_merged():
    text = "a: &x {k: 1, l: [2]}\nb: {<<: *x, k: 3}\nc: [*x, *x]"
    assert parse_yaml(text) == {"a": {"k": 1, "l": [2]}, "b": {"k": 3, "l": [2]}, "c": [{"k": 1, "l": [2]}] * 2}


@pytest.mark.parametrize("text", ["a: &x [*x]", "a: &x {b: {c: [*x]}}"])
def test_what_holds_itself_is_refused(text):
    with pytest.raises(yaml.YAMLError, match="what begins in line 1 holds itself"):
        parse_yaml(text)
