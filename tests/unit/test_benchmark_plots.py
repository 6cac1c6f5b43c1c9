"""Plots of the benchmarks."""

from __future__ import annotations

import json

from benchmarks import learning_plot
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


def test_the_picture_of_learning_has_every_run(tmp_path, monkeypatch):
    monkeypatch.setattr(learning_plot, "read_trajectories", lambda file: [])
    monkeypatch.setattr(learning_plot, "read_metrics", lambda file: [{"step": 1, "em": 0.5}])
    drawn = []
    monkeypatch.setattr(learning_plot, "save", lambda figure, file: drawn.append(figure))
    folders = [tmp_path / f"seed-{number}" for number in range(1, 6)]
    for folder in folders:
        folder.mkdir()
        (folder / "report.json").write_text(json.dumps({"em_start": 0.1, "em_end": 0.9, "num_steps": 30}))
    learning_plot.plot(folders, "unused.svg")
    legend = drawn[0].axes[0].get_legend_handles_labels()[1]
    assert legend == [f"seed {number}, held out: 0.10 → 0.90" for number in range(1, 6)]
    pyplot().close(drawn[0])
