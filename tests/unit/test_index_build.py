"""Building an index: whatever kills it, going on ends with the same bytes; what cannot be built is refused by name."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from dying_process import killed_at
from killed_build import build, run_and_die

from mempipe.checks.retrieval import check_build
from mempipe.data.corpus import corpus_files, read_corpus
from mempipe.loader import load_job
from mempipe.retrieval.adopt import adopt_index
from mempipe.retrieval.build import IndexBuild, build_index, encode_segment
from mempipe.retrieval.config import IndexConfig
from mempipe.retrieval.encoders import HashingEncoder
from mempipe.retrieval.faiss_build import make_index
from mempipe.retrieval.manifest import read_manifest, verify
from mempipe.retrieval.passages import line_offsets
from mempipe.retrieval.retriever import Query, Retriever
from mempipe.settings import ConfigError
from mempipe.storage.checksums import STAMP
from mempipe.storage.json_files import read_object, write_object
from mempipe.types import Passage
from pipelines.build_index import corpus_of, texts_of

ENCODER = {"kind": "hashing", "dimension": 32}
WORDS = [f"word{i}" for i in range(80)]


def write_corpus(path: Path, count: int = 500, *, partition: bool = False) -> Path:
    rng = random.Random(0)
    rows = [{"id": i, "contents": f'"Title {i}"\n{" ".join(rng.choices(WORDS, k=20))}'} for i in range(count)]
    if partition:
        rows = [row | {"partition": f"p{row['id'] // 90}"} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config_of(corpus: Path, output: Path, **settings: Any) -> IndexConfig:
    values = {"corpus": [str(corpus)], "output": str(output), "encoder": ENCODER, "segment_passages": 100} | settings
    return IndexConfig.model_validate(values)


def contents(folder: Path) -> dict[str, bytes]:
    """The files of an index, without the stamp that whoever opened it left."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file.name != STAMP]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


@pytest.mark.slow
def test_a_build_killed_again_and_again_ends_with_the_bytes_of_an_undisturbed_one(tmp_path):
    settings = {"lexical": True, "faiss": {"factory": "IVF4,Flat", "search": "nprobe=2", "shard_passages": 200}}
    corpus = write_corpus(tmp_path / "c.jsonl")
    build(config_of(corpus, tmp_path / "undisturbed", **settings))
    rng, num_kills = random.Random(1), 0
    while run_and_die(config_of(corpus, tmp_path / "i", **settings), rng.choice([3, 5, 8])):
        num_kills += 1
    assert num_kills >= 8  # more than 30 files get their names, some of them again after a kill
    assert contents(tmp_path / "i") == contents(tmp_path / "undisturbed")
    assert not list(tmp_path.glob(".*"))
    verify(tmp_path / "i")


@pytest.mark.slow
def test_a_build_with_other_settings_or_another_corpus_does_not_go_on(tmp_path):
    corpus = write_corpus(tmp_path / "c.jsonl")
    assert run_and_die(config_of(corpus, tmp_path / "i"), 3)
    with pytest.raises(
        ConfigError, match=r"unfinished build with segment_passages 100, now it is 50; remove that folder"
    ):
        build(config_of(corpus, tmp_path / "i", segment_passages=50))
    write_corpus(corpus, 501)
    with pytest.raises(ConfigError, match=r"unfinished build of another corpus \(.*c.jsonl has changed\)"):
        build(config_of(corpus, tmp_path / "i"))
    write_corpus(corpus, 500)
    assert build(config_of(corpus, tmp_path / "i", num_encoders=3)).passages.count == 500


def test_a_build_that_an_earlier_version_began_goes_on(tmp_path, monkeypatch):
    config = begun(tmp_path, monkeypatch, until="write_manifest")
    file = tmp_path / ".i.building/unfinished/settings.json"
    settings = read_object(file, advice="")
    del settings["max_line_bytes"], settings["faiss"]["graph_threads"]
    write_object(file, settings)
    other = config.model_copy(update={"faiss": config.faiss.model_copy(update={"factory": "SQ8"})})
    with pytest.raises(ConfigError, match=r"unfinished build with faiss\.factory 'Flat', now it is 'SQ8'"):
        build(other)
    assert build(config).passages.count == 60


SMALL: dict[str, Any] = {"lexical": True, "segment_passages": 20}


class Stop(BaseException):
    """Ends a build in this process where a test wants it, past every `except`."""


def stop(*_: Any, **__: Any) -> None:
    raise Stop


def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, until: str, factory: str = "Flat") -> IndexConfig:
    """Builds a small index until the build calls its method `until`; returns its settings."""
    config = config_of(write_corpus(tmp_path / "c.jsonl", 60), tmp_path / "i", **SMALL, faiss={"factory": factory})
    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(f"mempipe.retrieval.build.{until}", stop)
        build(config)
    return config


