"""What a run needs before it starts:
with a `world` in the config, questions, corpus, index, tokenizer and model are made from the seed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mempipe.config import RunConfig
from mempipe.data.qa import write_questions
from mempipe.data.world import World, make_questions, make_worlds
from mempipe.files import whole_folder
from mempipe.retrieval.build import build_index
from mempipe.retrieval.encoders import HashingEncoder
from mempipe.runs import Run

NUM_HELD_OUT_WORLDS = 8


def prepare(run: Run) -> RunConfig:
    """The config with every path filled in; what is already in the run's folder is kept."""
    config = run.config
    if config.world is None:
        return config
    train_worlds, held_out = worlds(config)
    index, model = run.folder / "index", run.folder / "model"
    train, validation = run.folder / "world" / "train.parquet", run.folder / "world" / "validation.parquet"
    if not validation.exists():
        wanted, seed, hops = config.world, config.seed, config.world.hops
        write_questions(train, make_questions(train_worlds, wanted.num_train_questions, seed=seed, hops=hops))
        write_questions(validation, make_questions(held_out, wanted.num_validation_questions, seed=seed, hops=hops))
    if not index.exists():
        passages = (
            replace(passage, partition=world.id) for world in [*train_worlds, *held_out] for passage in world.passages
        )
        build_index(passages, index, encoder=HashingEncoder())
    if not model.exists():
        _make_model(model, seed=config.seed)
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": str(model)}),
            "retrieval": config.retrieval.model_copy(update={"index": str(index)}),
            "data": config.data.model_copy(update={"train": str(train), "validation": str(validation)}),
        }
    )


def worlds(config: RunConfig) -> tuple[list[World], list[World]]:
    """Training worlds, and held-out worlds whose facts are true in none of them."""
    assert config.world is not None, "worlds are made only for a config with a `world`"
    return make_worlds(config.world.num_train_worlds, num_held_out=NUM_HELD_OUT_WORLDS, seed=config.seed)


def _make_model(folder: Path, *, seed: int) -> None:
    from mempipe.engines.tiny import build_model, build_tokenizer

    with whole_folder(folder) as partial:
        build_tokenizer(partial)
        build_model(partial, seed=seed)
