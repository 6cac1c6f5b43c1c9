"""Long documents with one entity hidden, from passages without labels (MemTrain, arXiv 2606.03197, section 3.2).

A document is a pivot passage, the passages most related to it and random ones, in random order. One entity of the pivot
is replaced by a mask wherever the document writes it, in whatever form. The text is cut into chunks, which are read one
after the other; a cut never goes through a word or a mask.

Everything here depends on its arguments alone; `mempipe.streams.documents` runs it on a cluster.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl
from pydantic import Field, model_validator

from mempipe.masking.entities import Entity, Finder, Kind, can_be_read, forms, hide
from mempipe.masking.rules import around, common_answers, guessable_answers, trivial_rule
from mempipe.settings import FolderName, Section
from mempipe.text import CountTokens, chunks_of
from mempipe.types import Passage

REJECTIONS = {
    "no_entity": "the finder sees none in the pivot",
    "short": "the entity has one character",
    "in_title": "the entity can be read in the pivot's title",
    "everywhere": "too many passages name the entity",
    "guessable": "the words around the entity are nearly always followed by it in the corpus",
    "readable": "after masking, the entity can still be read in the text or in the question",
    "too_long": "the pivot alone has more than max_tokens",
    "too_short": "the document has fewer tokens than one chunk",
    "no_recall": "no passage of the document has another entity, which a recall could ask for",
}
"""Why a pivot, or one of its entities, was not used. An entity is counted under the first rule that it breaks."""
_SEPARATOR = "\n\n"


class DocumentsConfig(Section):
    """Masked documents for self-supervised memory training: `mempipe data memtrain`."""

    FREE = ("output", "name", "num_workers", "ray_address")

    index: str
    """Folder of an index (`mempipe index build`); its passages are the corpus, its search finds the related ones."""
    tokenizer: str
    """Folder or name of the model whose tokenizer counts tokens."""
    output: str = "runs"
    """Folder that holds the build's own folder."""
    name: FolderName = "memtrain"
    """The build's folder; the same command again continues with it."""
    entities: str = "auto"
    """Finder of entities: rules, the name of an installed spaCy pipeline, or auto (an installed English pipeline,
    else rules)."""
    mask: str = "[MASK]"
    """The text that replaces the entity."""
    question: str = "What does {mask} stand for?"
    """The question about every document; {mask} is the mask. The published words are not known."""
    num_documents: int = Field(30_000, ge=1)
    """Documents to train on; each has another pivot."""
    num_held_out: int = Field(128, ge=0)
    """Further documents, in a separate file, that are not trained on."""
    num_recall_targets: int = Field(64, ge=0)
    """Passages of a document with one entity each that a recall may ask for; 0: none is. A document without any
    is rejected otherwise."""
    num_related: int = Field(29, ge=0)
    """Passages that a search for the pivot's text finds."""
    num_random: int = Field(120, ge=0)
    """Random passages, at least; more where the document would be shorter than its length, fewer where longer than
    max_tokens."""
    chunk_tokens: int = Field(5120, ge=64)
    """Tokens of a chunk, at most."""
    min_tokens: int = Field(24_000, ge=1)
    """Minimum number of tokens of a document before masking, if the corpus has enough passages. The length of each
    document is drawn from min_tokens to max_tokens."""
    max_tokens: int = Field(40_000, ge=1)
    """Tokens of a document before masking, at most."""
    max_passage_share: float = Field(0.005, gt=0, le=1)
    """An entity that a larger share of the passages names is rejected (of small corpora at least 20 passages)."""
    statistics_passages: int = Field(100_000, ge=1)
    """Passages, drawn by the seed, among which common and guessable entities are counted."""
    documents_per_part: int = Field(64, ge=1)
    """Documents that one worker makes and writes at once: the most that a killed build loses, for each worker."""
    num_workers: int = Field(0, ge=0)
    """Actors that make documents; 0: one for every CPU."""
    seed: int = Field(1, ge=0)
    """Seed of pivots, entities, random passages and their order."""
    ray_address: str = ""
    """A running cluster; empty: the job's own cluster, or a local one."""

    @model_validator(mode="after")
    def _lengths_in_order(self) -> DocumentsConfig:
        if not self.chunk_tokens <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"chunk_tokens {self.chunk_tokens}, min_tokens {self.min_tokens} and max_tokens {self.max_tokens} must "
                "rise in this order"
            )
        if not self.mask.strip() or self.mask != self.mask.strip() or len(self.mask.split()) > 1:
            raise ValueError(f"mask is {self.mask!r}; it must be one word, such as [MASK]")
        if "{mask}" not in self.question:
            raise ValueError(f"question is {self.question!r}; it must contain {{mask}}")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedDocument:
    """One masked document, with the fields of the `Question` that is asked of it: a file of documents is a file of
    questions.
    """

    id: str
    text: str
    """The question."""
    golden_answers: list[str]
    """Every form of the hidden entity; first as the pivot writes it."""
    context: str
    """The masked document."""
    recall_targets: list[list[str]]
    """Other entities of it, every form of each."""
    source: str = "memtrain"
    pivot_id: str
    pivot_title: str
    kind: Kind
    chunk_tokens: list[int]
    """Tokens of every chunk, as an agent with chunks of `DocumentsConfig.chunk_tokens` cuts them."""
    num_masks: int
    passage_ids: list[str]
    """In the order of the text, the pivot's among them."""
    related_scores: list[float]