@pytest.mark.slow
def test_a_kill_at_any_change_of_the_last_steps_changes_nothing_of_what_is_built(tmp_path, monkeypatch):
    for module in ("files", "retrieval.build"):
        monkeypatch.setattr(f"mempipe.{module}.sync", lambda path: None)  # a kill, unlike a power cut, loses nothing
    config = begun(tmp_path, monkeypatch, until="write_manifest")
    build(config_of(tmp_path / "c.jsonl", tmp_path / "undisturbed", **SMALL))
    for number in itertools.count():
        here = tmp_path / str(number)
        shutil.copytree(tmp_path / ".i.building", here / ".i.building")
        own = config.model_copy(update={"output": str(here / "i")})
        killed = killed_at(lambda own=own: build(own), number)
        if not (here / "i").exists():
            for changed in ({"encoder": {**ENCODER, "dimension": 64}}, {"lexical": False}):
                with pytest.raises(ConfigError, match=f"unfinished build with {next(iter(changed))}"):
                    build(own.model_copy(update=changed))
            other = tmp_path / "c.jsonl"
            kept = other.read_bytes()
            other.write_bytes(kept.replace(b"word1", b"w0rd1"))
            with pytest.raises(ConfigError, match=r"another corpus \(.*c.jsonl has changed\)"):
                build(own)
            other.write_bytes(kept)
            build(own)
        assert contents(here / "i") == contents(tmp_path / "undisturbed")
        if list(here.glob(".*")):  # what a kill left does not stand in the way of the next build, and goes with it
            (here / "i").rename(here / "elsewhere")
            build(own)
            assert contents(here / "i") == contents(tmp_path / "undisturbed") and not list(here.glob(".*"))
        if not killed:
            break
    assert number > 8  # before and after both renames, and while the rest of the build is removed


def test_a_corpus_edited_in_place_is_noticed_though_its_size_is_the_same(tmp_path, monkeypatch):
    config = begun(tmp_path, monkeypatch, until="make_index")
    corpus = tmp_path / "c.jsonl"
    corpus.write_bytes(corpus.read_bytes().replace(b"word1", b"w0rd1"))
    with pytest.raises(ConfigError, match=r"unfinished build of another corpus \(.*c.jsonl has changed\); remove"):
        build(config)


def test_a_corpus_edited_while_it_is_read_gives_no_index(tmp_path, monkeypatch):
    config = config_of(write_corpus(tmp_path / "c.jsonl", 60), tmp_path / "i", **SMALL)
    job = IndexBuild(config, corpus_files(config.corpus))
    for segment in job.read():
        encode_segment(job.folder, segment.number, HashingEncoder(dimension=32))
        (tmp_path / "c.jsonl").write_bytes((tmp_path / "c.jsonl").read_bytes().replace(b"word1", b"w0rd1"))
    with pytest.raises(ConfigError, match=r"another corpus \(.*c.jsonl has changed\)"):
        job.finish(HashingEncoder(dimension=32))
    assert not (tmp_path / "i").exists()


@pytest.mark.parametrize(
    ("file", "until"),
    [
        ("unfinished/settings.json", "make_index"),
        ("unfinished/corpus.json", "make_index"),
        ("unfinished/segments/00000001.json", "make_index"),
        ("passages/00000001.arrow", "make_index"),
        ("unfinished/encoded/00000001.f32", "make_index"),
        ("unfinished/trained.faiss", "faiss.clone_index"),
        ("vectors/00000.faiss", "build_lexical"),
        ("lexical/weights.npy", "write_manifest"),
    ],
)
def test_a_byte_that_changes_in_an_unfinished_build_is_refused_by_name(tmp_path, monkeypatch, file, until):
    config = begun(tmp_path, monkeypatch, until=until)
    damaged = tmp_path / ".i.building" / file
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 4
    for damage in (bytes(content), content[:-3], b"", b"[]"):
        damaged.write_bytes(damage)
        with pytest.raises(ConfigError, match=rf"{damaged.name}.*(remove|delete)") as refused:
            build(config)
        assert "\n" not in str(refused.value)


def test_two_builds_of_one_output_do_not_meet(tmp_path):
    config = config_of(write_corpus(tmp_path / "c.jsonl"), tmp_path / "i")
    first = IndexBuild(config, corpus_files(config.corpus))
    with pytest.raises(ConfigError, match="which another process is building"):
        IndexBuild(config, corpus_files(config.corpus))
    del first
    build(config)
    with pytest.raises(ConfigError, match="which exists; remove it or choose another"):
        build(config)


