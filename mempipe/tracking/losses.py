"""Lost records of a run, as sentences in the run's folder, for the report and for later readers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mempipe.storage.files import write_text

LOSSES_FILE = "lost_records.json"


def read_losses(folder: str | Path) -> list[str]:
    """Returns the sentences that `write_losses` kept; none where the file is missing or damaged."""
    try:
        found = json.loads((Path(folder) / LOSSES_FILE).read_bytes())
    except (OSError, ValueError):
        return []
    return [sentence for sentence in found if isinstance(sentence, str)] if isinstance(found, list) else []


def write_losses(folder: Path, losses: Sequence[str]) -> None:
    """Keeps the sentences in place of those that were kept before. A folder that cannot be written is left as it is:
    the terminal has listed the losses.
    """
    if losses == read_losses(folder):
        return
    with suppress(OSError):  # perhaps a mount that is away, in whose place no folder may be made
        write_text(folder / LOSSES_FILE, json.dumps(losses, indent=1, ensure_ascii=False) + "\n", make_folder=False)
