"""What an agent needs from the outside, as plain callables: a tokenizer, `generate` and `search`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mempipe.types import Completion, SearchResult


class Tokenizer(Protocol):
    """The text-to-ids boundary (`mempipe.engines.tokenizer.load_tokenizer` makes one)."""

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Ids that end an assistant message."""
        ...

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that only templates and the policy may produce: every special or added token."""
        ...

    @property
    def special_tokens(self) -> Sequence[str]:
        """The texts of those tokens."""
        ...

    def encode_template(self, text: str) -> list[int]:
        """Ids of trusted text; special tokens in it become their ids. Adds nothing of its own (no BOS)."""
        ...

    def encode_text(self, text: str) -> list[int]:
        """Ids of untrusted text; no id of `special_token_ids` can arise, whatever the text holds (lone surrogates too)."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids, special tokens included."""
        ...

    def render_chat(self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool) -> str:
        """The chat template applied to role/content messages."""
        ...


class GenerateFn(Protocol):
    async def __call__(self, token_ids: Sequence[int], *, max_tokens: int) -> Completion:
        """Samples one assistant message after `token_ids`. Infrastructure faults raise; they never come back as text."""
        ...


class SearchFn(Protocol):
    async def __call__(self, query: str, *, num_passages: int, partition: str) -> SearchResult:
        """The best passages, at most `num_passages`. Infrastructure faults raise."""
        ...
