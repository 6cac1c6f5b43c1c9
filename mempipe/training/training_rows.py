"""The questions of a training run in their order. The worker of the stream's source imports this module only."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from mempipe.data.qa import QuestionTable
from mempipe.types import Question

if TYPE_CHECKING:
    from mempipe.config import RunConfig


class TrainingRows:
    """(group id, question) in training order: every epoch shuffled by its own seed, without consumed questions.

    Ends after `num_groups` groups. Where groups may be filtered, their number is unknown, so there it ends with the
    last epoch.
    """

    def __init__(self, questions: QuestionTable, config: RunConfig, *, skip: set[str], num_groups: int) -> None:
        self._questions, self._skip = questions, skip
        self._seed, self._num_epochs, self._shuffle = config.seed, config.data.num_epochs, config.data.shuffle
        self._limit = None if config.algorithm.filter_zero_variance else max(num_groups, 0)

    def __iter__(self) -> Iterator[tuple[str, Question]]:
        return islice(self._all(), self._limit)

    def _all(self) -> Iterator[tuple[str, Question]]:
        for epoch in range(self._num_epochs):
            order = list(range(len(self._questions)))
            if self._shuffle:
                random.Random(f"{self._seed}:{epoch}").shuffle(order)
            for i in order:
                question = self._questions[i]
                group_id = f"{epoch}/{question.id}"
                if group_id not in self._skip:
                    yield group_id, question