def test_segments_and_shards_do_not_change_an_answer(tmp_path):
    corpus = write_corpus(tmp_path / "c.jsonl", partition=True)
    shapes: list[dict[str, Any]] = [
        {"segment_passages": 1000},
        {"segment_passages": 7, "faiss": {"shard_passages": 100}},
        {"segment_passages": 100, "faiss": {"shard_passages": 1}},
    ]
    queries = [
        Query(text=f"word{i} word{3 * i}", num_passages=9, partition=p)
        for i in range(20)
        for p in ("", "p0", "p1", "p5")
    ]
    answers = []
    for i, shape in enumerate(shapes):
        build(config_of(corpus, tmp_path / str(i), **shape))
        answers.append([result.passages for result in Retriever(tmp_path / str(i)).search(queries)])
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.slow
def test_passages_in_memory_and_in_a_file_give_the_same_bytes(tmp_path):
    corpus = write_corpus(tmp_path / "c.jsonl")
    config = config_of(corpus, tmp_path / "a")
    build(config)
    passages = [Retriever(tmp_path / "a")._passages[row] for row in range(500)]
    build_index(passages, tmp_path / "b", encoder=HashingEncoder(dimension=32), segment_passages=100)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.parametrize(
    ("factory", "search", "least"),
    [
        ("IVF8,Flat", "nprobe=8", 0.99),
        ("IVF8,Flat", "nprobe=1", 0.2),
        ("HNSW8", "efSearch=64", 0.9),
        ("IVF8,PQ8x4", "nprobe=8", 0.2),
        ("OPQ8,PQ8x4", "", 0.2),
    ],
)
@pytest.mark.slow
def test_every_kind_that_is_not_exact_reports_its_recall_against_an_exact_search(tmp_path, factory, search, least):
    corpus = write_corpus(tmp_path / "c.jsonl")
    settings = {"faiss": {"factory": factory, "search": search, "shard_passages": 300}}
    manifest = build(config_of(corpus, tmp_path / "i", **settings))
    assert manifest.vectors and manifest.vectors.recall_at_10 is not None and manifest.vectors.num_recall_queries == 256
    # By hand: every passage as a query, on the opened index and on the plain vectors.
    retriever = Retriever(tmp_path / "i")
    vectors = HashingEncoder(dimension=32).encode_passages([retriever._passages[row] for row in range(500)])
    exact = np.argsort(-(vectors @ vectors.T), axis=1, kind="stable")[:, :11]
    assert retriever._vectors is not None
    found = retriever._vectors.search(vectors, 11)
    shares = []
    for row in range(500):
        wanted = [i for i in exact[row] if i != row][:10]
        shares.append(len(set(wanted) & set(found[row][0].tolist())) / 10)
    assert manifest.vectors.recall_at_10 == pytest.approx(float(np.mean(shares)), abs=0.04)
    assert manifest.vectors.recall_at_10 >= least
    build(config_of(corpus, tmp_path / "again", **settings))
    assert contents(tmp_path / "i") == contents(tmp_path / "again")


def test_half_precision_takes_half_the_space_and_is_searched_exactly(tmp_path):
    corpus = write_corpus(tmp_path / "c.jsonl")
    sizes = {}
    for factory in ("Flat", "SQfp16"):
        manifest = build(config_of(corpus, tmp_path / factory, faiss={"factory": factory}))
        assert manifest.vectors and manifest.vectors.recall_at_10 is None
        sizes[factory] = manifest.files["vectors/00000.faiss"].bytes
    assert sizes["SQfp16"] < 0.52 * sizes["Flat"]


def test_bad_rows_are_counted_up_to_the_limit_and_their_absence_is_in_the_manifest(tmp_path):
    corpus = write_corpus(tmp_path / "c.jsonl", 20)
    good = corpus.read_bytes()
    bad = (
        b'{"id": 3, "contents": "\\"Again\\"\\ntwice"}\n{"id": "x", "contents": "\\"Empty\\"\\n "}\n\xff\xfe\n'
        + b'{"id": "long", "contents": "'
        + b"a" * 2**20
        + b'"}\n'
    )
    corpus.write_bytes(good + bad)
    with pytest.raises(ConfigError, match=r"c.jsonl, line 21: .*'3'"):
        build(config_of(corpus, tmp_path / "i"))
    with pytest.raises(ConfigError, match=r"max_bad_rows"):
        build(config_of(corpus, tmp_path / "j", max_bad_rows=3))
    manifest = build(config_of(corpus, tmp_path / "k", max_bad_rows=4))
    assert manifest.passages.count == 20
    assert manifest.passages.skipped == {"duplicate_id": 1, "empty": 1, "not_utf8": 1, "too_long": 1}


