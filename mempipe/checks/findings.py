"""Findings of checks, and the refusal of a command that cannot work."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from mempipe.credentials import without_passwords
from mempipe.settings import ConfigError

Level = Literal["ok", "note", "fatal"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was checked: it is right, worth knowing, or fatal."""

    level: Level
    text: str
    absent: str = ""
    """The path or the address of what this machine lacks and another one may have (`ConfigError.absent`)."""

    @property
    def fatal(self) -> bool:
        return self.level == "fatal"

    def __str__(self) -> str:
        return f"{self.level:5}  {without_passwords(self.text)}"


def ok(text: str) -> Finding:
    return Finding("ok", text)


def note(text: str) -> Finding:
    return Finding("note", text)


def fatal(text: str, *, absent: str = "") -> Finding:
    return Finding("fatal", text, absent)


def refused(error: ConfigError, *, what: str = "") -> Finding:
    """Returns the message of the error as fatal, after `what`."""
    return fatal(f"{what}: {error}" if what else str(error), absent=error.absent)


def attempt(check: Callable[[], Any], text: str) -> Finding:
    """Runs `check`: returns `text` as right, or the message of its ConfigError as fatal."""
    try:
        check()
    except ConfigError as error:
        return refused(error)
    return ok(text)


def refuse(findings: Iterable[Finding]) -> None:
    """Raises ConfigError with one line for every fatal finding; does nothing when there is none."""
    if texts := [finding.text for finding in findings if finding.fatal]:
        raise ConfigError("\n".join(texts))
