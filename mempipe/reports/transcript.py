"""Writes trajectories side by side as one SVG picture: for each turn the search, the passage it found and the memory.

The picture has its own colours for light and dark pages, so one file fits a README, slides and a printed page.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.cells import cell_len

from mempipe.reports.examples import ShownTurn, golden_text, shown_turns, verdict
from mempipe.reports.pages import cut, render
from mempipe.reports.traced import Traced
from mempipe.settings import ConfigError
from mempipe.storage.files import whole_file

_COLUMN, _GAP, _MARGIN = 410, 20, 20  # px
_LINE = 19  # px from one line of text to the next
_CHARS = 50  # characters in a line of a column, at 14 px
_LABEL = 64  # px that the label of a row takes
_FILLER = "\x00"  # stands for the second half of a wide character while a text is wrapped
_MAX_COLUMNS = 2
_MAX_TEXT = 240  # characters of a passage, a memory or an answer
_HEADS = {"before": "before training", "after": "after training"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of text; x and y in px, y is its baseline. `style` is a class of the template."""

    x: int
    y: int
    style: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """The background of a turn or an answer; all sizes in px."""

    x: int
    y: int
    width: int
    height: int
    style: str


def write_transcript(path: Path, shown: Sequence[Traced]) -> None:
    """Writes `shown`, one or two trajectories of one question, as an SVG file.

    Raises ConfigError if there are more trajectories, or if their questions differ.
    """
    if len(shown) > _MAX_COLUMNS or len({each.question.text for each in shown}) != 1:
        raise ConfigError(
            f"--svg draws at most {_MAX_COLUMNS} trajectories of one question, and {len(shown)} were chosen; "
            "choose them by --question, --phase and --limit"
        )
    question = shown[0].question
    drawing = _Drawing()
    drawing.text(f"Question: {question.text}", style="head", chars=2 * _CHARS)
    drawing.text(f"Right answer: {golden_text(question)}", style="quiet", chars=2 * _CHARS)
    top, bottoms = drawing.y + 12, []
    for index, each in enumerate(shown):
        drawing.x, drawing.y = _MARGIN + index * (_COLUMN + _GAP), top
        _draw_trajectory(drawing, each)
        bottoms.append(drawing.y)
    with whole_file(path) as file:
        file.write_text(
            render(
                "transcript.svg",
                title=f"{question.text} Attempts turn by turn",
                width=2 * _MARGIN + len(shown) * _COLUMN + (len(shown) - 1) * _GAP,
                height=max(bottoms) + _MARGIN - 8,
                boxes=drawing.boxes,
                lines=drawing.lines,
            ),
            encoding="utf-8",
        )


class _Drawing:
    """Collects lines and boxes from top to bottom of one column."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.boxes: list[Box] = []
        self.x, self.y = _MARGIN, _MARGIN

    def text(self, text: str, *, style: str = "", label: str = "", indent: int = 0, chars: int = _CHARS) -> None:
        """Adds a text, wrapped to lines of `chars`, with an optional label to its left."""
        for index, part in enumerate(_wrapped(cut(text, _MAX_TEXT), chars) or [""]):
            self.y += _LINE
            if label and index == 0:
                self.lines.append(Line(x=self.x + indent, y=self.y, style="label", text=label))
            left = self.x + indent + (_LABEL if label else 0)
            self.lines.append(Line(x=left, y=self.y, style=style, text=part))

    def box(self, top: int, style: str = "turn") -> None:
        """Puts a box behind everything from `top` to the last line, and leaves a gap below it."""
        self.boxes.append(Box(x=self.x, y=top, width=_COLUMN, height=self.y - top + 12, style=style))
        self.y += 22


def _wrapped(text: str, chars: int) -> list[str]:
    """Returns the text in lines of at most `chars` letters. A Chinese character is as wide as two of them."""
    padded = "".join(letter + _FILLER * (cell_len(letter) - 1) for letter in text)
    return [line.replace(_FILLER, "") for line in textwrap.wrap(padded, chars)]


def _draw_trajectory(drawing: _Drawing, traced: Traced) -> None:
    trajectory = traced.trajectory
    drawing.text(_HEADS.get(traced.phase, traced.phase), style="head")
    drawing.y += 10
    turns = shown_turns(trajectory, traced.question, text=traced.text)
    for turn in turns:
        if turn is not turns[-1] or turn.queries or trajectory.answer is None:  # else the answer says all of it
            _draw_turn(drawing, turn)
    top, right = drawing.y, trajectory.em == 1.0
    drawing.y += 3
    answer = trajectory.answer.strip() if trajectory.answer is not None else "none"
    drawing.text(
        f"{answer} ({verdict(trajectory, traced.question)})",
        label="answer",
        indent=12,
        style="right" if right else "wrong",
        chars=_CHARS - 8,
    )
    drawing.box(top, "right-box" if right else "wrong-box")


def _draw_turn(drawing: _Drawing, turn: ShownTurn) -> None:
    top, inner = drawing.y, _CHARS - 8
    drawing.y += 3
    numbers = f"turn {turn.number}" if turn.last == turn.number else f"turns {turn.number} to {turn.last}"
    drawing.text(" · ".join(filter(None, (numbers, turn.sizes))), style="quiet", indent=12, chars=_CHARS)
    for query in turn.queries:
        drawing.text(query, label="search", indent=12, chars=inner)
    for passage in [each for each in turn.passages if each.needed][:1] or turn.passages[:1]:
        drawing.text(passage.text, label="read", indent=12, style="quiet" if turn.queries else "", chars=inner)
    if not turn.queries and turn.action:
        drawing.text(turn.action, label="wrote", indent=12, chars=inner)
    memory = " ".join(text for kind, text in turn.memory if kind != "dropped")
    if turn.wrote:
        drawing.text(memory or "(empty)", label="memory", indent=12, style="memory", chars=inner)
    drawing.box(top)