def test_a_build_that_bad_rows_ended_goes_on_with_a_higher_limit_and_not_with_a_lower_one(tmp_path, monkeypatch):
    corpus = write_corpus(tmp_path / "c.jsonl", 400)
    lines = corpus.read_text().splitlines()
    corpus.write_text("\n".join([*lines[:50], "x", *lines[50:350], "x", *lines[350:]]))
    with pytest.raises(ConfigError, match=r"line 352|2 bad rows"):
        build(config_of(corpus, tmp_path / "i", max_bad_rows=1))
    with pytest.raises(ConfigError, match=r"max_bad_rows is 0, but 1 bad rows were passed over before"):
        build(config_of(corpus, tmp_path / "i"))
    encoded: list[int] = []
    monkeypatch.setattr("killed_build.encode_segment", lambda *each: (encoded.append(each[1]), encode_segment(*each)))
    build(config_of(corpus, tmp_path / "i", max_bad_rows=2))
    assert encoded == [3]  # the segments before were encoded already
    build(config_of(corpus, tmp_path / "undisturbed", max_bad_rows=2))
    assert contents(tmp_path / "i") == contents(tmp_path / "undisturbed")


def test_a_build_that_a_long_line_ended_goes_on_with_a_higher_limit(tmp_path):
    corpus = write_corpus(tmp_path / "c.jsonl", 250)
    with corpus.open("a") as file:
        file.write(json.dumps({"id": "long", "contents": "word1 " * 500}))
    limits = {"max_line_bytes": 1000, "max_bad_rows": 0}
    with pytest.raises(ConfigError, match=r"line 251: longer than 1000 bytes"):
        build(config_of(corpus, tmp_path / "i", **limits))
    with pytest.raises(ConfigError, match=r"unfinished build with max_line_bytes 1000, now it is 900"):
        build(config_of(corpus, tmp_path / "i", **limits | {"max_line_bytes": 900}))
    build(config_of(corpus, tmp_path / "i", max_line_bytes=9000))
    build(config_of(corpus, tmp_path / "undisturbed", max_line_bytes=9000))
    assert contents(tmp_path / "i") == contents(tmp_path / "undisturbed")


def test_texts_are_not_encoded_again_where_faiss_refused_their_vectors(tmp_path, monkeypatch):
    corpus = write_corpus(tmp_path / "c.jsonl")
    for refused in ("IVF600,Flat", "IDMap,Flat"):  # in its training, and once it is trained
        with pytest.raises(ConfigError, match=rf"faiss.factory is '{refused}'"):
            build(config_of(corpus, tmp_path / "i", faiss={"factory": refused}))
    monkeypatch.setattr("killed_build.encode_segment", None)
    right = {"factory": "IVF4,Flat", "search": "nprobe=4"}
    build(config_of(corpus, tmp_path / "i", faiss=right))
    monkeypatch.undo()
    build(config_of(corpus, tmp_path / "undisturbed", faiss=right))
    assert contents(tmp_path / "i") == contents(tmp_path / "undisturbed")


def test_equal_texts_do_not_lower_the_measured_recall(tmp_path):
    corpus = write_corpus(tmp_path / "c.jsonl", 50)
    rows = [json.loads(line) for line in corpus.read_text().splitlines()]
    again = [{"id": i, "title": "Form", "text": rows[i % 50]["contents"].partition("\n")[2]} for i in range(800)]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in again))
    for name, search in (("all", "nprobe=8"), ("some", "nprobe=1")):
        settings = {"factory": "IVF8,Flat", "search": search}
        manifest = build(config_of(corpus, tmp_path / name, faiss=settings))
        assert manifest.vectors and manifest.vectors.recall_at_10 == 1.0  # 16 passages are as near as the tenth


def test_an_output_that_can_get_no_new_folder_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    corpus = write_corpus(tmp_path / "c.jsonl", 20)
    (tmp_path / "disk" / "here").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    monkeypatch.chdir(tmp_path / "disk" / "here")
    before = sorted(tmp_path.rglob("*"))
    working = "the working folder or one above it"
    refused = {
        tmp_path / "link": "a link",
        Path("."): working,
        Path(".."): working,
        Path("/"): working,
        Path("/proc"): "a mount",
    }
    for output, kind in refused.items():
        config = config_of(corpus, output)
        with pytest.raises(ConfigError, match=rf"output is '.*', {kind}, whose place a new folder cannot take"):
            IndexBuild(config, corpus_files(config.corpus))
        assert any(f", {kind}, whose place" in finding.text for finding in check_build(config))
    assert sorted(tmp_path.rglob("*")) == before
    build(config_of(corpus, tmp_path / "link" / "new"))
    assert (tmp_path / "disk" / "new" / "manifest.json").exists()


