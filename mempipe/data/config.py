"""Settings of questions and of the synthetic world."""

from __future__ import annotations

from pydantic import Field

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
    """Passages for a run with a `cloze` section: a corpus, text files, a folder of either (docs/data.md lists them), or
    python-reference, the text that Python itself carries.
    """


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
    document_passages: int = Field(4, ge=1)
    """Passages in the document of a question, for agents that read."""
    num_layers: int = Field(4, ge=2)
    """Layers of the tiny model; 9 make a model of twice the parameters."""
