"""Small things about text that every room needs: characters that UTF-8 cannot hold, and tags in untrusted text."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

BOX = "\\boxed"


def replace_surrogates(text: str) -> str:
    """Returns the text with U+FFFD for every lone surrogate, so that it can be written as UTF-8."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


class Neutralizer:
    """Breaks what could be read as a special token or a protocol tag in untrusted text; all other text stays as it is.

    One character (a space, unless a special token holds one) is put after the first character of every occurrence. That
    character is part of no token, so none is left, none arises, and a second pass changes nothing. Special tokens of a
    single character cannot be broken; `Tokenizer.encode_text` sees to them.
    """

    def __init__(self, special_tokens: Iterable[str], *, tags: Sequence[str]) -> None:
        tokens = [token for token in special_tokens if len(token) > 1]
        used = {character for token in tokens for character in token}
        self._breaker = next(character for character in " _.\u00b7\u2060" if character not in used)
        endings: defaultdict[str, list[str]] = defaultdict(list)
        for token in tokens:
            endings[token[0]].append(re.escape(token[1:]))
        endings["<"].append(f"(?i:/?(?:{'|'.join(tags)})>)")
        endings[BOX[0]].append(f"(?i:{BOX[1:]})")
        # A first character, then a lookahead: the search skips to first characters quickly and overlapping occurrences
        # are all found.
        self._pattern = re.compile(
            "|".join(f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in endings.items())
        )

    def __call__(self, text: str) -> str:
        return self._pattern.sub(lambda match: match[0] + self._breaker, text)
