"""transformers and vLLM without scikit-learn and scipy, where these are installed (mlflow brings both).

transformers imports them for a way to decode and for models that find objects in pictures, vLLM for sound, and nothing
here does any of that. Without scikit-learn a learner loads its libraries in three quarters of the CPU time. Without
scipy an engine needs a tenth less, and 64 MB less. Importing this module before peft, vLLM and models of transformers
leaves them out. Whoever imports scikit-learn or scipy itself still gets them.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from typing import Any, cast

import transformers.utils
import transformers.utils.import_utils


def _is_not_available() -> bool:
    return False


for _module in (transformers.utils, transformers.utils.import_utils):
    _module.is_sklearn_available = _module.is_scipy_available = _is_not_available


def import_vllm_without_scipy() -> None:
    """Imports the part of vLLM that is for sound as on a machine without scipy, so that the rest does not import it.
    A version of vLLM without this part is left as it is."""
    modules = cast(dict[str, Any], sys.modules)
    if "scipy.signal" in modules:
        return
    modules["scipy.signal"] = None  # Python's way to say that a module cannot be imported
    try:
        with suppress(ImportError):
            importlib.import_module("vllm.multimodal.audio")
    finally:
        del modules["scipy.signal"]
