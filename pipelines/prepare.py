"""Makes the inputs of a run, if the config asks for it.

With a `world`, questions, corpus and index come from the seed, and so do tokenizer and model unless model.path names
one. With `cloze`, questions and index come from the passages of data.corpus; with model.source, the model is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mempipe.agents.protocol import UnfitQuestion
from mempipe.agents.rendering import Renderer
from mempipe.config import RunConfig
from mempipe.data.config import WorldConfig
from mempipe.data.objectives import join_objectives
from mempipe.data.qa import read_questions, write_questions
from mempipe.data.world import Relations, World, make_questions, make_worlds
from mempipe.engines.tokenizer import load_tokenizer
from mempipe.masking.cloze import SPLITS, is_linked, needing_link
from mempipe.masking.config import AskedClozeConfig
from mempipe.progress import say
from mempipe.retrieval.build import build_index
from mempipe.retrieval.config import IndexConfig, RetrievalConfig
from mempipe.retrieval.encoders import HashingEncoder
from mempipe.rollout import make_renderer
from mempipe.runs import QUESTIONS_FOLDER, Run
from mempipe.settings import ConfigError
from mempipe.storage.checksums import write_checksums
from mempipe.storage.files import whole_folder
from mempipe.types import Question

NUM_HELD_OUT_WORLDS = 8


def prepare(run: Run) -> RunConfig:
    """Returns the config with every path filled in. What is already in the run's folder is kept."""
    config = run.config
    if config.world is not None:
        return _from_world(run, config, config.world)
    if config.model.source:
        config = _with_imported_model(run, config)
    return config if config.cloze is None else _with_cloze_questions(run, config, config.cloze)


def _with_imported_model(run: Run, config: RunConfig) -> RunConfig:
    folder = run.folder / "model"
    if not folder.exists():
        from mempipe.engines.model_import import import_model

        import_model(config.model.source, folder)
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})


def _with_cloze_questions(run: Run, config: RunConfig, cloze: AskedClozeConfig) -> RunConfig:
    """Makes questions and an index of data.corpus. Questions that do not fit the agent's budget are skipped. Without a
    test question nothing is evaluated. With several objectives questions/single has the questions that were joined."""
    from pipelines.build_cloze import build_cloze
    from pipelines.build_index import main as index_corpus

    renderer = make_renderer(config, tokenizer=load_tokenizer(config.model.path))  # refuses a budget before the work
    made = build_cloze(
        config.data.corpus,
        run.folder / QUESTIONS_FOLDER,
        cloze.made,
        fallback=config.data.fallback_corpus,
        ray_address=config.ray_address,
    )
    index = run.folder / "index"
    if not index.exists():
        index_corpus(
            IndexConfig(
                corpus=[made.corpus], output=str(index), encoder=None, lexical=True, ray_address=config.ray_address
            )
        )
    files = {split: run.folder / "questions" / f"{split}.parquet" for split in SPLITS}
    for split, file in files.items():
        if not file.exists():
            asked = read_questions(made.questions(split)) if made.counts[f"{split}_questions"] else []
            if cloze.needs_link:
                asked = _that_need_links(asked, index, config.retrieval, split)
            if cloze.objectives > 1:
                write_questions(file.parent / "single" / file.name, asked)
                num_single, asked = len(asked), _joined(asked, cloze.objectives, seed=config.seed)
                if split == "train" and not asked:
                    raise ConfigError(
                        f"cloze.objectives is {cloze.objectives}, but data.corpus gives {num_single} training "
                        "questions in all, too few for one joined question; add texts, or lower it"
                    )
            fitting = [question for question in asked if _fits(renderer, question)]
            if split == "train" and asked and not fitting:
                raise ConfigError(
                    f"none of the {len(asked):,} training questions fits the budget of the agent; raise "
                    f"budget.question_tokens, which is {config.budget.question_tokens}"
                )
            if unfit := len(asked) - len(fitting):
                say(f"{unfit:,} of {len(asked):,} {split} questions do not fit the budget of the agent and are skipped")
            if fitting or split == "train":
                write_questions(file, fitting)
    held_out = str(files["test"]) if files["test"].exists() else ""
    if not held_out:
        say("there is no test question, so nothing is evaluated; more texts or a larger cloze.test_share change that")
    return config.model_copy(
        update={
            "retrieval": config.retrieval.model_copy(update={"index": str(index)}),
            "data": config.data.model_copy(update={"train": str(files["train"]), "validation": held_out}),
        }
    )


