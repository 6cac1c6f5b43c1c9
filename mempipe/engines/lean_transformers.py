"""transformers without scikit-learn, where both are installed (mlflow brings it).

transformers imports it, and scipy with it, for a way to decode that nothing here uses: a quarter of the CPU time in
which a learner, a reference or an engine loads its libraries. Importing this module before peft, vLLM and models of
transformers leaves it out. Whoever imports scikit-learn itself still gets it.
"""

from __future__ import annotations

import transformers.utils
import transformers.utils.import_utils


def _is_not_available() -> bool:
    return False


for _module in (transformers.utils, transformers.utils.import_utils):
    _module.is_sklearn_available = _is_not_available
