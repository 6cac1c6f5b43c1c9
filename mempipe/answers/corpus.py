"""Held-out questions that a visitor of the service can ask, and the part of the corpus that they are about.

The synthetic world is many worlds in one index, and the same name stands for another person in each of them: a question
has one answer in its own world only.
"""

from __future__ import annotations

from pathlib import Path

from mempipe.answers.api import CorpusReply, ExampleReply
from mempipe.config import RunConfig
from mempipe.data.partitions import example_questions, first_questions, main_partition
from mempipe.retrieval.manifest import read_manifest
from mempipe.settings import ConfigError

NUM_EXAMPLES = 6
MAX_TEXT_CHARS = 20_000
"""Longer texts are not offered with a question."""
MAX_PARTITIONS = 1000
"""More of them are not listed; each can be named all the same."""


def describe_corpus(main: RunConfig, *, searches: bool, partition: str | None) -> CorpusReply:
    """Returns what can be searched, the part that is searched by default, and held-out questions about it.

    `main` is the service's own agent; with `searches` at least one of its agents searches. `partition` is the part that
    the settings name; None: the one that most held-out questions are about.
    Only files of this machine are read. Raises ConfigError for a partition that the index does not have, and for a
    file of questions or an index that is damaged.
    """
    questions = first_questions(main.data.validation, columns=main.data.columns)
    reads, index = main.agent_spec.reads, main.retrieval.index
    partitions = _partitions(index) if searches and index else []
    if partition is None:
        partition = main_partition(questions) if searches else ""
        if index and partition not in partitions:
            partition = ""
    elif partition and searches and index and partition not in partitions:
        some = f"none of the {len(partitions)} of retrieval.index (e.g. {', '.join(partitions[:3])})"
        whole = "no part of retrieval.index, which has none; leave it out"
        raise ConfigError(f"partition is {partition!r}, which is {some if partitions else whole}")
    fitting = example_questions(questions, partition=partition)
    if reads:
        fitting = [question for question in fitting if len(question.context) <= MAX_TEXT_CHARS]
    return CorpusReply(
        partition=partition,
        partitions=partitions if len(partitions) <= MAX_PARTITIONS else [],
        examples=[
            ExampleReply(
                question=question.text,
                golden_answers=question.golden_answers,
                partition=question.partition,
                text=question.context if reads else "",
            )
            for question in fitting[:NUM_EXAMPLES]
        ],
    )


def _partitions(index: str) -> list[str]:
    manifest, _ = read_manifest(Path(index))
    return list(manifest.passages.partitions)
