"""Which rows of an evaluation are the same question: asked at several lengths, in several sets, or as a part of a
joined question. Their scores are not independent, so an interval draws them together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
import scipy

from mempipe.evaluation.results import ResultRow

_Asked = tuple[str, str]  # the words of a question and its first golden answer


def question_clusters(sets: Mapping[str, Sequence[ResultRow]]) -> dict[str, list[int]]:
    """Returns for each row of each set the number of its cluster.

    Rows of the same text and first golden answer are one cluster, whatever their ids are. A joined question is in one
    cluster with each of its parts.
    """
    rows = [*chain.from_iterable(sets.values())]
    numbers: dict[_Asked, int] = {}
    asked = [[numbers.setdefault(each, len(numbers)) for each in _parts(row)] for row in rows]
    edges = np.asarray([(own[0], part) for own in asked for part in own])
    if not edges.size:
        return {label: [] for label in sets}
    graph = scipy.sparse.coo_array((np.ones(len(edges)), edges.T), shape=(len(numbers), len(numbers)))
    _, clusters = scipy.sparse.csgraph.connected_components(graph, directed=False)
    found = iter(int(clusters[own[0]]) for own in asked)
    return {label: [next(found) for _ in rows] for label, rows in sets.items()}


def _parts(row: ResultRow) -> list[_Asked]:
    """Returns the questions of the row: one, or those that `joined_texts` joined."""
    number = len(row.em_by_objective)
    texts, golds = row.question.split("?; "), row.golden_answers[0].split("; ")
    if number == 1 or not len(texts) == len(golds) == number:
        texts, golds = [row.question], row.golden_answers[:1]
    return [(text.removesuffix("?"), gold) for text, gold in zip(texts, golds, strict=True)]
