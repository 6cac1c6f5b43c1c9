"""Settings of questions that are made of text without labels (`mempipe.masking.cloze`)."""

from __future__ import annotations

from pydantic import Field, model_validator

from mempipe.data.objectives import MAX_OBJECTIVES
from mempipe.settings import Section


class ClozeConfig(Section):
    """Questions made from the passages of a corpus."""

    entities: str = "auto"
    """Finder of entities: rules, the name of an installed spaCy pipeline, or auto (an installed English pipeline,
    else rules).
    """
    passage_words: int = Field(100, ge=10)
    """Words of a passage that is cut from a text; rows are passages already."""
    with_title: bool = False
    """Name the passage's title in the question. Without it the passage must be found by the sentence's own words."""
    two_passages: float = Field(0.25, ge=0, le=1)
    """Share of questions that need two passages, if the corpus has enough of them."""
    per_passage: int = Field(1, ge=1)
    """The most questions about one passage."""
    min_words: int = Field(8, ge=2)
    """Minimum number of words of a sentence besides its gap."""
    max_words: int = Field(40, ge=2)
    """Words of a sentence, at most."""
    max_passage_share: float = Field(0.005, gt=0, le=1)
    """An answer that a larger share of the passages names is rejected (of small corpora at least 20 passages)."""
    validation_share: float = Field(0.05, ge=0, lt=1)
    """Share of the titles whose passages are asked about in validation only."""
    test_share: float = Field(0.15, ge=0, lt=1)
    """Share of the titles whose passages are asked about in the test only."""
    seed: int = 1
    """Seed of the split and of the choice among candidates."""

    @model_validator(mode="after")
    def _something_to_train_on(self) -> ClozeConfig:
        if self.validation_share + self.test_share >= 1:
            raise ValueError(
                f"validation_share {self.validation_share} and test_share {self.test_share} leave nothing to train on"
            )
        if self.min_words > self.max_words:
            raise ValueError(f"min_words {self.min_words} is more than max_words {self.max_words}")
        return self


class AskedClozeConfig(ClozeConfig):
    """Questions that a run generates from the passages in data.corpus, and how it asks them."""

    objectives: int = Field(1, ge=1, le=MAX_OBJECTIVES)
    """Number of questions that are asked as one, with an answer for each. The run's seed draws them from a split."""
    needs_link: bool = False
    """Keep a question of two passages only if the words of its second sentence alone do not find their passage in the
    run's index, among `retrieval.max_passages`: then the first sentence has to be read, and what it tells remembered.
    A second sentence that finds it is cut to the words around the gap first.
    """

    @property
    def made(self) -> ClozeConfig:
        """Returns the settings of the question files."""
        return ClozeConfig(**self.model_dump(include=set(ClozeConfig.model_fields)))
