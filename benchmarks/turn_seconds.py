"""What a turn costs an engine where the history grows and where a memory takes its place: turn 2 against turn 20.

    python -m benchmarks.turn_seconds runs/quickstart/huggingface [--seeds 1 2 3 4 5] [--dtype bfloat16] [--threads 2]

What is measured: MemSearcher and ReAct, each with its own prompts, answer questions of 20 hops on the same engine, one
question at a time. No small model goes on for 20 turns by itself, so a faultless script writes the messages
(`benchmarks.context_growth`), and the engine then does the work of every turn of these trajectories: it reads each
prompt as the agent would send it and samples as many tokens as the script wrote there, which are then thrown away. The
seconds of a turn are those of all its messages: reading what the prefix cache does not hold, and sampling. Searches,
which cost both agents the same, are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.context_growth import play
from mempipe.agents.registry import agent_spec
from mempipe.engines.config import GenerationConfig, ModelConfig, SamplingConfig
from mempipe.engines.generator import Generator
from mempipe.evaluation.rollout_metrics import messages
from mempipe.types import Trajectory

AGENTS = ("memsearcher", "react")
SHOWN = (2, 5, 10, 15, 20)
NUM_TURNS = 20
WARM_UP_SEED = 99
SEEDS = (1, 2, 3, 4, 5)


@dataclass(frozen=True, slots=True)
class Call:
    """A message that a turn needs: the prompt, and how many tokens follow it."""

    prompt: list[int]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TurnCost:
    """Holds what one turn of one question took."""

    seconds: float
    context_tokens: int
    """Read and written when the turn ends."""


def calls_of_turns(trajectory: Trajectory, *, growing: bool) -> list[list[Call]]:
    """Returns the calls of the first NUM_TURNS turns. A growing context has a turn for every message."""
    turns = list[list[Call]]()
    for context in trajectory.contexts:
        ids = list(context.token_ids)
        calls = [Call(ids[:start], end - start) for start, end in messages(context)]
        turns += [[call] for call in calls] if growing else [calls]
    return turns[:NUM_TURNS]


def measure(
    model: ModelConfig, generation: GenerationConfig, *, seeds: Sequence[int] = SEEDS
) -> dict[str, list[list[TurnCost]]]:
    """Returns for every agent the costs of each question's turns."""
    return asyncio.run(_measure(model, generation, _plans(model, seeds)))


def _plans(model: ModelConfig, seeds: Sequence[int]) -> dict[str, list[list[list[Call]]]]:
    """Returns for every agent the calls of each question's turns; the first question warms the engine up."""
    with tempfile.TemporaryDirectory() as folder:
        played = play(Path(folder), seeds=[WARM_UP_SEED, *seeds], num_hops=NUM_TURNS, model=model.path, agents=AGENTS)
    return {
        agent: [calls_of_turns(each, growing=agent_spec(agent).grows) for each in trajectories]
        for agent, trajectories in played.items()
    }


async def _measure(
    model: ModelConfig, generation: GenerationConfig, plans: dict[str, list[list[list[Call]]]]
) -> dict[str, list[list[TurnCost]]]:
    longest = max(len(call.prompt) + call.num_tokens for call in _all_calls(plans))
    engine = Generator(model, generation, max_model_len=longest)
    await engine.start()
    try:
        return {agent: [await _costs(engine, turns) for turns in questions][1:] for agent, questions in plans.items()}
    finally:
        await engine.shutdown()


def _all_calls(plans: dict[str, list[list[list[Call]]]]) -> Iterator[Call]:
    return (call for questions in plans.values() for turns in questions for calls in turns for call in calls)


async def _costs(engine: Generator, turns: list[list[Call]]) -> list[TurnCost]:
    """Plays the turns of one question, one after the other."""
    costs = []
    for calls in turns:
        started = time.perf_counter()
        for call in calls:
            greedy = SamplingConfig(temperature=0.0)
            await engine.generate(call.prompt, max_tokens=call.num_tokens, sampling=greedy, stop_token_ids=[])
        length = len(calls[-1].prompt) + calls[-1].num_tokens
        costs.append(TurnCost(time.perf_counter() - started, length))
    return costs


def report(measured: dict[str, list[list[TurnCost]]]) -> None:
    """Prints a table of mean seconds and mean tokens of the context."""
    print("\n| turn | " + " | ".join(f"{agent}, ms | tokens" for agent in measured) + " |")
    print("|---" * (1 + 2 * len(measured)) + "|")
    for turn in SHOWN:
        cells = []
        for questions in measured.values():
            costs = [turns[turn - 1] for turns in questions]
            cells.append(f"{1000 * fmean(cost.seconds for cost in costs):.1f}")
            cells.append(f"{fmean(cost.context_tokens for cost in costs):.0f}")
        print(f"| {turn} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a Hugging Face folder")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the engine")
    arguments = parser.parse_args()
    model = ModelConfig(path=arguments.model, dtype=arguments.dtype)
    report(measure(model, GenerationConfig(num_threads=arguments.threads), seeds=arguments.seeds))


if __name__ == "__main__":
    main()
