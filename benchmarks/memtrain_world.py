"""What MemTrain is worth in the synthetic world, on several seeds.

    python -m benchmarks.memtrain_world [--seeds 1 2 3] [--output runs/memtrain-world] [--ablations] [--plot FILE.svg]

Every seed draws worlds, questions, documents, model, script and sampling anew, and is

1. `mempipe chain jobs/configs/tiny_chain.yaml`: MemTrain; MemAgent on top of it; MemAgent alone, from the same warm
   start and with as many steps;
2. MemTrain's ablations from the same warm start: end-to-end only (`agent.num_recalls=0`) and decoupled
   (`reward.recall_weight=0`: recalls are trained on, but do not count in the attempt's reward);
3. an evaluation, greedy, of warm start, MemTrain and ablations on held-out questions, with documents of `--passages`
   passages (4 is what was trained on), and one recall per attempt.

With `--ablations` MemAgent is left out. What is finished is read, not repeated. Pairs are joined by the question's id.
Each number has two 95 % intervals: over questions (a bootstrap), which says what these trainings reach on other
questions, and over trainings (a t-interval of one value for each seed), which says what other trainings would reach.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import yaml

from mempipe.data.qa import write_questions
from mempipe.data.world import make_questions, make_worlds
from mempipe.evaluation.results import ResultRow, read_groups, read_results
from mempipe.evaluation.statistics import Interval, bootstrap_interval, t_interval
from pipelines.prepare import NUM_HELD_OUT_WORLDS

CONFIGS = Path("jobs") / "configs"
TRAINED_ON = 4  # passages
ABLATIONS = {"end-to-end": "agent.num_recalls=0", "decoupled": "reward.recall_weight=0"}
MODELS = {
    "warm-start": "memtrain/warm_start",
    "memtrain": "memtrain/huggingface",
    **{name: f"{name}/huggingface" for name in ABLATIONS},
}
COLORS = {"warm-start": "#8b949e", "memtrain": "#1f6feb", "end-to-end": "#c2570c", "decoupled": "#1a7f5a"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--output", type=Path, default=Path("runs/memtrain-world"))
    parser.add_argument("--passages", type=int, nargs="+", default=[TRAINED_ON, 8, 12])
    parser.add_argument("--questions", type=int, default=192, help="held-out questions of step 3, per seed and length")
    parser.add_argument("--ablations", action="store_true", help="MemTrain and its ablations alone")
    parser.add_argument("--plot", default="", help="an SVG of step 3")
    arguments = parser.parse_args()
    folders = [make(seed, arguments) for seed in arguments.seeds]
    if not arguments.ablations:
        print_post_training(folders)
    points: dict[tuple[str, str, int], Interval] = {}
    print("each value (over questions; over trainings), 95 % intervals")
    for measure, of in (("reconstruction, exact match", answered), ("recall, share that is right", recalled)):
        print(f"{measure}, by passages in a document; and what MemTrain has more")
        for length in arguments.passages:
            values = {name: of(folders, name, length) for name in MODELS}
            for name in MODELS:
                points[measure, name, length] = over_questions(values[name])
                more = "" if name == "memtrain" else shown(differences(values[name], values["memtrain"]))
                print(f"  {length:>3}  {name:<14}{shown(values[name])}  {more}")
    if arguments.plot:
        plot(points, arguments.passages, arguments.plot)


def print_post_training(folders: Sequence[Path]) -> None:
    """Prints what MemAgent answers after MemTrain, and without it."""
    print("held-out questions after post-training (MemAgent), exact match")
    scores = {
        name: [by_id(read_results(folder / "evaluation" / name / "held-out")) for folder in folders]
        for name in ("memagent", "memagent-alone")
    }
    for name, values in scores.items():
        print(f"  {name:<16}{shown(values)}")
    print(f"  {'difference':<16}{shown(differences(scores['memagent-alone'], scores['memagent']))}")


def make(seed: int, arguments: argparse.Namespace) -> Path:
    """Runs what is missing of a seed and returns its folder."""
    folder = arguments.output / f"seed-{seed}"
    if arguments.ablations:
        train(folder, "memtrain", seed)
    else:
        seeds = [f"stages.{stage}.settings.seed={seed}" for stage in ("memtrain", "memagent")]
        mempipe("chain", CONFIGS / "tiny_chain.yaml", f"output={arguments.output}", f"name={folder.name}", *seeds)
    for name, setting in ABLATIONS.items():
        train(folder, name, seed, f"model.path={folder / MODELS['warm-start']}", "warm_start=null", setting)
    mempipe("evaluate", write_suite(folder, seed, arguments))
    return folder


def train(folder: Path, name: str, seed: int, *settings: str) -> None:
    """Runs MemTrain, or what is missing of it."""
    where = [f"output={folder}", f"name={name}", f"seed={seed}", "--resume-if-exists"]
    mempipe("train", CONFIGS / "tiny_memtrain.yaml", *settings, *where)


def mempipe(command: str, config: Path, *settings: str) -> None:
    subprocess.run([sys.executable, "-m", "mempipe.cli", command, str(config), *settings], check=True)


def write_suite(folder: Path, seed: int, arguments: argparse.Namespace) -> Path:
    """Writes held-out questions with documents of every length, and the evaluation of all models on them."""
    benchmarks = []
    for length in arguments.passages:
        file = folder / f"passages-{length}.parquet"
        _, worlds = make_worlds(0, num_held_out=NUM_HELD_OUT_WORLDS, seed=seed, document_passages=length)
        write_questions(file, make_questions(worlds, arguments.questions, seed=seed, hops=[1, 2]))
        benchmarks.append({"name": file.stem, "file": str(file)})
    settings = {"agent": {"num_recalls": 1}}
    suite = {
        "name": "lengths",
        "output": str(folder),
        "runs": [
            {"name": name, "config": str(folder / "memtrain"), "checkpoint": str(folder / model), "settings": settings}
            for name, model in MODELS.items()
        ],
        "benchmarks": benchmarks,
        "sampling": {"temperature": 0.0},
    }
    path = folder / "lengths.yaml"
    path.write_text(yaml.safe_dump(suite))
    return path


def answered(folders: Sequence[Path], name: str, length: int) -> list[dict[str, float]]:
    """Returns for each training every question's exact match, by its id."""
    return [by_id(read_results(folder / "lengths" / name / f"passages-{length}")) for folder in folders]


