"""The reference model in an actor: adds `ref_logprobs` to training samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import ray

from mempipe.actors.handles import Handle
from mempipe.config import RunConfig
from mempipe.engines.reference import ReferenceModel
from mempipe.types import TrainingSample


class ReferenceActor:
    def __init__(self, config: RunConfig) -> None:
        learner = config.learner
        self._model = ReferenceModel(
            config.model,
            temperature=config.sampling.temperature,
            max_tokens=learner.max_tokens_per_micro_batch,
            num_threads=learner.num_threads,
        )

    def ready(self) -> None:
        """Answers once the model is loaded."""

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[list[float]]:
        return self._model.logprobs(samples)


def with_ref_logprobs(samples: Sequence[TrainingSample], reference: Handle) -> list[TrainingSample]:
    """The samples with the reference model's log-probs of their tokens."""
    rows = ray.get(reference.logprobs.remote(samples))
    return [replace(sample, ref_logprobs=row) for sample, row in zip(samples, rows, strict=True)]
