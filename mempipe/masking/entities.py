"""Names, dates and numbers in a text, and every form in which one of them is written.

Questions without labels hide an entity and ask for it: `mempipe.masking.cloze` in one sentence, MemTrain (arXiv
2606.03197, section 3.2) in a whole document. Both need the same two things: where entities occur, and that a masked one
can be read nowhere else.

`SpacyFinder` uses a trained spaCy pipeline. `RuleFinder` needs none; it goes by capital letters, so it finds only
numbers in a script without them, and takes a name for a person's where no word of it says otherwise.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from mempipe.masking.name_words import LIGHT, NO_NAMES, NOT_FIRST_NAMES, NOT_PERSONS, PARTICLES
from mempipe.settings import ConfigError
from mempipe.spelling import is_written, replaced
from mempipe.text import sentences

Kind = Literal["person", "name", "title", "date", "number"]
KINDS: tuple[Kind, ...] = ("person", "name", "title", "date", "number")
"""A name is that of anything but a person."""


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
_MONTH_NAMES: list[str] = [*_MONTHS.split("|")]
_DAY = r"(?:[12]?\d|3[01])"
_YEAR = r"(?:1\d{3}|20\d{2})"
_DATE = re.compile(
    rf"\b(?:{_DAY} (?:{_MONTHS}),? {_YEAR}|(?:{_MONTHS}) {_DAY}, {_YEAR}|(?:{_MONTHS}) {_YEAR}|{_DAY} (?:{_MONTHS})"
    rf"|(?:{_MONTHS}) {_DAY}|{_YEAR})\b"
)
_WRITTEN_DATE = re.compile(
    rf"(?:(?P<day>{_DAY})(?:st|nd|rd|th)?(?: of)? (?P<month>{_MONTHS})"
    rf"|(?P<other_month>{_MONTHS})(?: (?P<other_day>{_DAY})(?:st|nd|rd|th)?)?)(?:,? (?P<year>{_YEAR}))?"
)
_ORDINALS = {1: "st", 2: "nd", 3: "rd"}
_NUMBER = re.compile(r"(?<![\w.,])\d+(?:,\d{3})*(?:\.\d+)?(?![\w]|[.,]\d)")
_TITLE = re.compile(r"[\"“]([A-Z0-9][^\"“”\n]{1,80})[\"”]")
_WORD = r"[^\W\d_](?:[^\W_]|['’\-.](?=[^\W_]))*"
_INITIAL = r"(?:[A-Z]\.)+(?=[\s,;)]|$)|(?:St|Dr|Mr|Mrs|Ms|Sr|Prof|Gen|Col|Lt|Sgt|Rev|Hon)\.(?= [A-Z])"
_TOKEN = re.compile(rf"{_INITIAL}|{_WORD}|[^\w\s]|\d+|\s+")
_NO_FIRST = NO_NAMES | PARTICLES
_AFTER_NAMES = re.compile(r"(?:Jr|Sr|Esq|PhD|MD)\.?|[IVX]+|,")
_LONGEST_PERSON = 4
"""Words, without those of `_AFTER_NAMES`."""
_NO_PART_OF_NAMES = re.compile(r"[<>&/|\\\"“”„‟«»‹›()\[\]{}*_=#~^]|(?<![^\W\d_])['’‘`´]|['’‘`´](?![^\W\d_])")
"""Signs before which a name ends. An apostrophe between letters is part of the name."""
_BEFORE_ENTITY = re.compile(r"(?:[\s\"“”„‟«»‹›'’‘`´*_,;:>|\\\u200b-\u200d])*")
_THE = re.compile(r"\b[Tt]he $")
_OWNS = re.compile(r"['’]s?$")
_ARTICLE = re.compile(r"[Tt]he\s+")
_AFTER_ENTITY = ' \t\n"“”„‟«»‹›*_,;:-–—<>|\\=#~^([{\u200b\u200c\u200d'
_LONGEST_NUMBER = 64
"""Digits of a number that is also written with commas; Python does not convert those with thousands of digits."""
_LETTERS = re.compile(r"\w+")
_WORD_BOUNDARY = re.compile(r"\b")
_LONGEST_NAME = 64
"""A longer word is not a name elsewhere."""
_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")


class RuleFinder:
    """Dates, numbers, quoted titles and runs of capitalised words.
    A capital at the start of a sentence alone makes no name.
    """

    name = "rules-2"

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
        return _without_overlaps(_trimmed(found))


class SpacyFinder:
    """The entities of an installed spaCy pipeline."""

    _KINDS: ClassVar[dict[str, Kind]] = {
        "PERSON": "person", "NORP": "name", "FAC": "name", "ORG": "name", "GPE": "name", "LOC": "name",
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
        self.name = f"spacy-{self._nlp.meta['name']}-{self._nlp.meta['version']}-2"

    def find(self, texts: Sequence[str]) -> list[list[Entity]]:
        found = []
        for document in self._nlp.pipe(texts):
            entities = []
            for each in document.ents:
                kind = self._KINDS.get(each.label_)
                if kind and (kind != "date" or any(character.isdigit() for character in each.text)):
                    entities.append(Entity(each.text, kind, each.start_char, each.end_char))
            found.append(_without_overlaps(_trimmed(entities)))
        return found


class CachedFinder:
    """A finder that keeps the entities which another one found."""

    def __init__(self, finder: Finder, *, max_texts: int) -> None:
        """Keeps the entities of at most `max_texts` texts between two calls; those found first go first."""
        self.name = finder.name
        self._finder = finder
        self._max_texts = max_texts
        self._known: dict[str, list[Entity]] = {}

    def find(self, texts: Sequence[str]) -> list[list[Entity]]:
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        self._known.update(zip(new, self._finder.find(new), strict=True))
        found = [self._known[text] for text in texts]
        for text in list(itertools.islice(self._known, max(len(self._known) - self._max_texts, 0))):
            del self._known[text]
        return found


def make_finder(kind: str = "auto") -> Finder:
    """Makes the finder called `kind`: "rules"; the name of a spaCy pipeline; or "auto": an installed English pipeline,
    else the rules. Raises ConfigError.
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
    """Returns every text that names the entity, longest first: itself, without accents, without "the", and shorter
    names.

    Of a person's name the last word ("Obama") is a form, of every name of several words its initials ("NATO"), of a
    date its other ways of writing (`_dates`), and of a number itself with and without commas ("1250"; "007" is not 7).
    """
    found = {entity, _plain(entity), re.sub(r"^[Tt]he ", "", entity)}
    words = entity.split()
    if kind == "person" and (last := _last_name(words)):
        found |= {last, _plain(last)}
    if kind in ("person", "name") and len(words) > 1:
        initials = "".join(word[0] for word in words if word[0].isupper())
        if len(initials) > 2:
            found |= {initials, ".".join(initials) + "."}
    if kind == "date" and (parts := _WRITTEN_DATE.fullmatch(entity)):
        found |= _dates(parts["day"] or parts["other_day"], parts["month"] or parts["other_month"], parts["year"])
    if kind == "number":
        found.add(entity.replace(",", ""))
        if entity.isdecimal() and int(entity[0]) and len(entity) <= _LONGEST_NUMBER:
            found.add(f"{int(entity):,}")
    return sorted((form for form in found if form.strip()), key=lambda form: (-len(form), form))