@dataclass(frozen=True, slots=True)
class CommonEntities:
    """Entities that are useless to mask, according to a sample of the corpus."""

    everywhere: frozenset[str] = frozenset()
    """Answers in lower case that too many passages name."""
    guessable: frozenset[tuple[str, str]] = frozenset()
    """(words around, answer in lower case) of patterns that nearly always hold this answer."""


ENTITIES_SCHEMA = pl.Schema({"passage_id": pl.String, "answer": pl.String, "around": pl.String})


def entities_of(passages: Sequence[Passage], finder: Finder) -> pl.DataFrame:
    """Returns one row per entity of the passages, columns `ENTITIES_SCHEMA`."""
    found = zip(passages, finder.find([passage.text for passage in passages]), strict=True)
    rows = [
        (passage.id, entity.text, around(passage.text, entity.start, entity.text))
        for passage, entities in found
        for entity in entities
    ]
    return pl.DataFrame(rows, schema=ENTITIES_SCHEMA, orient="row")


def common_entities(entities: pl.LazyFrame, num_passages: int, config: DocumentsConfig) -> CommonEntities:
    """Returns the statistics of the corpus from the rows of `entities_of` about `num_passages`."""
    common = common_answers(entities, num_passages, config.max_passage_share).collect(engine="streaming")
    guessable = guessable_answers(entities).collect(engine="streaming")
    return CommonEntities(frozenset(common["key"]), frozenset(guessable.iter_rows()))


@dataclass(slots=True)
class Material:
    """The passages of one document before an entity is chosen."""

    pivot: Passage
    related: Sequence[Passage]
    random: Iterator[Passage]
    """As many as are asked for; ends where the corpus does."""
    seed: tuple[int, int]
    """The build's seed and the document's number."""
    rejected: list[str] = field(default_factory=list)
    """Rules that entities of the pivot broke, filled by `make_document`."""


def make_document(
    material: Material, finder: Finder, common: CommonEntities, count_tokens: CountTokens, config: DocumentsConfig
) -> MaskedDocument | None:
    """Returns the masked document, or None when no entity of the pivot can be hidden; `material.rejected` says why."""
    rng = np.random.default_rng(material.seed)
    (entities,) = finder.find([material.pivot.text])
    chosen = list({(entity.text, entity.kind): entity for entity in reversed(entities)}.values())[::-1]
    if not chosen:
        material.rejected.append("no_entity")
        return None
    wanted = int(rng.integers(config.min_tokens, config.max_tokens, endpoint=True))
    passages, tokens = _gathered(material, wanted, count_tokens, config)
    if passages[:1] != [material.pivot]:
        material.rejected.append("too_long")
        return None
    order = rng.permutation(len(passages))
    passages, tokens = [passages[i] for i in order], [tokens[i] for i in order]
    if sum(tokens) < config.chunk_tokens:
        material.rejected.append("too_short")
        return None
    whole = _SEPARATOR.join(_text(passage, config.mask) for passage in passages)
    for i in rng.permutation(len(chosen)):
        entity = chosen[i]
        rule = _broken_rule(entity, material.pivot, common)
        if rule is None:
            document = _masked(material, entity, passages, whole, count_tokens, config)
            if document is not None:
                others = [passages[i] for i in rng.permutation(len(passages))[: config.num_recall_targets]]
                targets = _recall_targets(document, others, finder, common, rng)
                if targets or not config.num_recall_targets:
                    return replace(document, recall_targets=targets)
            rule = "readable" if document is None else "no_recall"
        material.rejected.append(rule)
    return None


