"""What every agent reads in each turn of a question of 20 hops: its context by turn, and by how much it grows from turn
5 to turn 20.

    python -m benchmarks.context_growth [--hops 20] [--seeds 1 2 3 4 5] [--plot docs/images/context_growth.svg]

No model: a faultless script writes the messages, everything else is real (the agents' own loops, tokenizer, index,
searches). The scripts of the agents with a memory keep the newest three facts, which is all that the next step needs.
MemAgent's turns are the passages of a document of 20.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from benchmarks.pictures import pyplot, save
from mempipe.agents.registry import agent_spec
from mempipe.data.scripted_agents import NO_NOISE
from mempipe.data.world import World
from mempipe.engines.tiny import build_tokenizer
from mempipe.evaluation.rollout_metrics import context_tokens_by_turn
from mempipe.loader import load_config
from mempipe.retrieval.build import build_index
from mempipe.retrieval.encoders import HashingEncoder
from mempipe.types import Trajectory
from pipelines.demonstrations import played, scripted_generate

CONFIGS = Path(__file__).parents[1] / "jobs" / "configs"
AGENTS = {
    "memsearcher": "quickstart",
    "mem1": "quickstart_mem1",
    "memagent": "quickstart_memagent",
    "react": "quickstart_react",
}
_ROOMY = ["budget.question_tokens=512", "budget.context_tokens=8192", "budget.action_tokens=128"]
_ROOMY += ["budget.observation_tokens=256"]
ROOMY = {
    "memsearcher": [*_ROOMY, "budget.memory_tokens=128", "budget.memory_message_tokens=192"],
    "react": _ROOMY,
}
"""Budgets under which the names of the world may be several tokens each."""
NUM_NOTED = 3
EARLY = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hops", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--plot", default="", help="an SVG of the context by turn")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        by_agent = {
            agent: [context_tokens_by_turn(t, growing=agent_spec(agent).grows) for t in trajectories]
            for agent, trajectories in play(Path(folder), seeds=arguments.seeds, num_hops=arguments.hops).items()
        }
    means = {
        agent: [fmean(turn) for turn in zip(*rows, strict=True)][: arguments.hops] for agent, rows in by_agent.items()
    }
    for agent, tokens in means.items():
        early, last = tokens[EARLY - 1], tokens[-1]
        print(f"{agent:12} turn {EARLY}: {early:6.1f}   turn {len(tokens)}: {last:6.1f}   x {last / early:.2f}")
    if arguments.plot:
        plot(means, arguments.plot)
    return 0


def play(
    folder: Path, *, seeds: Sequence[int], num_hops: int, model: str = "", agents: Collection[str] = tuple(AGENTS)
) -> dict[str, list[Trajectory]]:
    """Plays every agent's faultless attempt at one question of each seed's world, with its index in `folder`.

    The tokenizer is that of `model`, a folder, within a budget that is roomy for any; or the embedded world's own,
    within the quickstart's budget.
    """
    worlds = [World(seed) for seed in seeds]
    questions = [world.long_question(num_hops, seed=seed) for world, seed in zip(worlds, seeds, strict=True)]
    if not model:
        build_tokenizer(folder / "model")
    passages = [replace(passage, partition=world.id) for world in worlds for passage in world.passages]
    build_index(passages, folder / "index", encoder=HashingEncoder())
    settings = ["budget.question_tokens=128", "budget.context_tokens=4096", f"retrieval.index={folder / 'index'}"]
    attempts = {}
    for agent in agents:
        own = [f"budget.max_turns={num_hops + 1}"] if agent_spec(agent).searches else []
        own += ROOMY[agent] if model else []
        path = f"model.path={model or folder / 'model'}"
        config = load_config(CONFIGS / f"{AGENTS[agent]}.yaml", [*settings, path, *own])
        script = scripted_generate(config, NO_NOISE, num_noted=NUM_NOTED)
        attempts[agent] = [group.trajectories[0] for group in played(config, questions, script, name=agent)]
    return attempts


def plot(means: dict[str, list[float]], file: str) -> None:
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    names = {"memsearcher": "MemSearcher", "mem1": "MEM1", "memagent": "MemAgent", "react": "ReAct"}
    for (agent, tokens), color in zip(means.items(), ("#1f6feb", "#bf5af2", "#1a7f5a", "#c2570c"), strict=True):
        axes.plot(range(1, len(tokens) + 1), tokens, "o-", ms=3, color=color, label=names[agent])
    axes.set(
        xlabel="turn",
        ylabel="tokens of the context",
        ylim=(0, None),
        title=f"Context by turn, questions of {len(tokens)} hops",
    )
    axes.legend(fontsize=8)
    save(figure, file)


if __name__ == "__main__":
    sys.exit(main())
