"""HTML elements in which text can only be text: every string is escaped unless an element made it."""

from __future__ import annotations

import html
import re

# What HTML or UTF-8 cannot hold: control characters other than white space, and lone surrogates.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
_VOID = frozenset({"br", "meta", "line", "rect", "circle", "path", "polyline"})


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def element(tag: str, /, *children: str | None, **attributes: str | float | None) -> Markup:
    """An element. Children that are no `Markup` are escaped; None children and attributes are left out.

    Attribute names are given as in Python: `class_`, `stroke_width` and `aria_label` become class, stroke-width and
    aria-label.
    """
    values = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    head = "".join(f' {key}="{_escape(_short(value))}"' for key, value in values.items())
    if tag in _VOID and not children:
        return Markup(f"<{tag}{head}/>")
    return Markup(f"<{tag}{head}>{fragment(*children)}</{tag}>")


def fragment(*children: str | None) -> Markup:
    """Children one after the other, without an element around them."""
    return Markup(
        "".join(child if isinstance(child, Markup) else _escape(child) for child in children if child is not None)
    )


def _escape(text: str) -> str:
    return html.escape(_FORBIDDEN.sub("\ufffd", text), quote=True)


def _short(value: str | float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
