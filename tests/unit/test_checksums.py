"""A checksum survives how weights are cut up, and no change of a value survives it."""

from __future__ import annotations

import pytest
import torch

from mempipe.engines.checksums import CHUNKS, checksum
from mempipe.engines.proof import (
    CANARY_TOKENS,
    CanaryFailed,
    CanaryGap,
    HeldWeights,
    Proof,
    StaleWeights,
    added,
    canary_sequences,
    check_engines,
    check_held,
    joined,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def total(*tensors: torch.Tensor) -> int:
    return added([{"x": int(checksum(tensor))} for tensor in tensors])["x"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_shards_joined_tensors_padding_and_layout_change_nothing(dtype):
    whole = values(37, 24, dtype=dtype)
    expected = total(whole)
    assert total(*whole.split(10)) == expected
    assert total(*whole.split(7, dim=1)) == expected
    assert total(torch.cat([whole, torch.zeros(11, 24, dtype=dtype)])) == expected
    assert total(whole.t()) == expected
    assert total(torch.empty(0, dtype=dtype)) == 0


def test_a_tensor_longer_than_a_chunk_has_the_checksum_of_its_parts():
    whole = values(CHUNKS["cpu"] * 2 + 3)
    assert total(whole) == total(*whole.split(1000))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_changed_value_shows(dtype):
    """The smallest change, a sign, two changes that cancel in a sum, and a value that wandered to another tensor."""
    whole = values(50, dtype=dtype)
    seen = {total(whole)}
    for i in range(50):
        changed = whole.clone()
        bits = changed.view(torch.int32 if dtype == torch.float32 else torch.int16)
        bits[i] ^= 1
        seen.add(total(changed))
        seen.add(total(torch.where(torch.arange(50) == i, -whole, whole)))
        step = torch.eye(50, dtype=dtype)
        seen.add(total(whole + step[i] - step[i - 1]))
    assert len(seen) == 151


LEARNER = {"0.q_proj": 2**63, "0.k_proj": 2**63, "0.v_proj": 5, "0.norm": 7}


def test_parts_of_a_joined_module_add_up_modulo_two_to_the_64():
    assert joined(LEARNER, {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}) == {"0.qkv_proj": 5, "0.norm": 7}
    check_held(
        HeldWeights(
            version=3,
            checksums={"0.qkv_proj": 5, "0.norm": 7, "a place for an adapter": 0},
            packed_modules={"qkv_proj": ["q_proj", "k_proj", "v_proj"]},
        ),
        LEARNER,
        engine="generator-1",
        version=3,
    )


@pytest.mark.parametrize(
    ("version", "checksums", "said"),
    [
        (2, {"0.qkv_proj": 5, "0.norm": 7}, "generator-1 serves weights of version 2, the learner sent 3"),
        (4, {"0.qkv_proj": 5, "0.norm": 7}, "generator-1 serves weights of version 4, the learner sent 3"),
        (3, {"0.qkv_proj": 5, "0.norm": 7, "0.bias": 1}, "1 of 2 checksums differ, the first that of 0.bias"),
        (3, {"0.qkv_proj": 5, "0.norm": 8}, "1 of 2 checksums differ, the first that of 0.norm"),
        (3, {"0.qkv_proj": 6, "0.norm": 8}, "2 of 2 checksums differ"),
        (3, {"other.qkv_proj": 5, "other.norm": 8}, "1 of 1 checksums differ, the first that of all tensors"),
    ],
)
def test_an_engine_that_holds_something_else_is_named(version, checksums, said):
    weights = HeldWeights(
        version=version, checksums=checksums, packed_modules={"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    )
    with pytest.raises(StaleWeights, match=said):
        check_held(weights, LEARNER, engine="generator-1", version=3)


def test_weights_that_did_not_arrive_are_told_apart_from_another_computation():
    held = HeldWeights(version=3, checksums=LEARNER, packed_modules={})
    proofs = {
        "generator-0": Proof(held=held, scores=[[-1.0, -2.0]]),
        "generator-1": Proof(held=held, scores=[[-1.0, -2.04]]),
    }
    learner = {"checksums": LEARNER, "scores": [[-1.0, -2.0]], "version": 3}
    gap = check_engines(proofs, **learner, tolerance=0.05)
    assert (gap.mean, gap.maximum) == (pytest.approx(0.02), pytest.approx(0.04))
    with pytest.raises(CanaryFailed, match=r"generator-1 .* of version 3, but computes otherwise"):
        check_engines(proofs, **learner, tolerance=0.01)
    stale = Proof(held=HeldWeights(version=2, checksums=LEARNER, packed_modules={}), scores=[[-9.0, -9.0]])
    with pytest.raises(StaleWeights, match=r"generator-1 serves weights of version 2"):
        check_engines(proofs | {"generator-1": stale}, **learner, tolerance=0.01)


def test_an_engine_whose_prefix_cache_computes_otherwise_is_named():
    held = HeldWeights(version=3, checksums=LEARNER, packed_modules={})
    rows = [[-float(i % 7) for i in range(99)], [-float(i % 5) for i in range(80)]]
    learner = {"checksums": LEARNER, "scores": rows, "version": 3, "tolerance": 0.05}

    def proof(*ends: list[float]) -> dict[str, Proof]:
        return {"generator-0": Proof(held=held, scores=rows, scores_from_cache=list(ends))}

    gap = check_engines(proof(rows[0][-40:], rows[1][-50:]), **learner)
    assert gap == CanaryGap(mean=0.0, maximum=0.0, num_from_cache=90)
    off = [value + 0.2 for value in rows[1][-50:]]
    with pytest.raises(CanaryFailed, match=r"3, but computes otherwise from its prefix cache: .* 90 canary tok"):
        check_engines(proof(rows[0][-40:], off), **learner)
    assert check_engines(proof([], off), **learner).maximum == 0.0, "50 tokens are too few to judge"
    assert check_engines(proof([], []), **learner).num_from_cache == 0


def test_canaries_begin_with_a_prompt_each_and_take_several_blocks():
    first, second = list(range(100)), list(range(500, 700))
    one, other = canary_sequences([first, [], second], max_tokens=1000)
    assert one == [*first, *second[:156]] and other == [*second, *first[:56]]
    assert len(one) == CANARY_TOKENS >= 2 * 128
    assert canary_sequences([[1, 2]], max_tokens=5) == [[1, 2, 1, 2, 1]]


def test_an_engine_with_names_of_its_own_is_judged_by_the_sum():
    weights = HeldWeights(version=3, checksums={"other.qkv_proj": 5, "other.norm": 7}, packed_modules={})
    check_held(weights, LEARNER, engine="generator-1", version=3)
