"""Damages files of every kind that mempipe keeps or reads, in many small ways, and opens them.

Each damage must end in one of three ways: it is refused in a sentence that names the file, it changes nothing, or,
where the file carries no checksum, it is another value. A traceback is a miss, and so is another value beside a
checksum.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mempipe.settings import ConfigError

REFUSED, HARMLESS, ANOTHER_VALUE, TRACEBACK = "refused", "harmless", "another value", "traceback"
NUM_PASSAGES = 60
ENCODER = {"kind": "hashing", "dimension": 16}


@dataclass(frozen=True, slots=True)
class Specimen:
    """A file, what opens it and returns what it holds, and whether a checksum covers its values."""

    file: Path
    open: Callable[[], Any]
    has_checksum: bool = True
    is_config: bool = False
    """Whether a refusal may name a setting in the place of the file."""


@dataclass(frozen=True, slots=True)
class Outcome:
    kind: str
    damage: str
    """Which file was damaged, and how."""
    said: str

    @property
    def is_miss(self) -> bool:
        return self.kind == TRACEBACK


def check_mutations(count: int, *, seed: int) -> str:
    """Makes `count` damages, drawn by the seed, each to one file that is whole again afterwards; returns a summary.

    Raises AssertionError with every miss.
    """
    with tempfile.TemporaryDirectory(prefix="mempipe-mutations-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # damaged models make the libraries talk
        outcomes = list(mutations(specimens(Path(folder)), count, seed=seed))
    counts = Counter(outcome.kind for outcome in outcomes)
    misses = [f"{outcome.damage}: {outcome.said}" for outcome in outcomes if outcome.is_miss]
    assert not misses, "\n".join([f"{len(misses)} of {count} mutations (seed {seed}) were missed:", *misses])
    return ", ".join(f"{counts[kind]} {kind}" for kind in (REFUSED, HARMLESS, ANOTHER_VALUE))


def mutations(listed: Sequence[Specimen], count: int, *, seed: int) -> Iterator[Outcome]:
    """Yields what became of `count` damages; every file has its turn before one has its second."""
    draw = random.Random(seed)
    whole = {specimen: specimen.open() for specimen in listed}
    turns: list[Specimen] = []
    for _ in range(count):
        turns = turns or draw.sample(listed, len(listed))
        specimen = turns.pop()
        content = specimen.file.read_bytes()
        damage = f"{specimen.file.parent.name}/{specimen.file.name}: {mutate(specimen.file, draw)}"
        yield _outcome(specimen, damage, whole[specimen])
        specimen.file.write_bytes(content)


def mutate(path: Path, rng: random.Random) -> str:
    """Damages the file in one small way; says how."""
    content = path.read_bytes()
    ways = [_truncate, _flip, _zero, _empty, _insert, _swap]
    damaged, said = rng.choices(ways, weights=[2, 4, 2, 1, 1, 3])[0](content, rng)
    path.write_bytes(damaged)
    return said


def _truncate(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    size = rng.randrange(len(content)) if content else 0
    return content[:size], f"cut off after {size} of {len(content)} bytes"


def _flip(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    if not content:
        return b"\x01", "one byte where there was none"
    place, bit = rng.randrange(len(content)), rng.randrange(8)
    return content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :], f"bit {bit} of byte {place}"


def _zero(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    first = rng.randrange(len(content)) if content else 0
    size = min(rng.choice([1, 16, 512, 4096]), len(content) - first)
    return content[:first] + bytes(size) + content[first + size :], f"{size} zeros from byte {first}"


def _empty(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    return b"", "empty"


def _insert(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    place, added = rng.randrange(len(content) + 1), rng.randbytes(rng.choice([1, 7, 100]))
    return content[:place] + added + content[place:], f"{len(added)} bytes put in at byte {place}"


def _swap(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Puts a value of another type in the place of one value of a JSON or YAML file; flips a bit of others."""
    try:
        values = json.loads(content)
    except ValueError:
        try:
            values = yaml.safe_load(content)
        except (ValueError, yaml.YAMLError):
            return _flip(content, rng)
    if not isinstance(values, dict | list):
        return _flip(content, rng)
    places = list(_places(values))
    if not places or rng.random() < 0.1:
        other = rng.choice([[], {}, "text", 3, None])
        return json.dumps(other).encode(), f"all of it is {other!r}"
    holder, key = rng.choice(places)
    other = rng.choice([each for each in ([], {}, "text", 3, None, -1.5) if type(each) is not type(holder[key])])
    holder[key] = other
    return json.dumps(values).encode(), f"{key!r} is {other!r}"


