"""What a turn costs an engine where the history grows and where a memory takes its place: turn 2 against turn 20.

    python -m benchmarks.turn_seconds runs/quickstart/huggingface [--seeds 1 2 3 4 5] [--dtype bfloat16] [--threads 2]

What is measured: MemSearcher and ReAct, each with its own prompts, answer questions of 20 hops on the same engine, one
question at a time. No small model goes on for 20 turns by itself, so a faultless script writes the messages
(`benchmarks.context_growth`), and the engine then does the work of the shown turns of these trajectories: it reads each
prompt as the agent would send it and samples as many tokens as the script wrote there, which are then thrown away. The
seconds of a turn are those of all its messages: reading what the prefix cache does not hold, and sampling; the prompts
of the turn before are read first, so that the cache holds what it would. Searches, which cost both agents the same, are
left out.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

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
) -> dict[str, dict[int, list[TurnCost]]]:
    """Returns for every agent and shown turn the costs, one for each question."""
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
) -> dict[str, dict[int, list[TurnCost]]]:
    longest = max(len(call.prompt) + call.num_tokens for call in _all_calls(plans))
    engine = Generator(model, generation, max_model_len=longest)
    measured: dict[str, dict[int, list[TurnCost]]] = {agent: {turn: [] for turn in SHOWN} for agent in plans}
    await engine.start()
    try:
        for question in range(len(plans[AGENTS[0]])):
            for turn in SHOWN:  # the agents one after the other: a machine that slows down slows both
                for agent, questions in plans.items():
                    cost = await _cost(engine, questions[question], turn)
                    if question:
                        measured[agent][turn].append(cost)
    finally:
        await engine.shutdown()
    return measured


def _all_calls(plans: dict[str, list[list[list[Call]]]]) -> Iterator[Call]:
    return (call for questions in plans.values() for turns in questions for calls in turns for call in calls)


async def _cost(engine: Generator, turns: list[list[Call]], turn: int) -> TurnCost:
    """Plays one turn of a question, with the prefix cache as the turn before leaves it."""
    calls = turns[turn - 1]
    for call in turns[turn - 2]:
        await _generate(engine, Call(call.prompt, 1))
    started = time.perf_counter()
    for call in calls:
        await _generate(engine, call)
    return TurnCost(time.perf_counter() - started, len(calls[-1].prompt) + calls[-1].num_tokens)


async def _generate(engine: Generator, call: Call) -> None:
    greedy = SamplingConfig(temperature=0.0)
    await engine.generate(call.prompt, max_tokens=call.num_tokens, sampling=greedy, stop_token_ids=[])


def report(measured: dict[str, dict[int, list[TurnCost]]]) -> None:
    """Prints a table of median milliseconds and mean tokens of the context."""
    print("\n| turn | " + " | ".join(f"{agent}, ms | tokens" for agent in measured) + " |")
    print("|---" * (1 + 2 * len(measured)) + "|")
    for turn in SHOWN:
        cells = []
        for turns in measured.values():
            cells.append(f"{1000 * median(cost.seconds for cost in turns[turn]):.0f}")
            cells.append(f"{fmean(cost.context_tokens for cost in turns[turn]):.0f}")
        print(f"| {turn} | {' | '.join(cells)} |", flush=True)


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
