"""Fills the page templates. Every text is escaped, so that the texts of models, passages and settings stay text."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

# What HTML or UTF-8 cannot hold: control characters other than white space, and lone surrogates.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A figure in large type; `old` is what it was before training."""

    label: str
    value: str
    note: str
    old: str = ""


def render(template: str, **values: Any) -> str:
    """Returns `templates/TEMPLATE` filled with `values`. Raises UndefinedError for a name without a value."""
    return _environment().get_template(template).render(values)


def page_script(name: str) -> dict[str, str]:
    """Returns `templates/NAME` and its hash, as the template of a page takes them that runs this script alone."""
    script = files("mempipe.reports").joinpath(f"templates/{name}").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return {"script": Markup(script), "script_hash": digest}


def cut(text: str, max_chars: int) -> str:
    """Returns the text, with an ellipsis at its end where it is longer than `max_chars`."""
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("mempipe.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    environment.filters |= {"cut": cut, "short": _short, "words": _words}
    return environment


def _printable(value: Any) -> Any:
    is_plain = isinstance(value, str) and not isinstance(value, Markup)
    return _FORBIDDEN.sub("\ufffd", value) if is_plain else value


def _words(setting: str) -> str:
    """Returns the dotted name of a setting in words, its section first."""
    *sections, name = setting.split(".")
    return ": ".join([*sections, name]).replace("_", " ")


def _short(value: str | float) -> str:
    """Returns a coordinate with at most two digits."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
