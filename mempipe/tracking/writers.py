"""The writers next to MLflow by name (`tracking.writers`)."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from mempipe.settings import ConfigError
from mempipe.tracking.metrics_writer import MetricsWriter
from mempipe.user_code import load_user_object

_CLASSES = {
    "tensorboard": "mempipe.tracking.tensorboard_writer:TensorBoardWriter",
    "wandb": "mempipe.tracking.wandb_writer:WandbWriter",
}
"""Each in a package and an extra of its own name."""


def writer_class(name: str) -> type[MetricsWriter]:
    """Returns the class of a writer. Raises ConfigError when its package is missing, or `name` names no writer."""
    if name in _CLASSES:
        if find_spec(name) is None:
            raise ConfigError(
                f"tracking.writers names {name}, whose package is not installed; pip install 'mempipe[{name}]'"
            )
        module, _, attribute = _CLASSES[name].partition(":")
        return getattr(import_module(module), attribute)
    found = load_user_object(name, setting="tracking.writers")
    if not (isinstance(found, type) and issubclass(found, MetricsWriter)):
        raise ConfigError(
            f"tracking.writers names {name}, which is not a subclass of mempipe.tracking.metrics_writer.MetricsWriter"
        )
    return found
