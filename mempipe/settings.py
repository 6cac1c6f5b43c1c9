"""The base of every section of a config. Each room has its own sections, in its `config.py`; `mempipe.config` puts a
run together.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict


class ConfigError(ValueError):
    """A setting that cannot work. The message names the setting, its value and what would be right; commands exit with
    code 2.
    """


class Section(BaseModel):
    """Settings that belong together. Unknown keys are refused; the text under a field is its documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    MOVED: ClassVar[dict[str, str]] = {}
    """Keys of earlier versions and where each is now; the loader refuses the old key and names the new one."""


def _folder_name(name: str) -> str:
    if not name or name[0] in ".-~" or not name.isprintable() or set(name) & set("/\\") or len(name.encode()) > 200:
        raise ValueError(
            f"name is {name!r}; it becomes a folder inside `output`, so it has no slash or backslash, starts with "
            "neither '.' nor '-' nor '~', and has 1 to 200 bytes"
        )
    return name


FolderName = Annotated[str, AfterValidator(_folder_name)]
"""The name of a folder inside another one, which no name can leave."""