def _dates(day: str | None, month: str, year: str | None) -> set[str]:
    """Returns the forms of a date of a month: both orders, "12th", "12th of", "Mar" and, with a year, 1990-03-12."""
    names = {month, month[:3], *(["Sept"] if month == "September" else [])}
    if day is None:
        return {f"{name} {year}" for name in names} if year else set()
    number, end, comma = int(day), f" {year}" if year else "", f", {year}" if year else ""
    ordinal = f"{day}{'th' if 10 < number < 14 else _ORDINALS.get(number % 10, 'th')}"
    found = {f"{ordinal} of {month}{end}"}
    for name in names:
        found |= {f"{day} {name}{end}", f"{name} {day}{comma}", f"{ordinal} {name}{end}", f"{name} {ordinal}{comma}"}
    return found | ({f"{year}-{_MONTH_NAMES.index(month) + 1:02}-{number:02}"} if year else set())


def hide(text: str, entity: str, kind: Kind, mark: str) -> tuple[str, int]:
    """Returns the text with `mark` for every form of the entity, however it is spelled, and how many there were."""
    return replaced(text, forms(entity, kind), mark)


def can_be_read(text: str, entity: str, kind: Kind) -> bool:
    """Returns whether the text writes some form of the entity, however it is spelled (`mempipe.spelling`)."""
    return is_written(text, forms(entity, kind))