def test_what_faiss_cannot_make_is_refused_with_the_setting(tmp_path):
    with pytest.raises(ConfigError, match=r"faiss.factory is 'HNSW8,PQ8', .*distances only"):
        make_index(config_of(tmp_path, tmp_path, faiss={"factory": "HNSW8,PQ8"}).faiss, 32)
    with pytest.raises(ConfigError, match=r"faiss.factory is 'L2norm,Flat'"):
        build(config_of(write_corpus(tmp_path / "n.jsonl"), tmp_path / "n", faiss={"factory": "L2norm,Flat"}))
    with pytest.raises(ConfigError, match=r"faiss.factory is 'Flut'"):
        make_index(config_of(tmp_path, tmp_path, faiss={"factory": "Flut"}).faiss, 32)
    with pytest.raises(ConfigError, match=r"faiss.factory is 'PQ7'"):
        make_index(config_of(tmp_path, tmp_path, faiss={"factory": "PQ7"}).faiss, 32)
    with pytest.raises(ConfigError, match=r"faiss.search is 'nprobe=4'"):
        make_index(config_of(tmp_path, tmp_path, faiss={"search": "nprobe=4"}).faiss, 32)
    with pytest.raises(ConfigError, match=r"faiss.factory is 'IVF600,Flat'.*training points"):
        build(config_of(write_corpus(tmp_path / "c.jsonl"), tmp_path / "i", faiss={"factory": "IVF600,Flat"}))


def test_partitions_need_an_index_that_can_be_searched_by_rows(tmp_path):
    corpus = write_corpus(tmp_path / "c.jsonl", partition=True)
    with pytest.raises(ConfigError, match=r"faiss.factory is 'HNSW8', .*partitions.*Flat"):
        build(config_of(corpus, tmp_path / "i", faiss={"factory": "HNSW8"}))
    for _ in IndexBuild(config_of(corpus, tmp_path / "i"), corpus_files(corpus)).read():
        pass
    with pytest.raises(ConfigError, match=r"faiss.factory is 'HNSW8', .*partitions.*Flat"):  # of passages read before
        build(config_of(corpus, tmp_path / "i", faiss={"factory": "HNSW8"}))


def test_index_configs_name_what_is_wrong(tmp_path):
    file = tmp_path / "i.yaml"
    file.write_text("corpus: [a.jsonl]\noutput: x\nencoder: null\n")
    with pytest.raises(ConfigError, match="there would be nothing to search"):
        load_job(file, kind="index")
    _, loaded = load_job(file, ["lexical=true", "faiss.factory=SQfp16"], kind="index")
    assert loaded.faiss.factory == "SQfp16"
    with pytest.raises(ConfigError, match=r"faiss.factry is not a setting"):
        load_job(file, ["lexical=true", "faiss.factry=SQfp16"], kind="index")
    with pytest.raises(ConfigError, match=r"corpus"):
        load_job(file, ["lexical=true", "corpus=3"], kind="index")


# --- other people's files


def others_files(folder: Path, count: int = 50) -> tuple[Path, Path, list[Passage]]:
    """What Search-R1's index builder leaves: a flat faiss file, and the jsonl that it read."""
    corpus = write_corpus(folder / "wiki.jsonl", count)
    passages = [
        Passage(id=str(i), title=f"Title {i}", text=json.loads(line)["contents"].partition("\n")[2])
        for i, line in enumerate(corpus.open())
    ]
    index = faiss.index_factory(32, "Flat", faiss.METRIC_INNER_PRODUCT)
    index.add(HashingEncoder(dimension=32).encode_passages(passages))
    faiss.write_index(index, str(folder / "e5_Flat.index"))
    return folder / "e5_Flat.index", corpus, passages


def test_an_index_of_others_opens_as_it_is(tmp_path):
    index, corpus, passages = others_files(tmp_path)
    adopt_index(index, corpus, tmp_path / "i", encoder=HashingEncoder(dimension=32))
    build_index(passages, tmp_path / "ours", encoder=HashingEncoder(dimension=32))
    queries = [Query(text=f"word{i}", num_passages=7) for i in range(30)]
    theirs, ours = (Retriever(folder, checksums=True).search(queries) for folder in (tmp_path / "i", tmp_path / "ours"))
    assert [result.passages for result in theirs] == [result.passages for result in ours]
    assert sum(file.stat().st_size for file in (tmp_path / "i").iterdir()) < 5000
    data = bytearray(index.read_bytes())
    data[-1] ^= 1
    index.write_bytes(data)
    with pytest.raises(ConfigError, match=r"e5_Flat.index was changed since it was built"):
        verify(tmp_path / "i")
    index.write_bytes(data[:-1])
    with pytest.raises(ConfigError, match=r"e5_Flat.index has \d+ bytes, its manifest says"):
        read_manifest(tmp_path / "i")


