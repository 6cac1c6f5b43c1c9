"""Sheets on which people rate memories turn by turn: a page to fill in a browser, which saves a CSV, or that CSV for a
spreadsheet.
"""

from __future__ import annotations

import csv
import hashlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from mempipe.evaluation.memory_quality import MemoryQuality, turn_qualities
from mempipe.evaluation.ratings import RATINGS
from mempipe.facts import is_memory_turn
from mempipe.reports.examples import golden_text
from mempipe.reports.pages import page_script, render
from mempipe.reports.traced import Traced
from mempipe.settings import ConfigError
from mempipe.storage.files import whole_file, write_text
from mempipe.text import changed_runs

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_SEED = 1


def write_sheet(path: Path, traced: Sequence[Traced], *, num_trajectories: str | int, title: str = "") -> int:
    """Writes a row for each memory turn of `num_trajectories` random trajectories, with RATINGS to be filled in: a page
    if `path` ends in .html, a CSV if it ends in .csv. Returns the number of trajectories.

    The same trajectories give the same sheet. The rater sees neither phase nor reward nor needed facts: a trajectory's
    name is a hash of its key. Raises ConfigError for another suffix, for a number that is none, for a CSV
    that exists, and where no trajectory has a memory.
    """
    wanted = int(num_trajectories) if str(num_trajectories).isdecimal() else 0
    if not wanted:
        raise ConfigError(f"--sheet is {num_trajectories}; expected a number of trajectories from 1, e.g. 20")
    if path.suffix not in (".html", ".csv"):
        raise ConfigError(f"--sheet writes {path}; expected a name that ends in .html (for a browser) or .csv")
    if path.suffix == ".csv" and path.exists():
        raise ConfigError(f"--sheet writes {path}, which exists and may hold ratings; name a new file")
    rateable = [each for each in traced if next(_memory_turns(each), None) is not None]
    if not rateable:
        raise ConfigError("no trajectory writes a memory, so there is nothing to rate")
    chosen = random.Random(_SEED).sample(rateable, min(wanted, len(rateable)))
    turns = [(each, index) for each in chosen for index in _memory_turns(each)]
    if path.suffix == ".csv":
        _write_csv(path, [_row(*turn) for turn in turns])
    else:
        write_text(path, _page(turns, title=title, file=path.stem))
    return len(chosen)


def automatic_counts(traced: Sequence[Traced]) -> dict[tuple[str, int], MemoryQuality]:
    """Returns the automatic counts of each memory turn by the name and the turn that a sheet gives it."""
    return {
        (_name(each), index + 1): counts
        for each in traced
        for index, counts in enumerate(turn_qualities(each.trajectory, each.question))
        if counts.memory_turns
    }


def _memory_turns(traced: Traced) -> Iterator[int]:
    if traced.text.has_memory:
        yield from (i for i in range(len(traced.trajectory.contexts)) if is_memory_turn(traced.trajectory, i))


def _row(traced: Traced, index: int) -> dict[str, str]:
    """Returns the columns of a turn, those to be filled in empty."""
    context = traced.trajectory.contexts[index]
    passages = [f"[{p.title}] {p.text}" for search in context.searches for p in search.passages]
    used = [text for use in context.tool_uses for text in use.texts]
    shown = {
        "trajectory": _name(traced),
        "turn": str(index + 1),
        "question": traced.question.text,
        "golden_answers": golden_text(traced.question, between=" | "),
        "query": "\n".join(search.query for search in context.searches),
        "text_read": "\n\n".join(text for text in [*passages, *used, context.chunk] if text),
        "memory_before": context.memory_before,
        "memory_before_tokens": str(context.num_memory_tokens),
        "memory_after": context.memory_after,
        "memory_after_tokens": str(context.num_new_memory_tokens),
        "budget_tokens": "" if traced.memory_budget is None else str(traced.memory_budget),
    }
    return shown | dict.fromkeys([*RATINGS, "comment"], "")


def _name(traced: Traced) -> str:
    """Returns a name that does not say where the trajectory is from, and that no spreadsheet takes for a number."""
    return f"t{hashlib.sha256(traced.key.encode()).hexdigest()[:12]}"


def _write_csv(path: Path, rows: Sequence[dict[str, str]]) -> None:
    with whole_file(path) as partial, partial.open("w", encoding="utf-8", errors="replace", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(rows[0])
        writer.writerows([_as_text(text) for text in row.values()] for row in rows)


def _page(turns: Sequence[tuple[Traced, int]], *, title: str, file: str) -> str:
    shown = [
        {
            "row": (row := _row(traced, index)),
            "memory": [*changed_runs(row["memory_before"], row["memory_after"])],
            "truncated": traced.trajectory.contexts[index].memory_truncated,
        }
        for traced, index in turns
    ]
    sheet = hashlib.sha256("".join(f"{each['row']}" for each in shown).encode(errors="replace")).hexdigest()[:12]
    return render(
        "rating.html",
        title=title,
        ratings=RATINGS,
        data={"sheet": sheet, "file": file, "ratings": [*RATINGS], "turns": shown},
        **page_script("rating.js"),
    )


def _as_text(text: str) -> str:
    """Returns the text so that a spreadsheet takes it for text and never for a formula."""
    return f"'{text}" if text.startswith(_FORMULA) else text
