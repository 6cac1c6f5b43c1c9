"""How cost grows: CPU-seconds and memory of each part of mempipe over several sizes of its work, and their exponents.

    python -m benchmarks.growth [--curve NAME ...] [--most SIZE] [--plot FILE.svg]

Every size is measured in a process of its own. CPU-seconds are those of all its threads, without what it prepares;
memory is what the work adds to the process at its peak. An exponent is the slope between the largest two sizes in
logarithms: 1 where cost grows as the work does, 0 where it does not grow. CPU-seconds of under 0.02 have none.

No engine is measured: a stand-in answers at once, so that only mempipe's own part is left.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import re
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.driver_step import make_context
from benchmarks.pictures import pyplot, save
from mempipe.types import Completion, EndReason, Evidence, FinishReason, Group, Passage, Question, Trajectory

WORDS = [f"w{i}" for i in range(20_000)]
SEARCHES = 200
GROUP_SIZE = 8
PART = 32
"""Questions of a part of an evaluation's results."""
RESULTS_OF = {"num_samples": 1, "weights": "a model", "model_sha256": "m", "index_sha256": "i"}
LEAST = {"seconds": 0.02, "mib": 8}
"""Smaller values are not told from noise."""
Work = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A kind of work. `prepare` takes the size and an empty folder, and returns what is measured."""

    of: str
    """What the size counts."""
    sizes: Sequence[int]
    prepare: Callable[[int, Path], Work]
    expected: float
    """The exponent of the seconds that is no fault: 1 for the whole of the work, 0 for one piece of it."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """Holds the CPU-seconds and the memory of one size."""

    size: int
    seconds: float
    mib: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curve", choices=sorted(CURVES), action="append", help="measure this one; may be repeated")
    parser.add_argument("--most", type=int, default=10**9, help="leave larger sizes out")
    parser.add_argument("--plot", type=Path, help="the SVG")
    parser.add_argument("--one", nargs=2, metavar=("CURVE", "SIZE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(asdict(measured(CURVES[arguments.one[0]], int(arguments.one[1])))))
        return
    print("| work | sizes | CPU-s | exponent | expected | MiB | exponent |\n|---|---|---|---|---|---|---|")
    curves: dict[str, list[Point]] = {}
    for name in arguments.curve or CURVES:
        sizes = [size for size in CURVES[name].sizes if size <= arguments.most]
        curves[name] = [in_its_own_process(name, size) for size in sizes]
        print(line(name, curves[name]), flush=True)
    if arguments.plot:
        plot(curves, arguments.plot)


def in_its_own_process(name: str, size: int) -> Point:
    command = [sys.executable, "-m", "benchmarks.growth", "--one", name, str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, f"{name} of {size} failed:\n{done.stderr}"
    return Point(**json.loads(done.stdout.splitlines()[-1]))


def measured(curve: Curve, size: int) -> Point:
    with tempfile.TemporaryDirectory() as folder:
        work = curve.prepare(size, Path(folder))
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before, started = memory_mib("VmRSS"), time.process_time()
        work()
        seconds = time.process_time() - started
        return Point(size=size, seconds=seconds, mib=memory_mib("VmHWM") - before)


def memory_mib(kind: str) -> float:
    """Returns the memory that this process holds (VmRSS), or has held at most (VmHWM)."""
    (kib,) = re.findall(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kib) / 1024


def line(name: str, points: Sequence[Point]) -> str:
    """Returns the curve as a row of a Markdown table."""
    sizes, seconds, mib = ([getattr(point, part) for point in points] for part in ("size", "seconds", "mib"))
    last = points[-2:]
    return (
        f"| {name} | {' '.join(f'{size:,}' for size in sizes)} {CURVES[name].of} | "
        f"{' '.join(f'{value:.3g}' for value in seconds)} | {exponent(last, 'seconds')} | "
        f"{CURVES[name].expected:g} | {' '.join(f'{value:.0f}' for value in mib)} | {exponent(last, 'mib')} |"
    )


def exponent(points: Sequence[Point], part: str) -> str:
    """Returns the slope between two points; "–" where either is too small to tell."""
    values = [getattr(point, part) for point in points]
    if len(points) < 2 or min(values) < LEAST[part]:
        return "–"
    return f"{math.log(values[1] / values[0]) / math.log(points[1].size / points[0].size):.2f}"


def plot(curves: dict[str, list[Point]], file: Path) -> None:
    """Draws seconds and memory against the size, in logarithms."""
    plt = pyplot()
    figure, panels = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    colors = plt.get_cmap("Paired")(range(12))
    for axes, part, label in zip(panels, ("seconds", "mib"), ("CPU-seconds", "MiB on top"), strict=True):
        for (name, points), color in zip(curves.items(), colors, strict=False):
            shown = [(point.size, value) for point in points if (value := getattr(point, part)) >= LEAST[part]]
            style = {"ms": 3, "color": color, "label": name}
            axes.plot([size for size, _ in shown], [value for _, value in shown], "o-", **style)
        axes.set(xscale="log", yscale="log", xlabel="size of the work", ylabel=label)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    save(figure, file)


def played(count: int) -> Iterator[Group]:
    """Yields groups of `GROUP_SIZE` attempts of three contexts of 700 tokens, `count` attempts in all."""
    rng = np.random.default_rng(0)
    contexts = [make_context(rng, index, 700) for index in range(3)]
    for number in range(-(-count // GROUP_SIZE)):
        name = f"step/q{number}"
        members = range(min(GROUP_SIZE, count - number * GROUP_SIZE))
        yield Group(
            id=name,
            question=Question(id=f"q{number}", text=f"question {number}", golden_answers=["an answer"]),
            trajectories=[
                Trajectory(
                    id=f"{name}/{member}",
                    group_id=name,
                    member=member,
                    contexts=[replace(context) for context in contexts],
                    end_reason=EndReason.ANSWERED,
                    answer="an answer",
                    reward=0.5,
                    em=0.0,
                )
                for member in members
            ],
            seconds=1.0,
        )


def written(count: int, folder: Path) -> Work:
    from mempipe.data.trajectories import write_trajectories

    return lambda: write_trajectories(folder / "trajectories.parquet", played(count))


def viewed(count: int, folder: Path) -> Work:
    from mempipe.reports.traced import read_traced
    from mempipe.reports.viewer import write_viewer

    written(count, folder)()
    return lambda: write_viewer(folder / "page.html", read_traced(folder), title="growth")


def tracked(count: int, folder: Path) -> Work:
    from mempipe.tracking.config import TrackingConfig
    from mempipe.tracking.tracker import Tracker

    groups = list(played(GROUP_SIZE))

    def work() -> None:
        store = TrackingConfig(uri=f"sqlite:///{folder / 'mlflow.db'}")
        tracker = Tracker(store, folder=folder / "run", run_name="growth", run_config={})
        for step in range(1, count + 1):
            tracker.log_metrics({f"group/metric_{i}": step * i for i in range(60)}, step)
            if not step % 10:
                tracker.log_trajectories(groups, step)
        tracker.finish(timeout_s=3600)

    return work


def passages(count: int) -> Iterator[Passage]:
    """Yields passages of 60 words; the words of a language are as unequally frequent."""
    rng = np.random.default_rng(0)
    for number in range(count):
        drawn = (len(WORDS) ** rng.random(60)).astype(int) - 1
        yield Passage(id=str(number), title=f"Passage {number}", text=" ".join(WORDS[i] for i in drawn))


def built(count: int, folder: Path, *, lexical: bool) -> Work:
    from mempipe.retrieval.build import build_index
    from mempipe.retrieval.encoders import HashingEncoder

    encoder = HashingEncoder(dimension=256)
    return lambda: build_index(passages(count), folder / "index", encoder=encoder, lexical=lexical)


def searched(count: int, folder: Path, *, mode: str) -> Work:
    from mempipe.retrieval.retriever import Query, Retriever

    built(count, folder, lexical=mode == "lexical")()
    retriever, rng = Retriever(folder / "index", mode=mode), np.random.default_rng(1)

    def work() -> None:
        for _ in range(SEARCHES):
            text = " ".join(WORDS[i] for i in rng.integers(100, len(WORDS), 6))
            retriever.search([Query(text=text, num_passages=5)])

    return work


def claimed(count: int, folder: Path) -> Work:
    """Begins, asks and deletes sessions of a service that has `count` of them."""
    store, owners = stored("sessions", count, folder)

    async def work() -> None:
        for number in range(SEARCHES):
            owner = owners[number * 7919 % len(owners)]
            session = await store.sessions.create(owner, memory="what is known")
            await store.sessions.claim(session.id, owner, for_s=60)
            await store.sessions.release(session.id, "what is known now")
            await store.sessions.delete(session.id, owner)

    return lambda: asyncio.run(work())


def responded(count: int, folder: Path) -> Work:
    """Keeps responses of a service that has `count` of them."""
    from mempipe.serve.state.responses import StoredResponse

    store, owners = stored("responses", count, folder)

    async def work() -> None:
        for number in range(SEARCHES):
            owner = owners[number * 7919 % len(owners)]
            await store.responses.keep(StoredResponse(id=f"new-{number}", body="x" * 2000, memory="m" * 400), owner)
            await store.responses.delete(f"new-{number}", owner)

    return lambda: asyncio.run(work())


def stored(table: str, count: int, folder: Path) -> tuple[Any, list[str]]:
    """Returns a store with `count` rows in the table, and their owners, of whom none has more than 900."""
    from mempipe.serve.state.responses import StoredResponse
    from mempipe.serve.state.store import Store

    store = Store(folder / "state.db", lifetime_s=3600)
    if table == "sessions":
        asyncio.run(store.sessions.create("first", memory="what is known " * 20))
    else:
        asyncio.run(store.responses.keep(StoredResponse(id="first", body="x" * 2000, memory="m" * 400), "first"))
    with sqlite3.connect(folder / "state.db") as database:  # copies of one row: one by one they would take minutes
        (row,) = database.execute(f"SELECT * FROM {table}")
        copies = [(f"copy-{number}", f"owner {number // 900}", *row[2:]) for number in range(count)]
        database.executemany(f"INSERT INTO {table} VALUES ({','.join('?' * len(row))})", copies)
    return store, sorted({copy[1] for copy in copies})


def studied(count: int, folder: Path) -> Work:
    """Tests every budget of a sweep against the largest one, on 1,000 questions each, and writes the page."""
    from mempipe.evaluation.results import ResultFolder, result_row
    from mempipe.reports.budgets import write_budget_report
    from mempipe.studies.budgets import study_evaluation

    groups = list(played(1000 * GROUP_SIZE))
    groups = [replace(group, trajectories=group.trajectories[:1]) for group in groups]
    rows = [result_row(group, growing=False, prompt_hash="p") for group in groups]
    for number in range(count + 1):
        settings = {"run": {"agent": {"name": "memsearcher"}, "budget": {"memory_tokens": 8 + number}}}
        results = ResultFolder(folder / f"memory-{number}" / "nq", settings | {"num_samples": 1})
        results.open()
        results.append(groups, rows)
        results.finish()
    return lambda: write_budget_report(folder, study_evaluation(folder), name="growth")


def kept(count: int, folder: Path) -> Work:
    """Writes the rows of an evaluation of `count` questions in parts."""
    from mempipe.evaluation.results import ResultFolder, result_row

    def work() -> None:
        results = ResultFolder(folder / "growth" / "memory" / "nq", RESULTS_OF)
        results.open()
        for start in range(0, count, PART):
            part = [*asked(start, min(start + PART, count))]
            results.append(part, [result_row(group, growing=False, prompt_hash="p") for group in part])
        results.finish()

    return work


def asked(start: int, end: int) -> Iterator[Group]:
    """Yields questions that need one fact, each with one attempt."""
    (group,) = played(1)
    for number in range(start, end):
        fact = Evidence(passage_id=str(number), value=f"word{number}")
        question = Question(id=f"q{number}", text=f"question {number}", golden_answers=[fact.value], evidence=[fact])
        yield replace(group, id=question.id, question=question)


def reported(count: int, folder: Path) -> Work:
    """Makes the report of an evaluation of one run, as `mempipe evaluate` ends."""
    from mempipe.evaluation.results import ResultFolder
    from mempipe.evaluation.suite import Benchmark, EvaluatedRun, EvaluationSuite
    from mempipe.loader import load_config
    from mempipe.tracking.config import TrackingConfig
    from pipelines.evaluate import PlannedRun, QuestionSet, RunOnSet, report

    kept(count, folder)()
    run, benchmark = EvaluatedRun(name="memory", config="quickstart"), Benchmark(name="nq", file="nq.jsonl")
    suite = EvaluationSuite(
        name="growth",
        output=str(folder),
        runs=[run],
        benchmarks=[benchmark],
        tracking=TrackingConfig(enabled=False),
    )
    of_set = QuestionSet(benchmark=benchmark, file="nq.jsonl", file_sha256="", num_questions=count, depths={})
    job = RunOnSet(asked=of_set, results=ResultFolder(folder / "growth" / "memory" / "nq", RESULTS_OF))
    planned = PlannedRun(run=run, config=load_config("quickstart"), prompt_hash="p", jobs=[job])
    return lambda: report(suite, [planned])


class Answers:
    """Samples the same message at once."""

    def __init__(self, tokenizer: Any, texts: Callable[[str], str]) -> None:
        self._tokenizer, self._texts = tokenizer, texts

    async def __call__(self, token_ids: Sequence[int], *, max_tokens: int, seed: int | None = None) -> Completion:
        await asyncio.sleep(0)
        prompt = self._tokenizer.decode(token_ids[-200:])
        sampled = [*self._tokenizer.encode_template(self._texts(prompt)), min(self._tokenizer.stop_token_ids)]
        sampled = sampled[:max_tokens]
        return Completion(
            token_ids=sampled,
            logprobs=[-0.1] * len(sampled),
            finish_reason=FinishReason.STOP,
            policy_version=0,
        )


def read(num_tokens: int, folder: Path) -> Work:
    """Reads one document with MemAgent in chunks of 1,000 tokens."""
    _, rollout = playing(folder, "quickstart_memagent", "budget.chunk_tokens=1000", "budget.context_tokens=2048")
    text = " ".join(WORDS[i] for i in np.random.default_rng(0).integers(len(WORDS), size=num_tokens // 3))
    question = Question(id="q", text="who?", golden_answers=["x"], context=text)
    return lambda: asyncio.run(rollout(question, trajectory_id="t", group_id="g", member=0))


def in_flight(count: int, folder: Path) -> Work:
    """Plays groups of MemSearcher at the same time."""
    from mempipe.rollout import run_group

    config, rollout = playing(folder, "quickstart")
    question = Question(id="q", text="who?", golden_answers=["x"])

    async def work() -> None:
        await asyncio.gather(
            *(
                run_group(
                    question,
                    rollout,
                    group_id=f"g{number}",
                    group_size=GROUP_SIZE,
                    reward=config.reward,
                    advantage=config.algorithm,
                )
                for number in range(count)
            )
        )

    return lambda: asyncio.run(work())


def playing(folder: Path, preset: str, *overrides: str) -> tuple[Any, Any]:
    """Returns the config and its agent's rollout with the tiny tokenizer, a stand-in for the engine, and no searches'
    results."""
    from mempipe.engines.tiny import build_tokenizer
    from mempipe.engines.tokenizer import load_tokenizer
    from mempipe.loader import load_config
    from mempipe.rollout import find_nothing, make_rollout

    config = load_config(preset, overrides)
    build_tokenizer(folder / "model")
    tokenizer = load_tokenizer(str(folder / "model"))
    generate = Answers(tokenizer, lambda prompt: "I search. <tool_call>w1</tool_call>")
    return config, make_rollout(config, tokenizer=tokenizer, generate=generate, search=find_nothing)


CURVES = {
    "write trajectories": Curve(of="attempts", sizes=(100, 1000, 10_000, 100_000), prepare=written, expected=1),
    "read them for the viewer": Curve(of="attempts", sizes=(100, 1000, 10_000, 100_000), prepare=viewed, expected=1),
    "metrics and traces in MLflow": Curve(of="steps", sizes=(100, 1000, 10_000), prepare=tracked, expected=1),
    "index by words and vectors": Curve(
        of="passages",
        sizes=(10_000, 100_000, 1_000_000),
        prepare=lambda count, folder: built(count, folder, lexical=True),
        expected=1,
    ),
    "index by vectors": Curve(
        of="passages",
        sizes=(10_000, 100_000, 1_000_000),
        prepare=lambda count, folder: built(count, folder, lexical=False),
        expected=1,
    ),
    f"{SEARCHES} searches by words": Curve(
        of="passages",
        sizes=(10_000, 100_000, 1_000_000),
        prepare=lambda count, folder: searched(count, folder, mode="lexical"),
        expected=1,
    ),
    f"{SEARCHES} searches by vectors": Curve(
        of="passages",
        sizes=(10_000, 100_000, 1_000_000),
        prepare=lambda count, folder: searched(count, folder, mode="dense"),
        expected=1,
    ),
    f"{SEARCHES} sessions of a service": Curve(
        of="sessions", sizes=(10, 100, 1000, 10_000, 100_000), prepare=claimed, expected=0
    ),
    f"{SEARCHES} responses of a service": Curve(
        of="responses", sizes=(10, 100, 1000, 10_000, 100_000), prepare=responded, expected=0
    ),
    "rows of an evaluation": Curve(of="questions", sizes=(100, 1000, 10_000), prepare=kept, expected=1),
    "report of an evaluation": Curve(of="questions", sizes=(100, 1000, 10_000), prepare=reported, expected=1),
    "page of a sweep": Curve(of="budgets", sizes=(1, 5, 10, 50), prepare=studied, expected=1),
    "read a document": Curve(of="tokens", sizes=(4000, 40_000, 400_000, 4_000_000), prepare=read, expected=1),
    "groups in flight": Curve(of="groups", sizes=(1, 8, 64, 512), prepare=in_flight, expected=1),
}


if __name__ == "__main__":
    main()