@pytest.mark.parametrize("end", ["", "\n", "\n\n", "\n \n\t\r\n\n"])
def test_blank_lines_at_the_end_of_a_corpus_are_no_passages(tmp_path, end):
    index, corpus, passages = others_files(tmp_path)
    corpus.write_text(corpus.read_text().rstrip() + end)
    offsets = line_offsets(corpus)
    lines = [corpus.read_bytes()[start:stop] for start, stop in itertools.pairwise(offsets.tolist())]
    assert [str(json.loads(line)["id"]) for line in lines] == [passage.id for passage in passages]
    adopt_index(index, corpus, tmp_path / "i", encoder=HashingEncoder(dimension=32))
    (tmp_path / "empty.jsonl").write_text(end)
    assert line_offsets(tmp_path / "empty.jsonl").tolist() == [0]


def test_files_that_do_not_belong_together_are_not_adopted(tmp_path):
    index, corpus, _ = others_files(tmp_path)
    with pytest.raises(ConfigError, match="has 32 dimensions, but the encoder makes 64"):
        adopt_index(index, corpus, tmp_path / "i", encoder=HashingEncoder(dimension=64))
    with corpus.open("a") as file:
        file.write(json.dumps({"id": 99, "contents": "one more"}))
    with pytest.raises(ConfigError, match=r"holds 50 vectors, but .* has 51 lines"):
        adopt_index(index, corpus, tmp_path / "i", encoder=HashingEncoder(dimension=32))
    with pytest.raises(ConfigError, match=r"not a plain .jsonl file"):
        adopt_index(index, index, tmp_path / "i", encoder=HashingEncoder(dimension=32))
    assert not (tmp_path / "i").exists()


@pytest.mark.parametrize(("first", "step", "fits"), [(0, 1, True), (1, 1, False), (0, 1000, False)])
@pytest.mark.parametrize("kind", ["IDMap,Flat", "IDMap2,Flat", "IVF2,Flat"])
def test_an_index_that_calls_its_vectors_by_other_numbers_than_their_lines_is_not_adopted(
    tmp_path, kind, first, step, fits
):
    _, corpus, passages = others_files(tmp_path)
    vectors = HashingEncoder(dimension=32).encode_passages(passages)
    index = faiss.index_factory(32, kind, faiss.METRIC_INNER_PRODUCT)
    index.train(vectors)
    index.add_with_ids(vectors, np.arange(50, dtype=np.int64) * step + first)
    faiss.write_index(index, str(tmp_path / "numbered.index"))
    files = tmp_path / "numbered.index", corpus, tmp_path / "i"
    if fits:
        adopt_index(*files, encoder=HashingEncoder(dimension=32))
        (found,) = Retriever(tmp_path / "i").search([Query(text=passages[7].text, num_passages=1)])
        assert [passage.id for passage in found.passages] == ["7"]
        return
    with pytest.raises(ConfigError, match=r"calls a vector \d+; expected the numbers of lines, 0 to 49"):
        adopt_index(*files, encoder=HashingEncoder(dimension=32))


def test_an_adopted_corpus_that_a_link_leads_to_keeps_the_name_of_the_link(tmp_path):
    index, corpus, _ = others_files(tmp_path)
    blob, link = tmp_path / "blobs" / "abc123", tmp_path / "snapshot" / "wiki.jsonl"
    blob.parent.mkdir()
    link.parent.mkdir()
    corpus.rename(blob)
    link.symlink_to("../blobs/abc123")  # as the cache of the Hugging Face hub has it
    manifest = adopt_index(index, link, tmp_path / "i", encoder=HashingEncoder(dimension=32))
    assert manifest.passages.files[0] == str(link)
    assert len(list(read_corpus(manifest.passages.files[0]))) == 50


def test_a_line_that_is_no_passage_is_named_when_it_is_found(tmp_path):
    index, corpus, _ = others_files(tmp_path, 120)
    lines = corpus.read_text().splitlines()
    for row in (2, 120):
        wrong = [line if number != row else "[]" for number, line in enumerate(lines, start=1)]
        corpus.write_text("\n".join(wrong))
        with pytest.raises(ConfigError, match=rf"wiki.jsonl, row {row}: not a passage"):
            adopt_index(index, corpus, tmp_path / "i", encoder=HashingEncoder(dimension=32))
            Retriever(tmp_path / "i").search([Query(text="word1", num_passages=120)])
        assert (tmp_path / "i").exists() == (row == 120)


def test_a_line_of_an_adopted_corpus_may_have_a_title_alone(tmp_path):
    index, corpus, _ = others_files(tmp_path, 120)
    lines = corpus.read_text().splitlines()
    lines[110] = json.dumps({"id": "110", "contents": '"A title"\n'})
    corpus.write_text("\n".join(lines))
    adopt_index(index, corpus, tmp_path / "i", encoder=HashingEncoder(dimension=32))
    (found,) = Retriever(tmp_path / "i").search([Query(text="word1", num_passages=120)])
    assert [(each.title, each.text) for each in found.passages if each.id == "110"] == [("A title", "")]


