"""Causal attention within each context of a packed row.

A packed row [1, T] holds whole contexts one after the other; a context may share its first tokens with the one before
it. No [T, T] mask is ever built: on CUDA with 16-bit weights `torch.nn.attention.varlen` takes the boundaries
directly, those of the queries in the row and those of keys and values that are gathered for whole contexts; everywhere
else contexts of similar length are gathered into a right-padded batch, where causal attention never looks at the
padding, and scattered back. Both are exact.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from mempipe.rl.packing import context_places


class ContextLayout:
    """Locates the contexts of a packed row; made once per micro-batch, used by every layer.

    `lengths` are the S context lengths. The first `shared_lengths` [S] of these tokens are in the row once, with the
    context before; without sharing the lengths sum to T.
    """

    def __init__(
        self, lengths: Sequence[int], *, device: torch.device, shared_lengths: Sequence[int] | None = None
    ) -> None:
        assert lengths and min(lengths) > 0, (
            f"a packed row needs contexts of at least one token, got lengths {list(lengths)}"
        )
        self.lengths = list(lengths)
        self.shared_lengths = list(shared_lengths or [0] * len(lengths))
        self.max_length = max(lengths)
        self.num_tokens = sum(lengths) - sum(self.shared_lengths)
        self.device = device

    @functools.cached_property
    def gathered(self) -> Tensor | None:
        """Returns the row position [sum(lengths)] of each token of each whole context; None when no prefix is shared
        (it would be arange(T))."""
        return self._places.to(self.device) if any(self.shared_lengths) else None

    @functools.cached_property
    def _places(self) -> Tensor:
        return torch.from_numpy(context_places(self.lengths, self.shared_lengths))

    @functools.cached_property
    def own_lengths(self) -> list[int]:
        """Returns the number of tokens of each context that are in the row for it alone."""
        return [length - shared for length, shared in zip(self.lengths, self.shared_lengths, strict=True)]

    @functools.cached_property
    def boundaries(self) -> tuple[Tensor, Tensor]:
        """Returns [S + 1] int32, the start of every context and the end of the last: in the row, which holds
        `own_lengths`, and in a list of whole contexts."""
        own, whole = (
            torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=self.device)
            for lengths in (self.own_lengths, self.lengths)
        )
        return own, whole

    @functools.cached_property
    def buckets(self) -> list[tuple[int, int]]:
        """Returns pairs of (number of contexts, padded length), longest first. A bucket takes contexts that are at most
        an eighth shorter than its longest.
        """
        buckets: list[tuple[int, int]] = []
        for length in sorted(self.lengths, reverse=True):
            # Padding against kernel calls: a bucket wastes at most an eighth of its tokens, or 4 in short contexts.
            if buckets and length >= buckets[-1][1] - max(4, buckets[-1][1] // 8):
                buckets[-1] = (buckets[-1][0] + 1, buckets[-1][1])
            else:
                buckets.append((1, length))
        return buckets

    @functools.cached_property
    def _indices(self) -> tuple[Tensor, Tensor]:
        """Returns (row_positions [P], slots [T]): the row position in each slot of the padded buckets, and one slot per
        row position; P is the sum over buckets of contexts x padded length. Padding repeats the first token of the
        context."""
        places = self._places.split(self.lengths)
        longest_first = sorted(range(len(self.lengths)), key=lambda context: -self.lengths[context])
        padded_lengths = [length for count, length in self.buckets for _ in range(count)]
        row_positions, slots = [], torch.empty(self.num_tokens, dtype=torch.int64)
        first_slot = 0
        for context, padded in zip(longest_first, padded_lengths, strict=True):
            place, length, shared = places[context], self.lengths[context], self.shared_lengths[context]
            positions = torch.full((padded,), int(place[0]))
            positions[:length] = place
            row_positions.append(positions)
            slots[place[shared:]] = torch.arange(first_slot + shared, first_slot + length)
            first_slot += padded
        return torch.cat(row_positions).to(self.device), slots.to(self.device)

    def pad(self, row: Tensor) -> list[Tensor]:
        """Pads the contexts: [T, H, D] -> one [contexts, H, padded length, D] per bucket."""
        num_heads, head_dim = row.shape[1:]
        flat = row.reshape(len(row), -1).index_select(0, self._indices[0])
        parts = flat.split([count * length for count, length in self.buckets])
        return [
            part.view(count, length, num_heads, head_dim).transpose(1, 2)
            for part, (count, length) in zip(parts, self.buckets, strict=True)
        ]

    def unpad(self, padded: Sequence[Tensor]) -> Tensor:
        """Inverts `pad`: [T, H, D]."""
        num_heads, head_dim = padded[0].shape[1], padded[0].shape[3]
        flat = torch.cat([part.transpose(1, 2).reshape(-1, num_heads * head_dim) for part in padded])
        return flat.index_select(0, self._indices[1]).view(-1, num_heads, head_dim)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: ContextLayout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Computes attention as transformers calls it: query [1, H, T, D], key and value [1, H_kv, T, D] -> [1, T, H, D].

    Dropout is ignored: the ratio of two policies needs log-probs without noise. Raises ValueError for a model whose
    attention is anything but causal within a window.
    """
    assert layout is not None, "packed attention needs the `layout` of the row; call the model through PolicyModel"
    assert attention_mask is None, "packed attention takes the layout instead of a mask"
    if softcap is not None or s_aux is not None or not getattr(module, "is_causal", True):
        raise ValueError(
            f"{type(module).__name__} uses soft-capped, sink or bidirectional attention, which is not supported"
        )
    rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]  # [T, H, D]
    if sliding_window is not None and sliding_window >= layout.max_length:
        sliding_window = None
    attend = _varlen if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) else _padded
    return attend(*rows, layout=layout, scaling=scaling, sliding_window=sliding_window).unsqueeze(0), None


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    layout: ContextLayout,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """Lets each context's own queries attend to its whole keys. They belong to the last of these, where the kernel's
    causal mask puts them."""
    from torch.nn.attention.varlen import varlen_attn

    if layout.gathered is not None:
        key, value = (rows.index_select(0, layout.gathered) for rows in (key, value))
    grouped: dict[str, Any] = {}
    if (group := query.shape[1] // key.shape[1]) > 1:
        if _takes_groups(varlen_attn):
            grouped = {"enable_gqa": True}
        else:
            key, value = (rows.repeat_interleave(group, dim=1) for rows in (key, value))
    output = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        *layout.boundaries,
        max(layout.own_lengths),
        layout.max_length,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),  # (-1, 0) is plain causal
        **grouped,
    )
    assert isinstance(output, Tensor)
    return output


@functools.cache
def _takes_groups(varlen_attn: Callable[..., Tensor]) -> bool:
    """Returns whether this torch's kernel takes fewer heads of keys than of queries; that of 2.11 does not."""
    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    layout: ContextLayout,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    outputs = []
    for q, k, v in zip(layout.pad(query), layout.pad(key), layout.pad(value), strict=True):
        mask = None
        if sliding_window is not None and q.shape[2] > sliding_window:
            distance = torch.arange(q.shape[2], device=q.device)[:, None] - torch.arange(q.shape[2], device=q.device)
            mask = (distance >= 0) & (distance < sliding_window)
        outputs.append(
            scaled_dot_product_attention(
                q, k, v, mask, is_causal=mask is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
            )
        )
    return layout.unpad(outputs)
