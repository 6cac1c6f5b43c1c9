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

import numpy as np

from mempipe.text import UNSPACED

Span = tuple[int, int]
"""Start and end in a text."""
_SPACE, _MARK = " ", "-"
"""Stand for white space, and for any other character that is neither letter nor digit, in a folded text."""
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_UNSPACED = re.compile(f"[{UNSPACED}]")
_THOUSANDS, _THREE_DIGITS = re.compile(r",\d{3}(?!\d)"), re.compile(r"\d{3}(?!\d)")
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


class _Reading:
    """A text without case, accents and the characters between its words.

    Many texts contain none of the names, so the places of words are found at the first name.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._folded = text.translate(_FOLDED)
        self.squeezed = self._folded.replace(_SPACE, "").replace(_MARK, "")
        """Letters and digits alone."""

    @functools.cached_property
    def _words(self) -> tuple[list[int], list[int], list[bool]]:
        """Returns for each word its place in `squeezed` and in the folded text, and whether white space is before it.

        Every character but a letter or a digit ends a word.
        """
        codes = np.frombuffer(self._folded.encode("utf-32-le"), dtype="<u4")
        is_space = codes == ord(_SPACE)
        is_letter = ~is_space & (codes != ord(_MARK))
        is_first = is_letter.copy()
        is_first[1:] &= ~is_letter[:-1]
        folded_words = np.flatnonzero(is_first)
        words = np.cumsum(is_letter)[folded_words] - 1
        spaced = np.diff(np.cumsum(is_space)[folded_words], prepend=0) > 0
        return words.tolist(), folded_words.tolist(), spaced.tolist()

    @functools.cached_property
    def _runs(self) -> tuple[list[int], list[int]]:
        """Returns for each run whose characters are one to one those of the text its place in the folded text and in
        the text.
        """
        folded_runs, runs, drift = [0], [0], 0
        for match in _NOT_ASCII.finditer(self._text):
            length = len(_FOLDED[ord(match[0])])
            if length != 1:
                place = match.start() + drift
                folded_runs += [*range(place + 1, place + length), place + length]
                runs += [*[match.start()] * max(length - 1, 0), match.start() + 1]
                drift += length - 1
        return folded_runs, runs

    def begins(self, place: int) -> bool:
        """Returns whether a word begins at this place of `squeezed`, or the text ends there."""
        if place == len(self.squeezed):
            return True
        words, _, _ = self._words
        index = bisect.bisect_left(words, place)
        return index < len(words) and words[index] == place

    def is_edge(self, place: int) -> bool:
        """Returns whether a name may begin or end at this place of `squeezed`."""
        return self.begins(place) or bool(_UNSPACED.search(self.squeezed, max(place - 1, 0), place + 1))

    def place(self, place: int) -> int:
        """Returns the place in the text of a character of `squeezed`."""
        (words, folded_words, _), (folded_runs, runs) = self._words, self._runs
        word = bisect.bisect_right(words, place) - 1
        folded = folded_words[word] + place - words[word]
        run = bisect.bisect_right(folded_runs, folded) - 1
        return runs[run] + folded - folded_runs[run]

    def spaces(self, start: int, end: int) -> Iterator[int]:
        """Yields the places between two of `squeezed` that have white space before them."""
        words, _, spaced = self._words
        for index in range(bisect.bisect_right(words, start), bisect.bisect_left(words, end)):
            if spaced[index]:
                yield words[index]


@functools.lru_cache(maxsize=8)
def _read(text: str) -> _Reading:
    return _Reading(text)


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
            span = _as_written(text, form, reading.place(start), reading.place(end - 1) + 1)
            if not _is_in_a_number(text, *span):
                yield span


def _is_in_a_number(text: str, start: int, end: int) -> bool:
    """Returns whether the span ends or begins inside a number with commas, as "12" and "000" do in "12,000"."""
    after = text[end - 1 : end].isdecimal() and _THOUSANDS.match(text, end)
    before = text[max(start - 2, 0) : start]
    return bool(after) or (before[-1:] == "," and before[:1].isdecimal() and bool(_THREE_DIGITS.match(text, start)))


@functools.lru_cache(maxsize=4096)
def _form(form: str) -> _Reading:
    return _Reading(form)


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