@pytest.mark.parametrize("kind", ["Flat", "HNSW8", "IDMap2,Flat"])
def test_an_index_of_another_encoder_or_another_order_is_not_adopted(tmp_path, kind):
    _, corpus, passages = others_files(tmp_path)
    for name, vectors in (
        ("encoder", np.random.default_rng(1).standard_normal((50, 32), dtype=np.float32)),
        ("order", HashingEncoder(dimension=32).encode_passages(passages[::-1])),
    ):
        index = faiss.index_factory(32, kind, faiss.METRIC_INNER_PRODUCT)
        index.add_with_ids(vectors, np.arange(50)) if "ID" in kind else index.add(vectors)
        faiss.write_index(index, str(tmp_path / name))
        with pytest.raises(ConfigError, match=r"\d+ of 32 vectors are nearer to other lines of the corpus"):
            adopt_index(tmp_path / name, corpus, tmp_path / "i", encoder=HashingEncoder(dimension=32))
    assert not (tmp_path / "i").exists()


@pytest.mark.parametrize(("start", "row", "identity"), [("\ufeff", {"id": "a"}, "a"), ("", {}, "wiki-1")])
def test_an_adopted_corpus_may_have_a_byte_order_mark_and_rows_without_ids(tmp_path, start, row, identity):
    index, corpus, _ = others_files(tmp_path, 1)
    corpus.write_text(start + json.dumps(row | {"contents": "T\nword1"}) + "\n", encoding="utf-8")
    adopt_index(index, corpus, tmp_path / "i", encoder=HashingEncoder(dimension=32))
    (found,) = Retriever(tmp_path / "i").search([Query(text="word1", num_passages=1)])
    assert [passage.id for passage in found.passages] == [identity]
    assert [passage.id for passage in read_corpus(corpus)] == [identity]


def test_texts_tables_and_rows_become_one_index_and_a_second_start_makes_the_same_passages(tmp_path, capsys):
    (tmp_path / "docs" / "rivers").mkdir(parents=True)
    (tmp_path / "docs" / "nile.md").write_text("# Nile\n\nThe Nile ends in Egypt. " + "Its water is brown. " * 9)
    (tmp_path / "docs" / "rivers" / "oder.html").write_text("<h1>Oder</h1><p>The Oder ends in the Baltic Sea.")
    (tmp_path / "facts.csv").write_text("title,body\nRhine,The Rhine ends in the North Sea.\n")
    rows = [{"_id": "w", "title": "Po", "text": "The Po ends in the Adriatic Sea."}]
    (tmp_path / "wiki.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [str(tmp_path / name) for name in ("docs", "facts.csv", "wiki.jsonl")]
    config = IndexConfig(corpus=sources, output=str(tmp_path / "i"), encoder=None, lexical=True, passage_words=20)
    with corpus_of(config) as files:
        before = [Path(file.url).read_bytes() for file in files]
    assert "the first passage is 'nile-0', titled 'nile': 'The Nile ends in Egypt." in capsys.readouterr().out
    with corpus_of(config) as again:
        assert again == files and [Path(file.url).read_bytes() for file in again] == before
        assert sorted(file.name for file in (tmp_path / ".i.corpus").glob("*.parquet")) == ["0.parquet", "1.parquet"]
        build = IndexBuild(config, again)
        assert sum(segment.count for segment in build.read()) == 6
        build.finish(None)
    retriever = Retriever(tmp_path / "i")
    for words, identity in (("Oder ends", "rivers/oder-0"), ("Rhine ends", "facts-1"), ("Po Adriatic", "w")):
        (found,) = retriever.search([Query(text=words, num_passages=1)])
        assert [passage.id for passage in found.passages] == [identity]


def test_bad_rows_of_tables_are_passed_over_up_to_the_limit(tmp_path, capsys):
    (tmp_path / "a.csv").write_text("title,text\nNile,A river.\nOder,\n")
    (tmp_path / "b.csv").write_text("title,text\nPo,\nElbe,Another.\n")
    sources = [str(tmp_path / name) for name in ("a.csv", "b.csv")]
    config = IndexConfig(corpus=sources, output=str(tmp_path / "i"), encoder=None, lexical=True, max_bad_rows=1)
    with pytest.raises(ConfigError, match=r"2 bad rows .*, more than max_bad_rows 1"), corpus_of(config):
        pass
    with corpus_of(config.model_copy(update={"max_bad_rows": 2})) as files:
        assert [passage.title for passage in read_corpus([file.url for file in files])] == ["Nile", "Elbe"]
        build = IndexBuild(config.model_copy(update={"max_bad_rows": 2}), files)
        assert len(list(build.read())) == 1
        assert build.finish(None).passages.skipped == {"missing_field": 2}
    said = capsys.readouterr().out
    assert f"bad rows of tables that are passed over: 2; the first is {sources[0]}, row 2: text is missing" in said


def test_an_id_that_occurs_twice_in_texts_or_tables_is_said_with_their_name(tmp_path):
    (tmp_path / "a.csv").write_text("id,text\n1,A river.\n1,Another.\n")
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "README.md").write_text("A river.")
    for sources, said in ((["a.csv"], r"a.csv, passage 2: passage id '1'"), (["x", "y"], "y, passage 1: .*'README-0'")):
        config = IndexConfig(
            corpus=[str(tmp_path / name) for name in sources], output=str(tmp_path / "i"), encoder=None, lexical=True
        )
        with pytest.raises(ConfigError, match=said), corpus_of(config) as files:
            list(IndexBuild(config, files).read())
        shutil.rmtree(tmp_path / ".i.building", ignore_errors=True)


