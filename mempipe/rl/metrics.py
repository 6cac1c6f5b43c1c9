"""Joins the metrics of micro-batches, ranks and updates: `merge_metrics` over the sums of one update, `mean_metrics` of
them, and `step_metrics` over the updates of a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

TOTALS = ("loss", "policy_loss", "kl_loss")
"""Metrics that are shares of the step already; all others are sums over tokens, or maxima (names ending in `_max`)."""
COUNTS = ("tokens", "num_tokens", "num_contexts")
PER_UPDATE = (
    "lr",
    "grad_norm",
    "seconds",
    "reference_seconds",
    "tokens_per_second",
    "teraflops_per_rank",
    "model_flops_utilization",
)
"""Metrics of an update as a whole; the others that are neither totals, counts nor maxima are means over its tokens."""


def merge_metrics(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Merges the metric sums of several micro-batches or ranks: sums are added, maxima compared."""
    merged: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if name not in merged:
                merged[name] = value
            else:
                merged[name] = max(merged[name], value) if name.endswith("_max") else merged[name] + value
    return merged


def mean_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Turns merged sums into the logged metrics: means per trained token, but totals, maxima and token counts as they
    are.

    Where no token was trained (`pack_step`, when every advantage is 0) there are no means. A name "context_2/x" is a
    mean over the tokens of third contexts ("context_2/tokens").
    """
    means = {}
    for name, value in sums.items():
        scope, _, leaf = name.rpartition("/")
        if name in TOTALS or leaf == "tokens" or leaf.endswith("_max"):
            means[name] = value
        elif tokens := sums[f"{scope}/tokens" if scope else "tokens"]:
            means[name] = value / tokens
    return means


def step_metrics(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Joins the metrics of the updates of a step: counts are added, maxima compared, and means per token weighted by
    their tokens. Everything else, such as the loss and the gradient's norm, is a mean over the updates.
    """
    joined = {}
    for name in dict.fromkeys(itertools.chain.from_iterable(updates)):  # an update may lack later contexts of another
        having = [metrics for metrics in updates if name in metrics]
        scope, _, leaf = name.rpartition("/")
        count = f"{scope}/tokens" if scope else "tokens"
        if leaf in COUNTS:
            joined[name] = float(sum(metrics[name] for metrics in having))
        elif leaf.endswith("_max") or leaf == "peak_memory_gib":
            joined[name] = max(metrics[name] for metrics in having)
        else:
            is_whole = leaf in PER_UPDATE or name in TOTALS
            weights = [1.0 if is_whole else metrics.get(count, 0.0) for metrics in having]
            joined[name] = fmean([metrics[name] for metrics in having], weights=weights)
    return joined
