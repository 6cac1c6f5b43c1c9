"""Checks the language of documents, help texts, messages and comments of configs: `python tools/prose.py [FILE ...]`.

It prints one line for each finding (place, rule, words found, advice) and exits with 1 if there is one. Code, names and
quotations in backticks are not checked. `make lint` runs it over the whole project.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

MAX_WORDS = 30
PROMPTS = ("judge.py", "recall.py")  # texts for models: results depend on their wording
_OWN = (  # "a tool of your own", but not "of its own world"
    r"\bof (?:the user's|your|one's|their|its) own\b"
    r"(?! (?!(?:is|are|and|or|to|in|that|can|for|with)\b)[a-z])"
)
WORDS = {
    r"\b(?:goes|go|going|gone|went) on\b(?! to\b)": "write: resumes, continues, happens",
    r"\bunder way\b": "write: in flight, running",
    r"\b(?<!number )stands?\b(?! for\b|-| still\b)": "write: is, is listed",
    r"\bbeside\b": "write: next to, compared with, in addition to",
    r"\banew\b": "write: again, or name the new seed",
    r"\bof wh(?:ich|om)\b": "make a second sentence",
    r"\bwhat (?:is|was)\b": "name the thing by a noun",
    r"(?<!reaches )\bas far as\b": "write: if, up to",
    r"(?<![Tt]here )\b(?:is|are) no\b(?! longer\b| more than\b)": "write: is not a, has no",
    r"\b(?:rooms|the room)\b(?! for\b)": "write: package",
    r"\bpeers?\b(?!-)": "write: other implementations, original code",
    r"\bdear(?:er|est)?\b": "write: expensive, too high",
    r"\bleft out\b|\bleaves? out\b": "write: skipped, omitted",
    r"\b(?:lies|lie) (?:in|on|at|there|below|behind|next)\b": "write: is, is stored",
    r"\b(?:is|are) told\b": "write: receives, is printed",
    r"\bthe machinery\b": "write: infrastructure",
    r"\bwhole or not at all\b": "write: atomically",
    _OWN: "write: your own X, user-defined X",
    r"\bnobody listens\b": "name what is redirected",
    r"\bfor want of\b": "write: because X is missing",
    r"\bquiet (?:cores|machines?)\b": "write: idle",
    r"\bsiblings?\b": "write: attempts of a group",
    r"\baims?\b": "write: target",
    r"\barms?\b": "write: variant",
    r"\b[Tt]ells? whether\b|\b[Ss]ays? whether\b": "write: returns whether",
    r"\b[Mm]akes? of\b|\bmade of it\b": "write: creates from",
    r"\bso many\b": "name the number",
}
_THINGS = "Bytes|Contexts|Files|Groups|Ids|Indices|Its|Lines|Pairs|Replicas|Rows|Seconds|Settings|This|Tokens"
VERB = rf"(?!(?:{_THINGS})\b)(?:Is|[A-Z][a-z]+s)\b"  # "Returns the gap.", but not "Seconds of a pass."
NOUNS = ("metrics.py",)  # definitions of metrics, which reports show
CLAUSE = r"(?:What(?! to\b)|Of|Where|With which|For which) [^?]*\.(?:\s|$)"  # "What a run needs.": begin with the noun
OPENING = (
    r"(?:It|They|Those|These|Without it|Without them|That one|The same(?= (?:is|are|holds|as)\b))\b"
    r"(?! (?:is|was) (?:a|an|the)\b)"
)
_RULES = [(re.compile(pattern), advice) for pattern, advice in WORDS.items()]
_CONFLICT = re.compile(r"\s*(?:<{7}|>{7}) ")  # in a docstring no other check sees it
_SENTENCE_END = re.compile(r"(?<=[.!?:;])[*_)]*(?:\s+|$)(?=[\w`*\[(]|$)")
_CODE = re.compile(r"``.+?``|`[^`]*`|\"[^\"\n]{0,120}\"|<[^>]+>|https?://\S+")


def check_text(text: str, *, prose: bool = False) -> Iterator[tuple[str, str]]:
    """Yields (words found, advice) for a text; `prose` adds the rules for whole paragraphs.

    These are: a sentence has at most MAX_WORDS words, and no paragraph begins with a pronoun without a noun.
    """
    text = _CODE.sub("CODE", re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text))
    for pattern, advice in _RULES:
        for found in pattern.finditer(text):
            yield text[max(0, found.start() - 20) : found.end() + 20].strip(), advice
    if prose:
        if found := re.match(OPENING, text.strip()):
            yield found.group(), "begin a paragraph with a noun"
        for sentence in _SENTENCE_END.split(text):
            if (words := len(re.findall(r"[A-Za-z][\w'’-]*", re.sub(r"\([^)]*\)", "", sentence)))) > MAX_WORDS:
                yield f"{sentence.strip()[:50]}…", f"{words} words; make two sentences"


def markdown_blocks(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yields (line, text, is prose) of every paragraph, list item and row of a table; skips code blocks."""
    block: list[str] = []
    start, fenced = 0, False
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        bare = line.strip()
        is_fence, is_row = bare.startswith(("```", "~~~")), bare.startswith("|")
        begins = bool(re.match(r"(?:[-*+]|\d+\.) ", bare)) or bare.startswith("#")
        if block and (fenced or is_fence or is_row or begins or not bare):
            yield start, " ".join(block), True
            block = []
        if is_fence:
            fenced = not fenced
        elif is_row and not fenced:
            yield number, bare, False
        elif bare and not fenced and not bare.startswith(("#", "<")):
            start = start if block else number
            block.append(re.sub(r"^(?:[-*+]|\d+\.|>) +", "", bare))


