"""Groups as an evaluation leaves them, for what reads its results."""

from __future__ import annotations

from collections.abc import Sequence

from mempipe.types import EndReason, Group, Question, Trajectory


def answered(rights: Sequence[bool], *, num_hops: Sequence[int] | None = None) -> list[Group]:
    """Returns one question with one attempt for each of `rights`, which says whether the attempt is right."""
    hops = [0] * len(rights) if num_hops is None else num_hops
    return [
        Group(
            id=str(i),
            question=Question(id=str(i), text=f"Which {i}?", golden_answers=["Nile"], num_hops=hops[i]),
            trajectories=[
                Trajectory(
                    id="t",
                    group_id=str(i),
                    member=0,
                    contexts=[],
                    end_reason=EndReason.ANSWERED,
                    answer="Nile" if right else "Rhine",
                )
            ],
        )
        for i, right in enumerate(rights)
    ]
