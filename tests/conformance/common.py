"""What the conformance tables share: the shape of a case, of a deliberate difference,
and when two values are the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypeVar

from mempipe.agents.budget import Budget

B = TypeVar("B", bound=Budget)

Case = dict[str, Any]
"""One published behaviour: id, system, function, input, expected, source and perhaps a note."""
Adapter = Callable[[Case], Any]
"""Calls our function with a case's input and gives the answer in the shape of the case's `expected`."""


def limited(kind: type[B], limits: Mapping[str, Any]) -> B:
    """The budget of an agent with those of `limits` that mean something to it."""
    return kind(**{name: value for name, value in limits.items() if name in kind.model_fields})


@dataclass(frozen=True)
class Difference:
    """Where we mean to differ. It covers every case of `function` ("System:function") for which `applies` is true,
    by a property of the input and never by id; there our answer must be `ours(case)`, so the difference itself is
    checked too."""

    function: str
    applies: Callable[[Case], bool]
    ours: Callable[[Case], Any]
    reason: str


def same(got: Any, expected: Any) -> bool:
    """Equality of nested values.
    Numbers written with at most six decimals were rounded to them; all others must agree to 1e-12.
    """
    if isinstance(expected, dict):
        return (
            isinstance(got, dict)
            and got.keys() == expected.keys()
            and all(same(got[k], v) for k, v in expected.items())
        )
    if isinstance(expected, list | tuple):
        return isinstance(got, list | tuple) and len(got) == len(expected) and all(map(same, got, expected))
    if isinstance(expected, float) and isinstance(got, int | float):
        decimals = -int(Decimal(repr(expected)).as_tuple().exponent)
        return got == expected or abs(got - expected) <= (1e-6 if decimals <= 6 else 1e-12) * max(1.0, abs(expected))
    return got == expected
