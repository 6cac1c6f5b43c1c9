"""Measures one agent under several memory budgets: how much memory is enough."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import polars as pl

from mempipe.agents.budget import MemoryBudget
from mempipe.api.agent import Agent, Source, load
from mempipe.api.evaluation import SEED, Evaluation, Questions, check_sampling, played, questions_of
from mempipe.config import RunConfig
from mempipe.loader import parse_section
from mempipe.reports.budgets import verdicts
from mempipe.settings import ConfigError
from mempipe.studies.budgets import MARGIN, BudgetCurve, BudgetStudy, study_runs
from mempipe.studies.measured import MeasuredRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """An agent under several memory budgets, all on the same questions."""

    study: BudgetStudy
    """The budgets with their scores, costs and tests, for all questions and for each number of hops
    (`mempipe.studies.budgets`)."""
    evaluations: dict[int, Evaluation]
    """The evaluation under each budget, by memory_tokens."""

    @property
    def curve(self) -> BudgetCurve:
        """Returns the budgets over all questions."""
        (curve,) = self.study.whole.curves
        return curve

    @property
    def table(self) -> pl.DataFrame:
        """Returns a row for each budget: exact match with its 95 % interval, the verdict ("enough", "not enough",
        "cannot be told"; the largest one has none), and what a question costs."""
        return pl.DataFrame(
            [
                {
                    "memory_tokens": point.memory_tokens,
                    "em": point.measured.score.value,
                    "low": point.measured.score.low,
                    "high": point.measured.score.high,
                    "verdict": str(self.curve.verdict(point)) if point.test else None,
                    "tokens_per_question": point.measured.tokens_per_question,
                    "seconds_per_question": point.measured.seconds_per_question,
                    "largest_context": point.measured.largest_context,
                }
                for point in self.curve.points
            ]
        )

    @property
    def verdict(self) -> str:
        """Says which budget is enough: in a sentence for each number of hops where they are known, and in one for all
        questions."""
        return "\n".join(verdicts(self.study))

    def __repr__(self) -> str:
        budgets = ", ".join(map(str, self.evaluations))
        return f"<Sweep over memory_tokens {budgets}: {self.verdict}>"


def sweep(
    source: Agent | Source,
    questions: Questions,
    *,
    memory_tokens: Sequence[int],
    num_questions: int = 0,
    num_samples: int = 1,
    temperature: float = 0.0,
    margin: float = MARGIN,
    columns: Mapping[str, str] | None = None,
) -> Sweep:
    """Evaluates an agent under several values of budget.memory_tokens, all with the same weights.

    The arguments are those of `evaluate`, and `margin`: the percent points that a budget may lose against the largest
    one and still be enough. `mempipe sweep` also trains an agent for each budget, and repeats seeds.
    Raises ConfigError for an agent without a memory budget, for fewer than two budgets, and for a budget that the
    agent's context does not hold.
    """
    check_sampling(num_samples, temperature)
    asked = questions_of(questions, num_questions=num_questions, columns=columns)
    try:
        budgets = sorted({operator.index(tokens) for tokens in memory_tokens})
    except TypeError as error:
        raise ConfigError(f"memory_tokens is {memory_tokens!r}; expected a list of whole numbers") from error
    if len(budgets) < 2 or len(budgets) < len(memory_tokens):
        raise ConfigError(f"memory_tokens is {list(memory_tokens)}; expected two different budgets or more")
    with nullcontext(source) if isinstance(source, Agent) else load(source) as agent:
        configs = {tokens: with_memory(agent.config, tokens) for tokens in budgets}
        evaluations = {
            tokens: played(
                agent,
                config,
                asked,
                num_samples=num_samples,
                temperature=temperature,
                title=f"memory {tokens}",
            )
            for tokens, config in configs.items()
        }
    runs = [
        MeasuredRun(
            name=f"memory-{tokens}", agent=agent.name, memory_tokens=tokens, sets={"questions": evaluation.rows}
        )
        for tokens, evaluation in evaluations.items()
    ]
    return Sweep(study=study_runs(runs, margin=margin, seed=SEED), evaluations=evaluations)


def with_memory(config: RunConfig, memory_tokens: int) -> RunConfig:
    """Returns the config with another memory budget and the limits of `mempipe sweep`; the context stays, since the
    engine has one already. Raises ConfigError when the agent has no such budget, or when the context does not hold it.
    """
    if not config.budget.can_be_swept:
        raise ConfigError(f"memory_tokens: agent.name {config.agent.name!r} has no memory budget to sweep")
    values = config.model_dump(mode="json", exclude_unset=True)
    limits = {"memory_tokens": memory_tokens}
    if isinstance(config.budget, MemoryBudget):
        limits = config.budget.under(memory_tokens, fixed=("context_tokens",))
    values["budget"] = {**values.get("budget", {}), **limits}
    return parse_section(values, RunConfig)
