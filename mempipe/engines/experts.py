"""Mixtures of experts, which mempipe does not train: how a config, or a name, shows that a model is one.

The learner has no loss that balances the experts, and engine and learner would route tokens differently, so that the
ratios of their log-probs would be those of different networks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_NAMES = re.compile(r"moe|mixtral|-a\d+(\.\d+)?b\b|gpt-oss|deepseek-(v[23]|r1$)", re.IGNORECASE)


def num_experts(values: Mapping[str, Any]) -> int:
    """Returns the experts of a layer by the values of a config.json; 0 for a dense model."""
    of_text = values.get("text_config")
    counts = [values.get(name) for name in _COUNTS]
    counts += [of_text.get(name) for name in _COUNTS] if isinstance(of_text, Mapping) else []
    return max((count for count in counts if isinstance(count, int) and count > 1), default=0)


def is_named_as_mixture(name: str) -> bool:
    """Returns whether a model's name on the hub is that of a mixture, e.g. Qwen/Qwen3-30B-A3B."""
    return _NAMES.search(name) is not None


def refusal(path: str, *, kind: str = "", experts: int = 0) -> str:
    """Returns the sentence that refuses a mixture; `kind` is its model_type."""
    known = f" ({kind}, {experts} experts)" if experts else ""
    return (
        f"model.path {path!r} is a mixture of experts{known}, which mempipe does not train; take a dense model, e.g. "
        "Qwen/Qwen3-4B-Instruct-2507"
    )