def _gathered(
    material: Material, wanted: int, count_tokens: CountTokens, config: DocumentsConfig
) -> tuple[list[Passage], list[int]]:
    """Returns pivot, related and random passages, of at least `wanted` tokens together if `max_tokens` has room for the
    last one, and the tokens of each.
    """
    passages: list[Passage] = []
    tokens: list[int] = []
    total = 0

    def add(passage: Passage) -> bool:
        nonlocal total
        length = count_tokens(_text(passage, config.mask) + _SEPARATOR)
        if total + length > config.max_tokens:
            return False
        passages.append(passage)
        tokens.append(length)
        total += length
        return True

    for passage in (material.pivot, *material.related):
        add(passage)
    num_own = len(passages)
    for passage in material.random:
        if len(passages) - num_own >= config.num_random and total >= wanted:
            break
        if not add(passage):
            break
    return passages, tokens


def _text(passage: Passage, mask: str) -> str:
    """Returns title and text on two lines, without a mask of the corpus's own, which would be another entity's."""
    lines = (" ".join(part.replace(mask, " ").split()) for part in (passage.title, passage.text))
    return "\n".join(line for line in lines if line)


def _broken_rule(entity: Entity, pivot: Passage, common: CommonEntities) -> str | None:
    key = entity.text.lower()
    if rule := trivial_rule(entity.text, entity.kind, pivot.title):
        return rule
    if key in common.everywhere:
        return "everywhere"
    if (around(pivot.text, entity.start, entity.text), key) in common.guessable:
        return "guessable"
    return None


def _masked(
    material: Material,
    entity: Entity,
    passages: Sequence[Passage],
    whole: str,
    count_tokens: CountTokens,
    config: DocumentsConfig,
) -> MaskedDocument | None:
    """Returns the document without the entity; None when it can be read all the same."""
    answer = " ".join(entity.text.split())
    text, num_masks = hide(whole, answer, entity.kind, config.mask)
    question = config.question.replace("{mask}", config.mask)
    if not num_masks or can_be_read(text, answer, entity.kind) or can_be_read(question, answer, entity.kind):
        return None
    count_once = functools.cache(count_tokens)  # chunks are counted while they are cut, and again for their lengths
    chunks = chunks_of(text, config.chunk_tokens, count_once, config.mask)
    _, number = material.seed
    return MaskedDocument(
        id=f"memtrain-{number:08d}",
        text=question,
        golden_answers=_answer_first(answer, entity.kind),
        context=text,
        recall_targets=[],
        pivot_id=material.pivot.id,
        pivot_title=material.pivot.title,
        kind=entity.kind,
        chunk_tokens=[count_once(chunk) for chunk in chunks],
        num_masks=num_masks,
        passage_ids=[passage.id for passage in passages],
        related_scores=[passage.score for passage in material.related],
    )


def _recall_targets(
    document: MaskedDocument,
    passages: Sequence[Passage],
    finder: Finder,
    common: CommonEntities,
    rng: np.random.Generator,
) -> list[list[str]]:
    """Returns the forms of one entity of each passage that has one that can be asked for: by the rules of the hidden
    entity, and still there after masking. No entity comes twice.
    """
    chosen: dict[str, list[str]] = {}
    hidden = set(map(str.casefold, document.golden_answers))
    for passage, entities in zip(passages, finder.find([passage.text for passage in passages]), strict=True):
        for i in rng.permutation(len(entities)):
            entity, answer = entities[i], " ".join(entities[i].text.split())
            listed = _answer_first(answer, entity.kind)
            if (
                _broken_rule(entity, passage, common) is None
                and hidden.isdisjoint(map(str.casefold, listed))
                and can_be_read(document.context, answer, entity.kind)
            ):
                chosen.setdefault(answer.casefold(), listed)
                break
    return list(chosen.values())


def _answer_first(answer: str, kind: Kind) -> list[str]:
    return [answer, *(form for form in forms(answer, kind) if form != answer)]


Document, MemtrainConfig = MaskedDocument, DocumentsConfig
"""Their names in earlier versions."""
