"""Names, dates and numbers in a text, and every form in which one of them is written.

Questions without labels hide an entity and ask for it: `mempipe.masking.cloze` in one sentence, MemTrain (arXiv
2606.03197, section 3.2) in a whole document. Both need the same two things: where entities stand, and that a hidden one
can be read nowhere else.

`SpacyFinder` uses a trained spaCy pipeline. `RuleFinder` needs none; it goes by capital letters, so it finds only
numbers in a script without them.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, Protocol

from mempipe.settings import ConfigError

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
"""Lower-case words that may stand inside a name: "University of Oxford", "Leonardo da Vinci"."""
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
"""Words that begin a sentence with a capital and are no names."""
_ABBREVIATIONS = frozenset(
    [
        "mr",
        "mrs",
        "ms",
        "dr",
        "st",
        "jr",
        "sr",
        "prof",
        "gen",
        "col",
        "lt",
        "sgt",
        "rev",
        "hon",
        "no",
        "vs",
        "ca",
        "c",
        "b",
        "d",
        "inc",
        "ltd",
        "co",
        "corp",
        "u.s",
        "u.k",
        "e.g",
        "i.e",
    ]
)
_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")
_SENTENCE_END = re.compile(r"[.!?][\"”’')\]]*\s+(?=[\"“‘'(\[]?[A-Z0-9])")


def sentences(text: str) -> list[tuple[int, int]]:
    """Start and end of every sentence, without the space around it. A line break ends one too."""
    ends = [match.end() for match in _SENTENCE_END.finditer(text) if not _is_abbreviation(text[: match.start()])]
    ends += [match.end() for match in re.finditer(r"\n+", text)]
    found, start = [], 0
    for end in [*sorted(set(ends)), len(text)]:
        part = text[start:end]
        if part.strip():
            left = start + len(part) - len(part.lstrip())
            found.append((left, left + len(part.strip())))
        start = end
    return found


def _is_abbreviation(before: str) -> bool:
    """Tells whether the full stop after `before` belongs to an abbreviation or an initial."""
    word = re.split(r"[\s(\"“‘]", before[-16:])[-1].lower()
    return word in _ABBREVIATIONS or (len(word) == 1 and word.isalpha())


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
    """Tells whether some form of the entity stands in the text, accents aside."""
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


def _names(text: str) -> Iterator[Entity]:
    starts = {start for start, _ in sentences(text)}
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
        yield from _name(text, tokens[index : last + 1], starts)
        index = last + 1


def _name(text: str, tokens: Sequence[tuple[str, int, int]], sentence_starts: set[int]) -> Iterator[Entity]:
    """The name in a run of capitalised words, without words that begin a sentence only."""
    first = 0
    while first < len(tokens) and tokens[first][0].lower() in (_NO_NAMES | _PARTICLES):
        first += 1
    if first == len(tokens):
        return
    word, start, _ = tokens[first]
    at_start = start in sentence_starts and first == len(tokens) - 1
    if at_start and not _is_name_elsewhere(text, word, start):
        return
    end = tokens[-1][2]
    name = re.sub(r"['’]s?$", "", text[start:end])
    yield Entity(name, "name", start, start + len(name))


def _is_name_elsewhere(text: str, word: str, start: int) -> bool:
    """Tells whether a word that begins a sentence is capitalised inside another one, and never written small."""
    inside = re.search(rf"[a-z0-9,;] {re.escape(word)}\b", text[:start] + " " * len(word) + text[start + len(word) :])
    return bool(inside) and not re.search(rf"\b{re.escape(word.lower())}\b", text)


def _is_capitalised(word: str) -> bool:
    return word[0].isupper() and (len(word) > 1 or word == "I") and word != "I"


def _without_overlaps(entities: Iterable[Entity]) -> list[Entity]:
    """In order; of those that overlap the longest, of equally long ones the first kind of `KINDS`."""
    chosen: list[Entity] = []
    for entity in sorted(entities, key=lambda e: (e.start - e.end, KINDS.index(e.kind), e.start)):
        if entity.text.strip() and all(entity.end <= other.start or entity.start >= other.end for other in chosen):
            chosen.append(entity)
    return sorted(chosen, key=lambda e: e.start)
