"""Matches the needed facts in the published files of MuSiQue, 2WikiMultihopQA and HotpotQA to the passages of a corpus.
The result is the `Question.evidence` by which memory quality, first causes and recall probes are measured.

A file names the title of every needed text; what a middle one contributes is recorded or follows:

    MuSiQue           the answers of `question_decomposition`, each with its paragraph
    2WikiMultihopQA   the objects of `evidences`, [subject, relation, object]; the text is that of the subject
    HotpotQA          no middle answers: where one supporting text names the title of the other one, and the other one
                      holds the answer, the first contributes that title. Where both do, the text that the question
                      names is the first. Any other question, such as a comparison, has no evidence

Official rows and FlashRAG's (`metadata`) are read alike. A fact's passage has its title, holds its value, and has of
several such the most words of the supporting text; of equal ones it is the first. A question has evidence when all its
facts have passages; in part it would be counted wrongly.
"""

from __future__ import annotations

import html
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from mempipe.data.corpus import corpus_files, read_segments
from mempipe.data.qa import BY_NAME, iter_rows, write_questions
from mempipe.data.row_values import documents_of, find, supporting_titles
from mempipe.facts import contains_value
from mempipe.retrieval.manifest import MANIFEST, check_index, read_manifest
from mempipe.retrieval.passages import read_batches
from mempipe.settings import ConfigError
from mempipe.types import Evidence, Question

