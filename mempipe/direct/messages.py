"""The arguments of direct calls to an engine and to a retriever."""

from __future__ import annotations

from typing import Any

import msgspec


class GenerateCall(msgspec.Struct, array_like=True):
    """The arguments of `mempipe.engines.generator.Generator.generate`."""

    token_ids: list[int]
    max_tokens: int
    sampling: dict[str, Any]
    """The fields of a SamplingConfig."""
    stop_token_ids: list[int]
    seed: int | None


class SearchCall(msgspec.Struct, array_like=True):
    """The arguments of a search."""

    query: str
    num_passages: int
    partition: str
