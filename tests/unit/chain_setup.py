"""The tiny chain of the examples, for the tests of chains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from mempipe.loader import parse_section
from mempipe.studies.chain import ChainConfig

CONFIGS = Path(__file__).parents[2] / "jobs" / "configs"


def tiny(output: Path, **changes: Any) -> ChainConfig:
    values = yaml.safe_load((CONFIGS / "tiny_chain.yaml").read_text()) | {"output": str(output)} | changes
    for stage in values["stages"].values():
        stage["config"] = str(CONFIGS.parent.parent / stage["config"])
    return parse_section(values, ChainConfig)