def _that_need_links(asked: Sequence[Question], index: Path, searched: RetrievalConfig, split: str) -> list[Question]:
    """Returns the questions without those of two passages that need one of them only, and says how many are left."""
    from mempipe.retrieval.retriever import Query, Retriever

    retriever = Retriever(index, mode=searched.mode, encoder_path=searched.encoder_path)

    def found(words: str, partition: str) -> set[str]:
        (result,) = retriever.search([Query(text=words, num_passages=searched.max_passages, partition=partition)])
        return {passage.id for passage in result.passages}

    kept, num_linked, num_kept, num_cut = list[Question](), 0, 0, 0
    for question in asked:
        needing = needing_link(question, found)
        kept += [needing] if needing else []
        if is_linked(question):
            num_linked, num_kept = num_linked + 1, num_kept + (needing is not None)
            num_cut += needing is not None and needing.text != question.text
    if num_linked:
        say(
            f"{num_kept:,} of {num_linked:,} {split} questions about two passages need both, {num_cut:,} of them with "
            "a shorter second sentence; the others are rejected (cloze.needs_link)"
        )
    return kept


def _joined(asked: Iterable[Question], objectives: int, *, seed: int) -> list[Question]:
    """Returns every `objectives` questions about the same part of the corpus as one, drawn by the seed."""
    parts: dict[str, list[Question]] = {}
    for question in asked:
        parts.setdefault(question.partition, []).append(question)
    return [each for part in parts.values() for each in join_objectives(part, objectives=objectives, seed=seed)]


def _fits(renderer: Renderer[Any], question: Question) -> bool:
    try:
        renderer.check(question)
    except UnfitQuestion:
        return False
    return True


def _from_world(run: Run, config: RunConfig, wanted: WorldConfig) -> RunConfig:
    train_worlds, held_out = worlds(config)
    index, model = run.folder / "index", Path(config.model.path or run.folder / "model")
    train, validation = run.folder / "world" / "train.parquet", run.folder / "world" / "validation.parquet"
    if not validation.exists():
        count = wanted.num_validation_questions
        parts = [
            (name, held_out, count, f"world.{name}", hops, relations)
            for name, (hops, relations) in wanted.unseen.items()
        ]
        parts += [
            ("train", train_worlds, wanted.num_train_questions, "world.num_train_questions", wanted.hops, wanted.seen),
            ("validation", held_out, count, "world.num_validation_questions", wanted.hops, wanted.seen),
        ]
        for name, of, number, setting, hops, relations in parts:  # validation last: with it all are there
            asked = world_questions(
                of,
                number,
                setting=setting,
                seed=config.seed,
                hops=hops,
                relations=relations,
                objectives=wanted.objectives,
            )
            write_questions(run.folder / "world" / f"{name}.parquet", asked)
    if not index.exists():
        passages = (
            replace(passage, partition=world.id) for world in [*train_worlds, *held_out] for passage in world.passages
        )
        build_index(passages, index, encoder=HashingEncoder())
    if config.makes_model and not model.exists():
        _make_model(model, seed=config.seed, num_layers=wanted.num_layers)
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": str(model)}),
            "retrieval": config.retrieval.model_copy(update={"index": str(index)}),
            "data": config.data.model_copy(update={"train": str(train), "validation": str(validation)}),
        }
    )


def worlds(config: RunConfig) -> tuple[list[World], list[World]]:
    """Returns the training worlds, and held-out worlds whose facts are true in none of them."""
    assert config.world is not None, "worlds are made only for a config with a `world`"
    return make_worlds(
        config.world.num_train_worlds,
        num_held_out=NUM_HELD_OUT_WORLDS,
        seed=config.seed,
        document_passages=config.world.document_passages,
        evidence_order=config.world.evidence_order,
    )


def world_questions(
    worlds: Sequence[World],
    count: int,
    *,
    setting: str,
    seed: int,
    hops: Sequence[int],
    relations: Relations,
    objectives: int,
) -> list[Question]:
    """Returns questions about the worlds. Raises ConfigError that names the `setting` which asks for too many."""
    try:
        return make_questions(worlds, count, seed=seed, hops=hops, relations=relations, objectives=objectives)
    except ValueError as error:
        raise ConfigError(
            f"{setting}: {count * objectives} questions of {len(worlds)} worlds (hops {hops}): {error}"
        ) from error


def _make_model(folder: Path, *, seed: int, num_layers: int) -> None:
    from mempipe.engines.tiny import build_model, build_tokenizer

    with whole_folder(folder) as partial:
        build_tokenizer(partial)
        build_model(partial, seed=seed, num_layers=num_layers)
        write_checksums(partial)