def _places(values: Any) -> Iterator[tuple[Any, Any]]:
    for key in values if isinstance(values, dict) else range(len(values)):
        yield values, key
        if isinstance(values[key], dict | list):
            yield from _places(values[key])


def _outcome(specimen: Specimen, damage: str, whole: Any) -> Outcome:
    from mempipe.engines.checkpoint import CheckpointError

    try:
        found = specimen.open()
    except (ConfigError, CheckpointError) as error:
        if "\n" in str(error).strip() or not _is_named(specimen, str(error)):
            return Outcome(TRACEBACK, damage, f"refused, but not in a sentence that names the file: {error}")
        return Outcome(REFUSED, damage, str(error))
    except Exception as error:
        return Outcome(TRACEBACK, damage, f"{type(error).__name__}: {error}")
    if found == whole:
        return Outcome(HARMLESS, damage, "")
    if specimen.has_checksum:
        return Outcome(TRACEBACK, damage, "accepted, and its value is another one")
    return Outcome(ANOTHER_VALUE, damage, "")


def _is_named(specimen: Specimen, message: str) -> bool:
    """A message names the file, or a folder around it that has to be made again."""
    file = specimen.file
    return specimen.is_config or any(name in message for name in (file.name, file.parent.name, file.parents[1].name))


# --- one small file of every kind


def specimens(folder: Path) -> list[Specimen]:
    """Makes the files in `folder`."""
    makers = (_index, _adopted, _unfinished_build, _tables, _texts, _model, _checkpoint, _run, _made)
    found: list[Specimen] = []
    for make in makers:
        own = folder / make.__name__.removeprefix("_")
        own.mkdir()
        found += make(own)
    return found


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def _passages(count: int = NUM_PASSAGES) -> list[Any]:
    from mempipe.types import Passage

    return [Passage(id=f"p{i}", title=f"Title {i}", text=f"words number{i} and word{i % 7}") for i in range(count)]


def _rows(count: int = NUM_PASSAGES) -> list[dict[str, Any]]:
    return [{"id": each.id, "contents": f'"{each.title}"\n{each.text}'} for each in _passages(count)]


def _answers(index: Path) -> Any:
    from mempipe.retrieval.retriever import Query, Retriever

    retriever = Retriever(index)
    queries = [Query(text=f"number{i} word{i % 7}", num_passages=5) for i in (3, 20, 41)]
    passages = [retriever.passage(row) for row in range(retriever.num_passages)]
    return passages, [result.passages for result in retriever.search(queries)]


def _index(folder: Path) -> list[Specimen]:
    from mempipe.retrieval.build import build_index
    from mempipe.retrieval.encoders import HashingEncoder

    build_index(_passages(), folder / "index", encoder=HashingEncoder(dimension=16), lexical=True, segment_passages=30)
    return [Specimen(file, lambda: _answers(folder / "index")) for file in _files(folder)]


def _adopted(folder: Path) -> list[Specimen]:
    import faiss

    from mempipe.retrieval.adopt import adopt_index
    from mempipe.retrieval.encoders import HashingEncoder

    encoder = HashingEncoder(dimension=16)
    (folder / "wiki.jsonl").write_text("".join(json.dumps(row) + "\n" for row in _rows()))
    index = faiss.index_factory(16, "Flat", faiss.METRIC_INNER_PRODUCT)
    index.add(encoder.encode_passages(_passages()))  # pyrefly: ignore
    faiss.write_index(index, str(folder / "flat.faiss"))
    adopt_index(folder / "flat.faiss", folder / "wiki.jsonl", folder / "index", encoder=encoder)
    return [Specimen(file, lambda: _answers(folder / "index")) for file in _files(folder)]


def _unfinished_build(folder: Path) -> list[Specimen]:
    from mempipe.data.corpus import corpus_files
    from mempipe.retrieval.build import IndexBuild, encode_segment
    from mempipe.retrieval.config import IndexConfig
    from mempipe.retrieval.encoders import HashingEncoder

    corpus, encoder = folder / "corpus.jsonl", HashingEncoder(dimension=16)
    corpus.write_text("".join(json.dumps(row) + "\n" for row in _rows()))

    def build_in(place: Path) -> IndexBuild:
        values = {"corpus": [str(corpus)], "output": str(place / "i"), "encoder": ENCODER, "segment_passages": 20}
        return IndexBuild(IndexConfig.model_validate(values), corpus_files(str(corpus)))

    begun = build_in(folder)
    for segment in begun.read():
        encode_segment(begun.folder, segment.number, encoder)
        if segment.number == 1:
            break

    def go_on() -> Any:
        with tempfile.TemporaryDirectory(prefix="go-on-", dir=folder) as place:
            shutil.copytree(folder / ".i.building", Path(place) / ".i.building")
            build = build_in(Path(place))
            for segment in build.read():
                if build.needs_vectors(segment):
                    encode_segment(build.folder, segment.number, encoder)
            return build.finish(encoder)

    locks = {"lock"}
    return [Specimen(file, go_on) for file in _files(folder) if file.name not in locks and file != corpus]


