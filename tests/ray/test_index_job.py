"""`mempipe index build` as a user runs it:
on Ray Data, killed in the middle, refused by name; and the index behind actors.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from latin1 import latin1_variables

from mempipe.actors.cluster import connected
from mempipe.actors.handles import start_actor
from mempipe.actors.launch import MAX_CALLS
from mempipe.actors.pools import RetrieverPool
from mempipe.actors.retriever import RetrieverActor, ShardActor
from mempipe.beacons import VARIABLE
from mempipe.data.corpus import corpus_files
from mempipe.retrieval.build import IndexBuild, encode_segment
from mempipe.retrieval.config import IndexConfig, RetrievalConfig
from mempipe.retrieval.encoders import make_encoder
from mempipe.retrieval.retriever import Query, Retriever
from mempipe.settings import ConfigError
from mempipe.streams.segments import stream_segments
from tools.processes import Marked, Running, run

NUM_PASSAGES = 10_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of two files, and the index that this process builds of it without Ray."""
    folder = tmp_path_factory.mktemp("index")
    rng = random.Random(0)
    words = [f"word{i}" for i in range(2000)]
    for name in ("a", "b"):
        rows = (
            {"id": f"{name}{i}", "contents": f'"Title {i}"\n{" ".join(rng.choices(words, k=60))}'}
            for i in range(NUM_PASSAGES // 2)
        )
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = IndexConfig.model_validate(settings_of(folder, "undisturbed"))
    build = IndexBuild(config, corpus_files(config.corpus))
    encoder = make_encoder(config.encoder or {})
    for segment in build.read():
        encode_segment(build.folder, segment.number, encoder)
    build.finish(encoder)
    return folder


def settings_of(folder: Path, output: str) -> dict[str, Any]:
    return {
        "corpus": [str(folder / "a.jsonl"), str(folder / "b.jsonl")],
        "output": str(folder / output),
        "encoder": {"kind": "hashing", "dimension": 256},
        "lexical": True,
        "segment_passages": 500,
        "faiss": {"shard_passages": 3_500},
    }


def command_of(folder: Path, output: str, *overrides: str) -> list[str]:
    file = folder / f"{output}.yaml"
    file.write_text(yaml.safe_dump(settings_of(folder, output)))
    return [sys.executable, "-m", "mempipe.cli", "index", "build", str(file), *overrides]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def test_a_build_that_is_killed_while_it_encodes_goes_on_and_ends_with_the_same_bytes(folder, tmp_path):
    beacons = tmp_path / "beacons"
    beacons.mkdir()
    (beacons / "hold-index.encode").write_text(json.dumps({"segment": 5}))  # which stays undone
    marked = Marked({VARIABLE: str(beacons)})
    encoded = folder / ".killed.building" / "unfinished" / "encoded"
    try:
        build = Running(command_of(folder, "killed"), marked=marked, cwd=folder)
        build.wait_until(lambda: encoded.exists() and len(list(encoded.iterdir())) >= 3, every_s=0.01)
        build.kill()
        assert marked.survivors(named="Segment") == []  # Ray's own agents are not ours to judge
        marked.end()
        done = len(list(encoded.glob("*.f32")))
        assert 3 <= done < NUM_PASSAGES / 500
        (beacons / "hold-index.encode").unlink()
        again = run(command_of(folder, "killed"), marked=marked, cwd=folder)
    finally:
        marked.end()
    assert again.returncode == 0, again.stdout + again.stderr
    assert "continuing with" in again.stdout and f"passages: {NUM_PASSAGES}" in again.stdout
    assert f"{folder / 'killed'}: {NUM_PASSAGES:,} passages" in again.stdout and "3 shards" in again.stdout
    assert contents(folder / "killed") == contents(folder / "undisturbed")


@pytest.fixture(scope="module")
def bad_row(folder: Path) -> str:
    """Writes a corpus with a bad row to `folder`; returns what is to be said of it."""
    lines = (folder / "a.jsonl").read_text().splitlines()[:1000]
    (folder / "bad.jsonl").write_text("\n".join([*lines, '{"id": "x"}', ""]))
    return (
        f"{folder / 'bad.jsonl'}, line 1001: text is missing; a passage needs `contents`, or `title` and `text` (or "
        "content, passage, body, paragraph_text, page_content)"
    )


@pytest.mark.jobs
def test_a_bad_row_ends_the_job_with_its_file_and_line_and_no_trace(folder, bad_row):
    command = command_of(folder, "refused", f"corpus=[{folder / 'bad.jsonl'}]")
    done = run(command, marked=Marked(), cwd=folder)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [f"error: {bad_row}"]


@pytest.fixture(scope="module")
def on_ray() -> Iterator[None]:
    with connected("", name="shards"):
        yield


def test_a_bad_row_is_a_mistake_with_its_file_and_line_behind_ray_too(folder, bad_row, on_ray):
    corpus = folder / "bad.jsonl"
    config = IndexConfig.model_validate({**settings_of(folder, "bad"), "corpus": [str(corpus)]})
    files = corpus_files(corpus)
    with pytest.raises(ConfigError) as raised:
        list(stream_segments(config, files, folder=IndexBuild(config, files).folder))
    assert str(raised.value) == bad_row


def test_shards_on_actors_answer_as_the_whole_index_does(folder, on_ray):
    config = RetrievalConfig(index=str(folder / "undisturbed"), shard_actors=3, num_replicas=2)
    whole = Retriever(config.index)
    rng = random.Random(1)
    queries = [
        Query(text=" ".join(f"word{rng.randrange(2000)}" for _ in range(4)), num_passages=1 + i % 9) for i in range(200)
    ]
    shards = [
        start_actor(ShardActor, {"num_cpus": 0, "max_restarts": -1, "max_concurrency": 8}, config, i) for i in range(3)
    ]
    sizes = ray.get([shard.shape.remote() for shard in shards])
    assert [count for count, _ in sizes] == [3_500, 3_500, 3_000]
    options = {"num_cpus": 0, "max_concurrency": MAX_CALLS}
    replicas = [start_actor(RetrieverActor, options, config, shards) for _ in range(2)]

    async def ask_all() -> list[Any]:
        pool = RetrieverPool(replicas, config=config)
        asked = [
            asyncio.create_task(pool.search(q.text, num_passages=q.num_passages, partition="")) for q in queries[:100]
        ]
        await asked[0]
        ray.kill(shards[1], no_restart=False)
        asked += [
            asyncio.create_task(pool.search(q.text, num_passages=q.num_passages, partition="")) for q in queries[100:]
        ]
        return await asyncio.gather(*asked)

    found = asyncio.run(ask_all())
    assert found == whole.search(queries)


def test_a_job_speaks_utf8_whatever_the_locale_is(tmp_path):
    variables = latin1_variables(tmp_path)
    (tmp_path / "one.jsonl").write_text('{"id": "1", "title": "鲁迅", "text": "鲁迅原名周树人。"}\n')
    command = [sys.executable, "-m", "jobs.build_index", "one.jsonl", "output=index"]
    done = run(command, marked=Marked(variables), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "鲁迅" in done.stdout
