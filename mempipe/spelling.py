"""Finds the places where a text contains one of several forms of a name, in any spelling.

Case, accents, punctuation and underscores do not count: "Lestat" is written by "LESTAT's", "_Lestat_", "Léstat" and
"Les\u00adtat" (with a soft hyphen), "U.S." by "US", "New York" by "new-york" and "NewYork". A form is written as
whole words, except in scripts that put no space between words.
"""

from __future__ import annotations

import bisect
import functools
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Span = tuple[int, int]
"""Start and end in a text."""
_SPACE, _MARK = " ", "-"
"""Stand for white space, and for any other character that is neither letter nor digit, in a folded text."""
_FOLDED_WORD = re.compile(f"[^{_SPACE}{_MARK}]+")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u9fff\U00020000-\U0003ffff]"
)
"""Thai, Lao, Burmese, Khmer, Korean (which adds particles to a name), Japanese and Chinese."""
_INVISIBLE = re.compile("[\u034f\ufe00-\ufe0f\U000e0100-\U000e01ef]")
"""Selectors and joiners of the other characters: marks of combining class 0 that are not vowels."""


def letters(text: str) -> str:
    """Returns the letters and digits of the text without case and accents, and nothing else."""
    return _read(text).squeezed


def is_written(text: str, forms: Iterable[str]) -> bool:
    """Returns whether the text writes one of the forms."""
    return any(True for form in forms for _ in _places(text, form))


def written(text: str, forms: Iterable[str]) -> list[Span]:
    """Returns where the text writes the forms, in order. Places that overlap are one."""
    joined: list[Span] = []
    for start, end in sorted(span for form in forms for span in _places(text, form)):
        if joined and start < joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def replaced(text: str, forms: Iterable[str], mark: str) -> tuple[str, int]:
    """Returns the text with `mark` at every place of `written`, and how many there were."""
    parts, last, spans = [], 0, written(text, forms)
    for start, end in spans:
        parts += [text[last:start], mark]
        last = end
    return "".join([*parts, text[last:]]), len(spans)


@dataclass(frozen=True, slots=True)
class _Reading:
    """A text without case, accents and the characters between its words."""

    squeezed: str
    """Letters and digits alone."""
    words: list[int]
    """Place of each word in `squeezed`. Every character but a letter or a digit ends a word."""
    spaced: list[bool]
    """Is true of a word with white space before it."""
    folded_words: list[int]
    """Place of each word in the folded text."""
    folded_runs: list[int]
    """Place in the folded text of each run whose characters are one to one those of the text."""
    runs: list[int]
    """Place of each of these runs in the text."""

    def begins(self, place: int) -> bool:
        """Returns whether a word begins at this place of `squeezed`, or the text ends there."""
        if place == len(self.squeezed):
            return True
        index = bisect.bisect_left(self.words, place)
        return index < len(self.words) and self.words[index] == place

    def is_edge(self, place: int) -> bool:
        """Returns whether a name may begin or end at this place of `squeezed`."""
        return self.begins(place) or bool(_UNSPACED.search(self.squeezed, max(place - 1, 0), place + 1))

    def place(self, place: int) -> int:
        """Returns the place in the text of a character of `squeezed`."""
        word = bisect.bisect_right(self.words, place) - 1
        folded = self.folded_words[word] + place - self.words[word]
        run = bisect.bisect_right(self.folded_runs, folded) - 1
        return self.runs[run] + folded - self.folded_runs[run]

    def spaces(self, start: int, end: int) -> Iterator[int]:
        """Yields the places between two of `squeezed` that have white space before them."""
        for index in range(bisect.bisect_right(self.words, start), bisect.bisect_left(self.words, end)):
            if self.spaced[index]:
                yield self.words[index]


@functools.lru_cache(maxsize=8)
def _read(text: str) -> _Reading:
    folded = text.translate(_FOLDED)
    folded_runs, runs, drift = [0], [0], 0
    for match in _NOT_ASCII.finditer(text):
        length = len(_FOLDED[ord(match[0])])
        if length != 1:
            place = match.start() + drift
            folded_runs += [*range(place + 1, place + length), place + length]
            runs += [*[match.start()] * max(length - 1, 0), match.start() + 1]
            drift += length - 1
    words, spaced, folded_words, size, last = [], [], [], 0, 0
    found = [match.span() for match in _FOLDED_WORD.finditer(folded)]
    for start, end in found:
        words.append(size)
        spaced.append(_SPACE in folded[last:start])
        folded_words.append(start)
        size, last = size + end - start, end
    return _Reading(
        squeezed="".join(folded[start:end] for start, end in found),
        words=words,
        spaced=spaced,
        folded_words=folded_words,
        folded_runs=folded_runs,
        runs=runs,
    )


def _places(text: str, form: str) -> Iterator[Span]:
    """Yields where the text writes this one form."""
    wanted = _form(form)
    if not wanted.squeezed:
        if form.strip():
            yield from (match.span() for match in re.finditer(rf"(?<!\w){re.escape(form)}(?!\w)", text))
        return
    reading, length, start = _read(text), len(wanted.squeezed), -1
    while (start := reading.squeezed.find(wanted.squeezed, start + 1)) >= 0:
        end = start + length
        if (
            reading.is_edge(start)
            and reading.is_edge(end)
            and all(wanted.begins(place - start) for place in reading.spaces(start, end))
        ):
            yield _as_written(text, form, reading.place(start), reading.place(end - 1) + 1)


@functools.lru_cache(maxsize=4096)
def _form(form: str) -> _Reading:
    return _read.__wrapped__(form)


def _as_written(text: str, form: str, start: int, end: int) -> Span:
    """Returns the span with the accents that follow it, and with the signs at the ends of the form: all of "C++"."""
    while end < len(text) and not _FOLDED[ord(text[end])]:
        end += 1
    before = next((place for place, character in enumerate(form) if character.isalnum()), 0)
    whole = start - before, start - before + len(form)
    if whole[0] >= 0 and whole[1] >= end and text[slice(*whole)].casefold() == form.casefold():
        return whole
    return start, end


class _Fold(dict[int, str]):
    """Code points to what they are in a folded text, filled as characters are met."""

    def __missing__(self, code: int) -> str:
        folded = self[code] = _fold(chr(code))
        return folded


def _fold(character: str) -> str:
    decomposed = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", character).casefold())
    folded = "".join(map(_sorted_out, decomposed))
    if unicodedata.category(character) == "No" and not character.isascii():  # a footnote's sign is a separate word
        return f"{_MARK}{folded}{_MARK}"
    return folded


def _sorted_out(character: str) -> str:
    category = unicodedata.category(character)
    if unicodedata.combining(character) or category == "Cf" or _INVISIBLE.match(character):
        return ""
    if category[0] in "LNM":
        return character
    return _SPACE if character.isspace() else _MARK


_FOLDED = _Fold()
