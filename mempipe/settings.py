"""The base of every section of a config. Each room has its own sections, in its `config.py`; `mempipe.config` puts a
run together.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class ConfigError(ValueError):
    """A setting that cannot work. The message names the setting, its value and what would be right; commands exit with
    code 2.
    """


class Section(BaseModel):
    """Settings that belong together. Unknown keys are refused; the text under a field is its documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    MOVED: ClassVar[dict[str, str]] = {}
    """Keys of earlier versions and where each is now; the loader refuses the old key and names the new one."""
