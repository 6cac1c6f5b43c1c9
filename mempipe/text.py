"""Text helpers of all packages: characters that UTF-8 cannot hold, tags in untrusted text, sentences, and chunks that
are cut between words; words, and which of them two texts differ in.
"""

from __future__ import annotations

import bisect
import difflib
import functools
import itertools
import json
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

from mempipe.settings import ConfigError

BOX = "\\boxed"
TARGET = "[TARGET]"
"""Stands for the entity that a recall of MemTrain asks for; the document's own gap is [MASK]."""
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u3005-\u3007\u3041-\u309f\u30a1-\u30fa\u30fc-\u30ff"
    "\u31f0-\u31ff\u3400-\u9fff\uac00-\ud7a3\uf900-\ufaff\U00020000-\U0003ffff"
)
"""Thai, Lao, Burmese, Khmer, Korean, Japanese and Chinese, as ranges in a class of a regular expression. Words of these
scripts cannot be told apart: no space is between them, or (in Korean) a particle is part of each.
"""
INVISIBLE = (
    "\u00ad\u034f\u061c\u180b-\u180f\u200d-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff\U000e0100-\U000e01ef"
)
"""Characters that nobody sees and that end no word, as ranges in a class: soft hyphens, joiners, selectors."""
_NOT_SEEN = re.compile(f"[{INVISIBLE}]")
_NON_JOINER = re.compile("(?<![\u0600-\u08ff])\u200c")
_LAST_MARK = 0x1FFFF
_WORD = re.compile(rf"[^\s{UNSPACED}]+|[{UNSPACED}]")
_WITHOUT_SPACE = re.compile(f"[{UNSPACED}]")
_OPENED = re.compile(r"(?:^|\s)[\"'(\[“‘]$")
_LONGEST_WORD = 64
_MOST_PAIRS = 100
"""Places of a word in one text times those in another: where there are more, a comparison of the two finds the word
next to others only. A policy that repeats itself would make it take minutes, since its time is cubic in them.
"""
_ABBREVIATIONS = frozenset([
    "mr", "mrs", "ms", "dr", "st", "jr", "sr", "prof", "gen", "col", "lt", "sgt", "rev", "hon", "no", "vs", "ca", "c",
    "b", "d", "inc", "ltd", "co", "corp", "u.s", "u.k", "e.g", "i.e",
    "ул", "им", "св", "проф", "акад", "ген", "см",  # Russian: street, named after, saint, professor, ..., see
])  # fmt: skip
_SENTENCE_END = re.compile(r"[.!?][\"”’'»)\]]*\s+(?=[\"“„‘'«(\[]?([^\W_a-z]))")


class CountTokens(Protocol):
    def __call__(self, text: str) -> int: ...


def split_words(text: str) -> list[str]:
    """Returns the words of the text; in scripts without spaces every character is one."""
    return _WORD.findall(text)


def join_sentences(sentences: Sequence[str]) -> str:
    """Returns the text of a list of sentences. HotpotQA's hold the spaces between them, 2WikiMultihopQA's do not: where
    no two of a list have whitespace between them, they get a space, except behind an opening quotation mark and before
    a script without spaces.
    """
    filled = [sentence for sentence in sentences if sentence]
    pairs = [*itertools.pairwise(filled)]
    if any(before[-1].isspace() or after[0].isspace() for before, after in pairs):
        return "".join(filled)
    joined = [
        f"{'' if _OPENED.search(before) or _WITHOUT_SPACE.match(after) else ' '}{after}" for before, after in pairs
    ]
    return "".join([*filled[:1], *joined])


def changed_runs(before: str, after: str) -> Iterator[tuple[str, str]]:
    """Yields the texts as runs of words, each "kept", "dropped" (only `before` has it) or "added", in the order of
    `after`. A dropped run comes before the one that took its place.
    """
    old, new = list(_WORD.finditer(before)), list(_WORD.finditer(after))
    num_old, num_new = Counter(word[0] for word in old), Counter(word[0] for word in new)
    matcher = difflib.SequenceMatcher(
        lambda word: num_old[word] * num_new[word] > _MOST_PAIRS,
        [word[0] for word in old],
        [word[0] for word in new],
        autojunk=False,
    )
    for kind, old_start, old_end, new_start, new_end in matcher.get_opcodes():
        if kind in ("delete", "replace"):
            yield "dropped", _run(before, old[old_start:old_end])
        if kind != "delete":
            yield "kept" if kind == "equal" else "added", _run(after, new[new_start:new_end])


