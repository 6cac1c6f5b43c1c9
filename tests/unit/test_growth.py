"""The curves of benchmarks.growth do their work, and exponents are slopes."""

from __future__ import annotations

import pytest

from benchmarks.growth import CURVES, Point, exponent, line, measured


def points(*seconds: float) -> list[Point]:
    return [Point(size=10 ** (i + 1), seconds=value, mib=1.0) for i, value in enumerate(seconds)]


def test_an_exponent_is_the_slope_between_the_largest_two_sizes():
    assert exponent(points(1.0, 10.0), "seconds") == "1.00"
    assert exponent(points(3.0, 3.0), "seconds") == "0.00"
    assert exponent(points(0.01, 10.0), "seconds") == "–"
    assert exponent(points(1.0), "seconds") == "–"
    name = next(iter(CURVES))
    assert line(name, points(0.001, 1.0, 100.0)).endswith("| 0.001 1 100 | 2.00 | 1 | 1 1 1 | – |")


@pytest.mark.slow
@pytest.mark.parametrize("name", CURVES)
def test_every_curve_can_be_measured(name):
    size = min(12, CURVES[name].sizes[0])
    point = measured(CURVES[name], size)
    assert point.size == size and point.seconds > 0
