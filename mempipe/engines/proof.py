"""Checks after each sync that every engine samples from the learner's weights: tensor checksums (exact) and log-probs
of canary sequences (within a tolerance). Promise 5 of docs/architecture.md. Nothing here imports torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, cycle, islice

import numpy as np

from mempipe.engines.config import FEWEST_TOKENS

CANARY_LOOSENESS = 20
"""The largest difference of one canary token may be this many times `generation.canary_tolerance`."""

CANARY_TOKENS = 256
"""Ids of a canary sequence: several blocks of the cache of an engine, which has 16 to 128 ids in a block. Not tuned."""
CANARY_END = 64
"""Ids of its end, which are scored again after the rest was found in the prefix cache. Not tuned."""

_MODULUS = 2**64  # of checksums (`mempipe.engines.checksums`)


Scores = Sequence[Sequence[float]]


class StaleWeights(RuntimeError):
    """An engine does not hold the weights that the learner sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldWeights:
    """Holds what an engine says about the weights it samples from."""

    version: int
    checksums: dict[str, int]
    """By the engine's names of its tensors."""
    packed_modules: dict[str, list[str]]
    """The modules of the checkpoint that the engine's joined modules are made of."""


class CanaryFailed(RuntimeError):
    """Engine and learner disagree about the log-probs of the canary sequences more than rounding explains."""


class SamplingMismatch(RuntimeError):
    """Engines gave the tokens of a step other log-probs than the learner does under the same weights."""

    def __init__(self, mean: float, num_tokens: int, tolerance: float) -> None:
        super().__init__(mean, num_tokens, tolerance)
        self.mean = mean
        self._num_tokens, self._tolerance = num_tokens, tolerance

    def __str__(self) -> str:
        return (
            f"engine and learner differ by {self.mean:.6g} in log-prob on average on {self._num_tokens:,} tokens of "
            f"this step that the learner's own version sampled; generation.mismatch_tolerance allows "
            f"{self._tolerance:g}. The step's update was not made. Engines compute otherwise while they sample "
            "(recorded graphs, cached prefixes, adapters): try generation.enforce_eager"
        )


def check_sampled(difference: float, num_tokens: int, *, tolerance: float) -> None:
    """Judges the sum of |Δ log-prob| over tokens of one version; fewer than `FEWEST_TOKENS` say nothing. Raises
    SamplingMismatch when their mean exceeds the tolerance, or is not a number."""
    if num_tokens >= FEWEST_TOKENS and not difference / num_tokens <= tolerance:
        raise SamplingMismatch(difference / num_tokens, num_tokens, tolerance)


