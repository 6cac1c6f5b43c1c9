"""`mempipe data cloze` as a user types it: what Ray Data makes of a corpus is what one process makes of it."""

from __future__ import annotations

import sys

import polars as pl
import pytest

from mempipe.cli import main
from mempipe.data.corpus import read_corpus
from mempipe.data.plain_text import PYTHON_REFERENCE, write_corpus
from mempipe.data.qa import read_questions
from mempipe.masking.cloze import SPLITS, choose_questions, find_candidates
from mempipe.masking.config import ClozeConfig
from mempipe.masking.entities import RuleFinder
from tools.processes import Marked, run

SETTINGS = ["entities=rules", "with_title=true", "test_share=0.3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("cloze") / "made"
    assert main(["data", "cloze", PYTHON_REFERENCE, str(made), *SETTINGS]) == 0
    return made


def test_the_questions_are_those_that_one_process_makes_of_the_same_passages(folder, tmp_path):
    config = ClozeConfig(entities="rules", with_title=True, test_share=0.3)
    passages = list(read_corpus(write_corpus(PYTHON_REFERENCE, tmp_path / "corpus.parquet")))
    alone = choose_questions(find_candidates(passages, RuleFinder(), config).lazy(), len(passages), config)
    for split in SPLITS:
        assert read_questions(folder / f"{split}.parquet") == alone.questions[split]
    assert alone.counts["questions"] > 200


def test_a_finished_folder_is_kept_and_one_of_other_settings_is_refused(folder, capsys):
    before = (folder / "cloze.json").stat().st_mtime_ns
    assert main(["data", "cloze", PYTHON_REFERENCE, str(folder), *SETTINGS]) == 0
    out = capsys.readouterr().out
    assert "rejected:" in out and "____" in out and (folder / "cloze.json").stat().st_mtime_ns == before
    assert main(["data", "cloze", PYTHON_REFERENCE, str(folder), "entities=rules"]) == 2
    assert "was made with other settings (test_share, with_title)" in capsys.readouterr().err


def test_passages_of_plain_text_are_kept_for_an_index(folder):
    passages = pl.read_parquet(folder / "corpus.parquet")
    assert passages.columns == ["id", "title", "text", "partition"] and len(passages) > 500
    assert not (folder / "candidates").exists()


def test_a_small_text_says_which_split_has_no_question_and_shows_those_of_another(tmp_path):
    text = tmp_path / "note.txt"
    text.write_text(
        "Ada Lovelace was born in London. In 1843 she worked with Charles Babbage on the engine in England."
    )
    command = [sys.executable, "-m", "mempipe", "data", "cloze", str(text), str(tmp_path / "out")]
    done = run([*command, "entities=rules", "test_share=0"], marked=Marked(), cwd=tmp_path)  # pytest hides warnings
    assert done.returncode == 0, done.stdout + done.stderr
    assert "  test: none: no title with a question was drawn for it" in done.stdout and "\n  -> " in done.stdout
    assert "UserWarning" not in done.stdout + done.stderr  # of Ray, about a pool that is larger than the text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl"),
        ([PYTHON_REFERENCE, "entities=no_such_pipeline"], "no_such_pipeline"),
        ([PYTHON_REFERENCE, "with_titel=true"], "with_titel is not a setting; did you mean with_title?"),
    ],
)
def test_a_mistake_is_said_before_anything_starts(arguments, message, tmp_path, capsys):
    corpus, *settings = arguments
    assert main(["data", "cloze", corpus, str(tmp_path / "out"), *settings]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()
