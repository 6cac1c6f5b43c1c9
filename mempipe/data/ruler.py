"""RULER-HQA: HotpotQA questions whose paragraphs are hidden among a chosen number of others (MemAgent, arXiv
2507.02259).

A document is a title, a newline and the paragraph's sentences; a context is documents under "Document i:" headers. Each
question draws the other documents from all paragraphs of the file with its own generator, so that it depends on no
other question, on no order and on no process. It draws the positions too. Published files have the same positions in
every question; `peer_positions` repeats them.

A file has one row per question: context, input, answers, num_docs, index, id, evidence_depths (positions of the needed
documents, 0 to 1). Above 10,000 documents `context` is a list of document IDs (rows of `documents.arrow` in the same
folder); the text is inserted when the file is read.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import pyarrow as pa

from mempipe.data.input_files import ROWS, input_files
from mempipe.data.rows import BadRow, BadRows, parquet_batches, read_rows
from mempipe.rl.rewards import normalize_answer
from mempipe.settings import ConfigError
from mempipe.storage.files import whole_file, write_text
from mempipe.storage.parquet import parquet_writer
from mempipe.text import join_sentences, replace_surrogates

MAX_JOINED_DOCS = 10_000
DOCUMENTS_FILE = "documents.arrow"
MANIFEST_FILE = "ruler.json"
_PEER_SEED = 4
_QUESTIONS_AT_ONCE = 64
_ROWS_PER_GROUP = 8
_DEPTH_BINS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceQuestion:
    """A HotpotQA question with its own documents as (title, text).

    `needed` are the places of the documents that support its answer.
    """

    id: str
    text: str
    answers: list[str]
    documents: list[tuple[str, str]]
    needed: list[int]


class DocumentPool:
    """Holds all different paragraphs of a file, sorted, so that their numbers depend on the file alone."""

    def __init__(self, questions: Iterable[SourceQuestion]) -> None:
        documents = sorted({document for question in questions for document in question.documents})
        self.texts = [text for _, text in documents]
        self._number = {document: number for number, document in enumerate(documents)}
        self._of_title: defaultdict[str, list[int]] = defaultdict(list)
        for number, (title, _) in enumerate(documents):
            self._of_title[title].append(number)

    def arrange(
        self, question: SourceQuestion, *, num_docs: int, seed: int, peer_positions: bool = False
    ) -> tuple[list[int], list[float]]:
        """Returns the IDs of `num_docs` documents in their order, and the positions of the needed ones: 0 is the first
        document, 1 the last.

        Paragraphs that share a title with one of the question's own are not among the others. Raises ConfigError when
        there are too few others.
        """
        own = [self._number[document] for document in question.documents]
        taken = {number for title, _ in question.documents for number in self._of_title[title]}
        num_others = num_docs - len(own)
        if num_others < 0:
            raise ConfigError(
                f"--num-docs is {num_docs}, but question {question.id} brings {len(own)} documents itself"
            )
        if num_others > len(self.texts) - len(taken):
            raise ConfigError(
                f"--num-docs is {num_docs}, but the file has only {len(self.texts) - len(taken)} paragraphs of "
                "other titles than "
                f"those of question {question.id}"
            )
        generator = random.Random(f"{seed}:{num_docs}:{question.id}")
        drawn = generator.sample(range(len(self.texts)), num_others + len(taken))
        others = [number for number in drawn if number not in taken][:num_others]
        order = peer_order(num_docs) if peer_positions else generator.sample(range(num_docs), num_docs)
        documents = [[*own, *others][place] for place in order]
        depths = [order.index(place) / max(1, num_docs - 1) for place in question.needed]
        return documents, depths


def peer_order(num_docs: int) -> list[int]:
    """Returns the order of published files, which shuffle every list with the same fresh generator, the question's own
    documents first.
    """
    order = list(range(num_docs))
    random.Random(_PEER_SEED).shuffle(order)
    return order


def join_documents(texts: Iterable[str]) -> str:
    """Returns the context that holds these documents."""
    return "\n\n".join(f"Document {number}:\n{text}" for number, text in enumerate(texts, start=1))


def read_sources(path: str | Path) -> list[SourceQuestion]:
    """Reads the questions of a HotpotQA distractor file (the published json, or FlashRAG's jsonl with `metadata`), each
    text once.

    Raises ConfigError with row and field for a question that does not hold its own documents.
    """
    bad, questions = BadRows(), {}
    for file in input_files(path, suffixes=ROWS):
        for place, row in read_rows(file, bad=bad):
            try:
                question = _source(row)
            except BadRow as fault:
                bad.add(place, str(fault), kind=fault.kind)
            else:
                questions.setdefault(normalize_answer(question.text), question)
    if not questions:
        raise ConfigError(f"{path} holds no question")
    return list(questions.values())


def write_ruler(
    sources: Sequence[SourceQuestion],
    folder: str | Path,
    *,
    num_docs: Sequence[int],
    splits: Mapping[str, int],
    seed: int,
    peer_positions: bool = False,
    file_format: Literal["parquet", "json"] = "parquet",
    exclude: Collection[str] = (),
    are_known: Callable[[list[SourceQuestion]], list[bool]] | None = None,
) -> dict[str, Any]:
    """Writes `SPLIT_NUMDOCS.FORMAT` for every split and length, and `ruler.json`, which describes the files. Returns
    the content of `ruler.json`.

    Questions are drawn once, so all lengths of a split ask the same. No question is in two splits, and none has the
    normalised text of one in `exclude`. Questions that `are_known` calls known (a model answers them without the
    documents) are skipped. Raises ConfigError when too few are left.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    left_out: Counter[str] = Counter()
    chosen = _choose(
        sources, total=sum(splits.values()), seed=seed, exclude=exclude, are_known=are_known, left_out=left_out
    )
    pool = DocumentPool(sources)
    for count in num_docs:  # what cannot work is refused before the first file
        for question in chosen:
            pool.arrange(question, num_docs=count, seed=seed, peer_positions=peer_positions)
    if max(num_docs) > MAX_JOINED_DOCS:
        _write_documents(folder / DOCUMENTS_FILE, pool.texts)
    files = []
    remaining = iter(chosen)
    for split, size in splits.items():
        questions = list(islice(remaining, size))
        for count in num_docs:
            path = folder / f"{split}_{count}.{file_format}"
            rows = (
                _row(q, pool, index=i, num_docs=count, seed=seed, peer_positions=peer_positions)
                for i, q in enumerate(questions)
            )
            depths = (_write_parquet if file_format == "parquet" else _write_json)(path, rows)
            files.append({"file": path.name, "num_docs": count, "num_questions": size, **_describe_depths(depths)})
    manifest = {
        "seed": seed,
        "positions": "published" if peer_positions else "drawn per question",
        "num_paragraphs": len(pool.texts),
        "paragraphs_sha256": hashlib.sha256("\0".join(pool.texts).encode()).hexdigest(),
        "left_out": dict(left_out),
        "files": files,
    }
    write_text(folder / MANIFEST_FILE, json.dumps(manifest, indent=1) + "\n")
    return manifest


def expand_context(numbers: Sequence[Any], *, folder: str | Path) -> str:
    """Returns the context that a list of document numbers stands for.

    Raises ConfigError when the folder does not hold those documents.
    """
    path = Path(folder) / DOCUMENTS_FILE
    if not path.is_file():
        raise ConfigError(
            f"context is a list of document numbers, but {path}, which would hold the documents, does not exist"
        )
    texts = _document_column(path, path.stat().st_mtime_ns)
    wrong = [n for n in numbers if not isinstance(n, int) or isinstance(n, bool) or not 0 <= n < len(texts)]
    if wrong or not numbers:
        raise ConfigError(
            f"context names document {wrong[0] if wrong else '(none)'}; expected numbers from 0 to "
            f"{len(texts) - 1} of {path}"
        )
    return join_documents(texts.take(pa.array(numbers, pa.int64())).to_pylist())


def read_depths(path: str | Path) -> dict[str, list[float]]:
    """Returns the depths of the needed documents by question id (as `read_questions` gives it); nothing for a file that
    does not record them.
    """
    depths = {}
    for file in input_files(path, suffixes=ROWS):
        if file.is_parquet:
            batches = parquet_batches(file, size=_ROWS_PER_GROUP, columns=["index", "evidence_depths"])
            rows = [row for _, batch in batches for row in batch.to_pylist()]
        else:
            rows = [row for _, row in read_rows(file)]
        stem = file.name.partition(".")[0]
        depths |= {
            f"{stem}-{row['index']}": list(row["evidence_depths"])
            for row in rows
            if row.get("evidence_depths") and "index" in row
        }
    return depths


def _choose(
    sources: Sequence[SourceQuestion],
    *,
    total: int,
    seed: int,
    exclude: Collection[str],
    are_known: Callable[[list[SourceQuestion]], list[bool]] | None,
    left_out: Counter[str],
) -> list[SourceQuestion]:
    excluded = set(map(normalize_answer, exclude))
    order = random.Random(f"{seed}:questions").sample(list(sources), len(sources))
    candidates = iter([question for question in order if normalize_answer(question.text) not in excluded])
    left_out["excluded"] = sum(normalize_answer(question.text) in excluded for question in order)
    left_out["known"] = 0
    chosen: list[SourceQuestion] = []
    while len(chosen) < total and (batch := list(islice(candidates, _QUESTIONS_AT_ONCE))):
        known = are_known(batch) if are_known is not None else [False] * len(batch)
        left_out["known"] += sum(known)
        chosen += [question for question, is_known in zip(batch, known, strict=True) if not is_known]
    if len(chosen) < total:
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
        raise ConfigError(
            f"{total} questions are wanted, but only {len(chosen)} of {len(order)} are left ({reasons}); lower "
            "--num-questions, or the counts of --split"
        )
    return chosen[:total]


def _row(
    question: SourceQuestion, pool: DocumentPool, *, index: int, num_docs: int, seed: int, peer_positions: bool
) -> dict[str, Any]:
    numbers, depths = pool.arrange(question, num_docs=num_docs, seed=seed, peer_positions=peer_positions)
    return {
        "context": numbers if num_docs > MAX_JOINED_DOCS else join_documents(pool.texts[number] for number in numbers),
        "input": question.text,
        "answers": question.answers,
        "num_docs": num_docs,
        "index": index,
        "id": question.id,
        "evidence_depths": depths,
    }


def _schema(*, joined: bool) -> pa.Schema:
    return pa.schema(
        [
            ("context", pa.large_string() if joined else pa.list_(pa.int64())),
            ("input", pa.string()),
            ("answers", pa.list_(pa.string())),
            ("num_docs", pa.int64()),
            ("index", pa.int64()),
            ("id", pa.string()),
            ("evidence_depths", pa.list_(pa.float64())),
        ]
    )


def _write_parquet(path: Path, rows: Iterator[dict[str, Any]]) -> list[float]:
    depths: list[float] = []
    first = list(islice(rows, _ROWS_PER_GROUP))
    schema = _schema(joined=not first or isinstance(first[0]["context"], str))
    with parquet_writer(path, schema, compression="zstd") as writer:
        while first:
            writer.write_table(pa.Table.from_pylist(first, schema=schema))
            depths += [depth for row in first for depth in row["evidence_depths"]]
            first = list(islice(rows, _ROWS_PER_GROUP))
    return depths


def _write_json(path: Path, rows: Iterator[dict[str, Any]]) -> list[float]:
    depths: list[float] = []
    with whole_file(path) as partial, partial.open("w", encoding="utf-8") as file:
        for i, row in enumerate(rows):
            file.write(("[" if not i else ",\n") + json.dumps(row, ensure_ascii=False))
            depths += row["evidence_depths"]
        file.write("]\n")
    return depths


def _write_documents(path: Path, texts: Sequence[str]) -> None:
    schema = pa.schema([("text", pa.large_string())])
    with whole_file(path) as partial, pa.OSFile(str(partial), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for start in range(0, len(texts), MAX_JOINED_DOCS):
            writer.write_batch(
                pa.record_batch([pa.array(texts[start : start + MAX_JOINED_DOCS], pa.large_string())], schema=schema)
            )


@functools.lru_cache(maxsize=2)
def _document_column(path: Path, modified_ns: int) -> pa.ChunkedArray:
    """Returns the memory-mapped documents, so that only those of a question are read."""
    try:
        return pa.ipc.open_file(pa.memory_map(str(path))).read_all()["text"]
    except (pa.ArrowException, KeyError) as error:
        raise ConfigError(f"{path} is damaged: {' '.join(str(error).split())}") from error


def _describe_depths(depths: Sequence[float]) -> dict[str, Any]:
    counts = Counter(min(int(depth * _DEPTH_BINS), _DEPTH_BINS - 1) for depth in depths)
    mean = round(fmean(depths), 4) if depths else None
    return {"mean_evidence_depth": mean, "evidence_by_fifth": [counts[i] for i in range(_DEPTH_BINS)]}


def _source(row: dict[str, Any]) -> SourceQuestion:
    metadata = row.get("metadata")
    facts = metadata if isinstance(metadata, dict) else row
    documents = _documents(facts.get("context"))
    titles = [title for title, _ in documents]
    needed = list(dict.fromkeys(_titles(facts.get("supporting_facts"))))
    if missing := [title for title in needed if title not in titles]:
        raise BadRow(
            "missing_field",
            f"supporting_facts names {missing[0]!r}, which is not among the {len(titles)} documents of context",
        )
    answers = row.get("golden_answers") or [row.get("answer")]
    if not isinstance(answers, list) or not all(isinstance(answer, str) and answer.strip() for answer in answers):
        raise BadRow("missing_field", f"answer is {str(answers)[:80]}; expected a text")
    key, text = row.get("_id") or row.get("id"), row.get("question")
    if not isinstance(key, str) or not isinstance(text, str) or not text.strip():
        raise BadRow("missing_field", f"_id is {str(key)[:40]!r} and question {str(text)[:80]!r}; expected texts")
    return SourceQuestion(
        id=key,
        text=replace_surrogates(text.strip()),
        answers=[replace_surrogates(answer) for answer in answers],
        documents=documents,
        needed=[titles.index(title) for title in needed],
    )


def _documents(context: Any) -> list[tuple[str, str]]:
    """Returns [[title, [sentence, ...]], ...] or {title: [...], sentences: [[...], ...]} as (title, text)."""
    if (
        isinstance(context, dict)
        and isinstance(context.get("title"), list)
        and isinstance(context.get("sentences"), list)
    ):
        context = list(zip(context["title"], context["sentences"], strict=False))
    pairs = (
        [pair for pair in context if isinstance(pair, list | tuple) and len(pair) == 2]
        if isinstance(context, list)
        else []
    )
    whole = [
        (t, s)
        for t, s in pairs
        if isinstance(t, str) and isinstance(s, list) and all(isinstance(sentence, str) for sentence in s)
    ]
    if not whole or not isinstance(context, list) or len(whole) != len(context):
        raise BadRow("missing_field", f"context is {str(context)[:80]}; expected documents as [title, [sentence, ...]]")
    return list(
        {t: (replace_surrogates(t), replace_surrogates(f"{t}\n{join_sentences(s)}".strip())) for t, s in whole}.values()
    )


def _titles(facts: Any) -> list[str]:
    """Returns the titles of [[title, sentence], ...] or {title: [...], sent_id: [...]}."""
    if isinstance(facts, dict):
        titles = facts.get("title")
    else:
        titles = [fact[0] for fact in facts if isinstance(fact, list) and fact] if isinstance(facts, list) else None
    if not isinstance(titles, list) or not titles or not all(isinstance(title, str) for title in titles):
        raise BadRow("missing_field", f"supporting_facts is {str(facts)[:80]}; expected [title, sentence] pairs")
    return titles
