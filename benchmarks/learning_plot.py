"""What runs learnt, as a picture: exact match by step, and what the same trajectories read with a bounded memory and
would read with a full history.

    python -m benchmarks.learning_plot RUN [RUN ...] --output FILE.svg
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks.pictures import pyplot, save
from mempipe.data.trajectories import read_trajectories
from mempipe.evaluation.rollout_metrics import full_history_tokens
from mempipe.tracking.tracker import read_metrics


def plot(folders: Sequence[Path], file: str) -> None:
    """Draws exact match by step (training questions, and held-out ones before and after) and prompt tokens by turn."""
    plt = pyplot()
    figure, (learning, context) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    colors = ("#1f6feb", "#bf5af2", "#1a7f5a", *(f"C{number}" for number in range(1, 2 * len(folders), 2)))
    bounded: dict[int, list[int]] = defaultdict(list)
    full: dict[int, list[int]] = defaultdict(list)
    for folder, color in zip(folders, colors, strict=False):
        report = json.loads((folder / "report.json").read_text())
        rows = [row for row in read_metrics(folder / "metrics.jsonl") if "em" in row]
        learning.plot([row["step"] for row in rows], [row["em"] for row in rows], color=color, lw=1, alpha=0.5)
        before, after = report["em_start"], report["em_end"]
        label = f"{folder.name.replace('-', ' ')}, held out: {before:.2f} → {after:.2f}"
        learning.plot([0, report["num_steps"]], [before, after], "o", color=color, label=label)
        for group in read_trajectories(folder / "evaluation" / "after.parquet"):
            for trajectory in group.trajectories:
                for turn, (now, history) in enumerate(
                    zip(trajectory.contexts, full_history_tokens(trajectory), strict=True), start=1
                ):
                    bounded[turn].append(now.num_prompt_tokens)
                    full[turn].append(history)
    learning.set(
        xlabel="learner step", ylabel="exact match", ylim=(0, 1), title="Learning (thin: training batches, sampled)"
    )
    learning.legend(loc="best", fontsize=8)
    for axes in (learning, context):
        axes.xaxis.get_major_locator().set_params(integer=True)
    for label, tokens, color in (("full history would carry", full, "#c2570c"), ("bounded memory", bounded, "#1f6feb")):
        means = [sum(tokens[turn]) / len(tokens[turn]) for turn in sorted(tokens)]
        context.plot(sorted(tokens), means, "o-", color=color, label=label)
    context.set(xlabel="turn", ylabel="prompt tokens", ylim=(0, None), title="Context, same trajectories")
    context.legend(fontsize=8)
    save(figure, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of finished runs")
    parser.add_argument("--output", required=True, help="the SVG")
    arguments = parser.parse_args()
    plot(arguments.runs, arguments.output)


if __name__ == "__main__":
    main()
