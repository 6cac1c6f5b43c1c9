"""Names, dates and numbers in a text, and every form in which one of them is written.

Questions without labels hide an entity and ask for it: `mempipe.masking.cloze` in one sentence, MemTrain (arXiv
2606.03197, section 3.2) in a whole document. Both need the same two things: where entities occur, and that a masked one
can be read nowhere else.

`SpacyFinder` uses a trained spaCy pipeline. `RuleFinder` needs none; it goes by capital letters, so it finds only
numbers in a script without them.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, Protocol

from mempipe.settings import ConfigError
from mempipe.text import sentences

Kind = Literal["name", "title", "date", "number"]
KINDS: tuple[Kind, ...] = ("name", "title", "date", "number")


@dataclass(frozen=True, slots=True)
class Entity:
    """`text[start:end]` of the text that it was found in."""

    text: str
    kind: Kind
    start: int
    end: int


class Finder(Protocol):
    """Entities of texts, in order, none overlapping another. The same text gives the same entities."""

    name: str

    def find(self, texts: Sequence[str]) -> list[list[Entity]]: ...


_MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
_DAY = r"(?:[12]?\d|3[01])"
_YEAR = r"(?:1\d{3}|20\d{2})"
_DATE = re.compile(
    rf"\b(?:{_DAY} (?:{_MONTHS}),? {_YEAR}|(?:{_MONTHS}) {_DAY}, {_YEAR}|(?:{_MONTHS}) {_YEAR}|{_DAY} (?:{_MONTHS})"
    rf"|(?:{_MONTHS}) {_DAY}|{_YEAR})\b"
)
_NUMBER = re.compile(r"(?<![\w.,])\d+(?:,\d{3})*(?:\.\d+)?(?![\w]|[.,]\d)")
_TITLE = re.compile(r"[\"“]([A-Z0-9][^\"“”\n]{1,80})[\"”]")
_WORD = r"[^\W\d_](?:[^\W_]|['’\-.](?=[^\W_]))*"
_INITIAL = r"(?:[A-Z]\.)+(?=[\s,;)]|$)|(?:St|Dr|Mr|Mrs|Ms|Sr|Prof|Gen|Col|Lt|Sgt|Rev|Hon)\.(?= [A-Z])"
_TOKEN = re.compile(rf"{_INITIAL}|{_WORD}|[^\w\s]|\d+|\s+")
_PARTICLES = frozenset(
    [
        "of",
        "the",
        "and",
        "de",
        "da",
        "di",
        "del",
        "della",
        "van",
        "von",
        "der",
        "den",
        "la",
        "le",
        "du",
        "al",
        "bin",
        "ibn",
        "y",
        "e",
        "for",
        "in",
        "on",
        "at",
        "to",
    ]
)
_LIGHT = frozenset(
    ["of", "the", "de", "da", "di", "del", "della", "van", "von", "der", "den", "la", "le", "du", "al", "bin", "ibn"]
)
"""Lower-case words that may occur inside a name: "University of Oxford", "Leonardo da Vinci"."""
_NO_NAMES = frozenset(
    [
        "a",
        "an",
        "the",
        "this",
        "that",
        "these",
        "those",
        "it",
        "its",
        "he",
        "she",
        "his",
        "her",
        "him",
        "they",
        "their",
        "them",
        "we",
        "our",
        "us",
        "you",
        "your",
        "i",
        "my",
        "me",
        "in",
        "on",
        "at",
        "to",
        "of",
        "for",
        "from",
        "by",
        "with",
        "as",
        "and",
        "or",
        "but",
        "if",
        "when",
        "while",
        "where",
        "who",
        "which",
        "what",
        "whose",
        "how",
        "why",
        "there",
        "here",
        "after",
        "before",
        "during",
        "since",
        "until",
        "although",
        "though",
        "because",
        "however",
        "also",
        "then",
        "thus",
        "both",
        "each",
        "every",
        "all",
        "some",
        "many",
        "most",
        "other",
        "another",
        "such",
        "no",
        "not",
        "only",
        "one",
        "two",
        "three",
        "first",
        "second",
        "is",
        "are",
        "was",
        "were",
        "be",
        "been",
        "being",
        "has",
        "have",
        "had",
        "do",
        "does",
        "did",
        "can",
        "could",
        "will",
        "would",
        "may",
        "might",
        "must",
        "shall",
        "should",
        "according",
        "despite",
        "following",
        "founded",
        "located",
        "born",
        "known",
        "based",
        "early",
        "late",
        "today",
        "currently",
        "originally",
        "formerly",
    ]
)
"""Words that begin a sentence with a capital and are not names."""
_NO_FIRST = _NO_NAMES | _PARTICLES
_LETTERS = re.compile(r"\w+")
_WORD_BOUNDARY = re.compile(r"\b")
_BEFORE_NAME = frozenset("abcdefghijklmnopqrstuvwxyz0123456789,;")
"""Characters before the space before a name inside a sentence."""
_LONGEST_NAME = 64
"""A longer word is not a name elsewhere."""
_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")


class RuleFinder:
    """Dates, numbers, quoted titles and runs of capitalised words.
    A capital at the start of a sentence alone makes no name.
    """

    name = "rules-1"

    def find(self, texts: Sequence[str]) -> list[list[Entity]]:
        return [self._of(text) for text in texts]

    def _of(self, text: str) -> list[Entity]:
        found: list[Entity] = []
        patterns: tuple[tuple[Kind, re.Pattern[str]], ...] = (("date", _DATE), ("title", _TITLE), ("number", _NUMBER))
        for kind, pattern in patterns:
            for match in pattern.finditer(text):
                start = match.start(match.lastindex or 0)
                written = match.group(match.lastindex or 0).rstrip(" ,.")
                if kind != "title" or _looks_like_title(written):
                    found.append(Entity(written, kind, start, start + len(written)))
        found += _names(text)
        return _without_overlaps(found)


class SpacyFinder:
    """The entities of an installed spaCy pipeline."""

    _KINDS: ClassVar[dict[str, Kind]] = {
        "PERSON": "name", "NORP": "name", "FAC": "name", "ORG": "name", "GPE": "name", "LOC": "name",
        "PRODUCT": "name", "EVENT": "name", "WORK_OF_ART": "title", "LAW": "title", "LANGUAGE": "name",
        "DATE": "date", "PERCENT": "number", "MONEY": "number", "QUANTITY": "number", "CARDINAL": "number",
    }  # fmt: skip

    def __init__(self, pipeline: str) -> None:
        """Raises ConfigError when spaCy, or this pipeline, is not installed."""
        try:
            import spacy

            self._nlp: Any = spacy.load(pipeline, exclude=["lemmatizer", "attribute_ruler"])
        except (ImportError, OSError) as error:
            raise ConfigError(f"entities: the spaCy pipeline {pipeline!r} cannot be loaded: {error}") from error
        self.name = f"spacy-{self._nlp.meta['name']}-{self._nlp.meta['version']}"

    def find(self, texts: Sequence[str]) -> list[list[Entity]]:
        found = []
        for document in self._nlp.pipe(texts):
            entities = []
            for each in document.ents:
                kind = self._KINDS.get(each.label_)
                text = re.sub(r"^[Tt]he ", "", each.text)
                if kind and text.strip() and (kind != "date" or any(character.isdigit() for character in text)):
                    entities.append(Entity(text, kind, each.end_char - len(text), each.end_char))
            found.append(_without_overlaps(entities))
        return found


def make_finder(kind: str = "auto") -> Finder:
    """ "rules"; the name of a spaCy pipeline; or "auto":
    an installed English pipeline, else the rules. Raises ConfigError.
    """
    if kind == "rules":
        return RuleFinder()
    if kind != "auto":
        return SpacyFinder(kind)
    try:
        import spacy.util

        installed = sorted(name for name in spacy.util.get_installed_models() if name.startswith("en_core_web"))
    except ImportError:
        installed = []
    return SpacyFinder(installed[0]) if installed else RuleFinder()


def forms(entity: str, kind: Kind) -> list[str]:
    """Every text by which the entity could be read, longest first: itself, without accents, without "the", and shorter
    names.

    Of a name of several words the last one ("Obama") and the initials ("NATO") count as forms; of a date its other
    order.
    """
    found = {entity, _plain(entity), re.sub(r"^[Tt]he ", "", entity)}
    words = entity.split()
    if kind == "name" and len(words) > 1:
        if len(words[-1]) > 3 and words[-1][0].isupper():
            found |= {words[-1], _plain(words[-1])}
        initials = "".join(word[0] for word in words if word[0].isupper())
        if len(initials) > 2:
            found |= {initials, ".".join(initials) + "."}
    if kind == "date" and (parts := re.fullmatch(rf"({_DAY}) ({_MONTHS}),? ({_YEAR})", entity)):
        found.add(f"{parts[2]} {parts[1]}, {parts[3]}")
    if kind == "date" and (parts := re.fullmatch(rf"({_MONTHS}) ({_DAY}), ({_YEAR})", entity)):
        found |= {f"{parts[2]} {parts[1]} {parts[3]}", f"{parts[2]} {parts[1]}, {parts[3]}"}
    if kind == "number":
        found |= {entity.replace(",", "")} | ({f"{int(entity):,}"} if entity.isdecimal() else set())
    return sorted((form for form in found if form.strip()), key=lambda form: (-len(form), form))


@lru_cache(maxsize=4096)
def forms_pattern(entity: str, kind: Kind) -> re.Pattern[str]:
    """Finds every form of the entity as whole words, in any case."""
    listed = "|".join(re.escape(form) for form in forms(entity, kind))
    return re.compile(rf"(?<!\w)(?:{listed})(?!\w)", re.IGNORECASE)


def hide(text: str, entity: str, kind: Kind, mark: str) -> tuple[str, int]:
    """The text with `mark` for every form of the entity, and how many there were."""
    return forms_pattern(entity, kind).subn(lambda _: mark, text)


def can_be_read(text: str, entity: str, kind: Kind) -> bool:
    """Returns whether the text contains some form of the entity, accents aside."""
    pattern = forms_pattern(entity, kind)
    if pattern.search(text):
        return True
    plain = _plain(text)  # of a long document this takes longer than the search
    return plain != text and bool(pattern.search(plain))


def _plain(text: str) -> str:
    """Returns the text without accents."""
    return _NOT_ASCII.sub(_without_accents, text)


def _without_accents(characters: re.Match[str]) -> str:
    return "".join(c for c in unicodedata.normalize("NFKD", characters.group()) if not unicodedata.combining(c))


def _looks_like_title(text: str) -> bool:
    words = text.split()
    return 1 <= len(words) <= 10 and sum(word[0].isupper() or word[0].isdigit() for word in words) * 2 >= len(words)


_Token = tuple[str, int, int]
"""A word, its start and its end in the text."""


def _names(text: str) -> Iterator[Entity]:
    starts = {start for start, _ in sentences(text)}
    runs = [run for run in map(_without_opening_words, _capitalised_runs(text)) if run]
    unsure = {run[0][0] for run in runs if len(run) == 1 and run[0][1] in starts}
    known = _names_elsewhere(text, unsure)
    for run in runs:
        (word, start, _), end = run[0], run[-1][2]
        if len(run) > 1 or start not in starts or word in known:
            name = re.sub(r"['’]s?$", "", text[start:end])
            yield Entity(name, "name", start, start + len(name))


def _capitalised_runs(text: str) -> Iterator[list[_Token]]:
    """Yields words with a capital that follow one another, one space apart, with light words between them."""
    tokens = [
        (match.group(), match.start(), match.end()) for match in _TOKEN.finditer(text) if not match.group().isspace()
    ]
    index = 0
    while index < len(tokens):
        if not _is_capitalised(tokens[index][0]):
            index += 1
            continue
        last = index
        following = index + 1
        while following < len(tokens) and text[tokens[following - 1][2] : tokens[following][1]] in (" ", ""):
            word = tokens[following][0]
            if _is_capitalised(word) and text[tokens[following - 1][2] : tokens[following][1]] == " ":
                last = following
            elif word not in _LIGHT:
                break
            following += 1
        yield tokens[index : last + 1]
        index = last + 1


def _without_opening_words(run: list[_Token]) -> list[_Token]:
    """Returns the run from its first word on that can begin a name."""
    return list(itertools.dropwhile(lambda token: token[0].lower() in _NO_FIRST, run))


def _names_elsewhere(text: str, words: set[str]) -> set[str]:
    """Returns the words that are capitalised inside a sentence as well, and never written small.

    The text is read once, however many words there are.
    """
    words = {word for word in words if len(word) <= _LONGEST_NAME}
    if not words:
        return set()
    small, longest = {word.lower() for word in words}, max(map(len, words))
    heads = {match[0] for word in words | small if (match := _LETTERS.match(word))}
    inside, written_small = set(), set()
    for letters in _LETTERS.finditer(text):
        if letters[0] not in heads:
            continue
        start = letters.start()
        follows = start > 1 and text[start - 1] == " " and text[start - 2] in _BEFORE_NAME
        # A word may continue behind an apostrophe, a hyphen or a full stop.
        for end in _WORD_BOUNDARY.finditer(text, letters.end(), start + longest + 1):
            part = text[start : end.start()]
            if part in small:
                written_small.add(part)
            if follows and part in words:
                inside.add(part)
    return {word for word in inside if word.lower() not in written_small}


def _is_capitalised(word: str) -> bool:
    return word[0].isupper() and (len(word) > 1 or word == "I") and word != "I"


def _without_overlaps(entities: Iterable[Entity]) -> list[Entity]:
    """In order; of those that overlap the longest, of equally long ones the first kind of `KINDS`."""
    found = [entity for entity in entities if entity.text.strip()]
    taken = bytearray(max((entity.end for entity in found), default=0))
    chosen: list[Entity] = []
    for entity in sorted(found, key=lambda e: (e.start - e.end, KINDS.index(e.kind), e.start)):
        if taken.find(1, entity.start, entity.end) < 0:
            taken[entity.start : entity.end] = b"\1" * (entity.end - entity.start)
            chosen.append(entity)
    return sorted(chosen, key=lambda e: e.start)