def _run(text: str, found: Sequence[re.Match[str]]) -> str:
    return " ".join(text[found[0].start() : found[-1].end()].split())


def until_first(text: str, ends: Iterable[str]) -> str:
    """Returns the text before the first of `ends` in it; all of it where none occurs."""
    return text[: min((place for end in ends if (place := text.find(end)) >= 0), default=len(text))]


def replace_surrogates(text: str) -> str:
    """Returns the text with U+FFFD for every lone surrogate, so that it can be written as UTF-8."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def call_json(text: str) -> Any:
    """Returns the value of a JSON text that a policy wrote, with U+FFFD for each half of a character, which no tool
    could send on. Raises ValueError for another text, also for NaN and Infinity, and RecursionError.
    """
    value = json.loads(text, parse_constant=_refuse_constant)
    return json.loads(replace_surrogates(json.dumps(value, ensure_ascii=False)))  # escapes can spell them


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def visible(text: str, *, without: re.Pattern[str] = _NOT_SEEN) -> str:
    """Returns the text without `INVISIBLE`, or without more characters.

    A zero-width space stays, since it parts words, and so does a non-joiner after a letter of the Arabic script, since
    it parts the pieces of a Persian word.
    """
    if "\u200c" in text:
        text = _NON_JOINER.sub("", text)
    return without.sub("", text)


@functools.cache
def with_marks(letters: str) -> str:
    """Returns a pattern of words of these letters, themselves a pattern of one character, and of the marks that follow
    them, such as the vowel signs of Hindi; for `\\w` a mark ends a word. Marks of `UNSPACED` are none of them."""
    # After most words is an ASCII character: it is compared with one range before all those of the marks.
    return rf"(?:{letters}+(?:(?![\x00-\u02ff])[{as_class(_marks())}]+)?)+"


@functools.cache
def accents() -> str:
    """Returns the marks that words may be written without, as ranges in a class of a regular expression: accents, and
    the points of Hebrew, Arabic and Syriac. Elsewhere a mark is a vowel, or says that there is none."""
    return as_class(
        each
        for each in _marks()
        if each < "\U00010000"  # a class beyond is slow to compare with
        and unicodedata.combining(each)
        and re.search("COMBINING|^(HEBREW|ARABIC|SYRIAC) ", unicodedata.name(each))
    )


def as_class(characters: Iterable[str]) -> str:
    """Returns ascending characters as ranges in a class of a regular expression."""
    runs: list[list[int]] = []
    for code in map(ord, characters):
        if runs and runs[-1][1] == code - 1:
            runs[-1][1] = code
        else:
            runs.append([code, code])
    return "".join(f"{chr(first)}-{chr(last)}" for first, last in runs)


@functools.cache  # not at import: it takes some hundredths of a second
def _marks() -> list[str]:
    other = re.compile(f"[{UNSPACED}{INVISIBLE}]")
    marks = (each for each in map(chr, range(_LAST_MARK)) if unicodedata.category(each) in ("Mn", "Mc"))
    return [each for each in marks if not other.match(each)]


class Neutralizer:
    """Breaks the special tokens and protocol tags in untrusted text; all other text stays as it is.

    One character (a space, unless a special token holds one) is put after the first character of every occurrence. That
    character is part of no token, so none is left, none arises, and a second pass changes nothing. Special tokens of a
    single character cannot be broken; `Tokenizer.encode_text` sees to them.
    """

    def __init__(self, special_tokens: Iterable[str], *, tags: Sequence[str], box: bool = True) -> None:
        """`box`: `\\boxed` is broken too."""
        tokens = [token for token in special_tokens if len(token) > 1]
        used = {character for token in tokens for character in token}
        self._breaker = next(character for character in " _.\u00b7\u2060" if character not in used)
        endings: defaultdict[str, list[str]] = defaultdict(list)
        for token in tokens:
            endings[token[0]].append(re.escape(token[1:]))
        if tags:
            endings["<"].append(f"(?i:/?(?:{'|'.join(tags)})>)")
        if box:
            endings[BOX[0]].append(f"(?i:{BOX[1:]})")
        # A first character, then a lookahead: the search skips to first characters quickly and overlapping occurrences
        # are all found.
        self._pattern = re.compile(
            "|".join(f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in endings.items())
        )

    def __call__(self, text: str) -> str:
        return self._pattern.sub(lambda match: match[0] + self._breaker, text)


def chunks_of(text: str, max_tokens: int, count_tokens: CountTokens, mask: str) -> Iterator[str]:
    """Yields the text in pieces of at most `max_tokens` tokens, cut between words, and never inside a mask.

    Of a longer run of letters (a script without spaces), and of a word that has more tokens than a chunk, every
    character counts as a word. The pieces joined are the text. A mask, or a character, that has more tokens than a
    chunk is a separate chunk.
    """
    words = _words(text, mask)
    lengths = {word: count_tokens(word) for word in set(words)}
    long = {w for w, tokens in lengths.items() if mask not in w and (len(w) > _LONGEST_WORD or tokens > max_tokens)}
    if long:
        characters = {word: re.findall(f".{_marks_behind()}", word, re.DOTALL) for word in long}
        words = [part for word in words for part in characters.get(word, [word])]
        lengths |= {each: count_tokens(each) for each in set().union(*characters.values())}
    totals = [0, *itertools.accumulate(map(lengths.__getitem__, words))]
    first = 0
    while first < len(words):
        last = bisect.bisect_right(totals, totals[first] + max_tokens) - 1
        # A tokenizer may need another number of tokens for adjacent words.
        while last > first + 1 and count_tokens("".join(words[first:last])) > max_tokens:
            last -= 1
        last = max(last, first + 1)
        yield "".join(words[first:last])
        first = last


def _words(text: str, mask: str) -> list[str]:
    """Returns the masks, runs of letters and digits, and other characters of the text, each with the space before it
    and the marks behind it.

    Joined they are the text.
    """
    no_mask, marks = f"(?!{re.escape(mask)})", _marks_behind()
    pattern = rf"\s*(?:{re.escape(mask)}|(?:(?:{no_mask}[^\W_])+{marks})+|{no_mask}\S{marks})|\s+$"
    return re.findall(pattern, text)


@functools.cache
def _marks_behind() -> str:
    """Returns a pattern of the marks that belong to the character before them, such as the vowel signs of Hindi and of
    Thai, and of what nobody sees; it may find nothing."""
    marks = (each for each in map(chr, range(_LAST_MARK)) if unicodedata.category(each) in ("Mn", "Mc", "Me"))
    # After most characters is an ASCII one: it is compared with one range before all those of the marks.
    return rf"(?:(?![\x00-\xac])[{as_class(marks)}{INVISIBLE}]+)?"


def check_mask(mask: str, encode: Callable[[str], list[int]], decode: Callable[[list[int]], str]) -> None:
    """Raises ConfigError when the tokenizer does not give the mask back as it was, so that no model could read it."""
    sentence = f"word {mask}, and {mask}."
    if (found := decode(encode(sentence))) != sentence:
        raise ConfigError(
            f"mask is {mask!r}, which the tokenizer reads as {found!r} (in {sentence!r}); choose another mask for "
            "documents and agent, such as [MASK] or ____"
        )


def sentences(text: str) -> list[tuple[int, int]]:
    """Returns the start and end of every sentence, without the space around it. A line break ends one too."""
    ends = {
        match.end()
        for match in _SENTENCE_END.finditer(text)
        if (match[1].isupper() or match[1].isdigit()) and not _is_abbreviation(text, match.start())
    }
    ends |= {match.end() for match in re.finditer(r"\n+", text)}
    found, start = [], 0
    for end in [*sorted(ends), len(text)]:
        part = text[start:end]
        if part.strip():
            left = start + len(part) - len(part.lstrip())
            found.append((left, left + len(part.strip())))
        start = end
    return found


def _is_abbreviation(text: str, stop: int) -> bool:
    """Returns whether the full stop at `stop` belongs to an abbreviation or an initial."""
    word = re.split(r"[\s(\"“‘]", text[max(0, stop - 16) : stop])[-1].lower()
    return word in _ABBREVIATIONS or (len(word) == 1 and word.isalpha())