def by_id(rows: Sequence[ResultRow]) -> dict[str, float]:
    return {row.question_id: row.em for row in rows}


def recalled(folders: Sequence[Path], name: str, length: int) -> list[dict[str, float]]:
    """Returns for each training whether the recall of every question's attempt was right, by the question's id; it is
    wrong where the attempt did not get that far."""
    return [
        {
            group.question.id: float(any(recall.score for attempt in group.trajectories for recall in attempt.recalls))
            for group in read_groups(folder / "lengths" / name / f"passages-{length}")
        }
        for folder in folders
    ]


def differences(before: Sequence[dict[str, float]], after: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """Returns for each training every question's difference. Raises ValueError when a question lacks its partner."""
    for first, second in zip(before, after, strict=True):
        if first.keys() != second.keys():
            raise ValueError(f"{len(first.keys() ^ second.keys())} questions were asked of one of the two models only")
    return [
        {key: second[key] - score for key, score in first.items()} for first, second in zip(before, after, strict=True)
    ]


def over_questions(trainings: Sequence[dict[str, float]]) -> Interval:
    return bootstrap_interval([score for scores in trainings for score in scores.values()])


def shown(trainings: Sequence[dict[str, float]]) -> str:
    """Returns the mean with its interval over questions, and that over trainings."""
    questions, seeds = over_questions(trainings), t_interval([fmean(scores.values()) for scores in trainings])
    over = f"{seeds.low:.3f} to {seeds.high:.3f}" if seeds.is_bounded else "one training"
    return f"{questions.value:.3f} ({questions.low:.3f} to {questions.high:.3f}; {over})"


def plot(points: dict[tuple[str, str, int], Interval], lengths: Sequence[int], file: str) -> None:
    """Draws both measures by document length, with intervals."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    measures = list(dict.fromkeys(measure for measure, _, _ in points))
    figure, axes = plt.subplots(1, len(measures), figsize=(10, 3.6), layout="constrained", sharey=True)
    for measure, ax in zip(measures, axes, strict=True):
        for place, name in enumerate(MODELS):
            at = [points[measure, name, length] for length in lengths]
            values = [point.value for point in at]
            errors = [[point.value - point.low for point in at], [point.high - point.value for point in at]]
            shifted = [length + 0.08 * place for length in lengths]  # so that intervals do not hide each other
            ax.errorbar(shifted, values, errors, fmt="o-", capsize=3, color=COLORS[name], label=name)
        ax.set(xlabel=f"passages in a document (trained on {TRAINED_ON})", title=measure, ylim=(0, 1))
        ax.xaxis.set_ticks(lengths)
    axes[0].legend(fontsize=8)
    figure.savefig(file)


if __name__ == "__main__":
    main()
