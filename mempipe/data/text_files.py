"""Text of .txt, .md, .html and .pdf files: blank lines part its paragraphs, and headings are marked as in markdown."""

from __future__ import annotations

import importlib.util
from html.parser import HTMLParser
from pathlib import Path

from mempipe.settings import ConfigError
from mempipe.text import replace_surrogates

HTML, PDF = (".html", ".htm"), ".pdf"
SUFFIXES = (".txt", ".md", *HTML, PDF)
HEADING_WORDS = 20
"""A longer line is not a heading, whatever marks it."""
_HEADINGS = {f"h{level}": "#" * level for level in range(1, 7)}
_INLINE = {
    "a",
    "abbr",
    "b",
    "bdi",
    "bdo",
    "cite",
    "code",
    "data",
    "dfn",
    "em",
    "font",
    "i",
    "kbd",
    "label",
    "mark",
    "q",
}
_INLINE |= {"s", "samp", "small", "span", "strong", "sub", "sup", "time", "tt", "u", "var", "wbr", "ins", "del"}
_IN_HEAD = {"base", "link", "meta", "noscript", "script", "style", "template", "title"}
_UNSEEN = {"script", "style", "template", "noscript", "svg", "math", "head", "nav", "select"}


def read_text_file(file: Path) -> str:
    """Returns the text of a file. Raises ConfigError for one that cannot be read, is binary or is not UTF-8, and for a
    PDF that is damaged, needs a password, has no text, or finds no reader installed.
    """
    if file.suffix.lower() == PDF:
        return replace_surrogates(_pdf_text(file))
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}; save it as UTF-8 text"
        ) from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    if "\0" in text:
        raise ConfigError(f"{file} is binary: character {text.index(chr(0))} is NUL; expected words in UTF-8")
    return replace_surrogates(html_text(text) if file.suffix.lower() in HTML else text)


def check_reader(file: Path) -> None:
    """Raises ConfigError when no installed package reads the file."""
    if file.suffix.lower() == PDF and importlib.util.find_spec("pypdf") is None:
        raise ConfigError(f"{file} is a PDF, which pypdf reads; it is not installed: pip install 'mempipe[pdf]'")


def html_text(page: str) -> str:
    """Returns the visible text of a page, without its navigation. The title of a page that shows no heading of the
    first level is its heading."""
    parser = _Page()
    parser.feed(page)
    parser.close()
    text, title = "".join(parser.parts), "".join(parser.title).split()
    is_heading = 0 < len(title) <= HEADING_WORDS and not parser.has_main_heading
    return f"# {' '.join(title)}\n\n{text}" if is_heading else text


class _Page(HTMLParser):
    """Collects the text of a page: a block begins a paragraph, a heading is one line behind a "#" for each level."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.title: list[str] = []
        self.has_main_heading = False
        self._unseen: list[str] = []
        self._in_title = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        # A head need not be closed: the first tag that cannot be in one ends it.
        if self._unseen[-1:] == ["head"] and tag not in _IN_HEAD:
            self._unseen.clear()
        if tag in _UNSEEN:
            self._unseen.append(tag)
        elif tag == "body":
            self._unseen.clear()
        self._in_title = tag == "title" and not {"svg", "math"}.intersection(self._unseen)
        self.has_main_heading |= tag == "h1" and not self._unseen
        if tag == "br":
            self.parts.append("\n")
        elif tag in ("td", "th"):
            self.parts.append(" ")
        elif tag not in _INLINE:
            self.parts.append(f"\n\n{_HEADINGS[tag]} " if tag in _HEADINGS else "\n\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._unseen:
            del self._unseen[self._unseen.index(tag) :]
        self._in_title = False
        if tag not in _INLINE and tag not in ("br", "td", "th"):
            self.parts.append("\n\n")

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title.append(data)
        elif not self._unseen:
            words = " ".join(data.split())
            before, after = " " * data[:1].isspace(), " " * data[-1:].isspace()
            self.parts.append(f"{before}{words}{after}" if words else " ")


def _pdf_text(file: Path) -> str:
    check_reader(file)
    from pypdf import PdfReader

    try:
        with file.open("rb") as opened:
            pages = [page.extract_text() for page in PdfReader(opened).pages]
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except Exception as error:  # pypdf defines its own errors, and a damaged file raises many others
        raise ConfigError(f"{file} cannot be read as a PDF: {' '.join(str(error).split())[:200]}") from error
    if not any(page.strip() for page in pages):
        raise ConfigError(f"{file} holds pictures of pages and no text; make text of it first (OCR)")
    return "\n".join(pages).replace("\0", "")