def _last_name(words: Sequence[str]) -> str | None:
    """Returns the last of several words that is part of a person's name: not "Jr." and not "III"."""
    words = list(words)
    while len(words) > 1 and _AFTER_NAMES.fullmatch(words[-1]):
        words.pop()
    last = words[-1] if len(words) > 1 else ""
    is_name = len(last) > 1 and last[0].isupper() and last.lower() not in _NO_FIRST
    return last if is_name else None


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
            is_person = _may_be_a_person(name) and not _THE.search(text, max(start - 5, 0), start)
            yield Entity(name, "person" if is_person else "name", start, start + len(name))


def _may_be_a_person(name: str) -> bool:
    """Returns whether a run of capitalised words has the form of a person's name, and no word of another one's."""
    words = [word for word in name.split() if not _AFTER_NAMES.fullmatch(word)]
    plain = {word.lower().rstrip(".") for word in words}
    return (
        2 <= len(words) <= _LONGEST_PERSON
        and not plain & NOT_PERSONS
        and words[0].lower().rstrip(".") not in NOT_FIRST_NAMES
        and not any(_OWNS.search(word) or (len(word) > 2 and word.isupper() and word.isalpha()) for word in words)
    )


def _trimmed(entities: Iterable[Entity]) -> Iterator[Entity]:
    """Yields the entities without signs at their ends; names only up to a sign that no name has, and all but titles
    without an article before them.
    """
    for entity in entities:
        is_name = entity.kind in ("person", "name")
        for start, end in _parts(entity.text) if is_name else [(0, len(entity.text))]:
            start = _past(_BEFORE_ENTITY, entity.text, start)
            if entity.kind != "title":
                start = _past(_ARTICLE, entity.text, start)
                start = _past(_BEFORE_ENTITY, entity.text, start)
            text = entity.text[start:end].rstrip(_AFTER_ENTITY)
            if text and text.lower() not in _NO_FIRST:
                yield Entity(text, entity.kind, entity.start + start, entity.start + start + len(text))
                break


def _parts(name: str) -> Iterator[tuple[int, int]]:
    """Yields start and end of each part between the signs that no name has."""
    signs = [match.span() for match in _NO_PART_OF_NAMES.finditer(name)]
    starts, ends = [0, *(end for _, end in signs)], [*(start for start, _ in signs), len(name)]
    yield from zip(starts, ends, strict=True)


def _past(pattern: re.Pattern[str], text: str, start: int) -> int:
    match = pattern.match(text, start)
    return match.end() if match else start


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
            elif word not in LIGHT:
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
        follows = start > 1 and text[start - 1] == " " and _is_inside_sentence(text[start - 2])
        # A word may continue behind an apostrophe, a hyphen or a full stop.
        for end in _WORD_BOUNDARY.finditer(text, letters.end(), start + longest + 1):
            part = text[start : end.start()]
            if part in small:
                written_small.add(part)
            if follows and part in words:
                inside.add(part)
    return {word for word in inside if word.lower() not in written_small}


def _is_inside_sentence(character: str) -> bool:
    """Returns whether a name behind the character and a space is inside a sentence, and not in a run of names."""
    return character in ",;" or (character.isalnum() and not character.isupper())


def _is_capitalised(word: str) -> bool:
    return word[0].isupper() and (len(word) > 1 or word == "I") and word != "I"


def _without_overlaps(entities: Iterable[Entity]) -> list[Entity]:
    """Returns the entities in order: of overlapping ones the longest, of equally long ones the first in `KINDS`."""
    found = [entity for entity in entities if entity.text.strip()]
    taken = bytearray(max((entity.end for entity in found), default=0))
    chosen: list[Entity] = []
    for entity in sorted(found, key=lambda e: (e.start - e.end, KINDS.index(e.kind), e.start)):
        if taken.find(1, entity.start, entity.end) < 0:
            taken[entity.start : entity.end] = b"\1" * (entity.end - entity.start)
            chosen.append(entity)
    return sorted(chosen, key=lambda e: e.start)
