"""The page of a training report: tiles, charts, examples, settings. It needs no scripts and nothing from outside."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from mempipe.evaluation.quality_by_turn import first_of_row, row_label
from mempipe.evaluation.rollout_metrics import full_history_tokens, prompt_tokens_by_turn
from mempipe.facts import is_memory_turn
from mempipe.reports.alarms import alarms
from mempipe.reports.charts import (
    SMALL,
    Bar,
    BarGroup,
    Chart,
    Figure,
    Key,
    Series,
    bar_chart,
    line_chart,
    number,
    percent,
    share_bar,
    whole_percent,
)
from mempipe.reports.examples import examples
from mempipe.reports.next_steps import next_steps
from mempipe.reports.pages import Tile, render
from mempipe.reports.training_data import turn_name
from mempipe.studies.budgets import hops_label
from mempipe.types import EndReason, Group

if TYPE_CHECKING:
    from mempipe.reports.training_data import Number, ReportData

Numbers = Mapping[str, "Number"]

_MEMORY_RATES = [  # name, label, the count that it is a share of, which way is better
    ("found_rate", "passage found", "", "↑ is better"),
    ("kept_rate", "fact kept", "facts_retrieved", "↑ is better"),
    ("lost_rate", "fact lost later", "facts_held", "↓ is better"),
    ("early_answer_rate", "too early", "answers", "↓ is better"),
    ("format_rate", "answered", "", "↑ is better"),
]
_SMALL_CHARTS = [
    (
        "What memory does while training",
        percent,
        [("kept_rate", "kept"), ("found_rate", "found"), ("early_answer_rate", "too early")],
    ),
    ("Staleness, in policy versions", number, [("staleness_mean", "mean"), ("staleness_max", "largest")]),
    (
        "Engine against learner, |Δ log-prob|",
        number,
        [
            ("abs_logprob_diff", "mean"),
            ("same_version/abs_logprob_diff", "tokens of the same version"),
            ("canary_mean_difference", "canary"),
        ],
    ),
    ("KL to the reference, per token", number, [("kl_ref", "KL")]),
    ("Entropy, nats per token", number, [("entropy", "entropy")]),
    ("Gradient norm", number, [("grad_norm", "norm")]),
    ("Learning rate", number, [("lr", "learning rate")]),
    ("Tokens whose ratio is clipped", percent, [("clip_high", "above"), ("clip_low", "below")]),
    ("Groups without variance, which teach nothing", percent, [("zero_variance_groups", "groups")]),
    ("Spread of rewards", number, [("reward_std", "standard deviation")]),
    ("Turns per trajectory", number, [("turns", "turns")]),
    ("Sampled tokens per second", number, [("tokens_per_second", "tokens/s")]),
    (
        "Completions in an engine",
        number,
        [("engine/running_mean", "sampled at a time, mean"), ("engine/waiting_max", "without room, at most")],
    ),
    ("Most of an engine's KV cache in use", percent, [("engine/kv_cache_use_max", "blocks")]),
    ("Prompt tokens that the prefix cache held", percent, [("engine/prefix_hit_rate", "tokens")]),
    ("Tokens that were guessed right (generation.ngram_tokens)", percent, [("engine/guessed_right", "tokens")]),
    (
        "Seconds of a sync",
        number,
        [("sync/send_seconds", "weights sent and loaded"), ("sync/drain_seconds", "of them waiting for completions")],
    ),
    ("Megabytes of a sync, to each engine", number, [("sync/megabytes", "MB")]),
    ("Model FLOPs utilisation", percent, [("model_flops_utilization", "MFU")]),
    ("Most memory of a learner rank, GiB", number, [("peak_memory_gib", "GiB")]),
    (
        "Memory of the machine that the largest actor of a role holds, GiB",
        number,
        [(f"memory/{role}_gib", role) for role in ("learner", "generator", "retriever", "run")],
    ),
]
_LINE_STYLES = ("after", "history", "extra")
_BY_TURN = {
    "kept_rate": ("Facts kept by turn", "Share of the needed facts found in a turn that its memory took."),
    "lost_rate": ("Facts lost by turn", "Share of the needed facts in a memory that the next one lacks."),
    "answer_in_memory": ("Answer in memory by turn", "Share of the memories that hold a gold answer."),
    "irrelevant_rate": (
        "Irrelevant words by turn",
        "Share of a memory's words that are neither in the question nor in the needed passages that were read.",
    ),
    "contradiction_rate": (
        "Contradictions by turn",
        "Share of a memory's statements about needed facts that do not hold the fact's value.",
    ),
}
"""Title and text of the chart of each rate that turns have."""
_MOST_TURNS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureSection:
    title: str
    style: str
    figures: list[Figure]
    folded: bool = False


def render_page(data: ReportData, numbers: Numbers) -> str:
    """Returns the whole page. Texts of models, questions and passages appear in it as text, whatever they hold."""
    return render(
        "training.html",
        name=data.name,
        facts=_facts(data, numbers),
        source=data.source,
        notices=data.notices,
        alarms=alarms(data.metrics, data.settings),
        tiles=_tiles(numbers),
        sections=[
            _section("Learning", _learning_chart(data, numbers), _hops_chart(numbers)),
            _section(
                "What reinforcement learning repaired",
                None if data.growing else _memory_chart(numbers),
                *(_by_turn_chart(numbers, rate) for rate in _BY_TURN),
                _end_chart(numbers),
            ),
            _section(
                "The context" if data.growing else "A bounded context", _context_chart(data), _memory_size_chart(data)
            ),
            _seconds_section(data),
            _section("Health of the training", *_small_charts(data), style="small", folded=True),
        ],
        examples=examples(data.before, data.after, text=data.text),
        has_memory=not data.growing,
        settings=_flatten(data.settings),
        commands=_commands(data),
    )


def _facts(data: ReportData, numbers: Numbers) -> list[str]:
    algorithm, model = data.settings.get("algorithm", {}), data.settings.get("model", {})
    return [
        f"{data.num_steps:,} learner steps",
        f"{numbers['num_questions']:,} held-out questions",
        f"{algorithm.get('loss', '?').upper()}, {algorithm.get('group_size', '?')} attempts per question",
        f"seed {data.settings.get('seed', '?')}",
        f"model {model.get('path') or 'made by the run'}",
        *([data.note] if data.note else []),
    ]


def _tiles(numbers: Numbers) -> list[Tile]:
    total = _value(numbers, "seconds_total")
    tiles = [
        _change_tile("Exact match", numbers, "em", _em_note(numbers)),
        None if _f1_is_em(numbers) else _change_tile("F1", numbers, "f1", _interval_note(numbers, "f1_end")),
        _change_tile("Right recalls", numbers, "measure_recall", "of an entity of an earlier chunk, from a memory"),
        _change_tile("Needed facts kept in memory", numbers, "kept_rate", "of those that a search brought up"),
        _change_tile(
            "Answered too early", numbers, "early_answer_rate", "of the answers: the last needed fact was not yet known"
        ),
        _context_tile(numbers),
        Tile(label="Time", value=_duration(total), note="all phases together") if total else None,
    ]
    return [tile for tile in tiles if tile is not None]


def _f1_is_em(numbers: Numbers) -> bool:
    """Returns whether F1 says nothing that exact match does not, as where all answers are single words."""
    return all(numbers.get(f"f1_{label}") == numbers.get(f"em_{label}") for label in ("start", "end"))


def _change_tile(label: str, numbers: Numbers, name: str, note: str) -> Tile | None:
    """Returns the value after training, and before it; a run that ended early may have the one before alone."""
    start, end = (_value(numbers, f"{name}_{side}") for side in ("start", "end"))
    if end is not None:
        return Tile(label=label, value=percent(end), note=note, old="" if start is None else percent(start))
    return None if start is None else Tile(label=f"{label} before training", value=percent(start), note=note)


def _em_note(numbers: Numbers) -> str:
    notes = [_interval_note(numbers, "em_end")]
    difference = [_value(numbers, f"em_difference{end}") for end in ("", "_low", "_high")]
    if all(value is not None for value in difference):
        mean, low, high = (100 * value for value in difference if value is not None)
        notes.append(f"{mean:+.1f} points ({low:+.1f} to {high:+.1f})")
    gained, lost = _value(numbers, "questions_gained"), _value(numbers, "questions_lost")
    if gained is not None and lost is not None:
        notes.append(f"{gained:.0f} questions gained, {lost:.0f} lost")
    return "; ".join(note for note in notes if note)


def _interval_note(numbers: Numbers, name: str) -> str:
    low, high = _value(numbers, f"{name}_low"), _value(numbers, f"{name}_high")
    return "" if low is None or high is None else f"95 % interval {percent(low)} to {percent(high)}"


def _context_tile(numbers: Numbers) -> Tile | None:
    bounded, full = _value(numbers, "context_tokens_per_turn"), _value(numbers, "full_history_tokens_per_turn")
    if not bounded or not full:
        return None
    note = f"a full history would have carried {number(full)}: {full / bounded:.1f} times as much"
    return Tile(label="Prompt tokens per turn", value=number(bounded), note=note)


def _learning_chart(data: ReportData, numbers: Numbers) -> Figure | None:
    lines = []
    for label, style, points in _training_curves(data):
        window = max(1, len(points) // 12)
        if window > 1:
            lines.append(Series(label="", style=f"{style} faint", points=points))
        lines.append(Series(label=label, style=style, points=_smooth(points, window)))
    held_out = [
        (0, _value(numbers, "em_start")),
        *_column(data.metrics, "validation/em"),
        (data.num_steps, _value(numbers, "em_end")),
    ]
    points = [(step, value) for step, value in dict(held_out).items() if value is not None]
    if points:
        held_out_line = Series(
            label="exact match, held-out questions",
            style="held-out",
            points=points,
            markers=True,
            joined=len(points) > 2,  # two ends say nothing of the way between them
        )
        lines.append(held_out_line)
    if not lines:
        return None
    chart = line_chart(lines, title="Reward and exact match by learner step", x_label="learner step", y_format=percent)
    caption = "Thin lines are single steps, bold ones their running mean."
    if len(points) == 2:
        caption += " Held-out questions were asked before and after only; evaluation.every_steps asks them in between."
    return _figure("Reward and exact match by step", chart, lines, caption)


def _training_curves(data: ReportData) -> list[tuple[str, str, list[tuple[float, float]]]]:
    """Returns (label, style, points) of reward and exact match, as one curve where they are the same."""
    em, reward = _column(data.metrics, "em"), _column(data.metrics, "reward")
    if em == reward:
        curves = [("exact match, which is the reward, training", "after", em)]
    else:
        curves = [("exact match, training", "after", em), ("reward, training", "reward", reward)]
    return [curve for curve in curves if curve[2]]


def _hops_chart(numbers: Numbers) -> Figure | None:
    groups = []
    asked = [re.fullmatch(r"num_questions_(\d+)_hops", name) for name in numbers]
    for hops in sorted(int(match[1]) for match in asked if match):
        note, bars = f"{numbers[f'num_questions_{hops}_hops']} questions", _pair(numbers, f"em_{hops}_hops")
        groups.append(BarGroup(label=hops_label(hops), note=note, bars=bars))
    if not groups:
        return None
    chart = bar_chart(groups, title="Exact match by hops, before and after", y_max=1.0)
    return _figure("Exact match by hops", chart, _BEFORE_AFTER, "Held-out questions; whiskers are 95 % intervals.")


def _memory_chart(numbers: Numbers) -> Figure | None:
    groups = []
    for name, label, base, better in _MEMORY_RATES:
        counts = [numbers[f"{base}_{end}"] for end in ("start", "end") if f"{base}_{end}" in numbers]
        of = f"of {' → '.join(f'{count:,}' for count in counts)}\n" if counts else ""
        if bars := _pair(numbers, name):
            groups.append(BarGroup(label=label, note=of + better, bars=bars))
    if not groups:
        return None
    chart = bar_chart(groups, title="Memory quality before and after", y_max=1.0)
    text = (
        "Passages and facts that the question needs. Kept: of the facts that a search brought up. Lost: of the facts "
        "in memory, so an agent that keeps nothing loses nothing. Too early: of the answers."
    )
    return _figure("Memory quality", chart, _BEFORE_AFTER, text)


def _by_turn_chart(numbers: Numbers, rate: str) -> Figure | None:
    (title, text), groups = _BY_TURN[rate], []
    for turns in dict.fromkeys(row_label(first_of_row(turn)) for turn in range(1, _MOST_TURNS)):
        name = turn_name(rate, turns)
        counts = [numbers[f"{name}_{end}_cases"] for end in ("start", "end") if f"{name}_{end}_cases" in numbers]
        if bars := _pair(numbers, name):
            note = f"of {' → '.join(f'{count:,}' for count in counts)}"
            groups.append(BarGroup(label=f"turn {turns}", note=note, bars=bars))
    if len(groups) < 2:
        return None
    chart = bar_chart(groups, title=f"{title}, before and after", y_max=1.0)
    return _figure(title, chart, _BEFORE_AFTER, f"{text} Whiskers are 95 % intervals.")


def _end_chart(numbers: Numbers) -> Figure | None:
    named = [(str(reason).replace("_", " "), _pair(numbers, f"end_reason_{reason}")) for reason in EndReason]
    groups = [BarGroup(label=label, bars=bars) for label, bars in named if any(bar.value for bar in bars)]
    if not groups:
        return None
    chart = bar_chart(groups, title="End reasons before and after", y_max=1.0)
    return _figure("How trajectories ended", chart, _BEFORE_AFTER, "Share of the trajectories.")


def _context_chart(data: ReportData) -> Figure | None:
    trajectories = [trajectory for group in data.after or data.before for trajectory in group.trajectories]
    own = _by_turn([[float(tokens) for tokens in prompt_tokens_by_turn(t, growing=data.growing)] for t in trajectories])
    if not own:
        return None
    lines = [Series(label=data.context_label, style="after", points=own, markers=True)]
    text = "Mean over the trajectories that got so far."
    if not data.growing:
        full = _by_turn([[float(tokens) for tokens in full_history_tokens(t)] for t in trajectories])
        lines.append(Series(label="full history, same trajectories", style="history", points=full, markers=True))
        text += " A full history holds every earlier action and passage."
    chart = line_chart(lines, title="Prompt tokens by turn", x_label="turn")
    return _figure("Prompt tokens by turn", chart, lines, text)


def _memory_size_chart(data: ReportData) -> Figure | None:
    lines = []
    for label, style, groups in (("before, mean", "before", data.before), ("after, mean", "after", data.after)):
        sizes = _memory_sizes(groups)
        if any(sizes):
            lines.append(Series(label=label, style=style, points=_by_turn(sizes), markers=True))
    sizes = _memory_sizes(data.after or data.before)
    if not lines or data.memory_budget is None:
        return None
    when = "after" if data.after else "before"  # of a run that ended early
    lines.append(Series(label=f"{when}, largest", style="history", points=_by_turn(sizes, max), markers=True))
    last = max(point[0] for line in lines for point in line.points)
    lines.append(
        Series(
            label=f"budget, {data.memory_budget:,}",
            style="budget",
            points=[(1, data.memory_budget), (max(last, 2.0), data.memory_budget)],  # a line for a single turn, too
        )
    )
    chart = line_chart(lines, title="Memory tokens by turn against the budget", x_label="turn")
    return _figure(
        "Memory tokens by turn", chart, lines, "The memory that a turn left; no memory is ever longer than the budget."
    )


def _memory_sizes(groups: Sequence[Group]) -> list[list[float]]:
    """Returns the tokens of the memories that each trajectory left, by turn: 0 for a turn that left none and was
    followed by another.
    """
    return [
        [float(context.num_new_memory_tokens) for i, context in enumerate(t.contexts) if is_memory_turn(t, i)]
        for group in groups
        for t in group.trajectories
    ]


def _seconds_section(data: ReportData) -> FigureSection:
    return _section(
        "Where the time went",
        _share_figure("Phases of the run", data.seconds),
        _share_figure("Inside the learner steps", data.train_seconds),
        style="wide",
    )


def _share_figure(title: str, seconds: Mapping[str, float]) -> Figure | None:
    parts = sorted(((name, value) for name, value in seconds.items() if value > 0), key=lambda part: -part[1])
    if not parts:
        return None
    total = sum(value for _, value in parts)
    keys = [
        Key(
            style=f"part-{index}",
            label=name.replace("_", " "),
            value=f"{_duration(value)}, {whole_percent(value / total)}",
        )
        for index, (name, value) in enumerate(parts)
    ]
    return Figure(title=title, chart=share_bar(parts, title=title), keys=keys)


def _small_charts(data: ReportData) -> list[Figure]:
    figures = []
    for title, y_format, columns in _SMALL_CHARTS:
        lines = [
            Series(label=label, style=style, points=points)
            for (name, label), style in zip(columns, _LINE_STYLES, strict=False)
            if (points := _column(data.metrics, name))
        ]
        if lines:
            chart = line_chart(lines, title=title, x_label="learner step", y_format=y_format, size=SMALL)
            figures.append(_figure(title, chart, lines if len(lines) > 1 else [], ""))
    return figures


def _commands(data: ReportData) -> list[tuple[str, str]]:
    """Returns commands, each with its purpose."""
    folder = data.folder or f"{data.settings.get('output', 'runs')}/{data.name}"
    return next_steps(Path(folder), {**data.settings, "num_steps": data.num_steps})


def _section(title: str, *figures: Figure | None, style: str = "pair", folded: bool = False) -> FigureSection:
    drawn = [figure for figure in figures if figure is not None]
    return FigureSection(title=title, style=style, figures=drawn, folded=folded)


def _figure(title: str, chart: Chart, lines: Sequence[Series], caption: str) -> Figure:
    keys = [Key(style=line.style, label=line.label) for line in lines if line.label]
    return Figure(title=title, chart=chart, keys=keys, caption=caption)


_BEFORE_AFTER = [Series(label="before", style="before", points=[]), Series(label="after", style="after", points=[])]


def _pair(numbers: Numbers, name: str) -> list[Bar]:
    bars = []
    for label, style in (("start", "before"), ("end", "after")):
        value = _value(numbers, f"{name}_{label}")
        if value is not None:
            low, high = _value(numbers, f"{name}_{label}_low"), _value(numbers, f"{name}_{label}_high")
            bars.append(Bar(value=value, style=style, low=low, high=high))
    return bars


def _value(numbers: Numbers, name: str) -> float | None:
    value = numbers.get(name)
    return float(value) if isinstance(value, int | float) else None


def _column(metrics: Sequence[Mapping[str, float]], name: str) -> list[tuple[float, float]]:
    """Returns (step, value) of a metric, whether it is logged as `name` or as `learner/name`. Steps start at 1; step 0
    is an evaluation.
    """
    found = []
    for row in metrics:
        for key in (name, f"learner/{name}"):
            if row["step"] > 0 and math.isfinite(row.get(key, math.nan)):
                found.append((row["step"], row[key]))
                break
    return found


def _smooth(points: Sequence[tuple[float, float]], window: int) -> list[tuple[float, float]]:
    """Returns the mean of the last `window` points, of fewer at the start."""
    sums = [0.0, *accumulate(value for _, value in points)]
    starts = [max(0, index + 1 - window) for index in range(len(points))]
    return [(points[i][0], (sums[i + 1] - sums[start]) / (i + 1 - start)) for i, start in enumerate(starts)]


def _by_turn(
    rows: Sequence[Sequence[float]], combine: Callable[[Sequence[float]], float] = fmean
) -> list[tuple[float, float]]:
    longest = max((len(row) for row in rows), default=0)
    return [(float(turn + 1), combine([row[turn] for row in rows if len(row) > turn])) for turn in range(longest)]


def _duration(seconds: float | None) -> str:
    seconds = seconds or 0.0
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for name, value in values.items():
        flat += _flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(f"{prefix}{name}", value)]
    return flat
