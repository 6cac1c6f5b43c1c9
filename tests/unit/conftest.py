"""The tiny tokenizer, which many files of this folder use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mempipe.engines.tokenizer import HFTokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> HFTokenizer:
    from mempipe.engines.tiny import build_tokenizer
    from mempipe.engines.tokenizer import load_tokenizer

    folder = tmp_path_factory.mktemp("tiny")
    build_tokenizer(folder)
    return load_tokenizer(str(folder))
