"""The GPUs that this process sees, and why it may see none although the machine has some."""

from __future__ import annotations

import re
from pathlib import Path

from mempipe.settings import ConfigError

OLDEST_DRIVER = {12: 525, 13: 580}
"""NVIDIA driver that each major version of CUDA needs at least."""
DRIVER_FILE = Path("/proc/driver/nvidia/version")


def gpu_bytes() -> int:
    """Returns the memory in bytes of the smallest visible GPU. Raises ConfigError, which says why, when torch can use
    none."""
    import torch

    if not torch.cuda.is_available():
        driver = driver_version(DRIVER_FILE.read_text() if DRIVER_FILE.exists() else "")
        raise ConfigError(unusable(torch_version=torch.__version__, cuda=torch.version.cuda, driver=driver))
    return min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))


def driver_version(text: str) -> str:
    """Returns the version in what the driver writes to `DRIVER_FILE`, e.g. "550.54.15"; "" without one."""
    found = re.search(r"\b(\d{3}\.\d[\d.]*)", text)
    return found[1] if found else ""


def unusable(*, torch_version: str, cuda: str | None, driver: str) -> str:
    """Says why torch finds no GPU, and how to mend it."""
    if cuda is None:
        return (
            f"torch {torch_version} is built without CUDA; install the extra `gpu` (make setup on a machine with one)"
        )
    if not driver:
        return f"torch {torch_version} needs an NVIDIA driver, and none is loaded ({DRIVER_FILE} is not there)"
    oldest = OLDEST_DRIVER.get(int(cuda.split(".")[0]), 0)
    if int(driver.split(".")[0]) < oldest:
        return f"NVIDIA driver {driver} is too old: torch {torch_version} is CUDA {cuda} and needs {oldest} or newer"
    return f"torch {torch_version} (CUDA {cuda}) sees no GPU under driver {driver}; is CUDA_VISIBLE_DEVICES empty?"
