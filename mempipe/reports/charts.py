"""Small charts as shapes, which a template writes as SVG and the page's style sheet colours: lines, grouped bars with
intervals, one stacked bar.

They are drawn here and not by matplotlib: one SVG follows the reader's light or dark theme by CSS variables, its text
can be selected and has the page's font, and it takes 1 to 3 kB. The same line chart by matplotlib takes 15 kB, has its
colours written into every path and so needs one file per theme.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

WIDE, SMALL, NARROW = (560, 300), (360, 210), (320, 260)  # width and height in px; the page scales them
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 16, 14, 46
_NUM_STYLES = 10  # part-0 to part-9 of the style sheet
_SHARE_SIZE = (1000, 1)  # the page stretches it
_CHAR_WIDTH, _VALUE_CHAR_WIDTH, _ROW = 6.8, 6.2, 16
_OVERHANG = 2  # letters by which a word may be wider than its room before it is split, fewer in a small one
_VALUE_OVERHANG = 2  # px by which a value may be wider than its bar
_GAP = 4  # px between two bars, less between narrow ones, and between two labels
_LEAST_NOTE_ROOM = 60  # px; notes below narrower groups would be columns of single words


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """An SVG element. `place` holds its coordinates by attribute, `style` its classes, `hint` its tooltip."""

    tag: str
    place: Mapping[str, float | str]
    style: str
    text: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A drawn chart; sizes in px. With a `style` the page stretches it to any shape. `narrow` is the same chart for a
    phone, where the texts of a wide one would be too small to read."""

    title: str
    width: int
    height: int
    shapes: Sequence[Shape]
    style: str = ""
    narrow: Chart | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """An entry of a legend."""

    style: str
    label: str
    value: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A chart with its title, legend and caption."""

    title: str
    chart: Chart
    keys: Sequence[Key] = ()
    caption: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line. `style` is a class of the style sheet; points that are not finite leave a gap. Without `joined` only its
    markers are drawn.

    An interval is drawn as a whisker: x and its two ends.
    """

    label: str
    style: str
    points: Sequence[tuple[float, float]]
    markers: bool = False
    joined: bool = True
    intervals: Sequence[tuple[float, float, float]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar with an optional interval."""

    value: float
    style: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BarGroup:
    label: str
    note: str = ""
    bars: Sequence[Bar | None] = field(default_factory=list)  # None keeps a place empty


def style_of(number: int) -> str:
    """Returns the class of the colour of the run or the line with that number."""
    return f"part-{number % _NUM_STYLES}"


def percent(value: float) -> str:
    """Writes 0.625 as 62.5 %, without a needless digit, and a share below 1 % with two digits."""
    text = f"{100 * value:.1f}" if not 0 < abs(value) < 0.01 else f"{100 * value:.2g}"
    return f"{text.removesuffix('.0')} %"


def whole_percent(value: float) -> str:
    """Writes 0.625 as 62 %, for narrow places, and what would round to 0 as <1 %."""
    return "<1 %" if 0 < value < 0.005 else f"{100 * value:.0f} %"


def bare_percent(value: float) -> str:
    """Writes 0.625 as 62, where the axis says that it is percent."""
    return whole_percent(value).removesuffix(" %")


def _nothing(value: float) -> str:
    return ""


def _width(texts: Sequence[str]) -> float:
    return max(map(len, texts), default=0) * _VALUE_CHAR_WIDTH


def number(value: float) -> str:
    """Writes at most three significant digits, large numbers with separators."""
    if value and (abs(value) < 1e-3 or abs(value) >= 1e7):
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def with_legend(figure: Figure) -> Chart:
    """Returns the figure's chart with its legend drawn below it, for a separate file."""
    chart, shapes, x, row = figure.chart, [], float(_LEFT), 0
    for key in figure.keys:
        label = f"{key.label} ({key.value})" if key.value else key.label
        lines = _wrapped(label, chart.width - _RIGHT - _LEFT - 10)
        width = 34 + _CHAR_WIDTH * max(map(len, lines), default=0)
        if x > _LEFT and x + width > chart.width - _RIGHT:
            x, row = float(_LEFT), row + 1
        y = chart.height + 6 + _ROW * row
        shapes.append(Shape(tag="circle", place={"cx": x, "cy": y, "r": 4}, style=f"marker {key.style}"))
        shapes += [_text(line, x + 10, y + 4 + _ROW * below, "start") for below, line in enumerate(lines)]
        x, row = x + width, row + max(len(lines) - 1, 0)
    height = chart.height + 2 + _ROW * (row + 1) if shapes else chart.height
    return replace(chart, shapes=[*chart.shapes, *shapes], height=height)


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_format: Callable[[float], str] = number,
    y_max: float | None = None,
    doubles: bool = False,
    size: tuple[int, int] = WIDE,
) -> Chart:
    """Draws lines over a common x axis. The y axis starts at 0 unless a value is below it. With `doubles` two x have
    the distance of their logarithms, and the ticks are at the x themselves.
    """
    ends = [(x, end) for line in series for x, *both in line.intervals for end in both]
    finite = [(x, y) for line in series for x, y in line.points if math.isfinite(y)] + ends
    assert finite, f"chart {title!r} has no finite point"
    lowest, highest = min(0.0, *(y for _, y in finite)), max(y for _, y in finite)
    y_ticks = _ticks(lowest, y_max or (highest if highest > lowest else lowest + 1), size[1] // 60)
    x_low, x_high = min(x for x, _ in finite), max(x for x, _ in finite)
    x_ticks = [tick for tick in _ticks(x_low, x_high, size[0] // 80, whole=True) if x_low <= tick <= x_high]
    plot = _Plot(
        x=(x_low, x_high if x_high > x_low else x_low + 1),
        y=(y_ticks[0], y_ticks[-1]),
        size=size,
        scale=math.log if doubles else float,
    )
    if doubles:
        x_ticks = _apart(plot, sorted({x for x, _ in finite}))
    parts = [*_grid(plot, y_ticks, y_format), *_x_axis(plot, x_ticks or [x_low], x_label)]
    for line in series:
        parts += _line(plot, line)
    chart = _chart(title, parts, size)
    if size != WIDE:
        return chart
    options: dict[str, Any] = {"title": title, "x_label": x_label, "y_format": y_format, "y_max": y_max}
    return replace(chart, narrow=line_chart(series, **options, doubles=doubles, size=NARROW))


def bar_chart(
    groups: Sequence[BarGroup], *, title: str, y_max: float | None = None, size: tuple[int, int] = WIDE
) -> Chart:
    """Draws shares as bars side by side in groups, each with its value above it and, where given, its interval."""
    drawn = [bar for group in groups for bar in group.bars if bar is not None]
    tops = [max(bar.value, bar.high or 0.0) for bar in drawn]
    y_ticks = _ticks(0.0, y_max or max(tops, default=1.0) or 1.0, 5)
    plot = _Plot(x=(0.0, float(len(groups))), y=(0.0, y_ticks[-1]), size=size)
    room = plot.px(1) - plot.px(0)
    widths = [min(44.0, 0.76 * room / max(1, len(group.bars))) for group in groups]
    formats = [whole_percent, bare_percent] if size != WIDE else [percent, whole_percent, bare_percent]
    most = min(widths, default=0.0) + _VALUE_OVERHANG
    write = next((each for each in formats if _width([each(bar.value) for bar in drawn]) <= most), _nothing)
    parts = _grid(plot, y_ticks, percent)
    num_rows = 0
    for index, (group, width) in enumerate(zip(groups, widths, strict=True)):
        centre = plot.px(index + 0.5)
        left = centre - width * len(group.bars) / 2
        for place, bar in enumerate(group.bars):
            if bar is not None:
                parts += _bar(plot, bar, left + place * width, width, write)
        below = [(line, "label") for line in _wrapped(group.label, room)]
        notes = [(line, "tick") for part in group.note.splitlines() for line in _wrapped(part, room)]
        notes = notes if room >= _LEAST_NOTE_ROOM else []
        num_rows = max(num_rows, len(below) + len(notes))
        for row, (text, style) in enumerate([*below, *notes]):
            parts.append(_text(text, centre, plot.bottom + 17 + _ROW * row, style))
    chart = _chart(title, parts, (size[0], size[1] + _ROW * max(0, num_rows - 2)))
    return replace(chart, narrow=bar_chart(groups, title=title, y_max=y_max, size=NARROW)) if size == WIDE else chart


def share_bar(parts: Sequence[tuple[str, float]], *, title: str) -> Chart:
    """Draws one horizontal bar cut into parts; part i has the class `part-i`."""
    width, height = _SHARE_SIZE
    total = sum(value for _, value in parts)
    assert total > 0, f"chart {title!r} has nothing to share"
    shapes, x = [], 0.0
    for index, (label, value) in enumerate(parts):
        place = {"x": x, "y": 0, "width": width * value / total, "height": height}
        shapes.append(Shape(tag="rect", place=place, style=f"part-{index}", hint=f"{label}: {percent(value / total)}"))
        x += width * value / total
    return Chart(title=title, width=width, height=height, shapes=shapes, style="share")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plot:
    """Turns data coordinates into pixels."""

    x: tuple[float, float]
    y: tuple[float, float]
    size: tuple[int, int] = WIDE
    scale: Callable[[float], float] = float

    @property
    def right(self) -> float:
        return self.size[0] - _RIGHT

    @property
    def bottom(self) -> float:
        return self.size[1] - _BOTTOM

    def px(self, x: float) -> float:
        low, high = map(self.scale, self.x)
        return _LEFT + (self.scale(x) - low) / (high - low) * (self.right - _LEFT)

    def py(self, y: float) -> float:
        return self.bottom - (y - self.y[0]) / (self.y[1] - self.y[0]) * (self.bottom - _TOP)


def _ticks(low: float, high: float, about: int, *, whole: bool = False) -> list[float]:
    """Returns round values from at or below `low` to at or above `high`."""
    raw = max(high - low, 1e-12) / max(1, about)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * (1 - 1e-9))
    if whole:
        step = max(1.0, math.ceil(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * index for index in range(first, last + 1)]


def _apart(plot: _Plot, ticks: Sequence[float]) -> list[float]:
    """Returns ascending ticks without those whose number would touch the one before."""
    kept: list[float] = []
    for tick in ticks:
        if not kept or plot.px(tick) - plot.px(kept[-1]) > _CHAR_WIDTH * (len(f"{tick:,.0f}") + 1):
            kept.append(tick)
    return kept


def _grid(plot: _Plot, ticks: Sequence[float], y_format: Callable[[float], str]) -> list[Shape]:
    parts = []
    for tick in ticks:
        y = plot.py(tick)
        parts.append(_rule(_LEFT, y, plot.right, y, "axis" if tick == 0 else "grid"))
        parts.append(_text(y_format(tick), _LEFT - 8, y + 4, "tick end"))
    return parts


def _x_axis(plot: _Plot, ticks: Sequence[float], label: str) -> list[Shape]:
    parts = [_text(f"{tick:,.0f}", plot.px(tick), plot.bottom + 17, "tick") for tick in ticks]
    return [*parts, _text(label, (_LEFT + plot.right) / 2, plot.bottom + 37, "tick")]


def _line(plot: _Plot, line: Series) -> list[Shape]:
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in line.points:
        if math.isfinite(y):
            runs[-1].append((plot.px(x), plot.py(y)))
        elif runs[-1]:
            runs.append([])
    parts = [_rule(plot.px(x), plot.py(low), plot.px(x), plot.py(high), "interval") for x, low, high in line.intervals]
    for run in runs:
        if len(run) > 1 and line.joined:
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in run)
            parts.append(Shape(tag="polyline", place={"points": points}, style=f"line {line.style}"))
        if line.markers or len(run) == 1:
            parts += [
                Shape(tag="circle", place={"cx": x, "cy": y, "r": 4}, style=f"marker {line.style}") for x, y in run
            ]
    return parts


def _bar(plot: _Plot, bar: Bar, x: float, width: float, y_format: Callable[[float], str]) -> list[Shape]:
    y, gap = plot.py(bar.value), min(_GAP, 0.3 * width)
    place = {"x": x + gap / 2, "y": y, "width": width - gap, "height": max(plot.bottom - y, 0.0), "rx": 2}
    parts = [Shape(tag="rect", place=place, style=f"bar {bar.style}")]
    top = y
    if bar.low is not None and bar.high is not None:
        middle, top = x + width / 2, plot.py(bar.high)
        parts.append(_rule(middle, plot.py(bar.low), middle, top, "interval"))
    parts.append(_text(y_format(bar.value), x + width / 2, top - 5, "value"))
    return parts


def _wrapped(text: str, room: float) -> list[str]:
    width = max(4, math.floor((room - _GAP) / _CHAR_WIDTH))
    longest, overhang = max(map(len, text.split()), default=0), min(_OVERHANG, max(1, width // 5))
    return textwrap.wrap(text, longest if width < longest <= width + overhang else width)


def _rule(x1: float, y1: float, x2: float, y2: float, style: str) -> Shape:
    return Shape(tag="line", place={"x1": x1, "y1": y1, "x2": x2, "y2": y2}, style=style)


def _text(text: str, x: float, y: float, style: str) -> Shape:
    return Shape(tag="text", place={"x": x, "y": y}, style=style, text=text)


def _chart(title: str, shapes: Sequence[Shape], size: tuple[int, int]) -> Chart:
    return Chart(title=title, width=size[0], height=size[1], shapes=shapes)
