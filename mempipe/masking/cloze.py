"""Questions from any text without labels: a sentence of a passage with one entity taken out, to be found by search and
named.

Two steps, so that the first can run on many workers and the second sees the whole corpus: `find_candidates` cuts
passages into sentences with one entity hidden, `choose_questions` applies the rules of rejection, joins pairs of
passages and splits by title.

A question about two passages hides the entity that leads from one to the other: the first sentence describes it, the
second, from the passage that bears its name, has the gap.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import polars as pl

from mempipe.masking.config import ClozeConfig
from mempipe.masking.entities import Finder, Kind, can_be_read, hide
from mempipe.masking.rules import WORDS, answer_key, around, common_answers, guessable_answers, trivial_rule
from mempipe.settings import ConfigError
from mempipe.text import sentences
from mempipe.types import Evidence, Passage, Question

MANIFEST = "cloze.json"
"""File in a folder of questions: their settings and counts, and the source of their passages in words."""

GAP, LINK = "____", "[X]"
SECOND_SENTENCE = f" / {LINK}: "
"""Separates the sentences of a question about two passages: the first describes the link, the second has the gap."""
CUTS = (10, 8, 6, 5, 4, 3)
"""Words on each side of a gap, to which a second sentence is cut that finds its passage alone."""
SPLITS = ("train", "validation", "test")
RULES = {
    "short": "the answer has fewer than two letters or digits, or its sentence too few other words",
    "long": "the sentence has too many words",
    "in_title": "the answer can be read in the passage's title",
    "not_alone": "the sentence writes the answer a second time, in whatever form",
    "everywhere": "too many passages name the answer: it could be guessed without a search",
    "guessable": "the words around the gap are nearly always followed by this answer in the corpus",
    "unsearchable": "without the gap, too few words are left by which the passage could be found",
}
"""Rules of rejection. A candidate is counted under the first one that it breaks."""


@dataclass(frozen=True, kw_only=True)
class ClozeQuestions:
    """Questions by split, and how many candidates each rule rejected."""

    questions: dict[str, list[Question]]
    counts: dict[str, int]


SCHEMA = pl.Schema(
    {
        "passage_id": pl.String,
        "title": pl.String,
        "partition": pl.String,
        "split": pl.String,
        "sentence": pl.String,  # whole
        "start": pl.Int64,  # of the answer, in the sentence
        "answer": pl.String,
        "kind": pl.String,
        "around": pl.String,  # two words on either side of the gap
        "broken": pl.String,  # the first rule that the candidate breaks by itself; null: none
        "draw": pl.UInt64,  # orders candidates at random, by the seed
    }
)
_MIN_SEARCH_WORDS = 4
_COMMON_WORDS = frozenset(
    [
        "a",
        "an",
        "and",
        "are",
        "as",
        "at",
        "be",
        "been",
        "but",
        "by",
        "for",
        "from",
        "had",
        "has",
        "have",
        "he",
        "her",
        "his",
        "in",
        "into",
        "is",
        "it",
        "its",
        "of",
        "on",
        "or",
        "she",
        "that",
        "the",
        "their",
        "them",
        "then",
        "there",
        "they",
        "this",
        "to",
        "was",
        "were",
        "which",
        "who",
        "whose",
        "with",
        "also",
        "after",
        "before",
        "during",
        "first",
        "one",
        "two",
        "new",
        "not",
        "all",
        "other",
        "some",
    ]
)


def find_candidates(passages: Sequence[Passage], finder: Finder, config: ClozeConfig) -> pl.DataFrame:
    """Returns one row per entity of every sentence, columns `SCHEMA`; rules that need no other passage are applied
    already."""
    rows = []
    for passage, entities in zip(passages, finder.find([passage.text for passage in passages]), strict=True):
        # Passages without a title would all be in one split.
        spans, split = sentences(passage.text), split_of(passage.title or passage.id, passage.partition, config)
        starts = [start for start, _ in spans]
        for entity in entities:
            start, end = spans[max(0, bisect.bisect_right(starts, entity.start) - 1)]
            if not start <= entity.start < entity.end <= end:  # it crosses the end of a sentence
                continue
            sentence, place = passage.text[start:end], entity.start - start
            if GAP in sentence or LINK in sentence:  # of the text itself: a question would have two gaps
                continue
            rows.append(
                (
                    passage.id,
                    passage.title,
                    passage.partition,
                    split,
                    sentence,
                    place,
                    entity.text,
                    entity.kind,
                    around(sentence, place, entity.text),
                    _broken_rule(sentence, place, entity.text, entity.kind, passage.title, config),
                    _draw(config.seed, passage.id, str(entity.start), entity.text),
                )
            )
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")


def choose_questions(candidates: pl.LazyFrame, num_passages: int, config: ClozeConfig) -> ClozeQuestions:
    """Chooses the questions of a corpus of `num_passages`, from the candidates of all its passages, in whatever order
    those are.

    Raises ConfigError when no candidate is left.
    """
    judged = _judged(candidates, num_passages, config)
    counts = {name: 0 for name in ("candidates", *RULES)} | dict(
        judged.select(pl.col("broken").fill_null("kept").alias("rule"))
        .group_by("rule")
        .len()
        .collect(engine="streaming")
        .iter_rows()
    )
    counts["candidates"] = sum(counts[name] for name in (*RULES, "kept") if name in counts)
    if not counts.get("kept"):
        listed = ", ".join(f"{counts[rule]} {rule}" for rule in RULES if counts[rule])
        raise ConfigError(
            f"no question could be made of {num_passages} passages: {counts['candidates']} candidates, rejected: "
            f"{listed or 'none'}; "
            "a text whose script has no capital letters needs cloze.entities to name a spaCy pipeline"
        )
    kept = judged.filter(pl.col("broken").is_null()).collect(engine="streaming").sort("draw", "passage_id", "start")
    single = kept.with_columns(number=pl.int_range(pl.len()).over("passage_id"))
    single = single.filter(pl.col("number") < config.per_passage)
    pairs = _pairs(kept) if config.two_passages else None
    questions: dict[str, list[Question]] = {}
    for split in SPLITS:
        alone = [
            q for row in single.filter(pl.col("split") == split).iter_rows(named=True) if (q := _question(row, config))
        ]
        joined = []
        if pairs is not None:
            rows = pairs.filter(pl.col("split") == split).iter_rows(named=True)
            joined = [question for row in rows if (question := _pair_question(row))]
        questions[split] = _mixed(alone, joined, config)
    counts["questions"] = sum(map(len, questions.values()))
    counts["two_passages"] = sum(question.num_hops == 2 for listed in questions.values() for question in listed)
    return ClozeQuestions(questions=questions, counts=counts)


def _judged(candidates: pl.LazyFrame, num_passages: int, config: ClozeConfig) -> pl.LazyFrame:
    """Returns the candidates with the rules that look at the whole corpus."""
    common = common_answers(candidates, num_passages, config.max_passage_share).with_columns(everywhere=True)
    guessable = guessable_answers(candidates).with_columns(guessable=True)
    return (
        candidates.with_columns(answer_key())
        .join(common, on="key", how="left")
        .join(guessable, on=["around", "key"], how="left")
        .with_columns(
            pl.when(pl.col("broken").is_not_null())
            .then(pl.col("broken"))
            .when(pl.col("everywhere"))
            .then(pl.lit("everywhere"))
            .when(pl.col("guessable"))
            .then(pl.lit("guessable"))
            .alias("broken")
        )
    )


def _pairs(kept: pl.DataFrame) -> pl.DataFrame:
    """Returns the rows of `kept` whose title is the answer to another row of the same split, with that row's columns as
    `link_…`.

    `kept` comes in the order of the draw: of several rows that fit, the first one is taken on either side.
    """
    keys = ["link", "partition", "split"]
    bare = pl.col("title").str.replace(r"\s*\([^)]*\)$", "").str.to_lowercase()  # "Apink (group)" is named as "Apink"
    about = kept.unique(subset=["passage_id"], keep="first", maintain_order=True).with_columns(bare.alias("link"))
    shared = about.select("title", *keys).unique().group_by(keys).len().filter(pl.col("len") > 1)
    links = kept.filter(pl.col("kind").is_in(["person", "name"])).with_columns(
        pl.col("answer").str.to_lowercase().alias("link")
    )
    links = links.join(shared, on=keys, how="anti")  # a name that two titles share leads nowhere
    links = links.unique(subset=keys, keep="first", maintain_order=True).select(
        *keys, pl.col("passage_id", "title", "sentence", "start", "answer", "kind").name.prefix("link_")
    )
    joined = about.join(links, on=keys, how="inner", maintain_order="left")
    return joined.filter(pl.col("title") != pl.col("link_title"))


def _mixed(alone: list[Question], joined: list[Question], config: ClozeConfig) -> list[Question]:
    """Returns the questions of one split in random order: pairs take the place of the question about their second
    passage."""
    pairs = joined[: round(config.two_passages * len(alone))]
    taken = {question.evidence[-1].passage_id for question in pairs}
    single = [question for question in alone if question.evidence[0].passage_id not in taken]
    listed = pairs if config.two_passages == 1 else [*pairs, *single]
    return sorted(listed, key=lambda question: _draw(config.seed, "order", question.id))


def _question(row: dict, config: ClozeConfig) -> Question | None:
    """Makes a question about one sentence; returns None when its text would tell the answer after all.

    Two sentences of a passage may have their answers at the same place, so from its second question on the ids of a
    passage count.
    """
    gapped = _gapped(row["sentence"], row["start"], row["answer"])
    text = f"{row['title']}: {gapped}" if config.with_title else gapped
    if can_be_read(text, row["answer"], row["kind"]):
        return None
    return Question(
        id=f"cloze-{row['passage_id']}-{row['start']}" + (f".{row['number']}" if row["number"] else ""),
        text=text,
        golden_answers=[row["answer"]],
        source="cloze",
        partition=row["partition"],
        num_hops=1,
        evidence=[Evidence(passage_id=row["passage_id"], value=row["answer"])],
    )


def _pair_question(row: dict) -> Question | None:
    """Makes a question about two sentences; returns None when its text would tell the answer or the link."""
    link, link_kind = row["link_answer"], row["link_kind"]
    described = _gapped(row["link_sentence"], row["link_start"], link, mark=LINK)
    about, _ = hide(_gapped(row["sentence"], row["start"], row["answer"]), link, link_kind, LINK)
    text = f"{described}{SECOND_SENTENCE}{about}"
    if can_be_read(text, row["answer"], row["kind"]) or can_be_read(text, link, link_kind) or GAP not in about:
        return None
    return Question(
        id=f"cloze-{row['link_passage_id']}+{row['passage_id']}-{row['start']}",
        text=text,
        golden_answers=[row["answer"]],
        source="cloze",
        partition=row["partition"],
        num_hops=2,
        evidence=[
            Evidence(passage_id=row["link_passage_id"], value=link),
            Evidence(passage_id=row["passage_id"], value=row["answer"]),
        ],
    )


def is_linked(question: Question) -> bool:
    """Returns whether a question is about two passages."""
    return SECOND_SENTENCE in question.text


def needing_link(question: Question, found: Callable[[str, str], Collection[str]]) -> Question | None:
    """Returns a question about two passages with as much of its second sentence as does not find the passage of the
    gap alone: the whole sentence, or CUTS words on each side of the gap. Returns None if the fewest words find it.
    Other questions are returned as they are.

    `found` takes the words of a search and a part of the corpus, and returns the ids of the passages found there.
    """
    if not is_linked(question):
        return question
    described, _, about = question.text.partition(SECOND_SENTENCE)
    before, _, after = about.partition(GAP)
    shorter = (" ".join([*before.split()[-count:], GAP, *after.split()[:count]]) for count in CUTS)
    for sentence in (about, *shorter):
        words = WORDS.findall(sentence.replace(GAP, " ").replace(LINK, " "))
        if question.evidence[-1].passage_id not in found(" ".join(words), question.partition):
            return replace(question, text=f"{described}{SECOND_SENTENCE}{sentence}")
    return None


def _gapped(sentence: str, start: int, answer: str, *, mark: str = GAP) -> str:
    return " ".join((sentence[:start] + mark + sentence[start + len(answer) :]).split())


def _broken_rule(sentence: str, start: int, answer: str, kind: Kind, title: str, config: ClozeConfig) -> str | None:
    """Returns the first rule that the candidate breaks, of those that need no other passage."""
    gapped = _gapped(sentence, start, answer)
    words = WORDS.findall(gapped.replace(GAP, " "))
    trivial = trivial_rule(answer, kind, title)
    if trivial == "short" or len(words) < config.min_words:
        return "short"
    if len(words) > config.max_words:
        return "long"
    if trivial:
        return trivial
    if can_be_read(gapped, answer, kind):
        return "not_alone"
    if len({word.lower() for word in words} - _COMMON_WORDS) < _MIN_SEARCH_WORDS:
        return "unsearchable"
    return None


def split_of(title: str, partition: str, config: ClozeConfig) -> str:
    """Returns the split of all passages of a title, whatever else the corpus holds and however it is read."""
    place = _draw(config.seed, "split", partition, title) / 2**64
    if place < config.test_share:
        return "test"
    return "validation" if place < config.test_share + config.validation_share else "train"


def _draw(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest())
