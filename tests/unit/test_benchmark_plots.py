"""Plots of the benchmarks."""

from __future__ import annotations

from benchmarks.pictures import pyplot, save


def test_a_picture_changes_only_where_a_figure_does(tmp_path):
    drawn = []
    for heights in ([1, 2], [1, 2], [1, 3]):
        figure, axes = pyplot().subplots()
        axes.errorbar([0, 1], heights, [0.1, 0.1], capsize=3)
        save(figure, tmp_path / "plot.svg")
        pyplot().close(figure)
        drawn.append((tmp_path / "plot.svg").read_bytes())
    assert drawn[0] == drawn[1] != drawn[2]