def added(parts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Sums shard checksums to checksums of whole tensors, modulo 2^64."""
    totals: dict[str, int] = defaultdict(int)
    for part in parts:
        for name, value in part.items():
            totals[name] = (totals[name] + value) % _MODULUS
    return dict(totals)


def joined(checksums: Mapping[str, int], packed: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Maps the checkpoint's tensor checksums to the engine's fused tensors (sum of the parts).

    `packed` names the modules that an engine's module is made of, e.g. {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}.
    """
    owner = {part: whole for whole, parts in packed.items() for part in parts}
    return added(
        [{".".join(owner.get(part, part) for part in name.split(".")): value} for name, value in checksums.items()]
    )


def check_held(
    held: HeldWeights, sent: Mapping[str, int], *, engine: str, version: int, sender: str = "the learner"
) -> None:
    """Raises StaleWeights unless `engine` holds `version` of the sender's weights (`sent`: checksum by tensor name);
    the message names the first tensor that differs.

    If the engine's tensor names cannot be derived from the checkpoint's, only the sum over all tensors is compared.
    """
    if held.version != version:
        raise StaleWeights(f"{engine} serves weights of version {held.version}, {sender} sent {version}")
    found, expected = held.checksums, joined(sent, held.packed_modules)
    if not expected.keys() <= found.keys():
        found, expected = ({"all tensors": sum(sums.values()) % _MODULUS} for sums in (found, expected))
    # Places for adapters that the learner does not train hold zeros, whose checksum is zero.
    differing = [name for name in found if found[name] != expected.get(name, 0)]
    if differing:
        raise StaleWeights(
            f"{engine} does not hold {sender}'s weights of version {version}, which it says it serves: "
            f"{len(differing)} of {len(expected)} checksums differ, the first that of {differing[0]}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryGap:
    """|Δ log-prob| between engine and learner over all tokens of the canary sequences."""

    mean: float
    maximum: float
    num_from_cache: int = 0
    """Tokens among them that the engine computed after its prefix cache."""


def canary_sequences(prompts: Sequence[Sequence[int]], *, max_tokens: int) -> list[list[int]]:
    """Returns one sequence for each prompt: it begins with that prompt, and the next ones follow until it has
    CANARY_TOKENS ids, or `max_tokens` if that is less."""
    prompts = [prompt for prompt in prompts if prompt]
    length = min(CANARY_TOKENS, max_tokens)
    return [list(islice(chain.from_iterable(cycle([*prompts[i:], *prompts[:i]])), length)) for i in range(len(prompts))]


def canary_gap(engine_scores: Sequence[Sequence[float]], learner_scores: Sequence[Sequence[float]]) -> CanaryGap:
    """Returns the gap of two scorings of the same sequences; NaN on either side counts as infinite.

    Raises ValueError when the scorings have other shapes, or nothing to compare.
    """
    shapes = [[len(scores) for scores in side] for side in (engine_scores, learner_scores)]
    if shapes[0] != shapes[1] or not sum(shapes[0]):
        raise ValueError(
            f"engine and learner scored {shapes[0]} and {shapes[1]} canary tokens; the canary needs the same sequences "
            "on both sides, one of at least two ids"
        )
    engine, learner = (np.concatenate([np.asarray(row) for row in side]) for side in (engine_scores, learner_scores))
    gaps = np.nan_to_num(np.abs(engine - learner), nan=np.inf, posinf=np.inf)
    return CanaryGap(mean=float(gaps.mean()), maximum=float(gaps.max()))


def check_canary(
    engine_scores: Sequence[Sequence[float]], learner_scores: Sequence[Sequence[float]], *, tolerance: float
) -> CanaryGap:
    """Returns the `canary_gap`. Raises CanaryFailed when its mean exceeds `tolerance`, or its maximum CANARY_LOOSENESS
    times that.

    The mean judges, since 16-bit kernels round single tokens by ten times the mean; the loose maximum is there for a
    token that only one side gets wrong.
    """
    gap = canary_gap(engine_scores, learner_scores)
    if gap.mean > tolerance or gap.maximum > CANARY_LOOSENESS * tolerance:
        num_tokens = sum(len(scores) for scores in engine_scores)
        raise CanaryFailed(
            f"engine and learner differ by {gap.mean:.6g} in log-prob on average, {gap.maximum:.6g} at most, on "
            f"{num_tokens} canary tokens; generation.canary_tolerance allows {tolerance:g} and "
            f"{CANARY_LOOSENESS * tolerance:g}"
        )
    return gap


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Holds what an engine shows of the weights that it samples from."""

    held: HeldWeights
    scores: list[list[float]]
    """Log-probs of every canary sequence's tokens but the first."""
    scores_from_cache: list[list[float]] = field(default_factory=list)
    """Log-probs of each sequence's last tokens, computed after the prefix cache; empty for an engine without one."""

    def compared(self, learner: Sequence[Sequence[float]]) -> Iterator[tuple[str, Scores, Scores]]:
        """Yields how the engine scored, its log-probs, and the learner's of the same tokens."""
        yield "", self.scores, learner
        ends = [
            (end, row[len(row) - len(end) :]) for end, row in zip(self.scores_from_cache, learner, strict=False) if end
        ]
        if sum(len(end) for end, _ in ends) >= FEWEST_TOKENS:
            yield " from its prefix cache", [end for end, _ in ends], [row for _, row in ends]


def check_engines(
    proofs: Mapping[str, Proof],
    *,
    checksums: Mapping[str, int],
    scores: Sequence[Sequence[float]],
    version: int,
    tolerance: float,
) -> CanaryGap:
    """Compares every engine, by its name, with the learner's `checksums` and canary `scores`, and returns the largest
    gap.

    There are two checks: the weights arrived (exact), and both sides compute the same with them (up to rounding), also
    where the engine's prefix cache has the beginning. Raises StaleWeights for the first, CanaryFailed for the second.
    """
    gaps = []
    for engine, proof in proofs.items():
        check_held(proof.held, checksums, engine=engine, version=version)
        for how, found, expected in proof.compared(scores):
            try:
                gaps.append(check_canary(found, expected, tolerance=tolerance))
            except CanaryFailed as error:
                raise CanaryFailed(
                    f"{engine} holds the learner's weights of version {version}, but computes otherwise{how}: {error}"
                ) from error
    return CanaryGap(
        mean=max(gap.mean for gap in gaps),
        maximum=max(gap.maximum for gap in gaps),
        num_from_cache=sum(len(end) for proof in proofs.values() for end in proof.scores_from_cache),
    )