_ROWS_AT_ONCE = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A needed text by its title, its value, and its words if the data set has them."""

    title: str
    value: str
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """Counts of questions and facts: with facts in the file, and of these with passages in the corpus."""

    num_questions: int
    with_facts: int
    with_evidence: int
    num_facts: int
    found_facts: int
    missing: list[Fact]

    def describe(self) -> list[str]:
        """Returns lines for people."""
        lines = [
            f"{self.with_facts:,} of {self.num_questions:,} questions have recorded facts; of their {self.num_facts:,} "
            f"facts {self.found_facts:,} ({self.found_facts / max(self.num_facts, 1):.1%}) were matched to a passage",
            f"{self.with_evidence:,} questions ({self.with_evidence / self.num_questions:.1%}) have evidence",
        ]
        if self.missing:
            lines.append("not matched: " + "; ".join(f"{fact.value!r} in {fact.title!r}" for fact in self.missing[:5]))
        return lines


def facts_of(row: dict[str, Any], question: Question) -> list[Fact]:
    """Returns the facts that a row records, in the order of reading; none where it does not record all of them."""
    steps = find(row, ("question_decomposition", "metadata.question_decomposition"))
    triples = find(row, ("evidences", "metadata.evidences"))
    if isinstance(steps, list):
        facts = [_step_fact(step, row) for step in steps]
    elif triples is not None:
        facts = [_triple_fact(triple, _supporting_texts(row)) for triple in _triples(triples)]
    elif find(row, ("type", "metadata.type")) == "comparison":
        return []
    else:
        facts = _bridge_facts(_supporting_texts(row), question)
    known = [fact for fact in facts if fact is not None]
    return list(dict.fromkeys(known)) if len(known) == len(facts) else []


def match(facts: Iterable[Fact], batches: Iterable[pa.RecordBatch]) -> dict[Fact, Evidence]:
    """Returns the passage of every fact that has one among the batches (columns id, title, text). Memory grows with the
    facts, not with the corpus.
    """
    wanted: defaultdict[str, list[Fact]] = defaultdict(list)
    for fact in dict.fromkeys(facts):
        wanted[_key(fact.title)].append(fact)
    best: dict[Fact, tuple[float, str]] = {}
    for batch in batches:
        keys = map(_key, batch.column("title").to_pylist())
        rows = [(row, key) for row, key in enumerate(keys) if key in wanted]
        passages = batch.take(pa.array([row for row, _ in rows], pa.int64())).to_pylist()
        for passage, (_, key) in zip(passages, rows, strict=True):
            words = set(passage["text"].casefold().split())
            for fact in wanted[key]:
                if contains_value(f"{passage['title']}. {passage['text']}", fact.value):
                    score = _share(fact.text, words)
                    if fact not in best or score > best[fact][0]:
                        best[fact] = (score, passage["id"])
    return {fact: Evidence(passage_id=identity, value=fact.value) for fact, (_, identity) in best.items()}


def add_evidence(file: str | Path, corpus: str | Path, output: Path) -> Matched:
    """Writes the questions of a file with their evidence, as Parquet in mempipe's own format. `corpus` is an index or a
    file of passages, whose ids the evidence names.

    Raises ConfigError for a file or a corpus that cannot be read, and for a file that records no fact.
    """
    questions, facts = [], []
    for row, reading in iter_rows(file, columns=BY_NAME):
        questions.append(reading.question)
        facts.append(facts_of(row, reading.question))
    wanted = [fact for of_question in facts for fact in of_question]
    if not wanted:
        raise ConfigError(
            f"{file} records no facts; expected rows of MuSiQue (question_decomposition), 2WikiMultihopQA (evidences) "
            "or HotpotQA (supporting_facts with context)"
        )
    passages = match(wanted, _passage_batches(corpus))
    whole = [bool(of_question) and all(fact in passages for fact in of_question) for of_question in facts]
    write_questions(output, _with_evidence(questions, facts, passages, whole))
    return Matched(
        num_questions=len(questions),
        with_facts=sum(map(bool, facts)),
        with_evidence=sum(whole),
        num_facts=len(wanted),
        found_facts=sum(fact in passages for fact in wanted),
        missing=[fact for fact in dict.fromkeys(wanted) if fact not in passages],
    )


def _with_evidence(
    questions: Sequence[Question],
    facts: Sequence[Sequence[Fact]],
    passages: Mapping[Fact, Evidence],
    whole: Sequence[bool],
) -> Iterator[Question]:
    for question, of_question, is_whole in zip(questions, facts, whole, strict=True):
        evidence = [passages[fact] for fact in of_question] if is_whole else question.evidence
        yield replace(question, evidence=evidence)


def _passage_batches(corpus: str | Path) -> Iterator[pa.RecordBatch]:
    folder = Path(corpus)
    if not (folder / MANIFEST).exists():
        return (batch for batch, _ in read_segments(corpus_files(corpus), size=_ROWS_AT_ONCE))
    check_index(folder)
    passages = read_manifest(folder)[0].passages
    if passages.kind == "arrow":
        return (batch for name in passages.files for batch in read_batches(folder / name))
    return (batch for batch, _ in read_segments(corpus_files(folder / passages.files[0]), size=_ROWS_AT_ONCE))


def _step_fact(step: Any, row: dict[str, Any]) -> Fact | None:
    """Returns the fact of a step of MuSiQue: its paragraph is in the row, by number, or in the step (FlashRAG)."""
    if not isinstance(step, dict):
        return None
    paragraph, number = step.get("support_paragraph"), step.get("paragraph_support_idx")
    if not isinstance(paragraph, dict):
        paragraphs = [item for item in row.get("paragraphs") or [] if isinstance(item, dict)]
        paragraph = next((item for item in paragraphs if number is not None and item.get("idx") == number), {})
    title, value = paragraph.get("title"), step.get("answer")
    if not isinstance(title, str) or not isinstance(value, str) or not value.strip():
        return None
    return Fact(title=title, value=value.strip(), text=str(paragraph.get("paragraph_text") or ""))


def _triples(triples: object) -> list[Any]:
    """Returns [subject, relation, object] of 2Wiki's list, or of the names fact, relation, entity: those of columns
    (FlashRAG), or of every item."""
    names = ("fact", "relation", "entity")
    if isinstance(triples, dict):
        columns = [triples.get(name) or [] for name in names]
        return [list(triple) for triple in zip(*columns, strict=False)]
    items = triples if isinstance(triples, list) else []
    return [[item.get(name) for name in names] if isinstance(item, dict) else item for item in items]


def _triple_fact(triple: object, texts: Mapping[str, str]) -> Fact | None:
    if not isinstance(triple, list) or len(triple) != 3 or not all(isinstance(part, str) for part in triple):
        return None
    subject, _, value = (part.strip() for part in triple)
    # A title may part its subject from others of the name, "Robert Smith (director)".
    named = (title for form in (str, _bare) for title in texts if _key(form(title)) == _key(subject))
    title = next(named, None) or next((title for title, text in texts.items() if contains_value(text, value)), None)
    return Fact(title=title, value=value, text=texts[title]) if title and value else None


def _bridge_facts(texts: Mapping[str, str], question: Question) -> list[Fact | None]:
    """Returns the two facts of a HotpotQA question whose first text leads to the second, which holds the answer."""
    if len(texts) != 2:
        return []
    answer = question.golden_answers[0]
    chains = [
        (first, second)
        for first, second in (tuple(texts), tuple(texts)[::-1])
        if contains_value(texts[first], _bare(second)) and contains_value(texts[second], answer)
    ]
    named = [
        chain for chain in chains if [contains_value(question.text, _bare(title)) for title in chain] == [True, False]
    ]
    if len(chains) != 1 and len(named) != 1:
        return []
    first, second = (chains if len(chains) == 1 else named)[0]
    return [
        Fact(title=first, value=_bare(second), text=texts[first]),
        Fact(title=second, value=answer, text=texts[second]),
    ]


def _supporting_texts(row: dict[str, Any]) -> dict[str, str]:
    """Returns the supporting titles in order, each with its whole text if the row has it."""
    documents = dict(documents_of(find(row, ("context", "metadata.context"))))
    return {title: documents.get(title, "") for title in supporting_titles(row)}


def _bare(title: str) -> str:
    """Returns a title as texts name it: without what parts it from others of the name, "Emma (novel)"."""
    return html.unescape(title).partition(" (")[0].strip()


def _key(title: str) -> str:
    return unicodedata.normalize("NFC", html.unescape(title)).strip().lower()


def _share(text: str, words: set[str]) -> float:
    wanted = set(text.casefold().split())
    return len(wanted & words) / len(wanted) if wanted else 0.0
