"""Reads the inputs of a run's roles before any role starts: the tokenizer, and every question under the budget.

This imports transformers, so it comes after the checks that need nothing heavy.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mempipe.agents.protocol import UnfitQuestion
from mempipe.agents.registry import BUILT_IN
from mempipe.checks.findings import Finding, note, ok
from mempipe.checks.models import model_folder
from mempipe.checks.run import few_questions
from mempipe.config import RunConfig
from mempipe.data.config import Columns
from mempipe.data.input_files import is_remote
from mempipe.data.qa import iter_questions
from mempipe.engines.tokenizer import load_tokenizer
from mempipe.provenance import files_sha256, model_sha256
from mempipe.retrieval.manifest import MANIFEST, index_sha256
from mempipe.rollout import PROBE, agent_code, make_renderer, prompt_hash
from mempipe.settings import ConfigError
from mempipe.types import Question


def check_inputs(config: RunConfig) -> list[Finding]:
    """Returns the parts of the agent's largest context, and a note where the questions end before the run.

    Raises ConfigError when the tokenizer cannot serve, and when template, budget or questions do not fit.
    """
    renderer, few = make_renderer(config, tokenizer=load_tokenizer(config.model.path)), ""
    if config.reward.information_weight:
        with agent_code(config, "its answer_probe cannot be made", passing=(ConfigError,)):
            renderer.answer_probe(PROBE, "")  # refuses an agent that has none
    for path in filter(None, (config.data.train, config.data.validation)):
        check = renderer.check_trained if path == config.data.train else renderer.check
        count, with_evidence = _check_questions(path, check, columns=config.data.columns)
        if path == config.data.train:
            few = few_questions(config, count)
        if path == config.data.train and "kept_fact" in config.reward.per_turn and not with_evidence:
            raise ConfigError(
                f"reward.per_turn pays kept_fact, but no question of data.train {path} has evidence; `mempipe data "
                "evidence` finds it for MuSiQue, 2WikiMultihopQA and HotpotQA"
            )
    parts = {**config.budget.parts(), "template": renderer.template_tokens}
    listed = " + ".join(f"{name} {tokens}" for name, tokens in parts.items())
    fits = ok(f"{listed} = {sum(parts.values())} of budget.context_tokens {config.budget.context_tokens}")
    return [fits, *([note(few)] if few else [])]


def hash_inputs(config: RunConfig) -> dict[str, str]:
    """Returns the hashes of the run's inputs, by setting; "" for a file that is not on this machine, and for the
    prompts of a user-defined agent, which may not accept the test question."""
    train, index, model = config.data.train, config.retrieval.index, config.model.path
    is_ours = config.agent.name in BUILT_IN and config.agent_spec.prompts is not None
    has_prompts = model and model_folder(model) is not None and is_ours
    return {
        "data.train": files_sha256(train) if train and (is_remote(train) or Path(train).exists()) else "",
        "model.path": model_sha256(model),
        "agent.prompts": prompt_hash(config, tokenizer=load_tokenizer(model)) if has_prompts else "",
        "retrieval.index": index_sha256(index) if index and (Path(index) / MANIFEST).exists() else "",
    }


def _check_questions(path: str, check: Callable[[Question], None], *, columns: Columns) -> tuple[int, int]:
    """Returns how many questions the file has, and how many of them with evidence. Raises ConfigError where some do not
    fit."""
    count, with_evidence, unfit = 0, 0, []
    for question in iter_questions(path, columns=columns):
        count += 1
        with_evidence += bool(question.evidence)
        try:
            check(question)
        except UnfitQuestion as error:
            unfit.append(str(error))
    if unfit:
        raise ConfigError(
            f"{path}: {len(unfit)} of {count} questions do not fit: {'; '.join(unfit[:3])}; raise the "
            "budget or leave them out"
        )
    return count, with_evidence
