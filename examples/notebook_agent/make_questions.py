"""Writes the problems of this example: `python -m notebook_agent.make_questions` from the folder `examples`."""

from __future__ import annotations

import json
import random
from pathlib import Path

SEED = 7
FILES = {"train": 48, "held_out": 16}


def problem(rng: random.Random) -> tuple[str, int]:
    """Returns a problem of two calculations and its answer."""
    boxes, pens, price = rng.randint(12, 98), rng.randint(12, 98), rng.randint(2, 9)
    sold = rng.randint(1, boxes * pens - 1)
    return rng.choice(
        [
            (f"A shop has {boxes} boxes of {pens} pens and sells {sold} pens. How many are left?", boxes * pens - sold),
            (
                f"A child has {pens} cards and buys {sold} more; each card is worth {price} coins. How many coins are "
                "all of its cards worth?",
                (pens + sold) * price,
            ),
            (
                f"A hall has {boxes} rows of {pens} seats, and {price} halls are full. How many people are in them?",
                boxes * pens * price,
            ),
        ]
    )


def main() -> None:
    rng = random.Random(SEED)
    for name, count in FILES.items():
        rows = []
        for number in range(count):
            text, answer = problem(rng)
            rows.append({"id": f"{name}-{number}", "question": text, "golden_answers": [str(answer)]})
        Path(__file__).with_name(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