def _groups() -> list[Any]:
    from mempipe.types import Context, EndReason, Group, Question, Trajectory

    def context(number: int) -> Context:
        return Context(
            index=0,
            token_ids=[number, 2, 3, 4],
            loss_mask=[0, 0, 1, 1],
            logprobs=[0.0, 0.0, -0.25, -0.5],
            policy_versions=[-1, -1, 0, 0],
            num_prompt_tokens=2,
            num_question_tokens=1,
            num_memory_tokens=0,
            searches=[],
        )

    return [
        Group(
            id=f"after/q{i}/0",
            question=Question(id=f"q{i}", text=f"Which river is {i}?", golden_answers=["Nile"]),
            trajectories=[
                Trajectory(
                    id=f"after/q{i}/0-0",
                    group_id=f"after/q{i}/0",
                    member=0,
                    contexts=[context(i)],
                    end_reason=EndReason.ANSWERED,
                    answer="Nile",
                )
            ],
        )
        for i in range(20)
    ]


def _tables(folder: Path) -> list[Specimen]:
    from mempipe.data.corpus import read_corpus
    from mempipe.data.plain_text import write_corpus
    from mempipe.data.qa import read_questions, write_questions
    from mempipe.data.trajectories import read_made_of, read_trajectories, write_trajectories
    from mempipe.evaluation.results import ResultFolder, read_groups, read_results, result_row

    trajectories, questions, results = folder / "trajectories.parquet", folder / "train.parquet", folder / "results"
    groups = _groups()
    write_trajectories(trajectories, groups, made_of={"step": 3})
    write_questions(questions, [group.question for group in groups])
    (folder / "book.txt").write_text("\n\n".join(each.text for each in _passages()))
    corpus = write_corpus(folder / "book.txt", folder / "corpus.parquet")
    evaluated = ResultFolder(results, {"run": {}, "set": "nq"})
    evaluated.open()
    evaluated.append(groups, [result_row(group, growing=False, prompt_hash="p") for group in groups])
    evaluated.finish()
    return [
        Specimen(trajectories, lambda: (read_trajectories(trajectories), read_made_of(trajectories))),
        Specimen(questions, lambda: read_questions(questions)),
        Specimen(corpus, lambda: list(read_corpus(corpus))),
        Specimen(results / "part-00000.parquet", lambda: (read_results(results), read_groups(results))),
        Specimen(
            results / "settings.json",
            lambda: (ResultFolder(results, {"run": {}, "set": "nq"}).settings, len(read_results(results))),
            has_checksum=False,
        ),
    ]


