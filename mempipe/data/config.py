"""Settings of questions and of the synthetic world."""

from __future__ import annotations

from pydantic import Field

from mempipe.settings import Section


class DataConfig(Section):
    """The questions of a run."""

    train: str = ""
    """Question file in any published format (docs/evaluation.md), or parquet written by mempipe."""
    validation: str = ""
    """Question file that is never trained on; empty: nothing is evaluated."""
    num_epochs: int = Field(1, ge=1)
    """How often every training question may be asked."""
    shuffle: bool = True
    """Ask the questions of every epoch in an order drawn from the seed."""


class WorldConfig(Section):
    """The synthetic world (mempipe.data.world)."""

    num_train_worlds: int = Field(200, ge=1)
    """Worlds with facts of their own."""
    num_train_questions: int = Field(4000, ge=1)
    """Questions about them."""
    num_validation_questions: int = Field(384, ge=1)
    """Questions about worlds that are held out."""
    hops: list[int] = [1, 2, 3]
    """Hop counts of the questions, in equal shares."""


class WarmStartConfig(Section):
    """Supervised start of the tiny model:
    one pass over scripted trajectories, faultless ones first, then ones with bad habits.
    """

    num_clean_trajectories: int = Field(4500, ge=0)
    """Scripted trajectories without mistakes."""
    num_noisy_trajectories: int = Field(1000, ge=0)
    """Scripted trajectories with mistakes, which reinforcement learning has to undo."""
    lr: float = Field(2e-3, gt=0)
    """Learning rate at its peak; the schedule is a cosine."""
    tokens_per_step: int = Field(2048, ge=1)
    """Tokens of one optimiser update, all ranks together."""