def python_strings(source: str) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of every help text, message and documentation of a setting: all strings of several words.

    Docstrings of modules, classes and functions are for readers of the code and are skipped.
    """
    tree = ast.parse(source)
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                skipped.add(id(first.value))
        if isinstance(node, ast.JoinedStr):
            skipped.update(map(id, node.values))
            parts = [part.value if isinstance(part, ast.Constant) else "X" for part in node.values]
            yield node.lineno, "".join(map(str, parts))
    for node in ast.walk(tree):
        if id(node) in skipped or not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        if len(node.value.split()) >= 3:
            yield node.lineno, node.value


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of every docstring and comment of a module."""
    for node in ast.walk(ast.parse(source)):
        is_documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if is_documented and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def without_verb(source: str) -> Iterator[tuple[int, str]]:
    """Yields (line, first words) of every docstring of a function that does not begin with a verb. Docstrings of
    constructors describe parameters, and those of routes are text of the HTTP API.
    """
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name == "__init__":
            continue
        is_route = any(ast.unparse(each).startswith("router.") for each in node.decorator_list)
        if (text := ast.get_docstring(node)) and not is_route and not re.match(VERB, text):
            yield node.body[0].lineno, text[:40]


def yaml_comments(source: str) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of every comment of a YAML file; comments of lines that follow each other are one text."""
    block: list[str] = []
    start = 0
    for number, line in enumerate([*source.splitlines(), ""], start=1):
        comment = re.search(r"(?:^|\s)#\s?(.*)$", line)
        if comment:
            start = start if block else number
            block.append(comment.group(1))
        if block and not (comment and line.lstrip().startswith("#")):
            yield start, " ".join(block)
            block = []


def check_file(path: Path) -> Iterator[str]:
    """Yields one line for each finding in a .md, .py or .yaml file."""
    source = path.read_text(encoding="utf-8")
    for number, line in enumerate(source.splitlines(), start=1):
        if _CONFLICT.match(line):
            yield f"{path}:{number}: {line[:20]!r}: resolve the conflict of the merge"
    if path.suffix == ".md":
        texts: Iterable[tuple[int, str, bool]] = markdown_blocks(source)
    elif path.suffix == ".py":
        texts = ((line, text, False) for line, text in [*python_strings(source), *docstrings(source)])
    else:
        texts = ((line, text, False) for line, text in yaml_comments(source))
    if path.suffix == ".py" and path.name not in NOUNS:
        for line, words in without_verb(source):
            yield f"{path}:{line}: {words!r}: begin with a verb in the third person (Returns, Writes)"
    for line, text, prose in texts:
        if path.suffix == ".py" and (clause := re.match(CLAUSE, " ".join(text.split()))):
            yield f"{path}:{line}: {clause.group()[:50]!r}: begin with a noun or a verb"
        for found, advice in check_text(" ".join(text.split()), prose=prose):
            yield f"{path}:{line}: {found!r}: {advice}"


def project_files(root: Path) -> list[Path]:
    """Returns the files that `make lint` checks."""
    patterns = ("README.md", "docs/*.md", "examples/**/*.md", "jobs/configs/*.yaml")
    code = ("mempipe/**/*.py", "pipelines/*.py", "jobs/*.py", "examples/**/*.py")
    return sorted(path for pattern in (*patterns, *code) for path in root.glob(pattern) if path.name not in PROMPTS)


def main(names: list[str]) -> int:
    """Checks the files, or the whole project; returns 1 if there is a finding."""
    findings = [line for path in map(Path, names) or () for line in check_file(path)]
    if not names:
        findings = [line for path in project_files(Path()) for line in check_file(path)]
    print("\n".join(findings), end="\n" if findings else "")
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