def _texts(folder: Path) -> list[Specimen]:
    """Files of other people: questions and passages as data sets have them, and a config."""
    from mempipe.data.corpus import read_corpus
    from mempipe.data.qa import read_questions
    from mempipe.loader import load_config

    asked = [
        {"id": f"q{i}", "question": f"Which river is {i}?", "golden_answers": ["Nile", "the Nile"]} for i in range(20)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in asked)
    passages = "".join(json.dumps(row) + "\n" for row in _rows()).encode()
    contents = {
        "questions.jsonl": lines.encode(),
        "questions.json": json.dumps(asked).encode(),
        "corpus.jsonl": passages,
        "corpus.jsonl.gz": gzip.compress(passages, mtime=0),
        "run.yaml": b"seed: 3\nagent:\n  name: memagent\noptimizer:\n  lr: 0.001\nnum_steps: 7\n",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    opens: dict[str, Callable[[Path], Any]] = {
        "questions": read_questions,
        "corpus": lambda file: list(read_corpus(file)),
        "run": lambda file: load_config(file).model_dump(),
    }
    return [
        Specimen(
            file,
            lambda file=file: opens[file.name.partition(".")[0]](file),
            has_checksum=False,
            is_config=file.suffix == ".yaml",
        )
        for file in _files(folder)
    ]


def _model(folder: Path) -> list[Specimen]:
    from mempipe.engines.tiny import build_model, build_tokenizer
    from mempipe.storage.checksums import write_checksums

    checked, older = folder / "model", folder / "without_checksums"
    build_tokenizer(checked)
    build_model(checked, seed=0, num_layers=2)
    shutil.copytree(checked, older)
    write_checksums(checked)
    return [
        *(Specimen(file, lambda: _weights(checked)) for file in _files(checked)),
        *(Specimen(file, lambda: _weights(older), has_checksum=False) for file in _files(older)),
    ]


def _weights(folder: Path) -> Any:
    from transformers.utils import logging

    from mempipe.engines.config import ModelConfig
    from mempipe.engines.model import load_policy
    from mempipe.engines.tokenizer import load_tokenizer

    logging.set_verbosity(logging.CRITICAL)
    tokenizer = load_tokenizer(str(folder))
    policy = load_policy(ModelConfig(path=str(folder)))
    hashes = {
        name: hashlib.sha256(weight.detach().numpy().tobytes()).hexdigest()
        for name, weight in policy.named_parameters()
    }
    return hashes, tokenizer.encode_text("Which river is 3?"), sorted(tokenizer.stop_token_ids)


def _checkpoint(folder: Path) -> list[Specimen]:
    import torch

    from mempipe.engines.checkpoint import Position, TrainingState, read_state
    from mempipe.engines.sharded_checkpoint import load_tensors, save_checkpoint

    state = TrainingState(num_updates_done=2, ranks="1 cpu", position=Position(step=2, trained=[["q1"], ["q2"]]))
    path = save_checkpoint(folder, 2, tensors={"model/a": torch.arange(12.0).reshape(3, 4)}, state=state, keep=2)

    def open_checkpoint() -> Any:
        found, tensor = read_state(path), torch.zeros(3, 4)
        load_tensors(path, {"model/a": tensor})
        return found, tensor.tolist()

    return [Specimen(file, open_checkpoint) for file in _files(path)]


def _run(folder: Path) -> list[Specimen]:
    """A run's folder: its state, and its settings and its metrics, which carry no checksum."""
    from mempipe.loader import parse_config
    from mempipe.reports.training_data import read_report_data
    from mempipe.runs import Run, read_state, saved_state
    from mempipe.tracking.metrics_file import read_metrics

    config = parse_config({"output": str(folder), "name": "run"})
    run = Run(config)
    state = {"num_steps": 3, "finished": False, "best": {"step": 2, "metric": "em", "value": 0.5}}
    run.update(**state)
    metrics = run.folder / "metrics.jsonl"
    metrics.write_text("".join(json.dumps({"step": i, "time_s": 2.0 * i, "loss": 1 / i}) + "\n" for i in range(1, 9)))
    return [
        Specimen(run.folder / "state.json", lambda: {name: read_state(run.folder).get(name) for name in state}),
        Specimen(run.folder / "config.yaml", lambda: saved_state(config, resume="always"), has_checksum=False),
        Specimen(run.folder / "config.yaml", lambda: read_report_data(run.folder).settings, has_checksum=False),
        Specimen(metrics, lambda: read_metrics(metrics), has_checksum=False),
    ]


def _made(folder: Path) -> list[Specimen]:
    """What the builds of questions and documents keep about themselves."""
    from mempipe.masking.config import ClozeConfig
    from mempipe.masking.documents import DocumentsConfig
    from mempipe.storage.json_files import write_object
    from pipelines import build_cloze, build_memtrain

    questions, facts = ClozeConfig(seed=3), {"corpus": "wiki.jsonl", "finder": "rules"}
    documents, settings = DocumentsConfig(index="index", tokenizer="tiny"), folder / build_memtrain.SETTINGS
    made_with = questions.model_dump(mode="json") | facts
    write_object(folder / build_cloze.MANIFEST, {"settings": made_with, "counts": {"questions": 12}})
    summary = {"num_documents": 3, "num_held_out": 1, "ranges": {"tokens": [1, 2, 3]}, "kinds": {"person": 3}}
    write_object(folder / build_memtrain.SUMMARY, summary | {"rejected": {}})
    build_memtrain._check_same(settings, documents, finder="rules")
    return [
        Specimen(folder / build_cloze.MANIFEST, lambda: build_cloze._finished(folder, questions, facts)),
        Specimen(folder / build_memtrain.SUMMARY, lambda: build_memtrain.describe(folder)),
        Specimen(settings, lambda: build_memtrain._check_same(settings, documents, finder="rules")),
    ]