def test_a_build_that_fails_leaves_no_passages_of_its_texts(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("Ann was born in Paris.")
    config = IndexConfig(corpus=[str(tmp_path / "docs")], output=str(tmp_path / "i"), encoder=None, lexical=True)
    (tmp_path / "docs" / "b.txt").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"b\.txt is not UTF-8"), corpus_of(config):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["docs"]
    (tmp_path / "docs" / "b.txt").unlink()
    with pytest.raises(KeyboardInterrupt), corpus_of(config):
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["docs"]


def killed_build_of_texts(tmp_path: Path) -> IndexConfig:
    """A build of a folder of documents that SIGKILL ended after it had read a segment."""
    (tmp_path / "docs").mkdir()
    for name in ("a", "b"):
        (tmp_path / "docs" / f"{name}.txt").write_text(f"{name} was born in Paris.")
    config = IndexConfig(
        corpus=[str(tmp_path / "docs")], output=str(tmp_path / "i"), encoder=None, lexical=True, segment_passages=1
    )
    with corpus_of(config) as files:
        next(IndexBuild(config, files, texts=texts_of(config)).read())
        shutil.copytree(tmp_path / ".i.corpus", tmp_path / "kept")
    shutil.move(tmp_path / "kept", tmp_path / ".i.corpus")
    return config


def test_texts_that_changed_after_a_kill_are_read_again(tmp_path):
    config = killed_build_of_texts(tmp_path)
    (tmp_path / "docs" / "a.txt").write_text("a was born in Rome.")
    with corpus_of(config) as files:
        build = IndexBuild(config, files, texts=texts_of(config))
        assert build.changed_texts == str(tmp_path / "docs")
        assert sum(segment.count for segment in build.read()) == 2
        build.finish(None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["docs", "i"]
    (found,) = Retriever(tmp_path / "i").search([Query(text="Rome", num_passages=1)])
    assert found.passages[0].text == "a was born in Rome."


def test_texts_that_changed_after_more_was_made_of_them_are_refused_by_their_own_name(tmp_path, monkeypatch):
    config = killed_build_of_texts(tmp_path)
    with monkeypatch.context() as patch, corpus_of(config) as files, pytest.raises(Stop):
        patch.setattr("mempipe.retrieval.build.write_manifest", stop)
        build = IndexBuild(config, files, texts=texts_of(config))
        assert not build.changed_texts and len(list(build.read())) == 2
        build.finish(None)
    del build
    (tmp_path / "docs" / "a.txt").write_text("a was born in Rome.")
    with pytest.raises(ConfigError) as refused, corpus_of(config) as files:
        IndexBuild(config, files, texts=texts_of(config))
    building = tmp_path / ".i.building"
    assert str(refused.value) == (
        f"{building} is an unfinished build of another corpus ({tmp_path / 'docs'} has changed); remove {building}, "
        "and build the index again, or bring the corpus back"
    )


def test_the_next_build_in_a_folder_removes_the_passages_that_a_killed_one_left(tmp_path):
    config = killed_build_of_texts(tmp_path)
    mine = tmp_path / ".mine.corpus"
    mine.mkdir()
    for name in ("lock", "0.parquet", "notes.txt"):
        (mine / name).touch()
    at_work = config.model_copy(update={"output": str(tmp_path / "k")})
    with corpus_of(at_work), corpus_of(config.model_copy(update={"output": str(tmp_path / "j")})):
        assert sorted(path.name for path in tmp_path.glob(".*.corpus")) == [".j.corpus", ".k.corpus", ".mine.corpus"]


def test_a_second_build_of_texts_leaves_the_passages_of_the_first(tmp_path):
    (tmp_path / "a.txt").write_text("Ann was born in Paris.")
    config = IndexConfig(corpus=[str(tmp_path / "a.txt")], output=str(tmp_path / "i"), encoder=None, lexical=True)
    with corpus_of(config) as files:
        with pytest.raises(ConfigError, match="which another process is building"), corpus_of(config):
            pass
        assert Path(files[0].url).exists()
    with corpus_of(config) as again:
        assert again == files
