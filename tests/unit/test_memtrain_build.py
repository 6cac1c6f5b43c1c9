"""The build of masked documents without Ray: the same ones however it is cut, killed and continued."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from mempipe.agents.memtrain import MemTrainRenderer
from mempipe.cli import main as command
from mempipe.data.qa import read_questions
from mempipe.engines.tiny import build_tokenizer
from mempipe.engines.tokenizer import load_tokenizer
from mempipe.loader import parse_config, parse_section
from mempipe.masking.documents import DocumentsConfig
from mempipe.masking.entities import can_be_read
from mempipe.retrieval.build import build_index
from mempipe.rollout import make_renderer
from mempipe.settings import ConfigError
from mempipe.storage.json_files import read_object, write_object
from mempipe.streams.documents import DocumentMaker
from mempipe.types import Passage
from pipelines import build_memtrain

CITIES = ["Basel", "Lima", "Oslo", "Quito", "Turin", "Vilnius"]
PASSAGES = [
    Passage(
        id=f"p{i}", title=f"House {i}", text=f"the old house number {i} in {CITIES[i % 6]} was built for Ann{i} Miller."
    )
    for i in range(60)
]


class Killed(Exception):
    pass


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("memtrain")
    build_index(PASSAGES, folder / "index")
    build_tokenizer(folder / "model")
    return {"index": str(folder / "index"), "tokenizer": str(folder / "model")}


@pytest.fixture
def made(monkeypatch) -> list[str]:
    """Runs the parts in this process, last part first, and remembers which were made."""
    done: list[str] = []

    def stream_parts(parts: list[dict[str, Any]], config: DocumentsConfig, common: Any) -> Any:
        maker = DocumentMaker(config, common)
        for part in reversed(parts):
            yield from maker(pa.Table.from_pylist([part])).column("count").to_pylist()
            done.append(Path(part["file"]).parent.name + Path(part["file"]).name)

    monkeypatch.setattr(build_memtrain, "stream_parts", stream_parts)
    monkeypatch.setattr(build_memtrain, "connected", lambda *_, **__: contextlib.nullcontext("namespace"))
    monkeypatch.setattr(build_memtrain, "lock", lambda folder: folder.mkdir(parents=True, exist_ok=True))
    return done


def config(files: dict[str, str], output: Path, **changes: Any) -> DocumentsConfig:
    values = {
        "output": str(output),
        "entities": "rules",
        "num_documents": 12,
        "num_held_out": 0,
        "num_related": 3,
        "num_random": 4,
    }
    values |= {"chunk_tokens": 64, "min_tokens": 64, "max_tokens": 2000, "documents_per_part": 5, "mask": "____"}
    return parse_section(files | values | changes, DocumentsConfig)


def without(file: Path, setting: str) -> None:
    settings = read_object(file, advice="")
    del settings[setting]
    write_object(file, settings)


def documents(folder: Path) -> list[dict[str, Any]]:
    return pl.read_parquet(folder / "documents.parquet", glob=False).to_dicts()


def test_documents_are_the_same_however_the_build_is_cut(files, made, tmp_path):
    first = documents(build_memtrain.main(config(files, tmp_path / "a")))
    assert len(first) == 12 and len({row["id"] for row in first}) == 12
    assert first == documents(build_memtrain.main(config(files, tmp_path / "b", documents_per_part=2)))
    assert first != documents(build_memtrain.main(config(files, tmp_path / "c", seed=2)))
    for row in first:
        text = row["context"]
        assert not can_be_read(text, row["golden_answers"][0], row["kind"]) and text.count("____") == row["num_masks"]
        assert len(row["passage_ids"]) >= 8 and row["pivot_id"] in row["passage_ids"]
        assert len(set(row["passage_ids"])) == len(row["passage_ids"]) and len(row["related_scores"]) == 3


def test_a_build_that_was_killed_goes_on(files, made, tmp_path, monkeypatch):
    whole = documents(build_memtrain.main(config(files, tmp_path / "whole")))
    made.clear()
    write = DocumentMaker.write

    def dies(self: DocumentMaker, file: Path, first: int, rows: list[int]) -> None:
        if file.parent.name == "parts" and first == 0:
            raise Killed
        write(self, file, first, rows)

    monkeypatch.setattr(DocumentMaker, "write", dies)
    with pytest.raises(Killed):
        build_memtrain.main(config(files, tmp_path / "killed"))
    before = list(made)
    without(tmp_path / "killed/memtrain/settings.json", "num_recall_targets")  # as of a version that did not know it
    monkeypatch.setattr(DocumentMaker, "write", write)
    folder = build_memtrain.main(config(files, tmp_path / "killed"))
    assert documents(folder) == whole
    assert before and not set(before) & set(made[len(before) :])
    num_made = len(made)
    assert documents(build_memtrain.main(config(files, tmp_path / "killed"))) == whole and len(made) == num_made


def test_rejections_are_counted_and_a_short_corpus_gives_what_it_has(files, made, tmp_path):
    # A bracket in a path is no pattern.
    folder = build_memtrain.main(config(files, tmp_path / "[v2]", num_documents=1000))
    lines = "\n".join(build_memtrain.describe(folder))
    assert f"{len(documents(folder))} documents" in lines and "rejected as in_title" in lines
    assert "num_masks" in lines and "=== memtrain-" in "\n".join(build_memtrain.shown(folder, 2))


def test_what_cannot_work_is_refused_before_anything_starts(files, made, tmp_path):
    build_memtrain.main(config(files, tmp_path, name="begun"))
    made.clear()
    for changes, sentence in (
        ({"num_random": 100}, "holds 60 passages; a document .* needs 104"),
        ({"index": str(tmp_path)}, "index .* lacks|no index|manifest"),
        ({"tokenizer": str(tmp_path / "none")}, "expected a folder with a model"),
        ({"name": "begun", "seed": 7}, "was begun with seed 1, now it is 7"),
        ({"entities": "no_such_pipeline"}, "cannot be loaded"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            build_memtrain.main(config(files, tmp_path, **changes))
    assert not made


def test_held_out_documents_have_a_file_of_their_own_and_both_are_question_files(files, made, tmp_path):
    whole = documents(build_memtrain.main(config(files, tmp_path / "whole")))
    folder = build_memtrain.main(config(files, tmp_path / "split", num_documents=9, num_held_out=3))
    held_out, train = (read_questions(folder / f"{name}.parquet") for name in ("held_out", "documents"))
    assert [question.id for question in [*held_out, *train]] == [row["id"] for row in whole]
    assert len(held_out) == 3 and all("____" in q.context and "____" in q.text for q in [*held_out, *train])
    assert f"{folder / 'held_out.parquet'}: 3 documents" in build_memtrain.describe(folder)
    with pytest.raises(ConfigError, match=r"gave [0-9]+ documents; with num_held_out 5000 none is left to train on"):
        build_memtrain.main(config(files, tmp_path / "none", num_held_out=5000))


def test_a_build_with_too_few_documents_goes_on_with_fewer_that_are_held_out(files, made, tmp_path):
    with pytest.raises(ConfigError, match="none is left to train on: lower it"):
        build_memtrain.main(config(files, tmp_path, num_held_out=5000))
    made.clear()
    folder = build_memtrain.main(config(files, tmp_path, num_documents=9, num_held_out=3))
    assert not made, "all parts are there"
    whole = build_memtrain.main(config(files, tmp_path / "at once", num_documents=9, num_held_out=3))
    for name in ("held_out.parquet", "documents.parquet"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()
    with pytest.raises(ConfigError, match="was begun with num_held_out 3, now it is 2"):
        build_memtrain.main(config(files, tmp_path, num_documents=9, num_held_out=2))


def test_no_prompt_about_a_document_shows_what_is_asked(files, made, tmp_path):
    folder = build_memtrain.main(config(files, tmp_path, num_documents=8))
    budget = {"chunk_tokens": 200, "question_tokens": 64, "context_tokens": 4096}
    run = parse_config({"agent": {"name": "memtrain", "mask": "____"}, "budget": budget})
    renderer = make_renderer(run, tokenizer=load_tokenizer(files["tokenizer"]))
    assert isinstance(renderer, MemTrainRenderer)
    num_recalls = 0
    for question in read_questions(folder / "documents.parquet"):
        renderer.check(question)
        asked, chunks = renderer.question(question), renderer.chunks(question)
        shown = [renderer.read_prompt(question=asked, memory=[], chunk=chunk.token_ids) for chunk in chunks]
        shown.append(renderer.answer_prompt(question=asked, memory=[]))
        for seed in "abc":
            (probe,) = renderer.probes(question, seed=seed)
            assert len(chunks) > 1
            prompt = renderer.recall_prompt(memory=[], masked=probe.masked.token_ids)
            assert not any(can_be_read(renderer.tokenizer.decode(prompt), form, "number") for form in probe.target)
            shown.append(prompt)
            num_recalls += 1
        for form in question.golden_answers:
            assert not any(can_be_read(renderer.tokenizer.decode(prompt), form, "number") for prompt in shown)
    assert num_recalls == 24


def test_a_build_does_not_go_on_with_the_index_of_another_corpus(files, made, tmp_path):
    build_index(PASSAGES, tmp_path / "index")
    build_memtrain.main(config(files, tmp_path, index=str(tmp_path / "index")))
    shutil.rmtree(tmp_path / "index")
    build_index(PASSAGES[:40], tmp_path / "index")
    with pytest.raises(ConfigError, match=r"was begun with snapshot '.*', now it is '.*'; choose another name"):
        build_memtrain.main(config(files, tmp_path, index=str(tmp_path / "index")))


def test_a_script_without_capitals_needs_another_finder(files, made, tmp_path):
    passages = [Passage(id=f"p{i}", title="家", text="这座古老的房子是为安娜建造的。" * 6) for i in range(12)]
    build_index(passages, tmp_path / "index")
    with pytest.raises(ConfigError, match=r"rejected: 12 no_entity; a text whose script has no capital letters needs"):
        build_memtrain.main(config(files, tmp_path, index=str(tmp_path / "index")))


def test_the_command_builds_and_shows(files, made, tmp_path, capsys):
    path = tmp_path / "memtrain.yaml"
    values = config(files, tmp_path / "out").model_dump(mode="json")
    path.write_text("\n".join(f"{name}: {value!r}" for name, value in values.items()))
    assert command(["data", "memtrain", str(path), "num_documents=3", "--show", "1"]) == 0
    printed = capsys.readouterr().out
    assert "3 documents" in printed and printed.count("=== memtrain-") == 1 and "____" in printed
